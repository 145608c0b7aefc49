"""Runs that train adapters: the size of their checkpoints, and starts from existing adapters."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import CogVideoXPipeline, CogVideoXTransformer3DModel
from safetensors.torch import load_file

from cogfast.__main__ import _load
from cogfast.cli.options import parse_sample
from cogfast.cli.streams import start_logging
from cogfast.extensions.formats.adapters import open_adapter
from cogfast.extensions.formats.convert import convert
from cogfast.extensions.formats.image_scale import scale_of_run
from cogfast.extensions.formats.peft import FILE_NAME, peft_name, write_peft
from cogfast.model.lora import is_lora_parameter
from cogfast.model.transformer import build_transformer
from cogfast.model.weights.load import load_transformer
from cogfast.model.weights.open import open_source
from cogfast.model.weights.source import WeightSource
from tests.model.test_lora import save_as_sat
from tests.support.refusals import assert_refused
from tests.support.runs import Run
from tests.support.tiny_run import assert_same, losses, model_section
from tests.support.tiny_transformers import randomize

LORA = "model.network_config.params.modules.lora_config.params"
ASKED = [f"{LORA}.lora_alpha=3", f"{LORA}.target_modules=[to_q,to_v,to_out.0]"]
NUM_ADAPTERS = 2 * 3 * 2  # layers, targets, A and B
RANK, WIDTH = 2, 32


def lora_run(run: Run, rank: int) -> Run:
    """A LoRA run on a SAT checkpoint, which is written beside its YAML file."""
    section = model_section(run.family, run.data)
    plain = randomize(build_transformer(section), seed=1)
    save_as_sat(plain, run.folder / "base")
    return run.with_lora(rank).with_args(load=str(run.folder / "base"))


@pytest.fixture(scope="module")
def lora(shared_run: Run) -> Run:
    return lora_run(shared_run, RANK).with_args(train_iters=3)


@pytest.fixture(scope="module")
def trained(lora: Run) -> Run:
    return lora.train(*ASKED)


def test_a_checkpoint_holds_the_adapters_alone(trained: Run) -> None:
    """Master weights, two moments and the average, 4 bytes each, of the adapters."""
    files = sorted(trained.checkpoint.rglob("*.safetensors"))
    numels = [tensor.numel() for file in files for tensor in load_file(file).values()]
    assert sum(numels) == 4 * NUM_ADAPTERS * RANK * WIDTH
    base_file = next((trained.folder / "base").rglob("*.pt"))
    whole = sum(path.stat().st_size for path in trained.checkpoint.rglob("*"))
    assert whole < base_file.stat().st_size / 4


def strength(source: WeightSource) -> float:
    """Return the norm of what a source's first pair adds to its linear."""
    a, b = (source.read(f"blocks.0.attention.qkv.matrix_{s}.0", None).float() for s in "AB")
    return (source.lora_alpha / RANK * b @ a).norm().item()


def test_a_resumed_run_has_the_configuration_of_its_last_start(lora: Run, tmp_path: Path) -> None:
    """Readers take alpha and sampling from the checkpoint that they read, also without its run."""
    lora = lora.into(tmp_path / "runs").with_words("args.keep_last=0", "args.save_interval=2")
    lora.train(f"{LORA}.lora_alpha=4", "args.sampling_fps=24", steps=2)
    changed = (f"{LORA}.lora_alpha=16", "args.sampling_fps=12", "args.accept_changes=true")
    run = lora.resume("args.export=all", *changed, steps=4).path
    first, last = (run / "checkpoints" / name for name in ("00000002", "00000004"))
    copied = shutil.copytree(last, tmp_path / "copied" / last.name)
    shutil.copytree(run, tmp_path / "other" / run.name)
    sources = {run: 12, last: 12, first: 24, copied: 12, tmp_path / "other" / run.name: 12}
    for source, fps in sources.items():
        alpha = 4 if source is first else 16
        assert open_source(source).lora_alpha == alpha
        request = parse_sample([str(source), "--prompt", "a", "--dry-run"])
        config = _load(request, is_of_run=True)
        assert config.args.sampling_fps == fps
        params = config.model.network_config.params.modules.lora_config.params
        assert params.lora_alpha == alpha
        assert config.args.model_parallel_size == 1
    exported, found = open_source(last / FILE_NAME), open_source(copied)
    assert strength(exported) == pytest.approx(strength(found), rel=1e-6)
    convert(copied, tmp_path / "peft", "peft")
    assert strength(open_source(tmp_path / "peft")) == pytest.approx(strength(found), rel=1e-6)


def test_checkpoints_hold_the_file_of_the_adapters(lora: Run, tmp_path: Path) -> None:
    """It is what `cogfast convert` writes, and a pipeline reads it from the checkpoint's folder."""
    words = (*ASKED, f"{LORA}.lora_alpha=1", "args.export=all", "args.save_interval=2")
    run = lora.into(tmp_path / "runs").train(*words).path
    checkpoints = sorted(run.glob("checkpoints/0*"))
    assert [path.name for path in checkpoints] == ["00000002", "00000003"]
    for path in checkpoints:
        convert(path, tmp_path / path.name, "peft")
        assert (path / FILE_NAME).read_bytes() == (tmp_path / path.name / FILE_NAME).read_bytes()
    convert(lora.folder / "base", tmp_path / "base", "diffusers")
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
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """SAT's files have no such key: 1.5-I2V is trained with the trainers' scale."""
    lora = lora_run(run.of("1.5_5b_i2v"), RANK).with_args(train_iters=1)
    start_logging()
    losses_of, code = {}, "pipe.vae.register_to_config(invert_scale_latents=False)"
    text = r"have scale 0.7 \(model.image_latent_scale=trainer\), but .* pipeline 1.43 \(pipeline\)"
    for scale in ("trainer", "pipeline"):
        word = (f"model.image_latent_scale={scale}",) if scale == "pipeline" else ()
        run = lora.into(tmp_path / scale).train(*word)
        losses_of[scale] = run.losses
        log = capsys.readouterr().err
        assert len(re.findall(text, log)) == (2 if scale == "trainer" else 0), log
        assert (code in log) == (scale == "trainer")
        assert "LoRA: 16 adapter tensors start from their initial values" in log
        assert "matrix_A" not in log and "with unknown names" not in log
        convert(run.path, tmp_path / f"peft-{scale}", "peft")
        assert (code in capsys.readouterr().err) == (scale == "trainer")
        assert scale_of_run(run.path) == (scale, "pipeline", 0.7)
    assert losses_of["trainer"] != losses_of["pipeline"]
    # A run keeps its scale, and is sampled with it.
    changed = lora.into(tmp_path / "trainer").with_words("model.image_latent_scale=pipeline")
    line = "model.image_latent_scale: trainer -> pipeline"
    assert_refused(lambda: changed.resume(steps=2), line)


def test_dropout_is_drawn_again_in_a_resumed_run(lora: Run, tmp_path: Path) -> None:
    targets = f"{LORA}.target_modules=[to_q,ff.net.0.proj,ff.net.2]"
    dropout = f"{LORA}.lora_dropout"
    run = lora.with_words(targets, f"{dropout}=0.5", "args.train_iters=4", "args.save_interval=2")
    whole = run.into(tmp_path / "whole").train()
    parts = run.into(tmp_path / "parts")
    parts.train("args.exit_interval=2")
    torch.manual_seed(5)  # another process would be in another state
    parts.resume()
    assert whole.losses == parts.losses and len(whole.losses) == 4
    assert len(whole.weights()) == 2 * 3 * 2  # layers, targets, A and B
    assert_same(parts.weights(), whole.weights())
    assert run.into(tmp_path / "none").train(f"{dropout}=0").losses != whole.losses


@pytest.fixture(scope="module")
def sources(trained: Run) -> dict[str, Path]:
    """The trained adapters as the run itself, a PEFT file and a SAT checkpoint with its base."""
    adapter, folder = open_adapter(trained.path), trained.folder
    assert adapter.lora_alpha == 3.0
    written = write_peft(adapter, folder / "peft")
    whole = build_transformer(trained.config(*ASKED).model)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if is_lora_parameter(name):
                parameter.copy_(adapter.read(name, None))
    save_as_sat(whole, folder / "sat")
    return {"run": trained.path, "peft": written, "sat": folder / "sat"}


@pytest.mark.parametrize("kind", ["run", "peft", "sat"])
def test_training_starts_from_adapters(
    tmp_path: Path, lora: Run, sources: dict[str, Path], kind: str
) -> None:
    run = lora.into(tmp_path).with_words(*ASKED, f"args.load_lora={sources[kind]}")
    if kind == "peft":
        run = run.with_words(f"{LORA}.lora_alpha={RANK}")  # the strength 3 / 2 is in the file's B
    trainer = run.trainer()
    adapter = open_adapter(sources["run"])
    state = dict(trainer.engine.transformer.named_parameters())
    held = {name for name in state if is_lora_parameter(name)}
    assert held == adapter.shapes.keys() and len(held) == NUM_ADAPTERS
    for name in held:
        factor = 3 / RANK if kind == "peft" and "matrix_B" in name else 1
        assert torch.equal(state[name].detach().float(), adapter.read(name, None) * factor), name
    first = randomize(build_transformer(model_section("5b", tmp_path)), seed=1)
    name = "blocks.1.attention.out.{}weight"
    assert torch.equal(state[name.format("original.")], first.get_parameter(name.format("")))


def test_a_config_that_does_not_fit_is_refused_before_anything(
    lora: Run, sources: dict[str, Path], tmp_path: Path
) -> None:
    cases = {
        f"{LORA}.r=4": "args.load_lora: <...>which has LoRA rank 4, alpha 2, <...> set args.lora_rank=2 args.lora_alpha=2 ",
        f"{LORA}.target_modules=[to_q]": "; set <...>args.lora_modules=[q,v,out]",
        "args.load_lora=nothing": "args.load_lora=nothing does not exist; set it to a file",
    }
    peft = f"args.load_lora={sources['peft']}"
    run = lora.into(tmp_path).with_words(*ASKED, f"{LORA}.lora_alpha=2", peft)
    for word, line in cases.items():
        assert_refused(lambda word=word: run.trainer(word), line)
    assert not list(tmp_path.iterdir())
    # Weights that have these adapters.
    model = build_transformer(lora.config(*ASKED, f"{LORA}.lora_alpha=1").model)
    line = "which has LoRA rank 2, alpha 1, <...> set args.lora_rank=2 args.lora_alpha=3"
    assert_refused(lambda: load_transformer(model, sources["run"]), line)


@pytest.mark.parametrize("what", ["output layer", "modulation"])
def test_a_base_that_gives_adapters_no_gradient_is_refused(
    lora: Run, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The base is zero behind the adapters, as fresh weights are, so no gradient reaches them."""
    plain = randomize(build_transformer(model_section("5b", tmp_path)), seed=1)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            is_zero = name == "output.weight" if what == "output layer" else ".modulation." in name
            if is_zero:
                parameter.zero_()
    save_as_sat(plain, tmp_path / "zero")
    run = lora.into(tmp_path / "runs").with_words(f"args.load={tmp_path / 'zero'}")
    line = f"zero: the <...>{what} is zero, so LoRA gets no gradient"
    assert_refused(run.trainer, line)
    run.trainer("args.force_train=true")
    assert any("LoRA gets no gradient at first" in r.message for r in caplog.records)


def save_as_upstream(folder: Path, trained: Run) -> Path:
    """A checkpoint as accelerate and diffusers write it, with the adapters of a run."""
    adapter, layers = open_adapter(trained.path), {}
    for name in adapter.shapes:
        layers[peft_name(name).removeprefix("transformer.")] = adapter.read(name, None)
    checkpoint = folder / "checkpoint-200"
    CogVideoXPipeline.save_lora_weights(checkpoint, transformer_lora_layers=layers)
    for name in ("optimizer.bin", "scheduler.bin", "random_states_0.pkl"):
        (checkpoint / name).write_bytes(b"not read")
    return checkpoint


def test_a_checkpoint_of_the_diffusers_trainer_resumes(
    lora: Run, trained: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its weights with the configured alpha (the file has none) and its step; it stays where it is."""
    checkpoint = save_as_upstream(tmp_path / "theirs", trained)
    adapter = open_adapter(trained.path)
    run = lora.with_words(*ASKED, "args.train_iters=202", f"args.resume={checkpoint}")
    run = run.with_args(keep_last=1, folder_layout="finetune", save_interval=1)
    trainer = run.trainer(f"args.run_folder={checkpoint.parent}")
    text = "resuming its LoRA weights and its step 200, without the state of its optimizer"
    assert text in caplog.text
    for name, parameter in trainer.engine.transformer.named_parameters():
        if is_lora_parameter(name):
            assert torch.equal(parameter, adapter.read(name, None)), name
    trainer.train()
    folders = {path.name for path in checkpoint.parent.glob("checkpoint-*")}
    assert folders == {"checkpoint-200", "checkpoint-202"}
    assert len(losses(trainer.folder)) == 2
    elsewhere = run.into(tmp_path / "runs").trainer()
    assert elsewhere.step == 200 and elsewhere.folder.parent == tmp_path / "runs"


def test_checkpoints_of_the_diffusers_trainer_that_cannot_resume_are_refused(
    lora: Run, trained: Run, tmp_path: Path
) -> None:
    checkpoint = save_as_upstream(tmp_path, trained)
    run = lora.into(tmp_path / "runs").with_words(*ASKED, f"args.resume={checkpoint}")
    text = "args.resume: .*which has LoRA rank 4, .* set args.lora_rank=2 args.lora_alpha=3"
    with pytest.raises(ValueError, match=text):
        run.trainer(f"{LORA}.r=4")
    (checkpoint / FILE_NAME).unlink()
    (checkpoint / "pytorch_model").mkdir()
    (checkpoint / "pytorch_model" / "mp_rank_00_model_states.pt").write_bytes(b"not read")
    assert_refused(run.trainer, "checkpoint-200: its weights are in DeepSpeed's pickle")
    assert not (tmp_path / "runs").exists()
