"""The size of an update beside the size of the weights, computed from the optimizer's state.

After a step of Adam or AdamW its moments m and v, its count t and the weights p say how the step
changed the weights; nothing has to be kept from before the step:

    u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    |change| = lr |u|,  with decoupled weight decay w:  lr |u + w p| / (1 - lr w)

It takes one pass over the partition of this rank, at logging steps alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from cogfast.kernels.fused_ema_adam import FusedEmaAdam, has_triton, sum_of_squares
from cogfast.kernels.quantized.moment_codes import MOMENTS, largest_key, read_moment
from cogfast.train.distributed.process_groups import ProcessGroups
from cogfast.train.distributed.zero_engine import ZeroEngine, shard_of

_CHUNK = 1 << 22  # elements at a time: intermediate results take tens of MB, and not a partition


class UpdateRatio:
    """Computes norm(change of the last step) / norm(weights) over all trained weights.

    Other optimizers than FusedEmaAdam, torch's Adam and AdamW, and an offloaded one, have no ratio.
    """

    def __init__(self, engine: ZeroEngine, groups: ProcessGroups) -> None:
        self.engine = engine
        self.is_decoupled, is_known = _kind_of(engine.optimizer)
        self.has_ratio = is_known and engine.parts[0].device == groups.device
        kernels = getattr(engine.optimizer, "kernels", "triton")
        self.has_kernel = groups.device.type == "cuda" and kernels == "triton" and has_triton()
        self.ranges = dict(self._ranges(groups)) if self.has_ratio else {}
        self.tables = self.kernel_tables() if self.has_kernel else {}

    def _ranges(self, groups: ProcessGroups) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """Yield each part with its ranges [start, end) of elements that this rank counts."""
        parameters = dict(self.engine.transformer.named_parameters())
        # Tensor-parallel ranks all have the weights that are not sharded: the first counts them.
        counted = [
            piece
            for piece in self.engine.slices
            if groups.tensor_rank == 0 or shard_of(parameters[piece.parameter]) is not None
        ]
        counted.sort(key=lambda piece: (piece.part, piece.offset))
        for part, pieces in groupby(counted, lambda piece: piece.part):
            joined: list[tuple[int, int]] = []
            for piece in pieces:
                start = piece.offset
                if joined and joined[-1][1] == start:
                    start, _ = joined.pop()
                joined.append((start, piece.offset + piece.numel))
            yield part, joined

    def kernel_tables(self) -> dict[int, Tensor]:
        """Return the kernel's table of the ranges of each part."""
        from cogfast.kernels.gpu.update_squares import table_of

        parts = self.engine.parts
        return {part: table_of(ranges, parts[part].device) for part, ranges in self.ranges.items()}

    @torch.no_grad()
    def squares(self) -> Tensor:
        """Return this rank's sums of squares of the last change and of the weights, [2] on the device.

        Both are 0 where there is no ratio. The change is 0 if the step was skipped.
        """
        engine = self.engine
        found = torch.zeros(2, device=engine.num_skipped.device)
        # A first step that was skipped leaves no state.
        if not self.has_ratio or "exp_avg" not in engine.state(0):
            return found
        for part in self.ranges:
            add = self.add_with_triton if self.has_kernel else self.add_in_chunks
            add(found, part)
        found[0] *= (engine.num_skipped_in_a_row == 0).to(found)
        return found

    def add_in_chunks(self, found: Tensor, part: int) -> None:
        """Add the sums of one part to `found`, with PyTorch."""
        engine, state, group = self.engine, self.engine.state(part), self.engine.group_of(part)
        lr, decay = group["lr"], group["weight_decay"]
        first, second = _corrections(state["step"], group)
        chunks = (
            (at, min(_CHUNK, end - at))
            for start, end in self.ranges[part]
            for at in range(start, end, _CHUNK)
        )
        for at, numel in chunks:
            p = engine.parts[part].detach().narrow(0, at, numel)
            m, v = (read_moment(state, key, at, numel) for key in MOMENTS)
            change = (v / second).sqrt_().add_(group["eps"]).reciprocal_().mul_(m).div_(first)
            if self.is_decoupled:
                change = change.add_(p, alpha=decay).div_(1 - lr * decay)
            found += torch.stack([sum_of_squares([x]).float() for x in (change.mul_(lr), p)])

    def add_with_triton(self, found: Tensor, part: int) -> None:
        """Add the sums of one part to `found`, with one launch."""
        from cogfast.kernels.gpu.update_squares import launch_update_squares

        state, group = self.engine.state(part), self.engine.group_of(part)
        lr, decay = group["lr"], group["weight_decay"] if self.is_decoupled else 0.0
        first, second = _corrections(state["step"], group)
        p = self.engine.parts[part].detach()
        squares = launch_update_squares(
            p,
            [state[key] for key in MOMENTS],
            [state.get(largest_key(key)) for key in MOMENTS],
            # PyTorch's Adam may count its steps on the host.
            torch.stack([1 / first, second.rsqrt()]).to(p, non_blocking=True),
            self.tables[part],
            eps=float(group["eps"]),
            p_factor=float(decay),
        )
        squares[0] *= (lr / (1 - lr * decay)) ** 2
        found += squares.float()


def _corrections(step: Tensor, group: dict) -> tuple[Tensor, Tensor]:
    """Return the divisors of m and of v, [] float64 each."""
    step = step.double()  # 1 - beta^t loses digits in float32
    if not group.get("bias_correction", True):
        return torch.ones_like(step), torch.ones_like(step)
    beta1, beta2 = group["betas"]
    return 1 - beta1**step, 1 - beta2**step


def _kind_of(optimizer: torch.optim.Optimizer) -> tuple[bool, bool]:
    """Return whether weight decay is decoupled, and whether the formula holds for the optimizer."""
    if isinstance(optimizer, FusedEmaAdam):
        return optimizer.adam_w_mode, True
    is_plain = not any(g.get("amsgrad") or g.get("maximize") for g in optimizer.param_groups)
    kinds = (torch.optim.Adam, torch.optim.AdamW)
    return type(optimizer) is torch.optim.AdamW, type(optimizer) in kinds and is_plain
