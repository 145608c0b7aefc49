"""Training steps of full size on the null CUDA runtime: waits, allocations, launches, peak, streams."""

import json
from pathlib import Path

import pytest

from tests.cuda.cases import CASES, FIRST_STEADY, LOG_INTERVAL, LOG_LAUNCHES, LOGGING_WAITS, Case
from tests.cuda.null_device import start

_PLAN_TOLERANCE = 0.01
_LISTS = "multi_tensor_apply_kernel"
_SHOWN = 12  # kernels in a message


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_steps(case: Case, tmp_path: Path) -> None:
    arguments = [
        "-m",
        "tests.cuda.training_case",
        case.model,
        case.mode,
        str(tmp_path),
        *case.words,
        f"--card={case.card}",
    ]
    arguments += ["--streams"] if case.streams else []
    done = start(arguments, case.ranks)
    assert done.returncode == 0, done.stderr[-4000:]
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(case.ranks)]
    copies = case.ranks // (2 if "model_parallel_size=2" in case.more else 1)
    for rank, report in enumerate(reports):
        assert report["left"] == (16 if copies > 1 else 0)  # multiprocessors for NCCL
        assert problems_of(case, report) == [], f"rank {rank}"
    # The plan is that of the fullest rank.
    predicted, peak = reports[0]["predicted_gib"], max(report["peak_gib"] for report in reports)
    assert peak <= predicted * (1 + case.excess)
    least = predicted - max(peak * _PLAN_TOLERANCE, case.surplus)
    assert least <= peak
    if case.streams:
        uses = [report["stream_uses"] for report in reports]
        assert any(uses), "no side stream used a tensor, so that nothing was checked"


def problems_of(case: Case, report: dict) -> list[str]:
    """Return a sentence for each rule that a run breaks."""
    problems = []
    for number, step in enumerate(report["steps"], 1):
        problems += [f"step {number}: {fault}" for fault in step["faults"]]
        if not FIRST_STEADY <= number < len(report["steps"]):  # the last one ends the run
            continue
        is_logged = number == LOG_INTERVAL
        logging = LOGGING_WAITS if is_logged else ()
        for wait in sorted({*step["waits"]} - {*case.waits, *logging}):
            problems.append(f"step {number} waits for the device: {wait}")
        problems += [f"step {number}: twice {w}" for w in logging if step["waits"].count(w) > 1]
        if not step["launches"]:
            problems.append(f"step {number}: no launches, so that nothing was counted")
        # The tensors of a log line may take a page of their own.
        for what, most in (
            ("allocations", case.allocations + is_logged),
            ("pinned_allocations", 0),
        ):
            if step[what] > most:
                problems.append(f"step {number}: {step[what]} {what}")
        limit = case.launches + LOG_LAUNCHES * is_logged
        if report["has_short_lists"]:
            limit += sum(n for name, n in step["kernels"].items() if _LISTS in name)
        if step["launches"] > limit:
            most = sorted(step["kernels"].items(), key=lambda item: -item[1])[:_SHOWN]
            problems.append(f"step {number}: {step['launches']} launches > {limit}; {most}")
    return problems + report.get("stream_problems", [])


def test_nsys_finds_the_ranges_of_the_captured_steps(tmp_path: Path) -> None:
    """Every launch of a captured step lies in a range that scripts/profile_nsys.sh reports."""
    words = ["-m", "tests.cuda.training_case", "2b", "sft", str(tmp_path), "args.profiling=1"]
    done = start(
        [*words, "args.activation_checkpointing=full"], NVTX_INJECTION64_PATH="libnullcuda.so"
    )
    assert done.returncode == 0, done.stderr[-4000:]
    steps = [step["ranges"] for step in json.loads((tmp_path / "0.json").read_text())["steps"]]
    of_parts = {f"range {part}" for part in ("data", "encode", "forward", "backward", "optimizer")}
    for number, found in enumerate(steps):
        logs = {"range log"} if number + 1 == LOG_INTERVAL else set()
        opened = {f"range step {number}", *of_parts, *logs} if 1 <= number < 4 else set()
        ours = {name for name in found if name.startswith("range ") and "DeepSpeed" not in name}
        assert ours == opened
        assert all(found[name] == 1 for name in opened)
        if opened:
            assert all(found[f"launches in {part}"] > 100 for part in ("forward", "backward"))
            assert found["launches in optimizer"] > 1 and "launches in no range" not in found
    captured = [{name for name in found if name.startswith("capture ")} for found in steps]
    assert captured == [set(), {"capture starts"}, set(), {"capture ends"}, set(), set()]
