"""Time a training step on a CPU against every peer and against its floor, in one run:
python -m bench.steps.cpu_peers [--model quickstart tiny wide] [--dtype float32] [--threads 1 2]

The contenders take turns, each time in another order, so that other load slows all of them: cogfast,
diffusers' model with the same weights, eager and compiled by torch.compile, and the matrix products
and attention alone (the floor). A step is forward, mean squared error, backward, clipping,
AdamW and an EMA; the floor has neither loss nor optimizer. Ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.harness.machine import write_report
from bench.harness.outcome import Outcome, Row, table
from bench.harness.timing import spread, wait_for
from bench.steps.step_cases import make_call
from bench.steps.step_models import MODELS, Batch, Variant, draw_batch
from bench.steps.step_sides import SIDES, free_memory
from cogfast.model.block import MLP_RATIO

CPU = torch.device("cpu")
PEERS = ("diffusers", "diffusers compiled")
CONTENDERS = ("ours", *PEERS, "floor")
_WARM_UP = 3


class Floor(nn.Module):
    """The matrix products and attention of a transformer alone: no step can take less time.

    Linears and scaled dot product attention have the shapes of `variant`. There are no norms, rotations, activations, residuals or biases, and no optimizer.
    """

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.config, self.grid = variant.config, variant.grid
        config, width = variant.config, variant.config.hidden_size
        patch = config.patch_size
        self.patch_numel = patch.t * patch.h * patch.w * config.in_channels
        make = lambda m, n: nn.Linear(m, n, bias=False)
        self.embed_video = make(self.patch_numel, width)
        self.embed_text = make(config.text_hidden_size, width)
        self.unembed = make(width, self.patch_numel)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "modulation": make(config.time_embed_dim, 12 * width),
                    "qkv": make(width, 3 * width),
                    "out": make(width, width),
                    "fc1": make(width, MLP_RATIO * width),
                    "fc2": make(MLP_RATIO * width, width),
                }
            )
            for _ in range(config.num_layers)
        )
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            # Activations keep their size from layer to layer, so that none becomes denormal.
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)
        self.to(variant.dtype)

    def forward(self, batch: Batch) -> Tensor:
        """Return a scalar that depends on every product."""
        b = batch.latents.shape[0]
        video = batch.latents.reshape(b, -1, self.patch_numel)
        x = torch.cat([self.embed_text(batch.text), self.embed_video(video)], dim=1)
        conditioning = x[:, 0, :1].expand(-1, self.config.time_embed_dim)
        total = x.new_zeros(())
        for block in self.blocks:
            total = total + block["modulation"](conditioning).sum()
            qkv = block["qkv"](x).unflatten(-1, (3, self.config.num_attention_heads, -1))
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
            x = block["out"](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            x = block["fc2"](block["fc1"](x))
        return total + self.unembed(x[:, batch.text.shape[1] :]).sum()


def measure(model: str, dtype: torch.dtype, threads: int, rounds: int) -> Row:
    """Time all contenders in `rounds` rounds and return a row of milliseconds and ratios."""
    torch.set_num_threads(threads)
    torch._dynamo.reset()
    config, batch_size = MODELS[model]
    variant = Variant(config, batch_size, dtype, CPU)
    calls = {name: _make(name, variant) for name in CONTENDERS}
    times = take_turns(calls, rounds, CPU)
    free_memory(CPU)
    described = {"model": model, "dtype": str(dtype).removeprefix("torch."), "threads": threads}
    return described | summarize(times)


def take_turns(
    calls: dict[str, Callable[[], None]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Return the milliseconds of each call in `rounds` rounds, each in another order."""
    for call in calls.values():
        for _ in range(_WARM_UP):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(calls), len(calls)):
            wait_for(device)
            start = time.perf_counter()
            calls[name]()
            wait_for(device)
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def summarize(times: dict[str, list[float]]) -> Row:
    """Return the spread of the milliseconds of each contender, and medians of ratios over rounds."""
    row: Row = {}
    for name, samples in times.items():
        row |= {f"{name} {key}": value for key, value in spread(samples).items()}
    over = lambda a, b: statistics.median(x / y for x, y in zip(times[a], times[b], strict=True))
    row["speed-up over diffusers"] = over("diffusers", "ours")
    row["over compiled diffusers"] = over("diffusers compiled", "ours")
    return row


def _make(name: str, variant: Variant) -> Callable[[], None]:
    """Return one training step of a contender."""
    if name == "floor":
        network, batch = Floor(variant), draw_batch(variant)

        def call() -> None:
            network(batch).backward()
            network.zero_grad()

        return call
    side, _, engine = name.partition(" ")
    built = SIDES[side](variant)
    if engine:
        built.compile_blocks()
    return make_call(side, built, variant)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", nargs="+", choices=MODELS, default=["quickstart", "tiny", "wide"]
    )
    parser.add_argument(
        "--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"]
    )
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args(argv)
    rows = []
    for model, dtype, threads in product(arguments.model, arguments.dtype, arguments.threads):
        rows.append(measure(model, getattr(torch, dtype), threads, arguments.rounds))
    print(table(Outcome(rows=rows, shown=[key for key in rows[0] if "p10" not in key])))
    write_report(arguments.out, "cpu_peers", CPU, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
