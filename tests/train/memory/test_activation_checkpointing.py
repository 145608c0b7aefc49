"""Activation checkpointing: gradients, recomputed ops and kept bytes of every policy; auto's choice by
memory; the error of a run that runs out of memory."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cogfast.__main__ import _is_raised_by_cogfast
from cogfast.config import load_config
from cogfast.core.shapes import TokenGrid
from cogfast.model.transformer import DiffusionTransformer
from cogfast.schema.arguments import TrainArguments
from cogfast.train.memory import activation_checkpointing
from cogfast.train.memory.activation_checkpointing import (
    ActivationCheckpointing,
    apply_policies,
    layer_shape,
)
from cogfast.train.plan.activations import (
    LADDER,
    LayerShape,
    describe,
    kept_by_all,
    plan_layers,
)
from cogfast.train.trainer import Trainer
from tests.support.kernels.triton_on_cpu import launchers_on_cpu
from tests.support.tiny_run import losses, run_folder, write_clips, write_config
from tests.support.tiny_transformers import inputs, tiny

GIB = 2**30
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
@pytest.mark.parametrize("kind", ["2b", "5b", "lora"])
def test_gradients_are_bitwise_the_same_and_what_is_kept_does_not_run_again(kind, dtype) -> None:
    name, transformer = make(kind, dtype)
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
    attention = "flash_attention" if dtype == torch.float32 else "baddbmm"
    assert counts["none"][attention] == 2
    for policy in POLICIES:
        assert again(policy, attention) == (2 if policy == "full" else 0), policy
        assert again(policy, "bmm") == (2 if policy == "full" and attention == "baddbmm" else 0)
        # of two blocks: modulation, qkv, out, fc1 and fc2; LoRA's first products with them
        more = 2 * 5 + (2 * 2 if kind == "lora" else 0)
        assert again(policy, "matmul") == (more if policy in ("full", "attention_kept") else 0)
        assert again(policy, "gelu") == (0 if policy == "none" else 2)
    assert again("pointwise", "low-rank") == (8 if kind == "lora" else 0)


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
    assert calls.counts["flash_attention"] == 2


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
        assert again("cogfast::flash_attention") == 3 * attention, policy
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
        shape = layer_shape(transformer, hidden.shape[:2].numel(), hidden.element_size())
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


def layer(model: str, batch_size: int = 1, is_lora: bool = False) -> LayerShape:
    """Return a block with a real model's sizes, in bfloat16."""
    num_rows, width = {"2b": (17776, 1920), "5b": (17776, 3072), "1.5": (45104, 3072)}[model]
    return LayerShape(
        num_rows=batch_size * num_rows,
        width=width,
        num_heads=width // 64,
        bytes_per_number=2,
        adapter_columns=4 * 128 if is_lora else 0,
        is_frozen=is_lora,
    )


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
        kept = kept_by_all(layer(model), [policy] * LAYERS[model]) / GIB
        assert kept == pytest.approx(expected, rel=0.05), policy


# model, LoRA, batch, GiB of the GPU, GiB of weights, gradients and optimizer state -> layers
CHOICES = {
    "2b, H100": ("2b", False, 1, 79, 31.5, {"none": 30}),
    "2b, two samples, H200": ("2b", False, 2, 139, 31.5, {"none": 30}),
    "2b lora, H100": ("2b", True, 1, 79, 4.3, {"none": 30}),
    "5b lora, H200": ("5b", True, 1, 139, 12.8, {"none": 42}),
    "5b lora, H100": ("5b", True, 1, 79, 12.8, {"none": 42}),
    "5b, one H200": ("5b", False, 1, 139, 103.8, {"attention_kept": 25, "pointwise": 17}),
    "5b, two H200": ("5b", False, 1, 139, 57.1, {"pointwise": 16, "none": 26}),
    "5b, eight H100": ("5b", False, 1, 79, 22.0, {"pointwise": 40, "none": 2}),
    "5b, one H100": ("5b", False, 1, 79, 103.8, {"full": 42}),
    "1.5 lora, H200": ("1.5", True, 1, 139, 12.8, {"attention_kept": 4, "pointwise": 38}),
    "1.5, one H200": ("1.5", False, 1, 139, 103.8, {"full": 3, "attention_kept": 39}),
}


@pytest.mark.parametrize("case", CHOICES)
def test_auto_by_memory(case: str) -> None:
    model, is_lora, batch_size, total, state, expected = CHOICES[case]
    shape = layer(model, batch_size, is_lora)
    room = int(0.96 * total * GIB) - int(state * GIB) - shape.live - 2 * GIB
    policies = plan_layers(shape, LAYERS[model], room)
    assert Counter(policies) == expected
    assert sorted(policies, key=LADDER.index) == list(policies)  # the last layers keep most
    if set(policies) != {"full"}:
        assert kept_by_all(shape, policies) <= room


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
    shape = LayerShape(num_rows=17776, width=3072, num_heads=48, bytes_per_number=2, num_parts=8)
    assert "none" not in plan_layers(shape, 4, 4 * shape.kept("pointwise"))
    split = replace(shape, splits_rows=True)
    assert split.kept("none") < split.kept("pointwise")
    assert plan_layers(split, 4, 4 * split.kept("pointwise")) == ("none",) * 4


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
    """Stands for a GPU and for the other ranks; a test sets how much a step allocates."""

    device = torch.device("cuda")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int, others: list[int]) -> None:
        self.total, self.others = total, others
        self.allocated = self.peak = self.reserved = 0
        for name, value in (
            ("memory_allocated", lambda device: self.allocated),
            ("memory_reserved", lambda device: self.reserved),
            ("max_memory_allocated", lambda device: self.peak),
            ("reset_peak_memory_stats", lambda device: setattr(self, "peak", self.allocated)),
            ("mem_get_info", lambda device: (self.total - self.reserved, self.total)),
        ):
            monkeypatch.setattr(torch.cuda, name, value)

    def gather(self, value: int) -> list[int]:
        return [value, *self.others]

    def allocate(self, num_bytes: int) -> None:
        self.allocated += num_bytes
        self.peak = max(self.peak, self.allocated)
        self.reserved = max(self.reserved, self.peak)


@pytest.mark.parametrize("others", [[], [0]], ids=["alone", "beside a rank without room"])
def test_auto_measures_a_step_on_a_gpu(monkeypatch, others: list[int]) -> None:
    """The second step is measured: the first one has no optimizer state yet."""
    name, transformer = make("5b")
    tokens = inputs(name)["latents"].shape[2:].numel() // 4 + 10
    shape = LayerShape(num_rows=2 * tokens, width=128, num_heads=2, bytes_per_number=4)
    wanted = ("attention_kept", "pointwise")
    weights, state, on_top, encoder = 3_000_000, 9_000_000, 1_000_000, 2_000_000
    total = weights + state + on_top + kept_by_all(shape, wanted)
    gpu = Gpu(monkeypatch, int(total / 0.96) + 10, others)
    gpu.allocate(weights)
    checkpointing = ActivationCheckpointing(transformer, "auto", gpu)
    for step in range(3):
        for _ in range(2):  # micro-batches
            gpu.allocate(encoder)  # before the blocks, so beside no activation
            gpu.allocate(-encoder)
            transformer(**inputs(name)).square().mean()
            gpu.allocate(on_top + kept_by_all(shape, checkpointing.policies))
            gpu.allocate(-on_top - kept_by_all(shape, checkpointing.policies))
            checkpointing.after_backward()
        if step == 0:
            gpu.allocate(state)
        assert checkpointing.policies == (("full",) * 2 if step < 2 or others else wanted)
        checkpointing.after_step()
    assert checkpointing.layer == shape and checkpointing.bytes_on_top == on_top


def test_auto_plans_for_the_largest_bucket(monkeypatch) -> None:
    """The measurement of a small micro-batch is scaled to the run's largest one: activations grow,
    gradients do not."""
    name, transformer = make("5b")
    tokens = inputs(name)["latents"].shape[2:].numel() // 4 + 10
    shape = LayerShape(num_rows=2 * tokens, width=128, num_heads=2, bytes_per_number=4)
    largest = LayerShape(num_rows=6 * tokens, width=128, num_heads=2, bytes_per_number=4)
    gradients = sum(p.numel() * 4 for p in transformer.parameters() if p.requires_grad)
    on_top = gradients + 1_000_000
    total = gradients + 3_000_000 + kept_by_all(largest, ("attention_kept", "full"))
    gpu = Gpu(monkeypatch, int(total / 0.96) + 10, [])
    checkpointing = ActivationCheckpointing(transformer, "auto", gpu, most_rows=6 * tokens)
    for _ in range(2):
        transformer(**inputs(name)).square().mean()
        gpu.allocate(on_top + kept_by_all(shape, checkpointing.policies))
        gpu.allocate(-on_top - kept_by_all(shape, checkpointing.policies))
        checkpointing.after_backward()
        checkpointing.after_step()
    assert checkpointing.layer == largest
    assert checkpointing.bytes_on_top == gradients + 3_000_000
    kept = kept_by_all(largest, checkpointing.policies)
    assert 0 < kept <= kept_by_all(largest, ("attention_kept", "full"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clips(tmp_path_factory.mktemp("data"))


def start(folder: Path, data: Path, choice: str) -> Trainer:
    base = write_config(folder / "base.yaml", data, train_iters=3, activation_checkpointing=choice)
    return Trainer(load_config([base], []))


# 4 samples of 8 text tokens and 3 x 2 x 2 video tokens
TINY_RUN = LayerShape(num_rows=4 * 20, width=32, num_heads=2, bytes_per_number=4)


def with_memory_for(monkeypatch: pytest.MonkeyPatch, trainer: Trainer, *policies: str) -> None:
    """Give the machine as much memory as a step of the tiny run takes."""
    kept = kept_by_all(TINY_RUN, policies)
    room = TINY_RUN.live + trainer.checkpointing.gradient_bytes + kept
    memory = int(room / 0.96) + 2
    monkeypatch.setattr(activation_checkpointing, "free_memory", lambda device: (memory, memory))


def test_a_run_gives_the_same_losses_under_each_policy(
    tmp_path: Path, data: Path, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(logging.getLogger("cogfast"), "propagate", True)
    caplog.set_level(logging.INFO, "cogfast")
    found = {}
    for choice in (*POLICIES, "auto"):
        trainer = start(tmp_path / choice, data, choice)
        assert trainer.checkpointing.policies == ("full" if choice == "auto" else choice,) * 2
        if choice == "auto":  # room for one layer's worth of a rung
            with_memory_for(monkeypatch, trainer, "attention_kept", "pointwise")
        trainer.train()
        found[choice] = losses(run_folder(tmp_path / choice / "runs"))
    assert len(found["none"]) == 3
    assert all(numbers == found["none"] for numbers in found.values())
    assert trainer.checkpointing.layer == TINY_RUN
    assert trainer.checkpointing.policies == ("attention_kept", "pointwise")
    # a set: pytest listens at a logger that did not propagate, too
    (line,) = {r.message for r in caplog.records if "activation checkpointing" in r.message}
    assert "attention_kept in layers 0-0, pointwise in layers 1-1; predicted peak 0.0 of" in line


def test_auto_keeps_all_where_memory_is_plenty(tmp_path: Path, data: Path) -> None:
    trainer = start(tmp_path, data, "auto")
    trainer.train()
    assert trainer.checkpointing.policies == ("none", "none")


@pytest.mark.parametrize(
    ("choice", "fitting", "text"),
    [
        ("none", ["pointwise"] * 2, "pointwise keeps .* fit: set args.activation_checkpointing=po"),
        ("none", ["full", "pointwise"], "attention_kept keeps 0.0 GiB and would fit: set args"),
        (
            "pointwise",
            ["full"],
            "pointwise in all 2 layers.* not even full, which.* set it, and",
        ),
        (
            "full",
            [],
            r"full \(full in all 2 layers\) keeps the least of all policies; use a smaller deeps",
        ),
    ],
    ids=["pointwise", "attention-kept", "none-fits", "full"],
)
def test_out_of_memory_names_the_policy_that_fits(
    tmp_path: Path, data: Path, monkeypatch, choice: str, fitting: list[str], text: str
) -> None:
    trainer = start(tmp_path, data, choice)
    with_memory_for(monkeypatch, trainer, *fitting)

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
