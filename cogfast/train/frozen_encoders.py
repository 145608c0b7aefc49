"""The frozen encoders as a configuration names them, and functions in place of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from cogfast.core.component import Component
from cogfast.core.slot_random import SlotRandom


@dataclasses.dataclass(frozen=True, slots=True)
class EncodeOverrides:
    """Functions that encode clips and captions in place of the frozen encoders; None: the encoders do.

    encode_video(encoder, rng, clip [1, 3, F, H, W] in [-1, 1]) returns scaled latents [1, C, T, h, w],
    encode_text(encoder, rng, caption) an embedding [1, L, E]. rng has the draws of this sample alone.
    identity: {name of the function: text}, the text changes with what the function computes. It is a
    part of the latent cache's specs.
    """

    encode_video: Callable[[Any, SlotRandom, Tensor], Tensor] | None = None
    encode_text: Callable[[Any, SlotRandom, str], Tensor] | None = None
    identity: Mapping[str, str] = dataclasses.field(default_factory=dict)


NO_OVERRIDES = EncodeOverrides()


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenParts:
    """The classes of the frozen encoders with their arguments; None: left out. text_dropout: share of captions to drop."""

    first_stage: Component | None
    text_encoder: Component | None
    text_dropout: float = 0.0
    overrides: EncodeOverrides = NO_OVERRIDES
