"""`cogfast cache`: encodes all clips and captions of a data set once, on any number of ranks.

Rank 0 lists which entries are missing. They are divided among the ranks, each of which writes its own.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from cogfast.core.files import WriteError
from cogfast.core.keys import DEFAULT, names_origins
from cogfast.core.slot_random import SlotRandom, random_bits
from cogfast.core.values import counted, leaves
from cogfast.data.bad_samples import BadSample, BadSampleLog, Unavailable
from cogfast.data.batches import in_unit_range, read_sample
from cogfast.data.datasets import CaptionedVideos, Sample
from cogfast.data.sources.arrays import KEY as TENSORS_KEY
from cogfast.data.video.clip import device_reader
from cogfast.data.workers import Reads, read_ahead
from cogfast.distributed.process_groups import ProcessGroups, start_processes
from cogfast.distributed.stop_signals import keeping
from cogfast.extensions.cache import entry_keys
from cogfast.extensions.cache.cached_data import cache_specs
from cogfast.extensions.cache.entries import (
    ENCODE_CHUNKS,
    NUMBERS,
    Entries,
    Spec,
    difference,
    find_entries,
)
from cogfast.extensions.stores.store import StoreError, check_writable, in_threads
from cogfast.model.autoencoder import ENCODE_MODES, EncodePlan, Moments, VideoAutoencoder
from cogfast.train.assembly import Datasets, assemble_datasets, assemble_encoder
from cogfast.train.encode import Encoder
from cogfast.train.preflight.encode_choice import largest_clips, log_plan, memory_for_clips
from cogfast.train.preflight.header_scan import survey_datasets
from cogfast.train.run.folder import create_folder, plain_sections
from cogfast.train.run.opened import Run

logger = logging.getLogger(__name__)

_CAPTIONS_AT_ONCE = 8
_WRITING_THREADS = 8
_HASHED_AT_ONCE = 256  # files per rank; a kill loses this much work
_SECONDS_PER_LINE = 30.0  # between log lines of progress
_NO_VARIANCE = -1e4  # logarithm; its exponential is 0 in float32


@names_origins
def cache_latents(run: Run, price: float | None = None) -> None:
    """Encode all samples of args.train_data and args.valid_data into args.latent_cache.

    price: of an hour of a GPU, in dollars; the log has the costs.
    """
    groups = start_processes()
    groups.check_same(leaves(plain_sections(run.sections)))
    _fill(partial(_CacheRun, run, groups, price), run.args.latent_cache, groups, "`cogfast cache`")
    groups.close()


def encode_first(run: Run, groups: ProcessGroups) -> None:
    """Fill args.latent_cache as `cogfast cache` does, and free the memory of the encoders."""
    # Encoding may take hours: the folder that the run needs then is created before.
    groups.on_main(lambda: create_folder(run.args))
    folder = run.args.latent_cache
    kept = f"; the entries that are complete are kept in {folder}, and the same command continues from there"
    # Each rank encodes other clips, also the ranks that share a model later.
    with keeping(kept):
        groups = groups.without_models()
        _fill(partial(_CacheRun, run, groups), folder, groups, "the same command")
    gc.collect()  # sync: none; the encoders are in cycles that only a collection frees
    if groups.device.type == "cuda":
        torch.cuda.empty_cache()  # sync: once, before training begins


def _fill(
    make: Callable[[], _CacheRun], folder: str | None, groups: ProcessGroups, command: str
) -> None:
    kept = continues = ""
    try:
        # Before the videos are hashed, which may take hours.
        groups.on_main(lambda: check_writable(folder or ""))
        kept, continues = "what is encoded is kept: ", ", which continues from there"
        make().run()
    except (StoreError, WriteError) as error:
        of_disk = isinstance(error, WriteError)
        key = "args.latent_cache: " * (of_disk or str(error).startswith(str(folder)))
        fix = "free disk space and " * of_disk + f"run {command} again{continues}"
        if of_disk and not kept:
            raise ValueError(f"{key}{error}; use another folder or {fix}") from None
        raise RuntimeError(f"{key}{error}; {kept}{fix}") from None


@dataclasses.dataclass(frozen=True, slots=True)
class _Clip:
    dataset: CaptionedVideos
    index: int
    is_control: bool = False

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
class _Work:
    """The missing entries of one kind: {key: number of the first sample that needs it}."""

    entries: Entries
    missing: dict[str, int]


# The keys of a batch that were missing, with the tensors of their entries, or why there are none.
_Encoded = Iterator[Mapping[str, dict[str, Tensor] | BadSample]]


class _CacheRun:
    def __init__(self, run: Run, groups: ProcessGroups, price: float | None = None) -> None:
        args = run.args
        self.price, self.start = price, time.monotonic()
        assert args.latent_cache is not None, "preflight asks for a folder"
        if run.data_arguments.get("tensors"):  # training reads them from their files
            run = run.with_values({TENSORS_KEY: None}, DEFAULT)
        self.opened, self.args, self.groups = run, args, groups
        self.folder = args.latent_cache
        # The videos, and not the cache that this command fills.
        of_videos = args.changed(latent_cache=None)
        every = assemble_datasets(run.data, of_videos, run.model.inputs, run.is_masked, groups)
        every = Datasets(_without_masks(every.train), _without_masks(every.valid))
        found, _ = survey_datasets(every, of_videos, groups, 1)
        self.datasets = [d for d in (found.train, found.valid) if isinstance(d, CaptionedVideos)]
        self.clips = [
            _Clip(stream, i, is_control=stream is not videos)
            for videos in self.datasets
            for stream in videos.encoded.values()
            for i in entry_keys.used_samples(videos)
        ]
        self.keys: dict[str, list[str]] = {}  # of the clips, by kind; rank 0 alone has them
        self.how: EncodePlan | None = None  # to encode clips; None: nothing to choose
        self.bad = BadSampleLog(None, len(self.clips), args.max_bad_fraction)

    def run(self) -> None:
        # Launches that share no ranks have different orders, so that they share the work.
        turn = self.groups.broadcast(random.getrandbits(30))
        sources = self._hash_sources(turn)
        # Measured before anything is loaded. What fits into the least free memory fits on all ranks.
        budget = min(self.groups.gather(memory_for_clips(self.args, self.groups)))
        texts, clips, self.how = self.groups.on_main(lambda: self._find_missing(sources, budget))
        self._encode("caption", texts, _CAPTIONS_AT_ONCE, turn)
        self._encode("clip", clips, self.args.batch_size, turn)
        self.groups.on_main(lambda: self._finish(texts, clips))

    def _hash_sources(self, turn: int) -> entry_keys.Sources:
        """Hash all videos. Each rank reads a part of the files that may have changed."""
        sources, files = entry_keys.Sources(self.folder), {}
        for videos in self.datasets:
            files |= entry_keys.source_files(videos, entry_keys.used_samples(videos))
        # Rank 0's list: with own copies of the files, each rank would take part in other rounds.
        trusts = self.datasets[0].settings.trust_index
        of_files = lambda: [*sources.changed(files, trusts), *sources.unreadable(files)]
        stale = self.groups.on_main(of_files)
        random.Random(turn).shuffle(stale)
        if stale:
            logger.info("hashing %s", counted(len(stale), "new or changed video"))
        at_once = _HASHED_AT_ONCE * self.groups.world_size
        for start in range(0, len(stale), at_once):
            # Every rank takes part in each round, since the gather below needs all of them.
            left = self.groups.on_main(lambda: sources.left(stale[start : start + at_once]))  # noqa: B023
            mine = left[self.groups.rank :: self.groups.world_size]
            found = self.groups.gather(entry_keys.hash_files(mine, files))
            self.groups.on_main(lambda: sources.add(sum(found, [])))  # noqa: B023
        return sources

    def _find_missing(
        self, sources: entry_keys.Sources, budget: int
    ) -> tuple[_Work, _Work, EncodePlan | None]:
        """Return the missing captions and clips, and how to encode the clips. For rank 0."""
        # Both data sets have one data section, so one description of clips serves all entries.
        run, settings = self.opened, self.datasets[0].settings
        described = run.sections, run.allow_import, self.args, run.model, run.frozen.overrides
        specs = cache_specs(*described, settings)
        self.keys["text"] = [entry_keys.hash_text(clip.caption) for clip in self.clips]
        key = lambda clip: entry_keys.sample_key(clip.dataset, clip.index, sources, clip.is_control)
        self.keys["video"] = [*map(key, self.clips)]
        for kind, spec in specs.items():
            if changed := difference(self.folder, kind, spec):
                text = "args.latent_cache=%s: %s: encoding again; the old entries are kept"
                logger.warning(text, self.folder, changed)
        texts = self._missing("text", specs["text"])
        clips, how = self._missing_clips(specs["video"], budget)
        every = {kind: len({*keys}) for kind, keys in self.keys.items()}
        text = f"{len(clips.missing)} of {counted(every['video'], 'clip')} and "
        text += f"{len(texts.missing)} of {counted(every['text'], 'caption')}"
        logger.info("%s: encoding %s", self.folder, text)
        for work in (texts, clips):
            work.entries.create()
        return texts, clips, how

    def _missing_clips(self, spec: Spec, budget: int) -> tuple[_Work, EncodePlan | None]:
        work = self._missing("video", spec)
        stage = self.video_encoder.first_stage if work.missing else None
        if not isinstance(stage, VideoAutoencoder):
            return work, None
        run, at_once = self.opened, self.opened.model.en_and_decode_n_samples_a_time
        shape = largest_clips(self.args, run.data_arguments, run.network.config, at_once)
        how = stage.limit_encode_memory(budget, shape)
        if spec[ENCODE_CHUNKS] == "auto":
            # Entries that are there have one way: others would have other latents.
            before = ENCODE_MODES[ENCODE_MODES.index(work.entries.spec[ENCODE_CHUNKS])]
            if before != how.mode and (there := len({*self.keys["video"]}) - len(work.missing)):
                kept = stage.limit_encode_memory(budget, shape, [(before, True)])
                if kept.num_bytes > budget:
                    text = f"args.latent_cache={self.folder} has {counted(there, 'clip')} of encode_chunks={before}, which "
                    text += f"takes {kept.num_bytes / 2**30:.1f} GiB of {budget / 2**30:.1f} (args.vae_memory_gib, or the "
                    text += f"free memory); free memory, set model.first_stage_config.params.encode_chunks={before} to try "
                    raise ValueError(f"{text}it, or ={how.mode} to encode all clips again")
                how = kept
            work = self._missing("video", {**spec, ENCODE_CHUNKS: how.mode})
        log_plan(stage, shape, how, budget)
        stage.use(how)
        return work, how

    def _missing(self, kind: str, spec: Spec) -> _Work:
        keys, missing = self.keys[kind], {}
        entries, there = find_entries(self.folder, kind, spec, set(keys))
        if cut := entries.remove_cut([key for key in {*keys} if there.get(key) is False]):
            logger.warning("%s: %d entries were cut, first %s", entries.folder, len(cut), cut[0])
            there = {key: there[key] for key in there.keys() - {*cut}}
        # Clips of one size are encoded together. Equal captions and equal clips are encoded once.
        for number in sorted(range(len(keys)), key=lambda number: self.clips[number].bucket):
            if keys[number] not in there:
                missing.setdefault(keys[number], number)
        return _Work(entries, missing)

    def _encode(self, what: str, work: _Work, at_once: int, turn: int) -> None:
        """Encode and write this rank's part of the missing entries of a kind."""
        if not work.missing:
            return
        # Clips of one shape are encoded together. Keys with the same first digits follow each other, so that
        # one listing tells which are written. The rest is in an order of this launch: launches that come to
        # the same digits would otherwise encode the same clips at the same time, to the end.
        rng = random.Random(turn)
        places = [rng.random() for _ in range(256)]
        shape = lambda clip: (clip.bucket, clip.is_control)
        of_key = lambda key: (shape(self.clips[work.missing[key]]), places[int(key[:2], 16)])
        keys = sorted(work.missing, key=lambda key: (of_key(key), rng.random()))
        batches = [keys[start : start + at_once] for start in range(0, len(keys), at_once)]
        first = turn % len(batches)
        mine = [*batches[first:], *batches[:first]][self.groups.rank :: self.groups.world_size]
        total, passed, written = sum(map(len, mine)), 0, 0
        start = last_line = time.monotonic()

        def left() -> Iterator[list[str]]:
            """Yield the batches without what another `cogfast cache` has written since."""
            nonlocal passed
            for batch in mine:
                missing = [key for key in batch if not work.entries.has(key)]
                passed += len(batch) - len(missing)
                if missing:
                    yield missing

        encode = self._encode_captions if what == "caption" else self._encode_clips
        entries, writing = work.entries, deque[Future[None]]()
        with ThreadPoolExecutor(_WRITING_THREADS) as pool:
            for found in encode(work, left()):
                for key, entry in found.items():
                    if isinstance(entry, Unavailable):  # a later start may read it
                        raise StoreError(str(entry))
                    if isinstance(entry, BadSample):
                        writing.append(pool.submit(entries.write_bad, key, entry.reason))
                        self.bad.add(entry.path, entry.reason, is_logged=self.groups.is_main)
                        self.bad.check()
                    else:
                        writing.append(pool.submit(entries.write, key, entry))
                # A slow disk or store holds the encoder up before entries fill the memory.
                while len(writing) > 2 * _WRITING_THREADS:
                    writing.popleft().result()
                written += len(found)
                now = time.monotonic()
                if now - last_line > _SECONDS_PER_LINE:
                    last_line, rate, done = now, written / (now - start), passed + written
                    text = "encoded %d of %s on rank 0, %.2f/s, %.1f minutes left%s"
                    minutes = (total - done) / rate / 60 if rate else math.nan
                    cost = self._cost(now - self.start, minutes * 60)
                    logger.info(text, done, counted(total, what), rate, minutes, cost)
            for one in writing:
                one.result()
        number = sum(self.groups.gather(written))
        seconds = time.monotonic() - start
        text = "encoded %s in %.1f s, %.2f/s%s"
        cost = self._cost(time.monotonic() - self.start)
        logger.info(text, counted(number, what), seconds, number / seconds, cost)

    def _cost(self, *seconds: float) -> str:
        """Describe what the seconds until now, and maybe those that are left, take of all GPUs."""
        if self.price is None and self.groups.device.type != "cuda":
            return ""
        text = ""
        for each, name in zip(seconds, ("so far", "left"), strict=False):
            hours = each * self.groups.world_size / 3600
            dollars = "" if self.price is None else f" (${hours * self.price:.2f})"
            text += f"; {hours:.2f} GPU hours{dollars} {name}"
        return text

    def _encode_captions(self, work: _Work, batches: Iterator[Sequence[str]]) -> _Encoded:
        # An encoder of its own, whose memory is free before clips are encoded.
        encoder = self._encoder()
        for batch in batches:
            clips = [self.clips[work.missing[key]] for key in batch]
            rng = content_random(batch, self.groups.device)
            made = encoder.encode_captions([clip.caption for clip in clips], rng)
            made = made.cpu()  # sync: into a file
            why = "the embedding of its caption is not finite"
            yield {
                key: {"embedding": one} if one.isfinite().all() else BadSample(clip.name, why)
                for key, clip, one in zip(batch, clips, made, strict=True)
            }

    def _encode_clips(self, work: _Work, batches: Iterator[Sequence[str]]) -> _Encoded:
        encoder = self.video_encoder
        has_frames = encoder.image_input or encoder.given_frames is not None
        if self.how is not None and isinstance(encoder.first_stage, VideoAutoencoder):
            encoder.first_stage.use(self.how)
        reading = read_ahead(
            _Clips(self.clips, work, self.args.decode_timeout),
            batches,
            reader=device_reader(self.datasets[0].settings.video_backend),
            num_workers=self.args.num_workers,
            prefetch_factor=self.args.prefetch_factor,
        )
        with closing(reading) as read:
            for samples in read:
                bad = {key: one for key, one in samples.items() if isinstance(one, BadSample)}
                good = {key: one for key, one in samples.items() if not isinstance(one, BadSample)}
                is_clip = lambda key: not self.clips[work.missing[key]].is_control
                rows = [(one, key, has_frames and is_clip(key)) for key, one in good.items()]
                number = self.args.cached_noised_images
                entries = encode_clips(rows, encoder, number, self.groups.device)
                yield bad | dict(zip(good, entries, strict=True))

    @cached_property
    def video_encoder(self) -> Encoder:
        return self._encoder()

    def _encoder(self) -> Encoder:
        # The encoders need the network's sizes and not its weights.
        with torch.device("meta"):
            network = self.opened.network.build()
        run = self.opened
        return assemble_encoder(run.frozen, run.model, self.args, network, self.groups)

    def _finish(self, *both: _Work) -> None:
        """Log what the cache has. ValueError if too many samples are bad."""
        for work in both:
            there = work.entries.keys()
            there |= work.entries.ask(work.missing.keys() - there.keys())
            for clip, key in zip(self.clips, self.keys[work.entries.kind], strict=True):
                if there.get(key):
                    self.bad.add(clip.name, work.entries.reason(key))
        self.bad.check()
        text, number = "%s: %s, %d bad; train with args.latent_cache=%s", len(self.bad.reasons)
        logger.info(text, self.folder, counted(len(self.clips), "sample"), number, self.folder)


def _without_masks(dataset: Any) -> Any:
    """Leave out masks, which training reads from their files: they make no clip of the cache bad."""
    if isinstance(dataset, CaptionedVideos) and "mask" in dataset.others:
        return dataset.with_clips(dataset.clips.without(["mask"]))
    return dataset


class _Clips(Reads):
    """Reads the samples of a batch of keys: {key: sample, or why it is bad}."""

    def __init__(self, clips: Sequence[_Clip], work: _Work, timeout: float) -> None:
        self.clips, self.work, self.timeout = clips, work, timeout

    def _clip(self, key: str) -> _Clip:
        return self.clips[self.work.missing[key]]

    def name(self, key: Sequence[str]) -> str:
        return ", ".join(self._clip(one).name for one in key)

    def __getitem__(self, key: Sequence[str]) -> dict[str, Sample | BadSample]:
        clips = [self._clip(one) for one in key]
        # A slow store does not count for args.decode_timeout, which makes a clip bad for ever.
        list(in_threads(lambda clip: clip.dataset.fetch([clip.index]), clips))
        found: dict[str, Sample | BadSample] = {}
        for one, clip in zip(key, clips, strict=True):
            try:
                found[one] = read_sample(clip.dataset, clip.index, self.timeout)
            except BadSample as error:
                found[one] = error
        return found


def encode_clips(
    rows: Iterable[tuple[Sample, str, bool]],
    encoder: Encoder,
    num_noised_images: int,
    device: torch.device,
) -> Iterator[dict[str, Tensor] | BadSample]:
    """Yield the entry of each sample. Consecutive samples of one size are encoded together.

    rows: samples, their keys, which seed the noise of noised images, and whether they are clips of which the model is
    given frames. num_noised_images: 0 keeps the first frame of image-to-video as uint8.
    """
    # Buckets give clips of several sizes, which cannot be stacked.
    of_group = lambda row: (row[0]["video"].shape, row[2])
    for (shape, has_frames), group in groupby(rows, key=of_group):
        together, own_keys, _ = zip(*group, strict=True)
        parts = _moments(together, own_keys, encoder, device)
        if has_frames and encoder.given_frames is not None:
            frames = encoder.given_frames.pixel_frames(shape[0])
            chosen = torch.stack([sample["video"][frames] for sample in together])
            parts["given_frames"] = chosen.cpu()  # sync: into a file
        if has_frames and encoder.image_input:
            each = [s["images"] if "images" in s else s["video"][0] for s in together]
            images = torch.stack(each)
            if num_noised_images:
                moments = encoder.encode_noised(images.to(device), own_keys, num_noised_images)
                parts |= _tensors("noised_image_", moments)
            else:
                parts["first_frame"] = images.cpu()  # sync: into a file
        for i, sample in enumerate(together):
            entry = {name: tensor[i].contiguous() for name, tensor in parts.items()}
            if all(tensor.isfinite().all() for tensor in entry.values()):
                yield entry | {name: _number(sample[name]) for name in NUMBERS}
            else:
                yield BadSample(sample["path"], "its latents are not finite")


def _moments(
    samples: Sequence[Sample], keys: Sequence[str], encoder: Encoder, device: torch.device
) -> dict[str, Tensor]:
    clips = torch.stack([sample["video"] for sample in samples])
    pixels = in_unit_range(clips.to(device, non_blocking=True)).transpose(1, 2)
    if encoder.overrides.encode_video is not None:
        # It returns one sample, scaled latents [B, C, T, h, w], which every epoch uses as they are.
        own = encoder.encode_clips(pixels, content_random(keys, device)).cpu()  # sync: into a file
        # In float32: a quotient that is rounded to bf16 would not give the latents again.
        mean = own.float() / encoder.scale_factor
        # All samples of a batch need a variance. The reader expands this one, which is 0.
        return {"mean": mean, "logvar": mean.new_full((len(mean), 1, 1, 1, 1), _NO_VARIANCE)}
    # Mean and variance, so that each epoch can draw another sample of the latents.
    return _tensors("", encoder.encode_moments(pixels))


def content_random(keys: Sequence[str], device: torch.device) -> SlotRandom:
    """Return draws that depend on the keys of entries alone, and not on the run that writes them."""
    return SlotRandom(0, 0, [random_bits(key) for key in keys], 0, device)


def _number(value: float) -> Tensor:
    # torch would make a float32 of a float, and a batch of Python numbers has float64.
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


def _tensors(prefix: str, moments: Moments) -> dict[str, Tensor]:
    tensors = {f"{prefix}mean": moments.mean.cpu()}  # sync: into a file
    if moments.logvar is not None:
        tensors[f"{prefix}logvar"] = moments.logvar.cpu()  # sync: into a file
    return tensors
