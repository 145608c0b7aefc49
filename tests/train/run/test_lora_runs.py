"""Runs that train adapters: the size of their checkpoints, and starts from existing adapters."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import CogVideoXPipeline, CogVideoXTransformer3DModel
from safetensors.torch import load_file

from cogfast.cli.options import parse_sample
from cogfast.cli.streams import start_logging
from cogfast.config import load_config
from cogfast.model.lora import is_lora_parameter
from cogfast.model.transformer import build_transformer
from cogfast.model.weights.adapters import open_adapter
from cogfast.model.weights.convert import convert
from cogfast.model.weights.formats.checkpoint_manifest import (
    newest_checkpoint,
)
from cogfast.model.weights.formats.peft import FILE_NAME, peft_name, write_peft
from cogfast.model.weights.image_scale import scale_of_run
from cogfast.model.weights.load import load_transformer
from cogfast.model.weights.open import open_source
from cogfast.model.weights.source import WeightSource
from cogfast.train.trainer import Trainer
from tests.model.test_lora import save_as_sat
from tests.support.tiny_run import (
    losses,
    model_section,
    read_run_weights,
    run_folder,
    write_clips,
    write_config,
)
from tests.support.tiny_transformers import randomize

LORA = "model.network_config.params.modules.lora_config.params"
ASKED = [f"{LORA}.lora_alpha=3", f"{LORA}.target_modules=[to_q,to_v,to_out.0]"]
NUM_ADAPTERS = 2 * 3 * 2  # layers, targets, A and B
RANK, WIDTH = 2, 32


def write_lora_config(folder: Path, lora_rank: int, **args: object) -> Path:
    """Write a config of a LoRA run on a SAT checkpoint, both into `folder`."""
    data = write_clips(folder / "data")
    plain = build_transformer(model_section("5b", data))
    randomize(plain, seed=1)
    save_as_sat(plain, folder / "base")
    options: Any = {"load": str(folder / "base"), **args}
    return write_config(folder / "base.yaml", data, "5b", lora_rank, **options)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lora_config(tmp_path_factory.mktemp("lora"), RANK, train_iters=3)


@pytest.fixture(scope="module")
def trained(base: Path) -> Path:
    Trainer(load_config([base], ASKED)).train()
    return run_folder(base.parent / "runs")


def test_a_checkpoint_holds_the_adapters_alone(base: Path, trained: Path) -> None:
    """Master weights, two moments and the average, 4 bytes each, of the adapters."""
    files = sorted(newest_checkpoint(trained).rglob("*.safetensors"))
    numels = [tensor.numel() for file in files for tensor in load_file(file).values()]
    assert sum(numels) == 4 * NUM_ADAPTERS * RANK * WIDTH
    base_file = next((base.parent / "base").rglob("*.pt"))
    whole = sum(path.stat().st_size for path in newest_checkpoint(trained).rglob("*"))
    assert whole < base_file.stat().st_size / 4


def strength(source: WeightSource) -> float:
    """Return the norm of what a source's first pair adds to its linear."""
    a, b = (source.read(f"blocks.0.attention.qkv.matrix_{s}.0", None).float() for s in "AB")
    return (source.lora_alpha / RANK * b @ a).norm().item()


def test_a_resumed_run_has_the_configuration_of_its_last_start(base: Path, tmp_path: Path) -> None:
    """Readers take alpha and sampling from the checkpoint that they read, also without its run."""

    def train(*words: str) -> None:
        save = (f"args.save={tmp_path / 'runs'}", "args.keep_last=0", "args.save_interval=2")
        Trainer(load_config([base], [*save, *words])).train()

    train(f"{LORA}.lora_alpha=4", "args.train_iters=2", "args.sampling_fps=24")
    changed = (f"{LORA}.lora_alpha=16", "args.sampling_fps=12", "args.accept_changes=true")
    train("args.resume=latest", "args.train_iters=4", "args.export=all", *changed)
    run = run_folder(tmp_path / "runs")
    first, last = (run / "checkpoints" / name for name in ("00000002", "00000004"))
    copied = shutil.copytree(last, tmp_path / "copied" / last.name)
    shutil.copytree(run, tmp_path / "other" / run.name)
    sources = {run: 12, last: 12, first: 24, copied: 12, tmp_path / "other" / run.name: 12}
    for source, fps in sources.items():
        alpha = 4 if source is first else 16
        assert open_source(source).lora_alpha == alpha
        request = parse_sample([str(source), "--prompt", "a", "--dry-run"])
        given = (request.base, request.overrides, (), True, request.settings)
        config = load_config(*given)
        assert config.args.sampling_fps == fps
        params = config.model.network_config.params.modules.lora_config.params
        assert params.lora_alpha == alpha
        assert config.args.model_parallel_size == 1
    exported, found = open_source(last / FILE_NAME), open_source(copied)
    assert strength(exported) == pytest.approx(strength(found), rel=1e-6)
    convert(copied, tmp_path / "peft", "peft")
    assert strength(open_source(tmp_path / "peft")) == pytest.approx(strength(found), rel=1e-6)


def test_checkpoints_hold_the_file_of_the_adapters(base: Path, tmp_path: Path) -> None:
    """It is what `cogfast convert` writes, and a pipeline reads it from the checkpoint's folder."""
    arguments = [*ASKED, f"{LORA}.lora_alpha=1", "args.export=all", "args.save_interval=2"]
    Trainer(load_config([base], [*arguments, f"args.save={tmp_path / 'runs'}"])).train()
    run = run_folder(tmp_path / "runs")
    checkpoints = sorted(run.glob("checkpoints/0*"))
    assert [path.name for path in checkpoints] == ["00000002", "00000003"]
    for path in checkpoints:
        convert(path, tmp_path / path.name, "peft")
        assert (path / FILE_NAME).read_bytes() == (tmp_path / path.name / FILE_NAME).read_bytes()
    convert(base.parent / "base", tmp_path / "base", "diffusers")
    theirs = CogVideoXTransformer3DModel.from_pretrained(tmp_path / "base")
    none = dict.fromkeys(("tokenizer", "text_encoder", "vae", "scheduler"))
    CogVideoXPipeline(transformer=theirs, **none).load_lora_weights(str(checkpoints[-1]))
    adapter = open_adapter(run)
    for part, linear in ((0, "to_q"), (2, "to_v")):
        a, b = (adapter.read(f"blocks.1.attention.qkv.matrix_{s}.{part}", None) for s in "AB")
        layer = getattr(theirs.transformer_blocks[1].attn1, linear)
        torch.testing.assert_close(layer.get_delta_weight("default_0"), b @ a / RANK)
        assert b.abs().max() > 0


def test_a_run_whose_first_frame_has_another_scale_than_the_pipelines_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """SAT's files have no such key: 1.5-I2V is trained with the trainers' scale."""
    data = write_clips(tmp_path / "data")
    plain = build_transformer(model_section("1.5_5b_i2v", data))
    randomize(plain, seed=1)
    save_as_sat(plain, tmp_path / "base")
    options: Any = {"load": str(tmp_path / "base"), "train_iters": 1}
    base = write_config(tmp_path / "base.yaml", data, "1.5_5b_i2v", RANK, **options)
    start_logging()
    losses_of, code = {}, "pipe.vae.register_to_config(invert_scale_latents=False)"
    text = r"have scale 0.7 \(model.image_latent_scale=trainer\), but .* pipeline 1.43 \(pipeline\)"
    for scale in ("trainer", "pipeline"):
        given = [f"args.save={tmp_path / scale}"]
        given += [f"model.image_latent_scale={scale}"] if scale == "pipeline" else []
        Trainer(load_config([base], given)).train()
        run = run_folder(tmp_path / scale)
        losses_of[scale] = losses(run)
        log = capsys.readouterr().err
        assert len(re.findall(text, log)) == (2 if scale == "trainer" else 0), log
        assert (code in log) == (scale == "trainer")
        assert "LoRA: 16 adapter tensors start from their initial values" in log
        assert "matrix_A" not in log and "with unknown names" not in log
        convert(run, tmp_path / f"peft-{scale}", "peft")
        assert (code in capsys.readouterr().err) == (scale == "trainer")
        assert scale_of_run(run) == (scale, "pipeline", 0.7)
    assert losses_of["trainer"] != losses_of["pipeline"]
    # A run keeps its scale, and is sampled with it.
    changed = [f"args.save={tmp_path / 'trainer'}", "args.resume=latest", "args.train_iters=2"]
    with pytest.raises(ValueError, match="model.image_latent_scale: trainer -> pipeline"):
        Trainer(load_config([base], [*changed, "model.image_latent_scale=pipeline"]))


def test_dropout_is_drawn_again_in_a_resumed_run(base: Path, tmp_path: Path) -> None:
    asked = [f"{LORA}.target_modules=[to_q,ff.net.0.proj,ff.net.2]", f"{LORA}.lora_dropout=0.5"]
    arguments = [*asked, "args.train_iters=4", "args.save_interval=2"]
    Trainer(load_config([base], [*arguments, f"args.save={tmp_path / 'whole'}"])).train()
    arguments.append(f"args.save={tmp_path / 'parts'}")
    Trainer(load_config([base], [*arguments, "args.exit_interval=2"])).train()
    torch.manual_seed(5)  # another process would be in another state
    Trainer(load_config([base], [*arguments, "args.resume=latest"])).train()
    whole, parts = (losses(run_folder(tmp_path / name)) for name in ("whole", "parts"))
    assert whole == parts and len(whole) == 4
    runs = [newest_checkpoint(run_folder(tmp_path / name)) for name in ("whole", "parts")]
    states = [read_run_weights(run) for run in runs]
    assert len(states[0]) == 2 * 3 * 2  # layers, targets, A and B
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    arguments[1], arguments[-1] = f"{LORA}.lora_dropout=0", f"args.save={tmp_path / 'none'}"
    Trainer(load_config([base], arguments)).train()
    assert losses(run_folder(tmp_path / "none")) != whole


@pytest.fixture(scope="module")
def sources(trained: Path, base: Path) -> dict[str, Path]:
    """The trained adapters as the run itself, a PEFT file and a SAT checkpoint with its base."""
    adapter, folder = open_adapter(trained), base.parent
    assert adapter.lora_alpha == 3.0
    written = write_peft(adapter, folder / "peft")
    whole = build_transformer(load_config([base], ASKED).model)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if is_lora_parameter(name):
                parameter.copy_(adapter.read(name, None))
    save_as_sat(whole, folder / "sat")
    return {"run": trained, "peft": written, "sat": folder / "sat"}


@pytest.mark.parametrize("kind", ["run", "peft", "sat"])
def test_training_starts_from_adapters(
    tmp_path: Path, base: Path, sources: dict[str, Path], kind: str
) -> None:
    arguments = [*ASKED, f"args.load_lora={sources[kind]}", f"args.save={tmp_path}"]
    if kind == "peft":
        arguments.append(f"{LORA}.lora_alpha={RANK}")  # the strength 3 / 2 is in the file's B
    trainer = Trainer(load_config([base], arguments))
    adapter = open_adapter(sources["run"])
    state = dict(trainer.engine.transformer.named_parameters())
    held = {name for name in state if is_lora_parameter(name)}
    assert held == adapter.shapes.keys() and len(held) == NUM_ADAPTERS
    for name in held:
        factor = 3 / RANK if kind == "peft" and "matrix_B" in name else 1
        assert torch.equal(state[name].detach().float(), adapter.read(name, None) * factor), name
    first = build_transformer(model_section("5b", tmp_path))
    randomize(first, seed=1)
    name = "blocks.1.attention.out.{}weight"
    assert torch.equal(state[name.format("original.")], first.get_parameter(name.format("")))


def test_a_config_that_does_not_fit_is_refused_before_anything(
    base: Path, sources: dict[str, Path], tmp_path: Path
) -> None:
    cases = {
        f"{LORA}.r=4": r"args.load_lora: .*which has LoRA rank 4, alpha 2, .* set args.lora_rank=2 args.lora_alpha=2 ",
        f"{LORA}.target_modules=[to_q]": r"; set .*args.lora_modules=\[q,v,out\]",
        "args.load_lora=nothing": "args.load_lora=nothing does not exist; set it to a file",
    }
    for argument, match in cases.items():
        arguments = [*ASKED, f"{LORA}.lora_alpha=2", f"args.save={tmp_path}"]
        arguments += [f"args.load_lora={sources['peft']}", argument]
        with pytest.raises(ValueError, match=match):
            Trainer(load_config([base], arguments))
    assert not list(tmp_path.iterdir())
    # Weights that have these adapters.
    model = build_transformer(load_config([base], [*ASKED, f"{LORA}.lora_alpha=1"]).model)
    with pytest.raises(
        ValueError,
        match="which has LoRA rank 2, alpha 1, .* set args.lora_rank=2 args.lora_alpha=3",
    ):
        load_transformer(model, sources["run"])


@pytest.mark.parametrize("what", ["output layer", "modulation"])
def test_a_base_that_gives_adapters_no_gradient_is_refused(
    base: Path, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The base is zero behind the adapters, as fresh weights are, so no gradient reaches them."""
    plain = build_transformer(model_section("5b", tmp_path))
    randomize(plain, seed=1)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            is_zero = name == "output.weight" if what == "output layer" else ".modulation." in name
            if is_zero:
                parameter.zero_()
    save_as_sat(plain, tmp_path / "zero")
    arguments = [f"args.load={tmp_path / 'zero'}", f"args.save={tmp_path / 'runs'}"]
    with pytest.raises(ValueError, match=rf"zero: the .*{what} is zero, so LoRA gets no gradient"):
        Trainer(load_config([base], arguments))
    Trainer(load_config([base], [*arguments, "args.force_train=true"]))
    assert any("LoRA gets no gradient at first" in r.message for r in caplog.records)


def save_as_upstream(folder: Path, trained: Path) -> Path:
    """A checkpoint as accelerate and diffusers write it, with the adapters of a run."""
    adapter, layers = open_adapter(trained), {}
    for name in adapter.shapes:
        layers[peft_name(name).removeprefix("transformer.")] = adapter.read(name, None)
    checkpoint = folder / "checkpoint-200"
    CogVideoXPipeline.save_lora_weights(checkpoint, transformer_lora_layers=layers)
    for name in ("optimizer.bin", "scheduler.bin", "random_states_0.pkl"):
        (checkpoint / name).write_bytes(b"not read")
    return checkpoint


def test_a_checkpoint_of_the_diffusers_trainer_resumes(
    base: Path, trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its weights with the configured alpha (the file has none) and its step; it stays where it is."""
    checkpoint, adapter = save_as_upstream(tmp_path / "theirs", trained), open_adapter(trained)
    arguments = [*ASKED, "args.train_iters=202", f"args.resume={checkpoint}", "args.keep_last=1"]
    arguments += ["args.folder_layout=finetune", "args.save_interval=1"]
    into = [f"args.run_folder={checkpoint.parent}"]
    trainer = Trainer(load_config([base], [*arguments, *into]))
    assert (
        "resuming its LoRA weights and its step 200, without the state of its optimizer"
        in caplog.text
    )
    for name, parameter in trainer.engine.transformer.named_parameters():
        if is_lora_parameter(name):
            assert torch.equal(parameter, adapter.read(name, None)), name
    trainer.train()
    folders = {path.name for path in checkpoint.parent.glob("checkpoint-*")}
    assert folders == {"checkpoint-200", "checkpoint-202"}
    assert len(losses(checkpoint.parent)) == 2
    elsewhere = Trainer(load_config([base], [*arguments, f"args.save={tmp_path / 'runs'}"]))
    assert elsewhere.step == 200 and elsewhere.folder.parent == tmp_path / "runs"


def test_checkpoints_of_the_diffusers_trainer_that_cannot_resume_are_refused(
    base: Path, trained: Path, tmp_path: Path
) -> None:
    checkpoint = save_as_upstream(tmp_path, trained)
    arguments = [*ASKED, f"args.resume={checkpoint}", f"args.save={tmp_path / 'runs'}"]
    with pytest.raises(
        ValueError,
        match="args.resume: .*which has LoRA rank 4, .* set args.lora_rank=2 args.lora_alpha=3",
    ):
        Trainer(load_config([base], [*arguments, f"{LORA}.r=4"]))
    (checkpoint / FILE_NAME).unlink()
    (checkpoint / "pytorch_model").mkdir()
    (checkpoint / "pytorch_model" / "mp_rank_00_model_states.pt").write_bytes(b"not read")
    with pytest.raises(ValueError, match="checkpoint-200: its weights are in DeepSpeed's pickle"):
        Trainer(load_config([base], arguments))
    assert not (tmp_path / "runs").exists()
