"""Runs of trainers in the shape of others' forks of CogVideo's trainer: resumed, on ranks, validated."""

import re
import shutil
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from diffusers import CogVideoXPipeline
from PIL import Image

from cogfast.finetune import Args, Trainer
from tests.finetune.conftest import SIZE, words
from tests.finetune.test_derived_trainers import loss_of_diffusers
from tests.support.derived_trainers import StageTwo, SuperResolutionArgs
from tests.support.tiny_run import ROOT, assert_same, launch_ranks, losses, read_run_weights

OF_STAGE = {
    "one": {"training_type": "lora", "rank": 4},
    "two": {"training_type": "sft", "latent_cache": "none"},
}
for each in OF_STAGE.values():
    each |= {"noise_step": 700, "train_steps": 3, "checkpointing_steps": 2}
    each |= {"learning_rate": 1e-2, "lr_warmup_steps": 0}


def validated(data: Path) -> dict[str, object]:
    given = {"do_validation": True, "validation_steps": 2, "validation_dir": data}
    return given | {"validation_prompts": "prompts.txt", "validation_videos": "low.txt"}


@pytest.mark.soak
def test_a_resumed_run_of_stage_two_equals_an_uninterrupted_one(run_options, data, tmp_path):
    """With random draws and a loss in pixels."""
    given = run_options("2b", **OF_STAGE["two"] | {"output_dir": tmp_path / "whole"})
    StageTwo(SuperResolutionArgs(**given)).fit()
    StageTwo(SuperResolutionArgs(**given | resumed(tmp_path))).fit()
    check_equal(tmp_path)


def resumed(folder: Path) -> dict[str, object]:
    start = folder / "whole" / "checkpoint-2"
    return {"output_dir": folder / "parts", "resume_from_checkpoint": start}


def check_equal(folder: Path) -> None:
    start, whole, parts = (
        read_run_weights(folder / name)
        for name in ("whole/checkpoint-2", "whole/checkpoint-3", "parts/checkpoint-3")
    )
    assert_same(parts, whole)
    assert any(not torch.equal(tensor, start[key]) for key, tensor in whole.items())


def launch_stage_one(options: dict[str, object]) -> None:
    """Run the script on two ranks."""
    given = {name: value for name, value in options.items() if name != "overrides"}
    script = "tests/support/derived_trainers.py"
    launch_ranks(2, script, "one", *words(given), *options["overrides"])


@pytest.mark.soak
def test_two_ranks_train_resume_and_validate(run_options, data, tmp_path):
    """A script with options of its own. Each rank makes one of the two videos."""
    changes = OF_STAGE["one"] | validated(data) | {"train_resolution": "9x32x48"}
    given = run_options("1.5_5b", **changes)
    videos = []
    for more in ({"output_dir": tmp_path / "whole"}, resumed(tmp_path)):
        launch_stage_one(given | more)
        found = sorted((more["output_dir"] / "validation_res").glob("*.mp4"))
        videos.append({video.name: video.read_bytes() for video in found})
    check_equal(tmp_path)
    whole, parts = videos
    assert len(whole) == 4 and len(set(whole.values())) == 4
    assert parts == {name: video for name, video in whole.items() if "-3-" in name[:14]}


def test_a_second_clip_that_cannot_be_read_is_a_bad_sample(run_options, data, tmp_path):
    """The micro-batch has other samples then, on each rank for itself."""
    broken = tmp_path / "broken"
    shutil.copytree(data, broken)
    (broken / "low" / "2.mp4").write_bytes(b"no video")
    given = OF_STAGE["one"] | {"data_root": broken, "train_steps": 4, "checkpointing_steps": 4}
    given = run_options("5b", **given)
    launch_stage_one(given)
    found = losses(given["output_dir"])
    assert len(found) == 4 and np.isfinite(found).all()
    (line,) = (given["output_dir"] / "bad_samples.jsonl").read_text().splitlines()
    assert "low/2.mp4" in line and "not a readable video" in line


def test_the_example_of_the_docs_trains(run_options, data, pipelines, tmp_path):
    """Its loss is that of diffusers' network."""
    text = (ROOT / "docs" / "finetune.md").read_text()
    (code,) = re.findall(r"```python\n([^`]*class .*?)```", text, re.DOTALL)
    names: dict = {"__name__": "example"}
    exec(compile(code, "super_resolution.py", "exec"), names)
    given = run_options("5b", train_steps=2, training_type="sft", sr_noise_step=300)
    trainer = names["SuperResolution"](names["SuperResolutionArgs"](**given))
    trainer._prepare()
    generator = torch.Generator().manual_seed(0)
    low, high = (torch.randn(1, 16, 3, 4, 6, generator=generator) for _ in range(2))
    text = torch.randn(1, 226, 32, generator=generator)
    batch = {"low": low, "encoded_videos": high, "prompt_embedding": text}
    found = trainer.compute_loss(batch).item()
    expected = loss_of_diffusers(pipelines.path("5b"), low, high, text, 300)
    assert found == pytest.approx(expected.item(), rel=1e-5)
    trainer.fit()
    first, second = losses(tmp_path / "out")
    assert np.isfinite([first, second]).all() and first != second


def test_validation_videos_are_what_validation_step_returns(run_options, data):
    seen = []

    class Inverted(Trainer):
        def validation_step(self, eval_data: dict, pipe: CogVideoXPipeline) -> list:
            assert isinstance(pipe, CogVideoXPipeline)
            frames = np.stack([np.asarray(picture) for picture in eval_data["video"]])
            inverted = 255 - frames
            draws = torch.rand(1).item(), self.state.generator.initial_seed()
            seen.append((eval_data["prompt"], frames, *draws))
            if len(seen) == 1:
                return [("video", [Image.fromarray(frame) for frame in inverted])]
            return [("video", torch.from_numpy(inverted).permute(3, 0, 1, 2) / 255)]

    given = run_options("5b", **validated(data) | {"train_steps": 2, "latent_cache": "none"})
    trainer = Inverted(Args(**given))
    trainer.fit()
    (one, two), clip = seen, trainer.read_video(data / "low" / "1.mp4")
    assert [one[0], two[0]] == ["one block", "another block"]
    assert clip.shape == (1, 3, 9, *SIZE)
    pixels = ((clip[0].permute(1, 2, 3, 0) + 1) * 127.5).round().numpy()
    assert np.array_equal(pixels, one[1])
    assert one[2:] != two[2:]  # each prompt has its own draws
    files = sorted((given["output_dir"] / "validation_res").glob("*.mp4"))
    for (_, frames, *_), file in zip(seen, files, strict=True):
        with av.open(str(file)) as container:
            stored = np.stack([f.to_ndarray(format="rgb24") for f in container.decode(video=0)])
        assert np.abs(stored.astype(int) - (255 - frames)).mean() < 3
