"""Call the ops with tensors of another device than the current one, and print where their kernels were launched.

test_runtime.py runs it: python -m tests.cuda.two_devices
"""

import json
from collections.abc import Callable

import torch
from torch import Tensor

from cogfast.extensions.sparse.attention import sparse_attention
from cogfast.kernels.adaptive_layernorm import adaptive_layernorm, gated_residual
from cogfast.kernels.add_low_rank import add_low_rank
from cogfast.kernels.fused_ema_adam import average_
from cogfast.kernels.gelu import gelu
from cogfast.kernels.qk_norm_rope3d import qk_norm_rope3d
from tests.cuda.null_device import Counters

_ROWS, _HEADS, _WIDTH = 512, 2, 64


def main() -> None:
    counters, found = Counters(), {}

    def draw(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device="cuda:1", requires_grad=True)

    m = _HEADS * _WIDTH
    hidden, heads = (1, _ROWS, m), (1, _ROWS, _HEADS, _WIDTH)
    norm = lambda: (draw(_WIDTH), draw(_WIDTH))
    calls: dict[str, Callable[[], Tensor]] = {
        "gelu": lambda: gelu(draw(*hidden), draw(m)),
        "gated_residual": lambda: gated_residual(
            draw(*hidden), draw(*hidden), draw(m), draw(1, 2, m), 8
        ),
        "adaptive_layernorm": lambda: adaptive_layernorm(
            draw(*hidden), draw(m), draw(m), draw(1, 2, m), draw(1, 2, m), 8, 1e-5
        )[1],
        "add_low_rank": lambda: add_low_rank(
            draw(*hidden), draw(1, _ROWS, 16), [draw(m, 16)], [0], 1
        ),
        "qk_norm_rope3d": lambda: torch.stack(
            qk_norm_rope3d(draw(1, _ROWS, 3, _HEADS, _WIDTH), norm(), norm(), None, 8)
        ),
        "sparse_attention": lambda: sparse_attention(*(draw(*heads) for _ in "qkv"), 128, 0.5)[0],
    }
    assert torch.cuda.current_device() == 0
    for name, call in calls.items():
        counters.take()
        call().sum().backward()
        found[name] = counters.take()
    plain = lambda: torch.zeros(8, device="cuda:1")
    average_(plain(), plain(), torch.zeros((), device="cuda:1"))
    found["average_"] = counters.take()
    assert torch.cuda.current_device() == 0
    print(json.dumps(found))


if __name__ == "__main__":
    main()
