"""Activations of checkpointed blocks in host memory: equal gradients and runs, reused buffers, early
fetches, and what stays on the device."""

import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cogfast.extensions.memory import offloaded_activations
from cogfast.extensions.memory.offloaded_activations import (
    NUM_RESIDENT,
    OffloadedActivations,
    apply_offloaded,
)
from cogfast.extensions.plan.memory import choose_policies, setup_of, training_phase
from cogfast.model.lora import is_lora_parameter
from cogfast.model.transformer import DiffusionTransformer
from cogfast.train.activation_checkpointing import Policy, apply_policies
from tests.support.runs import Run
from tests.support.tiny_run import assert_same
from tests.support.tiny_transformers import inputs, tiny
from tests.train.test_activation_checkpointing import Storages, gradients

LAYERS = 5
EVERYWHERE: list[Policy] = ["full"] * LAYERS
POLICIES: tuple[Policy, ...] = ("full", "attention_kept", "pointwise")
CPU = torch.device("cpu")


def make(name: str, dtype: torch.dtype = torch.float32, rank: int = 0) -> DiffusionTransformer:
    changes = {"lora_rank": rank} if rank else {}
    transformer = tiny(name, num_layers=LAYERS, **changes).to(dtype).train()
    for parameter_name, parameter in transformer.named_parameters() if rank else ():
        parameter.requires_grad_(is_lora_parameter(parameter_name))
    return transformer


def offload(transformer: DiffusionTransformer, policy: Policy) -> OffloadedActivations:
    offloaded = OffloadedActivations(LAYERS, CPU)
    apply_offloaded(transformer, [policy] * LAYERS, offloaded)
    return offloaded


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the buffers that are allocated in host memory."""
    sizes, allocate = [], offloaded_activations.host_buffer
    note = lambda like: (sizes.append(like.nbytes), allocate(like))[1]
    monkeypatch.setattr(offloaded_activations, "host_buffer", note)
    return sizes


def sizes(offloaded: OffloadedActivations) -> list[list[int]]:
    return [[buffer.nbytes for buffer in free] for _, free in sorted(offloaded.free.items())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("name", "rank"), [("2b", 0), ("5b", 4)], ids=["all weights", "lora"])
def test_gradients_are_bitwise_those_of_plain_blocks(name: str, rank: int, dtype) -> None:
    transformer = make(name, dtype, rank)
    transformer.use_calls(None)
    expected = gradients(name, transformer)
    assert len(expected) >= 16
    for policy in POLICIES:
        offloaded = offload(transformer, policy)
        for _ in range(2):
            assert_same(gradients(name, transformer), expected)
            # All buffers are back, and the second step needed no others.
            assert all(len(of_kind) == LAYERS - NUM_RESIDENT for of_kind in sizes(offloaded))


def test_two_graphs_at_a_time_do_not_share_buffers() -> None:
    transformer = make("5b")
    given = [inputs("5b", seed) for seed in (1, 2)]

    def both() -> dict[str, Tensor]:
        transformer.zero_grad()
        torch.stack([transformer(**each).square().mean() for each in given]).sum().backward()
        named = transformer.named_parameters()
        return {n: p.grad.clone() for n, p in named if p.grad is not None}

    apply_policies(transformer, EVERYWHERE)
    expected = both()
    assert len(expected) >= 16
    offloaded = offload(transformer, "full")
    assert_same(both(), expected)
    assert sizes(offloaded) == [[2 * 106 * 128 * 4] * 2 * (LAYERS - NUM_RESIDENT)]
    transformer(**given[0])  # a forward pass without a backward pass frees its buffers, too
    assert_same(both(), expected)


def test_buffers_are_allocated_once_and_grow_with_the_clips(made: list[int]) -> None:
    transformer = make("5b")
    offload(transformer, "attention_kept")
    # Rows of latents -> buffers that are allocated: for inputs, attention and its log-sum-exp
    for rows, number in ((6, 9), (6, 0), (8, 9), (6, 0), (8, 0)):
        given = inputs("5b")
        given["latents"] = given["latents"][:, :, :, :rows]
        made.clear()
        transformer(**given).square().mean().backward()
        assert len(made) == number, rows


@pytest.mark.parametrize("policy", POLICIES)
def test_two_blocks_stay_on_the_device(policy: Policy, made: list[int]) -> None:
    """Autograd holds what two blocks keep after a forward pass, host buffers aside."""
    transformer = make("5b")
    weights = {p.untyped_storage()._cdata for p in transformer.parameters()}

    def held(is_offloaded: bool) -> int:
        apply_policies(transformer, [policy] * LAYERS)
        if is_offloaded:
            offload(transformer, policy)
        with Storages(weights) as storages:
            out = transformer(**inputs("5b"))
        assert out.requires_grad
        return storages.num_bytes()

    all_blocks, offloaded = held(False), held(True)
    assert offloaded - sum(made) == pytest.approx(all_blocks - sum(made), rel=0.01)
    assert sum(made) > 0.3 * all_blocks


def test_a_block_is_fetched_before_the_one_after_it_runs_again(monkeypatch) -> None:
    transformer, events = make("5b"), []
    offload(transformer, "full")
    for i, block in enumerate(transformer.blocks):
        block.register_forward_pre_hook(lambda *_, i=i: events.append(f"run {i}"))
    copies, fetch = offloaded_activations.HostCopy, offloaded_activations.HostCopy.fetch
    monkeypatch.setattr(copies, "fetch", lambda copy: (events.append("fetch"), fetch(copy)))
    out = transformer(**inputs("5b"))
    assert events == [f"run {i}" for i in range(LAYERS)]
    events.clear()
    out.square().mean().backward()
    # Block 3 stays on the device; the fetch of block 2 begins when block 3 starts to run again.
    assert events == ["run 4", "fetch", "run 3", "fetch", "run 2", "fetch", "run 1", "run 0"]


@pytest.mark.soak  # Inductor compiles C++
def test_compiled_blocks() -> None:
    transformer = make("5b")
    for block in transformer.blocks:
        block.compile(fullgraph=True)
    apply_policies(transformer, EVERYWHERE, is_compiled=True)
    expected = gradients("5b", transformer)
    assert len(expected) >= 16
    offloaded = OffloadedActivations(LAYERS, CPU)
    apply_offloaded(transformer, EVERYWHERE, offloaded, is_compiled=True)
    assert_same(gradients("5b", transformer), expected)


DEEP = f"model.network_config.params.num_layers={LAYERS}"
OFFLOADED = "args.offload_activations=true"


def policy(name: str) -> str:
    return f"args.activation_checkpointing={name}"


def test_runs_have_the_same_losses(run: Run, tmp_path: Path) -> None:
    """Two micro-batches per step. auto keeps attention's results once it has chosen."""
    run = run.with_words(DEEP, "deepspeed.train_micro_batch_size_per_gpu=2")
    run = run.with_args(train_iters=3, gradient_accumulation_steps=2)
    ways = ([policy("full")], [policy("full"), OFFLOADED], [policy("auto"), OFFLOADED])
    full, offloaded, auto = (run.into(tmp_path / str(i)).train(*w) for i, w in enumerate(ways))
    assert len(full.losses) == 3 and offloaded.losses == auto.losses == full.losses
    assert auto.last.parts.policies == ("attention_kept",) * LAYERS


def test_the_plan_has_two_blocks_on_the_device_and_the_others_on_the_host(run: Run) -> None:
    config = run.config(DEEP, policy("full"))
    # Activations are the largest part.
    plain = replace(setup_of(config.run, 1), batch_size=10**4)
    setup = replace(plain, args=plain.args.changed(offload_activations=True))
    for name in POLICIES:
        kept, policies = setup.block(1, name).kept, [name] * LAYERS
        assert setup.host_parts(policies)["activations"] == 3 * kept
        less = training_phase(plain, policies).total - training_phase(setup, policies).total
        assert less == pytest.approx(3 * kept, rel=0.01)
    assert plain.host_parts(EVERYWHERE)["activations"] == 0
    assert set(choose_policies(setup, 10**15)) == {"attention_kept"}


def test_a_buffer_is_replaced_once_its_copies_are_done() -> None:
    """The host may be a step ahead of the device when a larger bucket of videos comes."""
    offloaded, seen = OffloadedActivations(LAYERS, CPU), []
    small, large = (torch.zeros(n) for n in (4, 8))
    offloaded.free[0].append(offloaded.take(0, small))
    memory = weakref.ref(offloaded.free[0][0])
    stream: Any = SimpleNamespace(synchronize=lambda: seen.append(memory() is not None))
    offloaded.side.stream = stream
    assert offloaded.take(0, large).nbytes == large.nbytes
    assert seen == [True]
