"""Small pieces of HTML. Every text is escaped here; nothing else writes text into a page."""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

from cogfast.schema.values import printable


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def text(value: object) -> Markup:
    """Return a value as HTML text: control and direction characters shown as escapes, < > & quoted."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(printable(str(value), keep="\n\t")))


def tag(_name: str, /, *children: object, **attributes: object) -> Markup:
    """Build an element. Attributes that are None or False are left out, True has no value.

    A name's underscores become hyphens; `class_` and `for_` are `class` and `for`.
    """
    written = []
    for name, value in attributes.items():
        name = name.rstrip("_").replace("_", "-")
        if value is True:
            written.append(f" {name}")
        elif value is not None and value is not False:
            written.append(f' {name}="{text(value)}"')
    start = f"<{_name}{''.join(written)}>"
    if _name in ("meta", "link", "input"):  # elements without an end
        return Markup(start)
    return Markup(f"{start}{''.join(map(text, children))}</{_name}>")


def join(parts: Iterable[object]) -> Markup:
    return Markup("".join(map(text, parts)))


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[object]],
    numeric: Sequence[int] = (),
    is_stacked: bool = False,
) -> Markup:
    """Build a table that scrolls sideways on a narrow screen.

    numeric: columns of numbers. is_stacked: a narrow screen shows the cells of a row below each other.
    """
    align = lambda i: "number" if i in numeric else None
    head = tag("tr", *(tag("th", h, scope="col", class_=align(i)) for i, h in enumerate(heads)))
    labels = heads if is_stacked else [None] * len(heads)
    body = []
    for row in rows:
        cells = [
            tag("td", cell, class_=align(i), data_label=label)
            for i, (cell, label) in enumerate(zip(row, labels, strict=True))
        ]
        body.append(tag("tr", *cells))
    kind = "rows" if is_stacked else None
    whole = tag("table", tag("thead", head), tag("tbody", *body), class_=kind)
    # Focusable, so that the keyboard can scroll it.
    return tag("div", whole, class_="scroll", tabindex="0")


def address(folder: Path, file: str, page: Path) -> str:
    """Return the relative link from a page to a file in a run's folder."""
    start = os.path.relpath(folder.absolute(), page.absolute().parent)
    path = os.path.normpath(os.path.join(start, file))
    # `./` first: a colon in the first part would be read as a scheme.
    return "./" + quote(os.fsencode(path))


def code(value: object) -> Markup:
    return tag("code", value)
