"""`cogfast sample` from a diffusers pipeline alone, against diffusers' own pipeline; adapters on top;
SAT's inference.yaml with every model file."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import CogVideoXPipeline, CogVideoXTransformer3DModel
from diffusers.pipelines.cogvideo import pipeline_cogvideox_image2video
from peft import LoraConfig, get_peft_model_state_dict
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from cogfast.__main__ import main
from cogfast.core.slot_random import SlotRandom
from cogfast.extensions.formats.image_scale import pipeline_code, scale_of
from cogfast.extensions.sample.sizes import sampled_sizes
from cogfast.model.keys import ImageLatentScale
from cogfast.train.preflight.check import check_sample
from cogfast.train.video_size import LatentSize
from tests.support.pipelines import PROMPT, SCALE, SEED, SIZE, STEPS, Pipelines
from tests.support.refusals import assert_command_refused, assert_line, assert_refused
from tests.support.runs import run_of
from tests.support.video_files import decode_all

GUIDER = "sgm.modules.diffusionmodules.guiders.VanillaCFG"


def sample(out: Path, *arguments: str | Path) -> dict:
    """Sample one prompt with one seed; return settings.json."""
    steps = f"model.sampler_config.params.num_steps={STEPS}"
    given = ["sample", *arguments, "--prompt", PROMPT, "--out", out, "--seed", SEED, steps]
    assert main(list(map(str, given))) == 0
    return json.loads((out / "settings.json").read_text())


def latents(out: Path) -> Tensor:
    (file,) = out.glob("*.safetensors")
    return load_file(file)["latents"]


LATENTS = (
    "args.only_save_latents=true",
    "model.sampler_config.params.guider_config=null",  # in place of the config's, not merged
    f"model.sampler_config.params.guider_config={{target: {GUIDER}, params: {{scale: {SCALE}}}}}",
)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """The pipeline's own timesteps: two implementations of one float32 model remain."""
    assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("family", ["2b", "1.5_5b"])
def test_a_pipeline_alone_gives_diffusers_latents(
    family: str, pipelines: Pipelines, tmp_path: Path
) -> None:
    size = f"args.sampling_num_frames={4 if family == '1.5_5b' else 3}"
    settings = sample(tmp_path, pipelines.path(family), *LATENTS, size)
    expected = pipelines.latents(pipelines.load(family), 9)
    assert_close(latents(tmp_path), expected)
    assert settings["dtype"] == "fp32"
    assert settings["scale_factor"] == 0.7
    assert settings["prompts"][0] == {"text": PROMPT, "seed": SEED, "height": 32, "width": 48}
    assert settings["sampler"]["target"].endswith("VideoDDIMSampler")
    assert set(settings["versions"]) == {"torch", "diffusers", "transformers", "commit"}


def test_a_negative_prompt_is_diffusers(pipelines: Pipelines, tmp_path: Path) -> None:
    """The plain options alone; configs/ guide by a scale that varies, as diffusers' option does."""
    negative = "grey, without motion"
    words = ["--steps", STEPS, "--guidance", SCALE, "--frames", 9, "--negative-prompt", negative]
    given = [pipelines.path("5b"), "--prompt", PROMPT, "--seed", SEED, "--out", tmp_path, *words]
    assert main(["sample", *map(str, given), "args.only_save_latents=true"]) == 0
    expected = pipelines.latents(pipelines.load("5b"), 9, negative=negative, use_dynamic_cfg=True)
    assert_close(latents(tmp_path), expected)
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["negative_prompt"] == negative
    assert (settings["num_steps"], settings["num_frames"]) == (STEPS, 9)


def test_a_pipeline_takes_every_plain_option(pipelines: Pipelines, answer) -> None:
    """Its folder sets keys of its own, as the command line does."""
    words = ["--steps", "7", "--guidance", "2", "--num-videos", "3", "--frames", "9"]
    rows = answer("sample", pipelines.path("5b"), "--dry-run", *words).splitlines()
    for flag in words[::2]:
        assert any(row.endswith(f"# {flag}") for row in rows), flag


def test_a_pipeline_at_another_size_gives_diffusers_latents(
    pipelines: Pipelines, tmp_path: Path
) -> None:
    """Its positions are rescaled: another shape than its own, and larger."""
    size = (64, 48)
    arguments = (*LATENTS, "args.sampling_num_frames=3", f"args.sampling_image_size={list(size)}")
    sample(tmp_path / "out", pipelines.path("5b"), *arguments)
    expected = pipelines.latents(pipelines.load("5b"), 9, size)
    assert_close(latents(tmp_path / "out"), expected)


@pytest.mark.parametrize("family", ["5b_i2v", "1.5_5b_i2v"])
def test_a_picture_and_a_pipeline_are_enough(
    family: str, pipelines: Pipelines, tmp_path: Path
) -> None:
    """VAE, text encoder and frame rate come from the folder; 1.5 uses the picture's shape."""
    pixels = np.random.default_rng(0).integers(0, 256, (60, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "tall.png")
    few = "model.sampler_config.params.num_steps=2"
    out = tmp_path / "out"
    settings = sample(out, pipelines.path(family), "--image", tmp_path / "tall.png", few)
    (video,) = out.glob("*.mp4")
    shape = (17, 48, 32, 3) if family.startswith("1.5") else (9, 32, 48, 3)
    assert decode_all(video).shape == shape
    assert settings["fps"] == (16 if family.startswith("1.5") else 8)
    assert settings["decode_tile"] is None
    # The scale is that of the folder's vae/config.json.
    assert settings["image_scale"] == (1 / 0.7 if family.startswith("1.5") else 0.7)


@pytest.mark.parametrize("scale", ["trainer", pytest.param("pretrained", marks=pytest.mark.soak)])
def test_each_scale_of_the_first_frame_gives_diffusers_latents(
    scale: ImageLatentScale,
    pipelines: Pipelines,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The code that a run logs at its end gives the stock pipeline of 1.5-I2V the run's scale."""
    folder = pipelines.path("1.5_5b_i2v")
    picture = Image.effect_noise(SIZE[::-1], 80).convert("RGB")
    picture.save(tmp_path / "a.png")
    given = [folder, "--image", tmp_path / "a.png", *LATENTS, "args.sampling_num_frames=6"]
    settings = sample(tmp_path / "own", *given, f"model.image_latent_scale={scale}")
    assert "latents have scale" in capsys.readouterr().err

    def draw(output: object, generator: object) -> Tensor:
        """cogfast's noise in the place of the generator's."""
        found = output.latent_dist
        noise = SlotRandom(0, 0, [SEED], 0).normal("image_first_stage", found.mean.shape)
        return found.mean + found.std * noise

    monkeypatch.setattr(pipeline_cogvideox_image2video, "retrieve_latents", draw)
    pipe = pipelines.load("1.5_5b_i2v")
    pixels = pipe.decode_latents(latents(tmp_path / "own").transpose(0, 1)[None])
    exec(pipeline_code(scale, 0.7), {"pipe": pipe})
    expected = pipelines.latents(pipe, 17, image=picture)
    assert_close(latents(tmp_path / "own"), expected)
    assert settings["image_scale"] == scale_of(scale, 0.7)
    # Decoding is as before.
    assert_close(pipe.decode_latents(latents(tmp_path / "own").transpose(0, 1)[None]), pixels)
    plain = pipelines.latents(pipelines.load("1.5_5b_i2v"), 17, image=picture)
    assert (plain - expected).norm() > 1e-3 * plain.norm()


def test_each_picture_has_its_shape(pipelines: Pipelines, tmp_path: Path) -> None:
    """Each video has its picture's shape and equals that of the picture sampled alone."""
    folder, few = pipelines.path("1.5_5b_i2v"), "model.sampler_config.params.num_steps=2"
    for name, size in (("tall", (40, 60)), ("wide", (100, 40))):  # columns, rows
        Image.effect_noise(size, 80).convert("RGB").save(tmp_path / f"{name}.png")
    lines = [f"a block@@{tmp_path / f'{name}.png'}" for name in ("tall", "wide")]
    (tmp_path / "prompts.txt").write_text("\n".join(lines))
    arguments = ["sample", str(folder), few, *LATENTS, "args.mode=finetune"]
    words = ["--prompt-file", str(tmp_path / "prompts.txt"), "--out", str(tmp_path / "both")]
    words += ["--seed", str(SEED), "deepspeed.train_micro_batch_size_per_gpu=2"]
    assert main([*arguments, *words]) == 0
    settings = json.loads((tmp_path / "both" / "settings.json").read_text())
    sizes = [(row["height"], row["width"]) for row in settings["prompts"]]
    assert sizes == [(48, 32), (32, 80)]
    names = json.loads((tmp_path / "both" / "prompts.json").read_text())
    found = [load_file(tmp_path / "both" / name)["latents"] for name in names]
    assert [tuple(one.shape) for one in found] == [(16, 6, 6, 4), (16, 6, 4, 10)]
    one = [*arguments, "--prompt", "a block", "--image", str(tmp_path / "wide.png")]
    assert main([*one, "--seed", str(SEED + 1), "--out", str(tmp_path / "one")]) == 0
    torch.testing.assert_close(latents(tmp_path / "one"), found[1], rtol=0, atol=1e-4)


def test_decoding_within_what_is_allowed(
    pipelines: Pipelines, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = pipelines.path("1.5_5b")
    arguments = ["args.sampling_image_size=[192,96]", "args.sampling_num_frames=2"]
    arguments.append("model.sampler_config.params.num_steps=2")
    whole = sample(tmp_path / "whole", folder, *arguments)
    tiled = sample(tmp_path / "tiled", folder, *arguments, "args.vae_memory_gib=0.075")
    assert whole["decode_tile"] is None
    assert tiled["decode_tile"][0] < 192
    frames = [decode_all(next((tmp_path / name).glob("*.mp4"))) for name in ("whole", "tiled")]
    assert frames[0].shape == frames[1].shape == (1, 192, 96, 3)
    difference = np.abs(frames[0].astype(float) - frames[1]).mean()
    print(f"tiles of {tiled['decode_tile']}: {difference:.1f} of 255 apart")
    assert 0 < difference < 64  # random weights: a tile has statistics of its own
    capsys.readouterr()
    least = ["sample", str(folder), *arguments, "args.vae_memory_gib=0.001", "--prompt", "a"]
    line = "args.vae_memory_gib=0.001: decoding 1 frames of 192x96 takes 0."
    assert main([*least, "--out", str(tmp_path / "none")]) == 2
    assert_line(capsys.readouterr().err.splitlines()[-1], line)  # behind log lines
    assert not (tmp_path / "none").exists()


@pytest.fixture
def adapter(pipelines: Pipelines, tmp_path: Path) -> Path:
    """A LoRA file of diffusers' 5B, of strength 3 / 2."""
    transformer = CogVideoXTransformer3DModel.from_pretrained(pipelines.path("5b") / "transformer")
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    transformer.add_adapter(LoraConfig(r=2, lora_alpha=3, target_modules=targets))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in transformer.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.1, generator=generator)
    layers = get_peft_model_state_dict(transformer)
    metadata = {"transformer_lora_adapter_metadata": transformer.peft_config["default"].to_dict()}
    CogVideoXPipeline.save_lora_weights(tmp_path / "lora", layers, **metadata)
    return tmp_path / "lora"


def test_adapters_have_diffusers_strength(
    pipelines: Pipelines, adapter: Path, tmp_path: Path
) -> None:
    pipeline = pipelines.load("5b")
    plain = pipelines.latents(pipeline, 9)
    pipeline.load_lora_weights(adapter, adapter_name="mine")
    pipeline.set_adapters("mine", 0.5)
    expected = pipelines.latents(pipeline, 9)
    settings = sample(tmp_path / "out", pipelines.path("5b"), *LATENTS, "--lora", f"{adapter}:0.5")
    assert_close(latents(tmp_path / "out"), expected)
    assert (expected - plain).norm() > 0.02 * plain.norm()
    assert settings["lora"] == [{"path": str(adapter), "scale": 0.5}]


def test_a_sat_folder_alone(pipelines: Pipelines, adapter: Path, tmp_path: Path) -> None:
    """Base and adapters in SAT's one file, whose alpha is SAT's 1, are the base with the adapters on top.

    VAE and text encoder are named. A folder of averages beside the weights is read with --ema.
    """
    base, sat = pipelines.path("5b"), tmp_path / "sat"
    assert main(["convert", str(base), str(sat), "--to", "sat", "--add-lora", str(adapter)]) == 0
    arguments = (
        *LATENTS,
        f"model.first_stage_config.params.ckpt_path={base}",
        f"model.conditioner_config.params.emb_models[0].params.model_dir={base}",
        "model.sampler_config.params.timestep_spacing=trailing",  # as the pipeline's
        "model.sampler_config.target=sgm.modules.diffusionmodules.sampling.VideoDDIMSampler",
    )
    sample(tmp_path / "on-top", base, *LATENTS, "--lora", adapter)
    expected = latents(tmp_path / "on-top")
    sample(tmp_path / "alone", sat, *arguments)
    assert (latents(tmp_path / "alone") - expected).norm() < 1e-4 * expected.norm()
    averages = sat / f"{(sat / 'latest').read_text().strip()}-ema"
    shutil.copytree(str(averages).removesuffix("-ema"), averages)
    assert sample(tmp_path / "ema", sat, *arguments, "--ema")["ema"] is True
    assert torch.equal(latents(tmp_path / "ema"), latents(tmp_path / "alone"))


def test_adapters_that_cannot_be_added_are_refused(
    pipelines: Pipelines, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for source, lora, wanted in (
        ("5b", tmp_path / "none", "none: no such file or folder"),
        ("1.5_5b", pipelines.path("5b"), "transformer: has no LoRA tensors"),
    ):
        arguments = ["sample", pipelines.path(source), "--prompt", "a", "--lora", lora]
        assert_command_refused(capsys, [*arguments, "--out", tmp_path / "out"], wanted)
    assert not (tmp_path / "out").exists()
    line = "is a LoRA and not a model; give the folder of its base model, and the LoRA with --lora"
    assert_command_refused(capsys, ["sample", str(adapter), "--prompt", "a"], line)


MODELS = ("_2b", "_5b", "_5b_i2v", "1.5_5b", "1.5_5b_i2v")


@pytest.mark.parametrize("name", [f"cogvideox{model}" for model in MODELS])
def test_sats_inference_file_goes_with_every_model(
    name: str, sat_configs: Path, tmp_path: Path
) -> None:
    """It is read whole; its size and length are 1.5's, which the others refuse with their own."""
    Image.new("RGB", (1360, 768)).save(tmp_path / "a.png")
    files = [sat_configs / f"{file}.yaml" for file in (name, "inference")]
    given = [f"args.load={tmp_path}", f"model.first_stage_config.params.ckpt_path={tmp_path}"]
    given += [f"model.conditioner_config.params.emb_models[0].params.model_dir={tmp_path}"]
    given += ["deepspeed.fp16.enabled=false", "deepspeed.bf16.enabled=true"]
    images = [tmp_path / "a.png" if "i2v" in name else None]

    def size_of(*arguments: str) -> LatentSize:
        config = run_of(*files).config(*given, *arguments)
        check_sample(config.run, given=["image"] if images != [None] else [])
        made = config.run
        return sampled_sizes(made.args, made.fields, made.data_arguments, images)[0]

    if "1.5" in name:
        assert size_of() == LatentSize(16, 22, 96, 170, 81, 16)
        tall = [tmp_path / "tall.png"]
        Image.new("RGB", (300, 400)).save(tall[0])
        images = tall if "i2v" in name else images
        like_picture = size_of("args.sampling_image_size=null")  # upstream: "remove this for I2V"
        size = (128, 96) if "i2v" in name else (96, 170)  # no data section
        assert (like_picture.height, like_picture.width) == size
        assert size_of("args.sampling_num_frames=20").num_frames == 73
        return
    held = "ends at" if name == "cogvideox_5b" else "is for"
    table = f"inference.yaml: args.sampling_image_size=[768, 1360]: <...> {held} [480, 720]"
    assert_refused(size_of, table)
    size = "args.sampling_image_size=[480,720]"
    assert_refused(lambda: size_of(size), "sampling_num_frames=22 must be from 1 to 13")
    odd = "12 latent frames decode to 45 <...>1.0 supports 8N+1 <...> (2N+1 <...>); use 11 or 13"
    assert_refused(lambda: size_of(size, "args.sampling_num_frames=12"), odd)
    assert size_of(size, "args.sampling_num_frames=13") == LatentSize(16, 13, 60, 90, 49, 16)
