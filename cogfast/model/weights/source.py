"""A set of weights somewhere on a disk, under our names, read tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from cogfast.model.weights.shard import Shard


@dataclass(frozen=True, slots=True)
class WeightSource:
    """description: for people; shapes: {our name: shape} of the whole tensors; read: our name, and
    the Shard that is wanted of it or None -> tensor."""

    description: str
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str, Shard | None], Tensor]
    ignored: list[str] = field(default_factory=list)  # keys that are not the transformer's
    unexpected: list[str] = field(default_factory=list)  # keys nobody knows
    is_rotary: bool | None = None  # None: unknown, the config is believed
    is_partial: bool = False  # holds what a run trained; the rest comes from elsewhere
