"""The optimizer step of ZeRO stages 1 and 2 in one pass over the weights, without a host read.

Of this rank's partition, per parameter of it, in bytes (bf16; fp32 in brackets):
    norm of the averaged gradient                                  2   (4)
    FusedEmaAdam: gradient; masters, two moments, EMA in and out   34  (36)
    weights in the training dtype, into the all-gather's buffer    2   (4)
Together 38 (44). DeepSpeed's own step around the same optimizer takes 78 in bf16: a norm in float64,
a flattened copy of the gradients, a float32 copy of that (4 more bytes of memory per parameter),
clipping in place, and a pass that copies the weights back. It also reads the norm on the host.
On a GPU: not measured.

The new weights are gathered while training goes on to the next batch, whose forward pass waits for
all of them: they come as a piece of every rank's partition at a time, not block after block. Beside
the gather run the frozen autoencoder and text encoder where the batch brings pixels and captions;
with latents from a cache there is only its copy and the noise. GPU time: not measured.

DeepSpeed keeps reducing the gradients. Private names of DeepSpeed 0.19 are used here and in
zero_engine.py alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cogfast.kernels.fused_ema_adam import FusedEmaAdam

_NORM_EPS = 1e-6  # DeepSpeed's, and torch's
# Gradients begin where the kernel can read 16 bytes at a time.
_ALIGNMENT = 16


class WeightGather:
    """Every rank's partition of the weights, in the training dtype, to all ranks: started by who
    wrote them, waited for by who reads them.

    zero: DeepSpeed's optimizer of stage 1 or 2. All waits are to come from one thread and one CUDA
    stream: of NCCL's collectives the stream that waits first is the only one that does, and the host
    goes on; of gloo's the host waits.
    """

    def __init__(self, zero) -> None:
        self.zero = zero
        self._under_way: list[dist.Work] = []

    def start(self) -> None:
        self.wait()
        zero = self.zero
        wholes, parts = zero.bit16_groups_flat, own_weights(zero)
        for whole, part, group in zip(wholes, parts, zero.real_dp_process_group, strict=True):
            if dist.get_world_size(group) > 1:
                work = dist.all_gather_into_tensor(whole, part, group=group, async_op=True)
                self._under_way.append(work)

    def wait(self) -> None:
        for work in self._under_way:
            work.wait()
        self._under_way.clear()


def own_weights(zero) -> list[Tensor]:
    """This rank's partitions of the weights in the training dtype, flat, a view of the model's."""
    return [
        partitions[dist.get_rank(group=group)]
        for partitions, group in zip(
            zero.parallel_partitioned_bit16_groups, zero.real_dp_process_group, strict=True
        )
    ]


def why_stock(zero, optimizer: torch.optim.Optimizer, version: str) -> str | None:
    """Why DeepSpeed's own step has to do, or None where FusedStep can take its place."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if type(zero) is not DeepSpeedZeroOptimizer:
        return f"its optimizer is {type(zero).__name__}"
    if not isinstance(optimizer, FusedEmaAdam):
        return f"{type(optimizer).__name__} reads float32 gradients"
    if zero.dtype == torch.float16:
        return "fp16's loss scale is on the host"
    if zero.cpu_offload:
        return "the optimizer is offloaded"
    if not zero.compute_grad_norm:
        return "compute_grad_norm is false"
    if version.split(".")[:2] != ["0", "19"]:
        return f"DeepSpeed is {version}, and ours is written for 0.19"
    return None


class FusedStep:
    """Takes the place of `zero.step`.

    zero: DeepSpeed's optimizer of stage 1 or 2, around a FusedEmaAdam; bf16 or fp32. gather: of its
    weights; a step ends with it under way.
    """

    def __init__(self, zero, gather: WeightGather) -> None:
        self.zero, self.optimizer, self.gather = zero, zero.optimizer, gather
        self.partitions: list[Tensor] = zero.single_partition_of_fp32_groups
        self._landed: dict[int, Tensor] = {}
        for partition, weights in zip(self.partitions, own_weights(zero), strict=True):
            partition.grad_dtype = None  # a bf16 gradient of float32 masters
            self.optimizer.low_precision_copies[partition] = weights.detach()
        self._counted = list(self._counted_slices())
        if zero.gradient_accumulation_dtype == zero.dtype:  # else DeepSpeed's are flat already
            zero.copy_grads_in_partition = self._land
        zero.step = self.step

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update from the averaged gradients, which it releases.

        Leaves the norm before clipping in `zero`, and in the optimizer's `found_inf` whether the
        step was skipped, both on the device.
        """
        zero, optimizer = self.zero, self.optimizer
        self.gather.wait()  # before the weights are written again
        zero.micro_step_id = -1  # no micro-batch of the next step yet
        gradients = [self._gradient(i) for i in range(len(self.partitions))]
        norm = self._norm(gradients)
        zero._global_grad_norm = norm
        optimizer.found_inf = (~norm.isfinite()).float()
        if zero.clip_grad > 0:
            excess = (norm + _NORM_EPS) / zero.clip_grad
            optimizer.gradient_scale = excess.clamp(min=1).reciprocal()
        for partition, gradient in zip(self.partitions, gradients, strict=True):
            partition.grad = gradient
        optimizer.step()
        for i, partition in enumerate(self.partitions):
            partition.grad = zero.averaged_gradients[i] = zero.all_grad_tensors[i] = None
        self._landed.clear()
        self.gather.start()

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        """The norm of the whole model's gradient, float32; each of its elements counts once.

        Ranks that share a model own different slices of what is sharded between them, and one of
        them counts what all have; so one sum over all ranks does for both.
        """
        pieces = [gradients[part].narrow(0, offset, n) for part, offset, n in self._counted]
        # A CPU adds up one element after another: in float32 the last digits would be lost.
        dtype = torch.float64 if gradients[0].device.type == "cpu" else torch.float32
        square = torch.zeros((), dtype=dtype, device=gradients[0].device)
        if pieces:
            square += torch.stack(torch._foreach_norm(pieces, 2, dtype=dtype)).square().sum()
        dist.all_reduce(square)
        return square.sqrt().float()

    def _counted_slices(self) -> Iterable[tuple[int, int, int]]:
        """(partition, offset, numel) of what this rank adds to the norm."""
        from deepspeed.runtime.utils import is_model_parallel_parameter

        for part, group in enumerate(self.zero.bit16_groups):
            for parameter in group:
                mapping = parameter._hp_mapping
                is_first = self.zero.model_parallel_rank == 0
                if mapping is not None and (is_first or is_model_parallel_parameter(parameter)):
                    where = mapping.hp_fragment_address
                    yield part, where.start, where.numel

    def _gradient(self, part: int) -> Tensor:
        """The averaged gradient of a partition, flat, in the dtype in which it was summed up."""
        pieces = self.zero.averaged_gradients[part]
        flat = getattr(pieces, "flat_partition", None)
        if flat is not None:
            return flat
        partition = self.partitions[part]
        flat = self._landed.get(part)
        if flat is None:
            flat = torch.empty(partition.shape, dtype=pieces[0].dtype, device=partition.device)
        start = 0
        for piece in pieces:
            place = flat.narrow(0, start, piece.numel())
            if piece.data_ptr() != place.data_ptr():  # padding, or no gradient in this step
                place.copy_(piece.reshape(-1))
            start += piece.numel()
        assert start == flat.numel(), f"gradients of {start} in a partition of {flat.numel()}"
        return flat

    def _land(self, parameter: nn.Parameter, part: int) -> None:
        """Move a reduced gradient out of the bucket to its place in the partition.

        DeepSpeed's own puts them one after another as they come, last layer first, so that it has
        to flatten them. With accumulation it adds the later micro-batches to the first one's.
        """
        zero = self.zero
        if zero.grads_in_partition is None:  # the first of this micro-batch
            zero.grads_in_partition = {}
        if part not in zero.grads_in_partition:
            buffer, front = self._make_buffer(part)
            zero.grads_in_partition[part] = buffer, front
            self._landed.setdefault(part, buffer.narrow(0, front, self.partitions[part].numel()))
        buffer, front = zero.grads_in_partition[part]
        gradient = zero.get_gradient_for_reduction(parameter)
        place = buffer.narrow(0, front + self._start(part, parameter), parameter.numel())
        place.copy_(gradient.reshape(-1))
        gradient.data = place.view_as(gradient)

    def _make_buffer(self, part: int) -> tuple[Tensor, int]:
        """Memory for a partition's gradients, and where the partition begins in it.

        Parameters at the ends may reach over into other ranks' partitions.
        """
        zero, first = self.zero, self.zero.params_in_partition[part][0]
        last = zero.params_in_partition[part][-1]
        aligned = _ALIGNMENT // zero.dtype.itemsize
        front = -(self._start(part, first) // aligned) * aligned
        end = max(self.partitions[part].numel(), self._start(part, last) + last.numel())
        device = zero.bit16_groups_flat[part].device
        return torch.empty(front + end, dtype=zero.dtype, device=device), front

    def _start(self, part: int, parameter: nn.Parameter) -> int:
        """Where a parameter begins in this rank's partition; negative where before it."""
        rank = dist.get_rank(group=self.zero.real_dp_process_group[part])
        key = self.zero.get_param_id(parameter)
        offset = self.zero.grad_partition_insertion_offset[part][rank][key]
        return offset - self.zero.grad_start_offset[part][rank][key]
