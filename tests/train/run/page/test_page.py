"""The page of a run: what it shows of a whole, an old, a damaged and a hostile folder."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shlex
from pathlib import Path
from statistics import median
from urllib.parse import unquote

import pytest

from cogfast.config import load_config
from cogfast.model.weights.formats.checkpoint_manifest import FORMAT, write_manifest
from cogfast.train.run.page.document import page_of_run, page_of_runs, write_page
from cogfast.train.run.page.markup import address, tag, text
from cogfast.train.run.page.metrics_table import Column, encode, thinned, to_columns
from cogfast.train.run.page.record import read_run
from cogfast.train.run.page.samples import MOST_CELLS, find_evaluations
from cogfast.train.run.page.writer import RunPage
from cogfast.train.trainer import Trainer
from tests.support.tiny_run import run_folder, write_clips, write_config
from tests.train.run.page.run_folders import PROMPTS, Page, lines, write_evaluation, write_run

SPEED = ("step_ms", "samples_per_s")
HOSTILE = '</script><img src=x onerror="alert(1)">\u202e" onmouseover=alert(2) \''


def page_of(run: Path) -> Page:
    return Page(page_of_run(read_run(run), run / "index.html"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("page") / "tiny-2026-01-01-00-00-00")


@pytest.fixture(scope="module")
def whole(run: Path) -> Page:
    return page_of(run)


# --- a whole run ---


def test_a_page_has_all_sections_and_names_the_run(whole: Page) -> None:
    page = whole
    names = ["curves", "samples", "commands", "data", "configuration", "versions"]
    assert page.sections == names
    assert [link for link in page.attributes("a", "href") if link.startswith("#")][1:] == [
        f"#{name}" for name in names
    ]
    assert "tiny-2026-01-01-00-00-00" in page.text("head")
    assert "step 200 of 1,000" in page.text("head")
    assert "5.83 million parameters trained" in page.text("head")


def test_the_plots_have_the_numbers_of_the_metrics(whole: Page) -> None:
    page = whole
    (record,) = page.data["runs"]
    found = {}
    for key, (axis, values) in record["columns"].items():
        for step, value in zip(record["axes"][axis], values, strict=True):
            found[key, step] = value
    wanted = {
        (key, line["step"]): value
        for line in lines(20)
        for key, value in line.items()
        if key not in ("step", "mfu")
    }
    assert found == {place: pytest.approx(value, rel=1e-5) for place, value in wanted.items()}
    assert page.plots() == {
        "Loss": ["logged steps", "running mean", "held out"],
        "Held-out loss by noise level": ["t 0–249", "t 250–499", "t 500–749", "t 750–999"],
        "Training loss by noise level": ["t 0–249", "t 250–499", "t 500–749", "t 750–999"],
        "Learning rate": ["learning rate"],
        "Gradient norm": ["gradient norm"],
        "Update-to-weight ratio": ["update_ratio"],
        "Time of a step": ["whole step", "waiting for data"],
        "Throughput": ["samples per second"],
        "Memory": ["allocated, peak", "reserved, peak"],
    }
    more = [plot["title"] for plot in page.data["plots"] if plot["more"]]
    assert more == ["tokens_per_s", "model_tflops", "skipped", "skipped_in_a_row"]


def test_the_grid_has_a_row_per_prompt_and_a_column_per_step(run: Path, whole: Page) -> None:
    page = whole
    head, *rows = page.tables["samples"]
    assert head == ["Prompt", "step 50", "step 100"]
    assert [row[0] for row in rows] == list(PROMPTS)
    sources = [unquote(source) for source in page.attributes("video", "src")]
    assert sources == [
        f"./samples/step-{step:08d}/{i:03d}-prompt-{i:06x}.mp4"
        for i in (0, 1)
        for step in (50, 100)
    ]
    assert all((run / source).is_file() for source in sources)
    # Rows and columns of data.params.video_size.
    assert set(page.attributes("video", "width")) == {"32"}


def test_the_configuration_shows_what_differs_first(run: Path, whole: Page) -> None:
    rows = whole.tables["configuration"]
    first = rows[: rows.index(["Key", "Value", "From"])]
    assert first[0] == ["Key", "Value", "Default", "From"]
    found = {key: rest for key, *rest in first[1:]}
    assert found["args.seed"] == ["7", "1234", "command line"]
    assert found["args.train_iters"] == ["4", "null", f"{run.name}.yaml"]
    assert found["deepspeed.gradient_clipping"] == ["1.0", "", f"{run.name}.yaml"]
    assert found["args.batch_size"] == ["4", "1", f"{run.name}.yaml"]  # the deepspeed section's
    assert "args.train_data" in found and "args.split" not in found
    assert not any(key.startswith("model.network_config") for key in found)
    every = {row[0]: row[1:] for row in rows[len(first) :]}
    assert every["args.split"] == ["1,0,0", "default"]
    assert every["model.network_config.params.hidden_size"] == ["32", f"{run.name}.yaml"]
    config = load_config([run / "training_config.yaml"], is_of_run=True)
    assert set(every) >= {f"args.{key}" for key in config.args}


def test_the_bucket_table_and_the_versions(whole: Page) -> None:
    page = whole
    assert page.tables["data"][1:] == [
        ["9x32x32", "40", "66.7%"],
        ["17x32x32", "15", "25.0%"],
        ["left out", "5", "8.3%"],
    ]
    assert ["devices", "2 x NVIDIA H100"] in page.tables["versions"]


def test_commands_are_those_that_cogfast_takes(run: Path, whole: Page, tmp_path: Path) -> None:
    from cogfast.cli.convert_options import parse_convert
    from cogfast.cli.options import parse_report, parse_sample, parse_train

    assert "No checkpoint is saved yet" in whole.text("commands")
    saved = tmp_path / "a run"
    saved.mkdir()
    for name in ("metrics.jsonl", "training_config.yaml", "environment.json"):
        (saved / name).write_text((run / name).read_text())
    checkpoint = saved / "checkpoints" / "00000150"
    checkpoint.mkdir(parents=True)
    write_manifest(
        checkpoint,
        {
            "format": FORMAT,
            "step": 150,
            "parameters": {},
            "slices": {},
            "bytes": {},
            "checksums": {},
        },
    )
    (saved / "checkpoints" / "latest").write_text("00000150\n")
    page = page_of(saved)
    found = page.attributes("button", "data-text")
    assert found[0].startswith("torchrun --nproc_per_node=2 --no-python cogfast train --base ")
    parsers = {
        "train": parse_train,
        "sample": parse_sample,
        "convert": parse_convert,
        "report": parse_report,
    }
    for line in found:
        words = shlex.split(line)
        start = words.index("cogfast")
        parsers[words[start + 1]](words[start + 2 :])
    request = parse_train(shlex.split(found[0])[5:])
    assert request.base == [str(saved / "training_config.yaml")]
    assert "Continues from checkpoints/00000150" in page.text("commands")


def test_plan_and_reality(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=())
    plan = {"memory": {"weights": 2**30, "optimizer": 3 * 2**30}, "peak": 60 * 2**30}
    (run / "plan.json").write_text(json.dumps({**plan, "step_ms": 400.0}))
    rows = page_of(run).tables["plan"]
    # The plan has no measured figures: those of the metrics stand for them.
    assert rows[1] == ["Peak of memory per device", "60.00 GiB", "61.23 GiB", "+2.1%"]
    assert rows[2][1:3] == ["400 ms", "804 ms"]
    assert rows[4:] == [["optimizer", "3.00 GiB", ""], ["weights", "1.00 GiB", ""]]
    measured = {"step_ms": None, "measured_peak": 54 * 2**30, "measured_step_ms": None}
    (run / "plan.json").write_text(json.dumps({**plan, **measured}))
    assert page_of(run).tables["plan"][1][2:] == ["54.00 GiB", "-10.0%"]


def test_bad_samples_are_listed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=())
    bad = [{"path": f"videos/{i}.mp4", "reason": "cannot be decoded"} for i in range(300)]
    text = "\n".join(map(json.dumps, bad)) + '\n{"path": "half'
    (run / "bad_samples.jsonl").write_text(text)
    page = page_of(run)
    assert "300 samples could not be used" in page.text("data")
    assert "and 100 more in bad_samples.jsonl" in page.text("data")
    assert ["videos/199.mp4", "cannot be decoded"] in page.tables["data"]
    assert "bad_samples.jsonl: 1 line left out" in page.text("head")


def test_keys_that_are_absent_make_no_plot_and_no_section(tmp_path: Path) -> None:
    run = tmp_path / "old"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": null}\n')
    page = page_of(run)
    assert page.plots() == {"Loss": ["logged steps"]}
    assert page.sections == ["curves", "commands", "versions"]
    assert page.data["runs"][0]["columns"] == {"loss": [0, [0.5, None]]}
    (run / "metrics.jsonl").unlink()
    (run / "training_config.yaml").write_text("args:\n  seed: 5\n")
    page = page_of(run)
    assert page.sections == ["commands", "configuration", "versions"]
    # The origins of an older version's run are unknown.
    assert page.tables["configuration"][:2] == [
        ["Key", "Value", "Default"],
        ["args.seed", "5", "1234"],
    ]


def test_the_layout_of_the_diffusers_trainer(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=())
    for step in (5, 10):
        write_evaluation(run / "validation_res", f"validation-{step}-", PROMPTS)
    (run / "validation_res" / "notes.txt").write_text("")
    page = page_of(run)
    head, *rows = page.tables["samples"]
    assert head == ["Prompt", "step 5", "step 10"]
    assert [row[0] for row in rows] == list(PROMPTS)
    assert all((run / unquote(s)).is_file() for s in page.attributes("video", "src"))


def test_a_resumed_run_shows_its_newest_configuration_and_what_changed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=())
    text = (
        (run / "training_config.yaml").read_text().replace("log_interval: 1\n", "log_interval: 2\n")
    )
    (run / "training_config-from-00000150.yaml").write_text(text)
    (run / "environment-from-00000150.json").write_text('{"torch": "2.14.0", "world_size": 2}')
    page = page_of(run)
    assert ["args.log_interval", "2", "20", f"{run.name}.yaml"] in page.tables["configuration"]
    assert "args.log_interval: 1 → 2" in page.text("configuration")
    assert page.tables["versions"][:2] == [
        ["", "start", "from 00000150"],
        ["torch", "2.13.0", "2.14.0"],
    ]


# --- damaged and hostile folders ---


def test_damage_is_left_out_and_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 210, "lo')
    (run / "plan.json").write_text('{"memory": {}, "peak": "large"}')
    (run / "environment.json").write_text("{")
    (run / "run_facts.json").write_text("[]")
    (run / "training_config.yaml").write_text("args:\n  seed: ${oc.env:HOME}\n")
    video = run / "samples" / "step-00000050" / "000-prompt-000000.mp4"
    video.unlink()
    (run / "samples" / "step-00000100" / "prompts.json").write_text("not json")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "latest").write_text("../../etc")
    page = page_of(run)
    found = page.text("head")
    for word in (
        "metrics.jsonl: 1 line left out",
        "plan.json: peak='large' must be a number",
        "environment.json: damaged JSON",
        "run_facts.json: [] must be a mapping",
        "training_config.yaml: args.seed=",
        "prompts.json: damaged JSON",
        "latest: damaged, it names no step",
    ):
        assert word in found, word
    assert page.sections == ["curves", "samples", "commands", "versions"]
    rows = page.tables["samples"][1:]
    # The listing of step 50 has the prompts of both.
    assert [row[0] for row in rows] == list(PROMPTS)
    assert [row[1] for row in rows] == ["missing", ""]
    assert len(page.attributes("video", "src")) == 3


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    clean = write_run(tmp_path / "clean", prompts=["a prompt"])
    run = write_run(tmp_path / "run" / "<i>x'\"&", prompts=[HOSTILE])
    line = {"step": 30, "loss": 1.0, HOSTILE: 2.0, "constructor": 1.0, "__proto__": 2}
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    facts = json.loads((run / "run_facts.json").read_text())
    facts["origins"]["args.seed"] = facts["buckets"][0][0] = HOSTILE
    (run / "run_facts.json").write_text(json.dumps(facts))
    (run / "environment.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    bad = {"path": HOSTILE, "reason": "\ud800 " + HOSTILE}
    (run / "bad_samples.jsonl").write_text(json.dumps(bad).replace("\\ud800", "") + "\n")
    (run / "plan.json").write_text(json.dumps({"memory": {HOSTILE: 1}, "peak": 1}))
    document = page_of_run(read_run(run), run / "index.html")
    page, wanted = Page(document), page_of(clean)
    assert "\u202e" not in document
    kinds = {kind for kind, _ in page.elements}
    assert kinds - {kind for kind, _ in wanted.elements} <= {"meter"}
    assert len(page.scripts) == len(wanted.scripts) == 4
    names = {name for _, found in page.elements for name in found}
    assert not {name for name in names if name.startswith("on")}
    assert HOSTILE.replace("\u202e", "\\u202e") in page.tables["samples"][1][0]
    assert page.data["runs"][0]["columns"][HOSTILE][1] == [2]
    (link,) = {s for s in page.attributes("video", "src") if "step-00000050" in s}
    assert (run / unquote(link)).is_file()


def test_numbers_that_no_plot_can_show(tmp_path: Path) -> None:
    found = [
        {"step": 2, "loss": 10**400, "a": "text", "b": True, "c": [1]},
        {"step": 1, "loss": float("inf"), "d": 5},
        {"step": -1, "loss": 3.0},
        {"step": 2**60, "loss": 4.0},
        {"step": 2, "loss": 0.25},
    ]
    columns, notes = to_columns(found)
    assert columns == {"loss": Column((1, 2), (None, 0.25)), "d": Column((1,), (5.0,))}
    assert notes == ["metrics.jsonl: lines with an impossible step are left out"]
    many, notes = to_columns([{"step": 1, **{f"key{i}": 1 for i in range(1000)}}])
    assert len(many) == 200 and "first 200 keys" in notes[0]
    text = encode(columns)
    assert json.loads(json.dumps(text, allow_nan=False)) == {
        "axes": [[1, 2], [1]],
        "columns": {"loss": [0, [None, 0.25]], "d": [1, [5]]},
    }


def test_a_prompt_list_that_leads_outside_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "samples" / "step-00000001"
    folder.mkdir(parents=True)
    (tmp_path / "secret.mp4").write_bytes(b"")
    listing = {"../../secret.mp4": "outside", "/etc/passwd.mp4": "root"}
    (folder / "prompts.json").write_text(json.dumps(listing))
    (folder / "a.mp4").write_bytes(b"")
    (found,), notes = find_evaluations(tmp_path)
    assert [sample.file for sample in found.samples.values()] == ["samples/step-00000001/a.mp4"]
    assert len(notes) == 2 and all("is no name of a sample" in note for note in notes)


# --- size and drawing ---


def test_thinning_keeps_every_extreme_and_few_points() -> None:
    """Compared with a plain search of each interval's extremes."""
    steps = tuple(range(5, 200_005, 5))
    values = [((i * 7919) % 10007) / 10007 for i in range(len(steps))]
    values[12_345], values[30_000], values[100] = 50.0, -50.0, None
    found = thinned(Column(steps, tuple(values)), 1000)
    assert len(found.steps) <= 1000 and list(found.steps) == sorted(set(found.steps))
    given = dict(zip(steps, values, strict=True))
    assert all(given[step] == value for step, value in zip(found.steps, found.values, strict=True))
    for start in range(0, 40_000, 80):
        part = [v for v in values[start : start + 80] if v is not None]
        kept = [
            v
            for s, v in zip(found.steps, found.values, strict=True)
            if start <= (s - 5) // 5 < start + 80
        ]
        assert (min(part), max(part)) == (min(kept), max(kept))
    same = Column((1, 2), (0.5, None))
    assert thinned(same, 2) is same


def test_a_long_run_is_below_3_mb_without_its_videos(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_lines=10_000, steps=())
    for step in range(50):
        folder = run / "samples" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        names = {f"00{i}-prompt-00000{i}.mp4": f"prompt {i} " + "word " * 200 for i in range(4)}
        (folder / "prompts.json").write_text(json.dumps(names))
        for name in names:
            (folder / name).write_bytes(b"")
    document = page_of_run(read_run(run), run / "index.html")
    assert len(document.encode()) < 3_000_000
    page = Page(document)
    assert len(page.attributes("video", "src")) == 200
    record = page.data["runs"][0]
    axis, values = record["columns"]["loss"]
    assert len(values) == len(record["axes"][axis]) == 10_000  # a browser draws them all
    assert len(record["axes"]) == 2  # all logging lines share their steps


def test_very_many_evaluations_are_spaced_evenly(tmp_path: Path) -> None:
    for step in range(1, 2 * MOST_CELLS + 2):
        folder = tmp_path / "samples" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "0-a.mp4").touch()
    found, notes = find_evaluations(tmp_path)
    steps = [evaluation.step for evaluation in found]
    assert (len(steps), steps[0], steps[-1]) == (MOST_CELLS, 1, 2 * MOST_CELLS + 1)
    assert {b - a for a, b in zip(steps, steps[1:], strict=False)} <= {2, 3}
    assert "evaluations are shown" in notes[0]


# --- the document ---


def test_the_policy_allows_the_page_itself_and_nothing_else(run: Path) -> None:
    """Browsers run a script only if its hash is in the policy."""
    document = page_of_run(read_run(run), run / "index.html")
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', document)
    rules = {name: rest for name, *rest in (rule.split() for rule in policy.split("; "))}
    assert rules["default-src"] == ["'none'"]
    hash_of = lambda text: (
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    )
    scripts = re.findall(r"<script>(.*?)</script>", document, re.DOTALL)
    assert rules["script-src"] == [hash_of(script) for script in scripts]
    (style,) = re.findall(r"<style>(.*?)</style>", document, re.DOTALL)
    assert rules["style-src"] == [hash_of(style)]
    page = Page(document)
    # Such an attribute would be blocked by the policy.
    assert not page.attributes("div", "style") and not page.attributes("span", "style")
    links = [link for link in page.attributes("a", "href") if not link.startswith("#")]
    assert links and all(link.startswith("./") for link in links)


def test_the_page_carries_the_licence_of_the_library(run: Path) -> None:
    document = page_of_run(read_run(run), run / "index.html")
    assert "Copyright (c) 2022 Leon Sorokin" in document
    assert "Permission is hereby granted, free of charge" in document


def test_the_installed_package_has_the_static_files() -> None:
    """setup.py lists them as package data."""
    from setuptools import Distribution
    from setuptools.command.build_py import build_py

    from tests.support.tiny_run import ROOT

    (given,) = re.findall(r"package_data=(\{.*\})", (ROOT / "setup.py").read_text())
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        packages = ["cogfast"]
        command = build_py(Distribution({"packages": packages, "package_data": json.loads(given)}))
        command.ensure_finalized()
        found = {name for *_, names in command.data_files for name in names}
    finally:
        os.chdir(before)
    static = ROOT / "cogfast" / "train" / "run" / "page" / "static"
    names = {f"train/run/page/static/{path.name}" for path in static.iterdir()}
    assert names <= found and len(names) == 6


def test_links_start_at_the_page(tmp_path: Path) -> None:
    run = tmp_path / "a b#c" / "run?"
    assert address(run, "samples/1:2%.mp4", run / "index.html") == "./samples/1%3A2%25.mp4"
    assert address(run, "x", tmp_path / "report.html") == "./a%20b%23c/run%3F/x"
    assert address(run, "x", tmp_path / "reports" / "a.html") == "./../a%20b%23c/run%3F/x"


def test_markup_escapes_text_and_attributes() -> None:
    found = tag("a", "<b>", tag("i", "x"), href='"><', hidden=True, id=None)
    assert found == '<a href="&quot;&gt;&lt;" hidden>&lt;b&gt;<i>x</i></a>'
    assert text("\x1b[0m\u202e\ud800") == "\\x1b[0m\\u202e\\ud800"


def test_a_file_that_is_no_page_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "index.html"
    path.write_text("<h1>mine</h1>")
    with pytest.raises(ValueError, match=r"index.html exists and is no page of cogfast"):
        write_page(path, "<html>")
    assert path.read_text() == "<h1>mine</h1>"
    path.unlink()
    os.mkfifo(path)  # a run that opened it would wait for ever
    with pytest.raises(ValueError, match=r"index.html: not a regular file; move it, or use --out"):
        write_page(path, "<html>")


# --- a real run ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps with an evaluation at each second step and at the end."""
    folder = tmp_path_factory.mktemp("trained")
    data = write_clips(folder / "data")
    base = write_config(
        folder / "base.yaml",
        data,
        train_iters=3,
        eval_interval=2,
        eval_at_end=True,
        eval_prompts=["a bar moves", HOSTILE],
        eval_sampling_steps=2,
        valid_data=[str(data)],
        log_videos=False,
    )
    Trainer(load_config([base])).train()
    return run_folder(folder / "runs")


def test_a_run_writes_its_page(trained: Path) -> None:
    page = Page((trained / "index.html").read_text())
    head, *rows = page.tables["samples"]
    assert head == ["Prompt", "step 2", "step 3"]
    assert rows[0] == ["a bar moves", "", ""]
    assert all((trained / unquote(s)).is_file() for s in page.attributes("video", "src"))
    assert "step 3 of 3" in page.text("head")
    assert "Continues from checkpoints/00000003" in page.text("commands")
    assert ["args.eval_interval", "2", "null", "base.yaml"] in page.tables["configuration"]
    assert page.attributes("aside", "class") == []  # nothing could not be read


def test_the_page_is_the_same_from_the_files(trained: Path) -> None:
    """The run knows its metrics; a report reads them from the disk."""
    read = page_of(trained)
    written = Page((trained / "index.html").read_text())
    assert read.data == written.data and read.tables == written.tables


def test_a_page_that_cannot_be_written_ends_no_run(
    tmp_path: Path, trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "index.html").mkdir()
    page = RunPage(tmp_path)
    page.write([{"step": 1, "loss": 1.0}])
    page.write([{"step": 1, "loss": 1.0}])
    assert len(caplog.messages) == 1
    assert "the page of the run is not written" in caplog.messages[0]
    (tmp_path / "index.html").rmdir()
    page.write([{"step": 1, "loss": 1.0}])
    assert Page((tmp_path / "index.html").read_text()).plots() == {"Loss": ["logged steps"]}


# --- several runs ---


def test_a_comparison_of_runs(run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", num_lines=10, steps=(100, 150), lr_schedule="cosine")
    out = tmp_path / "report.html"
    page = Page(page_of_runs([read_run(run), read_run(other)], out))
    assert page.sections == ["curves", "samples", "configuration"]
    labels = [run.name, "other"]
    assert page.plots()["Loss, running mean"] == labels
    assert page.plots()["Held-out loss"] == labels
    head, *rows = page.tables["configuration"]
    assert head == ["Key", *labels]
    assert {row[0]: row[1:] for row in rows}["args.lr_schedule"] == ["constant", "cosine"]
    assert not any(row[1] == row[2] for row in rows)
    head, *rows = page.tables["samples"]
    assert head == ["Prompt", *labels, *labels, *labels]  # at steps 50, 100 and 150
    assert rows[0] == [PROMPTS[0], "", "–", "", "", "–", ""]
    # The slider starts at the last step that both have.
    ((_, slider),) = [e for e in page.elements if e[0] == "input"]
    assert slider["value"] == "1"
    assert all((tmp_path / unquote(s)).is_file() for s in page.attributes("video", "src"))
    *_, last, held_out = lines(20)
    speed = [median(line[key] for line in lines(20) if key in line) for key in SPEED]
    wanted = [200, last["loss_running"], held_out["valid_loss"], *speed]
    name, *found = page.tables["head"][1]
    assert name == run.name
    assert [float(text) for text in found] == pytest.approx(wanted, rel=1e-2)


def test_a_line_that_a_crash_has_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n\n{"step": 2, "lo')
    run = read_run(tmp_path)
    assert run.columns["loss"] == Column((1,), (1.0,))
    assert run.notes[0].startswith(
        "metrics.jsonl: 1 line left out, since they are damaged; first: line 3"
    )
