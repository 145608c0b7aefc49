"""cogfast's configs give every member of the family the values of upstream's longer ones."""

import inspect
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from cogfast.__main__ import main
from cogfast.config import Config, instantiate
from cogfast.config.sat_network import autoencoder_arguments, transformer_arguments
from cogfast.data.datasets import VideoFolder, VideoList, VideoManifest, VideoShards
from cogfast.distributed.keys import DeepSpeedKeys
from cogfast.extensions.conditions.check import check_conditions
from cogfast.model.config import MEMBERS, Family, TransformerConfig
from cogfast.train.keys import ModelKeys, TrainKeys
from cogfast.train.preflight.check import check_sample, check_train
from tests.support.runs import run_of
from tests.support.tiny_run import ROOT

CONFIGS = ROOT / "configs"
MODELS = [f"cogvideox{name}" for name in ("_2b", "_5b", "_5b_i2v", "1.5_5b", "1.5_5b_i2v")]
RANK = "model.network_config.params.modules.lora_config.params.r"
# Upstream's file -> the arguments that make ours its equal.
UPSTREAM = {
    **{name: (name, []) for name in MODELS},
    "cogvideox_2b_lora": ("cogvideox_2b", ["args.lora_alpha=1"]),
    "cogvideox_5b_lora": ("cogvideox_5b", ["args.lora_alpha=1"]),
    "cogvideox_5b_i2v_lora": ("cogvideox_5b_i2v", [f"{RANK}=256", "args.lora_alpha=1"]),
}
# Files of conditions, and the models that they go behind
CONDITIONS = {
    "control": ("cogvideox_2b", "cogvideox_5b"),
    "inpainting": ("cogvideox_2b", "cogvideox_5b", "cogvideox1.5_5b"),
    "first_last": ("cogvideox_5b_i2v",),
}


def load(*names: str, arguments: list[str] | None = None) -> Config:
    return run_of(*(CONFIGS / f"{name}.yaml" for name in names)).config(*(arguments or []))


def load_as_upstream(name: str) -> Config:
    model, arguments = UPSTREAM[name]
    return load(model, *(["lora"] if "lora" in name else []), arguments=arguments)


def test_no_file_is_left_out():
    others = {"lora", "sft", "inference", "quickstart"}
    assert {path.stem for path in (CONFIGS / "conditions").iterdir()} == {*CONDITIONS}
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*MODELS, *others}


def facts(config: Config) -> dict:
    """Return the values of a config's model section, with defaults, however it is written."""
    model = config.model
    network = TransformerConfig(**transformer_arguments(model.network_config.params))
    denoiser, loss, sampler = (
        instantiate(model[f"{part}_config"]) for part in ("denoiser", "loss_fn", "sampler")
    )
    (text,) = model.conditioner_config.params.emb_models
    first_stage = autoencoder_arguments(
        OmegaConf.to_container(model.first_stage_config.params), "", {}
    )
    sizes = ("z_channels", "ch", "ch_mult", "num_res_blocks")
    return {
        "network": asdict(network),
        "section": {
            **config.run.model.model_dump(),
            "latent_input": None,  # true in upstream's 1.5-5B, which its data sets cannot feed
            "image_latent_scale": None,  # SAT has no such key
        },
        "levels": denoiser.table.values.tolist(),
        "denoiser": type(denoiser.scaling),
        "loss": {k: v for k, v in vars(loss).items() if k != "sigma_sampler"},
        "loss levels": loss.sigma_sampler.table.values.tolist(),
        "is stratified": loss.sigma_sampler.uniform_sampling,
        "sampler": (type(sampler), sampler.num_steps, type(sampler.guider)),
        "guider": {k: v for k, v in vars(sampler.guider).items() if k != "thresholding"},
        "sampler levels": sampler.discretization.table().tolist(),
        "text": (text.target, text.ucg_rate, text.params.max_length),
        "coders": [[first_stage[f"{c}_config"][s] for s in sizes] for c in ("encoder", "decoder")],
        "ignored": first_stage["ignore_keys"],
    }


@pytest.mark.parametrize("name", UPSTREAM)
def test_facts_are_upstreams(name: str, sat_configs: Path) -> None:
    configs = load_as_upstream(name), run_of(sat_configs / f"{name}.yaml").config()
    ours, theirs = map(facts, configs)
    for key, value in theirs.items():
        assert ours[key] == value, key
    scales = [config.run.model.image_latent_scale for config in configs]
    # The released 1.5-I2V and diffusers' pipeline have another scale than SAT's trainer.
    own = "pipeline" if name == "cogvideox1.5_5b_i2v" else "trainer"
    assert scales == [own, "trainer"]


@pytest.mark.parametrize(
    ("model", "more"),
    [(model, ("sft",)) for model in MODELS]
    + [("cogvideox_5b", ("lora", "inference"))]
    + [(m, (f"conditions/{name}", "sft")) for name, models in CONDITIONS.items() for m in models],
)
def test_dry_run(model: str, more: tuple[str, ...], answer) -> None:
    files = [str(CONFIGS / f"{name}.yaml") for name in (model, *more)]
    text = answer("train", "--base", *files, "--dry-run")
    assert answer("sample", "--base", *files, "--dry-run") == text
    assert "${" not in text
    assert "accepted and not used" not in text  # our files hold no key that nothing reads
    config = run_of(*files).config()
    network = transformer_arguments(config.model.network_config.params)
    check_conditions(config.run.model, network)
    line = next(t for t in text.splitlines() if t.startswith("  lr: "))
    assert line.split() == (
        ["lr:", "0.0001", "#", "lora.yaml"]
        if "lora" in more
        else ["lr:", "1.0e-05", "#", f"{model}.yaml"]
    )


@pytest.mark.parametrize("model", ["cogvideox1.5_5b_i2v"])
def test_placeholders_are_refused_with_the_fix(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    fix = "is a placeholder of upstream's file; set it to your own path"
    arguments = ["args.num_workers=0"]
    for key in (
        "args.load",
        "model.conditioner_config.params.emb_models.0.params.model_dir",
        "model.first_stage_config.params.ckpt_path",
        "args.train_data.0",
    ):
        with pytest.raises(ValueError, match=rf"{re.escape(key)}='\{{your [^']*' {fix}"):
            check_train(load(model, "sft", arguments=arguments).run)
        if key != "args.train_data.0":
            with pytest.raises(ValueError, match=rf"{re.escape(key)}='\{{your [^']*' {fix}"):
                check_sample(
                    load(model, "inference", arguments=arguments).run,
                    given=["image"] if "i2v" in model else [],
                )
        if key.startswith("args.train_data"):
            arguments.append(f"args.train_data=[{tmp_path}]")
        else:
            arguments.append(f"{key}={tmp_path}")
    check_train(load(model, "sft", arguments=[*arguments, *CPU]).run, world_size=8)
    # and through the command, before anything is written
    files = [str(CONFIGS / f"{name}.yaml") for name in (model, "inference")]
    assert main(["sample", "--base", *files, "--prompt", "x", "--out", str(tmp_path / "o")]) == 2
    assert fix in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


CPU = ["deepspeed.fp16.enabled=false", "deepspeed.bf16.enabled=true"]  # 2B's file asks for fp16


@pytest.mark.parametrize("model", MODELS)
def test_precision_and_stage(model: str) -> None:
    for more in ("sft", "inference"):
        args = load(model, more).run.args
        assert args.precision == ("fp16" if model == "cogvideox_2b" else "bf16")
    assert load(model, "sft").run.args.zero_stage == 2


def test_script_defaults_load() -> None:
    """The files that finetune_*.sh take where BASE is not set."""
    for script in sorted((ROOT / "scripts").glob("finetune_*.sh")):
        (files,) = re.findall(r"BASE=\$\{BASE:-([^}]*)\}", script.read_text())
        config = run_of(*(ROOT / file for file in files.split())).config()
        assert config.model.network_config.params.modules.lora_config.params.r == 128
    # and every file that a comment or a page names
    scripts = [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
    texts = [*CONFIGS.glob("*.yaml"), *scripts, *(ROOT / "docs").rglob("*.md")]
    for path in [*texts, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for name in re.findall(r"\bconfigs/([\w./]+)\.yaml", path.read_text()):
            assert (CONFIGS / f"{name}.yaml").is_file(), f"{path} names {name}.yaml"


def test_options_that_pages_name_exist() -> None:
    known = {
        "args": {*TrainKeys.model_fields} | {"json"},  # the file args.json
        "model": {*ModelKeys.model_fields} | set(load("cogvideox_5b").model),
        "data.params": {
            name
            for dataset in (VideoFolder, VideoList, VideoManifest, VideoShards)
            for name in inspect.signature(dataset).parameters
        },
        "deepspeed": set(DeepSpeedKeys.model_fields),
    }
    found = 0
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        if page.name == "options.md":  # generated; it also lists SAT's keys that nothing reads
            continue
        text = page.read_text()
        for section, name in re.findall(
            r"(?<!self\.)\b(args|model|data\.params|deepspeed)\.([a-z]\w+)", text
        ):
            if f"cogfast.{section}.{name}" not in text:  # a module
                assert name in known[section], f"{page.name}: {section}.{name}"
                found += 1
    assert found > 15


@pytest.mark.parametrize("model", MODELS)
def test_the_table_of_members_agrees_with_our_files(model: str) -> None:
    config = load(model)
    network = TransformerConfig(**transformer_arguments(config.model.network_config.params))
    data = config.data.params
    member = Family.of_config(network).member
    assert member.config_file == f"configs/{model}.yaml"
    assert member.name in (CONFIGS / f"{model}.yaml").read_text().splitlines()[1]
    assert member.patch == network.patch_size
    assert member.is_rotary == (network.position == "rotary")
    assert member.has_image == config.model.noised_image_input
    assert (member.num_frames, member.fps) == (network.num_frames, data.fps)
    assert member.video_size == tuple(data.video_size)
    assert member.table_size == (network.latent_height, network.latent_width)
    assert (member.text_length, member.scale_factor) == (
        network.text_length,
        config.model.scale_factor,
    )


def test_each_member_has_one_file() -> None:
    assert sorted(Path(m.config_file).stem for m in MEMBERS) == sorted(MODELS)
