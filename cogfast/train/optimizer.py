"""The optimizer that a DeepSpeed section names, and which parameters decay."""

from __future__ import annotations

import difflib
import inspect
import numbers
from collections.abc import Callable, Mapping

import torch
from torch import nn

from cogfast.kernels.fused_ema_adam import FusedEmaAdam

_FUSED_EMA_ADAM = (
    "fusedemaadam",
    "sat.ops.fusedemaadam",
    "cogfast.kernels.fused_ema_adam.fusedemaadam",
)
_UNDECAYED_MODULES = (nn.LayerNorm, nn.RMSNorm)  # sat/transformer_defaults.py NO_WD_MODULES
# DeepSpeed's own keys of "Adam" and "AdamW" (deepspeed/runtime/engine.py _configure_basic_optimizer)
_DEEPSPEED_ADAM_KEYS = ("torch_adam", "adam_w_mode", "bias_correction", "set_grad_none")
_NUMBERS = ("lr", "eps", "weight_decay", "ema_decay", "momentum")
# What the optimizer gets from the trainer, or must not be told because ZeRO steps flat tensors.
_NOT_IN_A_CONFIG = ("self", "params", "named_params", "capturable", "differentiable")


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


def build_optimizer(section: Mapping, groups: list[dict]) -> torch.optim.Optimizer:
    """The optimizer of `deepspeed.optimizer` {type, params} over parameter groups.

    type: SAT's or our FusedEmaAdam; DeepSpeed's "Adam" (which decouples its weight decay unless
    adam_w_mode is false) and "AdamW"; or torch.optim.X with that class's own arguments.
    """
    unknown = [key for key in section if key not in ("type", "params")]
    if unknown:
        raise ValueError(
            f"unknown key deepspeed.optimizer.{unknown[0]}; "
            f"did you mean {_nearest(unknown[0], ('type', 'params'))}?"
        )
    kind = section.get("type", "FusedEmaAdam")
    params = {key: _plain(value) for key, value in (section.get("params") or {}).items()}
    for key in _NUMBERS:
        if key in params and not isinstance(params[key], numbers.Real):
            raise ValueError(
                f"deepspeed.optimizer.params.{key}={params[key]!r} must be a number; "
                "write 1.0e-5 instead of a quoted text"
            )
    if kind.lower() in _FUSED_EMA_ADAM:
        return _call(FusedEmaAdam, params, groups)
    if kind.lower() in ("adam", "adamw"):
        return _deepspeed_adam(kind, params, groups)
    if kind.startswith("torch.optim."):
        found = getattr(torch.optim, kind.removeprefix("torch.optim."), None)
        if inspect.isclass(found) and issubclass(found, torch.optim.Optimizer):
            return _call(found, params, groups)
    raise ValueError(
        f"deepspeed.optimizer.type={kind!r} must be sat.ops.FusedEmaAdam, Adam, AdamW or "
        f"torch.optim.<name>; {_closest_type(kind)}"
    )


def _deepspeed_adam(kind: str, params: dict, groups: list[dict]) -> torch.optim.Optimizer:
    """torch's Adam for DeepSpeed's arguments, whose `Adam` means AdamW by default."""
    known = [key for key in _argument_names(torch.optim.AdamW) if key != "decoupled_weight_decay"]
    _check_names(params, (*known, *_DEEPSPEED_ADAM_KEYS))
    if not params.pop("bias_correction", True):
        raise ValueError(
            f"deepspeed.optimizer.params.bias_correction=false does not work with type {kind}; "
            "use type sat.ops.FusedEmaAdam"
        )
    is_decoupled = params.pop("adam_w_mode", True) or kind.lower() == "adamw"
    for key in ("torch_adam", "set_grad_none"):  # which kernel runs, and torch's own default
        params.pop(key, None)
    params.setdefault("fused", True)  # one pass, and it can skip a step on the device
    return (torch.optim.AdamW if is_decoupled else torch.optim.Adam)(groups, **params)


def _call(make: Callable, params: dict, groups: list[dict]) -> torch.optim.Optimizer:
    _check_names(params, _argument_names(make))
    return make(groups, **params)


def _argument_names(make: Callable) -> list[str]:
    names = inspect.signature(make.__init__).parameters
    return [name for name in names if name not in _NOT_IN_A_CONFIG]


def _check_names(params: Mapping, known: list[str] | tuple[str, ...]) -> None:
    for key in params:
        if key not in known:
            raise ValueError(
                f"unknown key deepspeed.optimizer.params.{key}; did you mean {_nearest(key, known)}?"
            )


def _nearest(word: str, choices: list[str] | tuple[str, ...]) -> str:
    return difflib.get_close_matches(word, choices, n=1, cutoff=0.0)[0]


def _closest_type(kind: str) -> str:
    classes = [n for n, c in vars(torch.optim).items() if inspect.isclass(c)]
    choices = ["sat.ops.FusedEmaAdam", "Adam", "AdamW", *(f"torch.optim.{n}" for n in classes)]
    return f"did you mean {_nearest(kind, choices)}?"


def _plain(value: object) -> object:
    """A config's list as a tuple, the rest as it is."""
    return tuple(value) if not isinstance(value, str) and hasattr(value, "__iter__") else value
