"""Encodes samples to the entries of a latent cache, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from cogfast.core.slot_random import SlotRandom, random_bits
from cogfast.data.bad_samples import BadSample
from cogfast.data.batches import in_unit_range
from cogfast.data.datasets import Sample
from cogfast.model.autoencoder import Moments
from cogfast.train.encode import Encoder

_NO_VARIANCE = -1e4  # logarithm; its exponential is 0 in float32


def encode_samples(
    samples: Sequence[Sample | BadSample],
    keys: Sequence[str],
    encoder: Encoder,
    num_noised_images: int,
    device: torch.device,
    trusted: Mapping[str, Tensor],
) -> Iterator[tuple[dict, dict[str, Tensor]]]:
    """Yield (metadata, tensors) of each sample. Consecutive samples of one size share a batch.

    keys: content keys, which seed the noise of the noised images. num_noised_images: 0 stores the
    first frame as uint8 instead (image-to-video). trusted: {key: scaled latents} of samples that are
    not encoded.
    """
    # Buckets give clips of several sizes, which cannot be stacked; bad samples form groups, too.
    pairs = zip(samples, keys, strict=True)
    for _, group in groupby(pairs, key=lambda pair: (_size(pair[0]), pair[1] in trusted)):
        together, their_keys = zip(*group, strict=True)
        if isinstance(together[0], BadSample):
            yield from (({"bad": bad.reason}, {}) for bad in together)
            continue
        if their_keys[0] in trusted:
            latents = torch.stack([trusted[key] for key in their_keys])
            parts = _of_sample(latents, encoder.scale_factor)
        else:
            clips = torch.stack([sample["video"] for sample in together])
            pixels = in_unit_range(clips.to(device, non_blocking=True)).transpose(1, 2)
            if encoder.overrides.encode_video is not None:
                # It returns one sample, which every epoch uses.
                rng = content_random(their_keys, device)
                latents = encoder.encode_clips(pixels, rng).cpu()  # sync: into a file
                parts = _of_sample(latents, encoder.scale_factor)
            else:
                # Mean and variance, so that each epoch can draw another sample of the latents.
                parts = _tensors("", encoder.encode_moments(pixels))
        if encoder.image_input:
            images = torch.stack(
                [s["images"] if "images" in s else s["video"][0] for s in together]
            )
            if num_noised_images:
                moments = encoder.encode_noised(images.to(device), their_keys, num_noised_images)
                parts |= _tensors("noised_image_", moments)
            else:
                parts["first_frame"] = images.cpu()  # sync: into a file
        for i, sample in enumerate(together):
            # A copy: a view would keep the whole batch in memory until the shard is written.
            entry = {name: tensor[i].clone() for name, tensor in parts.items()}
            if all(tensor.isfinite().all() for tensor in entry.values()):
                yield {name: sample[name] for name in ("fps", "num_frames", "num_padded")}, entry
            else:
                yield {"bad": "its latents are not finite"}, {}


def content_random(keys: Sequence[str], device: torch.device) -> SlotRandom:
    """Return draws that depend on the keys of entries alone, and not on the run that writes them."""
    return SlotRandom(0, 0, [random_bits(key) for key in keys], 0, device)


def _tensors(prefix: str, moments: Moments) -> dict[str, Tensor]:
    tensors = {f"{prefix}mean": moments.mean.cpu()}  # sync: into a file
    if moments.logvar is not None:
        tensors[f"{prefix}logvar"] = moments.logvar.cpu()  # sync: into a file
    return tensors


def _of_sample(latents: Tensor, scale_factor: float) -> dict[str, Tensor]:
    """Return the moments of scaled latents [B, C, T, h, w], which every epoch uses as they are."""
    # In float32: a quotient that is rounded to bf16 would not give the latents again.
    mean = latents.float() / scale_factor
    # All samples of a batch need a variance. The reader expands this one, which is 0.
    return {"mean": mean, "logvar": mean.new_full((len(mean), 1, 1, 1, 1), _NO_VARIANCE)}


def _size(sample: Sample | BadSample) -> object:
    return None if isinstance(sample, BadSample) else sample["video"].shape
