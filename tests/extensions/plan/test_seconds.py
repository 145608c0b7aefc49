"""The predicted step: FLOPs are those that run, and times follow from rates by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cogfast.extensions.plan.command import describe_plan
from cogfast.extensions.plan.encoders import Encoders
from cogfast.extensions.plan.gpus import GPUS, Gpu, Shares
from cogfast.extensions.plan.memory import MemoryPlan, Setup, plan_memory, setup_of
from cogfast.extensions.plan.seconds import (
    count_traffic,
    micro_batch_work,
    muon_flops,
    predict_step,
)
from cogfast.extensions.plan.trace import Traces, Work
from cogfast.extensions.plan.zero import ZeroRules, num_trained
from cogfast.extensions.prodigy_muon.optimizers import Muon
from cogfast.kernels.attention_backends import BACKENDS
from cogfast.kernels.block_kernels import choose_kernels
from cogfast.model.lora import is_lora_parameter
from cogfast.model.transformer import DiffusionTransformer
from cogfast.train.activation_checkpointing import LADDER, Policy, apply_policies
from cogfast.train.keys import TrainKeys
from cogfast.train.optimizer import muon_matrices, parameter_groups
from cogfast.train.video_size import LatentSize
from cogfast.train.watchers.model_flops import train_flops
from tests.extensions.plan.test_memory import CACHED, config_of
from tests.support.tiny_transformers import inputs, tiny

ADAPTERS = {
    "all weights": {},
    "attention": {"lora_rank": 4},
    "queries": {"lora_rank": 4, "lora_targets": ("to_q", "to_out.0")},
    "mlp": {"lora_rank": 4, "lora_targets": ("ff.net.0.proj", "ff.net.2")},
    "last layer": {"lora_rank": 4, "lora_layers": (1,)},
}
ROOT = Path(__file__).parents[3]
H100 = next(gpu for gpu in GPUS if gpu.name == "h100-80")


def trained(name: str, **changes: Any) -> DiffusionTransformer:
    """Return a tiny 5B that trains all weights or its adapters."""
    model = tiny("5b", **ADAPTERS[name], **changes).train()
    for key, parameter in model.named_parameters():
        is_unused = key in model.unused_parameter_names()
        is_adapter = is_lora_parameter(key) or not ADAPTERS[name]
        parameter.requires_grad_(is_adapter and not is_unused)
    return model


def plan_of(name: str, policy: Policy, **rules: Any) -> MemoryPlan:
    latents = inputs("5b")["latents"]
    rules = {"stage": 2, "data_size": 1, "weight_bytes": 4, "sum_bytes": 4, **rules}
    channels, frames, height, width = latents.shape[1:]
    setup = Setup(
        args=TrainKeys(activation_checkpointing=policy),
        traces=Traces(trained(name).to("meta")),
        rules=ZeroRules(**rules),
        size=LatentSize(channels, frames, height, width, 9, 8.0),
        batch_size=len(latents),
        encoders=Encoders(shape=(1, 9, 8 * height, 8 * width)),
    )
    return plan_memory(setup, None)


# PyTorch counts none of a product that is added in place.
_IN_PLACE = {torch.ops.aten.addmm_: lambda total, a, b, **options: 2 * a[0] * a[1] * b[1]}


def flops_of(work: Work, *kinds: str) -> float:
    return sum(times * op.flops for op, times in work.items() if op.kind in kinds)


@pytest.mark.parametrize(
    ("name", "policy"),
    [("all weights", "none"), ("all weights", "full"), ("attention", "attention_kept")]
    + [("queries", "pointwise"), ("mlp", "full")]
    + [("last layer", "none"), ("last layer", "attention_kept")],
)
def test_flops_are_those_that_run(name: str, policy: Policy) -> None:
    """PyTorch counts every matrix product of a step, recomputed ones included."""
    model = trained(name)
    # Attention in plain PyTorch, whose products are counted as well.
    model.use_kernels(choose_kernels("torch", "math"))
    apply_policies(model, [policy] * 2)
    with FlopCounterMode(display=False, custom_mapping=_IN_PLACE) as counter:
        model(**inputs("5b")).square().mean().backward()
    found = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    attention = sum(flops for op, flops in found.items() if "bmm" in op)
    forward, others = micro_batch_work(plan_of(name, policy))
    work = forward + others
    assert flops_of(work, "matmul") == pytest.approx(sum(found.values()) - attention, rel=1e-6)
    # Plain attention keeps its scores: four products in backward, and not five.
    backward = 0.8 * flops_of(work, "attention backward")
    assert flops_of(work, "attention") + backward == pytest.approx(attention, rel=1e-6)


@pytest.mark.parametrize("name", ["all weights", "queries", "mlp"])
def test_model_flops_of_a_layer_are_those_that_run(name: str) -> None:
    """A third layer adds as many as PyTorch counts in it, forward and backward."""
    given, found, predicted = inputs("5b"), [], []
    num_tokens = given["text"].shape[1] + given["latents"][0, 0].numel() // 4
    for num_layers in (2, 3):
        model = trained(name, num_layers=num_layers)
        model.use_kernels(choose_kernels("torch", "math"))
        with FlopCounterMode(display=False, custom_mapping=_IN_PLACE) as counter:
            model(**given).square().mean().backward()
        found.append(counter.get_total_flops())
        predicted.append(len(given["latents"]) * train_flops(model.config, num_tokens))
    assert predicted[1] - predicted[0] == pytest.approx(found[1] - found[0], rel=1e-6)


def test_a_step_is_the_sum_of_its_parts() -> None:
    """A GPU whose rates are one: seconds are FLOPs and bytes."""
    slow = Shares(matmul=1, attention={"flash": (1, 0.5)}, memory=1, link=1)
    gpu = Gpu("test", 1e-12, 1e-12, 1e-9, ("test",), host_gb_per_s=1e-9, shares=slow)
    plan = plan_of("all weights", "full", accumulation=3)
    forward, others = micro_batch_work(plan)
    work, step = forward + others, predict_step(plan, gpu, "flash")
    assert step is not None
    in_memory = sum(n * op.num_bytes for op, n in work.items() if op.kind == "memory")
    # 4 of weights, 4 of gradients read twice, and 16 of state, read and written
    optimizer = 44 * num_trained(plan.setup.transformer)
    assert step.memory_bound == pytest.approx(3 * in_memory + optimizer)
    # Products with few columns take longer for their bytes.
    assert step.matmul >= 3 * flops_of(work, "matmul")
    backward = 2 * flops_of(work, "attention backward")
    assert step.attention == pytest.approx(3 * (flops_of(work, "attention") + backward))
    assert step.links.exposed == step.transfers == 0
    assert step.seconds == step.matmul + step.attention + step.memory_bound
    assert step.samples_per_second == pytest.approx(3 * 2 / step.seconds)


def test_bytes_of_a_layer_by_hand() -> None:
    """Beside the products a forward pass moves 22 units of [B, S, M]: the 21 of docs/kernels.md, and v, which
    the norm of queries and keys does not read."""
    plan = plan_of("all weights", "none")
    unit = 2 * 106 * 128 * 4
    block = plan.setup.block(1, "none")
    moved = sum(n * op.num_bytes for op, n in block.forward_work.items() if op.kind == "memory")
    assert moved == pytest.approx(22 * unit, rel=0.02)


def test_policies_recompute_in_their_order() -> None:
    steps = [predict_step(plan_of("all weights", policy), H100) for policy in reversed(LADDER)]
    times = [step.seconds for step in steps if step is not None]
    assert len(times) == 4 and torch.tensor(times).diff().gt(0).all()


def test_gradients_hide_behind_the_backward_pass_except_the_last_bucket() -> None:
    plan = plan_of("all weights", "none", data_size=4)
    traffic = count_traffic(plan.setup, Work())
    link = 0.8 * 450e9
    seconds = (traffic.gradients / link, traffic.weights / link)

    def predicted(**rules: Any) -> float:
        setup = replace(plan.setup, rules=replace(plan.setup.rules, **rules))
        step = predict_step(replace(plan, setup=setup), H100)
        assert step is not None
        return step.links.exposed

    assert predicted() == pytest.approx(sum(seconds))
    assert predicted(overlaps=True) == pytest.approx(sum(seconds))  # one bucket holds all
    assert seconds[1] <= predicted(overlaps=True, bucket=1000) < seconds[1] + 0.1 * seconds[0]


def test_links_between_machines_are_slower() -> None:
    inside, across = (
        predict_step(plan_of("all weights", "none", data_size=size), H100) for size in (8, 64)
    )
    assert inside is not None and across is not None
    assert across.links.exposed == pytest.approx(inside.links.exposed * 63 / 64 * 8 / 7)


def test_copies_between_host_and_gpu_hide_behind_computation() -> None:
    words = ["args.offload_blocks=10", "args.offload_activations=true"]
    config, args = config_of("_5b", *CACHED, *words, lora=True)
    plan = plan_memory(setup_of(config.run, 1), None)
    kept = 40 * plan.setup.block(1, "full").kept
    blocks = 8 * 2 * (12 * 3072**2 + 12 * 3072 * 512)  # two wait in their slots
    rate = 0.8 * 1e9
    slow, fast = (replace(H100, host_gb_per_s=gb) for gb in (1, 1e6))
    found, hidden = predict_step(plan, slow), predict_step(plan, fast)
    assert found is not None and hidden is not None and hidden.transfers == 0
    # Forward: activations leave while blocks come. Backward: both come.
    computed = hidden.matmul + hidden.attention + hidden.memory_bound
    total = (2 * kept + blocks) / rate
    assert total - computed <= found.transfers <= total


def test_muons_products_are_counted() -> None:
    """PyTorch counts those of a step of one process."""
    model = trained("all weights")
    optimizer = Muon(parameter_groups(model, 0.0, is_for_muon=True))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
    with FlopCounterMode(display=False, custom_mapping=_IN_PLACE) as counter:
        optimizer.step()
    alone, four = (plan_of("all weights", "full", data_size=n, is_muon=True) for n in (1, 4))
    assert muon_flops(alone.setup) == 4 * muon_flops(four.setup) == counter.get_total_flops() > 0
    slow = replace(H100, copy_tb_per_s=1e6, link_gb_per_s=1e9)
    for plan in (alone, four):
        without = replace(
            plan, setup=replace(plan.setup, rules=replace(plan.setup.rules, is_muon=False))
        )
        step, plain = predict_step(plan, slow), predict_step(without, slow)
        assert step is not None and plain is not None
        more = muon_flops(plan.setup) / (slow.shares.matmul * slow.matmul_tflop_per_s * 1e12)
        assert step.matmul - plain.matmul == pytest.approx(more)
    sent = [count_traffic(plan.setup, Work()).weights for plan in (four, without)]
    matrices = sum(p.numel() for p in muon_matrices(model))
    assert sent[0] - sent[1] == 2 * 2 * matrices


def test_every_gpu_has_memory_and_shares_below_one() -> None:
    for gpu in GPUS:
        assert gpu.memory_gib > 0, gpu.name
        attention = [share for pair in gpu.shares.attention.values() for share in pair]
        shares = (gpu.shares.matmul, gpu.shares.memory, gpu.shares.link, *attention)
        assert all(0 < share <= 1 for share in shares), gpu.name
        assert set(gpu.shares.attention) <= set(BACKENDS)


def measured(piece: str) -> list[dict[str, Any]]:
    """The rows of the H100's results."""
    return json.loads((ROOT / f"bench/results/h100-2026-11-26/{piece}.json").read_text())["rows"]


def test_shares_of_attention_are_those_measured_on_an_h100() -> None:
    rates: dict[str, list[tuple[float, float]]] = {}
    for row in measured("attention"):
        name = row["backend"].replace("default", "cudnn")  # whose kernel PyTorch chose
        if row["shape_bshd"][1] == 17776 and "forward_tflop_per_s" in row:
            pair = (row["forward_tflop_per_s"], row["backward_tflop_per_s"])
            rates.setdefault(name, []).append(pair)
    assert {"cudnn", "flash", "fa4"} <= set(rates)
    for name, pairs in rates.items():
        means = [sum(column) / len(column) / 989 for column in zip(*pairs, strict=True)]
        assert H100.shares.attention[name] == pytest.approx(means, rel=0.03), name


@pytest.mark.parametrize("piece", ["2b", "5b"])
def test_predictions_are_within_3_percent_of_the_steps_of_an_h100(piece: str) -> None:
    """The steps are those of bench.gpu_run, whose attention is cuDNN's."""
    found = {}
    for row in (row for row in measured(piece) if "options" not in row):
        case = (row["mode"] == "lora", row["checkpointing"], row["num_layers"])
        found[case] = row["ours_median_ms"]  # compiled steps take as long
    assert len(found) >= 3
    for (lora, policy, num_layers), milliseconds in found.items():
        layers = f"model.network_config.params.num_layers={num_layers}"
        words = [*CACHED, f"args.activation_checkpointing={policy}", layers]
        config, args = config_of(f"_{piece}", *words, lora=lora)
        step = predict_step(plan_memory(setup_of(config.run, 1), None), H100, "cudnn")
        assert step is not None
        assert 1000 * step.seconds == pytest.approx(milliseconds, rel=0.03)


def test_the_plan_names_the_attention_that_it_assumes() -> None:
    def time_lines(gpu: str, *words: str, lora: bool = False) -> str:
        config = config_of("_2b", *CACHED, *words, lora=lora)[0]
        return describe_plan(config.run, gpu).rpartition("\nstep: ")[2]

    text = time_lines("h100-80")
    fastest = "attention by cudnn at 43% and 43% of the peak (the fastest of PyTorch's); by fa4"
    assert fastest in text
    # flash-attn 4 is no faster there.
    assert time_lines("b200").endswith("at 40% and 40% of the peak (the fastest of PyTorch's)\n")
    named = time_lines("h100-80", "args.attention_backend=fa4")
    assert named.endswith("attention by fa4 at 54% and 55% of the peak\n")
    assert time_lines("4090").endswith("attention at an assumed 50% and 40% of the peak\n")
    fp8 = time_lines("h100-80", "args.quantize_base=fp8", lora=True)
    assert "; fp8 products at 2 times bf16's rate, which was not measured" in fp8
    sparse = time_lines("h100-80", "args.attention=sparse:0.8")
    assert "of the peak, measured with dense attention alone" in sparse
    with pytest.raises(ValueError, match="cogfast is for CPUs, the plan for GPUs: set auto"):
        time_lines("h100-80", "args.attention_backend=cogfast")


def test_a_data_sheet_gives_a_prediction() -> None:
    config, args = config_of("_5b", *CACHED)
    plan = plan_memory(setup_of(config.run, 8), None)
    for gpu in GPUS:
        step = predict_step(plan, gpu)
        assert step is not None and 0 < step.mfu < gpu.shares.matmul
    offload = "deepspeed.zero_optimization.offload_optimizer.device=cpu"
    config, args = config_of("_5b", *CACHED, offload)
    assert predict_step(plan_memory(setup_of(config.run, 1), None), H100) is None
