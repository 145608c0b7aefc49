"""8-bit codes of the moments of FusedEmaAdam: the upper bits of float32 numbers.

A code has 3 bits of the mantissa, so that there are 8 values from a power of two to the next. What it
keeps of the exponent is relative to the largest number of a block of 256 elements. With b the bits of
|x|, and r from 0 to 2^16 - 1 a part of a hash of the step and the element:

    largest = (max of b + 2^20 - 1) >> 20             of the block, rounded up; int16
    base = max(largest - levels, 0)                   levels: 127 of the first moment, 255 of the second
    code = ((b + 16 r) >> 20) - base
    x = the float32 with the bits (code + base) << 20; 0 for code 0

Rounding by r goes up or down so that the mean is x. To the nearest, a second moment would stand still:
with beta2 = 0.999 a step changes it by less than half the distance of two codes. The first moment has
a sign bit and spans 16 powers of two; below, it becomes 0 or the smallest code, with the mean x. The
second spans 32; below, it becomes the smallest code and never 0, which would make a step infinite.

Decoded numbers have the codes that they came from, whatever r is and however the elements are divided
into blocks, unless a block's largest number is more than those powers of two above them.

bitsandbytes and torchao have blocks of 256, too, and tables of values that are rounded to the nearest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from cogfast.kernels.fused_ema_adam import MOMENT_BLOCK, largest_key

NEAREST = 1 << 15  # r that rounds to the nearest code
_SHIFT = 20  # bits of a float32 that a code has not
_CHUNK = 1 << 22  # elements that are worked on at a time: temporary memory of some tens of MB


def _scramble(x: Tensor) -> Tensor:
    """Hash 32-bit numbers, which are held in int64 (C. Wellons' lowbias32)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)


@dataclass(frozen=True, slots=True)
class CodedMoment:
    """A moment of one tensor: codes uint8, in the shape of the tensor, and largest int16 [blocks]."""

    codes: Tensor
    largest: Tensor
    is_signed: bool

    @staticmethod
    def random_halves(step: Tensor, start: int, numel: int) -> tuple[Tensor, Tensor]:
        """Return r of the first and of the second moment of elements [start, start + numel), int32 [numel].

        step: count of updates, [], which decides the numbers together with the element.
        """
        element = torch.arange(start, start + numel, device=step.device) & 0xFFFFFFFF
        random = _scramble(element ^ _scramble(step.long()))
        return (random & 0xFFFF).int(), (random >> 16).int()

    def decode(self, start: int = 0, numel: int | None = None) -> Tensor:
        """Return elements [start, start + numel) of the flattened tensor, float32 [numel]."""
        codes = self.codes.view(-1)[start:][: self.codes.numel() if numel is None else numel]
        values = torch.empty(codes.shape, device=codes.device)
        for at in range(0, codes.numel(), _CHUNK):
            part = codes[at : at + _CHUNK].int()
            block = torch.arange(start + at, start + at + part.numel(), device=codes.device)
            base = self._base(self.largest[block // MOMENT_BLOCK])
            level = part & 127 if self.is_signed else part
            bits = torch.where(level > 0, level + base, 0) << _SHIFT
            found = values[at : at + _CHUNK].copy_(bits.view(torch.float32))
            if self.is_signed:
                found.copysign_(127.5 - part)
        return values

    def encode(self, values: Tensor, start: int = 0, r: Tensor | None = None) -> None:
        """Set elements [start, start + N) of the flattened tensor to `values`, float32 [N].

        start: of a block; N: of whole blocks, or up to the end. r: int32 [N]; None: round to nearest.
        """
        for at in range(0, values.numel(), _CHUNK):
            chosen = None if r is None else r[at : at + _CHUNK]
            self._encode(values[at : at + _CHUNK].to(self.codes.device), start + at, chosen)

    def _encode(self, values: Tensor, start: int, r: Tensor | None) -> None:
        n, device = values.numel(), values.device
        if r is None:
            r = torch.full((n,), NEAREST, dtype=torch.int32, device=device)
        rows = lambda x: functional.pad(x, (0, -n % MOMENT_BLOCK)).view(-1, MOMENT_BLOCK)
        raw, r = rows(values.view(torch.int32)), rows(r)
        bits = raw & 0x7FFFFFFF
        largest = (bits.amax(1) + ((1 << _SHIFT) - 1)) >> _SHIFT
        first = start // MOMENT_BLOCK
        self.largest[first : first + len(largest)] = largest.short()
        base = self._base(largest)[:, None]
        level = ((bits + (r << 4)) >> _SHIFT) - base
        least = bits > 0
        if self.is_signed:
            smallest = ((base + 1) << _SHIFT).view(torch.float32)
            least = r.float() * smallest < bits.view(torch.float32) * 65536
        level = torch.where(level < 1, least.int(), level)
        if self.is_signed:
            level |= (raw < 0).int() << 7
        self.codes.view(-1)[start : start + n] = level.view(-1)[:n].to(torch.uint8)

    def _base(self, largest: Tensor) -> Tensor:
        return (largest.int() - (127 if self.is_signed else 255)).clamp_(min=0)


def coded_moment(state: Mapping[str, Tensor], key: str) -> CodedMoment:
    """Return a moment of an optimizer's state."""
    return CodedMoment(state[key], state[largest_key(key)], is_signed=key == "exp_avg")
