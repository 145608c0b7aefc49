"""Time a training step on a CPU against every peer and against its floor, in one run:
python -m bench.steps.cpu_peers [--model quickstart tiny wide] [--dtype float32] [--threads 1 2]

The contenders take turns, each time in another order, so that other load slows all of them: cogfast,
diffusers' model with the same weights, eager and compiled by torch.compile, and the matrix products
and attention alone (the floor). A step is forward, mean squared error, backward, clipping,
AdamW and an EMA; the floor has neither loss nor optimizer. Ratios are medians over rounds.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

from bench.harness.command import finish, parser_of
from bench.harness.outcome import Outcome, Row
from bench.harness.timing import spread, wait_for
from bench.steps.step_cases import make_call
from bench.steps.step_models import MODELS, Batch, Variant, draw_batch
from bench.steps.step_sides import SIDES, free_memory
from cogfast.kernels.attention_backends import backends_that_run, flash_attention
from cogfast.model.block import MLP_RATIO
from cogfast.train.preflight.attention_choice import fastest, measure

CONTENDERS = ("ours", "diffusers", "diffusers compiled", "floor")
_WARM_UP = 3
_GPU_LAYERS = 4  # all contenders are in a GPU's memory together


class Floor(nn.Module):
    """The matrix products and attention of a transformer alone: no step can take less time.

    Linears and attention, by the fastest of all backends, have the shapes of `variant`. There are no norms, rotations,
    activations, residuals or biases, and no optimizer.
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
        case = (variant.device, variant.dtype, config.head_width)
        heads = (config.num_attention_heads, config.head_width)
        shape = (variant.batch_size, variant.num_tokens, *heads)
        names = backends_that_run(*case)
        if variant.device.type != "cpu":
            names.remove("math")  # it needs too much memory
        self.backend = fastest([measure(name, shape, *case[:2]) for name in names])

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
            attended = flash_attention(*qkv.unbind(2), self.backend)
            x = block["out"](attended.flatten(2))
            x = block["fc2"](block["fc1"](x))
        return total + self.unembed(x[:, batch.text.shape[1] :]).sum()


@dataclass(frozen=True, slots=True)
class Comparison:
    """The rows of contenders that take turns.

    make: returns the call of a contender. ratios: {key of a row: two contenders, whose times are divided}.
    """

    piece: str
    contenders: Sequence[str]
    make: Callable[[str, Variant], Callable[[], None]]
    ratios: Mapping[str, tuple[str, str]]

    def measure(
        self, model: str, dtype: torch.dtype, threads: int, rounds: int, device: str = "cpu"
    ) -> Row:
        """Time all contenders in `rounds` rounds and return a row of milliseconds and ratios."""
        torch.set_num_threads(threads)
        torch._dynamo.reset()
        config, batch_size = MODELS[model]
        layers = config.num_layers if device == "cpu" else min(_GPU_LAYERS, config.num_layers)
        config = replace(config, num_layers=layers)
        variant = Variant(config, batch_size, dtype, torch.device(device))
        calls = {name: self.make(name, variant) for name in self.contenders}
        times = take_turns(calls, rounds, variant.device)
        free_memory(variant.device)
        row = {"model": model, "dtype": str(dtype).removeprefix("torch."), "num_layers": layers}
        row |= {"num_tokens": variant.num_tokens, "batch_size": batch_size}
        row |= {"threads": threads} if device == "cpu" else {}
        return row | self.summarize(times)

    def summarize(self, times: Mapping[str, list[float]]) -> Row:
        """Return the spread of the milliseconds of each contender, and medians of ratios over rounds."""
        row: dict[str, object] = {}
        for name, samples in times.items():
            row |= {f"{name} {key}": value for key, value in spread(samples).items()}
        for key, (one, other) in self.ratios.items():
            pairs = zip(times[one], times[other], strict=True)
            row[key] = statistics.median(a / b for a, b in pairs)
        return row

    def main(self, text: str | None, dtypes: Sequence[str], argv: Sequence[str] | None) -> int:
        parser = parser_of(text)
        many = partial(parser.add_argument, nargs="+")
        many("--model", choices=MODELS, default=["quickstart", "tiny", "wide"])
        many("--dtype", choices=["float32", "bfloat16"], default=dtypes)
        many("--threads", type=int, default=[1, 2])
        parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
        parser.add_argument("--rounds", type=int, default=20)
        parser.add_argument("--out", type=Path, help="write the figures as JSON")
        given = parser.parse_args(argv)
        threads = given.threads if given.device == "cpu" else given.threads[:1]
        rows = [
            self.measure(model, getattr(torch, dtype), number, given.rounds, given.device)
            for model, dtype, number in product(given.model, given.dtype, threads)
        ]
        outcome = Outcome(rows=rows, shown=[key for key in rows[0] if "p10" not in key])
        return finish(outcome, given.out, self.piece, given.device)


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


def make_step(name: str, variant: Variant) -> Callable[[], None]:
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


RATIOS = {"speed-up over diffusers": ("diffusers", "ours")}
RATIOS["over compiled diffusers"] = ("diffusers compiled", "ours")
PEERS = Comparison("cpu_peers", CONTENDERS, lambda *of: make_step(*of), RATIOS)

if __name__ == "__main__":
    sys.exit(PEERS.main(__doc__, ["float32", "bfloat16"], None))
