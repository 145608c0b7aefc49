"""Identifies the member of the CogVideoX family of a config or a set of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cogfast.model.config import TransformerConfig

Shapes = Mapping[str, tuple[int, ...]]  # {cogfast's parameter name: shape}


@dataclass(frozen=True, slots=True)
class Family:
    """The properties in which the members differ. in_channels includes image latents."""

    is_rotary: bool
    has_learned_table: bool
    has_ofs: bool
    patch_t: int
    in_channels: int
    out_channels: int

    @classmethod
    def of_config(cls, config: TransformerConfig) -> Family:
        return cls(
            is_rotary=config.position == "rotary",
            has_learned_table=config.position == "rotary" and config.learnable_position,
            has_ofs=config.ofs_embed_dim is not None,
            patch_t=config.patch_size.t,
            in_channels=config.in_channels,
            out_channels=config.out_channels,
        )

    @property
    def name(self) -> str:
        i2v = "-I2V" if self.in_channels > self.out_channels else ""
        if self.patch_t > 1:
            return f"CogVideoX1.5-5B{i2v}"
        return f"CogVideoX-5B{i2v}" if self.is_rotary else f"CogVideoX-2B{i2v}"

    @property
    def config_file(self) -> str:
        """The shipped config of this member."""
        name = self.name.lower().replace("-", "_")
        return f"configs/{name}.yaml"

    def __str__(self) -> str:
        facts = [f"patch_size {self.patch_t}x2x2", f"in_channels {self.in_channels}"]
        facts.append("rotary positions" if self.is_rotary else "a sincos table")
        facts += ["a learned table"] * self.has_learned_table + ["ofs"] * self.has_ofs
        return f"{self.name} ({', '.join(facts)})"


def check_family(path: str, found: Family, config: TransformerConfig) -> None:
    """Raise ValueError if a checkpoint's tensors belong to another member than the config."""
    wanted = Family.of_config(config)
    if found != wanted:
        raise ValueError(
            f"{path}: the checkpoint is {found}, the config says {wanted}; use "
            f"{found.config_file} or a checkpoint of {wanted.name}"
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
