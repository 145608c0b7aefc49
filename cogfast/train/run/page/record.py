"""Everything that the page of a run shows, read from the run's folder.

A folder may be damaged, old or downloaded: what cannot be read is left out, and a note says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from cogfast.model.weights.formats.checkpoint_manifest import newest_checkpoint, step_of
from cogfast.schema.json_files import Range, parse_json, read_json, read_limited
from cogfast.schema.values import counted
from cogfast.train.run.page.metrics_table import Column, read_metrics, to_columns
from cogfast.train.run.page.samples import Evaluation, find_evaluations
from cogfast.train.run.page.settings import NAME as CONFIG_NAME
from cogfast.train.run.page.settings import Settings, read_settings

FACTS = "run_facts.json"
_METRICS = "metrics.jsonl"
_BAD_FILES = ("bad_samples.jsonl", "bad_samples_valid.jsonl")
_MOST_BAD = 200  # bad samples that are listed
_MOST_BAD_BYTES = 1 << 26
_ENVIRONMENT = re.compile(r"environment(?:-from-([\w-]+))?\.json")
_Count = Annotated[int, Range(0, 2**53)]
_Bytes = Annotated[float, Range(0, 2.0**60)]
_Milliseconds = Annotated[float, Range(0, 1e12)] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The facts that a run knows when it starts and no other file has. buckets: [size, clips] of each."""

    num_steps: _Count
    global_batch: _Count
    num_samples: _Count
    num_trained: _Count
    buckets: list[tuple[str, _Count]]
    left_out: _Count  # clips without a bucket
    allow_import: list[str]
    origins: dict[str, str]  # of the keys that are not at their default


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The bytes and the step time that were predicted, and those that were measured."""

    memory: dict[str, _Bytes]
    peak: _Bytes
    step_ms: _Milliseconds = None
    measured_peak: _Bytes | None = None
    measured_step_ms: _Milliseconds = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BadSamples:
    """One list of unusable samples: {name: reason} of the first ones, and the number of all."""

    file: str
    reasons: Mapping[str, str]
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """A run, as its page shows it."""

    folder: Path
    name: str
    columns: Mapping[str, Column]
    settings: Settings
    facts: Facts | None
    evaluations: Sequence[Evaluation]
    plan: Plan | None
    bad: Sequence[BadSamples]
    environments: Mapping[str, Mapping[str, Any]]  # {"start" or checkpoint's name: values}
    checkpoint: Path | None  # the newest
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def step(self) -> int:
        """The last step that the metrics or the checkpoints know."""
        saved = None if self.checkpoint is None else step_of(self.checkpoint)
        steps = [column.steps[-1] for column in self.columns.values()]
        return max([*steps, saved or 0])

    @property
    def num_steps(self) -> int | None:
        if self.facts is not None:
            return self.facts.num_steps
        number = self.settings.get("args.train_iters")
        return number if isinstance(number, int) else None


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (_METRICS, CONFIG_NAME))


def read_run(folder: Path, history: Sequence[Mapping] | None = None) -> RunRecord:
    """Read a run's folder. history: the lines of metrics.jsonl, if the caller has them."""
    notes: list[str] = []
    lines = history
    if lines is None:
        lines = _metrics(folder / _METRICS, notes)
    columns, found = to_columns(lines)
    notes += found
    facts = _read(folder / FACTS, Facts, notes)
    settings, found = read_settings(folder, None if facts is None else facts.origins)
    notes += found
    evaluations, found = find_evaluations(folder)
    notes += found
    try:
        checkpoint = newest_checkpoint(folder)
    except ValueError as error:
        checkpoint = None
        notes.append(str(error))
    bad = [_bad_samples(folder / name, notes) for name in _BAD_FILES]
    return RunRecord(
        folder=folder,
        name=folder.absolute().name,
        columns=columns,
        settings=settings,
        facts=facts,
        evaluations=evaluations,
        plan=_read(folder / "plan.json", Plan, notes),
        bad=[found for found in bad if found is not None],
        environments=_environments(folder, notes),
        checkpoint=checkpoint,
        notes=notes,
    )


def _metrics(path: Path, notes: list[str]) -> list[dict]:
    if not path.exists():
        return []
    found = read_metrics(path)
    damaged = [*found.problems, *([] if found.cut is None else [found.cut])]
    if damaged:
        left_out = counted(len(damaged), "line")
        notes.append(
            f"{path.name}: {left_out} left out, since they are damaged; first: {damaged[0]}"
        )
    return found.lines


def _read(path: Path, schema: Any, notes: list[str]) -> Any:
    """Read an optional JSON file; a damaged one becomes a note."""
    if not path.exists():
        return None
    try:
        return read_json(path, schema, fix="it is left out")
    except ValueError as error:
        notes.append(str(error))
        return None


def _bad_samples(path: Path, notes: list[str]) -> BadSamples | None:
    if not path.exists():
        return None
    reasons: dict[str, str] = {}
    num_damaged = 0
    try:
        texts = read_limited(path, _MOST_BAD_BYTES, "its samples are left out").split(b"\n")
    except ValueError as error:
        notes.append(str(error))
        return None
    for text in filter(None, texts):
        try:
            entry = parse_json(text, {"path": str, "reason": str}, path.name)
        except ValueError:
            num_damaged += 1
            continue
        reasons[entry["path"]] = entry["reason"]
    if num_damaged:
        notes.append(f"{path.name}: {counted(num_damaged, 'line')} left out, since damaged")
    first = dict(list(reasons.items())[:_MOST_BAD])
    return BadSamples(file=path.name, reasons=first, number=len(reasons)) if reasons else None


def _environments(folder: Path, notes: list[str]) -> dict[str, dict[str, Any]]:
    """Return the versions at the first start and at each resumption, in this order."""
    steps: dict[Path, int] = {}
    for path in folder.glob("environment*.json"):
        match = _ENVIRONMENT.fullmatch(path.name)
        if match:
            step = 0 if match[1] is None else step_of(Path(match[1]))
            if step is not None:
                steps[path] = step
    found = {}
    for path in sorted(steps, key=steps.__getitem__):
        content = _read(path, dict[str, Any], notes)
        if content is not None:
            name = path.stem.removeprefix("environment").removeprefix("-from-")
            found[name or "start"] = content
    return found
