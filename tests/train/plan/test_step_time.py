"""The predicted step: FLOPs are those that run, and times follow from rates by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from cogfast.diagnostics.plan_times import time_lines
from cogfast.kernels.block_kernels import choose_kernels
from cogfast.kernels.quantized import int8_linear
from cogfast.model.config import TransformerConfig
from cogfast.model.lora import is_lora_parameter
from cogfast.model.transformer import DiffusionTransformer, assemble_transformer, freeze
from cogfast.train.distributed.parallelize import allocate
from cogfast.train.memory.activation_checkpointing import apply_policies
from cogfast.train.memory.host_blocks import HostBlocks, allocate_base, hold_base
from cogfast.train.memory.offloaded_activations import OffloadedActivations
from cogfast.train.plan.activations import LADDER, Policy
from cogfast.train.plan.flops import train_flops
from cogfast.train.plan.gpus import GPUS
from cogfast.train.plan.measured import predict_step
from cogfast.train.plan.memory import plan_memory, setup_of
from cogfast.train.plan.step_time import Rates, Saving, count_work, estimate, stated_rates
from cogfast.train.plan.traffic import Layout, count_traffic
from tests.support.tiny_transformers import FAMILY, inputs, tiny
from tests.train.plan.test_memory import CACHED, config_of

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


# --- what saves memory ---

CPU = torch.device("cpu")
BLOCK = 12 * 128**2 + 12 * 128 * 64  # weights of a tiny block's linears


def held(quantization: str, num_offloaded: int, **changes: object) -> DiffusionTransformer:
    """A tiny transformer whose base is frozen and held as asked."""
    with torch.device("meta"):
        transformer = assemble_transformer(large(**changes))
    freeze(transformer, ["all"], is_lora_only=False)
    hold_base(transformer, quantization, num_offloaded)
    allocate(transformer, CPU)
    targets = {**dict(transformer.named_parameters()), **allocate_base(transformer, CPU)}
    source = dict(tiny("5b", **changes).named_parameters())
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(source[name])
    return transformer.train()


@pytest.mark.parametrize("policy", LADDER)
@pytest.mark.parametrize("name", [name for name in ADAPTERS if name != "all weights"])
def test_int8_weights_are_those_that_are_dequantized(
    name: str, policy: Policy, monkeypatch
) -> None:
    """In fp32 each weight is read as one byte and written as four, before each of its products."""
    numels = []
    dequantize = int8_linear.dequantize_rows
    monkeypatch.setattr(
        int8_linear,
        "dequantize_rows",
        lambda q, scale, dtype: numels.append(q.numel()) or dequantize(q, scale, dtype),
    )
    model = held("int8", 0, **ADAPTERS[name])
    apply_policies(model, [policy] * 2)
    model(**inputs("5b")).square().mean().backward()
    plain, quantized = (
        count_work(model.config, NUM_TOKENS, replace(ALONE, accumulation=3), [policy] * 2, kind)
        for kind in ("none", "int8")
    )
    assert quantized.num_bytes - plain.num_bytes == pytest.approx(3 * 5 * sum(numels))
    assert replace(quantized, num_bytes=plain.num_bytes) == plain


@pytest.mark.parametrize("policy", LADDER)
@pytest.mark.parametrize("name", [name for name in ADAPTERS if name != "all weights"])
def test_fp8_products_are_those_that_run(name: str, policy: Policy, monkeypatch) -> None:
    """In fp32 an activation is read as four bytes a number and written as one. Backward transposes."""
    calls = EightBitCalls()
    model = held("fp8", 0, **ADAPTERS[name])
    apply_policies(model, [policy] * 2)
    with calls:
        model(**inputs("5b")).square().mean().backward()
    plain, fp8 = (
        count_work(model.config, NUM_TOKENS, replace(ALONE, accumulation=3), [policy] * 2, kind)
        for kind in ("none", "fp8")
    )
    assert fp8.fp8_flops == pytest.approx(3 * calls.flops)
    assert fp8.num_bytes - plain.num_bytes == pytest.approx(3 * calls.bytes)
    assert replace(fp8, num_bytes=plain.num_bytes, fp8_flops=0.0) == plain


class EightBitCalls(TorchDispatchMode):
    """Counts the FLOPs of fp8 products, and the bytes moved beside them and int8 ones, in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.bytes = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        ops = torch.ops.cogfast
        if op in (ops.fp8_linear.default, ops.fp8_linear_backward.default):
            given, q = args[:2]
            is_backward = op is ops.fp8_linear_backward.default
            self.flops += 2 * given.numel() * q.shape[int(is_backward)]
            self.bytes += 5 * given.numel() + 2 * q.numel() * is_backward
        if op in (ops.int8_linear.default, ops.int8_linear_backward.default):
            self.bytes += 5 * args[1].numel()
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("number", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("adapted", [None, (2, 3, 4, 5), (3, 5), (5,)])
def test_fetched_blocks_are_those_that_are_copied(number: int, adapted, monkeypatch) -> None:
    """Six blocks, the last of them offloaded; those below the first adapters have no backward pass."""
    model = held("none", number, num_layers=6, lora_rank=4, lora_layers=adapted)
    apply_policies(model, ["full"] * 6)
    fetched: list[int] = []
    fetch = HostBlocks._fetch

    def note(blocks: HostBlocks, block: int) -> None:
        fetched.extend([block] * (blocks._slot(block).holds != block))
        fetch(blocks, block)

    monkeypatch.setattr(HostBlocks, "_fetch", note)
    for _ in range(3):
        fetched.clear()
        model(**inputs("5b")).square().mean().backward()
    free = replace(RATES, matmul=1e30, attention_forward=1e30, attention_backward=1e30, copy=1e30)
    saving = Saving(num_offloaded=number, block_bytes=4 * BLOCK)
    layout = replace(ALONE, accumulation=2)
    step = estimate(
        model.config, NUM_TOKENS, layout, replace(free, host=1e9), "full", saving=saving
    )
    assert step.transfers == pytest.approx(2 * len(fetched) * 4 * BLOCK / 1e9)
    assert step.seconds == pytest.approx(step.transfers)


def test_copied_activations_are_those_that_are_kept(monkeypatch) -> None:
    """Each block but the last two copies its input to the host and back."""
    model = tiny("5b", num_layers=5).train()
    copied = []
    copy = OffloadedActivations.copy
    monkeypatch.setattr(
        OffloadedActivations,
        "copy",
        lambda owner, target, source: copied.append(source.nbytes) or copy(owner, target, source),
    )
    apply_policies(model, ["full"] * 5, offload=OffloadedActivations(5, CPU))
    model(**inputs("5b")).square().mean().backward()
    unit = 2 * NUM_TOKENS * 128 * 4
    assert copied == 6 * [unit]
    free = replace(RATES, matmul=1e30, attention_forward=1e30, attention_backward=1e30, copy=1e30)
    saving = Saving(kept_bytes=(unit,) * 3)
    given = (model.config, NUM_TOKENS, ALONE, replace(free, host=1e9), "full")
    step = estimate(*given, saving=saving)
    assert step.transfers == pytest.approx(sum(copied) / 1e9)
    assert step.hidden_transfers == pytest.approx(0)


def test_copies_hide_behind_the_block_at_work() -> None:
    """Products of 24 B S M^2 forward; twice that, the recomputed ones and the modulation backward."""
    rate, unit = 1e12, 2 * NUM_TOKENS * 128**2
    free = replace(RATES, attention_forward=1e30, attention_backward=1e30, copy=1e30, matmul=rate)
    forward = 24 * unit / rate
    backward = (3 * 24 * unit + 2 * 2 * 64 * 128 * 12) / rate
    saving = Saving(kept_bytes=(10_000,) * 3)

    def predicted(seconds: float) -> tuple[float, float]:
        given = (large(num_layers=5), NUM_TOKENS, replace(ALONE, accumulation=2))
        rates = replace(free, host=10_000 / seconds)
        step = estimate(*given, rates, "full", saving=saving)
        assert step.communication == step.hidden == 0
        assert step.seconds == pytest.approx(step.matmul + step.transfers)
        return step.transfers, step.hidden_transfers

    assert predicted(0.9 * forward) == pytest.approx((0, 2 * 6 * 0.9 * forward))
    between = (forward + backward) / 2
    exposed = 2 * 3 * (between - forward)
    assert predicted(between) == pytest.approx((exposed, 2 * 6 * between - exposed))
    long = 2 * backward
    exposed = 2 * 3 * (long - forward + long - backward)
    assert predicted(long) == pytest.approx((exposed, 2 * 6 * long - exposed))


def test_blocks_and_activations_share_a_direction_in_backward_alone() -> None:
    free = replace(RATES, matmul=1e30, attention_forward=1e30, attention_backward=1e30, copy=1e30)
    config, rates = large(num_layers=5, lora_rank=4), replace(free, host=1.0)
    saving = Saving(num_offloaded=4, block_bytes=7, kept_bytes=(10, 10, 10))
    step = estimate(config, NUM_TOKENS, ALONE, rates, "full", saving=saving)
    # Forward: 2 x 7 to the device beside 3 x 10 from it. Backward: 2 x 7 and 3 x 10.
    assert step.transfers == pytest.approx(30 + 14 + 30)


@pytest.mark.parametrize(
    ("saving", "num_held"),
    [(Saving(quantization="int8"), 2), (Saving(num_offloaded=1, block_bytes=4 * BLOCK), 1)],
    ids=["int8", "host"],
)
def test_stage_3_gathers_no_weights_that_are_no_parameters(saving: Saving, num_held: int) -> None:
    """The linears of a held block leave both gathers of each of three micro-batches."""
    layout = Layout(data_size=4, zero_stage=3, accumulation=3, persistent_numel=0)
    plain, less = (
        estimate(large(lora_rank=4), NUM_TOKENS, layout, RATES, saving=each)
        for each in (Saving(), saving)
    )
    sent = [step.communication + step.hidden for step in (plain, less)]
    gathered = 3 * 2 * num_held * BLOCK * 2 * 3 / 4
    assert sent[0] - sent[1] == pytest.approx(gathered / RATES.link)


def test_the_plan_says_what_is_held_and_copied() -> None:
    """LoRA of 5B with all three keys: int8 rows with a scale each, and 40 inputs of blocks in bf16."""
    words = ["args.quantize_base=int8", "args.offload_blocks=10", "args.offload_activations=true"]
    config, args = config_of("_5b", *CACHED, *words, lora=True)
    plan = plan_memory(setup_of(config, args, 1), None)
    saving = Saving.of(plan)
    width, unit = 3072, 17_776 * 3072 * 2
    assert saving == Saving(
        quantization="int8",
        num_offloaded=10,
        block_bytes=12 * width**2 + 12 * width * 512 + 4 * (3 + 1 + 4 + 1 + 12) * width,
        kept_bytes=(unit,) * 40,
    )
    assert saving.num_held(42) == 42 and replace(saving, quantization="none").num_held(42) == 10
    h100 = next(gpu for gpu in GPUS if gpu.name == "h100-80")
    step = predict_step(config, args, plan, h100)
    # 40 units out, then in together with 8 of the 10 blocks; the first two wait in their slots.
    moved = 2 * 40 * unit + 8 * saving.block_bytes
    assert step is not None
    assert step.transfers + step.hidden_transfers == pytest.approx(moved / (0.8 * 64e9))
    assert "host transfers 0.000)" in time_lines(step)[0]
    assert "host transfers" not in time_lines(replace(step, hidden_transfers=0.0))[0]


def test_host_memory_is_as_fast_as_its_data_sheet_says() -> None:
    rates = {gpu.name: stated_rates(gpu).host for gpu in GPUS}
    assert rates["h100-80"] == 0.8 * 64e9 and rates["4090"] == rates["a100-80"] == 0.8 * 32e9
