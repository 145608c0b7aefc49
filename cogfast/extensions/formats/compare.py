"""Compares what two sets of weights compute, for `cogfast convert --verify`.

The networks have one block at a time, so that models of any size take little memory. Files of diffusers run
in diffusers' own class.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cogfast.core.json_files import read_json
from cogfast.extensions.formats.adapters import (
    merge_lora,
    only_adapters,
    selected,
    without_adapters,
)
from cogfast.model.config import TransformerConfig
from cogfast.model.lora import is_lora_parameter
from cogfast.model.transformer import assemble_transformer
from cogfast.model.weights.diffusers import find_diffusers_folder
from cogfast.model.weights.identify import identify
from cogfast.model.weights.load import load_source
from cogfast.model.weights.source import WeightSource
from cogfast.model.weights.tensor_files import open_tensors

_Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None]  # see _draw
_NUM_TEXT = 3
_OFS = 2.0  # of CogVideoX 1.5's image-to-video model
# Relative norms of differences: float32 with diffusers' epsilon of the last norm, and rounding to 16 bits.
_LIMITS = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
_TABLE = "position_table.weight"


@torch.no_grad()
def compare_networks(source: WeightSource, target: WeightSource, folder: Path) -> str:
    """Return in a line how much the outputs of two models differ on drawn inputs.

    source: what was to be written, with its adapters; target: as the written files are read, and folder theirs.
    ValueError if they differ by more than the target's dtype explains.
    """
    ours, written, worst = _merged(source), _merged(target), 0.0
    whole, theirs = identify(ours), find_diffusers_folder(folder)
    config = _one_block(whole)
    for i in range(whole.num_layers):
        inputs = _draw(config, i)
        expected = _run(ours, config, i, inputs)
        if theirs is None:
            found = _run(written, config, i, inputs)
        else:
            found = _run_diffusers(theirs, config, i, inputs)
        worst = max(worst, _difference(expected, found))
    return _judge(worst, target.main_dtype, folder, "the outputs of the networks")


def compare_adapters(source: WeightSource, target: WeightSource, file: Path) -> str:
    """Return in a line how much adapters of two sources, of the strengths that they have there, differ in what
    they add to the outputs of their linears. ValueError as compare_networks."""
    worst, random = 0.0, torch.Generator().manual_seed(0)
    for name in (name for name in source.shapes if ".matrix_A." in name):
        x = torch.randn(8, source.shapes[name][1], generator=random)
        worst = max(worst, _difference(*(_added(each, name, x) for each in (source, target))))
    return _judge(worst, target.main_dtype, file, "the outputs of the adapters")


def _added(source: WeightSource, name: str, x: Tensor) -> Tensor:
    """Return what the pair of a matrix A adds to its linear's output for x [N, in]: [N, out]."""
    a, b = (source.read(each, None).float() for each in (name, name.replace("_A.", "_B.")))
    return (x @ a.T @ b.T) * (source.alpha / a.shape[0])


def _difference(a: Tensor, b: Tensor) -> float:
    found = float((a - b).norm() / a.norm().clamp_min(1e-30))  # sync: none, on the CPU
    return math.inf if math.isnan(found) else found


def _judge(worst: float, dtype: torch.dtype, where: Path, what: str) -> str:
    if worst > _LIMITS[dtype]:
        raise ValueError(
            f"{where}: {what} differ from the source's by {worst:.2g} of their norm, more than {dtype} "
            "explains; delete it and report this".replace("torch.", "")
        )
    return f"{what} differ by at most {worst:.1e} of their norm"


def _merged(source: WeightSource) -> WeightSource:
    if not any(map(is_lora_parameter, source.shapes)):
        return source
    return merge_lora(without_adapters(source), only_adapters(source, with_others=True))


def _one_block(config: TransformerConfig) -> TransformerConfig:
    """Return the configuration of a network with one block and small videos."""
    patch = config.patch_size
    small = {"num_layers": 1, "num_frames": 8 * patch.t + 1, "text_length": _NUM_TEXT}
    sizes = {"latent_height": 2 * patch.h, "latent_width": 3 * patch.w}
    return replace(config, trained_size=None, **small, **sizes)


def _draw(config: TransformerConfig, seed: int) -> _Inputs:
    """Return latents [2, C, T, h, w], timesteps [2], text [2, L, E] and the ofs [1] of 1.5-I2V."""
    random, grid, patch = torch.Generator().manual_seed(seed), config.grid, config.patch_size
    shape = grid.t * patch.t, grid.h * patch.h, grid.w * patch.w
    latents = torch.randn(2, config.in_channels, *shape, generator=random)
    text = torch.randn(2, config.text_length, config.text_hidden_size, generator=random)
    ofs = None if config.ofs_embed_dim is None else torch.tensor([_OFS])
    return latents, torch.tensor([17, 863]), text, ofs


def _rows(table: Tensor, config: TransformerConfig) -> Tensor:
    """Return the first rows of a learned position table [1, rows, M], those of text and of a small video."""
    return table[:, : config.text_length + config.grid.num_tokens]


def _run(source: WeightSource, config: TransformerConfig, i: int, inputs: _Inputs) -> Tensor:
    """Return what cogfast's network with block i of these weights predicts."""
    names = {
        name.replace(f"blocks.{i}.", "blocks.0."): name
        for name in source.shapes
        if not name.startswith("blocks.") or name.startswith(f"blocks.{i}.")
    }
    if config.position == "sincos":
        names.pop(_TABLE, None)  # computed
    part = replace(selected(source, names), is_partial=True)
    if _TABLE in names:
        shape = (1, config.text_length + config.grid.num_tokens, config.hidden_size)
        part = part.changed(_TABLE, shape, lambda values: _rows(values, config))
    transformer = assemble_transformer(config)
    load_source(transformer, part, source.description)
    latents, timesteps, text, ofs = inputs
    return transformer(latents, timesteps, text, ofs=ofs)


def _run_diffusers(folder: Path, config: TransformerConfig, i: int, inputs: _Inputs) -> Tensor:
    """Return what diffusers' network with block i of the weights in a transformer folder predicts."""
    from diffusers import CogVideoXTransformer3DModel

    about = read_json(folder / "config.json") | {
        "num_layers": 1,
        "max_text_seq_length": config.text_length,
        "sample_frames": config.num_frames,
        "sample_height": config.latent_height,
        "sample_width": config.latent_width,
    }
    network: Any = CogVideoXTransformer3DModel.from_config(about)
    network.eval()
    files, state, block = open_tensors(folder), {}, f"transformer_blocks.{i}."
    for name in files.names():
        if not name.startswith("transformer_blocks.") or name.startswith(block):
            values = files.read(name).float()
            values = _rows(values, config) if name == "patch_embed.pos_embedding" else values
            state[name.replace(block, "transformer_blocks.0.")] = values
    network.load_state_dict(state)
    latents, timesteps, text, ofs = inputs
    rotary = _rotary(config) if about["use_rotary_positional_embeddings"] else None
    given = (latents.transpose(1, 2), text, timesteps)
    return network(*given, ofs=ofs, image_rotary_emb=rotary).sample.transpose(1, 2)


def _rotary(config: TransformerConfig) -> Any:
    """Return diffusers' cosines and sines, [V, D] each."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    grid, corners, more = config.grid, ((0, 0), (config.grid.h, config.grid.w)), {}
    if config.patch_size.joins_frames:
        corners, more = None, {"grid_type": "slice", "max_size": (grid.h, grid.w)}
    return get_3d_rotary_pos_embed(config.head_width, corners, (grid.h, grid.w), grid.t, **more)
