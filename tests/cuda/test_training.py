"""Training steps of full size on the null CUDA runtime: waits, allocations, launches, peak, streams."""

from __future__ import annotations

import json

import pytest

from tests.cuda.cases import CASES, LOG_LAUNCHES, LOGGING_WAITS, WAITS, Case
from tests.cuda.null_device import start

_PLAN_TOLERANCE = 0.03
_SHOWN = 12  # kernels in a message


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_steps(case: Case) -> None:
    arguments = ["-m", "tests.cuda.training_case", case.model, case.mode, *case.words]
    arguments += ["--streams"] if case.streams else []
    device = {} if case.device_bytes is None else {"NULLCUDA_BYTES": str(case.device_bytes)}
    done = start(arguments, **device)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert problems_of(case, report) == []


def problems_of(case: Case, report: dict) -> list[str]:
    """Return a sentence for each rule that a run breaks."""
    problems = []
    allowed = {*WAITS, *case.waits}
    for number, step in enumerate(report["steps"], 1):
        problems += [f"step {number}: {fault}" for fault in step["faults"]]
        if not case.first_steady <= number < len(report["steps"]):  # the last one ends the run
            continue
        logging = LOGGING_WAITS if number == 4 else ()
        for wait in sorted({*step["waits"]} - {*allowed, *logging}):
            problems.append(f"step {number} waits for the device: {wait}")
        problems += [f"step {number}: twice {w}" for w in logging if step["waits"].count(w) > 1]
        if bool(step["graphs"]) != case.has_graphs:
            problems.append(f"step {number}: {step['graphs']} graphs")
        if not step["launches"]:
            problems.append(f"step {number}: no launches, so that nothing was counted")
        for what in ("allocations", "pinned_allocations"):
            if step[what]:
                problems.append(f"step {number}: {step[what]} {what}")
        limit = case.launches + (LOG_LAUNCHES if number == 4 else 0)
        if step["launches"] > limit:
            most = sorted(step["kernels"].items(), key=lambda item: -item[1])[:_SHOWN]
            problems.append(f"step {number}: {step['launches']} launches > {limit}; {most}")
    predicted, peak = report["predicted_gib"], report["peak_gib"]
    # PyTorch counts what graphs use again as free.
    is_plan_whole = not case.has_graphs or peak > predicted
    if is_plan_whole and abs(predicted / peak - 1) > _PLAN_TOLERANCE:
        problems.append(f"the plan predicts {predicted:.2f} GiB, the allocator has {peak:.2f}")
    problems += report.get("stream_problems", [])
    if case.streams and not report["stream_uses"]:
        problems.append("no side stream used a tensor, so that nothing was checked")
    return problems
