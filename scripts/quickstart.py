"""Make the quickstart's data, and score and draw its samples.

prepare FOLDER            write clips and labels, wavelet.safetensors (a first stage fitted to the clips)
                          and captions.txt (all 48), and print the scores of the reconstructions, which
                          no model can exceed
machine                   print the number of processes to train with, and true if bf16 is the faster
                          dtype here, else false
look SAMPLES [...]        score folders of mp4s with prompts.json ({file: caption}), or with videos/ and
                          labels/
animate SAMPLES PICTURE   draw twelve of the videos, held-out captions first, as an animated WebP
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

# bench is not installed with the package: import it from the checkout.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.clips.animation import write_animation  # noqa: E402
from bench.clips.sample_clips import (  # noqa: E402
    FPS,
    HELD_OUT,
    caption_of,
    combinations,
    write_sample_clips,
)
from bench.clips.shape_look import read_frames, score  # noqa: E402
from cogfast.model.wavelet_autoencoder import WaveletAutoencoder, WaveletState  # noqa: E402

NUM_BANDS = 48  # of 768: reconstructions have 27.8 dB, and two CPU cores can train on the latents
FIT_BATCH = 16  # clips
NUM_ANIMATED = 12


def prepare(folder: Path) -> None:
    """Write clips, captions and wavelet; print the scores that training can reach at best."""
    paths = write_sample_clips(folder)
    captions = [read_caption(path) for path in paths]
    all_captions = [caption_of(*parts) for parts in combinations()]
    (folder / "captions.txt").write_text("\n".join(all_captions) + "\n")

    frames = [read_frames(path) for path in paths]
    pixels = torch.from_numpy(np.stack(frames)).permute(0, 4, 1, 2, 3)  # [B, 3, F, H, W]
    video = pixels.float() / 127.5 - 1
    wavelet_path = folder / "wavelet.safetensors"
    WaveletState.fit(video.split(FIT_BATCH), NUM_BANDS).save(wavelet_path)

    wavelet = WaveletAutoencoder(wavelet_path)
    decoded = wavelet.decode(wavelet.encode(video).mean).clamp(-1, 1)
    noise = (decoded - video).div(2).square().mean().log10().mul(-10).item()
    rebuilt = ((decoded + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 4, 1).numpy()
    print(f"{len(paths)} clips in {folder}; first stage keeps {NUM_BANDS} bands, {noise:.1f} dB")
    print(f"  the clips             {score(frames, captions)}")
    print(f"  their reconstructions {score(list(rebuilt), captions)}")


def describe_machine() -> None:
    """Print `<processes> <use bf16>`: two processes on two or more cores or GPUs."""
    if torch.cuda.is_available():
        num_processes, use_bf16 = min(2, torch.cuda.device_count()), True
    else:
        num_processes = min(2, os.cpu_count() or 1)
        use_bf16 = _matmul_seconds(torch.bfloat16) < _matmul_seconds(torch.float32)
    print(num_processes, str(use_bf16).lower())


def _matmul_seconds(dtype: torch.dtype) -> float:
    """Return the best time of five matrix products as large as those of the model."""
    x, weight = torch.randn(640, 256, dtype=dtype), torch.randn(256, 1024, dtype=dtype)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(10):  # a single product is too short to time
            x @ weight
        seconds.append(time.perf_counter() - start)
    return min(seconds)


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
    write_animation(path, [videos[i] for i in chosen], [captions[i] for i in chosen], FPS)


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
            describe_machine()
        elif arguments.command == "animate":
            animate(arguments.samples, arguments.picture)
        else:
            look(arguments.samples)
    except ValueError as error:
        sys.exit(f"quickstart: {error}")


if __name__ == "__main__":
    main()
