"""Activation checkpointing: gradients, recomputed ops and kept bytes of every policy."""

import gc
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cogfast.core.shapes import TokenGrid
from cogfast.extensions.plan.trace import trace_block
from cogfast.kernels.attention_backends import fastest_on_cpu
from cogfast.kernels.block_kernels import choose_kernels
from cogfast.model.transformer import DiffusionTransformer
from cogfast.train.activation_checkpointing import LADDER, apply_policies, block_call, describe
from tests.support.kernels.triton_on_cpu import launchers_on_cpu
from tests.support.runs import Run
from tests.support.tiny_transformers import inputs, tiny

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
            is_low = 4 * a.shape[1] < min(a.shape[0], b.shape[1])
            self.counts["low-rank" if is_low else "matmul"] += 1
        return op(*args, **(kwargs or {}))


# PyTorch runs its op in float32, and attention written out in bfloat16; cogfast has one op for both
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
    of_pytorch = FLASH if dtype == torch.float32 else "baddbmm"
    own = None if is_plain else fastest_on_cpu(dtype)
    attention = of_pytorch if own is None else "cpu_attention"
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


def test_a_kept_result_that_is_changed_in_place_is_an_error() -> None:
    linear, x = torch.nn.Linear(8, 8), torch.randn(2, 8, requires_grad=True)
    inner = torch.nn.Sequential(linear, torch.nn.LeakyReLU(inplace=True), torch.nn.Linear(8, 8))
    out = block_call(inner, "pointwise")(x)
    with pytest.raises(RuntimeError, match="which was changed in place afterwards; leave out"):
        out.sum().backward()


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
    assert calls.counts[FLASH] + calls.counts["cpu_attention"] == 2


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
    wanted_again = (("pointwise", 0, 0), ("attention_kept", 0, 5), ("full", 1, 5))
    for policy, attention, products in wanted_again:
        again = lambda op, policy=policy: ran[policy].get(op, 0) - ran["none"].get(op, 0)
        names = (f"aten::{FLASH}", "cogfast::cpu_attention")
        assert sum(map(again, names)) == 3 * attention, policy
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
def test_kept_bytes_are_those_of_the_trace(kind: str) -> None:
    """Real tensors with the launchers of a GPU, whose ops keep less than those of a CPU."""
    (_, transformer), (_, copy) = make(kind), make(kind)
    meta = copy.to("meta")
    grid, num_text = TokenGrid(2, 4, 6), 10
    hidden = torch.randn(1, num_text + grid.num_tokens, 128).requires_grad_()
    others = torch.randn(1, 64), num_text, transformer.rotary(grid)
    weights = {p.untyped_storage()._cdata for p in transformer.parameters()}
    for policy in POLICIES:
        apply_policies(transformer, [policy] * 2)
        with launchers_on_cpu(runs_kernels=False), Storages(weights) as storages:
            out = transformer.runtime.training_calls[0](hidden * 1, *others)
        # Beside the next block's input; the trace has that, without the block's own.
        kept = storages.num_bytes() - out.nbytes
        traced = trace_block(meta, 1, (1, hidden.shape[1]), policy)
        assert kept == pytest.approx(traced.kept, rel=0.05), policy


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


def test_a_plan_in_words() -> None:
    assert describe(("full",) * 3) == "full in all 3 layers"
    mixed = ("attention_kept", "attention_kept", "pointwise")
    assert describe(mixed) == "attention_kept in layers 0-1, pointwise in layers 2-2"


def test_keys_of_sat_and_ours(sat_configs: Path, run: Run) -> None:
    run = run.of_files(sat_configs / "cogvideox_2b.yaml")  # checkpoint_activations: True
    choice = lambda *words: run.config(*words).run.args.activation_checkpointing
    assert choice() == "auto"
    assert choice("args.checkpoint_activations=false") == "none"
    assert choice("args.checkpoint_activations=true") == "auto"
    inner = "model.network_config.params.transformer_args.checkpoint_activations"
    assert choice(f"{inner}=false") == "none"
    assert choice("args.activation_checkpointing=pointwise") == "pointwise"
    both = ("args.checkpoint_activations=false", "args.activation_checkpointing=full")
    assert choice(*both) == "full"
