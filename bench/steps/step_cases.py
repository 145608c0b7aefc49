"""Measure one case of bench.step: a training step of cogfast and of diffusers.

On a CPU calls alternate and the ratio is the median over pairs, so that other load slows both sides.
On a GPU a side has the memory to itself: the sides are built in the order ours, diffusers, diffusers, ours, and the ratio is that of the
medians.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch

from bench.harness.outcome import Row
from bench.harness.timing import spread, wait_for
from bench.kernel_ops.attention_backends import kernels_by_time
from bench.steps.agreement import compare_sides
from bench.steps.step_models import LORA_RANK, MODELS, Options, Variant, draw_batch
from bench.steps.step_sides import SIDES, UPDATES, Policy, Side, free_memory
from cogfast.extensions.plan.gpus import peak_flops
from cogfast.train.watchers.model_flops import train_flops

Mode = Literal["sft", "lora", "sampling"]
Engine = Literal["eager", "compiled"]

# This order makes a drift of the clocks affect both sides.
_ROUNDS = (("ours",), ("diffusers",), ("diffusers",), ("ours",))
_MIN_SAMPLES = 3
_ATTENTION = re.compile(r"flash|fmha|sdpa|attention|softmax", re.IGNORECASE)
_BACKWARD = re.compile(r"backward|bwd|bprop", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Case:
    """A training step to measure, or a guided forward pass (mode sampling). num_layers None: all of the model."""

    model: str
    mode: Mode = "sft"
    checkpointing: Policy = "none"
    engine: Engine = "eager"
    num_layers: int | None = None
    options: Options = Options()

    @property
    def layers(self) -> int:
        return self.num_layers or MODELS[self.model][0].num_layers

    def __str__(self) -> str:
        words = [f"{self.model} {self.mode}", f"{self.layers} layers"]
        words += [f"checkpointing {self.checkpointing}", self.engine, str(self.options)]
        return ", ".join(filter(None, words))

    def describe(self) -> dict[str, object]:
        """Return the keys that every row has, also one without figures."""
        keys = ("model", "mode", "checkpointing", "engine")
        layers = {
            "num_layers": self.layers,
            "num_layers_of_model": MODELS[self.model][0].num_layers,
        }
        row = {"what": "step", **{key: getattr(self, key) for key in keys}, **layers}
        return row | {"options": str(self.options)} if str(self.options) else row


@dataclass(frozen=True, slots=True)
class Plan:
    """The measuring options of all cases.

    num_pairs: number of alternating calls. seconds: limit of the sampling time of each side.
    """

    device: torch.device
    dtype: torch.dtype
    num_pairs: int = 20
    seconds: float = 10.0
    # (model, is LoRA, engine, options) -> figures and problems, since each is compared only once
    agreements: dict[tuple, tuple[Row, list[str]]] = field(default_factory=dict)

    def variant(self, case: Case) -> Variant:
        config, batch_size = MODELS[case.model]
        config = replace(config, num_layers=case.layers)
        if case.mode == "lora":
            # a scale of 1, so that the adapters matter in the comparison
            config = replace(config, lora_rank=LORA_RANK, lora_alpha=float(LORA_RANK))
        batch_size = 2 if case.mode == "sampling" else batch_size
        return Variant(config, batch_size, self.dtype, self.device, case.options)


def measure_case(case: Case, plan: Plan) -> tuple[dict[str, object], list[str]]:
    """Measure a row of figures; return it with the problems.

    Sides that disagree are timed all the same, in a row that says so: of hundreds of gradients one may be
    just above its limit.
    """
    variant = plan.variant(case)
    row: dict[str, object] = {
        **case.describe(),
        "batch_size": variant.batch_size,
        "num_tokens": variant.num_tokens,
        "dtype": str(plan.dtype).removeprefix("torch."),
    }
    agreement, wrong = _agree(case, plan, variant)
    row |= agreement
    if wrong:
        row["disagrees"] = f"{len(wrong)} of the compared tensors, first {wrong[0]}"
    problems = [f"{case}: {text}" for text in wrong]
    is_alternating = plan.device.type == "cpu"
    row["order"] = "pairs" if is_alternating else "rounds"
    times, seen = time_sides(case, plan, variant, (tuple(SIDES),) if is_alternating else _ROUNDS)
    # Both sides count equal FLOPs; recomputation does not count.
    model_flops = train_flops(variant.config, variant.num_tokens) * variant.batch_size
    model_flops /= 3 if case.mode == "sampling" else 1
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
        ours, theirs = times["ours"], times["diffusers"]
        row["ratio"] = (
            statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            if is_alternating
            else statistics.median(ours) / statistics.median(theirs)
        )
    return row, problems


def _agree(case: Case, plan: Plan, variant: Variant) -> tuple[Row, list[str]]:
    if case.options.sparse or case.options.quantize_base != "none":
        return {"not_compared": "another model"}, []
    key = (case.model, case.mode == "lora", case.engine, case.options)
    if key not in plan.agreements:
        # compare_sides cuts the layers by itself.
        whole = replace(variant.config, num_layers=MODELS[case.model][0].num_layers)
        try:
            found = compare_sides(replace(variant, config=whole), case.engine == "compiled")
        except ImportError as error:
            found = {"not_compared": str(error)}, []
        except Exception as error:  # the sides are timed after any failure
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            found = {"not_compared": text}, [f"not compared: {text}"]
        plan.agreements[key] = found
        free_memory(plan.device)
    return plan.agreements[key]


def time_sides(
    case: Case, plan: Plan, variant: Variant, rounds: Sequence[Sequence[str]]
) -> tuple[dict[str, list[float]], dict[str, dict[str, object]]]:
    """Time the sides of each round in turn; return the milliseconds and the other figures of each side.

    The sides of a round are in memory together, and are freed after it.
    """
    times: dict[str, list[float]] = {}
    seen: dict[str, dict[str, object]] = {}
    for sides in rounds:
        seconds = plan.seconds * (len(sides) if len(rounds) == 1 else 0.5)
        # A side that did not run in an earlier round does not run in a later one.
        able = [side for side in sides if side in times or side not in seen]
        _time_round(case, plan, variant, able, seconds, times, seen)
        free_memory(plan.device)
    return times, seen


def _time_round(
    case: Case,
    plan: Plan,
    variant: Variant,
    sides: Sequence[str],
    seconds: float,
    times: dict[str, list[float]],
    seen: dict[str, dict[str, object]],
) -> None:
    """Build the sides, time them and add what is found to `times` and `seen`."""
    torch._dynamo.reset()  # each build counts as a recompilation, and their number is limited
    calls: dict[str, Callable[[], None]] = {}
    for side in sides:
        call, seen[side] = _prepare(side, case, plan, variant, seen.get(side))
        if call is None:
            times.pop(side, None)
        else:
            calls[side] = call
            times.setdefault(side, [])
    started = time.perf_counter()
    for i in range(plan.num_pairs):
        if i >= _MIN_SAMPLES and time.perf_counter() - started > seconds:
            break
        for side in sorted(calls, reverse=i % 2 == 0):  # the sides alternate in going first
            times[side].append(_time(calls[side], plan.device))


def _time(call: Callable[[], None], device: torch.device) -> float:
    """Return the milliseconds until the device has finished the call."""
    wait_for(device)
    start = time.perf_counter()
    call()
    wait_for(device)
    return (time.perf_counter() - start) * 1e3


def _prepare(
    side: str, case: Case, plan: Plan, variant: Variant, seen: dict[str, object] | None
) -> tuple[Callable[[], None] | None, dict[str, object]]:
    """Build a side and warm it up; return its call, or None with the reason if it cannot run.

    seen: the figures of an earlier build, which are kept.
    """
    free_memory(plan.device)
    try:
        return _build(side, case, plan, variant, seen)
    except ImportError as error:
        return None, {"unavailable": str(error)}
    except torch.OutOfMemoryError as error:
        figures = {"does_not_fit": str(error).splitlines()[0]}
    except Exception as error:  # the other side is measured after any failure
        figures = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    # Only here, outside the handler, the traceback no longer holds the tensors of the failed build.
    free_memory(plan.device)
    return None, figures


def _build(
    side: str, case: Case, plan: Plan, variant: Variant, seen: dict[str, object] | None
) -> tuple[Callable[[], None] | None, dict[str, object]]:
    is_gpu = plan.device.type == "cuda"
    before = torch.cuda.memory_allocated(plan.device) if is_gpu else 0
    built = SIDES[side](variant)
    if case.checkpointing not in built.policies:
        return None, {"lacks_policy": f"checkpointing is one of {', '.join(built.policies)}"}
    built.use_checkpointing(case.checkpointing)
    if case.engine == "compiled":
        built.compile_blocks()
    if case.mode == "sampling":
        built.network.requires_grad_(False).eval()
        call = torch.no_grad()(partial(built.forward, draw_batch(variant)))
    else:
        call = make_call(side, built, variant)
    call()  # compiles, and creates the optimizer state
    if seen is not None:
        return call, seen
    # Peak memory is that of a later step: the first one also compiles and allocates state.
    if is_gpu:
        torch.cuda.reset_peak_memory_stats(plan.device)
    call()
    figures: dict[str, object] = {}
    if is_gpu:
        wait_for(plan.device)
        peak = torch.cuda.max_memory_allocated(plan.device) - before
        figures["peak_memory_gib"] = peak / 2**30
    # The profiler slows a call, so this call is not timed. The slowest of forward and of backward count.
    kernels = [name for name in kernels_by_time(call, plan.device) if _ATTENTION.search(name)]
    ways = ([n for n in kernels if bool(_BACKWARD.search(n)) is back] for back in (False, True))
    figures["attention_kernels"] = [names[0] for names in ways if names]
    free_memory(plan.device)
    return call, figures


def make_call(side: str, built: Side, variant: Variant) -> Callable[[], None]:
    """Return the call to time."""
    # Every step takes one batch: data loading is not part of the comparison.
    batch = draw_batch(variant)
    update = UPDATES[side](built.network.parameters())

    def step() -> None:
        # Mean squared error in float32 on both sides, in place of the diffusion loss.
        (built.forward(batch) - batch.target).float().square().mean().backward()
        update.step()

    return step
