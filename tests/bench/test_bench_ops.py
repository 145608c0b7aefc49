"""bench.ops at small sizes on the CPU: byte counts, refusals and the peers it compares with."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import gpu_run, ops
from bench.harness.outcome import Settings
from bench.kernel_ops.op_bench import OpBench, check_op
from bench.kernel_ops.op_cases import (
    GELU,
    NORM,
    OPS,
    QK,
    RESIDUAL,
    RESIDUAL_NORM,
    SHAPES,
    TINY_SHAPES,
    bytes_of,
    draw_inputs,
)
from bench.kernel_ops.optimizer_ops import PEERS, OptimizerBench, optimizer_benches
from cogfast.kernels import adaptive_layernorm, gelu, qk_norm_rope3d
from cogfast.kernels.fused_ema_adam import FusedEmaAdam

CPU = torch.device("cpu")
TINY = Settings(CPU, is_tiny=True)
PLAIN, ROTARY = TINY_SHAPES


def small_set(settings: Settings) -> list:
    """Return a block's ops with rotation, and the update with clipping and copy."""
    adam = optimizer_benches(settings)[2]
    return [adam, *(OpBench(settings, op, ROTARY) for op in OPS)]


def run(out: Path) -> int:
    """Run what `python -m bench.ops` runs."""
    return gpu_run.main(["op_times", "--device", "cpu", "--tiny", "--out", str(out)])


@pytest.fixture(scope="module")
def measured():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "benches", small_set)
        kept = []
        outcome = ops.measure_ops(replace(TINY, keep=kept.append))
    assert len(kept) == 1 + len(OPS), "one after each op"
    return outcome


@pytest.mark.soak
def test_rates_follow_from_bytes_and_times(measured) -> None:
    # tokens x width of ROTARY in bf16, and how many such tensors are read and written
    unit = (3 + 2 * 3 * 5) * 3 * 64 * 2
    units = {
        ("adaptive_layernorm", "forward"): 2,
        ("adaptive_layernorm", "backward"): 4,
        ("residual_adaptive_layernorm SFT", "forward"): 4,
        ("residual_adaptive_layernorm SFT", "backward"): 6,
        ("residual_adaptive_layernorm LoRA", "forward"): 4,
        ("residual_adaptive_layernorm LoRA", "backward"): 5,
        ("gated_residual", "forward"): 3,
        ("gated_residual", "backward"): 3,
        ("qk_norm_rope3d", "forward"): 4,
        ("qk_norm_rope3d", "backward"): 8,
        ("gelu", "forward"): 8,
        ("gelu", "backward"): 12,
        ("add_low_rank", "forward"): 6,
        ("add_low_rank", "backward"): 3,
    }
    expected = {key: unit * count for key, count in units.items()}
    expected["FusedEmaAdam clip copy", "step"] = 38 * 5_003
    assert {(row["op"], row["way"]): row["bytes"] for row in measured.rows} == expected
    assert measured.problems == []
    copy = measured.numbers["copy_gb_per_s"]
    for row in measured.rows:
        assert row["status"] == "ok" and row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["median_ms"] / 1e6)
        assert row["percent_of_copy"] == pytest.approx(100 * row["gb_per_s"] / copy)


@pytest.mark.soak
def test_every_peer_is_timed(measured) -> None:
    for row in measured.rows:
        peers = {key.removeprefix("vs ") for key, value in row.items() if key.startswith("vs ")}
        assert peers == ({*PEERS} if "Adam" in row["op"] else {"torch eager", "torch.compile"})


def test_bytes_at_the_shapes_of_the_models() -> None:
    """The fused norm moves 273 and 437 MB; a unit is 277 MB at 1.5-5B."""
    of_2b, of_5b, of_15 = (bytes_of(RESIDUAL_NORM, "forward", shape) for shape in SHAPES)
    assert (of_2b, of_5b) == (4 * 17776 * 1920 * 2, 4 * 17776 * 3072 * 2)
    assert of_15 == 4 * 45104 * 3072 * 2
    assert [round(x / 1e6) for x in (of_2b, of_5b, of_15 / 4)] == [273, 437, 277]
    adam = OptimizerBench(TINY, "2B", 1_000_000_000, has_copy=True, has_clip=False)
    assert adam.num_bytes("step") == 36e9  # bf16 gradient, four float32 streams both ways, copy


def bent(function, change):
    """Return the op with its outputs changed."""
    return lambda *arguments, **keywords: change(function(*arguments, **keywords))


def half_gradient(x: torch.Tensor) -> torch.Tensor:
    return x / 2 + x.detach() / 2


def one_element(y: torch.Tensor) -> torch.Tensor:
    change = torch.zeros_like(y)
    change.view(-1)[-1] = 0.03 * y.detach().abs().max()
    return y + change


def swapped_text(hidden, weight, bias, shift, scale, num_text, eps):
    return adaptive_layernorm.adaptive_layernorm_reference(
        hidden, weight, bias, shift.flip(1), scale, num_text, eps
    )


def raising(*arguments, **keywords):
    raise RuntimeError("CUDA error: misaligned address\nmore")


@pytest.mark.parametrize(
    ("op", "module", "name", "wrong", "message"),
    [
        (GELU, gelu, "gelu", bent(gelu.gelu, half_gradient), "d_x: relative error 5"),
        (GELU, gelu, "gelu", lambda x, bias: gelu.gelu_reference(x, None), "not have been used"),
        (GELU, gelu, "gelu", raising, "RuntimeError: CUDA error: misaligned address"),
        (RESIDUAL, adaptive_layernorm, "gated_residual", None, "hidden_out: largest error"),
        (NORM, adaptive_layernorm, "adaptive_layernorm", swapped_text, "normed: relative error"),
        (QK, qk_norm_rope3d, "qk_norm_rope3d", None, "d_k: relative error"),
    ],
    ids=["gradient", "no-bias", "raises", "one-element", "text-video", "one-part"],
)
def test_a_wrong_op_is_marked_and_timed(
    op, module, name, wrong, message, monkeypatch, capsys, tmp_path
) -> None:
    right = vars(module)[name]
    if op is RESIDUAL:
        wrong = bent(right, one_element)
    if op is QK:
        wrong = bent(right, lambda qkv: (qkv[0], half_gradient(qkv[1]), qkv[2]))
    monkeypatch.setattr(module, name, wrong)
    monkeypatch.setattr(OpBench, "peers", ())
    monkeypatch.setattr(ops, "benches", lambda settings: [OpBench(settings, op, ROTARY)])
    assert run(tmp_path) == 1
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.strip().startswith(str(op))]
    assert len(rows) == 2 and all("WRONG" in row for row in rows)
    has_times = [any(letter.isdigit() for letter in row.partition("WRONG")[2]) for row in rows]
    # An op that raises, or whose gradients cannot be computed, has no times.
    assert has_times == [wrong is not raising and message != "not have been used"] * 2
    assert any(message in line for line in printed.splitlines() if "WRONG: " in line)


def without_ema(self, closure=None):
    shadows = {p: self.state[p]["shadow"].clone() for p in self.state}
    right_step(self, closure)
    for p, shadow in shadows.items():
        self.state[p]["shadow"].copy_(shadow)


def without_last_element(self, closure=None):
    last = {p: p.detach()[-1].clone() for p in self.state}
    right_step(self, closure)
    for p, value in last.items():
        p.detach()[-1] = value


right_step = FusedEmaAdam.step


@pytest.mark.parametrize(
    ("step", "message"),
    [(without_ema, "shadow from 0 of 5003"), (without_last_element, "p from 907 of 5003")],
)
def test_a_wrong_update_is_marked_and_timed(step, message, monkeypatch) -> None:
    monkeypatch.setattr(FusedEmaAdam, "step", step)
    monkeypatch.setattr(OptimizerBench, "peers", ())
    monkeypatch.setattr(ops, "benches", lambda settings: optimizer_benches(settings)[:1])
    outcome = ops.measure_ops(TINY)
    assert [row["status"] for row in outcome.rows] == ["WRONG"]
    assert any(message in text for text in outcome.problems)
    assert outcome.rows[0]["median_ms"] > 0


@pytest.mark.parametrize("op", OPS, ids=str)
def test_checks_pass_without_rotation_too(op) -> None:
    assert check_op(op, PLAIN, CPU) == []


@pytest.mark.parametrize("shape", TINY_SHAPES, ids=str)
def test_what_is_compiled_computes_the_same(shape) -> None:
    """The exact reference of q and k has no complex numbers; in float32 it rounds as the other does."""
    inputs = draw_inputs(QK, shape, torch.float32, CPU)
    for found, wanted in zip(QK.exact(shape, inputs), QK.reference(shape, inputs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
