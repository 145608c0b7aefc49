"""A stop or an error planted before collectives of a run, on each rank: no case hangs."""

import os
import random
import shutil
from pathlib import Path

import pytest

from tests.support.ranks.planted import calls_of, plants_of, run_cases
from tests.support.ranks.planted_ranks import Case
from tests.support.runs import Run
from tests.support.tiny_run import CHANNELS, write_clips_with_vae

# Cases of each layout and command, drawn from the grid of some 2,500. COGFAST_PLANTED_FAULTS=100000 runs
# them all, which takes hours.
NUM_DRAWN = int(os.environ.get("COGFAST_PLANTED_FAULTS", "14"))
TENSOR = "args.model_parallel_size=2"
LAYOUTS = {
    "dp 2": (2, []),
    "tp 2": (2, [TENSOR]),
    "cp 2": (2, ["args.context_parallel_size=2"]),
    "dp 2, zero-3": (2, ["deepspeed.zero_optimization.stage=3"]),
    "dp 2 x tp 2": (4, [TENSOR]),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps, with an evaluation before the first and after the last, and a save after each."""
    folder = tmp_path_factory.mktemp("planted")
    data = write_clips_with_vae(folder / "data", 4, CHANNELS)
    return (
        Run(data, folder)
        .with_vae()
        .with_args(
            train_iters=2,
            valid_data=[str(data)],
            eval_at_start=True,
            eval_interval=2,
            eval_iters=2,
            eval_batch_size=1,
            eval_num_samples=2,
            eval_sampling_steps=1,
            save_interval=1,
        )
    )


@pytest.mark.soak
@pytest.mark.parametrize(
    ("layout", "command"),
    # Each rank of `cogfast cache` encodes clips of its own, whatever the model's layout.
    [*((layout, "train") for layout in LAYOUTS), ("dp 2", "cache")],
)
def test_no_planted_fault_hangs(layout: str, command: str, run: Run, tmp_path: Path) -> None:
    processes, extra = LAYOUTS[layout]
    micro = "deepspeed.train_micro_batch_size_per_gpu=1"

    def words(name: str) -> list[str]:
        key = "args.save" if command == "train" else "args.latent_cache"
        return run.command(micro, f"{key}={tmp_path / name}", *extra, name=command)

    # The first run of all writes the index of headers, in more calls than those that read it.
    calls_of(words("first"), tmp_path / "calls", processes)
    plants = list(plants_of(calls_of(words("clean"), tmp_path / "calls", processes)).items())
    drawn = random.Random(f"{layout} {command}").sample(plants, min(NUM_DRAWN, len(plants)))
    for start in range(0, len(drawn), 20):
        some = drawn[start : start + 20]
        cases = [Case(words(str(start + i)), "", plant) for i, (plant, _) in enumerate(some)]
        for i, outcome in enumerate(run_cases(cases, processes)):
            plant, place = some[i]
            save, what = tmp_path / str(start + i), f"{plant}, {place}\n{outcome.output}"
            assert not outcome.hangs, what
            assert f"planted on rank {plant.rank}" in outcome.output, what
            is_evaluation = place.startswith(("held-out loss", "samples"))
            if command == "train" and not place.startswith("start"):
                if plant.kind == "stop" and "before training began" not in outcome.output:
                    assert outcome.statuses == [0] * processes, what
                    assert list(save.glob("*/checkpoints/0*")), what
                elif is_evaluation and plant.thread.endswith("work"):
                    # An error of the work of an evaluation: the run continues.
                    assert outcome.statuses == [0] * processes, what
            if set(outcome.statuses) != {0} and plant.kind == "error":
                assert f"rank {plant.rank}" in outcome.output, what
            shutil.rmtree(save, ignore_errors=True)
