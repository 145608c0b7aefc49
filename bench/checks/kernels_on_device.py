"""Run the kernel tests that need a GPU, a process for each file: pytest -k 'gpu or cuda'."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

from bench.harness.outcome import Outcome, Settings

_ROOT = Path(__file__).resolve().parents[2]
_TESTS = (
    "test_adaptive_layernorm.py",
    "test_qk_norm_rope3d.py",
    "test_gelu.py",
    "test_add_low_rank.py",
    "test_ema_adam_kernel.py",
    "test_attention_backends.py",
    "quantized/test_quantized_linear.py",
)
_FILE_SECONDS = 150
_LEAST_SECONDS = 10
_LINES = 15  # of pytest's output, shown if it wrote no report


def run_kernel_tests(settings: Settings) -> Outcome:
    """Run the tests; one row per file, one problem per failure. On a CPU every test is skipped."""
    outcome = judge([])
    reports: list[str] = []
    problems: list[str] = []
    for name in _TESTS:
        seconds = min(_FILE_SECONDS, settings.seconds_left)
        if seconds < _LEAST_SECONDS:
            problems.append(f"{name}: left out, no time")
        else:
            try:
                reports.append(_run(name, settings, seconds))
            except (RuntimeError, subprocess.TimeoutExpired) as error:  # the other files still run
                problems.append(f"{name}: {error}")
        outcome = judge(reports, problems)
        settings.keep(outcome)
    return outcome


def _run(name: str, settings: Settings, seconds: float) -> str:
    """Run the tests of a file and return pytest's report."""
    environment = dict(os.environ)
    if settings.device.type == "cuda":
        environment["COGFAST_TEST_ON_GPU"] = "1"  # conftest.py hides the GPU otherwise
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-k", "gpu or cuda"]
        command += [f"--junitxml={report}", "-p", "no:cacheprovider", f"tests/kernels/{name}"]
        done = subprocess.run(
            command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=seconds
        )
        if not report.is_file():
            end = "\n".join((done.stdout + done.stderr).splitlines()[-_LINES:])
            raise RuntimeError(f"pytest wrote no report, exit status {done.returncode}\n{end}")
        return report.read_text()


def judge(reports: Sequence[str], problems: Sequence[str] = ()) -> Outcome:
    """Turn JUnit reports into counts, one row per file and one problem per failure."""
    counts: dict[str, dict[str, float]] = {}
    problems = list(problems)
    for case in (case for report in reports for case in ET.fromstring(report).iter("testcase")):
        name, file = case.get("name", ""), case.get("classname", "")
        row = counts.setdefault(file, {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0})
        row["seconds"] += float(case.get("time", 0))
        # A fixture that fails is an <error>, an assertion is a <failure>.
        wrong = [*case.iter("failure"), *case.iter("error")]
        result = "failed" if wrong else "passed" if case.find("skipped") is None else "skipped"
        row[result] += 1
        for each in wrong:
            message = (each.get("message") or "no message").splitlines()[0]
            problems.append(f"{file}::{name}: {message}")
    rows = [{"file": file, **row} for file, row in counts.items()]
    totals = {key: sum(row[key] for row in rows) for key in ("passed", "failed", "skipped")}
    return Outcome(totals, rows, ("file", "passed", "failed", "skipped", "seconds"), problems)
