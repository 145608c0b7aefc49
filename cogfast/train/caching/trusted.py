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
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
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

_MOST_LINES = 20  # warnings of files that this run cannot use


@dataclass(frozen=True, slots=True)
class TrustedFile:
    path: Path
    name: str  # of its tensor
    shape: tuple[int, ...]  # that this run needs


class TrustedCache:
    """Their folder, as a run of this model and precision reads it."""

    def __init__(
        self, folder: str, config: Config, dtype: torch.dtype, videos: Iterable[CaptionedVideos]
    ) -> None:
        self.folder, self.dtype, self._num_refused = Path(folder), dtype, 0
        network = TransformerConfig(**transformer_arguments(config.model.network_config.params))
        self.channels = network.out_channels
        self.text_shape = (network.text_length, network.text_hidden_size)
        self.model_name = Family.of_config(network).member.diffusers_trainer_name
        # The models that have their clips in one folder: only 2B and 5B share one.
        self.members = [m for m in MEMBERS if m.diffusers_trainer_name == self.model_name]
        self.shared: set[str] = set()  # clips whose file may be another video's
        self._videos = defaultdict(set)  # by stem
        for name in (name for of_data in videos for name in of_data.paths):
            self._videos[Path(name).stem].add(name)

    def clip(self, videos: CaptionedVideos, index: int) -> TrustedFile | None:
        """Return the file of a clip; None if there is none, or if it may be another video's."""
        settings, places, name = videos.settings_of(index), videos.clips.places, videos.paths[index]
        is_member = places is not None and places[index, 0] >= 0
        # Their trainer reads whole files only.
        if is_member or videos.name(index) != name:
            return None
        frames, (rows, columns) = settings.max_num_frames, settings.video_size
        folder = self.folder / "video_latent" / self.model_name / f"{frames}x{rows}x{columns}"
        path = folder / f"{Path(name).stem}.safetensors"
        if not path.is_file():  # opening a pipe would block
            return None
        if len(self._videos[path.stem]) > 1:
            self.shared.add(name)
            return None
        sides = rows // SPATIAL_COMPRESSION, columns // SPATIAL_COMPRESSION
        shape = (self.channels, num_latent_frames(frames), *sides)
        return TrustedFile(path, "encoded_video", shape)

    def caption(self, caption: str) -> TrustedFile | None:
        """Return the file of a caption; None if there is none."""
        name = hashlib.sha256(caption.encode("utf-8", "surrogatepass")).hexdigest()
        path = self.folder / "prompt_embeddings" / f"{name}.safetensors"
        return TrustedFile(path, "prompt_embedding", self.text_shape) if path.is_file() else None

    def read(self, file: TrustedFile) -> Tensor | None:
        """Read a file; None, with a warning, if this run cannot use it."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file.path, framework="pt") as opened:
                tensor = opened.get_tensor(file.name)
            if (tuple(tensor.shape), tensor.dtype) != (file.shape, self.dtype):
                found, needed = (list(tensor.shape), tensor.dtype), (list(file.shape), self.dtype)
                raise ValueError("{} is {} {}, not {} {}".format(file.name, *found, *needed))
            if not tensor.isfinite().all():
                raise ValueError(f"{file.name} is not finite")
        except (OSError, SafetensorError, ValueError) as error:
            self._num_refused += 1
            if self._num_refused <= _MOST_LINES:
                text = "args.trusted_cache: %s: %s; it is encoded instead"
                logger.warning(text, file.path, str(error).splitlines()[0][:200])
            return None
        return tensor

    def check_scale(self, file: TrustedFile, own: Moments, scale_factor: float) -> None:
        """Raise ValueError if a file's latents have the scale of the other model of its folder.

        own: unscaled, of the same clip from the run's VAE.
        """
        stored = self.read(file)
        if stored is None:
            return
        # The file has a sample of a distribution, whose mean square is that of mean and variance.
        power = own.mean.float().square().mean()
        if own.logvar is not None:
            power += own.logvar.float().exp().mean()
        # sync: for two clips, before any is encoded
        found = (stored.float().square().mean() / power.cpu()).sqrt().item()
        scales = [scale_factor, *(member.scale_factor for member in self.members)]
        if min(scales, key=lambda scale: abs(found - scale)) != scale_factor:
            known = " and ".join(f"{m.name} ({m.scale_factor:.3g})" for m in self.members)
            raise ValueError(
                f"args.trusted_cache: {file.path} has latents of scale {found:.3g}, this run has "
                f"{scale_factor:.3g}: {known} have their clips in one folder; remove the files of the "
                "other model, or set the key to null to encode all clips"
            )
