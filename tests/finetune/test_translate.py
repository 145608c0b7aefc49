"""Arguments become an ordinary configuration: origins, DeepSpeed files, wrong input."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

import cogfast.train.trainer
from cogfast.__main__ import main
from cogfast.config import load_config
from cogfast.config.merged_config import find_origin, to_dict
from cogfast.config.sat_network import transformer_arguments
from cogfast.finetune.registry import BUILT_IN, SUPPORTED_MODELS, get_model_cls, register
from cogfast.finetune.schemas import PLACEHOLDER, Args
from cogfast.finetune.trainer import Trainer
from cogfast.finetune.translate import notices, translate
from cogfast.model.config import TransformerConfig
from cogfast.plan.text import describe_plan
from cogfast.train.optimizer import build_optimizer
from cogfast.train.run.terminal import log_commands
from cogfast.train.video_size import sampled_size
from tests.support.pipelines import Pipelines

KINDS = {
    "2b": ("cogvideox-t2v", "t2v"),
    "5b": ("cogvideox-t2v", "t2v"),
    "5b_i2v": ("cogvideox-i2v", "i2v"),
    "1.5_5b": ("cogvideox1.5-t2v", "t2v"),
    "1.5_5b_i2v": ("cogvideox1.5-i2v", "i2v"),
}


@pytest.fixture
def options(pipelines: Pipelines, tmp_path: Path):
    """Build the options of a run, with changes; None leaves an option out."""

    def build(family: str = "5b", **changes: object) -> dict[str, object]:
        name, kind = KINDS[family]
        found = {
            "model_path": pipelines.path(family),
            "model_name": name,
            "model_type": kind,
            "training_type": "lora",
            "output_dir": tmp_path / "out",
            "data_root": tmp_path / "data",
            "caption_column": "prompts.txt",
            "video_column": "videos.txt",
            "train_resolution": f"{17 if family.startswith('1.5') else 9}x32x48",
        }
        return {k: v for k, v in (found | changes).items() if v is not None}

    data = tmp_path / "data"
    data.mkdir()
    (data / "prompts.txt").write_text("one\ntwo\n")
    (data / "videos.txt").write_text("1.mp4\n2.mp4\n")
    return build


def words(options: dict[str, object]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def test_the_average_of_the_weights_can_be_left_out(options):
    """torch's AdamW takes the same steps as the optimizer that keeps an average."""
    trained, kept = [], []
    for words in ([], ["deepspeed.optimizer.type=AdamW"]):
        config = translate(Args(**options("5b", training_type="sft", overrides=words)))
        weights = torch.nn.Parameter(torch.linspace(-1, 1, 64))
        group = {"params": [weights], "weight_decay": 1e-4}
        optimizer = build_optimizer(config.deepspeed.optimizer, [group])
        for step in range(3):
            weights.grad = torch.linspace(-1, 2, 64).roll(step)
            optimizer.step()
        trained.append(weights.detach())
        kept.append(optimizer.state[weights].keys())
    torch.testing.assert_close(*trained, rtol=1e-6, atol=0)
    assert kept[0] - kept[1] == {"shadow"}


@pytest.mark.parametrize(
    ("name", "peer"),
    [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("ADAM", torch.optim.Adam)],
)
def test_an_optimizer_is_torchs_of_that_name(options, name, peer):
    config = translate(Args(**options("5b", training_type="sft", optimizer=name)))
    found = []
    for build in (lambda group: build_optimizer(config.deepspeed.optimizer, [group]), None):
        weights = torch.nn.Parameter(torch.linspace(-1, 1, 64))
        group = {"params": [weights], "weight_decay": 0.1, "lr": 1e-2}
        optimizer = build(group) if build else peer([group], betas=(0.9, 0.95), eps=1e-8)
        for step in range(3):
            weights.grad = 0.1 * torch.linspace(-1, 2, 64).roll(step)
            optimizer.step()
        found.append(weights.detach())
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("training_type", ["lora", "sft"])
def test_every_family_gives_a_configuration(options, family, training_type):
    config = translate(Args(**options(family, training_type=training_type, rank=8)))
    model, network = to_dict(config.model), config.model.network_config.params
    assert model["noised_image_input"] is family.endswith("i2v")
    assert model["noised_image_dropout"] == 0
    assert model["conditioner_config"]["params"]["emb_models"][0]["ucg_rate"] == 0
    assert model["scale_factor"] == 0.7
    assert network.modules.pos_embed_config.params.get("positions", "integer") == "integer"
    stage = model["first_stage_config"]["params"]
    assert stage == {"path": f"{config.args.load}/vae", "encode_chunks": "auto"}
    sampler = model["sampler_config"]
    assert sampler["target"].endswith("VPSDEDPMPP2MSampler")
    assert sampler["params"]["num_steps"] == 50
    guider = sampler["params"]["guider_config"]
    assert guider["target"].endswith("VanillaCFG")
    assert guider["params"] == {"scale": 6.0}
    lora = network.modules.get("lora_config")
    if training_type == "lora":
        assert (lora.params.r, lora.params.lora_alpha) == (8, 64)
    else:
        assert lora is None


def test_each_value_names_its_option(options, capsys):
    given = words(options(rank=8, learning_rate=3e-4, train_steps=7, mixed_precision="bf16"))
    assert main(["finetune", *given, "args.log_interval=3", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for value, origin in {
        "r: 8": "--rank",
        "lr: 0.0003": "--learning_rate",
        "train_iters: 7": "--train_steps",
        "max_num_frames: 9": "--train_resolution",
        r"video_size: \[32, 48\]": "--train_resolution",
        "weight_decay: 0.0001": "--weight_decay",
        r"betas: \[0.9, 0.95\]": "--beta1",
        "log_interval: 3": "command line",
        "num_steps: 50": "CogVideo's trainer",
    }.items():
        assert re.search(rf"{value} +# {origin}\n", shown), value


def test_the_printed_configuration_is_the_one_of_cogfast_train(options, capsys, tmp_path):
    given = words(options(train_steps=7))
    assert main(["finetune", *given, "--dry-run"]) == 0
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    expected = translate(Args(**options(train_steps=7)))
    assert load_config([file]).to_yaml() == expected.to_yaml()
    assert not (tmp_path / "out").exists()


def test_the_command_that_continues_a_run_has_the_options_of_this_command(options, caplog):
    caplog.set_level("INFO", logger="cogfast")
    for given, words in (({"train_steps": 7}, "--train_steps 14"), ({}, "--train_epochs 20")):
        caplog.clear()
        log_commands(translate(Args(**options(**given))), Path("a run"), 7, is_lora=True)
        assert caplog.messages[-1].endswith(f"--resume_from_checkpoint 'a run' {words}")


def test_steps_come_before_epochs_and_clips_by_time(options):
    both = translate(Args(**options(train_steps=7, train_epochs=3)))
    assert (both.args.train_iters, both.args.epochs) == (7, None)
    epochs = translate(Args(**options(train_epochs=3)))
    assert (epochs.args.train_iters, epochs.args.epochs) == (None, 3)
    tiled = translate(Args(**options(enable_tiling=False, enable_slicing=False)))
    assert tiled.model.first_stage_config.params.encode_chunks == "frames"
    assert tiled.model.en_and_decode_n_samples_a_time is None
    assert both.args.encode_first is True
    assert both.args.latent_cache.endswith("/data/cache/cogfast")
    each_step = translate(Args(**options(latent_cache="none"))).args
    assert (each_step.encode_first, each_step.latent_cache) == (False, None)
    params = both.data.params
    assert (params.frame_selection, params.short_clips, params.fps) == ("uniform", "pad", 8)
    assert params.resize == "crop"
    params = translate(Args(**options(fps=4, resize="stretch"))).data.params
    assert params.resize == "stretch"
    assert (params.frame_selection, params.short_clips, params.fps) == ("timestamp", "skip", 4)


def test_a_validation_is_that_of_the_pipelines(options, tmp_path):
    """Its videos have --gen_fps, and guidance leads away from the empty caption."""
    (tmp_path / "prompts.txt").write_text("a bar\n")
    given = {"validation_steps": 2, "validation_dir": tmp_path, "validation_prompts": "prompts.txt"}
    config = translate(Args(**options("5b", do_validation=True, gen_fps=24, **given)))
    assert (config.args.sampling_fps, config.args.negative_prompt) == (24, "")
    model = TransformerConfig(**transformer_arguments(config.model.network_config.params))
    assert sampled_size(config, model).fps == 24


def test_whole_models_are_exported_at_an_interval(options):
    config = translate(Args(**options(training_type="sft", export_interval=400)))
    assert (config.args.export, config.args.export_interval) == ("last", 400)
    assert find_origin(config.origins, "args.export_interval") == "--export_interval"
    args = Args(**options(export_interval=200))
    assert (translate(args).args.export, translate(args).args.export_interval) == ("all", None)
    (line,) = notices(args)
    assert line.startswith("--export_interval 200 has no effect: each LoRA checkpoint")


def test_their_cache_is_taken_only_if_it_is_trusted(options, tmp_path, capsys):
    """If the cache exists and the option is not given, a log line names the option."""
    assert translate(Args(**options())).args.trusted_cache is None
    theirs = tmp_path / "data" / "cache"
    (theirs / "cogfast").mkdir(parents=True)
    assert notices(Args(**options())) == []
    (theirs / "prompt_embeddings").mkdir()
    (line,) = notices(Args(**options()))
    assert line.startswith(f"{theirs} has clips or captions") and "--trust_cache uses them" in line
    assert notices(Args(**options(trust_cache=True))) == []
    assert notices(Args(**options(latent_cache="none"))) == []
    main(["finetune", *words(options()), "--trust-cache", "--dry-run"])
    (line,) = (x for x in capsys.readouterr().out.splitlines() if "trusted_cache" in x)
    assert str(theirs) in line and "--trust_cache" in line
    with pytest.raises(ValueError, match="--trust_cache copies .* but --latent_cache none"):
        Args(**options(trust_cache=True, latent_cache="none"))


# --- DeepSpeed files ---

UPSTREAM_ZERO2 = {
    "bf16": {"enabled": True},
    "optimizer": {
        "type": "AdamW",
        "params": {
            "lr": "auto",
            "weight_decay": "auto",
            "torch_adam": True,
            "adam_w_mode": True,
        },
    },
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8},
    "gradient_accumulation_steps": 1,
    "train_micro_batch_size_per_gpu": 1,
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}


@pytest.mark.parametrize("by", ["option", "accelerate"])
def test_a_deepspeed_file_sets_what_is_not_auto(options, tmp_path, monkeypatch, by):
    file = tmp_path / "zero2.yaml"
    # A key twice, as in two of upstream's files: JSON takes the last.
    text = json.dumps(UPSTREAM_ZERO2).replace('"stage": 2', '"stage": 3, "stage": 2')
    file.write_text(text)
    given = options(mixed_precision="bf16", beta2=0.99, max_grad_norm=0.5, deepspeed_config=file)
    if by == "accelerate":
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(given.pop("deepspeed_config")))
    config = translate(Args(**given))
    section = to_dict(config.deepspeed)
    assert section["zero_optimization"] == UPSTREAM_ZERO2["zero_optimization"]
    assert section["optimizer"]["type"] == "AdamW"
    # Under DeepSpeed upstream's betas are 0.9 and 0.999, and its clipping is 1.
    assert section["optimizer"]["params"]["betas"] == [0.9, 0.99]
    assert section["gradient_clipping"] == 0.5
    assert "scheduler" not in section
    assert "auto" not in json.dumps(section)
    assert find_origin(config.origins, "deepspeed.zero_optimization.stage") == "zero2.yaml"
    assert find_origin(config.origins, "deepspeed.gradient_clipping") == "--max_grad_norm"


@pytest.mark.parametrize(
    ("option", "change", "message"),
    [
        ({"batch_size": 2}, {}, "--batch_size 2, but .* has train_micro_batch_size_per_gpu=1"),
        ({"gradient_accumulation_steps": 2}, {}, "has gradient_accumulation_steps=1; change one"),
        ({"mixed_precision": "no"}, {}, "--mixed_precision no, but .* has bf16.enabled=true"),
        ({"mixed_precision": "bf16"}, {"bf16": {"enabled": False}}, "has bf16.enabled=false"),
        ({}, {"gradient_clipping": 0.1}, "--max_grad_norm 1.0, but .* has gradient_clipping=0.1"),
        ({"optimizer": "adam"}, {}, "--optimizer adam, but .* has optimizer.type='AdamW'"),
        (
            {"learning_rate": 1e-3},
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}},
            "--learning_rate 0.001, but .* has optimizer.params.lr=0.0001; change one of them, or set",
        ),
        ({}, {"optimizer": True}, "zero2.json: optimizer=true must be a mapping; correct it, or"),
        ({}, {"optimizer": 5}, "zero2.json: optimizer=5 must be a mapping"),
        ({}, {"optimizer": {"params": [1]}}, r"optimizer.params=\[1\] must be a mapping"),
    ],
)
def test_a_deepspeed_file_that_contradicts_an_option_is_refused(
    options, tmp_path, option, change, message
):
    file = tmp_path / "zero2.json"
    file.write_text(json.dumps(UPSTREAM_ZERO2 | change))
    args = Args(**options(deepspeed_config=file, **{"mixed_precision": "bf16", **option}))
    with pytest.raises(ValueError, match=message):
        translate(args)


# --- wrong input: one line, status 2, before weights load ---

WRONG = [
    (
        "5b",
        {"model_name": "cogvideox-5b"},
        "--model_name cogvideox-5b: must be one of cogvideox-t2v, cogvideox-i2v, cogvideox1.5-t2v, cogvideox1.5-i2v; did you mean cogvideox-",
    ),
    (
        "5b",
        {"model_name": "cogvideox1.5-t2v"},
        "has in_channels=16, CogVideoX-5B; use --model_name cogvideox-t2v --model_type t2v",
    ),
    (
        "5b",
        {"model_name": "cogvideox-i2v", "model_type": "i2v"},
        "has in_channels=16, CogVideoX-5B; use --model_name cogvideox-t2v --model_type t2v",
    ),
    (
        "1.5_5b_i2v",
        {"model_name": "cogvideox1.5-t2v", "model_type": "t2v"},
        "has in_channels=32, CogVideoX1.5-5B-I2V; use --model_name cogvideox1.5-i2v --model_type i2v",
    ),
    (
        "5b",
        {"model_path": "/nowhere/to/be/found"},
        "--model_path /nowhere/to/be/found: has no transformer/config.json",
    ),
    (
        "5b",
        {"mixed_precision": "fp16"},
        "--mixed_precision fp16: only CogVideoX-2B was trained in fp16, CogVideoX-5B overflows",
    ),
    (
        "5b",
        {"train_resolution": "50x32x48"},
        "--train_resolution: data.params.max_num_frames=50: CogVideoX 1.0 supports 8N\\+1 frames, at most 9; use 9",
    ),
    (
        "1.5_5b",
        {"train_resolution": "32x48x9"},
        r"--train_resolution 32x48x9: it is frames x height x width, .*; did you mean 9x32x48\?",
    ),
    (
        "1.5_5b",
        {"train_resolution": "57x32x48"},
        "data.params.max_num_frames=57: CogVideoX 1.5 supports 8N\\+1 frames, at most 33; use 33",
    ),
    (
        "5b",
        {"train_resolution": "81x32x48"},
        "--train_resolution: data.params.max_num_frames=81: CogVideoX 1.0 supports 8N\\+1 frames, at",
    ),
    (
        "5b",
        {"train_resolution": "9x32x50"},
        r"data.params.video_size=\[32, 50\]: rows must be a multiple of 16 .*; use \[32, 48\]",
    ),
    ("2b", {"train_resolution": "9x32x32"}, "--train_resolution: data.params.video_size=.*32.*32"),
    (
        "5b_i2v",
        {"train_resolution": "9x32x32"},
        "--train_resolution: data.params.video_size=.*32.*32",
    ),
    (
        "5b",
        {"target_modules": "to_x"},
        r"--target_modules: .*target_modules=\['to_x'\]: use one or more of",
    ),
    (
        "5b",
        {"optimizer": "prodigy"},
        "--optimizer prodigy: must be adamw or adam; it estimates one step size over all weights.*; use adamw, whose --learning_rate is a step size, such as 1e-4 for lora, and not near 1$",
    ),
    (
        "5b",
        {"optimizer": "CAME"},
        "--optimizer CAME: must be adamw or adam; it needs whole matrices, and ZeRO splits them; use adamw$",
    ),
    ("5b", {"optimizer": "adamx"}, "--optimizer adamx: must be adamw or adam; did you mean adam"),
    (
        "5b",
        {"resume_from_checkpoint": "/nowhere/checkpoint-10"},
        "--resume_from_checkpoint: args.resume=/nowhere/checkpoint-10 not found: refusing to start",
    ),
    (
        "5b",
        {"data_root": "/nowhere"},
        "--data_root: args.train_data: folder /nowhere does not exist",
    ),
    (
        "5b",
        {"report_to": "wandb"},
        "--report_to: args.wandb=true, but wandb is not installed; pip install wandb",
    ),
    (
        "5b",
        {"output_dir": "/etc/hostname/out"},
        "--output_dir: args.run_folder=/etc/hostname/out: cannot be created .*hostname is a file",
    ),
    (
        "5b",
        {"model_path": "THUDM/CogVideoX-none"},
        "--model_path=THUDM/CogVideoX-none: no such folder, .*; run hf download THUDM/CogVideoX-none on a machine with .* set HF_HOME",
    ),
    (
        "5b",
        {"beta1": 0.8, "seed": "1"},
        "unknown key args.log_intervall; did you mean log_interval",
    ),
]


@pytest.mark.parametrize(("family", "changes", "message"), WRONG)
def test_wrong_input_ends_in_one_line(options, capsys, monkeypatch, family, changes, message):
    monkeypatch.setattr("cogfast.train.run.parts.start_processes", None)  # checks come before
    if "wandb" in message:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    given = words(options(family, num_workers=0, **changes))
    if "log_intervall" in message:
        given.append("args.log_intervall=3")
    assert main(["finetune", *given]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert re.search(message, lines[-1]), lines
    assert sum(line.startswith("cogfast:") for line in lines) == 1
    assert len(lines[-1]) < 400


def test_missing_paths_are_reported_together(options, capsys):
    """The two without which there is no configuration are reported with all others."""
    lost = {
        "model_path": "/lost/model",
        "deepspeed_config": "/lost/ds.json",
        "data_root": "/lost/data",
        "resume_from_checkpoint": "/lost/checkpoint-10",
    }
    assert main(["finetune", *words(options("5b", num_workers=0, **lost))]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == len(lost)
    for line, (name, path) in zip(lines, lost.items(), strict=True):
        assert line.startswith(f"cogfast: --{name} {path}: ") and "; " in line


def test_lists_that_do_not_fit_end_in_one_line(options, tmp_path, capsys, monkeypatch):
    """They are read before an encoder or the model is built."""
    monkeypatch.setattr("cogfast.train.caching.command.assemble_encoder", None)
    (tmp_path / "data" / "three.txt").write_text("a\nb\nc\n")
    given = words(options(num_workers=0, caption_column="three.txt"))
    assert main(["finetune", *given]) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("cogfast:")]
    assert "videos.txt has 2 lines and " in line and "three.txt 3; give each video one line" in line


def test_a_world_that_does_not_fit_the_file_is_refused(options, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    file = tmp_path / "zero2.json"
    file.write_text(json.dumps(UPSTREAM_ZERO2 | {"train_batch_size": 4}))
    given = words(options(deepspeed_config=file, mixed_precision="bf16"))
    assert main(["finetune", *given]) == 2
    message = r"zero2.json: deepspeed.train_batch_size=4 does not fit 8 data-parallel ranks"
    assert re.search(message, capsys.readouterr().err)


def test_a_plan_is_that_of_the_same_configuration(options, capsys):
    """--plan prints what `cogfast plan` does, and starts nothing."""
    given = words(options())
    assert main(["finetune", *given, "--plan", "24"]) == 0
    printed = capsys.readouterr().out
    assert printed == describe_plan(translate(Args(**options())), "24")
    assert "24 GiB has 24.0 GiB" in printed
    assert main(["finetune", *given, "--plan", "h1000"]) == 2
    assert "h100-80" in capsys.readouterr().err
    assert not options()["output_dir"].exists()


def test_options_without_an_effect_are_named_once(options):
    assert notices(Args(**options())) == []
    found = notices(
        Args(
            **options(
                training_type="sft",
                rank=64,
                image_column="images.txt",
                pin_memory="false",
                beta3="0.9",
                resume_from_checkpoint=PLACEHOLDER,
            )
        )
    )
    text = "\n".join(found)
    for part in (
        "is the placeholder of CogVideo's scripts and has no effect: a new run starts",
        "--rank 64 has no effect with --training_type sft",
        "--image_column images.txt has no effect: a text-to-video model takes no images",
        "--pin_memory false has no effect",
        "--beta3 0.9 has no effect",
    ):
        assert text.count(part) == 1, part
    assert len(found) == 5
    resume = options(resume_from_checkpoint=PLACEHOLDER)
    assert translate(Args(**resume)).args.resume is None


# --- the classes ---


def test_upstreams_classes_stand_at_upstreams_names():
    for name, folder in BUILT_IN.items():
        for training_type in ("lora", "sft"):
            cls = get_model_cls(name, training_type)
            version, kind = re.fullmatch(r"cogvideox(1_5)?_(\w+)", folder).groups()
            expected = f"CogVideoX{version or ''}{kind.upper()}{training_type.title()}Trainer"
            assert cls.__name__ == expected
            assert cls.__module__ == f"cogfast.finetune.models.{folder}.{training_type}_trainer"
            assert issubclass(cls, Trainer)
            assert getattr(import_module(cls.__module__), expected) is cls
            package = __import__("cogfast.finetune", fromlist=[expected])
            assert getattr(package, expected) is cls
    with pytest.raises(
        ValueError, match="--model_name x: must be one of cogvideox-t2v, cogvideox-i"
    ):
        get_model_cls("x", "lora")
    with pytest.raises(ValueError, match="cogvideox-t2v has only lora and sft; use one of them"):
        get_model_cls("cogvideox-t2v", "dora")


def test_a_class_of_ones_own_is_registered_once(monkeypatch):
    monkeypatch.setitem(SUPPORTED_MODELS, "mine", {})

    class Mine(Trainer):
        def compute_loss(self, batch):
            return 2 * super().compute_loss(batch)

    register("mine", "lora", Mine)
    assert get_model_cls("mine", "lora") is Mine
    with pytest.raises(
        ValueError,
        match="register: model_name='mine' already has the lora trainer Mine; register Mine under an",
    ):
        register("mine", "lora", Mine)
    get_model_cls("cogvideox-t2v", "lora")
    with pytest.raises(
        ValueError, match="'cogvideox-t2v' already has the lora trainer CogVideoXT2VLora"
    ):
        register("cogvideox-t2v", "lora", Mine)


@pytest.mark.parametrize("name", ["validation_step", "load_components", "UNLOAD_LIST"])
def test_a_hook_that_nothing_calls_is_a_type_error(name):
    with pytest.raises(TypeError, match=rf"Mine.{name} would never be called: \w+"):
        type("Mine", (Trainer,), {name: None})


def test_a_trainer_knows_its_state_before_it_trains(options):
    trainer = Trainer(Args(**options("1.5_5b", mixed_precision="bf16")))
    state = trainer.state
    assert (state.train_frames, state.train_height, state.train_width) == (17, 32, 48)
    assert str(state.weight_dtype) == "torch.bfloat16"
    assert state.transformer_config["patch_size_t"] == 2
    assert trainer.optimizer is trainer.lr_scheduler is trainer.dataset is None
    assert isinstance(trainer.config, cogfast.train.trainer.Config)
