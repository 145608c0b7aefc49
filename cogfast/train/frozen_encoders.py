"""The frozen encoders of a run: its video autoencoder and its text encoder."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cogfast.core.component import Component
from cogfast.core.shapes import num_latent_frames
from cogfast.core.slot_random import SlotRandom
from cogfast.extensions.memory.host_memory import HostWeights
from cogfast.model.autoencoder import FirstStage, Moments
from cogfast.model.keys import ModelKeys
from cogfast.model.text_encoder import TextEncoder


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenParts:
    """The classes of the frozen encoders with their arguments; None: left out. text_dropout: share of captions to drop."""

    first_stage: Component | None
    text_encoder: Component | None
    text_dropout: float = 0.0


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
_unchanged = lambda tensor: tensor
_no_choice = lambda stage, clips: None  # how the first stage encodes stays as it is


class FrozenEncoders:
    """A video autoencoder (first stage) and a text encoder, built on first use.

    build_first_stage, build_text_encoder: build the frozen modules on the device. before_clips: called before
    clips [B, 3, F, H, W] are encoded, and before single frames only if they are samples; chooses how the first
    stage encodes clips. broadcast_within_model: makes the encoders' outputs bitwise equal on all ranks of a
    tensor-parallel group. overrides: used for clips and captions of training data, and not for first frames
    and prompts that are sampled. device: where the modules' weights are while a method here uses them, and on
    a GPU may leave; None: they stay. is_brief: they leave after each use.
    """

    def __init__(
        self,
        build_first_stage: Callable[[], FirstStage | None],
        build_text_encoder: Callable[[], TextEncoder | None],
        model: ModelKeys,
        *,
        before_clips: Callable[[FirstStage, Tensor], None] = _no_choice,
        broadcast_within_model: Callable[[Tensor], Tensor] = _unchanged,
        overrides: EncodeOverrides = NO_OVERRIDES,
        device: torch.device | None = None,
        is_brief: bool = False,
    ) -> None:
        self._build_first_stage, self._build_text_encoder = build_first_stage, build_text_encoder
        self._first_stage: FirstStage | None = None
        self._text_encoder: TextEncoder | None = None
        self.model, self.scale_factor = model, model.scale_factor
        self._before_clips = before_clips
        self._broadcast_within_model = broadcast_within_model
        self.overrides = overrides
        self._device, self._is_brief = device, is_brief
        self._weights: dict[Any, HostWeights] = {}  # by module

    @property
    def first_stage(self) -> FirstStage:
        if self._first_stage is None:
            self._first_stage = self._build_first_stage()
        missing = "model.first_stage_config has no autoencoder, but the batch has pixels"
        return self._fetched(self._first_stage, missing, "encoded_videos")

    @property
    def text_encoder(self) -> TextEncoder:
        if self._text_encoder is None:
            self._text_encoder = self._build_text_encoder()
        missing = "model.conditioner_config has no text encoder, but the batch has captions"
        return self._fetched(self._text_encoder, missing, "prompt_embedding")

    def _fetched(self, module: Any, missing: str, encoded: str) -> Any:
        """Return a module with its weights on the device; ValueError if there is none."""
        if module is None:
            raise ValueError(f"{missing}; configure one, or use a data set that returns {encoded}")
        if self._device is not None:
            if module not in self._weights:
                self._weights[module] = HostWeights(module, self._device)
            self._weights[module].fetch()
        return module

    @contextlib.contextmanager
    def _leaving(self) -> Iterator[None]:
        """Let the modules' weights leave the device at the end, if they are there only briefly."""
        try:
            yield
        finally:
            if self._is_brief:
                for weights in self._weights.values():
                    weights.leave()

    @contextlib.contextmanager
    def visit(self) -> Iterator[None]:
        """Let weights that were not on the device before leave it at the end.

        An evaluation needs the encoders that a training step on cached data does not use, and may
        leave it no less memory than before.
        """
        present = {module for module, weights in self._weights.items() if weights.is_present}
        try:
            yield
        finally:
            for module, weights in self._weights.items():
                if module not in present:
                    weights.leave()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Encode without collectives in the block: a rank that fails there leaves no other waiting.

        Call `choose` before, and broadcast what was encoded to the ranks of a model after they agree.
        """
        kept = self._broadcast_within_model, self._before_clips
        self._broadcast_within_model, self._before_clips = _unchanged, _no_choice
        try:
            yield
        finally:
            self._broadcast_within_model, self._before_clips = kept

    def choose_for(self, clips: Tensor) -> None:
        """Choose how the first stage, which is built, encodes clips [B, 3, F, H, W]. Collective."""
        with self._leaving():
            self._before_clips(self.first_stage, clips)

    @torch.no_grad()
    def encode_clips(self, pixels: Tensor, rng: SlotRandom) -> Tensor:
        """Encode clips of the data [B, 3, F, H, W] as `encode_video`, or by its override."""
        encode = self.overrides.encode_video
        with self._leaving():
            # All ranks choose with their first pixels, some perhaps with a picture; an override may call the first
            # stage on one of them only.
            self._before_clips(self.first_stage, pixels)
            if encode is None:
                return self.encode_video(pixels, rng, "first_stage")
            clips = [clip.contiguous() for clip in pixels.float().split(1)]
            return self._overridden("encode_video", encode, clips, rng).float()

    @torch.no_grad()
    def encode_captions(self, captions: Sequence[str], rng: SlotRandom) -> Tensor:
        """Encode captions of the data [B] as `encode_text`, or by its override."""
        encode = self.overrides.encode_text
        if encode is None:
            return self.encode_text(captions)
        with self._leaving():
            return self._overridden("encode_text", encode, captions, rng)

    def _overridden(
        self, name: str, encode: Callable, samples: Sequence[Any], rng: SlotRandom
    ) -> Tensor:
        found = []
        for sample, slot in zip(samples, rng.slots, strict=True):
            own = dataclasses.replace(rng, slots=[slot])
            # Its random operations must not depend on what was drawn before.
            own.seed_generators(name)
            found.append(encode(self, own, sample))
        return self._broadcast_within_model(torch.cat(found))

    def encode_video(self, pixels: Tensor, rng: SlotRandom, purpose: str) -> Tensor:
        """Encode pixels [B, 3, F, H, W] in [-1, 1] to scaled latents [B, C, T, h, w] in float32."""
        # Pictures one by one: many of them in a batch take no more memory than a clip.
        parts = pixels.split(1 if pixels.shape[2] == 1 else len(pixels))
        moments = join_moments([self.encode_moments(part) for part in parts], torch.cat)
        return self._sample(moments, rng, purpose, self.scale_factor)

    @torch.no_grad()
    def encode_moments(self, pixels: Tensor) -> Moments:
        """Encode pixels [B, 3, F, H, W] in [-1, 1] to the unscaled moments of their latents."""
        with self._leaving():
            # The autoencoder runs in its own dtype, without autocast.
            dtype = _dtype(self.first_stage)
            if pixels.shape[2] > 1:
                self._before_clips(self.first_stage, pixels)
            # Smaller calls need less memory. They do not change how a clip is encoded.
            parts = pixels.split(self.model.en_and_decode_n_samples_a_time or len(pixels))
            moments = [self.first_stage.encode(part.to(dtype)) for part in parts]
            return join_moments(moments, torch.cat)

    def _sample(self, moments: Moments, rng: SlotRandom, purpose: str, scale: float) -> Tensor:
        """Sample latents * scale [B, C, T, h, w] in float32, with new noise for each slot and step."""
        noise = None if moments.logvar is None else rng.normal(purpose, moments.mean.shape)
        return self._broadcast_within_model(moments.sample(noise) * scale)

    @torch.no_grad()
    def encode_text(self, captions: Sequence[str]) -> Tensor:
        """Encode captions to embeddings [B, L, E]."""
        with self._leaving():
            return self._broadcast_within_model(self.text_encoder(captions))

    @torch.no_grad()
    def decode(self, latents: Tensor, num_frames: int) -> Tensor:
        """Decode scaled latents [B, C, T, h, w] to pixels [B, 3, num_frames, H, W] in about [-1, 1].

        The leading padding frames of CogVideoX 1.5 are dropped before decoding.
        """
        surplus = latents.shape[2] - num_latent_frames(num_frames)
        with self._leaving():
            latents = (latents[:, :, surplus:] / self.scale_factor).to(_dtype(self.first_stage))
            parts = latents.split(self.model.en_and_decode_n_samples_a_time or len(latents))
            return torch.cat([self.first_stage.decode(part).float() for part in parts])


def join_moments(parts: Sequence[Moments], join: Callable[[list[Tensor]], Tensor]) -> Moments:
    logvars = [moments.logvar for moments in parts if moments.logvar is not None]
    return Moments(join([moments.mean for moments in parts]), join(logvars) if logvars else None)


def _dtype(stage: FirstStage) -> torch.dtype:
    """Return the input dtype of a first stage: its parameters' dtype, or float32 if it has none."""
    return next((p.dtype for p in stage.parameters()), torch.float32)
