"""The step times that are expected of a GPU: python -m bench.harness.expected writes bench/expected.json.

They are those of cogfast/train/plan/step_time.py for the training steps that bench.gpu_run measures of
2B, 5B, 1.5-5B and 1.5-5B-I2V, with the rates of a data sheet times the shares that are assumed to be reached.
bench.gpu_run prints what it measured beside them. They are estimates, so that a slower step is a
question and no failure.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cogfast.train.plan.activations import LADDER
from cogfast.train.plan.gpus import Gpu, parse_gpu
from cogfast.train.plan.step_time import estimate, stated_rates
from cogfast.train.plan.traffic import Layout

if TYPE_CHECKING:
    from bench.steps.step_cases import Case, Plan

EXPECTED = Path(__file__).resolve().parents[1] / "expected.json"
CARDS = ("h100-80", "h200")
LEAST_SHARE = 0.85  # of the expected speed; a step below it is named
_KEYS = ("model", "num_layers", "mode", "checkpointing")


def expected_steps(gpu: Gpu) -> list[dict[str, Any]]:
    """Return the expected times of all steps that bench.gpu_run measures on a GPU, in milliseconds."""
    # bench.gpu_run imports this file, and may lack packages that the cases need.
    from bench.steps.step_cases import Plan
    from bench.steps.step_on_device import cases_2b, cases_5b, cases_15_5b, cases_15_5b_i2v

    rows: dict[tuple, dict[str, Any]] = {}
    plan = Plan(torch.device("cpu"), torch.bfloat16)
    cases = [*cases_2b(gpu.memory_gib), *cases_5b(gpu.memory_gib)]
    for case in (*cases, *cases_15_5b(), *cases_15_5b_i2v()):
        # `auto` chooses on the GPU; compiled blocks do the same work.
        if case.what == "step" and case.checkpointing in LADDER:
            key = (case.model, case.layers, case.mode, case.checkpointing)
            rows[key] = {
                "gpu": gpu.name,
                **dict(zip(_KEYS, key, strict=True)),
                **_times(case, plan, gpu),
            }
    return list(rows.values())


def _times(case: Case, plan: Plan, gpu: Gpu) -> dict[str, float]:
    assert case.checkpointing != "auto", "a policy"
    variant = plan.variant(case)
    layout = Layout(data_size=1, batch_size=variant.batch_size)
    rates = stated_rates(gpu)
    step = estimate(variant.config, variant.num_tokens, layout, rates, case.checkpointing)
    parts = {"step": step.seconds, "matmul": step.matmul, "attention": step.attention}
    parts |= {"memory_bound": step.memory_bound}
    return {f"{name}_ms": round(1000 * seconds, 1) for name, seconds in parts.items()}


def compare(rows: Sequence[Mapping[str, Any]], gpu: Gpu, path: Path = EXPECTED) -> list[str]:
    """Describe each measured step of bench.gpu_run beside its expectation, a line each."""
    known = {_key(row): row for row in json.loads(path.read_text()) if row["gpu"] == gpu.name}
    lines = []
    for row in rows:
        wanted = known.get(_key(row)) if row.get("what") == "step" else None
        if wanted is None or "ours_median_ms" not in row:
            continue
        measured, expected = row["ours_median_ms"], wanted["step_ms"]
        share = expected / measured
        what = ", ".join(f"{row[key]}" for key in (*_KEYS, "engine"))
        line = (
            f"{what}: {measured:.4g} ms, {expected:.4g} expected: {share:.0%} of the expected speed"
        )
        lines.append(line if share >= LEAST_SHARE else f"{line}, BELOW {LEAST_SHARE:.0%}")
    return lines


def _key(row: Mapping[str, Any]) -> tuple:
    return tuple(row.get(key) for key in _KEYS)


def write() -> str:
    """Return the text of bench/expected.json."""
    rows = []
    for name in CARDS:
        gpu = parse_gpu(name)[2]
        assert gpu is not None, name
        rows += expected_steps(gpu)
    return "[\n" + ",\n".join(f" {json.dumps(row)}" for row in rows) + "\n]\n"


def main() -> int:
    EXPECTED.write_text(write())
    print(EXPECTED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
