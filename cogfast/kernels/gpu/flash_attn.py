"""The packages flash-attn 3 and 4, which attention_backends.py calls. They are imported on first use."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

MODULES = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute.interface"}
LOADED: set[str] = set()  # names of imported packages: torch.compile cannot trace an import


@cache
def load(name: str) -> Any:
    """Import the module of a package, or return the reason why it does not import."""
    try:
        module = importlib.import_module(MODULES[name])
    except Exception as error:  # a broken package may raise anything
        return f"{MODULES[name]} does not import: {type(error).__name__}: {error}".splitlines()[0]
    LOADED.add(name)
    return module


def is_deterministic() -> bool:
    """Whether torch is set to raise an error for nondeterministic operations."""
    is_asked = torch.are_deterministic_algorithms_enabled()
    return is_asked and not torch.is_deterministic_algorithms_warn_only_enabled()


def attention_3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention of q, k, v [B, S, H, D], with gradients, by flash-attn 3."""
    out = load("fa3").flash_attn_func(q, k, v, deterministic=is_deterministic())
    return out[0] if isinstance(out, tuple) else out  # some releases add lse


def forward_4(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out [B, S, H, D] and lse [B, H, S] float32 of flash-attn 4."""
    # Releases differ in the outputs after out and lse.
    out, lse, *_ = load("fa4")._flash_attn_fwd(q, k, v, return_lse=True)
    return out, lse


def backward_4(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv of flash-attn 4."""
    run = load("fa4")._flash_attn_bwd
    dq, dk, dv, *_ = run(q, k, v, out, dout.contiguous(), lse, deterministic=is_deterministic())
    return dq, dk, dv
