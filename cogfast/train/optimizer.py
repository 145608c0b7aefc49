"""The optimizer that a DeepSpeed section names, and which parameters decay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from omegaconf import OmegaConf
from torch import nn

from cogfast.config import instantiate
from cogfast.kernels.block_kernels import KernelChoice
from cogfast.kernels.fused_ema_adam import FusedEmaAdam

_UNDECAYED_MODULES = (nn.LayerNorm, nn.RMSNorm)  # sat/transformer_defaults.py NO_WD_MODULES


def parameter_groups(module: nn.Module, weight_decay: float | None = None) -> list[dict]:
    """The trainable parameters in one group that decays and one that does not, as SAT has them.

    weight_decay: of the group that decays; None: the optimizer's own.

    No decay for LayerNorms and for parameters named `bias`; LoRA matrices and learned position
    tables decay. An empty group is left out. The order is that of module.modules().
    """
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    seen: set[nn.Parameter] = set()
    for owner in module.modules():
        is_norm = isinstance(owner, _UNDECAYED_MODULES)
        for name, parameter in owner.named_parameters(recurse=False):
            if not parameter.requires_grad or parameter in seen:
                continue
            seen.add(parameter)
            (undecayed if is_norm or name == "bias" else decayed).append(parameter)
    decay = {} if weight_decay is None else {"weight_decay": weight_decay}
    groups = [{"params": decayed, **decay}, {"params": undecayed, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(
    section: Mapping,
    groups: list[dict],
    kernels: KernelChoice = "triton",
    allow_import: Sequence[str] = (),
) -> torch.optim.Optimizer:
    """The optimizer of `deepspeed.optimizer` {type, params} over parameter groups.

    type: SAT's or our FusedEmaAdam; DeepSpeed's "Adam" (which decouples its weight decay unless
    adam_w_mode is false) and "AdamW"; or torch.optim.X with that class's own arguments, or a class
    of a package in allow_import.
    kernels: which of its own FusedEmaAdam takes on a GPU.
    """
    kind = section.get("type", "sat.ops.FusedEmaAdam")
    params = OmegaConf.to_container(OmegaConf.create(dict(section.get("params") or {})))
    if kind.lower() in ("adam", "adamw"):
        if not params.pop("bias_correction", True):
            raise ValueError(
                "deepspeed.optimizer.params.bias_correction=false does not work with type "
                f"{kind}; use type sat.ops.FusedEmaAdam"
            )
        is_decoupled = params.pop("adam_w_mode", True) or kind.lower() == "adamw"
        for key in ("torch_adam", "set_grad_none"):  # which kernel runs, and torch's own default
            params.pop(key, None)
        params.setdefault("fused", True)  # one pass, and it can skip a step on the device
        kind = "torch.optim.AdamW" if is_decoupled else "torch.optim.Adam"
    optimizer = instantiate({"target": kind, "params": params}, allow_import, params=groups)
    if isinstance(optimizer, FusedEmaAdam):
        optimizer.kernels = kernels
    return optimizer
