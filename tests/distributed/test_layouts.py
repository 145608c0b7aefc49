"""A run at any parallel layout equals the run of one process in losses, weights, EMA, held-out losses
and samples, and it can be resumed at any other layout."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor

from cogfast.config import load_config
from cogfast.train.trainer import Trainer
from tests.support.layouts import assert_equal_training, launch, numbers
from tests.support.tiny_run import (
    run_folder,
    write_clips,
    write_config,
)

STEPS, SAVED_AT = 4, 2
MICRO = "deepspeed.train_micro_batch_size_per_gpu"
ACCUMULATION = "deepspeed.gradient_accumulation_steps"
CLIP = "deepspeed.gradient_clipping=0.385"  # below the norm of some steps, above that of others
STAGE = "deepspeed.zero_optimization.stage"
TENSOR = "args.model_parallel_size"
CONTEXT = "args.context_parallel_size"
# Families and their LoRA rank. All have four heads, so that four ranks can share a model.
MODELS: dict[str, tuple[str, int | None]] = {
    "5b": ("5b", None),
    "2b": ("2b", None),
    "1.5_5b_i2v": ("1.5_5b_i2v", None),
    "lora": ("5b", 4),
}


@dataclass(frozen=True)
class Layout:
    """A run on `ranks` processes; resumed_from: the layout whose checkpoint it resumes from.

    A step has 4 samples.
    """

    ranks: int
    tensor: int = 1
    context: int = 1
    model: str = "5b"
    accumulation: int = 1
    stage: int = 2
    policy: str = "none"
    extra: tuple[str, ...] = ()
    resumed_from: str | None = None

    @property
    def arguments(self) -> list[str]:
        micro = 4 * self.tensor * self.context // (self.ranks * self.accumulation)
        return [
            f"{MICRO}={micro}",
            f"{ACCUMULATION}={self.accumulation}",
            f"{STAGE}={self.stage}",
            CLIP,
            f"{TENSOR}={self.tensor}",
            f"{CONTEXT}={self.context}",
            f"args.activation_checkpointing={self.policy}",
            f"args.eval_iters={self.accumulation}",  # as many held-out samples
            *self.extra,
        ]


ZERO = "deepspeed.zero_optimization"
WHOLE = f"{ZERO}.stage3_param_persistence_threshold=0"
ROWS = "args.sequence_parallel=true"
KINDS = {  # ranks, tensor- and context-parallel size
    "dp 2": (2, 1, 1),
    "tp 2": (2, 2, 1),
    "cp 2": (2, 1, 2),
    "dp 2 x tp 2": (4, 2, 1),
    "dp 2 x cp 2": (4, 1, 2),
    "cp 2 x tp 2": (4, 2, 2),
}
POLICIES = ("none", "pointwise", "attention_kept", "full")
# Products with 2 in the field of four elements, whose sums are XOR.
TWICE = (0, 2, 3, 1)


def pairwise() -> dict[str, Layout]:
    """Return layouts in which each pair of kind, model, stage and policy occurs (orthogonal Latin squares).

    The tensor-parallel ones split rows or do not, and some of every kind accumulate two micro-batches.
    """
    found = {}
    for k, (kind, (ranks, tensor, context)) in enumerate(KINDS.items()):
        for m, model in enumerate(MODELS):
            stage, policy = (m ^ k % 4) ^ 2, POLICIES[m ^ TWICE[k % 4]]
            extra = [ROWS] * (tensor == 2 and (k // 2 + m) % 2) + [WHOLE] * (stage == 3 and k > 0)
            if stage == 2 and k % 2:
                extra.append(f"{ZERO}.use_multi_rank_bucket_allreduce=false")
            if stage == 1 and k % 2:
                extra.append(f"{ZERO}.overlap_comm=false")
            accumulation = 1 + m % 2 if ranks // (tensor * context) <= 2 else 1
            layout = Layout(ranks, tensor, context, model, accumulation, stage, policy, (*extra,))
            found[f"{kind}, {model}"] = layout
    return found


LAYOUTS = pairwise()
LAYOUTS |= {
    "resumed at dp 4": Layout(4, resumed_from="dp 2 x tp 2, 5b"),
    "resumed at tp 2": Layout(2, 2, model="2b", resumed_from="dp 2 x cp 2, 2b"),
    "resumed at dp 1": Layout(1, model="1.5_5b_i2v", resumed_from="dp 2 x tp 2, 1.5_5b_i2v"),
    "lora resumed at dp 1": Layout(1, model="lora", resumed_from="dp 2 x tp 2, lora"),
    "dp 1 resumed at dp 2 x tp 2": Layout(4, 2, resumed_from="one process, 5b"),
    "resumed at cp 2 x tp 2": Layout(4, 2, 2, resumed_from="dp 2 x tp 2, 5b"),
}


def test_each_pair_of_values_is_in_a_layout() -> None:
    rows = [
        (name.partition(",")[0], of.model, of.stage, of.policy) for name, of in pairwise().items()
    ]
    for one, other in itertools.combinations(range(4), 2):
        pairs = {(row[one], row[other]) for row in rows}
        assert len(pairs) == len({row[one] for row in rows}) * len({row[other] for row in rows})


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Return the run folders by layout, of tested layouts and their sources, and of one process by
    model."""
    folder = tmp_path_factory.mktemp("layouts")
    mine = (item for item in request.session.items if item.module is request.module)
    wanted = {item.callspec.params["layout"] for item in mine if "runs" in item.fixturenames}
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
            replica_check_interval=2,
            keep_last=0,
            load=str(found["one process, 5b"]) if lora_rank else None,
        )
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
            launch(ranks, steps)
    return found | {name: run_folder(folder / name) for name in wanted & LAYOUTS.keys()}


def one_process(runs: dict[str, Path], layout: str) -> Path:
    return runs[f"one process, {LAYOUTS[layout].model}"]


QUICK = (  # the other layouts are marked soak
    "dp 2, 5b",
    "tp 2, lora",
    "cp 2, 1.5_5b_i2v",
    "dp 2 x tp 2, 1.5_5b_i2v",
    "cp 2 x tp 2, 5b",
    "resumed at dp 1",
)
EVERYWHERE = pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.soak) for name in LAYOUTS],
)


@pytest.mark.slow
@EVERYWHERE
def test_training_equals_one_process(runs: dict[str, Path], layout: str) -> None:
    """Losses, norms before clipping, weights and EMA."""
    first = SAVED_AT if LAYOUTS[layout].resumed_from else 0
    # The 2B model has no rotation: the gradient of this bias is zero but for rounding.
    free = "key_norm.bias" if LAYOUTS[layout].model == "2b" else None
    one = one_process(runs, layout)
    assert len(numbers(one, "loss")) == STEPS
    assert_equal_training(runs[layout], one, first, free)


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
