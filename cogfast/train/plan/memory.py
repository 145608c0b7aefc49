"""Predict the memory of a run on one GPU, by part and by phase, before any weights load.

A phase is a moment at which memory can peak: encoding a batch, a micro-batch's backward pass, the
optimizer's step, an evaluation, decoding a sampled video. activations.py counts a block, state.py
weights, optimizer and gradients, encoders.py the VAE and T5. docs/diagnostics.md compares predictions
with PyTorch's allocator.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cogfast.config import Config
from cogfast.core.shapes import SPATIAL_COMPRESSION
from cogfast.kernels.fused_ema_adam import FusedEmaAdam
from cogfast.model.config import TransformerConfig
from cogfast.model.transformer import DiffusionTransformer
from cogfast.schema.arguments import TrainArguments
from cogfast.schema.deepspeed_keys import stage_and_sums
from cogfast.schema.merged_config import to_dict
from cogfast.schema.sat_network import transformer_arguments
from cogfast.train.assembly import DTYPES, build_on_meta
from cogfast.train.distributed.tensor_parallel import ParallelGroup
from cogfast.train.memory.offloaded_activations import NUM_RESIDENT
from cogfast.train.optimizer import build_optimizer
from cogfast.train.plan.activations import LADDER, MARGIN, LayerShape, Policy
from cogfast.train.plan.encoders import Encoders, find_encoders
from cogfast.train.plan.state import (
    ModelSize,
    ZeroRules,
    backward_points,
    host_ema_bytes,
    lasting_state,
    step_bytes,
)
from cogfast.train.video_size import LatentSize, largest_size

GIB = 2**30

# In units of one activation [B, S, M]: what is kept before the first block, beside its input; the
# output layer and the loss; a block's forward pass without gradients, (by rows, shared by ranks).
_EMBEDDED, _HEAD = 0.08, 3
_FORWARD_ONLY = (6, 6)
# cuBLAS and cuDNN workspaces and small tensors that last. On a CPU: what libraries keep, as measured.
_WORKSPACE, _CPU_WORKSPACE = 2**27, 48 * 2**20
_STEP = ("training", "optimizer step")
_UNKNOWN = 2**62  # free bytes of a card that is not known


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The numbers that decide the memory of a run."""

    model: ModelSize
    rules: ZeroRules
    layer: LayerShape  # of the largest micro-batch
    choice: str  # args.activation_checkpointing
    encoders: Encoders
    eval_rows: int  # tokens of the largest forward pass of an evaluation; 0 without one
    batch_bytes: int  # of the batches on the device
    model_size: int = 1
    context_size: int = 1
    is_sampling: bool = False  # args.mode=inference: nothing is trained
    offloads: bool = False  # args.offload_activations
    is_cpu: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.model.blocks)

    @property
    def world_size(self) -> int:
        return self.model_size * self.rules.data_size


@dataclass(frozen=True, slots=True)
class Phase:
    """Bytes by part at the peak of a phase."""

    name: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Prediction for one rank. card: bytes of the device, None if it is unknown."""

    setup: Setup
    policies: tuple[Policy, ...]
    phases: tuple[Phase, ...]
    card: int | None

    @property
    def largest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def peak(self) -> int:
        return self.largest.total

    @property
    def fits(self) -> bool:
        return self.card is None or self.peak <= usable(self.card)

    @property
    def step_peak(self) -> int:
        """Return the peak of a training step without encoding, which a run measures."""
        return max(p.total for p in self.phases if p.name in _STEP)

    def summary(self) -> str:
        """Return one line for the log."""
        names = " + ".join(
            f"{name} {num_bytes / GIB:.1f}"
            for name, num_bytes in self.largest.parts.items()
            if num_bytes >= 0.05 * GIB
        )
        of = "" if self.card is None else f" of {self.card / GIB:.1f}"
        what = f"{self.peak / GIB:.1f}{of} GiB at its peak ({self.largest.name})"
        return f"{what}: {names}" if names else what


def usable(card: int) -> int:
    """Return the bytes of a device that a run may take."""
    return int((1 - MARGIN) * card)


def plan_memory(
    setup: Setup, card: int | None, policies: tuple[Policy, ...] | None = None
) -> MemoryPlan:
    """Predict the peaks. policies: None: those of the setup; `auto` gets the ones that fit on the card."""
    if policies is None:
        policies = (
            choose_policies(setup, usable(card) - gap_bytes(setup) if card else None)
            if setup.choice == "auto"
            else (as_policy(setup.choice),) * setup.num_layers
        )
    return MemoryPlan(setup, policies, tuple(_phases(setup, policies, card)), card)


def ladder_of(setup: Setup) -> tuple[Policy, ...]:
    """Return the policies that `auto` chooses from. What pointwise keeps takes longer to copy to the
    host and back than to compute."""
    return LADDER[: LADDER.index("pointwise")] if setup.offloads else LADDER


def as_policy(name: str) -> Policy:
    return next(policy for policy in LADDER if policy == name)


def choose_policies(setup: Setup, budget: int | None) -> tuple[Policy, ...]:
    """Return the policies that recompute least and fit into `budget` bytes; full if nothing fits.

    All layers climb one rung of LADDER before any climbs the next. The last layers climb first: their
    activations are released first, before the recomputations of the early layers need memory.
    """
    number, ladder = setup.num_layers, ladder_of(setup)
    if budget is None:
        return (ladder[-1],) * number
    chosen: tuple[Policy, ...] = (ladder[0],) * number
    for before, rung in zip(ladder, ladder[1:], strict=False):
        fits = lambda risen, below=before, above=rung: (
            training_phase(setup, (below,) * (number - risen) + (above,) * risen).total <= budget
        )
        low, high = 0, number
        while low < high:  # the largest number of risen layers that fits
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        if low:
            chosen = (before,) * (number - low) + (rung,) * low
        if low < number:
            break
    return chosen


def with_rows(setup: Setup, num_rows: int) -> Setup:
    """Return the setup for micro-batches of num_rows (B S) rows in the blocks."""
    return dataclasses.replace(setup, layer=dataclasses.replace(setup.layer, num_rows=num_rows))


def base_bytes(setup: Setup) -> int:
    """Return the bytes that last from step to step."""
    return sum(base_parts(setup).values())


def gap_bytes(setup: Setup) -> int:
    """Return up to how much more than the plan the allocator reserves in a step, since gradients come to
    lie between activations.

    On a CUDA runtime that computes nothing it was 3.4 GiB for 2B (this says 3.2) and 12.4 for 5B (10.4).
    """
    return setup.rules.partition(setup.model.num_trained) * setup.rules.sum_bytes


def base_parts(setup: Setup, is_evaluated: bool = False) -> dict[str, int]:
    state = lasting_state(setup.model, setup.rules)
    if setup.is_sampling:
        encoders = setup.encoders.resident(is_evaluated=True)
        return {"weights": state.weights, "encoders": encoders, "workspaces": _workspace(setup)}
    parts = {
        "weights": state.weights,
        "master weights": state.master,
        "moments": state.moments,
        "EMA": state.ema,
        "encoders": setup.encoders.resident(is_evaluated),
        "batches, workspaces": setup.batch_bytes + _workspace(setup),
    }
    if setup.is_cpu:
        # The checkpoint's writer keeps its copies, which are host memory on a GPU's machine.
        parts["copy for checkpoints"] = state.master + state.moments + state.ema
    return parts


def _workspace(setup: Setup) -> int:
    return _CPU_WORKSPACE if setup.is_cpu else _WORKSPACE


def training_phase(setup: Setup, policies: Sequence[Policy]) -> Phase:
    """Return the parts at the peak of a backward pass.

    Gradients grow while activations shrink, so the peak may be at any block.
    """
    layer, rules = setup.layer, setup.rules
    kept = [0]
    for policy in policies:
        kept.append(kept[-1] + layer.kept(policy))
    # Offloading leaves what the last blocks before the one at work keep.
    is_partial = setup.offloads and "none" not in policies
    held = lambda end, number: kept[end] - kept[max(0, end - number) if is_partial else 0]
    embedded = layer.kept("full") + int(_EMBEDDED * layer.unit)
    best: dict[str, int] = {}
    offloaded = rules.is_offloaded and rules.stage < 3
    for point in backward_points(setup.model, rules):
        below = embedded + held(max(point.block, 0), 1)
        # Offloaded gradients leave the device bucket by bucket.
        gradients = (
            min(point.gradients, setup.model.largest * rules.weight_bytes)
            if offloaded
            else point.gradients
        )
        running = layer.live if point.block >= 0 else 0
        found = {
            "gradients": gradients,
            "ZeRO's buffers": point.buffers + max(0, point.transient - running),
            "activations": below,
            "block at work": running,
        }
        if sum(found.values()) > sum(best.values()):
            best = found
    base = base_parts(setup)
    head = {
        "gradients": 0,
        "ZeRO's buffers": 0,
        "activations": embedded + held(len(policies), NUM_RESIDENT),
        "block at work": _HEAD * layer.unit,
    }
    return Phase("training", {**base, **max(best, head, key=lambda parts: sum(parts.values()))})


def host_parts(setup: Setup, policies: Sequence[Policy]) -> dict[str, int]:
    """Return the bytes of pinned host memory of one rank, by what they hold."""
    offloaded = policies[:-NUM_RESIDENT] if setup.offloads else ()
    waiting = dataclasses.replace(setup.encoders, are_offloaded=False)
    return {
        "activations": sum(map(setup.layer.kept, offloaded)),
        "encoders": waiting.resident(is_evaluated=True) if setup.encoders.are_offloaded else 0,
        "blocks": setup.model.host_bytes(setup.rules.weight_bytes),
        "EMA": host_ema_bytes(setup.model, setup.rules),
    }


def _phases(setup: Setup, policies: Sequence[Policy], card: int | None) -> list[Phase]:
    if setup.is_sampling:
        return _evaluation_phases(setup, base_parts(setup, is_evaluated=True), card, "sampling")
    phases = [training_phase(setup, policies)]
    base = base_parts(setup)
    phases.append(
        Phase("optimizer step", {**base, "gradients": step_bytes(setup.model, setup.rules)})
    )
    free = usable(card) - sum(base.values()) if card else _UNKNOWN
    if setup.encoders.in_step[1]:
        mode, num_bytes = setup.encoders.encode_peak(max(0, free))
        if num_bytes:
            # Gradients of earlier micro-batches wait.
            waiting = (
                {"gradients": step_bytes(setup.model, setup.rules)}
                if setup.rules.accumulation > 1
                else {}
            )
            parts = {**base, **waiting, **setup.encoders.fetched(setup.encoders.stage_bytes)}
            phases.append(Phase("encoding clips", {**parts, f"VAE ({mode})": num_bytes}))
    prompts = setup.encoders.are_offloaded and setup.encoders.in_evaluation[0]
    if setup.encoders.in_step[0] or prompts:
        parts = {**base, **setup.encoders.fetched(setup.encoders.text_bytes)}
        phases.append(Phase("encoding captions", {**parts, "T5": setup.encoders.text_peak}))
    if setup.eval_rows:
        base = base_parts(setup, is_evaluated=True)
        phases += _evaluation_phases(setup, base, card, "evaluation")
    return phases


def _evaluation_phases(
    setup: Setup, base: dict[str, int], card: int | None, name: str
) -> list[Phase]:
    unit = setup.eval_rows * setup.layer.width * setup.layer.bytes_per_number
    rows, parts = _FORWARD_ONLY
    forward = int(rows * unit + parts * unit / setup.layer.num_parts)
    phases = [Phase(name, {**base, "block at work": forward})]
    free = usable(card) - sum(base.values()) if card else _UNKNOWN
    how, num_bytes = setup.encoders.decode_peak(max(0, free))
    if num_bytes:
        base |= setup.encoders.fetched(setup.encoders.stage_bytes)
        phases.append(Phase("decoding", {**base, f"VAE ({how})": num_bytes}))
    return phases


def setup_of(
    config: Config,
    args: TrainArguments,
    world_size: int,
    transformer: DiffusionTransformer | None = None,
    device_type: str = "cuda",
) -> Setup:
    """Collect what decides the memory of a configuration on `world_size` ranks.

    transformer: of the run, with its shards; None builds it on the meta device.
    """
    is_cpu = device_type == "cpu"
    model_size = args.model_parallel_size
    if transformer is None:
        transformer = meta_transformer(config, args)
    model = transformer.config
    size = largest_size(config, model)
    number = DTYPES[args.precision].itemsize
    shape = (
        args.batch_size,
        size.num_frames,
        size.height * SPATIAL_COMPRESSION,
        size.width * SPATIAL_COMPRESSION,
    )
    encoders = find_encoders(config, args, shape, model.text_length, number)
    # Embeddings have all rows, which are a small part.
    rows = -(-size.num_tokens(model) // args.context_parallel_size)
    eval_batch = args.eval_batch_size or args.batch_size
    # Guidance runs the conditional and the unconditional half together.
    is_sampling = args.mode == "inference"
    eval_rows = 2 * eval_batch * rows if args.has_evaluation or is_sampling else 0
    return Setup(
        model=ModelSize.of(transformer),
        rules=rules_of(config, args, world_size // model_size),
        layer=LayerShape.of(transformer, args.batch_size * rows, number),
        choice=str(args.activation_checkpointing),
        encoders=encoders,
        eval_rows=eval_rows,
        batch_bytes=_batch_bytes(args, encoders, size, model),
        model_size=model_size,
        context_size=args.context_parallel_size,
        is_sampling=is_sampling,
        offloads=args.offload_activations,
        is_cpu=is_cpu,
    )


def _batch_bytes(
    args: TrainArguments, encoders: Encoders, size: LatentSize, model: TransformerConfig
) -> int:
    """Return the bytes of the batch in use and of those that are copied ahead."""
    clip = 3 * math.prod(encoders.shape[1:])
    latents = 3 * 4 * size.channels * size.frames * size.height * size.width
    text = 4 * model.text_length * model.text_hidden_size
    per_sample = latents + text
    if encoders.encodes_clips:
        per_sample += 4 * clip + args.device_prefetch * clip
    return args.batch_size * per_sample


def meta_transformer(config: Config, args: TrainArguments) -> DiffusionTransformer:
    """Build the shard of one rank without memory."""
    no_group: Any = None  # only the size of the group counts here
    size = args.model_parallel_size
    return build_on_meta(config, args, ParallelGroup(0, size, no_group) if size > 1 else None)


def rules_of(config: Config, args: TrainArguments, data_size: int) -> ZeroRules:
    """Return where DeepSpeed and the optimizer keep the state of this configuration."""
    section = to_dict(config.deepspeed)
    zero = section.get("zero_optimization") or {}
    number = DTYPES[args.precision].itemsize
    device = (zero.get("offload_optimizer") or {}).get("device")
    is_offloaded = bool(zero.get("cpu_offload")) or device in ("cpu", "nvme")
    stage, sum_dtype = stage_and_sums(section, args)
    sum_bytes = {"fp32": 4, "fp16": 2, "bf16": 2}.get(str(sum_dtype), number)
    weight = torch.nn.Parameter(torch.zeros(1, 1))
    optimizer = build_optimizer(
        section.get("optimizer") or {}, [{"params": [weight]}], allow_import=config.allow_import
    )
    is_fused_adam = isinstance(optimizer, FusedEmaAdam)
    is_fused = is_fused_adam and args.zero_stage < 3 and not is_offloaded
    return ZeroRules(
        stage=stage,
        data_size=data_size,
        weight_bytes=number,
        sum_bytes=sum_bytes,
        num_moments=2 if "betas" in optimizer.defaults else int("momentum" in optimizer.defaults),
        has_8bit_moments=args.optimizer_moments == "8bit",
        has_ema=is_fused_adam,
        has_host_ema=args.ema_device == "cpu",
        is_fused=is_fused,
        is_offloaded=is_offloaded,
        overlaps=bool(zero.get("overlap_comm", args.zero_stage == 3)),
        accumulation=args.gradient_accumulation_steps,
        bucket=int(float(zero.get("reduce_bucket_size") or 500_000_000)),
        copies_gradients=not is_fused_adam or args.kernels == "torch",
    )


def network_of(config: Config) -> TransformerConfig:
    return TransformerConfig(**transformer_arguments(config.model.network_config.params))
