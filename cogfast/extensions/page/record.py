"""Everything that the page of a run shows, read from the run's folder.

A folder may be damaged, old or downloaded: what cannot be read is left out and named in `problems`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any

from omegaconf.errors import OmegaConfBaseException

from cogfast.config.sat_unused import LORA_KEY
from cogfast.config.yaml_files import read_yaml, to_dict
from cogfast.core.json_files import Range, brief, read_json, read_limited
from cogfast.core.keys import find_origin
from cogfast.core.values import counted, leaves, printable
from cogfast.extensions.page.metrics_table import Column, to_columns
from cogfast.model.keys import ModelKeys
from cogfast.model.weights.checkpoint_manifest import newest_checkpoint, step_of
from cogfast.train.keys import TrainKeys
from cogfast.train.run.metrics_file import read_metrics

FACTS, _METRICS, CONFIG = "run_facts.json", "metrics.jsonl", "training_config.yaml"
_BAD_FILES = ("bad_samples.jsonl", "bad_samples_valid.jsonl")
_MOST_BAD_BYTES, _MOST_SHOWN = 1 << 26, 300
_LEFT_OUT = "it is left out"
_SUFFIXES = (".mp4", ".safetensors")  # a video, or its latents with args.only_log_video_latents
_STEP_FOLDER = re.compile(r"step-(\d{1,12})")
_FINETUNE = re.compile(r"(validation-(\d{1,12})-).+")
_MARKED = re.compile(r"(?:training_config|environment)-from-([\w-]+)\.\w+")

_DEFAULTS: Mapping[str, object] = {
    **{f"args.{key}": value for key, value in TrainKeys().model_dump().items()},
    **{f"model.{key}": value for key, value in ModelKeys().model_dump().items()},
}
_Count = Annotated[int, Range(0, 2**53)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The facts that a run knows when it starts and no other file has.

    effective: values that the run uses where the configuration does not say them.
    """

    num_steps: _Count
    global_batch: _Count
    num_samples: _Count
    num_trained: _Count
    shows_ema: bool = False  # whether samples are made with the averaged weights
    allow_import: list[str]
    origins: dict[str, str]  # of the keys that are not at their default
    effective: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """A sampled video; step: None for the reference clip. file: relative to the run's folder.

    prompt: its text, and which one it is of the run's prompts with this text.
    """

    prompt: tuple[str, int]
    step: int | None
    file: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """A run, as its page shows it."""

    folder: Path
    name: str
    columns: Mapping[str, Column]
    plain: Mapping[str, object]  # {dotted key: value} of the newest configuration
    config: Path  # its file
    facts: Facts | None
    samples: Sequence[Sample]
    environment: Mapping[str, object]  # of the newest start
    checkpoint: Path | None  # the newest
    problems: Sequence[str]

    @property
    def step(self) -> int:
        """The last step that the metrics or the checkpoints know."""
        saved = None if self.checkpoint is None else step_of(self.checkpoint)
        return max([*(column.steps[-1] for column in self.columns.values()), saved or 0])

    @property
    def num_steps(self) -> int | None:
        return None if self.facts is None else self.facts.num_steps

    @property
    def is_lora(self) -> bool:
        return any(key.startswith(LORA_KEY) for key in self.plain)

    def settings(self) -> Iterator[dict[str, object]]:
        """Yield the settings of `args`, then all others. default, origin: None if unknown. is_set: the value
        differs from its default, or has none and was given."""
        origins = None if self.facts is None else self.facts.origins
        origin_of = lambda key: None if origins is None else find_origin(origins, key)
        for key in sorted(self.plain, key=lambda key: not key.startswith("args.")):
            value, origin, default = self.plain[key], origin_of(key), _DEFAULTS.get(key)
            is_set = value != default if key in _DEFAULTS else origin != "default"
            if key.startswith("model.") and key not in _DEFAULTS and not key.startswith(LORA_KEY):
                # A YAML file lists every part of the network, most of them as published.
                is_set = origin is not None and not origin.endswith((".yaml", ".yml", "default"))
            known = {"key": key, "value": value, "default": default}
            yield known | {"origin": origin, "is_set": is_set}

    def compared(self) -> dict[str, object]:
        """Return what decides how the run trains, from whichever file, default or machine it is."""
        facts = {} if self.facts is None else asdict(self.facts)
        numbers = {k: v for k, v in facts.items() if k.startswith(("num_", "global_"))}
        defaults, effective = _DEFAULTS if self.plain else {}, facts.get("effective", {})
        return {**numbers, **self.environment, **defaults, **self.plain, **effective}


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (_METRICS, CONFIG))


def read_run(folder: Path, history: Sequence[Mapping] | None = None) -> RunRecord:
    """Read a run's folder. history: the lines of metrics.jsonl, if the caller has them."""
    problems: list[str] = []
    columns = to_columns(_metrics(folder / _METRICS, problems) if history is None else history)
    config, plain = folder / CONFIG, {}
    for config in _starts(folder, "training_config"):
        read = partial(_settings, config, config.stat().st_mtime_ns)
        plain = _attempt(read, problems, plain)
    starts = _starts(folder, "environment")
    environments = [_read(path, dict[str, Any], problems) for path in starts]
    checkpoint = _attempt(partial(newest_checkpoint, folder), problems)
    for path in filter(Path.exists, (folder / name for name in _BAD_FILES)):
        text = _attempt(partial(read_limited, path, _MOST_BAD_BYTES, _LEFT_OUT), problems, b"")
        if lines := text.decode(errors="replace").splitlines():
            number, first = counted(len(lines), "sample"), lines[0][:_MOST_SHOWN]
            problems.append(f"{number} could not be used: {path.name}; first: {first}")
    if "skipped" in columns and columns["skipped"].last > 0:
        number = counted(int(columns["skipped"].last), "step")
        problems.append(f"{number} skipped, since gradients were not finite")
    return RunRecord(
        folder=folder,
        name=printable(folder.absolute().name),
        columns=columns,
        plain=plain,
        config=config,
        facts=_read(folder / FACTS, Facts, problems),
        samples=_samples(folder, problems),
        environment=next((found for found in reversed(environments) if found), {}),
        checkpoint=checkpoint,
        problems=problems,
    )


@lru_cache(maxsize=8)  # an active run's page is written again and again, and YAML is slow to read
def _settings(config: Path, _: int) -> dict[str, Any]:
    return leaves(to_dict(read_yaml(config, config.name, is_plain=True)))


def _attempt(read: Callable[[], Any], problems: list[str], otherwise: Any = None) -> Any:
    """Return what `read` does; what is damaged is a problem."""
    try:
        return read()
    except (ValueError, OmegaConfBaseException) as error:
        problems.append(str(error).partition("\n")[0])
        return otherwise


def _metrics(path: Path, problems: list[str]) -> list[dict]:
    if not path.exists():
        return []
    found = read_metrics(path)
    if damaged := [*found.problems, *filter(None, [found.cut])]:
        number = counted(len(damaged), "line")
        problems.append(f"{path.name}: {number} left out as damaged; first: {damaged[0]}")
    return found.lines


def _read(path: Path, schema: Any, problems: list[str]) -> Any:
    """Read an optional JSON file."""
    read = partial(read_json, path, schema, fix=_LEFT_OUT)
    return _attempt(read, problems) if path.exists() else None


def _starts(folder: Path, name: str) -> list[Path]:
    """Return a description's files: that of the first start, then those of resumptions, by step."""
    found = ((_MARKED.fullmatch(path.name), path) for path in folder.glob(f"{name}-from-*"))
    steps = ((step_of(Path(match[1])), path) for match, path in found if match)
    marked = [(step, path) for step, path in steps if step is not None]
    first = folder / (CONFIG if name == "training_config" else f"{name}.json")
    return [path for path in (first, *(path for _, path in sorted(marked))) if path.is_file()]


def _samples(folder: Path, problems: list[str]) -> list[Sample]:
    """Return the videos of both layouts of a run's folder, by step, and the reference clips."""
    # {step: (folder in the run, start of the files' names, names)}
    places: dict[int | None, tuple[str, str, list[str]]] = {}
    places[None] = ("reference", "", _entries(folder / "reference"))
    for name in _entries(folder / "samples"):
        if match := _STEP_FOLDER.fullmatch(name):
            inner = f"samples/{name}"
            places[int(match[1])] = (inner, "", _entries(folder / inner))
    for name in _entries(folder / "validation_res"):
        if match := _FINETUNE.fullmatch(name):
            places.setdefault(int(match[2]), ("validation_res", match[1], []))[2].append(name)
    texts: dict[str, str] = {}  # by key, which is the same for a prompt at every step
    found: list[tuple[str, int | None, str]] = []
    for step in sorted(places, key=lambda step: -1 if step is None else step):
        inner, start, names = places[step]
        listing = f"{start}prompts.json"
        path = folder / inner / listing
        listed = _read(path, dict[str, str], problems) if listing in names else None
        for name, text in (listed or {}).items():
            if not name.startswith(start) or "/" in name or "\0" in name:
                problems.append(f"{inner}/{listing}: {brief(name)} is no name of a sample")
            else:
                texts[name.removeprefix(start).rpartition(".")[0]] = text
        for name in names:
            if name.endswith(_SUFFIXES):
                found.append((name.removeprefix(start).rpartition(".")[0], step, f"{inner}/{name}"))
    prompts: dict[str, tuple[str, int]] = {}
    numbers = Counter[str]()
    for key in sorted({key for key, *_ in found}):
        # Files of an evaluation that was stopped are in no listing; the name begins with the prompt.
        text = texts.get(key, key)
        prompts[key] = (text, numbers[text])
        numbers[text] += 1
    sampled = {key for key, step, _ in found if step is not None}
    return [Sample(prompts[key], step, file) for key, step, file in found if key in sampled]


def _entries(folder: Path) -> list[str]:
    """Return the names in a folder, sorted; none if it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
