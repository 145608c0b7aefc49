"""The predicted step: FLOPs are those that run, and times follow from rates by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.checks.plan_step_time import Probe, measure, predict, rates_of
from bench.steps.step_cases import Case, Plan
from cogfast.kernels.block_kernels import choose_kernels
from cogfast.model.config import TransformerConfig
from cogfast.model.lora import is_lora_parameter
from cogfast.train.memory.activation_checkpointing import apply_policies
from cogfast.train.plan.activations import LADDER, Policy
from cogfast.train.plan.flops import train_flops
from cogfast.train.plan.gpus import GPUS
from cogfast.train.plan.step_time import Rates, count_work, estimate, stated_rates
from cogfast.train.plan.traffic import Layout, count_traffic
from tests.support.tiny_transformers import FAMILY, inputs, tiny

NUM_TOKENS = 10 + 4 * 24  # of `inputs`: text, and video in patches
ALONE = Layout(data_size=1, batch_size=2, bytes_per_number=4)
ADAPTERS = {
    "all weights": {},
    "attention": {"lora_rank": 4},
    "queries": {"lora_rank": 4, "lora_targets": ("to_q", "to_out.0")},
    "mlp": {"lora_rank": 4, "lora_targets": ("ff.net.0.proj", "ff.net.2")},
    "last layer": {"lora_rank": 4, "lora_layers": (1,)},
}
RATES = Rates(matmul=1e12, attention_forward=5e11, attention_backward=4e11, copy=1e11, link=1e10)


@pytest.mark.parametrize("policy", LADDER)
@pytest.mark.parametrize("name", ADAPTERS)
def test_flops_are_those_that_run(name: str, policy: Policy) -> None:
    """PyTorch counts every matrix product of a step, recomputed ones included."""
    model = tiny("5b", **ADAPTERS[name]).train()
    # Attention in plain PyTorch, whose products are counted as well.
    model.use_kernels(choose_kernels("torch", "math"))
    is_trained = lambda key: is_lora_parameter(key) or not ADAPTERS[name]
    for key, parameter in model.named_parameters():
        is_unused = key in model.unused_parameter_names()
        parameter.requires_grad_(is_trained(key) and not is_unused)
    apply_policies(model, [policy] * 2)
    with FlopCounterMode(display=False) as counter:
        model(**inputs("5b")).square().mean().backward()
    found = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    attention = sum(flops for op, flops in found.items() if "bmm" in op)
    work = count_work(model.config, NUM_TOKENS, ALONE, [policy] * 2)
    # The embedding of the timestep is left out.
    assert work.matmul_flops == pytest.approx(sum(found.values()) - attention, rel=1e-3)
    # Plain attention keeps its scores: four products in backward, and not five.
    backward = 0.8 * work.attention_backward_flops
    assert work.attention_forward_flops + backward == pytest.approx(attention, rel=1e-6)


def large(**changes: object) -> TransformerConfig:
    return replace(FAMILY["5b"], **changes)


def test_bytes_of_a_layer_by_hand() -> None:
    """One more layer moves 21 units forward, 36 backward, and 44 + 8 bytes for each parameter."""
    first, second = (
        count_work(large(num_layers=n), NUM_TOKENS, ALONE, ["none"] * n).num_bytes for n in (2, 3)
    )
    width, unit = 128, 2 * NUM_TOKENS * 128 * 4
    norms = 4 * 32 * 2 + 4 * width  # of q and k (heads of 64), and of both halves
    linears = 12 * width**2 + 9 * width + 12 * width * 64 + 12 * width
    assert second - first == (21 + 36) * unit + (44 + 8) * (linears + norms)


def test_a_step_is_the_sum_of_its_parts() -> None:
    config, layout = large(), Layout(data_size=1, bytes_per_number=2, accumulation=3)
    work = count_work(config, NUM_TOKENS, layout, ["full"] * 2)
    step = estimate(config, NUM_TOKENS, layout, replace(RATES, peak=2e12), "full")
    assert step.matmul == work.matmul_flops / 1e12
    forward, backward = work.attention_forward_flops, work.attention_backward_flops
    assert step.attention == pytest.approx(forward / 5e11 + backward / 4e11)
    assert step.memory_bound == work.num_bytes / 1e11
    assert step.communication == step.hidden == 0
    assert step.seconds == step.matmul + step.attention + step.memory_bound
    assert step.samples_per_second == pytest.approx(3 / step.seconds)
    model_flops = 3 * train_flops(config, NUM_TOKENS)
    assert step.mfu == pytest.approx(model_flops / step.seconds / 2e12)


@pytest.mark.parametrize("splits_rows", [False, True])
def test_ranks_of_a_copy_share_its_work(splits_rows: bool) -> None:
    one, two = (
        estimate(large(), NUM_TOKENS, Layout(data_size=1, model_size=n, splits_rows=rows), RATES)
        for n, rows in ((1, False), (2, splits_rows))
    )
    assert two.matmul == pytest.approx(one.matmul / 2, rel=0.1)  # embeddings are not shared
    assert two.attention == one.attention / 2
    # Norms are shared only with sequence parallelism.
    assert two.memory_bound < (0.6 if splits_rows else 0.9) * one.memory_bound
    assert two.communication > 0


def test_ranks_of_a_sample_share_its_rows() -> None:
    """All but embeddings, output and optimizer is halved; the exchanges are not hidden."""
    alone, two = Layout(data_size=1), Layout(data_size=1, context_size=2)
    work, half = (count_work(large(), 1000, layout, ["none"] * 2) for layout in (alone, two))
    assert half.matmul_flops == pytest.approx(work.matmul_flops / 2, rel=0.1)
    assert half.attention_forward_flops == work.attention_forward_flops / 2
    assert half.attention_backward_flops == work.attention_backward_flops / 2
    step = estimate(large(), 1000, two, RATES, overlaps_gradients=False)
    traffic = count_traffic(large(), two, 1000)
    sent = traffic.rows + traffic.gradients + traffic.weights
    assert step.communication == pytest.approx(sent / RATES.link)
    # Both work on one sample.
    assert step.samples_per_second == 1 / step.seconds


def test_gradients_hide_behind_the_backward_pass_except_the_last_bucket() -> None:
    layout = Layout(data_size=4, bytes_per_number=4)
    traffic = count_traffic(large(), layout, NUM_TOKENS)
    seconds = (traffic.gradients / 1e10, traffic.weights / 1e10)
    slow = replace(RATES, matmul=1e9)  # computation is so slow that it hides everything
    predict = lambda **named: estimate(large(), NUM_TOKENS, layout, slow, **named)
    assert predict(overlaps_gradients=False).communication == pytest.approx(sum(seconds))
    assert predict().communication == pytest.approx(sum(seconds))  # one bucket holds all
    tenth = predict(bucket_numel=1000)
    assert seconds[1] < tenth.communication < seconds[1] + 0.01 * seconds[0]
    assert tenth.communication + tenth.hidden == pytest.approx(sum(seconds))


def test_links_between_machines_are_slower() -> None:
    inside, across, faster = (
        estimate(large(), NUM_TOKENS, Layout(data_size=n), replace(RATES, link_between=rate))
        for n, rate in ((8, 1e8), (64, 1e8), (64, 2e8))
    )
    assert across.communication > 10 * inside.communication
    assert across.communication == pytest.approx(2 * faster.communication)


def test_stage_3_with_lora_gathers_the_frozen_weights() -> None:
    adapted = large(lora_rank=4)
    two, three = (
        estimate(adapted, NUM_TOKENS, Layout(data_size=4, zero_stage=stage), RATES)
        for stage in (2, 3)
    )
    sent = [step.communication + step.hidden for step in (two, three)]
    assert sent[1] > 2 * sent[0]


def test_a_data_sheet_is_an_estimate() -> None:
    for gpu in GPUS:
        rates = stated_rates(gpu)
        assert rates.peak == gpu.matmul_tflop_per_s * 1e12
        assert not rates.is_measured
        assert gpu.name in rates.source
        step = estimate(large(), NUM_TOKENS, Layout(data_size=1), rates)
        assert step.mfu is not None and 0 < step.mfu < 0.65  # the share of matrix products


def test_policies_recompute_in_their_order() -> None:
    times = [
        estimate(large(), NUM_TOKENS, ALONE, RATES, policy).seconds for policy in reversed(LADDER)
    ]
    assert times == sorted(times)
    mixed = estimate(large(), NUM_TOKENS, ALONE, RATES, ("full", "none")).seconds
    assert times[0] < mixed < times[-1]
    assert torch.tensor(times).diff().gt(0).all()


def test_the_bench_predicts_from_rates_alone() -> None:
    """The time of the real step is no input: twice the rates halve the prediction."""
    case = Case("5b-smallest")
    row = measure(case, num_rounds=1)
    parts = sum(row[f"{part}_ms"] for part in ("matmul", "attention", "memory_bound"))
    assert row["predicted_ms"] == pytest.approx(parts)
    assert row["ratio"] == pytest.approx(row["predicted_ms"] / row["step_ms"])
    variant = Plan(torch.device("cpu"), torch.float32).variant(case)
    kinds = ("matmul", "matmul", "attention_forward", "attention_backward", "copy", "kernels")
    probes = [
        Probe(kind, 6e9, lambda: None, [3.0, 2.0 if i else 1.0]) for i, kind in enumerate(kinds)
    ]
    rates = rates_of(probes)
    # All work of a kind over the least times: 12e9 in 1 + 2 s.
    assert (rates.matmul, rates.attention_forward, rates.copy) == (4e9, 3e9, 3e9)
    fast = [Probe(p.name, 2 * p.work, p.call, p.times) for p in probes]
    seconds = [predict(variant, case, rates_of(made)).seconds for made in (probes, fast)]
    assert seconds[0] == pytest.approx(2 * seconds[1])
