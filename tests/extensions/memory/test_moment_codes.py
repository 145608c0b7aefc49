"""8-bit moments: their code, and FusedEmaAdam with them against float64 in NumPy."""

import numpy as np
import pytest
import torch
from torch import Tensor

from cogfast.extensions.memory.moment_codes import CodedMoment, coded_moment
from cogfast.kernels.fused_ema_adam import FusedEmaAdam, num_blocks
from tests.kernels.test_fused_ema_adam import HYPER, build, random_case, run  # noqa: F401

KEYS = ("exp_avg", "exp_avg_sq")
random_halves = CodedMoment.random_halves
LEVELS = {"exp_avg": 127, "exp_avg_sq": 255}


def coded(values: Tensor, key: str, r: Tensor | None = None) -> CodedMoment:
    moment = CodedMoment(
        torch.empty(values.shape, dtype=torch.uint8),
        torch.empty(num_blocks(values.numel()), dtype=torch.int16),
        is_signed=key == "exp_avg",
    )
    moment.encode(values, 0, r)
    return moment


def draw(n: int, key: str, seed: int = 0) -> Tensor:
    """Draw numbers over nine powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda: torch.randn(n, generator=generator)
    x = normal() * (3 * normal()).exp()
    return x if key == "exp_avg" else x.square()


# --- the same code in NumPy, by arithmetic and not by bits ---


def grid(exponent: np.ndarray, eighths: np.ndarray) -> np.ndarray:
    return (1 + eighths / 8) * 2.0**exponent


def level_of(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of the largest code value that is not above x, from that of 2^-127, and the
    share of the way to the next one."""
    exponent = np.floor(np.log2(np.maximum(x, 1e-300)))
    position = (x / 2.0**exponent - 1) * 8
    return (8 * (exponent + 127) + np.floor(position)).astype(int), position - np.floor(position)


def value_of(level: np.ndarray) -> np.ndarray:
    return grid(level // 8 - 127.0, level % 8)


def hashed(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def rounded(x: np.ndarray, key: str, step: int) -> np.ndarray:
    """Return what a moment [n], float64, is after it has been encoded at a step."""
    out = np.zeros_like(x)
    random = np.array([hashed(i ^ hashed(step)) for i in range(len(x))])
    random = random % 2**16 if key == "exp_avg" else random >> 16
    for start in range(0, len(x), 256):
        block = slice(start, start + 256)
        size, r = np.abs(x[block]), random[block] / 2**16
        if not size.any():
            continue
        below, share = level_of(size.max())
        top = below + (share > 0)
        level, share = level_of(size)
        level = level + (share + r >= 1)
        lowest = top - LEVELS[key] + 1
        if key == "exp_avg":
            small = np.where(r * value_of(lowest) < size, value_of(lowest), 0)
        else:
            small = np.where(size > 0, value_of(lowest), 0)
        out[block] = np.sign(x[block]) * np.where(level < lowest, small, value_of(level))
    return out


def numpy_steps(p: Tensor, grads: list[Tensor]) -> dict[str, np.ndarray]:
    """Return p and its decoded moments after updates with HYPER, in float64."""
    x = p.detach().double().numpy().copy()
    m, v = np.zeros_like(x), np.zeros_like(x)
    (b1, b2), lr = HYPER["betas"], HYPER["lr"]
    for t, gradient in enumerate(grads, 1):
        g = gradient.double().numpy()
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        x *= 1 - lr * HYPER["weight_decay"]
        x -= lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + HYPER["eps"])
        m, v = rounded(m, "exp_avg", t), rounded(v, "exp_avg_sq", t)
    return {"p": x, "exp_avg": m, "exp_avg_sq": v}


def eight_bit(optimizer: FusedEmaAdam) -> FusedEmaAdam:
    optimizer.has_8bit_moments = True
    return optimizer


def decoded(optimizer: FusedEmaAdam, p: Tensor, key: str) -> Tensor:
    return coded_moment(optimizer.state[p], key).decode().view(p.shape)


# One element, a block, one less and one more, a Triton block and one more, several pieces in C++.
LENGTHS = (1, 255, 256, 257, 1025, 4099)


def test_updates_equal_numpy_in_float64(build) -> None:  # noqa: F811
    """A random number may fall on the other side of a float32 rounding: very few elements."""
    params, grads = random_case(LENGTHS[: -1 if build.on == "triton" else None], num_steps=2)
    spread = torch.linspace(-9, 3, 4099).exp()
    spread[::50] *= 1e-6  # below the smallest codes of their blocks
    grads = [[g * spread[: len(g)] for g in step] for step in grads]
    expected = [numpy_steps(p, [g[i] for g in grads]) for i, p in enumerate(params)]
    optimizer = eight_bit(build(params, **HYPER))
    run(optimizer, params, grads)
    for p, want in zip(params, expected, strict=True):
        for key in KEYS:
            got = decoded(optimizer, p, key).double().numpy()
            same = np.isclose(got, want[key], rtol=1e-6, atol=0)
            assert (~same).sum() <= max(1, len(p) // 1000), key
            # The code beside it, which is at most an eighth away.
            assert np.allclose(got, want[key], rtol=0.13, atol=1e-9), key
        near = np.isclose(p.detach().double().numpy(), want["p"], rtol=1e-6, atol=1e-7)
        assert (~near).sum() <= max(1, len(p) // 1000)
        assert np.allclose(p.detach().double().numpy(), want["p"], rtol=0, atol=1e-4)


def test_strided_parameters_and_other_dtypes(build) -> None:  # noqa: F811
    """bf16 gradients, a rounded copy and a scale; a parameter that is not contiguous."""
    (p, q), ((g, h),) = random_case([(600,), (40, 30)], num_steps=1)
    q = q.detach().t().requires_grad_()
    optimizer = eight_bit(build([p, q], **HYPER))
    optimizer.gradient_scale = torch.tensor(0.5)
    copy = optimizer.low_precision_copies[p] = torch.zeros(600, dtype=torch.bfloat16)
    p.grad_dtype = None
    want = [
        numpy_steps(p, [0.5 * g.bfloat16()]),
        numpy_steps(q.detach().reshape(-1), [0.5 * h.reshape(-1)]),
    ]
    p.grad, q.grad = g.bfloat16(), h.view(30, 40)
    optimizer.step()
    for x, expected in ((p, want[0]), (q, want[1])):
        flat = x.detach().reshape(-1).double().numpy()
        assert np.allclose(flat, expected["p"], rtol=1e-6, atol=2e-7)
        for key in KEYS:
            got = decoded(optimizer, x, key).reshape(-1).double().numpy()
            assert np.isclose(got, expected[key], rtol=1e-6, atol=0).mean() > 0.995
    torch.testing.assert_close(copy.float(), p.detach(), rtol=2**-7, atol=1e-7)


def test_a_skipped_step_leaves_every_value(build) -> None:  # noqa: F811
    params, grads = random_case([700, 3], num_steps=2)
    optimizer = eight_bit(build(params, **HYPER))
    run(optimizer, params, grads)
    values = lambda: (
        [decoded(optimizer, p, key) for p in params for key in KEYS]
        + [x.detach().clone() for p in params for x in (p, optimizer.state[p]["step"])]
    )
    before = values()
    optimizer.found_inf = torch.tensor(1.0)
    run(optimizer, params, [[torch.full_like(p, torch.nan) for p in params]])
    assert all(torch.equal(a, b) for a, b in zip(before, values(), strict=True))


@pytest.mark.parametrize("key", KEYS)
def test_rounding_keeps_the_mean(key: str) -> None:
    """Codes are an eighth of a power of two apart; numbers below the smallest code keep the mean, too,
    except that of the second moment, which is larger."""
    x = draw(1500, key)
    mean = torch.zeros(1500, dtype=torch.float64)
    halves = [random_halves(torch.tensor(float(t)), 0, 1500)[KEYS.index(key)] for t in range(200)]
    for r in halves:
        mean += coded(x, key, r).decode().double() / 200
    block = x.abs().view(-1)[:1280].view(-1, 256)
    is_inside = (block > block.amax(1, keepdim=True) * 2e-5).view(-1)
    off = (mean / x - 1).abs()[:1280]
    assert off[is_inside].max() < 0.125 / 14 * 4  # four standard deviations
    r = torch.stack(halves).double() / 2**16
    assert abs(r.mean() - 0.5) < 1e-3 and abs((r[1:] * r[:-1]).mean() - 0.25) < 1e-3
    assert abs((r[:, 1:] * r[:, :-1]).mean() - 0.25) < 1e-3  # neighbours


def test_a_second_moment_follows_small_changes() -> None:
    """From 1, with gradients of sqrt(0.5) and beta2 = 0.999, v is 0.870 after 300 steps. Rounded to the
    nearest code, it would still be 1."""
    moment, nearest = (coded(torch.ones(256), "exp_avg_sq") for _ in range(2))
    for t in range(300):
        for which, r in (
            (moment, random_halves(torch.tensor(float(t)), 0, 256)[1]),
            (nearest, None),
        ):
            v = which.decode()
            which.encode(v + 0.001 * (0.5 - v), 0, r)
    assert nearest.decode().min() == 1
    assert abs(moment.decode().mean() - 0.870) < 0.02
    assert moment.decode().std() < 0.15


@pytest.mark.parametrize("key", KEYS)
def test_decoded_values_have_the_same_codes(key: str) -> None:
    """Whatever the random number, and where a block begins: so checkpoints hold float32."""
    x = draw(1500, key).clamp(min=1e-3) if key == "exp_avg_sq" else draw(1500, key)
    values = coded(x, key).decode()
    again = coded(values, key, random_halves(torch.tensor(7.0), 0, 1500)[0])
    assert torch.equal(again.decode(), values)
    is_kept = values != 0
    shifted = coded(values[100:], key).decode()
    span = values[100:].abs() > values.abs().max() * 2e-5
    assert torch.equal(shifted[span], values[100:][span])
    assert is_kept.any()
    assert torch.equal(again.decode(300, 777), values[300:1077])


def test_a_second_moment_never_becomes_zero() -> None:
    x = torch.tensor([1.0, 1e-20, 0.0, 1e-38])
    values = coded(x, "exp_avg_sq").decode()
    assert values[0] == 1 and values[2] == 0
    assert 2**-32 < values[1] == values[3] < 2**-31
    signed = coded(torch.tensor([-1.0, 1e-20, 2**-15.5, -0.0]), "exp_avg").decode()
    assert signed[0] == -1 and signed[1] == 0 and signed[3] == 0
    assert abs(signed[2] / 2**-15.5 - 1) < 0.13
    for zero in (torch.zeros(5), torch.full((5,), 1e-42)):
        assert coded(zero, "exp_avg").decode().abs().max() <= 2e-39
