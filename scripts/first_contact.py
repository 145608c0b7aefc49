"""Make the evidence that cogfast trains published weights, on your GPU:

    python -m scripts.first_contact CogVideoX-2b my_videos --out contact [--script train_cogvideox_lora.py]

MODEL is a folder of published weights or a hub id, DATA a folder with videos/ and labels/ of some 20 clips, of which the
last fifth is held out. It trains a LoRA for --steps steps, samples four held-out captions, does the
same with diffusers' own script if --script names it (examples/cogvideo of diffusers, its requirements installed), measures
the held-out loss of the base and of both adapters by the same command, and, on two GPUs, compares losses of one and of two.
OUT/report.md has the results, OUT/sheet.png the videos; OUT.tar has both with the logs, without weights and clips.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from cogfast.core.files import write_text
from cogfast.extensions.sample.writer import contact_sheet
from scripts.quickstart_clips import read_frames

RANK, LEARNING_RATE, SEED = 64, 1e-4, 42
_NUM_PROMPTS = 4


class Contact:
    """The commands of a comparison. Each has a log in `out`, and ends the program if it fails."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.model, self.out, self.given = given.model, given.out, given
        self.train, self.held_out = self.split(given.data)

    def split(self, data: Path) -> tuple[Path, Path]:
        """Link the clips and captions of a folder into one of training and one that is held out."""
        if not (data / "videos").is_dir():
            sys.exit(f"{data} has no folder videos/ with clips, beside labels/ with their captions")
        files = (data / "videos").iterdir()
        videos = sorted(path for path in files if path.is_file() and path.name[0] != ".")
        if len(videos) < 2:
            sys.exit(
                f"{data / 'videos'} has {len(videos)} clips; at least 2 are needed, 20 are better"
            )
        first = len(videos) - max(1, len(videos) // 5)
        folders = self.out / "data" / "train", self.out / "data" / "held_out"
        for folder, chosen in zip(folders, (videos[:first], videos[first:]), strict=True):
            for kind in ("videos", "labels"):
                (folder / kind).mkdir(parents=True)
            for video in chosen:
                caption = data / "labels" / f"{video.stem}.txt"
                for path, kind in ((video, "videos"), (caption, "labels")):
                    (folder / kind / path.name).symlink_to(path.resolve())
        return folders

    @property
    def prompts(self) -> list[str]:
        labels = sorted((self.held_out / "labels").glob("[!.]*"))[:_NUM_PROMPTS]
        return [" ".join(path.read_text(encoding="utf-8").split()) for path in labels]

    def run(self, name: str, words: Sequence[str]) -> float:
        """Run a command and return its seconds."""
        print(f"{name}: {' '.join(words)}", flush=True)
        start, log = time.monotonic(), self.out / f"{name}.log"
        with open(log, "w") as file:
            status = subprocess.run(
                words, stdout=file, stderr=subprocess.STDOUT, check=False
            ).returncode
        if status:
            end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            sys.exit(f"{name}: exit status {status}, see {log}\n{end}")
        return time.monotonic() - start

    def cogfast(self, name: str, *words: str, ranks: int = 1) -> float:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        start = [sys.executable, *(launch if ranks > 1 else []), "-m", "cogfast"]
        return self.run(name, [*start, *words])

    def fine_tune(self, name: str, *words: str, steps: int, ranks: int = 1) -> float:
        keys = [
            f"args.run_folder={self.out / name}",
            f"args.train_iters={steps}",
            f"args.seed={SEED}",
        ]
        keys += [f"args.lr={LEARNING_RATE}", "args.log_interval=1", *words]
        data = ["--data", str(self.train), "--lora", str(RANK)]
        return self.cogfast(name, "train", self.model, *data, *keys, *self.given.more, ranks=ranks)

    def losses(self, name: str, key: str) -> list[float]:
        lines = (self.out / name / "metrics.jsonl").read_text().splitlines()
        return [row[key] for row in map(json.loads, lines) if row.get(key) is not None]

    def held_out_loss(self, name: str, adapters: Path | None) -> float:
        """Return the held-out loss of the base with adapters: a run of one step that changes nothing."""
        words = [
            f"args.valid_data=[{self.held_out}]",
            "args.eval_at_end=true",
            "args.eval_num_samples=0",
        ]
        words += [f"args.load_lora={adapters}"] * (adapters is not None)
        self.fine_tune(name, *words, "args.lr=0", "args.warmup_steps=0", steps=1)
        return self.losses(name, "valid_loss")[-1]

    def sample(self, name: str, *words: str) -> list[Path]:
        prompts = [word for prompt in self.prompts for word in ("--prompt", prompt)]
        prompts += ["--steps", str(self.given.sampling_steps)] if self.given.sampling_steps else []
        self.cogfast(
            f"{name}_videos", "sample", *words, *prompts, "--out", str(self.out / f"{name}_videos")
        )
        return sorted((self.out / f"{name}_videos").glob("*.mp4"))

    def train_by_diffusers(self) -> tuple[float, Path]:
        """Train by diffusers' script with the same numbers; return its seconds and its adapters."""
        data, out = self.out / "data" / "diffusers", self.out / "diffusers"
        data.mkdir()
        videos = sorted((self.train / "videos").glob("[!.]*"))
        captions = [(self.train / "labels" / f"{v.stem}.txt").read_text().strip() for v in videos]
        write_text(data / "videos.txt", "".join(f"{v.resolve()}\n" for v in videos))
        write_text(data / "prompts.txt", "".join(f"{' '.join(c.split())}\n" for c in captions))
        words = {
            "pretrained_model_name_or_path": self.model,
            "instance_data_root": data,
            "video_column": "videos.txt",
            "caption_column": "prompts.txt",
            "rank": RANK,
            "lora_alpha": RANK,
            "learning_rate": LEARNING_RATE,
            "max_train_steps": self.given.steps,
            "train_batch_size": 1,
            "mixed_precision": "bf16",
            "seed": SEED,
            "output_dir": out,
        }
        listed = [f"--{key}={value}" for key, value in words.items()]
        seconds = self.run("diffusers", [sys.executable, str(self.given.script), *listed])
        return seconds, out / "pytorch_lora_weights.safetensors"

    def compare_ranks(self) -> str:
        """Train a few steps on one GPU and on two, with the same global batch."""
        steps, num = min(20, self.given.steps), 2
        both = "deepspeed.train_micro_batch_size_per_gpu=1"
        self.fine_tune("one_gpu", both, f"deepspeed.gradient_accumulation_steps={num}", steps=steps)
        self.fine_tune("two_gpus", both, steps=steps, ranks=num)
        one, two = (self.losses(name, "loss") for name in ("one_gpu", "two_gpus"))
        off = max(abs(a - b) / abs(a) for a, b in zip(one, two, strict=True))
        return f"largest relative difference of {len(one)} losses: {off:.1e}"


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("data", metavar="DATA", type=Path)
    parser.add_argument("--out", type=Path, default=Path("contact"), help="a new folder")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sampling-steps", type=int, help="default: the model's")
    parser.add_argument("--script", type=Path, help="diffusers' train_cogvideox_lora.py")
    parser.add_argument(
        "--gpus", type=int, default=torch.cuda.device_count(), help="default: all; 2 are compared"
    )
    parser.add_argument("more", nargs="*", metavar="key=value", help="for every training")
    given = parser.parse_intermixed_args(argv)
    given.out = given.out.resolve()
    if given.out.exists():
        parser.error(f"--out {given.out} exists; name a new folder")
    given.out.mkdir(parents=True)
    contact = Contact(given)
    contact.run("doctor", [sys.executable, "-m", "cogfast", "doctor"])
    run = contact.out / "cogfast"
    seconds = {"base": 0.0, "cogfast": contact.fine_tune("cogfast", steps=given.steps)}
    adapters = {"base": None, "cogfast": run}
    videos = {
        "base": contact.sample("base", contact.model),
        "cogfast": contact.sample("cogfast", str(run)),
    }
    if given.script is not None:
        seconds["diffusers"], adapters["diffusers"] = contact.train_by_diffusers()
        lora = ["--lora", str(adapters["diffusers"])]
        videos["diffusers"] = contact.sample("diffusers", contact.model, *lora)
    lines = [
        "# First contact",
        "",
        f"{contact.model}, LoRA of rank {RANK}, {given.steps} steps; doctor.log has the machine.",
        "",
    ]
    lines += [
        "| adapters of | held-out loss | seconds, start and end included |",
        "| --- | --- | --- |",
    ]
    for name, file in adapters.items():
        loss = contact.held_out_loss(f"{name}_held_out", file)
        lines.append(f"| {name} | {loss:.4f} | {seconds[name]:.0f} |")
    steps = contact.losses("cogfast", "step_ms")
    lines += ["", f"cogfast: {np.median(steps[len(steps) // 4 :]):.0f} ms a step (median)."]
    if given.gpus > 1:
        lines += ["", f"One and two GPUs: {contact.compare_ranks()}."]
    write_text(contact.out / "report.md", "\n".join(lines) + "\n")
    shown = [
        (f"{name}: {prompt}", video)
        for name, found in videos.items()
        for prompt, video in zip(contact.prompts, found, strict=True)
    ]
    frames = [read_frames(video) for _, video in shown]
    contact_sheet(contact.out / "sheet.png", frames, [text for text, _ in shown])
    with tarfile.open(f"{contact.out}.tar", "w") as tar:
        for path in sorted([*contact.out.glob("*.*"), *contact.out.glob("*/metrics.jsonl")]):
            tar.add(path, path.relative_to(contact.out.parent))
    print(
        (contact.out / "report.md").read_text() + f"\nPlease send {contact.out}.tar with an issue."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
