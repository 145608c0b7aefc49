"""`cogfast plan --table`: layouts on 8 to 1,024 GPUs, and what their links cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from cogfast.core.keys import names_origins, with_origins
from cogfast.extensions.plan.gpus import GPUS
from cogfast.extensions.plan.memory import GIB, MemoryPlan, plan_memory, rules_of, setup_of
from cogfast.extensions.plan.seconds import GPUS_PER_MACHINE, StepTime, predict_step
from cogfast.extensions.plan.text import attention_of, check_plan, find_card, model_line
from cogfast.extensions.plan.trace import Traces
from cogfast.extensions.sparse.check import check_sparse
from cogfast.train.preflight.mesh import check_mesh
from cogfast.train.run.opened import Run

WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024)
_SHOWN = 2  # layouts for each number of GPUs
_LAYOUT = ("model_parallel_size", "context_parallel_size", "gradient_accumulation_steps")
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
    run: Run, gpu: str | None, worlds: Iterable[int] = WORLDS
) -> dict[int, list[Layout] | str]:
    """Return the layouts that fit for each number of GPUs, the fastest first, or why there is none.

    Those of a number have the same global batch: deepspeed.train_batch_size, else the configuration's own.
    """
    name, memory, entry = find_card(gpu)
    run = run.with_values(*check_plan(run.args, run.model, run.fields))
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
    for world in worlds:
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
            values = dict(zip(map(args.key, _LAYOUT), sizes, strict=True))
            changed = run.with_values(values, "--table")
            try:
                with with_origins(changed.origins):
                    check_mesh(changed.args, model.config, data, model.target, world)
                    check_sparse(changed.args, model.config, data, is_training=True)
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
            backend, *_ = attention_of(plan, entry, is_here=gpu is None)
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
        model_line(fitting[0][0].plan),
        f"on: {find_card(gpu)[0]}, {GPUS_PER_MACHINE} in a machine, ZeRO-{setup.rules.stage}, batches of "
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
