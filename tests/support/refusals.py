"""Tables of what a user gets wrong: the words of each mistake, and the line that answers them.

A table is a text file beside its tests. A row is a line of words, as a shell takes them, and an
indented line with a part of the message (a message ends there if the line ends with `$`, and begins
there if it starts with `^`). `== NAME` begins the rows of one base: what the words are added to.

    == 5b lora
    args.bf16=true args.fp16=true
        args.bf16 and args.fp16 are both true; set one of them to false
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

MOST_CHARACTERS = 400


class Refusal(NamedTuple):
    """words that are added to a base, and the line that must answer them."""

    base: str
    words: list[str]
    line: str


def read_refusals(path: Path) -> Iterator[Refusal]:
    base, words = "", ""
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if text.startswith("== "):
            base = text[3:].strip()
        elif text.startswith("    "):
            assert words, f"{path.name}:{number}: a line without words"
            yield Refusal(base, shlex.split(words), text.strip())
            words = ""
        elif text and not text.startswith("#"):
            assert not words, f"{path.name}:{number}: no line for {words}"
            words = text
    assert not words, f"{path.name}: no line for {words}"


def refusals(path: Path | str, *bases: str) -> pytest.MarkDecorator:
    """Parametrize a test with `refusal`, a row of the table each; of these bases only, if given."""
    table = Path(path)
    rows = [row for row in read_refusals(table) if not bases or row.base in bases]
    assert rows, f"{table.name} has no rows of {bases}"
    names = [f"{row.base} {' '.join(row.words)}"[:120].strip() for row in rows]
    return pytest.mark.parametrize("refusal", rows, ids=names)


def assert_line(found: str, line: str) -> None:
    """The message is one line, not too long, and has `line` in it."""
    assert "\n" not in found and len(found) <= MOST_CHARACTERS, found
    begins, ends = line.startswith("^"), line.endswith("$")
    text = line.removeprefix("^").removesuffix("$")
    assert text in found, f"\n{found}\nhas no\n{text}"
    assert not begins or found.startswith(text), found
    assert not ends or found.endswith(text), found


def assert_refused(call: Callable[[], object], line: str) -> None:
    """`call` raises ValueError with the line."""
    with pytest.raises(ValueError) as raised:
        call()
    assert_line(str(raised.value), line)
