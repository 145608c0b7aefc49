"""`cogfast sample`: videos of prompts from a run folder, a checkpoint or the weights of a config."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from cogfast.config import Config
from cogfast.data.clip_transform import resize_and_center_crop
from cogfast.kernels.block_kernels import choose_kernels
from cogfast.model.transformer import DiffusionTransformer
from cogfast.model.weights.run import find_run_checkpoint
from cogfast.shapes import SPATIAL_COMPRESSION, num_pixel_frames
from cogfast.train.arguments import TrainArguments
from cogfast.train.assembly import assemble_diffusion, assemble_encoder, assemble_transformer
from cogfast.train.attention_choice import choose_for_sampling
from cogfast.train.checkpoint import read_manifest
from cogfast.train.generate import DEFAULT_FPS, LatentSize, Prompt, VideoMaker, write_samples
from cogfast.train.preflight import check_sample
from cogfast.train.process_groups import start_processes

logger = logging.getLogger(__name__)


def sample(
    config: Config,
    prompts: Sequence[str],
    images: Sequence[Path | None],
    out: Path,
    seed: int,
    weights: str | None,
    ema: bool,
    num_steps: int | None = None,
) -> list[Path]:
    """Sample a video of every prompt into `out`; prompts are shared between the ranks.

    weights: a run or checkpoint folder of ours, read on top of args.load; ema: its averaged
    weights. num_steps: instead of the sampler's own. Writes mp4s, contact_sheet.png, prompts.json
    and settings.json; a prompt's video depends on the seed and its place alone.
    """
    args = TrainArguments.from_config(config)
    check_sample(config, weights, has_images=any(image is not None for image in images))
    groups = start_processes(args.model_parallel_size)
    transformer = assemble_transformer(
        config, args, groups, weights, ema, allow_missing=args.force_inference
    ).eval()
    run = None if weights is None else find_run_checkpoint(Path(weights))
    stored = None if run is None else read_manifest(run).get("attention_backend")
    attention_backend = choose_for_sampling(args, transformer.config, groups, stored)
    transformer.use_kernels(choose_kernels(args.kernels, attention_backend))
    encoder = assemble_encoder(config, args, transformer, groups)
    diffusion = assemble_diffusion(config)
    size = _latent_size(config, args, transformer, encoder.image_input, images)
    pixels = (size.height * SPATIAL_COMPRESSION, size.width * SPATIAL_COMPRESSION)
    # In SAT's inference.yaml, batch_size is the number of videos per prompt, made one by one.
    num_copies, at_a_time = (
        (args.batch_size, 1) if args.mode == "inference" else (1, args.batch_size)
    )
    wanted = [
        Prompt(i * num_copies + copy, text, None if image is None else read_image(image, pixels))
        for i, (text, image) in enumerate(zip(prompts, images, strict=True))
        for copy in range(num_copies)
    ]
    maker = VideoMaker(
        transformer,
        diffusion,
        encoder,
        size,
        seed=seed,
        device=groups.device,
        num_steps=num_steps,
    )
    files = write_samples(
        out,
        maker,
        wanted,
        groups,
        at_a_time=at_a_time,
        latents_only=args.only_save_latents,
    )
    if groups.is_main:
        settings = {"seed": seed, "weights": weights or args.load, "ema": ema}
        settings |= {"num_steps": maker.sampler.num_steps}
        settings |= {"images": [None if i is None else str(i) for i in images]}
        settings |= dataclasses.asdict(size)
        (out / "settings.json").write_text(json.dumps(settings, indent=2) + "\n")
        what = "latents" if args.only_save_latents else "videos and contact_sheet.png"
        logger.info("%d %s in %s", len(files), what, out)
    groups.close()
    return files


def _latent_size(
    config: Config,
    args: TrainArguments,
    transformer: DiffusionTransformer,
    is_image_to_video: bool,
    images: Sequence[Path | None],
) -> LatentSize:
    """From args.sampling_*; what is not given is the training data's, then the model's own."""
    model = transformer.config
    patch_t = model.patch_size.t
    data = (config.data.get("params") or {}) if config.data else {}
    size = args.sampling_image_size or data.get("video_size")
    if size is None and is_image_to_video and images and images[0] is not None:
        size = _largest_fit(_image_size(images[0]), transformer)
    if size is None:
        size = (model.latent_height * SPATIAL_COMPRESSION, model.latent_width * SPATIAL_COMPRESSION)
    channels = args.latent_channels or model.out_channels
    height, width = (int(side) // SPATIAL_COMPRESSION for side in size)
    fps = args.sampling_fps or data.get("fps", DEFAULT_FPS)
    if args.sampling_num_frames is None:
        num_frames = data.get("max_num_frames", model.num_frames)
    else:  # SAT counts latent frames, those that padding adds included: 22 of 1.5 are 81 frames
        surplus = (args.sampling_num_frames - 1) % patch_t
        num_frames = num_pixel_frames(args.sampling_num_frames - surplus)
    return LatentSize.of_video(channels, num_frames, height, width, patch_t, fps)


def _image_size(path: Path) -> tuple[int, int]:
    from PIL import Image

    with Image.open(path) as image:
        return image.height, image.width


def _largest_fit(
    image: tuple[int, int], transformer: DiffusionTransformer
) -> tuple[int, int] | None:
    """The image's shape at a short side of 768 pixels (CogVideoX1.5), rounded to whole patches;
    None where the model takes one size only (upstream sat/sample_video.py)."""
    model = transformer.config
    if model.patch_size.t == 1:
        return None
    rows, columns = (
        SPATIAL_COMPRESSION * side for side in (model.patch_size.h, model.patch_size.w)
    )
    scale = 768 / min(image)
    return round(image[0] * scale / rows) * rows, round(image[1] * scale / columns) * columns


def read_image(path: Path, size: tuple[int, int]) -> Tensor:
    """A picture as [3, H, W] in [-1, 1], scaled to cover `size` and cut around its centre."""
    import numpy as np
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            pixels = torch.from_numpy(np.array(image.convert("RGB")))  # [H, W, 3]
    except FileNotFoundError:
        raise ValueError(f"--image {path}: no such file") from None
    except UnidentifiedImageError:
        raise ValueError(f"--image {path}: not a picture; use a PNG or JPEG file") from None
    frames = resize_and_center_crop(pixels[None], size)
    return frames[0].float() / 127.5 - 1
