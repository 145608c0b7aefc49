"""Reads converted weights back and compares them with their source, bit for bit."""

from __future__ import annotations

from pathlib import Path

import torch

from cogfast.config.values import counted
from cogfast.model.weights.open import open_source
from cogfast.model.weights.source import WeightSource, first_of

# SAT's files have them, diffusers computes the first and has no name for the second.
_MAY_BE_LEFT_OUT = {"position_table.weight", "unused_position_embeddings"}


def verify(source: WeightSource, target: Path, written: WeightSource | None = None) -> str:
    """Compare the tensors at `target` with those of `source`, the weights as they were to be written.

    written: the weights at `target`; None opens a transformer or adapters. Returns the result in one
    line. ValueError if a tensor is missing or differs.
    """
    written = open_source(target) if written is None else written
    missing = source.shapes.keys() - written.shapes.keys() - _MAY_BE_LEFT_OUT
    if missing:
        raise ValueError(
            f"{target}: lacks {counted(len(missing), 'tensor')} of the source, first "
            f"{first_of(sorted(missing))}; delete it and convert again"
        )
    names = [name for name in source.shapes if name in written.shapes]
    for name in names:
        expected, found = source.read(name, None), written.read(name, None)
        if expected.dtype != found.dtype or not torch.equal(expected, found):
            raise ValueError(
                f"{target}: {name} differs from the source's; delete it and convert again"
            )
    return f"{counted(len(names), 'tensor')} read back, all equal to the source's bit for bit"
