"""Check and measure everything that needs a GPU: python -m bench.gpu_run PART --out DIR.

PART is a piece or a set of pieces, each set under 9 minutes on one H100 or H200:
    first   facts, rates, matmul, goldens, train, attention
    ops     kernel_tests, tensor_parallel, op_times, quantized, attention, launches
    2b, 5b, 1.5-5b, 1.5-5b-i2v  blocks and training steps against the model of diffusers
    videos  data, data_runs
Each piece prints a table and writes DIR/<piece>.json after every row. Pieces that --minutes leaves no
time for are skipped. The exit status is 1 if a piece fails; the others still run.
docs/benchmarks.md lists what each piece measures and needs.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench.harness.expected import compare
from bench.harness.machine import describe_machine
from bench.harness.outcome import Outcome, Row, Settings, draw, table
from cogfast.diagnostics.timing import wait_for
from cogfast.train.plan.gpus import find_gpu

_TRACE_LINES = 12
_DEFAULT_MINUTES = 9.0
_LEAST_SECONDS = 10.0  # a piece is skipped when less is left
# Kept back from --minutes for starting, for plots and for a case that takes longer than expected.
_RESERVE_SECONDS = 20.0


# piece -> "module:function". A module is imported when its piece runs: a package that one piece needs
# and the machine lacks must not stop the others.
PIECES = {
    "facts": "bench.harness.device_facts:list_facts",
    "rates": "bench.harness.rates:measure_rates",
    "matmul": "bench.kernel_ops.matmul_shapes:measure_matmuls",
    "goldens": "bench.checks.goldens_on_device:check_goldens",
    "train": "bench.checks.training_on_device:check_training",
    "tensor_parallel": "bench.checks.tensor_parallel_on_device:check_tensor_parallel",
    "attention": "bench.kernel_ops.attention_backends:measure_attention",
    "kernel_tests": "bench.checks.kernels_on_device:run_kernel_tests",
    "op_times": "bench.ops:measure_ops",
    "quantized": "bench.kernel_ops.quantized_linears:measure_quantized",
    "launches": "bench.ops:sweep_launches",
    "2b": "bench.steps.step_on_device:measure_2b",
    "5b": "bench.steps.step_on_device:measure_5b",
    "1.5-5b": "bench.steps.step_on_device:measure_15_5b",
    "1.5-5b-i2v": "bench.steps.step_on_device:measure_15_5b_i2v",
    "data": "bench.data:measure_data",
    "data_runs": "bench.clips.data_runs:measure_data_runs",
}
# Attention comes late: it runs kernels of other packages, the likeliest to break the CUDA context. A
# part writes at most eight files.
PARTS: dict[str, Sequence[str]] = {
    "first": ("facts", "rates", "matmul", "goldens", "train", "attention"),
    "ops": ("kernel_tests", "tensor_parallel", "op_times", "quantized", "attention", "launches"),
    "videos": ("data", "data_runs"),
}


def load_piece(name: str) -> Callable[[Settings], Outcome]:
    """Import the function of a piece."""
    module, _, function = PIECES[name].partition(":")
    return getattr(importlib.import_module(module), function)


def run_piece(name: str, settings: Settings, out: Path) -> bool:
    """Run a piece, print its table and write its JSON; return True if nothing failed."""
    print(name, flush=True)
    report: dict[str, object] = {
        "piece": name,
        "is_tiny": settings.is_tiny,
        "torch": torch.__version__,
        **describe_machine(settings.device),
    }
    if settings.device.type == "cuda":
        report["gpu"] = torch.cuda.get_device_name(settings.device)
    started = time.perf_counter()

    def write(outcome: Outcome, is_complete: bool) -> None:
        seconds = round(time.perf_counter() - started, 2)
        answer = {key: getattr(outcome, key) for key in ("numbers", "rows", "problems")}
        text = json.dumps(
            {**report, "is_complete": is_complete, "seconds": seconds, **answer}, indent=1
        )
        path = out / f"{name}.json"
        path.with_suffix(".new").write_text(text + "\n")
        path.with_suffix(".new").replace(
            path
        )  # atomic: a killed run leaves the old file or the new one

    kept = [Outcome()]

    def keep(outcome: Outcome) -> None:
        kept[0] = outcome
        write(outcome, is_complete=False)

    try:
        if settings.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()  # other processes of this piece use the same GPU
        kept[0] = load_piece(name)(replace(settings, keep=keep))
        wait_for(settings.device)  # raise errors of the last kernel here, not in the next piece
    except Exception as error:  # the other pieces must run after any failure
        lines = traceback.format_exc().splitlines()
        report["error"] = {
            "type": type(error).__name__,
            "message": str(error),
            "trace": lines[-_TRACE_LINES:],
        }
        print("\n".join(f"  {line}" for line in lines[-_TRACE_LINES:]))
    outcome = kept[0]
    write(outcome, is_complete="error" not in report)
    print(table(outcome))
    if outcome.bars is not None:
        print(f"  {draw(outcome.bars, out / f'{name}.png')}")
    if settings.device.type == "cuda":
        memory_gib = torch.cuda.get_device_properties(settings.device).total_memory / 2**30
        for line in expectations(outcome.rows, str(report["gpu"]), memory_gib):
            print(f"  {line}")
    for problem in outcome.problems:
        print(f"  WRONG: {problem}")
    is_well = "error" not in report and not outcome.problems
    seconds = time.perf_counter() - started
    print(f"  {'ok' if is_well else 'FAILED'}, {seconds:.1f} s", flush=True)
    return is_well


def expectations(rows: Sequence[Row], gpu_name: str, memory_gib: float) -> list[str]:
    """Describe measured training steps beside what is expected of the GPU; nothing without a figure."""
    gpu = find_gpu(gpu_name, memory_gib)
    return [] if gpu is None else compare(rows, gpu)


def _skip(name: str, settings: Settings, out: Path) -> None:
    """Write a note into the file of a skipped piece, unless an earlier run left results there."""
    note = f"{max(0.0, settings.seconds_left):.0f} s left; run this piece alone"
    path = out / f"{name}.json"
    if not path.exists():
        path.write_text(json.dumps({"piece": name, "skipped": note}, indent=1) + "\n")
    print(f"{name}\n  skipped: {note}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=[*PARTS, *PIECES])
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the JSON files and plots"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test this program")
    parser.add_argument(
        "--minutes", type=float, default=_DEFAULT_MINUTES, help="skip pieces that would end later"
    )
    arguments = parser.parse_args(argv)
    started = time.perf_counter()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU; use --device cpu --tiny to try the program")
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("--device cpu: the full sizes take hours on a CPU; add --tiny")

    if arguments.device == "cuda":
        # Must be set before the first allocation: it avoids failures by fragmentation.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    arguments.out.mkdir(parents=True, exist_ok=True)
    deadline = started + 60 * arguments.minutes - _RESERVE_SECONDS
    settings = Settings(torch.device(arguments.device), arguments.tiny, deadline)
    failed, skipped = [], []
    for name in PARTS.get(arguments.part, (arguments.part,)):
        if settings.seconds_left < _LEAST_SECONDS:
            _skip(name, settings, arguments.out)
            skipped.append(name)
        elif not run_piece(name, settings, arguments.out):
            failed.append(name)
    if skipped:
        print(f"skipped: {', '.join(skipped)}")
    print(f"failed: {', '.join(failed)}" if failed else "all well")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
