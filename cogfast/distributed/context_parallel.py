"""Context parallelism: ranks split the rows of every sample, and attention's heads.

Each rank embeds all rows and keeps S / size of them through the blocks. Before attention, an all-to-all
exchanges rows for heads: each rank gets all rows of H / size heads; a second one takes the results
back (DeepSpeed-Ulysses, arXiv:2309.14509). Per block and pass a rank sends 4 (size - 1) / size^2 of
[B, S, M]; the two all-reduces of tensor parallelism send 4 (size - 1) / size. Weights are replicated,
and ZeRO shards their gradients and optimizer state over the data- and context-parallel ranks.

Gradients: ZeRO averages over all ranks that hold the same weights. What lies outside of the blocks has
the whole gradient on each rank, and the average keeps it. Inside the blocks a rank has the sum over
its rows, so that gradients that enter the blocks are multiplied by `size`, and those that leave them
are divided by it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cogfast.distributed.tensor_parallel import ParallelGroup, communicate, unchanged, wait_for
from cogfast.kernels.block_kernels import BlockKernels
from cogfast.model.transformer import DiffusionTransformer

_ops = torch.ops._c10d_functional


def rows_of_ranks(num_rows: int, size: int) -> list[int]:
    """Return how many of num_rows consecutive rows each rank has; they differ by at most one."""
    ends = [num_rows * (rank + 1) // size for rank in range(size)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _exchange(pieces: Tensor, sent: list[int], received: list[int], group: ParallelGroup) -> Tensor:
    """Send pieces [N], `sent[i]` numbers to rank i, and return the received ones, in order of ranks."""
    return wait_for(_ops.all_to_all_single(pieces, received, sent, group.name))


def _join(flat: Tensor, rows: list[int], shape: torch.Size) -> Tensor:
    """Join pieces [B, rows[i], *shape[2:]], which follow each other in `flat`, along dim 1."""
    batch, per_row = shape[0], shape[2:]
    if batch == 1:
        return flat.view(1, -1, *per_row)  # the pieces lie in order already
    pieces = flat.split([batch * per_row.numel() * n for n in rows])
    return torch.cat([piece.view(batch, -1, *per_row) for piece in pieces], dim=1)


def _cut(x: Tensor, rows: list[int]) -> Tensor:
    """Return the inverse of _join: pieces x[:, rows of rank i] after each other, [x.numel()]."""
    if x.shape[0] == 1:
        return x.contiguous().view(-1)
    return torch.cat([piece.reshape(-1) for piece in x.split(rows, dim=1)])


def _to_heads(x: Tensor, rows: list[int], group: ParallelGroup) -> Tensor:
    """This rank's rows of all heads [B, s, .., H, D] -> all rows of its heads [B, S, .., H / size, D]."""
    # [size, B, s, .., H / size, D]: the heads of rank i for rank i.
    pieces = x.unflatten(-2, (group.size, -1)).movedim(-3, 0).contiguous()
    shape, numbers = pieces.shape[1:], pieces[0].numel()
    received = [numbers // shape[1] * n for n in rows]
    return _join(_exchange(pieces.view(-1), [numbers] * group.size, received, group), rows, shape)


def _to_rows(x: Tensor, rows: list[int], group: ParallelGroup) -> Tensor:
    """Return the inverse of _to_heads."""
    per_row = x.shape[0] * x.shape[2:].numel()
    sent = [per_row * n for n in rows]
    flat = _exchange(_cut(x, rows), sent, [sent[group.rank]] * group.size, group)
    pieces = flat.view(group.size, x.shape[0], rows[group.rank], *x.shape[2:])
    return pieces.movedim(0, -3).flatten(-3, -2)


def _gather_rows(x: Tensor, rows: list[int], group: ParallelGroup) -> Tensor:
    """This rank's rows [B, s, M] -> all rows [B, S, M] on every rank."""
    missing = max(rows) - x.shape[1]
    # all_gather takes equal pieces: ranks with one row less send one of zeros with them.
    padded = F.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()
    gathered = _ops.all_gather_into_tensor(padded, group.size, group.name)
    pieces = wait_for(gathered).unflatten(0, (group.size, -1))
    if min(rows) == max(rows):  # without a copy for one sample
        return pieces.transpose(0, 1).flatten(1, 2)
    return torch.cat([piece[:, :n] for piece, n in zip(pieces, rows, strict=True)], dim=1)


def _own_rows(x: Tensor, rows: list[int], group: ParallelGroup) -> Tensor:
    return x.split(rows, dim=1)[group.rank].contiguous()


def _average(grad: Tensor, group: ParallelGroup) -> Tensor:
    # A sum over ranks in bf16 would round at every addition.
    whole = grad.to(torch.promote_types(grad.dtype, torch.float32))
    total = wait_for(_ops.all_reduce(whole, "sum", group.name))
    return (total / group.size).to(grad.dtype)


class ContextParallelRows:
    """The RowSplit of a transformer (model/transformer.py) over a context-parallel group."""

    def __init__(self, group: ParallelGroup) -> None:
        self.group = group
        self.rows: list[int] = []  # of each rank, in the forward pass that runs
        self.num_text = 0  # of a sample, there

    def split(
        self, hidden: Tensor, conditioning: Tensor, num_text: int
    ) -> tuple[Tensor, Tensor, int]:
        """Return this rank's rows of hidden [B, S, M], the conditioning, and how many rows are text."""
        self.rows = rows = rows_of_ranks(hidden.shape[1], self.group.size)
        self.num_text = num_text
        first, own = sum(rows[: self.group.rank]), rows[self.group.rank]
        # Text rows come first: a rank may have only text rows, or none.
        own_text = min(max(num_text - first, 0), own)
        leave = lambda grad, rows, group: _gather_rows(grad / group.size, rows, group)
        hidden = communicate(hidden, _own_rows, leave, rows, self.group)
        # All rows use the conditioning.
        return hidden, communicate(conditioning, unchanged, _average, self.group), own_text

    def join(self, hidden: Tensor) -> Tensor:
        """Return all rows [B, S, M] of this rank's rows."""
        enter = lambda grad, rows, group: _own_rows(grad, rows, group) * group.size
        return communicate(hidden, _gather_rows, enter, self.rows, self.group)

    def attention_kernels(self, kernels: BlockKernels) -> BlockKernels:
        """Return kernels whose attention has all rows of this rank's heads."""

        def qk_norm_rope3d(qkv: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
            # The last argument counts the text rows among this rank's rows, but here are all.
            qkv = communicate(qkv, _to_heads, _to_rows, self.rows, self.group)
            return kernels.qk_norm_rope3d(qkv, *given[:-1], self.num_text)

        def to_rows(attended: Tensor) -> Tensor:
            return communicate(attended, _to_rows, _to_heads, self.rows, self.group)

        def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return to_rows(kernels.flash_attention(q, k, v))

        def sparse_attention(
            q: Tensor, k: Tensor, v: Tensor, num_text: int, share: float
        ) -> tuple[Tensor, Tensor]:
            attended, kept_mass = kernels.sparse_attention(q, k, v, self.num_text, share)
            return to_rows(attended), kept_mass

        return replace(
            kernels,
            qk_norm_rope3d=qk_norm_rope3d,
            flash_attention=flash_attention,
            sparse_attention=sparse_attention,
        )


def split_context(transformer: DiffusionTransformer, group: ParallelGroup) -> None:
    """Let the ranks of a group split the rows of every sample, in place. Call it after `parallelize`."""
    transformer.runtime.row_split = ContextParallelRows(group)
    transformer.use_kernels(transformer.kernels)
