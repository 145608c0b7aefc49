"""`cogfast sample` of CogVideoX-Fun's control models against diffusers' pipeline, and their training."""

import json
from pathlib import Path

import pytest
from diffusers import CogVideoXFunControlPipeline, CogVideoXTransformer3DModel
from PIL import Image
from torch import Tensor

from cogfast.__main__ import main
from cogfast.extensions.pipeline_folder.pipeline_folder import find_config
from cogfast.model.autoencoder import Moments, VideoAutoencoder
from tests.extensions.sample.test_sample_sources import LATENTS, assert_close, latents, sample
from tests.support.pipelines import SIZE, Pipelines, write_control_pipeline
from tests.support.tiny_run import run_folder
from tests.support.video_files import constant_rate, decode_all, write_clip


@pytest.mark.parametrize("family", ["2b", "5b"])
def test_latents_are_those_of_diffusers_pipeline(
    family: str, pipelines: Pipelines, tmp_path: Path
) -> None:
    folder = write_control_pipeline(pipelines, family, tmp_path / "fun")
    control = write_clip(tmp_path / "control.mp4", constant_rate(9, 8), size=SIZE)
    size = "args.sampling_num_frames=3"
    sample(tmp_path / "out", folder, *LATENTS, size, "--control", control, "--size", "32x48")
    pipe = CogVideoXFunControlPipeline.from_pretrained(folder)
    pipe.transformer.norm_out.norm.eps = 1e-6  # SAT's; the class has 1e-5
    frames = [Image.fromarray(frame) for frame in decode_all(control)]
    expected = pipelines.latents(pipe, 9, control_video=frames)
    assert_close(latents(tmp_path / "out"), expected)


def test_a_control_is_encoded_in_the_memory_that_there_is(
    pipelines: Pipelines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_control_pipeline(pipelines, "5b", tmp_path / "fun")
    control = write_clip(tmp_path / "control.mp4", constant_rate(9, 8), size=SIZE)
    encode, are_sliced = VideoAutoencoder.encode, []

    def encode_noting(stage: VideoAutoencoder, video: Tensor) -> Moments:
        are_sliced.append(stage.has_encode_slices)
        return encode(stage, video)

    monkeypatch.setattr(VideoAutoencoder, "encode", encode_noting)
    words = ["args.sampling_num_frames=3", "args.batch_size=2"]
    words += ["--size", "32x48", "--control", control]
    sample(tmp_path / "out", folder, *LATENTS, *words)
    sample(tmp_path / "less", folder, *LATENTS, *words, "args.vae_memory_gib=1e-6")
    assert are_sliced == [False, False, True, True]  # two videos each


def test_the_folder_tells_the_conditions(pipelines: Pipelines, tmp_path: Path) -> None:
    for family, kind, stated in (
        ("5b", "CogVideoXFunControlPipeline", ["control"]),
        ("5b", "CogVideoXPipeline", ["control"]),  # as CogVideoX-Fun publishes them
        ("5b", "CogVideoXImageToVideoPipeline", ["image"]),
        ("2b", "CogVideoXPipeline", None),  # cogvideox-2b-img2vid has its channels, too
        ("2b", "CogVideoXFunControlPipeline", ["control"]),
    ):
        folder = tmp_path / family
        if not folder.exists():
            write_control_pipeline(pipelines, family, folder)
        index = folder / "model_index.json"
        index.write_text(json.dumps(json.loads(index.read_text()) | {"_class_name": kind}))
        file, values = find_config(folder)
        assert file.name == f"cogvideox_{family}.yaml"
        assert values.get("model.conditions") == stated, (family, kind)
    _, values = find_config(pipelines.path("5b_i2v"))
    assert "model.conditions" not in values


def train_once(folder: Path, data: Path, save: Path, *words: str) -> Path:
    """Train the model of a folder for a step, with an evaluation at the end. Return the run."""
    short = ["args.train_iters=1", "args.batch_size=1", "args.warmup_steps=1", "args.split=2,1"]
    short += ["data.params.video_size=[32,48]", "data.params.max_num_frames=9"]
    short += ["args.eval_at_end=true", "args.eval_num_samples=1", "args.num_workers=0"]
    short += ["model.sampler_config.params.num_steps=2", "args.activation_checkpointing=none"]
    given = ["train", folder, "--data", data, "--out", save, *words, *short]
    assert main([*map(str, given)]) == 0
    run = run_folder(save)
    assert list((run / "samples" / "step-00000001").glob("*.mp4"))
    return run


def test_a_control_model_trains_evaluates_samples_and_exports(
    pipelines: Pipelines, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = write_control_pipeline(pipelines, "5b", tmp_path / "fun")
    data = tmp_path / "data"
    for i in range(3):
        write_clip(data / f"{i}.mp4", constant_rate(9, 8), size=SIZE)
        write_clip(data / f"c{i}.mp4", constant_rate(9, 8), size=SIZE, options={"crf": "30"})
    rows = [{"path": f"{i}.mp4", "caption": "a", "control": f"c{i}.mp4"} for i in range(3)]
    (data / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = train_once(folder, data, tmp_path / "runs")
    assert "--control CONTROL.mp4" in capsys.readouterr().err
    assert main(["sample", str(run), "--prompt", "a", "--out", str(tmp_path / "none")]) != 0
    assert "a control model needs a control video; give --control" in capsys.readouterr().err
    assert main(["convert", str(run), str(tmp_path / "out"), "--to", "diffusers"]) == 0
    exported = CogVideoXTransformer3DModel.from_pretrained(tmp_path / "out")
    assert exported.config.in_channels == 32
    CogVideoXFunControlPipeline.from_pretrained(folder, transformer=exported)
