"""Before and after the quickstart's training: make its data, look at its samples.

python scripts/quickstart.py prepare FOLDER
    writes FOLDER/videos, FOLDER/labels (the clips), FOLDER/wavelet.safetensors (the first stage,
    fitted to them) and FOLDER/captions.txt (all 48 captions, the held-out ones too), and prints
    how the clips and their reconstructions score: no model can do better than the latter.
python scripts/quickstart.py machine
    prints how many processes to train with, and whether in bf16 (true) or float32 (false): what is
    faster here.
python scripts/quickstart.py look SAMPLES [SAMPLES ...]
    scores folders of sampled mp4s. SAMPLES/prompts.json is {file: caption}; a folder with videos/
    and labels/ works too.
python scripts/quickstart.py animate SAMPLES PICTURE.webp
    draws twelve of the videos, those of held-out captions in the first row, as one moving picture.
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

# bench is not installed with the package; it lies beside this folder.
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

NUM_BANDS = 48  # of 768: reconstructions at 27.8 dB, latents small enough for two CPU cores
FIT_BATCH = 16  # clips
NUM_ANIMATED = 12


def prepare(folder: Path) -> None:
    """Write clips, captions and wavelet; print the scores that bound what training can reach."""
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
    """Print `<processes> <use bf16>`: two processes where there are two cores or two GPUs."""
    if torch.cuda.is_available():
        num_processes, use_bf16 = min(2, torch.cuda.device_count()), True
    else:
        num_processes = min(2, os.cpu_count() or 1)
        use_bf16 = _matmul_seconds(torch.bfloat16) < _matmul_seconds(torch.float32)
    print(num_processes, str(use_bf16).lower())


def _matmul_seconds(dtype: torch.dtype) -> float:
    """The best of five products as large as the model's."""
    x, weight = torch.randn(640, 256, dtype=dtype), torch.randn(256, 1024, dtype=dtype)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(10):
            x @ weight
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def look(folders: list[Path]) -> None:
    """Print the scores of each folder, and those of the held-out captions alone."""
    held_out = {caption_of(*parts) for parts in HELD_OUT}
    for folder in folders:
        videos, captions = read_samples(folder)
        scores = score(videos, captions)
        verdict = "learned" if scores.has_learned else "not learned"
        print(f"{folder}: {scores}  over {scores.num_videos} videos: {verdict}")
        chosen = [i for i, caption in enumerate(captions) if caption in held_out]
        if chosen and len(chosen) < len(captions):
            part = score([videos[i] for i in chosen], [captions[i] for i in chosen])
            print(f"  the {part.num_videos} with a caption that was held out: {part}")


def animate(folder: Path, path: Path) -> None:
    """Draw the four held-out captions, then eight others, as one moving picture."""
    videos, captions = read_samples(folder)
    held_out = {caption_of(*parts) for parts in HELD_OUT}
    first = [i for i, caption in enumerate(captions) if caption in held_out]
    others = [i for i, caption in enumerate(captions) if caption not in held_out]
    count = NUM_ANIMATED - len(first)
    chosen = first + [others[round((k + 0.5) * len(others) / count - 0.5)] for k in range(count)]
    write_animation(path, [videos[i] for i in chosen], [captions[i] for i in chosen], FPS)


def read_samples(folder: Path) -> tuple[list[np.ndarray], list[str]]:
    """The videos (uint8 [F, H, W, 3]) and captions of a folder of samples or of clips."""
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
    """The caption of a clip in SAT's layout: videos/x.mp4 -> labels/x.txt."""
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
