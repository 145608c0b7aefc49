"""Data sets of captioned videos: SAT's folders, lists, manifests and tar shards.

Every data set returns the same `Sample`, and raises BadSample for a file that cannot be used. Files are
listed and captions are read once, in the constructor.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import compress
from pathlib import Path
from typing import Annotated, Any, ClassVar, NotRequired, Protocol, Self, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

import cogfast.extensions.stores.store as store
from cogfast.core.values import Range, counted, cut
from cogfast.data.bad_samples import BadSample
from cogfast.data.global_order import GlobalOrder
from cogfast.data.sources import folders
from cogfast.data.sources.arrays import KEY, Shapes, checked_shapes, open_array, values_of
from cogfast.data.sources.clip_list import ClipList, PackedStrings, file_of, join, member_of
from cogfast.data.sources.folders import ADD_CAPTIONS, DataDir, SourceError, refuse_samples
from cogfast.data.sources.lists import read_lists
from cogfast.data.sources.manifest import is_manifest, manifest_of, read_manifest, table_hint
from cogfast.data.video.clip import (
    Bucket,
    ClipSettings,
    ShortClips,
    VideoBackend,
    named_bytes,
    on_readers_device,
    read_clip,
    read_image,
)
from cogfast.data.video.transform import FrameSelection, Resize, Selection
from cogfast.extensions.stores.store import StoreError, Versions
from cogfast.extensions.table import hook

logger = logging.getLogger(__name__)

# Limits of data.params; what a model accepts is checked against the model.
Side = Annotated[int, Range(1, 2**16)]  # rows, columns, or frames of a bucket
FindOnce = Callable[[Callable[[], list[ClipList]]], list[ClipList]]
_LONGEST_EPOCH = 2**31  # samples; sums of weights are rounded too much above


class SizedDataset(Protocol):
    """A data set with a length: cogfast's, a user's own class, or a torch Subset of one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Sample(TypedDict):
    """A clip with what its source gives. Tensors of data.params.tensors have their names, and are float32."""

    video: Tensor  # uint8 [F, 3, H, W], of a picture with F = 1
    images: NotRequired[Tensor]  # uint8 [3, H, W], its own first frame
    control: NotRequired[Tensor]  # uint8 [F, 3, H, W], the same frames of the control video
    mask: NotRequired[Tensor]  # uint8 [F, 1, H, W], 1 where the mask is white
    prior: NotRequired[bool]  # if any sample of the data set has the base model as target
    txt: str
    fps: float
    num_frames: int  # before padding
    path: str
    num_padded: int


class CaptionedVideos(Dataset):
    """Video files with one caption each, read as `settings` says.

    source_sizes: number of samples per source; `clips` lists the sources one after the other.
    """

    def __init__(
        self, clips: ClipList, settings: ClipSettings, source_sizes: Sequence[int] = ()
    ) -> None:
        self.clips = clips
        self.settings = settings
        self.source_sizes = tuple(source_sizes)
        self.is_cached = False  # whether samples are read as latents, and no video is decoded
        self.encode_chunks: Any = None  # with which cogfast's autoencoder has encoded them
        # The samples' further videos by name, which are read as the clips are.
        self.others: dict[str, CaptionedVideos] = {}
        for name, files in clips.others.items():
            if files.shape is None:
                one = replace(clips, files=files.files, places=files.places, images=None, others={})
                self.others[name] = CaptionedVideos(one, settings)
        # Samples that can be read but are bad: {number: why}
        self.refused: Mapping[int, str] = {}
        # Every reading process keeps its own clips, in its copy of the data set.
        self._kept: dict[int, Sample] = {}
        self._budget = settings.keep_decoded_mib * 2**20  # bytes left for self._kept

    @property
    def paths(self) -> PackedStrings:
        return self.clips.files

    @property
    def captions(self) -> PackedStrings:
        return self.clips.captions

    @property
    def encoded(self) -> dict[str, CaptionedVideos]:
        """The videos that a latent cache holds, by name: the clips and, where there are any, their controls."""
        others = {name: other for name, other in self.others.items() if name != "mask"}
        return {"video": self, **others}

    def with_clips(self, clips: ClipList) -> CaptionedVideos:
        """Return this data set with `clips` as its samples."""
        # A subset no longer lists the sources as consecutive ranges.
        sizes = self.source_sizes if len(clips) == len(self) else ()
        return CaptionedVideos(clips, self.settings, sizes)

    def part(self, indices: Sequence[int]) -> CaptionedVideos:
        return self.with_clips(self.clips.take(indices))

    def with_source_weights(self, weights: Sequence[float]) -> CaptionedVideos:
        """Multiply each sample's weight by that of its source."""
        old = 1.0 if self.clips.weights is None else self.clips.weights
        new = np.repeat(weights, self.source_sizes) * old
        return self.with_clips(replace(self.clips, weights=new))

    def order(self, seed: int, global_batch: int) -> GlobalOrder:
        """The reading order of the samples, given their weights and buckets."""
        clips = self.clips
        total = len(clips) if clips.weights is None else float(clips.weights.sum())
        if len(clips) and not 0 < total < _LONGEST_EPOCH:
            text = f"the weights of {counted(len(clips), 'sample')} add up to {total:g}, the length of an epoch, "
            text += f"which must be above 0 and below {_LONGEST_EPOCH}; change args.train_data_weights or the "
            raise ValueError(f"{text}manifest's column weight")
        times = self.settings.batches
        return GlobalOrder(len(clips), seed, global_batch, clips.weights, clips.buckets, times)

    def name(self, index: int) -> str:
        """The sample's name in logs: its file, plus `#t=start,end` for a part of it."""
        file = self.clips.files[index]
        if self.clips.spans is None or np.isnan(self.clips.spans[index]).all():
            return file
        start, end = ("" if np.isnan(x) else f"{x:g}" for x in self.clips.spans[index])
        return f"{file}#t={start},{end}"  # as W3C's media fragments

    def settings_of(self, index: int) -> ClipSettings:
        """The sample's settings: the size of its bucket and, if it has one, its own frame rate."""
        sizes, clips = self.settings.sizes, self.clips
        bucket = sizes[0 if clips.buckets is None else int(clips.buckets[index])]
        return self.settings_at_own_rate(index).for_bucket(bucket)

    def settings_at_own_rate(self, index: int) -> ClipSettings:
        """The common settings with the sample's own frame rate, if it has one."""
        fps = np.nan if self.clips.fps is None else self.clips.fps[index]
        return self.settings if np.isnan(fps) else replace(self.settings, fps=float(fps))

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Return a Sample; a subclass may return other keys."""
        if index in self.refused:
            raise BadSample(self.name(index), self.refused[index])
        if index in self._kept:
            # A copy, so that a caller that adds keys does not change the kept sample.
            return self._kept[index].copy()
        try:
            with on_readers_device(self.settings.video_backend):
                sample = self._read(index)
        except BadSample as error:
            # Readers know only the file; logs also need the part of it.
            reason = error.reason.removeprefix(f"{self.clips.files[index]}: ")
            raise type(error)(self.name(index), reason) from None
        # Kept clips are never replaced: every epoch reads every clip once, so a different subset
        # would not be read more often.
        num_bytes = sum(v.nbytes for v in sample.values() if isinstance(v, Tensor))
        if num_bytes <= self._budget:
            self._budget -= num_bytes
            self._kept[index] = sample.copy()
        return sample

    def fetch(self, indices: Sequence[int], names: Collection[str] | None = None) -> None:
        """Copy files of samples from their stores, many at once; faults show later. names: of further files alone."""
        others = self.clips.others
        lists = [self.clips, *others.values()] if names is None else [others[n] for n in names]

        def copy(index: int) -> None:
            for one in lists:
                file, member = one.files[index], member_of(one, index)
                self.clips.prefetch(file_of(file, member), member)

        list(store.in_threads(copy, indices))

    def read_video(self, name: str, index: int, bucket: Bucket) -> Tensor:
        """Read the "video" of a sample, another one or its mask, at another size, [F, C, H, W] as in a Sample.
        The last frame of a shorter one is repeated."""
        settings = replace(self.settings_at_own_rate(index).for_bucket(bucket), short_clips="pad")
        with on_readers_device(self.settings.video_backend):
            if name == "video":
                return self._decode(index, settings)[0]
            return self._other(name, index, settings, None)

    def read_tensors(self, index: int, are_headers_enough: bool = False) -> dict[str, Tensor]:
        """Read the tensors of a sample, float32, by name. are_headers_enough: only check them."""
        found = {}
        for name, one in self.clips.others.items():
            file = one.files[index]
            # In a store a header would be a request for each sample.
            if one.shape and not (are_headers_enough and store.is_url(file)):
                array = open_array(name, file, one.shape, self.clips.local)
                found |= {} if are_headers_enough else {name: values_of(array, name, file)}
        return found

    def _decode(self, index: int, settings: ClipSettings) -> tuple[Tensor, Selection]:
        """Read the clip of a sample, uint8 [F, 3, H, W], and which frames of its file it has."""
        clips, file = self.clips, self.clips.files[index]
        span = None if clips.spans is None else tuple(clips.spans[index])
        if (member := member_of(clips, index)) is None:
            return read_clip(clips.local(file), settings, span)
        # Video libraries take paths, so the member's bytes get a temporary one.
        with named_bytes(clips.read_member(file, member), os.path.splitext(file)[1]) as path:
            return read_clip(path, settings, span)

    def _read(self, index: int) -> Sample:
        clips, settings = self.clips, self.settings_of(index)
        clip, selection = self._decode(index, settings)
        sample: Sample = {
            "video": clip,
            "txt": clips.captions[index],
            "fps": settings.fps,
            "num_frames": selection.num_frames,
            "path": self.name(index),
            "num_padded": selection.num_padded,
        }
        if clips.images is not None:
            # A sample without a conditioning image of its own takes its first frame.
            image, size = clips.local(clips.images[index]), settings.video_size
            picture = read_image(image, size, settings.resize) if image else clip[0].clone()
            sample["images"] = picture.to(clip.device)
        if "control" in self.others:
            sample["control"] = self._other("control", index, settings, selection)
        if "mask" in self.others:
            mask = self._other("mask", index, settings, selection)
            sample["mask"] = mask.to(clip.device)  # one that is missing has none
        if clips.prior is not None:
            sample["prior"] = bool(clips.prior[index])
        further: Any = self.read_tensors(index)
        return sample | further

    def _other(
        self, name: str, index: int, settings: ClipSettings, of_clip: Selection | None
    ) -> Tensor:
        """Read a further video, uint8 [F, 3, H, W], or a mask [F, 1, H, W]. of_clip: the frames of the clip."""
        videos = self.others[name]
        file = videos.paths[index]
        shape = (settings.max_num_frames, 3, *settings.video_size)
        if not file:
            # Only masks may be missing: the whole clip is within such a mask.
            return torch.ones(shape, dtype=torch.uint8)[:, :1]
        try:
            if name == "mask" and folders.is_picture(file):  # that of all frames
                one = settings.for_bucket(Bucket(1, *settings.video_size))
                video, own = videos._decode(index, one)[0].expand(shape), None
            else:
                video, own = videos._decode(index, settings)
        except BadSample as error:
            raise type(error)(file, f"its {name} {file}: {error.reason}") from None
        if own and of_clip and not np.array_equal(own.indices, of_clip.indices):
            fix = "give one of the same length and frame rate"
            raise BadSample(file, f"its {name} {file} has other frames than the clip; {fix}")
        return video if name == "control" else mask_of(video, file, f"its mask {file}")


def mask_of(video: Tensor, file: str, called: str) -> Tensor:
    """Return a mask [F, 1, H, W] of 0 and 1 from the frames of its file, uint8 [F, 3, H, W].

    called: how the reason of a BadSample calls the file."""
    mask = (video.sum(dim=1, keepdim=True, dtype=torch.int32) > 3 * 127).to(torch.uint8)
    if (whole := mask.float().mean()) in (0, 1):  # sync: with DALI, beside the training
        color = "white" if whole else "black"
        fix = "its white part is what is trained or made; draw it, or leave the mask out"
        raise BadSample(file, f"{called} is {color} in all frames; {fix}")
    return mask


@dataclass(eq=False, repr=False)
class ListedVideos(CaptionedVideos, ABC):
    """Base class of data sets that list their samples with `find`, one list per source.

    Its fields are `data.params` of the YAML, with their meanings above them, as docs/options.md has
    them; a subclass that is a dataclass too adds its own.
    has_pictures: whether pictures are trained on, for `find`.
    reads_pixels: whether items are decoded from video files as data.params describes. Then sizes
    are checked before training, and a latent cache can replace the files. A subclass that returns
    anything else sets it to False.
    """

    # the sources; set by the trainer to args.train_data or args.valid_data
    data_dir: DataDir
    # rows and columns in pixels that a clip is resized to, such as [480, 720]
    video_size: Sequence[Side]
    # frames per second that clips are read at
    fps: Annotated[float, Range(0.01, 1000)]
    # frames of a clip: 8N+1
    max_num_frames: Annotated[int, Range(1, 10**5)]
    # frames of a video that are left out at each end, or fewer if it would be too short otherwise
    skip_frms_num: Annotated[float, Range(0, 10**6)] = 0.0
    # timestamp: the frames at the times that fps gives; sat: SAT's rule, whose speed varies with the
    # file; uniform: spread over the whole video, as CogVideo's diffusers trainer does
    frame_selection: FrameSelection = "timestamp"
    # skip: report a video that is too short as bad; pad: repeat its last frame. null: skip with
    # timestamp (a frozen end teaches the model to stop moving), pad with sat and uniform
    short_clips: ShortClips | None = None
    # crop: scale to cover video_size and crop the centre, as SAT does; stretch: squeeze the picture to
    # video_size, as CogVideo's diffusers trainer does
    resize: Resize = "crop"
    # accept samples without a caption
    allow_empty_captions: bool = False
    # dali: decode in the training process, on its GPU, and use PyAV for files that DALI cannot read;
    # pyav, decord: decode in reading processes; auto: dali if it can run, else pyav
    video_backend: VideoBackend = "auto"
    # size of the decoded clips that each reading process keeps for later epochs (with DALI in GPU
    # memory), for data sets so small that decoding would slow training down
    keep_decoded_mib: Annotated[int, Range(0, 2**24)] = 0
    # sizes [frames, rows, columns] in place of max_num_frames and video_size; each clip gets the one
    # that keeps most of it. Pictures are trained on if there is a size of one frame, which only they get
    buckets: list[list[Side]] | None = None
    # for each of the buckets, by what args.batch_size is multiplied in its steps, such as [1, 11] for
    # clips and pictures; null: by 1
    bucket_batch: list[Annotated[int, Range(1, 4096)]] | None = None
    # {name: shape} of further tensors of each sample, such as {flow: [2, 13, 60, 90]}: a column of a manifest
    # with this name lists .npy files of this shape, which networks and trainers of your own get as float32
    tensors: Shapes | None = None
    # do not look at each start whether video files have changed since their headers were read, which takes
    # long for millions of files
    trust_index: bool = False
    reads_pixels: ClassVar[bool] = True

    @classmethod
    def listed_by(cls, find_once: FindOnce, **params: Any) -> Self:
        """Make a data set of `params` whose `find` is called by `find_once`, such as ProcessGroups.on_main: then
        one rank lists the files for all."""
        made = cls.__new__(cls)
        vars(made)["_find_once"] = find_once
        made.__init__(**params)
        return made

    def __post_init__(self) -> None:
        settings = ClipSettings(**{f.name: getattr(self, f.name) for f in fields(ClipSettings)})
        self.has_pictures = bool(settings.picture_buckets)
        shapes = checked_shapes(self.tensors)
        if shapes and self.buckets:
            raise ValueError(f"{KEY} gives one shape for all samples; remove data.params.buckets")
        try:
            # It is not kept: data sets are sent to reading processes.
            find_once = vars(self).pop("_find_once", lambda find: find())
            lists = find_once(lambda: self.find(self.data_dir, self.allow_empty_captions))
        except StoreError as error:
            raise SourceError(str(error)) from None
        if any(not shapes.keys() <= one.others.keys() for one in lists):
            text = f"{KEY}: {type(self).__name__} lists no {', '.join(shapes)}; give a manifest with a column "
            raise ValueError(f"{text}for each (data.target=cogfast.data.datasets.VideoManifest)")
        super().__init__(join(lists), settings, [len(one) for one in lists])

    @abstractmethod
    def find(self, data_dir: DataDir, allow_empty_captions: bool) -> list[ClipList]:
        """List the samples of each source of `data_dir`."""

    @staticmethod
    def missing_source(key: str, source: str) -> str | None:
        """Return an error message if `source` of the config key `key` does not exist, else None.

        Called before anything is built. By default, sources are not checked.
        """
        return None


def _missing_folder(key: str, source: str) -> str | None:
    is_table = is_manifest(source)
    if source.startswith("http") and not is_table:
        return folders.no_source(key, "folder", source)
    if store.is_url(source) and not is_table:
        found = store.list_folder(source)
        is_file, is_folder = [*found] == [source], bool(found)
    else:
        is_file = bool(source) and store.exists(source)
        is_folder = bool(source) and Path(source).is_dir()
    if is_file:
        fix = "set data.target=cogfast.data.datasets.VideoManifest, which reads it"
        fix = fix if is_table else "a manifest (.csv, .jsonl or .json)"
        return f"{key}: {cut(source, 160)} is a file; give folders of videos, or {fix}"
    return None if is_folder else folders.no_source(key, "file" if is_table else "folder", source)


class VideoFolder(ListedVideos):
    """SAT's layout: <dir>/**/videos/x.mp4 with a one-line caption in <dir>/**/labels/x.txt.

    Follows sat/data_video.SFTDataset: takes every .mp4 or .MP4 below `data_dir`. The path of its
    label has "labels" in place of "videos" and .txt in place of .mp4 (so x.txt beside x.mp4 works).
    """

    missing_source = staticmethod(_missing_folder)

    def find(self, data_dir: DataDir, allow_empty_captions: bool) -> list[ClipList]:
        lists, missing, empty = [], [], []
        for folder in (dirs := folders.data_folders(data_dir)):
            files = folders.list_files(folder)
            found = folders.find_videos(files, folder, self.has_pictures)
            if not found:
                more = table_hint(folder) or folders.in_place_of_videos(files)
                what = "no .mp4 file and no picture" if self.has_pictures else "no .mp4 file"
                raise SourceError(f"{folder}: {what} in it{more}")
            each = folders.read_labels(found, folder, files)
            labels, captions, has_more = zip(*each, strict=True)
            pairs = [*zip(found, labels, captions, strict=True)]
            missing += [folders.sat_label(path) for path, label, _ in pairs if label is None]
            empty += [label for _, label, caption in pairs if label and not caption]
            versions = Versions({path: about for path in found if (about := files[path])})
            texts = PackedStrings(captions)
            lists.append(ClipList(files=PackedStrings(found), captions=texts, versions=versions))
            # SAT reads the first line only; a longer file may be meant otherwise.
            if longer := [*compress(labels, has_more)]:
                number = counted(len(longer), "label file")
                text = "%s: only the first line is read of %s with several lines: %s"
                logger.warning(text, folder, number, folders.named(longer))
        if not allow_empty_captions:
            number, fix = sum(map(len, lists)), "".join(sorted({*map(table_hint, dirs)}))
            refuse_samples(missing, number, "videos without a label file", ADD_CAPTIONS + fix)
            what = "label files without a caption in the first line"
            refuse_samples(empty, number, what, ADD_CAPTIONS)
        return lists


class VideoManifest(ListedVideos):
    """Samples listed in .csv or .jsonl files, in the formats that manifest.py describes.

    data_dir: such files, or folders with a file named metadata.
    """

    @staticmethod
    def missing_source(key: str, source: str) -> str | None:
        try:
            is_there = source and store.exists(manifest_of(source))
        except SourceError as error:
            return f"{key}={error}"
        except ValueError as error:
            return f"{key}: {error}"
        return None if is_there else folders.no_source(key, "file", source)

    def find(self, data_dir: DataDir, allow_empty_captions: bool) -> list[ClipList]:
        given = (allow_empty_captions, self.has_pictures, checked_shapes(self.tensors))
        return [read_manifest(file, *given) for file in folders.data_sources(data_dir)]


@dataclass(eq=False, repr=False)
class VideoList(ListedVideos):
    """The diffusers trainer's layout: <dir>/prompts.txt and <dir>/videos.txt, one sample per line.

    Paths in videos.txt are relative to that file. Blank lines are skipped in both files, except
    for empty captions where these are allowed.
    """

    missing_source = staticmethod(_missing_folder)

    # file with a caption per line
    caption_column: str = "prompts.txt"
    # file with the path of a video per line
    video_column: str = "videos.txt"
    # file with the path of a first frame per line, such as images.txt
    image_column: str | None = None
    # file with the path of a control video per line, for models with model.conditions: [control]; it is
    # read if it is there
    control_column: str = "controls.txt"
    # file with the path of a mask per line, a video or a picture; it is read if it is there
    mask_column: str = "masks.txt"

    def find(self, data_dir: DataDir, allow_empty_captions: bool) -> list[ClipList]:
        columns = {"video_column": self.video_column, "caption_column": self.caption_column}
        columns |= {} if self.image_column is None else {"image_column": self.image_column}
        others, lists = {"control_column": self.control_column, "mask_column": self.mask_column}, []
        for folder in folders.data_folders(data_dir):
            files = {key: store.join(folder, name) for key, name in (columns | others).items()}
            files = {k: f for k, f in files.items() if k in columns or store.exists(f)}
            lists.append(read_lists(files, allow_empty_captions))
        return lists


@dataclass(eq=False, repr=False)
class VideoShards(ListedVideos):
    """Samples in tar files, in the format that tar_shards.py describes.

    data_dir: folders of .tar files, or names of .tar files; a-{000..099}.tar names many. As in SAT,
    ";A,B*2" means folder A once and folder B twice.
    """

    # key of the caption; SAT's txt_key
    caption_key: str = "caption"

    @staticmethod
    def missing_source(key: str, source: str) -> str | None:
        return hook("missing_shard")(key, source)  # as above

    def find(self, data_dir: DataDir, allow_empty_captions: bool) -> list[ClipList]:
        # (source, caption_key, has_pictures) -> ClipList
        list_source, given = hook("list_shards"), (self.caption_key, self.has_pictures)
        lists = [list_source(source, *given) for source in folders.data_sources(data_dir)]
        if not allow_empty_captions:
            samples = (each for one in lists for each in zip(one.files, one.captions, strict=True))
            empty = [file for file, text in samples if not text]
            what = f"samples without a caption (caption_key={self.caption_key})"
            refuse_samples(empty, sum(map(len, lists)), what, ADD_CAPTIONS)
        return lists
