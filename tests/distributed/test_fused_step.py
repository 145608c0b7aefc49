"""cogfast's step of ZeRO 1 and 2 against DeepSpeed's own, on one process and on two.

Without clipping the two are equal bit for bit, also in bf16 and fp16: a 16-bit gradient is the same
number in fp32, and a loss scale is a power of two. With clipping the norm is summed in a different
order, so the clip factor may differ in its last bit.

In the runs of two processes, a gather writes its result only when it is waited for. Code that reads
weights without waiting reads old ones.
"""

import copy
import gc
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from cogfast.distributed import fused_step, zero_engine
from cogfast.distributed.fused_step import DeviceLossScaler, reason_for_stock_step
from cogfast.distributed.process_groups import ModelParallelUnit, ProcessGroups, start_processes
from cogfast.distributed.zero_engine import ZeroEngine
from cogfast.kernels.fused_ema_adam import FusedEmaAdam
from cogfast.model.transformer import BlockRuntime
from cogfast.train.checkpoint.folder import CheckpointFolder
from cogfast.train.checkpoint.write import CheckpointWriter
from cogfast.train.optimizer import parameter_groups
from cogfast.train.watchers.nonfinite import check_skipped
from tests.support.tiny_run import launch_ranks

STEPS, BAD_STEP = 6, 3  # the gradient of the bad step is not finite on one rank


@dataclass(frozen=True)
class Case:
    stage: int = 2
    dtype: str = "bf16"
    clip: float = 0.0
    accumulation: int = 1
    zero: dict = field(default_factory=dict)
    data_types: dict = field(default_factory=dict)
    fp16: dict = field(default_factory=dict)
    is_model_shared: bool = False  # by the two ranks; of `first` each has its own part

    @property
    def is_of_one_process(self) -> bool:
        """Whether one process runs it, too. Options of reductions are for several."""
        return not self.zero and not self.is_model_shared

    @property
    def name(self) -> str:
        words = [f"zero-{self.stage}", self.dtype, f"clip {self.clip}", f"x{self.accumulation}"]
        words += ["tensor parallel"] * self.is_model_shared
        options = {**self.zero, **self.data_types, **self.fp16}
        return ", ".join([*words, *[f"{k}={v}" for k, v in options.items()]])


# Every pair of values of stage, dtype, clip and accumulation. The clip of 0.05 bites at every step,
# that of 3 at some.
PAIRWISE = [
    Case(1, "bf16", 0.0, 1),
    Case(1, "fp32", 0.05, 3),
    Case(2, "bf16", 0.05, 3),
    Case(2, "fp32", 0.0, 3),
    Case(2, "fp32", 0.05, 1),
]
CASES = [
    *PAIRWISE,
    Case(2, zero={"overlap_comm": True}, accumulation=3),
    Case(2, zero={"contiguous_gradients": False}, accumulation=3),
    Case(zero={"reduce_scatter": False}, accumulation=3),
    Case(zero={"round_robin_gradients": True, "parameter_alignment": True}),
    Case(data_types={"grad_accum_dtype": "fp32"}, accumulation=3),
    Case(2, "fp16", 0.0, 3, fp16={"initial_scale_power": 8, "loss_scale_window": 2}),
    Case(2, "fp16", 3.0, fp16={"loss_scale": 100.0}),
    # The last one, because DeepSpeed keeps a reference to the mpu.
    Case(2, dtype="fp32", clip=0.05, is_model_shared=True),
]


# Gathers are under way when the step returns, or waited for at once: the same numbers.
EVENTFUL = [Case(2, "bf16", 0.05, 3), Case(1, "fp32", 0.05)]
# Sums of many micro-batches: what float32 sums are worth.
LONG_SUMS = [Case(accumulation=8, data_types={"grad_accum_dtype": "fp32"}), Case(accumulation=32)]
EVALUATED_AT, SAVED_AT = (1, 2, BAD_STEP), 4


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Network(nn.Module):
    """Parameters that end nowhere near a partition, one above the bucket, one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(13, 37), nn.LayerNorm(37), nn.Linear(37, 5)
        self.middle = nn.Linear(37, 37)
        self.unused = nn.Parameter(torch.ones(7, 3))
        self.blocks = nn.ModuleList()  # where checkpoints look for a frozen base
        self.runtime = BlockRuntime()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.norm(torch.tanh(self.first(x)))))

    def kept_buffers(self) -> dict[str, Tensor]:  # as DiffusionTransformer
        return {}


def make(case: Case, use_stock_step: bool) -> ZeroEngine:
    torch.manual_seed(0)
    network = Network().to(DTYPES[case.dtype])
    if case.dtype == "fp16":
        # DeepSpeed wants a CPU that computes in fp16; PyTorch computes in float32 and rounds.
        get_accelerator().is_fp16_supported = lambda: True
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clip,
        "steps_per_print": 2**31,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": case.dtype == "bf16", "check_grad_overflow": False},
        "fp16": {"enabled": case.dtype == "fp16", **case.fp16},
        "zero_optimization": {
            **{"stage": case.stage, "reduce_bucket_size": 600, "allgather_bucket_size": 600},
            **case.zero,
        },
        "data_types": case.data_types,
    }
    optimizer = FusedEmaAdam(parameter_groups(network, 0.1), lr=1e-2)
    mpu = None
    if case.is_model_shared:
        mpu = ModelParallelUnit(start_processes(tensor_size=2))
        for p in network.first.parameters():
            p.tensor_model_parallel = True
    # Earlier engines must not be collected in the middle of an import: what they then import ends in
    # a KeyError of Python 3.11's import locks.
    gc.collect()
    reason = (lambda *_: "a test") if use_stock_step else reason_for_stock_step
    with patch.object(zero_engine, "reason_for_stock_step", reason):
        engine = ZeroEngine(network, optimizer, config, mpu)
    if use_stock_step and case.dtype == "fp16":
        unscale_by_the_scale_of_the_loss(engine.zero)
    return engine


def unscale_by_the_scale_of_the_loss(zero) -> None:
    """Correct DeepSpeed's step where the scale doubles: it would divide the gradients by the new scale."""
    update, unscale, scales = zero._update_scale, zero.unscale_and_clip_grads, []

    def remember_and_update(overflow: bool) -> None:
        scales.append(zero.loss_scale)
        update(overflow)

    def unscale_by_the_last(gradients: list[Tensor], norm: Tensor) -> None:
        new, zero.loss_scale = zero.loss_scale, scales[-1]
        unscale(gradients, norm)
        zero.loss_scale = new

    zero._update_scale, zero.unscale_and_clip_grads = remember_and_update, unscale_by_the_last


def micro_batch_input(step: int, i: int) -> Tensor:
    """Return this rank's input, [2, 13]."""
    rank = torch.distributed.get_rank()
    random = torch.Generator().manual_seed(1000 * step + 10 * i + rank)
    return torch.randn(2, 13, generator=random)


def micro_batch(engine: ZeroEngine, step: int, i: int, is_bad: bool = False) -> Tensor:
    """Run one micro-batch of a step, backward included."""
    x = micro_batch_input(step, i)
    if is_bad and torch.distributed.get_rank() == 0:
        x[0, 0] = torch.inf
    dtype = next(engine.transformer.parameters()).dtype
    loss = 10 * engine(x.to(dtype)).float().square().mean()
    engine.backward(loss)
    return loss.detach()


def snapshot(engine: ZeroEngine) -> dict[str, Tensor]:
    """Return the model's weights, and this rank's masters, moments, EMA and counters."""
    engine.wait_for_weights()
    out = {f"model {n}": p.detach().clone() for n, p in engine.transformer.named_parameters()}
    for kind in ("master", *engine.state_kinds()):
        for i, s in enumerate(engine.slices):
            whole = {"master": engine.parts[s.part].detach(), **engine.state(s.part)}[kind]
            out[f"{kind} {i}"] = whole[s.offset :][: s.numel].clone()
    for part in range(len(engine.parts)):
        out[f"updates {part}"] = engine.state(part)["step"].clone()
    return out


def trajectory(case: Case, use_stock_step: bool) -> dict:
    """Return a run's losses, norms, counters and last state, and the states around a bad step."""
    engine = make(case, use_stock_step)
    assert engine.is_step_fused is not use_stock_step
    losses, norms, before = [], [], {}
    for step in range(STEPS):
        is_bad = step == BAD_STEP
        if is_bad:
            before = snapshot(engine)
        for i in range(case.accumulation):
            losses.append(micro_batch(engine, step, i, is_bad))
            engine.step(1e-2)
        norms.append(engine.grad_norm)
        if is_bad:
            after = snapshot(engine)
            assert engine.num_skipped_in_a_row == 1
    return {
        "losses": torch.stack(losses),
        "norms": torch.stack(norms),
        "skipped": engine.num_skipped,
        "in a row": engine.num_skipped_in_a_row,
        "bad step": (before, after),
        "state": snapshot(engine),
    }


_all_gather: Callable = dist.all_gather_into_tensor
EVENTS: list[str] = []
GATHERS: list = []


class LateGather:
    """A pending all-gather that writes its result when it is waited for."""

    def __init__(self, output: Tensor, given: Tensor, group: dist.ProcessGroup) -> None:
        self.output, self.landing = output, torch.empty_like(output)
        self.work = _all_gather(self.landing, given, group=group, async_op=True)
        EVENTS.append("gather starts")

    def wait(self) -> None:
        EVENTS.append("gather is waited for")
        self.work.wait()
        self.output.copy_(self.landing)


def gather_late(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> object:
    if not async_op:
        return _all_gather(output_tensor, input_tensor, group=group)
    GATHERS.append(LateGather(output_tensor, input_tensor, group))
    return GATHERS[-1]


def eventful_run(case: Case, waits: bool, groups: ProcessGroups, folder: Path) -> dict:
    """Run evaluations and a save right after steps. waits: wait for the weights after each step."""
    engine, found = make(case, False), {}
    x = torch.linspace(-1, 1, 13).to(next(engine.transformer.parameters()).dtype)
    writer = CheckpointWriter(CheckpointFolder(folder, "cogfast", groups), engine, keep_last=1)
    for step in range(STEPS):
        for i in range(case.accumulation):
            micro_batch(engine, step, i, step == BAD_STEP)
            engine.step(1e-2)
            if waits:
                engine.wait_for_weights()
        if step in EVALUATED_AT:
            kind = "master" if step == EVALUATED_AT[0] else "shadow"
            with torch.no_grad(), engine.weights(kind):
                found[f"weights at {step}"] = engine.transformer.middle.weight.clone()
                found[f"evaluated at {step}"] = engine(x)
        if step == SAVED_AT:
            writer.save(step, {})
    writer.wait()
    saved = load_file(folder / f"{SAVED_AT:08d}" / f"rank-{groups.rank:05d}.safetensors")
    return found | {f"saved {k}": v for k, v in saved.items()} | snapshot(engine)


def accumulated_gradient(case: Case) -> tuple[Tensor, Tensor]:
    """Return the gradient that the optimizer gets for this rank's partition, and the float64 sum of
    the same bf16 gradients, averaged over the ranks in bf16 as DeepSpeed does."""
    engine = make(case, False)
    parameters = {n: p for n, p in engine.transformer.named_parameters() if n != "unused"}
    exact = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in parameters.items()}
    twin = copy.deepcopy(engine.transformer)
    twin._forward_pre_hooks.clear()  # those of DeepSpeed
    for i in range(case.accumulation):
        x = micro_batch_input(0, i).bfloat16()
        loss = 10 * twin(x).float().square().mean() / case.accumulation
        gradients = torch.autograd.grad(loss, [twin.get_parameter(n) for n in parameters])
        for name, gradient in zip(parameters, gradients, strict=True):
            gradient = gradient / dist.get_world_size()
            dist.all_reduce(gradient)
            exact[name] += gradient.double()
    seen: list[Tensor] = []
    update = FusedEmaAdam.step
    FusedEmaAdam.step = lambda optimizer: (
        seen.extend(p.grad.double() for p in engine.parts),
        update(optimizer),
    )
    try:
        for i in range(case.accumulation):
            micro_batch(engine, 0, i)
            engine.step(1e-2)
    finally:
        FusedEmaAdam.step = update
    mine = [s for s in engine.slices if s.parameter in exact]
    got = [seen[s.part].narrow(0, s.offset, s.numel) for s in mine]
    want = [exact[s.parameter].flatten().narrow(0, s.start, s.numel) for s in mine]
    return torch.cat(got), torch.cat(want)


def rare_gradients(use_stock_step: bool) -> dict[str, Tensor]:
    """Run steps in which a layer has gradients in all, in one or in no micro-batches."""
    engine = make(Case(dtype="fp32", accumulation=2), use_stock_step)
    network = engine.transformer
    whole = network.forward
    without_middle = lambda x: network.last(network.norm(torch.tanh(network.first(x))))
    for step, use in enumerate(((True, True), (False, False), (False, True), (True, False))):
        for i, is_used in enumerate(use):
            network.forward = whole if is_used else without_middle
            micro_batch(engine, step, i)
            engine.step(1e-2)
    return snapshot(engine)


def order_of_events(use_stock_step: bool) -> list[str]:
    """Return the events of the second step, the host's work after it, and a forward pass."""
    engine = make(Case(), use_stock_step)
    engine.transformer.first.register_forward_hook(lambda *_: EVENTS.append("forward"))
    for step in range(2):
        micro_batch(engine, step, 0)
        EVENTS.clear()
        GATHERS.clear()
        engine.step(1e-2)
    EVENTS.append("step returns")
    end = time.monotonic() + 60
    while not all(gather.work.is_completed() for gather in GATHERS):
        assert time.monotonic() < end, "a gather does not end until it is waited for"
        time.sleep(0.001)
    EVENTS.append("host's work, beside which gathers end")
    micro_batch(engine, 2, 0)
    events = EVENTS.copy()
    engine.wait_for_weights()
    return events


def run_cases(out: Path) -> None:
    """Save every case's run with cogfast's step and with DeepSpeed's, {(case's name, is stock): ...},
    and those of EVENTFUL, {(case's name, "waits" or "late"): ...}."""
    groups = start_processes()
    cases = [c for c in CASES if groups.world_size > 1 or c.is_of_one_process]
    found: dict = {}
    if groups.world_size > 1:
        dist.all_gather_into_tensor = gather_late
        for case, waits in itertools.product(EVENTFUL, (True, False)):
            key = case.name, "waits" if waits else "late"
            folder = out / ", ".join(key)
            found[key] = eventful_run(case, waits, groups, folder)
        found["order"] = {stock: order_of_events(stock) for stock in (False, True)}
    found |= {(c.name, stock): trajectory(c, stock) for c in cases for stock in (False, True)}
    found["rare gradients"] = {stock: rare_gradients(stock) for stock in (False, True)}
    found |= {("sum", case.name): accumulated_gradient(case) for case in LONG_SUMS}
    torch.save(found, out / f"{groups.rank}-of-{groups.world_size}.pt")
    groups.close()


PLACES = {"one process": (1, 0), "two, rank 0": (2, 0), "two, rank 1": (2, 1)}


def by_case(cases: Sequence[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases])


def everywhere(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """Parametrize a test by `case` and `place`."""
    params = [
        pytest.param(case, place, id=f"{case.name}, {where}")
        for case in cases
        for where, place in PLACES.items()
        if place[0] > 1 or case.is_of_one_process
    ]
    return pytest.mark.parametrize(("case", "place"), params)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], dict]:
    """Return what the cases saved, by (number of processes, rank)."""
    out = tmp_path_factory.mktemp("fused step")
    gc.collect()
    gc.freeze()  # make() collects, which is to look at its own garbage alone
    run_cases(out)
    launch_ranks(2, "-m", "tests.distributed.test_fused_step", str(out))
    return {(n, rank): torch.load(out / f"{rank}-of-{n}.pt") for n, rank in PLACES.values()}


@pytest.mark.slow
@everywhere(CASES)
def test_step_equals_deepspeeds(runs: dict, case: Case, place: tuple[int, int]) -> None:
    ours, stock = (runs[place][case.name, is_stock] for is_stock in (False, True))
    # If the clip factor's last bit differs, a 16-bit weight may be rounded the other way.
    exact = {"rtol": 0, "atol": 0}
    near = exact if case.clip == 0 else {"rtol": 1e-5, "atol": 1e-7}
    if case.clip > 0 and case.dtype == "fp16":
        near = {"rtol": 2e-3, "atol": 1e-4}
    assert len(ours["norms"]) == STEPS
    good = ours["norms"].isfinite()
    assert good.tolist() == [step != BAD_STEP for step in range(STEPS)]
    torch.testing.assert_close(ours["norms"][good], stock["norms"][good], rtol=1e-6, atol=0)
    if case.clip > 0:
        assert (ours["norms"][good] > case.clip).any()
    torch.testing.assert_close(ours["losses"], stock["losses"], equal_nan=True, **near)
    assert ours["state"].keys() == stock["state"].keys()
    for name, value in stock["state"].items():
        torch.testing.assert_close(
            ours["state"][name], value, **near, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert ours["skipped"] == stock["skipped"] == 1
    assert ours["in a row"] == stock["in a row"] == 0
    # A gradient that is not finite changes nothing.
    before, after = ours["bad step"]
    assert before["updates 0"] == BAD_STEP and any(name.startswith("shadow") for name in before)
    for name, value in before.items():
        assert torch.equal(after[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_parameters_without_gradients_get_zeros(runs: dict, place: tuple[int, int]) -> None:
    """A gradient of an earlier step or micro-batch is not used again."""
    ours, stock = (runs[place]["rare gradients"][is_stock] for is_stock in (False, True))
    torch.testing.assert_close(ours, stock, rtol=0, atol=0)


@pytest.mark.slow
@by_case(LONG_SUMS)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_many_micro_batches_add_up_in_float32(
    runs: dict, case: Case, place: tuple[int, int]
) -> None:
    got, want = runs[place]["sum", case.name]
    error = ((got - want).norm() / want.norm()).item()
    if case.data_types:
        assert error < 1e-6
    else:  # in bf16; else the case above would hold without float32
        assert error > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@by_case(EVENTFUL)
def test_every_reader_waits_for_the_weights(runs: dict, case: Case, rank: int) -> None:
    """Forward passes, an evaluation, a skipped step and a save right after a step are bit for bit
    the same."""
    late, waits = (runs[2, rank][case.name, how] for how in ("late", "waits"))
    assert late.keys() == waits.keys()
    kinds = {name.split()[0] for name in late}
    assert kinds >= {"weights", "evaluated", "saved", "model", "master", "shadow", "updates"}
    for name, value in waits.items():
        assert torch.equal(late[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_the_weights_are_gathered_while_the_host_continues(runs: dict, rank: int) -> None:
    """Each of the two parameter groups has a gather; DeepSpeed's own step waits for it."""
    work = ["step returns", "host's work, beside which gathers end"]
    starts, waits = ["gather starts"] * 2, ["gather is waited for"] * 2
    order = runs[2, rank]["order"]
    assert order[False] == [*starts, *work, *waits, "forward"]
    assert order[True] == [*work, "forward"]


class NoHostReads(TorchDispatchMode):
    """Refuses ops that make the host wait for a tensor's value: item(), bool(), float(), an index."""

    REFUSED = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("aten::").partition(".")[0]
        assert name not in self.REFUSED, f"{name} reads a tensor on the host"
        return function(*args, **(kwargs or {}))


CLIPPED = Case(clip=0.05)
WITHOUT_READS = [
    CLIPPED,  # by DeepSpeed's step, which reads the norm: the guard works
    Case(1, clip=0.05, accumulation=3),
    Case(zero={"contiguous_gradients": False}),
    Case(dtype="fp16", clip=0.05, fp16={"initial_scale_power": 8}),
]


@by_case(WITHOUT_READS)
def test_step_reads_nothing_on_the_host(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps under NoHostReads, except FusedEmaAdam, which reads CPU tensors."""
    update = FusedEmaAdam.step

    def update_freely(optimizer: FusedEmaAdam) -> None:
        with _disable_current_modes():
            update(optimizer)

    monkeypatch.setattr(FusedEmaAdam, "step", update_freely)
    start_processes()
    engine = make(case, use_stock_step=case is CLIPPED)
    reads = pytest.raises(AssertionError, match="reads a tensor on the host")
    with reads if case is CLIPPED else nullcontext():
        for step in range(2):
            for i in range(case.accumulation):
                micro_batch(engine, step, i)
                with NoHostReads():
                    engine.step(1e-2)
        assert engine.num_skipped == 0


# The window of DeepSpeed's default, 1,000 steps, is too long for a test.
SCALING = {"loss_scale_window": 4, "hysteresis": 3}
OVERFLOWS = (3, 4, 5, 6, 11, 19, 20, 30, 31, 40)


def scaled_steps(
    case: Case, use_stock_step: bool, steps: range, start: dict | None = None
) -> tuple[list[dict], dict[str, Tensor]]:
    """Run steps of which some overflow; return the loss scaler's numbers after each, and the end."""
    engine, found = make(case, use_stock_step), []
    assert engine.is_step_fused is not use_stock_step
    engine.load_loss_scaler_state(start or {})
    for step in steps:
        micro_batch(engine, step, 0, is_bad=step in OVERFLOWS)
        engine.step(1e-2)
        skipped = {"skipped": engine.num_skipped.item(), "row": engine.num_skipped_in_a_row.item()}
        found.append(engine.loss_scaler_state() | skipped)
    return found, snapshot(engine)


def test_the_loss_scale_is_deepspeeds() -> None:
    """The scale, its counters, the skipped steps and the weights, over 45 steps."""
    start_processes()
    case = Case(dtype="fp16", fp16={"initial_scale_power": 8, **SCALING})
    ours, stock = (scaled_steps(case, is_stock, range(45)) for is_stock in (False, True))
    assert ours[0] == stock[0]
    scales = [numbers["cur_scale"] for numbers in ours[0]]
    assert {0.5, 1, 2} <= {b / a for a, b in itertools.pairwise(scales)}
    assert ours[0][-1]["skipped"] == len(OVERFLOWS)
    torch.testing.assert_close(ours[1], stock[1], rtol=0, atol=0)


@pytest.mark.parametrize("is_stock", [False, True], ids=["from DeepSpeed's", "to DeepSpeed's"])
def test_a_resumed_step_takes_the_other_ones_loss_scale(is_stock: bool) -> None:
    """A checkpoint that one step wrote continues under the other one, as JSON keeps it."""
    start_processes()
    case = Case(dtype="fp16", fp16={"initial_scale_power": 6, **SCALING})
    first, _ = scaled_steps(case, not is_stock, range(22))
    saved = json.loads(json.dumps(first[-1]))
    resumed, _ = scaled_steps(case, is_stock, range(22, 45), saved)
    whole, _ = scaled_steps(case, True, range(45))
    scale = lambda numbers: {k: v for k, v in numbers.items() if k not in ("skipped", "row")}
    assert [scale(n) for n in first + resumed] == [scale(n) for n in whole]


def test_a_resumed_run_takes_the_new_settings_of_the_loss_scale() -> None:
    """Only the scale and its counters are the checkpoint's, and only if both scales are dynamic."""
    start_processes()

    def steps(settings: dict, start: dict | None, count: range) -> dict:
        case = Case(dtype="fp16", fp16={"initial_scale_power": 6, **settings})
        return scaled_steps(case, False, count, start)[0][-1]

    before = steps({"loss_scale_window": 1000, "hysteresis": 1}, None, range(10))
    assert before["cur_scale"] == 2.0**2  # 4 of these steps overflow
    changed = {"loss_scale_window": 4, "hysteresis": 3, "min_loss_scale": 2}
    after = steps(changed, before, range(10, 11))
    keys = ("scale_window", "delayed_shift", "min_scale", "cur_scale", "cur_iter")
    assert [after[key] for key in keys] == [4, 3, 2, 2.0**2, 11]
    constant = steps({"loss_scale": 128}, before, range(10, 12))
    assert (constant["cur_scale"], constant["dynamic"]) == (128, False)
    dynamic = steps({"loss_scale_window": 1000}, constant, range(2, 5))
    assert (dynamic["cur_scale"], dynamic["dynamic"]) == (2.0**5, True)


def test_a_scale_at_its_minimum_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's step raises an exception; ours keeps the fact on the device."""
    start_processes()
    scaling = {"initial_scale_power": 1, "hysteresis": 1, "min_loss_scale": 1}
    case = Case(dtype="fp16", fp16=scaling)
    stock, ours = make(case, True), make(case, False)
    before = [part.detach().clone() for part in ours.parts]
    for is_spent in (False, True):
        for engine in (stock, ours):
            micro_batch(engine, 0, 0, is_bad=True)
        with pytest.raises(Exception, match="already at minimum") if is_spent else nullcontext():
            stock.step(1e-2)
        ours.step(1e-2)
        assert bool(ours.is_loss_scale_spent) is is_spent
    assert ours.loss_scaler_state()["cur_scale"] == 1
    assert all(torch.equal(part, old) for part, old in zip(ours.parts, before, strict=True))
    check_skipped(2, 2, False)
    with pytest.raises(RuntimeError, match="loss scale at its minimum .* by step 2; .* bf16"):
        check_skipped(2, 2, True)


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("hysteresis", [1, 2, 4])
def test_any_order_of_overflows_gives_deepspeeds_scale(hysteresis: int, consecutive: bool) -> None:
    start_processes()
    deepspeed.comm.init_distributed("gloo", auto_mpi_discovery=False)  # for the scale's log lines
    stock = DynamicLossScaler(
        2.0**12, 7, 1.0, hysteresis, consecutive, raise_error_at_min_scale=False
    )
    ours = DeviceLossScaler(stock, torch.device("cpu"))
    random = torch.Generator().manual_seed(hysteresis)
    seen = set()
    for step in range(400):
        # Long rows without an overflow, in which the scale grows, and short ones.
        overflow = torch.rand((), generator=random) < (0.02 if step % 200 < 120 else 0.5)
        stock.update_scale(bool(overflow))
        ours.update_scale(overflow)
        numbers = (ours.cur_scale, ours.cur_hysteresis, ours.last_overflow_iter)
        want = (stock.cur_scale, stock.cur_hysteresis, stock.last_overflow_iter)
        assert tuple(n.item() for n in numbers) == want
        seen.add(stock.cur_scale)
    assert len(seen) > 5 and ours.cur_iter == stock.cur_iter


@pytest.mark.parametrize(
    ("make_optimizer", "changes", "reason"),
    [
        (partial(torch.optim.AdamW, fused=True), {}, "AdamW reads float32 gradients"),
        (FusedEmaAdam, {"offload_optimizer": {"device": "cpu"}}, "the optimizer is offloaded"),
        (FusedEmaAdam, {"compute_grad_norm": False}, "compute_grad_norm is false"),
    ],
    ids=["another optimizer", "offload", "no norm"],
)
def test_deepspeeds_step_stays_where_ours_cannot(
    make_optimizer, changes: dict, reason: str, monkeypatch, log
) -> None:
    monkeypatch.setattr("tests.distributed.test_fused_step.FusedEmaAdam", make_optimizer)
    start_processes()
    engine = make(Case(zero=changes), False)
    assert not engine.is_step_fused and reason in log.text
    before = engine.parts[0].detach().clone()
    micro_batch(engine, 0, 0)
    engine.step(1e-2)
    assert not torch.equal(engine.parts[0], before)


def test_another_deepspeed_keeps_its_step(monkeypatch, log) -> None:
    """Private names may have changed; the weights are those of our step."""
    weights = []
    for is_known in (True, False):
        if not is_known:
            monkeypatch.setattr(fused_step, "version", lambda name: "0.20.0")
        start_processes()
        engine = make(Case(clip=0.05), False)
        assert engine.is_step_fused is is_known
        micro_batch(engine, 0, 0)
        engine.step(1e-2)
        weights.append(engine.parts[0].detach().clone())
    assert log.text.count("DeepSpeed 0.20.0 may differ from 0.19.x") == 1
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    run_cases(Path(sys.argv[1]))
