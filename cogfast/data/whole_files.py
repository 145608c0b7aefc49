"""Files of a latent cache: there as a whole or not at all; `sync` for whoever waits for a disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

_UNFINISHED = ".incomplete"


class CacheWriteError(RuntimeError):
    """The cache cannot be written; what is in it stays valid."""


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make the file under another name, and rename it when it is on the disk."""
    draft = path.with_name(path.name + _UNFINISHED)
    try:
        write(draft)
        sync(draft)
        draft.replace(path)
        sync(path.parent)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise CacheWriteError(
            f"args.latent_cache: {path} cannot be written ({error}); what is in the cache stays "
            "valid: make room and run `cogfast cache` again, it goes on from there"
        ) from None


def unreadable(path: Path, error: OSError) -> str:
    """What to say where a file of a cache cannot be read."""
    return f"args.latent_cache: {path} cannot be read ({error.strerror}); name a folder that can"


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_unfinished(folder: Path) -> None:
    """What a killed writer left."""
    for path in folder.glob("*" + _UNFINISHED):
        path.unlink()
