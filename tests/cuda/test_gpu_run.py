"""Pieces of bench.gpu_run at small sizes: their numbers mean nothing here, but none may break."""

import json
import re
from pathlib import Path

import pytest

from bench import gpu_run
from tests.cuda.null_device import start

# A wrong number is a problem of a piece, and so is an exception that it has caught.
_EXCEPTION = re.compile(r"\b(?!Assertion)[A-Z]\w*(Error|Exception)\b")
_MINUTES = "30"  # beyond what a piece needs
# Each allocation is new memory, whose bytes are 0, so that no number is refused as not finite.
_ZEROS = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
ENVIRONMENT = {
    "train": _ZEROS,
    "data_runs": _ZEROS,
    # A host that reads device memory crashes there, and a collective of gloo that does is found.
    "tensor_parallel": {"NULLCUDA_GUARD": "1"},
    # To print a tensor, PyTorch counts its numbers on the device: what lies there may be any count.
    "kernel_tests": {"PYTEST_ADDOPTS": "--assert=plain --tb=native"},
}


@pytest.mark.parametrize("piece", gpu_run.PIECES)
def test_piece(piece: str, tmp_path: Path) -> None:
    arguments = [piece, "--tiny", "--minutes", _MINUTES, "--out", str(tmp_path)]
    done = start(["-m", "tests.cuda.gpu_piece", *arguments], **ENVIRONMENT.get(piece, {}))
    why = reason(tmp_path / f"{piece}.json")
    assert why is None, f"{why}\n{done.stderr[-4000:]}"


def reason(report_file: Path) -> object:
    """Return why a piece broke; None if it is complete, with right numbers or wrong ones."""
    if not report_file.is_file():
        return "no report"
    report = json.loads(report_file.read_text())
    if "(null runtime)" not in report["machine"]:
        return f"the results look like those of {report['machine']}"
    if "error" in report or not report.get("is_complete"):
        return report.get("error") or report
    return [problem for problem in report["problems"] if _EXCEPTION.search(problem)] or None
