"""The memory keys of small cards on ranks that share a model: a run equals that of one process with the
same keys, and resumes from another layout. Keys that only move memory do not change a bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cogfast.model.transformer import build_transformer
from tests.model.test_lora import save_as_sat
from tests.support.layouts import assert_equal_training, launch, numbers, weights
from tests.support.runs import Run
from tests.support.tiny_run import assert_same, run_folder
from tests.support.tiny_transformers import randomize

STEPS_OF_A_LAUNCH = 20  # gloo groups of ended runs keep 32 files each, and select() takes 1,024
STEPS, SAVED_AT, NUM_LAYERS = 4, 2, 4
DEEP = {"num_layers": NUM_LAYERS, "hidden_size": 64, "num_attention_heads": 4}
CLIP = "deepspeed.gradient_clipping=0.28"  # below the norm of the steps
POLICY = "args.activation_checkpointing"
STAGE = "deepspeed.zero_optimization.stage"
WHOLE = "deepspeed.zero_optimization.stage3_param_persistence_threshold=0"
MICRO = "deepspeed.train_micro_batch_size_per_gpu"
BF16 = "deepspeed.bf16.enabled=true"  # only compared with the same layout

CONTEXT, TENSOR = "args.context_parallel_size=2", "args.model_parallel_size=2"
KINDS: dict[str, tuple[int, tuple[str, ...]]] = {  # ranks and words
    "one process": (1, ()),
    "dp 2": (2, (f"{MICRO}=2",)),
    "cp 2": (2, (CONTEXT,)),
    "tp 2": (2, (TENSOR,)),
    "tp 2, rows split": (2, (TENSOR, "args.sequence_parallel=true")),
    "dp 2 x tp 2": (4, (f"{MICRO}=2", TENSOR)),
    "cp 2 x tp 2": (4, (CONTEXT, TENSOR)),
}

INT8, FP8 = "args.quantize_base=int8", "args.quantize_base=fp8"
BLOCKS = "args.offload_blocks=3"
ACTIVATIONS = "args.offload_activations=true"
COPIES = (ACTIVATIONS, f"{POLICY}=full")
EIGHT, HOST = "args.optimizer_moments=8bit", "args.ema_device=cpu"


@dataclass(frozen=True)
class Keys:
    """Keys of a run that trains adapters or all weights. same_bits: other keys with these results."""

    words: tuple[str, ...]
    is_lora: bool = False
    same_bits: str | None = None


KEYS = {
    "lora": Keys((), is_lora=True),
    "int8": Keys((INT8,), is_lora=True),
    "int8, blocks, activations": Keys((INT8, BLOCKS, *COPIES), True, same_bits="int8"),
    "fp8": Keys((FP8,), is_lora=True),
    "fp8, blocks, activations": Keys((FP8, BLOCKS, *COPIES), True, same_bits="fp8"),
    "blocks": Keys((BLOCKS,), True, same_bits="lora"),
    "all": Keys(()),
    "encoders, ema, activations": Keys(
        ("args.offload_encoders=true", HOST, ACTIVATIONS, f"{POLICY}=attention_kept"),
        same_bits="all",
    ),
    "8bit": Keys((EIGHT,)),
    "8bit, ema, activations": Keys((EIGHT, HOST, *COPIES), same_bits="8bit"),
    "lora, 8bit, ema": Keys((EIGHT, HOST), is_lora=True),
}
# 8-bit moments are rounded in blocks of a rank's part, and fp8 products round the rows that a rank has.
ROUNDED = [name for name, keys in KEYS.items() if {EIGHT, FP8} & {*keys.words}]


@dataclass(frozen=True)
class Keyed:
    """Keys at a layout. resumed_from: one with whose checkpoint it begins."""

    keys: str
    kind: str
    stage: int = 2
    is_bf16: bool = False
    resumed_from: Keyed | None = None

    @property
    def words(self) -> list[str]:
        more = [f"{STAGE}={self.stage}", *[WHOLE] * (self.stage == 3), *[BF16] * self.is_bf16]
        return [*KINDS[self.kind][1], *KEYS[self.keys].words, *more, CLIP]

    def __str__(self) -> str:
        text = f"{self.keys}: {self.kind}, zero-{self.stage}{', bf16' * self.is_bf16}"
        return (
            text if self.resumed_from is None else f"{text}, resumed from {self.resumed_from.kind}"
        )


QUICK = [
    Keyed("int8, blocks, activations", "cp 2", stage=3),
    Keyed("8bit, ema, activations", "tp 2"),
    Keyed("8bit, ema, activations", "cp 2", resumed_from=Keyed("8bit, ema, activations", "tp 2")),
]
# Each pair of keys and kind, of keys and stage, of kind and stage, and of each of them and dtype; keys
# without those that move memory run beside them.
SOAKED = [
    Keyed(keys, kind, (k + n) % 3 + 1, bool(KEYS[keys].same_bits) and (k // 2 + n) % 3 == 0)
    for k, keys in enumerate(name for name in KEYS if KEYS[name].same_bits or "," in name)
    for n, kind in enumerate(KINDS)
    if kind != "one process"
]
SOAKED += [
    Keyed(keys, "one process", resumed_from=Keyed(keys, kind, stage=3))
    for keys, kind in (("int8, blocks, activations", "tp 2"), ("lora, 8bit, ema", "dp 2 x tp 2"))
]
RUNS = [*QUICK, *(run for run in SOAKED if run not in QUICK)]


def marked(runs: list[Keyed]) -> list:
    marks = lambda run: [] if run in QUICK else pytest.mark.soak
    return [pytest.param(run, marks=marks(run), id=str(run)) for run in runs]


def plain_run(run: Keyed) -> Keyed:
    """Return the run without the keys that move memory."""
    return replace(run, keys=KEYS[run.keys].same_bits or "", resumed_from=None)


@pytest.fixture(scope="module")
def plain(shared_run: Run) -> Run:
    """A run of all weights of a deep model."""
    run = shared_run.with_words(*[f"model.network_config.params.{k}={v}" for k, v in DEEP.items()])
    save_as_sat(randomize(build_transformer(run.config().model), seed=1), run.folder / "base")
    run = run.with_args(train_iters=STEPS, save_interval=SAVED_AT, keep_last=0)
    return run.with_args(replica_check_interval=1, load=str(run.folder / "base"))


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, plain: Run) -> dict[Keyed, Path]:
    """Return the folders of all runs that the selected tests need."""
    mine = [item for item in request.session.items if item.module is request.module]
    wanted = {item.callspec.params["run"] for item in mine if "run" in item.callspec.params}
    for run in list(wanted):
        wanted |= {plain_run(run)} if KEYS[run.keys].same_bits and not run.resumed_from else set()
        if not run.is_bf16:
            wanted |= {Keyed(run.keys, "one process")}
            if run.keys in ROUNDED:
                wanted |= {Keyed("lora" if KEYS[run.keys].is_lora else "all", "one process")}
        if run.resumed_from:
            wanted.add(run.resumed_from)
    folder, found = plain.folder, {}
    bases = {True: replace(plain, folder=folder / "lora").with_lora(4), False: plain}
    # Last, since DeepSpeed's stage 3 replaces F.linear in its process, whose results round differently.
    order = sorted(wanted, key=lambda run: (run.stage == 3, str(run)))
    for is_resumed in (False, True):
        for ranks in (1, 2, 4):
            steps = []
            for run in order:
                if KINDS[run.kind][0] != ranks or (run.resumed_from is not None) != is_resumed:
                    continue
                save, words = folder / str(run), run.words
                found[run] = save
                if run.resumed_from:
                    source = str(folder / str(run.resumed_from))
                    steps.append(["copy", source, f"{SAVED_AT:08d}", str(save / "run")])
                    words.append(f"args.resume={save / 'run'}")
                steps.append(bases[KEYS[run.keys].is_lora].into(save).with_words(*words))
            for at in range(0, len(steps), STEPS_OF_A_LAUNCH):
                launch(ranks, steps[at : at + STEPS_OF_A_LAUNCH])
    return {run: run_folder(save) for run, save in found.items()}


EXACT = [run for run in RUNS if run.keys not in ROUNDED and not run.is_bf16]


@pytest.mark.slow
@pytest.mark.parametrize("run", marked(EXACT))
def test_a_run_equals_one_process(runs: dict[Keyed, Path], run: Keyed) -> None:
    one, first = runs[Keyed(run.keys, "one process")], SAVED_AT if run.resumed_from else 0
    assert len(numbers(one, "loss")) == STEPS
    assert_equal_training(runs[run], one, first)


MOVED = [run for run in RUNS if KEYS[run.keys].same_bits and not run.resumed_from]


@pytest.mark.slow
@pytest.mark.parametrize("run", marked(MOVED))
def test_moved_memory_changes_no_bit(runs: dict[Keyed, Path], run: Keyed) -> None:
    plain, other = runs[plain_run(run)], runs[run]
    for key in ("loss", "grad_norm"):
        assert torch.equal(numbers(plain, key), numbers(other, key))
    for ema in (False, True):
        assert_same(weights(other, ema), weights(plain, ema))


def off(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.mark.slow
@pytest.mark.parametrize(
    "run", marked([run for run in RUNS if run.keys in ROUNDED and not run.is_bf16])
)
def test_what_ranks_round_is_as_good_as_in_one_process(runs: dict[Keyed, Path], run: Keyed) -> None:
    """Ranks round other blocks or rows: they are as far from the plain run as one process is.

    Replicated parameters stay equal (args.replica_check_interval=1).
    """
    exact = runs[Keyed("lora" if KEYS[run.keys].is_lora else "all", "one process")]
    one, other = runs[Keyed(run.keys, "one process")], runs[run]
    first = SAVED_AT if run.resumed_from else 0
    for key in ("loss", "grad_norm"):
        wanted = numbers(exact, key)[first:]
        least = 1e-4  # five numbers, which may be close by chance
        limit = 3 * off(numbers(one, key)[first:], wanted) + least
        assert off(numbers(other, key), wanted) <= limit, key
    for ema in (False, True):
        whole, rounded, found = (
            torch.cat([value.flatten() for _, value in sorted(weights(folder, ema).items())])
            for folder in (exact, one, other)
        )
        assert 0 < off(found, whole) <= 1.5 * off(rounded, whole)
