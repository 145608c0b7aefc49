"""A run at any parallel layout equals the run of one process in losses, weights, EMA, held-out losses
and samples, and it can be resumed at any other layout."""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.layouts import assert_equal_training, launch
from tests.support.runs import Run

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
    request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Run]:
    """Return the runs by layout, of tested layouts and their sources, and of one process by model."""
    folder = tmp_path_factory.mktemp("layouts")
    mine = (item for item in request.session.items if item.module is request.module)
    wanted = {item.callspec.params["layout"] for item in mine if "runs" in item.fixturenames}
    wanted |= {LAYOUTS[name].resumed_from for name in wanted}
    found: dict[str, Run] = {}
    plain: dict[str, Run] = {}
    models = {"5b", *(LAYOUTS[name].model for name in wanted & LAYOUTS.keys())}
    network = "model.network_config.params"
    for model, (family, lora_rank) in MODELS.items():
        if model not in models:
            continue
        run = (
            Run(data, folder / model)
            .of(family)
            .with_args(
                lora_rank=lora_rank,
                train_iters=STEPS,
                save_interval=SAVED_AT,
                valid_data=[str(data)],
                eval_interval=STEPS,
                eval_num_samples=3,
                only_log_video_latents=True,
                replica_check_interval=2,
                keep_last=0,
                load=str(found["one process, 5b"].path) if lora_rank else None,
            )
        )
        plain[model] = run.with_words(
            f"{network}.hidden_size=64", f"{network}.num_attention_heads=4"
        )
        name = f"one process, {model}"
        found[name] = plain[model].into(folder / name).train(CLIP)
    for ranks in (4, 2, 1):  # the runs that others resume come first
        steps = []
        for name, layout in LAYOUTS.items():
            if name not in wanted or layout.ranks != ranks:
                continue
            run = plain[layout.model].into(folder / name).with_words(*layout.arguments)
            found[name] = run
            if layout.resumed_from:
                source, copied = str(folder / layout.resumed_from), str(folder / name / "run")
                steps.append(["copy", source, f"{SAVED_AT:08d}", copied])
                run = run.with_words(f"args.resume={copied}")
            steps.append(run)
        if steps:
            launch(ranks, steps)
    return found


def one_process(runs: dict[str, Run], layout: str) -> Run:
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
def test_training_equals_one_process(runs: dict[str, Run], layout: str) -> None:
    """Losses, norms before clipping, weights and EMA."""
    first = SAVED_AT if LAYOUTS[layout].resumed_from else 0
    # The 2B model has no rotation: the gradient of this bias is zero but for rounding.
    free = "key_norm.bias" if LAYOUTS[layout].model == "2b" else None
    one = one_process(runs, layout)
    assert len(one.losses) == STEPS
    assert_equal_training(runs[layout].path, one.path, first, free)


def held_out(run: Run) -> list[float]:
    (line,) = [line for line in run.lines if "valid_loss" in line]
    return [value for key, value in sorted(line.items()) if key.startswith("valid_loss")]


def samples(run: Run) -> Tensor:
    folder = run.path / "samples" / f"step-{STEPS:08d}"
    names = json.loads((folder / "prompts.json").read_text())
    assert len(names) == 3
    return torch.stack([load_file(folder / name)["latents"] for name in sorted(names)])


@pytest.mark.slow
@EVERYWHERE
def test_evaluation_equals_one_process(runs: dict[str, Run], layout: str) -> None:
    one, other = one_process(runs, layout), runs[layout]
    torch.testing.assert_close(
        torch.tensor(held_out(other)), torch.tensor(held_out(one)), rtol=1e-5, atol=0
    )
    expected, got = samples(one), samples(other)
    assert (got - expected).norm() <= 1e-4 * expected.norm()
