"""One of two ranks fails: the other ranks notice, none waits forever, and work that can continue does."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from cogfast.train.trainer import Trainer
from tests.support.runs import Run
from tests.support.tiny_run import launch_ranks, run_program

STEPS = 4
ZERO_3 = "deepspeed.zero_optimization.stage=3"
# Fault and overrides of each run; the first has none. tests/extensions/sample/test_evaluation_on_ranks.py has more
# faults of evaluations.
RUNS = {
    "none": "none:",
    "loss": "loss:",
    "prompts": "prompts:",
    "condition, zero-3": "condition:deepspeed.zero_optimization.stage=3",  # it gathers weights to sample
    "write": "write:",
    "complete": "complete:",
}
MICRO = "deepspeed.train_micro_batch_size_per_gpu=2"
EVERY_RUN = pytest.mark.parametrize("name", RUNS)


@pytest.fixture(scope="module")
def tiny(shared_run: Run) -> Run:
    return shared_run.with_args(
        train_iters=STEPS,
        valid_data=[str(shared_run.data)],
        eval_interval=2,
        eval_iters=2,
        eval_num_samples=3,
        eval_sampling_steps=2,
        save_interval=2,
    )


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs") / "log"


@pytest.fixture(scope="module")
def runs(log: Path, tiny: Run) -> dict[str, Run]:
    """Start all runs except those that end early in one launch, and one in this process to compare."""
    arguments = [str(tiny.base), str(log.parent), *(f"{run},{MICRO}" for run in RUNS.values())]
    log.write_text(launch_ranks(2, "tests/support/interrupted/faults.py", *arguments))
    two = {name: tiny.into(log.parent / str(number)) for number, name in enumerate(RUNS)}
    return {"one": tiny.into(log.parent / "one").train(), **two}


def held_out(run: Run) -> list[dict]:
    return [line for line in run.lines if "valid_loss" in line]


@pytest.mark.slow
@EVERY_RUN
def test_training_continues(runs: dict[str, Run], name: str) -> None:
    """Training reaches the last step after each failure, with the losses of one process."""
    found, wanted = runs[name].losses, runs["one"].losses
    assert len(found) == STEPS
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    assert runs[name].checkpoint.name == "00000004"
    steps = [p.name for p in sorted(runs[name].checkpoint.parent.glob("0*"))]
    assert steps == ["00000004"] if name in ("write", "complete") else ["00000002", "00000004"]


@pytest.mark.slow
@EVERY_RUN
def test_evaluation_is_whole_or_left_out(runs: dict[str, Run], name: str) -> None:
    """Two ranks compute one rank's held-out loss; if it fails the samples remain, and vice versa."""
    found, wanted = held_out(runs[name]), held_out(runs["one"])
    if name == "loss":
        assert found == []
    else:
        assert [line["step"] for line in found] == [2, 4]
        for line, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(line, expected, rtol=1e-5, atol=0)
    sheet = runs[name].path / "samples" / "step-00000002" / "contact_sheet.png"
    videos = {path.name for path in sheet.parent.glob("*.mp4")}
    if name not in ("prompts", "condition, zero-3"):
        one = runs["one"].path / "samples" / "step-00000002"
        assert videos == {path.name for path in one.glob("*.mp4")}
        assert len(videos) == 3
        assert sheet.is_file()
    else:
        assert videos == set()


@pytest.mark.slow
def test_the_log_says_what_failed(runs: dict[str, Run], log: Path) -> None:
    log = log.read_text()
    for what in ("loss", "prompts", "condition"):
        assert f"OutOfMemoryError: no memory for {what}" in log
    assert "checkpoint of step 2 failed: rank 1 failed: OSError" in log
    assert re.search(r"checkpoint of step 2 failed: \[Errno 28\] No space left on device", log)


@pytest.mark.slow
def test_a_failing_ranks_error_is_seen(tmp_path: Path, tiny: Run) -> None:
    """The error is printed last, also if the other rank reports a lost connection."""
    arguments = [str(tiny.base), str(tmp_path), f"first batch:,{MICRO}"]
    done = run_program(["tests/support/interrupted/faults.py", *arguments], 2)
    assert done.returncode != 0
    last = done.stdout.rpartition("Root Cause")[2]
    assert "ZeroDivisionError: first batch" in last, done.stdout
    assert "rank      : 1" in last


@pytest.mark.slow
def test_a_run_that_cannot_continue_ends_in_one_line(run: Run) -> None:
    """Two ranks agree that nothing is finite: one line from cogfast, no traceback, no warnings."""
    all_bad = {"target": "tests.train.test_trainer.EncodedSamples", "params": {"bad_sample": 0}}
    all_bad["params"]["num_bad"] = 8
    bad = run.by(Trainer, "tests").with_args(dataset=all_bad, train_iters=21)
    done = run_program(["-m", "cogfast", *bad.command(MICRO)], 2)
    assert done.returncode != 0
    ours = [line for line in done.stdout.splitlines() if line.startswith("cogfast: ")]
    # Rank 1 keeps quiet for some seconds, which a busy machine may need to end rank 0.
    assert len({line.replace("rank 1: ", "") for line in ours}) == 1, done.stdout
    assert "20 steps in a row had non-finite gradients" in ours[0]
    assert ours[0].removeprefix("cogfast: ") in done.stdout.rpartition("Root Cause")[2]
    assert "cogfast/train/trainer.py" not in done.stdout
    assert "FutureWarning" not in done.stdout


@pytest.mark.slow
def test_damage_that_one_of_two_ranks_reads_ends_both_in_one_line(
    tmp_path: Path, tiny: Run, runs: dict[str, Run]
) -> None:
    """Rank 1 reads its own file, and rank 0, which reads another, does not wait for it for ever."""
    resumed = Path(shutil.copytree(runs["none"].path, tmp_path / "run"))
    old, new = (resumed / "checkpoints" / f"{step:08d}" for step in (2, 4))
    content = bytearray((new / "rank-00001.safetensors").read_bytes())
    content[-100] ^= 4
    (new / "rank-00001.safetensors").write_bytes(content)
    command = tiny.command(MICRO, "--resume", str(resumed))
    done = run_program(["-m", "cogfast", *command], 2, timeout=120)
    assert done.returncode != 0
    ours = [line for line in done.stdout.splitlines() if line.startswith("cogfast: ")]
    assert len({line.replace("rank 1: ", "") for line in ours}) == 1, done.stdout
    assert f"{new}: cannot be read: rank-00001.safetensors is damaged" in ours[0]
    assert ours[0].endswith(
        f"the last good one is that of step 2: give {old} (training: with --resume)"
    )
    assert "cogfast/train" not in done.stdout  # no traceback
