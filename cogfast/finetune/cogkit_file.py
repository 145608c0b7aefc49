"""Reads the YAML of CogKit, whose keys are those of CogVideo's trainer with some of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cogfast.schema.merged_config import to_dict
from cogfast.schema.values import cut, nearest, show
from cogfast.schema.yaml_files import read_yaml

# CogKit's strategy -> ZeRO stage
_STAGES = {
    "DDP": 2,  # the same numbers as without shards, in less memory
    "SHARD_GRAD_OP": 2,
    "_HYBRID_SHARD_ZERO2": 2,
    "FULL_SHARD": 3,
    "HYBRID_SHARD": 3,
}
# Accepted, since they change no result.
_UNUSED = ("log_level", "no_grad_sync_when_accumulating")
# Refused if they are on: a run without them would need more memory or see other batches.
_REFUSED = {
    "offload_params_grads": "use --deepspeed_config with offload_param and offload_optimizer",
    "enable_packing": "use data.params.buckets=[[frames, rows, columns], ...]",
    "low_vram": "use a bf16 model; args.activation_checkpointing=full saves the most memory",
}


def read_cogkit(file: Path, known: list[str]) -> dict[str, Any]:
    """Return the options that the file sets. known: names of options."""
    options: dict[str, Any] = {}
    overrides: list[str] = []
    for key, value in to_dict(read_yaml(file, str(file), is_plain=True)).items():
        if key in _REFUSED:
            if value:
                raise ValueError(
                    f"{file}: {key}={show(value)} has no counterpart in cogfast; remove it, and "
                    f"{_REFUSED[key]}"
                )
        elif key == "strategy":
            if value not in _STAGES:
                raise ValueError(
                    f"{file}: strategy={show(value)} must be one of {', '.join(_STAGES)}; use DDP for "
                    "the numbers of plain data parallelism"
                )
            overrides.append(f"deepspeed.zero_optimization.stage={_STAGES[value]}")
        elif key == "name4train":
            overrides.append(f"args.experiment_name={json.dumps(value)}")
        elif key in known:
            options[key] = value
        elif key not in _UNUSED:
            names = [*known, *_REFUSED, *_UNUSED, "strategy", "name4train"]
            raise ValueError(
                f"{file}: unknown key {cut(key)}{nearest(key, names) or '; remove it'}"
            )
    # CogKit says fp32 where CogVideo's trainer says no.
    if options.get("mixed_precision") == "fp32":
        options["mixed_precision"] = "no"
    # CogKit has no model_type: its model names end in t2v or i2v.
    options.setdefault("model_type", str(options.get("model_name"))[-3:])
    # The metadata of data_root has both columns.
    options |= {"caption_column": ".", "video_column": "."}
    return options | {"overrides": overrides}
