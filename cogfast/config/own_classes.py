"""Classes of a user's own in a run: which they are, and a checksum of their code."""

from __future__ import annotations

import inspect
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TypedDict

from cogfast.config.components import allowed_path
from cogfast.config.merged_config import leaves
from cogfast.core.files import checksum_of_bytes

TRAINER = "trainer"  # the key of a trainer's class, beside the dotted keys of components
_NOT_OWN = (Path(__file__).resolve().parents[1], Path(sysconfig.get_path("stdlib")).resolve())


class OwnClass(TypedDict):
    """name: dotted. code: a checksum of its code; None if it has no file, as in a notebook."""

    name: str
    code: str | None


def own_classes(
    sections: Mapping, allow_import: Sequence[str], trainer: type | None = None
) -> dict[str, OwnClass]:
    """Return {dotted key: class} of the components that packages of --allow-import define, and of a trainer.

    A class that the command has not imported is left out. sections: plain.
    """
    found = {} if trainer is None else {TRAINER: trainer}
    for key, path in leaves(sections).items():
        where, _, last = key.rpartition(".")
        is_target = last == "target" or (where, last) == ("deepspeed.optimizer", "type")
        if not is_target or not isinstance(path, str) or allowed_path(path, "") is not None:
            continue
        module, _, name = path.rpartition(".")
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and any(path.startswith(f"{package}.") for package in allow_import):
            found[where] = kind
    return {
        key: OwnClass(name=_name_of(kind), code=code_of(kind))
        for key, kind in found.items()
        if kind.__module__.partition(".")[0] != "cogfast"
    }


def changes_of_code(before: Mapping[str, OwnClass], now: Mapping[str, OwnClass]) -> dict[str, str]:
    """Return {dotted key: what differs} of the classes of two runs. Another class of a component is left
    out, since its `target` differs, too."""
    found, none = {}, OwnClass(name="cogfast's own", code=None)
    for key in {**before, **now}:
        old, new = before.get(key, none), now.get(key, none)
        if key == TRAINER and old["name"] != new["name"]:
            found[key] = f"{key}: {old['name']} -> {new['name']}"
        elif (
            old["name"] == new["name"]
            and old["code"] != new["code"]
            and old["code"]
            and new["code"]
        ):
            found[f"{key}.code"] = f"{key}: the code of {new['name']} has changed"
    return found


def is_own_file(file: str | Path) -> bool:
    """Return whether a file of Python code is the user's own: not cogfast's, and not installed."""
    path = Path(file).resolve()
    is_installed = {"site-packages", "dist-packages"} & {*path.parts}
    return not is_installed and not any(map(path.is_relative_to, _NOT_OWN))


@cache
def code_of(kind: Callable) -> str | None:
    """Return a checksum of the files that define a class and its bases, those of installed packages left out;
    None if the class has no file."""
    bases = [_file_of(base) for base in getattr(kind, "__mro__", ())[1:]]
    files = {_file_of(kind), *(file for file in bases if file and is_own_file(file))}
    try:
        return checksum_of_bytes(
            b"\n".join(sorted(Path(file or "").read_bytes() for file in files))
        )
    except OSError:
        return None


def _file_of(kind: Callable) -> str | None:
    try:
        return inspect.getfile(kind)
    except (TypeError, OSError):  # Python's own classes, and those of a notebook
        return None


def _name_of(kind: Callable) -> str:
    """Return the dotted name of a class, with the name of a script's file for its module."""
    file = _file_of(kind)
    is_script = kind.__module__ == "__main__" and file is not None
    return f"{Path(file).stem if is_script else kind.__module__}.{kind.__qualname__}"
