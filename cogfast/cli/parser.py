"""The argument parser of the commands, whose errors say what the user probably meant."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from cogfast.core.addresses import check_address, is_url, name_of, url_of
from cogfast.core.keys import SECTIONS
from cogfast.core.values import nearest
from cogfast.train.keys import TrainKeys

N = TypeVar("N", int, float)

RUN_CONFIG = "training_config.yaml"
_MOST_NAMED = 3  # runs that an error lists
# Options or their metavars, and what an error says is missing behind them, with an example
_VALUES = {
    "--data": ("a folder", "my_videos"),
    "--control": ("a video", "dance.mp4"),
    "--video": ("a video", "dance.mp4"),
    "--mask": ("a video or picture", "mask.png"),
    "--first-frame": ("a picture", "first.png"),
    "--last-frame": ("a picture", "last.png"),
    "RANK": ("a rank", "64"),
}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one-line ValueErrors, as all of cogfast's errors are."""

    example = ""  # a complete command, for errors about missing words

    # All methods that parse call this one.
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        for word in args or ():
            check_address(re.sub(r"^--[\w-]+=", "", word))
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        text = message.removeprefix("argument ")
        # argparse lists the unknown options and the choices, but does not suggest a known one.
        if message.startswith("unrecognized arguments: -"):
            flag_given = message.split()[2].partition("=")[0]
            # All options have the dashes in common, so that these are not compared.
            known = [flag[2:] for flag in self._option_string_actions if flag.startswith("--")]
            hint = nearest(flag_given.lstrip("-"), known).replace("mean ", "mean --")
            text = f"{self.prog} has no option {flag_given}{hint or '; --help lists the options'}"
        elif match := re.match(r"(\S+): invalid choice: '(.*)' \(choose from (.*)\)$", text):
            flag, value, choices = match[1], match[2], match[3].replace("'", "")
            text = f"{flag} {value}: must be one of {choices}{nearest(value, choices.split(', '))}"
        elif text.startswith("the following arguments are required: "):
            fix = f"write {self.example}" if self.example else "--help lists the options"
            text = f"{self.prog} needs {text.partition(': ')[2]}; {fix}"
        elif match := re.match(r"(--[\w-]+).*: expected (?:at least )?one argument$", text):
            metavar = str(self._option_string_actions[match[1]].metavar or "VALUE")
            values = _VALUES.get(match[1]) or _VALUES.get(metavar, ("a value", metavar))
            text = f"{match[1]} needs {values[0]}: {match[1]} {values[1]}"
        elif match := re.match(r"--lora: '(?:args|model|data|deepspeed)\.\S*=", text):
            text = "the rank is missing after --lora; write --lora 64"
        raise ValueError(text)


def local_path(text: str) -> str:
    """Return the path of a file or folder that an option takes, which must be one of this machine."""
    if is_url(text):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} must be a path of this machine; give one")
    return text


def number_up_to(kind: type[N], most: int, least: float = 1) -> Callable[[str], N]:
    """Return a function that reads a number from `least` to `most`."""

    def read(text: str) -> N:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:  # not nan, either
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text[:80]!r} must be {what} from {least} to {most}")
        return value

    return read


def refuse_cut(argv: Sequence[str], words: Sequence[str]) -> None:
    """Raise ValueError if one of `words`, which are neither options nor key=value, is a part of a key=value
    that a space has cut."""
    names = TrainKeys.model_fields
    # A value such as that of --base=word is a part of its option, and no word of argv.
    for word in filter([*argv].__contains__, words):
        at = [*argv].index(word)
        if word in names or re.fullmatch(rf"({'|'.join(SECTIONS)})(\.\w+)+", word):
            behind = [text for text in (w.lstrip("=:") for w in argv[at + 1 : at + 3]) if text]
            is_value = behind and not behind[0].startswith("--") and "=" not in behind[0]
            fix = f"{'args.' * (word in names)}{word}={behind[0] if is_value else 'VALUE'}"
            text = f"{word!r} is a key, whose = and value must follow without a space"
            raise ValueError(f"{text}; write {fix}")
        for start in range(at):
            key, equals, value = argv[start].partition("=")
            if equals and value.count("[") > value.count("]"):
                last = next((i for i in range(at, len(argv)) if argv[i].endswith("]")), at)
                fix = f'quote it, "{" ".join(argv[start : last + 1])}", or leave out the spaces'
                text = f"{key}={value} ends at a space, where a shell splits words; {fix}"
                raise ValueError(text)
        if at and argv[at - 1].endswith("="):
            fix = f"leave out the space: {argv[at - 1]}{word}"
            raise ValueError(f"{argv[at - 1]} has no value, since a space is behind it; {fix}")


def check_run(prog: str, argv: Sequence[str], given: Sequence[str]) -> None:
    """Raise ValueError, with the runs that are there and the command for the newest, unless `given` is one
    path that exists and is no folder of runs.

    prog: the name of the command. given: the words of `argv` that name a run.
    """
    path = Path(given[0])
    if len(given) > 1:
        text, files = f"{prog} takes one run, but {len(given)} are given", [*map(Path, given)]
        files = [run / RUN_CONFIG for run in files if (run / RUN_CONFIG).is_file()]
    elif path.is_file() or (path / RUN_CONFIG).is_file():
        return
    elif path.is_dir():
        text = f"{name_of(path)} is a folder of runs, and no run"
        files = [*path.glob(f"*/{RUN_CONFIG}")]
    else:
        # A name without a folder may be that of a run in the default of args.save.
        folders = [path.parent, *([Path("runs")] if path.parent == Path() else [])]
        found = (folder.glob(f"*/{RUN_CONFIG}") for folder in folders)
        text, files = f"{path}: no such file or folder", [*chain(*found)]
    if files:
        # The name of a run ends with its date; copies of a store's files have no times of their own.
        age = os.path.getmtime if url_of(path) is None else lambda f: f.parent.name[-19:]
        runs = [name_of(f.parent) for f in sorted(files, key=age, reverse=True)]
        named = ", ".join(runs[:_MOST_NAMED]) + (", ..." if len(runs) > _MOST_NAMED else "")
        is_it = lambda word: word.rstrip("/") in (given[0].rstrip("/"), name_of(given[0]))
        words = [runs[0] if is_it(w) else w for w in argv if w not in given[1:]]
        fix = f"for the newest write {prog} {shlex.join(words)}"
        raise ValueError(f"{text}; the runs, newest first, are {named}; {fix}")
