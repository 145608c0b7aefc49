"""bench.data on tiny clips: counts, ratios and the piece of bench.gpu_run."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import data, results_table
from bench.clips import data_runs
from bench.clips.video_clips import TINY_SIZES, generated_clips
from bench.harness.outcome import Settings
from tests.support.ranks.forked import run_forked
from tests.support.video_files import decode_all


def test_all_sides_read_the_same_clip(tmp_path: Path) -> None:
    """All sides read the same clip; otherwise their rates would not be comparable."""
    (path,) = generated_clips(tmp_path, TINY_SIZES).values()
    assert decode_all(path).shape == (210, *TINY_SIZES["tiny"], 3)
    clips = {}
    for side in data.CPU_SIDES:
        if side.readers < 2:
            read = side.clips(path, side.readers)
            clip = next(read)
            read.close()
            clip = clip["mp4"] if isinstance(clip, dict) else clip
            clips[side.name, side.readers] = clip.reshape(data.NUM_FRAMES, 3, *data.SIZE)
    assert len(clips) == 5
    first = clips.pop(("ours", 0))
    assert len(first.unique()) > 10
    for name, clip in clips.items():
        assert torch.equal(clip, first), name


def test_report(tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = ["--out", str(out), "--tiny", "--seconds", "0.05", "--rounds", "1"]
    assert data.main(argv) == 0
    report = json.loads((out / "data.json").read_text())
    assert report["piece"] == "data" and report["is_tiny"]
    rows = {(row["side"], row["readers"]): row for row in report["rows"]}
    assert rows.keys() == {(side.name, side.readers) for side in data.CPU_SIDES}
    for row in rows.values():
        assert row["clips_per_s"] > 0
    table = "\n".join(results_table._data(report["rows"]))
    shown = rows["ours", 0]["clips_per_cpu_s"] / rows["decord", 0]["clips_per_cpu_s"]
    assert f"| {shown:.2f} |" in table and table.count("| tiny |") == 3


def test_piece_of_gpu_run(here: Path) -> None:
    kept = []
    settings = Settings(torch.device("cpu"), is_tiny=True, keep=kept.append)
    outcome = data.measure_data(settings)
    assert kept[-1].rows == outcome.rows and not list(here.iterdir())


def test_a_training_leaves_no_checkpoint_to_fill_the_disk(tmp_path: Path, monkeypatch) -> None:
    line = {"step_ms": 20.0, "data_wait_ms": 5.0, "samples_per_s": 50.0}

    def run(case: data_runs.Case, command: str, folder: Path, overrides: Sequence[str]) -> None:
        (folder / "run/checkpoints/00000003").mkdir(parents=True)
        lines = [{**line, "step_ms": 900.0}, line, line]
        (folder / "run/metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))

    monkeypatch.setattr(data_runs, "_cogfast", run)
    case = data_runs.Case((), (), {}, num_clips=18, num_steps=3, log_interval=1)
    row = data_runs._train(case, tmp_path, "training", ())
    assert row["data_wait_percent"] == 25 and row["step_median_ms"] == 20
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "metrics.jsonl"]


def test_a_run_that_fails_leaves_the_others(tmp_path: Path, monkeypatch) -> None:
    def train(case: data_runs.Case, folder: Path, name: str, overrides: Sequence[str]) -> dict:
        if name == "DALI":
            raise RuntimeError("exit status 1: no libnvcuvid.so.1")
        return {"run": name, "seconds": 1.0}

    monkeypatch.setattr(data_runs, "_train", train)
    monkeypatch.setattr(data_runs, "_cache", lambda *a: {"run": "cogfast cache", "seconds": 1.0})
    sides = {"DALI": ("data.params.video_backend=dali",), "CPU": ()}
    case = data_runs.Case((), (), sides, num_clips=18, num_steps=3, log_interval=1)
    settings = Settings(torch.device("cpu"), is_tiny=True)
    outcome = data_runs._measure(case, tmp_path, settings)
    runs = ["cogfast cache", "CPU", "training from the cache"]
    assert [row["run"] for row in outcome.rows] == runs
    assert outcome.problems == ["DALI: exit status 1: no libnvcuvid.so.1"]


def test_whole_commands(tmp_path: Path, monkeypatch) -> None:
    def run(command: Sequence[str]) -> None:
        done = run_forked(command[1:])
        assert done.returncode == 0, done.stdout

    monkeypatch.setattr(data_runs, "_run", run)
    assert data_runs.main(["--tiny", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "data_runs.json").read_text())
    assert report["problems"] == [] and report["is_tiny"]
    rows = {row["run"]: row for row in report["rows"]}
    assert len(rows) == 3
    cached, read = rows["training from the cache"], rows["training from videos, CPU reader"]
    assert cached["step_median_ms"] > 0 and read["step_median_ms"] > 0
    assert rows["cogfast cache"]["clips_per_s"] > 0
    assert 0 <= cached["data_wait_percent"] < 100
