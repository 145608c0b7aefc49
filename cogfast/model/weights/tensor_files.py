"""Files of tensors, safetensors and torch.save's: read by tensor name, written one tensor at a time."""

from __future__ import annotations

import json
import math
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy._core.multiarray import _reconstruct
from torch import Tensor

from cogfast.core.files import LFS, is_disk_full, is_lfs_pointer, write_hashed
from cogfast.core.json_files import InsideNames, brief, keys, read_json

# The *.bin files of weights; accelerate has others beside them.
TORCH_FILES = "*pytorch_model*.bin"
_NESTED = ("model", "module", "state_dict")  # keys of the weights beside other states
# Types of numpy's generator state, which SAT's training checkpoints contain
_NUMPY_TYPES: list[Any] = [_reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32)), np.uint32]
_INDEX = keys({"weight_map": InsideNames})
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_SPARE_BYTES = 64 << 20  # of disk space: headers, config files, what other processes write
# Bytes of a tensor whose rows share numbers: a file of a few bytes must not fill the memory.
_MOST_EXPANDED = 2**28


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A tensor to be written, with the target's name, shape and dtype. `read` returns its values, in
    any dtype and any shape with the same number of elements."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def bytes(self) -> memoryview:
        """Read the tensor and return its bytes as they are written to a file. ValueError for values
        that the file's dtype cannot represent."""
        values = self.read().detach()
        assert values.numel() == math.prod(self.shape), f"{self.name}: {values.shape}"
        written = values.to(self.dtype).contiguous()
        if written.dtype != values.dtype:
            low, high = (extreme.item() for extreme in values.aminmax())  # sync: none, on the CPU
            limit = torch.finfo(self.dtype).max
            if not -limit <= low <= high <= limit:
                raise ValueError(
                    f"{self.name} has numbers from {low:g} to {high:g}, but {self.dtype} ends at {limit:g}; "
                    "use a --dtype of a larger range (bf16, fp32)".replace("torch.", "")
                )
        # numpy has no bfloat16, so it gets bytes.
        return written.view(-1).view(torch.uint8).numpy().data


@contextmanager
def new_folder(path: Path, nbytes: int) -> Iterator[Path]:
    """Create a temporary folder to write `nbytes` into; it is renamed to `path` on success and deleted
    on failure. The temporary folder of an earlier, killed conversion is deleted first.

    ValueError if `path` is not empty or the disk has too little space.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path}: the target is not empty; give a folder that does not exist")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target and so on its disk, where a rename is atomic.
    folder = path.with_name(path.name + ".incomplete")
    shutil.rmtree(folder, ignore_errors=True)
    # After the remains of an earlier conversion are gone, which may be the space that is missing.
    free = shutil.disk_usage(path.parent).free
    if nbytes + _SPARE_BYTES > free:
        text = f"{path}: {_gib(nbytes + _SPARE_BYTES)} are needed, but {_gib(free)} are free there"
        raise ValueError(f"{text}; free disk space or use another disk")
    folder.mkdir()
    try:
        yield folder
        # An empty folder at `path` is replaced, too.
        os.replace(folder, path)
    except OSError as error:
        what = "the disk is full" if is_disk_full(error) else error.strerror or error
        text = f"{path}: {what}, {_gib(nbytes)} are needed; the incomplete target was deleted, the source is "
        raise ValueError(f"{text}unchanged; free disk space or use another disk") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


class SafetensorsFiles:
    """The tensors of the *.safetensors files in a folder, or of one file.

    ValueError for damaged files and for a folder that contradicts its index.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        paths = [path] if path.is_file() else _files_of(path, "*.safetensors")
        self._open, self._file_of = {}, {}
        self.metadata: dict[str, str] = {}
        for file in paths:
            try:
                # Maps the file into memory and parses its header; no tensor is read yet.
                opened = self._open[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                why = f"truncated or damaged ({brief(str(error))}); copy it again"
                if is_lfs_pointer(file):
                    why = LFS
                if not os.access(file, os.R_OK):  # safetensors says that there is no such file
                    why = "cannot be read (Permission denied); check its rights"
                raise ValueError(f"{file}: {why}") from None
            # Files of one folder have the same header entries; a LoRA is one file.
            self.metadata |= opened.metadata() or {}
            for key in opened.keys():  # noqa: SIM118 - not a dict
                # The file read last would win, and hide that the folder mixes two models.
                if key in self._file_of:
                    text = f"{file}: {brief(key)} is also in {self._file_of[key].name}"
                    raise ValueError(f"{text}; the folder mixes two models, keep the files of one")
                self._file_of[key] = file

    def names(self) -> list[str]:
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open[self._file_of[name]].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        found = self._open[self._file_of[name]].get_slice(name).get_dtype()
        if found not in _DTYPES:
            text = f"{self._file_of[name]}: {brief(name)} is {found}, but weights must be {', '.join(_DTYPES)}"
            raise ValueError(f"{text}; use weights that are not quantized")
        return _DTYPES[found]

    def read(self, name: str) -> Tensor:
        return self._open[self._file_of[name]].get_tensor(name)


class TorchFiles:
    """The tensors of the TORCH_FILES in a folder, or of one file of torch.save; see SafetensorsFiles."""

    def __init__(self, path: Path) -> None:
        self.metadata: dict[str, str] = {}
        self._tensors: dict[str, Tensor] = {}
        for file in [path] if path.is_file() else _files_of(path, TORCH_FILES):
            content = read_torch_file(file)
            nested = (content[key] for key in _NESTED if isinstance(content.get(key), dict))
            found = only_tensors(file, next(nested, content))
            if twice := found.keys() & self._tensors.keys():
                text = f"{file}: {brief(min(twice))} is in another file, too; keep the files of one model"
                raise ValueError(text)
            self._tensors |= found

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


def open_tensors(path: Path) -> SafetensorsFiles | TorchFiles:
    """Open the safetensors files of a folder or its TORCH_FILES, or one file of either kind."""
    named, others = ([*path.glob(kind)] for kind in ("*.safetensors*", TORCH_FILES))
    if named and others:
        text = f"{path}: has weights in {named[0].name} and in {others[0].name}, which may be two models"
        raise ValueError(f"{text}; keep the files of one")
    is_torch = path.suffix == ".bin" if path.is_file() else not named
    return TorchFiles(path) if is_torch else SafetensorsFiles(path)


def _files_of(folder: Path, kind: str) -> list[Path]:
    """Return the files that a folder's index names, or all of a kind if it has no index."""
    names = sorted(path.name for path in folder.glob(kind))
    if indexes := sorted(folder.glob(f"{kind}.index.json")):
        # Programs differ in which of the two they read.
        whole, present = indexes[0].name.removesuffix(".index.json"), names
        names = sorted(set(read_json(indexes[0], _INDEX)["weight_map"].values()))
        if whole in present and whole not in names:
            text = f"{folder}: has {whole}, which holds a whole model, and {brief(indexes[0].name)}"
            raise ValueError(f"{text}, which names other files; keep the files of one")
    if absent := [name for name in names if not (folder / name).is_file()]:
        text = f"{folder}: {brief(absent[0])}, one of {len(names)} files"
        raise ValueError(f"{text}, is missing or no regular file; copy it again")
    return [folder / name for name in names]


def write_safetensors_folder(
    folder: Path, tensors: Sequence[Outgoing], most_bytes: int = 5 * 10**9
) -> None:
    """Write diffusers' file of weights, or several with an index. No file is larger than most_bytes unless
    one tensor is; the default is that of diffusers and transformers."""
    from huggingface_hub import split_state_dict_into_shards_factory  # not in a start's imports

    named = {tensor.name: tensor for tensor in tensors}
    split = split_state_dict_into_shards_factory(
        named,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="diffusion_pytorch_model{suffix}.safetensors",
        max_shard_size=most_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        write_safetensors(folder / file, [named[name] for name in names])
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / "diffusion_pytorch_model.safetensors.index.json", index)


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
    start = len(text).to_bytes(8, "little") + text
    return write_hashed(path, chain([start], (tensor.bytes() for tensor in tensors)))


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def read_torch_file(path: Path) -> dict[str, Any]:
    """Read a .pt file; only tensors and plain data are unpickled.

    Tensors are mapped into memory, except those of the format before torch 1.6, which is no zip
    archive. ValueError for a file that is damaged or contains other objects.
    """
    try:
        is_zip = zipfile.is_zipfile(path)
        if is_zip:
            # Mapped, compressed entries would be read as other numbers, and the pickle could fill the memory.
            with zipfile.ZipFile(path) as archive:
                if {entry.compress_type for entry in archive.infolist()} != {zipfile.ZIP_STORED}:
                    raise ValueError("compressed, which torch.save never does")
        with torch.serialization.safe_globals(_NUMPY_TYPES):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"{path}: cannot be read ({reason}); check its rights") from None
    except Exception as error:  # on a damaged pickle the unpickler may raise nearly any type
        lines = [line.strip() for line in str(error).splitlines()]
        if reason := next((line for line in lines if "GLOBAL" in line), ""):
            text = f"{path}: refused, since reading it would run pickled code ({brief(reason)})"
            text += "; save it again with tensors only: torch.save({'module': state_dict}, path)"
            raise ValueError(text) from None
        if is_lfs_pointer(path):
            raise ValueError(f"{path}: {LFS}") from None
        # PyTorch's own text asks the reader to file an issue.
        text = f"{path}: truncated or damaged, or not a file of torch.save"
        raise ValueError(f"{text}; copy it again and compare its size with the original") from None
    return content if isinstance(content, dict) else {}


def write_torch_file(path: Path, key: str, tensors: Sequence[Outgoing]) -> None:
    """Write {key: {name: tensor}} with torch.save.

    Until then each tensor lies in a file that is mapped into memory, so that the process holds one
    at a time. On the disk this takes the space of all of them a second time.
    """
    held: dict[str, Tensor] = {}
    scratch = path.with_name(f"{path.name}.tensor")
    for tensor in tensors:
        scratch.write_bytes(tensor.bytes())
        size = math.prod(tensor.shape)
        mapped = torch.from_file(str(scratch), shared=False, size=size, dtype=tensor.dtype)
        held[tensor.name] = mapped.view(tensor.shape)
        scratch.unlink()  # its bytes stay as long as they are mapped
    with path.open("wb") as file:
        torch.save({key: held}, file)


def only_tensors(path: Path, content: object) -> dict[str, Tensor]:
    """Return the tensors among the entries of `content`, read from `path`. ValueError if it is no
    mapping, and for tensors without all their elements in the file."""
    if not isinstance(content, dict):
        kind = type(content).__name__
        text = f"{path}: has a {kind} instead of a mapping of names to tensors, so it is no checkpoint of SAT"
        raise ValueError(f"{text}; copy it again")
    found = {k: v for k, v in content.items() if isinstance(k, str) and isinstance(v, Tensor)}
    for name, tensor in found.items():
        # weights_only still builds sparse tensors and views from the numbers in the pickle.
        is_plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
        # Rows that share numbers. A sparse tensor has no number of bytes.
        if not is_plain or tensor.nbytes > max(_MOST_EXPANDED, tensor.untyped_storage().nbytes()):
            text = f"{path}: {brief(name)} is not a plain tensor (sparse, or with fewer elements than its shape "
            text += "has); save it again with torch.save({'module': state_dict}, path)"
            raise ValueError(text)
    return found
