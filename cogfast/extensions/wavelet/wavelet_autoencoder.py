"""A first stage without learned weights: an orthonormal wavelet that keeps the strongest bands.

A block of 4 frames x 8 rows x 8 columns x 3 colours is transformed to 768 bands: an orthonormal
luma-chroma matrix for colour, Haar wavelets in time, rows and columns. The bands with the most
energy on a set of clips are kept, shifted to mean 0 and divided by a power of their standard
deviation (scripts/quickstart_wavelet.py). The wavelet replaces the 3D VAE, with the same interface, in
the quickstart and in tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from einops import rearrange
from torch import Tensor, nn

from cogfast.core.shapes import SPATIAL_COMPRESSION, TEMPORAL_COMPRESSION, num_latent_frames
from cogfast.model.autoencoder import DecodePlan, Moments, check_pixels
from cogfast.model.weights.tensor_files import SafetensorsFiles

COLOURS = 3
NUM_BANDS = COLOURS * TEMPORAL_COMPRESSION * SPATIAL_COMPRESSION**2
FORMAT = "cogfast-wavelet-1"
_SIDES = {"dt": TEMPORAL_COMPRESSION, "dh": SPATIAL_COMPRESSION, "dw": SPATIAL_COMPRESSION}
_FIX = "write it with scripts/quickstart.py prepare FOLDER"


def haar_matrix(size: int) -> Tensor:
    """Return the orthonormal Haar wavelet of `size` = 2^n samples: float64 [band, sample], mean first."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        pair = torch.eye(matrix.shape[0], dtype=torch.float64)
        averages = torch.kron(matrix, torch.tensor([[1.0, 1.0]], dtype=torch.float64))
        details = torch.kron(pair, torch.tensor([[1.0, -1.0]], dtype=torch.float64))
        matrix = torch.cat([averages, details]) / 2**0.5
    assert matrix.shape[0] == size, f"Haar of {size} samples: not a power of two"
    return matrix


def band_matrix() -> Tensor:
    """Return all bands of one block: float64 [768 bands, 768 values of (colour, frame, row, column)]."""
    luma_chroma = torch.tensor([[1, 1, 1], [1, 0, -1], [-1, 2, -1]], dtype=torch.float64)
    luma_chroma = luma_chroma / luma_chroma.norm(dim=1, keepdim=True)
    space = haar_matrix(SPATIAL_COMPRESSION)
    return torch.kron(
        torch.kron(luma_chroma, haar_matrix(TEMPORAL_COMPRESSION)), torch.kron(space, space)
    )


def to_blocks(video: Tensor) -> Tensor:
    """Video [B, 3, 4(T-1)+1, 8h, 8w] -> blocks [B, T, h, w, 768]; frame 0 fills block 0."""
    num_frames = video.shape[2]
    if (num_frames - 1) % TEMPORAL_COMPRESSION:
        text = f"a clip of {num_frames} frames does not divide into latent frames"
        raise ValueError(f"{text}; use {TEMPORAL_COMPRESSION}N+1 frames")
    check_pixels(*video.shape[3:])
    # The first frame is a block alone, as in the VAE: it is repeated to the length of a block.
    first = video[:, :, :1].expand(-1, -1, TEMPORAL_COMPRESSION - 1, -1, -1)
    whole = torch.cat([first, video], dim=2)
    return rearrange(whole, "b c (t dt) (h dh) (w dw) -> b t h w (c dt dh dw)", **_SIDES)


def _from_blocks(blocks: Tensor) -> Tensor:
    """Blocks [B, T, h, w, 768] -> video [B, 3, 4(T-1)+1, 8h, 8w]."""
    pattern = "b t h w (c dt dh dw) -> b c (t dt) (h dh) (w dw)"
    video = rearrange(blocks, pattern, c=COLOURS, **_SIDES)
    # The mean of block 0's four frames is the still picture closest to them.
    first = video[:, :, :TEMPORAL_COMPRESSION].mean(dim=2, keepdim=True)
    return torch.cat([first, video[:, :, TEMPORAL_COMPRESSION:]], dim=2)


@dataclass(frozen=True, slots=True)
class WaveletState:
    """The kept bands and their normalization; all tensors [C], C = number of latent channels."""

    bands: Tensor  # int64 rows of band_matrix(), strongest first
    mean: Tensor  # float32, subtracted
    scale: Tensor  # float32, divided by

    @classmethod
    def load(cls, path: str | Path) -> WaveletState:
        """Read a file that scripts/quickstart_wavelet.py wrote."""
        if not Path(path).is_file():
            text = f"first_stage_config.params.ckpt_path={path} does not exist (a relative path starts at the "
            text += f"current folder); set model.first_stage_config.params.ckpt_path to its path, or {_FIX}"
            raise ValueError(text)
        files = SafetensorsFiles(Path(path))
        found, tensors = files.metadata.get("format"), {n: files.read(n) for n in files.names()}
        if found != FORMAT:
            raise ValueError(f"ckpt_path={path} has format {found!r} instead of {FORMAT!r}; {_FIX}")
        bands = tensors.get("bands", torch.zeros(0))
        is_list = bands.dtype == torch.int64 and bands.ndim == 1
        rows = set(bands.tolist()) if is_list else set()  # sync: none, CPU tensors
        is_whole = 0 < len(rows) == len(bands) and rows <= set(range(NUM_BANDS))
        for name in ("mean", "scale"):
            held = tensors.get(name, bands)
            is_whole &= held.dtype == torch.float32 and held.shape == bands.shape
            is_whole = is_whole and bool(held.isfinite().all())
        if not is_whole or not (tensors["scale"] > 0).all():
            fault = "bands, mean and scale must be finite and of one length"
            raise ValueError(f"ckpt_path={path} is damaged: {fault}; {_FIX}")
        return cls(bands, tensors["mean"], tensors["scale"])


class WaveletAutoencoder(nn.Module):
    """The wavelet with the interface of VideoAutoencoder; `logvar` of its moments is None.

    It computes in float32 whatever dtype it is moved to.
    """

    analysis: Tensor  # the buffers that _register makes: [C, 768], [C], [C]
    mean: Tensor
    scale: Tensor

    def __init__(
        self,
        # the fitted bands and scales, a file that the quickstart writes
        ckpt_path: str | Path | None = None,
        state: WaveletState | None = None,
    ) -> None:
        super().__init__()
        if state is None and ckpt_path is not None:
            state = WaveletState.load(ckpt_path)
        elif state is None or ckpt_path is not None:
            text = f"the wavelet needs either ckpt_path (got {ckpt_path}) or a state"
            raise ValueError(f"{text}; give one of them")
        self.state, self.latent_channels = state, len(state.bands)
        self._register("cpu")

    def _register(self, device: torch.device | str) -> None:
        analysis = band_matrix()[self.state.bands].float()  # [C, 768]
        constants = {"analysis": analysis, "mean": self.state.mean, "scale": self.state.scale}
        for name, value in constants.items():
            self.register_buffer(name, value.to(device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> WaveletAutoencoder:
        # Recompute the constants: `.to(bfloat16)` would round them, and with them the latents.
        super()._apply(fn, recurse)
        self._register(self.analysis.device)
        return self

    @torch.no_grad()
    def encode(self, video: Tensor) -> Moments:
        """Video [B, 3, 4(T-1)+1, 8h, 8w] in [-1, 1] -> mean [B, C, T, h, w]."""
        bands = to_blocks(video.float()) @ self.analysis.T  # [B, T, h, w, C]
        latents = (bands - self.mean) / self.scale
        return Moments(mean=latents.permute(0, 4, 1, 2, 3).contiguous(), logvar=None)

    def decode(self, latents: Tensor) -> Tensor:
        """Latents [B, C, T, h, w] -> video [B, 3, 4(T-1)+1, 8h, 8w], not clamped."""
        bands = latents.float().permute(0, 2, 3, 4, 1)  # [B, T, h, w, C]
        return _from_blocks((bands * self.scale + self.mean) @ self.analysis)

    def limit_decode_memory(
        self, num_bytes: int, num_frames: int, height: int, width: int
    ) -> DecodePlan:
        """Return a plan for whole frames, whatever the limit."""
        # At the peak two float32 copies of the bands and the video are alive.
        num_blocks = num_latent_frames(num_frames) * height * width // SPATIAL_COMPRESSION**2
        return DecodePlan(None, 3 * num_blocks * NUM_BANDS * 4)
