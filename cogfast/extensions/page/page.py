"""Builds the page of a run, or of several (`cogfast report`), and writes it: one HTML file, and relative links
to videos."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from statistics import median
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from cogfast import __version__
from cogfast.config.sat_unused import LOSS, NETWORK, NETWORKS
from cogfast.core.files import WriteError, read_limited, write_text
from cogfast.core.values import OF_TEXTS, printable
from cogfast.extensions.page.metrics_table import MOST_POINTS, encode
from cogfast.extensions.page.record import RunRecord, is_run, read_run
from cogfast.extensions.sample.flags import input_words
from cogfast.model.keys import ModelKeys, conditions_of_run
from cogfast.model.weights.checkpoint_manifest import is_in_run, run_of

NAME = "index.html"
_STATIC = Path(__file__).parent / "static"
_GENERATOR = "cogfast run page"  # in a meta element, by which a page is recognized
_START_BYTES, _MOST_BYTES = 1024, 64 << 20  # of an earlier page
_RELOAD_SECONDS = 60  # between two reloads of an active run's page
_NUM_RECENT = 100  # last lines, whose median is the speed of now
_TIMESTEPS = f"{LOSS}.params.sigma_sampler_config.params.num_idx"
_BAND = re.compile(r"(?:valid|train)_loss_band_(\d{1,4})")
# Title, pattern of the keys, unit, whether smoothing applies.
_PLOTS = (
    ("Loss", "loss|valid_loss", "", True),
    ("Training loss by kind", "loss_(?:video|image|prior)", "", True),
    ("Held-out loss by noise level", r"valid_loss_band_\d{1,4}", "", False),
    ("Training loss by noise level", r"train_loss_band_\d{1,4}", "", True),
    ("Learning rate", "lr", "", False),
    ("Time of a step", r"\w+_ms", "ms", True),
    ("Memory", r"memory_\w+", "GiB", False),
    ("Gradient norm, before clipping", "grad_norm", "", True),
    ("Kept share of attention, estimated", r"attention_kept(?:_layer_\d+)?", "", False),
    ("Throughput", "samples_per_s", "samples/s", True),
    ("Score", "score/.+", "", False),
    ("Logged by the trainer", "log/.+", "", True),
)
_LABELS = {
    "loss": "training",
    "loss_video": "clips",
    "loss_image": "pictures",
    "loss_prior": "prior",
    "valid_loss": "held out (configured loss)",
    "step_ms": "whole step",
    "attention_kept": "all layers",
}


def write_page(path: Path, document: str) -> None:
    """Write a page atomically. ValueError if the file exists and is no page of cogfast."""
    if path.exists():
        start = read_limited(path, _MOST_BYTES, "move it, or use --out FILE")[:_START_BYTES]
        if _GENERATOR.encode() not in start:
            raise ValueError(f"{path} exists and is no page of cogfast; move it, or use --out FILE")
    write_text(path, document)


def report(paths: Sequence[Path], out: Path | None) -> Path:
    """Write the page of the runs and return its path.

    out: None: index.html in the folder of a single run, report.html for several. ValueError if a path
    is no run, or the page cannot be written.
    """
    runs = [_folder(path) for path in paths]
    for i, run in enumerate(runs):
        if any(run.samefile(other) for other in runs[:i]):
            raise ValueError(f"{paths[i]}: the same run is given twice; give each run once")
    if out is None:
        out = runs[0] / NAME if len(runs) == 1 else Path("report.html")
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder; give the path of a file, such as {out / NAME}")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: the folder {out.parent} does not exist; create it")
    records = [read_run(run) for run in runs]
    try:
        write_page(out, page_of(records, out))
    except (OSError, WriteError) as error:
        raise ValueError(f"{error}; give another file with --out FILE") from None
    return out


def _folder(path: Path) -> Path:
    """Return the folder of a run, or that of a checkpoint's run."""
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder; give the folder of a run")
    # A path such as `.` has no name of its own, which decides what it is.
    if not is_run(path) and is_in_run(path.absolute()):
        path = run_of(path.absolute())
    if not is_run(path):
        text = f"{path} is not the folder of a run, since it has neither metrics.jsonl nor training_config.yaml"
        raise ValueError(f"{text}; give a folder that `cogfast train` has written")
    return path


def page_of(records: Sequence[RunRecord], page: Path, is_active: bool = False) -> str:
    """Return the page of a run, or of a comparison. page: where it will be, for its links."""
    paths = [record.name for record in records]
    names = [r.name if paths.count(r.name) == 1 else printable(str(r.folder)) for r in records]
    runs = list(zip(names, records, strict=True))
    now = datetime.now().astimezone()
    # A page of many runs stays about as large as that of one.
    most = max(1000, MOST_POINTS // len(records))
    plots = list(_plots(runs))
    drawn = {line["key"]: None for plot in plots for line in plot["lines"]}
    data = {
        "written": now.timestamp(),
        "reload": _RELOAD_SECONDS if is_active else None,
        "runs": [encode(record.columns, drawn, most) for record in records],
        "plots": plots,
    }
    static = {path.name: path.read_text(encoding="utf-8") for path in sorted(_STATIC.iterdir())}
    return _template().render(
        data=data,
        runs=runs,
        problems=[(name, problem) for name, record in runs for problem in record.problems],
        tiles=[list(_tiles(record)) for record in records],
        prompts=_prompts(records),
        settings=list(records[0].settings()),
        commands=list(_commands(records[0])),
        differences=list(_differences(records)),
        static=static,
        policy=_policy(static),
        generator=_GENERATOR,
        version=__version__,
        now=now,
        href=lambda record, file: _address(record.folder, file, page),
    )


@cache
def _template() -> Template:
    # Control and direction characters are shown as escapes.
    finalize = lambda v: v if isinstance(v, Markup) else printable(str(v), OF_TEXTS)
    environment = Environment(
        loader=FileSystemLoader(_STATIC),
        autoescape=True,
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"raw": Markup, "value": _show, "number": _number}
    return environment.get_template("page.html.jinja")


def _policy(static: Mapping[str, str]) -> str:
    """Return the content security policy: only the page's own scripts and styles have an effect."""
    digest = lambda name: base64.b64encode(hashlib.sha256(static[name].encode()).digest()).decode()
    hashes = {name: f"'sha256-{digest(name)}'" for name in static}
    return (
        f"default-src 'none'; script-src {hashes['uPlot.min.js']} {hashes['page.js']}; "
        f"style-src {hashes['uPlot.min.css']} {hashes['page.css']}; "
        # A web server, and a disk.
        "img-src data:; media-src 'self' file:; base-uri 'none'; form-action 'none'"
    )


def _plots(runs: Sequence[tuple[str, RunRecord]]) -> Iterator[dict]:
    """Yield a plot of a run's keys; for several runs a plot of each key with a line in each run's tone."""
    keys = sorted(dict.fromkeys(k for _, r in runs for k in r.columns), key=lambda k: "valid_" in k)
    timesteps = runs[0][1].plain.get(_TIMESTEPS)
    for title, pattern, unit, is_smooth in _PLOTS:
        found = [key for key in keys if re.fullmatch(pattern, key)]
        bands = len(found) if "band" in pattern else 0
        labels = [(key, _label(key, bands, timesteps)) for key in found]
        title = f"{title} ({unit})" if unit else title
        plot = {"title": title, "isSmooth": is_smooth}
        if len(runs) == 1 and found:
            yield {**plot, "lines": [{"run": 0, "key": k, "label": label} for k, label in labels]}
        for key, label in labels if len(runs) > 1 else ():
            if key.endswith("_ms") and key != "step_ms":
                continue  # the parts are on the runs' own pages
            lines = [
                {"run": i, "key": key, "label": name, "tone": i}
                for i, (name, record) in enumerate(runs)
                if key in record.columns
            ]
            whole = f"{title}: {label}" if len(found) > 1 else title
            yield {**plot, "title": whole, "lines": lines}


def _label(key: str, num_bands: int, num_timesteps: object) -> str:
    match = _BAND.fullmatch(key)
    if match is None:
        name = key.removeprefix("memory_").removesuffix("_ms").removesuffix("_gib")
        return _LABELS.get(key, name.replace("_", " "))
    number = int(match[1])
    if not isinstance(num_timesteps, int) or number >= num_bands:
        return f"band {number}"
    # The borders of a band, as an evaluation computes its middle.
    start, end = (round(i * num_timesteps / num_bands) for i in (number, number + 1))
    return f"t {start}–{end - 1}"


def _tiles(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value, note) of the last numbers."""
    columns = record.columns
    of = f"of {record.num_steps:,}" if record.num_steps is not None else ""
    yield "Step", f"{record.step:,}", of
    loss, held_out = columns.get("loss_running") or columns.get("loss"), columns.get("valid_loss")
    if loss is not None:
        yield "Loss", _number(loss.last), f"{_number(loss.finite[0])} at step {loss.steps[0]:,}"
    if held_out is not None:
        best = min(held_out.finite)
        at = held_out.steps[held_out.values.index(best)]
        yield "Held-out loss", _number(held_out.last), f"lowest {_number(best)} at step {at:,}"
    if "step_ms" in columns:
        ms, left = median(columns["step_ms"].finite[-_NUM_RECENT:]), ""
        if record.num_steps is not None and record.step < record.num_steps:
            hours = (record.num_steps - record.step) * ms / 3.6e6
            left = f"{hours:.1f} h left" if hours >= 1 else f"{max(1, round(60 * hours))} min left"
        yield "Time of a step", f"{_number(ms)} ms", left
    for key in ("memory_reserved_gib", "memory_rss_gib"):
        if key in columns:
            yield "Memory", f"{_number(max(columns[key].finite))} GiB", "peak"


def _number(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _show(value: object) -> str:
    """Format a value of a configuration: JSON, but text without quotes where it is unmistakable."""
    if isinstance(value, str) and value and value == value.strip():
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _address(folder: Path, file: str, page: Path) -> str:
    """Return the relative link from a page to a file in a run's folder."""
    start = os.path.relpath(folder.absolute(), page.absolute().parent)
    # `./` first: a colon in the first part would be read as a scheme.
    return "./" + quote(os.fsencode(os.path.normpath(os.path.join(start, file))))


def _prompts(records: Sequence[RunRecord]) -> list[tuple[str, list]]:
    """Return (prompt, [(number of the run, sample)]), those of all runs first; references first."""
    found: dict[tuple[str, int], list] = {}
    for i, record in enumerate(records):
        for sample in record.samples:
            found.setdefault(sample.prompt, []).append((i, sample))
    for cells in found.values():
        references = [cell for cell in cells if cell[1].step is None][:1]
        cells[:] = references + [cell for cell in cells if cell[1].step is not None]
    num_runs = lambda item: len({i for i, sample in item[1] if sample.step is not None})
    return [(text, cells) for (text, _), cells in sorted(found.items(), key=num_runs, reverse=True)]


def _differences(records: Sequence[RunRecord]) -> Iterator[tuple[str, list[str]]]:
    """Yield (key, value of each run) where the effective values differ."""
    runs = [record.compared() for record in records]
    for key in dict.fromkeys(key for run in runs for key in run):
        values = [_show(run[key]) if key in run else "–" for run in runs]
        if len(set(values)) > 1:
            yield key, values


def _commands(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield (title, command line). Those that need weights are left out until a checkpoint exists."""
    run = shlex.quote(str(record.folder))
    if record.checkpoint is not None:
        config = shlex.quote(str(record.config))
        # No name of the run's files, which may have been received
        own = " --allow-import PACKAGE" * bool(record.facts and record.facts.allow_import)
        train = f"{_launcher(record.environment)} train --base {config} --resume {run}{own}"
        is_done = record.num_steps is not None and record.step >= record.num_steps
        title = "Train on" if is_done else "Resume"
        more = " args.train_iters=MORE_STEPS" * is_done
        yield f"{title} from checkpoint {record.checkpoint.name}", f"{train}{more}"
        keys = ("conditions", "noised_image_input")
        inputs = conditions_of_run({key: record.plain.get(f"model.{key}") for key in keys})
        files = input_words(inputs, record.plain.get(ModelKeys.key("given_frames")))
        is_own = record.plain.get(f"{NETWORK}.target") not in NETWORKS
        for key in record.plain if is_own else ():
            if (name := key.removeprefix("data.params.tensors.")) != key:
                files += f" --tensor {shlex.quote(f'{name}=FILE.npy')}"
        prompt = f'--prompt "A PROMPT OF YOUR OWN"{files}'
        yield "Sample a video", f"cogfast sample {run}{own} {prompt} --out samples"
        to = "lora --to peft" if record.is_lora else "pipeline --to diffusers"
        ema = " --ema" if record.facts is not None and record.facts.shows_ema else ""
        ema += " --allow-unexpected" * is_own  # no other format has added modules
        has_others = record.is_lora or not record.plain.get(ModelKeys.key("trainable_modules"))
        if has_others or not is_own:
            yield "Convert to diffusers", f"cogfast convert {run} {to}{ema}"
            yield "Convert to SAT", f"cogfast convert {run} sat --to sat{ema}"
    yield "Write this page again", f"cogfast report {run}"
    yield "Compare with another run", f"cogfast report {run} OTHER_RUN --out comparison.html"


def _launcher(environment: Mapping[str, object]) -> str:
    """Return the command that starts as many processes as the run had."""
    world, devices = environment.get("world_size"), environment.get("devices")
    if type(world) is not int or world <= 1:
        return "cogfast"
    here = len(devices) if isinstance(devices, list) and devices else world
    nodes = ""
    if here < world and world % here == 0:
        nodes = f"--nnodes={world // here} --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 "
        world = here
    return f"torchrun {nodes}--nproc_per_node={world} --no-python cogfast"
