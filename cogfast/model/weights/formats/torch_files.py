"""Reads and writes torch.save's files without holding all their tensors in memory."""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v2

from cogfast.model.weights.formats.pickle_scan import PickleError, check_pickle
from cogfast.model.weights.formats.tensor_stream import Outgoing
from cogfast.schema.json_files import brief

_ALIGNMENT = 64  # bytes, of every tensor in the file, as in torch.save
_PICKLE_MAGIC = b"\x80\x02"  # first bytes of files that are not zip archives
_ROOT = "archive"
_LOCAL_HEADER_BYTES = 30  # of a zip entry, before its name
_EXTRA_HEADER_BYTES = 4
_STORAGE_TYPES = {
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.float64: torch.DoubleStorage,
}


def read_torch_file(path: Path) -> dict[str, Any]:
    """Read a .pt file with its tensors mapped into memory; only tensors and plain data are unpickled.

    ValueError for a file that is damaged or contains other objects.
    """
    # Before torch.load, which would do the work that a hostile file asks for.
    _check_zip(path)
    _check_pickle(path)
    try:
        with torch.serialization.safe_globals(_numpy_rng_globals()):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines() or [""]
        named = next((line.strip() for line in reason if "GLOBAL" in line), reason[0])
        raise ValueError(
            f"{path}: refused, since reading it would run pickled code ({brief(named)}); save it "
            "again with tensors only: torch.save({'module': state_dict}, path)"
        ) from None
    except Exception as error:  # on a damaged pickle the unpickler may raise nearly any type
        raise _damaged(path, error) from None
    return content if isinstance(content, dict) else {}


def _check_pickle(path: Path) -> None:
    """ValueError where the pickle is damaged, or asks for more than the tensors of a file need."""
    try:
        # torch's own reader is used: if a zip has an entry twice, others may take the other one.
        check_pickle(torch._C.PyTorchFileReader(str(path)).get_record("data.pkl"))
    except PickleError as error:
        raise ValueError(
            f"{path}: refused, its pickle is not one of tensors ({error}); save it again with "
            "tensors only: torch.save({'module': state_dict}, path)"
        ) from None
    except Exception as error:  # pickletools, too, raises many kinds
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> ValueError:
    reason = brief(str(error).partition("\n")[0] or type(error).__name__)
    return ValueError(
        f"{path}: truncated or damaged ({reason}); copy it again and compare its size with the "
        "original"
    )


def _check_zip(path: Path) -> None:
    """Raise ValueError unless `path` is a zip archive with uncompressed entries, as torch.save writes.
    A compressed entry could fill the memory when it is unpacked."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except Exception as error:  # on damaged headers zipfile raises more types than BadZipFile
        try:
            with path.open("rb") as file:
                is_old = file.read(2) == _PICKLE_MAGIC
        except OSError as unread:
            reason = unread.strerror or unread
            raise ValueError(f"{path}: cannot be read ({reason}); check its rights") from None
        if is_old:
            raise ValueError(
                f"{path}: written in the format before torch 1.6, which cannot be mapped into memory; "
                "load it with torch.load and save it again with torch.save"
            ) from None
        raise ValueError(
            f"{path}: truncated or not a file of torch.save ({brief(str(error))}); copy it again "
            "and compare its size with the original"
        ) from None
    size = path.stat().st_size
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > size:
            raise ValueError(
                f"{path}: its entry {brief(entry.filename)} of {entry.file_size} bytes is compressed, "
                "which torch.save never does; save it again with torch.save"
            )


def _numpy_rng_globals() -> list[Any]:
    """Return the types of numpy's generator state, which SAT's training checkpoints contain."""
    import numpy as np
    from numpy._core.multiarray import _reconstruct

    return [_reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32)), np.uint32]


def write_torch_file(path: Path, key: str, tensors: Sequence[Outgoing]) -> None:
    """Write {key: {name: tensor}} as torch.save does, one tensor in memory at a time.

    The file is a zip archive of the pickled dict, whose tensors refer to the entries data/0, data/1,
    ... that hold their bytes.
    """
    with zipfile.ZipFile(path, "w") as archive:
        _add(archive, "data.pkl", memoryview(_pickled(key, tensors)))
        # torch.save writes the same: torch.load reads the byte order here, the format in `version`.
        _add(archive, "byteorder", memoryview(b"little"))
        for index, tensor in enumerate(tensors):
            _add(archive, f"data/{index}", tensor.bytes())
        _add(archive, "version", memoryview(b"3\n"))


def _add(archive: zipfile.ZipFile, name: str, content: memoryview) -> None:
    entry = zipfile.ZipInfo(f"{_ROOT}/{name}")
    entry.file_size = content.nbytes
    assert archive.fp is not None, "the archive is closed"
    place = archive.fp.tell() + _LOCAL_HEADER_BYTES + len(entry.filename) + _EXTRA_HEADER_BYTES
    # An extra field of that length aligns the entry, as torch.save does.
    padding = -place % _ALIGNMENT
    entry.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    with archive.open(entry, "w") as out:
        out.write(content)


class _Storage:
    """Placeholder for a tensor's bytes while the dict is pickled."""

    def __init__(self, index: int, tensor: Outgoing) -> None:
        kind = _STORAGE_TYPES[tensor.dtype]
        self.reference = ("storage", kind, str(index), "cpu", math.prod(tensor.shape))


class _Tensor:
    def __init__(self, index: int, tensor: Outgoing) -> None:
        self.storage, self.shape = _Storage(index, tensor), tensor.shape

    def __reduce__(self) -> tuple:
        # The strides of a contiguous tensor of this shape.
        stride = torch.empty(self.shape, device="meta").stride()
        arguments = (self.storage, 0, self.shape, stride, False, OrderedDict())
        return _rebuild_tensor_v2, arguments


# Bytes of a tensor whose rows share numbers: a file of a few bytes must not fill the memory.
_MOST_EXPANDED = 2**28


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> tuple | None:
        return obj.reference if isinstance(obj, _Storage) else None


def _pickled(key: str, tensors: Sequence[Outgoing]) -> bytes:
    file = io.BytesIO()
    content = {key: {t.name: _Tensor(i, t) for i, t in enumerate(tensors)}}
    # torch.save's default protocol.
    _Pickler(file, protocol=2).dump(content)
    return file.getvalue()


def only_tensors(path: Path, content: object) -> dict[str, Tensor]:
    """Return the tensors among the entries of `content`, read from `path`. ValueError if it is no
    mapping, and for tensors without all their elements in the file."""
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ValueError(
            f"{path}: has a {kind} instead of a mapping of names to tensors, so it is no checkpoint "
            "of SAT; copy it again"
        )
    found = {k: v for k, v in content.items() if isinstance(k, str) and isinstance(v, Tensor)}
    for name, tensor in found.items():
        # weights_only still builds sparse tensors and views from the numbers in the pickle.
        is_plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
        # Rows that share numbers. A sparse tensor has no number of bytes.
        is_large = is_plain and tensor.nbytes > _MOST_EXPANDED
        if not is_plain or (is_large and tensor.nbytes > tensor.untyped_storage().nbytes()):
            raise ValueError(
                f"{path}: {brief(name)} is not a plain tensor (sparse, or with fewer elements than "
                "its shape has); save it again with torch.save({'module': state_dict}, path)"
            )
    return found
