"""Trainers in the shape of a super-resolution fork of CogVideo's diffusers trainer, with two stages.

Run as a script, the first word names the class and the others are arguments.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKLCogVideoX,
    CogVideoXDPMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
)
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from torch import Tensor
from transformers import AutoTokenizer, T5EncoderModel

from cogfast.finetune import Args, Components, Trainer


class SuperResolutionArgs(Args):
    low_folder: str = "low"
    """folder of the low quality clips, beside that of the clips"""
    noise_step: int = 0
    """timestep of the noise on the low quality latents; 0: none"""
    sr_noise_step: int = 399
    """timestep that the network gets"""


class StageOne(Trainer):
    """Predicts the latents of the high quality clip from those of the low quality one, in one step."""

    UNLOAD_LIST = ["text_encoder", "vae"]  # noqa: RUF012 - upstream's classes have it

    def load_components(self) -> Components:
        components, path = Components(), str(self.args.model_path)
        components.pipeline_cls = CogVideoXPipeline
        components.tokenizer = AutoTokenizer.from_pretrained(path, subfolder="tokenizer")
        components.text_encoder = T5EncoderModel.from_pretrained(path, subfolder="text_encoder")
        components.transformer = CogVideoXTransformer3DModel.from_pretrained(
            path, subfolder="transformer"
        )
        components.vae = AutoencoderKLCogVideoX.from_pretrained(path, subfolder="vae")
        components.scheduler = CogVideoXDPMScheduler.from_pretrained(path, subfolder="scheduler")
        return components

    def initialize_pipeline(self) -> CogVideoXPipeline:
        parts = self.components
        return CogVideoXPipeline(
            tokenizer=parts.tokenizer,
            text_encoder=parts.text_encoder,
            vae=parts.vae,
            transformer=self.accelerator.unwrap_model(parts.transformer),
            scheduler=parts.scheduler,
        )

    def encode_video(self, video: Tensor) -> Tensor:
        vae = self.components.vae
        found = vae.encode(video.to(vae.device, dtype=vae.dtype)).latent_dist
        return found.sample() * vae.config.scaling_factor

    def encode_text(self, prompt: str) -> Tensor:
        ids = self.components.tokenizer(
            prompt,
            padding="max_length",
            max_length=self.state.transformer_config.max_text_seq_length,
            truncation=True,
            return_tensors="pt",
        ).input_ids
        return self.components.text_encoder(ids.to(self.accelerator.device))[0]

    def low_clip(self, path: str) -> Tensor:
        file = Path(path)
        return self.read_video(file.parent.parent / self.args.low_folder / file.name)

    def collate_fn(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        low = torch.cat([self.low_clip(sample["path"]) for sample in samples])
        with torch.no_grad():
            encoded = self.encode_video(low)
        return {
            "low_latents": encoded,
            "high_latents": torch.stack([sample["encoded_video"] for sample in samples]),
            "prompt_embeddings": torch.stack([sample["prompt_embedding"] for sample in samples]),
        }

    def compute_loss(self, batch: dict[str, Any]) -> Tensor:
        found = self.estimate(batch["low_latents"], batch["prompt_embeddings"])
        return F.mse_loss(found.float(), batch["high_latents"].float())

    def estimate(self, low: Tensor, text: Tensor) -> Tensor:
        """Latents [B, C, T, h, w] to the estimate of the clean ones."""
        config, scheduler = self.state.transformer_config, self.components.scheduler
        surplus = low.shape[2] % config.patch_size_t if config.patch_size_t is not None else 0
        low = torch.cat([low[:, :, :1]] * surplus + [low], dim=2).transpose(1, 2)
        number, frames, _, rows, columns = low.shape
        device = self.accelerator.device
        at = lambda step: torch.full((number,), step, dtype=torch.long, device=device)
        if self.args.noise_step:
            noise = torch.randn_like(low)
            low = scheduler.add_noise(low, noise, at(self.args.noise_step))
        scale = 2 ** (len(self.components.vae.config.block_out_channels) - 1)
        rotary = None
        if config.use_rotary_positional_embeddings:
            rotary = self.prepare_rotary_positional_embeddings(
                height=rows * scale,
                width=columns * scale,
                num_frames=frames,
                transformer_config=config,
                vae_scale_factor_spatial=scale,
                device=device,
            )
        velocity = self.components.transformer(
            hidden_states=low,
            encoder_hidden_states=text,
            timestep=at(self.args.sr_noise_step),
            image_rotary_emb=rotary,
            return_dict=False,
        )[0]
        found = scheduler.get_velocity(velocity, low, at(self.args.sr_noise_step))
        return found[:, surplus:].transpose(1, 2)

    def validation_step(
        self, eval_data: dict[str, Any], pipe: CogVideoXPipeline
    ) -> list[tuple[str, Any]]:
        pictures = [torch.tensor(list(p.tobytes())).view(32, 48, 3) for p in eval_data["video"]]
        video = torch.stack(pictures).permute(3, 0, 1, 2)[None] / 127.5 - 1
        found = self.estimate(self.encode_video(video), self.encode_text(eval_data["prompt"]))
        pixels = pipe.decode_latents(found.transpose(1, 2))
        return [("video", (pixels[0] / 2 + 0.5).clamp(0, 1))]


class StageTwo(StageOne):
    """Decodes the estimate, and compares pixels and their differences between frames."""

    def load_components(self) -> Any:
        components = super(StageOne, self).load_components()
        components.scheduler = CogVideoXDPMScheduler.from_config(components.scheduler.config)
        return components

    def prepare_rotary_positional_embeddings(
        self,
        height: int,
        width: int,
        num_frames: int,
        transformer_config: dict[str, Any],
        vae_scale_factor_spatial: int,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        side = vae_scale_factor_spatial * transformer_config.patch_size
        grid = (height // side, width // side)
        step = transformer_config.patch_size_t or 1
        return get_3d_rotary_pos_embed(
            embed_dim=transformer_config.attention_head_dim,
            crops_coords=None,
            grid_size=grid,
            temporal_size=(num_frames + step - 1) // step,
            grid_type="slice",
            max_size=grid,
            device=device,
        )

    def collate_fn(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        high = torch.stack([sample["video"] for sample in samples])
        return super().collate_fn(samples) | {"high": high}

    def compute_loss(self, batch: dict[str, Any]) -> Tensor:
        found = self.estimate(batch["low_latents"], batch["prompt_embeddings"])
        vae = self.components.vae
        pixels = vae.decode(found / vae.config.scaling_factor).sample
        moves, wanted = (video.diff(dim=2) for video in (pixels, batch["high"]))
        return F.mse_loss(pixels.float(), batch["high"]) + F.l1_loss(moves.float(), wanted)


if __name__ == "__main__":
    {"one": StageOne, "two": StageTwo}[sys.argv[1]](
        SuperResolutionArgs.parse_args(sys.argv[2:])
    ).fit()
