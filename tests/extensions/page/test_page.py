"""The page of a run: what it shows of a whole, a damaged and a hostile folder."""

import base64
import hashlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from omegaconf import OmegaConf
from torch import Tensor

from cogfast.data.video.reader import open_video
from cogfast.extensions.page.metrics_table import Column, encode, thinned, to_columns
from cogfast.extensions.page.page import page_of, write_page
from cogfast.extensions.page.record import read_run
from cogfast.extensions.page.watch import RunPage
from cogfast.model.weights.checkpoint_manifest import FORMAT, write_manifest
from cogfast.train.run.metrics_file import read_metrics
from cogfast.train.trainer import Trainer
from tests.extensions.page.run_folders import PROMPTS, Page, lines, write_evaluation, write_run
from tests.support.refusals import assert_refused
from tests.support.runs import Run
from tests.train.run.test_lora_runs import ASKED, lora_run

HOSTILE = '</script><img src=x onerror="alert(1)">\u202e" onmouseover=alert(2) \'{{ 7*7 }}<!--'
SHOWN = HOSTILE.replace("\u202e", "\\u202e")


def page_at(*runs: Path, is_active: bool = False) -> Page:
    page = runs[0] / "index.html" if len(runs) == 1 else runs[0].parent / "report.html"
    return Page(page_of([read_run(run) for run in runs], page, is_active))


def captions(page: Page) -> list[str]:
    """Return what each video of a page shows."""
    return page.attributes("video", "aria-label")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("page") / "tiny-2026-01-01-00-00-00")


@pytest.fixture(scope="module")
def whole(run: Path) -> Page:
    return page_at(run)


# --- a whole run ---


def test_a_page_has_all_sections_and_names_the_run(whole: Page) -> None:
    assert whole.sections == ["curves", "samples", "settings", "versions", "commands"]
    for text in ("tiny-2026-01-01-00-00-00", "200 of 1,000", "5,830,000 trained parameters"):
        assert text in whole.text("head")
    last = [line for line in lines(20) if "loss_running" in line][-1]
    assert f"Loss {last['loss_running']:.4g}" in whole.text("head")
    # 800 steps are left, of 803.5 ms in the median.
    assert "11 min left" in whole.text("head")


def test_the_curves_have_the_numbers_of_the_metrics(whole: Page) -> None:
    wanted = {
        (key, line["step"]): value
        for line in lines(20)
        for key, value in line.items()
        if re.fullmatch(
            r"(valid_|train_)?loss(_band_.)?|lr|grad_norm|\w+_ms|samples\w+|memory\w+", key
        )
    }
    assert whole.values() == {place: pytest.approx(v, rel=1e-5) for place, v in wanted.items()}
    bands = ["t 0–249", "t 250–499", "t 500–749", "t 750–999"]
    assert whole.plots() == {
        "Loss": ["training", "held out (configured loss)"],
        "Held-out loss by noise level": bands,
        "Training loss by noise level": bands,
        "Learning rate": ["lr"],
        "Time of a step (ms)": ["whole step", "data wait"],
        "Memory (GiB)": ["allocated", "reserved"],
        "Gradient norm, before clipping": ["grad norm"],
        "Throughput (samples/s)": ["samples per s"],
    }


def test_the_time_axis_is_the_sum_of_the_steps(whole: Page) -> None:
    """Compared with a plain sum over the lines; each stands for ten steps."""
    hours, found = 0.0, {}
    for line in lines(20):
        if "step_ms" in line:
            hours += 10 * line["step_ms"] / 3_600_000
        found[line["step"]] = hours
    for steps, times in whole.data["runs"][0]["axes"]:
        assert times == pytest.approx([found[step] for step in steps], rel=1e-5)


def test_samples_stand_beside_each_other_and_beside_the_reference(
    run: Path, whole: Page, tmp_path: Path
) -> None:
    assert captions(whole) == [f"step {step}: {text}" for text in PROMPTS for step in (50, 100)]
    sources = [unquote(source) for source in whole.attributes("video", "src")]
    assert sources == [
        f"./samples/step-{step:08d}/{i:03d}-prompt-{i:06x}.mp4"
        for i in (0, 1)
        for step in (50, 100)
    ]
    assert all((run / source).is_file() for source in sources)
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    first = copy / "reference" / "000-prompt-000000.mp4"
    first.parent.mkdir()
    shutil.copy(run / sources[0], first)
    shutil.copy(run / sources[0], first.with_name("a clip that no prompt has.mp4"))
    page = page_at(copy)
    assert captions(page)[:3] == [
        f"{n}: {PROMPTS[0]}" for n in ("reference", "step 50", "step 100")
    ]
    assert len(captions(page)) == 5
    assert page.attributes("video", "src")[0] == "./reference/000-prompt-000000.mp4"


def test_the_settings_show_what_was_set_first(run: Path, whole: Page) -> None:
    rows = whole.tables["settings"]
    head = ["Key", "Value", "Default", "From"]
    assert rows[0] == head
    end = rows.index(head, 1)
    found = {key: rest for key, *rest in rows[1:end]}
    assert found["args.seed"] == ["7", "1234", "command line"]
    assert found["args.train_iters"] == ["4", "", f"{run.name}.yaml"]
    assert found["deepspeed.gradient_clipping"] == ["1.0", "", f"{run.name}.yaml"]
    assert found["args.batch_size"] == ["4", "1", f"{run.name}.yaml"]  # the deepspeed section's
    assert "deepspeed.train_micro_batch_size_per_gpu" not in found
    assert "args.train_data" in found and "args.split" not in found
    assert not any(key.startswith("model.network_config") for key in found)
    every = {row[0]: row[1:] for row in rows[end + 1 :]}
    assert every["args.split"] == ["1,0,0", "1,0,0", "default"]
    assert every["model.network_config.params.hidden_size"] == ["32", "", f"{run.name}.yaml"]
    config = OmegaConf.load(run / "training_config.yaml")
    assert set(every) >= {f"args.{key}" for key in config.args}


def test_a_cpu_has_no_empty_values(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=())
    assert "devices" in page_at(run).text("versions")
    environment = {"torch": "2.13.0", "cuda": None, "devices": [], "world_size": 1}
    (run / "environment.json").write_text(json.dumps(environment))
    assert page_at(run).text("versions") == "Versions and machine torch 2.13.0 world_size 1"


def save_checkpoint(run: Path, step: int) -> None:
    checkpoint = run / "checkpoints" / f"{step:08d}"
    checkpoint.mkdir(parents=True)
    kinds = ("parameters", "frozen", "slices", "bytes", "checksums")
    empty: dict[str, Mapping] = {kind: {} for kind in kinds}
    write_manifest(checkpoint, {"format": FORMAT, "step": step, **empty})
    (run / "checkpoints" / "latest").write_text(f"{checkpoint.name}\n")


def commands(page: Page) -> list[str]:
    return [line for line in page.code if "cogfast " in line]


def test_commands_are_those_that_cogfast_takes(run: Path, whole: Page, tmp_path: Path) -> None:
    from cogfast.cli.folder_options import parse_convert, parse_report
    from cogfast.cli.options import parse_sample, parse_train

    assert "No checkpoint is saved yet" in whole.text("commands")
    saved = tmp_path / "a run"
    saved.mkdir()
    for name in ("metrics.jsonl", "training_config.yaml", "environment.json"):
        (saved / name).write_text((run / name).read_text())
    save_checkpoint(saved, 150)
    page = page_at(saved)
    found = commands(page)
    assert found[0].startswith("torchrun --nproc_per_node=2 --no-python cogfast train --base ")
    parsers = {"train": parse_train, "sample": parse_sample, "convert": parse_convert}
    parsers |= {"report": parse_report}
    kinds = []
    for line in found:
        words = shlex.split(line)
        start = words.index("cogfast")
        kinds.append(words[start + 1])
        parsers[words[start + 1]](words[start + 2 :])
    assert set(kinds) == set(parsers)
    request = parse_train(shlex.split(found[0])[5:])
    assert request.base == [str(saved / "training_config.yaml")]
    assert "Resume from checkpoint 00000150" in page.text("commands")
    # A resumption that changed keys has written a configuration.
    text = (saved / "training_config.yaml").read_text()
    text = text.replace("log_interval: 1\n", "log_interval: 2\n")
    (saved / "training_config-from-00000100.yaml").write_text(text)
    (saved / "environment-from-00000100.json").write_text('{"torch": "2.14.0", "world_size": 1}')
    page = page_at(saved)
    assert ["args.log_interval", "2", "20", ""] in page.tables["settings"]
    assert "torch 2.14.0" in page.text("versions")
    newest = shlex.quote(str(saved / "training_config-from-00000100.yaml"))
    assert commands(page)[0].startswith(f"cogfast train --base {newest} ")


def test_problems_are_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=())
    bad = [{"path": f"videos/{i}.mp4", "reason": "cannot be decoded"} for i in range(300)]
    (run / "bad_samples.jsonl").write_text("\n".join(map(json.dumps, bad)) + "\n")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 210, "loss": 1.0, "skipped": 3}\n')
    found = page_at(run).text("problems")
    first = json.dumps(bad[0])
    assert f"300 samples could not be used: bad_samples.jsonl; first: {first}" in found
    assert "3 steps skipped, since gradients were not finite" in found


def test_keys_that_are_absent_make_no_plot_and_no_section(tmp_path: Path) -> None:
    run = tmp_path / "old"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": null}\n')
    page = page_at(run)
    assert page.plots() == {"Loss": ["training"]}
    assert page.sections == ["curves", "commands"]
    assert page.values() == {("loss", 1): 0.5, ("loss", 2): None}
    (run / "metrics.jsonl").unlink()
    (run / "training_config.yaml").write_text("args:\n  seed: 5\n")
    page = page_at(run)
    assert page.sections == ["settings", "commands"]
    # A page without the run's facts shows no origins.
    assert page.tables["settings"][1] == ["args.seed", "5", "1234", ""]


def test_the_layout_of_the_diffusers_trainer(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=())
    for step in (5, 10):
        write_evaluation(run / "validation_res", f"validation-{step}-", PROMPTS)
    (run / "validation_res" / "notes.txt").write_text("")
    page = page_at(run)
    assert captions(page) == [f"step {step}: {text}" for text in PROMPTS for step in (5, 10)]
    assert all((run / unquote(s)).is_file() for s in page.attributes("video", "src"))


def test_a_page_reloads_itself_while_its_run_is_active(run: Path, whole: Page) -> None:
    assert whole.data["reload"] is None and "reloads itself" not in whole.text("head")
    active = page_at(run, is_active=True)
    assert active.data["reload"] == 60 and "reloads itself" in active.text("head")


# --- damaged and hostile folders ---


def test_damage_is_left_out_and_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 210, "lo')
    (run / "environment.json").write_text("{")
    (run / "run_facts.json").write_text("[]")
    (run / "training_config.yaml").write_text("args:\n  seed: ${oc.env:HOME}\n")
    video = run / "samples" / "step-00000050" / "000-prompt-000000.mp4"
    video.unlink()
    (run / "samples" / "step-00000100" / "prompts.json").write_text("not json")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "latest").write_text("../../etc")
    page = page_at(run)
    found = page.text("problems")
    words = ["metrics.jsonl: 1 line left out", "environment.json: damaged JSON"]
    words += ["run_facts.json: [] must be a mapping", "training_config.yaml: args.seed="]
    words += ["prompts.json: damaged JSON", "latest: damaged, it names no step"]
    for word in words:
        assert word in found, word
    assert page.sections == ["problems", "curves", "samples", "commands"]
    # The listing of step 50 has the prompts of both.
    shown = [(50, PROMPTS[1]), (100, PROMPTS[0]), (100, PROMPTS[1])]
    assert sorted(captions(page)) == sorted(f"step {step}: {text}" for step, text in shown)


@pytest.mark.parametrize("num_runs", [1, 2])
def test_hostile_text_stays_text(tmp_path: Path, num_runs: int) -> None:
    clean = [
        write_run(tmp_path / f"clean{i}", prompts=["a prompt"], log_interval=i + 1) for i in (0, 1)
    ]
    runs = [write_run(tmp_path / f"<i>x'\"&{i}", prompts=[HOSTILE]) for i in (0, 1)]
    for run in runs + clean:
        line = {"step": 300, "loss": 1.0, "skipped": 1}
        if run in runs:
            line |= {HOSTILE: 2.0, "constructor": 1.0, "__proto__": 2, f"memory_{HOSTILE}": 1.0}
        with open(run / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        save_checkpoint(run, 30)
    for i, run in enumerate(runs):
        facts = json.loads((run / "run_facts.json").read_text())
        facts["origins"]["args.seed"] = f"{HOSTILE}{i}"
        facts["effective"] = {"a": [HOSTILE, i], HOSTILE: f"{HOSTILE}{i}", "b": {HOSTILE: HOSTILE}}
        facts["allow_import"] = [HOSTILE]
        (run / "run_facts.json").write_text(json.dumps(facts))
        (run / "environment.json").write_text(json.dumps({HOSTILE: f"{HOSTILE}{i}"}))
        (run / "bad_samples.jsonl").write_bytes(f"{HOSTILE}\xff\n".encode("latin-1", "replace"))
        (run / "bad_samples_valid.jsonl").write_text(f"{HOSTILE}\n")
    page = runs[0] / "index.html"
    document = page_of([read_run(run) for run in runs[:num_runs]], page)
    document.encode()  # no lone surrogate
    found, wanted = Page(document), page_at(*clean[:num_runs])
    assert "\u202e" not in document and "49" not in found.text("samples")
    assert {kind for kind, _ in found.elements} == {kind for kind, _ in wanted.elements}
    assert len(found.scripts) == len(wanted.scripts) == 3
    names = {name for _, attributes in found.elements for name in attributes}
    assert not {name for name in names if name.startswith("on")}
    assert SHOWN in found.text("samples") and SHOWN in found.text("problems")
    assert SHOWN in found.text("versions" if num_runs == 1 else "differences")
    link = next(s for s in found.attributes("video", "src") if "step-00000050" in s)
    assert (runs[0] / unquote(link)).is_file()


def test_numbers_that_no_plot_can_show(tmp_path: Path) -> None:
    found = [
        {"step": 2, "loss": 10**400, "a": "text", "b": True, "c": [1]},
        {"step": 1, "loss": float("inf"), "d": 5},
        {"step": 2, "loss": 0.25},
    ]
    columns = to_columns(found)
    assert columns == {"loss": Column((1, 2), (None, 0.25)), "d": Column((1,), (5.0,))}
    text = encode(columns, [*columns, "absent"])
    assert json.loads(json.dumps(text, allow_nan=False)) == {
        "axes": [[[1, 2], [0, 0]], [[1], [0]]],
        "columns": {"loss": [0, [None, 0.25]], "d": [1, [5]]},
    }
    (tmp_path / "metrics.jsonl").write_text('{"step": -1}\n{"step": 9007199254740993}\n')
    assert len(read_metrics(tmp_path / "metrics.jsonl").problems) == 2


def test_a_prompt_list_that_leads_outside_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "samples" / "step-00000001"
    folder.mkdir(parents=True)
    (tmp_path / "secret.mp4").write_bytes(b"")
    listing = {"../../secret.mp4": "outside", "/etc/passwd.mp4": "root"}
    (folder / "prompts.json").write_text(json.dumps(listing))
    (folder / "a.mp4").write_bytes(b"")
    run = read_run(tmp_path)
    assert [sample.file for sample in run.samples] == ["samples/step-00000001/a.mp4"]
    assert len(run.problems) == 2 and all("is no name of a sample" in p for p in run.problems)


# --- size and drawing ---


def test_thinning_keeps_every_extreme_and_few_points() -> None:
    """Compared with a plain search of the extremes of every 80 points."""
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
    document = page_of([read_run(run)], run / "index.html")
    assert len(document.encode()) < 3_000_000
    page = Page(document)
    assert len(page.attributes("video", "src")) == 200
    record = page.data["runs"][0]
    axis, values = record["columns"]["loss"]
    # A browser draws them all. All logging lines share their steps.
    assert len(values) == len(record["axes"][axis][0]) == len(record["axes"][axis][1]) == 10_000
    assert len(record["axes"]) == 2


# --- the document ---


def test_the_policy_allows_the_page_itself_and_nothing_else(run: Path) -> None:
    """Browsers run a script only if its hash is in the policy."""
    document = page_of([read_run(run)], run / "index.html")
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', document)
    rules = {name: rest for name, *rest in (rule.split() for rule in policy.split("; "))}
    assert rules["default-src"] == ["'none'"]
    hash_of = lambda text: (
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    )
    scripts = re.findall(r"<script>(.*?)</script>", document, re.DOTALL)
    assert rules["script-src"] == [hash_of(script) for script in scripts]
    styles = re.findall(r"<style>(.*?)</style>", document, re.DOTALL)
    assert rules["style-src"] == [hash_of(style) for style in styles]
    page = Page(document)
    # Such an attribute would be blocked by the policy.
    assert not any("style" in attributes for _, attributes in page.elements)
    sources = page.attributes("video", "src")
    assert sources and all(source.startswith("./") for source in sources)
    assert "Copyright (c) 2022 Leon Sorokin" in document  # uPlot's licence


def test_links_start_at_the_page(tmp_path: Path) -> None:
    run = tmp_path / "a b#c" / "run?"
    (run / "samples" / "step-00000001").mkdir(parents=True)
    (run / "samples" / "step-00000001" / "1:2%.mp4").touch()
    name = "samples/step-00000001/1%3A2%25.mp4"
    for page, link in (
        (run / "index.html", f"./{name}"),
        (tmp_path / "report.html", f"./a%20b%23c/run%3F/{name}"),
        (tmp_path / "reports" / "a.html", f"./../a%20b%23c/run%3F/{name}"),
    ):
        assert Page(page_of([read_run(run)], page)).attributes("video", "src") == [link]


def test_a_file_that_is_no_page_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "index.html"
    path.write_text("<h1>mine</h1>")
    line = "index.html exists and is no page of cogfast"
    assert_refused(lambda: write_page(path, "<html>"), line)
    assert path.read_text() == "<h1>mine</h1>"
    path.unlink()
    os.mkfifo(path)  # a run that opened it would wait for ever
    line = "index.html: cannot be read (it is not a regular file); move it, or use --out"
    assert_refused(lambda: write_page(path, "<html>"), line)


# --- a real run ---


@pytest.fixture(scope="module")
def trained(shared_run: Run) -> tuple[Path, list[Page | None]]:
    """Three LoRA steps with an evaluation at each second step and at the end, and the page that each
    step found."""
    lora = lora_run(shared_run, 2).with_args(train_iters=3, valid_data=[str(shared_run.data)])
    lora = lora.with_args(eval_interval=2, eval_at_end=True)
    lora = lora.with_args(eval_num_samples=2, eval_sampling_steps=2)
    pages: list[Page | None] = []

    class Watched(Trainer):
        def compute_loss(self, batch: dict) -> Tensor:
            path = self.folder / "index.html"
            pages.append(Page(path.read_text()) if path.exists() else None)
            return super().compute_loss(batch)

    return lora.by(Watched).train(*ASKED).path, pages


def test_a_run_writes_its_page(trained: tuple[Path, list[Page | None]], data: Path) -> None:
    """The held-out clips are the samples' references."""
    run, pages = trained
    page = Page((run / "index.html").read_text())
    assert captions(page) == [
        f"{name}: bar number {number} moves"
        for number in (0, 3)
        for name in ("reference", "step 2", "step 3")
    ]
    assert all((run / unquote(s)).is_file() for s in page.attributes("video", "src"))
    assert "Step 3 of 3" in page.text("head")
    assert page.data["reload"] is None  # the run has ended
    assert "Train on from checkpoint 00000003" in page.text("commands")
    assert any(line.endswith("lora --to peft --ema") for line in commands(page))
    chosen = {row[0].rpartition(".")[2]: row[1:] for row in page.tables["settings"][1:]}
    assert "(LoRA rank 2, alpha 3, strength 1.5, on q v out)" in page.text("head")
    assert chosen["r"] == ["2", "", "base.yaml"]
    assert chosen["lora_alpha"] == ["3", "", "command line"]
    assert "problems" not in page.sections
    first, *later = pages
    assert first is None
    assert [page.data["reload"] for page in later] == [60, 60]
    assert later[0].values().keys() >= {("loss", 1)} and not captions(later[0])
    for number in (0, 3):
        (file,) = (run / "reference").glob(f"*-bar-number-{number}-moves-*.mp4")
        found = read_frames(file)
        source = read_frames(data / "videos" / f"{number}.mp4")
        assert found.shape == (9, 32, 32, 3)
        # Nine frames in a row of the clip; both files are compressed.
        errors = [np.abs(found.astype(int) - source[i : i + 9]).mean() for i in range(9)]
        assert min(errors) < 8


def test_the_page_is_the_same_from_the_files(trained: tuple[Path, list[Page | None]]) -> None:
    """The run knows its metrics; a report reads them from the disk."""
    run, _ = trained
    read = page_at(run)
    written = Page((run / "index.html").read_text())
    assert read.data | {"written": 0} == written.data | {"written": 0}
    assert read.tables == written.tables


def read_frames(path: Path) -> np.ndarray:
    reader = open_video(str(path))
    try:
        return np.asarray(reader.read(range(len(reader))))
    finally:
        reader.close()


def test_a_page_that_cannot_be_written_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "index.html").mkdir()
    parts: Any = SimpleNamespace(folder=SimpleNamespace(path=tmp_path))
    trackers: Any = SimpleNamespace(is_main=True, history=[{"step": 1, "loss": 1.0}])
    page = RunPage(parts, trackers)
    page.write()
    page.write()
    assert len(caplog.messages) == 1
    assert "the page of the run is not written" in caplog.messages[0]
    (tmp_path / "index.html").rmdir()
    page.write()
    assert Page((tmp_path / "index.html").read_text()).plots() == {"Loss": ["training"]}


# --- several runs ---


def test_a_comparison_of_runs(run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", num_lines=10, steps=(100, 150), lr_schedule="cosine")
    facts = json.loads((other / "run_facts.json").read_text()) | {"global_batch": 8}
    facts["effective"] = {"args.attention_backend": "flash"}
    (other / "run_facts.json").write_text(json.dumps(facts))
    environment = {"torch": "2.14.0", "devices": ["NVIDIA H100"] * 2, "world_size": 4}
    (other / "environment.json").write_text(json.dumps(environment))
    page = page_at(run, other)
    assert page.sections == ["curves", "samples", "differences"]
    labels = [run.name, "other"]
    plots = page.plots()
    assert plots["Loss: training"] == plots["Loss: held out (configured loss)"] == labels
    assert page.plots()["Time of a step (ms): whole step"] == labels
    for i, number in enumerate((20, 10)):
        wanted = {line["step"]: line["loss"] for line in lines(number) if "loss" in line}
        found = {step: value for (key, step), value in page.values(i).items() if key == "loss"}
        assert found == {step: pytest.approx(value, rel=1e-5) for step, value in wanted.items()}
    head, *rows = page.tables["differences"]
    assert head == ["Key", *labels]
    found = {row[0]: row[1:] for row in rows}
    assert found == {
        "global_batch": ["4", "8"],
        "torch": ["2.13.0", "2.14.0"],
        "world_size": ["2", "4"],
        "args.lr_schedule": ["constant", "cosine"],
        "args.attention_backend": ["native", "flash"],
        "args.train_data": [json.dumps([str(path.parent)]) for path in (run, other)],
        "args.save": [str(path.parent / "base" / "runs") for path in (run, other)],
        "model.first_stage_config.params.ckpt_path": [
            str(path.parent / "wavelet.safetensors") for path in (run, other)
        ],
    }
    assert all((run.parent / unquote(s)).is_file() for s in page.attributes("video", "src"))


def test_a_run_has_one_colour_in_all_plots(tmp_path: Path) -> None:
    """Keys that one run lacks, and a held-out loss before the first step, shift no colour."""
    first, second = (write_run(tmp_path / name, steps=()) for name in ("first", "second"))
    rows = (first / "metrics.jsonl").read_text().splitlines(keepends=True)
    (first / "metrics.jsonl").write_text("".join(row for row in rows if "valid_" not in row))
    rows = (second / "metrics.jsonl").read_text()
    (second / "metrics.jsonl").write_text('{"step": 0, "valid_loss": 1.0}\n' + rows)
    plots = page_at(first, second).data["plots"]
    assert {len(plot["lines"]) for plot in plots} == {1, 2}
    assert all(line["tone"] == line["run"] for plot in plots for line in plot["lines"])
    loss = page_at(second).data["plots"][0]["lines"]
    assert [line["key"] for line in loss] == ["loss", "valid_loss"]


def test_common_prompts_come_first_and_defaults_are_no_difference(tmp_path: Path) -> None:
    first = write_run(tmp_path / "first", prompts=["only here", "both"])
    second = write_run(tmp_path / "second", prompts=["both", "only there"], steps=(70,))
    # A default that a file does not say is the same value.
    config = second / "training_config.yaml"
    config.write_text(config.read_text().replace("  save_interval: 1000\n", ""))
    config = first / "training_config.yaml"
    config.write_text(config.read_text().replace("  eval_with_ema: true\n", ""))
    page = page_at(first, second)
    both = [f"{name}: both" for name in ("first, step 50", "first, step 100", "second, step 70")]
    ours = [f"first, step {step}: only here" for step in (50, 100)]
    assert captions(page) == [*both, *ours, "second, step 70: only there"]
    figures = [found for kind, found in page.elements if kind == "figure"]
    assert [(f["data-run"], f["data-step"]) for f in figures][1:3] == [
        ("first", "100"),
        ("second", "70"),
    ]
    assert page.tables["differences"][1:] == [["args.save_interval", "1000", "5000"]]


def test_equal_runs_have_no_table_of_differences(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=())
    other = shutil.copytree(run, tmp_path / "other")
    page = page_at(run, other)
    assert "differences" not in page.tables
    assert "settings, versions and machines are equal" in page.text("differences")
