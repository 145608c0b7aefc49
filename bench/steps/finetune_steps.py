"""Time a step of `cogfast finetune` against the loop of CogVideo's diffusers trainer:

    python -m bench.steps.finetune_steps [--model tiny wide --pairs 20]

Both take the same arguments and weights and samples of the same shape. The steps take turns in one
process: a step of cogfast is a pass through its trainer's loop, with reading, logging and the update of
the EMA that CogVideo's trainer does not have. tests/finetune/test_runs.py compares the losses of both.
"""

from __future__ import annotations

import io
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bench.harness.command import parser_of
from bench.harness.outcome import Outcome, Row, table
from bench.harness.timing import spread, wait_for
from bench.steps.step_models import MODELS, Variant
from bench.steps.step_sides import Theirs, free_memory
from cogfast.core.shapes import SPATIAL_COMPRESSION, num_latent_frames
from cogfast.finetune import Args, CogVideoXT2VLoraTrainer, CogVideoXT2VSftTrainer
from cogfast.model.config import TransformerConfig

TRAINERS = {"lora": CogVideoXT2VLoraTrainer, "sft": CogVideoXT2VSftTrainer}
NUM_FRAMES = 9  # CogVideo's trainer takes 8N+1
_NUM_CLIPS = 4
_WARM_UP = 3  # steps
_SHOWN = ("model", "mode", "gradient_checkpointing", "ratio", "ours_median_ms", "ours_p10_ms")
_SHOWN += ("ours_p90_ms", "theirs_median_ms", "theirs_p10_ms", "theirs_p90_ms")


def prepare(folder: Path, model: str) -> Variant:
    """Write a pipeline with random weights, clips with captions, and encoded samples for the peer."""
    import sentencepiece
    from diffusers import AutoencoderKLCogVideoX, CogVideoXDPMScheduler, CogVideoXPipeline
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, T5Config, T5EncoderModel

    from cogfast.extensions.sample.writer import write_video

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

    data = folder / "data"
    rows, columns = (SPATIAL_COMPRESSION * n for n in (config.latent_height, config.latent_width))
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


def arguments_of(folder: Path, name: str, config: TransformerConfig, **changes: Any) -> Args:
    """Return the arguments of both sides: those of CogVideo's scripts, with other paths and sizes."""
    rows, columns = (SPATIAL_COMPRESSION * n for n in (config.latent_height, config.latent_width))
    given = {
        "model_path": folder / "pipeline",
        "model_name": "cogvideox-t2v",
        "model_type": "t2v",
        "output_dir": folder / name,
        "report_to": "tensorboard",
        "data_root": folder / "data",
        "caption_column": "prompts.txt",
        "video_column": "videos.txt",
        "train_resolution": f"{NUM_FRAMES}x{rows}x{columns}",
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

    It has the operations of that trainer in their order, without accelerate, its progress bar and
    TensorBoard: torch's AdamW updates and a schedule of diffusers sets the rate. Model and noise
    schedule are those of diffusers, adapters of PEFT.
    """

    def __init__(self, args: Args) -> None:
        from diffusers import CogVideoXDPMScheduler, CogVideoXTransformer3DModel
        from diffusers.optimization import get_scheduler
        from peft import LoraConfig

        folder = args.model_path
        model = CogVideoXTransformer3DModel.from_pretrained(folder, subfolder="transformer")
        self.scheduler = CogVideoXDPMScheduler.from_pretrained(folder, subfolder="scheduler")
        model.requires_grad_(args.training_type == "sft")
        if args.training_type == "lora":
            ranks = {"r": args.rank, "lora_alpha": args.lora_alpha}
            model.add_adapter(LoraConfig(**ranks, target_modules=args.target_modules))
        if args.gradient_checkpointing:
            model.enable_gradient_checkpointing()
        self.model, self.max_grad_norm = model.train(), args.max_grad_norm
        betas = (args.beta1, args.beta2)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        adam = {"lr": args.learning_rate, "eps": args.epsilon, "weight_decay": args.weight_decay}
        self.optimizer = torch.optim.AdamW(self.trained, betas=betas, **adam)
        steps = (args.lr_warmup_steps, args.train_steps)
        self.schedule = get_scheduler(args.lr_scheduler, self.optimizer, *steps)
        self.loader = DataLoader(EncodedSamples(args.data_root), args.batch_size, shuffle=True)

    def steps(self) -> Iterator[float]:
        """Train without an end; yield the loss after each step."""
        while True:
            for batch in self.loader:
                loss = self.loss(batch)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.trained, self.max_grad_norm)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
                yield loss.item()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss of encoded_video [B, C, T, h, w] and prompt_embedding [B, L, E]."""
        from diffusers.models.embeddings import get_3d_rotary_pos_embed

        clean, config = batch["encoded_video"].transpose(1, 2), self.model.config
        timesteps = torch.randint(0, self.scheduler.config.num_train_timesteps, (len(clean),))
        noised = self.scheduler.add_noise(clean, torch.randn_like(clean), timesteps)
        # That trainer makes the positions again in each step.
        grid = tuple(side // config.patch_size for side in clean.shape[-2:])
        sizes = {"grid_size": grid, "max_size": grid, "temporal_size": clean.shape[1]}
        rotary = get_3d_rotary_pos_embed(
            config.attention_head_dim, None, **sizes, grid_type="slice"
        )
        output = self.model(
            hidden_states=noised,
            encoder_hidden_states=batch["prompt_embedding"],
            timestep=timesteps,
            image_rotary_emb=rotary,
            return_dict=False,
        )[0]
        found = self.scheduler.get_velocity(output, noised, timesteps)
        weights = 1 / (1 - self.scheduler.alphas_cumprod[timesteps])
        errors = weights.view(-1, 1, 1, 1, 1) * (found - clean) ** 2
        return errors.reshape(len(clean), -1).mean(dim=1).mean()


def time_pairs(args: Args, pairs: int) -> dict[str, list[float]]:
    """Return the milliseconds of the steps of both sides, which alternate."""
    steps, times = Peer(args).steps(), {"ours": [], "theirs": []}
    args = args.model_copy(update={"train_steps": _WARM_UP + pairs + 1})
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
) -> Row:
    """Return a row for a case."""
    given = {"training_type": mode, "gradient_checkpointing": is_checkpointed, "train_steps": pairs}
    args = arguments_of(folder, f"{mode}-{is_checkpointed}", variant.config, **given)
    times = time_pairs(args, pairs)
    row: dict[str, object] = {"model": model, "mode": mode, "dtype": "float32"}
    row |= {"gradient_checkpointing": is_checkpointed, "num_tokens": variant.num_tokens}
    for side, samples in times.items():
        row |= {f"{side}_{key}": value for key, value in spread(samples).items()}
    both = zip(times["ours"], times["theirs"], strict=True)
    row["ratio"] = statistics.median(a / b for a, b in both)
    free_memory(torch.device("cpu"))
    return row


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["tiny"])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    rows = []
    for model in arguments.model:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            variant = prepare(folder, model)
            for mode, flag in product(TRAINERS, (False, True)):
                case = (mode, flag, arguments.pairs)
                rows.append(measure(folder, model, variant, *case))
                print(rows[-1], flush=True)
    print(table(Outcome(rows=rows, shown=_SHOWN)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
