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


def file_of(case: xml.Element) -> str:
    """Return the file of a test case, which may be of a class; a file that cannot be read is a case, too."""
    parts = (case.get("classname") or case.get("name", "")).split(".")
    while len(parts) > 1 and not (ROOT / "/".join(parts)).with_suffix(".py").is_file():
        parts.pop()
    return "/".join(parts) + ".py"


def summary(report: Path) -> dict:
    """Count the tests of a JUnit report by result, and add up the seconds of each file.

    A test that fails, and fails in its teardown, too, or ends its process, has several cases: one test.
    """
    results: dict[str, str] = {}
    files: Counter[str] = Counter()
    for case in xml.parse(report).iter("testcase"):
        name = f"{file_of(case)}::{case.get('name')}"
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "passed"
        kind = "skipped" if kind == "passed" and "skipped" in kinds else kind
        if results.get(name) != "failed":
            results[name] = kind
        files[file_of(case)] += float(case.get("time", 0))
    counts = Counter(results.values())
    return {
        **{kind: counts[kind] for kind in ("passed", "failed", "skipped")},
        "failed_tests": [name for name, kind in results.items() if kind == "failed"],
        "seconds_of_files": {name: round(time) for name, time in files.most_common()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="Other words are pytest's; they take --out, too."
    )
    parser.add_argument("--out", type=Path, help="default: docs/soak.json, which is of whole runs")
    given, words = parser.parse_known_args()
    if words and not given.out:
        parser.error("with words of pytest, which may choose tests, --out is needed")
    result = {
        "commit": output_of("git", "rev-parse", "HEAD"),
        "has_changes": bool(output_of("git", "status", "--porcelain", "--untracked-files=no")),
        "date": date.today().isoformat(),
        "machine": processor(),
    }
    with tempfile.TemporaryDirectory() as folder:
        report, start = Path(folder) / "soak.xml", time.monotonic()
        command = [sys.executable, "-m", "pytest", *PYTEST, f"--junitxml={report}", *words]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        result |= {"minutes": round((time.monotonic() - start) / 60, 1), "status": status}
        if status not in (0, 1):  # interrupted, or no test at all
            print(f"pytest ended with status {status}: no result is written", file=sys.stderr)
            return status
        result |= summary(report)
    out = given.out or RESULT
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(
        f"{out}: {result['passed']} passed, {result['failed']} failed, {result['minutes']} minutes"
    )
    return status


if __name__ == "__main__":
    sys.exit(main())
