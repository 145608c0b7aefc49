"""Time a step of `cogfast finetune` against the loop of CogVideo's diffusers trainer:

    python -m bench.steps.finetune_steps [--model tiny wide --mode lora sft
        --checkpointing false true --pairs 20] [--out FILE]

Both take the same arguments, weights, clips and encoded captions. The steps take turns in one process: a
step of cogfast is a pass through its trainer's loop, with reading, logging and the update of the EMA
that CogVideo's trainer does not have. Losses of the first steps, with equal adapters, timesteps and
noise, are compared first; a case that disagrees is not timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from bench.clips.finetune_cache import Encoders
from bench.clips.finetune_data import options, size_of, write_data, write_pipeline
from bench.harness.machine import write_report
from bench.harness.outcome import Outcome, Row, table
from bench.steps.finetune_peer import Peer
from bench.steps.step_models import MODELS, Variant
from bench.steps.step_sides import as_diffusers, free_memory
from cogfast.core.slot_random import SlotRandom
from cogfast.diagnostics.timing import spread, wait_for
from cogfast.finetune import Args, CogVideoXT2VLoraTrainer, CogVideoXT2VSftTrainer

TRAINERS = {"lora": CogVideoXT2VLoraTrainer, "sft": CogVideoXT2VSftTrainer}
_NUM_CLIPS = 4
_WARM_UP = 3  # steps
_COMPARED = 3  # steps
_TOLERANCE = 1e-5  # relative, of a loss
_SHOWN = ("model", "mode", "gradient_checkpointing", "ratio", "ours_median_ms", "ours_p10_ms")
_SHOWN += ("ours_p90_ms", "theirs_median_ms", "theirs_p10_ms", "theirs_p90_ms", "not_timed")


def prepare(folder: Path, model: str) -> Variant:
    """Write the pipeline, the clips, and the cache of CogVideo's trainer; return the model's sizes."""
    variant = write_pipeline(folder / "pipeline", model)
    write_data(folder / "data", _NUM_CLIPS, size_of(variant))
    Encoders(arguments_of(folder, "encoding", size_of(variant))).encode_all()
    return variant


def arguments_of(folder: Path, name: str, size: tuple[int, int], **changes) -> Args:
    return options(folder / "pipeline", folder / "data", folder / name, size, **changes)


def compare(args: Args, out: Path, steps: int = _COMPARED) -> list[tuple[float, float]]:
    """Train a few steps on both sides, from equal weights, batches and draws; return the losses."""
    args = replace(args, train_steps=steps, lr_warmup_steps=0, learning_rate=1e-3)
    peer, found = Peer(args, out), []

    class Both(TRAINERS[args.training_type]):
        def compute_loss(self, batch: dict) -> Tensor:
            run = self._prepare()
            if not found and args.training_type == "lora":
                copy_adapters(run.engine.transformer, peer.model)
            rng = SlotRandom(args.seed, run.step, batch["slots"], run.global_batch)
            latents, given = run.encoder(dict(batch), rng)
            timesteps = run.diffusion.loss.sigma_sampler.sample(rng)
            noise = rng.normal("noise", latents.shape).transpose(1, 2)
            peer.draw = lambda clean: (timesteps, noise.to(clean))
            theirs = peer.step({"encoded_videos": latents, "prompt_embedding": given.text})
            loss = super().compute_loss(batch)
            found.append((loss.item(), theirs))
            return loss

    Both(args).fit()
    return found


@torch.no_grad()
def copy_adapters(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    """Give PEFT's adapters the values of cogfast's."""
    targets = dict(theirs.named_parameters())
    for our_name, tensor in ours.named_parameters():
        if ".matrix_" in our_name:
            for name, part in as_diffusers(our_name, tensor):
                targets[name].copy_(part)


def time_pairs(args: Args, out: Path, pairs: int) -> dict[str, list[float]]:
    """Return the milliseconds of the steps of both sides, which alternate."""
    steps, times = Peer(args, out).steps(), {"ours": [], "theirs": []}
    args = replace(args, train_steps=_WARM_UP + pairs + 1)
    run = TRAINERS[args.training_type](args)._prepare()
    device, rate = run.groups.device, run.learning_rate
    ended: list[float] = []  # when the step of the other side had ended

    # The loop asks for the rate once, at the start of each step.
    def learning_rate(step: int) -> float:
        wait_for(device)
        started = time.perf_counter()
        if ended:
            times["ours"].append((started - ended.pop()) * 1e3)
        next(steps)
        wait_for(device)
        ended.append(time.perf_counter())
        times["theirs"].append((ended[0] - started) * 1e3)
        return rate(step)

    run.learning_rate = learning_rate
    run.train()
    # The peer's last step has no partner.
    return {side: samples[_WARM_UP : _WARM_UP + pairs] for side, samples in times.items()}


def measure(
    folder: Path, model: str, variant: Variant, mode: str, is_checkpointed: bool, pairs: int
) -> tuple[Row, list[str]]:
    """Return a row for a case, and the problems."""
    row: dict[str, object] = {
        "model": model,
        "mode": mode,
        "gradient_checkpointing": is_checkpointed,
        "num_tokens": variant.num_tokens,
        "dtype": "float32",
    }
    given = {
        "training_type": mode,
        "gradient_checkpointing": is_checkpointed,
        "num_workers": 0,
        "train_steps": pairs,
    }
    case = f"{mode}-{is_checkpointed}"
    build = lambda name: arguments_of(folder, f"{case}-{name}", size_of(variant), **given)
    losses = compare(build("compared"), folder / f"{case}-peer")
    differences = [abs(a - b) / abs(b) for a, b in losses]
    row["largest_difference"] = max(differences)
    if not all(difference <= _TOLERANCE for difference in differences):  # also true for NaN
        problem = f"{model} {case}: losses {losses}"
        return {**row, "not_timed": "the two sides disagree"}, [problem]
    times = time_pairs(build("timed"), folder / f"{case}-timed-peer", pairs)
    for side, samples in times.items():
        row |= {f"{side}_{key}": value for key, value in spread(samples).items()}
    row["ratio"] = statistics.median(
        a / b for a, b in zip(times["ours"], times["theirs"], strict=True)
    )
    free_memory(torch.device("cpu"))
    return row, []


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["tiny"])
    parser.add_argument("--mode", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument(
        "--checkpointing", nargs="+", choices=["false", "true"], default=["false", "true"]
    )
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    load, rows, problems = os.getloadavg()[0], [], []
    for model in arguments.model:
        with tempfile.TemporaryDirectory() as name:
            variant = prepare(Path(name), model)
            for mode, flag in product(arguments.mode, arguments.checkpointing):
                row, wrong = measure(
                    Path(name), model, variant, mode, flag == "true", arguments.pairs
                )
                print(row, flush=True)
                rows.append(row)
                problems += wrong
    shown = [key for key in _SHOWN if any(key in row for row in rows)]
    print(table(Outcome(rows=rows, shown=shown)))
    for problem in problems:
        print(f"  WRONG: {problem}")
    write_report(
        arguments.out,
        "finetune_step",
        torch.device("cpu"),
        threads=arguments.threads,
        load_average={"before": load, "after": os.getloadavg()[0]},
        rows=rows,
        problems=problems,
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
