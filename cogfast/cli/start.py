"""`cogfast train FOLDER --data PATH --lora RANK`, and so `plan` and `cache`: a run without a YAML file."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from cogfast.config.sat_network import POSITION_KEY
from cogfast.core.values import nearest_folder
from cogfast.extensions.stores.mirror import copy_of

# Keys of the configuration to values and to where they come from, for messages
Settings = dict[str, tuple[object, str]]


def add_options(parser: argparse.ArgumentParser, rank: Callable[[str], int]) -> None:
    """Add the options that set keys. rank: reads LoRA's rank."""
    text = "videos to train on, a path or an address such as s3://bucket/clips, in any layout of docs/data.md; may be repeated"
    parser.add_argument("--data", action="append", metavar="PATH", help=text)
    text = "train LoRA adapters of this rank; without it, all weights"
    parser.add_argument("--lora", type=rank, metavar="RANK", help=text)
    text = "folder or address in which cogfast train creates the run's folder; default: runs"
    parser.add_argument("--out", metavar="DIR", help=text)


def settings_of(found: argparse.Namespace) -> Settings:
    """Return the keys that the options of `add_options` set."""
    values = {"train_data": "data", "lora_rank": "lora", "save": "out"}
    given = {key: (getattr(found, name), f"--{name}") for key, name in values.items()}
    return {f"args.{key}": each for key, each in given.items() if each[0] is not None}


def find_model(
    folder: str, settings: Settings, has_data: bool, may_download: bool, is_read: bool
) -> tuple[list[str], Settings]:
    """Return the packaged files for a model's folder, and `settings` with the keys that fit them to it.

    folder: a diffusers pipeline, its id on the hub, or a folder of SAT's. has_data: args.train_data is
    set elsewhere. is_read: all weights of a pipeline are needed.
    """
    from cogfast.extensions.pipeline_folder.pipeline_folder import (
        find_config,
        hub_folder,
        is_hub_id,
        needed_files,
    )

    folder = copy_of(folder, may_download=may_download)
    path = Path(folder)
    if is_hub_id(folder):
        path = hub_folder(folder, "FOLDER", may_download)
    if not path.is_dir():
        raise ValueError(
            f"{folder}: no such folder; give the folder of a CogVideoX pipeline, or its id on the hub"
            f"{'; a file goes after --base' if path.is_file() else nearest_folder(path)}"
        )
    if (path / "training_config.yaml").is_file():
        text = f"is a run; train on with --resume {folder} alone, or give --base"
        raise ValueError(f"{folder}: {text} {folder}/training_config.yaml args.load={folder}")
    if not any((path / name).is_file() for name in ("model_index.json", "latest")):
        raise ValueError(
            f"{folder}: has no model_index.json; give the folder of a CogVideoX pipeline of diffusers, "
            "or SAT's transformer folder"
        )
    if not has_data and "args.train_data" not in settings:
        raise ValueError("--data is missing; give the folder of your videos: --data my_videos")
    if is_read and (path / "model_index.json").is_file():
        lacking = [name for name in needed_files(path) if not (path / name).is_file()]
        if lacking:
            raise ValueError(
                f"{folder}: has no {lacking[0]}, as after a download that was interrupted; repeat it: hf download "
                f"OWNER/MODEL --local-dir {folder}"
            )
    model, values = find_config(path)
    if "args.lora_rank" in settings:
        values["args.experiment_name"] = "lora"
    # Training has whole-numbered positions, as both upstream trainers.
    values.pop(f"{POSITION_KEY}.positions", None)
    values["args.mode"] = "finetune"
    names = [*(["lora.yaml"] if "args.lora_rank" in settings else []), "sft.yaml"]
    base = [str(model), *(str(model.with_name(name)) for name in names)]
    return base, {key: (value, str(path)) for key, value in values.items()} | settings
