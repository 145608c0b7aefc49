"""Reads metrics.jsonl: a line of numbers for each logged step, evaluation and score."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NotRequired

from cogfast.core.files import WriteError, read_limited, set_aside, write_text
from cogfast.core.json_files import Range, keys, parse_json

logger = logging.getLogger(__name__)

MOST_STEP = 2**53  # JavaScript's largest exact integer
_NUMBER = NotRequired[float | None]
_STEP = Annotated[int, Range(0, MOST_STEP)]
_LINE = keys({"step": _STEP, "loss": _NUMBER, "loss_running": _NUMBER, "valid_loss": _NUMBER})


@dataclass(frozen=True, slots=True)
class MetricsFile:
    """The lines of a metrics file that can be read.

    problems: why others cannot. cut: why the last one, which does not end in a newline, cannot.
    """

    lines: list[dict]
    problems: list[str]
    cut: str | None = None


def read_metrics(path: Path) -> MetricsFile:
    try:
        texts = read_limited(path).split(b"\n")
    except ValueError as error:
        return MetricsFile([], [str(error)])
    lines, problems, cut = [], [], None
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            lines.append(parse_json(text, _LINE, f"line {number}"))
        except ValueError as error:
            # The last newline is followed by nothing, or by a line that a crash has cut.
            if number == len(texts):
                cut = str(error)
            else:
                problems.append(str(error))
    return MetricsFile(lines, problems, cut)


def history_until(step: int, path: Path) -> list[dict]:
    """Return the lines up to `step`, where the run resumes, and remove later ones from the file.

    A damaged file is renamed; its readable lines are kept.
    """
    if not path.exists():
        return []
    found = read_metrics(path)
    # A run that starts again evaluates again before its first step.
    lines = [line for line in found.lines if line["step"] <= step and step > 0]
    try:
        if found.problems:
            kept = set_aside(path)
            logger.warning("%s is damaged (%s): renamed to %s", path, found.problems[0], kept.name)
        # Always, since a line that a crash has cut would swallow the next one.
        write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
    except (OSError, WriteError) as error:
        logger.warning("%s: cannot remove the lines after step %d (%s)", path, step, error)
    return lines
