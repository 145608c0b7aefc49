"""Graphs of the blocks, on a CPU, where a tape of operations that repeats them in the same memory takes
the place of CUDA's graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cogfast.config import load_config
from cogfast.core.shapes import TokenGrid
from cogfast.model.transformer import BlockCall, DiffusionTransformer
from cogfast.model.weights.formats.checkpoint_manifest import newest_checkpoint
from cogfast.train import trainer
from cogfast.train.memory import block_graphs
from cogfast.train.memory.activation_checkpointing import apply_policies
from cogfast.train.memory.block_graphs import MOST_SHAPES, BlockGraphs
from cogfast.train.plan.activations import LADDER, Policy
from cogfast.train.preflight.check import check_train
from cogfast.train.trainer import Trainer
from tests.support.tiny_run import (
    launch_ranks,
    losses,
    read_run_weights,
    run_folder,
    write_clips,
    write_config,
)
from tests.support.tiny_transformers import inputs
from tests.train.memory.test_activation_checkpointing import make
from tests.train.run.test_lora_runs import write_lora_config

NUM_BLOCKS = 2
EVERYWHERE: list[Policy] = ["full"] * NUM_BLOCKS


class Tape(TorchDispatchMode):
    """Records operations. `replay` runs them again on the tensors that they had, whatever these hold
    by then, and writes the results where the first ones are."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[Any, tuple, dict, Any]] = []
        self.num_replays = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        self.entries.append((op, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        self.num_replays += 1
        for op, args, kwargs, out in self.entries:
            again = op(*args, **kwargs)
            given = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs))}
            for old, new in zip(tensors(out), tensors(again), strict=True):
                if old.untyped_storage().data_ptr() not in given:  # else a view, or in place
                    old.copy_(new)


def tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


class Tapes(list[Tape]):
    """Captures onto tapes."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], object]:
        tape = Tape()
        with tape:
            run()
        self.append(tape)
        return tape.replay

    def take_replays(self) -> int:
        number = sum(tape.num_replays for tape in self)
        for tape in self:
            tape.num_replays = 0
        return number


def with_graphs(transformer: DiffusionTransformer, policy: Policy) -> tuple[BlockGraphs, Tapes]:
    policies: list[Policy] = [policy] * NUM_BLOCKS
    apply_policies(transformer, policies)
    tapes = Tapes()
    return BlockGraphs(transformer, tapes), tapes


def plain(transformer: DiffusionTransformer, run: Callable[[], Any]) -> Any:
    """Run without graphs."""
    calls, transformer.training_calls = transformer.training_calls, None
    try:
        return run()
    finally:
        transformer.training_calls = calls


def results(
    transformer: DiffusionTransformer, given: dict[str, Tensor], num_passes: int = 1
) -> dict[str, Tensor]:
    """Output, and the sum of the gradients of some passes."""
    transformer.zero_grad()
    out = torch.empty(0)
    for i in range(num_passes):
        out = transformer(**given | {"latents": given["latents"] * (i + 1)})
        out.float().square().mean().backward()
    named = transformer.named_parameters()
    return {"output": out.detach(), **{n: p.grad for n, p in named if p.grad is not None}}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys() and len(wanted) >= 17
    assert [n for n in wanted if not torch.equal(found[n], wanted[n])] == []


def warm_up(
    graphs: BlockGraphs, transformer: DiffusionTransformer, given: dict[str, Tensor]
) -> None:
    for _ in range(2):
        results(transformer, given)
        graphs.after_step()


def other(given: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Other numbers of the same shapes."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda t: torch.randn(t.shape, generator=generator)
    return {k: v if k == "timesteps" else draw(v) for k, v in given.items()}


def change_weights(transformer: DiffusionTransformer) -> None:
    with torch.no_grad():
        for p in transformer.parameters():
            p.mul_(1.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("policy", LADDER)
@pytest.mark.parametrize("kind", ["2b", "5b", "lora"])
def test_outputs_and_gradients_are_bitwise_those_without_graphs(kind, policy, dtype) -> None:
    name, transformer = make(kind, dtype)
    graphs, tapes = with_graphs(transformer, policy)
    warm_up(graphs, transformer, inputs(name))
    assert len(tapes) == 2 * NUM_BLOCKS and not tapes.take_replays()
    for seed in range(3):
        change_weights(transformer)
        given = other(inputs(name), seed)
        found = results(transformer, given)
        assert tapes.take_replays() == 2 * NUM_BLOCKS
        assert_same(found, plain(transformer, lambda given=given: results(transformer, given)))
        graphs.after_step()
    assert len(tapes) == 2 * NUM_BLOCKS


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("kind", ["5b", "lora"])
def test_gradients_accumulate(kind: str, policy: Policy) -> None:
    name, transformer = make(kind)
    graphs, tapes = with_graphs(transformer, policy)
    given = inputs(name)
    warm_up(graphs, transformer, given)
    found = results(transformer, given, num_passes=3)
    assert tapes.take_replays() == 3 * 2 * NUM_BLOCKS
    assert_same(found, plain(transformer, lambda: results(transformer, given, num_passes=3)))


def test_gradients_of_the_inputs_are_tensors_of_their_own() -> None:
    """The blocks alone, whose inputs are leaves that keep the gradients."""
    name, transformer = make("5b")
    graphs, tapes = with_graphs(transformer, "full")
    calls = transformer.training_calls
    width, generator = transformer.config.hidden_size, torch.Generator().manual_seed(0)
    rotation = transformer.rotary(TokenGrid(4, 4, 6))

    def run(calls: Sequence[BlockCall], scale: float) -> list[Tensor]:
        generator.manual_seed(0)
        hidden = torch.randn(2, 106, width, generator=generator).mul_(scale).requires_grad_()
        conditioning = torch.randn(2, 64, generator=generator).mul_(scale).requires_grad_()
        out = hidden
        for call in calls:
            out = call(out, conditioning, 10, rotation)
        out.square().mean().backward()
        assert hidden.grad is not None and conditioning.grad is not None
        return [hidden.grad, conditioning.grad]

    assert calls is not None
    for _ in range(2):
        run(calls, 1.0)
    graphs.after_step()
    found = [run(calls, scale) for scale in (1.0, 2.0)]
    assert tapes.take_replays() == 2 * 2 * NUM_BLOCKS
    for scale, gradients in zip((1.0, 2.0), found, strict=True):
        assert all(map(torch.equal, gradients, run(graphs.calls, scale)))


def test_each_shape_has_its_graphs_and_more_run_without(caplog) -> None:
    caplog.set_level("INFO")
    name, transformer = make("5b")
    graphs, tapes = with_graphs(transformer, "full")
    first = inputs(name)
    sizes = [(4, 8, 12), (2, 8, 12), (4, 8, 6), (3, 8, 8), (4, 4, 8)]
    shapes = [first | {"latents": torch.randn(2, 16, *size)} for size in sizes]
    for number, given in enumerate(shapes):
        warm_up(graphs, transformer, given)
        assert len(tapes) == 2 * NUM_BLOCKS * min(number + 1, MOST_SHAPES)
    tapes.take_replays()
    for _ in range(2):
        for number, given in enumerate(shapes):
            found = results(transformer, given)
            assert tapes.take_replays() == (2 * NUM_BLOCKS if number < MOST_SHAPES else 0)
            assert_same(found, plain(transformer, lambda given=given: results(transformer, given)))
    assert caplog.text.count("others run without") == 1


def test_as_many_rows_of_another_grid_are_another_shape() -> None:
    name, transformer = make("5b")
    graphs, tapes = with_graphs(transformer, "none")
    given = inputs(name)
    given["latents"] = given["latents"][..., :6]
    flat = given | {"latents": torch.randn(2, 16, 4, 4, 12)}
    warm_up(graphs, transformer, given)
    tapes.take_replays()
    found = results(transformer, flat)
    assert not tapes.take_replays()
    assert_same(found, plain(transformer, lambda: results(transformer, flat)))


def test_evaluation_runs_the_blocks() -> None:
    name, transformer = make("5b")
    graphs, tapes = with_graphs(transformer, "full")
    given = inputs(name)
    warm_up(graphs, transformer, given)
    evaluate = lambda: transformer(**given)
    with torch.no_grad():
        wanted = plain(transformer, evaluate)
        assert torch.equal(evaluate(), wanted)  # in training mode, too
        assert torch.equal(transformer.eval()(**given), wanted)
    assert not tapes.take_replays()
    transformer.train()
    assert_same(
        results(transformer, given), plain(transformer, lambda: results(transformer, given))
    )


@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_second_forward_before_the_first_backward_runs_without_graphs(policy: Policy) -> None:
    name, transformer = make("5b")
    graphs, tapes = with_graphs(transformer, policy)
    given = inputs(name), other(inputs(name), 5)
    warm_up(graphs, transformer, given[0])

    def both() -> dict[str, Tensor]:
        transformer.zero_grad()
        outs = [transformer(**g).square().mean() for g in given]
        for i in (0, 1):
            outs[i].backward()
        named = transformer.named_parameters()
        return {n: p.grad.clone() for n, p in named if p.grad is not None} | {"out": outs[1]}

    found = both()
    assert tapes.take_replays() == 2 * NUM_BLOCKS
    assert_same(found, plain(transformer, both))
    # The pass is over, and graphs are used again, also after one that had no backward pass.
    transformer(**given[0])
    assert tapes.take_replays() == NUM_BLOCKS
    found = results(transformer, given[1])
    assert tapes.take_replays() == 2 * NUM_BLOCKS
    assert_same(found, plain(transformer, lambda: results(transformer, given[1])))


def test_a_second_backward_is_an_error() -> None:
    name, transformer = make("5b")
    graphs, _ = with_graphs(transformer, "none")
    warm_up(graphs, transformer, inputs(name))
    loss = transformer(**inputs(name)).square().mean()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass .* set args.cuda_graphs=false"):
        loss.backward()


def test_a_weight_that_moved_is_an_error() -> None:
    name, transformer = make("2b")
    graphs, _ = with_graphs(transformer, "full")
    warm_up(graphs, transformer, inputs(name))
    weight = transformer.blocks[1].get_parameter("fc1.weight")
    weight.data = weight.data.clone()
    with pytest.raises(RuntimeError, match=r"blocks\.1\.fc1\.weight has moved"):
        transformer(**inputs(name))


def test_what_watches_operations_sees_them() -> None:
    name, transformer = make("5b")
    graphs, tapes = with_graphs(transformer, "full")
    warm_up(graphs, transformer, inputs(name))
    with Tape() as watch:
        results(transformer, inputs(name))
    attention = torch.ops.cogfast.flash_attention.default
    assert [entry[0] for entry in watch.entries].count(attention) == 2 * NUM_BLOCKS
    assert not tapes.take_replays()


def test_hooks_of_weights_run_once_for_each_pass_and_never_in_a_capture() -> None:
    name, transformer = make("5b")
    graphs, tapes = with_graphs(transformer, "full")
    given, seen = inputs(name), []
    for p in transformer.blocks.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p))
        p.register_hook(lambda gradient: seen.append(gradient))
    warm_up(graphs, transformer, given)
    number = len(list(transformer.blocks.parameters()))
    assert len(seen) == 2 * 2 * number
    results(transformer, given)
    assert tapes.take_replays() and len(seen) == 3 * 2 * number
    assert all(p.grad is not None for p in transformer.blocks.parameters())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    return write_config(folder / "base.yaml", write_clips(folder / "data"), train_iters=6)


@pytest.fixture(scope="module")
def lora_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lora_config(tmp_path_factory.mktemp("lora"), 2, train_iters=6)


def train(base: Path, words: list[str]) -> int:
    """Train with tapes for graphs if args.cuda_graphs is set, and return how often they ran."""
    tapes, patch = Tapes(), pytest.MonkeyPatch()
    with patch.context() as changed:
        changed.setattr(trainer, "check_train", lambda config: None)  # it wants a GPU
        changed.setattr(block_graphs, "cuda_capture", lambda device: tapes)
        Trainer(load_config([base], words)).train()
    return tapes.take_replays()


MICRO_BATCHES = [
    "deepspeed.train_micro_batch_size_per_gpu=2",
    "deepspeed.gradient_accumulation_steps=2",
]
EVALUATION = ["args.eval_interval=2", "args.split='2,1,0'", "args.eval_sampling_steps=2"]
RUNS = {
    "full": ["args.activation_checkpointing=full", *MICRO_BATCHES, *EVALUATION],
    "none": ["args.activation_checkpointing=none", *MICRO_BATCHES],
    "stage 1, bf16": [
        "deepspeed.zero_optimization.stage=1",
        "args.activation_checkpointing=pointwise",
        "deepspeed.bf16.enabled=true",
    ],
    "PyTorch's optimizer": [
        "args.activation_checkpointing=attention_kept",
        "deepspeed.optimizer.type=AdamW",
        *MICRO_BATCHES,
    ],
    "lora": ["args.activation_checkpointing=full", *MICRO_BATCHES, *EVALUATION],
}


def assert_same_runs(saves: list[Path], num_steps: int, has_ema: bool = True) -> None:
    found = [losses(run_folder(save)) for save in saves]
    assert len(found[0]) == num_steps and found[1] == found[0]
    for ema in (False, True)[: 1 + has_ema]:
        newest = [newest_checkpoint(run_folder(save)) for save in saves]
        weights = [read_run_weights(checkpoint or "", ema) for checkpoint in newest]
        assert weights[0] and weights[0].keys() == weights[1].keys()
        assert all(torch.equal(weights[1][name], w) for name, w in weights[0].items())


@pytest.mark.parametrize("name", RUNS)
def test_runs_have_the_same_losses_and_weights(name, base, lora_base, tmp_path) -> None:
    saves, replays = [tmp_path / "plain", tmp_path / "graphs"], []
    for save in saves:
        graphs = f"args.cuda_graphs={str(save.name == 'graphs').lower()}"
        words = [f"args.save={save}", graphs, *RUNS[name]]
        replays.append(train(lora_base if name == "lora" else base, words))
    # Captured after the second pass, and so after one step of two micro-batches.
    num_passes = 2 * 5 if set(MICRO_BATCHES) <= set(RUNS[name]) else 4
    assert replays == [0, num_passes * 2 * NUM_BLOCKS]
    assert_same_runs(saves, num_steps=6, has_ema=name != "PyTorch's optimizer")


@pytest.mark.slow
def test_two_ranks_have_the_same_losses_and_weights(base: Path, tmp_path: Path) -> None:
    """Gradients go through DeepSpeed's buckets and hooks."""
    saves = [tmp_path / "plain", tmp_path / "graphs"]
    for save in saves:
        launch_ranks(
            2,
            "-m",
            "tests.train.memory.test_block_graphs",
            str(base),
            f"args.save={save}",
            f"args.cuda_graphs={str(save.name == 'graphs').lower()}",
            "args.activation_checkpointing=full",
            "args.shared_memory=false",
            *MICRO_BATCHES,
        )
    assert_same_runs(saves, num_steps=6)


REFUSED = {
    "args.compile=true": "args.compile=true, which replaces the blocks, too; use args.compile=false",
    "deepspeed.zero_optimization.stage=3": "ZeRO stage 3, which moves .* use deepspeed.zero_opt.*=2,",
    "args.offload_activations=true": "args.offload_activations=true, which moves",
    "args.offload_blocks=1": "args.offload_blocks=1, which moves .* use args.offload_blocks=0,",
    "args.activation_checkpointing=auto": ".*=auto, which fills memory .* use full, attention_kept,",
    "args.fit=auto": "args.fit=auto, which may set keys that graphs do not support",
    "args.profiling_blocks=true": "args.profiling_blocks=true, which records ranges of blocks",
    "lora_config.params.lora_dropout=0.1": "lora_dropout=0.1, which draws other numbers",
    "args.model_parallel_size=2": "args.model_parallel_size=2, which exchanges data .*size=1, or",
    "args.context_parallel_size=2": "args.context_parallel_size=2, which exchanges data",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_graphs_cannot_repeat_is_refused(word: str, lora_base, monkeypatch) -> None:
    if word.startswith("lora_config"):
        word = f"model.network_config.params.modules.{word}"
    full = "args.activation_checkpointing=full"
    config = load_config([lora_base], [full, "args.cuda_graphs=true", word])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    name = word.removeprefix("model.network_config.params.modules.")
    expected = f"command line: args.cuda_graphs=true does not support {REFUSED[name]}"
    with pytest.raises(ValueError, match=expected + r".*args\.cuda_graphs=false$"):
        check_train(config, world_size=2)


def test_a_cpu_is_refused(base: Path) -> None:
    config = load_config([base], ["args.cuda_graphs=true"])
    with pytest.raises(
        ValueError, match="args.cuda_graphs=true needs a GPU; use args.cuda_graphs=f"
    ):
        check_train(config)


def test_a_failing_capture_names_the_key() -> None:
    name, transformer = make("5b")
    apply_policies(transformer, EVERYWHERE)

    def capture(run: Callable[[], None]) -> Callable[[], object]:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = BlockGraphs(transformer, capture)
    with pytest.raises(RuntimeError, match=r"set args.cuda_graphs=false \(operation not permitted"):
        warm_up(graphs, transformer, inputs(name))
    # The parameters are those of before.
    assert not [n for n, p in transformer.named_parameters() if p.grad is None and "blocks" in n]


if __name__ == "__main__":
    assert (train(Path(sys.argv[1]), sys.argv[2:]) > 0) == ("args.cuda_graphs=true" in sys.argv)
