"""args.ema_device=cpu and args.optimizer_moments=8bit: numbers of an update, and whole runs with
checkpoints, evaluations and exports."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cogfast.distributed.parallelize import find_shards, parallelize
from cogfast.distributed.tensor_parallel import ParallelGroup
from cogfast.extensions.memory.host_ema import DEVICE_BYTES, HostEma
from cogfast.extensions.plan.memory import rules_of
from cogfast.extensions.plan.zero import lasting_state, step_bytes
from cogfast.kernels.fused_ema_adam import FusedEmaAdam, average_, read_moment
from cogfast.kernels.gpu.fused_ema_adam import launch_average
from cogfast.model.transformer import BlockRuntime, assemble_transformer
from cogfast.train.optimizer import build_optimizer, parameter_groups
from tests.kernels.test_fused_ema_adam import HYPER, build, random_case, run  # noqa: F401
from tests.support.kernels.cpu_kernels import NEEDS_CPU_KERNELS
from tests.support.runs import Run
from tests.support.tiny_transformers import FAMILY

HOST, EIGHT = "args.ema_device=cpu", "args.optimizer_moments=8bit"
STAGE = "deepspeed.zero_optimization.stage"


@pytest.fixture
def tiny(data: Path, tmp_path: Path) -> Run:
    return Run(data, tmp_path).with_args(train_iters=4, save_interval=2, keep_last=0)


def files_of(run: Run, step: int) -> dict[str, bytes]:
    folder = run.path / "checkpoints" / f"{step:08d}"
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


# --- the EMA in host memory ---


def stepped(optimizer: FusedEmaAdam, params: list[Tensor], grads: list, has_host_ema: bool) -> list:
    """Return p and EMA after steps, of which the third is skipped."""
    if has_host_ema:
        optimizer.other_ema = HostEma()
    for t, step in enumerate(grads):
        optimizer.found_inf = torch.tensor(float(t == 2))
        run(optimizer, params, [step])
    if optimizer.other_ema is not None:
        optimizer.other_ema.wait()
    return [x for p in params for x in (p.detach(), optimizer.state[p]["shadow"])]


@NEEDS_CPU_KERNELS
@pytest.mark.parametrize("use_num_updates", [True, False])
def test_the_host_ema_has_the_bits_of_the_devices(use_num_updates: bool) -> None:
    found = []
    for has_host_ema in (True, False):
        params, grads = random_case([(77,), (4100,), (3, 5)])
        optimizer = FusedEmaAdam(params, **HYPER, use_num_updates=use_num_updates, ema_decay=0.97)
        found.append(stepped(optimizer, params, grads, has_host_ema))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_average_is_that_of_float64() -> None:
    shadow, p = torch.randn(2, 5001, generator=torch.Generator().manual_seed(0)).unbind()
    weight = torch.tensor(0.3)
    want = shadow.double() + weight.double() * (p.double() - shadow.double())
    for compute in (average_, launch_average):
        got = shadow.clone()
        compute(got, p, weight)
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=2e-7)


def test_the_host_ema_takes_float32_parameters() -> None:
    p = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    p.grad = torch.zeros_like(p)
    optimizer = FusedEmaAdam([p])
    optimizer.other_ema = HostEma()
    with pytest.raises(ValueError, match="must be float32 for an EMA in host memory"):
        optimizer.step()


@pytest.mark.parametrize("stage", [2, 3])
def test_runs_with_the_ema_in_host_memory_are_the_same(
    tmp_path: Path, tiny: Run, stage: int
) -> None:
    """Files and held-out losses equal those with the EMA on the device, also when it resumes."""
    moments = EIGHT if stage == 3 else "args.optimizer_moments=fp32"
    run = tiny.with_args(eval_interval=3, eval_num_samples=0, split="3,1,0")
    run = run.with_words(f"{STAGE}={stage}", moments)
    plain = run.into(tmp_path / "plain").train()
    if stage == 2:
        run = run.with_words("args.resume=auto")
        assert files_of(run.train(HOST, "args.exit_interval=2"), 2) == files_of(plain, 2)
    host = run.train(HOST)
    assert files_of(host, 4) == files_of(plain, 4)
    held_out = [each.logged("valid_loss") for each in (plain, host)]
    assert held_out[0] == held_out[1] and len(held_out[0]) == 1


# --- 8-bit moments ---


def test_8bit_runs_resume_bit_for_bit(tmp_path: Path, tiny: Run) -> None:
    run = tiny.with_words(EIGHT)
    done = run.into(tmp_path / "whole").train()
    run.train("args.exit_interval=2")
    assert files_of(run.resume(), 4) == files_of(done, 4)
    whole = done.last
    state = whole.engine.state(0)
    assert {state[key].dtype for key in ("exp_avg", "exp_avg_sq")} == {torch.uint8}
    # The snapshot holds codes, and the file float32 as in every other run.
    assert whole.writer._snapshot.partitions["exp_avg", 0].dtype == torch.uint8


def test_a_run_resumes_with_the_other_moments(tiny: Run, log: pytest.LogCaptureFixture) -> None:
    plain = tiny.train(steps=2).last
    view = lambda run, s, key: read_moment(run.engine.state(s.part), key, s.offset, s.numel)
    before = [view(plain, s, "exp_avg_sq").clone() for s in plain.engine.slices]
    coded = tiny.trainer(EIGHT, "args.resume=latest")
    assert "optimizer_moments=8bit, before fp32: the moments are rounded to 8 bits" in log.text
    # Half the distance of two codes, or the smallest code of a block.
    smallest = max(x.max() for x in before) * 2**-31
    for s, want in zip(coded.engine.slices, before, strict=True):
        assert ((view(coded, s, "exp_avg_sq") - want).abs() <= want / 16 + smallest).all()
    coded.train()
    back = tiny.trainer("args.resume=latest")
    assert "optimizer_moments=fp32, before 8bit: the moments are kept in float32" in log.text
    for s in back.engine.slices:
        assert torch.equal(view(back, s, "exp_avg"), view(coded, s, "exp_avg"))


def test_8bit_losses_stay_near_those_of_float32(tmp_path: Path, tiny: Run) -> None:
    run = tiny.with_args(train_iters=8, save_interval=None)
    plain = run.into(tmp_path / "plain").train().losses
    coded = run.into(tmp_path / "coded").train(EIGHT, HOST).losses
    off = abs(torch.tensor(coded).mean() / torch.tensor(plain).mean() - 1)
    assert off < 0.02 and coded != plain


def test_no_block_of_codes_has_shards_and_replicated_parameters() -> None:
    """A flat tensor of a group with both would have other scales on each tensor-parallel rank."""
    with torch.device("meta"):
        transformer = assemble_transformer(replace(FAMILY["5b"], lora_rank=4))
        no_group: Any = None  # no rank computes
        parallelize(transformer, ParallelGroup(0, 2, no_group))
    shards = {transformer.get_parameter(name) for name in find_shards(transformer)}
    groups = parameter_groups(transformer, 0.1, "8bit")
    assert [len(shards & set(g["params"])) in (0, len(g["params"])) for g in groups] == [True] * 4
    plain = parameter_groups(transformer, 0.1)
    decays = lambda found: {p: g["weight_decay"] for g in found for p in g["params"]}
    assert len(plain) == 2 and decays(groups) == decays(plain)


# --- checks and the plan ---


def test_muon_keeps_one_moment_of_the_linears_of_blocks(tiny: Run) -> None:
    """The other parameters have two; the plan counts both."""
    model = assemble_transformer(FAMILY["5b_i2v"])
    names = {p: name for name, p in model.named_parameters()}
    groups = parameter_groups(model, 0.1, is_for_muon=True)
    optimizer = build_optimizer({"type": "muon"}, groups)
    found = {1: 0, 2: 0}
    for group in optimizer.param_groups:
        for p in group["params"]:
            name = names.pop(p)
            kinds = [key for key in optimizer.state_of(p) if key.startswith("exp_avg")]
            is_matrix = name.startswith("blocks.") and "modulation" not in name and p.ndim == 2
            assert group.get("num_parts") == (None if not is_matrix else 3 if "qkv" in name else 1)
            assert group["weight_decay"] == (0.1 if p.ndim > 1 else 0)
            assert len(kinds) == 2 - is_matrix
            found[len(kinds)] += p.numel()
    assert all(found.values()) and not names
    config = tiny.config("deepspeed.optimizer.type=Muon")
    rules = rules_of(config.run.deepspeed, config.run.args, 1)
    assert lasting_state(model, rules)["moments"] == 4 * (found[1] + 2 * found[2])
    plain = step_bytes(model, replace(rules, is_muon=False))
    largest = model.blocks[0].fc1.weight.numel()
    assert plain + 2 * 2 * largest < step_bytes(model, rules) < plain + 20 * largest


def test_the_plan_counts_the_bytes(tiny: Run) -> None:
    def state_of(numel: int, *words: str, ranks: int = 2):
        config = tiny.config(*words)
        model: Any = torch.nn.Linear(numel, 1, bias=False, device="meta")
        model.runtime = BlockRuntime()
        return lasting_state(model, rules_of(config.run.deepspeed, config.run.args, ranks))

    plain, small = state_of(10**9), state_of(10**9, HOST, EIGHT)
    assert (plain["moments"], plain["EMA"]) == (4 * 10**9, 2 * 10**9)
    assert small["EMA"] == DEVICE_BYTES == 2**26
    blocks = -(-(10**9 // 2) // 256)
    assert small["moments"] == 2 * (10**9 // 2 + 2 * blocks)
    estimating = state_of(10**9, "deepspeed.optimizer.type=Prodigy", HOST)
    assert (estimating["moments"], estimating["EMA"]) == (4 * 4 * 10**9 // 2, DEVICE_BYTES)
    p = torch.nn.Parameter(torch.zeros(1000))
    args = tiny.config(HOST, EIGHT).run.args
    optimizer = build_optimizer({}, [{"params": [p]}], args=args)
    p.grad = torch.zeros(1000)
    optimizer.step()
    kept = sum(x.nbytes for key, x in optimizer.state[p].items() if key.startswith("exp_avg"))
    assert state_of(1000, EIGHT, ranks=1)["moments"] == kept
