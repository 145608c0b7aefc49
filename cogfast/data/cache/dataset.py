"""A data set that reads samples from a latent cache in place of their videos, in the same order."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from cogfast.data.bad_samples import BadSample
from cogfast.data.cache.shards import (
    CacheIndex,
    Spec,
    is_being_written,
    read_row,
    trusted_key,
)
from cogfast.data.cache.source_hashes import Sources, hash_text
from cogfast.data.datasets import CaptionedVideos
from cogfast.data.sources.clip_list import ClipList
from cogfast.schema.values import counted, fits

logger = logging.getLogger(__name__)

_POLL = 0.5  # seconds between checks for a shard
_LOG_AFTER, _LOG_EVERY = 5.0, 60.0  # seconds of waiting before the first and each further log line
_KINDS = ("video", "text")
# Each row must have these: tensors, and numbers beside them.
_TENSORS = {"video": ("mean",), "text": ("embedding",)}
_ABOUT = {"video": ("fps", "num_frames", "num_padded"), "text": ()}
# {key of an item: tensor of a row}; rows need not have all of them.
_STORED = {
    "latent_mean": "mean",
    "latent_logvar": "logvar",
    "images": "first_frame",
    "noised_image_mean": "noised_image_mean",
    "noised_image_logvar": "noised_image_logvar",
}


class CachedVideos(CaptionedVideos):
    """The samples of a data set of video files, as encoded by `cogfast cache`.

    An item is {"latent_mean" [C, T, h, w], "latent_logvar" (if the autoencoder has one), "images"
    uint8 [3, H, W] (the first frame, if cached) or instead "noised_image_mean" [N, C, 1, h, w] and
    "noised_image_logvar", "prompt_embedding" [L, E], "txt", "fps", "num_frames", "path",
    "num_padded"}. Reading an item waits until its shards are written.

    videos: the data set that this one replaces. specs: {"video", "text"}, the specs that the
    entries must have been made with. trusts: take entries from args.trusted_cache, too.
    """

    def __init__(
        self,
        folder: Path,
        videos: CaptionedVideos,
        specs: dict[str, Spec],
        trusts: bool = False,
    ) -> None:
        super().__init__(videos.clips, videos.settings, videos.source_sizes)
        self.folder, self.specs, self.trusts = folder, specs, trusts
        if videos.settings.buckets is not None and videos.clips.buckets is None:
            return  # buckets are not assigned yet; `with_clips` assigns them
        self.used = used_samples(self)
        index, keys, num_changed = self._load_index()
        # Arrays, because reading a Python object in a forked worker copies its memory page.
        self._files: dict[str, list[str]] = {}
        self._places: dict[str, np.ndarray] = {}  # {kind: [n, 2]}: file and row, -1 if not cached
        for kind in _KINDS:
            places = index.places(kind, self.specs[kind], trusts)
            files = {file: i for i, file in enumerate(dict.fromkeys(f for f, _ in places.values()))}
            found = (places.get(key) for key in keys[kind])
            rows = [(-1, -1) if at is None else (files[at[0]], at[1]) for at in found]
            self._files[kind], self._places[kind] = list(files), np.array(rows, dtype=np.int32)
        self._is_there = {
            kind: np.array([(folder / file).exists() for file in files], dtype=bool)
            for kind, files in self._files.items()
        }
        self._check(index, keys, num_changed)

    def with_clips(self, clips: ClipList) -> CachedVideos:
        return CachedVideos(self.folder, super().with_clips(clips), self.specs, self.trusts)

    def __getitem__(self, index: int) -> dict:
        self.wait(index)
        tensors, about = self._read_row("video", index)
        text, _ = self._read_row("text", index)
        if "logvar" in tensors:  # one number for a whole entry of args.trusted_cache
            tensors["logvar"] = tensors["logvar"].expand(tensors["mean"].shape)
        return {
            **{name: tensors[stored] for name, stored in _STORED.items() if stored in tensors},
            "prompt_embedding": text["embedding"],
            "txt": self.captions[index],
            "fps": about["fps"],
            "num_frames": about["num_frames"],
            "path": self.name(index),
            "num_padded": about["num_padded"],
        }

    def first_frame(self, index: int) -> Tensor:
        """Read a sample's conditioning image from its source files, uint8 [3, H, W]."""
        sample = super().__getitem__(index)
        return sample["images"] if self.has_images else sample["video"][0]

    def _read_row(self, kind: str, index: int) -> tuple[dict, dict]:
        from safetensors import SafetensorError

        number, row = self._places[kind][index]
        file = self.folder / self._files[kind][number]
        try:
            tensors, about = read_row(file, int(row))
        except (OSError, SafetensorError, ValueError, IndexError) as error:
            text = f"{file} is damaged ({error}); delete it and run `cogfast cache` again"
            raise BadSample(self.name(index), text) from None
        # `cogfast cache` stores the reason in place of tensors for samples it could not encode.
        if "bad" in about:
            raise BadSample(self.name(index), str(about["bad"])[:300])
        missing = [name for name in _TENSORS[kind] if name not in tensors]
        missing += [name for name in _ABOUT[kind] if not fits(about.get(name), float)]
        if missing:
            text = (
                f"{file} has no {missing[0]} in row {row}; delete it and run `cogfast cache` again"
            )
            raise BadSample(self.name(index), text)
        return tensors, about

    def wait(self, index: int, is_logged: bool = False) -> None:
        """Wait until the sample's shards exist; RuntimeError if no process is writing them."""
        for kind in _KINDS:
            number = int(self._places[kind][index][0])
            if not self._is_there[kind][number]:
                self._wait_for(kind, number, index, is_logged)
                self._is_there[kind][number] = True

    def _wait_for(self, kind: str, number: int, index: int, is_logged: bool) -> None:
        file = self.folder / self._files[kind][number]
        start, next_line = time.monotonic(), _LOG_AFTER
        while not file.exists():
            # Check for the writer first: one that ended just now had written its files before.
            if not is_being_written(self.folder) and not file.exists():
                raise RuntimeError(
                    f"args.latent_cache={self.folder}: {file.name}, for {self.name(index)}, is "
                    "missing, and no `cogfast cache` is writing it; run `cogfast cache` again, which "
                    "resumes"
                )
            waited = time.monotonic() - start
            if is_logged and waited >= next_line:
                next_line += _LOG_EVERY
                logger.info(
                    "waiting for `cogfast cache` since %.0f s: %s with %s (%d of %d such files "
                    "written)",
                    waited,
                    file.name,
                    self.name(index),
                    self._count(kind),
                    len(self._files[kind]),
                )
            time.sleep(_POLL)

    def _count(self, kind: str) -> int:
        return sum((self.folder / file).exists() for file in self._files[kind])

    def _load_index(self) -> tuple[CacheIndex, dict[str, list[str]], int]:
        """Return the index, the samples' keys, and how many videos changed since they were hashed.

        Waits until a running writer has completed the index, which it does before it encodes. The
        specs then say how the clips were encoded, where the configuration asks for "auto".
        """
        # Equal captions share an entry, so their key is the hash of the text alone.
        files, is_logged = source_files(self, self.used), False
        texts = [hash_text(caption) for caption in self.captions]
        while True:
            is_written = is_being_written(self.folder)
            index, sources = CacheIndex.read(self.folder), Sources(self.folder)
            # Files that the writer could not read are bad samples of the cache, not changed ones.
            changed = [f for f in sources.changed(files) if not sources.was_unreadable(f)]
            keys = {"video": _keys(self, sources, set(changed)), "text": texts}
            wanted = {kind: {keys[kind][i] for i in self.used} for kind in _KINDS}
            specs = {
                k: index.settled(k, self.specs[k], wanted[k], trusts=self.trusts) for k in _KINDS
            }
            is_whole = all(
                index.places(k, specs[k], self.trusts).keys() >= wanted[k] for k in _KINDS
            )
            if is_whole or not is_written:
                self.specs = specs
                return index, keys, len(changed)
            if not is_logged:
                logger.info("waiting for `cogfast cache` to hash the videos")
                is_logged = True
            time.sleep(_POLL)

    def _check(self, index: CacheIndex, keys: dict[str, list[str]], num_changed: int) -> None:
        """Raise ValueError if samples are not in the index, or are missing without a writer."""
        total = len(self.used)
        files = {kind: at[self.used, 0] for kind, at in self._places.items()}
        usable = sum((files["video"] >= 0) & (files["text"] >= 0))
        if usable < total:
            differences = [index.difference(kind, self.specs[kind]) for kind in _KINDS]
            why = "; ".join(text for text in dict.fromkeys(differences) if text)
            if not index.shards:
                why = "the folder has no cache"
            elif not why:
                changed = f"{counted(num_changed, 'video')} changed or moved since caching"
                why = changed if num_changed else "new captions"
                if self._has_trusted(index, keys):
                    why = "the rest comes from a trusted cache, and args.trusted_cache is not set"
            raise ValueError(
                f"args.latent_cache={self.folder}: {why}: {usable} of {total} usable; run "
                "`cogfast cache` again with this configuration"
            )
        is_there = np.all([self._is_there[kind][files[kind]] for kind in _KINDS], axis=0)
        missing = total - sum(is_there)
        if missing and not is_being_written(self.folder):
            raise ValueError(
                f"args.latent_cache={self.folder}: encoded only {total - missing} of "
                f"{counted(total, 'sample')}, and no `cogfast cache` is running; run it again, which "
                "resumes"
            )
        if missing:
            logger.info("still being encoded: %d of %s", missing, counted(total, "sample"))

    def _has_trusted(self, index: CacheIndex, keys: dict[str, list[str]]) -> bool:
        """Whether samples have entries from args.trusted_cache, which this run does not use."""
        if self.trusts:
            return False
        for kind in _KINDS:
            places = index.places(kind, self.specs[kind])
            left = (i for i in self.used if self._places[kind][i, 0] < 0)
            if any(trusted_key(keys[kind][i]) in places for i in left):
                return True
        return False


def _keys(videos: CaptionedVideos, sources: Sources, changed: set[str]) -> list[str]:
    """Cache key of every sample; "" where the file changed since it was hashed."""
    keys = [""] * len(videos)
    for index in used_samples(videos):
        if changed.isdisjoint(source_files(videos, [index])):
            keys[index] = sample_key(videos, index, sources)
    return keys


def used_samples(videos: CaptionedVideos) -> list[int]:
    """The samples that training can ask for: weight above 0, and assigned to a bucket."""
    clips = videos.clips
    is_used = np.ones(len(videos), dtype=bool)
    if clips.weights is not None:
        is_used &= clips.weights > 0
    if clips.buckets is not None:
        is_used &= clips.buckets >= 0
    return np.flatnonzero(is_used).tolist()


def source_files(videos: CaptionedVideos, indices: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The files that samples are read from: {file: (offset, bytes) in a tar shard, else ()}."""
    clips, found = videos.clips, {}
    for index in indices:
        # Offset and bytes of the video, then of the image; -1 for none.
        at = [-1] * 4 if clips.places is None else clips.places[index].tolist()
        found[clips.files[index]] = tuple(at[:2]) if at[0] >= 0 else ()
        image = _image_of(clips, index)
        if image is not None:
            found[image] = tuple(at[2:]) if at[0] >= 0 and at[2] >= 0 else ()
    return found


def _image_of(clips: ClipList, index: int) -> str | None:
    """The sample's conditioning image, a file or a member of a tar shard; None if it has none."""
    if clips.places is not None and min(clips.places[index, [0, 2]]) >= 0:
        return clips.files[index] + "::image"
    return None if clips.images is None else clips.images[index] or None


def sample_key(videos: CaptionedVideos, index: int, sources: Sources) -> str:
    """The cache key of a sample: a hash of its file's content and of its own settings."""
    clips, settings, common = videos.clips, videos.settings_of(index), videos.settings
    content = sources.recorded(clips.files[index])
    # Settings common to all samples are in the spec; only deviations from them are hashed here.
    own: dict[str, object] = {}
    if clips.spans is not None and not np.isnan(clips.spans[index]).all():
        own["span"] = [str(second) for second in clips.spans[index]]
    for name in ("fps", "max_num_frames", "video_size"):
        # With buckets the common size is only what evaluations sample, so it is not in the spec.
        is_buckets = common.buckets is not None and name != "fps"
        if is_buckets or getattr(settings, name) != getattr(common, name):
            own[name] = str(getattr(settings, name))
    image = _image_of(clips, index)
    if image is not None:
        own["image"] = sources.recorded(image)
    # Copies of a file, even in different data sets, share an entry.
    return hash_text(json.dumps([content, own], sort_keys=True)) if own else content
