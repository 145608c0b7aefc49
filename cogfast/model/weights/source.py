"""A set of weights somewhere on a disk, under our names, read tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cogfast.model.weights.shard import Shard


@dataclass(frozen=True, slots=True)
class WeightSource:
    """description: for people; shapes: {our name: shape} of the whole tensors; read: our name, and
    the Shard that is wanted of it or None -> tensor in its dtype of `dtypes`."""

    description: str
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str, Shard | None], Tensor]
    dtypes: dict[str, torch.dtype]
    ignored: list[str] = field(default_factory=list)  # keys that are not the transformer's
    unexpected: list[str] = field(default_factory=list)  # keys nobody knows
    facts: dict[str, Any] = field(default_factory=dict)  # fields of TransformerConfig it brings
    is_partial: bool = False  # holds what a run trained; the rest comes from elsewhere
    lora_alpha: float | None = None  # None: unknown; SAT's default is 1

    def dtype_in_target(self, name: str, dtype: torch.dtype | None) -> torch.dtype:
        """Of a tensor where weights are wanted in `dtype`, None for what they are. 2B's fixed table
        of positions stays as it is: rounded to bf16 it changes outputs by 2.5e-3."""
        is_fixed = name == "position_table.weight" and not self.is_rotary
        return self.dtypes[name] if dtype is None or is_fixed else dtype

    @property
    def is_rotary(self) -> bool:
        return "unused_position_embeddings" in self.shapes or self.facts.get("position") == "rotary"
