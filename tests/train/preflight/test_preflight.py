"""`cogfast train` and `cogfast sample` refuse these configs before any GPU work."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from cogfast.config import Config, resolve
from cogfast.core.shapes import PatchSize
from cogfast.data.datasets import ListedVideos
from cogfast.data.sources.clip_list import ClipList
from cogfast.data.sources.folders import DataDir
from cogfast.train.preflight.check import check_sample, check_train
from cogfast.train.preflight.parts import warn_of_different_schedules
from cogfast.train.run.terminal import log_unused
from cogfast.train.video_size import LatentSize, frames_problem
from tests.support.refusals import Refusal, assert_refused, refusals
from tests.support.runs import Run, diffusion_of


@pytest.fixture
def config(sat_configs: Path, run: Run, tmp_path: Path):
    """Upstream's own files, with every path of theirs put to one that exists."""
    for name in ("weights", "videos", "t5"):
        (tmp_path / name).mkdir()
    for name in ("vae.pt", "s-0.tar"):
        (tmp_path / name).touch()
    run = run.by(run.kind, "tests").with_words(
        f"args.load={tmp_path / 'weights'}",
        f"model.first_stage_config.params.ckpt_path={tmp_path / 'vae.pt'}",
        f"model.conditioner_config.params.emb_models[0].params.model_dir={tmp_path / 't5'}",
        f"args.train_data=[{tmp_path / 'videos'}]",
        f"args.valid_data=[{tmp_path / 'videos'}]",
    )

    def load(model: str, *words: str, second: str = "sft") -> Config:
        files = [sat_configs / f"{name}.yaml" for name in (model, second)]
        return run.of_files(*files).config(*words)

    return load


FRAMES = "data.params.max_num_frames"
# Files of upstream that pass once their paths are set: a model's, and more words
ACCEPTED = [
    (name, ()) for name in ("_2b", "_2b_lora", "_5b", "_5b_lora", "_5b_i2v", "_5b_i2v_lora")
]
ACCEPTED += [
    # 1.5's with latent_input off and 16n + 1 frames. The position table has an entry per token, and a
    # token covers two latent frames.
    ("1.5_5b", ("model.latent_input=false", f"{FRAMES}=81")),
    ("1.5_5b", ("model.latent_input=false", f"{FRAMES}=161")),
    ("1.5_5b", ("model.latent_input=false", f"{FRAMES}=57")),
    ("1.5_5b_i2v", (f"{FRAMES}=81",)),
    # Text and video of 2B's 49 frames at 480x720 are 17776 rows, which the ranks divide.
    ("_2b", ("args.sequence_parallel=true", "args.model_parallel_size=2")),
    ("_5b", ("deepspeed.optimizer.type=muon",)),
    ("_5b", ("data.params.video_size=[256,320]",)),  # within the rotary table
]


@pytest.mark.parametrize(("model", "words"), ACCEPTED)
def test_accepted(config, model, words):
    check_train(config(f"cogvideox{model}", *words).run, world_size=8)


def test_files_as_upstream_ships_them_are_refused(sat_configs: Path, run: Run):
    load = "args.load='{your CogVideoX SAT folder}/transformer'"
    placeholder = f"{load} is a placeholder of upstream's file"
    cases = (
        (check_train, "cogvideox_2b sft", f"sft.yaml: {placeholder}"),
        (check_sample, "cogvideox1.5_5b inference", f"inference.yaml: {placeholder}"),
        (check_train, "cogvideox1.5_5b inference", "args.mode=inference is for `cogfast sample`"),
        (check_train, "sft", "model.network_config is missing; add a model file"),
        (check_train, "cogvideox_2b", "data.target is missing"),
    )
    for check, names, line in cases:
        files = [sat_configs / f"{name}.yaml" for name in names.split()]
        with pytest.raises(ValueError, match=re.escape(line)):
            check(run.of_files(*files).config().run)


@refusals(Path(__file__).with_name("refusals.txt"))
def test_refused(config, tmp_path: Path, refusal: Refusal):
    """The base of a row is a command, a model of upstream's and the number of ranks."""
    command, model, ranks = refusal.base.split()
    refusal = refusal.fill(own=__name__, tmp=tmp_path)
    if command == "sample":
        words = [*SAMPLED, "args.force_inference=false", *refusal.words]
        call = lambda: check_sample(config(model, *words, second="inference").run)
    else:
        call = lambda: check_train(config(model, *refusal.words).run, world_size=int(ranks))
    assert_refused(call, refusal.line)


@refusals(Path(__file__).with_name("refusals_tiny.txt"))
def test_a_tiny_run_is_refused(run: Run, refusal: Refusal):
    """The base of a row is a member of the family, and perhaps the rank of a LoRA."""
    family, *rank = refusal.base.split()
    run = run.of(family).with_args(lora_rank=int(rank[0]) if rank else None)
    assert_refused(lambda: check_train(run.config(*refusal.words).run), refusal.line)


def test_world_size_is_read_from_the_launcher(config, monkeypatch):
    checked = config("cogvideox_2b", "deepspeed.train_batch_size=8")
    check_train(checked.run, world_size=4)
    monkeypatch.setenv("WORLD_SIZE", "4")
    check_train(checked.run)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert_refused(lambda: check_train(checked.run), "does not fit 3 data-parallel ranks")


def test_fp16_needs_a_gpu(config, monkeypatch):
    checked = config("cogvideox_2b", "deepspeed.fp16.enabled=true", "deepspeed.bf16.enabled=false")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_train(checked.run, world_size=8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = "args.fp16=true needs a GPU; on a CPU use"
    assert_refused(lambda: check_train(checked.run, world_size=8), line)


def test_fp8_needs_a_gpu_that_has_it_and_bf16(config, monkeypatch):
    """On a CPU it runs: the same roundings are computed there."""
    lora = lambda *words: config("cogvideox_5b_lora", *words)
    checked = lora("args.quantize_base=fp8")
    check_train(checked.run, world_size=8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    check_train(checked.run, world_size=8)
    words = ("deepspeed.fp16.enabled=true", "deepspeed.bf16.enabled=false")
    fp16 = lora("args.quantize_base=fp8", *words)
    line = "args.quantize_base=fp8 has products in bf16 on a GPU, but the run is in fp16; set deepspeed"
    assert_refused(lambda: check_train(fp16.run, world_size=8), line)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    line = "needs a GPU with fp8 matrix products <...> but this one is A100; set args.quantize_base=int8"
    assert_refused(lambda: check_train(checked.run, world_size=8), line)


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
    line = f"rows must be a multiple of 16<...>use {fix}"
    assert_refused(lambda: check_train(config(model, arguments).run), line)
    check_train(config(model, f"data.params.video_size={fix}".replace(" ", "")).run)


SAMPLED = ["args.sampling_image_size=[480,720]", "args.sampling_num_frames=13"]


def test_sampling_1_5_counts_padded_latent_frames(config):
    check_sample(config("cogvideox_2b", *SAMPLED, second="inference").run)
    load = lambda n: config("cogvideox1.5_5b", f"args.sampling_num_frames={n}", second="inference")
    for num_frames in (22, 21, 42):  # 5 s with and without the padding, 10 s
        check_sample(load(num_frames).run)
    assert_refused(lambda: check_sample(load(43).run), "=43 must be from 1 to 42 latent frames")


def test_images_go_to_image_models(config, tmp_path: Path):
    image_model = config("cogvideox1.5_5b_i2v", second="inference")
    check_sample(image_model.run, given=["image"])
    assert_refused(lambda: check_sample(image_model.run), "give --image PNG or prompts as prompt@@")
    text_model = config("cogvideox1.5_5b", second="inference")
    line = "the model does not use an image <...>; leave --image out"
    assert_refused(lambda: check_sample(text_model.run, given=["image"]), line)
    # a run's own weights replace args.load
    gone = config("cogvideox1.5_5b", "args.load=nowhere", second="inference")
    check_sample(gone.run, weights=str(tmp_path))


def test_different_noise_schedules_are_logged(config, caplog):
    shift = "params.discretization_config.params.shift_scale=1.0"
    for overrides in ((), (f"model.sampler_config.{shift}",), (f"model.denoiser_config.{shift}",)):
        warn_of_different_schedules(diffusion_of(config("cogvideox_2b", *overrides)))
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


def test_a_users_data_set_adds_params_and_one_of_videos_takes_a_cache(
    config, tmp_path: Path
) -> None:
    own = f"data.target={__name__}."
    words = [f"{own}OwnOption", "data.params.stride=2"]
    assert resolve(config("cogvideox_2b", *words).data, ("tests",))[1]["stride"] == 2
    cache = f"args.latent_cache={tmp_path / 'cache'}"
    check_train(config("cogvideox_2b", own + "OwnVideos", cache).run)
    check_train(config("cogvideox_2b", own + "OwnLatents", "args.train_data=[gone]").run)


def test_all_missing_paths_are_reported_together(config) -> None:
    """One start names every path that does not exist, each with the file that names it."""
    lost = {
        "args.load": "lost/base",
        "args.train_data": "lost/clips",
        "args.valid_data": "lost/valid",
        "args.resume": "lost/run",
        "args.load_lora": "lost/lora",
        "args.eval_prompt_file": "lost/prompts.txt",
        "model.first_stage_config.params.ckpt_path": "lost/vae.pt",
        "model.conditioner_config.params.emb_models[0].params.model_dir": "lost/t5",
    }
    arguments = [
        f"{key}=[{path}]" if "_data" in key else f"{key}={path}" for key, path in lost.items()
    ]
    checked = config("cogvideox_2b", *arguments, "args.eval_interval=5")
    with pytest.raises(ValueError) as raised:
        check_train(checked.run, world_size=8)
    lines = str(raised.value).splitlines()
    assert len(lines) == len(lost)
    assert "lost/base" in lines[0]  # a pipeline there would settle VAE and text encoder
    for path in lost.values():
        (line,) = [line for line in lines if path in line]
        assert line.startswith("command line: ") and len(line) <= 400


def logged(config: Config) -> None:
    log_unused(config.unused, config.run.sections["args"], config.origins)


def test_defaults_that_are_not_sats_are_logged(config, run: Run, log, tmp_path):
    """SAT's sft.yaml sets nearly all of them; a file without its keys relies on cogfast's."""
    logged(config("cogvideox_5b"))
    assert "no file sets" not in log.text
    base = tmp_path / "short.yaml"
    base.write_text("args: {eval_interval: 10, train_iters: 20000}")
    logged(run.of_files(base).config())
    (line,) = [text for text in log.messages if text.startswith("no file sets")]
    assert line == (
        "no file sets args.mode='finetune' (SAT: pretrain), args.batch_size=1 (SAT: 4), "
        "args.zero_stage=2 (SAT: 0), args.log_interval=20 (SAT: 50), args.keep_last=2 (SAT: all), "
        "args.split='1,0,0' (SAT: 1000,1,1)"
    )
    log.clear()
    base.write_text("args: {mode: inference, sampling_fps: 16}")
    logged(run.of_files(base).config())
    assert "args.sampling_num_frames=null (SAT: 32)" in log.text
    assert "sampling_fps" not in log.text


@pytest.mark.parametrize(("mode", "is_logged"), [("pretrain", True), ("finetune", False)])
def test_a_sat_run_that_sat_would_continue_is_logged(run: Run, log, tmp_path, mode, is_logged):
    (tmp_path / "latest").write_text("300\n")
    logged(run.of_files().config(f"args.mode={mode}", f"args.load={tmp_path}"))
    assert ("is SAT's iteration 300, from" in log.text) is is_logged


def test_inpainting_models_of_1_5_have_an_even_number_of_latent_frames() -> None:
    """CogVideoX-Fun-V1.5-InP was trained on 85 frames, 22 latent ones, which need no padding."""
    network = {"num_frames": 85, "time_compressed_rate": 4, "patch_size": PatchSize(2, 2, 2)}
    network |= {"in_channels": 33, "out_channels": 16}
    assert frames_problem(network, 85, "--frames") is None
    assert frames_problem(network, 13, "--frames") is None
    text = "--frames=81: CogVideoX 1.5 supports 8N+5 frames, at most 173; use 77 or 85"
    assert frames_problem(network, 81, "--frames") == text
    assert LatentSize.of_video(16, 85, 2, 2, 2, 8.0).frames == 22
    network["in_channels"] = 16
    assert frames_problem(network, 85, "--frames") is not None
