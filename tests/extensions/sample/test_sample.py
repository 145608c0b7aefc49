"""`cogfast sample`: videos of a run, through the real command line."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from cogfast.__main__ import main
from cogfast.data.video.reader import open_video
from cogfast.extensions.sample.generate import VideoMaker
from cogfast.extensions.sample.lora_overlay import LoraOverlay, open_loras
from cogfast.extensions.sample.sizes import read_image
from tests.support.refusals import assert_command_refused, assert_refused
from tests.support.runs import Run
from tests.support.tiny_run import CHANNELS, launch_ranks
from tests.support.video_files import decode_all

LATENTS = "args.only_save_latents=true"
TENSOR = "args.model_parallel_size=2"


@pytest.fixture(scope="module")
def fast(shared_run: Run) -> Run:
    """A run of three steps, whose rate is so high that samples change."""
    return shared_run.with_args(train_iters=3).with_words("deepspeed.optimizer.params.lr=0.05")


@pytest.fixture(scope="module")
def runs(fast: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    save = tmp_path_factory.mktemp("runs")
    families = ("5b", "5b_i2v", "1.5_5b")
    return {name: fast.of(name).into(save / name).train().path for name in families}


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


def sample(source: Path, out: Path, *arguments: str) -> dict[str, str]:
    """Run `cogfast sample`; return {file: prompt}."""
    assert main(["sample", str(source), "--out", str(out), *arguments]) == 0
    return json.loads((out / "prompts.json").read_text())


def latents(folder: Path) -> torch.Tensor:
    files = json.loads((folder / "prompts.json").read_text())
    return torch.stack([load_file(folder / name)["latents"] for name in files])


@pytest.mark.parametrize("family", ["5b_i2v", "1.5_5b"])
def test_videos_of_a_run(tmp_path: Path, runs: dict[str, Path], picture: Path, family: str) -> None:
    image = ["--image", str(picture)] if family.endswith("i2v") else []
    prompts = ["a bar", "password=12345678 on a bar"]
    arguments = ["--prompt", prompts[0], "--prompt", prompts[1], *image]
    found = sample(runs[family], tmp_path / "out", *arguments)
    assert list(found.values()) == prompts
    for name in found:
        shape = (17 if family.startswith("1.5") else 9, 32, 32, 3)
        assert decode_all(tmp_path / "out" / name).shape == shape
    assert (tmp_path / "out" / "contact_sheet.png").is_file()
    settings = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert [row["text"] for row in settings["prompts"]] == prompts  # as they were given
    assert settings["ema"] is True
    assert settings["num_steps"] == 4
    assert settings["frames"] == (6 if family.startswith("1.5") else 3)


# A limit on the size of files, and the number of videos that are complete nevertheless.
FULL_DISKS = {"settings": (500, 0), "the contact sheet": (4_000, 2)}


@pytest.mark.parametrize("what", FULL_DISKS)
def test_a_full_disk_ends_in_one_line_that_says_what_is_kept(
    what: str, tmp_path: Path, runs: dict[str, Path], file_limit, capsys: pytest.CaptureFixture[str]
) -> None:
    limit, num_kept = FULL_DISKS[what]
    out = tmp_path / "out"
    prompts = ["--prompt", "a bar", "--prompt", "two"]
    with file_limit(limit):
        assert main(["sample", str(runs["5b"]), "--out", str(out), *prompts]) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert error.splitlines()[-1].startswith(f"cogfast: {out}: cannot be written (")
    assert f"{num_kept} samples kept in it; free disk space and sample again" in error
    kinds = sorted(path.suffix for path in out.iterdir())
    num_lists = (what != "settings") + (num_kept > 0)
    assert kinds == [".json"] * num_lists + [".mp4"] * num_kept
    assert all(len(decode_all(file)) == 9 for file in out.glob("*.mp4"))


def test_prompts_of_a_file_with_images(
    tmp_path: Path, runs: dict[str, Path], picture: Path
) -> None:
    """Lines of prompt@@image; an image changes its video and no other."""
    Image.new("RGB", (32, 32), "red").save(tmp_path / "red.png")
    (tmp_path / "one.txt").write_text(f"a@@{picture}\n\nb@@{picture}\n")
    (tmp_path / "two.txt").write_text(f"a@@{picture}\nb@@{tmp_path / 'red.png'}\n")
    for name in ("one", "two"):
        file = str(tmp_path / f"{name}.txt")
        sample(runs["5b_i2v"], tmp_path / name, "--prompt-file", file, LATENTS)
    one, two = latents(tmp_path / "one"), latents(tmp_path / "two")
    assert one.shape == (2, CHANNELS, 3, 4, 4)
    torch.testing.assert_close(one[0], two[0], rtol=0, atol=1e-5)
    assert not torch.allclose(one[1], two[1], rtol=0, atol=1e-3)


def test_a_folder_with_samples_or_that_cannot_be_written_is_refused(
    tmp_path: Path, runs: dict[str, Path], capsys: pytest.CaptureFixture, monkeypatch
) -> None:
    """Their prompts, settings and sheet would be those of the last call only."""
    words = ["sample", str(runs["5b"]), "--out", str(tmp_path), LATENTS, "--prompt"]
    assert main([*words, "a bar"]) == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    line = f"--out {tmp_path}: has samples of an earlier call"
    assert_command_refused(capsys, [*words, "two bars"], line)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    file = tmp_path / "settings.json"
    for out, line in (
        (file, f"--out {file}: {file} is a file; give a folder"),
        (file / "videos", f"--out {file / 'videos'}: {file} is a file; give a folder"),
        ("s3://b/x", "--out: 's3://b/x' must be a path of this machine"),
    ):
        assert_command_refused(capsys, [*words[:2], "--out", out, "--prompt", "a bar"], line)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    line = f"{tmp_path} cannot be written; give another folder with --out"
    words = [*words[:2], "--out", tmp_path / "a" / "b", "--prompt", "a"]
    assert_command_refused(capsys, words, line)


def test_ema_and_plain_weights_differ(tmp_path: Path, runs: dict[str, Path]) -> None:
    arguments = ["--prompt", "a", LATENTS]
    sample(runs["5b"], tmp_path / "default", *arguments)
    sample(runs["5b"], tmp_path / "plain", *arguments, "--no-ema")
    ema, plain = (latents(tmp_path / name) for name in ("default", "plain"))
    assert not torch.allclose(ema, plain, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_two_processes_make_the_latents_of_one(
    tmp_path: Path, fast: Run, runs: dict[str, Path], picture: Path
) -> None:
    """Data parallelism gives the same bits, tensor parallelism the same latents up to rounding.
    Seeds belong to prompts, so a prompt alone gives its latents again on any number of processes."""
    lora = fast.with_lora(4).into(tmp_path / "lora").train(f"args.load={runs['5b']}").path
    prompts = [argument for text in "abc" for argument in ("--prompt", text)]
    arguments = [*prompts, "args.batch_size=1", "deepspeed.train_micro_batch_size_per_gpu=1"]
    cases = {
        "data": (runs["5b"], LATENTS),
        "tensor": (runs["5b"], LATENTS, TENSOR),
        "tensor-i2v": (runs["5b_i2v"], LATENTS, TENSOR, "--image", str(picture)),
        "tensor-video": (runs["5b_i2v"], TENSOR, "--image", str(picture)),
        "tensor-lora": (runs["5b"], LATENTS, TENSOR, "--lora", str(lora)),
    }
    lists = [
        [str(folder), *arguments, *more, "--out", str(tmp_path / name)]
        for name, (folder, *more) in cases.items()
    ]
    launch_ranks(2, "tests/support/ranks/sample_ranks.py", json.dumps(lists))
    sample(runs["5b"], tmp_path / "one", *arguments, LATENTS)
    sample(runs["5b_i2v"], tmp_path / "one-i2v", *arguments, LATENTS, "--image", str(picture))
    sample(runs["5b"], tmp_path / "one-lora", *arguments, LATENTS, "--lora", str(lora))
    names = [sorted(p.name for p in (tmp_path / name).iterdir()) for name in ("one", "data")]
    assert names[0] == names[1]
    assert torch.equal(latents(tmp_path / "one"), latents(tmp_path / "data"))
    for kind in ("", "-i2v", "-lora"):
        one, two = f"one{kind}", f"tensor{kind}"
        expected, found = latents(tmp_path / one), latents(tmp_path / two)
        assert (found - expected).norm() <= 1e-4 * expected.norm()
    assert len(list((tmp_path / "tensor-video").glob("*.mp4"))) == 3

    settings = json.loads((tmp_path / "one" / "settings.json").read_text())
    seed = settings["prompts"][2]["seed"]
    sample(runs["5b"], tmp_path / "again", "--prompt", "c", "--seed", str(seed), LATENTS)
    expected = latents(tmp_path / "one")[2]
    torch.testing.assert_close(latents(tmp_path / "again")[0], expected, rtol=0, atol=1e-5)


def test_a_prompt_that_fails_leaves_the_videos_before_it(
    tmp_path: Path,
    runs: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    frames, calls = VideoMaker.frames, []

    def fail_second(*given: object) -> np.ndarray:
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError("out of order")
        return frames(*given)

    monkeypatch.setattr(VideoMaker, "frames", fail_second)
    arguments = [argument for text in "abc" for argument in ("--prompt", text)]
    batch = "deepspeed.train_micro_batch_size_per_gpu=1"
    with pytest.raises(ZeroDivisionError):
        main(["sample", str(runs["5b"]), *arguments, batch, "--out", str(tmp_path)])
    assert "prompt 1 ('b') failed: ZeroDivisionError: out of order" in capsys.readouterr().err
    found = json.loads((tmp_path / "prompts.json").read_text())
    assert list(found.values()) == ["a"]
    assert (tmp_path / "contact_sheet.png").is_file()
    assert len(json.loads((tmp_path / "settings.json").read_text())["prompts"]) == 3


def test_lora_needs_its_base_and_a_full_run_does_not(
    tmp_path: Path, fast: Run, runs: dict[str, Path], capsys: pytest.CaptureFixture
) -> None:
    """The folder that args.load named is gone after training."""
    base = shutil.copytree(runs["5b"], tmp_path / "base")
    on_top = fast.with_words(f"args.load={base}")
    lora = on_top.with_lora(4).into(tmp_path / "lora").train().path
    full = on_top.into(tmp_path / "full").train().path
    arguments = ["--prompt", "a", LATENTS]
    sample(lora, tmp_path / "with", *arguments)
    raw = [*arguments, "--no-ema"]
    sample(lora, tmp_path / "lora-run", *raw)
    sample(runs["5b"], tmp_path / "added", *raw, "--lora", str(lora))
    found, expected = latents(tmp_path / "added"), latents(tmp_path / "lora-run")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.std()))
    sample(runs["5b"], tmp_path / "base", *raw)
    assert not torch.allclose(latents(tmp_path / "base"), expected, rtol=0, atol=1e-3)
    sample(full, tmp_path / "before", *arguments)
    assert not torch.allclose(latents(tmp_path / "with"), latents(tmp_path / "before"), atol=1e-3)

    shutil.rmtree(base)
    sample(full, tmp_path / "after", *arguments)
    assert torch.equal(latents(tmp_path / "after"), latents(tmp_path / "before"))
    assert main(["sample", str(lora), "--out", str(tmp_path / "none"), *arguments]) == 2
    assert str(base) in capsys.readouterr().err.splitlines()[-1]


def test_averaged_weights_are_taken_where_a_run_has_them(
    tmp_path: Path, fast: Run, runs: dict[str, Path], picture: Path, capsys: pytest.CaptureFixture
) -> None:
    """AdamW keeps no average, as a run and as the adapters of another run that has one."""
    adapters = fast.with_lora(4).with_words(f"args.load={runs['5b']}")
    other = adapters.with_args(optimizer="torch.optim.AdamW")
    plain = other.into(tmp_path / "adamw").train().path
    arguments = ["--prompt", "a", LATENTS]
    sample(plain, tmp_path / "alone", *arguments)
    sample(runs["5b"], tmp_path / "added", *arguments, "--lora", str(plain))
    settings = json.loads((tmp_path / "alone" / "settings.json").read_text())
    assert settings["ema"] is False
    assert json.loads((tmp_path / "added" / "settings.json").read_text())["ema"] is True
    assert main(["sample", str(plain), "--out", str(tmp_path / "no"), *arguments, "--ema"]) == 2
    logged = capsys.readouterr().err
    assert "has no EMA weights" in logged
    assert "was trained with model.conditions" not in logged and "is empty" not in logged
    arguments = ["--prompt", "", "--image", str(picture), LATENTS, "--lora", str(plain)]
    sample(runs["5b_i2v"], tmp_path / "i2v", *arguments)
    logged = capsys.readouterr().err
    assert f"--lora {plain} was trained with model.conditions=[], and this samples with [" in logged
    assert "a prompt is empty: its video is sampled without a caption" in logged
    lora = adapters.into(tmp_path / "lora").train().path
    both = open_loras([LoraOverlay(str(lora)), LoraOverlay(str(plain))], None)
    kinds = [adapter.description.partition(" of step")[0] for adapter, _ in both]
    assert kinds == ["EMA weights", "weights"]


def test_sizes_come_from_args_before_the_data(tmp_path: Path, runs: dict[str, Path]) -> None:
    """SAT counts latent frames, padding included: 2 of CogVideoX 1.5 are 1 pixel frame."""
    arguments = ["args.sampling_num_frames=2", "args.sampling_image_size=[16,32]"]
    words = ["--prompt", "a", "args.sampling_fps=16", *arguments]
    (name,) = sample(runs["1.5_5b"], tmp_path / "out", *words)
    assert decode_all(tmp_path / "out" / name).shape == (1, 16, 32, 3)
    video = open_video(str(tmp_path / "out" / name))
    assert video.fps == pytest.approx(16)
    video.close()


def test_inference_configs_count_videos_per_prompt(
    tmp_path: Path, run: Run, runs: dict[str, Path]
) -> None:
    """SAT's batch_size in inference.yaml."""
    args = f"{{mode: inference, load: {runs['5b']}, batch_size: 2, only_save_latents: true}}"
    (tmp_path / "inference.yaml").write_text(f"args: {args}\n")
    words = ["--prompt", "a", "--prompt", "b", "--out", str(tmp_path / "out")]
    files = run.of_files(run.base, tmp_path / "inference.yaml")
    assert main(files.command(*words, name="sample")) == 0
    found = json.loads((tmp_path / "out" / "prompts.json").read_text())
    assert list(found.values()) == ["a", "a", "b", "b"]
    four = latents(tmp_path / "out")
    assert len({tuple(one.flatten().tolist()) for one in four}) == 4


def test_a_video_has_the_seed_of_its_number(tmp_path: Path, runs: dict[str, Path]) -> None:
    """Video n has the seed args.seed + n, which makes it again from its prompt alone."""
    both = ["--prompt", "a", "--prompt", "b"]
    sample(runs["5b"], tmp_path / "both", *both, LATENTS, "args.seed=5")
    sample(runs["5b"], tmp_path / "second", *both[2:], LATENTS, "args.seed=6")
    second, alone = latents(tmp_path / "both")[1], latents(tmp_path / "second")[0]
    torch.testing.assert_close(second, alone, rtol=0, atol=1e-5)


def test_an_image_covers_the_frame_and_is_cut_around_its_centre(tmp_path: Path) -> None:
    pixels = np.zeros((32, 96, 3), dtype=np.uint8)
    pixels[:, 32:64] = 255
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    found = read_image(tmp_path / "wide.png", (32, 32))
    assert torch.equal(found, torch.ones(3, 32, 32))
    (tmp_path / "no.png").write_text("no picture")
    with pytest.raises(ValueError, match=r"--image .*no.png: not a readable image; use PNG, JPEG"):
        read_image(tmp_path / "no.png", (32, 32))


def test_the_steps_of_videos_are_shown(
    tmp_path: Path,
    runs: dict[str, Path],
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ("--prompt", "a", "--prompt", "b", LATENTS, "--steps", "2", "args.batch_size=1")
    sample(runs["1.5_5b"], tmp_path / "plain", *words)
    err = capsys.readouterr().err
    assert "sampled 1 of 2 videos, " in err and "sampled 2 of 2 videos, " in err
    assert "step 1 of 2" not in err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    sample(runs["1.5_5b"], tmp_path / "terminal", *words)
    err = capsys.readouterr().err
    places = [err.index(f"video {i} of 2: step {j} of 2, ") for i in (1, 2) for j in (1, 2)]
    assert places == sorted(places)
    assert torch.equal(latents(tmp_path / "plain"), latents(tmp_path / "terminal"))


def test_fixed_frames_of_the_sampler_are_refused(
    tmp_path: Path, runs: dict[str, Path], fast: Run, capsys: pytest.CaptureFixture
) -> None:
    """They would be the noise that a video is made from."""
    word = "model.sampler_config.params.fixed_frames=1"
    line = (
        "fixed_frames=1: a video is sampled from noise, which these frames would keep; set it to 0"
    )
    words = ["sample", runs["5b"], "--out", tmp_path / "out", "--prompt", "a", word]
    assert_command_refused(capsys, words, line)
    evaluated = fast.into(tmp_path).with_words(word, "args.eval_at_end=true")
    assert_refused(lambda: evaluated.train(steps=1), line)
