"""Classes of a user's own in a run: which they are, and a checksum of their code."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from cogfast.config.components import allowed_path, place_of
from cogfast.config.merged_config import leaves
from cogfast.core.files import checksum_of_bytes

# {dotted key, or "trainer": {"name": dotted, "code": a checksum; None without a file, as in a notebook}}
Classes = Mapping[str, Mapping[str, str | None]]
TRAINER = "trainer"
_NOT_OWN = (Path(__file__).resolve().parents[1], Path(sysconfig.get_path("stdlib")).resolve())


def own_targets(sections: Mapping) -> dict[str, str]:
    """Return {dotted key: path} of the targets that are not cogfast's and SAT's. sections: plain."""
    found = {}
    for key, path in leaves(sections).items():
        where, _, last = key.rpartition(".")
        is_target = last == "target" or key == "deepspeed.optimizer.type"
        if is_target and isinstance(path, str) and allowed_path(path, "") is None:
            found[where] = path
    return found


def own_classes(sections: Mapping, allow_import: Sequence[str], trainer: type | None) -> Classes:
    """Return the classes of a trainer and of components that packages of --allow-import define.

    A class that the command has not imported is left out. sections: plain.
    """
    found = {} if trainer is None else {TRAINER: trainer}
    for key, path in own_targets(sections).items():
        module, _, name = path.rpartition(".")
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and any(path.startswith(f"{package}.") for package in allow_import):
            found[key] = kind
    own = {k: kind for k, kind in found.items() if kind.__module__.partition(".")[0] != "cogfast"}
    return {key: {"name": _name_of(kind), "code": code_of(kind)} for key, kind in own.items()}


def changes_of_code(before: Classes, now: Classes) -> dict[str, str]:
    """Return {dotted key: what differs}. Another class of a component has another target, too."""
    found, none = {}, {"name": "cogfast's own", "code": None}
    for key in {**before, **now}:
        old, new = before.get(key, none), now.get(key, none)
        if key == TRAINER and old["name"] != new["name"]:
            found[key] = f"{key}: {old['name']} -> {new['name']}"
        elif old["name"] == new["name"] and len({None, old["code"], new["code"]}) == 3:
            found[f"{key}.code"] = f"{key}: the code of {new['name']} has changed"
    return found


def own_objective(model: Mapping) -> str | None:
    """Return the classes that may give a run another objective than v-prediction by CogVideoX's schedule."""
    kinds, own = ("denoiser", "scaling", "discretization"), own_targets({"model": model}).items()
    return ", ".join(sorted({path for key, path in own if place_of(key) in kinds})) or None


def is_own_file(file: str) -> bool:
    """Return whether a file of Python code is the user's own: not cogfast's, and not installed."""
    path = Path(file).resolve()
    is_installed = {"site-packages", "dist-packages"} & {*path.parts}
    return bool(file) and not is_installed and not any(map(path.is_relative_to, _NOT_OWN))


@cache
def code_of(kind: Callable) -> str | None:
    """Return a checksum of the files that define a class and its bases; None if the class has no file."""
    own, *bases = [_file_of(each) for each in getattr(kind, "__mro__", (kind,))]
    files = [own, *(file for file in bases if is_own_file(file))]
    is_known = own and all(map(os.path.isfile, files))
    texts = {Path(file).read_bytes() for file in files} if is_known else ()
    return checksum_of_bytes(b"\n".join(sorted(texts))) if is_known else None


def _file_of(kind: Callable) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def _name_of(kind: Callable) -> str:
    """Return the dotted name of a class, with the name of a script's file for its module."""
    is_script = kind.__module__ == "__main__" and _file_of(kind)
    return f"{Path(_file_of(kind)).stem if is_script else kind.__module__}.{kind.__qualname__}"
