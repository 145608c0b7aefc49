"""Time a training step of CPU ranks on one machine: ZeRO-2 through shared memory, through gloo, and DDP.

    python -m bench.scaling.data_parallel_step

All sides train cogfast's model with clipping, AdamW and an EMA of the weights, in turn in the same
processes, which torchrun starts, with one thread each. A sample begins and ends with all ranks together.
DDP has torch's AdamW(fused) and a foreach EMA. First the losses of all sides are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.harness.machine import describe_machine
from bench.steps.step_models import MODELS, Batch, Variant, draw_batch
from bench.steps.step_optimizers import ADAM, CLIP, EMA_DECAY, PeerUpdate
from bench.steps.step_sides import Ours
from cogfast.diagnostics.timing import spread
from cogfast.kernels.fused_ema_adam import FusedEmaAdam
from cogfast.train.distributed.process_groups import start_processes
from cogfast.train.distributed.zero_engine import ZeroEngine

_LOSS_TOLERANCE = 1e-4  # of a loss, relative
_NUM_COMPARED = 3  # steps before timing
Step = Callable[[], Tensor]


def zero_step(variant: Variant, batch: Batch, shares_memory: bool) -> Step:
    """Return a call that trains one step with ZeRO-2 and returns the loss."""
    network = Ours(variant).network
    trained = [p for p in network.parameters() if p.requires_grad]
    adam = FusedEmaAdam(trained, **ADAM, ema_decay=EMA_DECAY, use_num_updates=False)
    config = {
        "train_micro_batch_size_per_gpu": variant.batch_size,
        "gradient_clipping": CLIP,
        "steps_per_print": 2**31,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "timers": {"throughput": {"enabled": False}},
        "bf16": {"enabled": variant.dtype == torch.bfloat16, "check_grad_overflow": False},
        # as in configs/quickstart.yaml: the faster way with gloo
        "zero_optimization": {"stage": 2, "reduce_scatter": False},
    }
    engine = ZeroEngine(network, adam, config, shares_memory=shares_memory)

    def step() -> Tensor:
        loss = _loss(engine(batch.latents, batch.timesteps, batch.text), batch)
        engine.backward(loss)
        engine.step(ADAM["lr"])
        engine.wait_for_weights()
        return loss.detach()

    return step


def ddp_step(variant: Variant, batch: Batch) -> Step:
    """Return a call that trains one step with DistributedDataParallel and returns the loss."""
    network = Ours(variant).network
    update = PeerUpdate(network.parameters())
    replica = nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True)

    def step() -> Tensor:
        loss = _loss(replica(batch.latents, batch.timesteps, batch.text), batch)
        loss.backward()
        update.step()
        return loss.detach()

    return step


def _loss(output: Tensor, batch: Batch) -> Tensor:
    return (output - batch.target).float().square().mean()


SIDES: dict[str, Callable[[Variant, Batch], Step]] = {
    "zero-2, shared memory": partial(zero_step, shares_memory=True),
    "zero-2, gloo": partial(zero_step, shares_memory=False),
    "ddp": ddp_step,
}


def measure(variant: Variant, num_samples: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds of a step of every side, and their ratio to DDP. Every rank calls it."""
    batch = draw_batch(variant, seed=1 + dist.get_rank())
    steps = {name: build(variant, batch) for name, build in SIDES.items()}
    losses = {
        name: torch.stack([step() for _ in range(_NUM_COMPARED)]) for name, step in steps.items()
    }
    for name, found in losses.items():
        torch.testing.assert_close(
            found, losses["ddp"], rtol=_LOSS_TOLERANCE, atol=0, msg=lambda m, n=name: f"{n}: {m}"
        )
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(num_samples):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            times[name].append((time.perf_counter() - start) * 1e3)
    ratio = lambda name: statistics.median(
        a / b for a, b in zip(times[name], times["ddp"], strict=True)
    )
    return {name: {**spread(t), "ratio_to_ddp": ratio(name)} for name, t in times.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="quickstart")
    parser.add_argument("--batch-size", type=int, default=8, help="samples of a rank")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args(argv)
    if "RANK" not in os.environ:
        launch = ["-m", "torch.distributed.run", "--standalone"]
        launch += [f"--nproc_per_node={arguments.ranks}", "-m", "bench.scaling.data_parallel_step"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.run(
            [sys.executable, *launch, *(sys.argv[1:] if argv is None else argv)], env=environment
        ).returncode
    groups = start_processes()
    config, _ = MODELS[arguments.model]
    dtype = getattr(torch, arguments.dtype)
    variant = Variant(config, arguments.batch_size, dtype, groups.device)
    sides = measure(variant, arguments.samples)
    if groups.is_main:
        for name, row in sides.items():
            print(f"{name:24}" + ", ".join(f"{key} {value:.4g}" for key, value in row.items()))
        if arguments.out:
            report = {**describe_machine(groups.device), "ranks": groups.world_size, "sides": sides}
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    groups.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
