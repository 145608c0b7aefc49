"""The network that a run has trained computes the same by each way out of the run's folder."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLCogVideoX
from torch import Tensor

from cogfast.config import load_config
from cogfast.extensions.formats.adapters import only_adapters
from cogfast.extensions.formats.convert import convert
from cogfast.extensions.sample.lora_overlay import LoraOverlay, add_loras, open_loras
from cogfast.model.lora import is_lora_parameter
from cogfast.model.transformer import DiffusionTransformer, build_transformer
from cogfast.model.weights.load import load_transformer
from cogfast.model.weights.open import open_source
from tests.model.test_lora import save_as_sat
from tests.support.refusals import assert_refused
from tests.support.runs import Run
from tests.support.tiny_transformers import randomize

LORA = ("args.lora_rank=4", "args.lora_alpha=6", "args.lora_modules=[q,v,out]")
FAST = ("deepspeed.optimizer.params.lr=0.02",)  # so that averages differ from the weights
OTHERS = "model.trainable_modules=[modulation]"
# {what a run trains: its words}
SOURCES = {"LoRA": LORA, "LoRA and other weights": (*LORA, OTHERS), "all weights": ()}


@dataclass(frozen=True)
class Trained:
    run: Run
    base: Path
    outputs: dict[bool, Tensor]  # by whether the weights are averaged


def output(transformer: DiffusionTransformer) -> Tensor:
    """The prediction of 3 x 4 x 4 latents, float32."""
    config, random = transformer.config, torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(shape, generator=random)
    text = draw(2, config.text_length, config.text_hidden_size)
    with torch.no_grad():
        return transformer(draw(2, config.in_channels, 3, 4, 4), torch.tensor([17, 863]), text)


@pytest.fixture(scope="module")
def base(shared_run: Run) -> Path:
    """A folder of diffusers, from which the runs start. Its modulation is not that of a fresh model, zero."""
    transformer = build_transformer(shared_run.config().model)
    randomize(transformer, 3)
    save_as_sat(transformer, shared_run.folder / "sat")
    convert(shared_run.folder / "sat", shared_run.folder / "base", "diffusers")
    return shared_run.folder / "base"


@pytest.fixture(scope="module")
def trained(shared_run: Run, base: Path) -> dict[str, Trained]:
    found = {}
    for name, words in SOURCES.items():
        run = shared_run.with_words(*words, f"args.load={base}", *FAST)
        run = run.into(shared_run.folder / name).train(steps=3)
        engine, outputs = run.last.engine, {}
        for is_averaged in (False, True):
            with torch.no_grad(), engine.weights("shadow" if is_averaged else "master"):
                outputs[is_averaged] = output(engine.transformer)
        found[name] = Trained(run, base, outputs)
    return found


def plain(trained: Trained, folder: Path) -> DiffusionTransformer:
    """Load a model without adapters."""
    config = load_config([trained.run.base])
    transformer = build_transformer(config.model)
    load_transformer(transformer, folder)
    return transformer


def by_conversion(to: str, option: str) -> Callable[[Trained, bool, Path], Tensor]:
    def take(trained: Trained, ema: bool, folder: Path) -> Tensor:
        source, lora = trained.run.path, {}
        if option != "itself":
            source, lora = trained.base, {option: str(trained.run.path)}
        convert(source, folder / "out", to, ema=ema, verify=True, **lora)
        if option == "add_lora":  # as SAT's trainer reads it: alpha is 1
            config = load_config([trained.run.base], [*LORA[:1], "args.lora_alpha=1", *LORA[2:]])
            transformer = build_transformer(config.model)
            load_transformer(transformer, folder / "out")
            return output(transformer)
        return output(plain(trained, folder / "out"))

    return take


def by_overlay(trained: Trained, ema: bool, folder: Path) -> Tensor:
    transformer = plain(trained, trained.base)
    add_loras(transformer, open_loras([LoraOverlay(trained.run.path)], ema))
    return output(transformer)


def by_peft(trained: Trained, ema: bool, folder: Path) -> Tensor:
    convert(trained.run.path, folder / "lora", "peft", ema=ema, verify=True)
    run = replace(trained.run, last=None)
    return by_overlay(replace(trained, run=_At(run, folder / "lora")), False, folder)


class _At:
    """A LoRA folder in the place of a run."""

    def __init__(self, run: Run, path: Path) -> None:
        self.base, self.path = run.base, path


TARGETS: dict[str, Callable[[Trained, bool, Path], Tensor]] = {
    "diffusers": by_conversion("diffusers", "itself"),
    "sat": by_conversion("sat", "itself"),
    "merged, diffusers": by_conversion("diffusers", "merge_lora"),
    "merged, sat": by_conversion("sat", "merge_lora"),
    "added, sat": by_conversion("sat", "add_lora"),
    "peft": by_peft,
    "sample --lora": by_overlay,
}
# {(source, target): the line that refuses it}
ONLY = "has adapters only"
LACKS = "has no LoRA tensors"
BESIDE = "tensors beside the adapters, which adapters alone lack"
REFUSED = {
    ("LoRA", "diffusers"): ONLY,
    ("LoRA", "sat"): ONLY,
    ("LoRA and other weights", "diffusers"): "lacks",
    ("LoRA and other weights", "sat"): "lacks",
    ("LoRA and other weights", "peft"): BESIDE,
    ("LoRA and other weights", "sample --lora"): BESIDE,
    ("all weights", "merged, diffusers"): LACKS,
    ("all weights", "merged, sat"): LACKS,
    ("all weights", "added, sat"): LACKS,
    ("all weights", "peft"): LACKS,
    ("all weights", "sample --lora"): LACKS,
}


@pytest.mark.parametrize("ema", [False, True], ids=["plain", "averaged"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_the_network_computes_the_same(
    source: str, target: str, ema: bool, trained: dict[str, Trained], tmp_path: Path
) -> None:
    case = trained[source]
    take = TARGETS[target]
    if (source, target) in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[source, target]) as caught:
            take(case, ema, tmp_path)
        assert "\n" not in str(caught.value)
        return
    found, wanted, other = take(case, ema, tmp_path), case.outputs[ema], case.outputs[not ema]
    assert (found - wanted).norm() <= 1e-5 * wanted.norm()
    assert (found - other).norm() > 1e-4 * wanted.norm()


def test_adapters_of_a_sat_folder_keep_their_strength(
    trained: dict[str, Trained], tmp_path: Path
) -> None:
    """The file stores no alpha: a run that would take the rank is refused, and one with SAT's trains on."""
    case, folder = trained["LoRA"], tmp_path / "sat"
    convert(case.base, folder, "sat", add_lora=str(case.run.path))
    for key in ("load", "load_lora"):
        words = (f"args.load={case.base}", *LORA[::2], f"args.{key}={folder}")
        run = case.run.into(tmp_path / key).with_words(*words)
        run = replace(run, words=tuple(w for w in run.words if w not in LORA[1:2]))
        assert_refused(
            lambda run=run: run.train(steps=1), f"args.{key}={folder} has adapters without"
        )
        begun = run.with_words("args.lora_alpha=1").trainer("args.train_iters=1")
        found, wanted = output(begun.engine.transformer), case.outputs[False]
        assert (found - wanted).norm() <= 1e-5 * wanted.norm()


def test_what_a_conversion_would_ignore_is_refused(
    trained: dict[str, Trained], base: Path, tmp_path: Path
) -> None:
    sat = tmp_path / "sat"
    convert(base, sat, "sat")
    file = sat / "1" / "mp_rank_00_model_states.pt"
    line = f"{file}: is one file, and EMA weights are in a folder; give the SAT folder"
    assert_refused(lambda: convert(file, tmp_path / "out", "diffusers", ema=True), line)
    vae = tmp_path / "vae"
    AutoencoderKLCogVideoX(
        block_out_channels=(32,) * 4, layers_per_block=1, norm_num_groups=8
    ).save_pretrained(vae)
    options = {"ema": True, "merge_lora": "x", "lora_alpha": 3.0}
    line = (
        f"{vae} is a VAE, for which --ema, --merge-lora, --lora-alpha has no meaning; leave it out"
    )
    assert_refused(lambda: convert(vae, tmp_path / "out", "sat", **options), line)
    run = trained["LoRA"].run.with_words("args.lora_alpha=0").into(tmp_path / "runs")
    assert_refused(lambda: run.train(steps=1), "lora_alpha=0 makes the adapters' output")


def test_tensors_that_are_left_out_on_purpose_refuse_no_adapters(
    trained: dict[str, Trained],
) -> None:
    """--allow-unexpected leaves out the tensors of a user's own network."""
    source = open_source(trained["LoRA and other weights"].run.path)
    kept = {name: shape for name, shape in source.shapes.items() if is_lora_parameter(name)}
    assert only_adapters(replace(source, shapes=kept)).shapes == kept
    assert_refused(lambda: only_adapters(source), BESIDE)
