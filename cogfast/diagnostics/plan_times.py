"""Step times for `cogfast plan`: the parts of a predicted step, and a table of layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from cogfast.config import Config
from cogfast.schema.arguments import TrainArguments
from cogfast.schema.values import counted
from cogfast.train.plan.gpus import Gpu
from cogfast.train.plan.measured import predict_step
from cogfast.train.plan.memory import (
    GIB,
    meta_transformer,
    network_of,
    plan_memory,
    setup_of,
)
from cogfast.train.plan.step_time import StepTime
from cogfast.train.preflight.mesh import check_mesh

NUM_GPUS, TENSOR_SIZES = (1, 2, 4, 8, 64), (1, 2, 4)
_HEAD = ("GPUs", "tp", "GiB per GPU", "fits", "s per step", "MFU", "samples/s")


def time_lines(step: StepTime | None) -> list[str]:
    """Describe a predicted step."""
    if step is None:
        return ["step time: not predicted for sampling and offload"]
    parts = {"matmul": step.matmul, "attention": step.attention}
    parts |= {"memory-bound": step.memory_bound, "communication": step.communication}
    if step.transfers + step.hidden_transfers > 0:
        parts["host transfers"] = step.transfers
    shown = ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in parts.items())
    rate = f"{step.samples_per_second:.3g} samples/s"
    mfu = "" if step.mfu is None else f", MFU {step.mfu:.1%}"
    return [
        f"step: {_seconds(step.seconds)} s ({shown}){mfu}, {rate}",
        f"  {step.source}; without VAE and text encoder",
    ]


def layout_table(
    config: Config, args: TrainArguments, memory: int | None, gpu: Gpu | None, link: float | None
) -> list[str]:
    """Return memory, time and speed of this configuration in other layouts, a line each."""
    rows: list[Sequence[str]] = [_HEAD]
    for tensor_size in TENSOR_SIZES:
        changed = dataclasses.replace(args, model_parallel_size=tensor_size)
        reason = _reason(config, changed, tensor_size)
        # A shard is the same for any number of copies.
        transformer = None if reason else meta_transformer(config, changed)
        for num_gpus in NUM_GPUS:
            here = reason or _reason(config, changed, num_gpus)
            if here:
                rows.append((str(num_gpus), str(tensor_size), here))
                continue
            plan = plan_memory(setup_of(config, changed, num_gpus, transformer), memory)
            step = None if gpu is None else predict_step(config, changed, plan, gpu, link)
            cells = [str(num_gpus), str(tensor_size), f"{plan.peak / GIB:.1f}"]
            cells.append("-" if memory is None else "yes" if plan.fits else "no")
            cells += ["-"] * 3
            if step is not None:
                mfu = "-" if step.mfu is None else f"{step.mfu:.1%}"
                cells[4:] = [_seconds(step.seconds), mfu, f"{step.samples_per_second:.3g}"]
            rows.append(cells)
    widths = [max(len(row[i]) for row in rows if len(row) == len(_HEAD)) for i in range(len(_HEAD))]
    lines = []
    for row in rows:
        # A reason takes the other columns.
        padded = [cell.rjust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        rest = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=False)]
        lines.append("  ".join([*padded, *(rest if len(row) == len(_HEAD) else row[2:])]))
    return lines


def _reason(config: Config, args: TrainArguments, num_gpus: int) -> str:
    """Return why this number of GPUs cannot run the configuration, or nothing."""
    if num_gpus % (args.model_parallel_size * args.context_parallel_size):
        shared = args.model_parallel_size * args.context_parallel_size
        return f"{counted(num_gpus, 'GPU')}: not a multiple of {shared}"
    try:
        check_mesh(config, args, network_of(config), num_gpus)
    except ValueError as error:
        # The fix that follows is another row.
        return str(error).split(";")[0]
    return ""


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= 1 else f"{seconds:.3f}"
