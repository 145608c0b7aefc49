"""A whole folder of every format that a command reads, and what reads it."""

import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import torch

from cogfast.__main__ import _COMMANDS, main
from cogfast.extensions.formats.convert import convert
from cogfast.model.transformer import DiffusionTransformer
from cogfast.model.weights.load import load_transformer
from tests.cli.hostile.damage import TO_RUNS, TO_WEIGHTS
from tests.cli.hostile.forked_case import run_case
from tests.model.test_lora import save_as_sat
from tests.support.tiny_run import write_clips, write_config
from tests.support.tiny_transformers import tiny, write_t5

SMALL = {"hidden_size": 64, "num_attention_heads": 1, "num_layers": 1}
Read = tuple[str, ...] | Callable[[], object]


@dataclass(frozen=True)
class Format:
    """reads: arguments of commands, or calls, that read the folder `in`; they may write to `out`."""

    make: Callable[[Path], None]
    reads: tuple[Read, ...]
    damages: tuple[Callable, ...] = TO_WEIGHTS


def run(read: Read) -> int:
    """Run a command as the command line does, with one line for an error."""
    if isinstance(read, tuple):
        return main(list(read))
    with patch.dict(_COMMANDS, {"read": lambda argv: read()}):
        return main(["read"])


def _converted(source: Path, folder: Path, to: str, **options: object) -> None:
    """Convert `source`, which is below `folder`, to files of `folder`; remove it."""
    convert(source, folder / "made", to, **options)
    for path in (folder / "made").iterdir():
        path.rename(folder / path.name)
    (folder / "made").rmdir()
    shutil.rmtree(source)


def _sat(folder: Path) -> None:
    save_as_sat(tiny("2b", **SMALL).bfloat16(), folder)


def _from_sat(folder: Path, family: str, to: str, **lora: object) -> None:
    save_as_sat(tiny(family, seed=3, **SMALL, **lora).bfloat16(), folder / "sat")
    _converted(folder / "sat", folder, to)


def _sharded(folder: Path) -> None:
    from diffusers import CogVideoXTransformer3DModel

    _from_sat(folder / "one", "1.5_5b", "diffusers")
    model = CogVideoXTransformer3DModel.from_pretrained(folder / "one")
    shutil.rmtree(folder / "one")
    model.save_pretrained(folder, max_shard_size="200KB")


def _vae(folder: Path) -> None:
    from diffusers import AutoencoderKLCogVideoX

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoencoderKLCogVideoX(block_out_channels=(32, 32, 32, 32), layers_per_block=1)
    model.bfloat16().save_pretrained(folder)


def _vae_sat(folder: Path) -> None:
    _vae(folder / "vae")
    _converted(folder / "vae", folder, "sat")


def _pipeline(folder: Path) -> None:
    _from_sat(folder / "transformer", "5b", "diffusers")
    _vae(folder / "vae")
    scheduler = {"_class_name": "CogVideoXDDIMScheduler", "beta_schedule": "scaled_linear"}
    scheduler |= {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
    scheduler |= {"timestep_spacing": "trailing", "snr_shift_scale": 1.0}
    scheduler |= {"beta_start": 0.00085, "beta_end": 0.012}
    (folder / "scheduler").mkdir()
    (folder / "scheduler/scheduler_config.json").write_text(json.dumps(scheduler))
    (folder / "model_index.json").write_text('{"_class_name": "CogVideoXPipeline"}')


def _t5(folder: Path) -> None:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1}
    write_t5(folder, ["a video of the sea", "the sea at night"], 18, vocab_size=32, **sizes)


def _run(folder: Path) -> None:
    """Data, a configuration and a run of it with the checkpoints 2 and 4, all with relative paths."""
    with contextlib.chdir(folder.parent):
        write_clips(Path("in/data"), num_clips=4, num_frames=9)
        more = {"train_iters": 4, "save_interval": 2, "run_folder": "in/run"}
        write_config(Path("in/base.yaml"), Path("in/data"), **more)
    outcome = run_case(lambda: main(["train", "--base", "in/base.yaml"]), folder.parent)
    assert outcome.status == 0, outcome.output


def _encode() -> None:
    from cogfast.model.text_encoder import T5TextEncoder

    T5TextEncoder("in", max_length=8)(["the sea"])


@cache
def _model(family: str) -> DiffusionTransformer:
    """Return a model that a case changes in its own process only."""
    return tiny(family, **SMALL).bfloat16()


def _load(family: str) -> None:
    load_transformer(_model(family), "in")


def _add_lora() -> None:
    from cogfast.extensions.sample.lora_overlay import LoraOverlay, add_loras, open_loras

    add_loras(_model("5b"), open_loras([LoraOverlay("in", 0.5)], ema=False))


_TO = {to: ("convert", "in", "out", "--to", to) for to in ("sat", "diffusers", "peft")}
SAMPLE = ("sample", "in", "--prompt", "a prompt", "--out", "out", "--dry-run")
_LOAD_2B, _LOAD_5B, _LOAD_15 = (partial(_load, f) for f in ("2b", "5b", "1.5_5b"))
_BASE, _ONE_STEP = ("--base", "in/base.yaml"), "model.sampler_config.params.num_steps=1"
_RUN_READS = (
    ("train", *_BASE, "args.resume=in/run", "args.run_folder=null", "args.train_iters=5"),
    ("convert", "in/run", "out", "--to", "diffusers"),
    ("sample", "in/run", "--prompt", "a", "--out", "out", _ONE_STEP),
    ("train", *_BASE, "args.run_folder=out", "args.train_iters=1"),
    ("cache", *_BASE, "args.latent_cache=out"),
    ("report", "in/run"),
)
_diffusers = partial(_from_sat, family="5b", to="diffusers")
_peft = partial(_from_sat, family="5b", to="peft", lora_rank=4)
_sat_lora = lambda folder: save_as_sat(tiny("5b", lora_rank=4, **SMALL), folder)
WEIGHTS = {
    "sat": Format(_sat, (_TO["diffusers"], _TO["sat"], SAMPLE, _LOAD_2B)),
    "diffusers": Format(_diffusers, (_TO["sat"], SAMPLE, _LOAD_5B)),
    "diffusers in shards": Format(_sharded, (_TO["sat"], SAMPLE, _LOAD_15)),
    "pipeline": Format(_pipeline, (SAMPLE, _TO["sat"], _LOAD_5B)),
    "peft": Format(_peft, (_TO["peft"], _add_lora)),
    "sat lora": Format(_sat_lora, (_TO["peft"], (*_TO["diffusers"], "--merge-lora"), _add_lora)),
    "vae": Format(_vae, (_TO["sat"],)),
    "sat vae": Format(_vae_sat, (("convert", "in/3d-vae.pt", "out", "--to", "diffusers"),)),
    "t5": Format(_t5, (_encode,)),
}
FORMATS = {**WEIGHTS, "run": Format(_run, _RUN_READS, TO_RUNS)}


def load_models() -> None:
    """Make the models that reads load into."""
    for family in ("2b", "5b", "1.5_5b"):
        _model(family)
