"""Reads the lists of CogVideo's diffusers trainer: line i of each file belongs to sample i."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import compress

import cogfast.extensions.stores.store as store
from cogfast.core.values import nearest
from cogfast.data.sources.clip_list import OTHER_VIDEOS, ClipList, OtherFiles, PackedStrings
from cogfast.data.sources.folders import find_missing, placed, text_lines, worded
from cogfast.data.sources.manifest import table_hint


def read_lists(files: Mapping[str, str], allow_empty_captions: bool) -> ClipList:
    """Read the samples of a folder; ValueError that names file and line of a fault.

    files: the list of `video_column`, of `caption_column` and, where there are any, of
    `image_column`, `control_column` and `mask_column`. Paths are relative to the list that names them.
    """
    raw = {key: _read(key, file) for key, file in files.items()}
    raw["caption_column"] = [worded(line) for line in raw["caption_column"]]
    # Blank lines are skipped, which may pair captions with the wrong videos.
    blank = {key: [i for i, line in enumerate(texts) if not line] for key, texts in raw.items()}
    for key, places in () if allow_empty_captions else blank.items():
        if places and (of_videos := blank["video_column"]) and places != of_videos:
            text = f"{files[key]} and {files['video_column']} have blank lines in different places, first in line "
            text += f"{1 + min(set(places) ^ set(of_videos))}"
            raise ValueError(f"{text}; remove them, so that line numbers match")
    lines = {key: [line for line in texts if line] for key, texts in raw.items()}
    if not (videos := lines["video_column"]):
        raise ValueError(f"{files['video_column']}: lists no video; write one path per line")
    if allow_empty_captions:
        # text_lines drops blank lines at the end, which may be empty captions.
        captions = raw["caption_column"]
        lines["caption_column"] = captions + [""] * (len(videos) - len(captions))
    for key, texts in lines.items():
        if len(texts) != len(videos):
            what = key.removesuffix("_column").replace("control", "control video")
            text = f"{files['video_column']} has {len(videos)} lines and {files[key]} {len(texts)}, without blank ones"
            raise ValueError(f"{text}; give each video one line with its {what}")
    columns, found = {}, {}
    for key in ("video", "image", *OTHER_VIDEOS):
        if file := files.get(f"{key}_column"):
            paths = [placed(store.parent(file), line, file) for line in lines[f"{key}_column"]]
            found |= store.stats(paths)
            if missing := list(compress(paths, find_missing(paths, found))):
                numbers = [i for i, line in enumerate(raw[f"{key}_column"], 1) if line]
                place = f"{file}: line {numbers[paths.index(missing[0])]}: {missing[0]}"
                text = f"{place} does not exist ({len(missing)} of {len(paths)} files are missing); correct the path, "
                text += "which is relative to the list, or remove the sample's line from each list"
                raise ValueError(text + "; write / in place of \\" * ("\\" in missing[0]))
            columns[key] = PackedStrings(paths)
    return ClipList(
        files=columns["video"],
        captions=PackedStrings(lines["caption_column"]),
        images=columns.get("image"),
        others={name: OtherFiles(columns[name]) for name in OTHER_VIDEOS if name in columns},
        versions=store.Versions(found),
    )


def _read(key: str, file: str) -> list[str]:
    if store.exists(file):
        return text_lines(file)
    folder, name = store.parent(file), os.path.basename(file)
    found = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    fix = "; set it to the file that has one line per sample (for folders videos/ and labels/ use "
    hint = nearest(name, [other for other in found if other.endswith(os.path.splitext(name)[1])])
    hint = hint or table_hint(folder) or f"{fix}VideoFolder)"
    raise ValueError(f"data.params.{key}={name}: {file} does not exist{hint}")
