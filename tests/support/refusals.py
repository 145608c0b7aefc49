"""Tables of what a user gets wrong: the words of each mistake, and the line that answers them.

A table is a text file beside its tests. A row is a line of words, as a shell takes them, and an
indented line with a part of the message (a message ends there if the line ends with `$`, and begins
there if it starts with `^`; `<...>` stands for any text). `== NAME` begins the rows of one base: what
the words are added to. `{name}` in a row is a place that the test fills.

    == 5b lora
    args.bf16=true args.fp16=true
        args.bf16 and args.fp16 are both true; set one of them to false
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from cogfast.__main__ import main

MOST_CHARACTERS = 400


class Refusal(NamedTuple):
    """words that are added to a base, and the line that must answer them."""

    base: str
    words: list[str]
    line: str

    def fill(self, **places: object) -> Refusal:
        """Replace each `{name}` by its value; other braces stay."""

        def filled(text: str) -> str:
            for name, value in places.items():
                text = text.replace(f"{{{name}}}", str(value))
            return text

        return Refusal(self.base, [filled(word) for word in self.words], filled(self.line))


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
    # The folders of tests have longer paths than those of users.
    short = re.sub(r"/\S*/pytest-\d+(/popen-gw\d+)?/[^\s/]+", "/tmp", found)
    assert "\n" not in found and len(short) <= MOST_CHARACTERS, found
    begins, ends = line.startswith("^"), line.endswith("$")
    parts = line.removeprefix("^").removesuffix("$").split("<...>")
    place = 0
    for part in parts:
        place = found.find(part, place)
        assert place >= 0, f"\n{found}\nhas no\n{part}"
        place += len(part)
    assert not begins or found.startswith(parts[0]), found
    assert not ends or found.endswith(parts[-1]), found


def assert_refused(
    call: Callable[[], object], line: str, kind: type[Exception] = ValueError
) -> str:
    """`call` raises ValueError, or another `kind`, with the line; return the whole message."""
    with pytest.raises(kind) as raised:
        call()
    assert_line(str(raised.value), line)
    return str(raised.value)


def assert_command_refused(
    capsys: pytest.CaptureFixture[str], words: Iterable[object], line: str
) -> str:
    """`cogfast WORDS` ends with status 2, prints nothing, and its one error line has the line."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("cogfast: "), printed
    assert_line(printed.err.removesuffix("\n"), line)
    return printed.err
