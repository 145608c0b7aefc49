"""Arguments become an ordinary configuration: origins, DeepSpeed files, wrong input."""

import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

from cogfast.__main__ import main
from cogfast.config.yaml_files import to_dict
from cogfast.core.keys import find_origin
from cogfast.door.merged_config import Config
from cogfast.extensions.plan.command import describe_plan
from cogfast.extensions.sample.next_commands import log_commands
from cogfast.finetune import get_model_cls, register
from cogfast.finetune.registry import BUILT_IN, SUPPORTED_MODELS
from cogfast.finetune.schemas import PLACEHOLDER, Args
from cogfast.finetune.trainer import Trainer
from cogfast.finetune.translate import notices, translate
from cogfast.train.optimizer import build_optimizer, warn_of_rate
from cogfast.train.preflight.check import check_train
from cogfast.train.run.terminal import resume_words
from cogfast.train.video_size import sampled_size
from tests.extensions.prodigy_muon.test_optimizers import gradient, prodigy_by_the_paper
from tests.finetune.conftest import KINDS, words
from tests.support.refusals import assert_line, assert_refused, refusals
from tests.support.runs import run_of
from tests.support.tiny_run import ROOT


def test_prodigy_is_what_upstream_builds(options, caplog):
    """Decay is added to the gradient, beta3 is an option, and nothing is corrected for the first steps."""
    args = Args(
        **options("5b", optimizer="Prodigy", learning_rate=1.0, beta3=0.97, weight_decay=0.1)
    )
    config = translate(args)
    assert not any("beta3" in line or "learning_rate" in line for line in notices(args))
    check_train(config.run)
    train_args = config.run.args
    config.deepspeed.optimizer.params.d0 = 1e-4
    start = torch.linspace(0.1, -0.1, 30, dtype=torch.float64)
    weights = torch.nn.Parameter(start.float())
    optimizer = build_optimizer(config.deepspeed.optimizer, [{"params": [weights]}], lr=1.0)
    upstream = {"beta3": 0.97, "decay": 0.1, "decouple": False}
    for group in optimizer.param_groups:
        group["weight_decay"] = config.args.weight_decay
    wanted = prodigy_by_the_paper(start, [1.0] * 20, d0=1e-4, **upstream)
    for step, (x, _) in enumerate(wanted):
        weights.grad = gradient(weights.detach(), step).float()
        optimizer.step()
        torch.testing.assert_close(weights.detach(), x.float(), rtol=1e-3, atol=1e-5)
    caplog.clear()
    for rate in (1.0, 1e-4):
        warn_of_rate(train_args.changed(lr=rate, warmup_steps=0), 5, config.deepspeed.optimizer)
    assert [record.args for record in caplog.records] == [(1e-4,)]


def test_a_page_has_each_option_with_its_keys(options, tmp_path):
    rows = re.findall(
        r"^\| (`--.+?) \| (.+) \|$", (ROOT / "docs" / "finetune.md").read_text(), re.MULTILINE
    )
    table = {o: cell for left, cell in rows for o in re.findall(r"`--(\w+)`", left)}
    assert table.keys() == Args.model_fields.keys() - {"overrides"}
    (tmp_path / "prompts.txt").write_text("a\n")
    (tmp_path / "images.txt").write_text("a.png\n")
    lists = {"validation_prompts": "prompts.txt", "validation_images": "images.txt"}
    validation = {"do_validation": True, "validation_steps": 1, "validation_dir": tmp_path, **lists}
    runs = [
        options(
            "5b", train_steps=3, fps=8, optimizer="Prodigy", training_type="sft", export_interval=2
        ),
        options("5b_i2v", image_column="i.txt", optimizer="adam", **validation),
    ]
    found = {}
    for run in runs:
        for key, origin in translate(Args(**run)).origins.items():
            option = re.match(r"--(\w+)", origin)
            if option and "lora_config" not in key:
                found.setdefault(option[1], set()).add(key)
    named = {
        o: set(re.findall(r"`((?:args|data|model|deepspeed)\.[\w.]+)`", c))
        for o, c in table.items()
    }
    assert len(found) > 30
    assert {o: keys - named[o] for o, keys in found.items()} == dict.fromkeys(found, set())
    alone = {"train_epochs", "resume_from_checkpoint", "beta2", "validation_dir"}  # of other runs
    extra = {o: named[o] - found.get(o, set()) for o in named.keys() - alone}
    assert {o: keys for o, keys in extra.items() if keys} == {"video_column": {"data.target"}}


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


@pytest.mark.parametrize(
    ("family", "training_type"),
    [("2b", "sft"), ("5b", "lora"), ("5b_i2v", "sft"), ("1.5_5b", "sft"), ("1.5_5b_i2v", "lora")],
)
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


def test_each_value_names_its_option(options, answer):
    given = words(options(rank=8, learning_rate=3e-4, train_steps=7, mixed_precision="bf16"))
    shown = answer("finetune", *given, "args.log_interval=3", "--dry-run")
    for value, origin in {
        "r: 8": "--rank",
        "lr: 0.0003": "--learning_rate",
        "train_iters: 7": "--train_steps",
        "max_num_frames: 9": r"--train_resolution \(frames x rows x columns\)",
        r"video_size: \[32, 48\]": "--train_resolution",
        "weight_decay: 0.0001": "--weight_decay",
        r"betas: \[0.9, 0.95\]": "--beta1",
        "log_interval: 3": "command line",
        "num_steps: 50": "CogVideo's trainer",
    }.items():
        assert re.search(rf"{value} +# {origin}\n", shown), value


def test_the_printed_configuration_is_the_one_of_cogfast_train(options, answer, tmp_path):
    file = tmp_path / "printed.yaml"
    file.write_text(answer("finetune", *words(options(train_steps=7)), "--dry-run"))
    expected = translate(Args(**options(train_steps=7)))
    assert run_of(file).config().to_yaml() == expected.to_yaml()
    assert not (tmp_path / "out").exists()


def test_the_command_that_continues_a_run_has_the_options_of_this_command(options, log):
    for given, more in (({"train_steps": 7}, "--train_steps 14"), ({}, "--train_epochs 20")):
        log.clear()
        log_commands(
            translate(Args(**options(**given))).run, "a run", 7, is_lora=True, shows_ema=False
        )
        assert log.messages[-1].endswith(f"--resume_from_checkpoint 'a run' {more}")
        assert log.messages[-2].endswith(" --to peft")
    # --resume_from_checkpoint takes no address.
    stored = translate(Args(**options(), overrides=["args.run_folder=s3://b/run"])).run
    assert resume_words(stored.args, stored.origins, "s3://b/run") == "args.resume=s3://b/run"


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
    made = config.run
    size = sampled_size(made.data_arguments, made.network.config, made.args.sampling_fps)
    assert size.fps == 24


def test_whole_models_are_exported_at_an_interval(options):
    config = translate(Args(**options(training_type="sft", export_interval=400)))
    assert (config.args.export, config.args.export_interval) == ("last", 400)
    assert find_origin(config.origins, "args.export_interval") == "--export_interval"
    args = Args(**options(export_interval=200))
    assert (translate(args).args.export, translate(args).args.export_interval) == ("all", None)
    (line,) = notices(args)
    assert line.startswith("--export_interval 200 has no effect: each LoRA checkpoint")


# --- wrong input: one line, status 2, before weights load ---


@refusals(Path(__file__).with_name("refusals.txt"), *KINDS)
def test_wrong_input_ends_in_one_line(options, capsys, monkeypatch, refusal):
    monkeypatch.setattr("cogfast.train.phases.start_processes", None)  # checks come before
    if "wandb" in refusal.words:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    given = words(options(refusal.base, num_workers=0))
    assert main(["finetune", *given, *refusal.words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert_line(lines[-1], refusal.line)
    assert sum(line.startswith("cogfast:") for line in lines) == 1


def test_lists_that_do_not_fit_end_in_one_line(options, tmp_path, capsys, monkeypatch):
    """They are read before an encoder or the model is built."""
    monkeypatch.setattr("cogfast.extensions.cache.command.assemble_encoder", None)
    (tmp_path / "data" / "three.txt").write_text("a\nb\nc\n")
    given = words(options(num_workers=0, caption_column="three.txt"))
    assert main(["finetune", *given]) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("cogfast:")]
    fix = "without blank ones; give each video one line"
    assert_line(line, f"videos.txt has 2 lines and <...>three.txt 3, {fix}")


def test_a_plan_is_that_of_the_same_configuration(options, answer, capsys):
    """--plan prints what `cogfast plan` does, and starts nothing."""
    given = words(options())
    printed = answer("finetune", *given, "--plan", "24")
    assert printed == describe_plan(translate(Args(**options())).run, "24")
    assert "24 GiB has 24.0 GiB" in printed
    assert main(["finetune", *given, "--plan", "h1000"]) == 2
    assert "h100-80" in capsys.readouterr().err
    assert not options()["output_dir"].exists()


def test_options_without_an_effect_are_named_once(options):
    assert notices(Args(**options())) == []
    changes = {"rank": 64, "image_column": "images.txt", "pin_memory": "false", "beta3": "0.9"}
    changes["resume_from_checkpoint"] = PLACEHOLDER
    found = notices(Args(**options(training_type="sft", **changes)))
    assert sorted(found) == [
        "--beta3 0.9 has no effect: adamw and adam have two betas",
        "--image_column images.txt has no effect: a text-to-video model takes no images",
        "--pin_memory False has no effect: batches for a GPU are always pinned",
        "--rank 64 has no effect: --training_type sft has no adapters",
        f"--resume_from_checkpoint {PLACEHOLDER} has no effect: the placeholder of CogVideo's scripts",
    ]
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
    line = "--model_name x: must be one of cogvideox-t2v, cogvideox-i"
    assert_refused(lambda: get_model_cls("x", "lora"), line)
    with pytest.raises(ValueError, match="cogvideox-t2v has only lora and sft; use one of them"):
        get_model_cls("cogvideox-t2v", "dora")


def test_a_class_of_ones_own_is_registered_once(monkeypatch):
    monkeypatch.setitem(SUPPORTED_MODELS, "mine", {})

    class Mine(Trainer):
        def compute_loss(self, batch):
            return 2 * super().compute_loss(batch)

    register("mine", "lora", Mine)
    assert get_model_cls("mine", "lora") is Mine
    line = "register: model_name='mine' already has the lora trainer Mine; register Mine under an"
    assert_refused(lambda: register("mine", "lora", Mine), line)
    get_model_cls("cogvideox-t2v", "lora")
    line = "'cogvideox-t2v' already has the lora trainer CogVideoXT2VLora"
    assert_refused(lambda: register("cogvideox-t2v", "lora", Mine), line)


@pytest.mark.parametrize("name", ["validate", "prepare_dataset", "prepare_for_training"])
def test_a_hook_that_nothing_calls_is_a_type_error(name):
    with pytest.raises(TypeError, match=rf"Mine.{name} would never be called: \w+"):
        type("Mine", (Trainer,), {name: None})


def test_a_method_that_looks_misspelt_is_logged(caplog):
    type("Mine", (Trainer,), {"compute_los": None, "weigh": None})
    assert "does not call Mine.compute_los; did you mean compute_loss?" in caplog.text
    assert "weigh" not in caplog.text


def test_a_trainer_knows_its_state_before_it_trains(options):
    trainer = Trainer(Args(**options("1.5_5b", mixed_precision="bf16")))
    state = trainer.state
    assert (state.train_frames, state.train_height, state.train_width) == (17, 32, 48)
    assert str(state.weight_dtype) == "torch.bfloat16"
    assert state.transformer_config["patch_size_t"] == 2
    assert trainer.optimizer is trainer.lr_scheduler is trainer.dataset is None
    assert isinstance(trainer.config, Config)
