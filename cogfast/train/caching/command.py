"""`cogfast cache`: encodes all clips and captions of a data set once, on any number of ranks.

Rank 0 assigns samples to shards in the order in which training reads them. The missing shards are
divided among the ranks, each of which writes its own.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from cogfast.config import Config
from cogfast.core.files import WriteError, remove_unfinished, write_text
from cogfast.data.bad_samples import BadSample, BadSampleLog
from cogfast.data.batches import in_unit_range, read_sample
from cogfast.data.cache.dataset import sample_key, source_files, used_samples
from cogfast.data.cache.shards import (
    ENCODE_CHUNKS,
    SHARD_SAMPLES,
    CacheIndex,
    Shard,
    Spec,
    Writer,
    is_complete,
    is_trusted,
    rows_of,
    trusted_key,
    write_shard,
)
from cogfast.data.cache.source_hashes import Sources, hash_text
from cogfast.data.datasets import CaptionedVideos, Sample, SizedDataset
from cogfast.data.video.dali import dali_of_this_process
from cogfast.data.workers.read_ahead import Reads, read_ahead
from cogfast.model.autoencoder import ENCODE_MODES, EncodePlan, VideoAutoencoder
from cogfast.model.transformer import build_transformer
from cogfast.schema.arguments import TrainArguments
from cogfast.schema.values import counted
from cogfast.train.assembly import DTYPES, assemble_datasets, assemble_encoder, specs_of
from cogfast.train.caching.encode_choice import (
    as_mode,
    choose,
    largest_clips,
    log_plan,
    memory_for_clips,
)
from cogfast.train.caching.entries import content_random, encode_samples
from cogfast.train.caching.progress import CacheProgress
from cogfast.train.caching.trusted import (
    TrustedCache,
    TrustedFile,
    as_theirs,
    check_scale,
    choose_trusted,
)
from cogfast.train.distributed.process_groups import ProcessGroups, start_processes
from cogfast.train.encode import NO_OVERRIDES, EncodeOverrides, Encoder
from cogfast.train.preflight.header_scan import survey_datasets
from cogfast.train.run.stop_signals import keeping

logger = logging.getLogger(__name__)

_CAPTIONS_AT_ONCE = 8
_HASHED_AT_ONCE = 256  # files per rank
_SECONDS_PER_WRITE = 30.0  # between saves of the hashes; a kill loses this much work


@dataclasses.dataclass(frozen=True, slots=True)
class Clip:
    """A sample to encode: its data set and index, and the key of its caption."""

    dataset: CaptionedVideos
    index: int
    text_key: str

    @property
    def path(self) -> str:
        return self.dataset.name(self.index)

    @property
    def caption(self) -> str:
        return self.dataset.captions[self.index]


def cache_latents(config: Config) -> None:
    """Encode all samples of args.train_data and args.valid_data into args.latent_cache."""
    args = TrainArguments.from_config(config)
    groups = start_processes()
    _fill(config, args, groups, "`cogfast cache`")
    groups.close()


def encode_first(
    config: Config,
    args: TrainArguments,
    groups: ProcessGroups,
    overrides: EncodeOverrides = NO_OVERRIDES,
) -> None:
    """Fill args.latent_cache as `cogfast cache` does, and free the memory of the encoders."""
    kept = (
        f"; the shards that are complete are kept in {args.latent_cache}, and the same command "
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
    overrides: EncodeOverrides = NO_OVERRIDES,
) -> None:
    assert args.latent_cache is not None, "preflight asks for a folder"
    folder = Path(args.latent_cache)
    try:
        with ExitStack() as stack:
            groups.on_main(lambda: _own(stack, folder))
            _CacheRun(config, args, groups, folder, overrides).run()
            groups.gather(None)  # all ranks are done before rank 0 releases the cache
    except WriteError as error:
        raise RuntimeError(
            f"args.latent_cache: {error}; what is encoded is kept: free disk space and run {command} "
            "again, which continues from there"
        ) from None


def _own(stack: ExitStack, folder: Path) -> None:
    stack.enter_context(Writer(folder))
    # Under the lock: the files of another writer must stay.
    remove_unfinished(folder)


class _CacheRun:
    """One run of the command on one rank."""

    def __init__(
        self,
        config: Config,
        args: TrainArguments,
        groups: ProcessGroups,
        folder: Path,
        overrides: EncodeOverrides,
    ) -> None:
        self.config, self.args, self.groups, self.folder = config, args, groups, folder
        self.overrides = overrides
        # The videos, and not the cache that this command fills.
        datasets = assemble_datasets(config, dataclasses.replace(args, latent_cache=None))
        datasets, _ = survey_datasets(datasets, args, groups, global_batch=1)
        self.clips = [*_in_order(datasets.train, args.seed), *_in_order(datasets.valid, args.seed)]
        self.how: EncodePlan | None = None  # to encode clips
        self.trusted: dict[str, TrustedFile] = {}  # by key of the entry
        self.scales: dict[str, float] = {}  # of the models that the trusted files may be of
        self.bad = BadSampleLog(
            folder / "bad_samples.jsonl", len(self.clips), args.max_bad_fraction
        )

    def run(self) -> None:
        sources = self._hash_sources()
        # Both data sets have one data section, so one description of clips serves all entries.
        first = self.clips[0].dataset
        # Rank 0 alone hashes the weights of the encoders.
        specs = self.groups.on_main(
            lambda: specs_of(self.config, self.args, first.settings, sources, self.overrides)
        )
        keys = [sample_key(clip.dataset, clip.index, sources) for clip in self.clips]
        if self.args.trusted_cache is not None:
            keys = self._trust(specs, keys)
        # Measured before anything is loaded. What fits into the least free memory fits on all ranks.
        self.budget = min(self.groups.gather(memory_for_clips(self.args, self.groups)))
        plan = self.groups.on_main(lambda: self._plan(specs, sources, keys))
        missing = self.groups.on_main(lambda: [s for s in plan if not is_complete(self.folder, s)])
        self.how = self.groups.on_main(lambda: self._how_to_encode(missing))
        # Equal captions and equal clips are encoded once.
        by_text, by_video = {}, {}
        for clip, key in zip(self.clips, keys, strict=True):
            by_text.setdefault(clip.text_key, clip)
            by_video.setdefault(key, clip)
        self.groups.on_main(lambda: self._check_scales(missing, by_video))
        done = {s.file for s in plan} - {s.file for s in missing}
        for shard in plan:
            if shard.file in done:
                self._note_bad(shard, rows_of(self.folder / shard.file), by_text, by_video)
        self._encode("text", self._encode_text, missing, by_text, by_video)
        self._encode("video", self._encode_videos, missing, by_text, by_video)
        self.groups.gather(None)
        # Rank 0 reads the shards of all ranks, which are on disk since the gather.
        self.groups.on_main(lambda: self._finish(plan, by_text, by_video))

    def _hash_sources(self) -> Sources:
        """Hash all videos. Each rank reads a part of the files that may have changed."""
        sources = Sources(self.folder)
        before = dict(sources.known)
        files: dict[str, tuple[int, ...]] = {}
        for clip in self.clips:
            files |= source_files(clip.dataset, [clip.index])
        # Rank 0's list: with own copies of the files, each rank would take part in other rounds.
        stale = self.groups.on_main(lambda: sources.changed(files))
        if stale:
            logger.info("hashing %s", counted(len(stale), "new or changed video"))
        at_once, last = _HASHED_AT_ONCE * self.groups.world_size, time.monotonic()
        for start in range(0, len(stale), at_once):
            # Every rank takes part in each round, since the gather below needs all of them.
            mine = stale[start : start + at_once][self.groups.rank :: self.groups.world_size]
            for found in self.groups.gather(sources.hash(mine, files)):
                sources.known |= found
            # Rank 0 decides: the clocks of ranks differ, and all must take the same branch.
            if self.groups.broadcast(time.monotonic() - last > _SECONDS_PER_WRITE):
                last = time.monotonic()
                self.groups.on_main(sources.write)
                logger.info("hashed %d of %d videos", min(start + at_once, len(stale)), len(stale))
        changed = sum(before[n][-1] != now[-1] for n, now in sources.known.items() if n in before)
        if changed:
            text = "args.latent_cache=%s: encoding %s again, whose content changed since caching"
            logger.info(text, self.folder, counted(changed, "video"))
        return sources

    def _plan(self, specs: dict[str, Spec], sources: Sources, keys: list[str]) -> list[Shard]:
        index = CacheIndex.read(self.folder)
        specs["video"] = self._settled(specs["video"], keys)
        for kind, spec in specs.items():
            difference = index.difference(kind, spec)
            if difference is not None:
                logger.warning(
                    "args.latent_cache=%s: %s: encoding again; the old entries are kept beside the new "
                    "ones",
                    self.folder,
                    difference,
                )
        texts = [clip.text_key for clip in self.clips]
        plan = index.plan("text", specs["text"], texts, self.folder)
        plan += index.plan("video", specs["video"], keys, self.folder)
        # Before anything is encoded: a training that waits for this cache reads both files.
        sources.write()
        index.write(self.folder)
        return plan

    def _trust(self, specs: dict[str, Spec], keys: list[str]) -> list[str]:
        """Find the files of args.trusted_cache. Returns the keys of the clips; some become trusted ones."""
        videos = {id(clip.dataset): clip.dataset for clip in self.clips}.values()
        dtype = DTYPES[self.args.precision]
        cache = TrustedCache(self.config, self.args, dtype, videos)
        self.scales = cache.scales
        clips: dict[str, TrustedFile | None] = {}
        captions: dict[str, TrustedFile | None] = {}
        for clip, key in zip(self.clips, keys, strict=True):
            if clips.get(key) is None:
                clips[key] = cache.of_clip(clip.dataset, clip.index)
            if clip.text_key not in captions:
                captions[clip.text_key] = cache.of_caption(clip.caption)
        taken, clips_left = choose_trusted("video", clips, specs["video"], self.folder, self.groups)
        texts, texts_left = choose_trusted(
            "text", captions, specs["text"], self.folder, self.groups
        )
        for key, file in [*clips.items(), *captions.items()]:
            if file is not None:
                self.trusted[trusted_key(key)] = file
        left = ((clips_left, "clip"), (texts_left, "caption"))
        encoded = " and ".join(counted(number, noun) for number, noun in left if number)
        logger.info(
            "args.trusted_cache=%s: took %d of %s and %d of %s%s",
            cache.folder,
            len(taken),
            counted(len(clips), "clip"),
            len(texts),
            counted(len(captions), "caption"),
            f"; encoding {encoded}" if encoded else "",
        )
        settings = self.clips[0].dataset.settings
        if taken and (settings.resize, settings.frame_selection) != ("stretch", "uniform"):
            logger.info(
                "args.trusted_cache=%s: its clips are stretched to their size, with frames spread over the "
                "video; clips that this run encodes have data.params.resize=%s and frame_selection=%s",
                cache.folder,
                settings.resize,
                settings.frame_selection,
            )
        self.clips = [
            dataclasses.replace(clip, text_key=trusted_key(clip.text_key))
            if clip.text_key in texts
            else clip
            for clip in self.clips
        ]
        return [trusted_key(key) if key in taken else key for key in keys]

    def _check_scales(self, missing: Sequence[Shard], clips: Mapping[str, Clip]) -> None:
        """Encode two trusted clips to see that their files are of the run's model.

        These are the oldest and the newest: a user who changed the model may have added clips.
        """
        wanted = [key for shard in missing for key in shard.keys if key in clips]
        found = [key for key in wanted if key in self.trusted]
        if len(self.scales) < 2 or not found:
            return
        found.sort(key=lambda key: self.trusted[key].path.stat().st_mtime_ns)
        encoder = self.video_encoder
        if self.how is not None and isinstance(encoder.first_stage, VideoAutoencoder):
            encoder.first_stage.use(self.how)
        for key in dict.fromkeys((found[0], found[-1])):
            clip = clips[key]
            try:
                sample = read_sample(as_theirs(clip.dataset), clip.index, self.args.decode_timeout)
            except BadSample:
                continue  # it becomes a bad sample of the cache
            video = sample["video"][None].to(self.groups.device)
            own = encoder.encode_moments(in_unit_range(video).transpose(1, 2))
            stored = self._read_trusted("clip", [key], clips)[key]
            check_scale(self.trusted[key].path, stored, own, encoder.scale_factor, self.scales)

    def _read_trusted(
        self, what: str, keys: Sequence[str], clips: Mapping[str, Clip]
    ) -> dict[str, Tensor]:
        """Read the tensors of those keys that are trusted. what: "clip" or "caption"."""
        found = {}
        for key in filter(is_trusted, keys):
            file = self.trusted.get(key)
            if file is None:
                raise RuntimeError(
                    f"args.trusted_cache={self.args.trusted_cache}: the encoded {what} of "
                    f"{clips[key].path} is gone, which the latent cache was to contain; restore it, or set "
                    "the key to null to encode all clips"
                )
            try:
                found[key] = file.read()
            except ValueError as error:
                raise RuntimeError(
                    f"args.trusted_cache: {file.path} has changed since the start: {error}; run the "
                    "same command again"
                ) from None
        return found

    def _settled(self, spec: Spec, keys: list[str]) -> Spec:
        """Return the spec of clips with a mode in place of encode_chunks "auto".

        The mode of the cache's entries is kept if all clips have one or if it fits into the memory;
        otherwise the first mode that fits is taken.
        """
        if spec.get(ENCODE_CHUNKS) != "auto":
            return spec
        # A copy of the index, to which `plan` may add.
        index = CacheIndex.read(self.folder)
        made = index.settled("video", spec, keys)
        is_made = made.get(ENCODE_CHUNKS) != "auto"
        if is_made:
            shards = index.plan("video", made, keys, self.folder)
            if all(is_complete(self.folder, shard) for shard in shards):
                return made
        stage, shape = self.video_encoder.first_stage, largest_clips(self.config, self.args)
        assert isinstance(stage, VideoAutoencoder), "the spec of others has no way to encode"
        has_trial = self.args.vae_memory_gib is None
        self.how = stage.limit_encode_memory(self.budget, shape, has_trial=has_trial)
        before = as_mode(made.get(ENCODE_CHUNKS, "whole"))
        if before is not None and ENCODE_MODES.index(before) > ENCODE_MODES.index(self.how.mode):
            self.how = stage.limit_encode_memory(self.budget, shape, [(before, True)])
        log_plan(stage, shape, self.how, self.budget)
        spec = {name: value for name, value in spec.items() if name != ENCODE_CHUNKS}
        return spec if self.how.mode == "whole" else {**spec, ENCODE_CHUNKS: self.how.mode}

    def _how_to_encode(self, missing: list[Shard]) -> EncodePlan | None:
        """Return the plan for the missing clips; None if there are none, or for another first stage."""
        is_needed = any(shard.kind == "video" for shard in missing)
        if self.how is None and is_needed:
            stage = self.video_encoder.first_stage
            if isinstance(stage, VideoAutoencoder):
                self.how = choose(
                    stage, largest_clips(self.config, self.args), self.budget, self.args
                )
        return self.how

    def _encode(
        self,
        kind: str,
        encode: Callable,
        missing: list[Shard],
        by_text: dict[str, Clip],
        by_video: dict[str, Clip],
    ) -> None:
        """Encode and write this rank's part of the missing shards of a kind."""
        of_kind = [shard for shard in missing if shard.kind == kind]
        size = self.groups.world_size
        # In turn, so that the shards that training reads first are written first.
        dealt = [of_kind[rank::size] for rank in range(size)]
        clips = by_text if kind == "text" else by_video
        what = "caption" if kind == "text" else "clip"
        with CacheProgress(self.groups, self.folder, what, dealt) as progress:
            for shard, tensors, rows in encode(dealt[self.groups.rank], clips, progress):
                write_shard(self.folder / shard.file, tensors, rows)
                self._note_bad(shard, rows, by_text, by_video)
                self.bad.check()

    def _encode_text(
        self, shards: Sequence[Shard], clips: dict[str, Clip], progress: CacheProgress
    ) -> Iterator[tuple[Shard, dict[str, Tensor], list[dict]]]:
        if not shards:
            return
        encoder = self._encoder()
        for shard in shards:
            tensors, rows = {}, []
            for start in range(0, len(shard.keys), _CAPTIONS_AT_ONCE):
                keys = shard.keys[start : start + _CAPTIONS_AT_ONCE]
                trusted = self._read_trusted("caption", keys, clips)
                left = [key for key in keys if key not in trusted]
                found = dict(trusted)
                if left:
                    captions = [clips[key].caption for key in left]
                    rng = content_random(left, self.groups.device)
                    embeddings = encoder.encode_captions(captions, rng).cpu()  # sync: into a file
                    found |= zip(left, embeddings, strict=True)
                for i, key in enumerate(keys):
                    row, embedding = {"caption": clips[key].caption}, found[key]
                    if embedding.isfinite().all():
                        tensors[f"{start + i}.embedding"] = embedding.clone()
                    else:
                        row["bad"] = "the embedding of its caption is not finite"
                    rows.append(row)
                progress.add(len(keys))
            yield shard, tensors, rows

    def _encode_videos(
        self, shards: Sequence[Shard], clips: dict[str, Clip], progress: CacheProgress
    ) -> Iterator[tuple[Shard, dict[str, Tensor], list[dict]]]:
        if not shards:
            return
        encoder = self.video_encoder
        if self.how is not None and isinstance(encoder.first_stage, VideoAutoencoder):
            encoder.first_stage.use(self.how)
        at_once = self.args.batch_size
        batches = [
            [clips[key] for key in shard.keys[start : start + at_once]]
            for shard in shards
            for start in range(0, len(shard.keys), at_once)
        ]
        reading = read_ahead(
            _Clips(batches, self.args.decode_timeout),
            range(len(batches)),
            dali=dali_of_this_process(self.clips[0].dataset.settings.video_backend),
            num_workers=self.args.num_workers,
            prefetch_factor=self.args.prefetch_factor,
        )
        with closing(reading) as read:
            for shard in shards:
                tensors, rows = {}, []
                for start in range(0, len(shard.keys), at_once):
                    keys, samples = shard.keys[start : start + at_once], next(read)
                    for row, entry in encode_samples(
                        samples,
                        keys,
                        encoder,
                        self.args.cached_noised_images,
                        self.groups.device,
                        self._read_trusted("clip", keys, clips),
                    ):
                        tensors |= {f"{len(rows)}.{name}": tensor for name, tensor in entry.items()}
                        rows.append(row)
                    progress.add(len(samples))
                yield shard, tensors, rows

    @cached_property
    def video_encoder(self) -> Encoder:
        return self._encoder()

    def _encoder(self) -> Encoder:
        """Return the frozen encoders, which are built on first use.

        Captions have an encoder of their own, whose memory is free before clips are encoded.
        """
        # The encoders need the network's sizes and not its weights.
        with torch.device("meta"):
            transformer = build_transformer(self.config.model)
        return assemble_encoder(
            self.config, self.args, transformer, self.groups, overrides=self.overrides
        )

    def _note_bad(
        self,
        shard: Shard,
        rows: list[dict],
        by_text: dict[str, Clip],
        by_video: dict[str, Clip],
    ) -> None:
        clips = by_text if shard.kind == "text" else by_video
        for key, row in zip(shard.keys, rows, strict=True):
            if "bad" in row and key in clips:
                self.bad.add(clips[key].path, row["bad"])

    def _finish(
        self, plan: list[Shard], by_text: dict[str, Clip], by_video: dict[str, Clip]
    ) -> None:
        """Rewrite the list of bad samples in the order of the plan, and log a summary."""
        lines, num_bytes = {}, 0
        for shard in plan:
            clips = by_text if shard.kind == "text" else by_video
            num_bytes += (self.folder / shard.file).stat().st_size
            for key, row in zip(shard.keys, rows_of(self.folder / shard.file), strict=True):
                if "bad" in row and key in clips:
                    lines.setdefault(clips[key].path, row["bad"])
        # Shards of earlier runs count as well: the limit is one of the data, not of this run.
        for path, reason in lines.items():
            self.bad.add(path, reason)
        self.bad.check()
        text = "".join(json.dumps({"path": p, "reason": r}) + "\n" for p, r in lines.items())
        assert self.bad.file is not None, "__init__ names a file"
        if lines:
            write_text(self.bad.file, text)
        else:
            self.bad.file.unlink(missing_ok=True)
        logger.info(
            "%s: %s in the cache (%.2f GiB), %d of them bad; train with args.latent_cache=%s",
            self.folder,
            counted(len(self.clips), "sample"),
            num_bytes / 2**30,
            len(lines),
            self.folder,
        )


def _in_order(videos: SizedDataset | None, seed: int) -> Iterator[Clip]:
    """Yield the samples in the order in which training first reads them, then the unused ones.

    How buckets alternate depends on the global batch of training, which is unknown here. The size of
    a shard is used instead, so that most shards hold one bucket.
    """
    if videos is None:
        return
    assert isinstance(videos, CaptionedVideos), "preflight refuses other data sets"
    order = videos.order(seed, SHARD_SAMPLES["video"])
    # An epoch need not read samples of a weight below 1: they follow behind it.
    steps = range(order.num_steps(1))
    first = [order.index(step, slot) for step in steps for slot in range(order.global_batch)]
    for index in dict.fromkeys([*first, *used_samples(videos)]):
        yield Clip(videos, index, hash_text(videos.captions[index]))


class _Clips(Reads):
    """Reads micro-batches of samples. An unreadable sample is returned as its BadSample error."""

    def __init__(self, batches: list[list[Clip]], timeout: float) -> None:
        self.batches, self.timeout = batches, timeout

    def name(self, key: int) -> str:
        return ", ".join(clip.path for clip in self.batches[key])

    def __getitem__(self, number: int) -> list[Sample | BadSample]:
        return [self._sample(clip) for clip in self.batches[number]]

    def _sample(self, clip: Clip) -> Sample | BadSample:
        try:
            return read_sample(clip.dataset, clip.index, self.timeout)
        except BadSample as error:
            return error
