"""scripts/first_contact.py with a tiny pipeline, two CPU ranks, and in place of diffusers' script one that writes adapters."""

import json
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scripts import first_contact
from tests.support.pipelines import Pipelines
from tests.support.tiny_run import ROOT

# Takes the options that the real one has, checks its files, and writes what cogfast has trained.
SCRIPT = """
import argparse, subprocess, sys
from pathlib import Path
parser = argparse.ArgumentParser()
for name in "pretrained_model_name_or_path instance_data_root video_column caption_column output_dir mixed_precision".split():
    parser.add_argument(f"--{name}", required=True)
for name in "rank lora_alpha learning_rate max_train_steps train_batch_size seed".split():
    parser.add_argument(f"--{name}", type=float, required=True)
given = parser.parse_args()
read = lambda name: (Path(given.instance_data_root) / name).read_text().splitlines()
videos, captions = read(given.video_column), read(given.caption_column)
assert all(Path(video).is_file() for video in videos), videos
assert captions == [f"bar number {i} moves" for i in range(5)], captions
run = Path(given.output_dir).parent / "cogfast"
sys.exit(subprocess.call([sys.executable, "-m", "cogfast", "convert", str(run), given.output_dir, "--to", "peft"]))
"""
KEYS = ("args.num_workers=0", "args.warmup_steps=0", "data.params.fps=8")


def test_a_folder_without_clips_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="absent has no folder videos/ with clips, beside labels/"):
        first_contact.main(["model", str(tmp_path / "absent"), "--out", str(tmp_path / "out")])


@pytest.mark.slow
def test_it_compares_adapters_and_ranks(
    tmp_path: Path,
    pipelines: Pipelines,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(ROOT)
    script, out = tmp_path / "train.py", tmp_path / "contact"
    script.write_text(SCRIPT)
    words = [str(pipelines.path("5b")), str(data), "--out", str(out), "--steps", "3", "--gpus", "2"]
    words += ["--sampling-steps", "2", "--script", str(script), *KEYS]
    assert first_contact.main(words) == 0
    report = (out / "report.md").read_text()
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| (\d+) \|$", report, re.MULTILINE)
    losses = {name: loss for name, loss, _ in rows}
    assert losses.keys() == {"base", "cogfast", "diffusers"}
    assert losses["cogfast"] == losses["diffusers"] != losses["base"]  # the same adapters
    off = re.search(r"largest relative difference of 3 losses: (\S+)\.", report)
    assert float(off[1]) < 1e-5
    # Held-out clips are not trained on.
    assert [p.name for p in sorted((out / "data" / "train" / "videos").glob("[!.]*"))] == [
        f"{i}.mp4" for i in range(5)
    ][:5]
    assert np.asarray(Image.open(out / "sheet.png")).std() > 10
    with tarfile.open(tmp_path / "contact.tar") as tar:
        names = set(tar.getnames())
    assert {
        "contact/report.md",
        "contact/sheet.png",
        "contact/cogfast.log",
        "contact/cogfast/metrics.jsonl",
    } <= names
    assert not any(name.endswith((".mp4", ".safetensors")) for name in names)
    assert f"Please send {out}.tar" in capsys.readouterr().out
    steps = [
        json.loads(line) for line in (out / "cogfast" / "metrics.jsonl").read_text().splitlines()
    ]
    assert sum("loss" in step for step in steps) == 3
    with pytest.raises(SystemExit):
        first_contact.main(words)
    assert "exists; name a new folder" in capsys.readouterr().err
