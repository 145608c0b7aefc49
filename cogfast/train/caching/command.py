"""`cogfast cache`: encodes all clips and captions of a data set once, on any number of ranks.

Rank 0 lists which entries are missing. They are divided among the ranks, each of which writes its own.
"""

from __future__ import annotations

import dataclasses
import errno
import gc
import logging
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from cogfast.config import Config
from cogfast.config.arguments import TrainArguments
from cogfast.config.values import counted
from cogfast.core.files import WriteError
from cogfast.data.bad_samples import BadSample, BadSampleLog
from cogfast.data.batches import in_unit_range, read_sample
from cogfast.data.cache.entries import ENCODE_CHUNKS, Entries, Spec, difference, find_entries
from cogfast.data.cache.keys import (
    Sources,
    hash_files,
    hash_text,
    sample_key,
    source_files,
    used_samples,
)
from cogfast.data.datasets import CaptionedVideos, Sample
from cogfast.data.video.dali import dali_of_this_process
from cogfast.data.workers.read_ahead import Reads, read_ahead
from cogfast.distributed.process_groups import ProcessGroups, start_processes
from cogfast.distributed.stop_signals import keeping
from cogfast.model.autoencoder import ENCODE_MODES, EncodePlan, VideoAutoencoder
from cogfast.model.transformer import build_transformer
from cogfast.train.assembly import DTYPES, assemble_datasets, assemble_encoder
from cogfast.train.caching.cache_key import cache_specs
from cogfast.train.caching.clip_entries import content_random, encode_clips
from cogfast.train.caching.encode_choice import largest_clips, log_plan, memory_for_clips
from cogfast.train.caching.trusted import TrustedCache, TrustedFile
from cogfast.train.encode import NO_OVERRIDES, EncodeOverrides, Encoder
from cogfast.train.preflight.header_scan import survey_datasets

logger = logging.getLogger(__name__)

_CAPTIONS_AT_ONCE = 8
_HASHED_AT_ONCE = 256  # files per rank; a kill loses this much work
_SECONDS_PER_LINE = 30.0  # between log lines of progress


def cache_latents(config: Config) -> None:
    """Encode all samples of args.train_data and args.valid_data into args.latent_cache."""
    args = TrainArguments.from_config(config)
    groups = start_processes()
    _fill(config, args, groups, "`cogfast cache`", NO_OVERRIDES)
    groups.close()


def encode_first(
    config: Config, args: TrainArguments, groups: ProcessGroups, overrides: EncodeOverrides
) -> None:
    """Fill args.latent_cache as `cogfast cache` does, and free the memory of the encoders."""
    kept = (
        f"; the entries that are complete are kept in {args.latent_cache}, and the same command "
        "continues from there"
    )
    # Each rank encodes other clips, also the ranks that share a model later.
    with keeping(kept):
        _fill(config, args, groups.without_models(), "the same command", overrides)
    gc.collect()  # sync: none; the encoders are in cycles that only a collection frees
    if groups.device.type == "cuda":
        torch.cuda.empty_cache()  # sync: once, before training begins


def _fill(
    config: Config,
    args: TrainArguments,
    groups: ProcessGroups,
    command: str,
    overrides: EncodeOverrides,
) -> None:
    try:
        _CacheRun(config, args, groups, overrides).run()
    except WriteError as error:
        raise RuntimeError(
            f"args.latent_cache: {error}; what is encoded is kept: free disk space and run {command} "
            "again, which continues from there"
        ) from None


@dataclasses.dataclass(frozen=True, slots=True)
class _Clip:
    """A sample of a data set."""

    dataset: CaptionedVideos
    index: int

    @property
    def name(self) -> str:
        return self.dataset.name(self.index)

    @property
    def caption(self) -> str:
        return self.dataset.captions[self.index]

    @property
    def bucket(self) -> int:
        buckets = self.dataset.clips.buckets
        return 0 if buckets is None else int(buckets[self.index])


@dataclasses.dataclass(frozen=True, slots=True)
class _Missing:
    """An entry to write. clip: number of the first sample that needs it."""

    key: str
    clip: int
    theirs: TrustedFile | None  # in args.trusted_cache


@dataclasses.dataclass(frozen=True, slots=True)
class _Work:
    """The entries of one kind to write, and where: the second place is for args.trusted_cache."""

    entries: list[Entries]
    missing: list[_Missing]

    def is_done(self, one: _Missing) -> bool:
        """Whether another `cogfast cache` has written the entry since."""
        return any(entries.has(one.key) for entries in self.entries)


# For each batch: what was encoded, where it is written, and the tensors, or why there are none.
_Encoded = Iterator[list[tuple[_Missing, Entries, "dict[str, Tensor] | BadSample"]]]


class _CacheRun:
    """One run of the command on one rank."""

    def __init__(
        self,
        config: Config,
        args: TrainArguments,
        groups: ProcessGroups,
        overrides: EncodeOverrides,
    ) -> None:
        assert args.latent_cache is not None, "preflight asks for a folder"
        self.config, self.args, self.groups, self.overrides = config, args, groups, overrides
        self.folder = Path(args.latent_cache)
        groups.on_main(lambda: _create(self.folder))
        # The videos, and not the cache that this command fills.
        of_videos = dataclasses.replace(args, latent_cache=None)
        found, _ = survey_datasets(assemble_datasets(config, of_videos), of_videos, groups, 1)
        self.datasets = [d for d in (found.train, found.valid) if isinstance(d, CaptionedVideos)]
        self.clips = [_Clip(videos, i) for videos in self.datasets for i in used_samples(videos)]
        self.keys: dict[str, list[str]] = {}  # of the clips, by kind; rank 0 alone has them
        self.trusted: TrustedCache | None = None
        if args.trusted_cache is not None:
            dtype = DTYPES[args.precision]
            self.trusted = TrustedCache(args.trusted_cache, config, dtype, self.datasets)
        self.how: EncodePlan | None = None  # to encode clips; None: nothing to choose
        self.bad = BadSampleLog(None, len(self.clips), args.max_bad_fraction)

    def run(self) -> None:
        sources = self._hash_sources()
        # Measured before anything is loaded. What fits into the least free memory fits on all ranks.
        budget = min(self.groups.gather(memory_for_clips(self.args, self.groups)))
        texts, clips, self.how = self.groups.on_main(lambda: self._find_missing(sources, budget))
        # Launches that share no ranks begin at different places, so that they share the work.
        turn = self.groups.broadcast(random.getrandbits(30))
        self._encode("caption", texts, _CAPTIONS_AT_ONCE, turn)
        self._encode("clip", clips, self.args.batch_size, turn)
        self.groups.on_main(lambda: self._finish(texts, clips))

    def _hash_sources(self) -> Sources:
        """Hash all videos. Each rank reads a part of the files that may have changed."""
        sources, files = Sources(self.folder), {}
        for videos in self.datasets:
            files |= source_files(videos, used_samples(videos))
        # Rank 0's list: with own copies of the files, each rank would take part in other rounds.
        stale = self.groups.on_main(lambda: [*sources.changed(files), *sources.unreadable(files)])
        if stale:
            logger.info("hashing %s", counted(len(stale), "new or changed video"))
        at_once = _HASHED_AT_ONCE * self.groups.world_size
        for start in range(0, len(stale), at_once):
            # Every rank takes part in each round, since the gather below needs all of them.
            mine = stale[start : start + at_once][self.groups.rank :: self.groups.world_size]
            found = self.groups.gather(hash_files(mine, files))
            self.groups.on_main(lambda: [sources.add(of_rank) for of_rank in found])  # noqa: B023
        return sources

    def _find_missing(
        self, sources: Sources, budget: int
    ) -> tuple[_Work, _Work, EncodePlan | None]:
        """Return the missing captions and clips, and how to encode the clips. For rank 0."""
        # Both data sets have one data section, so one description of clips serves all entries.
        settings = self.datasets[0].settings
        specs = cache_specs(self.config, self.args, settings, sources, self.overrides)
        self.keys["text"] = [hash_text(clip.caption) for clip in self.clips]
        self.keys["video"] = [sample_key(c.dataset, c.index, sources) for c in self.clips]
        for kind, spec in specs.items():
            changed = difference(self.folder, kind, spec)
            if changed is not None:
                text = "args.latent_cache=%s: %s: encoding again; the old entries are kept"
                logger.warning(text, self.folder, changed)
        texts = self._missing("text", specs["text"])
        clips, how = self._missing_clips(specs["video"], budget)
        logger.info(
            "%s: encoding %d of %s and %d of %s",
            self.folder,
            len(clips.missing),
            counted(len(set(self.keys["video"])), "clip"),
            len(texts.missing),
            counted(len(set(self.keys["text"])), "caption"),
        )
        if self.trusted is not None:
            self._check_trusted(self.trusted, texts, clips, how)
        for entries in (*texts.entries, *clips.entries):
            entries.create()
        return texts, clips, how

    def _missing_clips(self, spec: Spec, budget: int) -> tuple[_Work, EncodePlan | None]:
        work = self._missing("video", spec)
        stage = self.video_encoder.first_stage if work.missing else None
        if not isinstance(stage, VideoAutoencoder):
            return work, None
        shape = largest_clips(self.config, self.args)
        how = stage.limit_encode_memory(budget, shape)
        if spec[ENCODE_CHUNKS] == "auto":
            # The way of the entries that are there is kept if it takes no more memory.
            before = ENCODE_MODES[ENCODE_MODES.index(work.entries[0].spec[ENCODE_CHUNKS])]
            if ENCODE_MODES.index(before) > ENCODE_MODES.index(how.mode):
                how = stage.limit_encode_memory(budget, shape, [(before, True)])
            work = self._missing("video", {**spec, ENCODE_CHUNKS: how.mode})
        log_plan(stage, shape, how, budget)
        return work, how

    def _missing(self, kind: str, spec: Spec) -> _Work:
        keys, trusted, missing = self.keys[kind], self.trusted, {}
        entries, there = find_entries(self.folder, kind, spec, set(keys), trusted is not None)
        # Equal captions and equal clips are encoded once.
        for number, key in enumerate(keys):
            if key not in there and key not in missing:
                clip, theirs = self.clips[number], None
                if trusted is not None:
                    is_text = kind == "text"
                    theirs = (
                        trusted.caption(clip.caption)
                        if is_text
                        else trusted.clip(clip.dataset, clip.index)
                    )
                missing[key] = _Missing(key, number, theirs)
        # Clips of one size are encoded together.
        ordered = sorted(missing.values(), key=lambda one: self.clips[one.clip].bucket)
        return _Work(entries, ordered)

    def _check_trusted(
        self, trusted: TrustedCache, texts: _Work, clips: _Work, how: EncodePlan | None
    ) -> None:
        """Log what args.trusted_cache has, and check that its clips are of the run's model."""
        found = [(one.theirs, one.clip) for one in clips.missing if one.theirs is not None]
        logger.info(
            "args.trusted_cache=%s: has %d of these clips and %d of these captions",
            trusted.folder,
            len(found),
            sum(one.theirs is not None for one in texts.missing),
        )
        if trusted.shared:
            text = (
                "args.trusted_cache: encoding %s with a file name that other videos have, first: %s"
            )
            logger.warning(text, counted(len(trusted.shared), "clip"), min(trusted.shared))
        if found and len(trusted.members) > 1:
            # The oldest and the newest: a user who changed the model may have added clips.
            found.sort(key=lambda pair: pair[0].path.stat().st_mtime_ns)
            self._use(how)
            for theirs, number in dict.fromkeys((found[0], found[-1])):
                clip = self.clips[number]
                # A clip that cannot be read becomes a bad sample of the cache.
                with suppress(BadSample):
                    sample = read_sample(clip.dataset, clip.index, self.args.decode_timeout)
                    video = sample["video"][None].to(self.groups.device)
                    own = self.video_encoder.encode_moments(in_unit_range(video).transpose(1, 2))
                    trusted.check_scale(theirs, own, self.video_encoder.scale_factor)

    def _encode(self, what: str, work: _Work, at_once: int, turn: int) -> None:
        """Encode and write this rank's part of the missing entries of a kind."""
        if not work.missing:
            return
        starts = range(0, len(work.missing), at_once)
        batches = [work.missing[start : start + at_once] for start in starts]
        first = turn % len(batches)
        mine = [*batches[first:], *batches[:first]][self.groups.rank :: self.groups.world_size]
        total, done, written = sum(map(len, mine)), 0, 0
        start = last_line = time.monotonic()
        encode = self._encode_captions if what == "caption" else self._encode_clips
        for batch, found in zip(mine, encode(work, mine), strict=True):
            for one, entries, entry in found:
                if isinstance(entry, BadSample):
                    entries.write_bad(one.key, entry.reason)
                    self.bad.add(entry.path, entry.reason, is_logged=self.groups.is_main)
                    self.bad.check()
                else:
                    entries.write(one.key, entry)
            done, written = done + len(batch), written + len(found)
            now = time.monotonic()
            if now - last_line > _SECONDS_PER_LINE:
                last_line, rate = now, written / (now - start)
                text = "encoded %d of %s on rank 0, %.2f/s, %.1f minutes left"
                left = (total - done) / rate / 60 if rate else math.nan
                logger.info(text, done, counted(total, what), rate, left)
        number = sum(self.groups.gather(written))
        seconds = time.monotonic() - start
        text = "encoded %s in %.1f s, %.2f/s"
        logger.info(text, counted(number, what), seconds, number / seconds)

    def _encode_captions(self, work: _Work, batches: Sequence[Sequence[_Missing]]) -> _Encoded:
        # An encoder of its own, whose memory is free before clips are encoded.
        encoder = self._encoder()
        for batch in batches:
            found, left = [], []
            for one in batch:
                stored = self._stored(one)
                if stored is not None:
                    found.append((one, work.entries[1], {"embedding": stored}))
                elif not work.is_done(one):
                    left.append(one)
            if left:
                captions = [self.clips[one.clip].caption for one in left]
                rng = content_random([one.key for one in left], self.groups.device)
                made = encoder.encode_captions(captions, rng).cpu()  # sync: into a file
                for one, embedding in zip(left, made, strict=True):
                    entry = {"embedding": embedding}
                    if not embedding.isfinite().all():
                        name = self.clips[one.clip].name
                        entry = BadSample(name, "the embedding of its caption is not finite")
                    found.append((one, work.entries[0], entry))
            yield found

    def _encode_clips(self, work: _Work, batches: Sequence[Sequence[_Missing]]) -> _Encoded:
        encoder = self._use(self.how)
        reading = read_ahead(
            _Clips(self.clips, work, batches, self.args.decode_timeout),
            range(len(batches)),
            dali=dali_of_this_process(self.datasets[0].settings.video_backend),
            num_workers=self.args.num_workers,
            prefetch_factor=self.args.prefetch_factor,
        )
        with closing(reading) as read:
            for batch, samples in zip(batches, read, strict=True):
                left = [pair for pair in zip(batch, samples, strict=True) if pair[1] is not None]
                stored = [self._stored(one) for one, _ in left]
                entries = encode_clips(
                    [sample for _, sample in left],
                    [one.key for one, _ in left],
                    stored,
                    encoder,
                    self.args.cached_noised_images,
                    self.groups.device,
                )
                yield [
                    (one, work.entries[tensor is not None], entry)
                    for (one, _), tensor, entry in zip(left, stored, entries, strict=True)
                ]

    def _stored(self, one: _Missing) -> Tensor | None:
        """Read the file of args.trusted_cache; None if there is none that can be used."""
        if self.trusted is None or one.theirs is None:
            return None
        return self.trusted.read(one.theirs)

    def _use(self, how: EncodePlan | None) -> Encoder:
        """Return the encoder of clips, which encodes as planned."""
        stage = None if how is None else self.video_encoder.first_stage
        if how is not None and isinstance(stage, VideoAutoencoder):
            stage.use(how)
        return self.video_encoder

    @cached_property
    def video_encoder(self) -> Encoder:
        return self._encoder()

    def _encoder(self) -> Encoder:
        """Return the frozen encoders, which are built on first use."""
        # The encoders need the network's sizes and not its weights.
        with torch.device("meta"):
            transformer = build_transformer(self.config.model)
        return assemble_encoder(
            self.config, self.args, transformer, self.groups, overrides=self.overrides
        )

    def _finish(self, *both: _Work) -> None:
        """Log what the cache has. ValueError if too many samples are bad."""
        missing = set()
        for work in both:
            there = [(entries, entries.keys()) for entries in work.entries]
            for clip, key in zip(self.clips, self.keys[work.entries[0].kind], strict=True):
                entries, keys = next((pair for pair in there if key in pair[1]), (None, {}))
                if entries is None:
                    missing.add(clip.name)
                elif keys[key]:
                    self.bad.add(clip.name, entries.reason(key))
        self.bad.check()
        logger.info(
            "%s: %s, %d missing, %d bad; train with args.latent_cache=%s",
            self.folder,
            counted(len(self.clips), "sample"),
            len(missing),
            len(self.bad.reasons),
            self.folder,
        )


class _Clips(Reads):
    """Reads batches of samples: a BadSample for one that cannot be read, None for one that is encoded."""

    def __init__(
        self,
        clips: Sequence[_Clip],
        work: _Work,
        batches: Sequence[Sequence[_Missing]],
        timeout: float,
    ) -> None:
        self.clips, self.work, self.batches, self.timeout = clips, work, batches, timeout

    def name(self, key: int) -> str:
        return ", ".join(self.clips[one.clip].name for one in self.batches[key])

    def __getitem__(self, number: int) -> list[Sample | BadSample | None]:
        return [self._sample(one) for one in self.batches[number]]

    def _sample(self, one: _Missing) -> Sample | BadSample | None:
        if self.work.is_done(one):
            return None
        clip = self.clips[one.clip]
        try:
            return read_sample(clip.dataset, clip.index, self.timeout)
        except BadSample as error:
            return error


def _create(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ValueError(
            f"args.latent_cache={folder}: cannot be written ({error.strerror}); set it to another folder"
        ) from None
