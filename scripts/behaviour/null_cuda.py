"""Launches, waits and peak bytes of training steps of full size on the null CUDA runtime of tests/cuda.

They need an environment with a CUDA build of PyTorch, which `make test-cuda` makes in .venv-cuda.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

from scripts.behaviour.difference import ROOT
from scripts.behaviour.forks import Command, Ended, run

# The backend "auto" is chosen by times, which mean nothing there. Sparse attention has one.
_BY_TIME = "args.attention_backend=auto"
_PRELOAD = ("triton", "deepspeed", "transformers", "torch._dynamo", "torch.utils.tensorboard")
_PRELOAD += ("cogfast.train.trainer",)


def environment() -> Path | None:
    """Return the virtual environment, if it and its runtime exist."""
    venv = ROOT / os.environ.get("TEST_CUDA_VENV", ".venv-cuda")
    is_there = (venv / "bin" / "python").exists() and _runtime(venv).exists()
    return venv if is_there else None


def _runtime(venv: Path) -> Path:
    return ROOT / "build" / "null_cuda" / venv.name


def steps(work: Path) -> dict[str, dict] | None:
    """Return what the steps of each layout did; None without the environment."""
    venv = environment()
    if venv is None:
        return None
    from tests.cuda.cases import CASES

    jobs, names = {}, {}
    for number, case in enumerate(CASES):
        if _BY_TIME in case.more and "sparse" not in case.more:
            continue
        names[str(number)] = f"null runtime {case.name}"
        words = [case.model, case.mode, ".", *case.words, f"--card={case.card}"]
        devices = {
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(case.ranks))),
            "NULLCUDA_DEVICES": str(case.ranks),
        }
        jobs[str(number)] = [Command(words, case.ranks, "tests.cuda.training_case", devices)]
    folder, runtime = work / "null", _runtime(venv)
    common = {
        "LD_PRELOAD": str(runtime / "libnullcuda.so"),
        "LD_LIBRARY_PATH": str(runtime),
        "TRITON_LIBCUDA_PATH": str(runtime),
        "TRITON_CACHE_DIR": str(runtime / "triton"),
        "NULLCUDA_COPY_MAX": "1000000",  # as tests/cuda/null_device.py
        # The server asks for a GPU without a context of CUDA, which forked processes could not use.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "DS_ACCELERATOR": "cuda",
    }
    python = str(venv / "bin" / "python")
    # The case reads configs/ of its current folder.
    ended = run(jobs, folder, ROOT / "configs", python, common, _PRELOAD, copies="configs")
    return {names[job]: _facts(folder / job, ended[job][0]) for job in jobs}


def _facts(folder: Path, ended: Ended) -> dict:
    if not ended.is_success:
        return {"statuses": ended.statuses, "text of the error": ended.outputs[0].splitlines()[-3:]}
    files = sorted(folder.glob("[0-9]*.json"))
    reports = [json.loads(file.read_text()) for file in files]
    return {f"rank {i}": _of_rank(report) for i, report in enumerate(reports)}


def _of_rank(report: dict) -> dict[str, object]:
    """Return lists of a number per step, and how often each step waited where.

    The first two steps also load kernels, or compile them where Triton's cache lacks them.
    """
    steps = report["steps"][2:]
    return {
        "launches": [step["launches"] for step in steps],
        "allocations": [step["allocations"] for step in steps],
        "pinned_allocations": [step["pinned_allocations"] for step in steps],
        "peak_bytes": [step["peak"] for step in steps],
        "waits": [dict(Counter(map(_without_place, step["waits"]))) for step in steps],
    }


def _without_place(wait: str) -> str:
    """Leave out which of cogfast's functions waits: these move."""
    call, _, place = wait.partition(" in ")
    return f"{call} in cogfast" if place.startswith("cogfast/") else wait
