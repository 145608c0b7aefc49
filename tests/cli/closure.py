"""Blocks the import of what `pip install cogfast` does not install, such as the packages of the tests."""

import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

_PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
_OF_PYTHON = {"pip", "setuptools", "wheel"}  # what a new virtual environment may have


def _name(text: str) -> str:
    return re.sub(r"[-_.]+", "-", text).lower()


def closure() -> set[str]:
    """The distributions that the project's dependencies need, without extras."""
    waiting = tomllib.loads(_PROJECT.read_text())["project"]["dependencies"]
    found = {"cogfast", *_OF_PYTHON}
    while waiting:
        requirement = Requirement(waiting.pop())
        marker, name = requirement.marker, _name(requirement.name)
        extras = ["", *requirement.extras]
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras):
            continue
        if name in found:
            continue
        found.add(name)
        try:
            of_it = requires(requirement.name) or []
        except PackageNotFoundError:
            continue
        wanted = {"extra": ""}
        for text in of_it:
            one = Requirement(text)
            given = [wanted, *({"extra": extra} for extra in requirement.extras)]
            if one.marker is None or any(one.marker.evaluate(each) for each in given):
                waiting.append(text.partition(";")[0])
    return found


class _Others:
    """Finds the modules of the path but for these."""

    find_distributions = staticmethod(PathFinder.find_distributions)

    def __init__(self, names: Iterable[str]) -> None:
        self.names = set(names)

    def find_spec(self, fullname: str, *more: Any) -> ModuleSpec | None:
        return None if fullname in self.names else PathFinder.find_spec(fullname, *more)


def block_others() -> None:
    """Let imports of modules outside of the closure fail in this process."""
    inside = closure()
    names = {
        module
        for module, owners in packages_distributions().items()
        if not inside.intersection(map(_name, owners))
    }
    for name in names & sys.modules.keys():
        del sys.modules[name]
    sys.meta_path[sys.meta_path.index(PathFinder)] = _Others(names)  # type: ignore[assignment]
