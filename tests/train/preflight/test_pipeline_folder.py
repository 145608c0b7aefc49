"""A diffusers pipeline as args.load: it fills in what the configuration leaves out."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from cogfast.__main__ import main
from cogfast.config import Config, load_config
from cogfast.model.transformer import build_transformer
from cogfast.model.weights.formats.diffusers import write_diffusers
from cogfast.train.preflight.check import check_cache, check_train
from cogfast.train.preflight.pipeline_folder import fill_from_pipeline
from tests.model.weights.test_peft import source_of
from tests.support.tiny_run import ROOT, write_config

VAE = {
    "_class_name": "AutoencoderKLCogVideoX",
    "latent_channels": 16,
    "scaling_factor": 0.7,
}
SCHEDULER = {
    "_class_name": "CogVideoXDDIMScheduler",
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "snr_shift_scale": 1.0,
}
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


def filled(folder: Path, *overrides: str, model: str = "cogvideox_5b") -> Config:
    files = [ROOT / "configs" / f"{name}.yaml" for name in (model, "sft")]
    return fill_from_pipeline(load_config(files, [f"args.load={folder}", *overrides]))


def test_a_dry_run_of_training_shows_what_comes_from_the_pipeline(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = write_pipeline(tmp_path / "pipeline")
    files = [str(ROOT / "configs" / f"{name}.yaml") for name in ("cogvideox_5b", "sft")]
    assert main(["train", "--base", *files, f"args.load={folder}", "--dry-run"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"path: {folder / 'vae'} # {folder}" in lines
    assert f"model_dir: {folder} # {folder}" in lines
    assert "scale_factor: 0.7 # cogvideox_5b.yaml" in lines
    assert f"load: {folder} # command line" in lines
    text = "\n".join(lines)
    assert "{your" not in text.replace("{your data folder}", "")
    assert "ckpt_path" not in text and "encoder_config" not in text


def test_configured_values_are_kept(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path)
    vae, t5 = "/mine/3d-vae.pt", "/mine/t5"
    given = (f"{STAGE}.params.ckpt_path={vae}", f"{MODEL_DIR}={t5}", f"{SCALE}=0.5")
    config = filled(folder, *given)
    assert config.model.first_stage_config.params.ckpt_path == vae
    assert config.model.conditioner_config.params.emb_models[0].params.model_dir == t5
    assert config.model.scale_factor == 0.5
    assert str(folder) not in config.origins.values()


def test_settings_of_the_autoencoder_stay_when_its_weights_come_from_the_pipeline(
    tmp_path: Path,
) -> None:
    folder = write_pipeline(tmp_path)
    config = filled(folder, f"{STAGE}.params.encode_chunks=frames")
    assert OmegaConf.to_container(config.model.first_stage_config) == {
        "target": "cogfast.model.autoencoder.VideoAutoencoder",
        "params": {"path": str(folder / "vae"), "encode_chunks": "frames"},
    }
    assert config.origins[f"{STAGE}.params.encode_chunks"] == "command line"
    again = fill_from_pipeline(config)
    assert (again.model, again.origins) == (config.model, config.origins)


def test_an_autoencoder_without_a_path_is_filled(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path)
    given = [f"{STAGE}.target=cogfast.model.autoencoder.VideoAutoencoder", f"args.load={folder}"]
    for overrides in (given, given[1:]):
        config = fill_from_pipeline(load_config([], overrides))
        assert config.model.first_stage_config.params.path == str(folder / "vae")
        assert config.model.scale_factor == 0.7
        assert config.origins[SCALE] == str(folder)


def test_another_scale_of_the_latents_is_refused(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path, vae={**VAE, "scaling_factor": 1.15258426})
    text = (
        r"cogvideox_5b.yaml: model.scale_factor=0.7, but .*vae/config.json has scaling_factor=1.152"
    )
    with pytest.raises(ValueError, match=text):
        filled(folder)
    assert filled(folder, model="cogvideox_2b").model.scale_factor == 1.15258426
    assert filled(folder, f"{SCALE}=1.15258426").model.scale_factor == 1.15258426


def test_the_noise_schedule_comes_from_the_pipeline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
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
    with caplog.at_level(logging.INFO, logger="cogfast"):
        other = filled(tmp_path / "2b", model="cogvideox_2b")
    assert OmegaConf.select(other.model, f"denoiser_config.{SHIFT}") == 3.0
    assert "shift_scale=3.0, but the model of args.load was trained with 1.0" in caplog.text


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"_class_name": "FlowMatchEulerDiscreteScheduler"}, "CogVideoXDPMScheduler or"),
        ({"prediction_type": "epsilon"}, "prediction_type=.epsilon. is .* has prediction_type=.v_"),
        ({"rescale_betas_zero_snr": False}, "zero_snr=false is .* has rescale_betas_zero_snr=true"),
        (
            {"beta_schedule": "linear"},
            "beta_schedule=.linear. is .* has beta_schedule=.scaled_linear",
        ),
    ],
)
def test_a_pipeline_of_another_schedule_is_refused_by_every_command(
    changed: dict, named: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = write_pipeline(tmp_path / "pipeline", scheduler=SCHEDULER | changed)
    files = [str(ROOT / "configs" / f"{name}.yaml") for name in ("cogvideox_5b", "sft")]
    cache = f"args.latent_cache={tmp_path / 'cache'}"
    for command, extra in (("train", ["--dry-run"]), ("cache", [cache]), ("sample", ["--dry-run"])):
        assert main([command, "--base", *files, f"args.load={folder}", *extra]) == 2
        error = capsys.readouterr().err
        assert "scheduler_config.json: " in error and "is not CogVideoX's noise schedule" in error
        assert re.search(named, error), error
    # Its autoencoder may be elsewhere.
    (folder / "vae" / "config.json").unlink()
    with pytest.raises(ValueError, match="is not CogVideoX's noise schedule"):
        filled(folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A configuration of a tiny 5B, and a pipeline whose transformer is that of this configuration."""
    folder = tmp_path_factory.mktemp("tiny")
    data = folder / "data"
    (data / "videos").mkdir(parents=True)
    (data / "wavelet.safetensors").touch()
    base = write_config(folder / "base.yaml", data)
    transformer = build_transformer(load_config([base]).model)
    write_pipeline(folder / "pipeline")
    write_diffusers(
        source_of(transformer, None), transformer.config, folder / "pipeline" / "transformer"
    )
    return base, folder / "pipeline"


def test_the_network_is_compared_with_the_pipeline_before_weights_load(
    tiny: tuple[Path, Path], tmp_path: Path
) -> None:
    base, folder = tiny
    check_train(load_config([base], [f"args.load={folder}"]))
    params = "model.network_config.params"
    for overrides, text in (
        (
            [f"{params}.num_layers=3"],
            r"the checkpoint has 2 blocks of width 32, the config num_lay",
        ),
        (
            [f"{params}.in_channels=16", "model.noised_image_input=true"],
            r"the checkpoint is CogVideoX-5B \(.*in_channels 8, .*the config says CogVideoX-5B-I2V",
        ),
    ):
        for check in (check_train, check_cache):
            cache = [] if check is check_train else [f"args.latent_cache={tmp_path}"]
            config = load_config([base], [f"args.load={folder}", *overrides, *cache])
            with pytest.raises(ValueError, match=f"command line: args.load={folder}: {text}"):
                check(config)


def test_the_place_of_the_pipeline_may_change_between_runs() -> None:
    """A resumed run may find the autoencoder's folder elsewhere."""
    from cogfast.train.run.folder import _FREE, _matches

    assert _matches(f"{STAGE}.params.path", _FREE)
    assert not _matches(f"{STAGE}.params.encode_chunks", _FREE)


def test_an_explicit_configuration_equals_the_filled_one(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path)
    config = filled(folder)
    explicit = filled(
        tmp_path / "nothing",
        f"{STAGE}=null",
        f"{STAGE}={{target: cogfast.model.autoencoder.VideoAutoencoder, params: {{path: {folder}/vae}}}}",
        f"{MODEL_DIR}={folder}",
    )
    assert config.model == explicit.model
