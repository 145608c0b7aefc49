"""Videos from prompts: noise, the sampler, the decoder, and files that a person looks at."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cogfast.diffusion.denoiser import Conditioning, Network
from cogfast.shapes import num_latent_frames
from cogfast.slot_random import SlotRandom
from cogfast.train.assembly import Diffusion
from cogfast.train.encode import Encoder
from cogfast.train.process_groups import ProcessGroups


@dataclass(frozen=True, slots=True)
class LatentSize:
    """Latents [C, T, h, w] that the network samples, and the frames and fps of the video."""

    channels: int
    frames: int  # T, padding included
    height: int
    width: int
    num_frames: int  # of the decoded video
    fps: float

    @classmethod
    def of_video(
        cls, channels: int, num_frames: int, height: int, width: int, patch_t: int, fps: float
    ) -> LatentSize:
        """For a video of `num_frames`, latent rows and columns; T is padded to whole patches."""
        frames = num_latent_frames(num_frames)
        frames += -frames % patch_t
        return cls(channels, frames, height, width, num_frames, fps)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to sample: `index` among all prompts gives the noise, image [3, H, W] in [-1, 1]."""

    index: int
    text: str
    image: Tensor | None = None


@torch.no_grad()
def generate(
    network: Network,
    diffusion: Diffusion,
    encoder: Encoder,
    prompts: Sequence[Prompt],
    size: LatentSize,
    *,
    seed: int,
    device: torch.device,
    num_steps: int | None = None,
) -> Tensor:
    """Scaled latents [B, C, T, h, w] float32, one per prompt; a prompt's noise is its own.

    The text of the unconditional half is zeros, as captions are dropped in training.
    """
    sampler = diffusion.sampler
    if sampler is None:
        raise ValueError("model.sampler_config is missing; sampling needs one")
    if num_steps is not None:
        sampler = sampler.with_num_steps(num_steps)
    rng = SlotRandom(seed, 0, [p.index for p in prompts], 0, device)
    shape = (len(prompts), size.channels, size.frames, size.height, size.width)
    text = encoder.text_encoder([p.text for p in prompts])
    image = _image_latents(encoder, prompts, shape, rng, device)
    conditioning = Conditioning(text=text, image_latents=image)
    unconditional = Conditioning(text=torch.zeros_like(text), image_latents=image)
    return sampler(
        diffusion.denoiser,
        network,
        rng.normal("sample", shape),
        conditioning,
        unconditional,
        _NoiseOfSteps(rng),
    )


class _NoiseOfSteps:
    """Fresh noise at every call of a sampler, keyed by prompt like everything else."""

    def __init__(self, rng: SlotRandom) -> None:
        self.rng, self.num_calls = rng, 0

    def __call__(self, like: Tensor) -> Tensor:
        self.num_calls += 1
        return self.rng.normal(f"sampler step {self.num_calls}", like.shape)


def _image_latents(
    encoder: Encoder,
    prompts: Sequence[Prompt],
    shape: tuple[int, ...],
    rng: SlotRandom,
    device: torch.device,
) -> Tensor | None:
    """[B, C, T, h, w] of the prompts' images, not noised; None for text-to-video."""
    if not encoder.image_input:
        return None
    missing = [p.text for p in prompts if p.image is None]
    if missing:
        raise ValueError(
            f"the model animates images (model.noised_image_input=true), but the prompt "
            f"{missing[0]!r} has none; give --image, or prompt@@image lines"
        )
    frames = torch.stack([p.image for p in prompts]).to(device)[:, :, None]  # [B, 3, 1, H, W]
    latents = encoder.encode_video(frames, rng, "image_first_stage")
    if encoder.image_on_all_frames:
        return latents.expand(-1, -1, shape[2], -1, -1)
    out = latents.new_zeros(shape[0], latents.shape[1], *shape[2:])
    out[:, :, :1] = latents
    return out


def share(prompts: Sequence[Prompt], groups: ProcessGroups, is_padded: bool) -> list[Prompt]:
    """This rank's prompts. is_padded: every rank gets as many (ZeRO-3 gathers weights together),
    the last ones twice."""
    mine = list(prompts[groups.rank :: groups.world_size])
    most = -(-len(prompts) // groups.world_size)
    while is_padded and len(mine) < most:
        mine.append(prompts[-1])
    return mine


def file_name(prompt: Prompt) -> str:
    """A file name that differs for every prompt and that a person can read."""
    words = re.sub(r"[^a-z0-9]+", "-", prompt.text.lower()).strip("-")[:40].strip("-")
    digest = hashlib.blake2b(prompt.text.encode(), digest_size=3).hexdigest()
    return f"{prompt.index:03d}-{words or 'empty'}-{digest}"


def write_samples(
    folder: Path,
    make: Callable[[Sequence[Prompt]], Tensor],
    prompts: Sequence[Prompt],
    encoder: Encoder,
    size: LatentSize,
    groups: ProcessGroups,
    *,
    at_a_time: int = 1,
    latents_only: bool = False,
    is_padded: bool = False,
) -> list[Path]:
    """Sample this rank's share with `make`, write files; rank 0 adds prompts.json and the sheet.

    Returns all files on every rank. A rank's error is raised on every rank after all are done.
    """
    from cogfast.data.video_writer import contact_sheet, to_frames, write_video

    folder.mkdir(parents=True, exist_ok=True)
    done: dict[int, tuple[str, str, np.ndarray | None]] = {}
    error = None
    try:
        mine = share(prompts, groups, is_padded)
        for start in range(0, len(mine), at_a_time):
            part = mine[start : start + at_a_time]
            latents = make(part)
            for prompt, one in zip(part, latents, strict=True):
                if latents_only:
                    name = file_name(prompt) + ".safetensors"
                    _write_latents(folder / name, one, prompt, size)
                    done[prompt.index] = (name, prompt.text, None)
                    continue
                frames = to_frames(encoder.decode(one[None], size.num_frames)[0])
                name = file_name(prompt) + ".mp4"
                write_video(folder / name, frames, size.fps)
                done[prompt.index] = (name, prompt.text, _thumbnails(frames))
    except Exception as caught:  # told to all ranks below; nobody waits for a rank that failed
        error = caught
    reports = groups.gather((done, None if error is None else repr(error)))
    if error is not None:
        raise error
    failed = [text for _, text in reports if text is not None]
    if failed:
        raise RuntimeError(f"sampling failed on another rank: {failed[0]}")
    rows = [
        row for _, row in sorted({k: v for part, _ in reports for k, v in part.items()}.items())
    ]
    if groups.is_main:
        listing = json.dumps({name: text for name, text, _ in rows}, indent=2, ensure_ascii=False)
        (folder / "prompts.json").write_text(listing + "\n")
        pictures = [(frames, text) for _, text, frames in rows if frames is not None]
        if pictures:
            contact_sheet(folder / "contact_sheet.png", *map(list, zip(*pictures, strict=True)))
    return [folder / name for name, _, _ in rows]


def _thumbnails(frames: np.ndarray) -> np.ndarray:
    """At most 6 frames of at most 360 columns: what the contact sheet needs of [F, H, W, 3]."""
    chosen = np.unique(np.linspace(0, len(frames) - 1, 6).round().astype(int))
    stride = max(1, frames.shape[2] // 360)
    return frames[chosen][:, ::stride, ::stride]


def _write_latents(path: Path, latents: Tensor, prompt: Prompt, size: LatentSize) -> None:
    from safetensors.torch import save_file

    metadata = {"prompt": prompt.text, "num_frames": str(size.num_frames), "fps": str(size.fps)}
    save_file({"latents": latents.float().cpu().contiguous()}, path, metadata)
