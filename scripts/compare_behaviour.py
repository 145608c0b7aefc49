"""Compare what this tree does with what was recorded of an earlier one: words, names, disks, numbers, ranks.

    python -m scripts.compare_behaviour [--parts words,names] [--small] [--record | --again] [--out FILE.json]

It prints a line for each difference and a table, and ends with status 1 if there is any. For a change that
is wanted, --again writes what this tree does, and keeps the commands of words and the files that earlier
commits wrote; --record writes all of a part.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import multiprocessing
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import date
from importlib.metadata import version
from pathlib import Path

from scripts.behaviour.difference import FIXTURES, ROOT, Difference, without_listed

PARTS = ("words", "names", "disks", "numbers", "ranks")
RECORDED = FIXTURES / "recorded.json"  # {part: which commit and machine wrote its fixtures}


def main(words: list[str] | None = None) -> int:
    """Record or compare the parts that the command line names and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.compare_behaviour", description=__doc__
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="names, with commas between them")
    parser.add_argument("--small", action="store_true", help="only what make test compares")
    parser.add_argument("--record", action="store_true", help="write the fixtures again")
    parser.add_argument("--out", type=Path, help="a JSON file for the differences and the table")
    text = "write what this tree does; commands and files of earlier commits stay"
    parser.add_argument("--again", action="store_true", help=text)
    options = parser.parse_args(words)
    parts = options.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts {','.join(unknown)}: use {', '.join(PARTS)}")

    table, differences, has_failed = [], [], False
    for part in parts:
        start = time.monotonic()
        record = "record_again" if options.again else "record" if options.record else ""
        result = _run_part(part, record, options.small)
        seconds = round(time.monotonic() - start)
        if result is None:
            has_failed = True
            table.append((part, "failed", "", seconds))
        elif record:
            _write_identity(part)
            table.append((part, "recorded", "", seconds))
        else:
            cases, found = result
            found = without_listed(found, [part], is_whole=not options.small)
            differences += found
            table.append((part, cases, len(found), seconds))
            for difference in found:
                print(difference)
    print(f"{'part':<10}{'cases':>10}{'differences':>13}{'seconds':>9}")
    for part, cases, count, seconds in table:
        print(f"{part:<10}{cases:>10}{count:>13}{seconds:>9}")
    if options.out:
        rows = [
            dict(zip(("part", "cases", "differences", "seconds"), row, strict=True))
            for row in table
        ]
        found = [dataclasses.asdict(it) for it in differences]
        options.out.write_text(json.dumps({"table": rows, "differences": found}, indent=1) + "\n")
    return int(has_failed or bool(differences))


def _run_part(part: str, record: str, small: bool) -> tuple[int, list[Difference]] | None:
    """Run one part in a process of its own, which inherits nothing that another part imported."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_be_part, args=(part, record, small, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return None
    finally:
        process.join()


def _be_part(part: str, record: str, small: bool, sender) -> None:
    module = importlib.import_module(f"scripts.behaviour.{part}")
    folder = FIXTURES / part
    try:
        with tempfile.TemporaryDirectory(prefix="behaviour") as work:
            if record:
                folder.mkdir(parents=True, exist_ok=True)
                again = getattr(module, "record_again", None) if record == "record_again" else None
                if again is None:
                    module.record(folder, Path(work).resolve())
                else:
                    again(folder, Path(work).resolve(), small)
                sender.send((0, []))
            else:
                sender.send(module.compare(folder, Path(work).resolve(), small))
    except Exception:
        traceback.print_exc()
        sys.exit(1)


def _write_identity(part: str) -> None:
    """Write down which commit and which machine wrote the fixtures of a part."""
    known = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    commit = subprocess.run(
        ["git", "log", "-1", "--format=%H", "--", "cogfast"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    known[part] = {
        "commit": commit,  # the last that changed the package
        "date": date.today().isoformat(),
        "torch": version("torch"),
        "python": platform.python_version(),
        "cpu": _cpu_name(),
    }
    RECORDED.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


if __name__ == "__main__":
    sys.exit(main())
