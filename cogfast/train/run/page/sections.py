"""The sections of a run's page as HTML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from cogfast.schema.values import counted
from cogfast.train.run.page.commands import commands_of
from cogfast.train.run.page.markup import Markup, address, code, join, table, tag, text
from cogfast.train.run.page.record import RunRecord
from cogfast.train.run.page.samples import Evaluation
from cogfast.train.run.page.settings import NAME as CONFIG_NAME
from cogfast.train.run.page.settings import Setting, show

NUM_RECENT = 100  # last lines, whose median is the speed of now
_DEFAULT_PIXELS = (480, 720)  # rows, columns of a video whose size is unknown
_FILES = (
    CONFIG_NAME,
    "environment.json",
    "changes.diff",
    "metrics.jsonl",
    "loss.png",
    "bad_samples.jsonl",
    "nonfinite",
    "samples",
    "checkpoints",
    "validation_res",
    "tensorboard",
    "logs",
    "profile",
)


def section(name: str, title: str, *children: object, kind: str | None = None) -> Markup:
    return tag("section", tag("h2", title), *children, id=name, class_=kind, aria_label=title)


def sections_of(record: RunRecord, page: Path) -> Iterator[tuple[str, str, Markup]]:
    """Yield (id, title, HTML) of the sections that have content."""
    if record.columns:
        yield "curves", "Curves", curves()
    if record.evaluations:
        yield "samples", "Samples", _samples(record, page)
    yield "commands", "Commands", _commands(record)
    if record.plan is not None:
        yield "plan", "Plan and reality", _plan(record)
    if record.facts is not None or record.bad:
        yield "data", "Data", _data(record, page)
    if record.settings.is_known:
        yield "configuration", "Configuration", _configuration(record)
    yield "versions", "Versions and files", _versions(record, page)


# --- head of the page ---


def summary(record: RunRecord) -> Markup:
    """Return the run's state: a line, its progress, and the last numbers as tiles."""
    step, num_steps = record.step, record.num_steps
    parts: list[object] = [f"step {step:,}"]
    if num_steps is not None:
        parts = [f"step {step:,} of {num_steps:,}"]
    facts = record.facts
    if facts is not None:
        parts.append(f"global batch {facts.global_batch}")
        parts.append(counted(facts.num_samples, "sample"))
        parts.append(f"{si(facts.num_trained)} parameters trained")
    line = tag("p", " · ".join(map(str, parts)), class_="state")
    bar = ""
    if num_steps:
        bar = tag("progress", value=min(step, num_steps), max=num_steps, aria_label="progress")
    tiles = [
        tag("div", tag("dt", name), tag("dd", value), tag("dd", note, class_="note"))
        for name, value, note in _tiles(record)
    ]
    return join([line, bar, tag("dl", *tiles, class_="tiles") if tiles else ""])


def _tiles(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    columns = record.columns
    loss = columns.get("loss_running") or columns.get("loss")
    if loss is not None:
        yield "Loss", number(loss.last), f"{number(loss.finite[0])} at step {loss.steps[0]:,}"
    held_out = columns.get("valid_loss")
    if held_out is not None:
        best = min(held_out.finite)
        at = held_out.steps[held_out.values.index(best)]
        yield "Held-out loss", number(held_out.last), f"lowest {number(best)} at step {at:,}"
    if "step_ms" in columns:
        recent = columns["step_ms"].finite[-NUM_RECENT:]
        left = ""
        if record.num_steps is not None and record.step < record.num_steps:
            left = f"{duration((record.num_steps - record.step) * median(recent) / 1000)} left"
        yield "Time of a step", f"{number(median(recent), 3)} ms", left
    if "samples_per_s" in columns:
        rate = median(columns["samples_per_s"].finite[-NUM_RECENT:])
        mfu = columns.get("mfu")
        note = f"{100 * median(mfu.finite[-NUM_RECENT:]):.1f}% MFU" if mfu is not None else ""
        yield "Throughput", f"{number(rate, 3)}/s", note or "samples"
    for key, name in (
        ("memory_reserved_gib", "GPU memory"),
        ("memory_rss_gib", "Memory"),
    ):
        if key in columns:
            yield name, f"{number(max(columns[key].finite), 3)} GiB", "peak"
    skipped = columns.get("skipped")
    if skipped is not None and skipped.last > 0:
        yield "Skipped steps", f"{skipped.last:.0f}", "gradients were not finite"


def notes(lines: Sequence[str]) -> Markup:
    """Return what could not be read, as a list; nothing where all is well."""
    if not lines:
        return Markup("")
    items = [tag("li", line) for line in lines]
    title = tag("strong", "Not everything in this folder can be read")
    return tag("aside", title, tag("ul", *items), class_="notes", id="notes")


def curves() -> Markup:
    hint = (
        "Drag over a plot to zoom in, double-click to zoom out. With the keyboard: arrow keys move, "
        "+ and − zoom, 0 shows all."
    )
    more = tag(
        "details",
        tag("summary", "More curves"),
        tag("div", class_="plots", id="more-plots"),
        id="more-curves",
        hidden=True,
    )
    return section(
        "curves",
        "Curves",
        tag("p", hint, class_="hint"),
        tag("noscript", tag("p", "The plots need JavaScript. loss.png has the loss curve.")),
        tag("div", class_="plots", id="plots"),
        more,
    )


# --- videos ---


def pixels_of(record: RunRecord) -> tuple[int, int]:
    """Return rows and columns of the videos, which reserve their place before they are loaded."""
    size = record.settings.get("data.params.video_size")
    if isinstance(size, list) and len(size) == 2 and all(type(n) is int for n in size):
        return size[0], size[1]
    return _DEFAULT_PIXELS


def clip(source: str | None, label: str, pixels: tuple[int, int], caption: str = "") -> Markup:
    """Return a cell's video, or what is there instead. caption: shown where several are side by side."""
    if source is None:
        return tag("span", "missing", class_="absent")
    if not source.endswith(".mp4"):
        return tag("a", "latents", href=source)
    video = tag(
        "video",
        src=source,
        width=pixels[1],
        height=pixels[0],
        preload="none",
        muted=True,
        loop=True,
        playsinline=True,
    )
    return tag(
        "button", video, type="button", class_="clip", aria_label=f"Enlarge {label}{caption}"
    )


def grid(
    heads: Sequence[object], rows: Sequence[Sequence[object]], frames: Sequence[int]
) -> Markup:
    """Build the grid of videos. The first cell of a row is its prompt.

    frames: of each further column; the slider shows the columns of one frame.
    """
    first = tag("th", heads[0], scope="col", class_="prompt")
    # A narrow screen has no heads: a run's name stands above its video.
    labels = [None if isinstance(head, Markup) else head for head in heads[1:]]
    head = [tag("th", h, scope="col", data_frame=f) for h, f in zip(heads[1:], frames, strict=True)]
    body = []
    for row in rows:
        prompt = tag("th", tag("div", row[0]), scope="row", class_="prompt")
        cells = [
            tag("td", cell, data_frame=frame, data_label=head)
            for cell, frame, head in zip(row[1:], frames, labels, strict=True)
        ]
        body.append(tag("tr", prompt, *cells))
    whole = tag("table", tag("thead", tag("tr", first, *head)), tag("tbody", *body), class_="grid")
    return tag("div", whole, class_="scroll", tabindex="0", id="grid")


def toolbar(names: Sequence[str], chosen: int) -> Markup:
    """Return the slider over the frames and the button that pauses the videos."""
    slider = tag(
        "label",
        tag("span", "Step"),
        tag("input", type="range", id="frame", min=0, max=len(names) - 1, value=chosen, step=1),
        tag("output", names[chosen], id="frame-name", for_="frame"),
        class_="slider",
    )
    play = tag("button", "Pause", type="button", id="play", aria_pressed="false")
    return tag("div", slider, play, class_="toolbar", data_names="|".join(names))


def _samples(record: RunRecord, page: Path) -> Markup:
    pixels, evaluations = pixels_of(record), record.evaluations
    texts: dict[str, str] = {}
    for key, sample in [item for e in evaluations for item in e.samples.items()]:
        # An evaluation without a listing knows the names of the files alone.
        if sample.text != key or key not in texts:
            texts[key] = sample.text
    heads: list[object] = ["Prompt", *(_head(record, e, page) for e in evaluations)]
    rows = []
    for key in sorted(texts):
        cells = [_cell(record, e, key, pixels, page) for e in evaluations]
        rows.append([texts[key], *cells])
    names = [f"{e.step:,}" for e in evaluations]
    return section(
        "samples",
        "Samples",
        tag("p", "The same noise at every step: only the weights differ.", class_="hint"),
        toolbar(names, len(names) - 1),
        grid(heads, rows, range(len(evaluations))),
    )


def _head(record: RunRecord, evaluation: Evaluation, page: Path) -> object:
    name = f"step {evaluation.step:,}"
    if evaluation.sheet is None:
        return name
    return tag("a", name, href=address(record.folder, evaluation.sheet, page))


def _cell(
    record: RunRecord, evaluation: Evaluation, key: str, pixels: tuple[int, int], page: Path
) -> Markup:
    sample = evaluation.samples.get(key)
    if sample is None:
        return tag("span", "–", class_="absent")
    source = None if sample.file is None else address(record.folder, sample.file, page)
    return clip(source, f"the video of step {evaluation.step}", pixels)


# --- text ---


def _commands(record: RunRecord) -> Markup:
    parts = []
    for command in commands_of(record):
        parts += [
            tag("h3", command.title),
            tag(
                "div",
                tag("pre", code(command.line), tabindex="0"),
                tag("button", "Copy", type="button", class_="copy", data_text=command.line),
                class_="command",
            ),
        ]
        if command.note:
            parts.append(tag("p", command.note, class_="hint"))
    if record.checkpoint is None:
        parts.append(tag("p", "No checkpoint is saved yet.", class_="hint"))
    return section("commands", "Commands", *parts)


def _plan(record: RunRecord) -> Markup:
    plan = record.plan
    assert plan is not None, "the caller checks"
    measured = plan.measured_peak
    reserved = record.columns.get("memory_allocated_gib")
    if measured is None and reserved is not None:
        measured = max(reserved.finite) * 2**30
    step_ms = plan.measured_step_ms
    if step_ms is None and "step_ms" in record.columns:
        step_ms = median(record.columns["step_ms"].finite)
    rows = [
        ("Peak of memory per device", gib(plan.peak), gib(measured), _off(plan.peak, measured)),
        ("Time of a step", ms(plan.step_ms), ms(step_ms), _off(plan.step_ms, step_ms)),
    ]
    parts = sorted(plan.memory.items(), key=lambda item: -item[1])
    most = max([*plan.memory.values(), 1.0])
    bars = [
        (part, gib(size), tag("meter", value=size / most, min=0, max=1, aria_hidden="true"))
        for part, size in parts
    ]
    return section(
        "plan",
        "Plan and reality",
        table(("", "Planned", "Measured", "Measured against plan"), rows, (1, 2, 3)),
        tag("h3", "Planned memory by part"),
        table(("Part", "Size", ""), bars, (1,)),
    )


def _data(record: RunRecord, page: Path) -> Markup:
    parts: list[object] = []
    facts = record.facts
    if facts is not None:
        parts.append(tag("p", f"{counted(facts.num_samples, 'sample')} in the training data."))
    if facts is not None and facts.buckets:
        total = max(1, sum(n for _, n in facts.buckets) + facts.left_out)
        rows = [(size, f"{n:,}", f"{100 * n / total:.1f}%") for size, n in facts.buckets]
        if facts.left_out:
            rows.append(("left out", f"{facts.left_out:,}", f"{100 * facts.left_out / total:.1f}%"))
        heads = ("Bucket: frames x rows x columns", "Clips", "Share")
        parts += [tag("h3", "Buckets"), table(heads, rows, (1, 2))]
    for bad in record.bad:
        whose = "held-out " if "valid" in bad.file else ""
        link = tag("a", bad.file, href=address(record.folder, bad.file, page))
        title = f"{counted(bad.number, f'{whose}sample')} could not be used"
        more = bad.number - len(bad.reasons)
        parts += [
            tag("h3", title),
            table(("Sample", "Reason"), [(code(p), r) for p, r in bad.reasons.items()], (), True),
            tag("p", f"and {more:,} more in " if more else "All are in ", link, ".", class_="hint"),
        ]
    if facts is not None and not record.bad:
        parts.append(tag("p", "All samples that were read could be used.", class_="hint"))
    return section("data", "Data", *parts)


def _configuration(record: RunRecord) -> Markup:
    settings = record.settings
    has_origins = record.facts is not None
    # `args` first: its keys are what runs differ in.
    names = sorted(settings.sections, key=lambda name: (name != "args", name))
    every = [setting for name in names for setting in settings.sections[name]]
    heads = ("Key", "Value", "Default", *(["From"] if has_origins else []))
    rows = [_row(setting, has_origins, has_default=True) for setting in every if setting.is_set]
    parts: list[object] = [tag("h3", "Set for this run"), table(heads, rows, is_stacked=True)]
    for file, lines in settings.changes.items():
        items = [tag("li", code(line)) for line in lines]
        parts += [tag("h3", f"Changed on resuming: {file}"), tag("ul", *items)]
    heads = ("Key", "Value", *(["From"] if has_origins else []))
    for name, found in settings.sections.items():
        rows = [_row(setting, has_origins, has_default=False) for setting in found]
        title = tag("summary", name, " ", tag("small", counted(len(found), "key")))
        parts.append(tag("details", title, table(heads, rows, is_stacked=True)))
    return section("configuration", "Configuration", *parts)


def _row(setting: Setting, has_origins: bool, has_default: bool) -> list[object]:
    row: list[object] = [code(setting.key), code(setting.value)]
    if has_default:
        row.append("" if setting.default is None else code(setting.default))
    if has_origins:
        row.append(setting.origin or "")
    return row


def _versions(record: RunRecord, page: Path) -> Markup:
    parts: list[object] = []
    if record.environments:
        # The first start and the newest ones: a run of months has resumed often.
        names = list(record.environments)
        names = names if len(names) <= 5 else [names[0], *names[-4:]]
        keys = {key: None for name in names for key in record.environments[name]}
        rows = [[key, *(_plain(record.environments[name], key) for name in names)] for key in keys]
        heads = ["", *(name if name == "start" else f"from {name}" for name in names)]
        parts.append(table(heads, rows))
    found = [name for name in _FILES if (record.folder / name).exists()]
    links = [tag("li", tag("a", name, href=address(record.folder, name, page))) for name in found]
    parts += [tag("h3", "Files"), tag("ul", *links, class_="files")]
    return section("versions", "Versions and files", *parts)


def _plain(environment: Mapping, key: str) -> Markup:
    value = environment.get(key)
    if isinstance(value, list):
        # Eight GPUs of one kind are one line.
        kinds = {show(item): value.count(item) for item in value}
        return text(", ".join(f"{n} x {kind}" if n > 1 else kind for kind, n in kinds.items()))
    return text("" if value is None else show(value))


# --- numbers ---


def number(value: float, digits: int = 4) -> str:
    """Format a number to some significant digits, without an exponent where it is short."""
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def si(count: int) -> str:
    for size, unit in ((10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:,}"


def duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{max(1, minutes)} min"
    hours = minutes / 60
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"


def gib(size: float | None) -> str:
    return "" if size is None else f"{size / 2**30:.2f} GiB"


def ms(value: float | None) -> str:
    return "" if value is None else f"{number(value, 3)} ms"


def _off(planned: float | None, measured: float | None) -> str:
    if not planned or measured is None:
        return ""
    return f"{100 * (measured / planned - 1):+.1f}%"
