"""Manifests: CSV or JSON-lines files that list the samples of a data set, one per row.

Required columns: path and caption. Optional: start and end (seconds), fps (frames per second of the
clip, in place of data.params.fps), image (first frame for image-to-video), weight (how often an
epoch reads the sample) and split (train, valid or test). Paths are relative to the file.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cogfast.data.sources.clip_list import SPLITS, ClipList, PackedStrings
from cogfast.data.sources.folders import (
    ADD_CAPTIONS,
    check_caption_size,
    refuse_samples,
    text_of,
)

logger = logging.getLogger(__name__)

_NUMBERS = {"start": math.nan, "end": math.nan, "fps": math.nan, "weight": 1.0}
_COLUMNS = ("path", "caption", *_NUMBERS, "image", "split")
_SPLIT_NAMES = {"": 0, "val": 1, "validation": 1} | {name: i for i, name in enumerate(SPLITS)}
MANIFEST_ENDINGS = (".csv", ".jsonl")


def read_manifest(file: Path, allow_empty_captions: bool = False) -> ClipList:
    """Read the samples of a manifest, in its order; ValueError with file and line of a fault."""
    if not file.is_file() or file.suffix.lower() not in MANIFEST_ENDINGS:
        raise ValueError(
            f"data_dir={file}: {'' if file.exists() else 'no such file; '}args.train_data must list "
            "manifests (.csv or .jsonl)"
        )
    texts: dict[str, list[str]] = {"path": [], "caption": [], "image": []}
    numbers: dict[str, list[float]] = {name: [] for name in _NUMBERS}
    splits, empty = [], []
    for line, row in _rows(file):
        where = f"{file}: line {line}"
        path, caption, image = (_text(row.get(n), f"{where}: {n}") for n in texts)
        if not path:
            raise ValueError(
                f"{file}: line {line} has no path; write the path of its video into column path"
            )
        check_caption_size(len(caption), f"{where}: caption")
        if not caption:
            empty.append(f"line {line}")
        # Paths are relative to the manifest; joining keeps absolute ones.
        texts["path"].append(str(file.parent / path))
        texts["caption"].append(caption)
        texts["image"].append(str(file.parent / image) if image else "")
        for name, missing in _NUMBERS.items():
            numbers[name].append(_number(row.get(name), missing, f"{where}: {name}"))
        start, end = numbers["start"][-1], numbers["end"][-1]
        if end <= start:
            raise ValueError(f"{file}: line {line}: end={end:g} must be after start={start:g}")
        split = _text(row.get("split"), f"{where}: split").lower()
        if split not in _SPLIT_NAMES:
            raise ValueError(
                f"{file}: line {line}: split={split[:80]!r} is not known; use {', '.join(SPLITS)}"
            )
        splits.append(_SPLIT_NAMES[split])
    if not texts["path"]:
        raise ValueError(f"{file}: no sample in it")
    if not allow_empty_captions:
        what = f"rows of {file} without a caption"
        refuse_samples(empty, len(texts["path"]), what, ADD_CAPTIONS)
    # Columns that no row uses are None, so that they cost no memory.
    spans = np.array([numbers["start"], numbers["end"]]).T
    fps, weights, numbered = (np.array(x) for x in (numbers["fps"], numbers["weight"], splits))
    return ClipList(
        files=PackedStrings(texts["path"]),
        captions=PackedStrings(texts["caption"]),
        images=PackedStrings(texts["image"]) if any(texts["image"]) else None,
        spans=None if np.isnan(spans).all() else spans,
        fps=None if np.isnan(fps).all() else fps,
        weights=None if (weights == 1).all() else weights,
        splits=numbered.astype(np.int8) if numbered.any() else None,
    )


def _rows(file: Path) -> Iterator[tuple[int, dict]]:
    """Yield (line number, {column: value}) for every row of a manifest."""
    text = text_of(file)
    if file.suffix.lower() == ".jsonl":
        others: set[str] = set()
        for line, content in enumerate(text.split("\n"), 1):
            if not content.strip():
                continue
            try:
                row = json.loads(content)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{file}: line {line} is not JSON ({error}); fix it") from None
            if not isinstance(row, dict):
                raise ValueError(f"{file}: line {line} must be an object with path and caption")
            # Each new key is checked once, not in every row.
            new = row.keys() - others
            if new:
                _check_columns(file, line, new)
                others |= new
            yield line, row
        return
    # newline="": csv itself splits lines, since quoted captions may hold line breaks.
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        names = reader.fieldnames = [name.strip() for name in reader.fieldnames or []]
        twice = [name for name in _COLUMNS if names.count(name) > 1]
        if twice:
            raise ValueError(f"{file}: line 1 has column {twice[0]} twice; remove one")
        _check_columns(file, 1, set(names))
        missing = [name for name in ("path", "caption") if name not in names]
        if missing:
            header = ",".join(names)
            raise ValueError(
                f"{file}: line 1 has no column {missing[0]} ({header[:80]!r}); add it to the header, "
                "with commas between columns"
            )
        for row in reader:
            # csv puts surplus values under None.
            if None in row:
                raise ValueError(
                    f"{file}: line {reader.line_num} has more values than the header has columns; "
                    "quote captions that contain commas"
                )
            yield reader.line_num, row
    except csv.Error as error:
        line = reader.reader.line_num
        raise ValueError(f"{file}: line {line} is not CSV ({error})") from None


def _check_columns(file: Path, line: int, names: set[str]) -> None:
    """Log columns that are not read; raise ValueError for one that looks misspelt."""
    unknown = sorted(name for name in names if name not in _COLUMNS)
    for name in unknown:
        # 0.75 is stricter than for keys: manifests have columns of other tools.
        near = difflib.get_close_matches(str(name).lower().strip(), _COLUMNS, n=1, cutoff=0.75)
        if near:
            raise ValueError(
                f"{file}: line {line}: unknown column {name[:80]!r}; did you mean {near[0]}?"
            )
    if unknown:
        logger.info("%s: unused columns: %s", file, ", ".join(map(str, unknown)))


def _text(value: object, what: str) -> str:
    if not isinstance(value, str | None):
        raise ValueError(f"{what}={str(value)[:80]} must be text in quotes")
    text = (value or "").strip()
    # JSON escapes can spell single surrogates. A tokenizer refuses them, but the name of a file
    # has them where it is not valid UTF-8.
    is_half = what.endswith("caption") and any("\ud800" <= c <= "\udfff" for c in text)
    if "\0" in text or is_half:
        raise ValueError(f"{what}={text[:80]!r} has an invalid character; remove it")
    return text


def _number(value: object, missing: float, what: str) -> float:
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
