"""The 3D VAE as SAT's 3d-vae.pt and as diffusers' vae folder: names, reading, and conversion."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from torch import Tensor

from cogfast.core.json_files import Range, check, read_json
from cogfast.core.shapes import TEMPORAL_COMPRESSION
from cogfast.core.values import counted, show
from cogfast.model.config import COGVIDEOX_2B, COGVIDEOX_5B
from cogfast.model.weights.source import WeightSource, first_of, verify
from cogfast.model.weights.tensor_files import (
    Outgoing,
    SafetensorsFiles,
    new_folder,
    only_tensors,
    read_torch_file,
    write_json,
    write_safetensors_folder,
    write_torch_file,
)

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_FIRST = "encoder.conv_in.conv.weight"  # in both formats, and in no transformer
_SHOWN = (_FIRST, "decoder.conv_in.conv.weight", "decoder.conv_out.conv.weight")
# Keys of config.json that decide what the tensors compute.
_ARCHITECTURE = ("in_channels", "out_channels", "latent_channels", "block_out_channels")
_ARCHITECTURE += ("layers_per_block", "norm_eps", "norm_num_groups")
SAT_FILE_NAME = "3d-vae.pt"
SCALING_FACTOR = COGVIDEOX_5B.scale_factor  # of all members except 2B; the tensors do not show it
SAT_PREFIX = "first_stage_model."  # in checkpoints of SAT's whole engine
CLASS_NAME = "AutoencoderKLCogVideoX"


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


def renamed(
    state: Mapping[str, _T], num_levels: int, num_res_blocks: int, to: Literal["diffusers", "sat"]
) -> dict[str, _T]:
    """Return SAT's tensors, or whatever values have their names, under diffusers' names, or the other way
    round; names that are alike in both, and unknown ones, stay."""
    modules = module_names(num_levels, num_res_blocks)
    before, after = ".nin_shortcut.", ".conv_shortcut."
    if to == "sat":
        modules, before, after = {theirs: sat for sat, theirs in modules.items()}, after, before
    found = {}
    for name, value in state.items():
        parts = name.split(".")
        for length in (5, 4, 3):  # module names have 3 to 5 parts; none is a prefix of another
            if module := modules.get(".".join(parts[:length])):
                name = ".".join([module, *parts[length:]]).replace(before, after)
                break
        found[name] = value
    return found


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
        given = asdict(self)
        del given["_class_name"]
        # diffusers' pipelines divide numbers of frames by it, which must stay whole.
        given["temporal_compression_ratio"] = TEMPORAL_COMPRESSION
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
        text = f"{where}: block_out_channels, down_block_types and up_block_types must have the same number of "
        raise ValueError(f"{text}entries, at most {_MOST_LEVELS}; copy it again")
    if any(channels % config.norm_num_groups for channels in config.block_out_channels):
        text = f"{where}: norm_num_groups={config.norm_num_groups} must divide "
        text += f"block_out_channels={list(config.block_out_channels)}; copy it again"
        raise ValueError(text)
    return config


def read_sat_vae(path: str | Path, ignore_keys: Sequence[str] = ()) -> dict[str, Tensor]:
    """Read the tensors of SAT's 3d-vae.pt, without the prefix `first_stage_model.`.

    Keys that start with an entry of `ignore_keys`, with or without the prefix, are left out.
    """
    if not Path(path).is_file():
        text = f"first_stage_config.params.ckpt_path={path} does not exist; give the path of SAT's 3d-vae.pt (a "
        text += "diffusers VAE is given as a folder: cogfast.model.autoencoder.VideoAutoencoder)"
        raise ValueError(text)
    content = read_torch_file(Path(path))
    state = only_tensors(Path(path), content.get("state_dict", content))
    if any(key.startswith(SAT_PREFIX) for key in state):
        # A checkpoint of the whole engine: leave out the network and the text encoder.
        state = {k.removeprefix(SAT_PREFIX): v for k, v in state.items() if SAT_PREFIX in k}
    # SAT's own configs list these entries with the prefix or without it.
    ignored = tuple(entry.removeprefix(SAT_PREFIX) for entry in ignore_keys)
    return {key: value for key, value in state.items() if not key.startswith(ignored)}


@dataclass(frozen=True, slots=True)
class Vae:
    """A VAE. weights: under diffusers' names; config: of a diffusers folder."""

    weights: WeightSource
    num_levels: int
    num_res_blocks: int
    config: VaeConfig | None = None


def open_vae(path: Path) -> Vae | None:
    """Open the VAE at `path`, a .pt file or a diffusers folder; None if it is something else.

    Reading a tensor that is not finite raises ValueError.
    """
    if path.is_file() and path.suffix != ".safetensors":
        state = read_sat_vae(path)
        if _FIRST not in state:
            return None
        # Leave out what only the VAE's own training needs, such as the discriminator.
        state = {k: v for k, v in state.items() if k.startswith(("encoder.", "decoder."))}
        sizes = _count(state, r"encoder\.down\.(\d+)\.block\.(\d+)\.", path)
        tensors = renamed(state, *sizes, to="diffusers")
        weights = WeightSource(
            description=f"SAT VAE {path}",
            shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
            dtypes={name: tensor.dtype for name, tensor in tensors.items()},
            read=lambda name, shard: tensors[name],
        )
        return Vae(weights.checked(), *sizes)
    if not (path / "config.json").is_file() or not any(path.glob("*.safetensors*")):
        return None
    files = SafetensorsFiles(path)
    # A transformer's folder looks alike; only the first convolution tells them apart.
    if _FIRST not in files.names():
        return None
    sizes = _count(files.names(), r"encoder\.down_blocks\.(\d+)\.resnets\.(\d+)\.", path)
    weights = WeightSource(
        description=f"diffusers VAE {path}",
        shapes={name: files.shape(name) for name in files.names()},
        dtypes={name: files.dtype(name) for name in files.names()},
        read=lambda name, shard: files.read(name),
    )
    return Vae(weights.checked(), *sizes, read_vae_config(path))


def _count(names: Iterable[str], pattern: str, path: Path) -> tuple[int, int]:
    """Return the number of levels of the encoder, and of blocks per level."""
    found = [match for match in (re.match(pattern, name) for name in names) if match]
    numbers = [{match[i] for match in found} for i in (1, 2)]
    # The numbers must run from 0 without a gap.
    if any(not held or held != set(map(str, range(len(held)))) for held in numbers):
        raise ValueError(f"{path}: blocks of the VAE's encoder are missing; copy it again")
    return len(numbers[0]), len(numbers[1])


def convert_vae(
    vae: Vae, path: Path, to: str, dtype: torch.dtype | None, scaling_factor: float | None
) -> None:
    """Write a folder with 3d-vae.pt (`to` sat), or diffusers' vae folder. scaling_factor: the latents'
    factor in diffusers' config; None: the source's, or SCALING_FACTOR."""
    if to not in ("sat", "diffusers"):
        text = f"{vae.weights.description}: a VAE converts --to sat or diffusers, not {to}"
        raise ValueError(text)
    config = vae_config(vae)
    if scaling_factor is None and vae.config is not None:
        scaling_factor = vae.config.scaling_factor
    if scaling_factor is None and to == "diffusers":
        scaling_factor = SCALING_FACTOR
        text = "%s does not store its scaling factor: %s is written, which is right for all models except 2B "
        factors = SCALING_FACTOR, COGVIDEOX_2B.scale_factor
        logger.info(text + "(--scaling-factor %s)", vae.weights.description, *factors)
    weights, names = vae.weights, {name: name for name in vae.weights.shapes}
    if to == "sat":
        names = renamed(names, vae.num_levels, vae.num_res_blocks, to)
    tensors = [
        Outgoing(
            name, weights.shapes[k], dtype or weights.dtypes[k], partial(weights.read, k, None)
        )
        for name, k in names.items()
    ]
    with new_folder(path, sum(t.nbytes for t in tensors)) as folder:
        if to == "sat":
            write_torch_file(folder / SAT_FILE_NAME, "state_dict", tensors)
        else:
            write_json(folder / "config.json", {**config, "scaling_factor": scaling_factor})
            write_safetensors_folder(folder, tensors)
    logger.info("%s: %d tensors written to %s", vae.weights.description, len(names), path)


def verify_vae(vae: Vae, target: Path, dtype: torch.dtype | None) -> str:
    """Compare the tensors at `target` with the source's; see verify."""
    file = target / SAT_FILE_NAME
    written = open_vae(file if file.is_file() else target)
    assert written is not None, f"{target}: convert_vae wrote a VAE"
    return verify(vae.weights.as_written(dtype), target, written.weights)


def vae_config(vae: Vae) -> dict[str, Any]:
    """Return diffusers' config.json except the scaling factor and what is its class's default.

    ValueError if the tensors are not those of a VAE of CogVideoX.
    """
    from diffusers import AutoencoderKLCogVideoX

    where, shapes = vae.weights.description, vae.weights.shapes
    # The sizes below are read from these: a weight of a 3D convolution has five dims.
    if any(len(shapes.get(name, ())) != 5 for name in _SHOWN):
        raise ValueError(f"{where}: its first or last convolutions are missing; copy it again")
    first = "encoder.down_blocks.{}.resnets.0.conv1.conv.weight"
    try:
        config = {
            "_class_name": CLASS_NAME,
            "_diffusers_version": "0.32.0",
            "block_out_channels": [shapes[first.format(i)][0] for i in range(vae.num_levels)],
            "down_block_types": ["CogVideoXDownBlock3D"] * vae.num_levels,
            "in_channels": shapes[_FIRST][1],
            "latent_channels": shapes["decoder.conv_in.conv.weight"][1],
            "layers_per_block": vae.num_res_blocks,
            "out_channels": shapes["decoder.conv_out.conv.weight"][0],
            "up_block_types": ["CogVideoXUpBlock3D"] * vae.num_levels,
        }
    except KeyError as missing:
        raise ValueError(f"{where}: has no {missing}; copy the file again") from None
    checked = check_vae_config(config, where)
    with torch.device("meta"):
        # On meta: names and shapes of the whole model without its memory.
        wanted = AutoencoderKLCogVideoX(**checked.arguments()).state_dict()
    expected = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    if differing := sorted({name for name, _ in expected.items() ^ shapes.items()}):
        text = f"{where}: {counted(len(differing), 'tensor')} missing, unknown or of another shape"
        raise ValueError(f"{text}, first {first_of(differing)}; use a complete VAE of CogVideoX")
    for key in () if vae.config is None else _ARCHITECTURE:
        stored, found = getattr(vae.config, key), getattr(checked, key)
        if stored != found:
            text = f"{where}: its config.json has {key}={show(stored)}, its tensors are those of {show(found)}"
            raise ValueError(f"{text}; copy the folder again")
    return config
