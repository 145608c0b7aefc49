"""Derives a model's config from its tensors: the member of the family, its size and adapters."""

from __future__ import annotations

from typing import Any

import torch

from cogfast.core.shapes import PatchSize
from cogfast.extensions.formats.adapters import adapters_of
from cogfast.model.config import TransformerConfig, member_of
from cogfast.model.lora import is_lora_parameter
from cogfast.model.transformer import DiffusionTransformer, assemble_transformer
from cogfast.model.weights.source import Shapes, WeightSource, first_of, num_blocks

_LATENT_CHANNELS = 16  # of CogVideoX's VAE
_PATCH_HW = 2
_HEAD_WIDTH = 64  # used if the model has no query norm, whose weight has this size
_NEEDED = ("patch_embedding.weight", "output.weight", "text_embedding.weight")
_NEEDED += ("time_embedding.fc1.weight",)
# SAT trained 1.5 with 224 rows of text; diffusers' published configs have 226 for all models.
_TEXT_LENGTH = 226
_INTERPOLATION_2B = {"height_interpolation": 1.875, "width_interpolation": 1.875}


def identify(source: WeightSource, out_channels: int = _LATENT_CHANNELS) -> TransformerConfig:
    """Return the config of the model that consists of these tensors.

    Names and shapes come first, then the facts that the format stores, then the published values.
    out_channels: latent channels, needed where the patch embedding is flat (CogVideoX 1.5).
    ValueError if the tensors are no complete transformer or contradict the format's facts.
    """
    # Weights of a model without LoRA
    plain = [name for name in source.shapes if not is_lora_parameter(name)]
    shapes = {name.replace(".original.", "."): source.shapes[name] for name in plain}
    absent = [name for name in _NEEDED if name not in shapes]
    if absent and source.is_partial and "hidden_size" in source.facts:
        return _config(source, source.facts)  # a run that trained only a part of the model
    if absent and not shapes:
        text = f"{source.description}: is a LoRA and not a model; give the folder of its base model"
        text += ", and the LoRA with --lora (cogfast sample), args.load_lora (train) or --merge-lora (convert)"
        raise ValueError(text)
    if absent:
        text = f"{source.description}: has no {' and no '.join(absent)} ({len(shapes)} tensors"
        text += f", first {first_of(list(source.shapes))}); use the files of a complete transformer"
        raise ValueError(text)
    if (flat := next((name for name in _NEEDED if len(shapes[name]) != 2), None)) is not None:
        text = f"{source.description}: {flat} has shape {list(shapes[flat])} instead of [outputs, inputs]"
        raise ValueError(f"{text}; copy it again")
    found = _of_shapes(shapes, source, out_channels)
    # A config.json of another model loads without error until a video looks wrong.
    for key, value in source.facts.items():
        if key in found and found[key] != value and not key.startswith("lora_"):
            text = f"{source.description}: its config has {key}={value}, its tensors {found[key]}"
            raise ValueError(f"{text}; use the config.json that belongs to these tensors")
    # Tensors overrule the facts of the format, and these the published values.
    return _config(source, {**_published(found), **source.facts, **found})


def _published(found: dict[str, Any]) -> dict[str, Any]:
    """Return the published values that neither the shapes nor every format store."""
    is_rotary = found["position"] == "rotary"
    member = member_of(found["patch_size"], found["in_channels"] > found["out_channels"], is_rotary)
    rows, columns = member.table_size
    sizes = {"num_frames": member.num_frames, "latent_height": rows, "latent_width": columns}
    return sizes | {"text_length": _TEXT_LENGTH} | ({} if is_rotary else _INTERPOLATION_2B)


def _config(source: WeightSource, fields: dict[str, Any]) -> TransformerConfig:
    try:
        return TransformerConfig(**fields)
    except ValueError as error:
        raise ValueError(f"{source.description}: {error}") from None


def _of_shapes(shapes: Shapes, source: WeightSource, out_channels: int) -> dict[str, Any]:
    patch, rows = shapes["patch_embedding.weight"], shapes["output.weight"][0]
    size = source.facts.get("patch_size") or _patch_size(rows, out_channels, source)
    # The query norm has one weight for each entry of a head.
    head = shapes.get("blocks.0.attention.query_norm.weight", (_HEAD_WIDTH,))[0]
    if patch[0] % head:
        text = f"{source.description}: tokens of width {patch[0]} do not divide into heads of width {head}"
        raise ValueError(f"{text}; the files belong to different models, copy those of one")
    # 1.5 is always rotary, also in formats that do not store positions.
    is_rotary = source.is_rotary or size.joins_frames
    patch_numel = size.t * size.h * size.w
    found = {
        "num_layers": num_blocks(shapes),
        "hidden_size": patch[0],
        "num_attention_heads": patch[0] // head,
        "in_channels": patch[1] // patch_numel,
        "out_channels": rows // patch_numel,
        "patch_size": size,
        "text_hidden_size": shapes["text_embedding.weight"][1],
        "time_embed_dim": shapes["time_embedding.fc1.weight"][0],
        "ofs_embed_dim": shapes.get("ofs_embedding.fc1.weight", (None,))[0],
        "position": "rotary" if is_rotary else "sincos",
        # The table of a model that is not rotary is 2B's, which is computed.
        "learnable_position": is_rotary and "position_table.weight" in shapes,
        "qk_norm": "blocks.0.attention.query_norm.bias" in shapes,
        "elementwise_affine": "final_norm.weight" in shapes,
    }
    if unused := shapes.get("unused_position_embeddings"):
        found["max_sequence_length"] = unused[0]
    if adapters := adapters_of(source):
        found |= {"lora_rank": adapters.ranks[0], "lora_targets": adapters.targets}
        found |= {} if adapters.alpha is None else {"lora_alpha": adapters.alpha}
        if len(adapters.layers) < found["num_layers"]:
            found["lora_layers"] = adapters.layers
    return found


def _patch_size(rows: int, out_channels: int, source: WeightSource) -> PatchSize:
    frames, rest = divmod(rows, out_channels * _PATCH_HW**2)
    if rest or frames not in (1, 2):
        text = f"{source.description}: the last layer has {rows} rows, which do not form patches of 1x2x2 or 2x2x2 "
        raise ValueError(f"{text}latent pixels with {out_channels} channels; use a CogVideoX model")
    return PatchSize(frames, _PATCH_HW, _PATCH_HW)


def may_be_left_out(model: DiffusionTransformer) -> set[str]:
    """Return the names of the parameters that files may lack: those without use, and 2B's computed table."""
    is_computed = model.config.position == "sincos"
    return {*model.unused_parameter_names(), *["position_table.weight"] * is_computed}


def lacking_of(
    source: WeightSource, config: TransformerConfig
) -> tuple[list[str], dict[str, tuple[int, ...]]]:
    """Return the names that `source` lacks of the model, and the shapes of all."""
    with torch.device("meta"):
        model = assemble_transformer(config)
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    may_lack = may_be_left_out(model)
    return [name for name in wanted if name not in source.shapes and name not in may_lack], wanted


def check_complete(source: WeightSource, config: TransformerConfig) -> None:
    """Raise ValueError if `source` lacks tensors of the model or has some of another shape."""
    missing, wanted = lacking_of(source, config)
    if missing:
        text = f"{source.description}: lacks {len(missing)} of the model's {len(wanted)} tensors"
        raise ValueError(f"{text}, first {first_of(missing)}; convert from a complete checkpoint")
    for name, shape in source.shapes.items():
        if name in wanted and shape != wanted[name]:
            text = f"{source.description}: {name} has shape {list(shape)} instead of {list(wanted[name])}"
            text += f", which {config.num_layers} blocks of width {config.hidden_size} need"
            raise ValueError(f"{text}; its files belong to different models, copy those of one")
