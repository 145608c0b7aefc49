"""Keys of evaluations and sampling."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Len
from pydantic import Field

from cogfast.core.keys import After, Batch, Count, Keys, Range, Size

Gibibytes = Annotated[float, Range(1e-6, 10**6)]  # the lower limit stands for "above 0"


class EvaluationKeys(Keys):
    """Evaluations during training."""

    eval_interval: Annotated[Count | None, After("min_lr_ratio")] = None
    """steps between evaluations; null: no evaluation"""
    eval_at_start: bool = False
    """evaluate before the first step, too; a run that resumes does not repeat it"""
    eval_at_end: bool = False
    """evaluate once more after the last step"""
    eval_iters: Count = 1
    """batches per evaluation; with args.elastic global batches, which do not depend on the ranks"""
    eval_batch_size: Batch | None = None
    """samples per rank when evaluating; null: batch_size"""
    strict_eval: bool = False
    """evaluate all of valid_data instead of eval_iters batches"""
    only_log_video_latents: bool = False
    """save sampled latents without decoding them"""
    eval_prompts: list[str] = Field(default_factory=list)
    """prompts of the videos to sample; empty: captions of valid_data"""
    eval_prompt_file: str | None = None
    """instead of eval_prompts: a text file with a prompt or prompt@@image per line"""
    eval_images: str | None = None
    """image-to-video: a text file with the path of an image per line, one for each prompt; null:
    first frames of valid_data"""
    eval_num_samples: Annotated[int, Range(0, 10**4)] = 1
    """videos to sample at each evaluation"""
    eval_sampling_steps: Count | None = None
    """sampling steps of these videos; null: the sampler's own number"""
    eval_with_ema: bool = True
    """evaluate and sample with the averaged (EMA) weights, if the optimizer keeps them"""

    @property
    def has_evaluation(self) -> bool:
        """Whether training evaluates at all."""
        return self.eval_interval is not None or self.eval_at_start or self.eval_at_end


class SamplingKeys(Keys):
    """Sampling."""

    negative_prompt: Annotated[str | None, After("force_inference")] = None
    """text of guidance's unconditional half, as --negative-prompt; null: zeros, as dropped captions
    in training; "": the empty caption, as in diffusers' pipelines"""
    input_type: Literal["cli", "txt"] = "cli"
    """source of prompts without --prompt: standard input (cli) or input_file (txt)"""
    input_file: str = "input.txt"
    """file with one prompt or prompt@@image per line"""
    output_dir: str = "samples"
    """folder of the sampled videos"""
    sampling_image_size: Annotated[list[Size], Len(2, 2)] | None = None
    """rows, columns in pixels; null: the training size"""
    sampling_num_frames: Size | None = None
    """length in latent frames; null: the training length"""
    sampling_fps: Annotated[int, Range(1, 1000)] | None = None
    """frames per second of the files; null: that of the training data, or SAT's 8"""
    only_save_latents: bool = False
    """save latents without decoding them"""
    vae_memory_gib: Gibibytes | None = None
    """GiB that the autoencoder may take to encode clips or decode a video; null: the free memory"""
