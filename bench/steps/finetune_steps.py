"""Time a step of `cogfast finetune` against the loop of CogVideo's diffusers trainer:

    python -m bench.steps.finetune_steps [--model tiny wide --mode lora sft
        --checkpointing false true --pairs 20] [--out FILE]

Both take the same arguments and weights and samples of the same shape. The steps take turns in one
process: a step of cogfast is a pass through its trainer's loop, with reading, logging and the update of
the EMA that CogVideo's trainer does not have. Losses of the first steps, with equal adapters, samples,
timesteps and noise, are compared first; a case that disagrees is not timed.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bench.harness.machine import write_report
from bench.harness.outcome import Outcome, Row, table
from bench.steps.step_models import MODELS, Variant
from bench.steps.step_sides import Theirs, as_diffusers, free_memory
from cogfast.core.shapes import SPATIAL_COMPRESSION, num_latent_frames
from cogfast.core.slot_random import SlotRandom
from cogfast.diagnostics.timing import spread, wait_for
from cogfast.finetune import Args, CogVideoXT2VLoraTrainer, CogVideoXT2VSftTrainer
from cogfast.model.transformer import OUTPUT_NORM_EPS

TRAINERS = {"lora": CogVideoXT2VLoraTrainer, "sft": CogVideoXT2VSftTrainer}
NUM_FRAMES = 9  # CogVideo's trainer takes 8N+1
_NUM_CLIPS = 4
_WARM_UP = 3  # steps
_COMPARED = 3  # steps
_TOLERANCE = 1e-5  # relative, of a loss
_SHOWN = ("model", "mode", "gradient_checkpointing", "ratio", "ours_median_ms", "ours_p10_ms")
_SHOWN += ("ours_p90_ms", "theirs_median_ms", "theirs_p10_ms", "theirs_p90_ms", "not_timed")


def prepare(folder: Path, model: str) -> Variant:
    """Write a pipeline with random weights, clips with captions, and encoded samples for the peer."""
    import sentencepiece
    from diffusers import AutoencoderKLCogVideoX, CogVideoXDPMScheduler, CogVideoXPipeline
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, T5Config, T5EncoderModel

    from cogfast.data.video.writer import write_video

    config = replace(MODELS[model][0], num_frames=NUM_FRAMES)
    variant = Variant(config, 1, torch.float32, torch.device("cpu"))
    captions = [f"a video of squares in the sea, number {i}" for i in range(20)]
    pieces = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(captions),
        model_writer=pieces,
        vocab_size=60,
        hard_vocab_limit=False,
        **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "minloglevel": 2},
    )
    (folder / "t5").mkdir()
    (folder / "t5" / "spiece.model").write_bytes(pieces.getvalue())
    torch.manual_seed(0)
    sizes = {"d_model": config.text_hidden_size, "d_kv": 16, "d_ff": 128, "vocab_size": 160}
    t5 = T5Config(**sizes, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu")
    T5EncoderModel(t5).save_pretrained(folder / "t5")
    vae = AutoencoderKLCogVideoX(block_out_channels=(32,) * 4, layers_per_block=1)
    vae.register_to_config(scaling_factor=0.7)
    scheduler = CogVideoXDPMScheduler(
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        snr_shift_scale=1.0,
    )
    CogVideoXPipeline(
        tokenizer=AutoTokenizer.from_pretrained(folder / "t5"),
        text_encoder=T5EncoderModel.from_pretrained(folder / "t5"),
        vae=vae,
        transformer=Theirs(variant).network,
        scheduler=scheduler,
    ).save_pretrained(folder / "pipeline")

    data, (rows, columns) = folder / "data", size_of(variant)
    frames = num_latent_frames(NUM_FRAMES)
    latents = (config.in_channels, frames, config.latent_height, config.latent_width)
    for i in range(_NUM_CLIPS):
        video = np.random.default_rng(i).integers(0, 256, (NUM_FRAMES, rows, columns, 3), np.uint8)
        write_video(data / "videos" / f"{i}.mp4", video, fps=8)
        sample = {
            "encoded_video": torch.randn(latents),
            "prompt_embedding": torch.randn(config.text_length, config.text_hidden_size),
        }
        save_file(sample, data / f"{i}.safetensors")
    (data / "prompts.txt").write_text("".join(f"{c}\n" for c in captions[:_NUM_CLIPS]))
    (data / "videos.txt").write_text("".join(f"videos/{i}.mp4\n" for i in range(_NUM_CLIPS)))
    return variant


def size_of(variant: Variant) -> tuple[int, int]:
    """Return the rows and columns of the clips that a model is trained on."""
    config = variant.config
    return (
        config.latent_height * SPATIAL_COMPRESSION,
        config.latent_width * SPATIAL_COMPRESSION,
    )


def arguments_of(folder: Path, name: str, size: tuple[int, int], **changes: Any) -> Args:
    """Return the arguments of both sides: those of CogVideo's scripts, with other paths and sizes."""
    given = {
        "model_path": folder / "pipeline",
        "model_name": "cogvideox-t2v",
        "model_type": "t2v",
        "output_dir": folder / name,
        "report_to": "tensorboard",
        "data_root": folder / "data",
        "caption_column": "prompts.txt",
        "video_column": "videos.txt",
        "train_resolution": f"{NUM_FRAMES}x{size[0]}x{size[1]}",
        "train_epochs": 10,
        "seed": 42,
        "batch_size": 1,
        "num_workers": 0,
        "mixed_precision": "no",
    }
    return Args(**given | changes)


class EncodedSamples(Dataset):
    """Latents and embeddings, read from disk for each batch as CogVideo's trainer reads its cache."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.safetensors"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        return load_file(self.files[index])


class Peer:
    """The training loop of CogVideo's diffusers trainer, text-to-video 1.0, in our own words.

    It has the operations of that trainer in their order: accelerate accumulates and clips, torch's AdamW
    updates, a schedule of diffusers sets the rate, and the loss goes to a progress bar and to TensorBoard
    after every step. Model and noise schedule are those of diffusers, adapters of PEFT. Build it before
    cogfast starts its processes: accelerate would join them.
    """

    def __init__(self, args: Args, out: Path) -> None:
        from accelerate import Accelerator
        from accelerate.utils import ProjectConfiguration
        from diffusers import CogVideoXDPMScheduler, CogVideoXTransformer3DModel
        from diffusers.optimization import get_scheduler
        from peft import LoraConfig
        from tqdm import tqdm

        self.args = args
        self.accelerator = Accelerator(
            project_config=ProjectConfiguration(
                project_dir=str(out), logging_dir=str(out / "logs")
            ),
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            mixed_precision=args.mixed_precision,
            log_with="tensorboard",
        )
        folder = args.model_path
        model = CogVideoXTransformer3DModel.from_pretrained(folder, subfolder="transformer")
        model.norm_out.norm.eps = OUTPUT_NORM_EPS  # else the outputs differ by 2e-5
        self.config = model.config
        self.scheduler = CogVideoXDPMScheduler.from_pretrained(folder, subfolder="scheduler")
        model.requires_grad_(args.training_type == "sft")
        if args.training_type == "lora":
            adapters = LoraConfig(
                r=args.rank, lora_alpha=args.lora_alpha, target_modules=args.target_modules
            )
            model.add_adapter(adapters)
        if args.gradient_checkpointing:
            model.enable_gradient_checkpointing()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            [{"params": trained, "lr": args.learning_rate}],
            betas=(args.beta1, args.beta2),
            eps=args.epsilon,
            weight_decay=args.weight_decay,
        )
        schedule = get_scheduler(
            args.lr_scheduler,
            optimizer,
            num_warmup_steps=args.lr_warmup_steps,
            num_training_steps=args.train_steps,
        )
        loader = DataLoader(EncodedSamples(args.data_root), args.batch_size, shuffle=True)
        prepared = self.accelerator.prepare(model, optimizer, loader, schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared
        self.accelerator.init_trackers("bench")
        self.progress = tqdm(total=args.train_steps, file=io.StringIO(), desc="Training steps")
        self.num_steps = 0
        self.draw: Callable[[Tensor], tuple[Tensor, Tensor]] = self._draw
        self.model.train()

    def steps(self) -> Iterator[float]:
        """Train without an end; yield the loss after each micro-batch."""
        while True:
            for batch in self.loader:
                yield self.step(batch)

    def step(self, batch: dict[str, Tensor]) -> float:
        """Take a step; the batch has encoded_video [B, C, T, h, w] and prompt_embedding [B, L, E]."""
        accelerator, logs = self.accelerator, {}
        with accelerator.accumulate([self.model]):
            loss = self.loss(batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                limit = self.args.max_grad_norm
                norm = accelerator.clip_grad_norm_(self.model.parameters(), limit)
                logs["grad_norm"] = norm.item()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        if accelerator.sync_gradients:
            self.progress.update(1)
            self.num_steps += 1
        logs |= {"loss": loss.detach().item(), "lr": self.schedule.get_last_lr()[0]}
        self.progress.set_postfix(logs)
        accelerator.log(logs, step=self.num_steps)
        return logs["loss"]

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        clean = batch["encoded_video"].transpose(1, 2)
        text = batch["prompt_embedding"].to(clean.dtype)
        timesteps, noise = self.draw(clean)
        noised = self.scheduler.add_noise(clean, noise, timesteps)
        output = self.model(
            hidden_states=noised,
            encoder_hidden_states=text,
            timestep=timesteps,
            image_rotary_emb=self._rotary(clean),
            return_dict=False,
        )[0]
        found = self.scheduler.get_velocity(output, noised, timesteps)
        weights = 1 / (1 - self.scheduler.alphas_cumprod[timesteps])
        errors = weights.view(-1, 1, 1, 1, 1) * (found - clean) ** 2
        return errors.reshape(len(clean), -1).mean(dim=1).mean()

    def _draw(self, clean: Tensor) -> tuple[Tensor, Tensor]:
        number = self.scheduler.config.num_train_timesteps
        timesteps = torch.randint(0, number, (len(clean),), device=clean.device)
        return timesteps, torch.randn_like(clean)

    def _rotary(self, clean: Tensor) -> Any:
        """Return the positions, which that trainer makes again in each step."""
        from diffusers.models.embeddings import get_3d_rotary_pos_embed

        grid = tuple(side // self.config.patch_size for side in clean.shape[-2:])
        return get_3d_rotary_pos_embed(
            embed_dim=self.config.attention_head_dim,
            crops_coords=None,
            grid_size=grid,
            temporal_size=clean.shape[1],
            grid_type="slice",
            max_size=grid,
            device=clean.device,
        )


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
            theirs = peer.step({"encoded_video": latents, "prompt_embedding": given.text})
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
    given = {"training_type": mode, "gradient_checkpointing": is_checkpointed, "train_steps": pairs}
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
