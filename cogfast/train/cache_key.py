"""What cached latents and embeddings depend on: first stage, text encoder, clips and precision."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
from collections.abc import Mapping

from omegaconf import DictConfig, OmegaConf

from cogfast.config import Config
from cogfast.data.cache.shards import Spec
from cogfast.data.cache.source_hashes import Sources, hash_text
from cogfast.data.video.settings import ClipSettings
from cogfast.schema.arguments import ModelArguments, TrainArguments
from cogfast.schema.components import resolve

# Arguments of frozen parts that change no number of what they encode.
_WITHOUT_EFFECT = ("decode_chunks", "use_slicing", "freeze", "device", "cache_dir", "ignore_keys")
# The parts of a diffusers model's folder that frozen parts read.
_FOLDERS = {"VAE": ("vae",), "text encoder": ("text_encoder", "tokenizer")}


def cache_specs(
    config: Config,
    args: TrainArguments,
    settings: ClipSettings,
    text_node: Mapping | None,
    sources: Sources,
) -> dict[str, Spec]:
    """{"video", "text"}: what the entries of a latent cache are made with; `sources` knows, or
    reads, the content of weight files. text_node: {target, params} of the text encoder."""
    clip = {
        f"data.params.{f.name}": getattr(settings, f.name) for f in dataclasses.fields(settings)
    }
    clip["data.params.video_size"] = list(settings.video_size)
    # What a bucket makes of a clip is in its key; what evaluations sample then counts for nothing.
    of_buckets = () if settings.buckets is None else ("max_num_frames", "video_size")
    for name in ("keep_decoded_mib", "buckets", *of_buckets):
        del clip[f"data.params.{name}"]
    # DALI's frames are PyAV's but for the rounding of colours; decord takes others in some formats.
    clip["data.params.video_backend"] = settings.cpu_reader
    clip["data.params.short_clips"] = "skip" if settings.skips_short_clips else "pad"
    has_image = ModelArguments.from_config(config).noised_image_input
    number = args.cached_noised_images
    video = {
        "VAE": _identity("VAE", config.model.get("first_stage_config"), config, sources),
        "precision": args.precision,
        "first frames kept": has_image and not number,
        **({"args.cached_noised_images": number} if number else {}),
        **clip,
    }
    text = {
        "text encoder": _identity("text encoder", text_node, config, sources),
        "max_length": None if text_node is None else _max_length(text_node, config),
        "precision": args.precision,
    }
    return {"video": video, "text": text}


def _max_length(node: Mapping, config: Config) -> int | None:
    target, arguments = resolve(node, config.allow_import)
    default = inspect.signature(target).parameters.get("max_length")
    return arguments.get("max_length", None if default is None else default.default)


def _identity(part: str, node: Mapping | None, config: Config, sources: Sources) -> str:
    """A hash of class, arguments and weights; where the files lie does not count."""
    if node is None:
        return "none"
    target, arguments = resolve(node, config.allow_import)
    described = {
        name: _described(part, value, sources)
        for name, value in arguments.items()
        if name not in (*_WITHOUT_EFFECT, "max_length")
    }
    text = json.dumps([target.__module__, target.__qualname__, described], sort_keys=True)
    return hash_text(text)[:12]


def _described(part: str, value: object, sources: Sources) -> object:
    """The value as JSON has it; the content of files and folders in place of their names."""
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=True)
    if isinstance(value, Mapping | DictConfig):
        return {str(key): _described(part, inner, sources) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_described(part, inner, sources) for inner in value]
    if isinstance(value, str) and os.path.isfile(value):
        return sources.content(value)
    if isinstance(value, str) and os.path.isdir(value):
        return _folder(part, value, sources)
    return value if isinstance(value, bool | int | float | None) else str(value)


def _folder(part: str, folder: str, sources: Sources) -> list[list[str]]:
    """[name, content hash] of the files that a frozen part may read."""
    inner = [os.path.join(folder, name) for name in _FOLDERS[part]]
    found = []
    for place in [path for path in inner if os.path.isdir(path)] or [folder]:
        for root, folders, names in os.walk(place):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(name for name in names if not name.startswith(".")):
                path = os.path.join(root, name)
                found.append([os.path.relpath(path, place), sources.content(path)])
    return found
