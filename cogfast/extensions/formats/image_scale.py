"""The scale of image-to-video's first frame, which is not the same in every program.

With z the VAE's output and s its scaling factor (0.7), CogVideo's trainers feed s * z to the network,
SAT samples CogVideoX1.5-5B-I2V with z, and diffusers' pipeline with z / s for that model, whose VAE
has `invert_scale_latents`, and with s * z for CogVideoX-5B-I2V.
"""

from __future__ import annotations

import logging
from pathlib import Path

from cogfast.core.json_files import check, keys
from cogfast.extensions.formats.vae import read_vae_config
from cogfast.model.config import TransformerConfig
from cogfast.model.keys import ImageLatentScale, ModelKeys, conditions_of_run, scale_of
from cogfast.model.weights.checkpoint_manifest import find_run_checkpoint, read_manifest

logger = logging.getLogger(__name__)

# The keys of a run's manifest that it depends on.
_PARAMS = keys({"patch_size": int | list[int]})
_MODEL = keys({"scale_factor": float, "network_config": keys({"params": _PARAMS})})


def stock_scale(joins_frames: bool, pipeline: Path | None = None) -> ImageLatentScale:
    """Return the scale that diffusers' pipeline uses.

    joins_frames: the model is CogVideoX 1.5. pipeline: a folder, whose VAE decides if it has one.
    """
    is_inverted = joins_frames
    if pipeline is not None and (pipeline / "vae" / "config.json").is_file():
        is_inverted = read_vae_config(pipeline / "vae").invert_scale_latents
    return "pipeline" if is_inverted else "trainer"


def difference(name: ImageLatentScale, stock: ImageLatentScale, factor: float) -> str | None:
    """Say how a model's scale differs from that of diffusers' pipeline; None if it does not."""
    own, theirs = scale_of(name, factor), scale_of(stock, factor)
    if own == theirs:
        return None
    return (
        f"the first frame's latents have scale {own:.3g} (model.image_latent_scale={name}), but those of "
        f"diffusers' pipeline {theirs:.3g} ({stock})"
    )


def pipeline_code(name: ImageLatentScale, factor: float) -> str:
    """Return the Python code that gives a CogVideoXImageToVideoPipeline `pipe` the scale."""
    if name == "pretrained":
        # The pipeline's one factor also scales what it decodes.
        return (
            "decode = pipe.decode_latents; pipe.vae_scaling_factor_image = 1.0; "
            f"pipe.decode_latents = lambda latents: decode(latents / {factor:g})"
        )
    return f"pipe.vae.register_to_config(invert_scale_latents={name == 'pipeline'})"


def scale_of_run(path: Path) -> tuple[ImageLatentScale, ImageLatentScale, float] | None:
    """Return a run's scale, that of diffusers' pipeline and the scaling factor.

    None if `path` is no run, or not of an image-to-video model.
    """
    checkpoint = find_run_checkpoint(path)
    if checkpoint is None:
        return None
    model = (read_manifest(checkpoint).get("config") or {}).get("model") or {}
    if "image" not in conditions_of_run(model):
        return None
    model = check(model, _MODEL, f"{checkpoint}/manifest.json")
    # Runs from before the key have the trainers' scale.
    name = model.get("image_latent_scale", "trainer")
    name = check(name, ImageLatentScale, f"{checkpoint}/manifest.json: image_latent_scale")
    patch = model["network_config"]["params"]["patch_size"]
    return name, stock_scale(isinstance(patch, list) and patch[0] > 1), model["scale_factor"]


def difference_of_run(path: Path) -> tuple[str, str] | None:
    """Return how a run's scale differs from that of diffusers' pipeline, and the code for the pipeline;
    None if it does not."""
    if (found := scale_of_run(path)) is None or (text := difference(*found)) is None:
        return None
    return text, pipeline_code(found[0], found[2])


def warn_of_scale(
    model: ModelKeys, load: str | None, network: TransformerConfig, is_end: bool
) -> None:
    """Warn if the scale is not that of diffusers' pipeline. load: args.load. is_end: of a run."""
    stock = stock_scale(network.patch_size.joins_frames, Path(load) if load else None)
    text = difference(model.image_latent_scale, stock, model.scale_factor)
    if text is not None and is_end:
        code = pipeline_code(model.image_latent_scale, model.scale_factor)
        logger.warning("%s; before sampling there: %s", text, code)
    elif text is not None:
        logger.warning("%s; model.image_latent_scale=%s is the same", text, stock)
