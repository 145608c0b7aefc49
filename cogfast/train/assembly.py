"""Builds the parts of a run from its configuration: transformer, encoders, data, diffusion."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from cogfast.core.addresses import url_of
from cogfast.core.component import Component
from cogfast.core.values import KeyProblem, counted
from cogfast.data.batches import BatchLoader
from cogfast.data.datasets import CaptionedVideos, ListedVideos, SizedDataset
from cogfast.data.global_order import GlobalOrder, shuffled
from cogfast.data.sources.folders import SourceError
from cogfast.diffusion.denoiser import DiscreteDenoiser
from cogfast.diffusion.loss import VideoDiffusionLoss
from cogfast.diffusion.sampler import VideoDDIMSampler
from cogfast.distributed.context_parallel import split_context
from cogfast.distributed.model_batches import ModelBatches
from cogfast.distributed.parallelize import allocate, compile_blocks, find_shards, parallelize
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.distributed.tensor_parallel import ParallelGroup
from cogfast.distributed.zero_engine import ZeroEngine
from cogfast.extensions.table import hooks
from cogfast.model.autoencoder import FirstStage
from cogfast.model.initialization import initialize
from cogfast.model.keys import ModelKeys
from cogfast.model.lora import is_lora_parameter, without_adapters
from cogfast.model.transformer import DiffusionTransformer, Network
from cogfast.model.weights.load import LoadReport, load_adapters, load_transformer
from cogfast.model.weights.shard import whole_shape
from cogfast.train.frozen_encoders import FrozenParts
from cogfast.train.keys import TrainKeys

if TYPE_CHECKING:
    from cogfast.train.encode import Encoder

logger = logging.getLogger(__name__)

# The kinds of further videos of samples, and what reads them
_OTHERS = {
    "control": ("control videos", "model.conditions: [control]"),
    "mask": ("masks", "model.conditions: [mask, masked_video] or loss_fn_config.params.masked"),
}

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclasses.dataclass(frozen=True, slots=True)
class Diffusion:
    """Denoiser, loss and sampler. A part that the configuration leaves out is None."""

    denoiser: DiscreteDenoiser
    loss: VideoDiffusionLoss | None
    sampler: VideoDDIMSampler | None


def assemble_diffusion(
    denoiser: Component | None, loss: Component | None, sampler: Component | None
) -> Diffusion:
    assert denoiser is not None, "preflight asks for one"
    build = lambda part: None if part is None else part.build()
    return Diffusion(denoiser=denoiser.build(), loss=build(loss), sampler=build(sampler))


def model_changes(
    args: TrainKeys, tensor: ParallelGroup | None, context: ParallelGroup | None
) -> list[Callable[[DiffusionTransformer], None]]:
    """Return what changes a model that is built, with its adapters, on the meta device, in this order.

    tensor, context: the tensor- and the context-parallel group.
    """
    changes: list[Callable] = [lambda model: model.use_sparse_attention(args.sparse_share)]
    if tensor is not None:
        changes.append(partial(parallelize, group=tensor, splits_rows=args.sequence_parallel))
    # (transformer, args) -> None, such as weights in 8 bits
    changes += [partial(change, args=args) for change in hooks("model_change", args)]
    if context is not None:
        changes.append(partial(split_context, group=context))
    return changes


def build_on_meta(
    network: Network,
    args: TrainKeys,
    tensor: ParallelGroup | None = None,
    context: ParallelGroup | None = None,
) -> DiffusionTransformer:
    """Build a rank's shard of the transformer, which takes no memory until `allocate`.

    tensor, context: as for `model_changes`.
    """
    with torch.device("meta"):
        transformer = network.build()
    # A trainable parameter without a gradient would end the run after its first step.
    for name in transformer.unused_parameter_names():
        transformer.get_parameter(name).requires_grad_(False)
    transformer.to(DTYPES[args.precision])
    for change in model_changes(args, tensor, context):
        change(transformer)
    return transformer


def frozen_to_keep(transformer: DiffusionTransformer) -> dict[str, nn.Parameter]:
    """Return the frozen parameters if they are the smaller part, else those that a user's network adds.

    The decision is the same for every parallel layout.
    """
    parameters = dict(transformer.named_parameters())
    frozen = {n: p for n, p in parameters.items() if not p.requires_grad}
    # LoRA's base is left out, since it is in args.load; a few frozen tables are kept.
    if transformer.runtime.held:
        return {}
    num_frozen = sum(math.prod(whole_shape(p)) for p in frozen.values())
    num_trained = sum(math.prod(whole_shape(p)) for p in parameters.values()) - num_frozen
    added = {n: p for n, p in frozen.items() if n in transformer.added}  # no args.load has them
    return frozen if num_frozen < num_trained else added


def assemble_transformer(
    network: Network,
    args: TrainKeys,
    groups: ProcessGroups,
    weights: str | None = None,
    ema: bool | None = False,
    allow_missing: bool = False,
) -> DiffusionTransformer:
    """Build the transformer on the device and load its weights.

    With tensor parallelism this rank holds its shard only. Weights are read one parameter at a time,
    so that no more than one full parameter is in memory beside the model.

    weights: read these instead of args.load and args.load_lora. If they are only a part of the model
    (a LoRA run), args.load supplies the rest. ema: read the averaged copy of `weights`.
    allow_missing: accept an `args.load` that lacks tensors; these are initialized.
    """
    transformer = build_on_meta(network, args, groups.tensor, groups.context)
    allocate(transformer, groups.device)
    # (transformer, device) -> {name: target} of the weights that are no parameters
    for allocate_held in hooks("allocate_held", args):
        transformer.runtime.held = allocate_held(transformer, groups.device)
    held = transformer.runtime.held
    shards = find_shards(transformer)
    # Weights that no file has set: they are initialized below.
    kept = transformer.kept_buffers()
    fresh = {*(name for name, _ in transformer.named_parameters()), *held, *kept}

    def read(action: Callable[[], LoadReport]) -> LoadReport:
        # A shard may be damaged that only one rank reads; the others must not continue without it.
        report = groups.on_all(action)
        fresh.intersection_update(report.missing)
        return report

    def load(path: str, **options: Any) -> LoadReport:
        options |= {"shards": shards, "held": held}
        return read(partial(load_transformer, transformer, path, **options))

    # `weights` are loaded first to see whether they are complete, and again on top of the base.
    report = None if weights is None else load(weights, ema=ema)
    if args.load and (report is None or report.missing):
        new, positions = network.model.new_channels, network.model.learned_positions
        is_new = {"new_channels": new is not None, "positions": positions}
        base = load(args.load, allow_missing=allow_missing, is_base=True, **is_new)
        if base.lacking:
            _refuse_part(f"args.load={args.load}", base)
        base.log()
        report = None if weights is None else load(weights, ema=ema)
    elif report is not None and report.lacking:
        _refuse_part(str(weights), report)
    elif weights is None and args.resume in (None, "auto"):
        logger.info("args.load is not set: the weights are random")
    if args.load_lora is not None and weights is None:
        read(partial(load_adapters, transformer, args.load_lora, shards=shards, held=held))
    if report is not None:
        report.log()
    if new := sum(map(is_lora_parameter, fresh)):
        logger.info("LoRA: %d adapter tensors start from their initial values", new)
    no_file_has = {name for name, _ in transformer.named_buffers()} - {*kept}
    DiffusionTransformer.reset_added(transformer, args.seed, no_file_has)
    if new := sorted(fresh & transformer.added):
        # One name stands for that of each block.
        names = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in new)
        text = "%s adds %s, which start from their own initial values: %s"
        logger.info(text, type(transformer).__name__, counted(len(new), "tensor"), ", ".join(names))
    initialize(transformer, args.seed, shards, fresh, held)
    # Not behind trained weights: an override may do more than this.
    if new:
        transformer.reset_added(args.seed, new)
    if args.compile:
        compile_blocks(transformer)
    return transformer


def _refuse_part(what: str, report: LoadReport) -> NoReturn:
    """Refuse weights that are only a part of the model, such as the checkpoint of a LoRA run."""
    text = f"{what} has {report.num_loaded} tensors and lacks {len(report.lacking)}"
    text += f", first {report.lacking[0]}: a run saves only what it trains, such as adapters; set args.load "
    raise ValueError(f"{text}to the base model's folder (`cogfast sample RUN_FOLDER` reads both)")


def assemble_encoder(
    frozen: FrozenParts,
    model: ModelKeys,
    args: TrainKeys,
    transformer: DiffusionTransformer,
    groups: ProcessGroups,
    before_clips: Callable[[FirstStage, Tensor], None] = lambda stage, clips: None,
    tensors: Iterable[str] = (),
) -> Encoder:
    from cogfast.train.encode import Encoder  # which --dry-run does not need

    device, dtype = groups.device, DTYPES[args.precision]

    # Returns a FirstStage, a TextEncoder or None.
    def build_frozen(part: Component | None) -> Any:
        if part is None:
            return None
        # Large modules take a dtype, so that they are never in memory in float32. They may keep some
        # weights in float32: in fp16, T5 overflows in its second feed-forward matrix.
        if "dtype" in inspect.signature(part.kind).parameters:
            module = part.build(dtype=dtype).to(device)
        else:
            module = part.build().to(device, dtype)
        return module.eval().requires_grad_(False)

    return Encoder(
        partial(build_frozen, frozen.first_stage),
        partial(build_frozen, frozen.text_encoder),
        model,
        transformer.patch_size,
        text_dropout=frozen.text_dropout,
        tensors=tuple(tensors),
        broadcast_within_model=groups.broadcast_tensor_in_model,
        before_clips=before_clips,
        overrides=frozen.overrides,
        device=device if device.type != "cpu" else None,
        is_brief=args.offload_encoders,
    )


def video_data(data: Component | None) -> type[ListedVideos] | None:
    """Return the class of the data set if it reads pixels of video files, else None."""
    target = None if data is None else data.kind
    if isinstance(target, type) and issubclass(target, ListedVideos) and target.reads_pixels:
        return target
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class Datasets:
    train: SizedDataset
    valid: SizedDataset | None


def assemble_datasets(
    data: Component | None,
    args: TrainKeys,
    inputs: Sequence[str] = (),
    is_masked: bool = False,
    groups: ProcessGroups | None = None,
) -> Datasets:
    """Build the training and validation data sets, of videos.

    inputs: the conditions of the model. is_masked: the loss takes masks. Rank 0 of `groups` lists their files for all; data sets with a `find` of a user's own list them on
    each rank. Without args.valid_data, validation uses the manifest rows of split `valid`, or else a fraction of
    the training data (args.split).
    """
    if data is not None and groups is not None and _is_listed_by_cogfast(data.kind):
        data = dataclasses.replace(data, kind=partial(data.kind.listed_by, groups.on_main))
    build = partial(_dataset, data, inputs=inputs, is_masked=is_masked)
    whole = build(args.key("train_data"), args.train_data)
    if args.train_data_weights is not None:
        if not isinstance(whole, CaptionedVideos):
            text = f"args.train_data_weights={args.train_data_weights}: {type(whole).__name__} does not report the "
            raise ValueError(f"{text}sources of its samples; remove the key")
        whole = whole.with_source_weights(args.train_data_weights)
    train, valid = whole, None
    if isinstance(whole, CaptionedVideos) and whole.clips.splits is not None:
        # Rows of split test are in neither part.
        train, valid = (whole.with_clips(whole.clips.in_split(n)) for n in ("train", "valid"))
        if not len(train):
            text = "args.train_data: no row has split train; change column split of the manifest"
            raise ValueError(text)
    if args.valid_data:
        valid = build(args.key("valid_data"), args.valid_data)
        if isinstance(valid, CaptionedVideos) and valid.clips.splits is not None:
            valid = valid.with_clips(valid.clips.in_split("valid"))
    # A manifest without rows of split `valid` uses args.split.
    if valid is not None and len(valid):
        return Datasets(train, _each_once(valid, args))
    shares = [float(s) for s in args.split.split(",")]
    # The third share, SAT's test data, stays in the training data: there is no test phase.
    num_valid = round(len(train) * shares[1] / sum(shares)) if len(shares) > 1 else 0
    if num_valid == 0:
        return Datasets(train, None)
    held_out = sorted(shuffled(i, len(train), args.seed, "split") for i in range(num_valid))
    rest = np.delete(np.arange(len(train)), held_out).tolist()  # sync: none, of NumPy
    return Datasets(_part(train, rest), _each_once(_part(train, held_out), args))


def _each_once(dataset: SizedDataset, args: TrainKeys) -> SizedDataset:
    """Return held-out data, for args.strict_eval without weights other than 0 and 1."""
    if not (args.strict_eval and isinstance(dataset, CaptionedVideos)):
        return dataset
    weights = dataset.clips.weights
    if weights is not None:
        weights = None if (weights > 0).all() else (weights > 0).astype(float)
    return dataset.with_clips(dataclasses.replace(dataset.clips, weights=weights))


def _is_listed_by_cogfast(kind: Any) -> TypeGuard[type[ListedVideos]]:
    """Return whether a class lists its samples by a `find` of cogfast's. One of a user's own may keep values in its
    data set, so that each rank calls it."""
    if not (isinstance(kind, type) and issubclass(kind, ListedVideos)):
        return False
    return kind.find.__module__ == ListedVideos.__module__


def _dataset(
    data: Component | None,
    key: str,
    sources: Sequence[str],
    inputs: Sequence[str],
    is_masked: bool,
) -> SizedDataset:
    """Build the data set of the sources that `key` lists."""
    if data is None:
        raise ValueError("the data section is missing; set data.target, as sft.yaml does")
    if not sources:
        raise ValueError(f"{key} is empty; set it to the folders of your videos")
    twice = next((source for source in sources if sources.count(source) > 1), None)
    if twice is not None:
        logger.warning("%s lists %s more than once; its samples are repeated", key, twice)
    try:
        made = data.build(data_dir=list(sources))
        return _with_others(made, key, inputs, is_masked)
    except ValueError as error:
        # Data sets do not know their sources' key. instantiate may have put the error into its own.
        cause = error.__cause__ or error
        if isinstance(cause, SourceError):
            raise KeyProblem(key, f"{key}={cause}") from None
        raise ValueError(str(error)) from error  # of a user's own class, whose file is not to blame


def _with_others(
    dataset: SizedDataset, key: str, inputs: Sequence[str], is_masked: bool
) -> SizedDataset:
    """Return a data set of videos whose samples have the controls and masks that model and loss take."""
    if not isinstance(dataset, CaptionedVideos):
        return dataset
    others = dataset.clips.others
    are_tensors = {name for name, one in others.items() if one.shape is not None}
    unused = {*others} - {*inputs, *(["mask"] * is_masked), *are_tensors}
    for name in sorted(unused):
        logger.info("%s: %s are not read; %s reads them", key, *_OTHERS[name])
    if is_masked and "mask" not in others and key == TrainKeys.key("train_data"):
        text = f"{key}: no sample has a mask, but loss_fn_config.params.masked is set"
        text += "; list masks in column mask of a manifest, in masks.txt beside videos.txt"
        raise ValueError(f"{text}, or as x.mask.mp4 in a shard, or remove the key")
    if unused:
        dataset = dataset.with_clips(dataset.clips.without(unused))
    if "control" in inputs:
        files = others["control"].files if "control" in others else [""] * len(dataset)
        lacking = [i for i, file in enumerate(files) if not file]
        if lacking:
            raise ValueError(
                f"{key}: {len(lacking)} of {counted(len(dataset), 'sample')} have no control video, first "
                f"{dataset.name(lacking[0])}, which model.conditions needs; list one for each clip, in "
                "column control of a manifest, in controls.txt beside videos.txt, or as x.control.mp4 in a shard"
            )
    return dataset


def check_prior(
    loss: Component | None, network: Network, args: TrainKeys, dataset: SizedDataset
) -> None:
    """Raise ValueError if samples have the base model as target, but adapters are not all that is trained;
    if all have it; and if none has it, but the key of its weight is set."""
    if not isinstance(dataset, CaptionedVideos):
        return
    key = "loss_fn_config.params.prior_weight"
    num_prior = 0 if dataset.clips.prior is None else int(dataset.clips.prior.sum())
    if not num_prior:
        if loss is not None and loss.params.get("prior_weight") is not None:
            text = f"args.train_data: no sample has prior: true, but {key} is set"
            raise ValueError(f"{text}; set prior in rows of a manifest, or remove the key")
        return
    if num_prior == len(dataset):
        text = "args.train_data: all samples have prior: true, so that nothing is learned"
        raise ValueError(f"{text}; add samples without it")
    names = (n for n, p in build_on_meta(network, args).named_parameters() if p.requires_grad)
    if all(map(is_lora_parameter, names)):
        return
    having = counted(num_prior, "sample has", "samples have")
    text = f"args.train_data: {having} prior: true, whose target is the model without its adapters"
    text += ", but this run trains other weights than LoRA's"
    raise ValueError(f"{text}; set args.lora_rank=64 (or another rank), or remove column prior")


def _part(dataset: SizedDataset, indices: Sequence[int]) -> SizedDataset:
    if isinstance(dataset, CaptionedVideos):
        return dataset.part(indices)
    whole: Any = dataset  # Subset asks for a torch Dataset, but anything with items works
    return Subset(whole, indices)


def assemble_order(dataset: SizedDataset, seed: int, global_batch: int) -> GlobalOrder:
    """Return the reading order of a data set's samples."""
    if isinstance(dataset, CaptionedVideos):
        return dataset.order(seed, global_batch)
    return GlobalOrder(len(dataset), seed, global_batch)


def assemble_batches(
    dataset: SizedDataset,
    args: TrainKeys,
    groups: ProcessGroups,
    folder: Path,
    start_step: int = 0,
    num_steps: int | None = None,
    list_name: str = "bad_samples.jsonl",
) -> ModelBatches:
    """Return the micro-batches of this rank from `start_step` on, of `num_steps` steps or without an end.

    list_name: of the file in `folder` that lists bad samples.
    """
    accumulation = args.gradient_accumulation_steps
    global_batch = args.batch_size * accumulation * groups.data_size
    loader = None
    # The first of the ranks that work on the same samples reads and broadcasts.
    if groups.is_first_of_model:
        loader = BatchLoader(
            dataset,
            assemble_order(dataset, args.seed, global_batch),
            micro_batch=args.batch_size,
            accumulation=accumulation,
            dp_rank=groups.data_rank,
            dp_size=groups.data_size,
            start_step=start_step,
            num_steps=num_steps,
            num_workers=args.num_workers,
            prefetch_factor=args.prefetch_factor,
            timeout=args.decode_timeout,
            bad_samples_path=folder / list_name,
            max_bad_fraction=args.max_bad_fraction,
        )
    return ModelBatches(loader, groups, url_of(folder) is not None)


def prior_samples(
    batch: dict, dataset: SizedDataset, engine: ZeroEngine, groups: ProcessGroups
) -> Tensor | None:
    """Return which samples [B] have the base model's own estimate as target; None if it is not needed.

    Ranks of one model have the same samples. Under ZeRO-3 all ranks run each micro-batch together.
    """
    if not isinstance(dataset, CaptionedVideos) or dataset.clips.prior is None:
        return None
    is_prior = batch["prior"]  # a list, so that the decision waits for no device
    if not any(is_prior) and engine.stage < 3:
        return None
    return torch.tensor(is_prior).to(groups.device, non_blocking=True)


@torch.no_grad()
def estimate_by_base(engine: ZeroEngine, predict: Callable[[], Tensor]) -> Tensor:
    """Return what `predict` returns of the model without its adapters, [B, C, T, h, w]."""
    transformer = engine.transformer
    # Evaluation mode leaves out activation checkpointing, which a pass without gradients has no use for.
    is_training = transformer.training
    transformer.eval()
    with without_adapters(transformer):
        estimate = predict()
    transformer.train(is_training)
    return estimate
