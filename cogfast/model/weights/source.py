"""A set of weights on disk, under cogfast's names, read tensor by tensor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cogfast.core.json_files import brief
from cogfast.core.shapes import PatchSize
from cogfast.core.values import counted
from cogfast.model.keys import LearnedPositions
from cogfast.model.lora import SAT_ALPHA
from cogfast.model.weights.shard import Shard

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_MOST_NAME = 200  # characters
_MOST_SHOWN = 160  # characters of names in a message
_MOST_DIMS = 5  # 3D convolutions of the VAE; the transformer's tensors have at most 4
# SAT's files have them, diffusers computes the first and has no name for the second.
_MAY_BE_LEFT_OUT = {"position_table.weight", "unused_position_embeddings"}

Shapes = Mapping[str, tuple[int, ...]]  # {cogfast's parameter name: shape}


class Target(Protocol):
    """A place for the values of a weight: a tensor, or storage of another kind."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def copy_(self) -> Callable[[Tensor], object]:
        """Store values of this shape, in any dtype."""
        ...


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Weights that are read tensor by tensor.

    description: name for logs and errors; shapes: {name: shape} of whole tensors; read: (name, Shard
    or None) -> tensor in its dtype of `dtypes`, or in float32 if it is computed, so that it is rounded
    only once, when it is written.
    """

    description: str
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str, Shard | None], Tensor]
    dtypes: dict[str, torch.dtype]
    unexpected: list[str] = field(default_factory=list)  # unknown keys
    facts: dict[str, Any] = field(default_factory=dict)  # fields of TransformerConfig it stores
    is_partial: bool = False  # has only the tensors that a run trained
    trained: frozenset[str] = frozenset()  # names of the tensors that a run trained
    convolutions: Shapes = field(default_factory=dict)  # the shapes of flat adapters in their file
    lora_alpha: float | None = None  # None: unknown; SAT's default is 1
    base: str | None = None  # of a run: the model that it started from
    positions: LearnedPositions | None = None  # of a run: what became of that model's learned table
    member: str | None = None  # the published model that adapters were trained on, if known

    def __post_init__(self) -> None:
        check_tensors(self.description, self.shapes, self.dtypes)

    def dtype_in_target(self, name: str, dtype: torch.dtype | None) -> torch.dtype:
        """Return the dtype in which a tensor is written for --dtype `dtype` (None: unchanged)."""
        # 2B's fixed position table is never rounded: in bf16 it changes outputs by 2.5e-3.
        is_fixed = name == "position_table.weight" and not self.is_rotary
        return self.dtypes[name] if dtype is None or is_fixed else dtype

    def as_written(self, dtype: torch.dtype | None) -> WeightSource:
        """Return these weights as a reader finds them in a target; see dtype_in_target."""
        dtypes = {name: self.dtype_in_target(name, dtype) for name in self.shapes}
        read = lambda name, shard: self.read(name, shard).to(dtypes[name])
        return replace(self, read=read, dtypes=dtypes)

    def checked(self) -> WeightSource:
        """Return these weights with a check of each tensor that is read: it must be finite."""
        check = lambda name, shard: check_finite(self.description, name, self.read(name, shard))
        return replace(self, read=check)

    def changed(
        self, name: str, shape: tuple[int, ...], change: Callable[[Tensor], Tensor]
    ) -> WeightSource:
        """Return these weights with `change`, which gives a tensor of `shape`, applied to one of them."""

        def read(other: str, shard: Shard | None) -> Tensor:
            found = self.read(other, shard)
            return change(found) if other == name else found

        return replace(self, read=read, shapes={**self.shapes, name: shape})

    @property
    def alpha(self) -> float:
        """The alpha of the adapters, SAT's default if it is unknown."""
        return SAT_ALPHA if self.lora_alpha is None else self.lora_alpha

    @property
    def main_dtype(self) -> torch.dtype:
        return Counter(self.dtypes.values()).most_common(1)[0][0]

    @property
    def is_rotary(self) -> bool:
        return "unused_position_embeddings" in self.shapes or self.facts.get("position") == "rotary"


def check_tensors(
    where: str | Path, shapes: Mapping[str, Sequence[int]], dtypes: Mapping[str, torch.dtype]
) -> None:
    """Raise ValueError for a tensor whose name, shape or dtype no weight can have."""
    for name, shape in shapes.items():
        if len(name) > _MOST_NAME or not name.isprintable():
            raise ValueError(f"{where}: {brief(name)} is not a tensor's name; copy it again")
        if not 1 <= len(shape) <= _MOST_DIMS or not all(shape):
            text = f"{where}: {name} has shape {brief(str(list(shape)))}, which no weight can have; copy it again"
            raise ValueError(text)
        if dtypes[name] not in _DTYPES:
            found = str(dtypes[name]).removeprefix("torch.")
            text = f"{where}: {name} is {found}, but weights must be float32, float16, bfloat16 or float64"
            raise ValueError(f"{text}; use weights that are not quantized")


def check_finite(where: str | Path, name: str, values: Tensor) -> Tensor:
    """Return `values`. ValueError if one is NaN or infinite."""
    if not values.numel():
        return values
    # The extremes show NaN and infinities; on a CPU isfinite() takes 30 times as long.
    low, high = values.aminmax()
    if not (low.isfinite() and high.isfinite()):  # sync: once per tensor, while it is loaded
        number = int((~values.isfinite()).sum())  # sync: before the end
        text = f"{where}: {brief(name)} has {number} of {values.numel()} numbers that are NaN or infinite"
        raise ValueError(f"{text}; copy it again, or use weights of an earlier step")
    return values


def first_of(names: Sequence[str]) -> str:
    """Join the first few names for a message."""
    # A message stays one line, whatever the names are.
    shown: list[str] = []
    for name in names[:5]:
        if shown and len(", ".join(shown)) + len(name) > _MOST_SHOWN:
            break
        shown.append(brief(name))
    return ", ".join(shown) + (", ..." if len(shown) < len(names) else "")


def load_state(
    module: nn.Module,
    state: Mapping[str, Tensor],
    where: str,
    fix: str,
    dtype: torch.dtype,
    kept: str | None = None,
) -> None:
    """Give a module of a library copies of all its tensors in `dtype`.

    where, fix: beginning and end of error messages. kept: the end of names that stay in float32.
    ValueError for missing, unexpected and resized tensors, for other dtypes than a weight's, and for
    numbers that are not finite.
    """
    wanted = module.state_dict()
    tensors = state.items()
    check_tensors(where, {k: v.shape for k, v in tensors}, {k: v.dtype for k, v in tensors})
    missing = [name for name in wanted if name not in state]
    unexpected = [name for name in state if name not in wanted]
    if missing or unexpected:
        absent, unknown = (
            counted(len(names), "tensor") + (f" ({first_of(names)})" if names else "")
            for names in (missing, unexpected)
        )
        raise ValueError(f"{where}: {absent} missing, {unknown} unexpected; {fix}")
    copies = {}
    for name, tensor in state.items():
        if tensor.shape != wanted[name].shape:
            text = f"{where}: {name} has shape {list(tensor.shape)}, the config asks for {list(wanted[name].shape)}"
            raise ValueError(f"{text}; {fix}")
        # Copy: a file's tensors may share memory, and a memory-mapped file may be moved or deleted.
        kind = torch.float32 if kept is not None and name.endswith(kept) else dtype
        copies[name] = check_finite(where, name, tensor).to(kind, copy=True)
    module.load_state_dict(copies, assign=True)


def verify(source: WeightSource, target: Path, written: WeightSource) -> str:
    """Compare `written`, the weights read back at `target`, with `source`, those that were to be
    written, bit for bit.

    Returns the result in one line. ValueError if a tensor is missing or differs.
    """
    if missing := source.shapes.keys() - written.shapes.keys() - _MAY_BE_LEFT_OUT:
        text = f"{target}: lacks {counted(len(missing), 'tensor')} of the source, first {first_of(sorted(missing))}"
        raise ValueError(f"{text}; delete it and convert again")
    names = [name for name in source.shapes if name in written.shapes]
    for name in names:
        expected, found = source.read(name, None), written.read(name, None)
        if expected.dtype != found.dtype or not torch.equal(expected, found):
            text = f"{target}: {name} differs from the source's; delete it and convert again"
            raise ValueError(text)
    return f"{counted(len(names), 'tensor')} read back, all equal to the source's bit for bit"


def with_flat_patches(source: WeightSource) -> WeightSource:
    """Return `source` with CogVideoX 1.0's patch embedding, a convolution [M, C, h, w] in SAT's and
    diffusers' files, reshaped to cogfast's linear [M, C*h*w]."""
    key = "patch_embedding.weight"
    shape = source.shapes.get(key, ())
    if len(shape) != 4:
        return source
    # Only 1.0 has a 2D convolution; 1.5's patches span two frames and are a linear.
    patch = PatchSize(1, *shape[2:])
    configured = source.facts.get("patch_size", patch)
    if configured != patch:
        text = f"{source.description}: its config has patch_size={configured}, its tensors {patch}"
        raise ValueError(f"{text}; use the config.json that belongs to these tensors")
    # Row-major, so a reshape alone: the kernel's values are in the order (C, h, w). Tensor parallelism
    # splits only the blocks, never this weight.
    flat = (shape[0], math.prod(shape[1:]))
    found = source.changed(key, flat, lambda values: values.reshape(flat))
    return replace(found, facts={**source.facts, "patch_size": patch})


def num_blocks(shapes: Shapes) -> int:
    return len({name.split(".")[1] for name in shapes if name.startswith("blocks.")})
