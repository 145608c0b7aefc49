"""Converts the 3D VAE between SAT's 3d-vae.pt and diffusers' vae folder; tensors are unchanged."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cogfast.config.values import counted, show
from cogfast.model.config import COGVIDEOX_2B, COGVIDEOX_5B
from cogfast.model.weights.formats.safetensors_files import (
    SafetensorsFiles,
    write_json,
    write_safetensors_folder,
)
from cogfast.model.weights.formats.tensor_stream import Outgoing, new_folder
from cogfast.model.weights.formats.torch_files import (
    only_tensors,
    read_torch_file,
    write_torch_file,
)
from cogfast.model.weights.source import WeightSource, first_of
from cogfast.model.weights.vae.names import (
    CLASS_NAME,
    SAT_PREFIX,
    VaeConfig,
    check_vae_config,
    read_vae_config,
    to_diffusers,
    to_sat,
)
from cogfast.model.weights.verify import verify

logger = logging.getLogger(__name__)

SAT_FILE_NAME = "3d-vae.pt"
SCALING_FACTOR = COGVIDEOX_5B.scale_factor  # of all members except 2B; the tensors do not show it
_STEM = "diffusion_pytorch_model"
_FIRST = "encoder.conv_in.conv.weight"  # in both formats, and in no transformer
# Keys of config.json that decide what the tensors compute.
_ARCHITECTURE = ("in_channels", "out_channels", "latent_channels", "block_out_channels")
_ARCHITECTURE += ("layers_per_block", "norm_eps", "norm_num_groups")
_SHOWN = (_FIRST, "decoder.conv_in.conv.weight", "decoder.conv_out.conv.weight")


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
        content = read_torch_file(path)
        state = only_tensors(path, content.get("state_dict", content))
        # In a checkpoint of SAT's whole engine the VAE's names have a prefix.
        if any(key.startswith(SAT_PREFIX + _FIRST) for key in state):
            state = {k.removeprefix(SAT_PREFIX): v for k, v in state.items() if SAT_PREFIX in k}
        if _FIRST not in state:
            return None
        # Leave out what only the VAE's own training needs, such as the discriminator.
        state = {k: v for k, v in state.items() if k.startswith(("encoder.", "decoder."))}
        sizes = _count(state, r"encoder\.down\.(\d+)\.block\.(\d+)\.", path)
        # {diffusers' name: SAT's}: the names alone go through the table, no tensor is copied.
        theirs = to_diffusers({name: name for name in state}, *sizes)
        weights = WeightSource(
            description=f"SAT VAE {path}",
            shapes={name: tuple(state[key].shape) for name, key in theirs.items()},
            dtypes={name: state[key].dtype for name, key in theirs.items()},
            read=lambda name, shard: state[theirs[name]],
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
    vae: Vae,
    path: Path,
    to: str,
    dtype: torch.dtype | None = None,
    scaling_factor: float | None = None,
) -> None:
    """Write a folder with 3d-vae.pt (`to` sat), or diffusers' vae folder. scaling_factor: the latents'
    factor in diffusers' config; None: the source's, or SCALING_FACTOR."""
    if to not in ("sat", "diffusers"):
        raise ValueError(
            f"{vae.weights.description}: a VAE converts --to sat or diffusers, not {to}"
        )
    config = vae_config(vae)
    if scaling_factor is None and vae.config is not None:
        scaling_factor = vae.config.scaling_factor
    if scaling_factor is None:
        scaling_factor = SCALING_FACTOR
        if to == "diffusers":
            logger.info(
                "%s does not store its scaling factor: %s is written, which is right for all models "
                "except 2B (--scaling-factor %s)",
                vae.weights.description,
                SCALING_FACTOR,
                COGVIDEOX_2B.scale_factor,
            )
    names = {name: name for name in vae.weights.shapes}
    if to == "sat":
        names = to_sat(names, vae.num_levels, vae.num_res_blocks)
    tensors = [
        Outgoing(
            name,
            vae.weights.shapes[k],
            dtype or vae.weights.dtypes[k],
            partial(vae.weights.read, k, None),
        )
        for name, k in names.items()
    ]
    with new_folder(path, sum(t.nbytes for t in tensors)) as folder:
        if to == "sat":
            write_torch_file(folder / SAT_FILE_NAME, "state_dict", tensors)
        else:
            write_json(folder / "config.json", {**config, "scaling_factor": scaling_factor})
            write_safetensors_folder(folder, _STEM, tensors)
    count = sum(t.nbytes for t in tensors) / 2**20
    logger.info(
        "%s: %d tensors, %.0f MiB, written to %s", vae.weights.description, len(names), count, path
    )


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

    levels = range(vae.num_levels)
    # The sizes below are read from these: a weight of a 3D convolution has five dims.
    if any(len(vae.weights.shapes.get(name, ())) != 5 for name in _SHOWN):
        raise ValueError(
            f"{vae.weights.description}: its first or last convolutions are missing; copy it again"
        )
    first = "encoder.down_blocks.{}.resnets.0.conv1.conv.weight"
    try:
        config = {
            "_class_name": CLASS_NAME,
            "_diffusers_version": "0.32.0",
            "block_out_channels": [vae.weights.shapes[first.format(i)][0] for i in levels],
            "down_block_types": ["CogVideoXDownBlock3D"] * vae.num_levels,
            "in_channels": vae.weights.shapes[_FIRST][1],
            "latent_channels": vae.weights.shapes["decoder.conv_in.conv.weight"][1],
            "layers_per_block": vae.num_res_blocks,
            "out_channels": vae.weights.shapes["decoder.conv_out.conv.weight"][0],
            "up_block_types": ["CogVideoXUpBlock3D"] * vae.num_levels,
        }
    except KeyError as missing:
        raise ValueError(
            f"{vae.weights.description}: has no {missing}; copy the file again"
        ) from None
    checked = check_vae_config(config, vae.weights.description)
    with torch.device("meta"):
        # On meta: names and shapes of the whole model without its memory.
        wanted = AutoencoderKLCogVideoX(**checked.arguments()).state_dict()
    differing = sorted(
        {
            n
            for n in wanted
            if n in vae.weights.shapes and tuple(wanted[n].shape) != vae.weights.shapes[n]
        }
        | (wanted.keys() ^ vae.weights.shapes.keys())
    )
    if differing:
        raise ValueError(
            f"{vae.weights.description}: {counted(len(differing), 'tensor')} missing, unknown or of another "
            f"shape, first {first_of(differing)}; use a complete VAE of CogVideoX"
        )
    for key in () if vae.config is None else _ARCHITECTURE:
        stored, found = getattr(vae.config, key), getattr(checked, key)
        if stored != found:
            raise ValueError(
                f"{vae.weights.description}: its config.json has {key}={show(stored)}, its tensors are those of "
                f"{show(found)}; copy the folder again"
            )
    return config
