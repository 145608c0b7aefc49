"""Extracts a LoRA from two models: the best low-rank approximation of what fine-tuning changed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cogfast.model.lora import DEFAULT_TARGETS, NUM_PARTS, TARGETS
from cogfast.model.weights.shard import Shard
from cogfast.model.weights.source import WeightSource, num_blocks
from cogfast.schema.values import counted

_SPARE, _ITERATIONS = 16, 6  # randomized SVD: extra singular values, power iterations
_OPTIONAL = {"position_table.weight", "unused_position_embeddings"}  # not in every format


@dataclass(slots=True)
class Extraction:
    """The extracted adapters; `source` computes each when it is read, with alpha = rank.

    kept: for each linear read so far, named as `blocks.0 to_q`, the fraction of its change
    (Frobenius norm) that the rank keeps; lost: changed tensors that adapters cannot represent.
    """

    tuned: WeightSource
    base: WeightSource
    rank: int
    lost: list[str] = field(default_factory=list)
    kept: dict[str, float] = field(default_factory=dict)
    _last: tuple[str, dict[str, Tensor]] = ("", {})

    @property
    def source(self) -> WeightSource:
        shapes = {}
        for block in range(num_blocks(self.base.shapes)):
            for linear, part in map(TARGETS.__getitem__, DEFAULT_TARGETS):
                module = f"blocks.{block}.{linear}"
                rows, columns = self.base.shapes[f"{module}.weight"]
                shapes[f"{module}.matrix_A.{part}"] = (self.rank, columns)
                shapes[f"{module}.matrix_B.{part}"] = (rows // NUM_PARTS[linear], self.rank)
        return WeightSource(
            description=f"the change from {self.base.description} to {self.tuned.description}",
            shapes=shapes,
            read=self._read,
            dtypes=dict.fromkeys(shapes, torch.float32),
            is_partial=True,
            lora_alpha=float(self.rank),
        )

    def report(self) -> str:
        """Summarize in one line what the adapters keep and which changed tensors they lose."""
        name, least = min(self.kept.items(), key=lambda item: item[1])
        mean = sum(self.kept.values()) / len(self.kept)
        line = (
            f"rank {self.rank} keeps {mean:.1%} of the change of a linear on average (Frobenius "
            f"norm), at least {least:.1%} ({name})"
        )
        if self.lost:
            shown = ", ".join(self.lost[:5]) + (", ..." if len(self.lost) > 5 else "")
            number = counted(len(self.lost), "other tensor")
            line += f"; lost are the changes of {number}: {shown}"
        return line

    def _read(self, name: str, shard: Shard | None) -> Tensor:
        module, matrix, part = name.rsplit(".", 2)
        # Writers ask for A and B of a pair in turn: keep the last SVD for the second.
        if self._last[0] != f"{module} {part}":
            self._last = f"{module} {part}", self._pair(module, int(part))
        whole = self._last[1][matrix]
        return whole if shard is None else shard.of(whole)

    def _pair(self, module: str, part: int) -> dict[str, Tensor]:
        _, number, linear = module.split(".", 2)
        weights = [s.read(f"{module}.weight", None) for s in (self.tuned, self.base)]
        # q, k and v have adapters of their own, so each third of the rows is one change.
        tuned, base = (w.chunk(NUM_PARTS[linear])[part].float() for w in weights)
        change = tuned - base
        norm = change.norm().item()  # sync: none, conversion is on the CPU
        if norm == 0:
            u, s, v = (change.new_zeros(n, self.rank) for n in (len(change), 1, change.shape[1]))
            kept = 1.0
        else:
            # A few directions more than are kept make the randomized SVD exact enough.
            size = min(self.rank + _SPARE, *change.shape)
            with torch.random.fork_rng(devices=[]):  # the SVD draws its first directions
                # Two conversions give the same file.
                torch.manual_seed(0)
                found = torch.svd_lowrank(change, q=size, niter=_ITERATIONS)
            u, s, v = (f[..., : self.rank] for f in found)
            kept = min(1.0, s.norm().item() / norm)  # sync: none, as above
        target = next(t for t, place in TARGETS.items() if place == (linear, part))
        self.kept[f"blocks.{number} {target}"] = kept
        # The square root of each singular value in A and in B gives both the same norm.
        return {"matrix_A": (v * s.sqrt()).T.contiguous(), "matrix_B": u * s.sqrt()}


def extract_lora(tuned: WeightSource, base: WeightSource, rank: int) -> Extraction:
    """Return the adapters of q, k, v and out that best turn `base` into `tuned` at a rank.

    Both are complete models of one config without LoRA; their tensors are read one at a time.
    ValueError for models that differ in names or shapes, and for a rank out of range.
    """
    names = (tuned.shapes.keys() | base.shapes.keys()) - _OPTIONAL
    for name in sorted(names):
        sizes = [s.shapes.get(name, ()) for s in (tuned, base)]
        if math.prod(sizes[0]) != math.prod(sizes[1]):  # formats differ in shapes, too
            raise ValueError(
                f"{tuned.description} and {base.description} are not of one model: {name} has shapes "
                f"{list(sizes[0])} and {list(sizes[1])}; use the base that was fine-tuned"
            )
    most = min(base.shapes["blocks.0.attention.out.weight"])
    if not 1 <= rank <= most:
        raise ValueError(f"--rank {rank} must be from 1 to {most}, the width of the linears")
    # All else that changed cannot be represented, and is reported instead of dropped in silence.
    adapted = tuple(f".{TARGETS[target][0]}.weight" for target in DEFAULT_TARGETS)
    lost = []
    for name in base.shapes:
        if name in tuned.shapes and not name.endswith(adapted):
            one, other = (s.read(name, None).float().flatten() for s in (base, tuned))
            if not torch.equal(one, other):
                lost.append(name)
    return Extraction(tuned, base, rank, lost)
