"""LoRA's frozen base in 8 bits and in host memory: numbers, copies, checkpoints and samples."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cogfast.__main__ import main
from cogfast.distributed.parallelize import allocate
from cogfast.extensions.memory.host_blocks import HostBlocks, allocate_base, hold_base
from cogfast.extensions.memory.keys import MemoryKeys
from cogfast.extensions.memory.quantized_base import base_linears
from cogfast.extensions.memory.quantized_linear import DTYPES, Quantization, quantize_rows
from cogfast.model.transformer import DiffusionTransformer, assemble_transformer, freeze
from cogfast.train.activation_checkpointing import Policy, apply_policies
from tests.support.refusals import assert_refused
from tests.support.runs import Run
from tests.support.tiny_run import assert_same
from tests.support.tiny_transformers import FAMILY, inputs, tiny
from tests.train.run.test_lora_runs import lora_run

CPU = torch.device("cpu")
NUM_LAYERS = 3
CHANGES = {"lora_rank": 4, "num_layers": NUM_LAYERS}


def build(dtype: torch.dtype, quantization: str, num_offloaded: int) -> DiffusionTransformer:
    """The weights of one tiny transformer, whose base is frozen and held as asked."""
    with torch.device("meta"):
        transformer = assemble_transformer(replace(FAMILY["5b"], **CHANGES))
    freeze(transformer, ["all"], is_lora_only=False)
    transformer.to(dtype)
    hold_base(transformer, MemoryKeys(quantize_base=quantization, offload_blocks=num_offloaded))
    allocate(transformer, CPU)
    held = transformer.runtime.held = allocate_base(transformer, CPU)
    source = dict(tiny("5b", **CHANGES).named_parameters())
    targets = {**dict(transformer.named_parameters()), **held}
    assert targets.keys() == source.keys()
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(source[name])
    return transformer.train()


def results(transformer: DiffusionTransformer) -> dict[str, Tensor]:
    """Output and gradients."""
    transformer.zero_grad()
    out = transformer(**inputs("5b"))
    out.float().square().mean().backward()
    named = transformer.named_parameters()
    return {"output": out.detach(), **{n: p.grad for n, p in named if p.grad is not None}}


@torch.no_grad()
def evaluate(transformer: DiffusionTransformer) -> Tensor:
    return transformer.eval()(**inputs("5b"))


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [("none", torch.float32)] + [(kind, torch.bfloat16) for kind in ("none", "int8", "fp8")],
    ids=["fp32", "bf16", "int8", "fp8"],
)
def test_offloaded_blocks_give_the_same_bits(quantization: str, dtype: torch.dtype) -> None:
    plain = build(dtype, quantization, 0)
    wanted, evaluated = results(plain), evaluate(plain)
    assert len(wanted) > 20
    cases: list[tuple[int, Policy]] = [(1, "none"), (2, "pointwise"), (3, "full")]
    for number, policy in cases:
        transformer = build(dtype, quantization, number)
        apply_policies(transformer, [policy] * NUM_LAYERS)
        assert_same(results(transformer), wanted)
        # The slots hold other blocks than at the start.
        assert torch.equal(evaluate(transformer), evaluated)
        assert_same(results(transformer.train()), wanted)


def test_the_device_holds_two_blocks_and_fetches_one_ahead(monkeypatch) -> None:
    fetched: list[int] = []
    fetch = HostBlocks._fetch

    def note(blocks: HostBlocks, number: int) -> None:
        if blocks._slot(number).holds != number:
            fetched.append(number)
        fetch(blocks, number)

    monkeypatch.setattr(HostBlocks, "_fetch", note)
    transformer = build(torch.float32, "none", NUM_LAYERS)
    memory = {linear.weight.untyped_storage().data_ptr() for _, linear in base_linears(transformer)}
    assert len(memory) == 2
    of_block = 4 * (12 * 128**2 + 12 * 128 * 64)
    source: Any = transformer.runtime.source
    assert source.slot_bytes == 2 * of_block
    assert all(slot.memory.nbytes == of_block for slot in source._slots)
    results(transformer)
    assert fetched == [0, 1, 2, 0]
    for _ in range(2):
        fetched.clear()
        results(transformer)
        assert fetched == [2, 0]  # each while another block computes


@pytest.mark.parametrize("kind", DTYPES)
def test_the_base_is_quantized_as_it_loads_and_is_no_parameter(kind: Quantization) -> None:
    """The modulation is int8 in both."""
    transformer, source = build(torch.bfloat16, kind, 1), tiny("5b", **CHANGES)
    held: Any = transformer.runtime.held
    assert len(held) == 5 * NUM_LAYERS
    for name, stored in held.items():
        dtype = torch.int8 if "modulation" in name else DTYPES[kind]
        q, scale = quantize_rows(source.get_parameter(name), dtype)
        assert stored.q.dtype == dtype and torch.equal(stored.scale, scale)
        assert torch.equal(stored.q.view(torch.uint8), q.view(torch.uint8))
    assert not held.keys() & {name for name, _ in transformer.named_parameters()}
    state = {name for name in transformer.state_dict() if name.startswith("blocks.0.fc1.")}
    assert state == {"blocks.0.fc1.bias"}


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.012), ("fp8", 0.045)])
def test_error_of_a_quantized_base(kind: str, most: float) -> None:
    """Normally distributed weights. int8: entries are off by 1/100 of their root mean square. fp8: weights
    and inputs are, each by 1/40 of themselves on average."""
    plain, rounded = (build(torch.float32, each, 0) for each in ("none", kind))
    far = lambda found, wanted: ((found - wanted).norm() / wanted.norm()).item()
    for (path, ours), (_, theirs) in zip(base_linears(rounded), base_linears(plain), strict=True):
        x = torch.randn(50, theirs.weight.shape[1], generator=torch.Generator().manual_seed(0))
        assert far(ours(x), theirs(x)) < most, path
    assert 1e-4 < far(evaluate(rounded), evaluate(plain)) < most


HELD = ("args.quantize_base=int8", "args.offload_blocks=1")


@pytest.fixture(scope="module")
def lora(shared_run: Run) -> Run:
    """A LoRA run with EMA and checkpoints."""
    return lora_run(shared_run, 4).with_args(train_iters=4, save_interval=2, keep_last=0)


@pytest.fixture(scope="module")
def held(lora: Run) -> Run:
    run = lora.with_args(valid_data=[str(lora.data)], eval_interval=2, eval_num_samples=0)
    return run.train(*HELD, "args.activation_checkpointing=full")


def test_a_run_trains_as_with_the_whole_base(lora: Run, held: Run, tmp_path: Path) -> None:
    """8 bits change the losses a little; host memory and ZeRO-3 do not."""
    plain = lora.into(tmp_path / "plain").train().losses
    assert held.losses != plain
    assert held.losses == pytest.approx(plain, rel=0.02)
    assert lora.into(tmp_path / "offloaded").train("args.offload_blocks=2").losses == plain
    stage3 = "deepspeed.zero_optimization.stage=3"
    partitioned = lora.into(tmp_path / "stage 3").train(*HELD, stage3)
    assert partitioned.losses == pytest.approx(held.losses, rel=1e-5)


def test_a_run_resumes_with_the_same_bits(lora: Run, held: Run, tmp_path: Path) -> None:
    copy = shutil.copytree(held.path, tmp_path / held.path.name)
    resumed = lora.into(tmp_path).train(*HELD, f"args.resume={copy / 'checkpoints' / '00000002'}")
    assert resumed.losses == held.losses
    assert len(held.weights()) == 2 * 4 * 2
    assert_same(resumed.weights(), held.weights())
    line, other = "args.quantize_base: int8 -> none; change it back, or", lora.into(tmp_path / "o")
    assert_refused(lambda: other.train(f"args.resume={held.path}"), line)


def test_sampling_uses_the_weights_of_args_load(held: Run, tmp_path: Path) -> None:
    found = []
    whole = ("args.quantize_base=none", "args.offload_blocks=0")
    for name, words in (("held", ()), ("whole", whole)):
        out, words = tmp_path / name, ["args.only_save_latents=true", *words]
        command = ["sample", str(held.path), "--out", str(out), "--prompt", "a bar", *words]
        assert main(command) == 0
        (file,) = out.glob("*.safetensors")
        found.append(load_file(file)["latents"])
    assert torch.equal(*found)
