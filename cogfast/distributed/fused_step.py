"""Optimizer step of ZeRO stages 1 and 2 in one pass over the weights, without a host sync.

Memory traffic in bytes per parameter of this rank's partition, bf16 and fp16 (fp32): gradient norm 2
(4), FusedEmaAdam 34 (36), weights written into the all-gather's buffer 2 (4); together 38 (44).
DeepSpeed's own step around the same optimizer moves 78 in bf16, and reads the norm on the host.

The all-gathers of the new weights overlap the preparation of the next batch (the frozen VAE and text
encoder, or only copies and noise for cached latents) and the next forward pass: groups of parameters are
gathered in the order of the blocks (`order_by_blocks`), and a block waits for its own weights.
DeepSpeed reduces the gradients; a rank without others has nothing to
reduce. Only this file and zero_engine.py use private names of DeepSpeed 0.19.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cogfast.kernels.fused_ema_adam import FusedEmaAdam, sum_of_squares
from cogfast.model.transformer import BlockCall, DiffusionTransformer
from cogfast.model.weights.shard import Shard

_NORM_EPS = 1e-6  # DeepSpeed's, and torch's
_RELEASE = "0.19."  # of DeepSpeed, whose private names this file uses
_BUCKET = 500_000_000  # DeepSpeed's allgather_bucket_size, in elements


def order_by_blocks(
    groups: list[dict], transformer: DiffusionTransformer, zero: Mapping, data_size: int
) -> list[dict]:
    """Split an optimizer's parameter groups between blocks, as many as allgather_bucket_size allows in each.

    zero: DeepSpeed's zero_optimization. The groups are in the order in which a forward pass needs them,
    parameters outside of the blocks first. Each group has a gather of equal parts, which keeps the links
    of all ranks busy. Groups of Muon's matrices stay whole: as many of a group as there are ranks are
    updated at a time.
    """
    if data_size == 1 or zero["stage"] == 3:
        return groups
    most = int(float(zero.get("allgather_bucket_size") or _BUCKET))
    blocks = enumerate(transformer.blocks)
    number_of = {p: number for number, block in blocks for p in block.parameters()}
    number = lambda p: number_of.get(p, -1)
    found: list[dict] = []
    for group in groups:
        if "num_parts" in group or sum(p.numel() for p in group["params"]) <= most:
            found.append(group)
            continue
        size = most
        for _, of_block in groupby(sorted(group["params"], key=number), key=number):
            params = list(of_block)
            numel = sum(p.numel() for p in params)
            if size + numel > most:
                found.append({**group, "params": []})
                size = 0
            found[-1]["params"] += params
            size += numel
    # NCCL gathers one group after the other.
    return sorted(found, key=lambda group: min(map(number, group["params"])))


class WeightGather:
    """Asynchronous all-gathers of every rank's partitions of the weights, in the training dtype.

    The writer of the weights calls `start`; every reader calls `wait` first.

    zero: DeepSpeed's optimizer of stage 1 or 2. Call `wait` from one thread and one CUDA stream only.
    With NCCL, the first stream that waits is the only one that is synchronized, and the host does
    not block; with gloo, the host blocks.
    """

    def __init__(self, zero) -> None:
        self.zero = zero
        self._under_way: dict[int, dist.Work] = {}  # by parameter group

    def start(self) -> None:
        self.wait()
        zero = self.zero
        wholes, parts = zero.bit16_groups_flat, own_weights(zero)
        gathers = zip(wholes, parts, zero.real_dp_process_group, strict=True)
        for number, (whole, part, group) in enumerate(gathers):
            # A single rank has all weights already: its part is a view of the whole.
            if dist.get_world_size(group) > 1:
                work = dist.all_gather_into_tensor(whole, part, group=group, async_op=True)
                assert work is not None, "an asynchronous collective returns its work"
                self._under_way[number] = work

    def wait(self, numbers: Iterable[int] | None = None) -> None:
        """Wait for the weights of these parameter groups; None: of all."""
        for number in list(self._under_way) if numbers is None else numbers:
            if work := self._under_way.pop(number, None):
                work.wait()


class BlockGather:
    """Waits for a block's weights before it runs: the transformer's `runtime.source`.

    others: parameter groups that have weights outside of the blocks, which the caller waits for.
    """

    def __init__(self, gather: WeightGather, transformer: DiffusionTransformer) -> None:
        self.gather = gather
        groups = gather.zero.bit16_groups
        group_of = {p: number for number, group in enumerate(groups) for p in group}
        used = lambda parameters: sorted({group_of[p] for p in parameters if p in group_of})
        of_blocks = {p for block in transformer.blocks for p in block.parameters()}
        self.of_block = [used(block.parameters()) for block in transformer.blocks]
        self.others = used(p for p in transformer.parameters() if p not in of_blocks)

    def around(self, calls: Iterable[BlockCall]) -> Iterator[BlockCall]:
        for numbers, call in zip(self.of_block, calls, strict=True):
            self.gather.wait(numbers)
            yield call


def own_weights(zero) -> list[Tensor]:
    """Return this rank's flat partitions of the weights, in the training dtype, as views."""
    groups = zip(zero.parallel_partitioned_bit16_groups, zero.real_dp_process_group, strict=True)
    return [partitions[dist.get_rank(group=group)] for partitions, group in groups]


class DeviceLossScaler:
    """DeepSpeed's loss scaler of fp16, with the scale on the device: no step waits for an overflow.

    Takes the place of `zero.loss_scaler` and has its attributes. Those that depend on overflows are
    tensors [] instead of numbers.

    scaler: DeepSpeed's DynamicLossScaler, or its LossScaler, whose scale is constant.
    """

    dynamic: bool
    # DynamicLossScaler has these as well.
    cur_iter: int
    last_overflow_iter: Tensor
    cur_hysteresis: Tensor
    scale_factor: float
    scale_window: int
    min_scale: float
    delayed_shift: int
    consecutive_hysteresis: bool

    def __init__(self, scaler, device: torch.device) -> None:
        vars(self).update(vars(scaler))
        self.cur_scale = torch.tensor(float(scaler.cur_scale), device=device)
        # Whether the scale had to fall below its minimum, where DeepSpeed raises an exception.
        self._is_spent = torch.zeros((), dtype=torch.bool, device=device)
        if self.dynamic:
            for name in ("last_overflow_iter", "cur_hysteresis"):
                setattr(self, name, torch.tensor(getattr(scaler, name), device=device))

    @property
    def is_spent(self) -> Tensor:
        return self._is_spent

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss * self.cur_scale

    def update_scale(self, overflow: Tensor) -> None:
        """Count a step and change the scale as DynamicLossScaler does; overflow: bool []."""
        if not self.dynamic:
            return
        shrinks = overflow
        if self.delayed_shift != 1:
            shrinks = overflow & (self.cur_hysteresis == 1)
        stable = self.cur_iter - self.last_overflow_iter - 1  # steps since the last overflow
        grows = (stable > 0) & (stable % self.scale_window == 0) & ~overflow
        restores = ~overflow if self.consecutive_hysteresis else grows
        self._is_spent |= shrinks & (self.cur_scale == self.min_scale)
        smaller = (self.cur_scale / self.scale_factor).clamp(min=self.min_scale)
        larger = torch.where(grows, self.cur_scale * self.scale_factor, self.cur_scale)
        self.cur_scale = torch.where(shrinks, smaller, larger)
        hysteresis = self.cur_hysteresis - (overflow & ~shrinks).long()
        self.cur_hysteresis = torch.where(restores, self.delayed_shift, hysteresis)
        self.last_overflow_iter = torch.where(overflow, self.cur_iter, self.last_overflow_iter)
        self.cur_iter += 1


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a parameter that a rank owns: elements [offset, offset + numel) of its flat partition, which
    are [start, start + numel) of the flattened parameter, or of this rank's shard of it.

    numel: 0 if the rank owns nothing of it. shape: of the parameter or the shard. is_counted: this rank
    adds the elements to sums over the model; tensor-parallel ranks hold replicated parameters, too, which
    only the first one counts.
    """

    offset: int
    numel: int
    start: int
    shape: torch.Size
    shard: Shard | None
    is_counted: bool


class ShardedOptimizer(FusedEmaAdam):
    """FusedEmaAdam's state and EMA, for an update that needs more than this rank's elements, such as sums over
    the model (extensions/prodigy_muon). DeepSpeed's own step cannot call it.

    To be assigned: pieces, {partition: a piece of each of its parameters}; the groups of the ranks that
    share the partitions (data) and the shards of a matrix (tensor).
    """

    pieces: dict[Tensor, list[Piece]] | None = None
    data_group: dist.ProcessGroup | None = None
    tensor_group: dist.ProcessGroup | None = None

    def pieces_of(self, p: Tensor) -> list[Piece]:
        if self.pieces is None:
            return [Piece(0, p.numel(), 0, p.shape, None, True)]
        return self.pieces[p]

    def gradient(self, p: Tensor, here: slice) -> Tensor:
        """Return elements of the gradient, averaged and clipped, in float32."""
        assert p.grad is not None, "step() passes parameters that have a gradient"
        g = p.grad.view(-1)[here].float()
        return g if self.gradient_scale is None else g * self.gradient_scale


def reason_for_stock_step(zero, optimizer: torch.optim.Optimizer) -> str | None:
    """Return why DeepSpeed's own step must be used, or None if FusedStep can replace it."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if type(zero) is not DeepSpeedZeroOptimizer:
        return f"its optimizer is {type(zero).__name__}"
    if not isinstance(optimizer, FusedEmaAdam):
        return f"{type(optimizer).__name__} reads float32 gradients"
    if zero.cpu_offload:
        return "the optimizer is offloaded"
    if not zero.compute_grad_norm:
        return "compute_grad_norm is false"
    installed = version("deepspeed")
    if not installed.startswith(_RELEASE):
        return f"DeepSpeed {installed} may differ from {_RELEASE}x, whose step cogfast replaces"
    return None


class FusedStep:
    """Replaces `zero.step`.

    zero: DeepSpeed's optimizer of stage 1 or 2, around a FusedEmaAdam; bf16, fp16 or fp32. gather:
    the gather of its weights; a step starts it and does not wait for it.
    """

    def __init__(self, zero, gather: WeightGather) -> None:
        self.zero, self.optimizer, self.gather = zero, zero.optimizer, gather
        self.partitions: list[Tensor] = zero.single_partition_of_fp32_groups
        device = self.partitions[0].device  # of the step's stream
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        for partition, weights in zip(self.partitions, own_weights(zero), strict=True):
            partition.grad_dtype = None  # allows a 16-bit gradient for float32 masters
            # The optimizer writes the new weights straight into the buffer of the all-gather.
            self.optimizer.low_precision_copies[partition] = weights.detach()
        self.pieces = [list(self._pieces(group)) for group in zero.bit16_groups]
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.pieces = dict(zip(self.partitions, self.pieces, strict=True))
            self.optimizer.data_group = zero.dp_process_group
            self.optimizer.tensor_group = zero.model_parallel_group
        # Whether the averaged gradient is the rank's own, bit for bit
        dtypes = (zero.gradient_accumulation_dtype, zero.communication_data_type)
        is_alone = dist.get_world_size(group=zero.dp_process_group) == 1
        is_alone &= dtypes == (zero.dtype,) * 2 and zero.gradient_predivide_factor == 1
        # Buckets that are not contiguous are lists of gradients: nothing is copied.
        if zero.contiguous_gradients and is_alone:
            zero.reduce_independent_p_g_buckets_and_remove_grads = self._keep_gradient
            zero.reduce_ipg_grads = self._store_kept
            zero.setup_buckets = self._begin_backward
        # With another accumulation dtype, DeepSpeed keeps a flat buffer already.
        if zero.gradient_accumulation_dtype == zero.dtype and zero.contiguous_gradients:
            zero.copy_grads_in_partition = self._store_gradient
            zero.get_all_grad_tensors = self._stored
            flat = lambda *_, param_group_idx, **options: zero.all_grad_tensors[param_group_idx]
            zero.get_flat_partition = flat
        if self.stream is not None and zero.overlap_comm and zero.contiguous_gradients:
            self._epilogue = zero.independent_gradient_partition_epilogue
            zero.independent_gradient_partition_epilogue = self._end_backward
        self.scaler: DeviceLossScaler | None = None
        if zero.dtype == torch.float16:
            self.scaler = zero.loss_scaler = DeviceLossScaler(zero.loss_scaler, device)
        zero.step = self.step

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update once from the averaged gradients, then release them.

        Stores the norm before clipping in `zero`, and whether the step was skipped in the
        optimizer's `found_inf`, both on the device.
        """
        zero, optimizer = self.zero, self.optimizer
        self.gather.wait()  # it reads the weights that this step overwrites
        zero.micro_step_id = -1  # DeepSpeed's value before the first micro-batch of a step
        gradients = [self._gradient(i) for i in range(len(self.partitions))]
        norm, divisor = self._norm(gradients), None
        if self.scaler is not None:
            # The scale of this step's losses. DeepSpeed's step divides by the updated scale, which
            # halves the gradient where the scale doubles.
            divisor = self.scaler.cur_scale
            norm = norm / divisor
        zero._global_grad_norm = norm
        # The norm is the whole model's, so all ranks skip the same steps.
        overflow = ~norm.isfinite()
        optimizer.found_inf = overflow.float()
        if self.scaler is not None:
            self.scaler.update_scale(overflow)
        if zero.clip_grad > 0:
            # At least 1: gradients below the limit keep their norm. On the device, without a sync.
            excess = ((norm + _NORM_EPS) / zero.clip_grad).clamp(min=1)
            divisor = excess if divisor is None else excess * divisor
        if divisor is not None:
            optimizer.gradient_scale = divisor.reciprocal()
        for partition, gradient in zip(self.partitions, gradients, strict=True):
            partition.grad = gradient
        optimizer.step()
        # Free the gradients' memory before the next batch is encoded.
        for i, partition in enumerate(self.partitions):
            partition.grad = zero.averaged_gradients[i] = zero.all_grad_tensors[i] = None
        self.gather.start()

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of the whole model's gradient, float32, each element counted once.

        Tensor-parallel ranks own different slices of sharded parameters, and only the first of them
        counts replicated ones. So one all-reduce over all ranks gives the total.
        """
        pieces = [
            gradient.narrow(0, piece.offset, piece.numel)
            for gradient, owned in zip(gradients, self.pieces, strict=True)
            for piece in owned
            if piece.is_counted and piece.numel
        ]
        if not pieces:  # this rank owns only padding
            pieces = [gradients[0].new_zeros(1)]
        square = sum_of_squares(pieces)
        dist.all_reduce(square)
        return square.sqrt().float()

    def _pieces(self, group: Iterable[Any]) -> Iterator[Piece]:
        """Yield what this rank owns of each parameter of a partition."""
        from deepspeed.runtime.utils import is_model_parallel_parameter

        is_first = self.zero.model_parallel_rank == 0
        for parameter in group:
            mapping, offset, numel, start = parameter._hp_mapping, 0, 0, 0
            # None: this rank owns no element of the parameter.
            if mapping is not None:
                where, start = mapping.hp_fragment_address, mapping.lp_fragment_address.start
                offset, numel = where.start, where.numel
            is_counted = is_first or is_model_parallel_parameter(parameter)
            shard = getattr(parameter, "shard", None)
            yield Piece(offset, numel, start, parameter.shape, shard, is_counted)

    def _gradient(self, part: int) -> Tensor:
        """Return the averaged gradient of a partition, flat, in the accumulation dtype."""
        pieces = self.zero.averaged_gradients[part]
        flat = getattr(pieces, "flat_partition", None)
        if flat is None:
            # Gradients that are not contiguous are pieces.
            flat = pieces[0] if len(pieces) == 1 else torch.cat([p.reshape(-1) for p in pieces])
        assert flat.shape == self.partitions[part].shape, f"gradients of {flat.numel()}"
        return flat

    def _begin_backward(self) -> None:
        """Do what `zero.setup_buckets` does, without the buckets' memory."""
        if not self.zero.ready_for_gradients:
            self.zero.micro_step_id += 1
            self.zero.ready_for_gradients = True

    def _end_backward(self) -> None:
        """Run DeepSpeed's end of a backward pass, in which the step's stream waits for the reductions.

        With overlap_comm DeepSpeed's own method makes the host wait for the whole device there.
        """
        zero, reduce_rest = self.zero, self.zero.reduce_ipg_grads

        def reduce_and_wait() -> None:
            reduce_rest()
            torch.cuda.current_stream().wait_stream(zero.reduction_stream)
            zero.overlap_comm = False  # what follows reads it for that wait alone

        zero.reduce_ipg_grads = reduce_and_wait
        try:
            self._epilogue()
        finally:
            zero.reduce_ipg_grads, zero.overlap_comm = reduce_rest, True

    def _keep_gradient(self, parameter: nn.Parameter, part: int) -> None:
        """Keep a new gradient where it is until there are as many as a bucket holds."""
        zero = self.zero
        if not parameter.numel():  # it has no place
            return
        key, bucket = zero.get_param_id(parameter), zero.ipg_buckets[zero.communication_data_type]
        assert not zero.params_already_reduced[key], "a gradient is reduced once per backward pass"
        bucket.elements += parameter.numel()
        bucket.params.append((part, parameter.param_idx_in_group, key))  # pyright: ignore[reportAttributeAccessIssue]
        # Not the first gradient: its partition's memory is allocated when activations are freed.
        if bucket.elements > zero.reduce_bucket_size:
            self._store_kept()

    def _store_kept(self, comm_dtype: torch.dtype | None = None) -> None:
        """Copy the kept gradients to their places, in place of `zero.reduce_ipg_grads`."""
        zero = self.zero
        for bucket in zero.ipg_buckets.values():
            for part, index, key in bucket.params:
                zero.params_already_reduced[key] = True
                self._store_gradient(zero.bit16_groups[part][index], part)
            bucket.clear()

    def _store_gradient(self, parameter: nn.Parameter, part: int) -> None:
        """Copy what this rank owns of a reduced gradient to its place, and release the gradient.

        DeepSpeed's own appends whole gradients as they arrive, last layer first, and must flatten them later.
        """
        zero = self.zero
        if zero.grads_in_partition is None:  # the first gradient of this micro-batch
            zero.grads_in_partition = {}
        if part not in zero.grads_in_partition:
            # This may run on DeepSpeed's stream of reductions. The step frees the memory, for the next
            # forward pass: allocated on its stream, it needs neither more memory nor a wait.
            with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
                zero.grads_in_partition[part] = self._empty(part), set()
            if self.stream is not None:
                torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        flat, stored = zero.grads_in_partition[part]
        gradient = zero.get_gradient_for_reduction(parameter)
        start, end = self._place(parameter, part)
        skipped = max(0, -start)  # elements of the ranks before this one
        place = flat[start + skipped : end]
        place.copy_(gradient.reshape(-1).narrow(0, skipped, place.numel()))
        stored.add(parameter)
        zero.clear_grad_attribute(parameter)  # the bucket is used again

    def _empty(self, part: int) -> Tensor:
        return torch.empty_like(self.partitions[part], dtype=self.zero.dtype)

    def _stored(self, parameters: list[nn.Parameter], dtype: torch.dtype) -> list[Tensor]:
        """Return the flat gradient of the partition of `parameters`, in place of `zero.get_all_grad_tensors`.

        What has no gradient is 0: padding, and parameters that were not used.
        """
        zero = self.zero
        part = next(i for i, each in enumerate(zero.params_in_partition) if each is parameters)
        held = zero.grads_in_partition or {}
        flat, stored = held[part] if part in held else (self._empty(part), set())
        at = 0
        for parameter in parameters:
            if parameter in stored:
                start, end = self._place(parameter, part)
                if start > at:
                    flat[at:start].zero_()
                at = end
        if at < flat.numel():
            flat[at:].zero_()
        return [flat]

    def _place(self, parameter: nn.Parameter, part: int) -> tuple[int, int]:
        """Return where a parameter starts and ends in this rank's partition.

        The start is negative if it starts in the partition before.
        """
        zero, key = self.zero, self.zero.get_param_id(parameter)
        rank = dist.get_rank(group=zero.real_dp_process_group[part])
        start = zero.grad_partition_insertion_offset[part][rank][key]
        start -= zero.grad_start_offset[part][rank][key]
        return start, min(start + parameter.numel(), self.partitions[part].numel())
