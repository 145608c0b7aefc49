"""Predict the memory of a run on one GPU, by part and by phase, before any weights load.

A phase is a moment at which memory can peak: encoding a batch, a micro-batch's backward pass, the
optimizer's step, an evaluation, decoding a sampled video. trace.py counts the network, zero.py
weights, optimizer and gradients, encoders.py the VAE and T5. docs/diagnostics.md compares predictions
with PyTorch's allocator.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

from cogfast.distributed.tensor_parallel import ParallelGroup
from cogfast.distributed.zero_engine import stage_and_sums
from cogfast.extensions.memory.offloaded_activations import NUM_RESIDENT
from cogfast.extensions.plan.encoders import Encoders, find_encoders
from cogfast.extensions.plan.trace import Trace, Traces
from cogfast.extensions.plan.zero import (
    DEFAULT_BUCKET,
    Gradients,
    ZeroRules,
    lasting_state,
    num_trained,
    offloaded_blocks,
    step_bytes,
)
from cogfast.extensions.prodigy_muon.optimizers import Muon
from cogfast.kernels.fused_ema_adam import FusedEmaAdam
from cogfast.model.config import TransformerConfig
from cogfast.model.transformer import DiffusionTransformer
from cogfast.train.activation_checkpointing import LADDER, Policy
from cogfast.train.assembly import DTYPES, build_on_meta
from cogfast.train.keys import TrainKeys
from cogfast.train.optimizer import build_optimizer
from cogfast.train.run.opened import Run
from cogfast.train.video_size import LatentSize, batch_sizes, largest_size

FIT = "args.fit=auto"
GIB = 2**30
MARGIN = 0.04  # fraction of the device's memory left free for the allocator's fragmentation
_WORKSPACE = 2**26  # of cuBLAS and cuDNN, and small tensors that last
_UNKNOWN = 2**62  # free bytes of a card that is not known


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The numbers that decide the memory of a run.

    traces: of the shard of one rank. size, batch_size: of the micro-batch with the most tokens.
    eval_shape: (B, S) of an evaluation's forward pass; None without one. batch_bytes: of the batches on
    the device.
    """

    args: TrainKeys
    traces: Traces
    rules: ZeroRules
    size: LatentSize
    batch_size: int
    encoders: Encoders
    eval_shape: tuple[int, int] | None = None
    batch_bytes: int = 0

    @property
    def is_sampling(self) -> bool:
        return self.args.mode == "inference"

    @property
    def transformer(self) -> DiffusionTransformer:
        return self.traces.transformer

    @property
    def world_size(self) -> int:
        return self.args.model_parallel_size * self.rules.data_size

    @property
    def shape(self) -> tuple[int, int]:
        """Return (B, S) of the blocks' input on this rank."""
        context = self.args.context_parallel_size
        return self.batch_size, _rows(self.size, self.transformer.config, context)

    @cached_property
    def num_trained(self) -> int:
        return num_trained(self.transformer)

    @cached_property
    def state(self) -> dict[str, int]:
        return lasting_state(self.transformer, self.rules)

    def kept(self, policies: Sequence[Policy]) -> list[int]:
        return [self.block(number, policy).kept for number, policy in enumerate(policies)]

    def block(self, number: int, policy: Policy) -> Trace:
        return self.traces.block(number, self.shape, policy)

    @property
    def gap_bytes(self) -> int:
        """Return up to how much more than the plan the allocator reserves in a step, since gradients come to
        lie between activations.

        On a CUDA runtime that computes nothing it was 3.4 GiB for 2B (this says 3.2) and 12.4 for 5B (10.4).
        """
        return self.rules.partition(self.num_trained) * self.rules.sum_bytes

    def base_parts(self, is_evaluated: bool = False) -> dict[str, int]:
        """Return the bytes that last from step to step, by part."""
        encoders = self.encoders.resident(is_evaluated or self.is_sampling)
        if self.is_sampling:
            weights = self.state["weights"]
            return {"weights": weights, "encoders": encoders, "workspaces": _WORKSPACE}
        batches = self.batch_bytes + _WORKSPACE
        return {**self.state, "encoders": encoders, "batches, workspaces": batches}

    def host_parts(self, policies: Sequence[Policy]) -> dict[str, int]:
        """Return the bytes of pinned host memory of one rank, by what they hold."""
        args, waiting = self.args, replace(self.encoders, are_offloaded=False)
        kept = self.kept(policies) if args.offload_activations else []
        average = 4 * self.rules.partition(self.num_trained)  # in float32
        return {
            "activations": sum(kept[:-NUM_RESIDENT]),
            "encoders": waiting.resident(is_evaluated=True) * args.offload_encoders,
            "blocks": offloaded_blocks(self.transformer)[0],
            "EMA": average if args.ema_device == "cpu" else 0,
        }


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
        return max(p.total for p in self.phases if p.name in ("training", "optimizer step"))

    def summary(self) -> str:
        parts = self.largest.parts.items()
        names = " + ".join(f"{name} {n / GIB:.1f}" for name, n in parts if n >= 0.05 * GIB)
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
    choice = setup.args.activation_checkpointing
    if policies is None and choice == "auto" and not setup.is_sampling:
        policies = choose_policies(setup, usable(card) - setup.gap_bytes if card else None)
    elif policies is None:
        # Sampling keeps all.
        policy = "none" if choice in (None, "auto") else choice
        policies = (policy,) * len(setup.transformer.blocks)
    return MemoryPlan(setup, policies, tuple(_phases(setup, policies, card)), card)


def choose_policies(setup: Setup, budget: int | None) -> tuple[Policy, ...]:
    """Return the policies that recompute least and fit into `budget` bytes; full if nothing fits.

    All layers climb one rung of LADDER before any climbs the next. The last layers climb first: their
    activations are released first, before the recomputations of the early layers need memory.
    """
    number, ladder = len(setup.transformer.blocks), LADDER
    if setup.args.offload_activations:
        # The bytes that pointwise keeps take longer to copy to the host and back than to compute.
        ladder = LADDER[: LADDER.index("pointwise")]
    if budget is None:
        return (ladder[-1],) * number
    climbed: list[tuple[Policy, ...]] = [
        tuple(above if i >= number - risen else below for i in range(number))
        for below, above in pairwise(ladder)
        for risen in range(1, number + 1)
    ]
    is_too_much = lambda policies: training_phase(setup, policies).total > budget
    fitting = bisect_left(climbed, True, key=is_too_much)
    return climbed[fitting - 1] if fitting else (ladder[0],) * number


def training_phase(setup: Setup, policies: Sequence[Policy]) -> Phase:
    """Return the parts at the peak of a backward pass.

    Gradients grow while activations shrink, so the peak may be at any block.
    """
    edges = setup.traces.edges(setup.size, setup.batch_size)
    gradients = Gradients(setup.transformer, setup.rules)
    # Gradients of an optimizer in host memory leave the device bucket by bucket.
    leaves = setup.rules.is_offloaded and setup.rules.stage < 3
    most = step_bytes(setup.transformer, setup.rules) if leaves else _UNKNOWN
    kept = setup.kept(policies)
    is_partial = setup.args.offload_activations and "none" not in policies
    # Offloading leaves what the last blocks before the one at work keep.
    held = lambda end, number: sum(kept[max(0, end - number) if is_partial else 0 : end])
    parts = [(held(len(kept), NUM_RESIDENT), edges.head)]
    for number in reversed(range(len(policies))):
        parts.append((held(number, 1), setup.block(number, policies[number]).backward))

    def moments() -> Iterator[tuple[int, int, int, int]]:
        """Yield the bytes of `names`."""
        for of_blocks, events in [*parts, (0, edges.embed)]:
            below = edges.embedded + of_blocks
            for event in events:
                yield min(gradients.held, most), gradients.buffers, below, event.peak
                if event.numel:
                    transient = gradients.arrive(event.numel)
                    buffers = gradients.buffers + transient
                    yield min(gradients.held, most), buffers, below, event.live
        transient = gradients.finish()
        yield min(gradients.held, most), gradients.buffers + transient, 0, 0

    names = ("gradients", "ZeRO's buffers", "activations", "block at work")
    best = dict(zip(names, max(moments(), key=sum), strict=True))
    return Phase("training", {**setup.base_parts(), **best})


def _phases(setup: Setup, policies: Sequence[Policy], card: int | None) -> list[Phase]:
    phases, encoders, base = list[Phase](), setup.encoders, setup.base_parts()
    free = lambda base: usable(card) - sum(base.values()) if card else _UNKNOWN
    of_stage = encoders.fetched(encoders.stage_bytes)
    if not setup.is_sampling:
        gradients = {"gradients": step_bytes(setup.transformer, setup.rules)}
        phases += training_phase(setup, policies), Phase("optimizer step", base | gradients)
        mode, num_bytes = encoders.encode_peak(free(base))
        if num_bytes:
            # Gradients of earlier micro-batches wait.
            parts = base | (gradients if setup.rules.accumulation > 1 else {}) | of_stage
            phases.append(Phase("encoding clips", parts | {f"VAE ({mode})": num_bytes}))
        if encoders.in_step[0] or (encoders.are_offloaded and encoders.in_evaluation):
            parts = base | encoders.fetched(encoders.text_bytes) | {"T5": encoders.text_peak}
            phases.append(Phase("encoding captions", parts))
    if setup.eval_shape is not None:
        base = setup.base_parts(is_evaluated=True)
        work = {"block at work": setup.traces.forward(setup.eval_shape)}
        phases.append(Phase("sampling" if setup.is_sampling else "evaluation", base | work))
        how, num_bytes = encoders.decode_peak(free(base))
        if num_bytes:
            phases.append(Phase("decoding", base | of_stage | {f"VAE ({how})": num_bytes}))
    return phases


def setup_of(
    run: Run, world_size: int, traces: Traces | None = None, values: Mapping[str, Any] = {}
) -> Setup:
    """Collect what decides the memory of a run on `world_size` ranks.

    traces: of the same layout, if there are some. values: that the run has in place of its own, by key.
    """
    run = run.with_values(values, FIT)
    args = run.args
    tensor, context = args.model_parallel_size, args.context_parallel_size
    if traces is None:
        # The shard of the rank that has most, without memory and processes
        of_tensor = stand_in(0, tensor) if tensor > 1 else None
        of_context = stand_in(context - 1, context) if context > 1 else None
        traces = Traces(build_on_meta(run.network, args, of_tensor, of_context))
    model = traces.transformer.config
    data = run.data_arguments
    clip, batches = largest_size(data, model), batch_sizes(data, model)
    times, size = max(batches, key=lambda pair: pair[0] * pair[1].num_tokens(model))
    # Pictures are encoded one by one, which takes less than a clip.
    shape = (args.batch_size, clip.num_frames, *clip.pixels)
    captions = args.batch_size * max(times for times, _ in batches)
    parts = run.model, run.data, run.frozen
    encoders = find_encoders(args, *parts, shape, model.text_length, captions)
    # Guidance runs the conditional and the unconditional half together.
    evaluated = args.eval_batch_size or args.batch_size
    eval_sizes = ((2, clip), *batches)
    eval_shapes = [(evaluated * times, _rows(size, model, context)) for times, size in eval_sizes]
    is_evaluated = args.has_evaluation or args.mode == "inference"
    most = max(times * _sample_bytes(encoders, size, model) for times, size in batches)
    return Setup(
        args=args,
        traces=traces,
        rules=rules_of(run.deepspeed, args, world_size // tensor, run.allow_import),
        size=size,
        batch_size=args.batch_size * times,
        encoders=encoders,
        eval_shape=max(eval_shapes, key=math.prod) if is_evaluated else None,
        batch_bytes=args.batch_size * most,
    )


def _rows(size: LatentSize, model: TransformerConfig, context_size: int) -> int:
    return -(-size.num_tokens(model) // context_size)


def _sample_bytes(encoders: Encoders, size: LatentSize, model: TransformerConfig) -> int:
    clip = 3 * size.num_frames * math.prod(size.pixels)
    # Three of the clip's latents, and those of the conditions, in float32
    channels = 2 * model.out_channels + model.in_channels
    latents = 4 * channels * size.frames * size.height * size.width
    per_sample = latents + 4 * model.text_length * model.text_hidden_size
    if encoders.encodes_clips:
        per_sample += encoders.num_videos * 5 * clip  # as bytes and as float32
    return per_sample


def stand_in(rank: int, size: int) -> ParallelGroup:
    """Return a group without processes: on the meta device a collective needs a name alone."""
    # Registers the collectives on the meta device. A run without groups needs no such import.
    import torch.distributed._functional_collectives  # noqa: F401

    named: Any = SimpleNamespace(group_name=f"group/{size}")
    return ParallelGroup(rank, size, named)


def rules_of(
    section: Mapping[str, Any], args: TrainKeys, data_size: int, allow_import: Sequence[str] = ()
) -> ZeroRules:
    """Return where DeepSpeed and the optimizer keep the state of a run. section: deepspeed's."""
    zero, number = section.get("zero_optimization") or {}, DTYPES[args.precision].itemsize
    device = (zero.get("offload_optimizer") or {}).get("device")
    is_offloaded = bool(zero.get("cpu_offload")) or device in ("cpu", "nvme")
    stage, sum_dtype = stage_and_sums(section, args)
    weight = torch.nn.Parameter(torch.zeros(1, 1))
    of_section, groups = section.get("optimizer") or {}, [{"params": [weight]}]
    optimizer = build_optimizer(of_section, groups, allow_import=allow_import, lr=args.lr)
    is_fused_adam = isinstance(optimizer, FusedEmaAdam)
    # Float32 numbers per weight that the optimizer keeps beside the EMA
    moments = 2 if "betas" in optimizer.defaults else int("momentum" in optimizer.defaults)
    if isinstance(optimizer, FusedEmaAdam):
        moments = sum(x.shape == weight.shape for x in optimizer.state_of(weight).values()) - 1
    return ZeroRules(
        stage=stage,
        data_size=data_size,
        weight_bytes=number,
        sum_bytes={"fp32": 4, "fp16": 2, "bf16": 2}.get(str(sum_dtype), number),
        args=args,
        num_moments=moments,
        has_ema=is_fused_adam,
        is_fused=is_fused_adam and args.zero_stage < 3 and not is_offloaded,
        is_offloaded=is_offloaded,
        overlaps=bool(zero.get("overlap_comm", args.zero_stage == 3)),
        accumulation=args.gradient_accumulation_steps,
        bucket=int(float(zero.get("reduce_bucket_size") or DEFAULT_BUCKET)),
        section={**zero, "stage": stage},
        is_muon=isinstance(optimizer, Muon),
        copies_gradients=not is_fused_adam or args.kernels == "torch",
    )
