"""A data set that reads samples from a latent cache in place of their videos, in the same order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from cogfast.data.bad_samples import BadSample
from cogfast.data.cache.entries import NUMBERS, BadEntry, Entries
from cogfast.data.cache.keys import hash_text
from cogfast.data.datasets import CaptionedVideos

# {key of an item: tensor of an entry}; entries need not have all of them.
_STORED = {
    "latent_mean": "mean",
    "latent_logvar": "logvar",
    "images": "first_frame",
    "noised_image_mean": "noised_image_mean",
    "noised_image_logvar": "noised_image_logvar",
}


class CachedVideos(CaptionedVideos):
    """The samples of a data set of video files, as encoded by `cogfast cache`.

    An item is {"latent_mean" [C, T, h, w], "latent_logvar" (if the autoencoder has one), "images"
    uint8 [3, H, W] (the first frame, if cached) or instead "noised_image_mean" [N, C, 1, h, w] and
    "noised_image_logvar", "prompt_embedding" [L, E], "txt", "fps", "num_frames", "path",
    "num_padded"}.

    videos: the data set that this one replaces. entries: those of "video" and "text", the preferred
    ones first. keys: of the samples' clips; "" for samples that are not used.
    """

    def __init__(
        self,
        videos: CaptionedVideos,
        entries: Mapping[str, Sequence[Entries]],
        keys: Sequence[str],
    ) -> None:
        super().__init__(videos.clips, videos.settings, videos.source_sizes)
        self.entries, self.keys = entries, keys

    def __getitem__(self, index: int) -> dict:
        caption = self.captions[index]
        clip = self._entry("video", self.keys[index], index)
        text = self._entry("text", hash_text(caption), index)
        if "logvar" in clip:  # one number for a whole entry of args.trusted_cache
            clip["logvar"] = clip["logvar"].expand(clip["mean"].shape)
        return {
            **{name: clip[stored] for name, stored in _STORED.items() if stored in clip},
            "prompt_embedding": text["embedding"],
            "txt": caption,
            **{name: clip[name].item() for name in NUMBERS},
            "path": self.name(index),
        }

    def first_frame(self, index: int) -> Tensor:
        """Read a sample's conditioning image from its source files, uint8 [3, H, W]."""
        sample = super().__getitem__(index)
        return sample["images"] if self.has_images else sample["video"][0]

    def _entry(self, kind: str, key: str, index: int) -> dict[str, Tensor]:
        for entries in self.entries[kind]:
            try:
                return entries.read(key)
            except FileNotFoundError:
                continue
            except BadEntry as error:
                raise BadSample(self.name(index), str(error)) from None
        reason = f"its {kind} entry is gone from the latent cache; run `cogfast cache` again"
        raise BadSample(self.name(index), reason)
