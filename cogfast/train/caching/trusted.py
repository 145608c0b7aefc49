"""Finds the clips and captions that CogVideo's diffusers trainer has encoded (args.trusted_cache).

video_latent/<model>/<frames>x<rows>x<columns>/<stem of the video>.safetensors
                                "encoded_video" [C, T, h, w], one scaled sample of the latents
prompt_embeddings/<sha256 of the caption>.safetensors
                                "prompt_embedding" [L, E]

No file says which video, weights or settings it was made with, so users have to ask for it. 2B and 5B
have one folder and different scales: check_scale tells their files apart.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cogfast.config import Config
from cogfast.core.shapes import SPATIAL_COMPRESSION, num_latent_frames
from cogfast.data.cache.shards import CacheIndex, Spec, trusted_key
from cogfast.data.datasets import CaptionedVideos
from cogfast.model.autoencoder import Moments
from cogfast.model.config import MEMBERS, Family, TransformerConfig
from cogfast.schema.arguments import TrainArguments
from cogfast.schema.json_files import brief
from cogfast.schema.sat_network import transformer_arguments
from cogfast.schema.values import counted
from cogfast.train.distributed.process_groups import ProcessGroups

logger = logging.getLogger(__name__)

_LINES = 20  # warnings of one kind, after which only their number is logged
# Largest quotient of two scales that count as equal. Those of 2B and 5B differ by a factor of 1.65.
_SAME_SCALE = 1.25


@dataclass(frozen=True, slots=True)
class TrustedFile:
    """A file of the trusted cache, with the name, shape and dtype that its tensor must have."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> Tensor:
        """Read the tensor; ValueError with the reason if this run cannot use it."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, framework="pt") as file:
                tensor = file.get_tensor(self.name)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"cannot be read ({brief(str(error))})") from None
        if tuple(tensor.shape) != self.shape:
            raise ValueError(
                f"{self.name} has shape {list(tensor.shape)}, this run needs {list(self.shape)}"
            )
        if tensor.dtype != self.dtype:
            raise ValueError(f"{self.name} is {tensor.dtype}, this run needs {self.dtype}")
        if not tensor.isfinite().all():
            raise ValueError(f"{self.name} is not finite")
        return tensor


class TrustedCache:
    """The folder args.trusted_cache, as a run of this model, size and precision reads it.

    videos: the data sets of the run.
    """

    def __init__(
        self,
        config: Config,
        args: TrainArguments,
        dtype: torch.dtype,
        videos: Iterable[CaptionedVideos],
    ) -> None:
        assert args.trusted_cache is not None, "the caller asks only with a folder"
        self.folder, self.dtype = Path(args.trusted_cache), dtype
        network = TransformerConfig(**transformer_arguments(config.model.network_config.params))
        self.channels = network.out_channels
        self.text_shape = (network.text_length, network.text_hidden_size)
        self.model_name = Family.of_config(network).member.diffusers_trainer_name
        self._shared = self._find_shared(videos)

    @property
    def scales(self) -> dict[str, float]:
        """The scale of the latents of each published model that has its clips in the run's folder."""
        return {
            m.name: m.scale_factor for m in MEMBERS if m.diffusers_trainer_name == self.model_name
        }

    def of_clip(self, videos: CaptionedVideos, index: int) -> TrustedFile | None:
        """Return the file of a sample; None if there is none or its name fits several videos."""
        clips, settings = videos.clips, videos.settings_of(index)
        is_part = clips.spans is not None and not np.isnan(clips.spans[index]).all()
        is_member = clips.places is not None and clips.places[index, 0] >= 0
        stem = Path(clips.files[index]).stem
        # Their trainer reads whole files only.
        if is_part or is_member or stem in self._shared:
            return None
        frames, (rows, columns) = settings.max_num_frames, settings.video_size
        path = self.folder / "video_latent" / self.model_name / f"{frames}x{rows}x{columns}"
        latent = (num_latent_frames(frames), rows // SPATIAL_COMPRESSION)
        shape = (self.channels, *latent, columns // SPATIAL_COMPRESSION)
        return self._file(path / f"{stem}.safetensors", "encoded_video", shape)

    def of_caption(self, caption: str) -> TrustedFile | None:
        name = hashlib.sha256(caption.encode("utf-8", "surrogatepass")).hexdigest()
        path = self.folder / "prompt_embeddings" / f"{name}.safetensors"
        return self._file(path, "prompt_embedding", self.text_shape)

    def _file(self, path: Path, name: str, shape: tuple[int, ...]) -> TrustedFile | None:
        # Opening a pipe would block.
        return TrustedFile(path, name, shape, self.dtype) if path.is_file() else None

    def _find_shared(self, videos: Iterable[CaptionedVideos]) -> set[str]:
        """Return the stems that several videos have; warn of those with a file."""
        files = defaultdict(dict)
        for one in videos:
            for name in one.clips.files:
                files[Path(name).stem][name] = None
        shared = {stem: list(names) for stem, names in files.items() if len(names) > 1}
        stored = {path.stem for path in self.folder.glob(f"video_latent/{self.model_name}/*/*")}
        _warn(
            f"{' and '.join(names[:3])}{' and others' * (len(names) > 3)} have the same file name, and "
            f"{stem}.safetensors in {self.folder} may be of either: they are encoded"
            for stem, names in shared.items()
            if stem in stored
        )
        return set(shared)


def choose_trusted(
    kind: str,
    files: Mapping[str, TrustedFile | None],
    spec: Spec,
    folder: Path,
    groups: ProcessGroups,
) -> tuple[set[str], int]:
    """Return the keys of `files` whose entries are trusted, and how many others are still to be encoded.

    An entry that cogfast encoded is preferred. Each rank checks a part of the files.
    """

    def complete() -> set[str]:
        index = CacheIndex.read(folder)
        return index.complete_keys(kind, index.settled(kind, spec, files, trusts=True), folder)

    written = groups.on_main(complete)
    taken = {key for key in files if key not in written and trusted_key(key) in written}
    new = [(key, file) for key, file in files.items() if key not in written | taken]
    found = {key: file for key, file in new if file is not None}
    mine = list(found)[groups.rank :: groups.world_size]
    reasons: dict[str, str] = {}
    for of_rank in groups.gather({key: why for key in mine if (why := _fault(found[key]))}):
        reasons |= of_rank
    _warn(f"{found[key].path}: {why}; it is encoded instead" for key, why in reasons.items())
    taken |= found.keys() - reasons.keys()
    return taken, len({key for key, _ in new} - taken)


def as_theirs(videos: CaptionedVideos) -> CaptionedVideos:
    """Return the data set with the frames and the squeezed pictures of their trainer."""
    settings = replace(
        videos.settings, resize="stretch", frame_selection="uniform", short_clips="pad"
    )
    return CaptionedVideos(videos.clips, settings, videos.source_sizes)


def check_scale(
    file: Path, stored: Tensor, own: Moments, scale_factor: float, scales: Mapping[str, float]
) -> None:
    """Raise ValueError if the latents of a file have another scale than those of this run.

    own: unscaled, of the same clip from the run's VAE. scales: as TrustedCache.scales.
    """
    # The file has a sample of a distribution, whose mean square is that of mean and variance.
    power = own.mean.float().square().mean()
    if own.logvar is not None:
        power += own.logvar.float().exp().mean()
    # sync: for two clips, before any is encoded
    found = (stored.float().square().mean() / power.cpu()).sqrt().item()
    if not 1 / _SAME_SCALE < found / scale_factor < _SAME_SCALE:
        known = " and ".join(f"{name} ({scale:.3g})" for name, scale in scales.items())
        raise ValueError(
            f"args.trusted_cache: {file} has latents of scale {found:.3g}, this run has "
            f"{scale_factor:.3g}: {known} have their clips in one folder; remove the files of the "
            "other model, or set the key to null to encode all clips"
        )


def _fault(file: TrustedFile) -> str | None:
    try:
        file.read()
    except ValueError as error:
        return str(error)
    return None


def _warn(lines: Iterable[str]) -> None:
    number = 0
    for number, line in enumerate(lines, 1):
        if number <= _LINES:
            logger.warning("args.trusted_cache: %s", line)
    if number > _LINES:
        logger.warning("args.trusted_cache: %s", counted(number - _LINES, "more such file"))
