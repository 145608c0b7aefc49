"""Builds the cheap parts of a run before the expensive ones, to report their errors early.

An error names the configuration file and key. Different noise schedules are reported, too.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from cogfast.config import Config, instantiate
from cogfast.config.arguments import TrainArguments
from cogfast.config.merged_config import find_origin
from cogfast.config.values import KeyProblem
from cogfast.train.assembly import Diffusion
from cogfast.train.optimizer import build_learning_rate, build_optimizer

logger = logging.getLogger(__name__)

_DIFFUSION = ("denoiser_config", "loss_fn_config", "sampler_config")


def try_training_parts(config: Config, args: TrainArguments) -> None:
    """Build denoiser, loss, sampler, optimizer and learning rate; ValueError if one fails."""
    try_diffusion(config)
    # One element stands for the model, which is too large to build here.
    weight = nn.Parameter(torch.zeros(1, 1))
    section = config.deepspeed.get("optimizer") or {}
    optimizer = partial(
        build_optimizer,
        section,
        [{"params": [weight]}],
        allow_import=config.allow_import,
        moments=args.optimizer_moments,
        ema_device=args.ema_device,
    )
    _try(config, "deepspeed.optimizer", optimizer)
    num_steps = args.train_iters or sys.maxsize  # steps of epochs are known only with the data
    _try(config, "args.lr_schedule", partial(build_learning_rate, args, num_steps))


def try_diffusion(config: Config) -> None:
    """Build the configured diffusion components; ValueError if one fails."""
    for name in _DIFFUSION:
        node, where = config.model.get(name), f"model.{name}"
        if node is not None:
            _try(config, where, partial(instantiate, node, config.allow_import, where))


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
