"""Classes of a user's own in a run: which they are, and a checksum of their code."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from cogfast.config.components import own_targets
from cogfast.core.files import checksum_of_bytes

# {dotted key, or "trainer": {"name": dotted, "code": a checksum; None without a file, as in a notebook}}
Classes = Mapping[str, Mapping[str, str | None]]
TRAINER = "trainer"
# Parts of the paths of installed code
_NOT_OWN = (f"{Path(__file__).parents[2]}/", sysconfig.get_path("stdlib"), "-packages/")


def own_classes(sections: Mapping, allow_import: Sequence[str], trainer: type | None) -> Classes:
    """Return the classes of a trainer and of components that packages of --allow-import define.

    A class that the command has not imported is left out. sections: plain.
    """
    found: dict[str, Any] = {TRAINER: trainer}
    for key, path in own_targets(sections).items():
        if any(path.startswith(f"{package}.") for package in allow_import):
            module, _, name = path.rpartition(".")
            found[key] = getattr(sys.modules.get(module), name, None)
    own = {k: kind for k, kind in found.items() if kind and kind.__module__[:8] != "cogfast."}
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


@cache
def code_of(kind: Callable) -> str | None:
    """Return a checksum of the files that define a class and its bases, cogfast and installed packages left
    out; None if the class has no file."""
    own, *bases = [_file_of(each) for each in getattr(kind, "__mro__", (kind,))]
    files = {own, *(file for file in bases if not any(part in file for part in _NOT_OWN))} - {""}
    texts = sorted(Path(file).read_bytes() for file in files)
    return checksum_of_bytes(b"\n".join(texts)) if own else None


def _file_of(kind: Callable) -> str:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return file if os.path.isfile(file) else ""


def _name_of(kind: Callable) -> str:
    """Return the dotted name of a class, with the name of a script's file for its module."""
    is_script = kind.__module__ == "__main__" and _file_of(kind)
    return f"{Path(_file_of(kind)).stem if is_script else kind.__module__}.{kind.__qualname__}"
