"""Prints docs/options.md as plain text: `cogfast train --help-all`.

The file is read, since the command that collects the options imports PyTorch.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

# In the source tree and in an installed package
_FILES = (
    Path(__file__).resolve().parents[2] / "docs" / "options.md",
    Path(sys.prefix, "share/cogfast/docs/options.md"),
)
_MOST_COLUMNS = 110


class HelpAll(argparse.Action):
    """An option like --help that prints every key of the configuration and ends the command."""

    def __init__(self, option_strings: Any, dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        file = next((path for path in _FILES if path.is_file()), None)
        if file is None:
            raise ValueError(f"--help-all: {_FILES[1]} does not exist; install cogfast again")
        # Lines that are wider are hard to read; a pipe has no width, and gets the widest.
        columns = min(shutil.get_terminal_size((_MOST_COLUMNS, 24)).columns, _MOST_COLUMNS)
        sys.stdout.write(plain_text(file.read_text(encoding="utf-8"), columns))
        parser.exit()


def plain_text(markdown: str, columns: int) -> str:
    """Convert headings and tables of docs/options.md to indented text of at most `columns` columns."""
    blocks: list[str] = []
    for block in markdown.replace("`", "").split("\n\n"):
        block = block.strip()
        title = block.lstrip("# ")
        if block.startswith("## "):
            blocks.append(title.upper())
        elif block.startswith("| "):
            # Cells hold no " | " of their own: option_table writes types and meanings without it.
            rows = [
                [cell.strip() for cell in row.strip("|").split(" | ")] for row in block.split("\n")
            ]
            heads, _, *rows = rows  # the second line is a rule
            lines = [_row(dict(zip(heads, row, strict=True)), columns) for row in rows]
            blocks.append("\n".join(line for row in lines for line in row))
        else:
            blocks.append(textwrap.fill(title, columns, break_on_hyphens=False))
    return "\n\n".join(blocks) + "\n"


def _row(cells: dict[str, str], columns: int) -> list[str]:
    """Return a key with type and default in one line, and its meaning below."""
    key, meaning = cells["key"], list(cells.values())[-1]
    notes = [cells[name] for name in ("type", "default") if name in cells]
    if "default" in cells and cells["default"] != "required":
        notes[-1] = f"default {notes[-1]}"
    first = f"  {key}  ({'; '.join(notes)})" if notes else f"  {key}"
    wrap = lambda text, indent: textwrap.wrap(
        text, columns, initial_indent=indent, subsequent_indent=" " * 6, break_on_hyphens=False
    )
    return wrap(first.strip(), "  ") + wrap(meaning, " " * 6)
