"""Tensors to be written, described before they are read, and the folder that they are written to."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cogfast.core.files import is_disk_full

_SPARE_BYTES = 64 << 20  # of disk space: headers, config files, what other processes write


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
    _check_free_space(path, nbytes)
    folder.mkdir()
    try:
        yield folder
        # An empty folder at `path` is replaced, too.
        os.replace(folder, path)
    except OSError as error:
        what = "the disk is full" if is_disk_full(error) else error.strerror or error
        raise ValueError(
            f"{path}: {what}, {_gib(nbytes)} are needed; the incomplete target was deleted, the "
            "source is unchanged; free disk space or use another disk"
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_free_space(path: Path, nbytes: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if nbytes + _SPARE_BYTES > free:
        raise ValueError(
            f"{path}: {_gib(nbytes + _SPARE_BYTES)} are needed, but {_gib(free)} are free there; free "
            "disk space or use another disk"
        )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
