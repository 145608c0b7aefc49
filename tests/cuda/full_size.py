"""Configurations of full-size models that train on drawn latents and embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from cogfast.config import Config, load_config

# Frames, rows and columns of a clip, its latents [C, T, h, w], and its caption's embedding [L, E]
SHAPES = {
    "2b": ((49, 480, 720), [16, 13, 60, 90], [226, 4096]),
    "5b": ((49, 480, 720), [16, 13, 60, 90], [226, 4096]),
    "1.5_5b": ((81, 768, 1360), [16, 22, 96, 170], [224, 4096]),
}
SHAPES |= {f"{name}_i2v": SHAPES[name] for name in ("5b", "1.5_5b")}


def load(model: str, mode: str, words: list[str], folder: Path) -> tuple[Config, Config]:
    """Return the configuration to run, whose data are latents, and the one to plan, with their clips."""
    (frames, rows, columns), latents, text = SHAPES[model]
    separator = "" if model.startswith("1.5") else "_"
    content: Any = OmegaConf.load(Path("configs") / f"cogvideox{separator}{model}.yaml")
    for key in ("conditioner_config", "first_stage_config"):
        del content["model"][key]
    planned = folder / "planned.yaml"
    OmegaConf.save(content, planned)
    content["data"] = {
        "target": "bench.checks.encoded_samples.EncodedSamples",
        "params": {
            "num_samples": 8,
            "latent_shape": latents,
            "text_shape": text,
            "has_images": model.endswith("_i2v"),
        },
    }
    OmegaConf.save(content, folder / "model.yaml")
    files = [*(["configs/lora.yaml"] if mode == "lora" else []), "configs/sft.yaml"]
    given = [
        "args.train_data=[none]",
        "args.load=null",
        "args.num_workers=0",
        "args.warmup_steps=1",
        "args.mode=pretrain",
        "args.save_interval=null",
        "args.attention_backend=flash",
    ]
    given.append(f"args.save={folder}")
    clips = [
        f"data.params.video_size=[{rows},{columns}]",
        f"data.params.max_num_frames={frames}",
        "args.latent_cache=none",  # nothing is encoded
    ]
    return (
        load_config([folder / "model.yaml", *files], given + words, allow_import=["bench"]),
        load_config([planned, *files], given + clips + words),
    )
