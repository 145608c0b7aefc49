"""Folders of safetensors files: read by tensor name, written one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from cogfast.config.json_files import InsideNames, brief, keys, read_json
from cogfast.core.files import ChecksumFile
from cogfast.model.weights.formats.tensor_stream import Outgoing

_INDEX = keys({"weight_map": InsideNames})
MOST_BYTES = 5 * 10**9  # of a file; the default limit of diffusers and transformers, 5 GB
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class SafetensorsFiles:
    """The tensors of the *.safetensors files in a folder, or of one file.

    ValueError for damaged files and for a folder that contradicts its index.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        index = None if path.is_file() else _index_of(path)
        paths = [path] if path.is_file() else _files_of(path, index)
        self._open, self._file_of = {}, {}
        self.metadata: dict[str, str] = {}
        for file in paths:
            try:
                # Maps the file into memory and parses its header; no tensor is read yet.
                opened = self._open[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                reason = brief(str(error))
                raise ValueError(
                    f"{file}: truncated or damaged ({reason}); copy it again"
                ) from None
            # Files of one folder have the same header entries; a LoRA is one file.
            self.metadata |= opened.metadata() or {}
            for key in opened.keys():  # noqa: SIM118 - not a dict
                # The file read last would win, and hide that the folder mixes two models.
                if key in self._file_of:
                    raise ValueError(
                        f"{file}: {brief(key)} is also in {self._file_of[key].name}; the folder mixes "
                        "two models, keep the files of one"
                    )
                self._file_of[key] = file
        _check_index(path, index or {}, self._file_of)

    def names(self) -> list[str]:
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open[self._file_of[name]].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        found = self._open[self._file_of[name]].get_slice(name).get_dtype()
        if found not in _DTYPES:
            raise ValueError(
                f"{self._file_of[name]}: {brief(name)} is {found}, but weights must be "
                f"{', '.join(_DTYPES)}; use weights that are not quantized"
            )
        return _DTYPES[found]

    def read(self, name: str) -> Tensor:
        return self._open[self._file_of[name]].get_tensor(name)

    def read_range(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        # A slice reads only its own bytes of the file.
        found = self._open[self._file_of[name]].get_slice(name)
        return found[(slice(None),) * dim + (slice(start, stop),)]


def _index_of(folder: Path) -> dict[str, str] | None:
    """Return {tensor: file} of the folder's index; None if it has no index."""
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if not indexes:
        return None
    index = read_json(indexes[0], _INDEX)["weight_map"]
    # Programs differ in which of the two they read.
    whole = indexes[0].name.removesuffix(".index.json")
    if whole not in index.values() and (folder / whole).is_file():
        raise ValueError(
            f"{folder}: has {whole}, which holds a whole model, and {brief(indexes[0].name)}, which names "
            "other files; keep the files of one"
        )
    return index


def _files_of(folder: Path, index: dict[str, str] | None) -> list[Path]:
    if index is None:
        paths = sorted(folder.glob("*.safetensors"))
        says = "it is not a regular file"
    else:
        paths = [folder / name for name in sorted(set(index.values()))]
        says = f"its index names {len(paths)} files"
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise ValueError(f"{folder}: {brief(absent[0])} is missing, {says}; copy it again")
    return paths


def _check_index(path: Path, index: dict[str, str], file_of: dict[str, Path]) -> None:
    for name, file in index.items():
        if name not in file_of or file_of[name] != path / file:
            raise ValueError(
                f"{path}: by its index {brief(name)} is in {brief(file)}, which does not hold it; "
                "the files belong to different models, copy the folder again"
            )


def plan_files(
    tensors: Sequence[Outgoing], stem: str, most_bytes: int = MOST_BYTES
) -> dict[str, list[Outgoing]]:
    """Distribute tensors to files: {file name: tensors}, in order. No file is larger than most_bytes
    unless one tensor is."""
    # Greedy and in order, as diffusers and transformers divide their files.
    groups: list[list[Outgoing]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > most_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    if len(groups) == 1:
        return {f"{stem}.safetensors": groups[0]}
    count = len(groups)
    return {f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors": g for i, g in enumerate(groups)}


def write_safetensors_folder(
    folder: Path, stem: str, tensors: Sequence[Outgoing], most_bytes: int = MOST_BYTES
) -> None:
    """Write <stem>.safetensors, or <stem>-00001-of-0000N.safetensors and so on with an index."""
    files = plan_files(tensors, stem, most_bytes)
    for name, held in files.items():
        write_safetensors(folder / name, held)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(t.nbytes for t in tensors)},
            "weight_map": {t.name: name for name, held in files.items() for t in held},
        }
        write_json(folder / f"{stem}.safetensors.index.json", index)


def write_safetensors(
    path: Path, tensors: Sequence[Outgoing], metadata: dict[str, str] | None = None
) -> str:
    """Write one file with one tensor in memory at a time, and return its checksum."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    # Offsets count from the end of the header, and tensors follow without a gap.
    place = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, place + tensor.nbytes],
        }
        place += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors; readers map them into memory
    with ChecksumFile(path) as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            out.write(tensor.bytes())
    return out.checksum


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
