"""Our own format: safetensors files under our names and the TransformerConfig, in one folder."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cogfast.json_files import read_json
from cogfast.model.weights.safetensors_files import (
    SafetensorsFiles,
    write_json,
    write_safetensors_folder,
)
from cogfast.model.weights.shard import Shard
from cogfast.model.weights.source import WeightSource
from cogfast.model.weights.tensor_stream import Outgoing, new_folder

if TYPE_CHECKING:
    from cogfast.model.transformer import TransformerConfig

FORMAT = "cogfast-weights-1"
_STEM = "weights"


def is_cogfast_folder(path: Path) -> bool:
    try:
        return read_json(path / "config.json").get("format") == FORMAT
    except ValueError:  # whoever reads the folder then says what is wrong
        return False


def open_cogfast(path: Path) -> WeightSource:
    """The weights in a folder that write_cogfast wrote."""
    from cogfast.model.transformer import TransformerConfig  # which imports weights/

    file = path / "config.json"
    try:
        config = read_json(file, TransformerConfig)
    except ValueError as error:  # some are its own, about values that do not go together
        text = str(error)
        raise ValueError(text if text.startswith(str(file)) else f"{file}: {text}") from None
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    files = SafetensorsFiles(path)

    def read(name: str, shard: Shard | None) -> Tensor:
        if shard is None or len(files.shape(name)) != len(shard.shape):
            return files.read(name) if shard is None else shard.of(files.read(name))
        stretches = [files.read_range(name, shard.dim, *r) for r in shard.ranges]
        return torch.cat(stretches, shard.dim)

    return WeightSource(
        description=f"weights of cogfast {path}",
        shapes={name: files.shape(name) for name in files.names()},
        read=read,
        dtypes={name: files.dtype(name) for name in files.names()},
        facts=fields,
        lora_alpha=fields["lora_alpha"] if fields["lora_rank"] is not None else None,
    )


def write_cogfast(
    source: WeightSource,
    config: TransformerConfig,
    path: Path,
    dtype: torch.dtype | None = None,
) -> None:
    """A folder with every tensor of `source`. dtype: of the weights; None: the source's."""
    tensors = [
        Outgoing(name, shape, source.dtype_in_target(name, dtype), partial(source.read, name, None))
        for name, shape in source.shapes.items()
    ]
    with new_folder(path, sum(t.nbytes for t in tensors)) as folder:
        write_json(folder / "config.json", {"format": FORMAT, **asdict(config)})
        write_safetensors_folder(folder, _STEM, tensors)
