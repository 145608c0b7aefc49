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
        if package.partition(".")[0] in theirs:
            text = f"--allow-import {package} is not a package that you wrote: it is part of Python, or cogfast needs it"
            raise ValueError(f"{text}; name your own, and derive your class there")


def _of_others() -> set[str]:
    """Return the top-level modules of Python and of the distributions that cogfast depends on."""
    needed, waiting = set[str](), ["cogfast"]
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name not in needed:
            needed.add(name)
            with suppress(metadata.PackageNotFoundError):
                lines = [n for n in metadata.requires(name) or () if "extra ==" not in n]
                waiting += [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines]
    modules = metadata.packages_distributions().items()
    of_others = {
        m for m, found in modules if needed & {re.sub(r"[-_.]+", "-", n).lower() for n in found}
    }
    return {*sys.stdlib_module_names, *of_others, "cogfast"}
