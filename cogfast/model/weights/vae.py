"""Names of SAT's 3d-vae.pt and of diffusers' AutoencoderKLCogVideoX; tensors are copied as they are."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

SAT_PREFIX = "first_stage_model."  # in a checkpoint of SAT's whole engine
_SAT_SHORTCUT, _DIFFUSERS_SHORTCUT = ".nin_shortcut.", ".conv_shortcut."


def module_names(num_levels: int, num_res_blocks: int) -> dict[str, str]:
    """SAT module -> diffusers module, for those whose names differ.

    SAT counts the decoder's levels from the output, diffusers from the input.
    """
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
        for i in range(num_res_blocks + 1):
            names[f"{up}.block.{i}"] = f"{up_block}.resnets.{i}"
    return names


def _rename(name: str, modules: Mapping[str, str], shortcut: tuple[str, str]) -> str:
    """One tensor's name; what the table does not hold keeps its name."""
    parts = name.split(".")
    for length in (5, 4, 3):  # modules' names have 3 to 5 parts, none is the start of another
        module = modules.get(".".join(parts[:length]))
        if module is not None:
            return ".".join([module, *parts[length:]]).replace(*shortcut)
    return name


def to_diffusers(
    state: Mapping[str, Tensor], num_levels: int, num_res_blocks: int
) -> dict[str, Tensor]:
    """SAT's tensors under diffusers' names."""
    modules = module_names(num_levels, num_res_blocks)
    shortcut = (_SAT_SHORTCUT, _DIFFUSERS_SHORTCUT)
    return {_rename(name, modules, shortcut): tensor for name, tensor in state.items()}


def to_sat(state: Mapping[str, Tensor], num_levels: int, num_res_blocks: int) -> dict[str, Tensor]:
    """diffusers' tensors under SAT's names."""
    modules = {theirs: sat for sat, theirs in module_names(num_levels, num_res_blocks).items()}
    shortcut = (_DIFFUSERS_SHORTCUT, _SAT_SHORTCUT)
    return {_rename(name, modules, shortcut): tensor for name, tensor in state.items()}


def read_sat_vae(path: str | Path, ignore_keys: Sequence[str] = ()) -> dict[str, Tensor]:
    """The tensors of SAT's 3d-vae.pt without `first_stage_model.` and without ignored keys.

    A key is ignored when it starts with an entry of `ignore_keys`, with or without the prefix.
    """
    if not Path(path).is_file():
        raise ValueError(
            f"first_stage_config.params.ckpt_path={path} does not exist; "
            "give the path of SAT's 3d-vae.pt"
        )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"ckpt_path={path} cannot be read as a torch checkpoint ({reason}); download it again"
        ) from None
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise ValueError(
            f"ckpt_path={path} has no 'state_dict'; give SAT's 3d-vae.pt "
            "(a diffusers VAE is given as a folder: cogfast.model.autoencoder.VideoAutoencoder)"
        )
    state: dict[str, Tensor] = content["state_dict"]
    if any(key.startswith(SAT_PREFIX) for key in state):
        # A whole engine's checkpoint: the network and the text encoder are not ours to load.
        state = {k.removeprefix(SAT_PREFIX): v for k, v in state.items() if SAT_PREFIX in k}
    ignored = tuple(entry.removeprefix(SAT_PREFIX) for entry in ignore_keys)
    return {key: value for key, value in state.items() if not key.startswith(ignored)}
