"""Train a tiny model for twenty steps with DeepSpeed on a device, and compare with the CPU.

The loss of a bf16 run must fall. A float32 run that draws its noise on the CPU must have the losses of
the same run on the CPU. Each run is a subprocess, since DeepSpeed initializes once per process and the
run on the CPU must not see the GPU:
python -m bench.checks.training_on_device RUN FOLDER
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from bench.harness.outcome import Outcome, Row, Settings
from bench.harness.timing import spread
from cogfast.config import load_config
from cogfast.core.slot_random import SlotRandom
from cogfast.train.trainer import Trainer

_CONFIG = Path(__file__).with_suffix(".yaml")
_ROOT = _CONFIG.parents[2]
_OVERRIDES = {"bf16": (), "fp32": ("deepspeed.bf16.enabled=false",)}
_TINY = (
    "model.network_config.params.num_layers=2",
    "model.network_config.params.hidden_size=128",
    "model.network_config.params.num_attention_heads=2",
    "data.params.latent_shape=[16,3,8,8]",
    "deepspeed.train_micro_batch_size_per_gpu=2",
)
_TIMEOUT_SECONDS = 240
_NUM_WARM_UP = 5  # steps left out of the step time
_NUM_AVERAGED = 5  # first and last steps whose mean losses are compared
# Float32 losses against those of the CPU. Noise of 1e-6 on the output of every linear changes them by
# 1e-7 (on a CPU); a different exp changes the embedding of a large timestep by about 1e-5.
_RELATIVE_TOLERANCE = 1e-4


class CpuDrawsTrainer(Trainer):
    """Draws timesteps and noise on the CPU: the generator of a GPU gives different numbers."""

    def compute_loss(self, batch: dict) -> Tensor:
        """Compute the loss of a batch of latents and embeddings."""
        rng = SlotRandom(self.args.seed, self.step, batch["slots"], self.parts.data.global_batch)
        latents, conditioning = self.encoder(batch, rng)
        loss = self.diffusion.loss
        idx = loss.sigma_sampler.sample(rng).to(latents.device)
        noise = rng.normal("noise", latents.shape).to(latents.device)
        denoiser = self.diffusion.denoiser
        return loss.at(self.engine, denoiser, latents, conditioning, idx, noise).mean()


def check_training(settings: Settings) -> Outcome:
    """Run the three trainings and judge their losses."""
    cpu = torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        runs = [("bf16", settings.device), ("fp32", settings.device), ("fp32", cpu)]
        folders = (Path(folder) / str(number) for number in range(len(runs)))
        pairs = zip(runs, folders, strict=True)
        return judge(*(_train(*run, settings.is_tiny, out) for run, out in pairs))


def judge(bf16: Sequence[Row], fp32: Sequence[Row], expected: Sequence[Row]) -> Outcome:
    """Judge three runs by the lines of their metrics.jsonl, one line per step."""
    losses = {
        "bf16": [line["loss"] for line in bf16],
        "fp32": [line["loss"] for line in fp32],
        "fp32_of_cpu": [line["loss"] for line in expected],
    }
    problems = []
    for run, values in losses.items():  # metrics.jsonl has null for a loss that is not finite
        if any(loss is None or not math.isfinite(loss) for loss in values):
            return Outcome({"losses": losses}, problems=[f"{run}: a loss is not finite"])
        # Means of several steps: single losses vary with their timesteps.
        first, last = _mean(values[:_NUM_AVERAGED]), _mean(values[-_NUM_AVERAGED:])
        if not last < first:
            problems.append(f"{run}: the loss does not fall: {first:.4f}, then {last:.4f}")
    # Both float32 runs have the same draws.
    pairs = zip(losses["fp32"], losses["fp32_of_cpu"], strict=True)
    difference = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
    if not difference <= _RELATIVE_TOLERANCE:
        problems.append(
            f"fp32: the losses differ from the CPU's by {difference:.2e} > {_RELATIVE_TOLERANCE}"
        )
    names = ("bf16, ZeRO-2", "fp32, ZeRO-2", "fp32, ZeRO-2, on the CPU")
    runs = zip(names, (bf16, fp32, expected), losses.values(), strict=True)
    rows = [
        {
            "run": name,
            "num_steps": len(lines),
            "loss_first_5": _mean(values[:_NUM_AVERAGED]),
            "loss_last_5": _mean(values[-_NUM_AVERAGED:]),
            **spread([line["step_ms"] for line in lines[_NUM_WARM_UP:]]),
            **{key: value for key, value in lines[-1].items() if key.startswith("memory")},
            "losses": values,
        }
        for name, lines, values in runs
    ]
    numbers = {"fp32_largest_relative_difference_from_cpu": difference}
    return Outcome(numbers, rows, [key for key in rows[0] if key != "losses"], problems)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _train(run: str, device: torch.device, is_tiny: bool, folder: Path) -> list[Row]:
    """Train in a process and return the lines of metrics.jsonl, one per step."""
    environment = dict(os.environ)
    if device.type == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", "bench.checks.training_on_device", run, str(folder)]
    with open(folder.with_suffix(".log"), "w+") as log:
        process = subprocess.Popen(
            [*command, *["--tiny"] * is_tiny],
            cwd=_ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            status: object = process.wait(timeout=_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            status = f"none, killed after {_TIMEOUT_SECONDS} s"
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        end = "\n".join(log.read().splitlines()[-15:])
    if status != 0:
        raise RuntimeError(f"{run} on {device}: exit status {status}\n{end}")
    (path,) = folder.glob("*/metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", choices=_OVERRIDES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("highest")  # no TF32
    overrides = [*_OVERRIDES[arguments.run], f"args.save={arguments.folder}"]
    overrides += _TINY if arguments.tiny else ()
    config = load_config([_CONFIG], overrides, allow_import=["bench"])
    (CpuDrawsTrainer if arguments.run == "fp32" else Trainer)(config).train()


if __name__ == "__main__":
    main()
