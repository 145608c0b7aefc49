"""Manifests: CSV, JSON-lines or JSON files that list the samples of a data set, one per row.

Required columns: path and caption, also under the names of other trainers' metadata (_NAMES).
Optional: start and end (seconds), target_fps (frames per second of the clip, in place of data.params.fps),
type (video, or image for a picture to train on), image (first frame for image-to-video), control (a
control video, also as control_file_path),
mask (a video or picture of black and white), weight (how often an epoch reads the sample), prior (true: the
target is the base model's own estimate) and split (train, valid or test). Paths are relative to the file.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np

import cogfast.extensions.stores.store as store
from cogfast.core.addresses import check_address
from cogfast.core.files import MOST_LINE_BYTES
from cogfast.core.values import counted
from cogfast.data.sources import folders
from cogfast.data.sources.clip_list import (
    OTHER_VIDEOS,
    SPLITS,
    TYPES,
    ClipList,
    OtherFiles,
    PackedStrings,
)
from cogfast.data.sources.folders import ADD_BUCKET, NO_WORDS, SourceError, placed, text_of

logger = logging.getLogger(__name__)

TABLE_ENDINGS = (".csv", ".jsonl", ".json")
_TABLES = tuple(f"metadata{ending}" for ending in TABLE_ENDINGS)
_OTHER_TOOLS = ("height", "priority")  # columns of other tools that resemble weight and prior
_NUMBERS = {"start": math.nan, "end": math.nan, "target_fps": math.nan, "weight": 1.0}
# Columns that give parts of videos in other units than seconds, or in unknown ones
_PARTS = re.compile(
    r"(start|begin|end|stop)_?(frame|time|idx|index|sec|ms)|(frame|time|clip|segment)_?(start|begin|end|stop)"
)
_RATES = ("fps", "frame_rate", "framerate")  # of the files, by tools that describe them
_COLUMNS = ("path", "caption", *_NUMBERS, "image", *OTHER_VIDEOS, "prior", "split")
# Hugging Face's videofolder and finetrainers write file_name, VideoX-Fun file_path, text and type.
_PATHS = ("path", "file_name", "file_path", "video", "video_path", "video_file", "media_path")
_CAPTIONS = ("caption", "prompt", "text")
# {column: names under which it is read, the first that is there}
_NAMES: Mapping[str, Sequence[str]] = {
    **{name: (name,) for name in (*_COLUMNS, "type")},
    "path": _PATHS,
    "caption": _CAPTIONS,
    "control": ("control", "control_file_path"),  # VideoX-Fun's
}
_KNOWN = {name for aliases in _NAMES.values() for name in aliases}
_HALF = re.compile("[\ud800-\udfff]")
_PATH = "path, which is relative to the manifest"
_FLAGS = {"": False, "false": False, "0": False, "true": True, "1": True}
_SPLIT_NAMES = {"": 0, "val": 1, "validation": 1} | {name: i for i, name in enumerate(SPLITS)}


def tables_in(folder: str) -> list[str]:
    """Return the names of the metadata files of a folder."""
    return [name for name in _TABLES if store.exists(store.join(folder, name))]


def table_hint(folder: str) -> str:
    """Return what an error about another layout adds for a folder with a metadata file, else ""."""
    found = tables_in(folder)
    text = "is read with data.target=cogfast.data.datasets.VideoManifest"
    if not found and store.exists(store.join(folder, "prompt.txt")):
        return "; lists of captions and videos are named prompts.txt and videos.txt"
    return f"; its {found[0]} {text}" if found else ""


def is_manifest(source: str) -> bool:
    """Return whether a source has the name of a table."""
    return store.without_query(source).lower().endswith(TABLE_ENDINGS)


def manifest_of(source: str) -> str:
    """Return a file as it is, and of a folder its metadata file or the one of its train/."""
    if is_manifest(source) if store.is_url(source) else not os.path.isdir(source):
        return source
    for folder in (source, store.join(source, "train")):
        found = tables_in(folder)
        if len(found) > 1:
            fix = "give one of them in place of the folder, or remove the other"
            raise ValueError(f"{folder}: has {found[0]} and {found[1]}; {fix}")
        if found:
            return store.join(folder, found[0])
    text = (
        f"{source}: has no metadata.jsonl, metadata.csv or metadata.json, nor has its train/; give "
    )
    raise SourceError(f"{text}a manifest (.csv, .jsonl or .json) or a folder with such a file")


def read_manifest(
    source: str | Path,
    allow_empty_captions: bool = False,
    has_pictures: bool = False,
    tensors: Mapping[str, tuple[int, ...]] = {},
) -> ClipList:
    """Read the samples of a manifest, in its order; ValueError with file and line of a fault.
    has_pictures: rows of type image are samples. tensors: {column of .npy files: their shape}."""
    file = manifest_of(str(source))
    if not store.exists(file) or not is_manifest(file):
        is_there = not store.is_url(file) and os.path.exists(file)
        problem = "not a manifest" if is_there else "no such file"
        raise SourceError(f"{file}: {problem}; give a .csv, .jsonl or .json file")
    if taken := sorted(_KNOWN.intersection(tensors)):
        raise ValueError(f"data.params.tensors: {taken[0]} names another column; rename the tensor")
    samples, num_pictures = _Samples(file, tensors), 0
    for place, row in _rows_of(file, set(tensors)):
        # pandas writes NaN where a value is missing.
        row = {k: None if str(v).strip() in NO_WORDS else v for k, v in row.items()}
        kind = str(row.get("type")).strip().lower()
        if kind == "image" and not has_pictures:
            num_pictures += 1
        else:
            samples.add(place, row, kind)
    if num_pictures:
        text = "%s: left out %s of type image; %s to train on pictures"
        logger.info(text, file, counted(num_pictures, "row"), ADD_BUCKET)
    if not samples.places:
        raise ValueError(f"{file}: no sample in it; add rows with a video and a caption")
    found = samples.find_files()
    if not allow_empty_captions:
        pairs = zip(samples.places, samples.texts["caption"], strict=True)
        empty = [place for place, caption in pairs if not caption]
        what = f"rows of {file} without a caption"
        fix = f"add them, in column {', '.join(_CAPTIONS[:-1])} or {_CAPTIONS[-1]}, or set "
        fix += "data.params.allow_empty_captions=true"
        folders.refuse_samples(empty, len(samples.places), what, fix)
    return samples.listed(found)


class _Samples:
    """The samples of a manifest, in columns."""

    def __init__(self, file: str, tensors: Mapping[str, tuple[int, ...]]) -> None:
        self._file, self._folder, self._tensors = file, store.parent(file), tensors
        self._others = ("image", *OTHER_VIDEOS, *tensors)  # columns of further files
        self.places: list[str] = []  # their lines or entries
        self.texts: dict[str, list[str]] = {n: [] for n in ("path", "caption", *self._others)}
        self._numbers: dict[str, list] = {n: [] for n in (*_NUMBERS, "split", "prior", "type")}
        self._columns_of = cache(self._columns)  # most rows have the same columns

    def _columns(self, keys: tuple[str, ...]) -> dict[str, str]:
        return {n: x for n in self.texts for x in reversed(_NAMES.get(n, (n,))) if x in keys}

    def add(self, place: str, row: Mapping[str, object], kind: str) -> None:
        where, columns, texts = f"{self._file}: {place}", self._columns_of(tuple(row)), self.texts
        cells = {n: _text(row[columns[n]], where, n) if n in columns else "" for n in texts}
        if not cells["path"]:
            fix = f"column path (or one of {', '.join(_PATHS[1:])})"
            raise ValueError(f"{where} has no path; write the path of its video into {fix}")
        size = len(cells["caption"].encode("utf-8", "replace"))
        folders.check_caption_size(size, f"{where}: caption")
        # Paths are relative to the manifest; joining keeps absolute ones and URLs.
        texts["path"].append(placed(self._folder, cells["path"], where))
        self.places.append(place)
        texts["caption"].append(cells["caption"])
        for name in self._others:
            if name in self._tensors and not cells[name]:
                raise ValueError(f"{where} has no {name}; data.params.tensors needs one per row")
            texts[name].append(placed(self._folder, cells[name], where) if cells[name] else "")
        numbers = {n: _number(row.get(n), missing, where, n) for n, missing in _NUMBERS.items()}
        if (end := numbers["end"]) <= (start := numbers["start"]):
            text = f"{where}: end={end:g} must be after start={start:g}"
            raise ValueError(f"{text}; both are seconds of the video")
        if (split := _text(row.get("split"), where, "split").lower()) not in _SPLIT_NAMES:
            raise ValueError(f"{where}: split={split[:80]!r} is not known; use {', '.join(SPLITS)}")
        if (flag := str(row.get("prior") or "").strip().lower()) not in _FLAGS:
            raise ValueError(f"{where}: prior={flag[:80]!r} must be true or false")
        # Other tools' values of the column type say something else.
        type_ = TYPES.index(kind) if kind in TYPES else 0
        numbers |= {"split": _SPLIT_NAMES[split], "prior": _FLAGS[flag], "type": type_}
        for name, number in numbers.items():
            self._numbers[name].append(number)

    def find_files(self) -> dict[str, store.Stat]:
        """Return the URLs that are there; log a warning about videos that are missing."""
        paths, texts = self.texts["path"], self.texts
        try:
            found = store.stats(name for n in texts if n != "caption" for name in texts[n])
        except store.StoreError as error:
            raise ValueError(f"{self._file}: {error}") from None
        if any(is_gone := folders.find_missing(paths, found)):
            i = is_gone.index(True)
            first = f"{self.places[i]}: {paths[i]}"
            text = "%s: %d of %s name a file that does not exist or is refused, first %s; correct the %s, or remove the row"
            text += "; write / in place of \\" * ("\\" in first)
            what = "address, or renew a signed one" if store.is_url(paths[i]) else _PATH
            number = counted(len(is_gone), "row")
            logger.warning(text, self._file, sum(is_gone), number, first, what)
        return found

    def listed(self, found: Mapping[str, store.Stat]) -> ClipList:
        """Return the list. Columns that no row uses are None, so that they cost no memory."""
        files = {n: PackedStrings(self.texts[n]) for n in self._others if any(self.texts[n])}
        images = files.pop("image", None)
        numbers = {name: np.array(column) for name, column in self._numbers.items()}
        spans = np.stack([numbers["start"], numbers["end"]], axis=1)
        fps, weights = numbers["target_fps"], numbers["weight"]
        splits, types, prior = numbers["split"], numbers["type"], numbers["prior"]
        return ClipList(
            files=PackedStrings(self.texts["path"]),
            captions=PackedStrings(self.texts["caption"]),
            images=images,
            others={n: OtherFiles(f, shape=self._tensors.get(n)) for n, f in files.items()},
            spans=None if np.isnan(spans).all() else spans,
            fps=None if np.isnan(fps).all() else fps,
            weights=None if (weights == 1).all() else weights,
            splits=splits.astype(np.int8) if splits.any() else None,
            prior=prior if prior.any() else None,
            types=types.astype(np.int8) if types.any() else None,
            versions=store.Versions(found),
        )


def _rows_of(file: str, known: set[str]) -> Iterator[tuple[str, dict]]:
    """Yield ("line 3", or "entry 3" of a list, {name: value}) of each row. known: further columns."""
    name = store.without_query(file).lower()
    if name.endswith(".csv"):
        yield from _csv_rows(file, known)
        return
    for place, row in _list_entries(file) if name.endswith(".json") else _line_entries(file):
        if not isinstance(row, dict):
            rule = "must be an object with path and caption, {...}"
            raise ValueError(f"{file}: {place} {rule}; correct it")
        # Each new key is checked once, not in every row.
        if new := row.keys() - known:
            _check_columns(file, place, new)
            known |= new
        yield place, row


def _line_entries(file: str) -> Iterator[tuple[str, object]]:
    for line, content in enumerate(text_of(file).split("\n"), 1):
        if not content.strip():
            continue
        if len(content) > MOST_LINE_BYTES:
            raise ValueError(f"{file}: line {line} has over {MOST_LINE_BYTES} characters; cut it")
        try:
            yield f"line {line}", json.loads(content, object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}: line {line} is not JSON ({error}); fix it") from None


def _list_entries(file: str) -> Iterator[tuple[str, object]]:
    try:
        entries = json.loads(text_of(file), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        fix = "correct it, or name it .jsonl if it has one object per line"
        raise ValueError(f"{file}: not JSON ({error}); {fix}") from None
    if not isinstance(entries, list):
        raise ValueError(f"{file}: must be a list of objects, [{{...}}, ...]; put it into [...]")
    yield from ((f"entry {number}", entry) for number, entry in enumerate(entries, 1))


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError(f"{', '.join(found)}: one of these keys is there twice")
    return found


def _csv_rows(file: str, known: set[str]) -> Iterator[tuple[str, dict]]:
    # newline="": csv itself splits lines, since quoted captions may hold line breaks.
    reader = csv.DictReader(io.StringIO(text_of(file), newline=""), strict=True)
    try:
        header = reader.fieldnames = [name.strip() for name in reader.fieldnames or []]
        if twice := [name for name in header if name in _KNOWN and header.count(name) > 1]:
            raise ValueError(f"{file}: line 1 has column {twice[0]} twice; remove one")
        _check_columns(file, "line 1", set(header) - known)
        for name in ("path", "caption"):
            if not set(_NAMES[name]) & set(header):
                text = f"{file}: line 1 has no column {name} ({','.join(header)[:80]!r}); add it to the header"
                other = ", ".join(_NAMES[name][1:])
                raise ValueError(f"{text} (or one of {other}), with commas between columns")
        for row in reader:
            # csv puts surplus values under None.
            if None in row:
                text = f"{file}: line {reader.line_num} has more values than the header has columns"
                raise ValueError(f"{text}; quote captions that contain commas")
            yield f"line {reader.line_num}", row
    except csv.Error as error:
        text = f"{file}: line {reader.reader.line_num} is not CSV ({error})"
        raise ValueError(f"{text}; correct the line, and double quotes in a caption") from None


def _check_columns(file: str, place: str, found: set[str]) -> None:
    """Log columns that are not read; raise ValueError for one that looks misspelt."""
    unknown = sorted(found - _KNOWN)
    for name in unknown:
        low = str(name).lower().strip()
        if _PARTS.match(low) and not {"start", "end"} & found:
            text = f"{file}: {place}: column {name[:80]} is not read: start and end (seconds) give a part of a video"
            raise ValueError(f"{text}; add these, or remove the column if each file is its part")
        # A higher cutoff than for keys: manifests have columns of other tools.
        near = difflib.get_close_matches(low, _COLUMNS, n=1, cutoff=0.75)
        if near and low not in _OTHER_TOOLS:
            text = f"{file}: {place}: unknown column {name[:80]!r}"
            raise ValueError(f"{text}; did you mean {near[0]}?")
    if unknown:
        logger.info("%s: unused columns: %s", file, ", ".join(map(str, unknown)))
    for name in (name for name in unknown if str(name).lower().strip() in _RATES):
        text = "%s: column %s describes the files, and clips are read at data.params.fps; name it target_fps to set "
        logger.warning(text + "the rate of each clip", file, name)


def _text(value: object, where: str, name: str) -> str:
    """Check that a value is text, and strip it; ValueError that begins with place and name if not."""
    if not (value is None or isinstance(value, str)):
        fix = "write a row for each" if isinstance(value, list) else "put it in quotes"
        raise ValueError(f"{where}: {name}={str(value)[:80]} must be text; {fix}")
    text = (value or "").strip()
    # JSON escapes can spell single surrogates. A tokenizer refuses them, but the name of a file
    # has them where it is not valid UTF-8.
    is_half = name == "caption" and not text.isascii() and _HALF.search(text)
    if "\0" in text or is_half:
        raise ValueError(f"{where}: {name}={text[:80]!r} has an invalid character; remove it")
    if name not in ("caption", "split") and ":" in text:
        try:
            check_address(text)
        except ValueError as error:
            raise ValueError(f"{where}: {name}={error}") from None
    return text


def _number(value: object, missing: float, where: str, name: str) -> float:
    """Read a number; `missing` where there is none, ValueError that begins with place and name if not one."""
    if value is None or not (text := str(value).strip()):
        return missing
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    # Rates and ends must be above 0: no video has a frame before its start.
    least = 0 if name in ("start", "weight") else 1e-9
    if not math.isfinite(number) or number < least or isinstance(value, bool):
        rule = "0 or more" if least == 0 else "above 0"
        raise ValueError(f"{where}: {name}={text[:80]} must be a number, {rule}")
    return number
