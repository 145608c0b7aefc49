"""The videos of a trainer whose own validation_step makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cogfast.data.video.writer import to_frames
from cogfast.diffusion.denoiser import Conditioning
from cogfast.extensions.sample.generate import Prompt, VideoMaker


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
        video, image = self._trainer.validation_video(prompt.index), prompt.image
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
