"""Refuses keys of the command line that the command does not read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cogfast.config.arguments import GROUPS, TrainArguments
from cogfast.core.keys import COMMAND_LINE, find_origin, level

_OF_SAMPLING = ("output_dir", "input_type", "input_file", "force_inference", "only_save_latents")


def refuse_sampling_keys(origins: Mapping[str, str], args: Mapping[str, Any]) -> None:
    """Raise ValueError if the command line of `cogfast train` sets a key that only sampling reads, or the
    place of the run twice."""
    for key in (f"args.{name}" for name in _OF_SAMPLING):
        if level(find_origin(origins, key)) > 0:
            fix = "set args.run_folder" if key.endswith("output_dir") else "leave it out"
            raise ValueError(f"{key} is for cogfast sample and has no effect on training; {fix}")
    if args["run_folder"] is not None and "--out" in origins.values():
        raise ValueError(
            f"--out {args['save']} and args.run_folder={args['run_folder']} are both given; keep one"
        )


def refuse_training_keys(origins: Mapping[str, str]) -> None:
    """Raise ValueError if the command line of `cogfast sample` sets a key that only training reads."""
    group = ""
    for name in TrainArguments.model_fields:
        group, key = GROUPS.get(name, group), f"args.{name}"
        is_of_training = group in ("learning rate", "evaluation")
        if is_of_training and find_origin(origins, key) == COMMAND_LINE:
            raise ValueError(
                f"{key} has no effect on sampling; leave it out (cogfast sample --help lists the options)"
            )
