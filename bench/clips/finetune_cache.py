"""Time `cogfast finetune`'s encoding of clips and captions against that of CogVideo's diffusers trainer:

    python -m bench.clips.finetune_cache [--clips 4 --rounds 5] [--out FILE]

That trainer encodes one clip and one caption after the other, with diffusers' VAE in tiles and
transformers' T5, and writes two files for each. Both read the same videos with the same random weights
and take turns, each time into an empty cache; the time includes loading the encoders and reading.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from bench.clips.finetune_data import (
    latent_file,
    options,
    samples_of,
    text_file,
    write_data,
    write_pipeline,
)
from bench.harness.machine import write_report
from bench.harness.outcome import Outcome, Row, table
from cogfast.config import load_config
from cogfast.diagnostics.timing import spread
from cogfast.finetune import Args
from cogfast.finetune.translate import translate
from cogfast.train.caching.command import cache_latents

SIZE = (256, 384)  # larger than a tile of diffusers' VAE, 240 x 360
_SHOWN = ("side", "clips_per_s", "median_s", "p10_s", "p90_s", "bytes_per_clip")


class Encoders:
    """VAE, T5 and tokenizer of a pipeline, as CogVideo's trainer uses them."""

    def __init__(self, args: Args) -> None:
        from diffusers import AutoencoderKLCogVideoX
        from transformers import AutoTokenizer, T5EncoderModel

        folder, self.args = args.model_path, args
        self.tokenizer = AutoTokenizer.from_pretrained(folder, subfolder="tokenizer")
        self.t5 = T5EncoderModel.from_pretrained(folder, subfolder="text_encoder")
        self.vae = AutoencoderKLCogVideoX.from_pretrained(folder, subfolder="vae")
        if args.enable_slicing:
            self.vae.enable_slicing()
        if args.enable_tiling:
            self.vae.enable_tiling()
        self.length = json.loads((folder / "transformer" / "config.json").read_text())[
            "max_text_seq_length"
        ]
        self.vae.requires_grad_(False)
        self.t5.requires_grad_(False)

    def encode_all(self) -> None:
        """Write two files for each sample: one sample of the scaled latents, and the embedding."""
        from safetensors.torch import save_file

        for video, caption in samples_of(self.args):
            latents, text = latent_file(self.args, video), text_file(self.args, caption)
            latents.parent.mkdir(parents=True, exist_ok=True)
            text.parent.mkdir(parents=True, exist_ok=True)
            save_file({"prompt_embedding": self._embed(caption)[0]}, text)
            save_file({"encoded_video": self._encode(video)[0].contiguous()}, latents)

    def _embed(self, caption: str) -> Tensor:
        ids = self.tokenizer(
            caption,
            padding="max_length",
            max_length=self.length,
            truncation=True,
            return_tensors="pt",
        ).input_ids
        return self.t5(ids)[0]

    def _encode(self, video: Path) -> Tensor:
        import decord

        decord.bridge.set_bridge("torch")  # for the whole process
        frames, height, width = self.args.train_resolution
        reader = decord.VideoReader(str(video), width=width, height=height)
        step = len(reader) // frames
        picked = reader.get_batch(list(range(0, len(reader), step)))[:frames]
        decord.bridge.set_bridge("native")
        pixels = picked.float().permute(0, 3, 1, 2).contiguous()
        # Frame after frame, as that trainer's transform does.
        scaled = torch.stack([frame / 255.0 * 2.0 - 1.0 for frame in pixels])
        clip = scaled[None].permute(0, 2, 1, 3, 4).contiguous()
        return self.vae.encode(clip).latent_dist.sample() * self.vae.config.scaling_factor


def measure(
    folder: Path,
    num_clips: int,
    rounds: int,
    size: tuple[int, int] = SIZE,
    model: str = "tiny",
) -> list[Row]:
    """Return a row for each side; the first has the ratio of their times. model: its T5's width counts."""
    write_pipeline(folder / "pipeline", model)
    write_data(folder / "data", num_clips, size)
    args = options(folder / "pipeline", folder / "data", folder / "out", size, num_workers=1)
    config, ours, theirs = translate(args), folder / "ours", args.data_root / "cache"
    words = [f"args.latent_cache={ours}", "args.encode_first=false"]
    (folder / "run.yaml").write_text(config.describe())
    config = load_config([folder / "run.yaml"], words)
    calls: dict[str, tuple[Path, Callable[[], object]]] = {
        "cogfast": (ours, lambda: cache_latents(config)),
        "CogVideo": (theirs, lambda: Encoders(args).encode_all()),
    }
    times: dict[str, list[float]] = {side: [] for side in calls}
    sizes: dict[str, int] = {}
    for round_ in range(rounds + 1):
        # The sides alternate in going first.
        for side in sorted(calls, reverse=round_ % 2 == 0):
            cache, call = calls[side]
            shutil.rmtree(cache, ignore_errors=True)
            started = time.perf_counter()
            call()
            if round_ > 0:  # the first round imports libraries
                times[side].append(time.perf_counter() - started)
            sizes[side] = sum(path.stat().st_size for path in cache.rglob("*.safetensors"))
    rows = []
    for side, samples in times.items():
        figures = {key.replace("_ms", "_s"): value for key, value in spread(samples).items()}
        rate = num_clips / statistics.median(samples)
        row = {"side": side, "clips": num_clips, "size": [*size], "clips_per_s": rate, **figures}
        rows.append({**row, "bytes_per_clip": sizes[side] // num_clips})
    pairs = zip(times["cogfast"], times["CogVideo"], strict=True)
    rows[0]["ratio"] = statistics.median(a / b for a, b in pairs)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clips", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), arguments.clips, arguments.rounds)
    print(table(Outcome(rows=rows, shown=_SHOWN)))
    write_report(
        arguments.out,
        "finetune_cache",
        torch.device("cpu"),
        threads=arguments.threads,
        load_average={"before": load, "after": os.getloadavg()[0]},
        rows=rows,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
