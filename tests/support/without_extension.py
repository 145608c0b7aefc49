"""Runs commands of cogfast while extensions cannot be imported: `python -m tests.support.without_extension FILE`.

FILE: a JSON list of [folders of extensions with commas, words of each command, file for the result]. Each row runs in a
process forked from this one, which has imported nothing of cogfast. Its result: exit status of each
command, what they print, and the modules of cogfast that are loaded at the end.
"""

import contextlib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch


class Blocked:
    """Finds no module of these extensions but their keys.py."""

    def __init__(self, folders: str) -> None:
        self.packages = tuple(f"cogfast.extensions.{folder}." for folder in folders.split(","))

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.startswith(self.packages) and not name.endswith(".keys"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def run(folders: str, commands: Sequence[Sequence[str]], result: Path) -> None:
    if folders:
        sys.meta_path.insert(0, Blocked(folders))
    from cogfast.__main__ import main

    printed, statuses = result.with_suffix(".txt"), []
    with open(printed, "w") as file, contextlib.redirect_stdout(file):
        os.dup2(file.fileno(), 2)
        for words in commands:
            try:
                statuses.append(main([*words]))
            except BaseException as error:
                statuses.append(repr(error))
                traceback.print_exc()
    about = {"statuses": statuses, "printed": printed.read_text(), "modules": sorted(sys.modules)}
    result.write_text(json.dumps(about))


if __name__ == "__main__":
    assert not any(name.startswith("cogfast") for name in sys.modules)
    torch.set_num_threads(1)
    for folders, commands, result in json.loads(Path(sys.argv[1]).read_text()):
        child = os.fork()
        if child == 0:
            run(folders, commands, Path(result))
            os._exit(0)
        os.waitpid(child, 0)
        # The next processes need not import what the first one has imported, beside cogfast.
        for name in json.loads(Path(result).read_text())["modules"]:
            if not name.startswith(("cogfast", "tests.")):
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
