"""Write what was measured of cogfast, for its own predictions: python -m bench.harness.reference

Reads the results under bench/results and writes cogfast/train/plan/measured.json: the times of
training steps by model, size, policy and device, and the rates of GPUs. A GPU's rates are those of
the products and the attention of 2B and 5B, and need the pieces facts, rates, matmul and attention of
bench.gpu_run.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence

from bench.results_table import ROOT, Results, all_folders, read_results
from bench.steps.step_cases import LORA_RANK
from bench.steps.step_models import MODELS
from cogfast.train.plan.activations import describe
from cogfast.train.plan.gpus import find_gpu
from cogfast.train.plan.measured import (
    MEASURED,
    Measured,
    MeasuredRates,
    MeasuredStep,
    StepCase,
    read_measured,
)

_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16"}
_STEP_PIECES = ("step", "2b", "5b", "1.5-5b", "1.5-5b-i2v")


def collect(results: Sequence[Results]) -> Measured:
    """Return the step times and rates of all results; of equal cases the last folder's counts."""
    steps: dict[StepCase, MeasuredStep] = {}
    rates: dict[str, MeasuredRates] = {}
    for each in results:
        for step in _steps(each):
            steps[step.case] = step
        for found in _rates(each):
            rates[found.gpu] = found
    return Measured(rates=list(rates.values()), steps=list(steps.values()))


def _steps(results: Results) -> list[MeasuredStep]:
    found = []
    for name, report in results.reports.items():
        if report["piece"] not in _STEP_PIECES:
            continue
        for row in report["rows"]:
            if row["what"] != "step" or "ours_median_ms" not in row or "disagrees" in row:
                continue
            model, _ = MODELS[row["model"]]
            policies = [row["checkpointing"]] * row["num_layers"]
            case = StepCase(
                device=_device(results, report),
                num_layers=row["num_layers"],
                hidden_size=model.hidden_size,
                num_tokens=row["num_tokens"],
                batch_size=row["batch_size"],
                lora_rank=LORA_RANK if row["mode"] == "lora" else None,
                precision=_PRECISIONS[row["dtype"]],
                policy=row.get("ours_checkpointing", describe(policies)),
                is_compiled=row["engine"] == "compiled",
            )
            parts = [row.get(f"ours_{part}_ms") for part in ("forward_backward", "optimizer")]
            found.append(
                MeasuredStep(
                    case=case,
                    step_ms=row["ours_median_ms"],
                    forward_backward_ms=parts[0],
                    optimizer_ms=parts[1],
                    source=_source(results, name),
                )
            )
    return found


def _rates(results: Results) -> list[MeasuredRates]:
    pieces = {str(report["piece"]): report for report in results.reports.values()}
    if not results.is_gpu or not {"facts", "rates", "matmul", "attention"} <= pieces.keys():
        return []
    gpu = find_gpu(results.machine, pieces["facts"]["numbers"]["memory_gib"])
    copies = [row for row in pieces["rates"]["rows"] if row["what"] == "copy"]
    attention = [row for row in pieces["attention"]["rows"] if "forward_tflop_per_s" in row]
    attention = [row for row in attention if row["backend"] == "default"]
    if gpu is None or not copies or not attention or not pieces["matmul"]["rows"]:
        return []
    return [
        MeasuredRates(
            gpu=gpu.name,
            matmul_tflop_per_s=_mean_rate(pieces["matmul"]["rows"], ""),
            attention_forward_tflop_per_s=_mean_rate(attention, "forward_"),
            attention_backward_tflop_per_s=_mean_rate(attention, "backward_"),
            copy_gb_per_s=copies[0]["gb_per_s"],
            source=_source(results, "matmul.json"),
        )
    ]


def _mean_rate(rows: Sequence[Mapping], prefix: str) -> float:
    """Return all operations over all of their time."""
    times = [row[f"{prefix}median_ms"] for row in rows]
    work = sum(row[f"{prefix}tflop_per_s"] * ms for row, ms in zip(rows, times, strict=True))
    return work / sum(times)


def _device(results: Results, report: Mapping) -> str:
    if report["device"] == "cpu":
        threads = report["threads"]
        return f"{report['machine']}, {threads} {'thread' if threads == 1 else 'threads'}"
    facts = [each["numbers"] for each in results.of("facts")]
    gpu = find_gpu(str(report["machine"]), facts[0]["memory_gib"]) if facts else None
    return str(report["machine"]) if gpu is None else gpu.name


def _source(results: Results, name: str) -> str:
    folder = results.folder
    inside = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    return (inside / name).as_posix()


def write(results: Sequence[Results]) -> str:
    """Return the text of measured.json."""
    return json.dumps(dataclasses.asdict(collect(results)), indent=1) + "\n"


def main() -> int:
    MEASURED.write_text(write([read_results(folder) for folder in all_folders()]))
    measured = read_measured()
    print(f"{MEASURED}: {len(measured.steps)} steps, rates of {len(measured.rates)} GPUs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
