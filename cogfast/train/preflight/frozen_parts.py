"""Checks the configuration of the frozen encoders: the first stage and the text encoder."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from cogfast.config import Config, resolve
from cogfast.config.components import is_none
from cogfast.config.merged_config import refuse
from cogfast.config.values import cut

# Upstream's files mark paths that the user must fill in: "{your CogVideoX SAT folder}/transformer".
PLACEHOLDER = re.compile(r"\{your [^}]*\}")
_FIRST_STAGE = "model.first_stage_config"
_ENCODERS = "model.conditioner_config.params.emb_models"


def check_frozen_parts(config: Config, text_length: int) -> None:
    """Check that both encoders are configured, as video files with captions need them."""
    node = config.model.get("first_stage_config")
    if is_none(node):
        raise ValueError(
            f"{_FIRST_STAGE} is missing: video files are encoded by an autoencoder; add the section, as "
            "in the model files of configs/"
        )
    params = node.get("params") or {}
    if "encoder_config" in params and not params.get("ckpt_path"):
        key = f"{_FIRST_STAGE}.params.ckpt_path"
        text = (
            f"{key} is missing: an autoencoder with random weights cannot encode videos; set it to the "
            "path of 3d-vae.pt"
        )
        refuse(config, key, text)
    node = config.model.get("conditioner_config")
    entries = [] if node is None else node.params.emb_models
    if not entries or is_none(entries[0]):
        raise ValueError(
            f"{_ENCODERS} is missing or empty: captions are encoded by a text encoder; add one, as in "
            "the model files of configs/"
        )
    for i, entry in enumerate(entries):
        _check_text_encoder(config, entry, f"{_ENCODERS}.{i}.params", text_length)


def missing_frozen(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, text) for each missing file or folder of the frozen encoders."""
    node = config.model.get("first_stage_config")
    params = {} if is_none(node) else node.get("params") or {}
    # SAT's key, and that of diffusers' folder; a first stage has one of them.
    for name in ("ckpt_path", "path"):
        path, key = params.get(name), f"{_FIRST_STAGE}.params.{name}"
        if path is not None and not Path(path).exists():
            text = f"{key}={cut(path, 160)} does not exist; set it to the autoencoder's weights"
            yield key, text
    node = config.model.get("conditioner_config")
    entries = [] if node is None else node.params.emb_models
    for i, entry in enumerate(entry for entry in entries if not is_none(entry)):
        params, key = entry.get("params") or {}, f"{_ENCODERS}.{i}.params.model_dir"
        folder = params.get("model_dir")
        is_cached = params.get("cache_dir") is not None  # then model_dir is a hub name
        if folder is not None and not is_cached and not (folder and Path(folder).is_dir()):
            yield key, f"{key}={cut(folder, 160)} is not a folder; set it to the folder of T5"


def _check_text_encoder(config: Config, entry: Mapping, where: str, text_length: int) -> None:
    target, arguments = resolve(
        {"target": entry["target"], "params": entry.get("params")}, config.allow_import
    )
    # A user's own text encoder may have no such argument; then there is nothing to compare.
    default = inspect.signature(target).parameters.get("max_length")
    length = arguments.get("max_length", default and default.default)
    if length is not None and length != text_length:
        key = f"{where}.max_length"
        by_default = "" if "max_length" in arguments else ", its default,"
        refuse(
            config,
            key,
            f"{key}={length}{by_default} must equal text_length={text_length} of the model's "
            "pos_embed_config; change one of them (226 for CogVideoX 1.0, 224 for 1.5)",
        )
