"""One block, and one whole training step, of ours against diffusers' model with the same weights:
python -m bench.step [--model 5b --what step block --mode sft lora ...] [--out FILE].

A step is forward, mean squared error, backward, clipping, AdamW and an EMA of the weights. Several
values of an option are measured in turn. First the two sides' outputs and gradients are compared,
and what disagrees is not timed. The rows at the same checkpointing policy come first, then each
side at its best.

Model TFLOP count three forward passes (LoRA: two of the frozen linears, three of adapters and
attention), never recomputation; MFU is their rate over the device's dense bf16 peak.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import get_args

import torch

from bench.harness.machine import describe_machine
from bench.harness.outcome import Bars, Outcome, Row, table
from bench.steps.step_cases import (
    Case,
    Engine,
    Mode,
    Plan,
    What,
    best_rows,
    measure_case,
)
from bench.steps.step_models import MODELS
from bench.steps.step_sides import SIDES, free_memory
from cogfast.kernels.block_kernels import KernelChoice
from cogfast.schema.arguments import PolicyChoice

SHOWN = (
    *("model", "what", "mode", "checkpointing", "engine", "num_layers", "ratio"),
    *(
        f"{side}_{key}"
        for key in ("median_ms", "p10_ms", "p90_ms", "model_tflop_per_s", "mfu")
        for side in SIDES
    ),
    *(f"{side}_{key}" for key in ("peak_memory_gib", "attention_kernels") for side in SIDES),
    *(f"{side}_{key}" for key in ("does_not_fit", "unavailable", "error") for side in SIDES),
    *("not_timed", "error"),
)
# Until one has been measured; a compilation of forward and backward costs most of it.
_FIRST_GUESS_SECONDS = {"eager": 30.0, "compiled": 90.0}


def measure_cases(
    cases: Sequence[Case],
    plan: Plan,
    deadline: float = math.inf,
    keep: Callable[[Outcome], None] | None = None,
) -> Outcome:
    """Rows of all cases, the best policies among the numbers.

    deadline: of time.perf_counter; a case that is unlikely to end before it is left out, with a
    note. keep: given what there is after every case.
    """
    rows: list[Row] = []
    problems: list[str] = []
    skipped: list[str] = []
    took: dict[tuple[str, str], float] = {}
    outcome = Outcome()
    for case in cases:
        kind = (case.what, case.engine)
        needed = took.get(kind, _FIRST_GUESS_SECONDS[case.engine])
        started = time.perf_counter()
        if started + needed > deadline:
            skipped.append(f"{case}: needs about {needed:.0f} s, {deadline - started:.0f} s left")
            print(f"  skipped: {skipped[-1]}", flush=True)
        else:
            row, wrong = _measure_safely(case, plan)
            took[kind] = max(took.get(kind, 0.0), time.perf_counter() - started)
            rows.append({**row, "seconds": round(time.perf_counter() - started, 1)})
            problems += wrong
            print(f"  {case}: ratio {row.get('ratio', '-')}, {took[kind]:.0f} s", flush=True)
        shown = [key for key in SHOWN if any(row.get(key) is not None for row in rows)]
        numbers = {"best": best_rows(rows), "skipped": skipped}
        outcome = Outcome(numbers, rows, shown, problems, _bars(rows))
        if keep is not None:
            keep(outcome)
    return outcome


def _measure_safely(case: Case, plan: Plan) -> tuple[dict[str, object], list[str]]:
    try:
        return measure_case(case, plan)
    except Exception as error:  # whatever it is, the other cases are still measured
        text = f"{type(error).__name__}: {error}".splitlines()[0]
    free_memory(plan.device)
    named = {key: getattr(case, key) for key in ("model", "what", "mode", "checkpointing")}
    row = {**named, "engine": case.engine, "num_layers": case.layers, "error": text}
    layers, dtype = MODELS[case.model][0].num_layers, str(plan.dtype).removeprefix("torch.")
    return {**row, "num_layers_of_model": layers, "dtype": dtype}, [f"{case}: {text}"]


def _bars(rows: Sequence[Row]) -> Bars | None:
    """Model TFLOP/s of both sides, where both were timed."""
    drawn = [row for row in rows if "ratio" in row]
    if not drawn:
        return None
    labels = [
        f"{r['what']} {r['mode']} {r['engine']}\n"
        f"checkpointing {r['checkpointing']}, layers: {r['num_layers']}"
        for r in drawn
    ]
    series = {side: [r[f"{side}_model_tflop_per_s"] for r in drawn] for side in SIDES}
    return Bars(f"{drawn[0]['model']}, {drawn[0]['dtype']}", "model TFLOP/s", labels, series)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    many = lambda name, choices, default: parser.add_argument(
        name, nargs="+", choices=get_args(choices), default=[default]
    )
    parser.add_argument("--model", choices=MODELS, default="tiny")
    many("--what", What, "step")
    many("--mode", Mode, "sft")
    many("--checkpointing", PolicyChoice, "none")
    many("--engine", Engine, "eager")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="cuda: bfloat16")
    parser.add_argument("--kernels", choices=get_args(KernelChoice), default="triton")
    parser.add_argument("--attention-backend", help="ours alone; left out: PyTorch's choice")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0, help="of sampling per case and side")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args(argv)
    if arguments.layers is not None and not (
        1 <= arguments.layers <= MODELS[arguments.model][0].num_layers
    ):
        parser.error(f"--layers: {arguments.model} has {MODELS[arguments.model][0].num_layers}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU")
    default_dtype = "float32" if arguments.device == "cpu" else "bfloat16"

    torch.set_num_threads(arguments.threads)
    plan = Plan(
        device=torch.device(arguments.device),
        dtype=getattr(torch, arguments.dtype or default_dtype),
        kernels=arguments.kernels,
        attention_backend=arguments.attention_backend,
        num_pairs=arguments.pairs,
        seconds=arguments.seconds,
        sides=("ours",) if arguments.ours_only else tuple(SIDES),
    )
    options = (arguments.what, arguments.mode, arguments.engine, arguments.checkpointing)
    cases = [
        Case(arguments.model, what, mode, checkpointing, engine, arguments.layers)
        for what, mode, engine, checkpointing in product(*options)
    ]
    outcome = measure_cases(cases, plan)
    print(table(replace(outcome, numbers={})))
    for best in outcome.numbers["best"]:
        print("  best: " + ", ".join(f"{key} {value}" for key, value in best.items()))
    for problem in outcome.problems:
        print(f"  WRONG: {problem}")
    if arguments.out:
        report = {
            "piece": "step",
            **describe_machine(plan.device),
            "threads": arguments.threads,
            "numbers": outcome.numbers,
            "rows": outcome.rows,
            "problems": outcome.problems,
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
