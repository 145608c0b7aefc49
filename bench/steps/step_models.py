"""The model configurations that bench.step measures, and their inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from cogfast.core.shapes import PatchSize, TokenGrid, num_latent_frames
from cogfast.model.config import TransformerConfig

LORA_RANK = 128


def _config(
    layers: int, width: int, text: int, size: tuple[int, int, int], **more: Any
) -> TransformerConfig:
    """Return a rotary model with heads of 64. size: frames, and latent rows and columns."""
    frames, rows, columns = size
    patch = more.pop("patch_size", PatchSize(1, 2, 2))
    return TransformerConfig(
        num_layers=layers,
        hidden_size=width,
        num_attention_heads=width // 64,
        in_channels=16,
        out_channels=16,
        patch_size=patch,
        text_length=text,
        num_frames=frames,
        latent_height=rows,
        latent_width=columns,
        position="rotary",
        **more,
    )


_SMALL, _PUBLISHED = (
    {"text_hidden_size": text, "time_embed_dim": time} for text, time in ((64, 256), (4096, 512))
)
# 1,000 tokens: 40 of text and 4 x 12 x 20 of video
TINY = _config(6, 256, 40, (13, 24, 40), **_SMALL)
# as in configs/quickstart.yaml: 48 video and 32 text tokens, batch 16
QUICKSTART = replace(
    _config(4, 256, 32, (9, 8, 8), **_SMALL), in_channels=48, out_channels=48, time_embed_dim=192
)
# 1,664 tokens: 64 of text and 4 x 20 x 20 of video
WIDE = _config(4, 768, 64, (13, 40, 40), **_SMALL)
# 49 x 480 x 720: 13 x 30 x 45 video tokens and 226 of text
CONFIG_5B = _config(42, 3072, 226, (49, 60, 90), **_PUBLISHED)
# 81 x 768 x 1360: 11 x 48 x 85 video tokens, each of two latent frames, and 224 of text
CONFIG_15_5B = _config(42, 3072, 224, (81, 96, 170), patch_size=PatchSize(2, 2, 2), **_PUBLISHED)
CONFIG_15_5B_I2V = replace(CONFIG_15_5B, in_channels=32, ofs_embed_dim=512)
CONFIG_2B = replace(
    _config(30, 1920, 226, (49, 60, 90), **_PUBLISHED),
    position="sincos",
    height_interpolation=1.875,
    width_interpolation=1.875,
)
# Replaces the sizes of 2B and 5B in tests of this program: 36 tokens.
_SMALLEST = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 1,
    "text_hidden_size": 32,
    "text_length": 12,
    "time_embed_dim": 64,
    "num_frames": 5,
    "latent_height": 6,
    "latent_width": 8,
}
_SMALLEST_15 = {**_SMALLEST, "num_frames": 9}  # three latent frames, and a repeated one
MODELS: dict[str, tuple[TransformerConfig, int]] = {  # configuration and batch size
    "tiny": (TINY, 1),
    "quickstart": (QUICKSTART, 16),
    "wide": (WIDE, 1),
    "2b": (CONFIG_2B, 1),
    "5b": (CONFIG_5B, 1),
    "2b-smallest": (replace(CONFIG_2B, **_SMALLEST), 2),
    "1.5-5b": (CONFIG_15_5B, 1),
    "1.5-5b-i2v": (CONFIG_15_5B_I2V, 1),
    "5b-smallest": (replace(CONFIG_5B, **_SMALLEST), 2),
    "1.5-5b-smallest": (replace(CONFIG_15_5B, **_SMALLEST_15), 2),
    "1.5-5b-i2v-smallest": (replace(CONFIG_15_5B_I2V, **_SMALLEST_15, ofs_embed_dim=64), 2),
}


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a step of cogfast: keys of a run, with their defaults. fa4: flash-attn 4."""

    attention: Literal["default", "fa4", "fa4 on both sides"] = "default"
    sparse: float = 0.0  # share of attention's blocks that are left out
    quantize_base: Literal["none", "int8", "fp8"] = "none"

    def __str__(self) -> str:
        words = [f"attention {self.attention}"] * (self.attention != "default")
        words += [f"sparse:{self.sparse}"] * bool(self.sparse)
        return ", ".join(words + [f"{self.quantize_base} base"] * (self.quantize_base != "none"))


@dataclass(frozen=True, slots=True)
class Variant:
    """The arguments of both sides; `options` are of cogfast, but for its "fa4 on both sides"."""

    config: TransformerConfig
    batch_size: int
    dtype: torch.dtype
    device: torch.device
    options: Options = Options()

    @property
    def grid(self) -> TokenGrid:
        """The tokens of the largest video. CogVideoX 1.5 repeats a frame where two make a token."""
        frames, patch = num_latent_frames(self.config.num_frames), self.config.patch_size.t
        return replace(self.config.grid, t=-(-frames // patch))

    @property
    def num_tokens(self) -> int:
        """Number of tokens of one sample, S = L + V."""
        return self.config.text_length + self.grid.num_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of a step: latents and target [B, C, T, h, w], timesteps [B], text [B, L, E].

    The latents of an I2V model include those of the image.
    """

    latents: Tensor
    timesteps: Tensor
    text: Tensor
    target: Tensor


def draw_batch(variant: Variant, seed: int = 1) -> Batch:
    """Draw latents, text and target from a normal distribution, in the dtype of the variant."""
    config, b = variant.config, variant.batch_size
    generator = torch.Generator(variant.device).manual_seed(seed)
    draw = lambda *shape: torch.randn(
        shape, generator=generator, device=variant.device, dtype=torch.float32
    ).to(variant.dtype)
    frames = variant.grid.t * config.patch_size.t
    video = (frames, config.latent_height, config.latent_width)
    # Spread over the range, so that samples differ in their modulation.
    timesteps = torch.linspace(17, 863, b, device=variant.device).long()
    text = draw(b, config.text_length, config.text_hidden_size)
    latents = draw(b, config.in_channels, *video)
    return Batch(latents, timesteps, text, draw(b, config.out_channels, *video))
