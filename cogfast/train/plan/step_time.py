"""Predict the time of an optimizer step: what one GPU computes, moves and sends, over its rates.

    matmul         FLOPs of the linears, over the rate of large matrix products
    attention      FLOPs of attention, forward and backward, over a rate for each
    memory-bound   bytes that norms, rotation, gelu, residuals and the optimizer read and write
                   (docs/kernels.md), over the rate of a copy
    communication  bytes between GPUs (traffic.py) over the links, without what overlaps computation
    transfers      bytes between host and GPU that computation does not hide, of offloaded blocks and
                   activations; int8 weights of a frozen base are dequantized in memory-bound time

What activation checkpointing recomputes counts. Batches of latents and embeddings are assumed: the
time of the VAE and the text encoder is not in it, nor is an EMA in host memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cogfast.model.block import MLP_RATIO
from cogfast.model.config import TransformerConfig
from cogfast.model.lora import NUM_PARTS, TARGETS
from cogfast.train.memory.host_blocks import NUM_SLOTS
from cogfast.train.memory.offloaded_activations import NUM_RESIDENT
from cogfast.train.plan.activations import Policy
from cogfast.train.plan.flops import train_flops
from cogfast.train.plan.gpus import Gpu
from cogfast.train.plan.memory import MemoryPlan
from cogfast.train.plan.traffic import Layout, Traffic, count_traffic, gradient_reaches, held_model

LINK_BETWEEN = 45e9  # bytes/s of a GPU to other machines: a 400 Gbit/s card for each, at 90%
GPUS_PER_MACHINE = 8
BUCKET_NUMEL = 500_000_000  # DeepSpeed's default for reduce_bucket_size

# Shares of a data sheet's rates that large matrix products, attention at a head width of 64, copies
# and collectives are assumed to reach. They were not measured.
MATMUL_SHARE, FORWARD_SHARE, BACKWARD_SHARE, COPY_SHARE, LINK_SHARE = 0.65, 0.5, 0.4, 0.85, 0.8

# FLOPs of a block's linears, in units of B S M^2.
_QKV, _OUT, _FC = 6, 2, 8
# Bytes of a block, in units of one activation [B, S, M]: forward, backward. The first row is for
# kernels whose rows tensor-parallel ranks repeat, the second for those that split heads or columns.
_NORMS, _SPLIT = (2 + 4 + 3, 4 + 6 + 3), (4 + 8, 8 + 12)
_FROZEN_NORMS_BACKWARD = 4 + 5 + 2
_QKV_BIAS = 3  # its gradient is a sum over the rows of QKV's
_EDGES = 16  # embeddings, final norms and their gradients, once for all blocks
_OPTIMIZER_BYTES = {2: 38, 4: 44}  # per parameter of the partition, by bytes of the training dtype
_MODULATION = 12  # vectors of a block
FP8_SPEED = 2  # rate of fp8 products, in multiples of bf16's, on every GPU that has them


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Rates of a GPU. matmul, attention_*, peak: FLOP/s; copy: bytes read and written per second;
    link, link_between: bytes/s sent to GPUs of the same machine and of others. host: bytes/s from or to
    host memory, in both directions at once; unlimited where the device computes in host memory.

    peak: of the data sheet, for MFU; None if it is unknown. source: shown beside the prediction.
    """

    matmul: float
    attention_forward: float
    attention_backward: float
    copy: float
    link: float
    link_between: float = LINK_BETWEEN
    host: float = math.inf
    peak: float | None = None
    is_measured: bool = False
    source: str = ""


def stated_rates(gpu: Gpu, link_between: float = LINK_BETWEEN) -> Rates:
    """Return the rates of a data sheet times the shares that are assumed to be reached."""
    peak = gpu.matmul_tflop_per_s * 1e12
    return Rates(
        matmul=MATMUL_SHARE * peak,
        attention_forward=FORWARD_SHARE * peak,
        attention_backward=BACKWARD_SHARE * peak,
        copy=COPY_SHARE * gpu.copy_tb_per_s * 1e12,
        link=LINK_SHARE * gpu.link_gb_per_s * 1e9,
        link_between=link_between,
        host=LINK_SHARE * gpu.host_gb_per_s * 1e9,
        peak=peak,
        source=f"an estimate from the data sheet of {gpu.name}",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """FLOPs and bytes of one GPU in an optimizer step. num_bytes: read and written by memory-bound kernels.

    weight_flops: the part of matmul_flops that weights' gradients take; fp8_flops: the part in fp8.
    """

    matmul_flops: float
    weight_flops: float
    attention_forward_flops: float
    attention_backward_flops: float
    num_bytes: float
    fp8_flops: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """The keys of a run that save memory of its GPU, in exchange for time.

    quantization: args.quantize_base. num_offloaded: args.offload_blocks; block_bytes: of one such
    block in host memory. kept_bytes: that each block keeps in host memory for a micro-batch; empty
    without args.offload_activations.
    """

    quantization: Literal["none", "int8", "fp8"] = "none"
    num_offloaded: int = 0
    block_bytes: int = 0
    kept_bytes: tuple[int, ...] = ()

    @classmethod
    def of(cls, plan: MemoryPlan) -> Saving:
        setup, model = plan.setup, plan.setup.model
        kept = [setup.layer.kept(p) for p in plan.policies[:-NUM_RESIDENT] if setup.offloads]
        number, is_fp8 = model.num_offloaded, plan.setup.layer.is_fp8
        return cls(
            quantization="none" if not model.is_quantized else "fp8" if is_fp8 else "int8",
            num_offloaded=number,
            block_bytes=model.host_bytes(setup.rules.weight_bytes) // max(number, 1),
            kept_bytes=tuple(kept),
        )

    def num_held(self, num_layers: int) -> int:
        """Return the number of last blocks whose linears' weights are no parameters."""
        return self.num_offloaded if self.quantization == "none" else num_layers


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Predicted seconds of an optimizer step. communication, transfers: what computation does not hide.

    hidden, hidden_transfers: what is sent or copied beside computation. mfu: model FLOPs over the peak;
    None if it is unknown. samples_per_second: of all GPUs.
    """

    matmul: float
    attention: float
    memory_bound: float
    communication: float
    hidden: float
    transfers: float
    hidden_transfers: float
    mfu: float | None
    samples_per_second: float
    is_measured: bool
    source: str

    @property
    def seconds(self) -> float:
        computed = self.matmul + self.attention + self.memory_bound
        return computed + self.communication + self.transfers


def estimate(
    config: TransformerConfig,
    num_tokens: int,
    layout: Layout,
    rates: Rates,
    policies: Policy | Sequence[Policy] = "none",
    *,
    overlaps_gradients: bool = True,
    bucket_numel: int = BUCKET_NUMEL,
    saving: Saving = Saving(),
) -> StepTime:
    """Predict the time of an optimizer step.

    num_tokens: S of one sample, text included. policies: of activation checkpointing, one or one for
    each block; `layout.is_recomputed` follows from them. overlaps_gradients: DeepSpeed's
    overlap_comm. bucket_numel: its reduce_bucket_size. saving: `layout.num_held` follows from it.
    """
    every = _of_layers(config, policies)
    num_held = saving.num_held(config.num_layers)
    layout = replace(layout, is_recomputed=set(every) != {"none"}, num_held=num_held)
    work = count_work(config, num_tokens, layout, every, saving.quantization)
    matmul, attention, memory_bound = _seconds(work, rates)
    computed = matmul + attention + memory_bound
    traffic = _traffic(config, num_tokens, layout)
    is_inside = layout.model_size * layout.context_size <= GPUS_PER_MACHINE
    rate = rates.link if is_inside else min(rates.link, rates.link_between)
    sent = (traffic.activations + traffic.rows) / rate
    # Nothing is left to compute while rows and heads are exchanged.
    exposed = sent - min(traffic.overlapped / rate, work.weight_flops / rates.matmul)
    if layout.num_replicas > 1:
        rate = _rate_among_copies(layout, rates)
        gradients, weights = traffic.gradients / rate, traffic.weights / rate
        sent += gradients + weights
        if overlaps_gradients:
            # The gradients in the last bucket are sent when there is nothing left to compute.
            last = _last_bucket(config, layout, bucket_numel)
            gradients = max(last * gradients, gradients - _BACKWARD_PART * computed)
        if layout.zero_stage == 3:
            # Gathers run ahead of the blocks that need them.
            weights = max(0.0, weights - (1 - _BACKWARD_PART) * computed)
        exposed += gradients + weights
    transfers, hidden_transfers = _transfers(config, num_tokens, layout, rates, every, saving)
    seconds = computed + exposed + transfers
    samples = layout.batch_size * layout.accumulation * layout.data_size
    flops = samples * train_flops(config, num_tokens) / layout.world_size
    return StepTime(
        matmul=matmul,
        attention=attention,
        memory_bound=memory_bound,
        communication=exposed,
        hidden=sent - exposed,
        transfers=transfers,
        hidden_transfers=hidden_transfers,
        mfu=None if rates.peak is None else flops / seconds / rates.peak,
        samples_per_second=samples / seconds,
        is_measured=rates.is_measured,
        source=rates.source,
    )


_BACKWARD_PART = 2 / 3  # of the computation; communication of gradients can overlap it


def _of_layers(
    config: TransformerConfig, policies: Policy | Sequence[Policy]
) -> tuple[Policy, ...]:
    if isinstance(policies, str):
        return (policies,) * config.num_layers
    assert len(policies) == config.num_layers, f"{len(policies)} policies"
    return tuple(policies)


def _seconds(work: Work, rates: Rates) -> tuple[float, float, float]:
    """Return the seconds of matrix products, attention and memory-bound kernels."""
    forward = work.attention_forward_flops / rates.attention_forward
    attention = forward + work.attention_backward_flops / rates.attention_backward
    matmul = (work.matmul_flops - work.fp8_flops * (1 - 1 / FP8_SPEED)) / rates.matmul
    return matmul, attention, work.num_bytes / rates.copy


def _transfers(
    config: TransformerConfig,
    num_tokens: int,
    layout: Layout,
    rates: Rates,
    policies: Sequence[Policy],
    saving: Saving,
) -> tuple[float, float]:
    """Return the seconds of copies between host and GPU that computation does not hide, and those that
    it hides.

    While one block computes, what the one before it keeps is copied to the host, and what the next one
    needs is copied from there.
    """
    if not saving.num_offloaded and not saving.kept_bytes:
        return 0.0, 0.0
    num_layers, reaches = config.num_layers, gradient_reaches(held_model(config, layout.model_size))
    num_reached = sum(reached for _, reached in reaches)
    given = (config, num_tokens, layout, policies)
    whole = _count_blocks(*given, reaches, saving.quantization)
    forward = _count_blocks(*given, [(False, False)] * num_layers, saving.quantization)
    forward_seconds = sum(_seconds(forward, rates))
    backward_seconds = sum(_seconds(whole, rates)) - forward_seconds
    beside = forward_seconds / num_layers, backward_seconds / max(num_reached, 1)
    fetches = _fetches(num_layers, saving.num_offloaded, num_reached)
    kept = [*saving.kept_bytes, *[0] * (num_layers - len(saving.kept_bytes))]
    fetched = [[saving.block_bytes * (i in each) for i in range(num_layers)] for each in fetches]
    first = num_layers - num_reached
    back = [size + kept[i] * (i >= first) for i, size in enumerate(fetched[1])]
    # In forward the two directions are used at once: the slower one counts.
    copies = [(fetched[0], beside[0]), (kept, beside[0]), (back, beside[1])]
    total = [sum(sizes) / rates.host for sizes, _ in copies]
    over = [sum(max(0.0, size / rates.host - most) for size in sizes) for sizes, most in copies]
    exposed = max(over[:2]) + over[2]
    copied = max(total[:2]) + total[2]
    hidden = max(0.0, copied - exposed)
    return layout.accumulation * exposed, layout.accumulation * hidden


def _fetches(num_layers: int, num_offloaded: int, num_reached: int) -> tuple[set[int], set[int]]:
    """Return the blocks that host_blocks.py fetches in a forward and in a backward pass.

    num_reached: last blocks that have a backward pass.
    """
    first, size = num_layers - num_offloaded, min(NUM_SLOTS, num_offloaded)
    slots: dict[int, int] = {}

    def run(order: range) -> set[int]:
        fetched = set()
        for number in order:
            for wanted in (number, number + order.step):
                if first <= wanted < num_layers and slots.get(wanted % size) != wanted:
                    slots[wanted % size] = wanted
                    fetched.add(wanted)
        return fetched

    passes = range(num_layers), range(num_layers - 1, num_layers - num_reached - 1, -1)
    for order in passes:  # the first micro-batch begins with empty slots
        run(order)
    return run(passes[0]), run(passes[1])


def _traffic(config: TransformerConfig, num_tokens: int, layout: Layout) -> Traffic:
    if layout.zero_stage < 3 or config.lora_rank is None:
        return count_traffic(config, layout, num_tokens)
    # Frozen weights are gathered as trained ones are, except a few that backward does not need.
    adapters = count_traffic(config, replace(layout, zero_stage=2), num_tokens)
    whole = count_traffic(replace(config, lora_rank=None), layout, num_tokens)
    return replace(adapters, gradients=adapters.gradients / 2, weights=whole.weights)


def _rate_among_copies(layout: Layout, rates: Rates) -> float:
    if layout.world_size <= GPUS_PER_MACHINE:
        return rates.link
    # A ring leaves a machine once, and uses the network cards of all its GPUs. The GPUs of a copy
    # are in rings of their own, which share the cards.
    return min(rates.link, rates.link_between * GPUS_PER_MACHINE / layout.model_size)


def _last_bucket(config: TransformerConfig, layout: Layout, bucket_numel: int) -> float:
    trained = _num_trained(config, layout)
    return (trained % bucket_numel or min(trained, bucket_numel)) / trained


def _num_trained(config: TransformerConfig, layout: Layout) -> int:
    """Return the number of trained parameters on one GPU, before ZeRO divides them."""
    transformer = held_model(config, layout.model_size)
    return sum(p.numel() for p in transformer.parameters() if p.requires_grad)


def count_work(
    config: TransformerConfig,
    num_tokens: int,
    layout: Layout,
    policies: Sequence[Policy],
    quantization: str = "none",
) -> Work:
    """Count what one GPU computes in an optimizer step, with recomputation."""
    reaches = gradient_reaches(held_model(config, layout.model_size))
    blocks = _count_blocks(config, num_tokens, layout, policies, reaches, quantization)
    matmul, weight, num_bytes = _edges(config, num_tokens, layout)
    times, trained = layout.accumulation, _num_trained(config, layout)
    number, copies = layout.bytes_per_number, layout.num_replicas
    # Each gradient is read and written once on its way to its partition, and twice more where
    # DeepSpeed averages it in a bucket; those of later micro-batches are added.
    transfers = 2 + (2 + 2 / copies if copies > 1 else 0) + 3 / copies * (times > 1)
    num_bytes = times * (blocks.num_bytes + num_bytes + transfers * trained * number)
    return Work(
        matmul_flops=times * (blocks.matmul_flops + matmul + weight),
        weight_flops=times * (blocks.weight_flops + weight),
        attention_forward_flops=times * blocks.attention_forward_flops,
        attention_backward_flops=times * blocks.attention_backward_flops,
        fp8_flops=times * blocks.fp8_flops,
        num_bytes=num_bytes + trained / copies * _OPTIMIZER_BYTES[number],
    )


def _count_blocks(
    config: TransformerConfig,
    num_tokens: int,
    layout: Layout,
    policies: Sequence[Policy],
    reaches: Sequence[tuple[bool, bool]],
    quantization: str,
) -> Work:
    """Count what the blocks compute for one micro-batch, without the products of their modulation.

    reaches: of gradients, as in `gradient_reaches`.
    """
    width, parts = config.hidden_size, layout.model_size
    rows = layout.batch_size * num_tokens / layout.context_size
    square, low = rows * width**2 / parts, 2 * rows * (config.lora_rank or 0) * width / parts
    unit = rows * width * layout.bytes_per_number
    is_trained = config.lora_rank is None
    modulation = 2 * layout.batch_size * config.time_embed_dim * width * _MODULATION / parts
    is_int8, is_fp8 = quantization == "int8", quantization == "fp8"
    # An int8 weight is read and written in the training dtype before each of its products.
    dequantized = (1 + layout.bytes_per_number) / parts
    vectors = _MODULATION * width * config.time_embed_dim * dequantized * (is_int8 or is_fp8)
    # Before an fp8 product an activation is read and 1 byte per number written. Backward also reads and
    # writes the weight, which it transposes.
    rounded = unit / layout.bytes_per_number * (1 + layout.bytes_per_number) * is_fp8
    matmul, weight, num_bytes, fp8, forwards, backwards = 0.0, 0.0, 0.0, 0.0, 0, 0
    for i, (policy, (has_gradient, is_reached)) in enumerate(zip(policies, reaches, strict=True)):
        linears = _linears(config, i)
        forward = sum(each.size * square + each.num_columns * low for each in linears)
        base = (
            sum(each.num_weights for each in linears) * width**2 * dequantized * is_int8 + vectors
        )
        base += sum(each.rounded(parts, is_backward=False) for each in linears) * rounded
        fp8_forward = sum(each.size for each in linears) * square * is_fp8
        fp8 += fp8_forward
        moved = sum(each.forward_units for each in linears) / parts
        moved += _units_of_pass(layout, is_trained, is_backward=False)
        matmul, num_bytes = matmul + forward, num_bytes + moved * unit + base
        forwards += 1
        if not is_reached:  # a block before the first adapters
            continue
        for each in linears:
            if has_gradient:
                matmul += each.size * square + each.columns_in * low
                num_bytes += each.num_weights * width**2 * dequantized * is_int8
                num_bytes += each.rounded(parts, is_backward=True) * rounded
                num_bytes += 2 * each.num_weights * width**2 / parts * is_fp8
                fp8 += each.size * square * is_fp8
            own = each.num_columns * low
            matmul += each.columns_out * low
            weight += each.size * square if is_trained else own
            has_gradient = has_gradient or each.columns_in > 0
            if each.size == _QKV:
                backwards += has_gradient
        num_bytes += sum(each.backward_units for each in linears) / parts * unit
        num_bytes += _units_of_pass(layout, is_trained, is_backward=True) * unit
        if policy == "none":
            continue
        num_bytes += moved * unit
        if policy == "pointwise":
            # Second products of adapters, whose inner dimension is small, are not kept.
            matmul += sum(each.columns_out for each in linears) * low
            continue
        matmul += forward + modulation
        fp8 += fp8_forward
        num_bytes += base
        forwards += policy == "full"
    quadratic = rows * num_tokens * width / parts
    return Work(
        matmul_flops=matmul + weight,
        weight_flops=weight,
        attention_forward_flops=forwards * 4 * quadratic,
        attention_backward_flops=backwards * 10 * quadratic,
        num_bytes=num_bytes,
        fp8_flops=fp8,
    )


def _units_of_pass(layout: Layout, is_trained: bool, *, is_backward: bool) -> float:
    """Return what the kernels of a block move, in units."""
    norms, split = _NORMS[is_backward], _SPLIT[is_backward]
    if is_backward:
        norms = norms if is_trained else _FROZEN_NORMS_BACKWARD
        split += _QKV_BIAS if is_trained else 0
    return norms / (layout.model_size if layout.splits_rows else 1) + split / layout.model_size


def _edges(
    config: TransformerConfig, num_tokens: int, layout: Layout
) -> tuple[float, float, float]:
    """Return FLOPs without and of weights' gradients, and bytes, of everything outside of the
    blocks' linears: embeddings, output and the blocks' modulation."""
    width, patch = config.hidden_size, config.patch_size
    numel = patch.t * patch.h * patch.w
    video = layout.batch_size * (num_tokens - config.text_length)
    text = layout.batch_size * config.text_length
    inputs = 2 * width * (video * numel * config.in_channels + text * config.text_hidden_size)
    output = 2 * width * video * numel * config.out_channels
    vectors = _MODULATION * config.num_layers / layout.model_size
    modulation = 2 * layout.batch_size * config.time_embed_dim * width * vectors
    rows = layout.batch_size * num_tokens
    num_bytes = _EDGES * rows * width * layout.bytes_per_number
    if config.lora_rank is not None:
        return inputs + 2 * output + modulation, 0.0, num_bytes
    return inputs + 2 * (output + modulation), inputs + output + modulation, num_bytes


@dataclass(frozen=True, slots=True)
class _Linear:
    """A linear of a block and its adapters.

    size: FLOPs in units of B S M^2. num_in, num_out: inputs and outputs, in multiples of M; cuts_outputs:
    which of them tensor-parallel ranks divide. columns_in, columns_out: inputs and outputs of the adapters'
    products, in multiples of M. *_units: activations [B, S, M] that the adapters move.
    """

    size: int
    num_in: int
    num_out: int
    cuts_outputs: bool
    columns_in: int = 0
    columns_out: int = 0
    forward_units: int = 0
    backward_units: int = 0

    @property
    def num_columns(self) -> int:
        return self.columns_in + self.columns_out

    def rounded(self, parts: int, *, is_backward: bool) -> float:
        """Return what a rank rounds for an fp8 product, in activations [B, S, M]."""
        number = self.num_out if is_backward else self.num_in
        return number / parts if self.cuts_outputs == is_backward else number

    @property
    def num_weights(self) -> int:
        """Return the number of weights, in units of M^2."""
        return self.size // 2


def _linears(config: TransformerConfig, layer: int) -> list[_Linear]:
    """Return the linears of a block, in their order."""
    is_adapted = config.lora_rank is not None
    is_adapted = is_adapted and (config.lora_layers is None or layer in config.lora_layers)
    linears = []
    # FLOPs, and inputs and outputs in multiples of M
    sizes = {"attention.qkv": (_QKV, 1, 3), "attention.out": (_OUT, 1, 1)}
    sizes |= {"fc1": (_FC, 1, MLP_RATIO), "fc2": (_FC, MLP_RATIO, 1)}
    for name, (size, num_in, num_out) in sizes.items():
        cuts_outputs = name in ("attention.qkv", "fc1")
        pairs = sum(TARGETS[target][0] == name for target in config.lora_targets) * is_adapted
        if not pairs:
            linears.append(_Linear(size, num_in, num_out, cuts_outputs))
            continue
        written = pairs * num_out // NUM_PARTS[name]
        linears.append(
            _Linear(
                size,
                num_in,
                num_out,
                cuts_outputs,
                columns_in=pairs * num_in,
                columns_out=written,
                forward_units=num_in + 2 * num_out,
                backward_units=2 * written + 5 * num_in,
            )
        )
    return linears
