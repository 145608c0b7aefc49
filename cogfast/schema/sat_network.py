"""Translates SAT's nested network_config and first_stage_config to constructor arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

from omegaconf import DictConfig

from cogfast.schema.json_files import Range
from cogfast.schema.merged_config import to_dict
from cogfast.schema.sat_unused import UNUSED
from cogfast.schema.values import KeyProblem, check_mapping, check_type, join, show, unknown_key

NETWORK_KEY = "model.network_config.params"
POSITION_KEY = f"{NETWORK_KEY}.modules.pos_embed_config.params"
LORA_KEY = f"{NETWORK_KEY}.modules.lora_config.params"
POSITION_SINCOS = "dit_video_concat.Basic3DPositionEmbeddingMixin"
POSITION_ROTARY = "dit_video_concat.Rotary3DPositionEmbeddingMixin"
PATCH_EMBED = "dit_video_concat.ImagePatchEmbeddingMixin"
ADALN = "dit_video_concat.AdaLNMixin"
FINAL_LAYER = "dit_video_concat.FinalLayerMixin"
LORA = "sat.model.finetune.lora2.LoraMixin"
REGULARIZER = "vae_modules.regularizers.DiagonalGaussianRegularizer"

_NORM_GROUPS = 32  # groups of GroupNorm in SAT's Normalize

# The ranges refuse a mistyped size before memory is allocated for it.
_Width = Annotated[int, Range(1, 2**16)]  # embedding width
_OptionalWidth = _Width | None
_Side = Annotated[int, Range(1, 4096)]
_Length = Annotated[int, Range(1, 10**5)]
_TextLength = Annotated[int, Range(0, 4096)]  # tokens
_Channels = Annotated[int, Range(1, 1024)]  # of the autoencoder
_Scale = Annotated[float, Range(1e-3, 1000)]
_Interpolation: dict[str, Any] = {
    # factor by which the row positions of a sincos table are divided
    "height_interpolation": _Scale,
    # factor by which the column positions of a sincos table are divided
    "width_interpolation": _Scale,
    # factor by which the time positions of a sincos table are divided
    "time_interpolation": _Scale,
}
_Patch = Annotated[int, Range(1, 64)]
_PatchSize = _Patch | tuple[_Patch, _Patch, _Patch]
# Params that are read -> type. The comment above a key is its meaning in docs/options.md.
NETWORK_PARAMS: dict[str, Any] = {
    # pixel frames of the longest video that the position table holds
    "num_frames": _Length,
    # pixel frames per latent frame: 4
    "time_compressed_rate": Annotated[int, Range(1, 64)],
    # latent columns of the position table
    "latent_width": _Side,
    # latent rows of the position table
    "latent_height": _Side,
    # channels of the network's input: 16, with image latents 32
    "in_channels": _Side,
    # channels of the latents: 16
    "out_channels": _Side,
    # width of a token
    "hidden_size": _Width,
    # number of blocks
    "num_layers": Annotated[int, Range(1, 1000)],
    # attention heads per block
    "num_attention_heads": _Side,
    # latent rows and columns of a token (2), or [frames, rows, columns] (CogVideoX1.5: [2, 2, 2])
    "patch_size": _PatchSize,
    # whether layer norms have a scale and a shift
    "elementwise_affine": bool,
    # width of the timestep's embedding; null: hidden_size
    "time_embed_dim": _OptionalWidth,
    # width of the embedding of ofs (CogVideoX1.5 image-to-video), equal to time_embed_dim
    "ofs_embed_dim": _OptionalWidth,
    # value of ofs; a key of cogfast
    "default_ofs": Annotated[float, Range(-(10**6), 10**6)],
    **_Interpolation,
}
NETWORK_REQUIRED = (
    "num_frames",
    "time_compressed_rate",
    "latent_width",
    "latent_height",
    "in_channels",
    "out_channels",
    "hidden_size",
    "num_layers",
    "num_attention_heads",
    "patch_size",
    "elementwise_affine",
)
# Params of SAT's class that have one legal value, that of CogVideoX
_NETWORK_ONLY = {
    "num_classes": None,
    "input_time": "adaln",
    "use_SwiGLU": False,
    "use_RMSNorm": False,
}
TRANSFORMER_ARGS: dict[str, Any] = {
    # true: args.activation_checkpointing is auto, if that is not set
    "checkpoint_activations": bool,
    # rows of a table that SAT's rotary models store and never read
    "max_sequence_length": _Length,
}
_TRANSFORMER_ARGS_ONLY = {
    "layernorm_order": "pre",
    "is_decoder": False,
    "is_gated_mlp": False,
    "is_rotary_emb": False,  # SAT's own rotary embedding, not the video one
    "num_multi_query_heads": 0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "drop_path": 0.0,
    "layernorm_epsilon": 1e-5,
    "inner_hidden_size": None,
    "hidden_size_per_attention_head": None,
}
_MODULES = (
    "pos_embed_config",
    "patch_embed_config",
    "adaln_layer_config",
    "final_layer_config",
    "lora_config",
)
SINCOS_PARAMS: dict[str, Any] = {
    # tokens of a caption: 226
    "text_length": _TextLength,
    **_Interpolation,
}
ROTARY_PARAMS: dict[str, Any] = {
    # width of a head: hidden_size / num_attention_heads
    "hidden_size_head": _Width,
    # tokens of a caption: 226
    "text_length": _TextLength,
    # base of the rotary frequencies
    "theta": Annotated[float, Range(1, 10**9)],
    # train a learned position table beside the rotation (CogVideoX-5B-I2V)
    "learnable_pos_embed": bool,
    # integer: SAT's positions; pipeline: those of diffusers' pipelines, which rescale videos whose
    # size differs from latent_height and latent_width. A key of cogfast
    "positions": Literal["integer", "pipeline"],
}
PATCH_PARAMS: dict[str, Any] = {
    # width of a caption's embedding: T5's 4096
    "text_hidden_size": _Width,
}
ADALN_PARAMS: dict[str, Any] = {
    # layer norms of queries and keys
    "qk_ln": bool,
}
LORA_PARAMS: dict[str, Any] = {
    # rank of the adapters
    "r": _Side,
    # strength of the adapters: their product is multiplied by lora_alpha / r
    "lora_alpha": Annotated[float, Range(-(10**6), 10**6)],
    # dropout of the adapters' input
    "lora_dropout": Annotated[float, Range(0, 0.999)],
    # numbers of the blocks that get adapters; null: all
    "layer_range": list[int] | None,
    # linears that get adapters: query_key_value, dense (SAT), to_q, to_k, to_v, to_out.0,
    # ff.net.0.proj, ff.net.2 (diffusers). A key of cogfast
    "target_modules": list[str],
}
# Linears that can have adapters: SAT's or diffusers' name -> diffusers' names
_LORA_TARGETS = {
    "query_key_value": ("to_q", "to_k", "to_v"),
    "dense": ("to_out.0",),
    **{name: (name,) for name in ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2")},
}
# Params of the encoder and of the decoder of SAT's autoencoder -> type
CODER_PARAMS: dict[str, Any] = {
    # channels of the latents
    "z_channels": _Channels,
    # channels of the pixels that the encoder takes
    "in_channels": _Channels,
    # channels of the pixels that the decoder returns
    "out_ch": _Channels,
    # channels of the first level, a multiple of 32
    "ch": _Channels,
    # residual blocks per level
    "num_res_blocks": Annotated[int, Range(1, 16)],
    # channels of each level in multiples of ch
    "ch_mult": list[Annotated[int, Range(1, 16)]],
    # the encoder returns mean and variance; only true
    "double_z": bool,
    # pixel frames per latent frame; only 4
    "temporal_compress_times": Annotated[int, Range(1, 64)],
}
CODER_REQUIRED = ("z_channels", "ch", "ch_mult", "num_res_blocks")
# Params of the autoencoder itself -> type
AUTOENCODER_PARAMS: dict[str, Any] = {
    # the weights: SAT's 3d-vae.pt
    "ckpt_path": str | None,
    # beginnings of names in the file that are not loaded
    "ignore_keys": list[str],
    # whole: encode a clip in one call, as SAT does; frames (or diffusers): eight frames at a time, as
    # diffusers does; tiles: likewise, in tiles; auto: the first of these that fits into the memory
    "encode_chunks": Literal["auto", "whole", "frames", "tiles", "diffusers"],
    # serial: decode two latent frames at a time, as SAT's sampling does; whole: in one call
    "decode_chunks": Literal["serial", "whole"],
    # encode and decode one sample at a time
    "use_slicing": bool,
    # encode and decode in tiles
    "use_tiling": bool,
    # rows and columns of a tile in pixels; null: diffusers' own
    "tile_size": tuple[_Side, _Side] | None,
}
_CODER_ONLY = {
    "attn_resolutions": [],
    "resamp_with_conv": True,
    "pad_mode": "first",
    "zq_ch": None,
    "add_conv": False,
    "give_pre_end": False,
}


def transformer_arguments(
    params: Mapping, where: str = NETWORK_KEY, unused: dict[str, str] | None = None
) -> dict[str, Any]:
    """Return the fields of TransformerConfig for SAT's network_config.params, after checking all keys.

    patch_size may be an integer (CogVideoX 1.0) or [t, h, w] (1.5). The interpolations may be set
    beside num_frames or in pos_embed_config. unused: receives accepted keys without effect.
    """
    from cogfast.core.shapes import PatchSize  # here, since it imports torch

    unused = {} if unused is None else unused
    if isinstance(params, DictConfig):
        params = to_dict(params)
    own = {k: v for k, v in params.items() if k not in ("transformer_args", "modules")}
    fields = _read(own, NETWORK_PARAMS, where, unused, "DiffusionTransformer", _NETWORK_ONLY)
    _require(fields, NETWORK_REQUIRED, where)
    _require_positive(fields, fields.keys() - {"default_ofs"}, where)
    fields["patch_size"] = PatchSize.from_config(fields["patch_size"])
    # The embedding is as wide as the model by default, as in SAT.
    if fields.get("time_embed_dim") is None:
        fields["time_embed_dim"] = fields["hidden_size"]
    where_args = join(where, "transformer_args")
    args = check_mapping(where_args, params.get("transformer_args"))
    fields |= _read(
        args, TRANSFORMER_ARGS, where_args, unused, "transformer_args", _TRANSFORMER_ARGS_ONLY
    )
    fields.pop("checkpoint_activations", None)  # the trainer's: args.activation_checkpointing
    _require_positive(fields, ["max_sequence_length"], where_args)
    where_modules = join(where, "modules")
    modules = check_mapping(where_modules, params.get("modules"))
    for name in modules:
        if name not in _MODULES:
            raise unknown_key(where_modules, name, _MODULES)
    _require(modules, _MODULES[:-1], where_modules)  # lora_config, the last, is optional
    fields |= _position(fields, modules["pos_embed_config"], where_modules, unused)
    patch = _module(modules, "patch_embed_config", [PATCH_EMBED], where_modules)
    where_patch = join(where_modules, "patch_embed_config.params")
    only = {"bias": True}
    fields |= _read(patch, PATCH_PARAMS, where_patch, unused, "ImagePatchEmbeddingMixin", only)
    _require(fields, ("text_hidden_size",), where_patch)
    adaln = _module(modules, "adaln_layer_config", [ADALN], where_modules)
    where_adaln = join(where_modules, "adaln_layer_config.params")
    fields["qk_norm"] = _read(adaln, ADALN_PARAMS, where_adaln, unused).get("qk_ln", True)
    final = _module(modules, "final_layer_config", [FINAL_LAYER], where_modules)
    _read(final, {}, join(where_modules, "final_layer_config.params"), unused)
    if modules.get("lora_config") is not None:
        fields |= _lora(modules, where_modules, unused)
    return fields


def network_arguments(params: Mapping, where: str, unused: dict[str, str]) -> dict[str, Any]:
    """Return the argument of assemble_transformer for SAT's network_config.params.

    components.py converts its fields to a TransformerConfig.
    """
    return {"config": transformer_arguments(params, where, unused)}


def _position(fields: dict, node: Any, where: str, unused: dict[str, str]) -> dict[str, Any]:
    """Return the position fields. `fields` already holds interpolations set beside num_frames."""
    key = join(where, "pos_embed_config")
    targets = (POSITION_SINCOS, POSITION_ROTARY)
    params = _module({"pos_embed_config": node}, "pos_embed_config", targets, where)
    where_params = join(key, "params")
    head_width = fields["hidden_size"] // fields["num_attention_heads"]
    if node["target"] == POSITION_SINCOS:
        found = _read(params, SINCOS_PARAMS, where_params, unused)
        _require_positive(found, _Interpolation, where_params)
        for name in _Interpolation:
            if name in found and fields.get(name, found[name]) != found[name]:
                raise KeyProblem(
                    join(where_params, name),
                    f"{join(where_params, name)}={found[name]} but network_config.params.{name}="
                    f"{fields[name]}; keep one of them",
                )
        return {"text_length": 0, **found, "position": "sincos"}
    for name in _Interpolation:
        if fields.pop(name, None) is not None:
            outer = where.removesuffix(".modules")
            unused[join(outer, name)] = UNUSED[f"Rotary3DPositionEmbeddingMixin.{name}"]
    only = {"rot_v": False}
    found = _read(
        params, ROTARY_PARAMS, where_params, unused, "Rotary3DPositionEmbeddingMixin", only
    )
    _require(found, ("hidden_size_head", "text_length"), where_params)
    if found["hidden_size_head"] != head_width:
        raise KeyProblem(
            join(where_params, "hidden_size_head"),
            f"{join(where_params, 'hidden_size_head')}={found['hidden_size_head']} must be "
            f"hidden_size / num_attention_heads = {head_width}",
        )
    return {
        "position": "rotary",
        "text_length": found["text_length"],
        "rope_theta": float(found.get("theta", 10000.0)),
        "learnable_position": found.get("learnable_pos_embed", False),
        "rotary_positions": found.get("positions", "integer"),
    }


def _lora(modules: Mapping, where: str, unused: dict[str, str]) -> dict[str, Any]:
    params = _module(modules, "lora_config", [LORA], where)
    where_params = join(where, "lora_config.params")
    found = _read(params, LORA_PARAMS, where_params, unused, "LoraMixin", {"qlora": False})
    _require(found, ("r",), where_params)
    _require_positive(found, ["r"], where_params)
    layers = found.get("layer_range")
    key = join(where_params, "target_modules")
    targets = found.get("target_modules", ["query_key_value", "dense"])
    if not targets or not all(name in _LORA_TARGETS for name in targets):
        allowed = f"one or more of {', '.join(_LORA_TARGETS)}"
        raise KeyProblem(key, f"{key}={show(targets)}: use {allowed}")
    return {
        "lora_targets": tuple(dict.fromkeys(t for name in targets for t in _LORA_TARGETS[name])),
        "lora_rank": found["r"],
        "lora_alpha": float(found.get("lora_alpha", 1.0)),  # SAT's default: scaling is 1/r
        "lora_dropout": float(found.get("lora_dropout", 0.0)),
        "lora_layers": None if layers is None else tuple(layers),
    }


def autoencoder_arguments(params: Mapping, where: str, unused: dict[str, str]) -> dict[str, Any]:
    """Return the arguments of video_autoencoder_from_sat for the params of SAT's wrapper.

    The params may also hold cogfast's own keys, such as encode_chunks.
    """
    nested = ("encoder_config", "decoder_config", "regularizer_config")
    own = {k: v for k, v in params.items() if k not in nested}
    arguments = _read(own, AUTOENCODER_PARAMS, where, unused, "VideoAutoencoderInferenceWrapper")
    _require(params, nested[:2], where)
    for name, target in zip(nested[:2], ("Encoder3D", "Decoder3D"), strict=True):
        paths = [
            f"{home}.cp_enc_dec.ContextParallel{target}" for home in ("vae_modules", "sgm.modules")
        ]
        coder = _module(params, name, paths, where)
        where_coder = join(where, f"{name}.params")
        arguments[name] = _read(
            coder, CODER_PARAMS, where_coder, unused, "encoder_config", _CODER_ONLY
        )
        _require(arguments[name], CODER_REQUIRED, where_coder)
        _require_positive(arguments[name], arguments[name], where_coder)
        for multiple in arguments[name]["ch_mult"]:
            _require_positive({"ch_mult": multiple}, ["ch_mult"], where_coder)
    autoencoder_sizes(arguments["encoder_config"], arguments["decoder_config"])
    if params.get("regularizer_config") is not None:
        regularizers = [
            REGULARIZER,
            "sgm.modules.autoencoding.regularizers." + REGULARIZER.split(".")[-1],
        ]
        chosen = _module(params, "regularizer_config", regularizers, where)
        where_regularizer = join(where, "regularizer_config.params")
        _read(chosen, {}, where_regularizer, unused, "", {"sample": True})
    return arguments


def autoencoder_sizes(encoder: Mapping[str, Any], decoder: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of diffusers' class for SAT's encoder and decoder sections.

    ValueError if the two sections do not describe one autoencoder.
    """
    from cogfast.core.shapes import TEMPORAL_COMPRESSION  # here, since it imports torch

    encoder, decoder = (dict(c.get("params", c)) for c in (encoder, decoder))
    # Fixed values of the CogVideoX autoencoder, which diffusers' class assumes
    fixed = {
        "attn_resolutions": [],
        "resamp_with_conv": True,
        "pad_mode": "first",
        "give_pre_end": False,
        "zq_ch": None,
        "add_conv": False,
        "double_z": True,
        "temporal_compress_times": TEMPORAL_COMPRESSION,
    }
    for name, config in (("encoder_config", encoder), ("decoder_config", decoder)):
        for key, only in fixed.items():
            value = config.get(key, only)
            # attn_resolutions may be a tuple, which does not equal a list.
            if (list(value) if isinstance(value, Sequence) and only == [] else value) != only:
                raise ValueError(f"{name}.params.{key}={value}: only {only} is supported; use it")
        for key in ("ch", "ch_mult", "num_res_blocks", "z_channels"):
            if key not in config:
                raise ValueError(f"{name}.params.{key} is missing; set it as SAT's config does")
    for key in ("ch", "ch_mult", "num_res_blocks", "z_channels"):
        if encoder[key] != decoder[key]:
            raise ValueError(
                f"encoder_config.params.{key}={encoder[key]} and decoder_config.params.{key}="
                f"{decoder[key]} must be equal; make both the checkpoint's"
            )
    if encoder["ch"] % _NORM_GROUPS:
        raise ValueError(
            f"encoder_config.params.ch={encoder['ch']} must be a multiple of {_NORM_GROUPS} "
            "(group norm); use 128 for CogVideoX"
        )
    return {
        "in_channels": encoder.get("in_channels", 3),
        "out_channels": decoder.get("out_ch", 3),
        "block_out_channels": tuple(encoder["ch"] * m for m in encoder["ch_mult"]),
        "layers_per_block": encoder["num_res_blocks"],
        "latent_channels": encoder["z_channels"],
        "norm_num_groups": _NORM_GROUPS,
        "temporal_compression_ratio": TEMPORAL_COMPRESSION,
    }


def _module(modules: Mapping, name: str, targets: Collection[str], where: str) -> Mapping[str, Any]:
    """Return the params of a `{target, params}` node whose target must be one of `targets`."""
    node, key = modules[name], join(where, name)
    if not isinstance(node, Mapping) or "target" not in node:
        text = f"{key}={show(node)} must be a mapping with target and params"
        if name == "lora_config":
            text = f"{key}.target is missing; add configs/lora.yaml to --base, which has it"
        raise KeyProblem(key, text)
    for part in node:
        if part not in ("target", "params"):
            raise unknown_key(key, part, ("target", "params"))
    if node["target"] not in targets:
        key = join(key, "target")
        raise KeyProblem(key, f"{key}={node['target']}: use {' or '.join(targets)}")
    return check_mapping(join(key, "params"), node.get("params"))


def _read(
    params: Mapping,
    kinds: Mapping[str, Any],
    where: str,
    unused: dict[str, str],
    sat_class: str = "",
    only: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Check the names and types of all params and return those that are read."""
    only, found = only or {}, {}
    for name, value in params.items():
        key = join(where, name)
        if name in kinds:
            check_type(key, value, kinds[name])
            found[name] = value
        elif name in only:
            if value != only[name]:
                text = f"{key}={show(value)}: only {show(only[name])} is supported; use it"
                raise KeyProblem(key, text)
        elif f"{sat_class}.{name}" in UNUSED:
            unused[key] = UNUSED[f"{sat_class}.{name}"]
        else:
            raise unknown_key(where, name, [*kinds, *only])
    return found


def _require(params: Mapping, names: Collection[str], where: str) -> None:
    for name in names:
        if params.get(name) is None:
            raise KeyProblem(where, f"{join(where, name)} is missing; set it as SAT's file does")


def _require_positive(params: Mapping, names: Collection[str], where: str) -> None:
    for name in names:
        value = params.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
            key = join(where, name)
            raise KeyProblem(key, f"{key}={value} must be above 0")
