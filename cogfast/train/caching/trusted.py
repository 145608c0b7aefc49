"""Reads what CogVideo's diffusers trainer has encoded (args.trusted_cache): a file of theirs is an entry.

video_latent/<model>/<frames>x<rows>x<columns>/<stem of the video>.safetensors
                                "encoded_video" [C, T, h, w], one scaled sample of the latents
prompt_embeddings/<sha256 of the caption>.safetensors
                                "prompt_embedding" [L, E]

No file says which video, weights or settings it was made with, so users have to ask for it.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from cogfast.config import Config
from cogfast.config.sat_network import transformer_arguments
from cogfast.core.shapes import SPATIAL_COMPRESSION, num_latent_frames
from cogfast.data.datasets import CaptionedVideos
from cogfast.model.config import Family, TransformerConfig

logger = logging.getLogger(__name__)


class TrustedCache:
    """Their folder, as a run of this model and precision reads it. num_used: files read so far."""

    def __init__(
        self, folder: str, config: Config, dtype: torch.dtype, videos: Iterable[CaptionedVideos]
    ) -> None:
        self.folder, self.dtype, self.num_used = Path(folder), dtype, 0
        self._network = TransformerConfig(
            **transformer_arguments(config.model.network_config.params)
        )
        self._model = Family.of_config(self._network).member.diffusers_trainer_name
        files = {name for of_data in videos for name in of_data.paths}
        self._num_videos = Counter(Path(name).stem for name in files)

    def latents(self, videos: CaptionedVideos, index: int) -> Tensor | None:
        """Read the scaled latents [C, T, h, w] of a clip; None if no file is surely the clip's."""
        settings, name = videos.settings_of(index), videos.paths[index]
        # Their trainer reads whole files only, and names what it encodes by the stem alone.
        if videos.name(index) != name or self._num_videos[Path(name).stem] > 1:
            return None
        frames, (rows, columns) = settings.max_num_frames, settings.video_size
        folder = self.folder / "video_latent" / self._model / f"{frames}x{rows}x{columns}"
        sides = rows // SPATIAL_COMPRESSION, columns // SPATIAL_COMPRESSION
        shape = (self._network.out_channels, num_latent_frames(frames), *sides)
        return self._read(folder / f"{Path(name).stem}.safetensors", "encoded_video", shape)

    def embedding(self, caption: str) -> Tensor | None:
        """Read the embedding [L, E] of a caption; None if there is none."""
        name = hashlib.sha256(caption.encode("utf-8", "surrogatepass")).hexdigest()
        path = self.folder / "prompt_embeddings" / f"{name}.safetensors"
        shape = self._network.text_length, self._network.text_hidden_size
        return self._read(path, "prompt_embedding", shape)

    def _read(self, path: Path, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Read a tensor; None if there is no file and, with a warning, if this run cannot use it."""
        from safetensors import SafetensorError, safe_open

        if not path.is_file():  # opening a pipe would block
            return None
        try:
            with safe_open(path, framework="pt") as file:
                tensor = file.get_tensor(name)
            if (tuple(tensor.shape), tensor.dtype) != (shape, self.dtype):
                found = f"{list(tensor.shape)} {tensor.dtype}"
                raise ValueError(f"{name} is {found}, not {list(shape)} {self.dtype}")
            if not tensor.isfinite().all():
                raise ValueError(f"{name} is not finite")
        except (OSError, SafetensorError, ValueError) as error:
            text = "args.trusted_cache: %s: %s; it is encoded instead"
            logger.warning(text, path, str(error).splitlines()[0][:200])
            return None
        self.num_used += 1
        return tensor
