"""The tensors of a target, described before they are read, and the folder that they go to."""

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

from cogfast.files import is_disk_full

_SPARE_BYTES = 64 << 20  # of a disk: headers, config files, what others write meanwhile


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A tensor of a target: its name and shape there; `read` gives its numbers, in any dtype and
    any shape of as many, when their turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def bytes(self) -> memoryview:
        """Its numbers as they stand in a file, in memory of this process for as long as they are
        referred to."""
        values = self.read().detach().to(self.dtype).contiguous()
        assert values.numel() == math.prod(self.shape), f"{self.name}: {values.shape}"
        return memoryview(values.view(-1).view(torch.uint8).numpy())


@contextmanager
def new_folder(path: Path, nbytes: int) -> Iterator[Path]:
    """A folder to write `nbytes` into, which becomes `path` when all went well and vanishes when
    not; what an earlier conversion that was killed left there is removed.

    ValueError where `path` holds something or the disk has no room.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path}: the target is not empty; name a folder that does not exist yet")
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = path.with_name(path.name + ".incomplete")
    shutil.rmtree(folder, ignore_errors=True)
    _check_room(path, nbytes)
    folder.mkdir()
    try:
        yield folder
        os.replace(folder, path)
    except OSError as error:
        what = "the disk is full" if is_disk_full(error) else error.strerror or error
        raise ValueError(
            f"{path}: {what}, {_gib(nbytes)} were to be written; nothing is left of the attempt, "
            "the source is as it was; make room or name another disk"
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_room(path: Path, nbytes: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if nbytes + _SPARE_BYTES > free:
        raise ValueError(
            f"{path}: {_gib(nbytes)} are to be written and {_gib(free)} are free there; make room "
            "or name another disk"
        )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
