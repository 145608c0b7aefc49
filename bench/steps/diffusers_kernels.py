"""Time forward and backward of diffusers' model with and without cogfast.apply_to_diffusers:
python -m bench.steps.diffusers_kernels [--device cuda --model 2b 5b --dtype bfloat16]

The contenders take turns, each time in another order. A GPU runs at most 4 layers, since all of them are in its memory
together. The floor (cpu_peers.Floor) has neither norms nor other pointwise operations. Ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from bench.harness.machine import write_report
from bench.harness.outcome import Outcome, Row, table
from bench.harness.timing import spread
from bench.steps.cpu_peers import Floor, take_turns
from bench.steps.step_models import MODELS, Variant, draw_batch
from bench.steps.step_sides import Theirs, free_memory
from cogfast import apply_to_diffusers

CONTENDERS = ("diffusers", "with kernels", "diffusers compiled", "with kernels compiled", "floor")


def make_call(name: str, variant: Variant) -> Callable[[], None]:
    """Return forward and backward of a contender."""
    batch = draw_batch(variant)
    if name == "floor":
        floor = Floor(variant).to(variant.device)
        network, loss = floor, lambda: floor(batch)
    else:
        side = Theirs(variant)
        network, loss = side.network, lambda: (side.forward(batch) - batch.target).square().mean()
        if name.startswith("with kernels"):
            apply_to_diffusers(network)
        if name.endswith("compiled"):
            side.compile_blocks()

    def call() -> None:
        loss().backward()
        network.zero_grad()

    return call


def measure(model: str, dtype: torch.dtype, threads: int, rounds: int, device: str) -> Row:
    torch.set_num_threads(threads)
    torch._dynamo.reset()
    config, batch_size = MODELS[model]
    layers = config.num_layers if device == "cpu" else min(4, config.num_layers)
    variant = Variant(replace(config, num_layers=layers), batch_size, dtype, torch.device(device))
    times = take_turns({n: make_call(n, variant) for n in CONTENDERS}, rounds, variant.device)
    free_memory(variant.device)
    row: Row = {"model": model, "dtype": str(dtype).removeprefix("torch."), "num_layers": layers}
    row |= {"num_tokens": variant.num_tokens, "batch_size": batch_size}
    row |= {"threads": threads} if device == "cpu" else {}
    for name, samples in times.items():
        row |= {f"{name} {key}": value for key, value in spread(samples).items()}
        if name != "diffusers":
            pairs = zip(times["diffusers"], samples, strict=True)
            row[f"{name} ratio"] = statistics.median(a / b for a, b in pairs)
    return row


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = ["quickstart", "tiny", "wide"]
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=sizes)
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    given = parser.parse_args(argv)
    threads = given.threads if given.device == "cpu" else given.threads[:1]
    rows = [
        measure(model, getattr(torch, dtype), number, given.rounds, given.device)
        for model, dtype, number in product(given.model, given.dtype, threads)
    ]
    print(table(Outcome(rows=rows, shown=[key for key in rows[0] if "p10" not in key])))
    write_report(given.out, "diffusers_kernels", torch.device(given.device), rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
