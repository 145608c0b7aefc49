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
from cogfast.model.autoencoder import Moments
from cogfast.model.config import MEMBERS, Family, TransformerConfig

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
        # The models that have their clips in one folder: only 2B and 5B share one.
        self.members = [m for m in MEMBERS if m.diffusers_trainer_name == self._model]
        files = {name for of_data in videos for name in of_data.paths}
        self._num_videos = Counter(Path(name).stem for name in files)

    def path(self, videos: CaptionedVideos, index: int) -> Path | None:
        """Return where the latents of a clip are; None if no file is surely the clip's."""
        settings, name = videos.settings_of(index), videos.paths[index]
        # Their trainer reads whole files only, and names what it encodes by the stem alone.
        if videos.name(index) != name or self._num_videos[Path(name).stem] > 1:
            return None
        frames, (rows, columns) = settings.max_num_frames, settings.video_size
        folder = self.folder / "video_latent" / self._model / f"{frames}x{rows}x{columns}"
        path = folder / f"{Path(name).stem}.safetensors"
        return path if path.is_file() else None  # opening a pipe would block

    def latents(self, videos: CaptionedVideos, index: int, is_check: bool = False) -> Tensor | None:
        """Read the scaled latents [C, T, h, w] of a clip; None if no file is surely the clip's.

        is_check: neither count the file nor warn of it.
        """
        path, settings = self.path(videos, index), videos.settings_of(index)
        frames, (rows, columns) = settings.max_num_frames, settings.video_size
        sides = rows // SPATIAL_COMPRESSION, columns // SPATIAL_COMPRESSION
        shape = (self._network.out_channels, num_latent_frames(frames), *sides)
        return None if path is None else self._read(path, "encoded_video", shape, is_check)

    def check_scale(self, path: Path, stored: Tensor, own: Moments, scale_factor: float) -> None:
        """Raise ValueError if latents have the scale of the other model of their folder.

        stored: scaled ones of a file. own: unscaled, of the same clip from the run's VAE.
        """
        # The file has a sample of a distribution, whose mean square is that of mean and variance.
        power = own.mean.float().square().mean()
        if own.logvar is not None:
            power += own.logvar.float().exp().mean()
        ratio = stored.float().square().mean() / power.cpu()  # sync: for two clips, before encoding
        found = ratio.sqrt().item()  # sync: none, on the CPU
        scales = [scale_factor, *(member.scale_factor for member in self.members)]
        if min(scales, key=lambda scale: abs(found - scale)) != scale_factor:
            known = " and ".join(f"{m.name} ({m.scale_factor:.3g})" for m in self.members)
            raise ValueError(
                f"args.trusted_cache: {path} has latents of scale {found:.3g}, this run has "
                f"{scale_factor:.3g}: {known} have their clips in one folder; remove the files of the "
                "other model, or set the key to null to encode all clips"
            )

    def embedding(self, caption: str) -> Tensor | None:
        """Read the embedding [L, E] of a caption; None if there is none."""
        name = hashlib.sha256(caption.encode("utf-8", "surrogatepass")).hexdigest()
        path = self.folder / "prompt_embeddings" / f"{name}.safetensors"
        shape = self._network.text_length, self._network.text_hidden_size
        return self._read(path, "prompt_embedding", shape)

    def _read(
        self, path: Path, name: str, shape: tuple[int, ...], is_check: bool = False
    ) -> Tensor | None:
        """Read a tensor; None if there is no file and, with a warning, if this run cannot use it."""
        from safetensors import SafetensorError, safe_open

        if not path.is_file():
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
            if not is_check:
                logger.warning(text, path, str(error).splitlines()[0][:200])
            return None
        self.num_used += not is_check
        return tensor
