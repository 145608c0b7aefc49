"""Run the kernel tests that need a GPU, a process for each file: pytest -k 'gpu or cuda'."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.harness.outcome import Outcome, Settings

_ROOT = Path(__file__).resolve().parents[2]
_TESTS = (
    "kernels/test_adaptive_layernorm.py",
    "kernels/test_qk_norm_rope3d.py",
    "kernels/test_gelu.py",
    "kernels/test_add_low_rank.py",
    "kernels/test_ema_adam_kernel.py",
    "kernels/test_attention_backends.py",
    "extensions/memory/test_quantized_linear.py",
    "extensions/sparse/test_sparse.py",
)
_FILE_SECONDS = 150
_LEAST_SECONDS = 10
_LINES = 15  # of pytest's output, shown if it has no summary
# "FAILED path::test - message" or "ERROR path::test - message", and "1 failed, 8 passed in 1.20s"
_WRONG = re.compile(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - (.*))?$", re.MULTILINE)
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")
_KINDS = ("passed", "failed", "skipped")


def run_kernel_tests(settings: Settings) -> Outcome:
    """Run the tests; one row per file, one problem per failure. On a CPU every test is skipped."""
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    outcome = Outcome()
    for name in _TESTS:
        seconds = min(_FILE_SECONDS, settings.seconds_left)
        if seconds < _LEAST_SECONDS:
            problems.append(f"{name}: left out, no time")
        else:
            try:
                row, wrong = _run(name, settings, seconds)
                rows.append(row)
                problems += wrong
            except (RuntimeError, subprocess.TimeoutExpired) as error:  # the other files still run
                problems.append(f"{name}: {error}")
        totals = {kind: sum(row[kind] for row in rows) for kind in _KINDS}
        outcome = Outcome(totals, list(rows), ("file", *_KINDS, "seconds"), list(problems))
        settings.keep(outcome)
    return outcome


def _run(name: str, settings: Settings, seconds: float) -> tuple[dict[str, Any], list[str]]:
    """Run the tests of a file; return its row and a sentence for each failure."""
    environment = dict(os.environ, COLUMNS="300")  # pytest cuts messages at the terminal's width
    if settings.device.type == "cuda":
        environment["COGFAST_TEST_ON_GPU"] = "1"  # conftest.py hides the GPU otherwise
    command = [sys.executable, "-m", "pytest", "-rfE", "-k", "gpu or cuda"]
    command += ["-p", "no:cacheprovider", f"tests/{name}"]
    started = time.perf_counter()
    done = subprocess.run(
        command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=seconds
    )
    lines = done.stdout.splitlines() or [""]
    counts = dict.fromkeys(_KINDS, 0)
    for number, kind in _COUNT.findall(lines[-1]):
        counts["failed" if kind == "error" else kind] += int(number)
    if not any(counts.values()):
        end = "\n".join((done.stdout + done.stderr).splitlines()[-_LINES:])
        raise RuntimeError(f"pytest counted no tests, exit status {done.returncode}\n{end}")
    wrong = [f"{test}: {text or 'no message'}" for test, text in _WRONG.findall(done.stdout)]
    return {"file": name, **counts, "seconds": round(time.perf_counter() - started, 2)}, wrong
