"""Checks the parts of a run before the network is built: frozen encoders, diffusion and optimizer.

Cheap parts are built once, so that their errors are reported early, with the file and the key.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from cogfast.config.components import own_optimizer
from cogfast.config.sat_unused import FIRST_STAGE, OPTIMIZER, TEXT_ENCODERS
from cogfast.core.component import Component
from cogfast.core.values import KeyProblem, cut, select
from cogfast.extensions.table import hooks
from cogfast.model.config import TransformerConfig
from cogfast.model.keys import ModelKeys
from cogfast.train.assembly import Diffusion
from cogfast.train.frozen_encoders import FrozenParts
from cogfast.train.keys import TrainKeys
from cogfast.train.optimizer import TENTH, build_learning_rate, build_optimizer

logger = logging.getLogger(__name__)


def check_frozen_parts(frozen: FrozenParts, text_length: int) -> None:
    """Check that both encoders are configured, as video files with captions need them."""
    first_stage, text_encoder = frozen.first_stage, frozen.text_encoder
    fix = "as in the model files of configs/"
    if first_stage is None:
        text = f"{FIRST_STAGE} is missing: an autoencoder encodes video files; add the section"
        raise ValueError(f"{text}, {fix}")
    params = first_stage.params
    if "encoder_config" in params and not params.get("ckpt_path"):
        key = first_stage.named("ckpt_path")
        text = f"{key} is missing: an autoencoder with random weights cannot encode videos"
        raise KeyProblem(key, f"{text}; set it to the path of 3d-vae.pt")
    if text_encoder is None:
        text = f"{TEXT_ENCODERS} is missing or empty: captions are encoded by a text encoder"
        raise ValueError(f"{text}; add one, {fix}")
    # A user's own text encoder may have no such argument; then there is nothing to compare.
    default = inspect.signature(text_encoder.kind).parameters.get("max_length")
    length = text_encoder.arguments.get("max_length", default and default.default)
    if length is not None and length != text_length:
        key = f"{TEXT_ENCODERS}.0.params.max_length"
        text = f"{key}={length} must equal text_length={text_length} of the model's "
        text += "pos_embed_config; change one of them (226 for CogVideoX 1.0, 224 for 1.5)"
        raise KeyProblem(key, text)


def missing_frozen(frozen: FrozenParts) -> Iterator[tuple[str, str]]:
    """Yield (key, text) for each missing file or folder of the frozen encoders."""
    first_stage, text_encoder = frozen.first_stage, frozen.text_encoder
    # SAT's key, and that of diffusers' folder; a first stage has one of them.
    stages = [(first_stage, name) for name in ("ckpt_path", "path") if first_stage is not None]
    for stage, name in stages:
        path, key = stage.params.get(name), stage.named(name)
        if path is not None and not Path(path).exists():
            yield key, f"{key}={cut(path, 160)} does not exist; set it to the autoencoder's weights"
    if text_encoder is not None:
        params, key = text_encoder.params, f"{TEXT_ENCODERS}.0.params.model_dir"
        folder = params.get("model_dir")
        is_cached = params.get("cache_dir") is not None  # then model_dir is a hub name
        if folder is not None and not is_cached and not (folder and Path(folder).is_dir()):
            yield key, f"{key}={cut(folder, 160)} is not a folder; set it to the folder of T5"


def try_optimizer(args: TrainKeys, section: Mapping[str, Any], allow_import: Sequence[str]) -> None:
    """Build the optimizer of DeepSpeed's section; KeyProblem if that fails."""
    # One element stands for the model, which is too large to build here.
    groups: list[dict] = [{"params": [nn.Parameter(torch.zeros(1, 1))]}]
    given = section.get("optimizer") or {}, groups, args.kernels, allow_import, args.lr, args
    try_build(OPTIMIZER, partial(build_optimizer, *given))


def try_diffusion(*parts: Component | None) -> None:
    for part in parts:
        if part is not None:
            try_build(part.key, part.build)


def check_optimizer_state(args: TrainKeys, section: Mapping[str, Any]) -> None:
    """Check where the optimizer's state is. section: DeepSpeed's."""
    device = select(section, "zero_optimization.offload_optimizer.device")
    offload = f"deepspeed.zero_optimization.offload_optimizer.device={device}"
    if args.ema_device == "cpu" and device in ("cpu", "nvme"):
        text = f", but {offload} takes all state of the optimizer off the device, the EMA included"
        raise args.refusal("ema_device", f"{text}; leave out one of them")
    if args.optimizer_moments == "8bit" and device == "nvme":
        text = f" does not work with {offload}, which moves float32 state; use device=cpu, or "
        raise args.refusal("optimizer_moments", f"{text}optimizer_moments=fp32")
    optimizer = section.get("optimizer") or {}
    if own_optimizer(optimizer) and (args.zero_stage == 3 or device in ("cpu", "nvme")):
        cause = "args.zero_stage=3" if args.zero_stage == 3 else offload
        text = f"{OPTIMIZER}.type={optimizer['type']} does not work with {cause}, whose step sees a part of "
        text += "the model at a time; use ZeRO 0 to 2 without offload_optimizer, or sat.ops.FusedEmaAdam"
        raise KeyProblem(f"{OPTIMIZER}.type", text)


def check_offload(args: TrainKeys) -> None:
    policy = args.activation_checkpointing
    text = f" with args.activation_checkpointing={policy}"
    if args.offload_activations and policy == "none":
        text += " would copy every activation; use full, attention_kept, pointwise or auto"
        raise args.refusal("offload_activations", text)
    if args.offload_activations and args.compile and policy != "full":
        text += (
            " does not support args.compile=true, which keeps activations inside compiled blocks"
        )
        raise args.refusal("offload_activations", f"{text}; use full, or args.compile=false")


def try_build(key: str, build: Callable[[], object]) -> None:
    """Build what `key` configures; KeyProblem if that fails."""
    try:
        build()
    # Constructors of PyTorch and of users' classes raise these for a wrong value.
    except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
        text = " ".join(str(error).split())
        named = error.key if isinstance(error, KeyProblem) else text.partition("=")[0]
        # The error names no key of its own: put the component's key in front.
        if not named.startswith(("args.", "deepspeed.", "model.")):
            named, text = key, f"{key}: {text}"
        raise KeyProblem(named, text) from None


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


def warn_of_image_scale(
    model: ModelKeys, load: str | None, network: TransformerConfig, is_end: bool = False
) -> None:
    """Warn if the first frame's scale is not that of diffusers' pipeline. load: args.load. is_end: of a run."""
    if "image" not in model.inputs:
        return
    # (model, load, network, is_end)
    for warn in hooks("image_scale"):
        warn(model, load, network, is_end)


def fit_rates(
    origins: Mapping[str, str],
    args: TrainKeys,
    num_steps: int,
    manifest: Mapping = MappingProxyType({}),
) -> tuple[TrainKeys, Callable[[int], float]]:
    """Return the learning rate by step, and the arguments.

    A run that `cogfast train FOLDER` starts without a warm-up has that of the packaged file, or a tenth of
    the steps if that is less. manifest: of what it resumes, whose warm-up it keeps.
    """
    of_warmup, of_mode, of_load = map(origins.get, map(args.key, ("warmup_steps", "mode", "load")))
    if of_warmup in ("sft.yaml", TENTH) and of_mode == of_load:  # both are of the folder
        stored = (manifest.get("config") or {}).get("args", {}).get("warmup_steps")
        steps = min(args.warmup_steps or 0, num_steps // 10) if stored is None else stored
        args = args.changed(warmup_steps=steps)
    return args, build_learning_rate(args, num_steps)


def warmup_of(args: TrainKeys, before: TrainKeys) -> dict[str, Any]:
    """Return {dotted key: value} of the warm-up that fit_rates has chosen, if it was another one before."""
    steps = args.warmup_steps
    return {} if steps == before.warmup_steps else {args.key("warmup_steps"): steps}
