"""Measure whole commands: how fast `cogfast cache` encodes and how long training waits for data.

    python -m bench.clips.data_runs --out DIR

On a CPU, this uses the clips and the model of the quickstart. The piece data_runs of bench.gpu_run
trains CogVideoX-2B with random weights on H.264 of 480 rows, read by DALI, by the CPU and from the
cache.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from omegaconf import OmegaConf

from bench.clips.video_clips import TINY_SIZES, copies, generated_clips
from bench.harness.command import finish, parser_of
from bench.harness.outcome import Outcome, Row, Settings

_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_SECONDS = 300
_SHOWN = ("run", "clips", "clips_per_s", "step_median_ms", "data_wait_percent", "seconds", "mib")
_TINY_OVERRIDES = (
    "model.network_config.params.num_frames=9",
    "model.network_config.params.latent_height=8",
    "model.network_config.params.latent_width=8",
    "model.network_config.params.num_layers=1",
    "model.network_config.params.hidden_size=64",
    "model.network_config.params.num_attention_heads=1",
    "model.network_config.params.time_embed_dim=64",
    "model.network_config.params.modules.patch_embed_config.params.text_hidden_size=32",
    "model.network_config.params.modules.pos_embed_config.params.height_interpolation=1.0",
    "model.network_config.params.modules.pos_embed_config.params.width_interpolation=1.0",
    "data.params.video_size=[64,64]",
    "deepspeed.bf16.enabled=false",  # slow on processors without it
    "deepspeed.zero_optimization.reduce_bucket_size=1000000",
    "deepspeed.zero_optimization.allgather_bucket_size=1000000",
)
_TINY_VAE = {"block_out_channels": (32, 32, 32, 32), "layers_per_block": 1}


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration and its videos.

    overrides: `key=value` arguments of every command. sides: {name: overrides of a training run that
    reads videos}.
    """

    files: Sequence[str]
    overrides: Sequence[str]
    sides: dict[str, Sequence[str]]
    num_clips: int
    num_steps: int
    log_interval: int


def measure_data_runs(settings: Settings, is_short: bool = False) -> Outcome:
    """Run the piece data_runs of bench.gpu_run, or run: LoRA on few clips, without a cache."""
    carried = Path("bench_clips")
    tiny = settings.is_tiny
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        sizes = TINY_SIZES if tiny else {"480p": (480, 848)}
        source = carried if carried.is_dir() and not tiny else folder
        (clip,) = generated_clips(source, sizes).values()
        num_clips = 6 if tiny else 24 if is_short else 96
        data = copies(clip, folder / "data", num_clips)
        sides = {} if tiny else {"training from videos, DALI": ("data.params.video_backend=dali",)}
        sides["training from videos, CPU reader"] = ("data.params.video_backend=pyav",)
        case = Case(
            files=(
                str(_write_2b(folder, tiny)),
                *["configs/lora.yaml"] * is_short,
                "configs/sft.yaml",
            ),
            overrides=(
                f"args.train_data=[{data}]",
                f"args.num_workers={1 if tiny else 8}",
                "args.mode=pretrain",
                "args.load=null",
                "args.save_interval=null",
                "args.lr_schedule=constant",
                "args.warmup_steps=0",
                "deepspeed.fp16.enabled=false",
                "deepspeed.bf16.enabled=true",
            )
            + (_TINY_OVERRIDES if tiny else ()),
            sides=sides,
            num_clips=num_clips,
            num_steps=3 if tiny else 12 if is_short else 30,
            log_interval=1 if tiny else 2 if is_short else 5,
        )
        return _measure(case, folder, settings, has_cache=not is_short)


measure_run = partial(measure_data_runs, is_short=True)


def _write_2b(folder: Path, is_tiny: bool) -> Path:
    """Write a configuration of CogVideoX-2B that needs no download.

    It has an autoencoder with random weights and a small text encoder with the width of T5.
    """
    from diffusers import AutoencoderKLCogVideoX

    # The defaults are the sizes of the real one.
    AutoencoderKLCogVideoX(**_TINY_VAE if is_tiny else {}).save_pretrained(folder / "vae")
    config = OmegaConf.load(_ROOT / "configs" / "cogvideox_2b.yaml")
    config.model.first_stage_config = {
        "target": "cogfast.model.autoencoder.VideoAutoencoder",
        "params": {"path": str(folder / "vae")},
    }
    (encoder,) = config.model.conditioner_config.params.emb_models
    modules = "${model.network_config.params.modules"
    encoder.target = "cogfast.model.text_encoder.ByteTextEncoder"
    encoder.params = {
        "max_length": modules + ".pos_embed_config.params.text_length}",
        "d_model": modules + ".patch_embed_config.params.text_hidden_size}",
        "num_layers": 1,
    }
    OmegaConf.save(config, folder / "2b.yaml")
    return folder / "2b.yaml"


def measure_quickstart(num_steps: int = 300) -> Outcome:
    """Measure the quickstart's model and clips on a CPU, with one process."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        data = folder / "data"
        _run([sys.executable, "scripts/quickstart.py", "prepare", str(data)])
        case = Case(
            files=("configs/quickstart.yaml",),
            overrides=(
                f"args.train_data=[{data}]",
                f"model.first_stage_config.params.ckpt_path={data / 'wavelet.safetensors'}",
                "args.eval_interval=null",
                "args.save_interval=null",
            ),
            sides={
                "training from videos": (),
                "training from videos, each decoded in each epoch": (
                    "data.params.keep_decoded_mib=0",
                ),
            },
            num_clips=len(list((data / "videos").iterdir())),
            num_steps=num_steps,
            log_interval=20,
        )
        return _measure(case, folder, Settings(torch.device("cpu"), is_tiny=False))


def _measure(case: Case, folder: Path, settings: Settings, has_cache: bool = True) -> Outcome:
    """Run everything that fits the time: a run is skipped if the longest one so far would not fit."""
    cache = folder / "latents"
    overrides = dict(case.sides)
    if has_cache:
        overrides["training from the cache"] = (f"args.latent_cache={cache}",)
    runs: dict[str, Callable[[], Row]] = {
        name: lambda name=name: _train(case, folder / name, name, overrides[name])
        for name in overrides
    }
    # The last training needs the cache. One training runs before it, so that a cut-off leaves a figure.
    first = next(iter(runs))
    cached = {"cogfast cache": lambda: _cache(case, folder, cache)} if has_cache else {}
    runs = {first: runs.pop(first), **cached, **runs}
    rows: list[Row] = []
    skipped: list[str] = []
    problems: list[str] = []
    for name, run in runs.items():
        if settings.seconds_left < max((row["seconds"] for row in rows), default=0.0):
            skipped.append(name)
            continue
        try:
            rows.append(run())
        except (RuntimeError, subprocess.TimeoutExpired) as error:  # DALI may lack its decoder
            problems.append(f"{name}: {error}")
        settings.keep(Outcome({"skipped": skipped}, rows, _SHOWN, problems))
    return Outcome({"skipped": skipped}, rows, _SHOWN, problems)


def _run(command: Sequence[str]) -> None:
    """Run a command; RuntimeError with the end of its output if it fails."""
    done = subprocess.run(
        list(command),
        cwd=_ROOT,
        env={"OMP_NUM_THREADS": "1", **os.environ},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
    )
    if done.returncode != 0:
        end = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise RuntimeError(f"{' '.join(command[:5])}: exit status {done.returncode}\n{end}")


def _cogfast(case: Case, command: str, folder: Path, overrides: Sequence[str]) -> None:
    base = [sys.executable, "-m", "cogfast", command, "--base", *case.files]
    _run([*base, *case.overrides, f"args.save={folder}", *overrides])


def _cache(case: Case, folder: Path, cache: Path) -> Row:
    started = time.perf_counter()
    _cogfast(case, "cache", folder / "caching", [f"args.latent_cache={cache}"])
    seconds = time.perf_counter() - started
    num_bytes = sum(path.stat().st_size for path in cache.rglob("*.safetensors"))
    return {
        "run": "cogfast cache",
        "clips": case.num_clips,
        "clips_per_s": case.num_clips / seconds,
        "seconds": seconds,
        "mib": num_bytes / 2**20,
    }


def _train(case: Case, folder: Path, name: str, overrides: Sequence[str]) -> Row:
    steps = [f"args.train_iters={case.num_steps}", f"args.log_interval={case.log_interval}"]
    started = time.perf_counter()
    _cogfast(case, "train", folder, [*overrides, *steps])
    seconds = time.perf_counter() - started
    (path,) = folder.glob("*/metrics.jsonl")
    # That of 2B has 27 GB, and the disk of a machine may not hold those of all runs.
    shutil.rmtree(path.parent / "checkpoints")
    # The first line includes the start of the readers.
    lines = [json.loads(line) for line in path.read_text().splitlines()][1:]
    waited, took = (sum(line[key] for line in lines) for key in ("data_wait_ms", "step_ms"))
    return {
        "run": name,
        "clips": case.num_clips,
        "clips_per_s": statistics.median(line["samples_per_s"] for line in lines),
        "step_median_ms": statistics.median(line["step_ms"] for line in lines),
        "data_wait_percent": 100 * waited / took,
        "seconds": seconds,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of data_runs.json")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test this program")
    arguments = parser.parse_args(argv)
    out, load = arguments.out, os.getloadavg()[0]
    if arguments.tiny:
        outcome = measure_data_runs(Settings(torch.device("cpu"), is_tiny=True))
    else:
        outcome = measure_quickstart()
    load_average = {"before": load, "after": os.getloadavg()[0]}
    more = {"is_tiny": arguments.tiny, "load_average": load_average}
    return finish(outcome, out / "data_runs.json", "data_runs", **more)


if __name__ == "__main__":
    sys.exit(main())
