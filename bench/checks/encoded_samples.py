"""A data set of latents and prompt embeddings drawn from seeds, to train without video files."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset


class EncodedSamples(Dataset):
    """Latents of about unit variance: a pattern shared by all samples plus a small random part.

    data_dir: ignored; the trainer passes it to every data set. latent_shape: [C, T, h, w].
    text_shape: [L, E]. has_images: image-to-video; the image's latents are the first of the video's.
    others: names of further parts: control_latents, and mask, which is white.
    Draws happen on the CPU, so that every device sees the same numbers.
    """

    def __init__(
        self,
        data_dir: Sequence[str],
        num_samples: int,
        latent_shape: Sequence[int],
        text_shape: Sequence[int],
        has_images: bool = False,
        others: Sequence[str] = (),
    ) -> None:
        self.has_images, self.others = has_images, others
        self.num_samples = num_samples
        self.latent_shape, self.text_shape = tuple(latent_shape), tuple(text_shape)
        # One number per channel: learned within few steps
        self._shared = _draw(0, (self.latent_shape[0], 1, 1, 1))

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        # Seed 0 is the shared pattern, odd seeds are latents, even seeds are prompts.
        own = _draw(2 * index + 1, self.latent_shape)
        sample = {
            "encoded_video": self._shared + 0.3 * own,
            "prompt_embedding": _draw(2 * index + 2, self.text_shape),
        }
        image = {"image_latents": sample["encoded_video"][:, :1]} if self.has_images else {}
        _, frames, height, width = self.latent_shape
        further = {
            "control_latents": own,
            "mask": torch.ones(4 * frames - 3, 1, 8 * height, 8 * width, dtype=torch.uint8),
        }
        return sample | image | {name: further[name] for name in self.others}


def _draw(seed: int, shape: Sequence[int]) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
