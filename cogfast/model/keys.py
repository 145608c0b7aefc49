"""Keys of weights, adapters, kernels and the `model` section."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from cogfast.core.keys import After, Batch, Keys, Range, Share

ImageLatentScale = Literal["trainer", "pretrained", "pipeline"]
# Inputs of the network beside the noised latents: a first frame, or a second video
Condition = Literal["image", "control", "frames", "mask", "masked_video"]
LearnedPositions = Literal["resize", "drop"]
DEFAULT_FROZEN_PREFIXES = ("first_stage_model", "conditioner")


def scale_of(name: ImageLatentScale, factor: float) -> float:
    """Return the scale of first frames relative to the VAE's output. factor: the VAE's scaling factor."""
    return {"trainer": factor, "pretrained": 1.0, "pipeline": 1 / factor}[name]


class WeightKeys(Keys):
    """Weights to start from."""

    load: Annotated[str | None, After("mode")] = None
    """weights to start from: a folder or a file of any format that `cogfast convert` reads, an address
    of one, or the id of a diffusers pipeline on the Hugging Face hub. A pipeline also fills in VAE and text
    encoder"""
    load_lora: str | None = None
    """adapters to start from: a LoRA file, a SAT folder or a run"""
    force_train: Annotated[bool, After("offload_blocks")] = False
    """train even if the weights of args.load are incomplete"""
    force_inference: Annotated[bool, After("keep_best")] = False
    """sample even if the weights are incomplete or missing"""


class LoraKeys(Keys):
    """Short names of lora_config's params; the door moves them there."""

    lora_rank: Annotated[Annotated[int, Range(1, 4096)] | None, After("load_lora")] = None
    """train LoRA adapters of this rank, and only them. Short for r of
    model.network_config.params.modules.lora_config.params, like the next two for lora_alpha and
    target_modules"""
    lora_alpha: Annotated[float, Range(-(10**6), 10**6)] | None = None
    """the adapters' output is multiplied by lora_alpha / lora_rank; null: the rank, so that their
    strength is 1"""
    lora_modules: list[str] | None = None
    """linears that get adapters: q, k, v, out (attention), fc1, fc2 (the MLP), or their names in
    target_modules; null: q, k, v and out"""


class KernelKeys(Keys):
    """Kernels of a block."""

    kernels: Annotated[Literal["triton", "torch"], After("replica_check_interval")] = "triton"
    """torch: plain PyTorch in place of cogfast's kernels"""
    compile: bool = False
    """torch.compile for each block"""
    attention_backend: Literal[
        "auto", "fa4", "fa3", "cudnn", "flash", "efficient", "cogfast", "math"
    ] = "auto"
    """auto: on a GPU, measure the fastest at the run's shape once; on a CPU, cogfast's kernel. The choice is
    stored in the checkpoint"""


class ModelKeys(Keys):
    """The `model` section without its components."""

    section: ClassVar[str] = "model"

    input_key: str = "mp4"
    """key of the videos in a batch; only mp4 is read"""
    scale_factor: float = 1.0
    """latents = scale_factor * output of the first stage"""
    latent_input: bool = False
    """batches hold first-stage latents instead of pixels"""
    en_and_decode_n_samples_a_time: Batch | None = None
    """samples per first-stage call; null: all"""
    noised_image_input: bool = False
    """image-to-video: the latents of the first frame, with a little noise, are a part of the input"""
    noised_image_all_concat: bool = False
    """concatenate the image latents to every frame, not only the first"""
    noised_image_dropout: Share = 0.0
    """fraction of samples trained without the image"""
    conditions: list[Condition] | None = None
    """inputs beside the noised latents, in the order of their channels. image: the first frame;
    control: a second video through the same autoencoder, such as poses, depth or edges; frames:
    given_frames of the clip; mask and masked_video, behind each other: inpainting (docs/conditions.md);
    null: image with noised_image_input, else none"""
    given_frames: str | None = None
    """frames that the condition frames gives the model: first, last, first_last, random, all, or
    prefix:N for the first N"""
    masked_video_noise: bool = False
    """add a little noise to the masked video; add_noise_in_inpaint_model of CogVideoX-Fun's config.json"""
    condition_dropout: Share = 0.0
    """fraction of samples trained without a condition, drawn for each condition; noised_image_dropout
    is that of the image"""
    new_channels: Literal["zero"] | None = None
    """zero: weights of args.load for fewer input channels get zeros for the others, so that a
    text-to-video model begins as itself and learns new conditions"""
    learned_positions: LearnedPositions | None = None
    """what becomes of the learned position table of CogVideoX-5B-I2V in args.load at another size.
    resize: it is interpolated to num_frames, latent_height and latent_width of the network; drop: it is
    left out of a network whose pos_embed_config.params.learnable_pos_embed is false"""
    image_latent_scale: ImageLatentScale = "trainer"
    """scale of the first frame's latents, relative to the VAE's output. trainer: scale_factor, as
    both upstream trainers; pretrained: 1, as SAT samples; pipeline: 1 / scale_factor, as diffusers'
    pipeline of CogVideoX1.5-5B-I2V"""
    not_trainable_prefixes: list[str] = Field(default_factory=lambda: [*DEFAULT_FROZEN_PREFIXES])
    """prefixes of SAT's parameter names that are not trained; "all" trains only LoRA matrices"""
    lora_train: bool = False
    """train only LoRA adapters, whatever not_trainable_prefixes lists"""
    trainable_modules: list[str] | None = None
    """names of modules, such as those that a network of your own adds: only their parameters and LoRA
    adapters are trained (docs/extending.md); null: all that not_trainable_prefixes leaves"""

    @property
    def inputs(self) -> tuple[Condition, ...]:
        """The conditions, in the order of their channels."""
        if self.conditions is not None:
            return tuple(self.conditions)
        return ("image",) if self.noised_image_input else ()


def conditions_of_run(model: Mapping[str, Any]) -> list[str]:
    """Return the conditions of a manifest's model section, which may lack the keys or be damaged."""
    named = model.get("conditions")
    if isinstance(named, list):
        return [str(name) for name in named]
    return ["image"] if model.get("noised_image_input") else []
