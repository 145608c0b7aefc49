"""Translates SAT's nested network_config and first_stage_config to constructor arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from annotated_types import MaxLen
from omegaconf import DictConfig

from cogfast.config.sat_unused import FIRST_STAGE, LORA_KEY, NETWORK_KEY, POSITION_KEY, why_unused
from cogfast.config.yaml_files import to_dict
from cogfast.core.values import (
    KeyProblem,
    Model,
    Range,
    check_keys,
    check_mapping,
    join,
    show,
    validated,
)

VAE_KEY = f"{FIRST_STAGE}.params"
POSITION_SINCOS = "dit_video_concat.Basic3DPositionEmbeddingMixin"
POSITION_ROTARY = "dit_video_concat.Rotary3DPositionEmbeddingMixin"
PATCH_EMBED = "dit_video_concat.ImagePatchEmbeddingMixin"
ADALN = "dit_video_concat.AdaLNMixin"
FINAL_LAYER = "dit_video_concat.FinalLayerMixin"
LORA = "sat.model.finetune.lora2.LoraMixin"
REGULARIZER = "vae_modules.regularizers.DiagonalGaussianRegularizer"

_INTERPOLATIONS = ("height_interpolation", "width_interpolation", "time_interpolation")
_NORM_GROUPS = 32  # groups of GroupNorm in SAT's Normalize

# The ranges refuse a mistyped size before memory is allocated for it.
_Width = Annotated[int, Range(1, 2**16)]  # embedding width
_OptionalWidth = _Width | None
_Side = Annotated[int, Range(1, 4096)]
_Length = Annotated[int, Range(1, 10**5)]
_TextLength = Annotated[int, Range(0, 4096)]  # tokens
_Channels = Annotated[int, Range(1, 1024)]  # of the autoencoder
_Scale = Annotated[float, Range(1e-3, 1000)]
_Zero = Annotated[float, Range(0, 0)]
_Patch = Annotated[int, Range(1, 64)]
_PatchSize = _Patch | tuple[_Patch, _Patch, _Patch]


class NetworkParams(Model):
    """The params of SAT's network."""

    num_frames: _Length
    """pixel frames of the longest video that the position table holds"""
    time_compressed_rate: Annotated[int, Range(1, 64)]
    """pixel frames per latent frame: 4"""
    latent_width: _Side
    """latent columns of the position table"""
    latent_height: _Side
    """latent rows of the position table"""
    in_channels: _Side
    """channels of the network's input: 16, with image latents 32"""
    out_channels: _Side
    """channels of the latents: 16"""
    hidden_size: _Width
    """width of a token"""
    num_layers: Annotated[int, Range(1, 1000)]
    """number of blocks"""
    num_attention_heads: _Side
    """attention heads per block"""
    patch_size: _PatchSize
    """latent rows and columns of a token (2), or [frames, rows, columns] (CogVideoX1.5: [2, 2, 2])"""
    elementwise_affine: bool
    """whether layer norms have a scale and a shift"""
    time_embed_dim: _OptionalWidth = None
    """width of the timestep's embedding; null: hidden_size"""
    ofs_embed_dim: _OptionalWidth = None
    """width of the embedding of ofs (CogVideoX1.5 image-to-video), equal to time_embed_dim"""
    default_ofs: Annotated[float, Range(-(10**6), 10**6)] = 2.0
    """value of ofs; a key of cogfast"""
    height_interpolation: _Scale = 1.0
    """factor by which the row positions of a sincos table are divided"""
    width_interpolation: _Scale = 1.0
    """factor by which the column positions of a sincos table are divided"""
    time_interpolation: _Scale = 1.0
    """factor by which the time positions of a sincos table are divided"""
    # one legal value, that of CogVideoX
    num_classes: None = None
    input_time: Literal["adaln"] = "adaln"
    use_SwiGLU: Literal[False] = False
    use_RMSNorm: Literal[False] = False


class TransformerArgs(Model):
    """The keys of SAT's transformer_args that count."""

    checkpoint_activations: bool = False
    """true: args.activation_checkpointing is auto, if that is not set"""
    max_sequence_length: _Length = 64
    """rows of a table that SAT's rotary models store and never read"""
    # one legal value, that of CogVideoX
    layernorm_order: Literal["pre"] = "pre"
    is_decoder: Literal[False] = False
    is_gated_mlp: Literal[False] = False
    is_rotary_emb: Literal[False] = False
    num_multi_query_heads: Annotated[int, Range(0, 0)] = 0
    hidden_dropout: _Zero = 0.0
    attention_dropout: _Zero = 0.0
    drop_path: _Zero = 0.0
    layernorm_epsilon: Annotated[float, Range(1e-5, 1e-5)] = 1e-5
    inner_hidden_size: None = None
    hidden_size_per_attention_head: None = None


_MODULES = (
    "pos_embed_config",
    "patch_embed_config",
    "adaln_layer_config",
    "final_layer_config",
    "lora_config",
)


class SincosParams(Model):
    """The position table of CogVideoX-2B."""

    text_length: _TextLength = 0
    """tokens of a caption: 226"""
    height_interpolation: _Scale = 1.0
    """factor by which the row positions of a sincos table are divided"""
    width_interpolation: _Scale = 1.0
    """factor by which the column positions of a sincos table are divided"""
    time_interpolation: _Scale = 1.0
    """factor by which the time positions of a sincos table are divided"""


class RotaryParams(Model):
    """The rotary positions of the other models."""

    hidden_size_head: _Width
    """width of a head: hidden_size / num_attention_heads"""
    text_length: _TextLength
    """tokens of a caption: 226"""
    theta: Annotated[float, Range(1, 10**9)] = 10000.0
    """base of the rotary frequencies"""
    learnable_pos_embed: bool = False
    """train a learned position table beside the rotation (CogVideoX-5B-I2V)"""
    positions: Literal["integer", "pipeline"] = "integer"
    """integer: SAT's positions; pipeline: those of diffusers' pipelines, which rescale videos whose
    size differs from latent_height and latent_width. A key of cogfast"""
    # one legal value, that of CogVideoX
    rot_v: Literal[False] = False


class PatchParams(Model):
    """The embedding of patches and captions."""

    text_hidden_size: _Width
    """width of a caption's embedding: T5's 4096"""
    # one legal value, that of CogVideoX
    bias: Literal[True] = True


class AdalnParams(Model):
    """The blocks' modulation and norms."""

    qk_ln: bool = True
    """layer norms of queries and keys"""


class LoraParams(Model):
    """The adapters."""

    r: _Side
    """rank of the adapters"""
    lora_alpha: Annotated[float, Range(-(10**6), 10**6)] = 1.0
    """strength of the adapters: their product is multiplied by lora_alpha / r"""
    lora_dropout: Annotated[float, Range(0, 0.999)] = 0.0
    """dropout of the adapters' input"""
    layer_range: list[int] | None = None
    """numbers of the blocks that get adapters; null: all"""
    target_modules: list[str] = ["query_key_value", "dense"]
    """linears that get adapters: query_key_value, dense (SAT), to_q, to_k, to_v, to_out.0,
    ff.net.0.proj, ff.net.2 (diffusers), or in short q, k, v, out, fc1, fc2. A key of cogfast"""
    # one legal value, that of CogVideoX
    qlora: Literal[False] = False


# Linears that can have adapters: diffusers' name -> short name
LORA_SHORT = {
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "out",
    "ff.net.0.proj": "fc1",
    "ff.net.2": "fc2",
}
# Each of their names (short, diffusers' or SAT's) -> diffusers' names
_LORA_TARGETS = {
    **{short: (name,) for name, short in LORA_SHORT.items()},
    **{name: (name,) for name in LORA_SHORT},
    "query_key_value": ("to_q", "to_k", "to_v"),
    "dense": ("to_out.0",),
}


class NoParams(Model):
    """A class of SAT without params."""


class _RegularizerParams(Model):
    sample: Literal[True] = True


class CoderParams(Model):
    """The encoder, or the decoder, of SAT's autoencoder."""

    z_channels: _Channels
    """channels of the latents"""
    in_channels: _Channels = 3
    """channels of the pixels that the encoder takes"""
    out_ch: _Channels = 3
    """channels of the pixels that the decoder returns"""
    ch: _Channels
    """channels of the first level, a multiple of 32"""
    num_res_blocks: Annotated[int, Range(1, 16)]
    """residual blocks per level"""
    ch_mult: list[Annotated[int, Range(1, 16)]]
    """channels of each level in multiples of ch"""
    # one legal value, that of CogVideoX
    double_z: Literal[True] = True
    temporal_compress_times: Annotated[int, Range(4, 4)] = 4
    attn_resolutions: Annotated[list, MaxLen(0)] = []
    resamp_with_conv: Literal[True] = True
    pad_mode: Literal["first"] = "first"
    zq_ch: None = None
    add_conv: Literal[False] = False
    give_pre_end: Literal[False] = False


class AutoencoderParams(Model):
    """SAT's autoencoder itself."""

    ckpt_path: str | None = None
    """the weights: SAT's 3d-vae.pt"""
    ignore_keys: list[str] = []
    """beginnings of names in the file that are not loaded"""
    encode_chunks: Literal["auto", "whole", "frames", "tiles"] = "auto"
    """whole: encode a clip in one call, as SAT does; frames: eight frames at a time, as diffusers
    does; tiles: likewise, in tiles; auto: the first of these that fits into the memory"""
    use_slicing: bool = False
    """encode and decode one sample at a time"""
    use_tiling: bool = False
    """encode and decode in tiles"""


# (key of the params, "" or " of" a class) -> their model
NETWORK_MODELS = {
    (NETWORK_KEY, ""): NetworkParams,
    (f"{NETWORK_KEY}.transformer_args", ""): TransformerArgs,
    (POSITION_KEY, " of Basic3DPositionEmbeddingMixin"): SincosParams,
    (POSITION_KEY, " of Rotary3DPositionEmbeddingMixin"): RotaryParams,
    (f"{NETWORK_KEY}.modules.patch_embed_config.params", ""): PatchParams,
    (f"{NETWORK_KEY}.modules.adaln_layer_config.params", ""): AdalnParams,
    (LORA_KEY, ""): LoraParams,
    (VAE_KEY, " of SAT's VideoAutoencoderInferenceWrapper"): AutoencoderParams,
    (f"{VAE_KEY}.encoder_config.params", ", and of decoder_config"): CoderParams,
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
    fields = _read(own, NetworkParams, where, unused, "DiffusionTransformer")
    fields["patch_size"] = PatchSize.from_config(fields["patch_size"])
    # The embedding is as wide as the model by default, as in SAT.
    if fields.get("time_embed_dim") is None:
        fields["time_embed_dim"] = fields["hidden_size"]
    where_args = join(where, "transformer_args")
    args = check_mapping(where_args, params.get("transformer_args"))
    fields |= _read(args, TransformerArgs, where_args, unused, "transformer_args")
    fields.pop("checkpoint_activations", None)  # the trainer's: args.activation_checkpointing
    where_modules = join(where, "modules")
    modules = check_mapping(where_modules, params.get("modules"))
    check_keys(modules, _MODULES, where_modules)
    _require(modules, _MODULES[:-1], where_modules)  # lora_config, the last, is optional
    fields |= _position(fields, modules, where_modules, unused)
    of = where_modules, unused
    fields |= _module(modules, "patch_embed_config", {PATCH_EMBED: PatchParams}, *of)
    adaln = _module(modules, "adaln_layer_config", {ADALN: AdalnParams}, *of)
    fields["qk_norm"] = adaln.get("qk_ln", True)
    _module(modules, "final_layer_config", {FINAL_LAYER: NoParams}, *of)
    if modules.get("lora_config") is not None:
        fields |= _lora(modules, where_modules, unused)
    return fields


def _position(fields: dict, modules: Mapping, where: str, unused: dict[str, str]) -> dict[str, Any]:
    """Return the position fields. `fields` already holds interpolations set beside num_frames."""
    kinds = {POSITION_SINCOS: SincosParams, POSITION_ROTARY: RotaryParams}
    own: dict[str, str] = {}  # unused keys of the module, which come after those of the network
    found = _module(modules, "pos_embed_config", kinds, where, own)
    where_params = join(where, "pos_embed_config.params")
    head_width = fields["hidden_size"] // fields["num_attention_heads"]
    if modules["pos_embed_config"]["target"] == POSITION_SINCOS:
        for name in _INTERPOLATIONS:
            if name in found and fields.get(name, found[name]) != found[name]:
                raise KeyProblem(
                    join(where_params, name),
                    f"{join(where_params, name)}={found[name]} but network_config.params.{name}="
                    f"{fields[name]}; keep one of them",
                )
        return {"text_length": 0, **found, "position": "sincos"}
    for name in _INTERPOLATIONS:
        if fields.pop(name, None) is not None:
            outer = where.removesuffix(".modules")
            why = why_unused(f"Rotary3DPositionEmbeddingMixin.{name}")
            unused[join(outer, name)] = why or ""
    unused |= own
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


def lora_targets(key: str, names: Any) -> tuple[str, ...]:
    """Return diffusers' names of the linears that get adapters."""
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not names or not is_list or not all(name in _LORA_TARGETS for name in names):
        allowed = f"one or more of {', '.join(_LORA_TARGETS)}"
        raise KeyProblem(key, f"{key}={show(names)}: use {allowed}")
    found = {target for name in names for target in _LORA_TARGETS[name]}
    return tuple(name for name in LORA_SHORT if name in found)


def lora_text(rank: int, alpha: float, targets: Collection[str]) -> str:
    """Describe adapters: "LoRA rank 64, alpha 64, strength 1, on q k v out"."""
    on = " ".join(LORA_SHORT[name] for name in targets)
    return f"LoRA rank {rank}, alpha {alpha:g}, strength {alpha / rank:.4g}, on {on}"


def _lora(modules: Mapping, where: str, unused: dict[str, str]) -> dict[str, Any]:
    found = _module(modules, "lora_config", {LORA: LoraParams}, where, unused)
    layers = found.get("layer_range")
    key = join(where, "lora_config.params.target_modules")
    targets = found.get("target_modules", ["query_key_value", "dense"])
    return {
        "lora_targets": lora_targets(key, targets),
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
    arguments = _read(own, AutoencoderParams, where, unused, "VideoAutoencoderInferenceWrapper")
    _require(params, nested[:2], where)
    for name, target in zip(nested[:2], ("Encoder3D", "Decoder3D"), strict=True):
        homes = "vae_modules", "sgm.modules"
        paths = [f"{home}.cp_enc_dec.ContextParallel{target}" for home in homes]
        kinds = dict.fromkeys(paths, CoderParams)
        arguments[name] = _module(params, name, kinds, where, unused, "encoder_config")
    autoencoder_sizes(arguments["encoder_config"], arguments["decoder_config"])
    if params.get("regularizer_config") is not None:
        last = REGULARIZER.rpartition(".")[2]
        regularizers = [REGULARIZER, f"sgm.modules.autoencoding.regularizers.{last}"]
        kinds = dict.fromkeys(regularizers, _RegularizerParams)
        _module(params, "regularizer_config", kinds, where, unused)
    return arguments


def autoencoder_sizes(encoder: Mapping[str, Any], decoder: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of diffusers' class for SAT's encoder and decoder sections.

    ValueError if the two sections do not describe one autoencoder.
    """
    from cogfast.core.shapes import TEMPORAL_COMPRESSION  # here, since it imports torch

    encoder, decoder = (c.get("params", c) for c in (encoder, decoder))
    for key in ("ch", "ch_mult", "num_res_blocks", "z_channels"):
        if encoder[key] != decoder[key]:
            text = f"encoder_config.params.{key}={encoder[key]} and decoder_config.params.{key}={decoder[key]} "
            raise ValueError(f"{text}must be equal; make both the checkpoint's")
    if encoder["ch"] % _NORM_GROUPS:
        text = f"encoder_config.params.ch={encoder['ch']} must be a multiple of {_NORM_GROUPS} (group norm)"
        raise ValueError(f"{text}; use 128 for CogVideoX")
    return {
        "in_channels": encoder.get("in_channels", 3),
        "out_channels": decoder.get("out_ch", 3),
        "block_out_channels": tuple(encoder["ch"] * m for m in encoder["ch_mult"]),
        "layers_per_block": encoder["num_res_blocks"],
        "latent_channels": encoder["z_channels"],
        "norm_num_groups": _NORM_GROUPS,
        "temporal_compression_ratio": TEMPORAL_COMPRESSION,
    }


def _module(
    modules: Mapping,
    name: str,
    kinds: Mapping[str, type[Model]],
    where: str,
    unused: dict[str, str],
    sat_class: str = "",
) -> dict[str, Any]:
    """Check a `{target, params}` node, and return the params that the file sets. kinds: {target: its params}.

    unused: receives the keys of `sat_class`, or of the target, that are accepted without effect.
    """
    node, key = modules[name], join(where, name)
    if not isinstance(node, Mapping) or "target" not in node:
        text = f"{key}={show(node)} must be a mapping with target and params"
        if name == "lora_config":
            text = (
                f"{key}.target is missing; set args.lora_rank=64 (or another rank), which sets it"
            )
        raise KeyProblem(key, text)
    check_keys(node, ("target", "params"), key)
    target, where_params = node["target"], join(key, "params")
    if target not in [*kinds]:  # it may be a list, too
        key = join(key, "target")
        raise KeyProblem(key, f"{key}={target}: use {' or '.join(kinds)}")
    params = check_mapping(where_params, node.get("params"))
    sat_class = sat_class or target.rpartition(".")[2]
    return _read(params, kinds[target], where_params, unused, sat_class)


def _read(
    params: Mapping, kind: type[Model], where: str, unused: dict[str, str], sat_class: str
) -> dict[str, Any]:
    """Check all params, and return those that the file sets.

    unused: receives the keys of `sat_class` that are accepted without effect.
    """
    given = {}
    for name, value in params.items():
        if why := why_unused(f"{sat_class}.{name}"):
            unused[join(where, name)] = why
        else:
            given[name] = value
    # A field without a description has one legal value, which nothing reads.
    silent = {name for name, field in kind.model_fields.items() if field.description is None}
    return validated(given, kind, where).model_dump(exclude_unset=True, exclude=silent)


def _require(params: Mapping, names: Collection[str], where: str) -> None:
    for name in names:
        if params.get(name) is None:
            raise KeyProblem(where, f"{join(where, name)} is missing; set it as SAT's file does")
