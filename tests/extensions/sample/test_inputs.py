"""Inpainting models and models of given frames: sampling against diffusers' loop, training, what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import CogVideoXFunControlPipeline, CogVideoXTransformer3DModel
from PIL import Image
from torch import Tensor

from cogfast.__main__ import main
from cogfast.core.slot_random import SlotRandom
from cogfast.extensions.pipeline_folder.pipeline_folder import find_config
from tests.extensions.sample.test_control import train_once
from tests.extensions.sample.test_sample_sources import LATENTS, assert_close, latents, sample
from tests.support.layouts import assert_equal_training, launch
from tests.support.pipelines import SEED, SIZE, Pipelines, write_control_pipeline
from tests.support.refusals import assert_command_refused
from tests.support.runs import Run
from tests.support.tiny_run import CHANNELS, SIDE, run_folder, write_clips, write_clips_with_vae
from tests.support.video_files import constant_rate, decode_all, write_clip

PREFIX = ["model.given_frames=prefix:5", "args.encode_first=true"]
SHAPE = "args.sampling_num_frames=3", "--size", "32x48"


def expected_latents(folder: Path, pipelines: Pipelines, condition: Tensor) -> Tensor:
    """Sample with diffusers' loop, which joins the condition [1, C, T, h, w] to the noised latents."""
    pipe = CogVideoXFunControlPipeline.from_pretrained(folder)
    pipe.transformer.norm_out.norm.eps = 1e-6  # SAT's; the class has 1e-5
    pipe.prepare_control_latents = lambda *_: (None, condition)
    return pipelines.latents(pipe, 9, control_video=[Image.new("RGB", SIZE[::-1])] * 9)


def encode(folder: Path, frames: np.ndarray | Tensor) -> Tensor:
    """The means of latents of frames [F, H, W, 3], without a scale: [1, C, T, h, w]."""
    vae = CogVideoXFunControlPipeline.from_pretrained(folder).vae
    pixels = torch.as_tensor(frames).permute(3, 0, 1, 2)[None].float()
    with torch.no_grad():
        return vae.encode(pixels).latent_dist.mode()


def change_json(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def inpainting_folder(pipelines: Pipelines, folder: Path, noise: bool = False) -> Path:
    write_control_pipeline(pipelines, "5b", folder, in_channels=33)
    change_json(folder / "transformer" / "config.json", add_noise_in_inpaint_model=noise)
    change_json(folder / "model_index.json", _class_name="CogVideoXPipeline")
    return folder


def test_inpainting_is_videox_funs(pipelines: Pipelines, tmp_path: Path) -> None:
    folder = inpainting_folder(pipelines, tmp_path / "inp")
    video = write_clip(tmp_path / "v.mp4", constant_rate(9, 8), size=SIZE)
    mask = np.zeros((*SIZE, 3), np.uint8)
    mask[8:24, 16:40] = 255
    Image.fromarray(mask).save(tmp_path / "m.png")
    given = ["--video", video, "--mask", tmp_path / "m.png"]
    sample(tmp_path / "out", folder, *LATENTS, *SHAPE, *given)
    frames = torch.from_numpy(decode_all(video)).float() / 127.5 - 1
    frames[:, 8:24, 16:40] = -1
    scale = CogVideoXFunControlPipeline.from_pretrained(folder).vae.config.scaling_factor
    known = torch.ones(1, 1, 3, 4, 6)
    known[..., 1:3, 2:5] = 0
    condition = scale * torch.cat([known, encode(folder, frames)], dim=1)
    assert_close(latents(tmp_path / "out"), expected_latents(folder, pipelines, condition))

    # All channels of text-to-video are zeros.
    sample(tmp_path / "text", folder, *LATENTS, *SHAPE)
    expected = expected_latents(folder, pipelines, torch.zeros_like(condition))
    assert_close(latents(tmp_path / "text"), expected)

    # A first frame stands for a video of it and a mask of all others.
    first = Image.fromarray(decode_all(video)[0])
    first.save(tmp_path / "first.png")
    sample(tmp_path / "image", folder, *LATENTS, *SHAPE, "--first-frame", tmp_path / "first.png")
    frames = torch.full((9, *SIZE, 3), -1.0)
    frames[0] = torch.from_numpy(np.array(first)).float() / 127.5 - 1
    known = torch.zeros(1, 1, 3, 4, 6)
    known[:, :, 0] = 1
    condition = scale * torch.cat([known, encode(folder, frames)], dim=1)
    assert_close(latents(tmp_path / "image"), expected_latents(folder, pipelines, condition))


@pytest.mark.parametrize("family", ["5b", "5b_i2v"])
def test_first_and_last_frame_are_in_their_places(
    family: str, pipelines: Pipelines, tmp_path: Path
) -> None:
    """The released CogVideoX-Interpolation is an image-to-video model, whose file drops images in training."""
    folder = write_control_pipeline(pipelines, family, tmp_path / "ends")
    change_json(folder / "model_index.json", _class_name="CogVideoXInterpolationPipeline")
    pictures = np.random.default_rng(0).integers(0, 255, (2, *SIZE, 3), np.uint8)
    words = []
    for name, picture in zip(("first", "last"), pictures, strict=True):
        Image.fromarray(picture).save(tmp_path / f"{name}.png")
        words += [f"--{name}-frame", tmp_path / f"{name}.png"]
    sample(tmp_path / "out", folder, *LATENTS, *SHAPE, *words)
    vae = CogVideoXFunControlPipeline.from_pretrained(folder).vae
    # The pictures' latents are drawn, as those of image-to-video.
    noise = SlotRandom(0, 0, [SEED], 0).normal("image_first_stage", (1, 16, 2, 4, 6))
    condition = torch.zeros(1, 16, 3, 4, 6)
    for i, place in enumerate((0, 2)):
        pixels = torch.from_numpy(pictures[i : i + 1]).permute(3, 0, 1, 2)[None] / 127.5 - 1
        with torch.no_grad():
            found = vae.encode(pixels).latent_dist
        drawn = found.mean[:, :, 0] + found.std[:, :, 0] * noise[:, :, i]
        condition[:, :, place] = vae.config.scaling_factor * drawn
    assert_close(latents(tmp_path / "out"), expected_latents(folder, pipelines, condition))


@pytest.mark.parametrize(
    ("inputs", "words", "shown"),
    [
        ("masked_video", [], "--video VIDEO.mp4 --mask MASK.png"),
        pytest.param(
            "masked_video",
            ["--lora", "2"],
            "--video VIDEO.mp4 --mask MASK.png",
            marks=pytest.mark.soak,
        ),
        ("frames", ["model.given_frames=first_last"], "FIRST.png"),
        ("frames", PREFIX, "--video VIDEO.mp4 --out"),
    ],
    ids=["inpainting", "inpainting LoRA", "ends", "cached prefix"],
)
def test_models_train_evaluate_and_export(
    inputs: str,
    words: list[str],
    shown: str,
    pipelines: Pipelines,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    if inputs == "frames":
        folder = write_control_pipeline(pipelines, "5b", tmp_path / "fun")
        index = folder / "model_index.json"
        # A class that does not tell the conditions
        index.write_text(index.read_text().replace("FunControl", ""))
        words = ["model.conditions=[frames]", *words]
    else:
        folder = inpainting_folder(pipelines, tmp_path / "fun", noise=True)
        assert find_config(folder)[1]["model.conditions"] == ["mask", "masked_video"]
    data = tmp_path / "data"
    for i in range(3):
        write_clip(data / "videos" / f"{i}.mp4", constant_rate(9, 8), size=SIZE)
        (data / "labels").mkdir(exist_ok=True)
        (data / "labels" / f"{i}.txt").write_text("a clip")
    if "args.encode_first=true" in words:
        words = [*words, f"args.latent_cache={tmp_path / 'cache'}"]
    run = train_once(folder, data, tmp_path / "runs", *words)
    assert shown in capsys.readouterr().err
    if "--lora" in words:
        return
    assert main(["convert", str(run), str(tmp_path / "out"), "--to", "diffusers"]) == 0
    exported = CogVideoXTransformer3DModel.from_pretrained(tmp_path / "out")
    assert exported.config.in_channels == (33 if inputs == "masked_video" else 32)
    if inputs == "masked_video":
        content = json.loads((tmp_path / "out" / "config.json").read_text())
        assert content["add_noise_in_inpaint_model"] is True


def test_what_does_not_fit_is_refused(
    pipelines: Pipelines, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = inpainting_folder(pipelines, tmp_path / "inp")
    video = write_clip(tmp_path / "v.mp4", constant_rate(9, 8), size=SIZE)
    Image.new("L", SIZE[::-1]).save(tmp_path / "black.png")
    Image.new("RGB", SIZE[::-1]).save(tmp_path / "first.png")
    Image.new("L", (32, 32)).save(tmp_path / "square.png")
    needs_mask = "the model needs a mask (model.conditions: mask, masked_video); give --mask"
    black, first = ["--mask", tmp_path / "black.png"], ["--first-frame", tmp_path / "first.png"]
    for words, message in (
        (["--video", video], needs_mask),
        (black, "the model needs a video"),
        (["--video", video, *black], "black.png: it is black in all frames; its white part is"),
        (["--video", video, "--mask", tmp_path / "square.png"], "is 32x32, --video "),
        (["--video", tmp_path / "first.png", *black], "first.png: an image (png), not a video$"),
        (["--video", video, *black, *first], "--first-frame stands for --video and --mask"),
        (["--control", video], "the model does not use a control video"),
        (["--mask", tmp_path / "none.png", "--video", video], "none.png: no such file"),
    ):
        given = ["sample", folder, "--prompt", "a", *SHAPE, "--out", tmp_path / "out", *words]
        assert_command_refused(capsys, given, message)
    cached = ["train", folder, "--data", tmp_path, f"args.latent_cache={tmp_path / 'cache'}"]
    assert_command_refused(capsys, cached, "holds no masked videos")


@pytest.fixture(scope="module")
def with_everything(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A model with all conditions beside each other."""
    folder = tmp_path_factory.mktemp("everything")
    data, rows = write_clips(folder / "data"), []
    mask = np.zeros((SIDE, SIDE, 3), np.uint8)
    mask[:, : SIDE // 2] = 255
    Image.fromarray(mask).save(data / "half.png")
    for i in range(6):
        row = {"path": f"videos/{i}.mp4", "control": f"videos/{(i + 1) % 6}.mp4"}
        row |= {"mask": "half.png", "caption": f"bar number {i} moves"}
        rows.append(json.dumps(row) + "\n")
    (data / "metadata.jsonl").write_text("".join(rows))
    words = [f"args.train_data=[{data}]", "data.target=cogfast.data.datasets.VideoManifest"]
    words += ["model.conditions=[frames, mask, masked_video, control]", "args.seed=7"]
    words += ["model.given_frames=random", "model.masked_video_noise=true"]
    words += [f"model.network_config.params.in_channels={4 * CHANNELS + 1}"]
    run = Run(data, folder).with_args(train_iters=3)
    return run.with_words(*words, "model.condition_dropout=0.3")


@pytest.mark.soak
def test_several_conditions_train_alike_on_every_layout(
    with_everything: Run, tmp_path: Path
) -> None:
    words_of = lambda *more: with_everything.into(tmp_path / more[0][5:]).command(*more)[2:]
    one = words_of("args.batch_size=4")
    layouts = [
        words_of("args.model_parallel_size=2", "args.sequence_parallel=true"),
        words_of("args.context_parallel_size=2", "args.activation_checkpointing=full"),
        words_of("args.batch_size=2"),
    ]
    launch(1, [one])
    launch(2, layouts)
    expected = run_folder(tmp_path / "batch_size=4")
    for save in ("model_parallel_size=2", "context_parallel_size=2", "batch_size=2"):
        assert_equal_training(run_folder(tmp_path / save), expected)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return clips with controls, listed by VideoX-Fun's file, and a small VAE of 16 channels."""
    folder = write_clips_with_vae(tmp_path_factory.mktemp("clips"), 2, 16)
    rows = []
    for one, other in ((0, 1), (1, 0)):
        row = {"file_path": f"videos/{one}.mp4", "control_file_path": f"videos/{other}.mp4"}
        rows.append(row | {"text": "a bar", "type": "video"})
    (folder / "metadata.json").write_text(json.dumps(rows))
    return folder


@pytest.mark.parametrize(
    ("model", "condition"),
    [
        ("cogvideox_2b", "control"),
        ("cogvideox_5b", "inpainting"),
        ("cogvideox1.5_5b", "inpainting"),
        ("cogvideox_5b_i2v", "first_last"),
    ],
)
def test_files_of_conditions_train(model: str, condition: str, clips: Path, tmp_path: Path) -> None:
    network, frames = "model.network_config.params", 13 if "1.5" in model else 9
    modules = f"{network}.modules"
    emb = "model.conditioner_config.params.emb_models[0]"
    vae = (
        f"{{target: cogfast.model.autoencoder.VideoAutoencoder, params: {{path: {clips / 'vae'}}}}}"
    )
    small = {f"{network}.num_layers": 1, f"{network}.num_attention_heads": 1}
    small |= {f"{network}.hidden_size": 64, f"{network}.time_embed_dim": 32}
    small |= {f"{modules}.patch_embed_config.params.text_hidden_size": 64}
    small |= {f"{modules}.pos_embed_config.params.text_length": 8}
    small |= {f"{emb}.target": "cogfast.model.text_encoder.ByteTextEncoder"}
    small |= {f"{emb}.params": "{max_length: 8}", "model.first_stage_config": vae}
    small |= {"args.mode": "pretrain", "args.load": "null", "args.save": tmp_path / "runs"}
    small |= {"args.train_data": f"[{clips}]", "args.split": "'1'", "args.train_iters": 1}
    small |= {"args.warmup_steps": 1, "args.num_workers": 0}
    small |= {"data.target": "cogfast.data.datasets.VideoManifest"}
    small |= {"data.params.video_size": f"[{SIDE},{SIDE}]", "data.params.max_num_frames": frames}
    small |= {"deepspeed.bf16.enabled": "false", "deepspeed.fp16.enabled": "false"}
    if "1.5" not in model:
        small |= {f"{network}.{name}": SIDE // 8 for name in ("latent_height", "latent_width")}
        small[f"{network}.num_frames"] = frames
    files = [f"configs/{name}.yaml" for name in (model, f"conditions/{condition}", "sft")]
    # In place of those of the file, not merged
    words = [f"{emb}.params=null", "model.first_stage_config=null"]
    words += [f"{key}={value}" for key, value in small.items()]
    assert main(["train", "--base", *files, *words]) == 0
    (line,) = (run_folder(tmp_path / "runs") / "metrics.jsonl").read_text().splitlines()
    assert np.isfinite(json.loads(line)["loss"])


def test_a_given_image_stands_beside_the_control_of_a_held_out_clip(
    with_everything: Run, tmp_path: Path
) -> None:
    Image.new("RGB", (SIDE, SIDE), "white").save(tmp_path / "white.png")
    (tmp_path / "prompts.txt").write_text(f"a bar@@{tmp_path / 'white.png'}\n")
    more = ["model.conditions=[image, control]", "model.given_frames=null", "args.split=4,2"]
    more += [f"model.network_config.params.in_channels={3 * CHANNELS}", "args.eval_interval=1"]
    more += [f"args.eval_prompt_file={tmp_path / 'prompts.txt'}", "model.masked_video_noise=false"]
    trainer = with_everything.into(tmp_path / "runs").trainer(*more)
    (prompt,) = trainer.evaluator._prompts(trainer.parts.size.latents, "")
    assert prompt.control is not None and (prompt.image == 1).all()
