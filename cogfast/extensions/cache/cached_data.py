"""The data sets of a run that trains from a latent cache, and the specs of its entries: all settings that
latents and embeddings depend on."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection, Mapping, Sequence

from omegaconf import OmegaConf

from cogfast.config.components import resolve
from cogfast.config.yaml_files import to_dict
from cogfast.core.values import counted, select
from cogfast.data.datasets import CaptionedVideos
from cogfast.data.keys import data_param
from cogfast.data.sources.clip_list import PackedStrings
from cogfast.data.sources.file_index import user_index
from cogfast.data.video.clip import ClipSettings
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.extensions.cache import entry_keys
from cogfast.extensions.cache.entries import (
    ENCODE_CHUNKS,
    CachedVideos,
    Entries,
    Spec,
    difference,
    find_entries,
    folders_of,
)
from cogfast.extensions.cache.entry_keys import hash_file, hash_text, used_samples, version_of
from cogfast.extensions.stores.store import StoreError
from cogfast.model.autoencoder import VideoAutoencoder, video_autoencoder_from_sat
from cogfast.model.keys import ModelKeys
from cogfast.moved import public_module
from cogfast.train.assembly import Datasets
from cogfast.train.frozen_encoders import EncodeOverrides
from cogfast.train.keys import TrainKeys
from cogfast.train.run.own_classes import own_classes

# Arguments of the encoders that do not change what they compute.
_WITHOUT_EFFECT = ("use_slicing", "freeze", "device", "cache_dir", "ignore_keys")
# Sub-folders of a diffusers model folder that each encoder reads.
_FOLDERS = {"VAE": ("vae",), "text encoder": ("text_encoder", "tokenizer")}


def read_from_cache(
    datasets: Datasets,
    sections: Mapping[str, Mapping],
    allow_import: Sequence[str],
    args: TrainKeys,
    model: ModelKeys,
    overrides: EncodeOverrides,
    groups: ProcessGroups,
) -> Datasets:
    """Return the data sets with their samples read from args.latent_cache.

    sections, allow_import: as for `cache_specs`. Rank 0 looks for the entries. ValueError if any is missing.
    Call it after buckets are assigned.
    """
    folder = args.latent_cache
    assert folder is not None, "it turns this on"
    # Preflight refuses a cache for other data sets.
    every = [d for d in (datasets.train, datasets.valid) if isinstance(d, CaptionedVideos)]
    described = sections, allow_import, args, model, overrides, every[0].settings
    try:
        entries, keys = groups.on_main(lambda: _find(every, folder, cache_specs(*described)))
    except StoreError as error:
        raise ValueError(f"args.latent_cache: {error}") from None
    cached = [CachedVideos(v, entries, of_v) for v, of_v in zip(every, keys, strict=True)]
    return Datasets(cached[0], None if datasets.valid is None else cached[1])


def _find(
    every: list[CaptionedVideos], folder: str, specs: Mapping[str, Spec]
) -> tuple[dict[str, Entries], list[dict[str, PackedStrings]]]:
    """Return the entries by kind, and the keys of each data set: by the names of
    `CaptionedVideos.encoded`."""
    sources = entry_keys.Sources(folder)
    changed: list[str] = []
    for v in every:
        files = entry_keys.source_files(v, used_samples(v))
        changed += sources.changed(files, v.settings.trust_index)
    key = lambda one, i, name: entry_keys.sample_key(one, i, sources, name != "video")
    keys_of = lambda one, name: PackedStrings(key(one, i, name) for i in range(len(one)))
    keys = [{name: keys_of(one, name) for name, one in v.encoded.items()} for v in every]
    used = [(number, i) for number, v in enumerate(every) for i in used_samples(v)]
    clips = [tuple(of_one[i] for of_one in keys[number].values()) for number, i in used]
    texts = [hash_text(every[number].captions[i]) for number, i in used]
    wanted = {"video": set().union(*clips), "text": set(texts)}
    entries, there = {}, {}
    for kind, spec in specs.items():
        entries[kind], there[kind] = find_entries(folder, kind, spec, wanted[kind])
        there[kind] |= entries[kind].ask(wanted[kind] - there[kind].keys())
    is_there = lambda own, text: text in there["text"] and there["video"].keys() >= {*own}
    if (num_usable := sum(map(is_there, clips, texts))) == len(used):
        return entries, keys
    differences = dict.fromkeys(difference(folder, kind, spec) for kind, spec in specs.items())
    why = "; ".join(filter(None, differences))
    if not folders_of(folder, "video"):
        why = "the folder has no cache"
    elif not why and changed:
        why = f"{counted(len(changed), 'video')} changed or moved since caching"
    text = f"args.latent_cache={folder}: {why or 'not all are encoded'}: {num_usable} of {len(used)} usable"
    raise ValueError(f"{text}; run `cogfast cache` again with this configuration")


def cache_specs(
    sections: Mapping[str, Mapping],
    allow_import: Sequence[str],
    args: TrainKeys,
    model: ModelKeys,
    overrides: EncodeOverrides,
    settings: ClipSettings,
) -> dict[str, Spec]:
    """Return the specs of cache entries by "video" and "text". Reads the encoders' weight files.

    sections: of the configuration, plain. allow_import: packages whose classes they may name.
    """
    fields = dataclasses.fields(settings)
    clip = {data_param(field.name): getattr(settings, field.name) for field in fields}
    clip[data_param("video_size")] = list(settings.video_size)
    # With buckets, the size is part of a clip's key, and video_size only sets what evaluations sample.
    of_buckets = () if settings.buckets is None else ("max_num_frames", "video_size")
    for name in ("keep_decoded_mib", "buckets", "bucket_batch", "trust_index", *of_buckets):
        del clip[data_param(name)]
    # DALI's frames equal PyAV's up to rounding of colours. decord selects other frames in some formats.
    clip[data_param("video_backend")] = settings.cpu_reader
    clip[data_param("short_clips")] = "skip" if settings.skips_short_clips else "pad"
    has_image = "image" in model.inputs
    number = args.cached_noised_images
    first_stage = sections["model"].get("first_stage_config")
    chunks = _encode_chunks(first_stage, allow_import)
    chunks_entry = {} if chunks is None else {ENCODE_CHUNKS: chunks}
    common = {"precision": args.precision}
    video = {
        "VAE": _identity("VAE", first_stage, allow_import, own=chunks_entry),
        **common,
        # Noised images are stored instead of first frames.
        "first frames kept": has_image and not number,
        **({model.key("given_frames"): model.given_frames} if model.given_frames else {}),
        **({args.key("cached_noised_images"): number} if number else {}),
        **chunks_entry,
        **clip,
    }
    # A data set of the user's own may read other pixels.
    if codes := _codes(sections["data"], allow_import):
        video["code of data.target"] = " ".join(codes)
    entry, *_ = select(sections["model"], "conditioner_config.params.emb_models") or [None]
    node = None if entry is None else {"target": entry["target"], "params": entry.get("params")}
    text = {"text encoder": _identity("text encoder", node, allow_import), **common}
    specs = {"video": video, "text": text}
    for name, value in overrides.identity.items():  # encode_video, encode_text
        specs[name.removeprefix("encode_")][name] = value
    return specs


def _encode_chunks(node: Mapping | None, allow_import: Sequence[str]) -> str | None:
    """Return encode_chunks of the autoencoder; None if it is another first stage."""
    if node is None:
        return None
    target, arguments = resolve(node, allow_import)
    is_ours = isinstance(target, type) and issubclass(target, VideoAutoencoder)
    is_ours |= target is video_autoencoder_from_sat
    return arguments.get("encode_chunks", "auto") if is_ours else None


def _identity(
    part: str, node: Mapping | None, allow_import: Sequence[str], own: Collection[str] = ()
) -> str:
    """Hash class, arguments and weights of an encoder. The location of its files does not matter.

    own: arguments that are entries of the spec.
    """
    if node is None:
        return "none"
    target, arguments = resolve(node, allow_import)
    names = arguments.keys() - {*_WITHOUT_EFFECT, *own}
    described = {name: _described(part, arguments[name]) for name in names}
    named = [public_module(target), target.__qualname__]  # wherever its file lies
    text = json.dumps([*named, *_codes(node, allow_import), described], sort_keys=True)
    return hash_text(text)[:12]


def _codes(node: Mapping, allow_import: Sequence[str]) -> list[str]:
    """Return the checksums of the code of a component and of those inside it, if they are the user's own."""
    own = own_classes(to_dict(OmegaConf.create({"": node})), allow_import, None).values()
    return sorted(each["code"] for each in own if each["code"] is not None)


def _described(part: str, value: object) -> object:
    """Convert a value to JSON, with names of files and folders replaced by their content hashes."""
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=True)
    if isinstance(value, Mapping):
        return {str(key): _described(part, inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_described(part, inner) for inner in value]
    if isinstance(value, str) and os.path.isfile(value):
        return _content(value)
    if isinstance(value, str) and os.path.isdir(value):
        return _folder(part, value)
    return value if isinstance(value, bool | int | float | None) else str(value)


def _folder(part: str, folder: str) -> list[list[str]]:
    """Return [name, content hash] of the files that an encoder may read."""
    inner = [os.path.join(folder, name) for name in _FOLDERS[part]]
    found = []
    # Encoders read a pipeline's folders only if they are complete.
    for place in inner if all(map(os.path.isdir, inner)) else [folder]:
        for root, folders, names in os.walk(place):
            # os.walk descends in this order, which must be the same on every machine.
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(name for name in names if not name.startswith(".")):
                path = os.path.join(root, name)
                found.append([os.path.relpath(path, place), _content(path)])
    return found


def _content(path: str) -> str:
    """Return the content hash of a file of weights. The user's cache keeps it: T5 has 10 GB."""
    path = os.path.abspath(path)
    index, version = user_index("weights", [path]), version_of(path)
    if version and len(known := index.get(path, version) or []) == 1:
        return str(known[0])
    found = hash_file(path)
    if version:
        index.keep([(path, version, found)])
    return found
