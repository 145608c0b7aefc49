"""Models with dense and with sparse attention learn long clips alike: about ten minutes on two CPU cores.

COGFAST_SPARSE_STEPS=600 draws the curves of docs/kernels.md.
"""

import json
import os
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch

from cogfast.__main__ import main
from cogfast.core.slot_random import random_unit
from cogfast.extensions.sample.writer import write_video
from scripts.quickstart_clips import COLOURS
from scripts.quickstart_wavelet import fit_wavelet, save_wavelet
from tests.support.tiny_run import run_folder

STEPS = int(os.environ.get("COGFAST_SPARSE_STEPS", "240"))
NUM_CLIPS, NUM_FRAMES, SIZE, RADIUS = 176, 33, 128, 15  # 9 x 16 x 16 tokens
KINDS = {"circle": 2.0, "square": 20.0}  # exponent p of |x|^p + |y|^p < r^p


def render(colour: str, shape: str, key: int) -> np.ndarray:
    """A shape that crosses the frame in a random direction and bounces, over a random gradient."""
    draw = lambda name: random_unit("long clips", key, name)
    angle, place = 2 * np.pi * draw("angle"), [RADIUS + (SIZE - 2 * RADIUS) * draw(a) for a in "xy"]
    t, span = np.arange(NUM_FRAMES), SIZE - 2 * RADIUS
    walk = [
        start + 3.5 * t * step
        for start, step in zip(place, (np.cos(angle), np.sin(angle)), strict=True)
    ]
    x, y = (RADIUS + span - abs((w - RADIUS) % (2 * span) - span) for w in walk)
    rows, columns = np.mgrid[:SIZE, :SIZE] + 0.5
    power = KINDS[shape]
    far = abs(columns - x[:, None, None]) ** power + abs(rows - y[:, None, None]) ** power
    inside = np.clip((RADIUS - far ** (1 / power)) / 2 + 0.5, 0, 1)[..., None]
    slope = np.cos(2 * np.pi * draw("slope")) * rows + np.sin(2 * np.pi * draw("slope")) * columns
    ground = np.repeat(90 + 50 * slope[None, ..., None] / SIZE, 3, axis=-1)
    return np.rint(inside * COLOURS[colour] + (1 - inside) * ground).clip(0, 255).astype(np.uint8)


def train(folder: Path, name: str, *words: str) -> tuple[Path, list[dict]]:
    """Train a model on the clips of a folder; return its run and its metrics."""
    network = {"num_frames": NUM_FRAMES, "latent_height": 16, "latent_width": 16}
    network |= {"patch_size": 1, "hidden_size": 128, "num_attention_heads": 2}
    given = tuple(f"model.network_config.params.{key}={value}" for key, value in network.items())
    given += (f"args.train_data=[{folder / 'data'}]", f"args.save={folder / name}")
    given += ("args.split='10,1,0'", f"args.train_iters={STEPS}", f"args.save_interval={STEPS}")
    given += (f"args.eval_interval={STEPS // 4}", "args.eval_iters=8", "args.eval_num_samples=0")
    given += ("args.log_interval=10", f"data.params.video_size=[{SIZE},{SIZE}]")
    given += (f"data.params.max_num_frames={NUM_FRAMES}", "data.params.keep_decoded_mib=0")
    given += (f"model.first_stage_config.params.ckpt_path={folder / 'wavelet.safetensors'}",)
    given += (f"args.latent_cache={folder / 'cache'}", "args.encode_first=true")
    given += ("deepspeed.train_micro_batch_size_per_gpu=2", "deepspeed.bf16.enabled=false")
    assert main(["train", "--base", "configs/quickstart.yaml", *given, *words]) == 0
    run = run_folder(folder / name)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return run, [json.loads(line) for line in lines]


@pytest.mark.soak
def test_sparse_attention_learns_as_dense_attention_does(tmp_path: Path) -> None:
    """Within 3% of the held-out loss of dense attention after as many steps."""
    looks = [(colour, shape) for colour in COLOURS for shape in KINDS]
    pixels, rows = [], []
    for i in range(NUM_CLIPS):
        colour, shape = looks[i % len(looks)]
        frames = render(colour, shape, i)
        write_video(tmp_path / "data" / f"{i}.mp4", frames, 8)
        rows.append({"path": f"{i}.mp4", "caption": f"{colour} {shape}"})
        pixels.append(torch.from_numpy(frames).permute(3, 0, 1, 2)[None].float() / 127.5 - 1)
    for row in rows:
        (tmp_path / "data" / row["path"]).with_suffix(".txt").write_text(row["caption"])
    save_wavelet(fit_wavelet(pixels[::8], 48), tmp_path / "wavelet.safetensors")
    runs = {
        "dense": train(tmp_path, "dense"),
        "sparse:0.8": train(tmp_path, "sparse", "args.attention=sparse:0.8"),
    }
    held_out = {}
    for name, (_, lines) in runs.items():
        held_out[name] = [line["valid_loss"] for line in lines if "valid_loss" in line][-1]
        print(name, held_out[name], median(x["step_ms"] for x in lines if "step_ms" in x), "ms")
    kept = [line["attention_kept"] for line in runs["sparse:0.8"][1] if "attention_kept" in line]
    print("kept", kept[0], kept[-1])
    assert held_out["sparse:0.8"] <= 1.03 * held_out["dense"], held_out
    assert 0.2 < kept[-1] < 1

    draw_curves({name: lines for name, (_, lines) in runs.items()}, tmp_path / "curves.png")
    # The sparse weights with dense attention, after one more step.
    words = ("args.attention=dense", "args.accept_changes=true")
    words += (f"args.resume={runs['sparse:0.8'][0]}",)
    words += (f"args.train_iters={STEPS + 1}", f"args.eval_interval={STEPS + 1}")
    _, lines = train(tmp_path, "sparse", *words)
    print("sparse weights, dense attention", lines[-1]["valid_loss"])


def draw_curves(runs: dict[str, list[dict]], path: Path) -> None:
    """The picture of docs/kernels.md: losses, and the kept share of attention by layer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), dpi=110, layout="tight")
    left, right = figure.subplots(1, 2)
    for (name, lines), colour in zip(runs.items(), ("#444444", "#c2410c"), strict=True):

        def points(key: str, lines: list[dict] = lines) -> tuple[list, list]:
            found = [line for line in lines if key in line]
            return [line["step"] for line in found], [line[key] for line in found]

        left.plot(*points("loss_running"), color=colour, label=f"{name}, training")
        left.plot(*points("valid_loss"), "o", color=colour, label=f"{name}, held out")
    for layer in range(4):
        right.plot(*points(f"attention_kept_layer_{layer:02d}"), label=f"layer {layer}")
    left.set(xlabel="step", ylabel="loss")
    right.set(xlabel="step", ylabel="kept share of attention, estimated", ylim=(0, 1))
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.25)
    figure.savefig(path)
