"""GELU in its tanh form, of a linear's product and the bias that the linear left out:

y = 0.5 u (1 + tanh(sqrt(2/pi) (u + 0.044715 u^3))),   u = x + bias
"""

import torch.nn.functional as F
from torch import Tensor


def gelu_reference(x: Tensor, bias: Tensor | None) -> Tensor:
    """x [B, S, N], bias [N] -> [B, S, N]."""
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


def gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    """x [B, S, N], bias [N] -> [B, S, N]."""
    return gelu_reference(x, bias)
