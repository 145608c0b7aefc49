"""Reads and writes torch.save's files without holding all their tensors in memory."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cogfast.config.json_files import brief
from cogfast.model.weights.formats.tensor_stream import Outgoing

# Bytes of a tensor whose rows share numbers: a file of a few bytes must not fill the memory.
_MOST_EXPANDED = 2**28


def read_torch_file(path: Path) -> dict[str, Any]:
    """Read a .pt file; only tensors and plain data are unpickled.

    Tensors are mapped into memory, except those of the format before torch 1.6, which is no zip
    archive. ValueError for a file that is damaged or contains other objects.
    """
    try:
        is_zip = zipfile.is_zipfile(path)
        if is_zip:
            _check_stored(path)
        with torch.serialization.safe_globals(_numpy_rng_globals()):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"{path}: cannot be read ({reason}); check its rights") from None
    except Exception as error:  # on a damaged pickle the unpickler may raise nearly any type
        lines = [line.strip() for line in str(error).splitlines()]
        reason = next((line for line in lines if "GLOBAL" in line), "")
        if reason:
            raise ValueError(
                f"{path}: refused, since reading it would run pickled code ({brief(reason)}); save it "
                "again with tensors only: torch.save({'module': state_dict}, path)"
            ) from None
        # PyTorch's own text asks the reader to file an issue.
        raise ValueError(
            f"{path}: truncated or damaged, or not a file of torch.save; copy it again and compare its "
            "size with the original"
        ) from None
    return content if isinstance(content, dict) else {}


def _check_stored(path: Path) -> None:
    """Raise ValueError for compressed entries: mapped, they would be read as other numbers, and the
    pickle could fill the memory."""
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{entry.filename} is compressed, which torch.save never does")


def _numpy_rng_globals() -> list[Any]:
    """Return the types of numpy's generator state, which SAT's training checkpoints contain."""
    import numpy as np
    from numpy._core.multiarray import _reconstruct

    return [_reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32)), np.uint32]


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
        raise ValueError(
            f"{path}: has a {kind} instead of a mapping of names to tensors, so it is no checkpoint "
            "of SAT; copy it again"
        )
    found = {k: v for k, v in content.items() if isinstance(k, str) and isinstance(v, Tensor)}
    for name, tensor in found.items():
        # weights_only still builds sparse tensors and views from the numbers in the pickle.
        is_plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
        # Rows that share numbers. A sparse tensor has no number of bytes.
        if not is_plain or tensor.nbytes > max(_MOST_EXPANDED, tensor.untyped_storage().nbytes()):
            raise ValueError(
                f"{path}: {brief(name)} is not a plain tensor (sparse, or with fewer elements than "
                "its shape has); save it again with torch.save({'module': state_dict}, path)"
            )
    return found
