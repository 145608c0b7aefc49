"""A run at any parallel layout equals the run of one process in losses, weights, EMA, held-out losses
and samples, and it can be resumed at any other layout."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor

from cogfast.config import load_config
from cogfast.model.weights.formats.checkpoint_manifest import newest_checkpoint
from cogfast.train.trainer import Trainer
from tests.support.layouts import train
from tests.support.tiny_run import (
    launch_ranks,
    losses,
    read_run_weights,
    run_folder,
    write_clips,
    write_config,
)

STEPS, SAVED_AT = 9, 6
MICRO = "deepspeed.train_micro_batch_size_per_gpu"
ACCUMULATION = "deepspeed.gradient_accumulation_steps"
CLIP = "deepspeed.gradient_clipping=0.28"  # below the norm of some steps, above that of others
STAGE = "deepspeed.zero_optimization.stage"
TENSOR = "args.model_parallel_size"
CONTEXT = "args.context_parallel_size"
FAMILIES: dict[str, tuple[str, int | None]] = {  # families and their LoRA rank
    "5b": ("5b", None),
    "2b": ("2b", None),
    "5b_i2v": ("5b_i2v", None),
    "1.5_5b": ("1.5_5b", None),
    "1.5_5b_i2v": ("1.5_5b_i2v", None),
    "lora": ("5b", 4),
}
MODELS = {**FAMILIES, "wide": ("5b", None)}  # wide: four heads instead of two


@dataclass(frozen=True)
class Layout:
    """A run on `ranks` processes; resumed_from: the layout whose checkpoint it resumes from."""

    ranks: int
    tensor: int = 1
    model: str = "5b"
    micro: int | None = None  # 4 samples per step, unless set otherwise
    accumulation: int = 1
    stage: int = 2
    extra: tuple[str, ...] = ()
    resumed_from: str | None = None
    context: int = 1

    @property
    def arguments(self) -> list[str]:
        micro = self.micro or 4 * self.tensor * self.context // (self.ranks * self.accumulation)
        return [
            f"{MICRO}={micro}",
            f"{ACCUMULATION}={self.accumulation}",
            f"{STAGE}={self.stage}",
            # as many held-out samples
            CLIP,
            f"{TENSOR}={self.tensor}",
            f"{CONTEXT}={self.context}",
            f"args.eval_iters={self.accumulation}",
            *self.extra,
        ]


WHOLE = "deepspeed.zero_optimization.stage3_param_persistence_threshold=0"
POLICY = "args.activation_checkpointing"
ROWS = "args.sequence_parallel=true"
LAYOUTS = {
    "dp 2": Layout(2),
    "dp 2, accumulation": Layout(2, accumulation=2),
    "dp 2, zero-0": Layout(2, stage=0),
    "dp 2, zero-1": Layout(2, stage=1),
    "dp 2, zero-3": Layout(2, stage=3),
    "dp 2, zero-3, small parameters sharded": Layout(2, stage=3, extra=(WHOLE,)),
    "dp 2, zero-3, recomputed": Layout(2, stage=3, extra=(WHOLE, f"{POLICY}=pointwise")),
    **{f"tp 2, {model}": Layout(2, 2, model) for model in FAMILIES},
    "tp 2, accumulation": Layout(2, 2, accumulation=2),
    "tp 2, zero-3": Layout(2, 2, stage=3, extra=(WHOLE,)),
    "tp 2, rows split": Layout(2, 2, extra=(ROWS,)),
    "tp 2, recomputed": Layout(2, 2, extra=(f"{POLICY}=full",)),
    **{f"dp 2 x tp 2, {model}": Layout(4, 2, model) for model in FAMILIES},
    "dp 2 x tp 2, accumulation": Layout(4, 2, accumulation=2),
    "dp 2 x tp 2, zero-0": Layout(4, 2, stage=0),
    "dp 2 x tp 2, zero-1": Layout(4, 2, stage=1),
    "dp 2 x tp 2, zero-3": Layout(4, 2, stage=3, extra=(WHOLE,)),
    "dp 2 x tp 2, rows split": Layout(4, 2, extra=(ROWS,)),
    "dp 2 x tp 2, rows split, lora": Layout(4, 2, "lora", extra=(ROWS,)),
    **{f"cp 2, {model}": Layout(2, context=2, model=model) for model in FAMILIES},
    "cp 2, accumulation": Layout(2, context=2, accumulation=2),
    "cp 2, zero-3": Layout(2, context=2, stage=3, extra=(WHOLE,)),
    "cp 2, recomputed": Layout(2, context=2, extra=(f"{POLICY}=pointwise",)),
    "cp 4": Layout(4, context=4, model="wide"),
    "dp 2 x cp 2": Layout(4, context=2),
    "dp 2 x cp 2, zero-1": Layout(4, context=2, stage=1),
    "cp 2 x tp 2": Layout(4, 2, "wide", context=2),
    "cp 2 x tp 2, rows split": Layout(4, 2, "wide", context=2, extra=(ROWS,)),
    # from a checkpoint of dp 2 x tp 2
    "resumed at dp 1": Layout(1, resumed_from="dp 2 x tp 2, 5b"),
    "resumed at dp 4": Layout(4, resumed_from="dp 2 x tp 2, 5b"),
    "resumed at tp 2": Layout(2, 2, resumed_from="dp 2 x tp 2, 5b"),
    "resumed at dp 2 x tp 2": Layout(4, 2, resumed_from="dp 2 x tp 2, 5b"),
    "resumed at dp 4, zero-3": Layout(4, stage=3, resumed_from="dp 2 x tp 2, 5b"),
    "lora resumed at dp 1": Layout(1, model="lora", resumed_from="dp 2 x tp 2, lora"),
    "dp 1 resumed at dp 2 x tp 2": Layout(4, 2, resumed_from="one process, 5b"),
    "resumed at dp 2 x cp 2": Layout(4, context=2, resumed_from="dp 2 x tp 2, 5b"),
    "cp 2 x tp 2 resumed at dp 1": Layout(1, model="wide", resumed_from="cp 2 x tp 2"),
    "zero-3 resumed at tp 2": Layout(2, 2, resumed_from="dp 2 x tp 2, zero-3"),
}
NUM_RANDOM = 16


def random_layout(seed: int) -> Layout:
    """Draw what no list above combines, such as ZeRO-3 with each policy of checkpointing."""
    draw = random.Random(seed)
    ranks, model = draw.choice([1, 2, 2, 4]), draw.choice(list(MODELS))
    heads = 4 if model == "wide" else 2
    sizes = [
        (tensor, context)
        for tensor in (1, 2, 4)
        for context in (1, 2, 4)
        if ranks % (tensor * context) == 0 and heads % (tensor * context) == 0
    ]
    tensor, context = draw.choice(sizes)
    stage = draw.choice([0, 1, 2, 3, 3])
    policy = draw.choice(["none", "pointwise", "attention_kept", "full", "auto"])
    extra = [f"{POLICY}={policy}"]
    zero = "deepspeed.zero_optimization"
    options = {
        ROWS: tensor > 1,
        WHOLE: stage == 3,
        "args.kernels=torch": True,
        f"{zero}.use_multi_rank_bucket_allreduce=false": stage == 2,
        f"{zero}.overlap_comm=false": stage in (1, 2),
    }
    extra += [word for word, is_possible in options.items() if is_possible and draw.random() < 0.4]
    accumulation = 2 if ranks // (tensor * context) <= 2 and draw.random() < 0.5 else 1
    return Layout(ranks, tensor, model, None, accumulation, stage, tuple(extra), context=context)


LAYOUTS |= {f"random {seed}": random_layout(seed) for seed in range(NUM_RANDOM)}


def launch(ranks: int, runs: list[list[str]]) -> None:
    """Train the layouts one after the other on `processes` processes."""
    launch_ranks(ranks, "tests/support/layouts.py", json.dumps(runs))


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Return the run folders by layout, of tested layouts and their sources, and of one process by
    model."""
    folder = tmp_path_factory.mktemp("layouts")
    mine = (item for item in request.session.items if item.module is request.module)
    wanted = {item.callspec.params["layout"] for item in mine}
    wanted |= {LAYOUTS[name].resumed_from for name in wanted}
    data = write_clips(folder / "data")
    found: dict[str, Path] = {}
    bases: dict[str, Path] = {}
    models = {"5b", *(LAYOUTS[name].model for name in wanted & LAYOUTS.keys())}
    for model, (family, lora_rank) in MODELS.items():
        if model not in models:
            continue
        bases[model] = write_config(
            folder / f"{model}.yaml",
            data,
            family,
            lora_rank,
            train_iters=STEPS,
            num_workers=0,
            save_interval=SAVED_AT,
            valid_data=[str(data)],
            eval_interval=STEPS,
            eval_num_samples=3,
            only_log_video_latents=True,
            replica_check_interval=4,
            keep_last=0,
            load=str(found["one process, 5b"]) if lora_rank else None,
        )
        if model == "wide":
            config = OmegaConf.load(bases[model])
            config.model.network_config.params |= {"hidden_size": 64, "num_attention_heads": 4}
            OmegaConf.save(config, bases[model])
        save = folder / f"one process, {model}"
        Trainer(load_config([bases[model]], [f"args.save={save}", CLIP])).train()
        found[save.name] = run_folder(save)
    for ranks in (4, 2, 1):  # the runs that others resume come first
        steps = []
        for name, layout in LAYOUTS.items():
            if name not in wanted or layout.ranks != ranks:
                continue
            save, resume = folder / name, []
            if layout.resumed_from:
                source, run = str(folder / layout.resumed_from), str(save / "run")
                steps.append(["copy", source, f"{SAVED_AT:08d}", run])
                resume = [f"args.resume={run}"]
            base = str(bases[layout.model])
            steps.append([base, f"args.save={save}", *resume, *layout.arguments])
        if steps:
            launch(ranks, steps) if ranks > 1 else train(steps)
    return found | {name: run_folder(folder / name) for name in wanted & LAYOUTS.keys()}


def one_process(runs: dict[str, Path], layout: str) -> Path:
    return runs[f"one process, {LAYOUTS[layout].model}"]


QUICK = (  # the other layouts are marked soak
    "dp 2",
    "dp 2, zero-3, recomputed",
    "tp 2, lora",
    "dp 2 x tp 2, 5b",
    "dp 2 x tp 2, zero-3",
    "cp 2, 1.5_5b",
    "dp 2 x cp 2",
    "cp 2 x tp 2",
    "resumed at dp 1",
    "resumed at dp 4",
    "dp 1 resumed at dp 2 x tp 2",
)
EVERYWHERE = pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.soak) for name in LAYOUTS],
)


@pytest.mark.slow
@EVERYWHERE
def test_losses_equal_one_process(runs: dict[str, Path], layout: str) -> None:
    one, other = losses(one_process(runs, layout)), losses(runs[layout])
    assert len(one) == STEPS
    assert one[-1] != one[0]
    if LAYOUTS[layout].resumed_from:
        one = one[SAVED_AT:]
    torch.testing.assert_close(torch.tensor(other), torch.tensor(one), rtol=1e-5, atol=0)


@pytest.mark.slow
@EVERYWHERE
def test_norms_before_clipping_equal_one_process(runs: dict[str, Path], layout: str) -> None:
    one, other = (
        [line["grad_norm"] for line in lines(run) if "grad_norm" in line]
        for run in (one_process(runs, layout), runs[layout])
    )
    if LAYOUTS[layout].resumed_from:
        one = one[SAVED_AT:]
    torch.testing.assert_close(torch.tensor(other), torch.tensor(one), rtol=1e-4, atol=0)


@pytest.mark.slow
@EVERYWHERE
@pytest.mark.parametrize("ema", [False, True], ids=["weights", "ema"])
def test_weights_equal_one_process(runs: dict[str, Path], layout: str, ema: bool) -> None:
    one = read_run_weights(newest_checkpoint(one_process(runs, layout)), ema)
    other = read_run_weights(newest_checkpoint(runs[layout]), ema)
    assert one.keys() == other.keys()
    for name, value in one.items():
        if LAYOUTS[layout].model == "2b" and name.endswith("key_norm.bias"):
            continue  # without rotation its gradient is zero but for rounding
        # Adam turns the rounding of a gradient near zero into a step of its own.
        assert (other[name] - value).norm() <= 1e-4 * value.norm().clamp(min=1e-2), name


def lines(run: Path) -> list[dict]:
    return [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]


def held_out(run: Path) -> list[float]:
    (line,) = [line for line in lines(run) if "valid_loss" in line]
    return [value for key, value in sorted(line.items()) if key.startswith("valid_loss")]


def samples(run: Path) -> Tensor:
    folder = run / "samples" / f"step-{STEPS:08d}"
    names = json.loads((folder / "prompts.json").read_text())
    assert len(names) == 3
    return torch.stack([load_file(folder / name)["latents"] for name in sorted(names)])


@pytest.mark.slow
@EVERYWHERE
def test_evaluation_equals_one_process(runs: dict[str, Path], layout: str) -> None:
    one, other = one_process(runs, layout), runs[layout]
    torch.testing.assert_close(
        torch.tensor(held_out(other)), torch.tensor(held_out(one)), rtol=1e-5, atol=0
    )
    expected, got = samples(one), samples(other)
    assert (got - expected).norm() <= 1e-4 * expected.norm()
