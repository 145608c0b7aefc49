"""bench.step at its smallest sizes: both sides compute the same, and the figures are right."""

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import step
from bench.harness.outcome import Outcome
from bench.steps import agreement, step_cases
from bench.steps.agreement import compare_sides
from bench.steps.step_cases import Case, Plan, measure_case
from bench.steps.step_models import MODELS, Variant, draw_batch
from bench.steps.step_on_device import cases_2b, cases_5b, cases_15_5b, cases_15_5b_i2v
from bench.steps.step_sides import SIDES, UPDATES, Ours, OurUpdate, PeerUpdate, Theirs, as_diffusers
from cogfast.model.weights.diffusers import from_diffusers

CPU = torch.device("cpu")
PLAN = Plan(CPU, torch.float32, num_pairs=3)


def variant(model: str, lora_rank: int | None = None, dtype=torch.float32) -> Variant:
    config, batch_size = MODELS[model]
    if lora_rank is not None:
        config = replace(config, lora_rank=lora_rank, lora_alpha=float(lora_rank))
    return Variant(config, batch_size, dtype, CPU)


@pytest.mark.parametrize(
    ("model", "lora_rank"),
    [
        ("2b-smallest", None),
        ("5b-smallest", 4),
        ("1.5-5b-smallest", 4),
        ("1.5-5b-i2v-smallest", None),
    ],
)
def test_the_sides_agree(model: str, lora_rank: int | None) -> None:
    """Outputs and the gradients of all trained parameters agree, by the same names."""
    figures, problems = compare_sides(variant(model, lora_rank), is_compiled=False)
    assert problems == []
    assert 0 < figures["ours_output_relative_error"] < 1e-6  # same function, different arithmetic
    assert 0 < figures["ours_worst_gradient_relative_error"] < 1e-5
    # In diffusers: 24 trained tensors in each of 2 blocks, 16 outside and 4 of ofs; with LoRA, 8 adapters in
    # each block.
    outside = 16 + 4 * ("i2v" in model)
    assert figures["num_gradients_compared"] == (2 * 24 + outside if lora_rank is None else 2 * 8)


def test_the_tokens_of_15() -> None:
    """81 frames are 21 latent ones, and 22 with a repeated one: 11 x 48 x 85 tokens, and 224 of text."""
    for model, channels in (("1.5-5b", 16), ("1.5-5b-i2v", 32)):
        assert MODELS[model][0].in_channels == channels
        assert variant(model).num_tokens == 11 * 48 * 85 + 224 == 45_104
    drawn = draw_batch(variant("1.5-5b-i2v-smallest"))
    assert drawn.latents.shape == (2, 32, 4, 6, 8) and drawn.target.shape == (2, 16, 4, 6, 8)


def test_bfloat16_is_compared_with_float32() -> None:
    figures, problems = compare_sides(variant("5b-smallest", dtype=torch.bfloat16), False)
    assert problems == []
    for side in SIDES:
        assert 1e-3 < figures[f"{side}_output_relative_error"] < 2e-2


@pytest.mark.soak  # Inductor compiles C++
def test_compiled_sides_agree_and_are_timed(monkeypatch) -> None:
    """Compiled sides agree, and nothing is compiled while they are timed."""
    numbers = []

    def count(call, device) -> float:
        stats = torch._dynamo.utils.counters["stats"]
        numbers.append(stats["unique_graphs"])
        call()
        numbers.append(stats["unique_graphs"])
        return 1.0

    monkeypatch.setattr(step_cases, "_time", count)
    row, problems = measure_case(Case("5b-smallest", engine="compiled"), PLAN)
    assert problems == [] and row["num_gradients_compared"] == 64 and row["ratio"] == 1.0
    assert len(numbers) == 12 and len(set(numbers)) == 1 and numbers[0] >= 2


@pytest.mark.parametrize("lora_rank", [None, 4], ids=["sft", "lora"])
def test_names_and_parts_invert_the_loader(lora_rank: int | None) -> None:
    network = Ours(variant("2b-smallest", lora_rank)).network
    for name, tensor in network.named_parameters():
        if ".matrix_" in name:
            continue
        plain = name.replace(".original.", ".")
        parts = [part for _, part in as_diffusers(name, tensor)]
        assert torch.equal(from_diffusers(plain, parts), tensor), name


class Wrong(Ours):
    """A side that loses a tenth of the gradient of one bias."""

    def gradients(self):
        found = super().gradients()
        name = "transformer_blocks.1.ff.net.0.proj.bias"
        return {**found, name: 0.9 * found[name]}


def test_sides_that_disagree_are_marked_and_timed(monkeypatch) -> None:
    monkeypatch.setitem(SIDES, "ours", Wrong)
    row, problems = measure_case(Case("2b-smallest"), replace(PLAN, agreements={}))
    (problem,) = problems
    assert problem.startswith("2b-smallest sft, 2 layers, checkpointing none, eager: ")
    assert "transformer_blocks.1.ff.net.0.proj.bias: relative error 1.00e-01 > 1.00e-04" in problem
    start = (
        "1 of the compared tensors, first transformer_blocks.1.ff.net.0.proj.bias: relative error"
    )
    assert row["disagrees"].startswith(start)
    assert row["ours_median_ms"] > 0 and row["ratio"] > 0


def test_sides_that_cannot_be_compared_are_timed(monkeypatch) -> None:
    def fail(variant, is_compiled):
        raise torch.OutOfMemoryError("CUDA out of memory\nmore")

    monkeypatch.setattr(step_cases, "compare_sides", fail)
    row, (problem,) = measure_case(Case("2b-smallest"), replace(PLAN, agreements={}))
    assert problem.endswith(": not compared: OutOfMemoryError: CUDA out of memory")
    assert row["ratio"] > 0 and row["disagrees"].endswith("CUDA out of memory")


def test_nan_is_no_agreement() -> None:
    truth = {"output": torch.ones(4), "a.weight": torch.ones(3)}
    broken = {**truth, "a.weight": torch.tensor([1.0, float("nan"), 1.0])}
    assert "a.weight: relative error nan" in agreement.judge(truth, broken, truth, 1.0)[1][0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_both_updates_do_the_same(dtype: torch.dtype) -> None:
    """Three steps of clipping, AdamW, EMA and copy equal the formulas in float64."""
    torch.manual_seed(0)
    start = [torch.randn(5, 7), torch.randn(11)]
    gradients = [[torch.randn_like(p) for p in start] for _ in range(3)]
    models = {
        build: [torch.nn.Parameter(p.to(dtype, copy=True)) for p in start]
        for build in (OurUpdate, PeerUpdate)
    }
    expected = [p.to(dtype).double() for p in start]
    shadows = [p.clone() for p in expected]
    m, v = ([torch.zeros_like(p) for p in expected] for _ in range(2))
    updates = {build: build(params) for build, params in models.items()}
    for t, given in enumerate(gradients, start=1):
        rounded = [g.to(dtype) for g in given]
        for build, params in models.items():
            for p, g in zip(params, rounded, strict=True):
                p.grad = g.clone()
            updates[build].step()
            assert all(p.grad is None for p in params)
        norm = torch.cat([g.double().flatten() for g in rounded]).norm()
        for i, g in enumerate(rounded):
            g = g.double() / norm
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.95 * v[i] + 0.05 * g * g
            expected[i] = expected[i] * (1 - 1e-4 * 1e-4)
            root = (v[i] / (1 - 0.95**t)).sqrt() + 1e-8
            expected[i] = expected[i] - 1e-4 * m[i] / (1 - 0.9**t) / root
            shadows[i] = shadows[i] + 1e-4 * (expected[i] - shadows[i])
    for build, params in models.items():
        update = updates[build]
        masters = update.masters.tensors
        for i, p in enumerate(params):
            torch.testing.assert_close(masters[i].double(), expected[i], rtol=0, atol=3e-7)
            assert torch.equal(p, masters[i].to(dtype))
            is_ours = build is OurUpdate
            shadow = update.adam.state[masters[i]]["shadow"] if is_ours else update.shadows[i]
            torch.testing.assert_close(shadow.double(), shadows[i], rtol=0, atol=3e-7)


@pytest.mark.parametrize("side", SIDES)
def test_checkpointing_runs_each_block_twice(side: str) -> None:
    given = variant("5b-smallest")
    built = SIDES[side](given)
    blocks = built.network.blocks if side == "ours" else built.network.transformer_blocks
    inner = [block.fc1 if side == "ours" else block.ff for block in blocks]
    seen = []
    for module in inner:
        module.register_forward_hook(lambda module, inputs, output: seen.append(module))
    for policy, times in (("none", 1), ("full", 2), ("none", 1)):
        built.use_checkpointing(policy)
        built.forward(draw_batch(given)).square().mean().backward()
        assert [seen.count(module) for module in inner] == [times] * 2
        seen.clear()


def test_figures_follow_from_times_and_sizes(monkeypatch) -> None:
    times = iter([4.0, 3.0, 2.0, 5.0, 6.0, 4.0])  # which side goes first alternates
    monkeypatch.setattr(step_cases, "_time", lambda call, device: next(times))
    monkeypatch.setattr(step_cases, "peak_flops", lambda device: 1e12)
    row, problems = measure_case(Case("5b-smallest", mode="lora"), PLAN)
    assert problems == []
    assert (row["ours_median_ms"], row["diffusers_median_ms"]) == (5.0, 3.0)
    assert row["ratio"] == statistics.median([4 / 3, 5 / 2, 6 / 4])
    assert row["ours_num_samples"] == 3 and row["order"] == "pairs"
    s, width, rank = 2 * 3 * 4 + 12, 64, 128
    linear, attention = 24 * width**2 * s, 4 * s**2 * width
    adapters = 4 * 2 * s * rank * 2 * width
    modulation = 2 * 12 * width * 64
    # The first block's input has no gradient: two products of QKV and of its adapters less.
    unneeded = 3 * 2 * s * width * (width + rank)
    flops = 2 * (2 * (2 * linear + 3 * attention + 3 * adapters + modulation) - unneeded)
    assert row["num_tokens"] == s
    assert row["model_tflop"] == pytest.approx(flops / 1e12)
    assert row["ours_model_tflop_per_s"] == pytest.approx(flops / 5e-3 / 1e12)
    assert row["ours_mfu"] == pytest.approx(flops / 5e-3 / 1e12)


def test_a_side_that_does_not_fit_is_reported(monkeypatch) -> None:
    class Large:
        def __init__(self, parameters) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.75 GiB.\nMore")

    monkeypatch.setitem(UPDATES, "diffusers", Large)
    row, problems = measure_case(Case("2b-smallest"), PLAN)
    assert problems == [] and row["ours_median_ms"] > 0
    assert row["diffusers_does_not_fit"] == "CUDA out of memory. Tried to allocate 20.75 GiB."
    assert "ratio" not in row and "diffusers_median_ms" not in row
    monkeypatch.setattr(UPDATES["diffusers"], "__init__", lambda self, parameters: 1 / 0)
    row, problems = measure_case(Case("2b-smallest"), PLAN)
    assert problems == [f"{Case('2b-smallest')}: diffusers: ZeroDivisionError: division by zero"]
    assert row["ours_median_ms"] > 0


def test_without_peft_only_cogfast_is_timed(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    row, problems = measure_case(Case("2b-smallest", mode="lora"), replace(PLAN, agreements={}))
    assert problems == [] and row["ours_median_ms"] > 0
    assert "peft" in row["not_compared"] and "peft" in row["diffusers_unavailable"]


def test_time_that_runs_out_is_noted(monkeypatch) -> None:
    took, now = {"full": 20.0, "none": 0.0}, 100.0  # seconds

    def measure(case: Case, plan: Plan):
        nonlocal now
        now += took[case.checkpointing]
        return {"model": case.model, "checkpointing": case.checkpointing, **timed(case)}, []

    monkeypatch.setattr(step, "measure_case", measure)
    monkeypatch.setattr(step, "_SECONDS", {"eager": (5.0, 0.0), "compiled": (1e9, 0.0)})
    monkeypatch.setattr(step, "_COMPARISON_SECONDS", 0.0)
    full, none = Case("2b", checkpointing="full"), Case("2b")
    kept: list[Outcome] = []
    deadline = now + 30
    cases = [full, replace(none, engine="compiled"), full, none]
    outcome = step.measure_cases(cases, PLAN, deadline, kept.append, clock=lambda: now)
    assert [row["checkpointing"] for row in outcome.rows] == ["full"]
    skipped = outcome.numbers["skipped"]
    assert len(skipped) == 3 and skipped[0].startswith("2b sft, 30 layers, checkpointing none")
    assert [len(each.rows) for each in kept] == [1, 1, 1, 1]


def timed(case: Case, ours: float | None = 2.0, theirs: float | None = 3.0) -> dict[str, object]:
    row = {
        **{key: getattr(case, key) for key in ("model", "mode", "checkpointing", "engine")},
        **{
            "what": "step",
            "num_layers": case.layers,
            "num_layers_of_model": 30,
            "dtype": "bfloat16",
        },
    }
    for side, ms in (("ours", ours), ("diffusers", theirs)):
        row |= {} if ms is None else {f"{side}_median_ms": ms, f"{side}_model_tflop_per_s": 1 / ms}
    return row | ({} if None in (ours, theirs) else {"ratio": ours / theirs})


def test_cases_for_a_gpu() -> None:
    """Cases of the README's table come first, use the whole model if it fits, and occur once."""
    for cases, layers in ((cases_2b, 30), (cases_5b, 42)):
        for memory_gib in (79.0, 139.0):
            listed = cases(memory_gib)
            assert len(set(listed)) == len(listed)
            # A short run measures only the first cases.
            first = {(c.mode, c.engine) for c in listed[:4] if c.checkpointing == "none"}
            assert first >= {("sft", "eager"), ("sft", "compiled"), ("lora", "compiled")}
            words = {str(case.options) for case in listed}
            assert words >= {"", "attention fa4", "attention fa4 on both sides"}
            kinds = {(case.mode, case.engine) for case in listed}
            assert kinds == {(m, e) for m in ("sft", "lora") for e in ("eager", "compiled")}
        assert listed[0].layers == layers  # on an H200
    assert {"sparse:0.8", "attention fa4, sparse:0.8", "fp8 base"} <= words
    for listed in (cases_15_5b(79.0), cases_15_5b_i2v(79.0)):
        assert len(set(listed)) == len(listed)
        assert [(c.layers, c.mode) for c in listed if c.num_layers is None] == [(42, "lora")]
        assert listed[0].checkpointing not in Theirs.policies  # it has no time for both sides
        assert {("sft", "full"), ("lora", "none")} <= {(c.mode, c.checkpointing) for c in listed}


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "results" / "step.json"
    argv = ["--model", "5b-smallest", "--mode", "sft", "lora", "--layers", "1", "--pairs", "3"]
    assert step.main([*argv, "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["piece"] == "step" and report["problems"] == []
    assert report["versions"]["torch"] == torch.__version__ and report["machine"]
    modes = [(row["what"], row["mode"], row["num_layers"]) for row in report["rows"]]
    assert modes == [("step", "sft", 1), ("step", "lora", 1)]
    assert all(row["ratio"] > 0 and row["order"] == "pairs" for row in report["rows"])
