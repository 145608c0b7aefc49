"""Encodes a batch to the inputs of the transformer: latents, text embeddings, conditions.

The frozen first stage (video autoencoder) and text encoder are built on first use, so batches that
already hold latents and embeddings never load them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cogfast.core.device_memory import HostWeights
from cogfast.core.shapes import PatchSize, num_latent_frames, num_pixel_frames, pad_latent_frames
from cogfast.core.slot_random import SlotRandom, random_bits
from cogfast.data.batches import in_unit_range
from cogfast.diffusion.denoiser import Conditioning
from cogfast.diffusion.noise_schedule import add_first_frame_noise
from cogfast.extensions.conditions.given_frames import GivenFrames, place_frames
from cogfast.extensions.conditions.inpainting import (
    SAMPLING_STRENGTH,
    drop_wholly_masked,
    mask_channel,
    masked_pixels,
    noised_masked_pixels,
    random_masks,
)
from cogfast.model.autoencoder import FirstStage, Moments
from cogfast.model.keys import ModelKeys, scale_of
from cogfast.model.text_encoder import TextEncoder
from cogfast.train.frozen_encoders import NO_OVERRIDES, EncodeOverrides

_unchanged = lambda tensor: tensor
_no_choice = lambda stage, clips: None  # how the first stage encodes stays as it is


class Encoder:
    """Encodes the batches of one transformer with its frozen encoders, which are built on first use.

    build_first_stage, build_text_encoder: build the frozen modules on the device. model: with latent_input,
    the batch's "mp4" holds unscaled latents [B, T, C, h, w]. Its conditions: image: the first frame is
    encoded to image latents, followed by zeros or, with noised_image_all_concat, repeated, and of a picture
    all are zeros; control: a video is encoded as the clip; frames: given_frames of the clip are encoded to
    their places, and of a picture all are zeros; mask and masked_video: a mask, drawn if the batch has none,
    and the clip without what it covers, to which masked_video_noise adds noise. patch: latent frames are
    padded to whole patches. text_dropout: fraction of samples whose text embeddings are replaced by zeros;
    those of conditions are the model's. tensors: names of data.params.tensors, which the network gets as the
    batch has them.
    before_clips: called before clips [B, 3, F, H, W] are encoded, and before single frames only if they are
    samples; chooses how the first stage encodes clips. broadcast_within_model: makes the encoders' outputs
    bitwise equal on all ranks of a tensor-parallel group. overrides: used for clips and captions of training
    data, and not for first frames and prompts that are sampled. device: where the modules' weights are while
    a method here uses them, and on a GPU may leave; None: they stay. is_brief: they leave after each use.
    """

    def __init__(
        self,
        build_first_stage: Callable[[], FirstStage | None],
        build_text_encoder: Callable[[], TextEncoder | None],
        model: ModelKeys,
        patch: PatchSize,
        *,
        text_dropout: float = 0.0,
        tensors: Sequence[str] = (),
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
        self.patch, self.conditions, self.tensors = patch, model.inputs, tensors
        self.image_scale = scale_of(model.image_latent_scale, model.scale_factor)
        self.given_frames = GivenFrames.parse(model.given_frames)
        self.dropouts: dict[str, float] = dict.fromkeys(model.inputs, model.condition_dropout)
        self.dropouts |= {"image": model.noised_image_dropout, "text": text_dropout}
        self._before_clips = before_clips
        self._broadcast_within_model = broadcast_within_model
        self.overrides = overrides
        self._device, self._is_brief = device, is_brief
        self._weights: dict[Any, HostWeights] = {}  # by module

    @property
    def image_input(self) -> bool:
        return "image" in self.conditions

    @property
    def encodes_clips(self) -> bool:
        """Whether conditions are encoded from clips when a video is sampled."""
        has_prefix = self.given_frames is not None and self.given_frames.is_clip
        return has_prefix or bool({"control", "masked_video"} & set(self.conditions))

    def build(self, batch: dict) -> None:
        """Build the encoders that `batch` needs, without collectives."""
        with self._leaving():
            if "prompt_embedding" not in batch and self.overrides.encode_text is None:
                _ = self.text_encoder
            if self._has_pixels(batch):
                _ = self.first_stage

    def choose(self, batch: dict) -> None:
        """Choose how the first stage encodes clips, if `batch` has pixels, after `build`. Collective."""
        if self._has_pixels(batch):
            self.choose_for(batch["mp4"].transpose(1, 2))

    def _has_pixels(self, batch: dict) -> bool:
        return not (self.model.latent_input or {"encoded_videos", "latent_mean"} & batch.keys())

    @torch.no_grad()
    def __call__(
        self, batch: dict, rng: SlotRandom, has_dropout: bool = True
    ) -> tuple[Tensor, Conditioning]:
        """Encode a batch on the device to latents [B, C, T, h, w] in float32 and conditioning.

        has_dropout: drop captions and images at their rates, as in training.
        """
        # The first clips choose how they are encoded by the memory that the text encoder leaves free.
        text = self._text(batch, rng)
        pixels, latents = self._latents(batch, rng)
        # CogVideoX 1.5 joins two latent frames in a token, but clips have an odd number.
        latents = pad_latent_frames(latents, self.patch)
        # They return scaled latents [B, C', T, h, w], without padding.
        encode = {
            "control": self._control_latents,
            "frames": self._given_latents,
            "masked_video": self._masked_video,
        }
        found = []
        for name in self.conditions:
            if name == "mask":
                continue  # its channel comes with masked_video
            if name in ("image", "frames") and self.num_frames(batch) == 1:
                # A picture is its own first frame, which would teach the model to copy it.
                values = torch.zeros_like(latents)
            elif name == "image":
                values = self._image_latents(batch, pixels, latents, rng)
            else:
                values = pad_latent_frames(encode[name](batch, pixels, rng), self.patch)
            if has_dropout and self.dropouts[name] > 0:
                values = _dropped(values, rng.uniform(f"{name}_dropout") < self.dropouts[name])
            found.append(values)
        if has_dropout and self.dropouts["text"] > 0:
            # Drawn by the slot in the global batch: the same on every parallel layout.
            text = _dropped(text, rng.uniform("text_dropout") < self.dropouts["text"])
        tensors = {name: batch[name] for name in self.tensors}
        return latents, Conditioning(text, join_conditions(found), tensors=tensors)

    @torch.no_grad()
    def encode_batch(self, batch: dict, rng: SlotRandom) -> dict:
        """Return a batch on the device with encodings in place of pixels, captions and moments.

        They are those that a call draws from `rng`: "encoded_videos" [B, C, T, h, w], scaled, in
        float32, "prompt_embedding" [B, L, E], for image-to-video "images" [B, 3, H, W] in [-1, 1], where
        the batch has images, of a control "control_latents", as encoded_videos, "given_frames" [B, P, 3,
        H, W] in [-1, 1], and "masked_video_latents" with the channel of the mask.
        """
        text = self._text(batch, rng)
        pixels, latents = self._latents(batch, rng)
        encoded = {"encoded_videos": latents, "prompt_embedding": text}
        if self.image_input and "images" in batch:
            encoded["images"] = in_unit_range(batch["images"])
        elif self.image_input and pixels is not None:
            encoded["images"] = pixels[:, :, 0]
        if "control" in self.conditions:
            encoded["control_latents"] = self._control_latents(batch, pixels, rng)
        if self.given_frames is not None:
            encoded["given_frames"] = self._given_pixels(batch, pixels)
        if "masked_video" in self.conditions:
            encoded["masked_video_latents"] = self._masked_video(batch, pixels, rng)
        kinds = ("latent_mean", "latent_logvar", "control_mean", "control_logvar")
        replaced = ("mp4", "control", *kinds)
        return {key: value for key, value in batch.items() if key not in replaced} | encoded

    def num_frames(self, batch: dict) -> int:
        """Return the number of pixel frames of the batch's clips, even if it holds latents."""
        for key in ("encoded_videos", "latent_mean"):
            if key in batch:
                return num_pixel_frames(batch[key].shape[2])
        frames = batch["mp4"].shape[1]
        return num_pixel_frames(frames) if self.model.latent_input else frames

    def _latents(self, batch: dict, rng: SlotRandom) -> tuple[Tensor | None, Tensor]:
        if "encoded_videos" in batch:
            return None, batch["encoded_videos"].float()  # [B, C, T, h, w], scaled
        if "latent_mean" in batch:  # [B, C, T, h, w], not scaled
            moments = Moments(batch["latent_mean"], batch.get("latent_logvar"))
            return None, self._sample(moments, rng, "first_stage", self.scale_factor)
        # [B, 3, F, H, W]: the only permute from file to network
        pixels = batch["mp4"].transpose(1, 2)
        if self.model.latent_input:
            return None, pixels.float() * self.scale_factor
        return pixels, self.encode_clips(pixels, rng)

    def encode_image(self, frame: Tensor, rng: SlotRandom) -> Tensor:
        """Encode first frames [B, 3, 1, H, W] in [-1, 1] to image latents [B, C, 1, h, w]."""
        return self._sample(self.encode_moments(frame), rng, "image_first_stage", self.image_scale)

    def scale_image(self, latents: Tensor) -> Tensor:
        """Return image latents for latents of the data, which have scale_factor."""
        factor, latents = self.image_scale / self.scale_factor, latents.float()
        return latents if factor == 1 else latents * factor

    @torch.no_grad()
    def encode_noised(self, images: Tensor, keys: Sequence[str], number: int) -> Moments:
        """Encode `number` noised variants of each image to unscaled moments [B, N, C, 1, h, w].

        images: [B, 3, H, W], uint8 or in [-1, 1]. The noise of a variant depends only on the key of
        the image and the index of the variant.
        """
        frames, variants = in_unit_range(images)[:, :, None], []  # [B, 3, 1, H, W]
        for number_of_variant in range(number):
            slots = [random_bits(key, number_of_variant) for key in keys]
            # Seed and step are 0: a cache entry must not depend on the run that writes it.
            rng = SlotRandom(0, 0, slots, 0, frames.device)
            variants.append(self.encode_moments(add_first_frame_noise(frames, rng)))
        return join_moments(variants, partial(torch.stack, dim=1))

    def _text(self, batch: dict, rng: SlotRandom) -> Tensor:
        """Return the batch's text embeddings [B, L, E], encoding its captions if it holds none."""
        text = batch.get("prompt_embedding")
        return self.encode_captions(batch["txt"], rng) if text is None else text

    def _image_latents(
        self, batch: dict, pixels: Tensor | None, latents: Tensor, rng: SlotRandom
    ) -> Tensor:
        """Return the latents of the noised first frame, padded to all frames: [B, C, T, h, w]."""
        if "image_latents" in batch:
            image = self.scale_image(batch["image_latents"])  # [B, C, 1, h, w]
        elif "noised_image_mean" in batch:
            moments = _one_variant(batch, rng)
            image = self._sample(moments, rng, "image_first_stage", self.image_scale)
        else:
            if "images" in batch:
                frame = in_unit_range(batch["images"])[:, :, None]  # [B, 3, 1, H, W] in [-1, 1]
            elif pixels is not None:
                frame = pixels[:, :, :1]
            else:
                text = "model.noised_image_input=true, but the batch has neither pixels nor "
                text += "images nor image_latents; use a data set that returns one of them with encoded_videos"
                raise ValueError(text)
            # Upstream noises the pixels of the image, not its latents.
            image = self.encode_image(add_first_frame_noise(frame.float(), rng), rng)
        return self.pad_to_frames(image, latents.shape[2])

    def _control_latents(self, batch: dict, pixels: Tensor | None, rng: SlotRandom) -> Tensor:
        """Return the scaled latents of the control video [B, C, T, h, w], without padding."""
        if "control_latents" in batch:
            return batch["control_latents"].float()
        purpose = "control_first_stage"
        if "control_mean" in batch:  # [B, C, T, h, w], not scaled
            moments = Moments(batch["control_mean"], batch.get("control_logvar"))
            return self._sample(moments, rng, purpose, self.scale_factor)
        if "control" not in batch:
            text = "model.conditions has control, but the batch has neither control nor control_latents; use a "
            raise ValueError(f"{text}data set that returns one of them")
        return self.encode_video(batch["control"].transpose(1, 2), rng, purpose)

    def _given_pixels(self, batch: dict, pixels: Tensor | None) -> Tensor:
        """Return the given frames of the batch's clips [B, P, 3, H, W] in [-1, 1]."""
        assert self.given_frames is not None, "the model has the condition frames"
        if "given_frames" in batch:
            return in_unit_range(batch["given_frames"])
        if pixels is None:
            text = "model.conditions has frames, but the batch has neither pixels nor given_frames; use a "
            raise ValueError(text + "data set that returns one of them")
        # An index by a list would wait for its copy to the device.
        frames = self.given_frames.pixel_frames(pixels.shape[2])
        return torch.stack([pixels[:, :, i] for i in frames], dim=1)

    def _given_latents(self, batch: dict, pixels: Tensor | None, rng: SlotRandom) -> Tensor:
        """Return the latents of the noised given frames in their places."""
        assert self.given_frames is not None, "the model has the condition frames"
        frames = self._given_pixels(batch, pixels).transpose(1, 2).float()
        num_frames = self.num_frames(batch)
        places = self.given_frames.places(num_frames)
        drawn = self.given_frames.drawn(len(places), rng)
        noised = add_first_frame_noise(frames, rng)
        return self.encode_given(noised, places, num_frames, rng, is_given=drawn)

    @torch.no_grad()
    def encode_given(
        self,
        frames: Tensor,
        places: Sequence[int],
        num_frames: int,
        rng: SlotRandom,
        *,
        is_given: Tensor | None = None,
    ) -> Tensor:
        """Encode given frames [B, 3, P, H, W] in [-1, 1] to latents [B, C, T, h, w], zeros elsewhere.

        places: the latent frames of their latents, of a clip of num_frames pixel frames. is_given: bool
        [B, P] on the CPU, the frames that each sample has; None: all.
        """
        assert self.given_frames is not None, "the model has the condition frames"
        # Pictures one after the other, which takes the memory of one.
        parts = [frames] if self.given_frames.is_clip else frames.split(1, dim=2)
        moments = join_moments([*map(self.encode_moments, parts)], partial(torch.cat, dim=2))
        latents = self._sample(moments, rng, "image_first_stage", self.image_scale)
        if is_given is not None:
            is_given = is_given.to(latents.device, non_blocking=True)
            latents = latents.masked_fill(~is_given[:, None, :, None, None], 0)
        return place_frames(latents, places, num_latent_frames(num_frames))

    def _masked_video(self, batch: dict, pixels: Tensor | None, rng: SlotRandom) -> Tensor:
        """Return the channels of the mask and of the masked video [B, 1 + C, T, h, w]."""
        if "masked_video_latents" in batch:
            return batch["masked_video_latents"].float()
        if pixels is None:
            text = "model.conditions has masked_video, but the batch has latents; use a data set"
            raise ValueError(f"{text} that returns pixels, without a latent cache")
        if "mask" in batch:
            masks = batch["mask"].transpose(1, 2)
        else:
            masks = random_masks(*pixels.shape[2:], rng=rng)
        masked = masked_pixels(pixels, masks)
        if self.model.masked_video_noise:
            masked = noised_masked_pixels(masked, rng)
        latents = self.encode_video(masked, rng, "masked_video_first_stage")
        return drop_wholly_masked(self._with_mask(masks, latents), masks, rng)

    def _with_mask(self, masks: Tensor, latents: Tensor) -> Tensor:
        # VideoX-Fun scales the mask's channel as the latents.
        mask = mask_channel(masks, *latents.shape[2:]) * self.scale_factor
        return torch.cat([mask, latents], dim=1)

    @torch.no_grad()
    def encode_masked(self, pixels: Tensor, masks: Tensor, rng: SlotRandom) -> Tensor:
        """Encode clips [B, 3, F, H, W] in [-1, 1] and masks [B, 1, F, H, W] for sampling, as VideoX-Fun's
        pipeline: [B, 1 + C, T, h, w], padded to whole patches."""
        masked = masked_pixels(pixels, masks)
        if self.model.masked_video_noise:
            masked = noised_masked_pixels(masked, rng, SAMPLING_STRENGTH)
        latents = self.encode_moments(masked).mean.float() * self.scale_factor
        latents = self._with_mask(masks, self._broadcast_within_model(latents))
        return pad_latent_frames(latents, self.patch)

    @torch.no_grad()
    def encode_control(self, pixels: Tensor) -> Tensor:
        """Encode control videos [B, 3, F, H, W] in [-1, 1] for sampling: the scaled means of their
        latents [B, C, T, h, w], padded to whole patches."""
        latents = self.encode_moments(pixels).mean.float() * self.scale_factor
        return pad_latent_frames(self._broadcast_within_model(latents), self.patch)

    def pad_to_frames(self, image: Tensor, num_frames: int) -> Tensor:
        """Extend image latents [B, C, 1, h, w] to `num_frames` latent frames [B, C, T, h, w]."""
        if self.model.noised_image_all_concat:
            return image.expand(-1, -1, num_frames, -1, -1)
        return torch.nn.functional.pad(image, (0, 0, 0, 0, 0, num_frames - 1))

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


def join_conditions(found: Sequence[Tensor]) -> Tensor | None:
    """Join the channels of conditions [B, C, T, h, w]; None if there are none."""
    if len(found) < 2:
        return found[0] if found else None
    return torch.cat([each.float() for each in found], dim=1)


def _one_variant(batch: dict, rng: SlotRandom) -> Moments:
    """Draw one of the N noised images of each sample by its slot: [B, C, 1, h, w]."""
    means, logvars = batch["noised_image_mean"], batch.get("noised_image_logvar")
    drawn = (rng.uniform("noised_image") * means.shape[1]).long()
    numbers = drawn.tolist()  # sync: none, drawn on the CPU

    def of_drawn(variants: Tensor) -> Tensor:  # [B, N, C, 1, h, w]
        return torch.stack([of_one[i] for of_one, i in zip(variants, numbers, strict=True)])

    return Moments(of_drawn(means), None if logvars is None else of_drawn(logvars))


def _dropped(values: Tensor, is_dropped: Tensor) -> Tensor:
    """Replace the samples of `values` [B, ...] that is_dropped [B] marks by zeros."""
    is_dropped = is_dropped.to(values.device, non_blocking=True)
    # Zeros, as in SAT, and not the embedding of an empty caption.
    return values.masked_fill(is_dropped.view(-1, *[1] * (values.ndim - 1)), 0)
