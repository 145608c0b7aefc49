"""Data sets of video files with captions, in SAT's folder layout and the diffusers trainer's lists.

Both give the same sample, {"video": uint8 [F, 3, H, W], "txt", "fps", "num_frames", "path",
"num_padded"}, and raise BadSample for a file that cannot be used. The files are found, and the
captions read, once at the start; no video is opened before it is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

import torch
from torch import Tensor
from torch.utils.data import Dataset

from cogfast.data.bad_samples import BadSample
from cogfast.data.clip_transform import (
    FrameSelection,
    Selection,
    resize_and_center_crop,
    select_frames_sat,
    select_frames_timestamp,
    select_frames_uniform,
)
from cogfast.data.packed_strings import PackedStrings
from cogfast.data.sample_files import (
    DataDir,
    data_folders,
    find_videos,
    first_line,
    label_of,
    other_videos,
    sat_label,
    text_lines,
)
from cogfast.data.video_reader import ReaderName, VideoReader, open_video

_NUM_NAMED = 5  # files that an error lists
_FRAMES_AT_ONCE = 16  # full-size frames held before they are scaled down

ShortClips = Literal["skip", "pad"]


class Sample(TypedDict):
    video: Tensor  # uint8 [F, 3, H, W]
    txt: str
    fps: int
    num_frames: int  # before padding
    path: str
    num_padded: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipSettings:
    """What a video file becomes: data.params of the YAML.

    short_clips: "skip" reports a clip that is too short as bad, "pad" repeats its last frame. Left
    out, `timestamp` skips (a frozen tail teaches the model to stop moving) and `sat` and `uniform`
    pad as upstream does; padded clips are counted either way.
    keep_decoded_mib: decoded clips that each reading process keeps for the next epoch; for sets so
    small that decoding them again and again would hold training up.
    """

    video_size: tuple[int, int]  # rows, columns
    fps: int
    max_num_frames: int
    skip_frms_num: float = 0.0
    frame_selection: FrameSelection = "timestamp"
    short_clips: ShortClips | None = None
    reader: ReaderName = "auto"
    keep_decoded_mib: int = 0

    def __post_init__(self) -> None:
        size = tuple(self.video_size)
        if len(size) != 2 or not all(isinstance(v, int) and v > 0 for v in size):
            raise ValueError(
                f"data.params.video_size={list(size)} must be [rows, columns], e.g. [480, 720]"
            )
        object.__setattr__(self, "video_size", size)
        for key, value, least in (
            ("fps", self.fps, "positive"),
            ("max_num_frames", self.max_num_frames, "positive"),
            ("skip_frms_num", self.skip_frms_num, "0 or more"),
            ("keep_decoded_mib", self.keep_decoded_mib, "0 or more"),
        ):
            if value < 0 or (value == 0 and least == "positive"):
                raise ValueError(f"data.params.{key}={value} must be {least}")
        for key, value, choices in (
            ("frame_selection", self.frame_selection, get_args(FrameSelection)),
            ("short_clips", self.short_clips, (None, *get_args(ShortClips))),
            ("reader", self.reader, get_args(ReaderName)),
        ):
            if value not in choices:
                allowed = ", ".join(str(c) for c in choices if c is not None)
                raise ValueError(f"data.params.{key}={value!r} is not known; use one of {allowed}")

    @property
    def skips_short_clips(self) -> bool:
        if self.short_clips is None:
            return self.frame_selection == "timestamp"
        return self.short_clips == "skip"


def select_frames(video: VideoReader, settings: ClipSettings) -> Selection:
    """The clip's frames, or BadSample where the video is too short for it."""
    fps, num_frames, skip = settings.fps, settings.max_num_frames, settings.skip_frms_num
    try:
        if settings.frame_selection == "timestamp":
            selection = select_frames_timestamp(video.times, fps, num_frames, int(skip))
        elif settings.frame_selection == "sat":
            selection = select_frames_sat(len(video), video.fps, fps, num_frames, skip)
        else:
            selection = select_frames_uniform(len(video), num_frames)
    except ValueError as error:
        raise BadSample(video.path, str(error)) from None
    if selection.num_padded and settings.skips_short_clips:
        has, need = len(video) / video.fps, num_frames / fps
        digits = 1 if f"{has:.1f}" != f"{need:.1f}" else 2
        raise BadSample(
            video.path,
            f"{len(video)} frames at {video.fps:g} fps = {has:.{digits}f} s, "
            f"need {need:.{digits}f} s (data.params.short_clips=pad repeats the last frame)",
        )
    return selection


def read_clip(path: str, settings: ClipSettings) -> tuple[Tensor, Selection]:
    """The clip [F, 3, rows, columns] uint8 of a video file, and its selection."""
    video = open_video(path, settings.reader)
    try:
        selection = select_frames(video, settings)
        # Padded frames are copied, not decoded; full-size frames are let go a few at a time.
        chosen = selection.indices[: len(selection.indices) - selection.num_padded]
        parts = [
            resize_and_center_crop(
                video.read(chosen[i : i + _FRAMES_AT_ONCE].tolist()), settings.video_size
            )
            for i in range(0, len(chosen), _FRAMES_AT_ONCE)
        ]
    finally:
        video.close()
    if selection.num_padded:
        parts.append(parts[-1][-1:].expand(selection.num_padded, -1, -1, -1))
    return torch.cat(parts), selection


class CaptionedVideos(Dataset):
    """Video files with one caption each; `settings` says what a file becomes."""

    def __init__(
        self, paths: Sequence[str], captions: Sequence[str], settings: ClipSettings
    ) -> None:
        assert len(paths) == len(captions), f"{len(paths)=}, {len(captions)=}"
        self.paths = PackedStrings(paths)
        self.captions = PackedStrings(captions)
        self.settings = settings
        self._kept: dict[int, Sample] = {}
        self._room = settings.keep_decoded_mib * 2**20  # bytes

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Sample:
        if index in self._kept:
            return self._kept[index].copy()
        sample = self._read(index)
        if sample["video"].nbytes <= self._room:
            self._room -= sample["video"].nbytes
            self._kept[index] = sample.copy()
        return sample

    def _read(self, index: int) -> Sample:
        clip, selection = read_clip(self.paths[index], self.settings)
        return {
            "video": clip,
            "txt": self.captions[index],
            "fps": self.settings.fps,
            "num_frames": selection.num_frames,
            "path": self.paths[index],
            "num_padded": selection.num_padded,
        }


class VideoFolder(CaptionedVideos):
    """SAT's layout: <dir>/**/videos/x.mp4 with its caption, one line, in <dir>/**/labels/x.txt.

    As sat/data_video.SFTDataset finds them: every .mp4 (.MP4 too) below `data_dir`, whose label is
    named by putting labels for videos and .txt for .mp4 in its path (so x.txt beside x.mp4 works).
    """

    def __init__(
        self,
        data_dir: DataDir,
        video_size: Sequence[int],
        fps: int,
        max_num_frames: int,
        skip_frms_num: float = 0.0,
        frame_selection: FrameSelection = "timestamp",
        short_clips: ShortClips | None = None,
        allow_empty_captions: bool = False,
        reader: ReaderName = "auto",
        keep_decoded_mib: int = 0,
    ) -> None:
        settings = ClipSettings(
            video_size=tuple(video_size),
            fps=fps,
            max_num_frames=max_num_frames,
            skip_frms_num=skip_frms_num,
            frame_selection=frame_selection,
            short_clips=short_clips,
            reader=reader,
            keep_decoded_mib=keep_decoded_mib,
        )
        paths, captions, missing, empty = [], [], [], []
        for folder in data_folders(data_dir):
            found = list(find_videos(folder))
            if not found:
                raise ValueError(f"data_dir={folder}: no .mp4 file in it{other_videos(folder)}")
            for path in found:
                label = label_of(path, folder)
                caption = "" if label is None else first_line(label)
                if label is None:
                    missing.append(sat_label(path))
                elif not caption:
                    empty.append(str(label))
                paths.append(path)
                captions.append(caption)
        if not allow_empty_captions:
            _refuse(missing, len(paths), "videos without a label file")
            _refuse(empty, len(paths), "label files without a caption in the first line")
        super().__init__(paths, captions, settings)


class VideoList(CaptionedVideos):
    """The diffusers trainer's layout: <dir>/prompts.txt and <dir>/videos.txt, a line each a sample.

    Paths in videos.txt are relative to it; blank lines count in neither file.
    """

    def __init__(
        self,
        data_dir: DataDir,
        video_size: Sequence[int],
        fps: int,
        max_num_frames: int,
        skip_frms_num: float = 0.0,
        frame_selection: FrameSelection = "timestamp",
        short_clips: ShortClips | None = None,
        caption_column: str = "prompts.txt",
        video_column: str = "videos.txt",
        reader: ReaderName = "auto",
        keep_decoded_mib: int = 0,
    ) -> None:
        settings = ClipSettings(
            video_size=tuple(video_size),
            fps=fps,
            max_num_frames=max_num_frames,
            skip_frms_num=skip_frms_num,
            frame_selection=frame_selection,
            short_clips=short_clips,
            reader=reader,
            keep_decoded_mib=keep_decoded_mib,
        )
        paths, captions = [], []
        for folder in data_folders(data_dir):
            lists = folder / video_column, folder / caption_column
            for key, file in zip(("video_column", "caption_column"), lists, strict=True):
                if not file.is_file():
                    raise ValueError(
                        f"data.params.{key}={file.name}: {file} does not exist; name the list's "
                        "file, one line a sample (folders of videos/ and labels/: VideoFolder)"
                    )
            videos, prompts = (text_lines(file) for file in lists)
            if len(videos) != len(prompts):
                raise ValueError(
                    f"{lists[0]} has {len(videos)} lines and {lists[1]} {len(prompts)}; "
                    "give every video one caption line"
                )
            if not videos:
                raise ValueError(f"{lists[0]}: no video in it")
            paths += [str(lists[0].parent / line) for line in videos]
            captions += prompts
        _refuse([p for p in paths if not os.path.isfile(p)], len(paths), "listed videos missing")
        super().__init__(paths, captions, settings)


def _refuse(files: list[str], num_samples: int, what: str) -> None:
    if files:
        named = ", ".join(files[:_NUM_NAMED]) + (", ..." if len(files) > _NUM_NAMED else "")
        fix = " or set data.params.allow_empty_captions=true" if "label" in what else ""
        raise ValueError(f"{len(files)}/{num_samples} {what}: {named}; add them{fix}")
