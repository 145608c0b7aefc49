"""One comparison of bench.step: a block or a whole training step, ours against diffusers'.

Where both fit into memory together (a block; anything on a CPU), calls alternate, and the ratio is
the median over pairs, so that a busy machine slows both. A whole step on a GPU has it to itself:
ours, diffusers', diffusers', ours, each built anew; the ratio is that of the medians.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.harness.outcome import Row
from bench.harness.timing import spread, wait_for
from bench.steps.agreement import compare_sides
from bench.steps.step_models import LORA_RANK, MODELS, Variant, draw_batch, draw_block_input
from bench.steps.step_optimizers import UPDATES
from bench.steps.step_sides import SIDES, Side, free_memory
from cogfast.kernels.attention_backends import default_backend
from cogfast.kernels.block_kernels import KernelChoice
from cogfast.schema.arguments import PolicyChoice
from cogfast.train.distributed.memory_plan import describe
from cogfast.train.run.metrics import peak_flops, train_flops

What = Literal["step", "block"]
Mode = Literal["sft", "lora"]
Engine = Literal["eager", "compiled"]

_ROUNDS = ("ours", "diffusers", "diffusers", "ours")  # a drift of the clocks slows both
_MIN_SAMPLES = 3
_ATTENTION = re.compile(r"flash|fmha|sdpa|attention|softmax", re.IGNORECASE)
_BACKWARD = re.compile(r"backward|bwd|bprop", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Case:
    """What is compared; num_layers None: all of the model's."""

    model: str
    what: What = "step"
    mode: Mode = "sft"
    checkpointing: PolicyChoice = "none"
    engine: Engine = "eager"
    num_layers: int | None = None

    @property
    def layers(self) -> int:
        if self.what == "block":
            return 1
        return self.num_layers or MODELS[self.model][0].num_layers

    def __str__(self) -> str:
        return (
            f"{self.model} {self.what} {self.mode}, {self.layers} layers, "
            f"checkpointing {self.checkpointing}, {self.engine}"
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """How to measure. num_pairs: of alternating calls; seconds: of sampling for each side where that
    ends sooner."""

    device: torch.device
    dtype: torch.dtype
    kernels: KernelChoice = "triton"
    attention_backend: str | None = None
    num_pairs: int = 20
    seconds: float = 10.0
    sides: Sequence[str] = tuple(SIDES)
    # (model, mode, engine) -> figures and problems: compared once
    agreements: dict[tuple[str, str, str], tuple[Row, list[str]]] = field(default_factory=dict)

    def variant(self, case: Case) -> Variant:
        config, batch_size = MODELS[case.model]
        config = replace(config, num_layers=case.layers)
        if case.mode == "lora":
            # a scale of 1: the adapters count for something in the comparison
            config = replace(config, lora_rank=LORA_RANK, lora_alpha=float(LORA_RANK))
        return Variant(
            config, batch_size, self.dtype, self.device, self.kernels, self.attention_backend
        )


@dataclass(slots=True)
class _Prepared:
    """A side that is built and warm: what to time, and what was seen on the way."""

    call: Callable[[], None]
    figures: dict[str, object]


def measure_case(case: Case, plan: Plan) -> tuple[dict[str, object], list[str]]:
    """A row of figures, and what is wrong: sides that disagree are not timed."""
    variant = plan.variant(case)
    default = "PyTorch's choice"
    if plan.device.type == "cuda":
        default = default_backend(plan.device, plan.dtype, variant.config.head_width)
    row: dict[str, object] = {
        "model": case.model,
        "what": case.what,
        "mode": case.mode,
        "checkpointing": case.checkpointing,
        "engine": case.engine,
        "num_layers": case.layers,
        "num_layers_of_model": MODELS[case.model][0].num_layers,
        "batch_size": variant.batch_size,
        "num_tokens": variant.num_tokens,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "ours_kernels": plan.kernels,
        "ours_attention_backend": plan.attention_backend or default,
        "diffusers_attention_backend": "PyTorch's choice",
    }
    agreement, wrong = _agree(case, plan, variant)
    row |= agreement
    if wrong:
        return {**row, "not_timed": "the two sides disagree"}, [f"{case}: {p}" for p in wrong]
    problems: list[str] = []
    is_alternating = case.what == "block" or plan.device.type == "cpu"
    row["order"] = "pairs" if is_alternating else "rounds"
    times, seen = (_time_pairs if is_alternating else _time_rounds)(case, plan, variant)
    model_flops = train_flops(variant.config, variant.num_tokens) * variant.batch_size
    row["model_tflop"] = model_flops / 1e12
    for side, figures in seen.items():
        row |= {f"{side}_{key}": value for key, value in figures.items()}
        problems += [f"{case}: {side}: {figures['error']}"] if "error" in figures else []
    for side, samples in times.items():
        row |= {f"{side}_{key}": value for key, value in spread(samples).items()}
        seconds = row[f"{side}_median_ms"] * 1e-3
        row[f"{side}_model_tflop_per_s"] = model_flops / seconds / 1e12
        peak = peak_flops(plan.device)
        row[f"{side}_mfu"] = None if peak is None else model_flops / seconds / peak
    if len(times) == len(SIDES):
        row["ratio"] = _ratio(times["ours"], times["diffusers"], is_alternating)
    return row, problems


def _ratio(ours: Sequence[float], theirs: Sequence[float], are_pairs: bool) -> float:
    """Our time over diffusers': below 1 ours is the faster."""
    if are_pairs:
        return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return statistics.median(ours) / statistics.median(theirs)


def _agree(case: Case, plan: Plan, variant: Variant) -> tuple[Row, list[str]]:
    if len(plan.sides) < len(SIDES):
        return {"not_compared": "ours alone was asked for"}, []
    key = (case.model, case.mode, case.engine)
    if key not in plan.agreements:
        whole = replace(variant.config, num_layers=MODELS[case.model][0].num_layers)
        try:
            found = compare_sides(replace(variant, config=whole), case.engine == "compiled")
        except ImportError as error:
            found = {"not_compared": str(error)}, []
        plan.agreements[key] = found
        free_memory(plan.device)
    return plan.agreements[key]


def _time_pairs(
    case: Case, plan: Plan, variant: Variant
) -> tuple[dict[str, list[float]], dict[str, dict[str, object]]]:
    torch._dynamo.reset()  # each build counts as a recompilation of the same code, up to a limit
    prepared = {side: _prepare(side, case, plan, variant) for side in plan.sides}
    seen = {side: p.figures if isinstance(p, _Prepared) else p for side, p in prepared.items()}
    calls = {side: p.call for side, p in prepared.items() if isinstance(p, _Prepared)}
    times: dict[str, list[float]] = {side: [] for side in calls}
    started = time.perf_counter()
    for i in range(plan.num_pairs):
        is_late = time.perf_counter() - started > plan.seconds * len(calls)
        if is_late and i >= _MIN_SAMPLES:
            break
        for side in sorted(calls, reverse=i % 2 == 0):  # the sides take turns at going first
            times[side].append(_time(calls[side], plan.device))
    return times, seen


def _time_rounds(
    case: Case, plan: Plan, variant: Variant
) -> tuple[dict[str, list[float]], dict[str, dict[str, object]]]:
    times: dict[str, list[float]] = {}
    seen: dict[str, dict[str, object]] = {}
    for side in _ROUNDS:
        if side not in plan.sides or (side in seen and side not in times):  # or it does not fit
            continue
        torch._dynamo.reset()
        prepared = _prepare(side, case, plan, variant, seen.get(side))
        if not isinstance(prepared, _Prepared):
            seen[side] = prepared
            times.pop(side, None)
            continue
        seen[side] = prepared.figures
        samples = times.setdefault(side, [])
        started, num_before = time.perf_counter(), len(samples)
        while len(samples) - num_before < plan.num_pairs:
            is_late = time.perf_counter() - started > plan.seconds / 2
            if is_late and len(samples) - num_before >= _MIN_SAMPLES:
                break
            samples.append(_time(prepared.call, plan.device))
        del prepared
        free_memory(plan.device)
    return times, seen


def _time(call: Callable[[], None], device: torch.device) -> float:
    """Milliseconds until the device has done it."""
    wait_for(device)
    start = time.perf_counter()
    call()
    wait_for(device)
    return (time.perf_counter() - start) * 1e3


def _prepare(
    side: str,
    case: Case,
    plan: Plan,
    variant: Variant,
    seen: dict[str, object] | None = None,
) -> _Prepared | dict[str, object]:
    """Build a side and warm it up; figures that say why, where it cannot run. seen: the figures of
    an earlier build, which are not taken again."""
    free_memory(plan.device)
    try:
        return _build(side, case, plan, variant, seen)
    except ImportError as error:
        return {"unavailable": str(error)}
    except torch.OutOfMemoryError as error:
        figures = {"does_not_fit": str(error).splitlines()[0]}
    except Exception as error:  # whatever it is, the other side is still measured
        figures = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    # here the traceback, which holds the tensors of what failed, is gone
    free_memory(plan.device)
    return figures


def _build(
    side: str, case: Case, plan: Plan, variant: Variant, seen: dict[str, object] | None
) -> _Prepared | dict[str, object]:
    is_gpu = plan.device.type == "cuda"
    before = torch.cuda.memory_allocated(plan.device) if is_gpu else 0
    built = SIDES[side](variant)
    if case.checkpointing not in built.policies:
        return {"unavailable": f"checkpointing is one of {', '.join(built.policies)}"}
    built.use_checkpointing(case.checkpointing)
    if case.engine == "compiled":
        built.compile_blocks()
    call = _make_call(side, built, case, variant)
    call()  # compiles; makes the optimizer's state
    if case.checkpointing == "auto":
        call()  # it chooses after the second
    if seen is not None:
        return _Prepared(call, seen)
    if is_gpu:
        torch.cuda.reset_peak_memory_stats(plan.device)
    call()
    figures: dict[str, object] = {"checkpointing": describe(built.layer_policies)}
    if is_gpu:
        wait_for(plan.device)
        peak = torch.cuda.max_memory_allocated(plan.device) - before
        figures["peak_memory_gib"] = peak / 2**30
    figures["attention_kernels"] = name_attention(call, plan.device)
    free_memory(plan.device)
    return _Prepared(call, figures)


def _make_call(side: str, built: Side, case: Case, variant: Variant) -> Callable[[], None]:
    if case.what == "block":
        return built.block_call(draw_block_input(variant))
    batch = draw_batch(variant)
    update = UPDATES[side](built.network.parameters())

    def step() -> None:
        loss = (built.forward(batch) - batch.target).float().square().mean()
        loss.backward()
        built.after_backward()
        update.step()
        built.after_step()

    return step


def name_attention(call: Callable[[], object], device: torch.device) -> list[str]:
    """The kernels (on a CPU: operators) of attention that a call spends most time in, by a trace: the
    forward's, then the backward's."""
    is_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
    with profile(activities=activities) as trace:
        call()
        wait_for(device)
    kind = DeviceType.CUDA if is_gpu else DeviceType.CPU
    costs = {
        event.key: event.self_device_time_total if is_gpu else event.self_cpu_time_total
        for event in trace.key_averages()
        if event.device_type == kind and _ATTENTION.search(event.key)
    }
    ways = ([n for n in costs if bool(_BACKWARD.search(n)) is back] for back in (False, True))
    return [max(names, key=costs.__getitem__) for names in ways if names]


def best_rows(rows: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Each side at its best policy: the fastest that fits, of those that were measured.

    A row for each model, number of layers, block or step, and mode, against diffusers' eager model
    and against its compiled one; ours is the best of all.
    """
    keys = ("model", "num_layers", "num_layers_of_model", "what", "mode", "dtype")
    groups: dict[tuple, list[Mapping[str, object]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    best = []
    for group, members in groups.items():
        ours = _fastest(members, "ours")
        for engine in ("eager", "compiled"):
            theirs = _fastest([r for r in members if r["engine"] == engine], "diffusers")
            if ours is None or theirs is None:
                continue
            row = dict(zip(keys, group, strict=True)) | {"against": engine}
            for side, source in (("ours", ours), ("diffusers", theirs)):
                row[f"{side}_policy"] = (
                    f"checkpointing {source['checkpointing']}, {source['engine']}"
                )
                for key in ("median_ms", "model_tflop_per_s", "mfu", "peak_memory_gib"):
                    if f"{side}_{key}" in source:
                        row[f"{side}_{key}"] = source[f"{side}_{key}"]
            row["ratio"] = row["ours_median_ms"] / row["diffusers_median_ms"]
            best.append(row)
    return best


def _fastest(rows: Sequence[Mapping[str, object]], side: str) -> Mapping[str, object] | None:
    timed = [row for row in rows if f"{side}_median_ms" in row]
    return min(timed, key=lambda row: row[f"{side}_median_ms"], default=None)
