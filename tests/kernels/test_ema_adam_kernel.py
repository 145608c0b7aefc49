"""FusedEmaAdam's Triton kernels: many tensors in one launch, the table of their addresses, and
offsets beyond 32 bits."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cogfast.kernels.fused_ema_adam import AdamStreams, FusedEmaAdam, fused_ema_adam_reference
from cogfast.kernels.gpu import fused_ema_adam as ema_adam_kernel
from cogfast.kernels.gpu.fused_ema_adam import BLOCK, TensorTable, blocks_of, launch_ema_adam

HYPER = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
OPTIONS = {"bias_correction": True, "adam_w_mode": True, "ema_decay": 0.99, "use_num_updates": True}


def unaligned(x: Tensor, offset: int) -> Tensor:
    """Copy x to an address `offset` elements past a multiple of 16 bytes."""
    storage = torch.full((x.numel() + offset + 16,), 1234.0, dtype=x.dtype, device=x.device)
    skipped = -(storage.data_ptr() // x.element_size()) % 16
    start = skipped + offset if skipped + offset <= 16 else offset
    return storage[start:][: x.numel()].copy_(x)


def draw_streams(
    lengths: list[int], g_dtype: torch.dtype, has_copy: bool, offset: int = 0
) -> list[AdamStreams]:
    generator = torch.Generator().manual_seed(5)
    draw = lambda n: unaligned(torch.randn(n, generator=generator), offset)
    return [
        AdamStreams(
            p=draw(n),
            g=unaligned(torch.randn(n, generator=generator).to(g_dtype), offset),
            m=draw(n),
            v=draw(n).square_(),
            shadow=draw(n),
            step=torch.tensor(10.0 * (i + 1)),
            copy=unaligned(torch.zeros(n).to(g_dtype), offset) if has_copy else None,
            largest_m=None,
            largest_v=None,
        )
        for i, n in enumerate(lengths)
    ]


def expected_of(t: AdamStreams, scale: float = 1.0) -> list[Tensor]:
    """Return p, m, v, shadow after one update with OPTIONS, in float64."""
    step = t.step.item() + 1
    p, m, v, shadow = (x.double() for x in (t.p, t.m, t.v, t.shadow))
    decay = min(0.99, (1 + step) / (10 + step))
    fused_ema_adam_reference(
        p, scale * t.g.double(), m, v, shadow, **HYPER, adam_w_mode=True, step=step, ema_decay=decay
    )
    return [p, m, v, shadow]


def close(actual: Tensor, expected: Tensor) -> None:
    # One rounding error of numbers up to 4.
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=3e-7)


# One element, none, a prime, a full block, one more than two; empty tensors take no program.
LENGTHS = [1, 0, 1021, BLOCK, 2 * BLOCK + 1]


@pytest.mark.parametrize(
    ("g_dtype", "has_copy", "offset"),
    [
        (torch.float32, False, 1),
        (torch.float32, True, 0),
        (torch.bfloat16, True, 3),
        (torch.bfloat16, True, 0),
        (torch.float16, True, 1),
    ],
)
def test_many_tensors_in_one_launch(g_dtype: torch.dtype, has_copy: bool, offset: int) -> None:
    """Every tensor has its own count; neighbours in memory are not written."""
    streams = draw_streams(LENGTHS, g_dtype, has_copy, offset)
    expected = [expected_of(t, scale=0.5) for t in streams]
    table = TensorTable()
    table.hold(streams)
    assert table.num_blocks == 1 + 0 + 1 + 1 + 3
    launch_ema_adam(table, **HYPER, **OPTIONS, gradient_scale=torch.tensor(0.5))
    for i, (t, want) in enumerate(zip(streams, expected, strict=True)):
        assert t.step.item() == 10 * (i + 1) + 1
        for actual, e in zip((t.p, t.m, t.v, t.shadow), want, strict=True):
            close(actual, e)
            storage = torch.empty(0).set_(actual.untyped_storage())
            outside = storage.numel() - actual.numel()
            assert (storage == 1234).sum() == outside
        if has_copy:
            rtol = 2 * torch.finfo(g_dtype).eps  # the interpreter truncates
            torch.testing.assert_close(t.copy.float(), t.p, rtol=rtol, atol=1e-7)


def test_more_tensors_than_a_program_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ema_adam_kernel, "STEP_BLOCK", 4)
    streams = draw_streams([3] * 9, torch.float32, has_copy=False)
    expected = [expected_of(t) for t in streams]
    table = TensorTable()
    table.hold(streams)
    launch_ema_adam(table, **HYPER, **OPTIONS)
    for t, want in zip(streams, expected, strict=True):
        for actual, e in zip((t.p, t.m, t.v, t.shadow), want, strict=True):
            close(actual, e)


def on_triton(params: list[Tensor]) -> FusedEmaAdam:
    optimizer = FusedEmaAdam(params, **HYPER)
    optimizer._update_on_cpu = optimizer._update_with_triton
    return optimizer


def test_table_is_rebuilt_only_when_a_tensor_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads: list[Tensor] = []
    upload = ema_adam_kernel._upload
    monkeypatch.setattr(
        ema_adam_kernel, "_upload", lambda x, device: uploads.append(x) or upload(x, device)
    )
    params = [torch.randn(n).requires_grad_() for n in (5, 7)]
    optimizer = on_triton(params)
    for p in params:
        p.grad = torch.randn(p.shape)
    optimizer.step()
    assert [x.tolist() for x in uploads[:1]] == [[1, 1]] and len(uploads) == 2
    optimizer.step()
    assert len(uploads) == 2
    held, params[1].grad = params[1].grad, torch.randn(7)  # at another address
    optimizer.step()
    assert len(uploads) == 3, "addresses, not the map of blocks"
    params[0].grad = None
    optimizer.step()
    assert len(uploads) == 5
    assert [int(optimizer.state[p]["step"]) for p in params] == [3, 4]
    assert held.shape == (7,)


def test_blocks_of_tensors_beyond_32_bits() -> None:
    """The flat partition of 5B at one process has 5.57e9 elements."""
    n = 5_570_000_000
    counts, first = blocks_of([3, n, 0, BLOCK, n])
    assert counts == [1, 5_439_454, 0, 1, 5_439_454]
    assert first == [0, 1, 5_439_455, 5_439_455, 5_439_456]
    assert counts[1] * BLOCK >= n > (counts[1] - 1) * BLOCK > 2**32


def sparse(file: Path, n: int, dtype: torch.dtype) -> Tensor:
    """Return n zeros that take no memory."""
    with file.open("wb") as opened:
        opened.truncate(n * dtype.itemsize)
    return torch.from_file(str(file), shared=True, size=n, dtype=dtype)


def test_elements_beyond_32_bits(tmp_path: Path) -> None:
    """Update the last blocks of a tensor of 2^31 + 1,500 elements, in sparse files."""
    n = 2**31 + 1500
    first_block = 2**31 // BLOCK - 1  # the last that 32 bits hold
    start = first_block * BLOCK

    (window,) = draw_streams([n - start], torch.bfloat16, has_copy=True)
    names = ("p", "g", "m", "v", "shadow", "copy")
    streams = {k: sparse(tmp_path / k, n, getattr(window, k).dtype) for k in names}
    whole = AdamStreams(**streams, largest_m=None, largest_v=None, step=window.step)
    for name in names:
        getattr(whole, name)[start:] = getattr(window, name)
    expected = expected_of(window)
    table = TensorTable()
    table.hold([whole])
    assert table.num_blocks == first_block + 3
    # The interpreter runs only these three blocks: program 0 is moved to the first of them.
    table.num_blocks = 3
    table.table[0, ema_adam_kernel._FIRST_BLOCK.value] = -first_block
    launch_ema_adam(table, **HYPER, **OPTIONS)
    for actual, e in zip((whole.p, whole.m, whole.v, whole.shadow), expected, strict=True):
        close(actual[start:], e)
        assert not actual[start - 5000 : start].any() and not actual[:5000].any()


def test_copies_and_dtypes_that_do_not_fit() -> None:
    p = torch.zeros(4, 2, requires_grad=True)
    p.grad = torch.zeros(4, 2)
    optimizer = on_triton([p])
    optimizer.low_precision_copies[p] = torch.zeros(8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"FusedEmaAdam: a low precision copy is \[8\] bfloat16"):
        optimizer.step()
    optimizer.low_precision_copies[p] = torch.zeros(4, 3, dtype=torch.bfloat16)[:, :2]
    with pytest.raises(ValueError, match=r"strides \[3, 1\].*it must be contiguous"):
        optimizer.step()
    q = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    q.grad = torch.zeros(4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"a parameter is \[4\] float64.*bfloat16, float16 or"):
        on_triton([q]).step()


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@gpu
@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("offset", [0, 1])
def test_on_a_gpu(kernels: str, offset: int) -> None:
    """bf16 gradients, a clip factor and a rounded copy, against float64."""
    (on_cpu,) = draw_streams([1_000_003], torch.bfloat16, has_copy=True)
    on_gpu = (x if x is None else x.cuda() for x in on_cpu)
    t = AdamStreams(*(unaligned(x, offset) if x is not None and x.dim() else x for x in on_gpu))
    expected = expected_of(t, scale=0.5)
    p = t.p.requires_grad_()
    optimizer = FusedEmaAdam([p], **HYPER, ema_decay=0.99, kernels=kernels)
    optimizer.state[p] = {"step": t.step, "exp_avg": t.m, "exp_avg_sq": t.v, "shadow": t.shadow}
    optimizer.low_precision_copies[p] = t.copy
    optimizer.gradient_scale = torch.tensor(0.5, device="cuda")
    p.grad_dtype = None
    p.grad = t.g
    optimizer.step()
    for actual, e in zip((p.detach(), t.m, t.v, t.shadow), expected, strict=True):
        close(actual, e)
    assert torch.equal(t.copy, p.detach().bfloat16())
