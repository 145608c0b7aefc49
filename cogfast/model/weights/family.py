"""The five members of the CogVideoX family, and which of them a config or a checkpoint is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cogfast.core.shapes import PatchSize
from cogfast.model.config import TransformerConfig

Shapes = Mapping[str, tuple[int, ...]]  # {cogfast's parameter name: shape}


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A published model, as its config in configs/ has it.

    Sizes are rows and columns: video_size in pixels, table_size in latent pixels (the position
    table). num_frames and fps are those of its training videos, text_length the rows of text.
    """

    name: str
    config_file: str
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
    def diffusers_trainer_name(self) -> str:
        """The --model_name of CogVideo's diffusers trainer. 2B and 5B share one."""
        version = "1.5" if self.patch.joins_frames else ""
        return f"cogvideox{version}-{'i2v' if self.has_image else 't2v'}"


COGVIDEOX_2B = Member(
    name="CogVideoX-2B",
    config_file="configs/cogvideox_2b.yaml",
    patch=PatchSize(1, 2, 2),
    is_rotary=False,
    num_frames=49,
    fps=8,
    video_size=(480, 720),
    table_size=(60, 90),
    text_length=226,
    scale_factor=1.15258426,
)
COGVIDEOX_5B = replace(
    COGVIDEOX_2B,
    name="CogVideoX-5B",
    config_file="configs/cogvideox_5b.yaml",
    is_rotary=True,
    scale_factor=0.7,
)
COGVIDEOX_5B_I2V = replace(
    COGVIDEOX_5B,
    name="CogVideoX-5B-I2V",
    config_file="configs/cogvideox_5b_i2v.yaml",
    has_image=True,
)
COGVIDEOX_15_5B = Member(
    name="CogVideoX1.5-5B",
    config_file="configs/cogvideox1.5_5b.yaml",
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
COGVIDEOX_15_5B_I2V = replace(
    COGVIDEOX_15_5B,
    name="CogVideoX1.5-5B-I2V",
    config_file="configs/cogvideox1.5_5b_i2v.yaml",
    has_image=True,
)
MEMBERS = (COGVIDEOX_2B, COGVIDEOX_5B, COGVIDEOX_5B_I2V, COGVIDEOX_15_5B, COGVIDEOX_15_5B_I2V)


def member_of(patch: PatchSize, has_image: bool, is_rotary: bool) -> Member:
    """Return the published model that is most like a model with these properties."""
    alike = [m for m in MEMBERS if (m.patch.version, m.has_image) == (patch.version, has_image)]
    # Only 1.0 text-to-video has two members, which differ in their positions.
    return next((m for m in alike if m.is_rotary == is_rotary), alike[0])


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
        return cls(
            is_rotary=config.position == "rotary",
            has_learned_table=config.position == "rotary" and config.learnable_position,
            has_ofs=config.ofs_embed_dim is not None,
            patch=config.patch_size,
            in_channels=config.in_channels,
            out_channels=config.out_channels,
        )

    @property
    def member(self) -> Member:
        return member_of(self.patch, self.in_channels > self.out_channels, self.is_rotary)

    def __str__(self) -> str:
        patch = "x".join(map(str, (self.patch.t, self.patch.h, self.patch.w)))
        facts = [f"patch_size {patch}", f"in_channels {self.in_channels}"]
        facts.append("rotary positions" if self.is_rotary else "a sincos table")
        facts += ["a learned table"] * self.has_learned_table + ["ofs"] * self.has_ofs
        return f"{self.member.name} ({', '.join(facts)})"


def check_family(path: str, found: Family, config: TransformerConfig) -> None:
    """Raise ValueError if a checkpoint's tensors belong to another member than the config."""
    wanted = Family.of_config(config)
    if found != wanted:
        raise ValueError(
            f"{path}: the checkpoint is {found}, the config says {wanted}; use "
            f"{found.member.config_file} or a checkpoint of {wanted.member.name}"
        )


def num_blocks(shapes: Shapes) -> int:
    return len({name.split(".")[1] for name in shapes if name.startswith("blocks.")})


def check_size(path: str, shapes: Shapes, config: TransformerConfig) -> None:
    """Raise ValueError if depth or width differ."""
    found = (num_blocks(shapes), shapes["patch_embedding.weight"][0])
    wanted = (config.num_layers, config.hidden_size)
    if found != wanted:
        raise ValueError(
            f"{path}: the checkpoint has {found[0]} blocks of width {found[1]}, the config "
            f"num_layers={wanted[0]} and hidden_size={wanted[1]}; use the config that belongs to "
            "the checkpoint"
        )
