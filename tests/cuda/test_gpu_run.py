"""Pieces of bench.gpu_run at small sizes: their numbers mean nothing here, but none may break."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cuda.null_device import start

# A wrong number is a problem of a piece, and so is an exception that it has caught.
_EXCEPTION = re.compile(r"\b(?!Assertion)[A-Z]\w*(Error|Exception)\b")
_MINUTES = "30"  # beyond what a piece needs


# Pieces that show nothing where nothing is computed -> the reason
NEED_A_DEVICE = {
    "kernel_tests": "compares what kernels compute, and here they compute nothing",
    "data": "DALI decodes on the video engine of a GPU; tests/bench has the CPU readers",
}


PIECES = ["facts", "rates", "matmul", "goldens", "attention"]
SKIPPED = [
    pytest.param(name, marks=pytest.mark.skip(reason=reason))
    for name, reason in NEED_A_DEVICE.items()
]


@pytest.mark.parametrize("piece", PIECES + SKIPPED)
def test_piece(piece: str, tmp_path: Path) -> None:
    done = start(
        ["-m", "bench.gpu_run", piece, "--tiny", "--minutes", _MINUTES, "--out", str(tmp_path)]
    )
    why = reason(tmp_path / f"{piece}.json")
    assert why is None, f"{why}\n{done.stderr[-4000:]}"


def reason(report_file: Path) -> object:
    """Return why a piece broke; None if it is complete, with right numbers or wrong ones."""
    if not report_file.is_file():
        return "no report"
    report = json.loads(report_file.read_text())
    if "error" in report or not report.get("is_complete"):
        return report.get("error") or report
    return [problem for problem in report["problems"] if _EXCEPTION.search(problem)] or None
