"""The sizes and options of a model, and the table of the published members of the CogVideoX family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cogfast.config.sat_network import lora_text
from cogfast.core.shapes import PatchSize, TokenGrid
from cogfast.model.lora import DEFAULT_TARGETS, SAT_ALPHA

# Upper bounds, far beyond the published models: a damaged config must not exhaust the memory. The readers
# of configs have ranges for each size.
_MOST_TOKENS = 2**22  # 1.5's tables of 300x300 latent pixels and 81 frames have 472,500
_MOST_PRODUCT = 10**10  # num_layers * hidden_size**2; 5B's is 4e8
_MOST_TABLE = 2**27  # 2B's has 34 million


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerConfig:
    """Sizes and options of a model: lengths in tokens, sizes in latent rows and columns and pixel frames."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    in_channels: int  # image latents included
    out_channels: int
    patch_size: PatchSize
    text_hidden_size: int
    text_length: int
    time_embed_dim: int
    ofs_embed_dim: int | None = None  # 1.5-I2V only
    default_ofs: float = 2.0  # what 1.5-I2V was trained and is sampled with
    num_frames: int
    time_compressed_rate: int = 4
    latent_height: int
    latent_width: int
    position: Literal["sincos", "rotary"]
    learnable_position: bool = False
    height_interpolation: float = 1.0
    width_interpolation: float = 1.0
    time_interpolation: float = 1.0
    rope_theta: float = 10000.0
    # pipeline: the positions of diffusers' pipelines, which rescale videos whose size differs from
    # latent_height and latent_width. They differ from "integer" for CogVideoX 1.0 only.
    rotary_positions: Literal["integer", "pipeline"] = "integer"
    # The training videos' pixel frames, latent rows and latent columns, if known.
    trained_size: tuple[int, int, int] | None = None
    qk_norm: bool = True
    elementwise_affine: bool = True
    max_sequence_length: int = 64  # rows of a table that SAT's rotary models store and never read
    lora_rank: int | None = None
    lora_alpha: float = SAT_ALPHA
    lora_dropout: float = 0.0
    lora_layers: tuple[int, ...] | None = None  # None: all
    lora_targets: tuple[str, ...] = DEFAULT_TARGETS

    def __post_init__(self) -> None:
        # Refuse sizes of too large a model before anything of that size is allocated. A layer has about 12 M^2
        # weights.
        if self.num_layers * self.hidden_size**2 > _MOST_PRODUCT:
            text = f"num_layers={self.num_layers} and hidden_size={self.hidden_size} make a "
            text += f"network of {12 * self.num_layers * self.hidden_size**2:.0e} weights or more"
            raise ValueError(f"{text}; use at most 1e+11")
        # Position tables grow with the product of three sizes, each of which may be in range.
        grid, patch, table = self.grid, self.patch_size, 0
        if self.position == "sincos" or self.learnable_position:
            table = (grid.num_tokens + self.text_length) * self.hidden_size
        is_possible = self.text_length > 0 and 1 <= grid.num_tokens <= _MOST_TOKENS
        if not is_possible or table > _MOST_TABLE:
            raise ValueError(
                f"num_frames={self.num_frames}, latent_height={self.latent_height} and latent_width="
                f"{self.latent_width} with patches of {patch.t}x{patch.h}x{patch.w} give positions "
                f"for {grid.num_tokens} tokens beside text_length={self.text_length}; use 1 to "
                f"{_MOST_TOKENS} tokens and tables of at most {_MOST_TABLE} numbers"
            )
        if self.hidden_size % self.num_attention_heads:
            text = f"num_attention_heads={self.num_attention_heads} must divide hidden_size={self.hidden_size}"
            raise ValueError(text)
        if self.position == "rotary" and self.head_width % 16:
            text = f"hidden_size/num_attention_heads={self.head_width}: a rotary head needs a multiple of 16 "
            text += "entries (a quarter for time, 3/8 each for rows and columns); use 64"
            raise ValueError(text)
        # 3/8 of the width for columns and rows each, half of it sines and half cosines.
        if self.position == "sincos" and self.hidden_size % 16:
            raise ValueError(f"hidden_size={self.hidden_size}: must be a multiple of 16")
        # Negative and repeated layers would adapt a layer twice.
        layers = self.lora_layers or ()
        if not all(0 <= i < self.num_layers for i in layers) or len(set(layers)) < len(layers):
            text = f"lora_config layer_range={list(layers)} must name layers from 0 to {self.num_layers - 1}"
            raise ValueError(f"{text}, each once")
        if self.ofs_embed_dim not in (None, self.time_embed_dim):
            text = f"ofs_embed_dim={self.ofs_embed_dim} must equal time_embed_dim={self.time_embed_dim}: "
            raise ValueError(f"{text}the two embeddings are added")

    @property
    def adapters(self) -> str | None:
        """The adapters in words; None without LoRA."""
        rank = self.lora_rank
        return None if rank is None else lora_text(rank, self.lora_alpha, self.lora_targets)

    @property
    def head_width(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def has_rescaled_positions(self) -> bool:
        """Whether the positions of rows and columns depend on the video's size."""
        return self.rotary_positions == "pipeline" and not self.patch_size.joins_frames

    @property
    def grid(self) -> TokenGrid:
        """The token grid of the largest video that the position tables hold."""
        patch = self.patch_size
        latent_frames = (self.num_frames - 1) // self.time_compressed_rate + 1
        # SAT's tables have an entry per latent frame, even where a token covers two (1.5).
        return TokenGrid(latent_frames, self.latent_height // patch.h, self.latent_width // patch.w)


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A published model, as its config in configs/ has it.

    Sizes are rows and columns: video_size in pixels, table_size in latent pixels (the position
    table). num_frames and fps are those of its training videos, text_length the rows of text.
    """

    name: str
    patch: PatchSize
    is_rotary: bool = True
    has_image: bool = False
    num_frames: int
    fps: int
    video_size: tuple[int, int]
    table_size: tuple[int, int]
    text_length: int
    scale_factor: float  # latents = scale_factor * output of the VAE

    @property
    def config_file(self) -> str:
        return f"configs/{self.name.lower().replace('-', '_')}.yaml"

    @property
    def diffusers_trainer_name(self) -> str:
        """The --model_name of CogVideo's diffusers trainer. 2B and 5B share one."""
        version = "1.5" if self.patch.joins_frames else ""
        return f"cogvideox{version}-{'i2v' if self.has_image else 't2v'}"


COGVIDEOX_2B = Member(
    name="CogVideoX-2B",
    patch=PatchSize(1, 2, 2),
    is_rotary=False,
    num_frames=49,
    fps=8,
    video_size=(480, 720),
    table_size=(60, 90),
    text_length=226,
    scale_factor=1.15258426,
)
COGVIDEOX_5B = replace(COGVIDEOX_2B, name="CogVideoX-5B", is_rotary=True, scale_factor=0.7)
COGVIDEOX_5B_I2V = replace(COGVIDEOX_5B, name="CogVideoX-5B-I2V", has_image=True)
COGVIDEOX_15_5B = Member(
    name="CogVideoX1.5-5B",
    patch=PatchSize(2, 2, 2),
    num_frames=81,
    fps=16,
    video_size=(768, 1360),
    # Larger than the training videos, so that other aspect ratios fit.
    table_size=(300, 300),
    # SAT trained the model with 224; diffusers' published configs say 226.
    text_length=224,
    scale_factor=0.7,
)
COGVIDEOX_15_5B_I2V = replace(COGVIDEOX_15_5B, name="CogVideoX1.5-5B-I2V", has_image=True)
MEMBERS = (COGVIDEOX_2B, COGVIDEOX_5B, COGVIDEOX_5B_I2V, COGVIDEOX_15_5B, COGVIDEOX_15_5B_I2V)


def member_of(patch: PatchSize, has_image: bool, is_rotary: bool) -> Member:
    """Return the published model that is most like a model with these properties."""
    alike = [m for m in MEMBERS if (m.patch.version, m.has_image) == (patch.version, has_image)]
    # Only 1.0 text-to-video has two members, which differ in their positions.
    return next((m for m in alike if m.is_rotary == is_rotary), alike[0])


def num_condition_channels(conditions: Sequence[str], channels: int) -> int:
    """Return the channels of the conditions of model.conditions. channels: of the latents."""
    return sum(1 if name == "mask" else channels for name in conditions)


def inpainting_channels(channels: int) -> int:
    """Return the input channels of CogVideoX-Fun's inpainting models. channels: of the latents."""
    return channels + num_condition_channels(("mask", "masked_video"), channels)


def derived_models(in_channels: int, out_channels: int) -> str:
    """Name the released models, derived from CogVideoX, that have such inputs; "" if there are none."""
    # 16 noised, 16 of the image, 16 of the pose
    if in_channels == 3 * out_channels:
        return "SkyReels-A1 has an image and a pose: [image, control]"
    # 16 noised, 1 of the mask, 16 of the masked video
    text = "CogVideoX-Fun's inpainting models (InP) have a mask and a masked video: [mask, masked_video]"
    return text if in_channels == inpainting_channels(out_channels) else ""


@dataclass(frozen=True, slots=True)
class Family:
    """The properties in which the members differ. in_channels includes image latents."""

    is_rotary: bool
    has_learned_table: bool
    has_ofs: bool
    patch: PatchSize
    in_channels: int
    out_channels: int

    @classmethod
    def of_config(cls, config: TransformerConfig) -> Family:
        is_rotary, has_ofs = config.position == "rotary", config.ofs_embed_dim is not None
        has_table, patch = is_rotary and config.learnable_position, config.patch_size
        return cls(is_rotary, has_table, has_ofs, patch, config.in_channels, config.out_channels)

    @property
    def has_image_part(self) -> bool:
        """Whether a model has what only image-to-video members have beside their channels."""
        return self.has_ofs if self.patch.joins_frames else self.has_learned_table

    @property
    def member(self) -> Member:
        """The member that the model is, or is derived from."""
        return member_of(self.patch, self.has_image_part, self.is_rotary)

    @property
    def is_derived(self) -> bool:
        """Whether a model has the channels of image-to-video, but lacks a part of such a member."""
        return self.in_channels == 2 * self.out_channels and not self.has_image_part

    def __str__(self) -> str:
        patch = "x".join(map(str, (self.patch.t, self.patch.h, self.patch.w)))
        facts = [f"patch_size {patch}", f"in_channels {self.in_channels}"]
        facts.append("rotary positions" if self.is_rotary else "a sincos table")
        facts += ["a learned table"] * self.has_learned_table + ["ofs"] * self.has_ofs
        return f"{self.member.name} ({', '.join(facts)})"
