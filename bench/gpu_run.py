"""Check and measure everything that needs a GPU: python -m bench.gpu_run PART --out DIR.

PART is a piece or a set of pieces; docs/benchmarks.md says what they measure and need. Each prints a table and
writes DIR/<piece>.json after every row. The exit status is 1 if a piece fails; the others still run.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench.harness import command
from bench.harness.machine import describe_machine
from bench.harness.outcome import Outcome, Settings
from bench.harness.timing import wait_for

_TRACE_LINES = 12
_MINUTES = 9.0
_LEAST_SECONDS = 10.0  # a piece is skipped when less is left
# Kept back from --minutes for starting and for a case that takes longer than expected.
_RESERVE_SECONDS = 20.0


# piece -> "module:function". A module is imported when its piece runs: a package that one piece needs
# and the machine lacks must not stop the others.
PIECES = {
    "facts": "bench.harness.machine:list_facts",
    "rates": "bench.harness.rates:measure_rates",
    "goldens": "bench.checks.goldens_on_device:check_goldens",
    "train": "bench.checks.training_on_device:check_training",
    "tensor_parallel": "bench.checks.tensor_parallel_on_device:check_tensor_parallel",
    "attention": "bench.kernel_ops.attention_backends:measure_attention",
    "kernel_tests": "bench.checks.kernels_on_device:run_kernel_tests",
    "op_times": "bench.ops:measure_ops",
    "products": "bench.kernel_ops.products:measure_products",
    "2b": "bench.steps.step_on_device:measure_2b",
    "5b": "bench.steps.step_on_device:measure_5b",
    "sampling": "bench.steps.step_on_device:measure_sampling",
    "diffusers_kernels": "bench.steps.diffusers_kernels:measure_kernels",
    "run": "bench.clips.data_runs:measure_run",
    "1.5-5b": "bench.steps.step_on_device:measure_15_5b",
    "1.5-5b-i2v": "bench.steps.step_on_device:measure_15_5b_i2v",
    "data": "bench.data:measure_data",
    "data_runs": "bench.clips.data_runs:measure_data_runs",
}
# {part: {piece: the most minutes that it gets, or None for what is left}}, in the order in which they run
PARTS: dict[str, Mapping[str, float | None]] = {
    # The first six fill the README's table, in 12 minutes of an H100; those that decide more come before others.
    "short": {
        "facts": 0.5,
        "rates": 0.5,
        "2b": 4.5,
        "5b": 4.5,
        "attention": 1.6,
        "op_times": 2.5,
        "goldens": 0.8,
        "run": 3.0,
        "products": 1.2,
        "sampling": 2.5,
        "diffusers_kernels": 2.0,
        "kernel_tests": 3.0,
        "train": 1.4,
    },
    "ops": dict.fromkeys(("kernel_tests", "tensor_parallel", "op_times", "products", "attention")),
    "videos": dict.fromkeys(("data", "data_runs")),
}
_PART_MINUTES = {"short": 28.0}
_LEAST_SHARE = 0.7  # of its minutes: a piece that gets less is skipped


def load_piece(name: str) -> Callable[[Settings], Outcome]:
    """Import the function of a piece."""
    module, _, function = PIECES[name].partition(":")
    return getattr(importlib.import_module(module), function)


def run_piece(name: str, settings: Settings, out: Path) -> bool:
    """Run a piece, print its table and write its JSON; return True if nothing failed."""
    print(name, flush=True)
    stem = "-".join([name, *settings.cases]).replace(" ", "_").replace("/", "_")
    report: dict[str, object] = {
        "piece": name,
        "is_tiny": settings.is_tiny,
        "torch": torch.__version__,
        **describe_machine(settings.device),
    }
    started = time.perf_counter()

    def write(outcome: Outcome, is_complete: bool) -> None:
        seconds = round(time.perf_counter() - started, 2)
        more = {**report, "is_complete": is_complete, "seconds": seconds}
        command.write(out / f"{stem}.json", outcome, **more)

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
    command.show(outcome)
    is_well = "error" not in report and not outcome.problems
    seconds = time.perf_counter() - started
    print(f"  {'ok' if is_well else 'FAILED'}, {seconds:.1f} s", flush=True)
    return is_well


def run_apart(name: str, arguments: argparse.Namespace, minutes: float) -> bool:
    """Run a piece in a process for at most `minutes`; return True if nothing failed.

    What the piece has kept stays in its file if its process crashes or takes longer.
    """
    path = arguments.out / f"{name}.json"
    path.unlink(missing_ok=True)
    words = [sys.executable, "-m", "bench.gpu_run", name, "--out", str(arguments.out)]
    words += ["--device", arguments.device, "--minutes", f"{minutes:.2f}"]
    words += ["--tiny"] * arguments.tiny
    process = subprocess.Popen(words, start_new_session=True)
    try:
        status = process.wait(60 * minutes)
        end = f"its process ended with status {status}"
    except subprocess.TimeoutExpired:
        status, end = None, f"it took more than {minutes:.1f} minutes"
    finally:
        if process.poll() is None:  # its own processes, such as pytest and ranks, end with it
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    report = json.loads(path.read_text()) if path.exists() else {"piece": name}
    if "error" in report or report.get("is_complete"):
        return status == 0
    report["error"] = {"type": "ended", "message": end, "trace": []}
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{name}\n  FAILED: {end}; {len(report.get('rows', ()))} rows are kept", flush=True)
    return False


def run_part(arguments: argparse.Namespace, deadline: float) -> tuple[list[str], list[str]]:
    """Run the pieces of a part one after the other; return those that failed and those skipped."""
    failed, skipped = [], []
    for name, most in PARTS[arguments.part].items():
        path = arguments.out / f"{name}.json"
        left = (deadline - time.perf_counter()) / 60
        report = json.loads(path.read_text()) if path.exists() else {}
        if report.get("is_complete") and report.get("is_tiny") == arguments.tiny:
            print(f"{name}\n  {path} is complete; delete it to measure again", flush=True)
            failed += [name] if report["problems"] else []
        elif left < max(_LEAST_SHARE * (most or 0), (_LEAST_SECONDS + _RESERVE_SECONDS) / 60):
            note = f"{60 * max(0.0, left):.0f} s left; run this piece alone"
            print(f"{name}\n  skipped: {note}", flush=True)
            skipped.append(name)
            if not report:  # an earlier run may have left rows
                path.write_text(json.dumps({"piece": name, "skipped": note}, indent=1) + "\n")
        elif not run_apart(name, arguments, left if most is None else min(most, left)):
            failed.append(name)
    with tarfile.open(arguments.out / "results.tar", "w") as tar:  # one file to bring home
        for path in sorted(arguments.out.glob("*.json")):
            tar.add(path, path.name)
    return failed, skipped


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser_of(__doc__)
    parser.add_argument("part", choices=[*PARTS, *PIECES])
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test this program")
    minutes = (
        f"skip what would end later; default: {_MINUTES:g}, for short {_PART_MINUTES['short']:g}"
    )
    parser.add_argument("--minutes", type=float, help=minutes)
    cases = "of one step's piece: those whose line has a word, into a file of their own"
    parser.add_argument("--cases", nargs="+", default=[], metavar="WORD", help=cases)
    arguments = parser.parse_args(argv)
    started = time.perf_counter()
    if arguments.cases and "step_on_device" not in PIECES.get(arguments.part, ""):
        parser.error(f"--cases: {arguments.part} has no cases of bench.step")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU; use --device cpu --tiny to try the program")
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("--device cpu: the full sizes take hours on a CPU; add --tiny")

    if arguments.device == "cuda":
        # Must be set before the first allocation: it avoids failures by fragmentation.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    arguments.out.mkdir(parents=True, exist_ok=True)
    deadline = started + 60 * (arguments.minutes or _PART_MINUTES.get(arguments.part, _MINUTES))
    failed, skipped = [], []
    if arguments.part in PARTS:
        failed, skipped = run_part(arguments, deadline)
    else:
        device = torch.device(arguments.device)
        settings = Settings(device, arguments.tiny, deadline - _RESERVE_SECONDS, arguments.cases)
        if not run_piece(arguments.part, settings, arguments.out):
            failed.append(arguments.part)
    if skipped:
        print(f"skipped: {', '.join(skipped)}")
    print(f"failed: {', '.join(failed)}" if failed else "all well")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
