"""What a set of tensors is: the member of the family, its size and its adapters."""

from __future__ import annotations

from typing import Any

import torch

from cogfast.model.config import TransformerConfig
from cogfast.model.lora import is_lora_parameter
from cogfast.model.transformer import assemble_transformer
from cogfast.model.weights.family import Shapes, num_blocks
from cogfast.model.weights.lora.adapters import adapters_of
from cogfast.model.weights.source import WeightSource, first_of
from cogfast.shapes import PatchSize

_LATENT_CHANNELS = 16  # of CogVideoX's VAE
_PATCH_HW = 2
_HEAD_WIDTH = 64  # where no norm of queries shows it
_NEEDED = ("patch_embedding.weight", "output.weight", "text_embedding.weight")
_NEEDED += ("time_embedding.fc1.weight",)
# The published sizes, for what neither shapes nor the format say; by latent frames per patch. SAT
# trained 1.5 with 224 rows of text, diffusers' published config says 226; the weights know neither.
_PUBLISHED = {
    1: {"num_frames": 49, "latent_height": 60, "latent_width": 90, "text_length": 226},
    2: {"num_frames": 81, "latent_height": 300, "latent_width": 300, "text_length": 226},
}

_OF_2B = {"height_interpolation": 1.875, "width_interpolation": 1.875}


def identify(source: WeightSource, out_channels: int = _LATENT_CHANNELS) -> TransformerConfig:
    """The config of the model that the tensors make up, from their names and shapes; what those do
    not hold comes from the format's own facts or is the published model's.

    out_channels: latent channels, needed where the patch embedding is flat (CogVideoX 1.5).
    ValueError where the tensors are no whole transformer, or contradict the format's facts.
    """
    shapes = plain_shapes(source.shapes)
    absent = [name for name in _NEEDED if name not in shapes]
    if absent and source.is_partial and "hidden_size" in source.facts:
        return _config(source, source.facts)  # a run that trained a part
    if absent:
        raise ValueError(
            f"{source.description}: no {' and no '.join(absent)} in it ({len(shapes)} tensors, "
            f"first {first_of(list(source.shapes))}); use the files of a whole transformer"
        )
    flat = next((name for name in _NEEDED if len(shapes[name]) != 2), None)
    if flat is not None:
        raise ValueError(
            f"{source.description}: {flat} has shape {list(shapes[flat])} instead of [outputs, "
            "inputs]; copy it again"
        )
    found = _of_shapes(shapes, source, out_channels)
    for key, value in source.facts.items():
        if key in found and found[key] != value and not key.startswith("lora_"):
            raise ValueError(
                f"{source.description}: its config says {key}={value}, the tensors {found[key]}; "
                "put the config beside the tensors that belongs to them"
            )
    published = _PUBLISHED[min(found["patch_size"].t, 2)]
    if found["position"] == "sincos":
        published = published | _OF_2B
    config = _config(source, {**published, **source.facts, **found})
    table = shapes.get("position_table.weight")
    if table is not None and len(table) == 3:
        held = table[1] - config.grid.num_tokens
        if held != config.text_length:
            raise ValueError(
                f"{source.description}: its position table has {table[1]} rows, which are not "
                f"{config.text_length} of text and {config.grid.num_tokens} of a video of "
                f"{config.num_frames} frames with {config.latent_height}x{config.latent_width} "
                "latent pixels; convert from a format that says the video's size (diffusers, or "
                "a run of cogfast)"
            )
    return config


def _config(source: WeightSource, fields: dict[str, Any]) -> TransformerConfig:
    try:
        return TransformerConfig(**fields)
    except ValueError as error:
        raise ValueError(f"{source.description}: {error}") from None


def plain_shapes(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Without adapters, and under the names of a model that has none."""
    return {
        name.replace(".original.", "."): tuple(shape)
        for name, shape in shapes.items()
        if not is_lora_parameter(name)
    }


def _of_shapes(shapes: Shapes, source: WeightSource, out_channels: int) -> dict[str, Any]:
    patch, rows = shapes["patch_embedding.weight"], shapes["output.weight"][0]
    size = source.facts.get("patch_size") or _patch_size(rows, out_channels, source)
    head = shapes.get("blocks.0.attention.query_norm.weight", (_HEAD_WIDTH,))[0]
    if patch[0] % head:
        raise ValueError(
            f"{source.description}: tokens {patch[0]} wide do not divide into heads {head} wide; "
            "the files are of different models"
        )
    ofs = shapes.get("ofs_embedding.fc1.weight")
    unused = shapes.get("unused_position_embeddings")
    is_rotary = source.is_rotary or size.t > 1
    found = {
        "num_layers": num_blocks(shapes),
        "hidden_size": patch[0],
        "num_attention_heads": patch[0] // head,
        "in_channels": patch[1] // (size.t * size.h * size.w),
        "out_channels": rows // (size.t * size.h * size.w),
        "patch_size": size,
        "text_hidden_size": shapes["text_embedding.weight"][1],
        "time_embed_dim": shapes["time_embedding.fc1.weight"][0],
        "ofs_embed_dim": None if ofs is None else ofs[0],
        "position": "rotary" if is_rotary else "sincos",
        "learnable_position": is_rotary and "position_table.weight" in shapes,
        "qk_norm": "blocks.0.attention.query_norm.bias" in shapes,
        "elementwise_affine": "final_norm.weight" in shapes,
    }
    if unused is not None:
        found["max_sequence_length"] = unused[0]
    return found | _adapters(source, found["num_layers"])


def _patch_size(rows: int, out_channels: int, source: WeightSource) -> PatchSize:
    frames, rest = divmod(rows, out_channels * _PATCH_HW**2)
    if rest or frames not in (1, 2):
        raise ValueError(
            f"{source.description}: the last layer has {rows} rows, which are no patches of 1x2x2 "
            f"or 2x2x2 latent pixels with {out_channels} channels; it is no CogVideoX"
        )
    return PatchSize(frames, _PATCH_HW, _PATCH_HW)


def _adapters(source: WeightSource, num_layers: int) -> dict[str, Any]:
    """Fields about LoRA: rank, targets, and the layers that have adapters where not all have."""
    found = adapters_of(source)
    if found is None:
        return {}
    alpha = {} if found.alpha is None else {"lora_alpha": found.alpha}
    some = {"lora_layers": found.layers} if len(found.layers) < num_layers else {}
    return {"lora_rank": found.ranks[0], "lora_targets": found.targets, **alpha, **some}


def check_complete(source: WeightSource, config: TransformerConfig) -> None:
    """ValueError where `source` lacks tensors of the model, or has some of another size."""
    with torch.device("meta"):
        model = assemble_transformer(config)
    optional = set(model.unused_parameter_names())
    if config.position == "sincos":
        optional.add("position_table.weight")
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    missing = [name for name in wanted if name not in source.shapes and name not in optional]
    if missing:
        raise ValueError(
            f"{source.description}: {len(missing)} of the model's {len(wanted)} tensors are not in "
            f"it, first {first_of(missing)}; convert from a complete checkpoint"
        )
    for name, shape in source.shapes.items():
        if name in wanted and shape != wanted[name]:
            raise ValueError(
                f"{source.description}: {name} is {list(shape)}, in a model of {config.num_layers} "
                f"blocks {config.hidden_size} wide it is {list(wanted[name])}; its files are of "
                "different models"
            )
