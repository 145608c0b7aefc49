"""Reads the rows of a table, and finds the one of a folder: CSV, JSON lines, or a JSON list of objects."""

from __future__ import annotations

import csv
import difflib
import io
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cogfast.data.sources.folders import text_of

logger = logging.getLogger(__name__)

TABLE_ENDINGS = (".csv", ".jsonl", ".json")
_TABLES = tuple(f"metadata{ending}" for ending in TABLE_ENDINGS)
_OTHER_TOOLS = ("height",)  # a column of other tools that resembles "weight"
# {column: names under which it is read, the first that is there}
Names = Mapping[str, Sequence[str]]


def has_table(folder: Path) -> bool:
    """Return whether a folder has a metadata file."""
    return any((folder / name).is_file() for name in _TABLES)


def table_hint(folder: Path) -> str:
    """Return what an error about another layout adds for a folder with a metadata file, else ""."""
    found = next((name for name in _TABLES if (folder / name).is_file()), None)
    if found is None:
        return ""
    return f"; its {found} is read with data.target=cogfast.data.datasets.VideoManifest"


def table_in(folder: Path) -> Path | None:
    """Find the metadata file of a folder; None if there is none, ValueError if there are several."""
    found = [folder / name for name in _TABLES if (folder / name).is_file()]
    if len(found) > 1:
        raise ValueError(
            f"{folder}: has {found[0].name} and {found[1].name}; give one of them in place of the "
            "folder, or remove the other"
        )
    return found[0] if found else None


def value_of(row: Mapping, names: Sequence[str]) -> object:
    """The value of the first of `names` that the row has; None if it has none of them."""
    return next((row[name] for name in names if name in row), None)


def read_rows(
    file: Path, names: Names, required: Sequence[str], spelled: Sequence[str]
) -> Iterator[tuple[str, dict]]:
    """Yield (place, {name: value}) for every row; the place is "line 3", or "entry 3" of a list.

    required: columns that the header of a CSV must have. spelled: columns of which names
    that are almost the same are refused.
    """
    known = {name for aliases in names.values() for name in aliases}
    if file.suffix.lower() == ".csv":
        yield from _csv_rows(file, names, required, known, spelled)
        return
    entries = _list_entries(file) if file.suffix.lower() == ".json" else _line_entries(file)
    others: set[str] = set()
    for place, row in entries:
        if not isinstance(row, dict):
            raise ValueError(
                f"{file}: {place} must be an object with {' and '.join(required)}, {{...}}; correct it"
            )
        # Each new key is checked once, not in every row.
        new = row.keys() - others
        if new:
            _check_columns(file, place, new, known, spelled)
            others |= new
        yield place, row


def _line_entries(file: Path) -> Iterator[tuple[str, object]]:
    for line, content in enumerate(text_of(file).split("\n"), 1):
        if not content.strip():
            continue
        try:
            yield f"line {line}", json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}: line {line} is not JSON ({error}); fix it") from None


def _list_entries(file: Path) -> Iterator[tuple[str, object]]:
    try:
        entries = json.loads(text_of(file))
    except RecursionError as error:
        raise ValueError(f"{file}: not JSON ({error}); correct the file") from None
    except json.JSONDecodeError as error:
        fix = (
            "name it .jsonl if it has one object per line" if "Extra" in error.msg else "correct it"
        )
        raise ValueError(f"{file}: not JSON ({error}); {fix}") from None
    if not isinstance(entries, list):
        raise ValueError(
            f"{file}: contains {'an object' if isinstance(entries, dict) else 'one value'}, but must be "
            "a list of objects, [{...}, ...]; put it into [...], or use .jsonl"
        )
    yield from ((f"entry {number}", entry) for number, entry in enumerate(entries, 1))


def _csv_rows(
    file: Path, names: Names, required: Sequence[str], known: set[str], spelled: Sequence[str]
) -> Iterator[tuple[str, dict]]:
    # newline="": csv itself splits lines, since quoted captions may hold line breaks.
    reader = csv.DictReader(io.StringIO(text_of(file), newline=""), strict=True)
    try:
        header = reader.fieldnames = [name.strip() for name in reader.fieldnames or []]
        twice = [name for name in header if name in known and header.count(name) > 1]
        if twice:
            raise ValueError(f"{file}: line 1 has column {twice[0]} twice; remove one")
        _check_columns(file, "line 1", set(header), known, spelled)
        missing = [name for name in required if not set(names[name]) & set(header)]
        if missing:
            also = ", ".join(names[missing[0]][1:])
            raise ValueError(
                f"{file}: line 1 has no column {missing[0]} ({','.join(header)[:80]!r}); add it to the "
                f"header{f' (or one of {also})' if also else ''}, with commas between columns"
            )
        for row in reader:
            # csv puts surplus values under None.
            if None in row:
                raise ValueError(
                    f"{file}: line {reader.line_num} has more values than the header has columns; "
                    "quote captions that contain commas"
                )
            yield f"line {reader.line_num}", row
    except csv.Error as error:
        line = reader.reader.line_num
        raise ValueError(
            f"{file}: line {line} is not CSV ({error}); correct the line, and double quotes in a caption"
        ) from None


def _check_columns(
    file: Path, place: str, found: set[str], known: set[str], spelled: Sequence[str]
) -> None:
    """Log columns that are not read; raise ValueError for one that looks misspelt."""
    unknown = sorted(name for name in found if name not in known)
    for name in unknown:
        # A higher cutoff than for keys: manifests have columns of other tools.
        near = difflib.get_close_matches(str(name).lower().strip(), spelled, n=1, cutoff=0.75)
        if near and name not in _OTHER_TOOLS:
            raise ValueError(
                f"{file}: {place}: unknown column {name[:80]!r}; did you mean {near[0]}?"
            )
    if unknown:
        logger.info("%s: unused columns: %s", file, ", ".join(map(str, unknown)))


def text_value(value: object, what: str) -> str:
    """Check that a value is text, and strip it; ValueError that begins with `what` if not."""
    if not isinstance(value, str | None):
        raise ValueError(f"{what}={str(value)[:80]} must be text; put it in quotes")
    text = (value or "").strip()
    # JSON escapes can spell single surrogates. A tokenizer refuses them, but the name of a file
    # has them where it is not valid UTF-8.
    is_half = what.endswith("caption") and any("\ud800" <= c <= "\udfff" for c in text)
    if "\0" in text or is_half:
        raise ValueError(f"{what}={text[:80]!r} has an invalid character; remove it")
    return text


def number_value(value: object, missing: float, what: str) -> float:
    """Read a number; `missing` where there is none, ValueError that begins with `what` if not one."""
    text = "" if value is None else str(value).strip()
    if not text:
        return missing
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    # Rates and ends must be above 0: no video has a frame before its start.
    least = 0 if what.endswith(("start", "weight")) else 1e-9
    if not math.isfinite(number) or number < least or isinstance(value, bool):
        rule = "0 or more" if least == 0 else "above 0"
        raise ValueError(f"{what}={text[:80]} must be a number, {rule}")
    return number
