"""A diffusers pipeline as args.load, as a folder or by its id on the hub, fills in what the configuration
leaves out."""

import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from huggingface_hub import constants
from omegaconf import OmegaConf

from cogfast.config import Config
from cogfast.core.addresses import is_hub_id
from cogfast.extensions.pipeline_folder.pipeline_folder import (
    fill_from_pipeline,
    hub_folder,
)
from cogfast.model.transformer import build_transformer
from cogfast.model.weights.diffusers import write_diffusers
from cogfast.train.preflight.check import check_cache, check_train
from tests.cli.hostile.web_server import serving
from tests.extensions.formats.test_peft import source_of
from tests.support.refusals import assert_refused
from tests.support.runs import Run
from tests.support.tiny_run import ROOT

VAE = {"_class_name": "AutoencoderKLCogVideoX", "latent_channels": 16, "scaling_factor": 0.7}
SCHEDULER = {"_class_name": "CogVideoXDDIMScheduler", "prediction_type": "v_prediction"}
SCHEDULER |= {"rescale_betas_zero_snr": True, "snr_shift_scale": 1.0}
STAGE, SCALE = "model.first_stage_config", "model.scale_factor"
MODEL_DIR = "model.conditioner_config.params.emb_models[0].params.model_dir"
SHIFT = "params.discretization_config.params.shift_scale"


def write_pipeline(folder: Path, vae: dict = VAE, scheduler: dict = SCHEDULER) -> Path:
    """Write the parts of a pipeline that are read before weights are."""
    for part, name, content in (
        ("vae", "config.json", vae),
        ("text_encoder", "config.json", {}),
        ("tokenizer", "tokenizer_config.json", {}),
        ("scheduler", "scheduler_config.json", scheduler),
        (".", "model_index.json", {"_class_name": "CogVideoXPipeline"}),
    ):
        (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / part / name).write_text(json.dumps(content))
    return folder


@pytest.fixture
def filled(run: Run) -> Callable[..., Config]:
    def fill(folder: Path, *words: str, model: str = "cogvideox_5b") -> Config:
        files = [ROOT / "configs" / f"{name}.yaml" for name in (model, "sft")]
        config = run.of_files(*files).config(f"args.load={folder}", *words)
        return config.filled(fill_from_pipeline)

    return fill


def test_a_dry_run_of_training_shows_what_comes_from_the_pipeline(tmp_path: Path, answer) -> None:
    folder = write_pipeline(tmp_path / "pipeline")
    files = [ROOT / "configs" / f"{name}.yaml" for name in ("cogvideox_5b", "sft")]
    shown = answer("train", "--base", *files, f"args.load={folder}", "--dry-run")
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert f"path: {folder / 'vae'} # {folder}" in lines
    assert f"model_dir: {folder} # {folder}" in lines
    assert "scale_factor: 0.7 # cogvideox_5b.yaml" in lines
    assert f"load: {folder} # command line" in lines
    text = "\n".join(lines)
    assert "{your" not in text.replace("{your data folder}", "")
    assert "ckpt_path" not in text and "encoder_config" not in text


def test_configured_values_are_kept(filled, tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path)
    vae, t5 = "/mine/3d-vae.pt", "/mine/t5"
    given = (f"{STAGE}.params.ckpt_path={vae}", f"{MODEL_DIR}={t5}", f"{SCALE}=0.5")
    config = filled(folder, *given)
    assert config.model.first_stage_config.params.ckpt_path == vae
    assert config.model.conditioner_config.params.emb_models[0].params.model_dir == t5
    assert config.model.scale_factor == 0.5
    assert str(folder) not in config.origins.values()


def test_settings_of_the_autoencoder_stay_when_its_weights_come_from_the_pipeline(
    filled, tmp_path: Path
) -> None:
    folder = write_pipeline(tmp_path)
    config = filled(folder, f"{STAGE}.params.encode_chunks=frames")
    assert OmegaConf.to_container(config.model.first_stage_config) == {
        "target": "cogfast.model.autoencoder.VideoAutoencoder",
        "params": {"path": str(folder / "vae"), "encode_chunks": "frames"},
    }
    assert config.origins[f"{STAGE}.params.encode_chunks"] == "command line"
    again = config.filled(fill_from_pipeline)
    assert (again.model, again.origins) == (config.model, config.origins)


def test_another_scale_of_the_latents_is_refused(filled, tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path, vae={**VAE, "scaling_factor": 1.15258426})
    line = (
        "cogvideox_5b.yaml: model.scale_factor=0.7, but <...>vae/config.json has scaling_factor=1"
    )
    assert_refused(lambda: filled(folder), line)
    assert filled(folder, model="cogvideox_2b").model.scale_factor == 1.15258426
    assert filled(folder, f"{SCALE}=1.15258426").model.scale_factor == 1.15258426


def test_the_noise_schedule_comes_from_the_pipeline(
    filled, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """5B's file leaves the shift out, 2B's sets it to 3."""
    folder = write_pipeline(tmp_path, scheduler={**SCHEDULER, "snr_shift_scale": 2.0})
    config = filled(folder)
    for name in ("denoiser_config", "sampler_config"):
        assert OmegaConf.select(config.model, f"{name}.{SHIFT}") == 2.0
        assert config.origins[f"model.{name}.{SHIFT}"] == str(folder)
    loss = f"loss_fn_config.params.sigma_sampler_config.{SHIFT}"
    assert OmegaConf.select(config.model, loss) == 2.0
    plain = filled(write_pipeline(tmp_path / "plain"))
    assert OmegaConf.select(plain.model, f"denoiser_config.{SHIFT}") is None
    write_pipeline(tmp_path / "2b", {**VAE, "scaling_factor": 1.15258426})
    other = filled(tmp_path / "2b", model="cogvideox_2b")
    assert OmegaConf.select(other.model, f"denoiser_config.{SHIFT}") == 3.0
    assert "shift_scale=3.0, but the model of args.load was trained with 1.0" in log.text


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("_class_name", "DDIMScheduler", "'DDIMScheduler' must be one of CogVideoXDPM"),
        ("prediction_type", "epsilon", "'epsilon': only 'v_prediction' is"),
        ("rescale_betas_zero_snr", False, "false: only true is"),
        ("beta_schedule", "linear", "'linear': only 'scaled_linear' is"),
    ],
)
def test_a_pipeline_of_another_schedule_is_refused(
    filled, key: str, value: object, message: str, tmp_path: Path
) -> None:
    folder = write_pipeline(tmp_path, scheduler=SCHEDULER | {key: value})
    # Its autoencoder may be elsewhere.
    (folder / "vae" / "config.json").unlink()
    line = f"scheduler_config.json: {key}={message}<...> of a CogVideoX model"
    assert_refused(lambda: filled(folder), line)


@pytest.fixture(scope="module")
def tiny(shared_run: Run) -> Run:
    """A tiny 5B that loads a pipeline whose transformer is that of its configuration."""
    folder = write_pipeline(shared_run.folder / "pipeline")
    transformer = build_transformer(shared_run.config().model)
    write_diffusers(source_of(transformer, None), transformer.config, folder / "transformer")
    return shared_run.with_words(f"args.load={folder}")


def test_the_network_is_compared_with_the_pipeline_before_weights_load(
    tiny: Run, tmp_path: Path
) -> None:
    check_train(tiny.config().run)
    params = "model.network_config.params"
    cases = {
        f"{params}.num_layers=3": "the checkpoint has 2 blocks of width 32, the config num_lay",
        f"{params}.in_channels=16|model.noised_image_input=true": (
            "the checkpoint is CogVideoX-5B <...>in_channels 8, <...>config says CogVideoX-5B "
            "<...>in_channels 16"
        ),
    }
    for words, text in cases.items():
        wrong, line = tiny.with_words(*words.split("|")), f"command line: {tiny.words[0]}: {text}"
        assert_refused(lambda wrong=wrong: check_train(wrong.config().run), line)
        cached = wrong.cached_in(tmp_path).config()
        assert_refused(lambda cached=cached: check_cache(cached.run), line)


# --- a model of the hub: from the local cache, or by download from a stand-in of the hub ---

NAME, COMMIT = "owner/CogVideoX-tiny", "0123456789abcdef0123456789abcdef01234567"
SHARDS = [f"transformer/diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
INDEX = {"weight_map": {"a": SHARDS[0].partition("/")[2], "b": SHARDS[1].partition("/")[2]}}
NEEDED = {
    "model_index.json": b'{"_class_name": "CogVideoXPipeline"}',
    "scheduler/scheduler_config.json": b'{"_class_name": "CogVideoXDDIMScheduler", '
    b'"prediction_type": "v_prediction", "rescale_betas_zero_snr": true}',
    "tokenizer/spiece.model": b"pieces",
    "tokenizer/tokenizer_config.json": b'{"tokenizer_class": "T5Tokenizer"}',
    "text_encoder/config.json": b'{"model_type": "t5"}',
    "text_encoder/model.safetensors": b"t5",
    "transformer/config.json": b'{"num_layers": 2}',
    "transformer/diffusion_pytorch_model.safetensors.index.json": json.dumps(INDEX).encode(),
    SHARDS[0]: b"first",
    SHARDS[1]: b"second",
    "vae/config.json": b'{"_class_name": "AutoencoderKLCogVideoX", "scaling_factor": 0.7}',
    "vae/diffusion_pytorch_model.safetensors": b"vae",
}
# Files that nothing reads, or that can run code.
OTHERS = {
    "README.md": b"a model",
    "text_encoder/pytorch_model.bin": b"pickle",
    "transformer/diffusion_pytorch_model.fp16.safetensors": b"rounded",
    "vae/modeling.py": b"import os",
}


def write_snapshot(cache: Path, files: dict[str, bytes]) -> Path:
    """Write a model into a cache folder as the hub's client lays it out."""
    model = cache / f"models--{NAME.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    for name, content in files.items():
        file = model / "snapshots" / COMMIT / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return model / "snapshots" / COMMIT


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_model_in_the_cache_becomes_its_folder(
    run: Run, cache: Path, tmp_path: Path, answer
) -> None:
    folder = write_snapshot(cache, NEEDED)
    config = run.of_files().config(f"args.load={NAME}").filled(fill_from_pipeline)
    assert config.args.load == str(folder)
    assert config.origins["args.load"] == f"hub model {NAME}"
    assert config.model.first_stage_config.params.path == str(folder / "vae")
    (tmp_path / "base.yaml").write_text(f"args: {{load: {NAME}, bf16: true}}\n")
    text = answer("train", "--base", tmp_path / "base.yaml", "--dry-run")
    assert f"load: {folder} # hub model {NAME}" in " ".join(text.split())


def test_every_file_of_the_pipeline_must_be_in_the_cache(cache: Path) -> None:
    folder = write_snapshot(cache, NEEDED)
    assert hub_folder(NAME) == folder
    for name, content in NEEDED.items():
        # If the index were missing, a transformer of one file would be looked for.
        if name.endswith((".index.json", "tokenizer_config.json")):
            continue
        (folder / name).unlink()
        lacking = rf"--model_path={NAME}: no such folder.*\({folder} has no {name}\); --dry-run and"
        with pytest.raises(ValueError, match=lacking):
            hub_folder(NAME, key="--model_path", may_download=False)
        (folder / name).write_bytes(content)
    assert hub_folder(NAME) == folder


def test_hub_ids_and_paths_are_distinguished(here: Path) -> None:
    (here / "runs" / "mine").mkdir(parents=True)
    assert is_hub_id("THUDM/CogVideoX1.5-5B-I2V") and is_hub_id("runs/other")
    for name in ("runs/mine", "model", "/a/b", "a/b/c", "./a", "../a", "a/", "a/b c", "a/{b}"):
        assert not is_hub_id(name)
    line = "args.load=a/b--c: no such folder, <...>; correct it <...>, or run"
    assert_refused(lambda: hub_folder("a/b--c"), line)
    # Beside folders that exist, a wrong path is more likely.
    (here / "models" / "CogVideoX-5b").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"; correct it \([^;]*\); did you mean CogVideoX-5b\?$"):
        hub_folder("models/CogVideoX-5B", may_download=False)
    line = "args.load=runs/my: no such folder; give a run or a model that exists"
    assert_refused(lambda: hub_folder("runs/my"), line)


class Hub(BaseHTTPRequestHandler):
    """The hub's HTTP for one model: its facts, its list of files and the files."""

    requests: list[str] = []
    files = NEEDED | OTHERS

    def do_GET(self) -> None:
        self.requests.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{NAME}/tree/"):
            rows = [
                {"type": "file", "path": name, "size": len(data), "oid": etag(data)}
                for name, data in self.files.items()
            ]
            self.answer(json.dumps(rows).encode())
        elif path.startswith(f"/api/models/{NAME}"):
            siblings = [{"rfilename": name} for name in self.files]
            facts = {"id": NAME, "sha": COMMIT, "private": False, "siblings": siblings}
            self.answer(json.dumps(facts).encode())
        elif path.startswith(f"/{NAME}/resolve/{COMMIT}/"):
            self.answer(self.files[path.split(f"{COMMIT}/")[1]])
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_HEAD = do_GET

    def answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{etag(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Hub.requests = []
    with serving(Hub) as server:
        use_hub(monkeypatch, server.server_port)
        yield


def use_hub(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    address = f"http://127.0.0.1:{port}"
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def test_a_download_takes_what_is_read_once_for_all_ranks(hub: None) -> None:
    with ThreadPoolExecutor() as pool:
        (folder,) = set(pool.map(hub_folder, [NAME, NAME]))
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == set(NEEDED)
    fetched = [request for request in Hub.requests if request.startswith(f"GET /{NAME}/resolve")]
    assert sorted(fetched) == sorted(f"GET /{NAME}/resolve/{COMMIT}/{name}" for name in NEEDED)
    before = len(Hub.requests)
    assert hub_folder(NAME) == folder
    assert len(Hub.requests) == before


def test_a_model_that_cannot_be_downloaded(
    run: Run, hub: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for although the configuration is a run's, since the command line names it."""
    for name, reason in (("owner/other", "404"), (NAME, "[Cc]onnect")):
        text = (
            rf"args.load={name}: no such folder, and no complete CogVideoX .*{reason}.*; correct it "
            r"\(a relative path starts at the current folder\)"
        )
        with pytest.raises(ValueError, match=rf"{text}, or run hf download {name} on a machine"):
            config = run.of_files().config(f"args.load={name}")
            config.filled(partial(fill_from_pipeline, is_of_run=True))
        use_hub(monkeypatch, 9)  # where nothing answers
