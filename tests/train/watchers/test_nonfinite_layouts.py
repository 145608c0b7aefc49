"""A fault on one of several ranks is named first, with its rank and place, whatever the ranks share."""

import json
from pathlib import Path

import pytest

from cogfast.data.global_order import GlobalOrder
from tests.support.runs import Run
from tests.support.tiny_run import launch_ranks, losses, write_clips
from tests.train.watchers.test_nonfinite import BATCH, NUM_SAMPLES, SEED, one_bad

WEIGHT = "blocks.3.fc1.weight"
BAD = GlobalOrder(NUM_SAMPLES, SEED, BATCH).index(0, 3)  # read by the last data rank in step 1
_MICRO = "deepspeed.train_micro_batch_size_per_gpu=2"
_HALVES = ("deepspeed.train_micro_batch_size_per_gpu=1", "args.gradient_accumulation_steps=2")
_ZERO = "deepspeed.zero_optimization"
_SHARDED = f"{_ZERO}.stage3_param_persistence_threshold=0"
LAYOUTS = {
    "zero-3": (_MICRO, f"{_ZERO}.stage=3", _SHARDED),
    "tp, rows split": ("args.model_parallel_size=2", "args.sequence_parallel=true"),
    "cp": ("args.context_parallel_size=2",),
}
CASES = (("zero-3", WEIGHT), ("tp, rows split", WEIGHT), ("cp", "sample"))
# Each run skips the bad step. In the last two, a second pass fails: in the second of two micro-batches,
# which is rank 1's bad one.
SKIPPED = {
    "zero-3": ("none", *LAYOUTS["zero-3"]),
    "zero-2": ("none", _MICRO),
    "an error": ("error", *_HALVES),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all runs."""
    folder = tmp_path_factory.mktemp("layouts")
    data = write_clips(folder / "data", num_clips=1)
    base = Run(data, folder).with_args(dataset=one_bad(-1), train_iters=1).base
    runs: dict[str, list[str]] = {}
    for layout, fault in CASES:
        given = ["none", f"data.params.bad_sample={BAD}"] if fault == "sample" else [fault]
        runs[f"{layout}-{fault}"] = [*given, "args.nonfinite=stop", *LAYOUTS[layout]]
    for name, (fault, *words) in SKIPPED.items():
        runs[name] = [fault, *words, f"data.params.bad_sample={BAD}", "args.train_iters=3"]
    layers = "model.network_config.params.num_layers=4"
    runs = {name: [fault, layers, *words] for name, (fault, *words) in runs.items()}
    script = "tests/support/ranks/nonfinite_ranks.py"
    (folder / "log").write_text(launch_ranks(2, script, str(base), str(folder), json.dumps(runs)))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "fault"), CASES)
def test_the_rank_with_the_fault_comes_first(folder: Path, layout: str, fault: str) -> None:
    error = (folder / f"{layout}-{fault}.txt").read_text()
    is_one_model = layout.startswith(("tp", "cp"))
    found = error.partition("; not finite: ")[2]
    if fault == "sample":
        # All ranks of a model have read it.
        rank, place = int(not is_one_model), "the network's input latents (1 of "
        assert f"samples: sample {BAD} at timestep " in error
    else:
        # ZeRO gathers the weight: all ranks find it at once.
        rank = int(layout.startswith("tp"))
        place = f"the output of {fault.removesuffix('.weight')}"
    assert error.startswith(f"args.nonfinite=stop: step 1, rank {rank}: samples: ")
    assert found.startswith(place)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero-3", "an error"])
def test_training_continues_on_all_ranks(folder: Path, name: str) -> None:
    """Its losses are those of ZeRO-2, also after an error of one rank in its second pass."""
    found, wanted = losses(folder / name), losses(folder / "zero-2")
    assert len(found) == 3
    # In the first step, the finite losses are those of two samples, or of three.
    assert found[1:] == pytest.approx(wanted[1:], rel=1e-5)
    if name == "an error":
        assert "step 1: it cannot be run again (OtherRankError: rank 1 failed: OutOfM" in (
            (folder / "log").read_text()
        )
