"""bench.ops at small sizes on the CPU: byte counts, refusals and the peers it compares with."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import types
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch import nn

from bench import ops
from bench.harness.outcome import Settings
from bench.kernel_ops import peers
from bench.kernel_ops.op_bench import OpBench
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
from bench.kernel_ops.op_check import check_op, check_peer
from bench.kernel_ops.optimizer_ops import OptimizerBench, optimizer_benches
from bench.kernel_ops.peers import Unavailable
from cogfast.kernels import adaptive_layernorm, gelu, qk_norm_rope3d
from cogfast.kernels.fused_ema_adam import FusedEmaAdam
from tests.support.tiny_run import ROOT

CPU = torch.device("cpu")
TINY = Settings(CPU, is_tiny=True)
PLAIN, ROTARY = TINY_SHAPES


def small_set(settings: Settings) -> list:
    """Return a block's ops with rotation, and the update with clipping and copy."""
    adam = optimizer_benches(settings)[2]
    return [adam, *(OpBench(settings, op, ROTARY) for op in OPS)]


@pytest.fixture(scope="module")
def measured():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "benches", small_set)
        kept = []
        outcome = ops.measure_ops(replace(TINY, keep=kept.append))
    assert len(kept) == 2 * (1 + len(OPS)), "one after each op, and after its foreign peers"
    return outcome


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
        for name, times in row["peers"].items():
            if "median_ms" in times:
                assert row[f"vs {name}"] == pytest.approx(times["median_ms"] / row["median_ms"])
            else:
                assert f"vs {name}" not in row


def test_every_peer_is_timed_or_says_why_not(measured) -> None:
    reasons = {
        "needs a GPU": {
            "Liger LayerNorm",
            "apex FusedLayerNorm",
            "DeepSpeed FusedAdam + lerp",
            "apex FusedAdam + lerp",
        }
    }
    for row in measured.rows:
        for name, times in row["peers"].items():
            on_gpu_only = name in reasons["needs a GPU"]
            assert times.get("unavailable") == ("needs a GPU" if on_gpu_only else None)
            assert ("median_ms" in times) != on_gpu_only
    compared = {row["op"]: set(row["peers"]) for row in measured.rows}
    both = {"torch eager", "torch.compile"}
    assert all(names >= both for op, names in compared.items() if "Adam" not in op)
    is_diffusers = lambda op: "Adam" not in op and op != "add_low_rank"
    assert all("diffusers" in names for op, names in compared.items() if is_diffusers(op))
    assert compared["residual_adaptive_layernorm SFT"] >= {"Liger LayerNorm", "apex FusedLayerNorm"}
    assert measured.numbers["no figure for Liger LayerNorm"] == "needs a GPU"


def test_bars_are_marked_with_the_goals(measured) -> None:
    labels, (_, goals) = measured.bars.labels, measured.bars.marks
    found = {label.splitlines()[0]: goal for label, goal in zip(labels, goals, strict=True)}
    assert found["residual_adaptive_layernorm SFT forward"] == 88
    assert found["residual_adaptive_layernorm SFT backward"] == 80
    assert found["qk_norm_rope3d backward"] == 75 and found["gelu backward"] == 85
    assert found["FusedEmaAdam clip copy step"] == 88


def test_bytes_at_the_shapes_of_the_models() -> None:
    """The fused norm moves 273 and 437 MB; a unit is 277 MB at 1.5-5B."""
    of_2b, of_5b, of_15 = (bytes_of(RESIDUAL_NORM, "forward", shape) for shape in SHAPES)
    assert (of_2b, of_5b) == (4 * 17776 * 1920 * 2, 4 * 17776 * 3072 * 2)
    assert of_15 == 4 * 45104 * 3072 * 2
    assert [round(x / 1e6) for x in (of_2b, of_5b, of_15 / 4)] == [273, 437, 277]
    adam = OptimizerBench(TINY, "2B", 1_000_000_000, has_copy=True, has_clip=False)
    assert adam.num_bytes("step") == 36e9  # bf16 gradient, four float32 streams both ways, copy


def test_update_of_one_tensor_and_of_many() -> None:
    """The quickstart's parameters with float32 gradients, the norm and the clip included."""
    one, many = optimizer_benches(TINY)[-2:]
    assert (one.num_tensors, many.num_tensors) == (1, 100)
    for bench in (one, many):
        assert bench.check() == []
        assert bench.num_bytes("step") == 40 * 5_003
        for name in ("AdamW(fused) + lerp", "AdamW(foreach) + lerp"):
            (call,) = bench.calls(name)["step"]
            call()
    assert many.describe()["model"] == "quickstart, 100 tensors"


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
        (GELU, gelu, "gelu", bent(gelu.gelu, lambda y: 1.02 * y), "y: relative error 2"),
        (GELU, gelu, "gelu", bent(gelu.gelu, half_gradient), "d_x: relative error 5"),
        (GELU, gelu, "gelu", bent(gelu.gelu, lambda y: y * math.nan), "y: relative error nan"),
        (GELU, gelu, "gelu", lambda x, bias: gelu.gelu_reference(x, None), "not have been used"),
        (GELU, gelu, "gelu", raising, "RuntimeError: CUDA error: misaligned address"),
        (RESIDUAL, adaptive_layernorm, "gated_residual", None, "hidden_out: largest error"),
        (NORM, adaptive_layernorm, "adaptive_layernorm", swapped_text, "normed: relative error"),
        (QK, qk_norm_rope3d, "qk_norm_rope3d", None, "d_k: relative error"),
    ],
    ids=["scaled", "gradient", "nan", "no-bias", "raises", "one-element", "text-video", "one-part"],
)
def test_a_wrong_op_is_marked_and_timed(
    op, module, name, wrong, message, monkeypatch, capsys
) -> None:
    right = vars(module)[name]
    if op is RESIDUAL:
        wrong = bent(right, one_element)
    if op is QK:
        wrong = bent(right, lambda qkv: (qkv[0], half_gradient(qkv[1]), qkv[2]))
    monkeypatch.setattr(module, name, wrong)
    monkeypatch.setattr(ops, "benches", lambda settings: [OpBench(settings, op, ROTARY)])
    assert ops.main(["--device", "cpu", "--tiny"]) == 1
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.strip().startswith(str(op))]
    assert len(rows) == 2 and all("WRONG" in row for row in rows)
    has_times = [any(letter.isdigit() for letter in row.partition("WRONG")[2]) for row in rows]
    # An op that raises, or whose gradients cannot be computed, has no times.
    assert has_times == [wrong is not raising and message != "not have been used"] * 2
    assert any(message in line for line in printed.splitlines() if line.startswith("WRONG"))


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
    monkeypatch.setattr(ops, "benches", lambda settings: optimizer_benches(settings)[:1])
    outcome = ops.measure_ops(TINY)
    assert [row["status"] for row in outcome.rows] == ["WRONG"]
    assert any(message in text for text in outcome.problems)
    assert outcome.rows[0]["median_ms"] > 0


def test_packages_with_gpu_code_of_their_own_come_last(monkeypatch) -> None:
    """A package that breaks the device costs no figure of cogfast or PyTorch."""
    timed = []

    def record(bench, name: str, ways) -> dict[str, list[float]]:
        timed.append((str(bench), name))
        return {way: [1.0, 2.0, 3.0] for way in ways}

    monkeypatch.setattr(ops, "time_contestant", record)
    monkeypatch.setattr(OpBench, "check", lambda self: [])
    monkeypatch.setattr(ops, "benches", small_set)
    outcome = ops.measure_ops(TINY)
    foreign = [any(word in name for word in ("Liger", "apex", "DeepSpeed")) for _, name in timed]
    assert any(foreign) and foreign == sorted(foreign)
    wanted = {(str(b), name) for b in small_set(TINY) for name in (ops.OURS, *b.peers())}
    assert set(timed) == wanted and len(timed) == len(wanted)
    assert all(set(row["peers"]) for row in outcome.rows)


@pytest.mark.parametrize("op", OPS, ids=str)
def test_checks_pass_without_rotation_too(op) -> None:
    assert check_op(op, PLAIN, CPU) == []


def test_rows_without_time_are_noted() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "benches", small_set)
        outcome = ops.measure_ops(replace(TINY, deadline=0.0))
    assert {row["status"] for row in outcome.rows} == {"left out: no time"}


@pytest.mark.parametrize("shape", TINY_SHAPES, ids=str)
@pytest.mark.parametrize("op", OPS, ids=str)
def test_peers_compute_the_same(op, shape) -> None:
    for name, build in peers.peers_of(op).items():
        if name not in ("Liger LayerNorm", "apex FusedLayerNorm"):
            check_peer(build, op, shape, CPU)


def test_a_peer_that_computes_something_else_is_refused(monkeypatch) -> None:
    other = lambda op, shape, inputs: replace(
        peers.eager(op, shape, inputs), call=lambda: {"y": torch.relu(inputs["x"] + inputs["bias"])}
    )
    with pytest.raises(AssertionError, match="gelu: y of the peer has relative error"):
        check_peer(other, GELU, PLAIN, CPU)
    monkeypatch.setitem(peers.PEERS["gelu"], "diffusers", other)
    monkeypatch.setattr(ops, "benches", lambda settings: [OpBench(settings, GELU, PLAIN)])
    outcome = ops.measure_ops(TINY)
    assert outcome.problems == [], "a peer's fault is not ours"
    assert "vs diffusers" not in outcome.rows[0] and "vs torch eager" in outcome.rows[0]
    assert "has relative error" in outcome.numbers["no figure for diffusers"]


def package(monkeypatch, name: str, **contents) -> None:
    module = types.ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


class _ForeignNorm(nn.LayerNorm):
    """Take the arguments of Liger's and apex's norms."""

    def __init__(self, width: int, eps: float, bias: bool = True) -> None:
        super().__init__(width, eps=eps, bias=bias)


def test_norms_of_other_packages_replace_the_norm(monkeypatch) -> None:
    monkeypatch.setattr(peers, "need_gpu", lambda device: None)
    package(monkeypatch, "liger_kernel")
    package(monkeypatch, "liger_kernel.transformers", LigerLayerNorm=_ForeignNorm)
    package(monkeypatch, "apex")
    package(monkeypatch, "apex.normalization", FusedLayerNorm=_ForeignNorm)
    for op in (NORM, RESIDUAL_NORM):
        for name in ("Liger LayerNorm", "apex FusedLayerNorm"):
            check_peer(peers.peers_of(op)[name], op, ROTARY, CPU)


def test_pypi_apex_is_not_taken_for_nvidia_apex(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", None)
    with pytest.raises(Unavailable, match="apex is not installed"):
        peers.nvidia_apex("normalization")
    package(monkeypatch, "apex")  # a module without submodules: PyPI's apex has no normalization
    with pytest.raises(Unavailable, match="not NVIDIA's, or is built without its kernels"):
        peers.nvidia_apex("normalization")


def test_a_missing_liger_is_reported(monkeypatch) -> None:
    monkeypatch.setattr(peers, "need_gpu", lambda device: None)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    inputs = draw_inputs(NORM, PLAIN, torch.float32, CPU)
    with pytest.raises(ImportError) as caught:
        peers.peers_of(NORM)["Liger LayerNorm"](NORM, PLAIN, inputs)
    assert "liger_kernel" in ops.why(caught.value)


@pytest.mark.soak
@pytest.mark.skipif(
    tuple(map(int, version("pytest-benchmark").split(".")[:3])) < (5, 3, 1),
    reason="pytest-benchmark before 5.3.1 does not run with pytest 9.2",
)
def test_pytest_benchmark_keeps_the_same_figures(tmp_path: Path) -> None:
    out = tmp_path / "ops.json"
    # pytest-benchmark does not measure in a worker of xdist, which it recognizes by these variables.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["TORCHDYNAMO_DISABLE"] = "1"  # `measured` compiles, and these are the files alone
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "bench/ops.py", "-q", "-p", "no:xdist", "-rs"]
        + ["-p", "no:cacheprovider", f"--benchmark-json={out}"]
        + ["-k", "adaptive_layernorm and not residual and 2B and backward"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "needs a GPU" in done.stdout
    kept = {b["extra_info"]["by"]: b for b in json.loads(out.read_text())["benchmarks"]}
    assert set(kept) == {"cogfast", "torch eager", "torch.compile", "diffusers"}
    unit = (3 + 2 * 3 * 4) * 2 * 64 * 2
    for row in kept.values():
        info, seconds = row["extra_info"], row["stats"]["median"]
        assert row["stats"]["rounds"] >= 5 and info["bytes"] == 4 * unit
        assert info["gb_per_s"] == pytest.approx(4 * unit / seconds / 1e9, rel=1e-6)


@pytest.mark.parametrize(
    ("argv", "message"),
    [([], "torch sees no GPU"), (["--device", "cpu"], "take hours on a CPU; add --tiny")],
)
def test_bad_arguments(argv, message, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        ops.main(argv)
    assert message in capsys.readouterr().err


def test_json_and_plot(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(ops, "benches", lambda settings: [OpBench(settings, GELU, PLAIN)])
    assert ops.main(["--device", "cpu", "--tiny", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "ops.json").read_text())
    assert [row["way"] for row in report["rows"]] == ["forward", "backward"]
    assert report["is_tiny"] and report["problems"] == []
    assert (tmp_path / "ops.png").read_bytes().startswith(b"\x89PNG")
    assert "drew ops.png" in capsys.readouterr().out
