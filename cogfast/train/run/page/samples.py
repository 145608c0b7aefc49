"""Finds the videos that the evaluations of a run have sampled, in both layouts of a run's folder."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cogfast.schema.json_files import brief, read_json

_STEP_FOLDER = re.compile(r"step-(\d{1,12})")
_FINETUNE = re.compile(r"validation-(\d{1,12})-(.+)")
_LISTING, _SHEET = "prompts.json", "contact_sheet.png"
_SUFFIXES = (".mp4", ".safetensors")  # a video, or its latents with args.only_log_video_latents
MOST_CELLS = 2000  # videos on a page; the steps between are left out above it
_MOST_FILES = 100_000  # of a folder


@dataclass(frozen=True, slots=True)
class Sample:
    """A sampled video. key: the same for a prompt in every evaluation of a run. file: relative to the
    run's folder; None if it is missing."""

    key: str
    text: str
    file: str | None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The samples of one step. sheet: the contact sheet's file, relative to the run's folder."""

    step: int
    sheet: str | None
    samples: dict[str, Sample] = field(default_factory=dict)  # by key


def find_evaluations(folder: Path) -> tuple[list[Evaluation], list[str]]:
    """Return the evaluations by step, and notes about what is damaged or left out."""
    found: dict[int, Evaluation] = {}
    notes: list[str] = []
    for path in _entries(folder / "samples"):
        match = _STEP_FOLDER.fullmatch(path)
        if match:
            names = _entries(folder / "samples" / path)
            step = int(match[1])
            found[step] = _evaluation(folder, f"samples/{path}", "", names, step, notes)
    by_step: dict[int, list[str]] = {}
    for name in _entries(folder / "validation_res"):
        match = _FINETUNE.fullmatch(name)
        if match:
            by_step.setdefault(int(match[1]), []).append(name)
    for step, names in by_step.items():
        start = f"validation-{step}-"
        found[step] = _evaluation(folder, "validation_res", start, names, step, notes)
    evaluations = [found[step] for step in sorted(found) if found[step].samples]
    chosen = _chosen(evaluations)
    if len(chosen) < len(evaluations):
        notes.append(
            f"{len(chosen)} of {len(evaluations)} evaluations are shown, evenly spaced; all videos are "
            "in the run's folder"
        )
    return chosen, notes


def _chosen(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Return evenly spaced evaluations, with the first and the last, of MOST_CELLS videos together."""
    most_rows = max((len(e.samples) for e in evaluations), default=1)
    most = max(2, MOST_CELLS // most_rows)
    if len(evaluations) <= most:
        return list(evaluations)
    return [evaluations[i * (len(evaluations) - 1) // (most - 1)] for i in range(most)]


def _evaluation(
    folder: Path, inner: str, start: str, names: Sequence[str], step: int, notes: list[str]
) -> Evaluation:
    """Read one evaluation. inner: its folder in the run; start: what the names of its files begin with."""
    listing = f"{start}{_LISTING}"
    texts: dict[str, str] = {}
    if listing in names:
        try:
            texts = read_json(folder / inner / listing, dict[str, str])
        except ValueError as error:
            notes.append(str(error))
    present = {name for name in names if name.endswith(_SUFFIXES)}
    samples = {}
    # Files of an evaluation that was stopped are not in a listing; the name begins with the prompt.
    for name in sorted({*texts, *present}):
        if not name.startswith(start) or "/" in name or "\0" in name:
            notes.append(f"{inner}/{listing}: {brief(name)} is no name of a sample")
            continue
        key = name.removeprefix(start).rpartition(".")[0]
        file = f"{inner}/{name}" if name in present else None
        samples[key] = Sample(key, texts.get(name, key), file)
    sheet = f"{start}{_SHEET}"
    return Evaluation(step, f"{inner}/{sheet}" if sheet in names else None, samples)


def _entries(folder: Path) -> list[str]:
    """Return the names in a folder, sorted; none if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry, _ in zip(entries, range(_MOST_FILES), strict=False)]
    except OSError:
        return []
    return sorted(names)
