"""Block-sparse attention: the choice of blocks, and outputs and gradients against float64."""

import numpy as np
import pytest
import torch
from torch import Tensor

from cogfast.extensions.sparse import attention, check
from cogfast.extensions.sparse import choose_blocks as gpu
from cogfast.extensions.sparse.attention import (
    BLOCK,
    Blocks,
    block_order,
    choose_blocks_reference,
    sparse_attention,
)
from cogfast.extensions.sparse.check import sparse_error
from cogfast.train.keys import TrainKeys

# B, S, H, D, text rows: prime numbers of rows, no text, a grid that does not divide the block, text
# that ends inside a block and at one, text alone, one row
SHAPES = {
    "prime": (2, 1009, 2, 16, 1),
    "226 text rows": (1, 997, 1, 48, 226),
    "no text": (1, 700, 2, 16, 0),
    "whole blocks": (1, 6 * BLOCK, 2, 64, BLOCK),
    "text alone": (1, 130, 1, 16, 226),
    "one row": (1, 1, 1, 16, 0),
}
SHARES = (0.0, 0.5, 0.8)


def draw(count: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    return list(torch.randn(count, *shape, generator=generator))


def allowed(q: Tensor, k: Tensor, num_text: int, share: float) -> Tensor:
    """The pairs of rows that are attended, bool [B, H, S, S], from the definition in float64."""
    b, rows, h, d = q.shape
    blocks = -(-rows // BLOCK)
    block_of = torch.arange(rows) // BLOCK
    means = [
        torch.stack([x[:, block_of == i].double().mean(1) for i in range(blocks)], 2)
        for x in (q, k)
    ]  # [B, H, N, D]
    scores = means[0] @ means[1].transpose(-1, -2) * d**-0.5
    has_text = torch.arange(blocks) * BLOCK < num_text
    is_short = torch.tensor([sum(block_of == i) < BLOCK for i in range(blocks)])
    is_free = ~has_text & ~is_short
    kept = min(int(is_free.sum()), max(1, round((1 - share) * int(is_free.sum()))))
    pairs = torch.zeros(b, h, blocks, blocks, dtype=torch.bool)
    for i, j, query in np.ndindex(b, h, blocks):
        best = scores[i, j, query].masked_fill(~is_free, -torch.inf).argsort(descending=True)[:kept]
        pairs[i, j, query, best] = bool(is_free.any())
        pairs[i, j, query] |= ~is_free | has_text[query]
    return pairs[:, :, block_of][..., block_of]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", SHARES)
def test_outputs_and_gradients_are_those_of_masked_attention(shape: str, share: float) -> None:
    *sizes, num_text = SHAPES[shape]
    q, k, v, dout = draw(4, *sizes)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    pairs = allowed(q, k, num_text, share)
    scores = torch.einsum("bihd,bjhd->bhij", exact[0], exact[1]) * sizes[-1] ** -0.5
    weights = scores.masked_fill(~pairs, -torch.inf).softmax(-1)
    wanted = torch.einsum("bhij,bjhd->bihd", weights, exact[2])
    wanted = (wanted, *torch.autograd.grad(wanted, exact, dout.double()))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, kept_mass = sparse_attention(*leaves, num_text, share)
    found = (out, *torch.autograd.grad(out, leaves, dout))
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        assert (a - b).norm() <= 1e-5 * max(b.norm(), 0.1), name
    blocks = Blocks.of(sizes[1], num_text)
    counted = blocks.attended(sizes[1], blocks.num_kept(share))
    assert counted * sizes[0] * sizes[2] == pairs.sum()
    assert kept_mass.shape == (sizes[0], sizes[2], blocks.count)
    assert (kept_mass <= 1 + 1e-6).all() and (kept_mass > 0).all()
    if share == 0:
        assert torch.allclose(kept_mass, torch.ones(()))


def test_bf16_is_as_near_as_dense_attention() -> None:
    *sizes, num_text = SHAPES["prime"]
    q, k, v, dout = (x.bfloat16() for x in draw(4, *sizes))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    wanted, _ = sparse_attention(*exact, num_text, 0.5)
    wanted = (wanted, *torch.autograd.grad(wanted, exact, dout.double()))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = sparse_attention(*leaves, num_text, 0.5)
    found = (out, *torch.autograd.grad(out, leaves, dout))
    assert all(x.dtype == torch.bfloat16 for x in found)
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).norm() <= 0.01 * b.norm()


@pytest.mark.parametrize("shape", ["prime", "226 text rows", "no text", "text alone"])
def test_the_kernels_choose_as_the_reference(shape: str) -> None:
    *sizes, num_text = SHAPES[shape]
    q, k = draw(2, *sizes)
    for share in (0.5, 0.95):
        kept = Blocks.of(sizes[1], num_text).num_kept(share)
        wanted = choose_blocks_reference(q, k, num_text, kept)
        for name, a, b in zip(
            wanted._fields, gpu.launch(q, k, num_text, kept), wanted, strict=True
        ):
            equal = torch.allclose(a, b, atol=1e-6) if a.is_floating_point() else torch.equal(a, b)
            assert equal, (name, share)


def test_equal_scores_keep_the_first_blocks() -> None:
    q = torch.ones(1, 900, 1, 16)
    for found in (choose_blocks_reference(q, q, 0, 2), gpu.launch(q, q, 0, 2)):
        assert found.kv_indices[0, 0, :, :3].tolist() == [[0, 1, 7]] * 8
        assert found.kv_counts.tolist() == [[[3] * 8]]


def test_a_share_of_80_percent_takes_at_most_27_percent_of_the_pairs() -> None:
    for rows in (17_776, 45_106):
        blocks = Blocks.of(rows, 226)
        assert blocks.attended(rows, blocks.num_kept(0.8)) <= 0.27 * rows**2


@pytest.mark.parametrize("grid", [(13, 30, 45), (11, 48, 85), (1, 3, 200), (2, 1, 1), (5, 7, 11)])
def test_blocks_are_compact_parts_of_the_video(grid: tuple[int, int, int]) -> None:
    t, h, w = grid
    order = block_order(*grid).long()
    assert torch.equal(order.sort().values, torch.arange(t * h * w))
    places = torch.stack([order // (h * w), order // w % h, order % w], -1)
    whole = places[: len(places) // BLOCK * BLOCK].unflatten(0, (-1, BLOCK)).float()
    if len(whole) > 20:
        extent = (whole.amax(1) - whole.amin(1) + 1).mean(0)
        assert (extent <= torch.tensor([2.1, 10.0, 12.0])).all(), extent


@pytest.mark.soak  # FlexAttention is compiled for each shape
@pytest.mark.parametrize("shape", ["whole blocks", "226 text rows"])
def test_flex_attention_reads_the_lists_of_blocks_alike(shape: str) -> None:
    """Its forward pass on a CPU, which takes them as blocks with a mask; it has no backward pass there."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention, noop_mask

    *sizes, num_text = SHAPES[shape]
    q, k, v = draw(3, *sizes)
    kept = Blocks.of(sizes[1], num_text).num_kept(0.6)
    kv, indices, of_keys, q_indices, *_ = choose_blocks_reference(q, k, num_text, kept)
    lists = (kv, indices, None, None, of_keys, q_indices, None, None)
    mask = BlockMask((sizes[1], sizes[1]), *lists, (BLOCK, BLOCK), noop_mask)
    with torch.no_grad():
        heads = (x.transpose(1, 2) for x in (q, k, v))
        found = torch.compile(flex_attention)(*heads, block_mask=mask).transpose(1, 2)
    wanted, _ = sparse_attention(q, k, v, num_text, 0.6)
    assert (found - wanted).norm() <= 1e-5 * wanted.norm()


def test_flash_attn_4_is_given_the_lists_of_blocks() -> None:
    """PyTorch leaves them out for masks that it takes for constants (pytorch issue 188322)."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.kernel.flex.flex_flash_attention import is_trivial_mask_graph
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.nn.attention.flex_attention import noop_mask

    places = [torch.zeros((), dtype=torch.int32) for _ in range(4)]
    traced = lambda mask: make_fx(mask, decomposition_table=select_decomp_table())(*places)
    assert is_trivial_mask_graph(traced(noop_mask))
    assert not is_trivial_mask_graph(traced(attention._is_any_pair))
    assert all(attention._is_any_pair(*(torch.arange(300),) * 4))


@pytest.mark.parametrize("shape", ["prime", "whole blocks"])
def test_results_are_checked_before_training(shape: str, monkeypatch) -> None:
    """Right ones pass; dense attention, other blocks and a wrong gradient do not."""
    *sizes, num_text = SHAPES[shape]
    args = TrainKeys(attention="sparse:0.8", fp16=False, bf16=False)
    find = lambda: sparse_error(tuple(sizes), num_text, 0.8, args, torch.device("cpu"))
    assert find() is None
    right = check.sparse_attention
    halved = lambda k: k / 2 + k.detach() / 2
    wrong = {
        "out is wrong": lambda q, k, v, text, share, _: right(q, k, v, text, 0.0),
        "dq is wrong": lambda q, k, v, *rest: right(halved(q), k, v, *rest),
        "dk is wrong": lambda q, k, v, *rest: right(q, halved(k), v, *rest),
    }
    for line, attend in wrong.items():
        monkeypatch.setattr(check, "sparse_attention", attend)
        assert line in (find() or "")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [4_500, 17_776])
def test_on_a_gpu(rows: int, dtype: torch.dtype) -> None:
    """Outputs and gradients of FlexAttention against masked attention in float64, a head at a time."""
    num_text, share = 226, 0.8
    q, k, v, dout = (x.to("cuda", dtype) for x in draw(4, 1, rows, 2, 64))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = sparse_attention(*leaves, num_text, share)
    found = [out, *torch.autograd.grad(out, leaves, dout)]
    pairs = allowed(q.detach().cpu(), k.detach().cpu(), num_text, share)
    for head in range(2):
        exact = [x.detach()[:, :, head].double().requires_grad_() for x in leaves]
        scores = exact[0] @ exact[1].transpose(1, 2) * 64**-0.5
        scores = scores.masked_fill(~pairs[:, head].cuda(), -torch.inf)
        truth = scores.softmax(-1) @ exact[2]
        wanted = [truth, *torch.autograd.grad(truth, exact, dout[:, :, head].double())]
        near = 1e-2 if dtype == torch.bfloat16 else 2e-3
        for ours, theirs in zip(found, wanted, strict=True):
            assert (ours[:, :, head].double() - theirs).norm() <= near * theirs.norm()
