"""Time a training step of cogfast and of diffusers' model with the same weights:
python -m bench.step [--model 5b --mode sft lora ...] [--out FILE].

A step is forward, mean squared error, backward, clipping, AdamW and an EMA of the weights. All values
of an option are measured in turn. Outputs and gradients of the two sides are compared first; a case
that disagrees is marked, and the exit status is 1. Both sides
of a row have the same checkpointing policy.

Model TFLOP count three forward passes (LoRA: two for the frozen linears, three for adapters and
attention) and no recomputation; MFU is their rate over the dense bf16 peak of the device.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import get_args

import torch

from bench.harness.command import finish, parser_of
from bench.harness.outcome import Outcome, Row
from bench.steps.step_cases import Case, Engine, Mode, Plan, measure_case
from bench.steps.step_models import MODELS
from bench.steps.step_sides import SIDES, Policy, free_memory

# Columns of the printed table.
SHOWN = ["model", "mode", "checkpointing", "engine", "num_layers", "ratio"]
_OF_SIDES = ("median_ms", "p10_ms", "p90_ms", "model_tflop_per_s", "mfu", "peak_memory_gib")
_OF_SIDES += ("attention_kernels", "does_not_fit", "lacks_policy", "unavailable", "error")
SHOWN += [f"{side}_{key}" for key in _OF_SIDES for side in SIDES]
SHOWN += ["disagrees", "error"]
# Seconds of a case on an H100, and more for each layer: all layers are compiled, one after the other.
_SECONDS = {"eager": (16.0, 0.5), "compiled": (18.0, 1.1)}
_COMPARISON_SECONDS = 20.0  # before the first case of a mode and engine


def measure_cases(
    cases: Sequence[Case],
    plan: Plan,
    deadline: float = math.inf,
    keep: Callable[[Outcome], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Outcome:
    """Measure all cases.

    deadline: a time of `clock`, in seconds; a case that would probably end later is skipped, with a
    note. keep: called with the outcome so far after every case.
    """
    rows: list[Row] = []
    problems: list[str] = []
    skipped: list[str] = []
    slowest, compared = 1.0, set()  # measured seconds over guessed ones
    outcome = Outcome()
    for case in cases:
        fixed, of_layer = _SECONDS[case.engine]
        kind = (case.mode, case.engine, case.options)
        guess = fixed + of_layer * case.layers + _COMPARISON_SECONDS * (kind not in compared)
        needed, started = slowest * guess, clock()
        if started + needed > deadline:
            skipped.append(f"{case}: needs about {needed:.0f} s, {deadline - started:.0f} s left")
            print(f"  skipped: {skipped[-1]}", flush=True)
        else:
            row, wrong = _measure_safely(case, plan)
            seconds = clock() - started
            slowest = max(slowest, seconds / guess)
            compared.add(kind)
            rows.append({**row, "seconds": round(seconds, 1)})
            problems += wrong
            print(f"  {case}: ratio {row.get('ratio', '-')}, {seconds:.0f} s", flush=True)
        shown = [key for key in SHOWN if any(row.get(key) is not None for row in rows)]
        outcome = Outcome({"skipped": skipped}, rows, shown, problems)
        if keep is not None:
            keep(outcome)
    return outcome


def _measure_safely(case: Case, plan: Plan) -> tuple[dict[str, object], list[str]]:
    try:
        return measure_case(case, plan)
    except Exception as error:  # the other cases are measured after any failure
        text = f"{type(error).__name__}: {error}".splitlines()[0]
    free_memory(plan.device)
    dtype = str(plan.dtype).removeprefix("torch.")
    return {**case.describe(), "dtype": dtype, "error": text}, [f"{case}: {text}"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    many = lambda name, choices, default: parser.add_argument(
        name, nargs="+", choices=get_args(choices), default=[default]
    )
    parser.add_argument("--model", choices=MODELS, default="tiny")
    many("--mode", Mode, "sft")
    many("--checkpointing", Policy, "none")
    many("--engine", Engine, "eager")
    parser.add_argument("--layers", type=int, help="number of layers; default: all of the model")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="default: float32 on cpu, bfloat16 on cuda"
    )
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="sampling time per case and side"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args(argv)
    most = MODELS[arguments.model][0].num_layers
    if arguments.layers is not None and not 1 <= arguments.layers <= most:
        parser.error(f"--layers must be 1 to {most} for {arguments.model}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU")
    default_dtype = "float32" if arguments.device == "cpu" else "bfloat16"

    torch.set_num_threads(arguments.threads)
    plan = Plan(
        device=torch.device(arguments.device),
        dtype=getattr(torch, arguments.dtype or default_dtype),
        num_pairs=arguments.pairs,
        seconds=arguments.seconds,
    )
    options = (arguments.mode, arguments.engine, arguments.checkpointing)
    cases = [
        Case(arguments.model, mode, checkpointing, engine, arguments.layers)
        for mode, engine, checkpointing in product(*options)
    ]
    outcome = measure_cases(cases, plan)
    return finish(outcome, arguments.out, "step", arguments.device, threads=arguments.threads)


if __name__ == "__main__":
    sys.exit(main())
