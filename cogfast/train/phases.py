"""Builds what the training loop uses, in the order in which mistakes end a run soonest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
    step_of,
)
from cogfast.train.assembly import (
    DTYPES,
    Datasets,
    Diffusion,
    assemble_datasets,
    assemble_diffusion,
    assemble_encoder,
    assemble_order,
    assemble_transformer,
    check_prior,
)
from cogfast.train.checkpoint.load import load_checkpoint
from cogfast.train.checkpoint.write import CheckpointWriter
from cogfast.train.encode import Encoder
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
from cogfast.train.run.terminal import Hints, log_unused
from cogfast.train.run.trackers import RunLog
from cogfast.train.video_size import SampleSize, warn_of_pipeline_positions
from cogfast.train.watchers.hang import HangStacks
from cogfast.train.watchers.metrics import BandLosses, Metrics
from cogfast.train.watchers.nonfinite import NonfiniteCheck
from cogfast.train.watchers.parameter_checks import GradientCheck, ReplicaCheck, lora_cannot_learn
from cogfast.train.watchers.profiling import Profiler
from cogfast.train.watchers.watcher import Watcher, Watchers

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A run and its processes. args: its keys, with what the phases have chosen."""

    run: Run
    args: TrainKeys
    groups: ProcessGroups
    overrides: EncodeOverrides
    own: Classes  # of the user
    held: ExitStack  # what the run holds until its log ends: the lock of its folder, uploads to a store
    log: RunLog


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """What is trained on. num_steps: of the whole run. bad: {name of an unusable sample: reason}."""

    datasets: Datasets
    order: GlobalOrder
    num_steps: int
    global_batch: int
    bad: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Folder:
    """Where the run is written, and the checkpoint that it continues, with completed optimizer steps."""

    path: Path
    checkpoint: Path | None
    manifest: dict[str, Any]
    step: int
    learning_rate: Callable[[int], float]  # by step, from 0
    check_owner: Callable[[], None]
    uploads: Uploads


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What computes: the transformer, and the frozen encoders before it."""

    transformer: DiffusionTransformer
    attention_backend: str | None  # None: the op's default
    encoder: Encoder
    encode_choice: EncodeChoice
    num_trained: int  # parameters
    gradient_check: GradientCheck
    exporter: Exporter


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """All that the training loop uses, as the phases have built it."""

    launch: Launch
    diffusion: Diffusion
    data: Data
    folder: Folder
    model: Model
    engine: ZeroEngine
    size: SampleSize
    memory: MemoryWatch
    bands: BandLosses
    evaluator: Evaluator
    writer: CheckpointWriter
    hints: Hints


def start(
    run: Run, overrides: EncodeOverrides, own: Classes, log: RunLog, held: ExitStack
) -> Launch:
    """Check a run and start its processes, with what its weights, its launch and its devices decide."""
    run = run.with_values(*follow_weights(run.args))
    values, launch = follow_world(run.args, run.deepspeed, run.origins)
    run = run.with_values(values, run.args.key("elastic"))
    args = run.args
    if not args.compile:
        run_without_dynamo()
    # Before process groups and GPU memory, so that a mistake ends the run in seconds.
    check_train(run)
    sizes = args.model_parallel_size, args.context_parallel_size
    groups = start_processes(*sizes, args.collective_timeout, launch)
    groups.check_same(leaves(plain_sections(run.sections)))
    change = partial(setup_of, run)
    if args.fit == "auto" and (values := fit_to_device(change, groups)):
        run = run.with_values(values, FIT)
        check_train(run)
    if args.deterministic:
        torch.use_deterministic_algorithms(True)
    given = {"overrides": overrides, "own": own, "held": held, "log": log}
    return Launch(run=run, args=run.args, groups=groups, **given)


def build_diffusion(launch: Launch) -> Diffusion:
    """Build denoiser, loss and sampler, and say what is unusual about the run."""
    run, args = launch.run, launch.args
    diffusion, network = assemble_diffusion(run.denoiser, run.loss, run.sampler), run.network.config
    if launch.groups.is_main:
        log_unused(run.unused, run.sections["args"], run.origins)
        warn_of_missing_token(args)
        warn_of_different_schedules(diffusion)
        warn_of_pipeline_positions(run.data_arguments, network)
        warn_of_image_scale(run.model, args.load, network)
    return diffusion


def open_data(launch: Launch) -> tuple[Launch, Data]:
    """Find the samples, and encode them if they are encoded first; their headers decide buckets and order."""
    run, args, groups, model = launch.run, launch.args, launch.groups, launch.run.model
    if args.encode_first:
        # Encoding may take hours: the folder that the run needs then is created before.
        groups.on_main(lambda: create_folder(args))
        encode_first(run, args, groups, launch.overrides)
    global_batch = args.batch_size * args.gradient_accumulation_steps * groups.data_size
    # Before the model: unreadable data should fail early.
    videos = assemble_datasets(run.data, args, model.inputs, run.is_masked, groups)
    videos, bad = survey_datasets(videos, args, groups, global_batch)
    check_prior(run.loss, run.network, args, videos.train)
    about = run.sections, run.allow_import, args, model
    datasets = read_from_cache(videos, *about, groups, launch.overrides)
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
    exporter = Exporter(args, transformer, num_steps, dtype)
    args, backend = _choose_attention(launch, transformer, stored)
    clips = largest_clips(
        args, run.data_arguments, network.config, run.model.en_and_decode_n_samples_a_time
    )
    # A resumed run keeps the way in which clips are encoded.
    choice = EncodeChoice(clips, args, groups, stored.get("encode_way"), data.datasets.train)
    about = transformer, groups, choice, launch.overrides, run.tensors
    encoder = assemble_encoder(run.frozen, run.model, args, *about)
    model = Model(
        transformer=transformer,
        attention_backend=backend,
        encoder=encoder,
        encode_choice=choice,
        num_trained=count_trained(transformer),
        gradient_check=GradientCheck(transformer),
        exporter=exporter,
    )
    return replace(launch, args=args), model


def _choose_attention(
    launch: Launch, transformer: DiffusionTransformer, stored: Mapping[str, Any]
) -> tuple[TrainKeys, str | None]:
    """Choose args.attention and the backend, which a resumed run keeps. stored: its manifest."""
    args, groups, data = launch.args, launch.groups, launch.run.data_arguments
    before, config = stored.get("attention"), launch.run.network.config
    chosen = choose_attention(args, config, data, before, groups, is_training=True)
    args = args.changed(attention=chosen)
    use_attention(transformer, chosen)
    is_sparse = transformer.sparse_share is not None
    if groups.is_main and is_sparse and args.export != "none":
        text = "args.export=%s and " + OTHERS_RUN_DENSE
        logger.warning(text, args.export, f"args.attention={chosen}")
    before = stored.get("attention_backend")
    backend = choose_for_training(data, args, transformer.config, groups, before, is_sparse)
    transformer.use_kernels(choose_kernels(args.kernels, backend))
    return args, backend


def build_engine(launch: Launch, model: Model, hints: Hints) -> tuple[ZeroEngine, MemoryWatch]:
    """Build the optimizer and give both to DeepSpeed; what is left of the memory decides checkpointing."""
    run, args, groups, transformer = launch.run, launch.args, launch.groups, model.transformer
    settings, section = deepspeed_config(run.deepspeed, args), run.deepspeed.get("optimizer") or {}
    is_muon, moments = own_optimizer(section) == "muon", args.optimizer_moments
    made = parameter_groups(transformer, args.weight_decay, moments, is_muon)
    num_data_ranks = groups.world_size // groups.tensor_size
    made = order_by_blocks(made, transformer, settings["zero_optimization"], num_data_ranks)
    state = moments, args.ema_device, args.lr
    optimizer = build_optimizer(section, made, args.kernels, run.allow_import, *state)
    # Before ZeRO-3 divides the parameters.
    change = partial(setup_of, replace(run, args=args))
    memory = MemoryWatch(change, groups, hints.how_to_resume)
    memory.attention = model.attention_backend
    mpu = None if groups.tensor is None else ModelParallelUnit(groups)
    # Last, because DeepSpeed copies the loaded weights into its flat partitions.
    timeout_s = args.collective_timeout
    engine = ZeroEngine(transformer, optimizer, settings, mpu, timeout_s=timeout_s)
    memory.policies = apply_checkpointing(transformer, args, groups, memory.setup)
    return engine, memory


def build_writer(
    launch: Launch, data: Data, folder: Folder, engine: ZeroEngine
) -> CheckpointWriter:
    """Build the writer of checkpoints, and load the state of the one that the run continues."""
    args, groups, checkpoint = launch.args, launch.groups, folder.checkpoint
    layout = args.folder_layout
    checkpoints = checkpoints_folder(folder.path, layout)
    writer = CheckpointWriter(checkpoints, engine, groups, args.keep_last, layout, launch.own)
    writer.check_owner, writer.upload_logs = folder.check_owner, folder.uploads.upload
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
    engine, memory = build_engine(launch, model, hints)
    size = SampleSize(run.data_arguments, engine.transformer.config, args.sampling_fps)
    tensors = tuple(sampled_tensors(run.network.target, run.data_arguments))
    resize = run.data_arguments.get("resize", "crop")
    about = data.datasets.valid, args, groups, folder.path, resize, tensors
    evaluator = Evaluator(engine, diffusion, model.encoder, *about)
    writer = hints.writer = build_writer(launch, data, folder, engine)
    bands = BandLosses(diffusion.loss, groups.device)
    return Parts(
        launch=launch,
        diffusion=diffusion,
        data=data,
        folder=folder,
        model=model,
        engine=engine,
        size=size,
        memory=memory,
        bands=bands,
        evaluator=evaluator,
        writer=writer,
        hints=hints,
    )


def assemble(run: Run, overrides: EncodeOverrides, kind: type) -> Parts:
    """Build a run of this kind of trainer. Its log ends with the error if that fails."""
    log, held = RunLog(), ExitStack()
    own = own_classes(run.sections, run.allow_import, kind)
    try:
        with with_origins(run.origins):
            return _build(start(run, overrides, own, log, held))
    except BaseException as error:
        log.end(error)
        held.close()
        if isinstance(error, DamagedRun) and run.args.elastic != "off":
            fall_back(error, run.args.resume)
        raise


def write_run_facts(parts: Parts, num_steps: int, shows_ema: bool) -> None:
    """Write what the page of a run shows and no other file has. shows_ema: its samples are made with EMA's weights."""
    run, model = parts.launch.run, parts.model
    if not parts.launch.groups.is_main:
        return
    write_facts(
        parts.folder.path,
        run.sections["args"],
        run.origins,
        run.allow_import,
        parts.launch.args,
        model.attention_backend,
        model.transformer.config.adapters,
        num_samples=len(parts.data.datasets.train),
        num_steps=num_steps,
        global_batch=parts.data.global_batch,
        num_trained=model.num_trained,
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
    args, groups, folder = parts.launch.args, parts.launch.groups, parts.folder.path
    engine, data, start_step = parts.engine, parts.data, parts.folder.step
    transformer, dataset = engine.transformer, data.datasets.train
    metrics = Metrics(
        args,
        folder,
        groups,
        engine,
        parts.size,
        parts.bands,
        start_step=start_step,
        num_steps=data.num_steps,
        num_slots=data.order.num_slots,
    )
    scores = Scores(args, folder, metrics, start_step)
    parts.writer.kept = scores.kept
    # In the order of their calls; closed in the reverse order.
    watchers = [
        HangStacks(folder, groups.rank, args.collective_timeout),
        parts.memory,
        parts.model.gradient_check,
        NonfiniteCheck(args, groups, folder, engine, dataset, data.order, loss_at, save),
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
