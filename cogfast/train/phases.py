"""Builds what the training loop uses, in the order in which mistakes end a run soonest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cogfast.extensions.stores.store as store
from cogfast.config.components import own_optimizer
from cogfast.core.keys import with_origins
from cogfast.core.values import counted, leaves
from cogfast.data.batches import Batch
from cogfast.data.global_order import GlobalOrder
from cogfast.distributed.fused_step import order_by_blocks
from cogfast.distributed.model_batches import ModelBatches
from cogfast.distributed.parallelize import count_trained, run_without_dynamo
from cogfast.distributed.process_groups import ModelParallelUnit, ProcessGroups, start_processes
from cogfast.distributed.zero_engine import ZeroEngine, deepspeed_config
from cogfast.extensions.cache.cached_data import read_from_cache
from cogfast.extensions.cache.command import encode_first
from cogfast.extensions.cache.encode_choice import EncodeChoice, largest_clips
from cogfast.extensions.elastic.elastic import fall_back, follow_world
from cogfast.extensions.exports.export import Exporter
from cogfast.extensions.formats.convert import OTHERS_RUN_DENSE
from cogfast.extensions.page.page import write_facts
from cogfast.extensions.plan.ladder import apply_checkpointing, fit_to_device
from cogfast.extensions.plan.memory import FIT, setup_of
from cogfast.extensions.plan.out_of_memory import MemoryWatch
from cogfast.extensions.publish.publish import warn_of_missing_token
from cogfast.extensions.sample.evaluate import Evaluator
from cogfast.extensions.sample.flags import sampled_tensors
from cogfast.extensions.scores.scores import Scores
from cogfast.extensions.sparse.check import (
    SparseWarmup,
    choose_attention,
    follow_weights,
    use_attention,
)
from cogfast.extensions.stores.mirror import Uploads, copy_of, name_of
from cogfast.kernels.block_kernels import choose_kernels
from cogfast.model.transformer import DiffusionTransformer
from cogfast.model.weights.checkpoint_manifest import (
    RESUMABLE,
    DamagedRun,
    checkpoints_folder,
    read_manifest,
    run_of,
    step_of,
)
from cogfast.train.assembly import (
    DTYPES,
    assemble_datasets,
    assemble_diffusion,
    assemble_encoder,
    assemble_order,
    assemble_transformer,
    check_prior,
)
from cogfast.train.checkpoint.load import load_checkpoint
from cogfast.train.checkpoint.write import CheckpointWriter
from cogfast.train.frozen_encoders import EncodeOverrides
from cogfast.train.keys import TrainKeys
from cogfast.train.optimizer import TENTH, build_optimizer, parameter_groups, warn_of_rate
from cogfast.train.preflight.attention_choice import choose_for_training
from cogfast.train.preflight.check import check_train
from cogfast.train.preflight.header_scan import log_pictures, record_bad, survey_datasets
from cogfast.train.preflight.parts import (
    fit_rates,
    warmup_of,
    warn_of_different_schedules,
    warn_of_image_scale,
)
from cogfast.train.run.folder import (
    adapters_to_resume,
    check_changes,
    create_folder,
    describe_run,
    open_run_folder,
    plain_sections,
)
from cogfast.train.run.opened import Run
from cogfast.train.run.own_classes import Classes, own_classes
from cogfast.train.run.terminal import log_unused, resume_words
from cogfast.train.run.trackers import RunLog
from cogfast.train.video_size import SampleSize, warn_of_pipeline_positions
from cogfast.train.watchers.hang import HangStacks
from cogfast.train.watchers.metrics import BandLosses, Metrics
from cogfast.train.watchers.nonfinite import NonfiniteCheck
from cogfast.train.watchers.parameter_checks import GradientCheck, ReplicaCheck, lora_cannot_learn
from cogfast.train.watchers.profiling import Profiler
from cogfast.train.watchers.watcher import Watcher, Watchers

logger = logging.getLogger(__name__)

# Commands that copy a folder to a store, by its scheme
_COPIES = {"s3": "aws s3 cp --recursive", "gs": "gcloud storage cp --recursive"}


def start(run: Run) -> tuple[Run, ProcessGroups]:
    """Check a run and start its processes. Return it with what its weights, its launch and its devices decide."""
    run = run.with_values(*follow_weights(run.args))
    values, launch = follow_world(run.args, run.deepspeed, run.origins)
    run = run.with_values(values, run.args.key("elastic"))
    args = run.args
    if not args.compile:
        run_without_dynamo()
    # Before process groups and GPU memory, so that a mistake ends the run in seconds.
    check_train(run)
    groups = start_processes(
        args.model_parallel_size, args.context_parallel_size, args.collective_timeout, launch
    )
    groups.check_same(leaves(plain_sections(run.sections)))
    change = partial(setup_of, run)
    if args.fit == "auto" and (values := fit_to_device(change, groups)):
        run = run.with_values(values, FIT)
        check_train(run)
    return run, groups


class Parts:
    """All that the training loop uses. step: completed optimizer steps, of the run that it resumes.

    learning_rate: by step, from 0. num_trained: parameters. num_steps: of the whole run.
    """

    def __init__(
        self, run: Run, overrides: EncodeOverrides, own: Classes, log: RunLog, held: ExitStack
    ) -> None:
        """Check the configuration, start the processes, build the run, and load what it resumes from.

        own: classes. held: what the run holds until its log ends: the lock of its folder, uploads to a store.
        """
        run, groups = start(run)
        args, network, data, model = run.args, run.network, run.data_arguments, run.model
        diffusion = assemble_diffusion(run.denoiser, run.loss, run.sampler)
        if groups.is_main:
            log_unused(run.unused, run.sections["args"], run.origins)
            warn_of_missing_token(args)
            warn_of_different_schedules(diffusion)
            warn_of_pipeline_positions(data, network.config)
            warn_of_image_scale(model, args.load, network.config)
        if args.deterministic:
            torch.use_deterministic_algorithms(True)

        if args.encode_first:
            # Encoding may take hours: the folder that the run needs then is created before.
            groups.on_main(lambda: create_folder(args))
            encode_first(run, args, groups, overrides)
        global_batch = args.batch_size * args.gradient_accumulation_steps * groups.data_size
        # Before the model: headers determine buckets and order, and unreadable data should fail early.
        videos = assemble_datasets(run.data, args, model.inputs, run.is_masked, groups)
        videos, bad = survey_datasets(videos, args, groups, global_batch)
        check_prior(run.loss, network, args, videos.train)
        about = run.sections, run.allow_import, args, model
        datasets = read_from_cache(videos, *about, groups, overrides)
        order = assemble_order(datasets.train, args.seed, global_batch)
        num_steps = args.train_iters if args.epochs is None else order.num_steps(args.epochs)
        assert num_steps is not None, "the door sets a default"
        args, learning_rate = fit_rates(run.origins, args, num_steps)
        run = run.with_values(warmup_of(args, run.args), TENTH)
        if groups.is_main:
            log_pictures(datasets.train, order)
            warn_of_rate(args, num_steps, run.deepspeed.get("optimizer") or {})
        folder, checkpoint, check_owner = open_run_folder(args, groups, held)
        step, manifest = 0, {}
        if checkpoint is not None:
            adapters = groups.on_main(partial(adapters_to_resume, checkpoint))
            if adapters is not None:
                checkpoint = None
                step, args = _take_adapters(name_of(adapters), args, groups)
        if checkpoint is not None:
            manifest = groups.on_main(partial(read_manifest, checkpoint, RESUMABLE))
            args, learning_rate = fit_rates(run.origins, args, num_steps, manifest)
            run = run.with_values(warmup_of(args, run.args), TENTH)
            groups.on_main(
                partial(check_changes, checkpoint, manifest, run.sections, global_batch, own)
            )
            step = manifest["step"]
            if groups.is_main and step > num_steps:
                text = "the checkpoint is at step %d, and the run ends at step %d: nothing is left to train; "
                logger.warning(text + "set args.train_iters above %d", step, num_steps, step)
        # One rank of each machine uploads what its ranks write.
        local = folder if groups.local_rank == 0 else Path()
        self.uploads = Uploads(local, check_owner, groups.is_main)
        held.callback(self.uploads.close)
        about = (checkpoint, manifest, run.sections, run.origins, groups.world_size, own)
        groups.on_main(partial(describe_run, folder, *about))
        if groups.is_main:
            log.open(folder)
            # The headers were read before the folder existed.
            record_bad(folder, bad, len(datasets.train))

        transformer = assemble_transformer(network, args, groups, allow_missing=args.force_train)
        _check_lora(transformer, args, groups)
        exporter = Exporter(args, transformer, num_steps, DTYPES[args.precision])
        # A resumed run keeps its attention backend and the way in which clips are encoded.
        stored, way = manifest.get("attention_backend"), manifest.get("encode_way")
        before = manifest.get("attention")
        chosen = choose_attention(args, network.config, data, before, groups, is_training=True)
        args = args.changed(attention=chosen)
        use_attention(transformer, chosen)
        is_sparse = transformer.sparse_share is not None
        if groups.is_main and is_sparse and args.export != "none":
            text = "args.export=%s and " + OTHERS_RUN_DENSE
            logger.warning(text, args.export, f"args.attention={chosen}")
        backend = choose_for_training(data, args, transformer.config, groups, stored, is_sparse)
        transformer.use_kernels(choose_kernels(args.kernels, backend))
        clips = largest_clips(args, data, network.config, model.en_and_decode_n_samples_a_time)
        encode_choice = EncodeChoice(clips, args, groups, way, datasets.train)
        encoder = assemble_encoder(
            run.frozen, model, args, transformer, groups, encode_choice, overrides, run.tensors
        )
        num_trained, gradient_check = count_trained(transformer), GradientCheck(transformer)
        settings, timeout_s = deepspeed_config(run.deepspeed, args), args.collective_timeout
        section, zero = run.deepspeed.get("optimizer") or {}, settings["zero_optimization"]
        is_muon = own_optimizer(section) == "muon"
        made = parameter_groups(transformer, args.weight_decay, args.optimizer_moments, is_muon)
        made = order_by_blocks(made, transformer, zero, groups.world_size // groups.tensor_size)
        state = args.optimizer_moments, args.ema_device, args.lr
        optimizer = build_optimizer(section, made, args.kernels, run.allow_import, *state)
        # Before ZeRO-3 divides the parameters.
        change = partial(setup_of, replace(run, args=args))
        memory = MemoryWatch(change, groups, self.how_to_resume)
        memory.attention = backend
        mpu = None if groups.tensor is None else ModelParallelUnit(groups)
        # Last, because DeepSpeed copies the loaded weights into its flat partitions.
        engine = ZeroEngine(transformer, optimizer, settings, mpu, timeout_s=timeout_s)
        size = SampleSize(data, transformer.config, args.sampling_fps)
        memory.policies = apply_checkpointing(transformer, args, groups, memory.setup)
        tensors = tuple(sampled_tensors(network.target, data))
        more = (datasets.valid, args, groups, folder, data.get("resize", "crop"), tensors)
        evaluator = Evaluator(engine, diffusion, encoder, *more)
        layout = args.folder_layout
        checkpoints = checkpoints_folder(folder, layout)
        writer = CheckpointWriter(checkpoints, engine, groups, args.keep_last, layout, own)
        writer.check_owner, writer.upload_logs = check_owner, self.uploads.upload
        if checkpoint is not None:
            load_checkpoint(checkpoint, manifest, engine, groups)
            _log_changes(manifest, args, order, len(datasets.train))
            # A run that ends before its first step need not save this one again.
            writer.resume(checkpoint, step)
            logger.info("resumed %s at step %d", name_of(checkpoint), step)
        self.run, self.args, self.groups, self.log = run, args, groups, log
        self.folder, self.held, self.step, self.num_steps = folder, held, step, num_steps
        self.global_batch, self.num_trained = global_batch, num_trained
        self.attention_backend = backend
        self.diffusion, self.datasets, self.order = diffusion, datasets, order
        self.learning_rate, self.size, self.memory = learning_rate, size, memory
        self.encode_choice, self.encoder, self.engine = encode_choice, encoder, engine
        self.bands = BandLosses(diffusion.loss, groups.device)
        self.evaluator, self.exporter, self.writer = evaluator, exporter, writer
        self.gradient_check = gradient_check

    def how_to_upload(self) -> str | None:
        """Return the commands for a checkpoint that is not in its store and from which no restart continues."""
        unsent = self.writer.unsent
        # With args.elastic a restart removes these files, and continues from what is in the store.
        if unsent is None or self.args.elastic != "off":
            return None
        url = name_of(unsent)
        copy = _COPIES.get(url.partition("://")[0], "copy") + f" {unsent} {url}"
        where = " on each machine" if self.groups.world_size > 1 else ""
        how = f"run `{copy}`{where}, then the same command with {self._resume_words(url)}"
        return f"{url} is not in the store; {how}"

    def _resume_words(self, folder: str) -> str:
        return resume_words(self.run.args, self.run.origins, folder)

    def how_to_resume(self) -> str:
        """Describe the last checkpoint and the command that resumes from it."""
        path, folder = self.writer.saved, self.folder
        if self.how_to_upload():
            return f"its files are in {self.writer.unsent}, but not in the store; the log says how to upload them"
        if path is None:
            how = "" if self.args.run_folder is None else f" with {self._resume_words('auto')}"
            return (
                f"nothing is saved in {name_of(folder)}; run the same command{how} to start again"
            )
        # A run that continues another one in a folder of its own may not have saved yet.
        is_own = run_of(path).absolute() == folder.absolute()
        if self.args.elastic != "off":
            return f"the last checkpoint is {name_of(path)}; torchrun, or the same command, resumes from it"
        resume = self._resume_words(name_of(folder if is_own else path))
        return (
            f"the last checkpoint is {name_of(path)}; run the same command with {resume} to resume"
        )


def assemble(run: Run, overrides: EncodeOverrides, kind: type) -> Parts:
    """Build a run of this kind of trainer. Its log ends with the error if that fails."""
    log, held = RunLog(), ExitStack()
    own = own_classes(run.sections, run.allow_import, kind)
    try:
        with with_origins(run.origins):
            return Parts(run, overrides, own, log, held)
    except BaseException as error:
        log.end(error)
        held.close()
        if isinstance(error, DamagedRun) and run.args.elastic != "off":
            fall_back(error, run.args.resume)
        raise


def write_run_facts(parts: Parts, num_steps: int, shows_ema: bool) -> None:
    """Write what the page of a run shows and no other file has. shows_ema: its samples are made with EMA's weights."""
    run = parts.run
    if not parts.groups.is_main:
        return
    write_facts(
        parts.folder,
        run.sections["args"],
        run.origins,
        run.allow_import,
        parts.args,
        parts.attention_backend,
        parts.engine.transformer.config.adapters,
        num_samples=len(parts.datasets.train),
        num_steps=num_steps,
        global_batch=parts.global_batch,
        num_trained=parts.num_trained,
        shows_ema=shows_ema,
    )


class _SharedBadSamples(Watcher):
    """Lists on each machine the bad samples of all, with each line of the log."""

    def __init__(self, batches: ModelBatches) -> None:
        self.batches = batches

    def after_log(self, line: Mapping) -> None:
        self.batches.share_bad()


def assemble_watchers(
    parts: Parts,
    batches: ModelBatches,
    loss_at: Callable[[int, Batch], Tensor],
    save: Callable[[], bool],
) -> tuple[Watchers, Metrics, Scores]:
    """Return what watches the run, and of it the metrics and the scores of evaluations.

    batches: of the run. loss_at: returns the loss of a micro-batch of a step. save: saves a checkpoint of the current step,
    and returns whether that succeeded.
    """
    args, groups, folder, engine = parts.args, parts.groups, parts.folder, parts.engine
    transformer, dataset = engine.transformer, parts.datasets.train
    metrics = Metrics(
        args,
        folder,
        groups,
        engine,
        parts.size,
        parts.bands,
        start_step=parts.step,
        num_steps=parts.num_steps,
        num_slots=parts.order.num_slots,
    )
    scores = Scores(args, folder, metrics, parts.step)
    parts.writer.kept = scores.kept
    # In the order of their calls; closed in the reverse order.
    watchers = [
        HangStacks(folder, groups.rank, args.collective_timeout),
        parts.memory,
        parts.gradient_check,
        NonfiniteCheck(args, groups, folder, engine, dataset, parts.order, loss_at, save),
        metrics,
        scores,
        _SharedBadSamples(batches),
    ]
    if groups.tensor is not None and (every := args.replica_check_interval):
        watchers.insert(4, ReplicaCheck(engine, groups.tensor, every))
    if args.sparse_warmup and transformer.sparse_share is not None:
        watchers.append(SparseWarmup(transformer, args.sparse_warmup))
    if args.profiling is not None and args.profiling >= 0:
        watchers.append(Profiler(folder / "profile", groups, args.profiling))
    return Watchers(watchers), metrics, scores


def _check_lora(transformer: DiffusionTransformer, args: TrainKeys, groups: ProcessGroups) -> None:
    reason = lora_cannot_learn(transformer, groups)
    if reason is None:
        return
    text = f"args.load={args.load}: {reason}, so LoRA gets no gradient at first"
    if not args.force_train:
        raise ValueError(
            f"{text}; set args.load to a trained model, or args.force_train=true to continue"
        )
    logger.warning("%s", text)


def _take_adapters(file: str, args: TrainKeys, groups: ProcessGroups) -> tuple[int, TrainKeys]:
    """Start from a checkpoint of CogVideo's diffusers trainer: its LoRA file, a path or URL, and its step."""
    folder = store.parent(file)
    step = step_of(Path(folder))
    assert step is not None, f"{folder}: a name of such a checkpoint"
    if groups.is_main:
        logger.warning(
            "args.resume=%s: resuming its LoRA weights and its step %d, without the state of its "
            "optimizer, since CogVideo's diffusers trainer wrote it",
            folder,
            step,
        )
    return step, args.changed(load_lora=groups.on_all(partial(copy_of, file)))


def _log_changes(
    manifest: dict[str, Any], args: TrainKeys, order: GlobalOrder, num_samples: int
) -> None:
    """Log what differs from the run that a checkpoint is of, where a run may change it."""
    moments = args.optimizer_moments
    saved = (manifest.get("config") or {}).get("args", {}).get("optimizer_moments", "fp32")
    if saved != moments:
        how = "rounded to 8 bits" if moments == "8bit" else "kept in float32 from here on"
        logger.info("args.optimizer_moments=%s, before %s: the moments are %s", moments, saved, how)
    now, before = (manifest["step"] * n for n in (order.global_batch, manifest["global_batch"]))
    if before != now:
        text = "the global batch has changed: after %d samples, the run continues at number %d, so that %d are %s"
        how = "left out" if now > before else "read again"
        logger.info(text, before, now, abs(before - now), how)
    now = num_samples, order.fingerprint
    before = manifest.get("num_samples", now[0]), manifest.get("data_order", now[1])
    if before != now:
        logger.warning(
            "the data set has changed (%s, before %d%s): from this step on, the order of the samples "
            "is different",
            counted(num_samples, "sample"),
            before[0],
            ""
            if before[0] != num_samples
            else ", with different weights or buckets, or in the order of another version",
        )
