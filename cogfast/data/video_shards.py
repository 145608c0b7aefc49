"""The data set of tar shards, SAT's VideoDataset, read by index like every other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cogfast.data.datasets import Buckets, ListedVideos
from cogfast.data.sources.clip_list import ClipList, join
from cogfast.data.sources.folders import ADD_CAPTIONS, DataDir, data_sources, refuse_samples
from cogfast.data.sources.tar_shards import list_shard, shards_of
from cogfast.data.video.dali import VideoBackend
from cogfast.data.video.settings import (
    FramesPerSecond,
    Mebibytes,
    NumFrames,
    ShortClips,
    Side,
    SkippedFrames,
)
from cogfast.data.video.transform import FrameSelection


class VideoShards(ListedVideos):
    """Samples in tar files (tar_shards.py says how).

    data_dir: folders of .tar files, or their names, with a-{000..099}.tar for many and a scheme
    such as s3:// for what fsspec opens; as in SAT, ";A,B*2" means the folders A and, twice, B.
    caption_key: SAT's txt_key. image_key: the kind of the members that hold the first frame, png say.
    """

    def __init__(
        self,
        data_dir: DataDir,
        video_size: Sequence[Side],
        fps: FramesPerSecond,
        max_num_frames: NumFrames,
        skip_frms_num: SkippedFrames = 0.0,
        frame_selection: FrameSelection = "timestamp",
        short_clips: ShortClips | None = None,
        allow_empty_captions: bool = False,
        video_backend: VideoBackend = "auto",
        keep_decoded_mib: Mebibytes = 0,
        buckets: Buckets | None = None,
        caption_key: str = "caption",
        image_key: str | None = None,
    ) -> None:
        self._caption_key, self._image_key = caption_key, image_key
        super().__init__(
            data_dir,
            video_size,
            fps,
            max_num_frames,
            skip_frms_num=skip_frms_num,
            frame_selection=frame_selection,
            short_clips=short_clips,
            allow_empty_captions=allow_empty_captions,
            video_backend=video_backend,
            keep_decoded_mib=keep_decoded_mib,
            buckets=buckets,
        )

    def find(self, data_dir: DataDir, allow_empty_captions: bool) -> list[ClipList]:
        lists = []
        for source in data_sources(data_dir):
            shards = [shard for name in _folders(source) for shard in shards_of(name)]
            parts = [list_shard(shard, self._caption_key, self._image_key) for shard in shards]
            lists.append(join(parts))
        if not allow_empty_captions:
            empty = [
                file
                for clips in lists
                for file, text in zip(clips.files, clips.captions, strict=True)
                if not text
            ]
            what = f"samples without a caption (caption_key={self._caption_key})"
            refuse_samples(empty, sum(map(len, lists)), what, ADD_CAPTIONS)
        return lists


def _folders(source: str) -> list[str]:
    """SAT's pattern;A,B*2 -> pattern, A, B, B."""
    pattern, semicolon, folders = source.partition(";")
    names = [pattern] if pattern else []
    for folder in folders.split(",") if semicolon else []:
        name, star, times = folder.partition("*")
        if not Path(name).is_dir() or (star and not times.isdigit()):
            raise ValueError(f"data_dir={source}: no folder {folder}; after ; come A,B*2")
        names += [name] * (int(times) if star else 1)
    return names
