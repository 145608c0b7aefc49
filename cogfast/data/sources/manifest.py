"""Manifests: CSV, JSON-lines or JSON files that list the samples of a data set, one per row.

Required columns: path and caption, also under the names of other trainers' metadata (_NAMES).
Optional: start and end (seconds), fps (frames per second of the clip, in place of data.params.fps),
image (first frame for image-to-video), weight (how often an epoch reads the sample) and split
(train, valid or test). Paths are relative to the file. In CogKit's layout the manifest has ids and
captions, and videos/ and images/ have a manifest each, of files and ids.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from cogfast.config.values import counted
from cogfast.data.sources.clip_list import SPLITS, ClipList, PackedStrings
from cogfast.data.sources.folders import SourceError, check_caption_size, refuse_samples
from cogfast.data.sources.table import (
    TABLE_ENDINGS,
    Names,
    has_table,
    number_value,
    read_rows,
    table_in,
    text_value,
    value_of,
)

logger = logging.getLogger(__name__)

_NUMBERS = {"start": math.nan, "end": math.nan, "fps": math.nan, "weight": 1.0}
_COLUMNS = ("path", "caption", *_NUMBERS, "image", "split")
# Hugging Face's videofolder and finetrainers write file_name, VideoX-Fun file_path, text and type.
_PATHS = ("path", "file_name", "file_path", "video", "video_path", "video_file", "media_path")
_CAPTIONS = ("caption", "prompt", "text")
_NAMES: Names = {
    **{name: (name,) for name in (*_COLUMNS, "type")},
    "path": _PATHS,
    "caption": _CAPTIONS,
}
_FILES_BY_ID: Names = {"path": _PATHS, "id": ("id",)}
_SPLIT_NAMES = {"": 0, "val": 1, "validation": 1} | {name: i for i, name in enumerate(SPLITS)}


def manifest_of(source: Path) -> Path:
    """Return a file as it is, and of a folder its metadata file or the one of its train/."""
    if not source.is_dir():
        return source
    found = table_in(source) or table_in(source / "train")
    if found is None:
        raise SourceError(
            f"{source}: has no metadata.jsonl, metadata.csv or metadata.json, nor has its train/; "
            "give a manifest (.csv, .jsonl or .json) or a folder with such a file"
        )
    return found


def read_manifest(source: Path, allow_empty_captions: bool = False) -> ClipList:
    """Read the samples of a manifest, in its order; ValueError with file and line of a fault."""
    file = manifest_of(source)
    if not file.is_file() or file.suffix.lower() not in TABLE_ENDINGS:
        problem = "not a manifest" if file.exists() else "no such file"
        raise SourceError(f"{file}: {problem}; give a .csv, .jsonl or .json file")
    has_ids, by_id = has_table(file.parent / "videos"), None
    texts: dict[str, list[str]] = {"path": [], "caption": [], "image": []}
    numbers: dict[str, list[float]] = {name: [] for name in _NUMBERS}
    splits, empty, num_pictures = [], [], 0
    # With videos by id, the manifest needs no paths.
    names = {**_NAMES, "id": ("id",)} if has_ids else _NAMES
    required = ("caption",) if has_ids else ("path", "caption")
    for place, row in read_rows(file, names, required, _COLUMNS):
        where = f"{file}: {place}"
        path, caption, image = (text_value(value_of(row, names[n]), f"{where}: {n}") for n in texts)
        if row.get("type") == "image":
            num_pictures += 1
            continue
        if not path and has_ids:
            by_id = by_id or [_files_by_id(file.parent / name) for name in ("videos", "images")]
            path, own = (files.take(row.get("id"), where) if files else "" for files in by_id)
            image = image or own
        if not path:
            raise ValueError(
                f"{where} has no path; write the path of its video into column path (or one of "
                f"{', '.join(_PATHS[1:])})"
            )
        check_caption_size(len(caption.encode("utf-8", "replace")), f"{where}: caption")
        if not caption:
            empty.append(place)
        # Paths are relative to the manifest; joining keeps absolute ones.
        texts["path"].append(str(file.parent / path))
        texts["caption"].append(caption)
        texts["image"].append(str(file.parent / image) if image else "")
        for name, missing in _NUMBERS.items():
            numbers[name].append(number_value(row.get(name), missing, f"{where}: {name}"))
        start, end = numbers["start"][-1], numbers["end"][-1]
        if end <= start:
            raise ValueError(
                f"{where}: end={end:g} must be after start={start:g}; both are seconds of the video"
            )
        split = text_value(row.get("split"), f"{where}: split").lower()
        if split not in _SPLIT_NAMES:
            raise ValueError(f"{where}: split={split[:80]!r} is not known; use {', '.join(SPLITS)}")
        splits.append(_SPLIT_NAMES[split])
    if not texts["path"]:
        pictures = f", only {counted(num_pictures, 'row')} of type image" if num_pictures else ""
        raise ValueError(f"{file}: no sample in it{pictures}; add rows with a video and a caption")
    if num_pictures:
        logger.info("%s: left out %s of type image", file, counted(num_pictures, "row"))
    for files in by_id or ():
        if files is not None:
            files.refuse_unused(file)
    if not allow_empty_captions:
        what = f"rows of {file} without a caption"
        fix = f"add them, in column {', '.join(_CAPTIONS[:-1])} or {_CAPTIONS[-1]}, or set "
        fix += "data.params.allow_empty_captions=true"
        refuse_samples(empty, len(texts["path"]), what, fix)
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


@dataclass(slots=True)
class _FilesById:
    """Files by id, as the metadata file of a folder beside the manifest lists them.

    used: the ids that rows of the manifest have named.
    """

    table: Path
    paths: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def take(self, number: object, where: str) -> str:
        """Return the file of an id; ValueError if there is none."""
        key = str(number)
        if number is None or key not in self.paths:
            raise ValueError(
                f"{where}: id={key[:80]} is not in {self.table}; give each sample a line with its id "
                "in both files"
            )
        if key in self.used:
            raise ValueError(
                f"{where}: id={key[:80]} is listed twice; give each sample an id of its own"
            )
        self.used.add(key)
        return self.paths[key]

    def refuse_unused(self, manifest: Path) -> None:
        """Raise ValueError for a file that no row names: its caption may have been lost."""
        left = [key for key in self.paths if key not in self.used]
        if left:
            raise ValueError(
                f"{self.table}: id={left[0][:80]} is not in {manifest} ({counted(len(left), 'such file')}); "
                "give each sample a line with its id in both files"
            )


def _files_by_id(folder: Path) -> _FilesById | None:
    """Read the metadata file of a folder beside the manifest; None if it has none."""
    table = table_in(folder)
    if table is None:
        return None
    found = _FilesById(table)
    for place, row in read_rows(table, _FILES_BY_ID, ("path", "id"), ()):
        path = text_value(value_of(row, _PATHS), f"{table}: {place}: path")
        key = str(row.get("id", ""))
        if not path or not key:
            raise ValueError(f"{table}: {place} has no {'id' if path else 'file_name'}; add it")
        if key in found.paths:
            raise ValueError(
                f"{table}: {place}: id={key[:80]} is listed twice; give each file an id of its own"
            )
        found.paths[key] = str(folder / path)
    return found
