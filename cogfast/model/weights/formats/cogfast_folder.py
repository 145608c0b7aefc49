"""cogfast's own format: a folder of safetensors files and a config.json of TransformerConfig."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cogfast.core.files import DamageError, check_checksum, checksum_of
from cogfast.model.config import TransformerConfig
from cogfast.model.weights.formats.safetensors_files import (
    SafetensorsFiles,
    write_json,
    write_safetensors_folder,
)
from cogfast.model.weights.formats.sat_names import is_known
from cogfast.model.weights.formats.tensor_stream import Outgoing, new_folder
from cogfast.model.weights.shard import Shard
from cogfast.model.weights.source import WeightSource
from cogfast.schema.json_files import InsideName, read_json

FORMATS = ("cogfast-weights-1", "cogfast-weights-2")  # the first has no checksums
FORMAT = FORMATS[-1]  # the format that is written
CHECKSUMS = "checksums.json"  # {file: checksum} of all other files in the folder
_STEM = "weights"
_AGAIN = "copy the folder again"
logger = logging.getLogger(__name__)


def is_cogfast_folder(path: Path) -> bool:
    try:
        return read_json(path / "config.json").get("format") in FORMATS
    except ValueError:  # the reader that takes the folder reports the damage
        return False


def open_cogfast(path: Path) -> WeightSource:
    """Open the weights in a folder that write_cogfast wrote. A file's checksum is verified before the
    first of its tensors is read."""
    file = path / "config.json"
    try:
        config = read_json(file, TransformerConfig)
    except ValueError as error:  # TransformerConfig's own errors do not name the file
        text = str(error)
        raise ValueError(text if text.startswith(str(file)) else f"{file}: {text}") from None
    checksums = _checksums(path)
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    files = SafetensorsFiles(path, checksums)

    def read(name: str, shard: Shard | None) -> Tensor:
        # A tensor that is stored flat has no dim to cut along until it is reshaped.
        if shard is None or len(files.shape(name)) != len(shard.shape):
            return files.read(name) if shard is None else shard.of(files.read(name))
        stretches = [files.read_range(name, shard.dim, *r) for r in shard.ranges]
        return torch.cat(stretches, shard.dim)

    # A tensor that no model has is reported, since it may be a misspelled one.
    names = [name for name in files.names() if is_known(name)]
    return WeightSource(
        description=f"weights of cogfast {path}",
        shapes={name: files.shape(name) for name in names},
        read=read,
        dtypes={name: files.dtype(name) for name in names},
        unexpected=sorted(set(files.names()) - set(names)),
        facts=fields,
        lora_alpha=fields["lora_alpha"] if fields["lora_rank"] is not None else None,
    )


def _checksums(path: Path) -> dict[str, str] | None:
    """Return the checksums of the folder's files and verify the JSON files; None for a folder of the
    first format, which has none."""
    config = path / "config.json"
    if read_json(config)["format"] == FORMATS[0]:
        logger.info("%s: written by an earlier version, without checksums to verify", path)
        return None
    checksums = read_json(path / CHECKSUMS, dict[InsideName, str], _AGAIN)
    for file in sorted(path.glob("*.json")):
        if file.name == CHECKSUMS:
            continue
        try:
            check_checksum(file, checksums.get(file.name, "not known"))
        except DamageError as error:
            raise ValueError(f"{path}: {error}; {_AGAIN}") from None
    return checksums


def write_cogfast(
    source: WeightSource,
    config: TransformerConfig,
    path: Path,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a folder with every tensor of `source`. dtype: of the weights; None: the source's."""
    tensors = [
        Outgoing(name, shape, source.dtype_in_target(name, dtype), partial(source.read, name, None))
        for name, shape in source.shapes.items()
    ]
    # config.json first: its checksum is taken from the file, with all others, below.
    with new_folder(path, sum(t.nbytes for t in tensors)) as folder:
        write_json(folder / "config.json", {"format": FORMAT, **asdict(config)})
        checksums = write_safetensors_folder(folder, _STEM, tensors)
        # A changed config.json would load as another model.
        checksums |= {file.name: checksum_of(file) for file in folder.glob("*.json")}
        write_json(folder / CHECKSUMS, checksums)
