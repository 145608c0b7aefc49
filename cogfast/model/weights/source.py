"""A set of weights somewhere on a disk, under our names, read tensor by tensor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cogfast.model.weights.shard import Shard
from cogfast.schema.json_files import brief
from cogfast.shapes import PatchSize

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_MOST_NAME = 200  # characters
_MOST_SHOWN = 160  # characters of names in a message
_MOST_DIMS = 5  # a convolution of the VAE; the transformer's tensors have at most 4


@dataclass(frozen=True, slots=True)
class WeightSource:
    """description: for people; shapes: {our name: shape} of the whole tensors; read: our name, and
    the Shard that is wanted of it or None -> tensor in its dtype of `dtypes`, or float32 where it
    is computed, so that it is rounded once, when it is written."""

    description: str
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str, Shard | None], Tensor]
    dtypes: dict[str, torch.dtype]
    ignored: list[str] = field(default_factory=list)  # keys that are not the transformer's
    unexpected: list[str] = field(default_factory=list)  # keys nobody knows
    facts: dict[str, Any] = field(default_factory=dict)  # fields of TransformerConfig it brings
    is_partial: bool = False  # holds what a run trained; the rest comes from elsewhere
    lora_alpha: float | None = None  # None: unknown; SAT's default is 1

    def __post_init__(self) -> None:
        check_tensors(self.description, self.shapes, self.dtypes)

    def dtype_in_target(self, name: str, dtype: torch.dtype | None) -> torch.dtype:
        """Of a tensor where weights are wanted in `dtype`, None for what they are. 2B's fixed table
        of positions stays as it is: rounded to bf16 it changes outputs by 2.5e-3."""
        is_fixed = name == "position_table.weight" and not self.is_rotary
        return self.dtypes[name] if dtype is None or is_fixed else dtype

    def as_written(self, dtype: torch.dtype | None) -> WeightSource:
        """What a reader finds in a target of these weights, see dtype_in_target."""
        dtypes = {name: self.dtype_in_target(name, dtype) for name in self.shapes}
        read = lambda name, shard: self.read(name, shard).to(dtypes[name])
        return replace(self, read=read, dtypes=dtypes)

    @property
    def main_dtype(self) -> torch.dtype:
        """That of most tensors."""
        return Counter(self.dtypes.values()).most_common(1)[0][0]

    @property
    def is_rotary(self) -> bool:
        return "unused_position_embeddings" in self.shapes or self.facts.get("position") == "rotary"


def check_tensors(
    where: str | Path, shapes: Mapping[str, Sequence[int]], dtypes: Mapping[str, torch.dtype]
) -> None:
    """ValueError for a tensor that no weight of a model can be, by its name, shape or dtype."""
    for name, shape in shapes.items():
        if len(name) > _MOST_NAME or not name.isprintable():
            raise ValueError(f"{where}: {brief(name)} is no name of a tensor; copy it again")
        if not 1 <= len(shape) <= _MOST_DIMS or not all(shape):
            raise ValueError(
                f"{where}: {name} has shape {brief(str(list(shape)))}, which no weight has; copy it "
                "again"
            )
        if dtypes[name] not in _DTYPES:
            found = str(dtypes[name]).removeprefix("torch.")
            raise ValueError(
                f"{where}: {name} is {found}, and weights are float32, float16, bfloat16 or "
                "float64; use weights that are not quantized"
            )


def first_of(names: Sequence[str]) -> str:
    """The first few names, for a message."""
    shown: list[str] = []
    for name in names[:5]:
        if shown and len(", ".join(shown)) + len(name) > _MOST_SHOWN:
            break
        shown.append(brief(name))
    return ", ".join(shown) + (", ..." if len(shown) < len(names) else "")


def with_flat_patches(source: WeightSource) -> WeightSource:
    """`source` with CogVideoX 1.0's patch embedding, a convolution [M, C, h, w] in SAT's and
    diffusers' files, as the linear [M, C*h*w] that it is here."""
    key = "patch_embedding.weight"
    shape = source.shapes.get(key, ())
    if len(shape) != 4:
        return source
    patch = PatchSize(1, *shape[2:])
    said = source.facts.get("patch_size", patch)
    if said != patch:
        raise ValueError(
            f"{source.description}: its config says patch_size={said}, the tensors {patch}; put the "
            "config beside the tensors that belongs to them"
        )
    flat = (shape[0], math.prod(shape[1:]))

    def read(name: str, shard: Shard | None) -> Tensor:
        values = source.read(name, shard)
        return values.reshape(flat) if name == key and shard is None else values

    return replace(
        source,
        shapes={**source.shapes, key: flat},
        read=read,
        facts={**source.facts, "patch_size": patch},
    )
