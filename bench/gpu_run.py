"""Everything that needs a GPU to be checked or measured: python -m bench.gpu_run PART --out DIR.

PART is a piece (facts, rates, matmul, goldens, train, attention) or a set of them: `first` is all,
under 8 minutes on one H200. Each piece prints a table and writes DIR/<piece>.json, units in the
keys. A piece that fails says so there, the others still run, and the exit status is 1.

It needs torch and matplotlib; goldens and train also omegaconf, einops, safetensors and, train alone,
deepspeed and tensorboard. No network, no video decoder, no weights.

Without a GPU, `--device cpu --tiny` runs the same code at small sizes, as a test of this program;
those numbers mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

from bench.outcome import Outcome, Settings, draw, table
from bench.timing import wait_for

_TRACE_LINES = 12


# The imports stand inside: what one piece needs and the machine lacks must not stop the others.
def _facts(settings: Settings) -> Outcome:
    from bench.device_facts import tell_facts

    return tell_facts(settings)


def _rates(settings: Settings) -> Outcome:
    from bench.rates import measure_rates

    return measure_rates(settings)


def _matmul(settings: Settings) -> Outcome:
    from bench.matmul_shapes import measure_matmuls

    return measure_matmuls(settings)


def _goldens(settings: Settings) -> Outcome:
    from bench.goldens_on_device import check_goldens

    return check_goldens(settings)


def _train(settings: Settings) -> Outcome:
    from bench.training_on_device import check_training

    return check_training(settings)


def _attention(settings: Settings) -> Outcome:
    from bench.attention_backends import measure_attention

    return measure_attention(settings)


PIECES: dict[str, Callable[[Settings], Outcome]] = {
    "facts": _facts,
    "rates": _rates,
    "matmul": _matmul,
    "goldens": _goldens,
    "train": _train,
    "attention": _attention,  # last: others' kernels, the likeliest to break the CUDA context
}
PARTS: dict[str, Sequence[str]] = {"first": tuple(PIECES)}


def run_piece(name: str, settings: Settings, out: Path) -> bool:
    """Run a piece, print its table and write its JSON; whether all was well."""
    print(name, flush=True)
    report: dict[str, object] = {
        "piece": name,
        "device": str(settings.device),
        "is_tiny": settings.is_tiny,
        "torch": torch.__version__,
        "started_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    started = time.perf_counter()
    outcome = Outcome()
    try:
        if settings.device.type == "cuda":
            report["gpu"] = torch.cuda.get_device_name(settings.device)
            gc.collect()
            torch.cuda.empty_cache()  # training has processes of its own on the same GPU
        outcome = PIECES[name](settings)
        wait_for(settings.device)  # an error of the last kernel belongs to this piece
        print(table(outcome))
    except Exception as error:  # whatever it is, it must not keep the other pieces from running
        lines = traceback.format_exc().splitlines()
        report["error"] = {
            "type": type(error).__name__,
            "message": str(error),
            "trace": lines[-_TRACE_LINES:],
        }
        print("\n".join(f"  {line}" for line in lines[-_TRACE_LINES:]))
    report["seconds"] = round(time.perf_counter() - started, 2)
    report |= {"numbers": outcome.numbers, "rows": outcome.rows, "problems": outcome.problems}
    (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    if outcome.bars is not None:
        print(f"  {draw(outcome.bars, out / f'{name}.png')}")
    for problem in outcome.problems:
        print(f"  WRONG: {problem}")
    is_well = "error" not in report and not outcome.problems
    print(f"  {'ok' if is_well else 'FAILED'}, {report['seconds']} s", flush=True)
    return is_well


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
    arguments = parser.parse_args(words)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU; use --device cpu --tiny to try the program")
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("--device cpu: the full sizes take hours on a CPU; add --tiny")

    arguments.out.mkdir(parents=True, exist_ok=True)
    settings = Settings(torch.device(arguments.device), arguments.tiny)
    failed = []
    for name in PARTS.get(arguments.part, (arguments.part,)):
        if not run_piece(name, settings, arguments.out):
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all well")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
