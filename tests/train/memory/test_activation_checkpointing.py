"""Activation checkpointing: gradients, recomputed ops and kept bytes of every policy; auto's choice by
memory; the error of a run that runs out of memory."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.steps.step_models import CONFIG_2B, CONFIG_5B
from cogfast.__main__ import _is_raised_by_cogfast
from cogfast.config import load_config
from cogfast.core.live_bytes import LiveBytes
from cogfast.core.shapes import TokenGrid
from cogfast.kernels.block_kernels import choose_kernels
from cogfast.model.transformer import DiffusionTransformer, assemble_transformer
from cogfast.schema.arguments import TrainArguments
from cogfast.train.distributed.process_groups import ProcessGroups
from cogfast.train.memory import activation_checkpointing
from cogfast.train.memory.activation_checkpointing import (
    ActivationCheckpointing,
    apply_policies,
)
from cogfast.train.plan.activations import LADDER, MARGIN, LayerShape, Policy, describe
from cogfast.train.plan.encoders import Encoders
from cogfast.train.plan.memory import Setup, base_bytes, choose_policies, training_phase
from cogfast.train.plan.state import ModelSize, ZeroRules
from cogfast.train.trainer import Trainer
from cogfast.train.video_size import LatentSize
from tests.support.kernels.triton_on_cpu import launchers_on_cpu
from tests.support.tiny_run import losses, run_folder, write_config
from tests.support.tiny_transformers import inputs, tiny
from tests.train.plan.step_trace import example_inputs, scratch

GIB = 2**30
FLASH = "_scaled_dot_product_flash_attention_for_cpu"
POLICIES = list(reversed(LADDER))  # none comes first
MLP = ("ff.net.0.proj", "ff.net.2")
KINDS = {
    "2b": ("2b", {}),
    "5b": ("5b", {}),
    "lora": ("5b", {"lora_rank": 4}),
    "mlp": ("5b", {"lora_rank": 4, "lora_targets": MLP}),
    "fc2": ("5b", {"lora_rank": 4, "lora_targets": MLP[1:]}),
}


def make(kind: str, dtype: torch.dtype = torch.float32) -> tuple[str, DiffusionTransformer]:
    name, changes = KINDS[kind]
    transformer = tiny(name, **changes).to(dtype).train()
    if changes:
        for parameter_name, p in transformer.named_parameters():
            p.requires_grad_(".matrix_" in parameter_name)
    return name, transformer


def gradients(name: str, transformer: DiffusionTransformer) -> dict[str, Tensor]:
    transformer.zero_grad()
    transformer(**inputs(name)).float().square().mean().backward()
    return {n: p.grad for n, p in transformer.named_parameters() if p.grad is not None}


class Calls(TorchDispatchMode):
    """Counts the calls of ops by name; matmuls also by their operands."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.counts[op._opname] += 1
        if op._opname in ("mm", "addmm"):
            a, b = args[-2:]
            self.counts[
                "low-rank" if 4 * a.shape[1] < min(a.shape[0], b.shape[1]) else "matmul"
            ] += 1
        return op(*args, **(kwargs or {}))


# float32 runs attention's op, bfloat16 attention written out
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["2b", "5b", "lora", "lora, plain PyTorch"])
def test_gradients_are_bitwise_the_same_and_what_is_kept_does_not_run_again(kind, dtype) -> None:
    name, transformer = make(kind.partition(",")[0], dtype)
    has_lora, is_plain = kind.startswith("lora"), "plain" in kind
    if is_plain:
        transformer.use_kernels(choose_kernels("torch"))
    found, counts = {}, {}
    for policy in POLICIES:
        apply_policies(transformer, [policy] * 2)
        with Calls() as calls:
            found[policy] = gradients(name, transformer)
        counts[policy] = calls.counts
        assert found[policy].keys() == found["none"].keys() and len(found["none"]) >= 16
        for parameter, gradient in found["none"].items():
            assert torch.equal(found[policy][parameter], gradient), (policy, parameter)

    again = lambda policy, op: counts[policy][op] - counts["none"][op]
    attention = FLASH if dtype == torch.float32 else "baddbmm"
    assert counts["none"][attention] == 2
    for policy in POLICIES:
        assert again(policy, attention) == (2 if policy == "full" else 0), policy
        assert again(policy, "bmm") == (2 if policy == "full" and attention == "baddbmm" else 0)
        # of two blocks: modulation, qkv, out, fc1 and fc2; LoRA's first products with them
        more = 2 * 5 + (2 * 2 if has_lora else 0)
        assert again(policy, "matmul") == (more if policy in ("full", "attention_kept") else 0)
        assert again(policy, "gelu") == (0 if policy == "none" else 2)
    # LoRA's second products: of qkv and out in one op each, or of q, k, v and out in plain PyTorch
    assert again("pointwise", "add_low_rank") == (2 * 2 if has_lora and not is_plain else 0)
    assert again("pointwise", "low-rank") == (2 * 4 if is_plain else 0)


def test_dropout_is_drawn_once(monkeypatch) -> None:
    transformer = tiny("5b", lora_rank=4, lora_dropout=0.5).train()
    found = []
    for policy in POLICIES:
        apply_policies(transformer, [policy] * 2)
        torch.manual_seed(3)
        found.append(gradients("5b", transformer))
    for other in found[1:]:
        assert all(torch.equal(other[name], g) for name, g in found[0].items())


def test_policies_count_in_training_alone() -> None:
    transformer = tiny("5b").eval()
    apply_policies(transformer, ["full"] * 2)
    with Calls() as calls:
        gradients("5b", transformer)
    assert calls.counts[FLASH] == 2


def test_calls_replace_blocks_in_training_and_memory_is_read_before_them() -> None:
    transformer = tiny("5b").train()
    given, ran = inputs("5b"), []
    make = lambda i: lambda *x: (ran.append(i), transformer.blocks[i](*x))[1]
    transformer.use_calls([make(0), make(1)], before=lambda hidden: ran.append(hidden.shape))
    out = transformer(**given)
    num_tokens = given["text"].shape[1] + given["latents"].shape[2:].numel() // 4
    assert ran == [(len(out), num_tokens, 128), 0, 1]
    transformer.eval()(**given)
    assert len(ran) == 3
    transformer.use_calls(None)
    assert torch.equal(transformer.train()(**given), out) and len(ran) == 3


@pytest.mark.slow  # Inductor compiles C++
def test_policies_hold_in_compiled_blocks() -> None:
    """The blocks of a policy share one graph, and ops whose results are kept do not run again."""
    transformer = tiny("5b", num_layers=3).train()
    wanted = gradients("5b", transformer)
    torch._dynamo.reset()
    for block in transformer.blocks:
        block.compile(fullgraph=True)
    ran = {}
    for policy in POLICIES:
        apply_policies(transformer, [policy] * 3, is_compiled=True)
        counters = torch._dynamo.utils.counters["stats"]
        counters.clear()
        got = gradients("5b", transformer)
        assert counters["unique_graphs"] == (0 if policy == "full" else 1)
        for parameter, gradient in wanted.items():
            tolerance = 1e-5 * gradient.abs().max().item()
            torch.testing.assert_close(got[parameter], gradient, atol=tolerance, rtol=0)
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            gradients("5b", transformer)
        ran[policy] = {event.key: event.count for event in trace.key_averages()}
    for policy, attention, products in (
        ("pointwise", 0, 0),
        ("attention_kept", 0, 5),
        ("full", 1, 5),
    ):
        again = lambda op, policy=policy: ran[policy].get(op, 0) - ran["none"].get(op, 0)
        assert again("aten::_scaled_dot_product_flash_attention_for_cpu") == 3 * attention, policy
        assert again("aten::mm") + again("aten::addmm") == 3 * products, policy
        assert again("cogfast::gelu") == 3


class Storages(TorchDispatchMode):
    """Refers to the memory of every result of an op, without holding it."""

    def __init__(self, others: set[int]) -> None:
        """others: memory of other processes, which does not count."""
        super().__init__()
        self.others = others
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        results = op(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                storage = result.untyped_storage()
                if storage._cdata not in self.others:
                    self.seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return results

    def num_bytes(self) -> int:
        return sum(size for reference, size in self.seen.values() if not reference.expired())


@pytest.mark.parametrize("kind", ["5b", "lora", "mlp", "fc2"])
def test_kept_bytes_follow_the_formulas(kind: str) -> None:
    """Uses the launchers of a GPU, whose ops keep less than those of a CPU."""
    _, transformer = make(kind)
    grid, num_text = TokenGrid(2, 4, 6), 12
    hidden = torch.randn(1, num_text + grid.num_tokens, 128).requires_grad_()
    others = torch.randn(1, 64), num_text, transformer.rotary(grid)
    weights = {p.untyped_storage()._cdata for p in transformer.parameters()}
    for policy in POLICIES:
        apply_policies(transformer, [policy] * 2)
        with launchers_on_cpu(runs_kernels=False), Storages(weights) as storages:
            out = transformer.training_calls[0](hidden * 1, *others)
        kept = storages.num_bytes() - out.numel() * out.element_size()  # the next block's
        shape = LayerShape.of(transformer, hidden.shape[:2].numel(), hidden.element_size())
        assert shape.is_frozen == (kind != "5b")
        expected = shape.kept(policy)
        assert kept == pytest.approx(expected, rel=0.05), policy


def test_nothing_is_left_after_backward() -> None:
    """Memory is freed without the garbage collector."""
    name, transformer = make("5b")
    weights = {p.untyped_storage()._cdata for p in transformer.parameters()}
    gc.disable()
    try:
        for policy in POLICIES:
            apply_policies(transformer, [policy] * 2)
            transformer.zero_grad()
            with Storages(weights) as storages:
                transformer(**inputs(name)).square().mean().backward()
            # what is left are the gradients and small buffers
            gradients = sum(p.grad.nbytes for p in transformer.parameters() if p.grad is not None)
            assert storages.num_bytes() <= gradients + 100_000, policy
    finally:
        gc.enable()


def layer(model: str) -> LayerShape:
    """Return a block with a real model's sizes, in bfloat16."""
    num_rows, width = {"2b": (17776, 1920), "5b": (17776, 3072), "1.5": (45104, 3072)}[model]
    return LayerShape(num_rows=num_rows, width=width, num_heads=width // 64, bytes_per_number=2)


LAYERS = {"2b": 30, "5b": 42, "1.5": 42}


@pytest.mark.parametrize(
    ("model", "gib"),
    [
        ("2b", (1.9, 3.9, 21.0, 38.2)),
        ("5b", (4.3, 8.7, 47.1, 85.6)),
        ("1.5", (10.8, 22.0, 119.6, 217.0)),
    ],
    ids=LAYERS,
)
def test_activations_of_the_real_models(model: str, gib: tuple[float, ...]) -> None:
    """Counted by hand from the ops of a block, in GiB."""
    for policy, expected in zip(LADDER, gib, strict=True):
        kept = LAYERS[model] * layer(model).kept(policy) / GIB
        assert kept == pytest.approx(expected, rel=0.05), policy


def test_tensor_parallel_parts_share_what_is_wide() -> None:
    kinds = ({}, {"num_parts": 2}, {"num_parts": 2, "splits_rows": True})
    whole, half, rows = (LayerShape(**SMALL, **kind) for kind in kinds)
    u = whole.unit
    for policy, shared, of_rows in (
        ("full", 0, 1),
        ("attention_kept", 1, 1),
        ("pointwise", 8, 1),
        ("none", 14, 6),
    ):
        lse = 0 if policy == "full" else 4 * 100 * 4
        assert whole.kept(policy) - half.kept(policy) == (shared * u + lse) // 2
        assert half.kept(policy) - rows.kept(policy) == of_rows * u // 2


def test_none_where_it_keeps_less_than_pointwise() -> None:
    """The products that are still to be summed keep all rows where rows are split in eight."""
    _, transformer = make("5b")
    shape = replace(layer("5b"), num_parts=8)
    split = replace(shape, splits_rows=True)
    assert split.kept("none") < split.kept("pointwise")
    # The last block is at work at the peak: it takes the same whatever it keeps.
    for one, first in ((shape, "pointwise"), (split, "none")):
        setup = replace(setup_of(transformer, 1), layer=one)
        budget = training_phase(setup, ["pointwise"] * 2).total
        assert choose_policies(setup, budget) == (first, "none")


SMALL = {"num_rows": 100, "width": 64, "num_heads": 4, "bytes_per_number": 2}


def test_a_plan_in_words() -> None:
    assert describe(("full",) * 3) == "full in all 3 layers"
    mixed = ("attention_kept", "attention_kept", "pointwise")
    assert describe(mixed) == "attention_kept in layers 0-1, pointwise in layers 2-2"


def test_keys_of_sat_and_ours(sat_configs: Path) -> None:
    model = sat_configs / "cogvideox_2b.yaml"  # checkpoint_activations: True
    choice = lambda *arguments: (
        TrainArguments.from_config(load_config([model], arguments)).activation_checkpointing
    )
    assert choice() == "auto"
    assert choice("args.checkpoint_activations=false") == "none"
    assert choice("args.checkpoint_activations=true") == "auto"
    inner = "model.network_config.params.transformer_args.checkpoint_activations"
    assert choice(f"{inner}=false") == "none"
    assert choice("args.activation_checkpointing=pointwise") == "pointwise"
    both = ("args.checkpoint_activations=false", "args.activation_checkpointing=full")
    assert choice(*both) == "full"
    text = "activation_checkpointing='some' must be one of auto, none, attention_kept, pointwise"
    with pytest.raises(ValueError, match=text):
        choice("args.activation_checkpointing=some")


class Gpu:
    """Stands for a GPU, whose allocator holds `held` bytes and what ops on the meta device make, and for
    the other ranks, which chose `others`."""

    device = torch.device("cuda")

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, total: int, others: Sequence[tuple[Policy, ...]] = ()
    ) -> None:
        self.total, self.others, self.held = total, others, 0
        self.ops = LiveBytes(512, scratch)
        for name, value in (
            ("memory_allocated", lambda device: self.held + self.ops.live),
            ("memory_reserved", lambda device: self.held + self.ops.live),
            ("max_memory_allocated", lambda device: self.held + self.ops.peak),
            ("reset_peak_memory_stats", lambda device: setattr(self.ops, "peak", self.ops.live)),
            ("mem_get_info", lambda device: (total - self.held - self.ops.live, total)),
        ):
            monkeypatch.setattr(torch.cuda, name, value)

    def gather(self, value: tuple[Policy, ...]) -> list[tuple[Policy, ...]]:
        return [value, *self.others]


NUM_LAYERS = 5
BIG = {
    "5b": replace(CONFIG_5B, num_layers=NUM_LAYERS),
    "2b": replace(CONFIG_2B, num_layers=NUM_LAYERS),
    "lora": replace(CONFIG_5B, num_layers=NUM_LAYERS, lora_rank=128),
}
# From the policies that recompute most to those that recompute least
CANDIDATES: list[tuple[Policy, ...]] = [("full",) * NUM_LAYERS] + [
    (below,) * (NUM_LAYERS - number) + (above,) * number
    for below, above in pairwise(LADDER)
    for number in range(1, NUM_LAYERS + 1)
]


def big(kind: str) -> DiffusionTransformer:
    """Return a few layers of a real model, on the meta device."""
    with torch.device("meta"):
        transformer = assemble_transformer(BIG[kind]).to(torch.bfloat16).train()
    for name, p in transformer.named_parameters():
        p.requires_grad_(".matrix_" in name or kind != "lora" and "position_table" not in name)
    return transformer


def setup_of(transformer: DiffusionTransformer, batch_size: int) -> Setup:
    """Return the setup of steps without ZeRO, whose gradients stay where autograd put them."""
    rows = batch_size * LatentSize.of_model(transformer.config).num_tokens(transformer.config)
    return Setup(
        model=ModelSize.of(transformer),
        rules=ZeroRules(
            stage=1, data_size=1, weight_bytes=2, sum_bytes=0, is_fused=False, bucket=0
        ),
        layer=LayerShape.of(transformer, rows, 2),
        choice="auto",
        encoders=Encoders(shape=(0, 0, 0, 0)),
        eval_rows=0,
        batch_bytes=0,
    )


def run_step(
    transformer: DiffusionTransformer,
    ops: LiveBytes,
    batch_size: int,
    num_unknown: int = 0,
    after_backward: Callable[[], None] = lambda: None,
) -> int:
    """Run a step on the meta device; return the peak of its ops. num_unknown: bytes that no plan has."""
    ops.ignore([*transformer.parameters(), *transformer.buffers()])
    size = LatentSize.of_model(transformer.config)
    x0, timesteps, given = example_inputs(transformer, size, batch_size)
    ops.peak = ops.live
    with ops:
        unknown = torch.empty(num_unknown, dtype=torch.uint8, device="meta")
        out = transformer(x0, timesteps, given.text)
        loss = (out.float() - x0).square().mean()
        del out
        loss.backward()
        after_backward()
    peak = ops.peak
    del unknown, loss
    transformer.zero_grad()
    return peak


def peaks_of(kind: str, batch_size: int, num_unknown: int = 0) -> list[int]:
    """Return the peak of a step under each of CANDIDATES."""
    transformer, found = big(kind), []
    for policies in CANDIDATES:
        apply_policies(transformer, policies)
        found.append(run_step(transformer, LiveBytes(512, scratch), batch_size, num_unknown))
    return found


@pytest.mark.parametrize(
    ("kind", "num_unknown", "largest", "others"),
    [
        ("5b", 0, 1, []),
        ("2b", 0, 1, []),
        ("lora", 0, 1, []),
        ("lora", 2 * GIB, 1, []),
        ("2b", 0, 3, []),
        ("lora", 0, 1, [("full",) * NUM_LAYERS]),
    ],
    ids=["5b", "2b", "lora", "beside memory not in the plan", "buckets", "beside a full rank"],
)
def test_auto_chooses_the_most_that_fits(
    monkeypatch, kind: str, num_unknown: int, largest: int, others: list[tuple[Policy, ...]]
) -> None:
    """Every possible choice was run, and the memory counted. The plan has another optimizer."""
    peaks = peaks_of(kind, largest, num_unknown)
    assert peaks == sorted(peaks) and peaks[-1] > 2 * peaks[0]
    held, state = 3 * GIB, 5 * GIB
    steps = [i for i, (one, more) in enumerate(pairwise(peaks)) if more > 1.005 * one]
    assert len(steps) >= 8
    for i in steps[::3]:
        # Between two choices, though one layer's rung apart
        usable = held + state + (peaks[i] + peaks[i + 1]) // 2
        gpu, transformer = Gpu(monkeypatch, int(usable / (1 - MARGIN)), others), big(kind)
        gpu.held = held
        checkpointing = ActivationCheckpointing(
            transformer, "auto", gpu, setup_of(transformer, largest), has_buckets=largest > 1
        )
        for number in range(2):
            assert set(checkpointing.policies) == {"full"}
            # The first step is larger: nothing follows from it.
            run_step(
                transformer,
                gpu.ops,
                1,
                num_unknown + (1 - number) * GIB,
                checkpointing.after_backward,
            )
            gpu.held = held + state  # the optimizer's
            checkpointing.after_step(1)
        assert checkpointing.policies == (others[0] if others else CANDIDATES[i]), (i, steps)


def test_auto_counts_the_largest_of_a_steps_micro_batches(monkeypatch) -> None:
    """Two micro-batches, of which the first one has other memory, too."""
    transformer, extra = big("lora"), 4 * GIB
    peaks = peaks_of("lora", 1, extra)
    gpu = Gpu(monkeypatch, int((peaks[9] + peaks[10]) / 2 / (1 - MARGIN)))
    checkpointing = ActivationCheckpointing(transformer, "auto", gpu, setup_of(transformer, 1))
    for _ in range(2):
        for unknown in (extra, 0):
            run_step(transformer, gpu.ops, 1, unknown, checkpointing.after_backward)
        checkpointing.after_step(1)
    assert checkpointing.policies == CANDIDATES[9]


def test_auto_leaves_memory_for_gaps_between_gradients(monkeypatch) -> None:
    peaks, transformer = peaks_of("2b", 1), big("2b")
    gap = sum(2 * p.numel() for p in transformer.parameters() if p.requires_grad)
    setup = setup_of(transformer, 1)
    setup = replace(setup, rules=replace(setup.rules, sum_bytes=2))
    usable = (peaks[-3] + peaks[-2]) // 2 + gap
    assert peaks[-2] < usable  # it would fit without gaps
    gpu = Gpu(monkeypatch, int(usable / (1 - MARGIN)))
    checkpointing = ActivationCheckpointing(transformer, "auto", gpu, setup)
    for _ in range(2):
        run_step(transformer, gpu.ops, 1, after_backward=checkpointing.after_backward)
        checkpointing.after_step(1)
    assert checkpointing.policies == CANDIDATES[-3]


def test_without_a_plan_auto_stays_at_full(caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger("cogfast"), "propagate", True)
    name, transformer = make("5b")
    alone = ProcessGroups(0, 1, 0, torch.device("cpu"), control=None, is_owner=False)
    checkpointing = ActivationCheckpointing(transformer, "auto", alone, None)
    for _ in range(3):
        gradients(name, transformer)
        checkpointing.after_backward(torch.zeros(()))
        checkpointing.after_step(1)
    assert checkpointing.policies == ("full",) * 2 and checkpointing.is_settled
    assert "full in all 2 layers, because the memory of the run cannot be predicted" in caplog.text
    assert "keeps the least of all policies" in checkpointing.advice()


def start(folder: Path, data: Path, choice: str) -> Trainer:
    base = write_config(folder / "base.yaml", data, train_iters=3, activation_checkpointing=choice)
    return Trainer(load_config([base], []))


# 4 samples of 8 text tokens and 3 x 2 x 2 video tokens
TINY_RUN = LayerShape(num_rows=4 * 20, width=32, num_heads=2, bytes_per_number=4)


_ALL = 2**40  # bytes


def with_memory_for(
    monkeypatch: pytest.MonkeyPatch, trainer: Trainer, *policies: Policy, missing: int = 0
) -> None:
    """Give the machine as much memory as a step of the tiny run takes, less `missing` bytes."""
    setup = trainer.parts.checkpointing.setup
    assert setup is not None and setup.layer == TINY_RUN
    # Weights and optimizer state are in memory already.
    gap = setup.rules.partition(setup.model.num_trained) * setup.rules.sum_bytes
    needed = training_phase(setup, policies).total - base_bytes(setup) + gap
    memory = max(0, int(needed / (1 - MARGIN)) + 2 - missing)
    monkeypatch.setattr(activation_checkpointing, "free_memory", lambda device: (memory, memory))


def test_a_run_gives_the_same_losses_under_each_policy(
    tmp_path: Path, data: Path, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(logging.getLogger("cogfast"), "propagate", True)
    caplog.set_level(logging.INFO, "cogfast")
    found = {}
    for choice in (*POLICIES, "auto"):
        trainer = start(tmp_path / choice, data, choice)
        assert trainer.parts.checkpointing.policies == ("full" if choice == "auto" else choice,) * 2
        if choice == "auto":  # room for one layer's worth of a rung
            with_memory_for(monkeypatch, trainer, "attention_kept", "pointwise")
        trainer.train()
        found[choice] = losses(run_folder(tmp_path / choice / "runs"))
    assert len(found["none"]) == 3
    assert all(numbers == found["none"] for numbers in found.values())
    assert trainer.parts.checkpointing.most_rows == TINY_RUN.num_rows
    assert trainer.parts.checkpointing.policies == ("attention_kept", "pointwise")
    # a set: pytest listens at a logger that did not propagate, too
    (line,) = {r.message for r in caplog.records if "activation checkpointing" in r.message}
    assert "attention_kept in layers 0-0, pointwise in layers 1-1; predicted peak 0.0 of" in line


def test_auto_keeps_all_where_memory_is_plenty(tmp_path: Path, data: Path) -> None:
    trainer = start(tmp_path, data, "auto")
    trainer.train()
    assert trainer.parts.checkpointing.policies == ("none", "none")


@pytest.mark.parametrize(
    ("choice", "fitting", "missing", "text"),
    [
        ("none", "pointwise", 0, "pointwise keeps .* fit: set args.activation_checkpointing=po"),
        ("none", "pointwise", 9, "attention_kept keeps 0.0 GiB and would fit: set args"),
        (
            "pointwise",
            "full",
            9,
            "pointwise in all 2 layers.* full keeps the least, and with it a step takes 0.0 of the 0.0 "
            "GiB that .*: set args.activation_checkpointing=full, or",
        ),
        ("pointwise", "full", _ALL, "not even full, which keeps the .* set it, and use a smaller"),
        (
            "full",
            "full",
            9,
            r"full \(full in all 2 layers\) keeps the least of all policies; use a smaller deeps",
        ),
    ],
    ids=["pointwise", "attention-kept", "fits-without-gaps", "none-fits", "full"],
)
def test_out_of_memory_names_the_policy_that_fits(
    tmp_path: Path, data: Path, monkeypatch, choice: str, fitting: Policy, missing: int, text: str
) -> None:
    trainer = start(tmp_path, data, choice)
    with_memory_for(monkeypatch, trainer, fitting, fitting, missing=missing)

    def fail(loss: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.75 GiB.")

    monkeypatch.setattr(trainer.engine, "backward", fail)
    text = f"^out of memory: args.activation_checkpoint.*{text}"
    with pytest.raises(RuntimeError, match=text) as raised:
        trainer.train()
    assert _is_raised_by_cogfast(raised.value)  # one line and exit status 1


def test_out_of_memory_elsewhere(tmp_path: Path, data: Path, monkeypatch) -> None:
    trainer = start(tmp_path, data, "none")

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(type(trainer.encoder), "__call__", fail)
    with pytest.raises(RuntimeError, match="no block has run yet, so activation checkpointing can"):
        trainer.train()
