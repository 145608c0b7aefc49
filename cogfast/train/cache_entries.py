"""What a latent cache keeps of samples: what they are encoded to, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from cogfast.data.bad_samples import BadSample
from cogfast.data.batches import to_device
from cogfast.data.datasets import Sample
from cogfast.train.encode import Encoder


def encode_samples(
    samples: Sequence[Sample | BadSample], encoder: Encoder, device: torch.device
) -> Iterator[tuple[dict, dict[str, Tensor]]]:
    """(what is said of it, its tensors) of each sample; those of one size are encoded together."""
    for _, group in groupby(samples, key=_size):
        together = list(group)
        if isinstance(together[0], BadSample):
            yield from (({"bad": bad.reason}, {}) for bad in together)
            continue
        clips = torch.stack([sample["video"] for sample in together])
        pixels = to_device({"mp4": clips}, device)["mp4"].transpose(1, 2)
        moments = encoder.encode_moments(pixels)
        parts = {"mean": moments.mean.cpu()}  # sync: into a file
        if moments.logvar is not None:
            parts["logvar"] = moments.logvar.cpu()  # sync: into a file
        for i, sample in enumerate(together):
            entry = {name: tensor[i].clone() for name, tensor in parts.items()}
            about = {name: sample[name] for name in ("fps", "num_frames", "num_padded")}
            if not all(tensor.isfinite().all() for tensor in entry.values()):
                yield {"bad": "its latents are not finite"}, {}
                continue
            if encoder.image_input:
                frame = sample["images"] if "images" in sample else sample["video"][0]
                entry["first_frame"] = frame.clone()
            yield about, entry


def _size(sample: Sample | BadSample) -> object:
    return None if isinstance(sample, BadSample) else sample["video"].shape
