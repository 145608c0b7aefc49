"""Builds the optimizer of the deepspeed section, its parameter groups and the learning rate."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence

import torch
from omegaconf import OmegaConf
from torch import nn

from cogfast.config.components import OWN_OPTIMIZERS, instantiate, own_optimizer
from cogfast.config.yaml_files import to_dict
from cogfast.distributed.parallelize import find_shards
from cogfast.extensions.table import hooks
from cogfast.kernels.block_kernels import KernelChoice
from cogfast.kernels.fused_ema_adam import FusedEmaAdam
from cogfast.train.keys import TrainKeys

logger = logging.getLogger(__name__)

_MUON_MATRIX = re.compile(r"blocks\.\d+\.(attention\.(qkv|out)|fc1|fc2)\.weight")
_UNDECAYED_MODULES = (nn.LayerNorm, nn.RMSNorm)  # sat/transformer_defaults.py NO_WD_MODULES


def muon_matrices(module: nn.Module) -> dict[nn.Parameter, int]:
    """Return {parameter: matrices in it} of the trained parameters that Muon orthogonalizes.

    They are the linears of attention and MLP. Embeddings, modulation, norms, biases, and the patch and
    output layers are AdamW's.
    """
    named = ((n, p) for n, p in module.named_parameters() if p.requires_grad)
    return {p: 3 if ".qkv." in name else 1 for name, p in named if _MUON_MATRIX.fullmatch(name)}


def parameter_groups(
    module: nn.Module,
    weight_decay: float | None = None,
    moments: str = "fp32",
    is_for_muon: bool = False,
) -> list[dict]:
    """Split the trainable parameters into a group with weight decay and one without, as SAT does.

    LayerNorms and parameters named `bias` do not decay; LoRA matrices and learned position tables
    do. An empty group is left out. The order is that of module.modules().
    weight_decay: for the group with decay; None: the optimizer's default. moments: with 8bit, shards
    of tensor-parallel ranks and replicated parameters are in groups of their own. is_for_muon: so are
    its matrices, which all decay.
    """
    decays: dict[nn.Parameter, bool] = {}
    for owner in module.modules():
        is_norm = isinstance(owner, _UNDECAYED_MODULES)
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter.requires_grad:
                # A parameter that two modules share is in the group that the first one asks for.
                decays.setdefault(parameter, not (is_norm or name == "bias"))
    decayed = [p for p, has_decay in decays.items() if has_decay]
    undecayed = [p for p, has_decay in decays.items() if not has_decay]
    # An absent key lets the optimizer's own default apply.
    decay = {} if weight_decay is None else {"weight_decay": weight_decay}
    matrices = muon_matrices(module) if is_for_muon else {}
    if is_for_muon and not matrices:
        text = "deepspeed.optimizer.type=Muon: the run trains none of the matrices that it orthogonalizes "
        text += "(attention, fc1, fc2), so that it would be AdamW; use sat.ops.FusedEmaAdam"
        raise ValueError(text)
    others = [p for p in decayed if p not in matrices]
    groups = [{"params": others, **decay}, {"params": undecayed, "weight_decay": 0.0}]
    for num_parts in sorted({*matrices.values()}):
        params = [p for p in decayed if matrices.get(p) == num_parts]
        groups.append({"params": params, "num_parts": num_parts, **decay})
    if moments == "8bit":
        # Ranks must give replicated parameters the same bits. ZeRO makes a flat tensor of a group, and
        # a block of codes with elements of a shard would have another scale on each rank.
        cut = {module.get_parameter(name) for name in find_shards(module)}
        groups = [
            {**group, "params": [p for p in group["params"] if (p in cut) is is_cut]}
            for group in groups
            for is_cut in (False, True)
        ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    section: Mapping,
    groups: list[dict],
    kernels: KernelChoice = "triton",
    allow_import: Sequence[str] = (),
    lr: float | None = None,
    args: TrainKeys | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer of `deepspeed.optimizer` {type, params} for parameter groups.

    type: FusedEmaAdam under SAT's or cogfast's path; "Prodigy"; "Muon"; DeepSpeed's "Adam" (decoupled weight decay
    unless adam_w_mode is false) and "AdamW"; torch.optim.X; or a class of a package in allow_import.
    kernels: "triton" or "torch" implementation of FusedEmaAdam on a GPU. lr: args.lr, for classes that need
    one; steps set it. args: what extensions change, such as where the EMA is; None: nothing.
    """
    kind = section.get("type", "sat.ops.FusedEmaAdam")
    # A copy, since keys are removed below.
    params = to_dict(OmegaConf.create(dict(section.get("params") or {})))
    if lr is not None:
        params["lr"] = lr
    if kind.lower() in ("adam", "adamw"):
        if not params.pop("bias_correction", True):
            text = f"deepspeed.optimizer.params.bias_correction=false does not work with type {kind}; use type "
            raise ValueError(f"{text}sat.ops.FusedEmaAdam")
        # DeepSpeed's Adam is AdamW by default, and its AdamW ignores adam_w_mode.
        is_decoupled = params.pop("adam_w_mode", True) or kind.lower() == "adamw"
        # A choice of kernel, and torch's default behaviour
        for key in ("torch_adam", "set_grad_none"):
            params.pop(key, None)
        kind = "torch.optim.AdamW" if is_decoupled else "torch.optim.Adam"
    if kind in ("torch.optim.Adam", "torch.optim.AdamW") and params.get("foreach") is None:
        # One pass over memory without copies of it, and a step can be skipped without a sync.
        params.setdefault("fused", True)
    kind = OWN_OPTIMIZERS.get(kind.lower(), kind)
    optimizer = instantiate({"target": kind, "params": params}, allow_import, params=groups)
    if isinstance(optimizer, FusedEmaAdam):
        optimizer.kernels = kernels
    # (optimizer, args, type of the section) -> None
    for change in [] if args is None else hooks("optimizer_state", args):
        change(optimizer, args, section.get("type", kind))
    return optimizer


TENTH = "a tenth of the run's steps"
_SAT_AUTO_WARMUP_STEPS = 100  # sat/training/deepspeed_training.py get_learning_rate_scheduler
_SAT_AUTO_WARMUP_RATE = 0.05  # fraction of lr
_SMALL_FACTOR = 0.1  # of Prodigy, as CogVideo's diffusers trainer warns
_POLYNOMIAL_END = 1e-7  # diffusers' lr_end, which is a rate


def build_learning_rate(args: TrainKeys, num_steps: int) -> Callable[[int], float]:
    """Return a function from step (starting at 0) to learning rate, for a run of `num_steps` steps."""
    warmup, warmup_steps = args.warmup, args.warmup_steps
    # diffusers accepts a warm-up that does not end; warn_of_rate reports it.
    if warmup_steps is not None and warmup_steps > num_steps and args.lr_first_step:
        text = f"args.warmup_steps={warmup_steps} must not exceed the run's {num_steps} steps"
        raise ValueError(f"{text}; set args.warmup_steps={num_steps} or less")
    if args.lr_schedule == "sat":
        end = max(1, num_steps if args.lr_decay_iters is None else args.lr_decay_iters)
        return _sat_rate(args, end, warmup * end if warmup_steps is None else warmup_steps)
    if args.lr_schedule == "polynomial" and args.lr < _POLYNOMIAL_END:
        text = f"args.lr={args.lr} must be at least {_POLYNOMIAL_END:g}, where lr_schedule=polynomial ends"
        raise ValueError(f"{text}; raise it")
    if args.lr_schedule == "constant" and not args.lr_first_step:
        warmup_steps = 0
    return _decayed_rate(
        args, num_steps, round(warmup * num_steps) if warmup_steps is None else warmup_steps
    )


def warn_of_rate(args: TrainKeys, num_steps: int, section: Mapping) -> None:
    """Warn if the run ends before the rate reaches args.lr, which only lr_first_step=0 allows, or if
    args.lr is a rate where the optimizer of `deepspeed.optimizer` wants a factor."""
    if own_optimizer(section) == "prodigy" and args.lr <= _SMALL_FACTOR:
        logger.warning(
            "args.lr=%g is small for Prodigy, which multiplies the rate that it estimates by it; use 1",
            args.lr,
        )
    if args.warmup_steps is not None and args.warmup_steps > num_steps:
        logger.warning(
            "args.warmup_steps=%d exceeds the run's %d steps: the learning rate ends below args.lr; "
            "set %s to %d or less",
            args.warmup_steps,
            num_steps,
            "--lr_warmup_steps" if args.folder_layout == "finetune" else args.key("warmup_steps"),
            num_steps,
        )


def _sat_rate(args: TrainKeys, num_iters: int, warmup_iters: float) -> Callable[[int], float]:
    """Return SAT's AnnealingLR (sat/training/learning_rates.py) as SAT's trainer builds it.

    Except in pre-training, the first 100 steps use the lower of 0.05 lr and the warm-up; then the
    rate jumps to the schedule. "linear" reaches 0 at num_iters + warmup_iters and stays there
    (SAT's turns negative). "cosine" ends at lr_decay_ratio * lr. "exponential" is constant. SAT counts
    steps from 1.
    """
    # SAT applies it to fine-tuning only, whatever the configured warm-up is.
    auto_warmup = 0 if args.mode == "pretrain" else _SAT_AUTO_WARMUP_STEPS
    lr, decay_ratio = args.lr, args.lr_decay_ratio

    def rate(step: int) -> float:
        n = step + 1
        ramp = lr * n / warmup_iters if warmup_iters > 0 else math.inf
        if n <= auto_warmup:
            return min(lr * _SAT_AUTO_WARMUP_RATE, ramp)
        if n <= warmup_iters:
            return ramp
        if args.lr_decay_style == "linear":
            return max(0.0, lr * ((num_iters - (n - warmup_iters)) / num_iters))
        if args.lr_decay_style == "cosine":
            done = min(1.0, (n - warmup_iters) / num_iters)
            return lr * (decay_ratio + (1 - decay_ratio) * (math.cos(math.pi * done) + 1) / 2)
        return lr

    return rate


def _decayed_rate(args: TrainKeys, num_steps: int, warmup_steps: int) -> Callable[[int], float]:
    """Return a linear warm-up to args.lr, then a decay from step warmup_steps to min_lr_ratio * lr.

    The decay would reach its end at step num_steps, one after the last. "constant" does not decay,
    "cosine_with_restarts" decays lr_num_cycles times, and "polynomial" ends at 1e-7 or above.
    The warm-up has (step + lr_first_step) / warmup_steps of lr. With lr_first_step=0 and min_lr_ratio=0,
    the rates equal those of diffusers' get_scheduler bit for bit.
    """
    lr, style, first_step = args.lr, args.lr_schedule, args.lr_first_step
    num_decays, min_lr_ratio = max(1, num_steps - warmup_steps), args.min_lr_ratio
    end = max(_POLYNOMIAL_END, min_lr_ratio * lr)

    def rate(step: int) -> float:
        # Operations are in diffusers' order where first_step is 0, since each of them rounds.
        if step < warmup_steps:
            return lr * (step + 1) / warmup_steps if first_step else lr * (step / warmup_steps)
        if style in ("constant", "constant_with_warmup"):
            return lr
        done = min(1.0, (step - warmup_steps) / num_decays)
        if style == "polynomial":
            return lr * (((lr - end) * (1 - done) ** args.lr_power + end) / lr)
        if style == "linear":
            left = 1 - done if first_step else max(0, num_steps - step) / num_decays
        elif style == "cosine" or done == 1:
            left = (1 + math.cos(math.pi * done)) / 2
        else:
            left = (1 + math.cos(math.pi * (args.lr_num_cycles * done % 1))) / 2
        return lr * (min_lr_ratio + (1 - min_lr_ratio) * left)

    return rate
