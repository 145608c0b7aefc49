"""Keys of the latent cache."""

from __future__ import annotations

from typing import Annotated

from cogfast.core.keys import After, Keys, Range


class CacheKeys(Keys):
    """The cache of latents."""

    latent_cache: Annotated[str | None, After("split")] = None
    """cache that `cogfast cache` filled, a folder or a URL such as s3://bucket/cache; training reads it
    instead of the videos"""
    encode_first: bool = False
    """fill latent_cache as `cogfast cache` does before training; then the encoders leave the memory"""
    cached_noised_images: Annotated[int, Range(0, 1024)] = 0
    """image-to-video: number of noised first frames cached per clip; each step draws one. 0: cache
    the frame itself; each step noises and encodes it"""
