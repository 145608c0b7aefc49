"""The packages that --allow-import may name: those of the user's own."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata


def check_packages(packages: Sequence[str]) -> None:
    """Raise ValueError if --allow-import names Python's own modules, or packages that cogfast depends on.

    A received file could name their functions, such as subprocess.Popen.
    """
    theirs = _of_others() if packages else set()
    for package in packages:
        if "," in package:
            raise ValueError(f"--allow-import {package}: repeat the option for each package")
        if package.partition(".")[0] in theirs:
            text = f"--allow-import {package} is not a package that you wrote: it is part of Python, or cogfast needs it"
            raise ValueError(f"{text}; name your own, and derive your class there")


def _of_others() -> set[str]:
    """Return the top-level modules of Python and of the distributions that cogfast depends on."""
    needed, waiting = set[str](), ["cogfast"]
    while waiting:
        if (name := _plain(waiting.pop())) not in needed:
            needed.add(name)
            with suppress(metadata.PackageNotFoundError):
                lines = [n for n in metadata.requires(name) or () if "extra ==" not in n]
                waiting += [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines]
    found = metadata.packages_distributions().items()
    of_others = {module for module, names in found if needed & {*map(_plain, names)}}
    return {*sys.stdlib_module_names, *of_others, "cogfast"}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
