"""Moves the strength of adapters, alpha / r, from a file's header into the matrices, and back.

Loaders that ignore the header take strength 1, which is alpha = r. A strength that is a power of two
multiplies the matrices without rounding, so that such a file is right in every loader. A second entry
of the header lets cogfast read the original alpha and the original bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from cogfast.model.lora import SAT_ALPHA, is_lora_parameter
from cogfast.model.weights.shard import Shard
from cogfast.model.weights.source import WeightSource
from cogfast.schema.json_files import Range, parse_json

HEADER_KEY = "cogfast_lora_strength"


@dataclass(frozen=True, slots=True)
class Strength:
    """The strength that a file's matrices contain. lora_alpha: the alpha that was trained with;
    exponents_of_a: the power of two in the matrix A of a pair, by the name of A; the rest is in B."""

    lora_alpha: Annotated[float, Range(1e-6, 1e6)]
    exponents_of_a: dict[str, Annotated[int, Range(-64, 64)]] = field(default_factory=dict)

    @classmethod
    def of_header(cls, header: Mapping[str, str], file: Path) -> Strength | None:
        """Read the header's entry; None if the file's matrices are as they were trained."""
        if HEADER_KEY not in header:
            return None
        where = f"{file}: {HEADER_KEY}"
        return parse_json(header[HEADER_KEY], cls, where)

    def header(self) -> dict[str, str]:
        """Return the header's entry."""
        content = {"lora_alpha": self.lora_alpha, "exponents_of_a": self.exponents_of_a}
        return {HEADER_KEY: json.dumps(content)}

    def exponent(self, name: str, rank: int) -> int:
        """Return the power of two in a matrix: A or B of a pair of this rank."""
        of_a = self.exponents_of_a.get(name.replace(".matrix_B.", ".matrix_A."), 0)
        # B takes what A does not: without an entry, all of it.
        whole = _exponent(self.lora_alpha / rank)
        assert whole is not None, f"{name}: {self.lora_alpha} / {rank}"
        return of_a if ".matrix_A." in name else whole - of_a

    def is_one(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Return whether the strength of every pair is 1."""
        return all(rank == self.lora_alpha for _, rank in _pairs(shapes))

    def fits(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Return whether the strength of every pair is a power of two."""
        return all(_exponent(self.lora_alpha / rank) is not None for _, rank in _pairs(shapes))


def lora_alpha_of(source: WeightSource) -> float:
    """Return the alpha of a source's adapters, SAT's default if it is unknown."""
    return SAT_ALPHA if source.lora_alpha is None else source.lora_alpha


def into_matrices(source: WeightSource, dtype: torch.dtype | None) -> Strength | None:
    """Return how the strength of a source's adapters goes into their matrices; None if it cannot.

    dtype: of the target; None: the source's. Matrices in float16 are read, one pair at a time.
    """
    strength = Strength(lora_alpha_of(source))
    if not strength.fits(source.shapes):
        return None
    # Exponents of A that are not 0. In bf16 and float32 B takes the whole factor.
    exponents = {}
    for name, rank in _pairs(source.shapes):
        pair = name, name.replace(".matrix_A.", ".matrix_B.")
        # The other dtypes have float32's range, where B alone can take it.
        if torch.float16 in {dtype or source.dtypes[n] for n in pair}:
            a, b = (source.read(n, None).abs().max().item() for n in pair)  # sync: none, on the CPU
            exponent = _share_of_a(a, b, strength.exponent(pair[1], rank))
            exponents |= {name: exponent} if exponent else {}
    return replace(strength, exponents_of_a=exponents)


def scaled(source: WeightSource, strength: Strength, is_removed: bool = False) -> WeightSource:
    """Return `source` with the strength in its matrices, or without it if `is_removed`."""
    ranks = {}
    for name, rank in _pairs(source.shapes):
        ranks |= {name: rank, name.replace(".matrix_A.", ".matrix_B."): rank}
    sign = -1 if is_removed else 1

    def read(name: str, shard: Shard | None) -> Tensor:
        values = source.read(name, shard)
        # Powers of two change the exponent of a float and no bit of its digits.
        exponent = sign * strength.exponent(name, ranks[name]) if name in ranks else 0
        return values * 2.0**exponent if exponent else values

    return replace(source, read=read)


def header_only(source: WeightSource) -> str | None:
    """Return a warning if a file of these adapters needs its header to have the right strength."""
    alpha = lora_alpha_of(source)
    if Strength(alpha).fits(source.shapes):
        return None
    ranks = sorted({rank for _, rank in _pairs(source.shapes)})
    rank = next(r for r in ranks if _exponent(alpha / r) is None)
    return (
        f"lora_alpha / r = {alpha:g} / {rank} is not a power of two, so only the file's header stores "
        f"it: diffusers before 0.34, its load_lora_adapter(FILE) without use_safetensors=True, ComfyUI "
        f"and VideoX-Fun ignore the header and take strength 1; give them {alpha / rank:.4g} as the "
        "LoRA's strength"
    )


def _pairs(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, int]]:
    """Yield the name of each matrix A, [r, in], and its rank."""
    for name, shape in shapes.items():
        if is_lora_parameter(name) and ".matrix_A." in name:
            yield name, shape[0]


def _exponent(strength: float) -> int | None:
    """Return log2 of a power of two; None for other numbers."""
    # frexp's mantissa is from 0.5 to 1, and 0.5 for powers of two alone.
    mantissa, exponent = math.frexp(strength)
    return exponent - 1 if mantissa == 0.5 else None


def _share_of_a(a: float, b: float, exponent: int) -> int:
    """Return A's share of an exponent after which the largest elements of A and B are closest.

    float16 is normal from 2^-14 to 2^16: a B of 1e-3 times 1/128 would lose bits, but A is larger and
    can take a part of the factor. a, b: the largest elements.
    """
    if not (0 < a < math.inf and 0 < b < math.inf):
        return 0
    # Solves |a| 2^share = |b| 2^(exponent - share).
    share = round((exponent + math.log2(b) - math.log2(a)) / 2)
    # A takes at most the whole exponent and never the opposite sign of it.
    low, high = sorted((0, exponent))
    return min(max(share, low), high)
