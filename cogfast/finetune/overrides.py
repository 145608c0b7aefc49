"""Methods of upstream's trainer that a user's class may override (docs/finetune.md), and what they get and return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cogfast.diffusion.denoiser import Conditioning
from cogfast.extensions.cache.entry_keys import hash_text
from cogfast.extensions.sample.generate import Prompt, VideoMaker
from cogfast.extensions.sample.writer import to_frames

OVERRIDABLE = (
    "encode_video",
    "encode_text",
    "collate_fn",
    "compute_loss",
    "load_components",
    "initialize_pipeline",
    "validation_step",
)
# Key of a batch -> key of a sample
SAMPLE_KEYS = {
    "encoded_videos": "encoded_video",
    "prompt_embedding": "prompt_embedding",
    "images": "image",
}
# Further keys of a batch -> key of a sample. Videos are there without a latent cache.
FURTHER_KEYS = {"videos": "video", "paths": "path", "txt": "prompt"}


def overridden(cls: type, base: type) -> dict[str, list[Callable]]:
    """Return {name: the functions of `cls` and its parents} of the methods that replace those of `base`."""
    parents = [parent for parent in cls.__mro__ if parent is not base]
    methods = {name: [vars(c)[name] for c in parents if name in vars(c)] for name in OVERRIDABLE}
    return {name: functions for name, functions in methods.items() if functions}


def identity(cls: type, name: str, functions: list[Callable]) -> str:
    """Return a text that changes with the source of a method, for the latent cache's specs."""
    try:
        text = "".join(inspect.getsource(function) for function in functions)
    except (OSError, TypeError):
        text = f"{cls.__name__}.{name}: its source cannot be read, so the latent cache could not notice when it "
        text += "changes; define the class in a file, or set latent_cache to none"
        raise ValueError(text) from None
    where = getattr(functions[0], "__qualname__", name)  # of the class that defines it
    return f"{where} {hash_text(text)[:12]}"


def check_encoded(what: str, found: Any, shape: tuple[int, ...]) -> Tensor:
    """Return what an overridden encode_video or encode_text returned; ValueError for another shape."""
    if isinstance(found, Tensor) and found.is_floating_point() and tuple(found.shape) == shape:
        return found
    raise ValueError(f"{what} returned {described(found)}; return floats {list(shape)}")


def samples_of(batch: Mapping[str, Any], number: int) -> list[dict[str, Any]]:
    """Return the samples of a batch with upstream's keys, on the CPU as those of its workers."""
    # sync: only for a user's own collate_fn, which gets CPU tensors as upstream's does
    parts = {name: batch[key] for key, name in (SAMPLE_KEYS | FURTHER_KEYS).items() if key in batch}
    parts = {name: part.cpu() if isinstance(part, Tensor) else part for name, part in parts.items()}
    frames, height, width = parts["encoded_video"].shape[2:]
    size = {"num_frames": frames, "height": height, "width": width}
    return [
        {**{name: part[i] for name, part in parts.items()}, "video_metadata": dict(size)}
        for i in range(number)
    ]


def check_collated(what: str, found: Any, samples: list[dict[str, Any]], is_loss_own: bool) -> dict:
    """Return what an overridden collate_fn returned; ValueError for what cogfast's loss cannot take.

    is_loss_own: compute_loss is overridden, too, and may read other keys.
    """
    if not isinstance(found, dict):
        raise ValueError(f"{what} returned {described(found)}; return a dict")
    for key, name in SAMPLE_KEYS.items():
        value = found.get(key)
        is_whole = isinstance(value, Tensor) and len(value) == len(samples)
        if name in samples[0] and not is_whole and not is_loss_own:
            text = f"{what} returned {described(value)} as {key}; return a tensor of all {len(samples)} samples"
            text += ", each of which has its own noise, or override compute_loss, too"
            raise ValueError(text)
    return found


def described(value: object) -> str:
    """Return what a method returned, for messages."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return f"a {type(value).__name__}"


class StepVideos(VideoMaker):
    """Takes the videos of prompts from the validation_step of a trainer of cogfast.finetune.trainer, whose
    module imports this one, in place of the sampler."""

    def __init__(self, trainer: Any, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._trainer: Any = trainer
        self._pipe: Any = None

    def condition(self, prompts: Sequence[Prompt]) -> Conditioning:
        """Build the pipeline, at the first call. After this call the ranks agree on errors."""
        if self._pipe is None:
            self._pipe = self._trainer.initialize_pipeline()
        return Conditioning(text=torch.zeros(len(prompts), 1, 1, device=self.device))

    @torch.no_grad()
    def latents(self, prompts: Sequence[Prompt], conditioning: Conditioning) -> Any:
        """Return the frames of each prompt, uint8 [F, H, W, 3]."""
        # Ranks make different videos, so what they encode may have no collectives.
        with self.encoder.alone():
            return [self._video(prompt) for prompt in prompts]

    def frames(self, latents: Any, num_frames: int) -> np.ndarray:
        return latents

    def _video(self, prompt: Prompt) -> np.ndarray:
        self._trainer.seed_generators(self._random([prompt]), "validation_step")
        image, video = prompt.image, self._trainer.validation_video(prompt.index)
        data = {
            "prompt": prompt.text,
            "image": None if image is None else _pictures(image[:, None])[0],
            "video": None if video is None else _pictures(video),
        }
        found = self._trainer.validation_step(data, self._pipe)
        try:
            ((_, value),) = found
            if isinstance(value, Tensor):
                return to_frames(value * 2 - 1)
            pictures = value if isinstance(value, list) else [value]
            return np.stack([np.asarray(picture.convert("RGB")) for picture in pictures])
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{type(self._trainer).__name__}.validation_step: {error}; return one "
                '("video", frames), the frames as PIL images or as a tensor [3, F, H, W] in [0, 1]'
            ) from None


def _pictures(video: Tensor) -> list[Any]:
    """Return a video [3, F, H, W] in [-1, 1] as PIL images."""
    from PIL import Image

    return [Image.fromarray(frame) for frame in to_frames(video)]
