"""`cogfast plan`: predicts a run's memory and step time from its configuration alone.

With --table: layouts on 8 to 1,024 GPUs, and what their links cost.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cogfast.core.keys import names_origins, with_origins
from cogfast.core.values import counted
from cogfast.distributed.parallelize import run_without_dynamo
from cogfast.extensions.conditions.check import check_conditions
from cogfast.extensions.memory.quantized_base import base_linears
from cogfast.extensions.plan.gpus import GPUS, INSTALL_FLASH_ATTENTION, Gpu, gpu_of, parse_gpu
from cogfast.extensions.plan.ladder import climb, fit_lines
from cogfast.extensions.plan.memory import (
    FIT,
    GIB,
    MemoryPlan,
    plan_memory,
    rules_of,
    setup_of,
    usable,
)
from cogfast.extensions.plan.seconds import GPUS_PER_MACHINE, StepTime, predict_step
from cogfast.extensions.plan.trace import Traces
from cogfast.extensions.table import hooks
from cogfast.kernels.attention_backends import BACKENDS, backends_that_run
from cogfast.model.keys import ModelKeys
from cogfast.train.activation_checkpointing import describe
from cogfast.train.assembly import DTYPES
from cogfast.train.keys import TrainKeys
from cogfast.train.preflight.attention_choice import follow_weights
from cogfast.train.preflight.mesh import check_global_batch, check_mesh
from cogfast.train.run.opened import Run

_NOTHING_FITS = "No change that is tried makes it fit; use LoRA (args.lora_rank=64), or reduce "
_NOTHING_FITS += "data.params.video_size or max_num_frames."


@names_origins
def describe_plan(run: Run, gpu: str | None = None, num_gpus: int | None = None) -> str:
    """Return the prediction for a run as text.

    gpu: of --gpu; None: the one that is here. num_gpus: of --gpus; None: of this launch. Raises
    ValueError for a name that is not known and for a number of GPUs that does not divide.
    """
    run = run.with_values(*_check_plan(run.args, run.model, run.fields))
    args, model, data = run.args, run.network, run.data_arguments
    card_name, memory, entry = _find_card(gpu)
    world_size = num_gpus or int(os.environ.get("WORLD_SIZE", "1"))
    check_mesh(args, model.config, data, model.target, world_size)
    for check in hooks("check_attention", args):
        check(args, model.config, data, is_training=args.mode != "inference")
    if args.mode != "inference":
        check_global_batch(args, run.deepspeed, world_size)
    change = partial(setup_of, run)
    plan = plan_memory(change(world_size), memory)
    changes: list[str] = []
    if args.fit == "auto" and memory is not None:
        found = climb(plan, change)
        if found.plan.fits:
            plan, changes = found.plan, fit_lines(found)
    setup = plan.setup
    lines = [_model_line(plan), _layout_line(plan)]
    if not setup.is_sampling:
        asked = "auto: " if setup.args.activation_checkpointing == "auto" else ""
        lines.append(f"activation checkpointing: {asked}{describe(plan.policies)}")
    host = [f"{name} {_gib(n)} GiB" for name, n in setup.host_parts(plan.policies).items() if n]
    if host:
        lines.append(f"in host memory, for each GPU: {', '.join(host)}")
    verdict = ". There is no GPU here to compare with; --gpu NAME or --gpu GIB names one."
    if memory is not None:
        has = f"{card_name} has {_gib(memory)} GiB, of which a run may use {_gib(usable(memory))}"
        verdict = f"; {has}: it {'fits' if plan.fits else 'does not fit'}."
    peak = f"peak: {_gib(plan.peak)} GiB ({plan.largest.name})"
    lines += ["", *_table(plan), "", peak + verdict]
    gap = setup.gap_bytes
    is_tight = memory is not None and plan.phases[0].total + gap > usable(memory)
    if is_tight and plan.fits and not setup.is_sampling:
        text = f"It is tight: gaps between gradients and activations may take up to {_gib(gap)} GiB more in a "
        text += "step. Where they do not fit, PyTorch's allocator moves free memory, and steps take longer."
        lines.append(text)
    lines += [f"{FIT}: {line}" for line in changes]
    if not plan.fits:
        fix = climb(plan, change, has_gpus=True)
        peak = f"{_gib(fix.plan.peak)} GiB, {fix.plan.largest.name}"
        makes = ["", f"This makes it fit ({peak}):", *(f"  {change}" for change in fix.changes)]
        lines += makes if fix.plan.fits else [_NOTHING_FITS]
    if entry is not None:
        lines += _time_lines(plan, entry, is_here=gpu is None)
    return "\n".join(lines) + "\n"


def _check_plan(
    args: TrainKeys, model: ModelKeys, fields: dict[str, Any]
) -> tuple[dict[str, str], str]:
    """Check what a plan needs; return what follow_weights finds. fields: of the network; {} without one."""
    run_without_dynamo()
    found = follow_weights(args)
    if not fields:
        raise ValueError("model.network_config is missing; add a model file to --base")
    check_conditions(model, fields)
    return found


def _find_card(name: str | None) -> tuple[str, int | None, Gpu | None]:
    """Return name, memory and entry of the card of --gpu, else of the one that is here."""
    if name is not None:
        return parse_gpu(name)
    if not torch.cuda.is_available():
        return "", None, None
    properties = torch.cuda.get_device_properties(0)
    return properties.name, properties.total_memory, gpu_of(torch.device("cuda:0"))


def _model_line(plan: MemoryPlan) -> str:
    args, transformer = plan.setup.args, plan.setup.transformer
    # Weights of 8 bits and those in host memory are no parameters.
    weights = {*transformer.parameters(), *(x.weight for _, x in base_linears(transformer))}
    held = f"{sum(weight.numel() for weight in weights) / 1e6:.1f} M parameters"
    held += " a GPU" if args.model_parallel_size > 1 else ""
    if not plan.setup.is_sampling:
        held += f", {plan.setup.num_trained / 1e6:.1f} M of them trained"
    layers, width = counted(len(transformer.blocks), "layer"), transformer.config.hidden_size
    return f"model: {layers} of width {width}, {held}, {args.precision}"


def _layout_line(plan: MemoryPlan) -> str:
    setup = plan.setup
    frames, (rows, columns) = setup.size.num_frames, setup.size.pixels
    number = setup.args.context_parallel_size
    context = f" x cp {number}" if number > 1 else ""
    mesh = f"dp {setup.rules.data_size // number}{context} x tp {setup.args.model_parallel_size}"
    zero = "" if setup.is_sampling else f", ZeRO-{setup.rules.stage}"
    batch = f"batches of {setup.batch_size} x {counted(frames, 'frame')} of {rows}x{columns}"
    tokens = setup.size.num_tokens(setup.transformer.config)
    return f"on: {counted(setup.world_size, 'GPU')} ({mesh}){zero}, {batch} ({tokens} tokens)"


def _table(plan: MemoryPlan) -> list[str]:
    """Return a row for each part, with a column for each phase."""
    names = list(dict.fromkeys(name for phase in plan.phases for name in phase.parts))
    names = [n for n in names if any(phase.parts.get(n, 0) for phase in plan.phases)]
    widths = [max(8, len(phase.name)) for phase in plan.phases]
    cells = {"GiB per GPU": [phase.name for phase in plan.phases]}
    for name in names:
        cells[name] = [_gib(p.parts[name]) if p.parts.get(name) else "" for p in plan.phases]
    cells["total"] = [_gib(phase.total) for phase in plan.phases]
    aligned = lambda name, row: "  ".join([name.ljust(22), *map(str.rjust, row, widths)])
    return [aligned(name, row).rstrip() for name, row in cells.items()]


def _attention_of(
    plan: MemoryPlan, gpu: Gpu, is_here: bool = False
) -> tuple[str | None, list[str], str]:
    """Return the backend of attention that a plan assumes (None: no rates are known), those that it may
    choose, and the reason. is_here: the GPU is that of this machine."""
    args = plan.setup.args
    named = args.attention_backend
    if named != "auto" and not BACKENDS[named].capability:
        raise ValueError(f"args.attention_backend={named} is for CPUs, the plan for GPUs: set auto")
    able, why = [n for n, each in BACKENDS.items() if each.kernel], "the fastest of PyTorch's"
    if is_here:
        width, dtype = plan.setup.transformer.config.head_width, DTYPES[args.precision]
        able = backends_that_run(torch.device("cuda:0"), dtype, width, args.deterministic)
        why = "the fastest that runs here"
    if plan.setup.transformer.sparse_share is not None:
        able, why = ["flash"], "taken for FlexAttention's kernels, which were not timed"
    return named if named != "auto" else gpu.shares.fastest(able), able, why


def _time_lines(plan: MemoryPlan, gpu: Gpu, is_here: bool) -> list[str]:
    backend, able, why = _attention_of(plan, gpu, is_here)
    step = predict_step(plan, gpu, backend)
    if step is None:
        return ["", "step time: not predicted for sampling and offload"]
    parts = {"matmul": step.matmul, "attention": step.attention}
    parts |= {"memory-bound": step.memory_bound, "communication": step.links.exposed}
    parts |= {"host transfers": step.transfers} if step.transfers else {}
    shown = ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in parts.items())
    rates = f"MFU {step.mfu:.1%}, {step.samples_per_second:.3g} samples/s"
    lines = [
        "",
        f"step: {_seconds(step.seconds)} s ({shown}), {rates}",
        f"  a prediction from the data sheet of {gpu.name}; without VAE and text encoder",
        f"  {step.attention_rates}",
    ]
    if plan.setup.args.attention_backend == "auto" and backend is not None:
        lines[-1] += f" ({why})"
        best = gpu.shares.fastest(["fa4", backend])
        faster = predict_step(plan, gpu, best)
        if best != backend and faster is not None and len(able) > 1:
            lines[-1] += f"; by {best} {_seconds(faster.seconds)} s: {INSTALL_FLASH_ATTENTION}"
    return lines


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= 1 else f"{seconds:.3f}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}" if num_bytes < 10 * GIB else f"{num_bytes / GIB:.1f}"


# --- the table of layouts ---

_WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024)
_SHOWN = 2  # layouts for each number of GPUs
_KEYS = ("model_parallel_size", "context_parallel_size", "gradient_accumulation_steps")
_SIZES = (1, 2, 4, 8)  # of a group that shares a sample


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout that fits. samples: the global batch."""

    samples: int
    plan: MemoryPlan
    step: StepTime

    @property
    def mesh(self) -> tuple[int, int, int]:
        """Return the sizes of data, context and tensor parallelism."""
        setup, args = self.plan.setup, self.plan.setup.args
        context = args.context_parallel_size
        return setup.rules.data_size // context, context, args.model_parallel_size

    @property
    def parts(self) -> tuple[float, ...]:
        """Return the seconds of a step: matmul, attention, memory-bound, and waits for links, to the host, too."""
        step = self.step
        waits = step.links.exposed + step.transfers
        return step.matmul, step.attention, step.memory_bound, waits


@names_origins
def find_layouts(
    run: Run, gpu: str | None, worlds: Iterable[int] | None = None
) -> dict[int, list[Layout] | str]:
    """Return the layouts that fit for each number of GPUs, the fastest first, or why there is none.

    Those of a number have the same global batch: deepspeed.train_batch_size, else the configuration's own.
    """
    name, memory, entry = _find_card(gpu)
    run = run.with_values(*_check_plan(run.args, run.model, run.fields))
    model, data = run.network, run.data_arguments
    if entry is None or memory is None:
        known = ", ".join(each.name for each in GPUS)
        text = f"--table has no rates of {name}" if name else "--table needs --gpu NAME"
        raise ValueError(f"{text}; use --gpu {known}")
    args, traces = run.args, dict[tuple[int, int], Traces]()
    rules = rules_of(run.deepspeed, args, 1, run.allow_import)
    if args.mode == "inference" or rules.is_offloaded:
        raise ValueError("--table predicts no sampling and no offload_optimizer; plan without it")
    found: dict[int, list[Layout] | str] = {}
    for world in worlds or _WORLDS:
        copies = max(1, world // (args.model_parallel_size * args.context_parallel_size))
        samples = args.batch_size * args.gradient_accumulation_steps * copies
        samples = run.deepspeed.get("train_batch_size") or samples
        layouts, peaks, why = list[Layout](), list[int](), ""
        for tensor, context in ((t, c) for t in _SIZES for c in _SIZES if t * c <= _SIZES[-1]):
            # Context parallelism sends less (docs/scaling.md): tensor parallelism is for what does not fit.
            if tensor > 1 and len(layouts) >= _SHOWN:
                break
            at_once = args.batch_size * max(1, world // (tensor * context))
            sizes = tensor, context, max(1, samples // at_once)
            values = dict(zip(map(args.key, _KEYS), sizes, strict=True))
            changed = run.with_values(values, "--table")
            try:
                with with_origins(changed.origins):
                    check_mesh(changed.args, model.config, data, model.target, world)
                    for check in hooks("check_attention", changed.args):
                        check(changed.args, model.config, data, is_training=True)
            except ValueError as error:
                why = why or str(error)
                continue
            if samples % at_once:
                why = f"{at_once} samples at once do not divide a batch of {samples}; set "
                why += f"deepspeed.train_batch_size to a multiple of {at_once}"
                continue
            setup = setup_of(changed, world, traces.get((tensor, context)))
            traces[tensor, context] = setup.traces
            plan = plan_memory(setup, memory)
            peaks.append(plan.peak)
            backend, *_ = _attention_of(plan, entry, is_here=gpu is None)
            step = predict_step(plan, entry, backend)
            if plan.fits and step is not None:
                layouts.append(Layout(samples, plan, step))
        if peaks:
            why = f"no layout fits: {min(peaks) / GIB:.1f} GiB or more, of {memory / GIB:.1f}; "
            why += f"`cogfast plan --gpus {world}` shows what helps"
        found[world] = sorted(layouts, key=lambda layout: layout.step.seconds) or why
    return found


# The columns of each table, by their heads. Only the first one has several layouts of a number of GPUs.
_TABLES: Mapping[str, Mapping[str, Callable[[Layout], str]]] = {
    "The fastest layouts that fit:": {
        "dp x cp x tp": lambda x: " x ".join(map(str, x.mesh)),
        "accum.": lambda x: f"{x.plan.setup.rules.accumulation}",
        "global batch": lambda x: f"{x.samples}",
        "peak GiB": lambda x: f"{x.plan.peak / GIB:.1f}",
        "step s": lambda x: f"{x.step.seconds:.3f}",
        "= matmul, attention, memory, links": lambda x: " + ".join(f"{s:.3f}" for s in x.parts),
        "MFU": lambda x: f"{x.step.mfu:.1%}",
        "samples/s": lambda x: f"{x.step.samples_per_second:.3g}",
    },
    "What a GPU sends in a step of the first layout of each, by NVLink (or PCIe) and InfiniBand:": {
        "GB in its machine": lambda x: f"{x.step.links.machine_bytes / 1e9:.2f}",
        "take s": lambda x: f"{x.step.links.machine_seconds:.3f}",
        "GB to other machines": lambda x: f"{x.step.links.network_bytes / 1e9:.2f}",
        "take s ": lambda x: f"{x.step.links.network_seconds:.3f}",
        "together s": lambda x: f"{x.step.links.seconds:.3f}",
        "hidden": lambda x: f"{1 - x.step.links.exposed / (x.step.links.seconds or 1):.0%}",
    },
}


def describe_table(found: Mapping[int, list[Layout] | str], gpu: str | None) -> str:
    """Return two tables of at most 120 columns. found: by find_layouts. Raises ValueError if no number of GPUs has a layout."""
    fitting = [each for each in found.values() if not isinstance(each, str)]
    reasons = [f"--gpus {n}: {why}" for n, why in found.items() if isinstance(why, str)]
    if not fitting:
        raise ValueError(reasons[-1])
    step, setup = fitting[0][0].step, fitting[0][0].plan.setup
    frames, (rows, columns) = setup.size.num_frames, setup.size.pixels
    lines = [
        _model_line(fitting[0][0].plan),
        f"on: {_find_card(gpu)[0]}, {GPUS_PER_MACHINE} in a machine, ZeRO-{setup.rules.stage}, batches of "
        f"{setup.batch_size} x {frames} frames of {rows}x{columns}, cached latents",
        f"All figures are predicted, none was measured; {step.attention_rates}.",
    ]
    number = _SHOWN
    for title, table in _TABLES.items():
        cells = [["GPUs", *table]]
        for layout in (layout for each in fitting for layout in each[:number]):
            gpus = f"{layout.plan.setup.world_size}"
            cells.append([gpus, *(of(layout) for of in table.values())])
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines += ["", title, *("  ".join(map(str.rjust, row, widths)) for row in cells), *reasons]
        number, reasons = 1, []
    return "\n".join([*lines, ""])
