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
from cogfast.core.addresses import name_of, url_of
from cogfast.core.keys import with_origins
from cogfast.core.values import counted, leaves
from cogfast.data.batches import Batch
from cogfast.data.global_order import GlobalOrder
from cogfast.distributed.fused_step import order_by_blocks
from cogfast.distributed.model_batches import ModelBatches
from cogfast.distributed.parallelize import count_trained, run_without_dynamo
from cogfast.distributed.process_groups import ModelParallelUnit, ProcessGroups, start_processes
from cogfast.distributed.step_clock import StepClock
from cogfast.distributed.zero_engine import ZeroEngine, deepspeed_config
from cogfast.extensions.stores.mirror import Uploads, copy_of
from cogfast.extensions.table import hook, hooks
from cogfast.model.transformer import DiffusionTransformer
from cogfast.model.weights.checkpoint_manifest import (
    RESUMABLE,
    DamagedRun,
    checkpoints_folder,
    read_manifest,
    step_of,
)
from cogfast.train.activation_checkpointing import Policy, apply_checkpointing
from cogfast.train.assembly import (
    DTYPES,
    Diffusion,
    assemble_datasets,
    assemble_diffusion,
    assemble_encoder,
    assemble_order,
    assemble_transformer,
    check_prior,
)
from cogfast.train.checkpoint.folder import CheckpointFolder
from cogfast.train.checkpoint.load import load_checkpoint
from cogfast.train.checkpoint.write import CheckpointWriter, no_export
from cogfast.train.frozen_encoders import EncodeOverrides
from cogfast.train.keys import TrainKeys
from cogfast.train.optimizer import TENTH, build_optimizer, parameter_groups, warn_of_rate
from cogfast.train.preflight.attention_choice import choose_attention, follow_weights
from cogfast.train.preflight.check import check_train
from cogfast.train.preflight.encode_choice import EncodeChoice, largest_clips
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
    describe_run,
    open_run_folder,
    plain_sections,
)
from cogfast.train.run.opened import Run
from cogfast.train.run.own_classes import Classes, own_classes
from cogfast.train.run.parts import Data, Folder, Launch, Model, Parts
from cogfast.train.run.terminal import Hints, log_unused
from cogfast.train.run.trackers import RunLog, Trackers
from cogfast.train.video_size import SampleSize, warn_of_pipeline_positions
from cogfast.train.watchers.hang import HangStacks
from cogfast.train.watchers.metrics import Metrics
from cogfast.train.watchers.nonfinite import NonfiniteCheck
from cogfast.train.watchers.out_of_memory import OutOfMemory
from cogfast.train.watchers.parameter_checks import GradientCheck, ReplicaCheck, lora_cannot_learn
from cogfast.train.watchers.profiling import Profiler
from cogfast.train.watchers.training_losses import BandLosses, LoggedValues
from cogfast.train.watchers.watcher import Watcher, Watchers

logger = logging.getLogger(__name__)


def start(run: Run, own: Classes, log: RunLog, held: ExitStack) -> Launch:
    """Check a run and start its processes, with what its weights, its launch and its devices decide."""
    run = run.with_values(*follow_weights(run.args))
    launch = None
    # (args, deepspeed, origins) -> {key of args: value} for the ranks of this launch, the key that
    # decides them, and the launch
    for follow in hooks("follow_world", run.args):
        values, key, launch = follow(run.args, run.deepspeed, run.origins)
        run = run.with_values(values, key)
    args = run.args
    if not args.compile:
        run_without_dynamo()
    # Before process groups and GPU memory, so that a mistake ends the run in seconds.
    check_train(run)
    sizes = args.model_parallel_size, args.context_parallel_size
    groups = start_processes(*sizes, args.collective_timeout, launch)
    groups.check_same(leaves(plain_sections(run.sections)))
    launched = Launch(run=run, args=args, groups=groups, own=own, held=held, log=log)
    # (launch) -> its run, with changes with which that fits on the devices
    for fit in hooks("fit", args):
        if (fitted := fit(launched)) is not run:
            check_train(fitted)
            launched = replace(launched, run=fitted, args=fitted.args)
    if args.deterministic:
        torch.use_deterministic_algorithms(True)
    return launched


def build_diffusion(launch: Launch) -> Diffusion:
    """Build denoiser, loss and sampler, and say what is unusual about the run."""
    run, args = launch.run, launch.args
    diffusion, network = assemble_diffusion(run.denoiser, run.loss, run.sampler), run.network.config
    if launch.groups.is_main:
        log_unused(run.unused, run.sections["args"], run.origins)
        for warn in hooks("warn", args):  # (args)
            warn(args)
        warn_of_different_schedules(diffusion)
        warn_of_pipeline_positions(run.data_arguments, network)
        warn_of_image_scale(run.model, args.load, network)
    return diffusion


def open_data(launch: Launch) -> tuple[Launch, Data]:
    """Find the samples, and encode them if they are encoded first; their headers decide buckets and order."""
    run, args, groups, model = launch.run, launch.args, launch.groups, launch.run.model
    # (run, groups) -> None: writes what the data is read from
    for prepare in hooks("before_data", args):
        prepare(run, groups)
    global_batch = args.batch_size * args.gradient_accumulation_steps * groups.data_size
    # Before the model: unreadable data should fail early.
    datasets = assemble_datasets(run.data, args, model.inputs, run.is_masked, groups)
    datasets, bad = survey_datasets(datasets, args, groups, global_batch)
    check_prior(run.loss, run.network, args, datasets.train)
    about = run.sections, run.allow_import, args, model, run.frozen.overrides
    # (datasets, *about, groups) -> Datasets: reads the same samples from elsewhere
    for read in hooks("read_data", args):
        datasets = read(datasets, *about, groups)
    order = assemble_order(datasets.train, args.seed, global_batch)
    num_steps = args.train_iters if args.epochs is None else order.num_steps(args.epochs)
    assert num_steps is not None, "the door sets a default"
    launch, _ = _with_rates(launch, num_steps, {})
    if groups.is_main:
        log_pictures(datasets.train, order)
        warn_of_rate(launch.args, num_steps, run.deepspeed.get("optimizer") or {})
    data = Data(
        datasets=datasets, order=order, num_steps=num_steps, global_batch=global_batch, bad=bad
    )
    return launch, data


def _with_rates(
    launch: Launch, num_steps: int, manifest: Mapping[str, Any]
) -> tuple[Launch, Callable[[int], float]]:
    """Return the launch with its warm-up, and the learning rate by step. manifest: of what it resumes."""
    run = launch.run
    args, learning_rate = fit_rates(run.origins, launch.args, num_steps, manifest)
    run = run.with_values(warmup_of(args, run.args), TENTH)
    return replace(launch, run=run, args=args), learning_rate


def open_folder(launch: Launch, data: Data) -> tuple[Launch, Folder]:
    """Open the run's folder, compare the run with what it resumes, and describe it there."""
    groups = launch.groups
    path, checkpoint, check_owner = open_run_folder(launch.args, groups, launch.held)
    step, manifest = 0, {}
    if checkpoint is not None:
        adapters = groups.on_main(partial(adapters_to_resume, checkpoint))
        if adapters is not None:
            checkpoint = None
            step, args = _take_adapters(name_of(adapters), launch.args, groups)
            launch = replace(launch, args=args)
    if checkpoint is not None:
        manifest = groups.on_main(partial(read_manifest, checkpoint, RESUMABLE))
    launch, learning_rate = _with_rates(launch, data.num_steps, manifest)
    if checkpoint is not None:
        step = manifest["step"]
        about = launch.run.sections, data.global_batch, launch.own
        groups.on_main(partial(check_changes, checkpoint, manifest, *about))
        if groups.is_main and step > data.num_steps:
            text = "the checkpoint is at step %d, and the run ends at step %d: nothing is left to train; "
            text += "set args.train_iters above %d"
            logger.warning(text, step, data.num_steps, step)
    # One rank of each machine uploads what its ranks write.
    uploads = Uploads(path if groups.local_rank == 0 else Path(), check_owner, groups.is_main)
    launch.held.callback(uploads.close)
    about = launch.run.sections, launch.run.origins, groups.world_size, launch.own
    groups.on_main(partial(describe_run, path, checkpoint, manifest, *about))
    if groups.is_main:
        launch.log.open(path)
        # The headers were read before the folder existed.
        record_bad(path, data.bad, len(data.datasets.train))
    places = {"path": path, "checkpoint": checkpoint, "manifest": manifest, "step": step}
    given = {"learning_rate": learning_rate, "check_owner": check_owner, "uploads": uploads}
    return launch, Folder(**places, **given)


def build_model(launch: Launch, data: Data, folder: Folder) -> tuple[Launch, Model]:
    """Build the transformer, with its weights and kernels, and the encoders."""
    run, groups = launch.run, launch.groups
    args, network, stored = launch.args, run.network, folder.manifest
    transformer = assemble_transformer(network, args, groups, allow_missing=args.force_train)
    _check_lora(transformer, args, groups)
    num_steps, dtype = data.num_steps, DTYPES[args.precision]
    # (args, transformer, num_steps, dtype) -> Export
    export = hook("export", args)
    data_arguments = run.data_arguments
    args, backend = choose_attention(
        transformer, args, data_arguments, stored, groups, is_training=True
    )
    clips = largest_clips(
        args, data_arguments, network.config, run.model.en_and_decode_n_samples_a_time
    )
    # A resumed run keeps the way in which clips are encoded.
    choice = EncodeChoice(clips, args, groups, stored.get("encode_way"), data.datasets.train)
    about = transformer, groups, choice, run.tensors
    encoder = assemble_encoder(run.frozen, run.model, args, *about)
    model = Model(
        transformer=transformer,
        attention_backend=backend,
        encoder=encoder,
        encode_choice=choice,
        num_trained=count_trained(transformer),
        gradient_check=GradientCheck(transformer),
        export=no_export if export is None else export(args, transformer, num_steps, dtype),
    )
    return replace(launch, args=args), model


def build_engine(launch: Launch, model: Model) -> tuple[ZeroEngine, tuple[Policy, ...]]:
    """Build the optimizer and give both to DeepSpeed; what is left of the memory decides checkpointing."""
    run, args, groups, transformer = launch.run, launch.args, launch.groups, model.transformer
    settings, section = deepspeed_config(run.deepspeed, args), run.deepspeed.get("optimizer") or {}
    is_muon = own_optimizer(section) == "muon"
    made = parameter_groups(transformer, args.weight_decay, args.optimizer_moments, is_muon)
    num_data_ranks = groups.world_size // groups.tensor_size
    made = order_by_blocks(made, transformer, settings["zero_optimization"], num_data_ranks)
    optimizer = build_optimizer(section, made, args.kernels, run.allow_import, args.lr, args)
    mpu = None if groups.tensor is None else ModelParallelUnit(groups)
    # Last, because DeepSpeed copies the loaded weights into its flat partitions.
    timeout_s = args.collective_timeout
    engine = ZeroEngine(transformer, optimizer, settings, mpu, timeout_s, StepClock())
    # (launch, transformer) -> the policies of `auto`; None if it cannot predict the run's memory
    choose = hook("policies") if args.activation_checkpointing == "auto" else None
    # Now that all that lasts is in memory
    chosen = None if choose is None else choose(launch, transformer)
    return engine, apply_checkpointing(transformer, args, groups.device, chosen)


def build_writer(
    launch: Launch, data: Data, folder: Folder, engine: ZeroEngine
) -> CheckpointWriter:
    """Build the writer of checkpoints, and load the state of the one that the run continues."""
    args, groups, checkpoint = launch.args, launch.groups, folder.checkpoint
    layout = args.folder_layout
    about = checkpoints_folder(folder.path, layout), layout, groups, folder.check_owner
    if url_of(folder.path) is None:
        checkpoints = CheckpointFolder(*about)
    else:  # (*about, upload_logs) -> a CheckpointFolder whose path stands for one of a store
        checkpoints = hook("stored_checkpoints")(*about, upload_logs=folder.uploads.upload)
    writer = CheckpointWriter(checkpoints, engine, args.keep_last)
    if checkpoint is not None:
        load_checkpoint(checkpoint, folder.manifest, engine, groups)
        _log_changes(folder.manifest, args, data.order, len(data.datasets.train))
        # A run that ends before its first step need not save this one again.
        writer.resume(checkpoint, folder.step)
        logger.info("resumed %s at step %d", name_of(checkpoint), folder.step)
    return writer


def _build(launch: Launch) -> Parts:
    """Run the phases, in the order in which mistakes end a run soonest."""
    diffusion = build_diffusion(launch)
    launch, data = open_data(launch)
    launch, folder = open_folder(launch, data)
    launch, model = build_model(launch, data, folder)
    run, args, groups = launch.run, launch.args, launch.groups
    hints = Hints(args, run.origins, folder.path, groups.world_size)
    engine, policies = build_engine(launch, model)
    size = SampleSize(run.data_arguments, engine.transformer.config, args.sampling_fps)
    shows_ema, evaluator = args.eval_with_ema and "shadow" in engine.state_kinds(), None
    # A call evaluates: (step, size of videos, stop, report_videos) -> {name: held-out loss}.
    if evaluate := hook("evaluate", args):
        about = args, groups, folder.path, run.network.target, run.data_arguments, shows_ema
        evaluator = evaluate(engine, diffusion, model.encoder, data.datasets.valid, *about)
    writer = hints.writer = build_writer(launch, data, folder, engine)
    return Parts(
        launch=launch,
        diffusion=diffusion,
        data=data,
        folder=folder,
        model=model,
        engine=engine,
        size=size,
        policies=policies,
        bands=BandLosses(diffusion.loss, groups.device),
        logged=LoggedValues(groups) if launch.own.get("trainer") else None,
        evaluator=evaluator,
        shows_ema=shows_ema,
        writer=writer,
        hints=hints,
    )


def assemble(run: Run, overrides: EncodeOverrides, kind: type) -> Parts:
    """Build a run of this kind of trainer. Its log ends with the error if that fails."""
    run = replace(run, frozen=replace(run.frozen, overrides=overrides))
    log, held = RunLog(), ExitStack()
    own = own_classes(run.sections, run.allow_import, kind)
    try:
        with with_origins(run.origins):
            return _build(start(run, own, log, held))
    except BaseException as error:
        log.end(error)
        held.close()
        if isinstance(error, DamagedRun):
            for fall_back in hooks(
                "fall_back", run.args
            ):  # (error, args.resume): may raise another one
                fall_back(error, run.args.resume)
        raise


class _SharedBadSamples(Watcher):
    """Lists on each machine the bad samples of all, with each line of the log."""

    def __init__(self, batches: ModelBatches) -> None:
        self.batches = batches

    def after_log(self, line: Mapping) -> None:
        self.batches.share_bad()


class _UploadedFiles(Watcher):
    """Uploads what has changed in the run's folder, if that is in a store."""

    def __init__(self, uploads: Uploads) -> None:
        self.uploads = uploads

    def after_save(self, step: int, path: Path) -> None:
        self.uploads.ask()

    def after_evaluation(
        self, step: int, losses: Mapping[str, float], samples: Path | None
    ) -> None:
        self.uploads.ask()


def assemble_watchers(
    parts: Parts,
    batches: ModelBatches,
    loss_at: Callable[[int, Batch], Tensor],
    save: Callable[[], bool],
) -> tuple[Watchers, Trackers]:
    """Return what watches the run, and what its numbers are written to.

    batches: of the run. loss_at: returns the loss of a micro-batch of a step. save: saves a checkpoint of the current step,
    and returns whether that succeeded.
    """
    args, groups, folder = parts.launch.args, parts.launch.groups, parts.folder.path
    engine, data = parts.engine, parts.data
    dataset = data.datasets.train
    trackers = Trackers(args, folder, parts.folder.step, groups.is_main)
    # (parts) -> Watcher of the memory of a run on GPUs
    on_gpu = hooks("watch_memory") if groups.device.type == "cuda" else []
    of_memory = [watch(parts) for watch in on_gpu]
    # In the order of their calls; closed in the reverse order.
    watchers = [
        HangStacks(folder, groups.rank, args.collective_timeout),
        *of_memory,
        OutOfMemory(parts),
        parts.model.gradient_check,
        NonfiniteCheck(args, groups, folder, engine, dataset, data.order, loss_at, save),
        Metrics(parts, trackers),
        _SharedBadSamples(batches),
    ]
    if groups.tensor is not None and (every := args.replica_check_interval):
        watchers.insert(4, ReplicaCheck(engine, groups.tensor, every))
    if args.profiling is not None and args.profiling >= 0:
        watchers.append(Profiler(folder / "profile", groups, args.profiling, engine.clock))
    # (parts, trackers) -> Watcher, or None where the run gives it nothing to watch
    watchers += filter(None, (watch(parts, trackers) for watch in hooks("watch", args)))
    # Behind all that write files
    return Watchers([*watchers, _UploadedFiles(parts.folder.uploads)]), trackers


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
