"""A set of weights somewhere on a disk, under our names, read tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class WeightSource:
    """description: for people; shapes: {our name: shape}; read: our name -> tensor."""

    description: str
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    ignored: list[str] = field(default_factory=list)  # keys that are not the transformer's
    unexpected: list[str] = field(default_factory=list)  # keys nobody knows
    is_rotary: bool | None = None  # None: unknown, the config is believed
    is_partial: bool = False  # holds what a run trained; the rest comes from elsewhere
