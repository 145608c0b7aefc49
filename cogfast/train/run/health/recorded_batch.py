"""A micro-batch in files, as a run writes it for `cogfast train --replay`.

nonfinite/step-N/rank-R-batch-A.json         where it was read, its random draws, the report
nonfinite/step-N/rank-R-batch-A.safetensors  batch/NAME: its tensors; network/NAME: the network's
                                             inputs
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from torch import Tensor

from cogfast.core.files import write_text, write_whole
from cogfast.model.config import TransformerConfig
from cogfast.schema.json_files import Range, read_json

_Count = Annotated[int, Range(0, 2**53)]
_Seed = Annotated[int, Range(-(2**62), 2**62)]
_NEW = "give a folder nonfinite/step-N of a run"


@dataclass(frozen=True, kw_only=True)
class RecordedBatch:
    """Micro-batch `number` of a rank in `step`, which counts from 1 as in log lines.

    seed, slots, num_slots: of its SlotRandom, whose step is one less. weights_step: the steps that
    its inspection's weights had been trained for. samples: their names. model: the network's sizes.
    texts: lists of strings in the batch, such as captions. report: the finding in words.
    """

    step: _Count
    rank: _Count
    number: _Count
    seed: _Seed
    slots: list[_Count]
    num_slots: _Count
    weights_step: _Count
    loss_scale: float
    attention_backend: str | None
    samples: list[str]
    model: dict[str, str]
    texts: dict[str, list[str]]
    report: str
    batch: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"rank-{self.rank}-batch-{self.number}"

    def write(self, folder: Path) -> None:
        """Write both files; OSError or WriteError if that fails."""
        from safetensors.torch import save

        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"batch/{key}": value for key, value in self.batch.items()}
        tensors |= {f"network/{key}": value for key, value in self.inputs.items()}
        # sync: after a bad step. Copies: safetensors refuses tensors that share memory.
        copies = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
        path = folder / f"{self.name}.safetensors"
        write_whole(path, lambda draft: draft.write_bytes(save(copies)))
        facts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del facts["batch"], facts["inputs"]
        # Last: a folder with this file is complete.
        write_text(folder / f"{self.name}.json", json.dumps(facts, indent=2) + "\n")


def texts_of(batch: dict[str, Any]) -> dict[str, list[str]]:
    """Return the entries of a batch that are lists of strings."""
    return {
        key: value
        for key, value in batch.items()
        if isinstance(value, list) and value and all(isinstance(item, str) for item in value)
    }


def model_facts(config: TransformerConfig) -> dict[str, str]:
    """Return the sizes and options of a network, to recognize it."""
    return {f.name: str(getattr(config, f.name)) for f in dataclasses.fields(config)}


def read_recorded(folder: Path) -> list[RecordedBatch]:
    """Read the micro-batches in a folder that a run wrote.

    ValueError if it has none, or if a file is damaged.
    """
    files = sorted(folder.glob("rank-*-batch-*.json")) if folder.is_dir() else []
    if not files:
        what = "it has no micro-batch" if folder.is_dir() else "no such folder"
        raise ValueError(f"--replay {folder}: {what}; {_NEW}")
    return [_read(file) for file in files]


def _read(file: Path) -> RecordedBatch:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    recorded: RecordedBatch = read_json(file, RecordedBatch, _NEW)
    path = file.with_suffix(".safetensors")
    if not path.is_file():  # a pipe would be read for ever
        raise ValueError(f"{path}: missing, or not a regular file; {_NEW}")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: missing or damaged ({error}); {_NEW}") from None
    found: dict[str, dict[str, Tensor]] = {"batch": {}, "network": {}}
    for key, value in tensors.items():
        part, _, name = key.partition("/")
        found.setdefault(part, {})[name] = value
    is_whole = all(len(v) == len(recorded.slots) for v in found["batch"].values() if v.ndim)
    if not found["batch"] or not is_whole or not recorded.slots:
        raise ValueError(
            f"{path}: its tensors are not those of {len(recorded.slots)} samples; {_NEW}"
        )
    return dataclasses.replace(recorded, batch=found["batch"], inputs=found["network"])
