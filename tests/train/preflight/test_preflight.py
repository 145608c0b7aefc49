"""`cogfast train` and `cogfast sample` refuse these configs before any GPU work."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from cogfast.config import Config, load_config, resolve
from cogfast.data.datasets import ListedVideos
from cogfast.data.sources.clip_list import ClipList
from cogfast.data.sources.folders import DataDir
from cogfast.train.assembly import assemble_diffusion
from cogfast.train.preflight.check import check_sample, check_train, log_unused
from cogfast.train.preflight.parts import warn_of_different_schedules


@pytest.fixture
def config(sat_configs, tmp_path):
    """Upstream's own files, with every path of theirs put to one that exists."""
    for name in ("weights", "videos", "t5"):
        (tmp_path / name).mkdir()
    (tmp_path / "vae.pt").touch()

    def load(
        model: str, *arguments: str, second: str = "sft", allow_import: tuple[str, ...] = ()
    ) -> Config:
        paths = [
            f"args.load={tmp_path / 'weights'}",
            f"model.first_stage_config.params.ckpt_path={tmp_path / 'vae.pt'}",
            f"model.conditioner_config.params.emb_models[0].params.model_dir={tmp_path / 't5'}",
            f"args.train_data=[{tmp_path / 'videos'}]",
            f"args.valid_data=[{tmp_path / 'videos'}]",
        ]
        files = [sat_configs / f"{model}.yaml", sat_configs / f"{second}.yaml"]
        return load_config(files, [*paths, *arguments], allow_import)

    return load


@pytest.mark.parametrize(
    "model",
    [
        "cogvideox_2b",
        "cogvideox_2b_lora",
        "cogvideox_5b",
        "cogvideox_5b_lora",
        "cogvideox_5b_i2v",
        "cogvideox_5b_i2v_lora",
    ],
)
def test_upstreams_1_0_files_pass_once_their_paths_are_set(config, model):
    check_train(config(model), world_size=8)


def test_upstreams_1_5_files_pass_with_latent_input_off_and_16n_plus_1_frames(config):
    arguments = ["model.latent_input=false", "data.params.max_num_frames=81"]
    check_train(config("cogvideox1.5_5b", *arguments), world_size=8)
    check_train(config("cogvideox1.5_5b_i2v", *arguments[1:]), world_size=8)
    # the position table has an entry per token, and a token covers two latent frames
    check_train(config("cogvideox1.5_5b", arguments[0], "data.params.max_num_frames=161"))


def test_files_as_upstream_ships_them_are_refused(sat_configs):
    load = lambda *names: load_config([sat_configs / f"{n}.yaml" for n in names])
    placeholder = (
        r"args.load='\{your CogVideoX SAT folder\}/transformer' is a placeholder of upstream's file"
    )
    with pytest.raises(ValueError, match="sft.yaml: " + placeholder):
        check_train(load("cogvideox_2b", "sft"))
    with pytest.raises(ValueError, match="inference.yaml: " + placeholder):
        check_sample(load("cogvideox1.5_5b", "inference"))
    with pytest.raises(ValueError, match="args.mode=inference is for `cogfast sample`"):
        check_train(load("cogvideox1.5_5b", "inference"))
    with pytest.raises(ValueError, match="model.network_config is missing; add a model file"):
        check_train(load("sft"))
    with pytest.raises(ValueError, match="data.target is missing"):
        check_train(load("cogvideox_2b"))


REFUSED = {
    "model.image_latent_scale=pipeline": (
        "command line: model.image_latent_scale=pipeline is a scale of image-to-video models; leave the "
        "key out"
    ),
    "model.network_config.params.out_channels=160": (
        "cogvideox_2b.yaml: model.network_config.params.in_channels=16 must equal out_channels=160, or "
        "have those of model.conditions, too"
    ),
    "model.latent_input=true": (
        "command line: model.latent_input=true, but data_video.SFTDataset returns pixels; set "
        "it to false"
    ),
    "args.load=nowhere": "args.load=nowhere does not exist; set it to the folder of the",
    "args.train_data=[nowhere]": "args.train_data: folder nowhere does not exist; set it to",
    "args.train_data=[]": "args.train_data is empty; set it to the folders of",
    "args.train_data_weights=[0]": "at least one must be above 0; ",
    "args.train_data_weights=[1,2]": "must have as many entries as args.train_data, 1; give one",
    "args.cached_noised_images=2": "but args.latent_cache is not set; set that to a folder: args.latent",
    "args.encode_first=true": "args.encode_first=true applies to a latent cache, but args.latent_cache",
    "args.cached_noised_images=2 args.latent_cache=cache": (
        "=2 applies to image-to-video, but the model takes no image; set it to 0"
    ),
    "args.resume=nowhere": "args.resume=nowhere does not exist; set it to a run",
    "args.train_iters=1000 args.epochs=3": "args.train_iters=1000 and args.epochs=3 are both set; set one of them to null",
    "args.model_parallel_size=4": (
        "command line: args.model_parallel_size=4 must divide num_attention_heads=30; use 1, 2, 3, 5, "
        "6, 10, 15, 30"
    ),
    "args.model_parallel_size=0": "args.model_parallel_size=0 must divide num_attention_heads=30",
    "args.model_parallel_size=5": (
        "args.model_parallel_size=5 must divide the number of ranks, 8; use 1, 2, or start "
        "another number of ranks (--nproc_per_node)"
    ),
    "args.sequence_parallel=true": "but args.model_parallel_size=1; set that to 2 or more",
    "args.quantize_base=int8": (
        "args.quantize_base=int8 is for LoRA with a frozen base, but this run trains other weights; set "
        "args.lora_rank=64 (or another rank), or args.quantize_base=none"
    ),
    "args.offload_blocks=4": "args.offload_blocks=4 is for LoRA with a frozen base, but this run",
    "args.context_parallel_size=4": (
        "command line: args.context_parallel_size=4 must divide num_attention_heads=30; use 1, 2, 3, 5, "
        "6, 10, 15, 30"
    ),
    "args.model_parallel_size=2 args.context_parallel_size=3": (
        "args.context_parallel_size=3 must divide the number of ranks, 8 / args.model_parallel_size=2 "
        "= 4; use 1, or start another number of ranks (--nproc_per_node)"
    ),
    "args.model_parallel_size=2 deepspeed.train_batch_size=16": (
        "deepspeed.train_batch_size=16 does not fit 4 data-parallel ranks: "
    ),
    "args.bf16=true args.fp16=true": (
        "args.bf16 and args.fp16 are both true; set one of them to false"
    ),
    "deepspeed.train_batch_size=15": (
        "deepspeed.train_batch_size=15 does not fit 8 data-parallel ranks: "
        "train_micro_batch_size_per_gpu=2 x gradient_accumulation_steps=1 x 8 ranks = 16; remove deepspeed.train_batch_size or"
    ),
    "data.params.max_num_frames=50": (
        "data.params.max_num_frames=50: CogVideoX 1.0 supports 8N+1 frames, at most 49; use 49"
    ),
    "data.params.video_size=[480]": r"video_size=[480] must be [rows, columns], e.g. [480, 720]",
    "data.params.video_size=[480,721]": "rows must be a multiple of 16 and columns of 16",
    "data.params.video_size=[720,480]": (
        "data.params.video_size=[720, 480]: the model's position table is for [480, 720] only; use "
        "that, or change latent_height and latent_width of model.network_config.params to 90 and 60: the "
        "table is computed, so the weights load"
    ),
    "model.noised_image_input=true": (
        "model.noised_image_input=true does not fit in_channels=16 and out_channels=16"
    ),
    "model.conditioner_config.params.emb_models[0].params.max_length=77": (
        "max_length=77 must equal text_length=226 of the model's pos_embed_config"
    ),
    "model.conditioner_config.params.emb_models[0].params.model_dir=t5-v1_1-xxl": (
        "model_dir=t5-v1_1-xxl is not a folder; set it to the folder of T5"
    ),
    "model.first_stage_config.params.ckpt_path=nowhere.pt": (
        "model.first_stage_config.params.ckpt_path=nowhere.pt does not exist"
    ),
    "args.load=": "args.load= does not exist",
    "args.split=0,1": "args.split='0,1' must be the shares of training",
    "model.conditioner_config.params.emb_models=[{target: torch.nn.Identity}]": "by a text enc",
    "args.wandb=true": "command line: args.wandb=true, but wandb is not installed; pip install",
    "model.input_key=jpg": "model.input_key=jpg must be mp4, the key of the videos",
    **{
        f"args.experiment_name={json.dumps(name)}": f"args.experiment_name={name!r} must be a folder name of"
        for name in ("..", "", "a/b", "a\nb")
    },
    "args.experiment_name="
    + 201 * "x": "xxx' must be a folder name of at most 200 bytes, printable",
    "args.warmup_steps=2000": (
        "command line: args.warmup_steps=2000 must not exceed the run's 1000 steps"
    ),
    "model.first_stage_config.params.ckpt_path=null": (
        "command line: model.first_stage_config.params.ckpt_path is missing: an autoencoder with random"
    ),
    "model.first_stage_config=null": "model.first_stage_config is missing: an autoencoder",
    "model.conditioner_config.params.emb_models=[]": "captions are encoded by a text encoder",
    "model.loss_fn_config={target: torch.nn.Identity}": "model.loss_fn_config is missing",
    "model.sampler_config.params.num_steps=0": (
        "model.sampler_config: num_steps=0 must be from 1 to 1000; use 50"
    ),
    "deepspeed.optimizer.params.betas=[0.9,2]": (
        "deepspeed.optimizer: FusedEmaAdam betas=[0.9, 2] must be in [0, 1)"
    ),
    "deepspeed.optimizer={type: Adam, params: {betas: [0.9, 2]}}": "deepspeed.optimizer: Invalid",
}


def _arguments(text: str) -> list[str]:
    """Overrides out of one text; a space starts a new one only in front of a key."""
    return re.split(r" (?=args\.|deepspeed\.)", text)


@pytest.mark.parametrize("argument", REFUSED)
def test_train_refuses(config, argument):
    with pytest.raises(ValueError) as raised:
        check_train(config("cogvideox_2b", *_arguments(argument)), world_size=8)
    assert len(str(raised.value)) <= 400
    assert REFUSED[argument] in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_shard_is_named(config, tmp_path: Path):
    (tmp_path / "s-0.tar").touch()
    arguments = f"data.target=data_video.VideoDataset|args.train_data=['{tmp_path}/s-{{0..1}}.tar']"
    with pytest.raises(ValueError, match=r"train_data=.*s-\{0..1\}.tar: file .*s-1.tar does not"):
        check_train(config("cogvideox_2b", *arguments.split("|")))


def test_rows_of_ranks_divide_the_tokens(config):
    """Text and video of 2B's 49 frames at 480x720 are 17776 rows."""
    split = ["args.sequence_parallel=true", "args.model_parallel_size=3"]
    check_train(config("cogvideox_2b", split[0], "args.model_parallel_size=2"), world_size=8)
    message = "splits 17776 text and video tokens between 3 ranks .* which does not divide them"
    with pytest.raises(ValueError, match=message):
        check_train(config("cogvideox_2b", *split), world_size=3)


@pytest.mark.parametrize("key", ["model_parallel_size", "context_parallel_size"])
def test_ranks_of_a_model_would_drop_other_entries(config, key: str):
    dropout = "model.network_config.params.modules.lora_config.params.lora_dropout=0.1"
    checked = config("cogvideox_5b_lora", f"args.{key}=2", dropout)
    with pytest.raises(
        ValueError, match=rf"args.{key}=2 does not support lora_dropout=0.1: .*: 0$"
    ):
        check_train(checked, world_size=8)


def test_world_size_is_read_from_the_launcher(config, monkeypatch):
    checked = config("cogvideox_2b", "deepspeed.train_batch_size=8")
    check_train(checked, world_size=4)
    monkeypatch.setenv("WORLD_SIZE", "4")
    check_train(checked)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="does not fit 3 data-parallel ranks"):
        check_train(checked)


def test_fp16_needs_a_gpu(config, monkeypatch):
    checked = config("cogvideox_2b", "deepspeed.fp16.enabled=true", "deepspeed.bf16.enabled=false")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_train(checked, world_size=8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="args.fp16=true needs a GPU; on a CPU use"):
        check_train(checked, world_size=8)


def test_muon_is_for_runs_that_train_all_weights(config):
    muon = "deepspeed.optimizer.type=muon"
    check_train(config("cogvideox_5b", muon), world_size=8)
    text = "type=muon is for runs that train all weights: .*; use Prodigy or sat.ops.FusedEmaAdam"
    with pytest.raises(ValueError, match=text):
        check_train(config("cogvideox_5b_lora", muon), world_size=8)


def test_fp8_needs_a_gpu_that_has_it_and_bf16(config, monkeypatch):
    """On a CPU it runs: the same roundings are computed there."""
    lora = lambda *words: config("cogvideox_5b_lora", *words)
    checked = lora("args.quantize_base=fp8")
    check_train(checked, world_size=8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    check_train(checked, world_size=8)
    fp16 = ["deepspeed.fp16.enabled=true", "deepspeed.bf16.enabled=false"]
    text = r"args.quantize_base=fp8 has products in bf16 on a GPU, but the run is in fp16; set deepspeed"
    with pytest.raises(ValueError, match=text):
        check_train(lora("args.quantize_base=fp8", *fp16), world_size=8)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    text = (
        r"needs a GPU with fp8 matrix products .* but this one is A100; set args.quantize_base=int8"
    )
    with pytest.raises(ValueError, match=text):
        check_train(checked, world_size=8)


FRAMES_1_5 = {57: None, 60: "use 57 or 65", 161: None, 177: "at most 161; use 161"}


@pytest.mark.parametrize("num_frames", FRAMES_1_5)
def test_frames_of_1_5(config, num_frames):
    arguments = ["model.latent_input=false", f"data.params.max_num_frames={num_frames}"]
    checked = config("cogvideox1.5_5b", *arguments)
    if FRAMES_1_5[num_frames] is None:
        check_train(checked)
    else:
        with pytest.raises(ValueError, match=f"supports 8N.1 frames.*{FRAMES_1_5[num_frames]}"):
            check_train(checked)


def test_sizes_within_a_rotary_table_and_beyond(config):
    check_train(config("cogvideox_5b", "data.params.video_size=[256,320]"))
    with pytest.raises(ValueError, match=r"\[720, 480\]: the model's position table ends at \[480"):
        check_train(config("cogvideox_5b", "data.params.video_size=[720,480]"))


@pytest.mark.parametrize(
    "model, size, fix",
    [
        ("cogvideox_2b", [470, 720], [480, 720]),
        ("cogvideox_5b", [500, 4000], [480, 720]),
        ("cogvideox1.5_5b_i2v", [767, 1361], [768, 1360]),
    ],
)
def test_the_size_that_is_named_fits(config, model, size, fix):
    arguments = f"data.params.video_size={size}".replace(" ", "")
    with pytest.raises(
        ValueError, match=rf"rows must be a multiple of 16.*use {re.escape(str(fix))}"
    ):
        check_train(config(model, arguments))
    check_train(config(model, f"data.params.video_size={fix}".replace(" ", "")))


SAMPLING = {
    "args.sampling_image_size=[480]": r"args.sampling_image_size=\[480\] must be a list of 2 \(each item: a whole",
    "args.sampling_image_size=[480,832]": r"position table is for \[480, 720\] only",
    "args.sampling_num_frames=22": "=22 must be from 1 to 13 latent frames.*position table",
    "args.load=null": "args.load is missing; set it to the weights to sample with, or give a run",
    "model.sampler_config=null": "model.sampler_config is missing; add a model file",
    "args.lr=1": "args.lr has no effect on sampling; leave it out",
    "args.eval_sampling_steps=3": "args.eval_sampling_steps has no effect on sampling",
}


@pytest.mark.parametrize("argument", SAMPLING)
def test_sample_refuses(config, argument):
    fitting = ["args.sampling_image_size=[480,720]", "args.sampling_num_frames=13"]
    check_sample(config("cogvideox_2b", *fitting, second="inference"))
    with pytest.raises(ValueError, match=SAMPLING[argument]):
        check_sample(
            config(
                "cogvideox_2b", *fitting, "args.force_inference=false", argument, second="inference"
            )
        )


def test_sampling_1_5_counts_padded_latent_frames(config):
    load = lambda n: config("cogvideox1.5_5b", f"args.sampling_num_frames={n}", second="inference")
    for num_frames in (22, 21, 42):  # 5 s with and without the padding, 10 s
        check_sample(load(num_frames))
    with pytest.raises(ValueError, match="=43 must be from 1 to 42 latent frames"):
        check_sample(load(43))


def test_images_go_to_image_models(config, tmp_path: Path):
    image_model = config("cogvideox1.5_5b_i2v", second="inference")
    check_sample(image_model, given=["image"])
    with pytest.raises(ValueError, match="give --image PNG or prompts as prompt@@"):
        check_sample(image_model)
    with pytest.raises(ValueError, match="the model does not use an image .*; leave --image out"):
        check_sample(config("cogvideox1.5_5b", second="inference"), given=["image"])
    # a run's own weights replace args.load
    gone = config("cogvideox1.5_5b", "args.load=nowhere", second="inference")
    check_sample(gone, weights=str(tmp_path))


def test_different_noise_schedules_are_logged(config, caplog):
    shift = "params.discretization_config.params.shift_scale=1.0"
    for overrides in ((), (f"model.sampler_config.{shift}",), (f"model.denoiser_config.{shift}",)):
        warn_of_different_schedules(assemble_diffusion(config("cogvideox_2b", *overrides)))
    logged = [record.message.split()[0] for record in caplog.records]
    assert logged == ["model.sampler_config", "model.loss_fn_config", "model.sampler_config"]


class OwnVideos(ListedVideos):
    def find(self, data_dir: DataDir, allow_empty_captions: bool) -> list[ClipList]:
        return []

    @staticmethod
    def missing_source(key: str, source: str) -> str | None:
        return f"{key}: no bucket {source}" if source == "gone" else None


class OwnLatents(OwnVideos):
    reads_pixels = False


@dataclass(eq=False)
class OwnOption(OwnVideos):
    stride: int = 1


def test_a_users_data_set_adds_params_and_all_are_checked(config) -> None:
    own = f"data.target={__name__}.OwnOption"
    load = lambda argument: config("cogvideox_2b", own, argument, allow_import=("tests",))
    assert resolve(load("data.params.stride=2").data, ("tests",))[1]["stride"] == 2
    for argument in ("data.params.stride=x", "data.params.fps=0", "data.params.strides=2"):
        with pytest.raises(ValueError, match=f"command line: .*{argument.partition('=')[0]}"):
            load(argument)


def test_a_users_data_set_of_videos_is_checked_and_takes_a_cache(config, tmp_path: Path) -> None:
    own = f"data.target={__name__}."
    cache = f"args.latent_cache={tmp_path / 'cache'}"
    load = lambda *arguments: config("cogvideox_2b", *arguments, allow_import=("tests",))
    check_train(load(own + "OwnVideos", cache))
    with pytest.raises(ValueError, match="max_num_frames=50"):
        check_train(load(own + "OwnVideos", "data.params.max_num_frames=50"))
    with pytest.raises(ValueError, match="args.train_data: no bucket gone"):
        check_train(load(own + "OwnVideos", "args.train_data=[gone]"))
    check_train(load(own + "OwnLatents", "args.train_data=[gone]"))
    with pytest.raises(
        ValueError, match=r"latent_cache=.* does not work with .*OwnLatents: the cache"
    ):
        check_train(load(own + "OwnLatents", cache))


def test_all_missing_paths_are_reported_together(config) -> None:
    """One start names every path that does not exist, each with the file that names it."""
    lost = {
        "args.load": "lost/base",
        "args.train_data": "lost/clips",
        "args.valid_data": "lost/valid",
        "args.resume": "lost/run",
        "args.load_lora": "lost/lora",
        "args.trusted_cache": "lost/cache",
        "args.eval_prompt_file": "lost/prompts.txt",
        "model.first_stage_config.params.ckpt_path": "lost/vae.pt",
        "model.conditioner_config.params.emb_models[0].params.model_dir": "lost/t5",
    }
    arguments = [
        f"{key}=[{path}]" if "_data" in key else f"{key}={path}" for key, path in lost.items()
    ]
    checked = config("cogvideox_2b", *arguments, "args.eval_interval=5")
    with pytest.raises(ValueError) as raised:
        check_train(checked, world_size=8)
    lines = str(raised.value).splitlines()
    assert len(lines) == len(lost)
    assert "lost/base" in lines[0]  # a pipeline there would settle VAE and text encoder
    for path in lost.values():
        (line,) = [line for line in lines if path in line]
        assert line.startswith("command line: ") and len(line) <= 400


def test_defaults_that_are_not_sats_are_logged(config, caplog, tmp_path):
    """SAT's sft.yaml sets nearly all of them; a file without its keys relies on cogfast's."""
    caplog.set_level("INFO")
    log_unused(config("cogvideox_5b"))
    assert "no file sets" not in caplog.text
    base = tmp_path / "short.yaml"
    base.write_text("args: {eval_interval: 10, train_iters: 20000}")
    log_unused(load_config([base]))
    (line,) = [text for text in caplog.messages if text.startswith("no file sets")]
    assert line == (
        "no file sets args.mode='finetune' (SAT: pretrain), args.batch_size=1 (SAT: 4), "
        "args.zero_stage=2 (SAT: 0), args.log_interval=20 (SAT: 50), args.keep_last=2 (SAT: all), "
        "args.split='1,0,0' (SAT: 1000,1,1)"
    )
    caplog.clear()
    base.write_text("args: {mode: inference, sampling_fps: 16}")
    log_unused(load_config([base]))
    assert "args.sampling_num_frames=null (SAT: 32)" in caplog.text
    assert "sampling_fps" not in caplog.text


@pytest.mark.parametrize(("mode", "is_logged"), [("pretrain", True), ("finetune", False)])
def test_a_sat_run_that_sat_would_continue_is_logged(caplog, tmp_path, mode, is_logged):
    caplog.set_level("INFO")
    (tmp_path / "latest").write_text("300\n")
    log_unused(load_config([], [f"args.mode={mode}", f"args.load={tmp_path}"]))
    assert ("is SAT's iteration 300, from" in caplog.text) is is_logged
