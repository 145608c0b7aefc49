"""Tensor names of SAT's 3d-vae.pt and of diffusers' AutoencoderKLCogVideoX; reads both formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from torch import Tensor

from cogfast.config.json_files import Range, check, read_json
from cogfast.core.shapes import TEMPORAL_COMPRESSION
from cogfast.model.weights.formats.torch_files import only_tensors, read_torch_file

_T = TypeVar("_T")
SAT_PREFIX = "first_stage_model."  # in checkpoints of SAT's whole engine
CLASS_NAME = "AutoencoderKLCogVideoX"
_SAT_SHORTCUT, _DIFFUSERS_SHORTCUT = ".nin_shortcut.", ".conv_shortcut."


def module_names(num_levels: int, num_res_blocks: int) -> dict[str, str]:
    """Return {SAT module: diffusers module} of the modules whose names differ."""
    # SAT counts the decoder's levels from the output, diffusers from the input.
    names = {
        f"{side}.mid.block_{i + 1}": f"{side}.mid_block.resnets.{i}"
        for side in ("encoder", "decoder")
        for i in range(2)
    }
    for level in range(num_levels):
        down, up = f"encoder.down.{level}", f"decoder.up.{level}"
        down_block = f"encoder.down_blocks.{level}"
        up_block = f"decoder.up_blocks.{num_levels - 1 - level}"
        names[f"{down}.downsample"] = f"{down_block}.downsamplers.0"
        names[f"{up}.upsample"] = f"{up_block}.upsamplers.0"
        for i in range(num_res_blocks):
            names[f"{down}.block.{i}"] = f"{down_block}.resnets.{i}"
        # The decoder has one block more per level than the encoder, in both codes.
        for i in range(num_res_blocks + 1):
            names[f"{up}.block.{i}"] = f"{up_block}.resnets.{i}"
    return names


def _rename(name: str, modules: Mapping[str, str], shortcut: tuple[str, str]) -> str:
    """Rename one tensor; names that are not in the table are returned unchanged."""
    parts = name.split(".")
    for length in (5, 4, 3):  # module names have 3 to 5 parts; none is a prefix of another
        module = modules.get(".".join(parts[:length]))
        if module is not None:
            return ".".join([module, *parts[length:]]).replace(*shortcut)
    return name


def to_diffusers(state: Mapping[str, _T], num_levels: int, num_res_blocks: int) -> dict[str, _T]:
    """Return SAT's tensors, or whatever values have their names, under diffusers' names."""
    modules = module_names(num_levels, num_res_blocks)
    shortcut = (_SAT_SHORTCUT, _DIFFUSERS_SHORTCUT)
    return {_rename(name, modules, shortcut): tensor for name, tensor in state.items()}


def to_sat(state: Mapping[str, _T], num_levels: int, num_res_blocks: int) -> dict[str, _T]:
    """Return diffusers' tensors, or whatever values have their names, under SAT's names."""
    modules = {theirs: sat for sat, theirs in module_names(num_levels, num_res_blocks).items()}
    shortcut = (_DIFFUSERS_SHORTCUT, _SAT_SHORTCUT)
    return {_rename(name, modules, shortcut): tensor for name, tensor in state.items()}


_Channels = Annotated[int, Range(1, 2**13)]
_MOST_LEVELS = 8


@dataclass(frozen=True, slots=True)
class VaeConfig:
    """The keys of a vae folder's config.json that diffusers' class reads, with its defaults."""

    _class_name: Literal["AutoencoderKLCogVideoX"]
    in_channels: _Channels = 3
    out_channels: _Channels = 3
    down_block_types: tuple[Literal["CogVideoXDownBlock3D"], ...] = ("CogVideoXDownBlock3D",) * 4
    up_block_types: tuple[Literal["CogVideoXUpBlock3D"], ...] = ("CogVideoXUpBlock3D",) * 4
    block_out_channels: tuple[_Channels, ...] = (128, 256, 256, 512)
    latent_channels: _Channels = 16
    layers_per_block: Annotated[int, Range(1, 16)] = 3
    act_fn: Literal["silu"] = "silu"
    norm_eps: Annotated[float, Range(1e-12, 1e-2)] = 1e-6
    norm_num_groups: Annotated[int, Range(1, 1024)] = 32
    temporal_compression_ratio: Annotated[
        float, Range(TEMPORAL_COMPRESSION, TEMPORAL_COMPRESSION)
    ] = TEMPORAL_COMPRESSION
    sample_height: Annotated[int, Range(16, 2**14)] = 480
    sample_width: Annotated[int, Range(16, 2**14)] = 720
    scaling_factor: Annotated[float, Range(1e-3, 1e3)] | None = None
    invert_scale_latents: bool = False
    use_quant_conv: bool = False
    use_post_quant_conv: bool = False

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of diffusers' class."""
        given = asdict(self)
        del given["_class_name"]
        if self.scaling_factor is None:
            del given["scaling_factor"]
        return given


def read_vae_config(folder: Path) -> VaeConfig:
    """Read the config of a diffusers vae folder. ValueError if it is not a CogVideoX VAE's."""
    return check_vae_config(read_json(folder / "config.json"), f"{folder}/config.json")


def check_vae_config(given: dict[str, Any], where: str) -> VaeConfig:
    """Check a config from JSON or derived from tensors. ValueError if it is not a CogVideoX VAE's."""
    # The ranges bound what diffusers' class allocates for a config from elsewhere.
    config = check(given, VaeConfig, where)
    sides = (config.down_block_types, config.up_block_types)
    num_levels = len(config.block_out_channels)
    if not 1 <= num_levels <= _MOST_LEVELS or any(len(side) != num_levels for side in sides):
        raise ValueError(
            f"{where}: block_out_channels, down_block_types and up_block_types must have the same "
            f"number of entries, at most {_MOST_LEVELS}; copy it again"
        )
    if any(channels % config.norm_num_groups for channels in config.block_out_channels):
        raise ValueError(
            f"{where}: norm_num_groups={config.norm_num_groups} must divide block_out_channels="
            f"{list(config.block_out_channels)}; copy it again"
        )
    return config


def read_sat_vae(path: str | Path, ignore_keys: Sequence[str] = ()) -> dict[str, Tensor]:
    """Read the tensors of SAT's 3d-vae.pt, without the prefix `first_stage_model.`.

    Keys that start with an entry of `ignore_keys`, with or without the prefix, are left out.
    """
    if not Path(path).is_file():
        raise ValueError(
            f"first_stage_config.params.ckpt_path={path} does not exist; "
            "give the path of SAT's 3d-vae.pt"
        )
    content = read_torch_file(Path(path))
    if "state_dict" not in content:
        raise ValueError(
            f"ckpt_path={path} has no 'state_dict'; give SAT's 3d-vae.pt "
            "(a diffusers VAE is given as a folder: cogfast.model.autoencoder.VideoAutoencoder)"
        )
    state = only_tensors(Path(path), content["state_dict"])
    if any(key.startswith(SAT_PREFIX) for key in state):
        # A checkpoint of the whole engine: leave out the network and the text encoder.
        state = {k.removeprefix(SAT_PREFIX): v for k, v in state.items() if SAT_PREFIX in k}
    # SAT's own configs list these entries with the prefix or without it.
    ignored = tuple(entry.removeprefix(SAT_PREFIX) for entry in ignore_keys)
    return {key: value for key, value in state.items() if not key.startswith(ignored)}
