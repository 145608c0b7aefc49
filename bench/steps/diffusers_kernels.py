"""Time forward and backward of diffusers' model with and without cogfast.apply_to_diffusers:
python -m bench.steps.diffusers_kernels [--device cuda --model 2b 5b --dtype bfloat16]

The contenders take turns, each time in another order. A GPU runs at most 4 layers. The floor (cpu_peers.Floor)
has neither norms nor other pointwise operations. Ratios are medians over rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from bench.harness.outcome import Outcome, Row, Settings
from bench.steps.cpu_peers import Comparison, Floor
from bench.steps.step_models import Variant, draw_batch
from bench.steps.step_sides import Theirs
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


RATIOS = {f"{name} ratio": ("diffusers", name) for name in CONTENDERS[1:]}
KERNELS = Comparison("diffusers_kernels", CONTENDERS, lambda *of: make_call(*of), RATIOS)


def measure_kernels(settings: Settings) -> Outcome:
    """Run the piece diffusers_kernels of bench.gpu_run."""
    rows: list[Row] = []
    for model in ("2b-smallest",) if settings.is_tiny else ("2b", "5b"):
        rounds, device = 2 if settings.is_tiny else 12, settings.device.type
        rows.append(KERNELS.measure(model, torch.bfloat16, 1, rounds, device))
        settings.keep(Outcome(rows=rows))
    return Outcome(rows=rows, shown=[key for key in rows[0] if "p10" not in key])


if __name__ == "__main__":
    sys.exit(KERNELS.main(__doc__, ["float32"], None))
