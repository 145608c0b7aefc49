"""Parts of the diffusion that its tests share, and the layout of upstream's stored videos."""

from collections.abc import Callable
from types import SimpleNamespace

from torch import Tensor

from cogfast.diffusion.denoiser import DiscreteDenoiser, VideoScaling
from cogfast.diffusion.noise_schedule import ZeroSNRDDPMDiscretization


def ours(video: Tensor) -> Tensor:
    """[..., T, C, h, w] of the stored files as [..., C, T, h, w]."""
    return video.transpose(-4, -3).contiguous()


def video_denoiser(shift: float = 1.0) -> DiscreteDenoiser:
    return DiscreteDenoiser(VideoScaling(), ZeroSNRDDPMDiscretization(shift_scale=shift))


class Recorded:
    """A network that returns `compute(x, timesteps, text)` and keeps the arguments of its calls."""

    def __init__(self, compute: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self.compute = compute
        self.calls: list[SimpleNamespace] = []

    def __call__(
        self,
        x: Tensor,
        timesteps: Tensor,
        text: Tensor,
        condition_latents: Tensor | None = None,
        ofs: Tensor | None = None,
    ) -> Tensor:
        given = {"x": x, "timesteps": timesteps, "text": text, "ofs": ofs}
        self.calls.append(SimpleNamespace(**given, condition_latents=condition_latents))
        return self.compute(x, timesteps, text)
