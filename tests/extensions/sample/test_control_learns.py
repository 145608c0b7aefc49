"""A tiny control model learns edges to shapes from random weights: about six minutes on two CPU cores."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from cogfast.__main__ import main
from cogfast.core.slot_random import random_unit
from cogfast.extensions.sample.writer import contact_sheet, write_video
from scripts.quickstart_clips import (
    COLOURS,
    DIRECTIONS,
    FPS,
    JITTER,
    SHAPES,
    caption_of,
    foreground,
    read_frames,
    render_clip,
    score,
)
from scripts.quickstart_wavelet import fit_wavelet, save_wavelet
from tests.support.tiny_run import run_folder

STEPS = 800
NUM_SAMPLES = 12


def edges(frames: np.ndarray) -> np.ndarray:
    """The outline of the shape in white on black, uint8 [F, H, W, 3]."""
    mask = foreground(frames)
    inside = mask.copy()
    for shift in (-2, 2):
        for axis in (1, 2):
            inside &= np.roll(mask, shift, axis)
    return np.repeat((mask & ~inside)[..., None] * np.uint8(255), 3, axis=3)


def render(colour: str, shape: str, direction: str, key: int) -> np.ndarray:
    draw = [random_unit("control clips", key, axis) for axis in "xy"]
    return render_clip(
        colour, shape, direction, (JITTER * (2 * draw[0] - 1), JITTER * (2 * draw[1] - 1))
    )


@pytest.mark.soak
def test_samples_follow_their_control(tmp_path: Path) -> None:
    data, rows, pixels = tmp_path / "data", [], []
    looks = [(c, s, d) for c in COLOURS for s in SHAPES for d in DIRECTIONS]
    for i, (colour, shape, direction) in enumerate(looks * 3):
        frames = render(colour, shape, direction, i)
        write_video(data / f"{i}.mp4", frames, FPS)
        write_video(data / f"{i}-edges.mp4", edges(frames), FPS)
        # The caption tells the colour alone: shape and motion are in the control.
        rows.append({"path": f"{i}.mp4", "control": f"{i}-edges.mp4", "caption": colour})
        for clip in (frames, edges(frames)):
            pixels.append(torch.from_numpy(clip).permute(3, 0, 1, 2)[None].float() / 127.5 - 1)
    (data / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_wavelet(fit_wavelet(pixels[::5], 48), tmp_path / "wavelet.safetensors")
    words = [f"args.train_data=[{data}]", f"args.save={tmp_path / 'runs'}", "args.split='1'"]
    words += ["data.target=cogfast.data.datasets.VideoManifest", "model.conditions=[control]"]
    words += ["model.network_config.params.in_channels=96", f"args.train_iters={STEPS}"]
    words += [f"model.first_stage_config.params.ckpt_path={tmp_path / 'wavelet.safetensors'}"]
    words += [f"args.latent_cache={tmp_path / 'cache'}", "args.encode_first=true"]
    words += ["args.eval_interval=null", "args.save_interval=800", "data.params.keep_decoded_mib=0"]
    words += ["deepspeed.train_micro_batch_size_per_gpu=16", "deepspeed.bf16.enabled=false"]
    assert main(["train", "--base", "configs/quickstart.yaml", *words]) == 0
    run, options = run_folder(tmp_path / "runs"), []
    wanted, controls = [], []
    for i in range(NUM_SAMPLES):
        # A clip of no training file: another place, and a colour that its control does not have.
        colour, shape, direction = looks[(7 * i + 5) % len(looks)]
        other = list(COLOURS)[(i + 1) % 4]
        controls.append(edges(render(colour, shape, direction, 1000 + i)))
        write_video(tmp_path / f"control-{i}.mp4", controls[-1], FPS)
        options += ["--prompt", other, "--control", str(tmp_path / f"control-{i}.mp4")]
        wanted.append((other, shape, direction))
    out = tmp_path / "samples"
    assert main(["sample", str(run), *options, "--out", str(out), "--ema"]) == 0
    videos = [read_frames(path) for path in sorted(out.glob("*.mp4"))]
    captions = [caption_of(*look) for look in wanted]
    found = score(videos, captions)
    pairs = [[control[::4], video[::4]] for control, video in zip(controls, videos, strict=True)]
    contact_sheet(
        tmp_path / "control.png",
        [np.concatenate(pair) for pair in pairs],
        [f"{look[0]}: control, sample" for look in wanted],
    )
    print(found)
    assert min(found.colour, found.shape, found.motion) >= 0.9, str(found)
    # Each sample's shape lies where its own control has it.
    overlaps = np.array(
        [
            [np.mean(foreground(video) & _filled(c)) / _filled(c).mean() for c in controls]
            for video in videos
        ]
    )
    own = np.diag(overlaps)
    assert (own > 0.8).all() and (own >= overlaps.max(axis=1) - 0.05).all(), overlaps


def _filled(control: np.ndarray) -> np.ndarray:
    """The inside of an outline, bool [F, H, W]: between its first and last pixel of each row."""
    lines = control[..., 0] > 127
    return (
        np.maximum.accumulate(lines, axis=2)
        & np.maximum.accumulate(lines[:, :, ::-1], axis=2)[:, :, ::-1]
    )
