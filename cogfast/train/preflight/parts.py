"""Checks the parts of a run before the network is built: frozen encoders, diffusion and optimizer.

Cheap parts are built once, so that their errors are reported early, with the file and the key.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn

from cogfast.config import Config, instantiate, resolve
from cogfast.config.arguments import ModelArguments, TrainArguments
from cogfast.config.components import is_none
from cogfast.config.load import with_words
from cogfast.config.merged_config import find_origin, refuse
from cogfast.core.values import KeyProblem, cut
from cogfast.extensions.formats.image_scale import difference, pipeline_code, stock_scale
from cogfast.train.assembly import Diffusion
from cogfast.train.optimizer import TENTH, build_learning_rate, build_optimizer, shorter_warmup

logger = logging.getLogger(__name__)

_DIFFUSION = ("denoiser_config", "loss_fn_config", "sampler_config")
_FIRST_STAGE = "model.first_stage_config"
_ENCODERS = "model.conditioner_config.params.emb_models"


def check_frozen_parts(config: Config, text_length: int) -> None:
    """Check that both encoders are configured, as video files with captions need them."""
    node, fix = config.model.get("first_stage_config"), "as in the model files of configs/"
    if is_none(node):
        text = f"{_FIRST_STAGE} is missing: an autoencoder encodes video files; add the section"
        raise ValueError(f"{text}, {fix}")
    params = node.get("params") or {}
    if "encoder_config" in params and not params.get("ckpt_path"):
        key = f"{_FIRST_STAGE}.params.ckpt_path"
        text = f"{key} is missing: an autoencoder with random weights cannot encode videos"
        refuse(config, key, f"{text}; set it to the path of 3d-vae.pt")
    entries = _text_encoders(config)
    if not entries or is_none(entries[0]):
        text = f"{_ENCODERS} is missing or empty: captions are encoded by a text encoder; add one"
        raise ValueError(f"{text}, {fix}")
    for i, entry in enumerate(entries):
        _check_text_encoder(config, entry, f"{_ENCODERS}.{i}.params", text_length)


def _text_encoders(config: Config) -> list[Mapping]:
    node = config.model.get("conditioner_config")
    return [] if node is None else node.params.emb_models


def _check_text_encoder(config: Config, entry: Mapping, where: str, text_length: int) -> None:
    target, arguments = resolve(
        {"target": entry["target"], "params": entry.get("params")}, config.allow_import
    )
    # A user's own text encoder may have no such argument; then there is nothing to compare.
    default = inspect.signature(target).parameters.get("max_length")
    length = arguments.get("max_length", default and default.default)
    if length is not None and length != text_length:
        key = f"{where}.max_length"
        text = f"{key}={length} must equal text_length={text_length} of the model's "
        text += "pos_embed_config; change one of them (226 for CogVideoX 1.0, 224 for 1.5)"
        refuse(config, key, text)


def missing_frozen(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, text) for each missing file or folder of the frozen encoders."""
    node = config.model.get("first_stage_config")
    params = {} if is_none(node) else node.get("params") or {}
    # SAT's key, and that of diffusers' folder; a first stage has one of them.
    for name in ("ckpt_path", "path"):
        path, key = params.get(name), f"{_FIRST_STAGE}.params.{name}"
        if path is not None and not Path(path).exists():
            yield key, f"{key}={cut(path, 160)} does not exist; set it to the autoencoder's weights"
    for i, entry in enumerate(entry for entry in _text_encoders(config) if not is_none(entry)):
        params, key = entry.get("params") or {}, f"{_ENCODERS}.{i}.params.model_dir"
        folder = params.get("model_dir")
        is_cached = params.get("cache_dir") is not None  # then model_dir is a hub name
        if folder is not None and not is_cached and not (folder and Path(folder).is_dir()):
            yield key, f"{key}={cut(folder, 160)} is not a folder; set it to the folder of T5"


def try_training_parts(config: Config, args: TrainArguments) -> None:
    """Build denoiser, loss, sampler, optimizer and learning rate; ValueError if one fails."""
    try_diffusion(config)
    # One element stands for the model, which is too large to build here.
    weight = nn.Parameter(torch.zeros(1, 1))
    optimizer = partial(
        build_optimizer,
        config.deepspeed.get("optimizer") or {},
        [{"params": [weight]}],
        allow_import=config.allow_import,
        moments=args.optimizer_moments,
        ema_device=args.ema_device,
        lr=args.lr,
    )
    _try(config, "deepspeed.optimizer", optimizer)
    num_steps = args.train_iters or sys.maxsize  # steps of epochs are known only with the data
    _try(config, "args.lr_schedule", partial(fit_rates, config, args, num_steps))


def try_diffusion(config: Config) -> None:
    """Build the configured diffusion components; ValueError if one fails."""
    for name in _DIFFUSION:
        node, where = config.model.get(name), f"model.{name}"
        if node is not None:
            _try(config, where, partial(instantiate, node, config.allow_import, where))


def _try(config: Config, key: str, build: Callable[[], object]) -> None:
    try:
        build()
    # Constructors of PyTorch and of users' classes raise these for a wrong value.
    except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
        text = " ".join(str(error).split())
        named = error.key if isinstance(error, KeyProblem) else text.partition("=")[0]
        # The error names no key of its own: put the component's key in front.
        if not named.startswith(("args.", "deepspeed.", "model.")):
            named, text = key, f"{key}: {text}"
        raise ValueError(f"{find_origin(config.origins, named)}: {text}") from None


def warn_of_different_schedules(diffusion: Diffusion) -> None:
    """Warn if loss or sampler use a different noise schedule from the denoiser's.

    The model would then learn or sample nonsense.
    """
    tables = {}
    if diffusion.loss is not None:
        tables["loss_fn_config"] = diffusion.loss.sigma_sampler.table.values
    if diffusion.sampler is not None:
        tables["sampler_config"] = diffusion.sampler.discretization.table()
    for name, table in tables.items():
        if not torch.equal(table, diffusion.denoiser.table.values):
            logger.warning(
                "model.%s and model.denoiser_config have different noise schedules; make their "
                "discretization_config equal (shift_scale is 3.0 for CogVideoX-2B, else 1.0)",
                name,
            )


def warn_of_image_scale(config: Config, is_end: bool = False) -> None:
    """Warn if the first frame's scale is not that of diffusers' pipeline. is_end: of a run."""
    model = ModelArguments.from_config(config)
    if "image" not in model.inputs:
        return
    patch, load = config.model.network_config.params.patch_size, config.args.get("load")
    stock = stock_scale(not isinstance(patch, int) and patch[0] > 1, Path(load) if load else None)
    text = difference(model.image_latent_scale, stock, model.scale_factor)
    if text is not None and is_end:
        code = pipeline_code(model.image_latent_scale, model.scale_factor)
        logger.warning("%s; before sampling there: %s", text, code)
    elif text is not None:
        logger.warning("%s; model.image_latent_scale=%s is the same", text, stock)


def fit_rates(
    config: Config, args: TrainArguments, num_steps: int, manifest: Mapping = MappingProxyType({})
) -> tuple[Config, TrainArguments, Callable[[int], float]]:
    """Return the learning rate by step, and the configuration with the warm-up of shorter_warmup if `cogfast
    train FOLDER` has started the run. manifest: of what it resumes."""
    stored = (manifest.get("config") or {}).get("args", {}).get("warmup_steps")
    steps = shorter_warmup(config.origins, args, num_steps, stored)
    if steps is not None and steps != args.warmup_steps:
        config = with_words(config, [f"args.warmup_steps={steps}"], TENTH)
        args = args.changed(warmup_steps=steps)
    return config, args, build_learning_rate(args, num_steps)
