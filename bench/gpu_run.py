"""Everything that needs a GPU to be checked or measured: python -m bench.gpu_run PART --out DIR.

PART is a piece or a set of them, each under 9 minutes on one H100 or H200:
    first      facts, rates, matmul, goldens, train, attention
    ops        kernel_tests, tensor_parallel, op_times, attention, launches: the kernels' tests in bf16,
               fp16 and fp32, two ranks that share a model and the GPU, the kernels' times against the
               copy rate and the peers, every attention backend, and launch configurations
    2b, 5b     one block and one training step against diffusers' model
    videos     data, data_runs: H.264 read by DALI and on the CPU; `cogfast cache` and 2B training on it
Each piece prints a table and writes DIR/<piece>.json, units in the keys, again after every row: a
run that is killed leaves what it had. What --minutes has no room for is left out, with a note there.
A piece that fails says so in its file, the others still run, and the exit status is 1.

It needs torch and matplotlib; goldens, tensor_parallel and train also omegaconf, einops, safetensors and, train alone,
deepspeed and tensorboard; kernel_tests and op_times pytest. Peers that are not installed are named.
videos takes DALI and decord, and PyAV where ./bench_clips does not hold the clips that bench.data made.
No network, no weights.

Without a GPU, `--device cpu --tiny` runs the same code at small sizes, as a test of this program;
those numbers mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench.harness.machine import describe_machine
from bench.harness.outcome import Outcome, Settings, draw, table
from bench.harness.timing import wait_for

_TRACE_LINES = 12
_DEFAULT_MINUTES = 9.0
_LEAST_SECONDS = 10.0  # a piece needs more than that
_RESERVE_SECONDS = (
    20.0  # of a part's minutes: for starting, for plots, for a case that takes longer
)


# The imports stand inside: what one piece needs and the machine lacks must not stop the others.
def _facts(settings: Settings) -> Outcome:
    from bench.harness.device_facts import tell_facts

    return tell_facts(settings)


def _rates(settings: Settings) -> Outcome:
    from bench.harness.rates import measure_rates

    return measure_rates(settings)


def _matmul(settings: Settings) -> Outcome:
    from bench.kernel_ops.matmul_shapes import measure_matmuls

    return measure_matmuls(settings)


def _goldens(settings: Settings) -> Outcome:
    from bench.checks.goldens_on_device import check_goldens

    return check_goldens(settings)


def _train(settings: Settings) -> Outcome:
    from bench.checks.training_on_device import check_training

    return check_training(settings)


def _tensor_parallel(settings: Settings) -> Outcome:
    from bench.checks.tensor_parallel_on_device import check_tensor_parallel

    return check_tensor_parallel(settings)


def _attention(settings: Settings) -> Outcome:
    from bench.kernel_ops.attention_backends import measure_attention

    return measure_attention(settings)


def _kernel_tests(settings: Settings) -> Outcome:
    from bench.checks.kernels_on_device import run_kernel_tests

    return run_kernel_tests(settings)


def _op_times(settings: Settings) -> Outcome:
    from bench.ops import measure_ops

    return measure_ops(settings)


def _launches(settings: Settings) -> Outcome:
    from bench.ops import sweep_launches

    return sweep_launches(settings)


def _data(settings: Settings) -> Outcome:
    from bench.data import measure_data

    return measure_data(settings)


def _data_runs(settings: Settings) -> Outcome:
    from bench.clips.data_runs import measure_data_runs

    return measure_data_runs(settings)


def _2b(settings: Settings) -> Outcome:
    from bench.steps.step_on_device import measure_2b

    return measure_2b(settings)


def _5b(settings: Settings) -> Outcome:
    from bench.steps.step_on_device import measure_5b

    return measure_5b(settings)


PIECES: dict[str, Callable[[Settings], Outcome]] = {
    "facts": _facts,
    "rates": _rates,
    "matmul": _matmul,
    "goldens": _goldens,
    "train": _train,
    "tensor_parallel": _tensor_parallel,
    "attention": _attention,
    "kernel_tests": _kernel_tests,
    "op_times": _op_times,
    "launches": _launches,
    "2b": _2b,
    "5b": _5b,
    "data": _data,
    "data_runs": _data_runs,
}
# Attention comes late: others' kernels, the likeliest to break the CUDA context. A part writes no
# more than eight files.
PARTS: dict[str, Sequence[str]] = {
    "first": ("facts", "rates", "matmul", "goldens", "train", "attention"),
    "ops": ("kernel_tests", "tensor_parallel", "op_times", "attention", "launches"),
    "videos": ("data", "data_runs"),
}


def run_piece(name: str, settings: Settings, out: Path) -> bool:
    """Run a piece, print its table and write its JSON; whether all was well."""
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
        path.with_suffix(".new").replace(path)  # whole, whenever the run is killed

    kept = [Outcome()]

    def keep(outcome: Outcome) -> None:
        kept[0] = outcome
        write(outcome, is_complete=False)

    try:
        if settings.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()  # training has processes of its own on the same GPU
        kept[0] = PIECES[name](replace(settings, keep=keep))
        wait_for(settings.device)  # an error of the last kernel belongs to this piece
    except Exception as error:  # whatever it is, it must not keep the other pieces from running
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
    for problem in outcome.problems:
        print(f"  WRONG: {problem}")
    is_well = "error" not in report and not outcome.problems
    seconds = time.perf_counter() - started
    print(f"  {'ok' if is_well else 'FAILED'}, {seconds:.1f} s", flush=True)
    return is_well


def _skip(name: str, settings: Settings, out: Path) -> None:
    """Leave a note in the file of a piece that there is no time for; what an earlier run left stays."""
    note = f"{max(0.0, settings.seconds_left):.0f} s left; run this piece alone"
    path = out / f"{name}.json"
    if not path.exists():
        path.write_text(json.dumps({"piece": name, "skipped": note}, indent=1) + "\n")
    print(f"{name}\n  skipped: {note}", flush=True)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=__doc__.partition("\n\n")[2]
    )
    parser.add_argument("part", choices=[*PARTS, *PIECES])
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the JSON files and plots"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes: a test of this program")
    parser.add_argument(
        "--minutes", type=float, default=_DEFAULT_MINUTES, help="leave out what would end later"
    )
    arguments = parser.parse_args(words)
    started = time.perf_counter()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU; use --device cpu --tiny to try the program")
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("--device cpu: the full sizes take hours on a CPU; add --tiny")

    if arguments.device == "cuda":  # before the first allocation: what fits, fits in pieces too
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
