"""Run the tests marked soak, print how long each took, and write the result to docs/soak.json.

The file has the commit, the minutes, the counts, the failed tests, and the seconds of each file of
tests, so that the next run starts with the longest files (conftest.py reads it).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from collections import Counter
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "docs" / "soak.json"
PYTEST = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "soak", "--durations=0"]


def output_of(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "CPU")
    return f"{os.cpu_count()} cores, {name}"


def summary(report: Path, seconds: float) -> dict:
    """Count the results of a JUnit report, and add up the seconds of each file."""
    counts, files, failed = Counter(), Counter(), []
    for case in xml.parse(report).iter("testcase"):
        is_failed = case.find("failure") is not None or case.find("error") is not None
        kind = (
            "failed" if is_failed else "skipped" if case.find("skipped") is not None else "passed"
        )
        counts[kind] += 1
        files[case.get("classname", "").replace(".", "/") + ".py"] += float(case.get("time", 0))
        if is_failed:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    return {
        "commit": output_of("git", "rev-parse", "HEAD"),
        "has_changes": bool(output_of("git", "status", "--porcelain", "--untracked-files=no")),
        "date": date.today().isoformat(),
        "machine": processor(),
        "minutes": round(seconds / 60, 1),
        **{kind: counts[kind] for kind in ("passed", "failed", "skipped")},
        "failed_tests": failed,
        "seconds_of_files": {name: round(time) for name, time in files.most_common()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULT, help="default: docs/soak.json")
    given, words = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        report, start = Path(folder) / "soak.xml", time.monotonic()
        command = [sys.executable, "-m", "pytest", *PYTEST, f"--junitxml={report}", *words]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if report.is_file():
            result = summary(report, time.monotonic() - start)
            given.out.write_text(json.dumps(result, indent=2) + "\n")
            print(f"{given.out}: {result['passed']} passed, {result['minutes']} minutes")
    return status


if __name__ == "__main__":
    sys.exit(main())
