"""Make the quickstart's data, and score and draw its samples.

prepare FOLDER            write clips and labels, wavelet.safetensors (a first stage fitted to the clips)
                          and captions.txt (all 48), and print the scores of the reconstructions, which
                          no model can exceed
machine                   time training steps in fp32 and bf16, in one process and in two; print the
                          number of processes, the threads of each, and true for bf16, else false
look SAMPLES [...]        score folders of mp4s with prompts.json ({file: caption}), or with videos/ and
                          labels/
animate SAMPLES PICTURE   draw twelve of the videos, held-out captions first, as an animated WebP
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from quickstart_clips import (
    FPS,
    HELD_OUT,
    caption_of,
    combinations,
    read_frames,
    score,
    write_clips,
)
from quickstart_wavelet import fit_wavelet, save_wavelet

from cogfast.config import load_config
from cogfast.core.shapes import num_latent_frames
from cogfast.extensions.wavelet.wavelet_autoencoder import WaveletAutoencoder
from cogfast.kernels.block_kernels import choose_kernels
from cogfast.model.transformer import build_transformer

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "quickstart.yaml"
NUM_BANDS = 48  # of 768: reconstructions have 27.8 dB, and two CPU cores can train on the latents
BATCH = 16  # clips of a training step
FIT_BATCH = 16  # clips
NUM_ANIMATED, NUM_COLUMNS = 12, 4  # videos of the moving picture
SCALE, GAP, TEXT_HEIGHT = 3, 8, 20  # of the moving picture, in pixels of a video and of the picture
PAPER, INK = (255, 255, 255), (36, 36, 36)
NUM_TIMED_STEPS = 2  # after one that warms up; the faster counts


def prepare(folder: Path) -> None:
    """Write clips, captions and wavelet; print the scores that training can reach at best."""
    paths = write_clips(folder)
    captions = [read_caption(path) for path in paths]
    all_captions = [caption_of(*parts) for parts in combinations()]
    (folder / "captions.txt").write_text("\n".join(all_captions) + "\n")

    frames = [read_frames(path) for path in paths]
    pixels = torch.from_numpy(np.stack(frames)).permute(0, 4, 1, 2, 3)  # [B, 3, F, H, W]
    video = pixels.float() / 127.5 - 1
    wavelet_path = folder / "wavelet.safetensors"
    save_wavelet(fit_wavelet(video.split(FIT_BATCH), NUM_BANDS), wavelet_path)

    wavelet = WaveletAutoencoder(wavelet_path)
    decoded = wavelet.decode(wavelet.encode(video).mean).clamp(-1, 1)
    noise = (decoded - video).div(2).square().mean().log10().mul(-10).item()
    rebuilt = ((decoded + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 4, 1).numpy()
    print(f"{len(paths)} clips in {folder}; first stage keeps {NUM_BANDS} bands, {noise:.1f} dB")
    print(f"  the clips             {score(frames, captions)}")
    print(f"  their reconstructions {score(list(rebuilt), captions)}")


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to train on this machine: processes, threads of each, and bf16 or fp32."""

    num_processes: int
    num_threads: int
    use_bf16: bool

    def __str__(self) -> str:
        dtype = "bf16" if self.use_bf16 else "fp32"
        return f"{self.num_processes} x {self.num_threads} in {dtype}"


def choose_layout() -> None:
    """Print the fastest layout as `<processes> <threads> <use bf16>`, and the times on stderr."""
    if torch.cuda.is_available():
        print(min(2, torch.cuda.device_count()), 1, "true")
        return
    num_cores = len(os.sched_getaffinity(0))
    found: dict[Layout, float] = {}

    def time_layout(num_processes: int, use_bf16: bool) -> None:
        layout = Layout(num_processes, max(1, num_cores // num_processes), use_bf16)
        found[layout] = measure_step(layout)

    for use_bf16 in (False, True):
        time_layout(1, use_bf16)
    if num_cores > 1:
        # Only with the faster dtype: that choice hardly depends on the number of processes.
        time_layout(2, min(found, key=found.__getitem__).use_bf16)
    best = min(found, key=found.__getitem__)
    times = ", ".join(f"{layout}: {seconds * 1000:.0f} ms" for layout, seconds in found.items())
    print(f"processes x threads: {best} is the fastest here ({times} a step)", file=sys.stderr)
    print(best.num_processes, best.num_threads, str(best.use_bf16).lower())


def measure_step(layout: Layout) -> float:
    """Return the seconds of a training step of configs/quickstart.yaml with random inputs."""
    # In child processes: PyTorch's number of threads is best set before its first op.
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            fork.Process(target=_time_steps, args=(layout, rank, f"{folder}/store", sender))
            for rank in range(layout.num_processes)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError(f"a training step with {layout} failed; see the error above")
    return receiver.recv()


def _time_steps(layout: Layout, rank: int, store: str, sender: Connection) -> None:
    """Time steps of the whole batch, split between the processes; rank 0 sends the faster one."""
    torch.set_num_threads(layout.num_threads)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=layout.num_processes
    )
    config = load_config([CONFIG])
    transformer = build_transformer(config.model)
    transformer.use_kernels(choose_kernels())
    transformer.to(torch.bfloat16 if layout.use_bf16 else torch.float32)
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=1e-4, fused=True)
    sizes, batch = transformer.config, BATCH // layout.num_processes
    frames = num_latent_frames(sizes.num_frames)
    latents = torch.randn(batch, sizes.in_channels, frames, sizes.latent_height, sizes.latent_width)
    timesteps = torch.randint(1000, (batch,))
    text = torch.randn(batch, sizes.text_length, sizes.text_hidden_size)
    seconds, flat = [], torch.empty(0)
    for _ in range(1 + NUM_TIMED_STEPS):
        start = time.perf_counter()
        transformer(latents, timesteps, text).float().square().mean().backward()
        if layout.num_processes > 1:
            gradients = [p.grad for p in transformer.parameters() if p.grad is not None]
            flat = torch.cat([g.flatten() for g in gradients])
            torch.distributed.all_reduce(flat)
        optimizer.step()
        if layout.num_processes > 1:
            # ZeRO: each process has updated its part of the weights, and gets the others'.
            part = flat[: len(flat) // layout.num_processes]
            torch.distributed.all_gather([torch.empty_like(part)] * layout.num_processes, part)
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        sender.send(min(seconds[1:]))


def look(folders: list[Path]) -> None:
    """Print the scores of each folder, over all captions and over the held-out ones."""
    held_out = {caption_of(*parts) for parts in HELD_OUT}
    for folder in folders:
        videos, captions = read_samples(folder)
        scores = score(videos, captions)
        verdict = "learned" if scores.has_learned else "not learned"
        print(f"{folder}: {scores}  over {scores.num_videos} videos: {verdict}")
        chosen = [i for i, caption in enumerate(captions) if caption in held_out]
        if chosen and len(chosen) < len(captions):
            part = score([videos[i] for i in chosen], [captions[i] for i in chosen])
            print(f"  the {part.num_videos} with a held-out caption: {part}")


def animate(folder: Path, path: Path) -> None:
    """Draw the four held-out captions and eight of the rest as one animated picture."""
    videos, captions = read_samples(folder)
    held_out = {caption_of(*parts) for parts in HELD_OUT}
    first = [i for i, caption in enumerate(captions) if caption in held_out]
    rest = [i for i, caption in enumerate(captions) if caption not in held_out]
    count = NUM_ANIMATED - len(first)
    # Evenly spaced over all captions that were trained on.
    chosen = first + [rest[round((k + 0.5) * len(rest) / count - 0.5)] for k in range(count)]
    _, height, width, _ = videos[0].shape
    size = (SCALE * width, SCALE * height)
    cell = (size[0] + GAP, size[1] + TEXT_HEIGHT + GAP)
    rows = -(-len(chosen) // NUM_COLUMNS)  # rounded up
    page = Image.new("RGB", (NUM_COLUMNS * cell[0] + GAP, rows * cell[1] + GAP), PAPER)
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(size=13)
    places = [
        (GAP + k % NUM_COLUMNS * cell[0], GAP + k // NUM_COLUMNS * cell[1])
        for k in range(len(chosen))
    ]
    for (x, y), i in zip(places, chosen, strict=True):
        draw.text((x + size[0] / 2, y + size[1] + 4), captions[i], INK, font, anchor="ma")
    pages = [page.copy() for _ in videos[0]]
    for place, i in zip(places, chosen, strict=True):
        for shown, frame in zip(pages, videos[i], strict=True):
            # Nearest neighbour, so that every sampled pixel stays visible.
            shown.paste(Image.fromarray(frame).resize(size, Image.Resampling.NEAREST), place)
    duration = round(1000 / FPS)  # ms
    pages[0].save(
        path, save_all=True, append_images=pages[1:], duration=duration, loop=0, quality=90
    )


def read_samples(folder: Path) -> tuple[list[np.ndarray], list[str]]:
    """Read the videos, uint8 [F, H, W, 3], and captions of a folder of samples or clips."""
    prompts = folder / "prompts.json"
    if prompts.is_file():
        named = {folder / name: text for name, text in json.loads(prompts.read_text()).items()}
    else:
        named = {path: read_caption(path) for path in sorted(folder.glob("videos/*.mp4"))}
    if not named:
        raise ValueError(
            f"{folder} has neither prompts.json ({{file: caption}}) nor videos/*.mp4; "
            "give a folder of samples"
        )
    missing = [path for path in named if not path.is_file()]
    if missing:
        raise ValueError(f"{prompts} names {missing[0]}, which does not exist; sample again")
    return [read_frames(path) for path in named], list(named.values())


def read_caption(path: Path) -> str:
    """Read the caption of a clip in SAT's layout: videos/x.mp4 -> labels/x.txt."""
    return (path.parent.parent / "labels" / f"{path.stem}.txt").read_text().strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("prepare").add_argument("folder", type=Path)
    commands.add_parser("machine")
    commands.add_parser("look").add_argument("samples", type=Path, nargs="+")
    animation = commands.add_parser("animate")
    animation.add_argument("samples", type=Path)
    animation.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    try:
        if arguments.command == "prepare":
            prepare(arguments.folder)
        elif arguments.command == "machine":
            choose_layout()
        elif arguments.command == "animate":
            animate(arguments.samples, arguments.picture)
        else:
            look(arguments.samples)
    except ValueError as error:
        sys.exit(f"quickstart: {error}")


if __name__ == "__main__":
    main()
