"""Time sampling against diffusers' pipeline with the same weights, steps and guidance:
python -m bench.steps.sampling_peers [--model tiny] [--device cpu] [--steps 4]

Both start from the same noise and text embeddings and return latents: the text encoder and the VAE
are the same code on both sides. The results are compared first. Calls take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from bench.harness.machine import write_report
from bench.harness.outcome import Outcome, Row, table
from bench.steps.step_models import MODELS, Variant, draw_batch
from bench.steps.step_sides import Ours, Theirs
from cogfast.diagnostics.timing import spread, wait_for
from cogfast.diffusion.denoiser import Conditioning, DiscreteDenoiser, VideoScaling
from cogfast.diffusion.guidance import VanillaCFG
from cogfast.diffusion.noise_schedule import ZeroSNRDDPMDiscretization
from cogfast.diffusion.sampler import VideoDDIMSampler

GUIDANCE = 6.0
# Largest difference of the latents over their largest value: rounding of every step adds up.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}


def make_ours(variant: Variant, num_steps: int) -> Callable[[], Tensor]:
    """Return a call of cogfast's sampler, which gives latents [B, C, T, h, w] float32."""
    network, batch = Ours(variant).network.eval(), draw_batch(variant)
    schedule = ZeroSNRDDPMDiscretization()
    denoiser = DiscreteDenoiser(VideoScaling(), schedule)
    # The spacing of CogVideoX's published pipelines.
    sampler = VideoDDIMSampler(
        schedule, num_steps, VanillaCFG(GUIDANCE), timestep_spacing="trailing"
    )
    given, empty = Conditioning(batch.text), Conditioning(torch.zeros_like(batch.text))
    return lambda: sampler(denoiser, network, batch.latents, given, empty)


def make_diffusers(variant: Variant, num_steps: int) -> Callable[[], Tensor]:
    """Return a call of CogVideoXPipeline, which gives latents [B, C, T, h, w]."""
    from diffusers import CogVideoXDDIMScheduler, CogVideoXPipeline

    network, batch, config = Theirs(variant).network.eval(), draw_batch(variant), variant.config
    scheduler = CogVideoXDDIMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        snr_shift_scale=1.0,
        timestep_spacing="trailing",
        clip_sample=False,
    )
    pipeline = CogVideoXPipeline(
        tokenizer=None, text_encoder=None, vae=None, transformer=network, scheduler=scheduler
    )
    pipeline.set_progress_bar_config(disable=True)
    factor = pipeline.vae_scale_factor_spatial
    options = {
        "prompt_embeds": batch.text,
        "negative_prompt_embeds": torch.zeros_like(batch.text),
        "latents": batch.latents.transpose(1, 2),
        "height": config.latent_height * factor,
        "width": config.latent_width * factor,
        "num_frames": config.num_frames,
        "num_inference_steps": num_steps,
        "guidance_scale": GUIDANCE,
        "output_type": "latent",
    }
    return lambda: pipeline(**options).frames.transpose(1, 2)


def measure(variant: Variant, model: str, num_steps: int, rounds: int) -> Outcome:
    """Compare both results, then time both sides in turn."""
    calls = {
        "ours": make_ours(variant, num_steps),
        "diffusers": make_diffusers(variant, num_steps),
    }
    ours, theirs = (call().float() for call in calls.values())
    error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    row: Row = {
        "model": model,
        "dtype": str(variant.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "batch": variant.batch_size,
        "steps": num_steps,
        "difference": error,
    }
    shown = [*row, "ours median_ms", "diffusers median_ms", "speed-up"]
    if not error <= _TOLERANCE[variant.dtype]:
        problem = f"{model}: the latents differ by {error:.1e} of the largest"
        return Outcome(rows=[row], shown=[*row], problems=[problem])
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name in sorted(calls, reverse=i % 2 == 0):
            wait_for(variant.device)
            start = time.perf_counter()
            calls[name]()
            wait_for(variant.device)
            times[name].append((time.perf_counter() - start) * 1e3)
    for name, samples in times.items():
        row |= {f"{name} {key}": value for key, value in spread(samples).items()}
    pairs = zip(times["diffusers"], times["ours"], strict=True)
    row["speed-up"] = statistics.median(theirs / ours for theirs, ours in pairs)
    return Outcome(rows=[row], shown=shown)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # A model of images also takes the latents of one, which are not drawn here.
    of_text = [n for n, (config, _) in MODELS.items() if config.in_channels == config.out_channels]
    parser.add_argument("--model", choices=of_text, default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    config, _ = MODELS[arguments.model]
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    outcome = measure(
        Variant(config, 1, dtype, device), arguments.model, arguments.steps, arguments.rounds
    )
    print(table(outcome))
    for problem in outcome.problems:
        print(f"  WRONG: {problem}")
    write_report(arguments.out, "sampling_peers", device, rows=outcome.rows)
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
