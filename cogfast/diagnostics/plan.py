"""`cogfast plan`: predicts a run's memory from its configuration alone, and names changes that fit."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cogfast.config import Config
from cogfast.diagnostics.plan_times import layout_table, time_lines
from cogfast.schema.arguments import TrainArguments
from cogfast.schema.values import counted
from cogfast.train.distributed.parallelize import run_without_dynamo
from cogfast.train.memory.fit import fit_lines, fit_to_memory
from cogfast.train.plan.activations import describe
from cogfast.train.plan.fixes import Fix, find_fixes
from cogfast.train.plan.gpus import Gpu, find_gpu, parse_gpu
from cogfast.train.plan.measured import predict_step
from cogfast.train.plan.memory import (
    GIB,
    MemoryPlan,
    gap_bytes,
    host_parts,
    network_of,
    plan_memory,
    setup_of,
    usable,
)
from cogfast.train.plan.step_time import StepTime
from cogfast.train.preflight.mesh import check_global_batch, check_mesh
from cogfast.train.video_size import largest_size

_NAME_COLUMNS = 22
_NOTHING_FITS = (
    "No change that is tried makes it fit; reduce data.params.video_size or max_num_frames."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """The GPU to plan for. entry: its rates; None for a number of GiB. memory: None if there is no GPU."""

    name: str
    memory: int | None
    entry: Gpu | None = None


def find_card(name: str | None) -> Card:
    """Return the card of --gpu, else the one that is here."""
    if name is not None:
        shown, memory, entry = parse_gpu(name)
        return Card(name=shown, memory=memory, entry=entry)
    if not torch.cuda.is_available():
        return Card(name="", memory=None)
    properties = torch.cuda.get_device_properties(0)
    entry = find_gpu(properties.name, properties.total_memory / GIB)
    return Card(name=properties.name, memory=properties.total_memory, entry=entry)


def describe_plan(
    config: Config,
    gpu: str | None = None,
    num_gpus: int | None = None,
    as_json: bool = False,
    link: float | None = None,
    has_table: bool = False,
) -> str:
    """Return the prediction for `config` as text or JSON.

    gpu: of --gpu. num_gpus: of --gpus; None: of this launch. link: of --link, GB/s. has_table: add the
    table of layouts. Raises ValueError for a name that is
    not known and for a number of GPUs that does not divide.
    """
    run_without_dynamo()
    args, card = TrainArguments.from_config(config), find_card(gpu)
    if config.model.get("network_config") is None:
        raise ValueError("model.network_config is missing; add a model file to --base")
    world_size = num_gpus or int(os.environ.get("WORLD_SIZE", "1"))
    check_mesh(config, args, network_of(config), world_size)
    if args.mode != "inference":
        check_global_batch(config, args, world_size)
    changes: list[str] = []
    if args.fit == "auto" and card.memory is not None:
        found = fit_to_memory(config, args, world_size, card.memory)
        config, args, plan = found.config, found.args, found.plan
        changes = fit_lines(found.fitted) if plan.fits else []
    else:
        plan = plan_memory(setup_of(config, args, world_size), card.memory)
    fixes = find_fixes(config, args, plan)
    step = None if card.entry is None else predict_step(config, args, plan, card.entry, link)
    if as_json:
        return to_json(config, args, plan, card.name, fixes, step, changes)
    text = to_text(config, args, plan, card.name, fixes, changes)
    if card.entry is not None:
        text += "\n" + "\n".join(time_lines(step)) + "\n"
    if has_table:
        table = layout_table(config, args, card.memory, card.entry, link)
        text += "\n" + "\n".join(table) + "\n"
    return text


def to_text(
    config: Config,
    args: TrainArguments,
    plan: MemoryPlan,
    card_name: str,
    fixes: Sequence[Fix],
    changes: Sequence[str] = (),
) -> str:
    """Return the prediction as a table: a row for each part, a column for each phase.

    changes: lines about what args.fit=auto has changed.
    """
    setup = plan.setup
    lines = [_model_line(config, args, plan), _layout_line(config, args, plan)]
    if not setup.is_sampling:
        asked = f"{setup.choice}: " if setup.choice == "auto" else ""
        lines.append(f"activation checkpointing: {asked}{describe(plan.policies)}")
    host = [f"{name} {_gib(n)} GiB" for name, n in host_parts(setup, plan.policies).items() if n]
    if host:
        where = "in host memory, for each GPU"
        lines.append(
            f"{where}: {', '.join(host)} (their copies are not in the predicted step time)"
        )
    lines += ["", *_table(plan), "", _verdict(plan, card_name), *_gap_lines(plan)]
    lines += [f"args.fit=auto: {line}" for line in changes]
    if fixes:
        lines += ["", "These changes make it fit, the cheapest first:"]
        lines += [
            f"  {fix.words}: {_gib(fix.plan.peak)} GiB ({fix.plan.largest.name})" for fix in fixes
        ]
    elif not plan.fits:
        lines.append(_NOTHING_FITS)
    return "\n".join(lines) + "\n"


def to_json(
    config: Config,
    args: TrainArguments,
    plan: MemoryPlan,
    card_name: str,
    fixes: Sequence[Fix],
    step: StepTime | None = None,
    changes: Sequence[str] = (),
) -> str:
    found = {
        "gpu": card_name or None,
        "card": plan.card,
        "usable": None if plan.card is None else usable(plan.card),
        "gpus": plan.setup.world_size,
        "model_parallel_size": plan.setup.model_size,
        "zero_stage": plan.setup.rules.stage,
        "activation_checkpointing": list(plan.policies),
        "phases": {phase.name: dict(phase.parts) for phase in plan.phases},
        "host": host_parts(plan.setup, plan.policies),
        "peak": plan.peak,
        "peak_phase": plan.largest.name,
        "fits": plan.fits if plan.card is not None else None,
        "step": None if step is None else {**dataclasses.asdict(step), "seconds": step.seconds},
        "fit": list(changes),
        "fixes": [{"change": fix.words, "peak": fix.plan.peak} for fix in fixes],
    }
    return json.dumps(found, indent=2) + "\n"


def _model_line(config: Config, args: TrainArguments, plan: MemoryPlan) -> str:
    model, network = plan.setup.model, network_of(config)
    held = f"{model.num_weights / 1e6:.1f} M parameters"
    held += " a GPU" if plan.setup.model_size > 1 else ""
    trained = "" if plan.setup.is_sampling else f", {model.num_trained / 1e6:.1f} M of them trained"
    layers = counted(network.num_layers, "layer")
    return f"model: {layers} of width {network.hidden_size}, {held}{trained}, {args.precision}"


def _layout_line(config: Config, args: TrainArguments, plan: MemoryPlan) -> str:
    setup, network = plan.setup, network_of(config)
    size = largest_size(config, network)
    _, frames, rows, columns = setup.encoders.shape
    context = f" x cp {setup.context_size}" if setup.context_size > 1 else ""
    copies = setup.rules.data_size // setup.context_size
    mesh = f"dp {copies}{context} x tp {setup.model_size}"
    zero = "" if setup.is_sampling else f", ZeRO-{setup.rules.stage}"
    batch = f"batches of {args.batch_size} x {frames} frames of {rows}x{columns}"
    tokens = size.num_tokens(network)
    return f"on: {counted(setup.world_size, 'GPU')} ({mesh}){zero}, {batch} ({tokens} tokens)"


def _table(plan: MemoryPlan) -> list[str]:
    names = list(dict.fromkeys(name for phase in plan.phases for name in phase.parts))
    # Parts that no phase has are left out.
    names = [n for n in names if any(phase.parts.get(n, 0) for phase in plan.phases)]
    widths = [max(8, len(phase.name)) for phase in plan.phases]

    def row(name: str, cells: Sequence[str]) -> str:
        columns = [f"  {cell.rjust(width)}" for cell, width in zip(cells, widths, strict=True)]
        return "".join([name.ljust(_NAME_COLUMNS), *columns]).rstrip()

    lines = [row("GiB per GPU", [phase.name for phase in plan.phases])]
    for name in names:
        lines.append(
            row(
                name,
                [_gib(phase.parts[name]) if phase.parts.get(name) else "" for phase in plan.phases],
            )
        )
    lines.append(row("total", [_gib(phase.total) for phase in plan.phases]))
    return lines


def _verdict(plan: MemoryPlan, card_name: str) -> str:
    peak = f"{_gib(plan.peak)} GiB ({plan.largest.name})"
    if plan.card is None:
        return f"peak: {peak}. There is no GPU here to compare with; --gpu NAME or --gpu GIB names one."
    has = f"{card_name} has {_gib(plan.card)} GiB, of which a run may use {_gib(usable(plan.card))}"
    return f"peak: {peak}; {has}: it {'fits' if plan.fits else 'does not fit'}."


def _gap_lines(plan: MemoryPlan) -> list[str]:
    """Return a warning if gaps in the allocator's memory may slow down a run that fits."""
    step, gap = plan.phases[0], gap_bytes(plan.setup)
    if plan.setup.is_sampling or plan.card is None or not plan.fits:
        return []
    if step.total + gap <= usable(plan.card):
        return []
    return [
        f"It is tight: gaps between gradients and activations may take up to {_gib(gap)} GiB more in a "
        "step. Where they do not fit, PyTorch's allocator moves free memory, and steps take longer."
    ]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}" if num_bytes < 10 * GIB else f"{num_bytes / GIB:.1f}"
