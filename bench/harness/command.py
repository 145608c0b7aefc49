"""The parser that the commands of bench share, and the table, problems and JSON file of an outcome."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from bench.harness.machine import describe_machine
from bench.harness.outcome import Outcome, table
from cogfast.core.files import write_text


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help shows `text` with its line breaks."""
    kind = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=text, formatter_class=kind)


def show(outcome: Outcome) -> None:
    print(table(outcome))
    for problem in outcome.problems:
        print(f"  WRONG: {problem}")


def write(path: Path, outcome: Outcome, **content: object) -> None:
    """Write an outcome as JSON; a run that is killed leaves the old file or the new one."""
    answer = {key: getattr(outcome, key) for key in ("numbers", "rows", "problems")}
    write_text(path, json.dumps({**content, **answer}, indent=1) + "\n")


def finish(
    outcome: Outcome, path: Path | None, piece: str, device: str = "cpu", **content: object
) -> int:
    """Show an outcome and write it with its machine, unless path is None; return the exit status."""
    show(outcome)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        machine = describe_machine(torch.device(device))
        write(path, outcome, piece=piece, **machine, **content)
    return 1 if outcome.problems else 0
