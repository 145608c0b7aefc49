"""The page that compares runs: their numbers, samples side by side, and differences of configurations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from cogfast.train.run.page.markup import Markup, address, code, table, tag
from cogfast.train.run.page.record import RunRecord
from cogfast.train.run.page.samples import Sample
from cogfast.train.run.page.sections import (
    NUM_RECENT,
    clip,
    curves,
    grid,
    number,
    pixels_of,
    section,
    toolbar,
)
from cogfast.train.run.page.settings import show


def names_of(records: Sequence[RunRecord]) -> list[str]:
    """Return the runs' names; their paths where two have the same name."""
    names = [record.name for record in records]
    return [
        name if names.count(name) == 1 else str(record.folder)
        for name, record in zip(names, records, strict=True)
    ]


def summary(records: Sequence[RunRecord], names: Sequence[str], page: Path) -> Markup:
    """Return a table with a row per run: its colour in the plots and its last numbers."""
    rows = []
    for i, (name, record) in enumerate(zip(names, records, strict=True)):
        columns = record.columns
        last = lambda key, found=columns: number(found[key].last) if key in found else ""
        recent = lambda key, found=columns: (
            number(median(found[key].finite[-NUM_RECENT:]), 3) if key in found else ""
        )
        loss = "loss_running" if "loss_running" in columns else "loss"
        label: object = name
        if (record.folder / "index.html").is_file():
            label = tag("a", name, href=address(record.folder, "index.html", page))
        dot = tag("span", "", class_="swatch", data_tone=i)
        rows.append(
            [
                tag("span", dot, label, class_="run"),
                f"{record.step:,}",
                last(loss),
                last("valid_loss"),
                recent("step_ms"),
                recent("samples_per_s"),
            ]
        )
    heads = ("Run", "Step", "Loss", "Held-out loss", "ms per step", "Samples/s")
    return table(heads, rows, range(1, len(heads)), is_stacked=True)


def sections_of(
    records: Sequence[RunRecord], names: Sequence[str], page: Path
) -> Iterator[tuple[str, str, Markup]]:
    """Yield (id, title, HTML) of the sections that have content."""
    if any(record.columns for record in records):
        yield "curves", "Curves", curves()
    if any(record.evaluations for record in records):
        yield "samples", "Samples", _samples(records, names, page)
    yield "configuration", "Configuration", _configuration(records, names)


def _samples(records: Sequence[RunRecord], names: Sequence[str], page: Path) -> Markup:
    """Build a grid with a column per run at each step; the slider chooses the step."""
    steps = sorted({e.step for record in records for e in record.evaluations})
    found = [{e.step: _by_prompt(e.samples) for e in record.evaluations} for record in records]
    shared = [i for i, step in enumerate(steps) if all(step in of_run for of_run in found)]
    prompts = {key: None for of_run in found for samples in of_run.values() for key in samples}
    rows: list[list[object]] = [[text] for text, _ in prompts]
    heads: list[object] = ["Prompt"]
    frames = []
    for frame, step in enumerate(steps):
        for name, record, of_run in zip(names, records, found, strict=True):
            heads.append(name)
            frames.append(frame)
            samples, pixels = of_run.get(step, {}), pixels_of(record)
            for row, key in zip(rows, prompts, strict=True):
                sample = samples.get(key)
                if sample is None:
                    row.append(tag("span", "–", class_="absent"))
                    continue
                file = sample.file
                source = None if file is None else address(record.folder, file, page)
                row.append(clip(source, f"the video of step {step}", pixels, f", {name}"))
    chosen = shared[-1] if shared else len(steps) - 1
    return section(
        "samples",
        "Samples",
        toolbar([f"{step:,}" for step in steps], chosen),
        grid(heads, rows, frames),
        kind="compared",
    )


def _by_prompt(samples: dict[str, Sample]) -> dict[tuple[str, int], Sample]:
    """Key samples by their prompt, and by a number where a prompt occurs several times."""
    found: dict[tuple[str, int], Sample] = {}
    for sample in samples.values():
        times = 0
        while (sample.text, times) in found:
            times += 1
        found[sample.text, times] = sample
    return found


def _configuration(records: Sequence[RunRecord], names: Sequence[str]) -> Markup:
    plain = [record.settings.plain for record in records]
    keys = {key: None for settings in plain for key in settings}
    rows = []
    for key in keys:
        values = [show(settings[key]) if key in settings else None for settings in plain]
        if len(set(values)) > 1:
            cells = [tag("span", "–", class_="absent") if v is None else code(v) for v in values]
            rows.append([code(key), *cells])
    if not rows:
        content: Markup = tag("p", "The configurations are equal.")
    else:
        content = table(("Key", *names), rows)
    return section("configuration", "Differences of the configurations", content)
