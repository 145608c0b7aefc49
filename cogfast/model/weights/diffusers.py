"""diffusers' format: its tensor names, and folders of safetensors files with a config.json."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from cogfast.core.json_files import Range, Size, brief, check, read_json
from cogfast.core.shapes import SPATIAL_COMPRESSION, TEMPORAL_COMPRESSION, PatchSize
from cogfast.core.values import show
from cogfast.model.config import TransformerConfig, inpainting_channels
from cogfast.model.weights.names import diffusers_names, our_names
from cogfast.model.weights.shard import Shard, join
from cogfast.model.weights.source import WeightSource, with_flat_patches
from cogfast.model.weights.tensor_files import (
    TORCH_FILES,
    Outgoing,
    new_folder,
    open_tensors,
    write_json,
    write_safetensors_folder,
)

logger = logging.getLogger(__name__)
CLASS_NAME = "CogVideoXTransformer3DModel"
# Keys of config.json with the only values that cogfast's network has. They are diffusers' defaults.
_FIXED = {
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
    "flip_sin_to_cos": True,
    "freq_shift": 0,
    "norm_eps": 1e-5,  # the models were trained with 1e-6
    "timestep_activation_fn": "silu",
}
# PEFT, diffusers, ComfyUI's files and DDP put these before the names of weights.
_PREFIXES = re.compile(r"^(base_model\.model\.|transformer\.|diffusion_model\.|module\.)+")
# torch.compile, FSDP and checkpointing put these at any place.
_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Classes in model_index.json of the pipelines that run CogVideoX's models.
NOISE_KEY = "add_noise_in_inpaint_model"  # VideoX-Fun's, in the config.json of inpainting models
_PIPELINES = (
    "CogVideoXPipeline",
    "CogVideoXVideoToVideoPipeline",
    "CogVideoXImageToVideoPipeline",
    "CogVideoXFunControlPipeline",
    "CogVideoXFunInpaintPipeline",  # VideoX-Fun's
    "CogVideoXInterpolationPipeline",  # CogVideoX-Interpolation's
)


def plain_name(name: str) -> str:
    """Return a tensor's name without what other programs put before it or into it."""
    return _PREFIXES.sub("", _WRAPPERS.sub("", name))


def _num_parts(our_name: str) -> int:
    """Return the number of consecutive parts of cogfast's tensor, see Shard.num_parts."""
    # The modulation has video's rows, then text's; each of diffusers' two tensors has rows of both.
    return 2 if ".modulation." in our_name else 1


def from_diffusers(our_name: str, parts: list[Tensor]) -> Tensor:
    """Join the tensors that diffusers_names lists to one of cogfast's."""
    return join(parts, 0, _num_parts(our_name))


def find_diffusers_folder(path: Path) -> Path | None:
    """Return the transformer folder at `path` or in the pipeline's folder there; None if neither."""
    for folder in (path, path / "transformer"):
        kinds = ("*.safetensors*", TORCH_FILES)
        if (folder / "config.json").is_file() and any(any(folder.glob(kind)) for kind in kinds):
            return folder
    return None


def open_diffusers(folder: Path) -> WeightSource:
    """Open the weights in a diffusers transformer folder."""
    config = _read_config(folder)
    files = open_tensors(folder)
    names = {plain_name(name): name for name in files.names()}
    held = our_names(list(names))
    if not held:
        raise ValueError(f"{folder}: has no weights of diffusers' {CLASS_NAME}; copy it again")

    def shape(name: str) -> tuple[int, ...]:
        sizes = [files.shape(names[key]) for key in held[name]]
        if len(set(sizes)) > 1 or not sizes[0]:
            text = f"{folder}: {' and '.join(held[name])} have shapes "
            text += f"{brief(', '.join(str(list(s)) for s in sizes))}, which must be equal; copy it again"
            raise ValueError(text)
        # The parts are stacked by outputs.
        return (sum(s[0] for s in sizes), *sizes[0][1:])

    shapes = {name: shape(name) for name in held}

    def read(name: str, shard: Shard | None) -> Tensor:
        whole = from_diffusers(name, [files.read(names[key]) for key in held[name]])
        return whole if shard is None else shard.of(whole)

    # Other keys are reported: a key of another class, or a part without its partners.
    source = WeightSource(
        description=f"diffusers folder {folder}",
        shapes=shapes,
        read=read,
        dtypes={name: files.dtype(names[keys[0]]) for name, keys in held.items()},
        unexpected=sorted(names.keys() - {key for keys in held.values() for key in keys}),
        facts=_facts(config),
    )
    return with_flat_patches(source)


@dataclass(frozen=True, slots=True)
class _Config:
    """The keys of config.json for values that shapes do not show, with diffusers' defaults."""

    num_layers: Size | None = None
    patch_size: Annotated[int, Range(1, 16)] = 2
    patch_size_t: Annotated[int, Range(1, 16)] | None = None
    max_text_seq_length: Annotated[int, Range(1, 2**14)] = 226
    sample_frames: Annotated[int, Range(1, 2**14)] = 49
    temporal_compression_ratio: Annotated[int, Range(1, 64)] = TEMPORAL_COMPRESSION
    sample_height: Annotated[int, Range(1, 2**14)] = 60
    sample_width: Annotated[int, Range(1, 2**14)] = 90
    in_channels: Annotated[int, Range(1, 2**12)] = 16
    out_channels: Annotated[int, Range(1, 2**12)] = 16
    norm_elementwise_affine: bool = True
    ofs_embed_dim: Annotated[int, Range(1, 2**16)] | None = None
    use_rotary_positional_embeddings: bool = False
    use_learned_positional_embeddings: bool = False
    spatial_interpolation_scale: Annotated[float, Range(0.01, 100)] = 1.875
    temporal_interpolation_scale: Annotated[float, Range(0.01, 100)] = 1.0


def _read_config(folder: Path) -> _Config:
    """Read config.json. ValueError for another class, and for values that cogfast's network lacks."""
    file = folder / "config.json"
    given = read_json(file)
    kind = given.get("_class_name", CLASS_NAME)
    if kind != CLASS_NAME:
        text = f"{file}: _class_name={brief(show(kind))} is another network than CogVideoX's {CLASS_NAME}"
        raise ValueError(f"{text}; use the transformer folder of a CogVideoX model")
    for key, value in _FIXED.items():
        if given.get(key, value) != value:
            text = f"{file}: {key}={brief(show(given[key]))}, but cogfast's network has {show(value)}, as all "
            raise ValueError(f"{text}CogVideoX models; use a CogVideoX model, or correct the file")
    config = check(given, _Config, str(file))
    # The pipeline around a transformer folder may give it other inputs.
    file = folder.parent / "model_index.json"
    if folder.name == "transformer" and file.is_file():
        kind = read_json(file).get("_class_name")
        if kind not in _PIPELINES:
            text = f"{file}: _class_name={brief(show(kind))} is the pipeline of a model derived from CogVideoX"
            text += ", with inputs that cogfast does not make"
            raise ValueError(f"{text}; use a folder of {', '.join(_PIPELINES)}")
    return config


def _facts(config: _Config) -> dict[str, Any]:
    """Return the fields of TransformerConfig that config.json stores and shapes do not show."""
    is_rotary = config.use_rotary_positional_embeddings
    facts = {
        "patch_size": PatchSize(config.patch_size_t or 1, config.patch_size, config.patch_size),
        "in_channels": config.in_channels,
        "out_channels": config.out_channels,
        "elementwise_affine": config.norm_elementwise_affine,
        "text_length": config.max_text_seq_length,
        "num_frames": config.sample_frames,
        "time_compressed_rate": config.temporal_compression_ratio,
        "latent_height": config.sample_height,
        "latent_width": config.sample_width,
        "position": "rotary" if is_rotary else "sincos",
        "learnable_position": config.use_learned_positional_embeddings,
    }
    if config.num_layers is not None:
        facts["num_layers"] = config.num_layers
    # Rotary models store the scales too, but only computed tables use them.
    if not is_rotary:
        scale = config.spatial_interpolation_scale
        facts |= {"height_interpolation": scale, "width_interpolation": scale}
        facts["time_interpolation"] = config.temporal_interpolation_scale
    return facts


def _sample_size(config: TransformerConfig) -> tuple[int, int, int]:
    """Return sample_frames, sample_height, sample_width: pipelines' default size, with integer positions.

    This is the trained size. Exceptions: models trained with rescaled positions (rotary_positions:
    pipeline) and models with a position table keep their own size, and 1.5 keeps its own rows and
    columns, where its table ends.
    """
    own = (config.num_frames, config.latent_height, config.latent_width)
    if config.trained_size is None or config.position == "sincos" or config.learnable_position:
        return own
    is_fixed = config.has_rescaled_positions or config.patch_size.joins_frames
    return (config.trained_size[0], *own[1:]) if is_fixed else config.trained_size


def log_positions(config: TransformerConfig, path: Path) -> None:
    """Log the only size at which pipelines use the positions that the model was trained with."""
    own = (config.latent_height, config.latent_width)
    sample_size = _sample_size(config)[1:]
    if sample_size != own:
        rows, columns = (side * SPATIAL_COMPRESSION for side in sample_size)
        text = "%s: trained at %dx%d with integer positions, which diffusers' pipelines use only at this size "
        text += "(sample_height and sample_width of config.json); at other sizes they rescale them "
        text += "(pos_embed_config.params.positions: pipeline trains rescaled positions)"
        logger.warning(text, path, rows, columns)


def diffusers_config(config: TransformerConfig) -> dict[str, Any]:
    """Return the config.json of diffusers' class. ValueError for models that it cannot represent."""
    # diffusers' class hard-codes these values; a model that differs would load and be wrong.
    scales = (config.height_interpolation, config.width_interpolation)
    for is_met, key, value, rule in (
        (scales[0] == scales[1], "height_interpolation, width_interpolation", scales, "be equal"),
        (config.patch_size.h == config.patch_size.w, "patch_size", config.patch_size, "be square"),
        (config.qk_norm, "qk_ln", config.qk_norm, "be true"),
        (config.lora_rank is None, "LoRA rank", config.lora_rank, "go: merge it (--merge-lora)"),
        (config.rope_theta == 10000.0, "theta", config.rope_theta, "be 10000"),
    ):
        if not is_met:
            raise ValueError(f"{key}={value} must {rule} for diffusers' {CLASS_NAME}; use --to sat")
    is_rotary, joins_frames = config.position == "rotary", config.patch_size.joins_frames
    frames, rows, columns = _sample_size(config)
    return {
        "_class_name": CLASS_NAME,
        "_diffusers_version": "0.32.0",  # the first with all five models
        **_FIXED,
        "attention_head_dim": config.head_width,
        "dropout": 0.0,
        "in_channels": config.in_channels,
        "max_text_seq_length": config.text_length,
        "norm_elementwise_affine": config.elementwise_affine,
        "num_attention_heads": config.num_attention_heads,
        "num_layers": config.num_layers,
        "ofs_embed_dim": config.ofs_embed_dim,
        "out_channels": config.out_channels,
        "patch_bias": not joins_frames,
        "patch_size": config.patch_size.h,
        "patch_size_t": config.patch_size.t if joins_frames else None,
        "sample_frames": frames,
        "sample_height": rows,
        "sample_width": columns,
        "spatial_interpolation_scale": 1.875 if is_rotary else scales[0],
        "temporal_compression_ratio": config.time_compressed_rate,
        "temporal_interpolation_scale": 1.0 if is_rotary else config.time_interpolation,
        "text_embed_dim": config.text_hidden_size,
        "time_embed_dim": config.time_embed_dim,
        "use_learned_positional_embeddings": config.learnable_position,
        "use_rotary_positional_embeddings": is_rotary,
    }


def diffusers_tensors(
    source: WeightSource, config: TransformerConfig, dtype: torch.dtype | None = None
) -> Iterator[Outgoing]:
    """Yield the tensors of `source` under diffusers' names, without the tables it computes itself."""
    for name, shape in source.shapes.items():
        # diffusers computes 2B's table, and has no name for SAT's unused one.
        is_computed = name == "position_table.weight" and config.position == "sincos"
        theirs = [] if is_computed else diffusers_names(name)
        for index, target in enumerate(theirs):
            shard = None
            if len(theirs) > 1:
                shard = Shard(shape, 0, _num_parts(name), index, len(theirs))
            yield outgoing(source, config, name, target, shard, dtype)


def outgoing(
    source: WeightSource,
    config: TransformerConfig,
    name: str,
    target: str,
    shard: Shard | None,
    dtype: torch.dtype | None,
) -> Outgoing:
    """Describe a tensor, or a shard of it, as it is written to diffusers' and SAT's files under `target`."""
    shape, patch = source.shapes[name] if shard is None else shard.share_shape, config.patch_size
    if name == "patch_embedding.weight" and not patch.joins_frames:  # a convolution there
        shape = (shape[0], config.in_channels, patch.h, patch.w)
    read = partial(source.read, name, shard)
    return Outgoing(target, shape, source.dtype_in_target(name, dtype), read)


def write_diffusers(
    source: WeightSource,
    config: TransformerConfig,
    path: Path,
    dtype: torch.dtype | None = None,
    masked_video_noise: bool = False,
) -> None:
    """Write a transformer folder for CogVideoXTransformer3DModel.from_pretrained. dtype: of the weights;
    None: the source's. masked_video_noise: of an inpainting model's masked video."""
    about = diffusers_config(config)
    if config.in_channels == inpainting_channels(config.out_channels):
        about[NOISE_KEY] = masked_video_noise
    # Descriptions only: a tensor is read when it is written.
    tensors = list(diffusers_tensors(source, config, dtype))
    with new_folder(path, sum(t.nbytes for t in tensors)) as folder:
        write_json(folder / "config.json", about)
        write_safetensors_folder(folder, tensors)
