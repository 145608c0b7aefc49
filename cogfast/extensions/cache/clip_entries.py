"""Encodes clips to the tensors of their entries in a latent cache, on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from cogfast.core.slot_random import SlotRandom, random_bits
from cogfast.data.bad_samples import BadSample
from cogfast.data.batches import in_unit_range
from cogfast.data.datasets import Sample
from cogfast.extensions.cache.entries import NUMBERS
from cogfast.model.autoencoder import Moments
from cogfast.train.encode import Encoder

_NO_VARIANCE = -1e4  # logarithm; its exponential is 0 in float32


def encode_clips(
    rows: Iterable[tuple[Sample, str, bool]],
    encoder: Encoder,
    num_noised_images: int,
    device: torch.device,
) -> Iterator[dict[str, Tensor] | BadSample]:
    """Yield the entry of each sample. Consecutive samples of one size are encoded together.

    rows: samples, their keys, which seed the noise of noised images, and whether they are clips of which the model is
    given frames. num_noised_images: 0 keeps the first frame of image-to-video as uint8.
    """
    # Buckets give clips of several sizes, which cannot be stacked.
    of_group = lambda row: (row[0]["video"].shape, row[2])
    for (shape, has_frames), group in groupby(rows, key=of_group):
        together, own_keys, _ = zip(*group, strict=True)
        parts = _moments(together, own_keys, encoder, device)
        if has_frames and encoder.given_frames is not None:
            frames = encoder.given_frames.pixel_frames(shape[0])
            parts["given_frames"] = torch.stack(
                [s["video"][frames] for s in together]
            ).cpu()  # sync: into a file
        if has_frames and encoder.image_input:
            each = [s["images"] if "images" in s else s["video"][0] for s in together]
            images = torch.stack(each)
            if num_noised_images:
                moments = encoder.encode_noised(images.to(device), own_keys, num_noised_images)
                parts |= _tensors("noised_image_", moments)
            else:
                parts["first_frame"] = images.cpu()  # sync: into a file
        for i, sample in enumerate(together):
            entry = {name: tensor[i].contiguous() for name, tensor in parts.items()}
            if all(tensor.isfinite().all() for tensor in entry.values()):
                yield entry | {name: _number(sample[name]) for name in NUMBERS}
            else:
                yield BadSample(sample["path"], "its latents are not finite")


def _moments(
    samples: Sequence[Sample], keys: Sequence[str], encoder: Encoder, device: torch.device
) -> dict[str, Tensor]:
    clips = torch.stack([sample["video"] for sample in samples])
    pixels = in_unit_range(clips.to(device, non_blocking=True)).transpose(1, 2)
    if encoder.overrides.encode_video is not None:
        # It returns one sample, scaled latents [B, C, T, h, w], which every epoch uses as they are.
        own = encoder.encode_clips(pixels, content_random(keys, device)).cpu()  # sync: into a file
        # In float32: a quotient that is rounded to bf16 would not give the latents again.
        mean = own.float() / encoder.scale_factor
        # All samples of a batch need a variance. The reader expands this one, which is 0.
        return {"mean": mean, "logvar": mean.new_full((len(mean), 1, 1, 1, 1), _NO_VARIANCE)}
    # Mean and variance, so that each epoch can draw another sample of the latents.
    return _tensors("", encoder.encode_moments(pixels))


def content_random(keys: Sequence[str], device: torch.device) -> SlotRandom:
    """Return draws that depend on the keys of entries alone, and not on the run that writes them."""
    return SlotRandom(0, 0, [random_bits(key) for key in keys], 0, device)


def _number(value: float) -> Tensor:
    # torch would make a float32 of a float, and a batch of Python numbers has float64.
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


def _tensors(prefix: str, moments: Moments) -> dict[str, Tensor]:
    tensors = {f"{prefix}mean": moments.mean.cpu()}  # sync: into a file
    if moments.logvar is not None:
        tensors[f"{prefix}logvar"] = moments.logvar.cpu()  # sync: into a file
    return tensors
