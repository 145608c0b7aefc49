"""How much of a block each policy of activation checkpointing keeps, and which policies fit.

In units U of one activation [B, S, M] (t: tensor-parallel parts, which share what stands in brackets):

    full            h 1
    attention_kept  h 1, [attention 1, lse]
    pointwise       h 1, [qkv 3, attention 1, lse, fc1 4], out 1, fc2 1
    none            pointwise's and n1 1, [q, k 2], h' 1, n2 1, [gelu 4], the statistics of two norms

v is a part of qkv. Where only adapters are trained, nothing asks for the inputs of fc1 and fc2 nor
for what a gate multiplies: none keeps h, n1, qkv, q, k, attention, lse, h' and fc1, 13 U, beside the
adapters' low-rank products. Where processes have rows of their own between the linears, they share
everything but what pointwise keeps of out and fc2, products whose sum is still to come, and the
adapters' n1. What a policy spares for what it recomputes falls from row to row:
attention_kept saves most of a recomputation for 1 U, pointwise the matmuls for 9 U, none the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

Policy = Literal["none", "attention_kept", "pointwise", "full"]

LADDER: tuple[Policy, ...] = ("full", "attention_kept", "pointwise", "none")
_LIVE_UNITS = 22  # the block that backward is in: what none keeps of it, and two gradients


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """One block of a micro-batch. num_rows: B S; num_heads: of the whole model; num_parts: of
    tensor parallelism; adapter_columns: entries of a row that LoRA's low-rank products have in all;
    is_frozen: only adapters are trained."""

    num_rows: int
    width: int
    num_heads: int
    bytes_per_number: int
    num_parts: int = 1
    splits_rows: bool = False
    adapter_columns: int = 0
    is_frozen: bool = False

    @property
    def unit(self) -> int:
        """Bytes of one [B, S, M]."""
        return self.num_rows * self.width * self.bytes_per_number

    @property
    def live(self) -> int:
        """Bytes of the block whose backward runs, the policy's own part included."""
        return _LIVE_UNITS * self.unit

    def kept(self, policy: Policy) -> int:
        """Bytes that a block keeps from its forward to its backward pass."""
        u, part = self.unit, self.unit // self.num_parts
        row = part if self.splits_rows else u  # of what is between the linears
        lse = 4 * self.num_rows * self.num_heads // self.num_parts
        statistics = 2 * 2 * 4 * self.num_rows  # float32 mean and rstd
        adapters = self.num_rows * self.adapter_columns * self.bytes_per_number
        if policy == "full":
            return row
        if policy == "attention_kept":
            return row + part + lse
        wide = 8 * part + lse + adapters
        if policy == "pointwise":
            return row + 2 * u + wide
        if self.is_frozen:
            return 2 * row + u + 2 * part + wide + statistics
        return 6 * row + 6 * part + wide + statistics


def plan_layers(layer: LayerShape, num_layers: int, num_bytes: int) -> tuple[Policy, ...]:
    """The policies of all layers that recompute least of those that keep `num_bytes` at most, or
    full everywhere where nothing fits.

    All layers climb a rung of the ladder before any climbs the next. The last ones climb first:
    what they hold is released first, before the early layers' recomputations need room.
    """
    policies = [LADDER[0]] * num_layers
    left = num_bytes - num_layers * layer.kept(LADDER[0])
    for before, rung in zip(LADDER, LADDER[1:], strict=False):
        price = layer.kept(rung) - layer.kept(before)
        num_risen = num_layers
        if price > 0:
            num_risen = min(num_layers, max(0, left // price))
        left -= num_risen * price
        policies[num_layers - num_risen :] = [rung] * num_risen
        if num_risen < num_layers:
            break
    return tuple(policies)


def kept_by_all(layer: LayerShape, policies: Sequence[Policy]) -> int:
    return sum(map(layer.kept, policies))


def describe(policies: Sequence[Policy]) -> str:
    """`attention_kept in layers 0-23, pointwise in layers 24-41`; a single one without layers."""
    if len(set(policies)) == 1:
        return f"{policies[0]} in all {len(policies)} layers"
    parts, first = [], 0
    for policy, run in groupby(policies):
        last = first + len(list(run)) - 1
        parts.append(f"{policy} in layers {first}-{last}")
        first = last + 1
    return ", ".join(parts)
