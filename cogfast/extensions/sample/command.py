"""`cogfast sample`: generates videos with a run folder, a checkpoint or the weights of args.load."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from cogfast.core.addresses import shown
from cogfast.core.files import WriteError, write_text
from cogfast.core.json_files import brief
from cogfast.core.keys import names_origins
from cogfast.core.values import counted, leaves, show
from cogfast.distributed.parallelize import run_without_dynamo
from cogfast.distributed.process_groups import ProcessGroups, start_processes
from cogfast.extensions.conditions.given_frames import GivenFrames
from cogfast.extensions.formats.image_scale import scale_of_run
from cogfast.extensions.sample.flags import check_negative_prompt
from cogfast.extensions.sample.generate import (
    Prompt,
    VideoMaker,
    refuse_fixed_frames,
    write_samples,
)
from cogfast.extensions.sample.inputs import read_inputs, read_tensors
from cogfast.extensions.sample.lora_overlay import LoraOverlay, add_loras, open_loras
from cogfast.extensions.sample.sizes import sampled_sizes, warn_of_other_positions
from cogfast.model.autoencoder import DecodePlan, VideoAutoencoder
from cogfast.model.keys import ModelKeys, conditions_of_run
from cogfast.model.weights.checkpoint_manifest import find_run_checkpoint, read_manifest
from cogfast.model.weights.run_checkpoint import RunFiles
from cogfast.train.assembly import assemble_diffusion, assemble_encoder, assemble_transformer
from cogfast.train.encode import Encoder
from cogfast.train.keys import TrainKeys
from cogfast.train.preflight.attention_choice import choose_attention, follow_weights
from cogfast.train.preflight.check import check_sample
from cogfast.train.preflight.encode_choice import memory_for_clips
from cogfast.train.preflight.parts import warn_of_different_schedules, warn_of_image_scale
from cogfast.train.run.folder import git, plain_sections
from cogfast.train.run.opened import Run
from cogfast.train.run.terminal import log_unused
from cogfast.train.video_size import LatentSize

logger = logging.getLogger(__name__)

_GIB = 2**30


@names_origins
def sample(
    run: Run,
    prompts: Sequence[str],
    files: Mapping[str, Sequence[Path | None]],
    out: Path,
    weights: str | None,
    ema: bool | None,
    loras: Sequence[LoraOverlay] = (),
    tensors: Sequence[str] = (),
) -> list[Path]:
    """Sample a video for every prompt and write it to `out`. Prompts are split between replicas.

    Writes mp4 files, contact_sheet.png, prompts.json and settings.json. Video n (from 0) has the seed
    args.seed + n, which reproduces it from its prompt alone.
    files: of the options that give conditions, such as image and first_frame, one for each prompt. weights: a run or checkpoint folder, loaded on top of args.load. ema: use its averaged weights, or
    those of args.load; None: those of runs that have any. loras: adapters to merge. tensors: NAME=FILE of
    those of data.params.tensors, for each name once or once per prompt.
    """
    run = run.with_values(*follow_weights(run.args, [lora.path for lora in loras]))
    args, model, data = run.args, run.model, run.data_arguments
    if not args.compile:
        run_without_dynamo()
    check_sample(run, weights, [name for name, of_name in files.items() if any(of_name)])
    _check_files(files, prompts)
    assert run.sampler is not None, "check_sample asks for one"
    check_negative_prompt(args.negative_prompt, run.sampler)
    _check_folder(out)
    sizes = sampled_sizes(args, run.fields, data, files["image"])
    # Before the weights: a video that is too short should not cost the user a long start.
    inputs = read_inputs(files, sizes, data, GivenFrames.parse(model.given_frames))
    arrays = read_tensors(tensors, len(prompts), run.network_target, data)
    # Before the model is built, so that a wrong path costs no time.
    adapters = open_loras(loras, ema)
    groups = start_processes(
        args.model_parallel_size, args.context_parallel_size, args.collective_timeout
    )
    groups.check_same({**leaves(plain_sections(run.sections)), "prompts": prompts})
    # The cheap parts first; weights of 11 GB are read below.
    diffusion = assemble_diffusion(run.denoiser, run.loss, run.sampler)
    refuse_fixed_frames(diffusion.sampler)
    if groups.is_main:
        log_unused(run.unused, run.sections["args"], run.origins)
        if not all(prompts):
            logger.info("a prompt is empty: its video is sampled without a caption")
        warn_of_different_schedules(diffusion)
        if weights is None:
            warn_of_image_scale(model, args.load, run.network.config)
        _warn_of_other_loras(model, loras)
    # If there is no run, --ema reads the averaged weights of args.load.
    source = args.load if weights is None and ema else weights
    # Rounded and offloaded weights are for training; adapters are merged into the original ones.
    whole = args.changed(quantize_base="none", offload_blocks=0)
    transformer = assemble_transformer(
        run.network, whole, groups, source, ema, allow_missing=args.force_inference
    ).eval()
    add_loras(transformer, adapters)
    trained = None if weights is None else find_run_checkpoint(Path(weights))
    manifest = {} if trained is None else read_manifest(trained)
    if manifest and groups.is_main:
        warn_of_other_positions(transformer.config, sizes, manifest)
    choose_attention(transformer, args, data, manifest, groups)
    encoder = assemble_encoder(run.frozen, model, args, transformer, groups, tensors=run.tensors)
    plan = _limit_memory(encoder, args, groups, sizes)
    maker = VideoMaker(transformer, diffusion, encoder, sizes[0], args, groups)
    if ema is None:
        ema = trained is not None and "shadow" in RunFiles(trained, manifest).kinds
    settings = {"weights": weights or args.load, "ema": ema}
    settings["lora"] = [dataclasses.asdict(lora) for lora in loras]
    if tensors:
        settings["tensors"] = list(tensors)
    settings |= _settings(run.sections["model"], args, maker, plan)
    wanted, rows = _wanted_videos(args, prompts, files, sizes, inputs, arrays)
    # Prompts are written as they were given.
    written_as_given = {"negative_prompt": args.negative_prompt, "prompts": rows}
    text = json.dumps(shown(settings) | written_as_given, indent=2, ensure_ascii=False) + "\n"
    return _write(out, maker, wanted, text, args)


def _check_files(files: Mapping[str, Sequence[Path | None]], prompts: Sequence[str]) -> None:
    """Raise ValueError if an option gives a condition to some of the prompts only."""
    for name, of_name in files.items():
        if any(of_name) and not all(of_name):
            prompt, option = prompts[of_name.index(None)], name.replace("_", "-")
            text = f"--{option}: the prompt {brief(prompt)} has none; give one for each prompt"
            raise ValueError(text)


def _wanted_videos(
    args: TrainKeys,
    prompts: Sequence[str],
    files: Mapping[str, Sequence[Path | None]],
    sizes: Sequence[LatentSize],
    inputs: Sequence[Mapping[str, Any]],
    tensors: Mapping[str, Sequence[Tensor]],
) -> tuple[list[Prompt], list[dict[str, Any]]]:
    """Return the videos to sample, and what settings.json says of each. inputs: tensors of their conditions."""
    # In SAT's inference.yaml, batch_size is the number of videos per prompt, sampled one at a time.
    num_copies = args.batch_size if args.mode == "inference" else 1
    wanted, rows = [], []
    for i in range(len(prompts) * num_copies):
        n, seed = i // num_copies, args.seed + i
        of_prompt = {name: values[n] for name, values in tensors.items()}
        wanted.append(Prompt(i, prompts[n], seed, size=sizes[n], tensors=of_prompt, **inputs[n]))
        height, width = sizes[n].pixels
        row = {"text": prompts[n], "seed": seed, "height": height, "width": width}
        rows.append(row | {name: str(of[n]) for name, of in files.items() if of[n] is not None})
    return wanted, rows


def _write(
    out: Path, maker: VideoMaker, prompts: Sequence[Prompt], settings: str, args: TrainKeys
) -> list[Path]:
    """Write settings.json and the samples, and return the samples' files."""
    groups, sizes = maker.groups, {prompt.size for prompt in prompts}
    # The videos of one call have one size.
    at_a_time = args.batch_size if args.mode != "inference" and len(sizes) == 1 else 1
    try:
        # Before the first video, so that a run that fails has its settings, too.
        groups.on_main(lambda: out.mkdir(parents=True, exist_ok=True))
        groups.on_main(lambda: write_text(out / "settings.json", settings))
        only_latents = args.only_save_latents
        written = write_samples(out, maker, prompts, at_a_time=at_a_time, latents_only=only_latents)
    except (OSError, WriteError) as error:
        kept = len(list(out.glob("*.safetensors" if args.only_save_latents else "*.mp4")))
        text = f"{out}: cannot be written ({error}); {counted(kept, 'sample')} kept in it; free disk space and "
        raise RuntimeError(f"{text}sample again into another folder (--out)") from None
    what = f"{counted(len(written), 'video')} and contact_sheet.png"
    if args.only_save_latents:
        what = counted(len(written), "file of latents", "files of latents")
    logger.info("wrote %s to %s", what, out)
    groups.close()
    return written


def _check_folder(out: Path) -> None:
    """Raise ValueError, before any time is spent on sampling, if `out` is a file, cannot be written, or
    has samples whose prompts and seeds would be lost."""
    for folder in (out, *out.parents):
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--out {out}: {folder} is a file; give a folder with --out")
    if samples := [*out.glob("*.mp4"), *out.glob("*.safetensors"), *out.glob("prompts.json")]:
        text = f"--out {out}: has samples of an earlier call ({samples[0].name}); give another folder with --out"
        raise ValueError(text)
    there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not os.access(there, os.W_OK):
        raise ValueError(f"--out {out}: {there} cannot be written; give another folder with --out")


def _warn_of_other_loras(model: ModelKeys, loras: Sequence[LoraOverlay]) -> None:
    """Warn of adapters that were trained with other conditions, or another scale of the first frame."""
    for lora in loras:
        run = find_run_checkpoint(Path(lora.path))
        section = {} if run is None else (read_manifest(run).get("config") or {}).get("model") or {}
        conditions = conditions_of_run(section)
        if section and conditions != list(model.inputs):
            text = "--lora %s was trained with model.conditions=%s, and this samples with %s; use the model of its training"
            logger.warning(text, lora.path, show(conditions), show(list(model.inputs)))
    for lora in loras if "image" in model.inputs else ():
        trained = scale_of_run(Path(lora.path))
        if trained is not None and trained[0] != model.image_latent_scale:
            text = "--lora %s was trained with model.image_latent_scale=%s, and this samples with %s; add "
            text += "model.image_latent_scale=%s"
            logger.warning(text, lora.path, trained[0], model.image_latent_scale, trained[0])


def _limit_memory(
    encoder: Encoder, args: TrainKeys, groups: ProcessGroups, sizes: Sequence[LatentSize]
) -> DecodePlan | None:
    """Set the first stage to decode in tiles, and to encode conditions in parts, if the largest video needs
    too much memory. Return the plan of decoding; None if only latents are saved.

    The limit is args.vae_memory_gib, else all devices' least free memory. All ranks use the same tiles.
    """
    asked, budget = args.vae_memory_gib, min(groups.gather(memory_for_clips(args, groups)))
    # One plan for all videos, since a plan decides the numbers that come out.
    largest = max(sizes, key=lambda size: size.height * size.width)
    shape = largest.num_frames, *largest.pixels
    if encoder.encodes_clips:  # on all ranks
        stage = groups.on_all(lambda: encoder.first_stage)
        if isinstance(stage, VideoAutoencoder):
            stage.limit_encode_memory(budget, (args.batch_size, *shape))
    if args.only_save_latents:
        return None
    # Only the first ranks of models decode: the others need no first stage.
    limit = lambda: encoder.first_stage.limit_decode_memory(budget, *shape)
    plan = groups.broadcast(groups.on_all(limit if groups.is_first_of_model else lambda: None))
    assert plan is not None, "rank 0 decodes"
    needed = plan.num_bytes / _GIB
    if plan.num_bytes > budget and asked is not None:
        text = f"args.vae_memory_gib={asked}: decoding {largest.num_frames} frames "
        text += f"of {largest.pixels[0]}x{largest.pixels[1]} takes {needed:.2f} GiB in the smallest tiles"
        raise ValueError(f"{text}; raise it, or save only latents (args.only_save_latents=true)")
    if plan.tile is not None:
        logger.info("decoding in tiles of %dx%d pixels, about %.1f GiB", *plan.tile, needed)
    if plan.num_bytes > budget:
        logger.warning("%.1f GiB are free, but decoding needs about %.1f", budget / _GIB, needed)
    return plan


def _settings(
    model: Mapping[str, Any], args: TrainKeys, maker: VideoMaker, plan: DecodePlan | None
) -> dict[str, Any]:
    """Return all settings that affect the result, for all prompts. model: the section."""
    size = maker.size
    return {
        "dtype": args.precision,
        "num_steps": maker.sampler.num_steps,
        "sampler": model["sampler_config"],
        "denoiser": model["denoiser_config"],
        "channels": size.channels,
        "frames": size.frames,
        "num_frames": size.num_frames,
        "fps": size.fps,
        "scale_factor": maker.encoder.scale_factor,
        "image_scale": maker.encoder.image_scale if maker.encoder.image_input else None,
        "decode_tile": plan.tile if plan is not None else None,
        "model_parallel_size": args.model_parallel_size,
        "context_parallel_size": args.context_parallel_size,
        "versions": {
            **{name: version(name) for name in ("torch", "diffusers", "transformers")},
            "commit": git("rev-parse", "HEAD"),
        },
    }
