"""The training loop of CogVideo's diffusers trainer, for bench.steps.finetune_steps.

It has the operations of that trainer in their order, in our own words: accelerate accumulates and
clips, torch's AdamW updates, a schedule of diffusers sets the rate, and the loss goes to a progress bar
and to TensorBoard after every step. Model and noise schedule are those of diffusers, adapters of PEFT.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bench.clips.finetune_data import latent_file, samples_of, text_file
from cogfast.finetune import Args
from cogfast.model.transformer import OUTPUT_NORM_EPS

Draws = tuple[Tensor, Tensor]  # timesteps [B], noise [B, T, C, h, w]


class CachedSamples(Dataset):
    """Latents and embeddings of two files for each sample, read from disk for each batch."""

    def __init__(self, args: Args) -> None:
        self.files = [(latent_file(args, v), text_file(args, c)) for v, c in samples_of(args)]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        latents, text = self.files[index]
        return {
            "prompt_embedding": load_file(text)["prompt_embedding"],
            "encoded_video": load_file(latents)["encoded_video"],
        }


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    stack = lambda name: torch.stack([sample[name] for sample in samples])
    return {
        "encoded_videos": stack("encoded_video"),
        "prompt_embedding": stack("prompt_embedding"),
    }


class Peer:
    """A run of CogVideo's trainer with the arguments of `cogfast finetune`, text-to-video 1.0.

    Build it before cogfast starts its processes: accelerate would join them. ImportError if
    accelerate, diffusers or, for LoRA, peft is not installed.
    """

    def __init__(self, args: Args, out: Path) -> None:
        from accelerate import Accelerator
        from accelerate.utils import ProjectConfiguration
        from diffusers import CogVideoXDPMScheduler, CogVideoXTransformer3DModel
        from diffusers.optimization import get_scheduler
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
        self.config, self.model = model.config, model
        self.scheduler = CogVideoXDPMScheduler.from_pretrained(folder, subfolder="scheduler")
        model.requires_grad_(args.training_type == "sft")
        if args.training_type == "lora":
            self._add_lora()
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
        loader = DataLoader(
            CachedSamples(args),
            batch_size=args.batch_size,
            num_workers=args.num_workers,
            pin_memory=args.pin_memory and self.accelerator.device.type == "cuda",
            shuffle=True,
            collate_fn=collate,
        )
        prepared = self.accelerator.prepare(model, optimizer, loader, schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared
        self.accelerator.init_trackers("bench")
        self.progress = tqdm(total=args.train_steps, file=io.StringIO(), desc="Training steps")
        self.num_steps = 0
        self.draw: Callable[[Tensor], Draws] = self._draw
        self.model.train()

    def _add_lora(self) -> None:
        from peft import LoraConfig

        args = self.args
        config = LoraConfig(
            r=args.rank,
            lora_alpha=args.lora_alpha,
            init_lora_weights=True,
            target_modules=args.target_modules,
        )
        self.model.add_adapter(config)

    def steps(self) -> Iterator[float]:
        """Train without an end; yield the loss after each micro-batch."""
        while True:
            for batch in self.loader:
                yield self.step(batch)

    def step(self, batch: dict[str, Tensor]) -> float:
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
        """Return the mean loss of {"encoded_videos": [B, C, T, h, w], "prompt_embedding": [B, L, E]}."""
        clean = batch["encoded_videos"].transpose(1, 2)
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

    def _draw(self, clean: Tensor) -> Draws:
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
