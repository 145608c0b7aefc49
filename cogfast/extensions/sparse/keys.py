"""Keys of block-sparse attention."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator

from cogfast.core.keys import After, Keys, Range
from cogfast.core.values import cut, show

_MOST_SHARE = 0.95  # of blocks that args.attention leaves out
OTHERS_RUN_DENSE = (
    "%s: other programs run dense attention with these weights; cogfast sample ... args.attention=dense "
    "shows the difference"
)


class SparseKeys(Keys):
    """Block-sparse attention."""

    attention: Annotated[
        str | None, BeforeValidator(lambda x: _attention(x)), After("attention_backend")
    ] = None
    """dense, or sparse:SHARE, which leaves a share of 0 to 0.95 of attention's blocks out
    ([kernels.md](kernels.md#block-sparse-attention)), with attention_backend auto or fa4. null: that
    of args.load, args.load_lora or the sampled run if a run saved them, else dense"""
    sparse_warmup: Annotated[int, Range(0, 10**9)] = 0
    """first steps over which the share of args.attention=sparse:SHARE grows from 0; not with compile"""

    @property
    def sparse_share(self) -> float | None:
        """The share of blocks that attention leaves out; None: dense."""
        return sparse_share(self.attention or "dense")


def sparse_share(attention: str) -> float | None:
    """Return the share that args.attention leaves out, None for dense attention. ValueError for others."""
    if attention == "dense":
        return None
    kind, _, share = attention.partition(":")
    if kind == "sparse" and re.fullmatch(r"0(\.\d+)?", share) and float(share) <= _MOST_SHARE:
        return float(share)
    text = f"args.attention={cut(attention)} must be dense or sparse:SHARE, with a SHARE of blocks to leave"
    raise ValueError(f"{text} out from 0 to {_MOST_SHARE}, such as sparse:0.8")


def _attention(value: object) -> str | None:
    """Check a value of args.attention, and write it in one way."""
    if value is None:
        return None
    share = sparse_share(value if isinstance(value, str) else show(value))
    return "dense" if share is None else f"sparse:{share:g}"
