"""Chooses the frames of a clip that a model with the condition `frames` is given.

A latent frame k holds the pixel frame 4k, encoded alone, as CogVideoX-Interpolation has its first and
last frame; a prefix is encoded as one clip.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cogfast.core.shapes import TEMPORAL_COMPRESSION, num_latent_frames
from cogfast.core.slot_random import SlotRandom

KINDS = ("first", "last", "first_last", "random", "all", "prefix:N")
_PREFIX = re.compile(r"prefix:(\d{1,6})")


@dataclass(frozen=True, slots=True)
class GivenFrames:
    """The frames that model.given_frames names. kind: one of KINDS, with "prefix" for prefix:N; number: N."""

    kind: str
    number: int = 0

    @classmethod
    def parse(cls, text: str | None) -> GivenFrames | None:
        """Read a value of model.given_frames; ValueError if it is not known. None: without the condition."""
        if text is None:
            return None
        if text in KINDS[:-1]:
            return cls(text)
        if (found := _PREFIX.fullmatch(text)) is None:
            raise ValueError(f"must be one of {', '.join(KINDS)}")
        if int(found[1]) % TEMPORAL_COMPRESSION != 1:
            raise ValueError("the N frames of prefix:N fill whole latent frames; use 1, 5, 9, ...")
        return cls("prefix", int(found[1]))

    @property
    def is_clip(self) -> bool:
        """Whether the frames are encoded as one clip, and not each alone."""
        return self.kind in ("prefix", "all")

    def places(self, num_frames: int) -> list[int]:
        """Return the latent frames that may be given, of a clip of `num_frames` pixel frames."""
        every = list(range(num_latent_frames(num_frames)))
        if self.kind == "prefix":
            return every[: num_latent_frames(self.number)]
        ends = {"first": every[:1], "last": every[-1:], "first_last": every[:1] + every[1:][-1:]}
        return ends.get(self.kind, every)

    def pixel_frames(self, num_frames: int) -> list[int]:
        """Return the pixel frames that `places` are encoded from."""
        if self.is_clip:
            return list(range(min(self.number or num_frames, num_frames)))
        return [place * TEMPORAL_COMPRESSION for place in self.places(num_frames)]

    def drawn(self, num_places: int, rng: SlotRandom) -> Tensor | None:
        """Draw which places each sample is given, bool [B, P] on the CPU, at least one; None: all are."""
        if self.kind != "random":
            return None
        drawn = []
        for generator in rng.generators("given_frames"):
            count = 1 + int(torch.randint(num_places, (), generator=generator))
            drawn.append(torch.randperm(num_places, generator=generator) < count)
        return torch.stack(drawn)


def place_frames(latents: Tensor, places: Sequence[int], num_frames: int) -> Tensor:
    """Put latents [B, C, P, h, w] into their places among `num_frames` latent frames; zeros elsewhere."""
    out = latents.new_zeros(*latents.shape[:2], num_frames, *latents.shape[3:])
    for i, place in enumerate(places):
        out[:, :, place] = latents[:, :, i]
    return out
