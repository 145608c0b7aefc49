"""GELU in its tanh form: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gelu_reference(x: Tensor) -> Tensor:
    """x [B, S, 4M] -> [B, S, 4M]."""
    return F.gelu(x, approximate="tanh")


def gelu(x: Tensor) -> Tensor:
    """x [B, S, 4M] -> [B, S, 4M]."""
    return gelu_reference(x)
