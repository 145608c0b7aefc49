"""Reads converted weights back and compares them with their source, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from cogfast.model.weights.open import open_source
from cogfast.model.weights.source import WeightSource, first_of
from cogfast.schema.values import counted

# SAT's files have them, diffusers computes the first and has no name for the second.
_MAY_BE_LEFT_OUT = {"position_table.weight", "unused_position_embeddings"}


def verify(source: WeightSource, target: Path) -> str:
    """Compare the tensors at `target` with those of `source`, the weights as they were to be written.

    Returns the result in one line. ValueError if one is missing or differs.
    """
    written = open_source(target)
    missing = [n for n in source.shapes if n not in written.shapes and n not in _MAY_BE_LEFT_OUT]
    if missing:
        raise ValueError(
            f"{target}: lacks {counted(len(missing), 'tensor')} of the source, first "
            f"{first_of(missing)}; delete it and convert again"
        )
    return compare(
        target,
        [name for name in source.shapes if name in written.shapes],
        lambda name: source.read(name, None),
        lambda name: written.read(name, None),
    )


def compare(
    target: Path,
    names: Sequence[str],
    expected: Callable[[str], Tensor],
    found: Callable[[str], Tensor],
) -> str:
    """Compare tensors by name, in their dtypes too. ValueError for one that differs."""
    for name in names:
        one, other = expected(name), found(name)
        if one.dtype != other.dtype or not torch.equal(one, other):
            raise ValueError(
                f"{target}: {name} differs from the source's; delete it and convert again"
            )
    return f"{counted(len(names), 'tensor')} read back, all equal to the source's bit for bit"
