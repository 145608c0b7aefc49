"""Freezes the parameters whose SAT names start with a prefix that the config lists."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from cogfast.model.lora import is_lora_parameter
from cogfast.model.weights.formats.sat_names import sat_name

DEFAULT_FROZEN_PREFIXES = ("first_stage_model", "conditioner")


def freeze(
    transformer: nn.Module, not_trainable_prefixes: Iterable[str], is_lora_only: bool
) -> None:
    """Set requires_grad as upstream's disable_untrainable_params (sat/diffusion_video.py).

    Parameters whose SAT name starts with a prefix are frozen ("all": every parameter), except
    adapters. is_lora_only (`lora_train: true`): freeze all but the adapters. (Upstream looks for
    another kind of adapter there, `lora_layer`, and also freezes those of lora2.)
    """
    prefixes = tuple(not_trainable_prefixes)
    names = [sat_name(name) for name, _ in transformer.named_parameters()]
    for prefix in prefixes:
        # SAT's configs also list prefixes of the VAE and the text encoder.
        is_elsewhere = prefix == "all" or prefix.startswith(DEFAULT_FROZEN_PREFIXES)
        if not is_elsewhere and not any(name.startswith(prefix) for name in names):
            raise ValueError(
                f"model.not_trainable_prefixes: no parameter's name starts with {prefix!r}; use "
                f"all, or a name such as {names[0]}"
            )
    # A model arrives with all parameters trainable, so nothing has to be set to True.
    freezes_all = is_lora_only or "all" in prefixes
    for name, parameter in transformer.named_parameters():
        if is_lora_parameter(name):
            continue
        if freezes_all or sat_name(name).startswith(prefixes):
            parameter.requires_grad_(False)
