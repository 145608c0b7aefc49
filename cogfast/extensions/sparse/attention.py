"""Block-sparse attention, by FlexAttention on a GPU and by PyTorch's kernels on a CPU.

Rows are cut into blocks of BLOCK. With qbar_i and kbar_j the means of the queries and keys of a block,
each block of queries of a head attends to the `num_kept` blocks of keys with the largest

    s_ij = qbar_i kbar_j / sqrt(D)

and to the blocks that are always attended: those with text rows, which come first, and the last one if it
is not whole. Blocks of queries with text rows attend to everything. No gradient flows through the choice
(VSA, arXiv:2505.13389, chooses so too). `block_order` gives video rows an order in which a block is a
compact part of the video.

The share of attention's mass that is kept is estimated from the same scores: with n_j the rows of block j,
sum over the chosen j of n_j exp(s_ij), divided by the sum over all j.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cogfast.core.shapes import TokenGrid
from cogfast.kernels.argument_checks import check_qkv
from cogfast.kernels.torch_library import from_gpu, register_op

BLOCK = 128  # rows; PyTorch's and flash-attn's tuned kernels for Hopper take blocks of 128 x 128
_TILE = 8  # rows and columns of the part of a video in a block, which has 2 frames
# Blocks of queries per call on a CPU: their keys and values stay in the second-level cache.
_CHUNK = 4
_MOST_SHAPES = 64  # FlexAttention is compiled for each; PyTorch stops at 8

_COMPILED: set[Any] = set()  # for what FlexAttention is compiled
_aten = torch.ops.aten


def block_order(t: int, h: int, w: int) -> Tensor:
    """Return an order of t x h x w tokens in which BLOCK consecutive ones are near each other, [t*h*w] int32:
    the row-major number of the token in each place.

    Two frames at a time are walked in strips of about 8 rows, to and fro, so that each token's successor
    is near it, and no block needs padding: blocks of 4x4x4 would pad 13x30x45 by 40%.
    """
    num_strips = max(1, round(h / _TILE))
    frame, row, column = (x.reshape(-1) for x in np.indices((t, h, w)))
    pair, strip = frame // 2, row * num_strips // h
    strip = np.where(pair % 2, num_strips - 1 - strip, strip)
    column = np.where((pair * num_strips + strip) % 2, w - 1 - column, column)
    # The last key is the most significant one.
    return torch.from_numpy(np.lexsort((frame, row, column, strip, pair)).astype(np.int32))


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(1, there)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # PyTorch's gradient of index_select adds by atomics, since an index might come twice.
        return gradients[0].index_select(1, *ctx.saved_tensors), None, None


class RowOrder:
    """The order in which rows go through blocks with sparse attention: text, then `block_order`."""

    def __init__(self, grid: TokenGrid, num_text: int, device: torch.device) -> None:
        order = block_order(grid.t, grid.h, grid.w)
        self.video = order.to(device)  # [V] int32, for Rotation.order
        there = torch.cat([torch.arange(num_text), order.long() + num_text])
        self._there, self._back = there.to(device), there.argsort().to(device)  # [S]

    def apply(self, hidden: Tensor) -> Tensor:
        """Put rows of hidden [B, S, M] into this order."""
        return _Take.apply(hidden, self._there, self._back)

    def undo(self, hidden: Tensor) -> Tensor:
        """Put rows of hidden [B, S, M] back into row-major order."""
        return _Take.apply(hidden, self._back, self._there)


@dataclass(frozen=True, slots=True)
class Blocks:
    """How rows fall into blocks: `text` blocks with text rows, `free` ones to choose from, and a last one
    of `rest` rows if that is not 0."""

    text: int
    free: int
    rest: int

    @classmethod
    def of(cls, num_rows: int, num_text: int) -> Blocks:
        text = -(-num_text // BLOCK)
        if text * BLOCK >= num_rows:
            return cls(-(-num_rows // BLOCK), 0, 0)
        return cls(text, num_rows // BLOCK - text, num_rows % BLOCK)

    @property
    def count(self) -> int:
        return self.text + self.free + (self.rest > 0)

    def num_kept(self, share: float) -> int:
        """Return how many of the free blocks are attended if a share of them is left out."""
        return min(self.free, max(1, round((1 - share) * self.free)))

    def attended(self, num_rows: int, num_kept: int) -> int:
        """Return the number of pairs of a query and a key that are computed, of num_rows ** 2."""
        text_rows = min(self.text * BLOCK, num_rows)
        per_row = (self.text + num_kept) * BLOCK + self.rest
        return text_rows * num_rows + (num_rows - text_rows) * min(per_row, num_rows)


class Choice(NamedTuple):
    """The blocks of keys that each block of queries attends to, and the other way round.

    Indices begin with `counts` chosen blocks in ascending order; the others follow. N blocks.
    """

    kv_counts: Tensor  # [B, H, N] int32, as the next four
    kv_indices: Tensor  # [B, H, N, N]
    q_counts: Tensor
    q_indices: Tensor  # [B, H, N, N]
    nothing: Tensor  # [B, H, N] zeros: FlexAttention's counts of blocks with a mask
    kept_mass: Tensor  # [B, H, N] float32: the estimated share of a block of queries


def _block_means(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Means over blocks of x [B, S, H, D] -> [B, H, N, D]."""
    whole = x.shape[1] // BLOCK * BLOCK
    means = x[:, :whole].unflatten(1, (-1, BLOCK)).mean(2, dtype=dtype)
    if whole < x.shape[1]:
        means = torch.cat([means, x[:, whole:].mean(1, keepdim=True, dtype=dtype)], 1)
    return means.transpose(1, 2)


def _list_blocks(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Counts [..., N] and indices [..., N, N] of chosen [..., N, N]."""
    first = chosen.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices
    return chosen.sum(-1, dtype=torch.int32), first.int()


def choose_blocks_reference(q: Tensor, k: Tensor, num_text: int, num_kept: int) -> Choice:
    """Choose blocks for q, k [B, S, H, D] in plain PyTorch."""
    rows = q.shape[1]
    blocks = Blocks.of(rows, num_text)
    dtype = torch.promote_types(q.dtype, torch.float32)
    means = [_block_means(x, dtype) for x in (q, k)]
    scores = means[0] @ means[1].transpose(-1, -2) * q.shape[-1] ** -0.5
    sizes = scores.new_full((blocks.count,), BLOCK)
    sizes[-1] = rows - (blocks.count - 1) * BLOCK
    chosen = torch.ones_like(scores, dtype=torch.bool)
    free = slice(blocks.text, blocks.text + blocks.free)
    order = scores[..., free].sort(dim=-1, descending=True, stable=True).indices
    chosen[..., free].scatter_(-1, order[..., num_kept:], False)
    chosen[..., : blocks.text, :] = True
    kept_mass = (scores + sizes.log()).softmax(-1).masked_fill(~chosen, 0).sum(-1).float()
    kv, of_keys = _list_blocks(chosen), _list_blocks(chosen.transpose(-1, -2))
    return Choice(*kv, *of_keys, torch.zeros_like(kv[0]), kept_mass)


def attended_keys(q: Tensor, k: Tensor, num_text: int, share: float, rows: Tensor) -> Tensor:
    """Return which keys some rows [R] of q, k [B, S, H, D] attend to, bool [B, H, R, S]."""
    num_kept = Blocks.of(q.shape[1], num_text).num_kept(share)
    choice = Choice(*_choose_blocks(q.detach(), k.detach(), num_text, num_kept))
    count, indices = choice.kv_counts[..., None], choice.kv_indices.long()
    places = torch.arange(indices.shape[-1], device=q.device)
    blocks = torch.zeros_like(indices, dtype=torch.bool)
    blocks.scatter_(-1, indices, (places < count).expand_as(indices))
    return blocks[:, :, rows // BLOCK].repeat_interleave(BLOCK, -1)[..., : q.shape[1]]


def empty_choice(q: Tensor, *others: object) -> Choice:
    b, rows, h, _ = q.shape
    n = -(-rows // BLOCK)
    counts = lambda: q.new_empty(b, h, n, dtype=torch.int32)
    indices = lambda: q.new_empty(b, h, n, n, dtype=torch.int32)
    mass = q.new_empty(b, h, n, dtype=torch.float32)
    return Choice(counts(), indices(), counts(), indices(), counts(), mass)


_choose_blocks = register_op(
    "choose_blocks(Tensor q, Tensor k, SymInt num_text, SymInt num_kept)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    gpu=from_gpu("choose_blocks", "launch", "cogfast.extensions.sparse"),
    cpu=choose_blocks_reference,
    fake=empty_choice,
)


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, num_text: int, share: float, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention over the chosen blocks, [B, S, H, D], and the kept share of its mass.

    q, k, v: [B, S, H, D] with a dense last dim, num_text text rows in front. share: of the free blocks
        that each block of queries leaves out; 0: attention over all rows. backend: on a GPU, "flex"
        (FlexAttention's Triton kernels, as None) or "fa4" (FlexAttention by flash-attn 4).
    The second result, [B, H, N] float32, has an estimate for each block of queries.
    """
    check_qkv("sparse_attention", q, k, v)
    num_kept = Blocks.of(q.shape[1], num_text).num_kept(share)
    choice = Choice(*_choose_blocks(q.detach(), k.detach(), num_text, num_kept))
    if q.device.type == "cuda":
        return _flex_attention(q, k, v, choice, backend), choice.kept_mass
    # A GPU's kernels need q_indices, too; on the meta device this stands for them.
    indices = choice.kv_indices, choice.q_indices
    return _SparseAttention.apply(q, k, v, num_text, num_kept, *indices), choice.kept_mass


class SparseAttention:
    """The seam "sparse_attention": what a transformer takes to leave out blocks."""

    attend = staticmethod(sparse_attention)

    def __init__(self) -> None:
        self._orders: dict[tuple[TokenGrid, int, torch.device], RowOrder] = {}

    def order(self, grid: TokenGrid, num_text: int, device: torch.device) -> RowOrder:
        key = (grid, num_text, device)
        return self._orders.get(key) or self._orders.setdefault(key, RowOrder(*key))


# --- on a GPU


def _is_any_pair(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Allow all pairs, in a way that PyTorch does not see through: its flash-attn 4 kernels leave the lists of
    blocks out if the mask is a constant, and compute dense attention (pytorch issue 188322)."""
    return row >= 0


def _flex_attention(q: Tensor, k: Tensor, v: Tensor, choice: Choice, backend: str | None) -> Tensor:
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    kv, of_keys = choice[:2], choice[2:4]
    rows = q.shape[1]
    # All chosen blocks are whole ones in FlexAttention's words, which need no mask. The lists of blocks
    # with a mask are empty; flash-attn 4 and PyTorch 2.11 need them, and with the same strides.
    lists = (choice.nothing, kv[1], *kv, choice.nothing, of_keys[1], *of_keys)
    mask = BlockMask((rows, rows), *lists, (BLOCK, BLOCK), _is_any_pair)
    run = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    options: Any = {"BACKEND": "FLASH" if backend == "fa4" else "TRITON"}
    out = run(q, k, v, block_mask=mask, kernel_options=options)
    compiled = (q.shape, q.dtype, q.requires_grad, backend)
    if compiled not in _COMPILED and not torch.compiler.is_compiling():
        # Objects of the compiler refer to q, k, v, out and their gradients, and to each other. This
        # looks at Python's objects and waits for no device.
        _COMPILED.add(compiled)
        _collect_garbage()
        if q.requires_grad:
            q.register_hook(_collect_garbage)
    return out.transpose(1, 2)


def _collect_garbage(grad: Tensor | None = None) -> None:
    """Collect garbage. A hook of a gradient must return None, which leaves the gradient as it is."""
    gc.collect()  # sync: none, and once for a shape


@cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_SHAPES)
    # Activation checkpointing sees a wrapped region as one op, whose results it can keep.
    options: dict[str, Any] = {"wrap_inductor_compiled_regions": True}
    return torch.compile(flex_attention, fullgraph=True, dynamic=False, options=options)


# --- on a CPU, as ops


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows of n blocks of queries of a head; all rows of keys, or `chosen` [n, c] blocks and the rest."""

    rows: slice
    n: int
    chosen: Tensor | None
    num_rows: int  # S

    def queries(self, x: Tensor) -> Tensor:
        """These rows of x [S, D] -> [n, 1, R, D]."""
        return x[self.rows].unflatten(0, (self.n, 1, -1))

    def keys(self, x: Tensor) -> Tensor:
        """The rows that these attend to, of x [S, D] -> [n, 1, R, D]."""
        if self.chosen is None:
            return x[None, None]
        places = (self.chosen[..., None] * BLOCK + torch.arange(BLOCK)).flatten(1)
        rest = torch.arange(self.num_rows // BLOCK * BLOCK, self.num_rows).expand(self.n, -1)
        places = torch.cat([places, rest], 1)
        return x.index_select(0, places.flatten()).view(self.n, 1, -1, x.shape[-1])

    def add_to(self, total: Tensor, part: Tensor) -> None:
        """Add part [n, 1, R, D], whose rows are those of `keys`, to total [S, D]."""
        part = part[:, 0].to(total.dtype)
        if self.chosen is None:
            total += part[0]
            return
        whole, end = self.num_rows // BLOCK * BLOCK, self.chosen.shape[1] * BLOCK
        blocks = total[:whole].unflatten(0, (-1, BLOCK))
        for chosen, piece in zip(self.chosen, part, strict=True):
            blocks.index_add_(0, chosen, piece[:end].view(len(chosen), BLOCK, piece.shape[-1]))
            total[whole:] += piece[end:]


def _groups(
    kv_indices: Tensor, num_rows: int, num_text: int, num_kept: int
) -> Iterator[tuple[tuple[int, int], _Group]]:
    """Yield each group of all heads with the numbers of its sample and head. kv_indices: of Choice."""
    blocks = Blocks.of(num_rows, num_text)
    text_rows, end = min(blocks.text * BLOCK, num_rows), blocks.text + blocks.free
    parts = [*pairwise([*range(blocks.text, end, _CHUNK), end]), (end, blocks.count)]
    for head in np.ndindex(kv_indices.shape[:2]):
        if text_rows:
            yield head, _Group(slice(0, text_rows), 1, None, num_rows)
        for first, last in parts:
            if first < last:
                rows = slice(first * BLOCK, min(last * BLOCK, num_rows))
                chosen = kv_indices[head][first:last, : blocks.text + num_kept]
                yield head, _Group(rows, last - first, chosen, num_rows)


def _empty_results(q: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    b, num_rows, h, _ = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(b, h, num_rows, dtype=dtype)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, kv_indices: Tensor, num_text: int, num_kept: int
) -> tuple[Tensor, Tensor]:
    """Return out [B, S, H, D] and lse [B, H, S]."""
    out, lse = _empty_results(q)
    for (i, j), group in _groups(kv_indices, q.shape[1], num_text, num_kept):
        head = (i, slice(None), j)
        result, logs = _aten._scaled_dot_product_flash_attention_for_cpu(
            group.queries(q[head]), group.keys(k[head]), group.keys(v[head])
        )
        out[head][group.rows] = result.flatten(0, 2)
        lse[i, j, group.rows] = logs.flatten()
    return out, lse


def _attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kv_indices: Tensor,
    num_text: int,
    num_kept: int,
) -> tuple[Tensor, Tensor, Tensor]:
    dq = q.new_empty(q.shape)
    # Many blocks of queries add to a block of keys: a sum in 16 bits would round at every addition.
    dk, dv = (torch.zeros(k.shape, dtype=lse.dtype) for _ in range(2))
    for (i, j), group in _groups(kv_indices, q.shape[1], num_text, num_kept):
        head = (i, slice(None), j)
        parts = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            group.queries(dout[head]),
            group.queries(q[head]),
            group.keys(k[head]),
            group.keys(v[head]),
            group.queries(out[head]),
            group.queries(lse[i, j]),
            0.0,
            False,
        )
        dq[head][group.rows] = parts[0].flatten(0, 2)
        group.add_to(dk[head], parts[1])
        group.add_to(dv[head], parts[2])
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _flops(num_products: int, q: torch.Size, *others: Any, **out: Any) -> int:
    """Return the FLOPs of products of the pairs of rows that are attended. q: or dout; others: up to num_kept."""
    b, s, h, d = q
    return 2 * num_products * b * h * d * Blocks.of(s, others[-2]).attended(s, others[-1])


_sparse_attention = register_op(
    "sparse_attention(Tensor q, Tensor k, Tensor v, Tensor kv_indices, SymInt num_text,"
    " SymInt num_kept) -> (Tensor, Tensor)",
    cpu=_attend,
    fake=_empty_results,
    flops=partial(_flops, 2),
)
_sparse_attention_backward = register_op(
    "sparse_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    " Tensor kv_indices, SymInt num_text, SymInt num_kept) -> (Tensor, Tensor, Tensor)",
    cpu=_attend_backward,
    fake=lambda dout, q, k, v, *others: tuple(x.new_empty(x.shape) for x in (q, k, v)),
    flops=partial(_flops, 5),
)


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, num_text: int, num_kept: int, *indices: Tensor
    ) -> Tensor:
        ctx.numbers = (num_text, num_kept)
        out, lse = _sparse_attention(q, k, v, indices[0], *ctx.numbers)
        ctx.save_for_backward(q, k, v, out, lse, *indices)
        return out

    @staticmethod
    def backward(ctx, *output_gradients: Tensor) -> tuple[Any, ...]:
        *saved, _ = ctx.saved_tensors
        gradients = _sparse_attention_backward(*output_gradients, *saved, *ctx.numbers)
        return *gradients, *[None] * 4
