"""Content hashes of source files and captions, recomputed only for files that changed."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from cogfast.core.files import write_text
from cogfast.data.sources.store import Store

_HASHING_THREADS = 8
_BLOCK = 2**20  # bytes read at once
_UNREADABLE = "unreadable-"  # prefix of the hash of a file that cannot be read


def unreadable(path: Path, error: OSError) -> str:
    """The error message for a file of a cache that cannot be read."""
    return f"args.latent_cache: {path} cannot be read ({error.strerror}); use a readable folder"


def hash_text(text: str) -> str:
    """Hash a caption or any other text."""
    # surrogatepass: file names need not be valid UTF-8.
    encoded = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()


def hash_file(path: str, start: int = 0, num_bytes: int | None = None) -> str:
    """Hash the content of a file or of a part of it; if it cannot be read, hash its name."""
    # hashlib releases the interpreter lock for large blocks, so that threads hash in parallel.
    digest = hashlib.blake2b(digest_size=16)
    left = sys.maxsize if num_bytes is None else num_bytes
    try:
        if not _stamp(path):
            raise FileNotFoundError(path)
        with Store(path).open() as file:
            file.seek(start)
            while block := file.read(min(left, _BLOCK)):
                digest.update(block)
                left -= len(block)
    except OSError:
        return _UNREADABLE + hash_text(path)
    return digest.hexdigest()


class Sources:
    """Content hashes of files, recomputed only when size or mtime changed."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "sources.json"
        try:
            known = json.loads(self.file.read_text()) if self.file.is_file() else {}
        except OSError as error:
            raise ValueError(unreadable(self.file, error)) from None
        except (ValueError, RecursionError):
            known = {}
        # Ignore malformed rows; their files are hashed again.
        rows = known.items() if isinstance(known, dict) else ()
        self.known = {name: row for name, row in rows if _is_row(row)}

    def changed(self, paths: Iterable[str]) -> list[str]:
        """The paths that are new, or whose size or mtime changed since they were hashed."""
        stamp = cache(_stamp)  # many members of a tar shard share its stamp
        return [
            path
            for path in paths
            if _name(path) not in self.known
            or self.known[_name(path)][:-1] != stamp(_file_of(path))
        ]

    def hash(
        self, paths: Sequence[str], parts: Mapping[str, tuple[int, ...]] | None = None
    ) -> dict[str, list]:
        """Hash files in parallel; returns {name: [bytes, mtime, content hash]}.

        The row of a file that cannot be read is [hash of its name]. parts: {path: (offset, bytes)}
        of members of a tar shard, () or no entry for whole files.
        """

        def row(path: str) -> list:
            # Take the stamp first: a file that changes while it is read is then hashed again.
            stamp = _stamp(_file_of(path))
            content = hash_file(_file_of(path), *(parts or {}).get(path, ()))
            return [content] if content.startswith(_UNREADABLE) else [*stamp, content]

        with ThreadPoolExecutor(_HASHING_THREADS) as pool:
            return dict(zip(map(_name, paths), pool.map(row, paths), strict=True))

    def was_unreadable(self, path: str) -> bool:
        """Whether the last attempt to read the file failed; `changed` lists it for another try."""
        return self.known.get(_name(path), [""])[-1].startswith(_UNREADABLE)

    def recorded(self, path: str) -> str:
        """The content hash of a file as of when it was last read."""
        return self.known[_name(path)][-1]

    def content(self, path: str) -> str:
        """The current content hash of a file, which is read if it is new or changed."""
        if self.changed([path]):
            self.known |= self.hash([path])
        return self.recorded(path)

    def write(self) -> None:
        text = json.dumps(self.known, sort_keys=True, indent=0)
        write_text(self.file, text)


def _is_row(row: object) -> bool:
    return isinstance(row, list) and len(row) > 0 and isinstance(row[-1], str)


def _name(path: str) -> str:
    return os.path.abspath(path)


def _file_of(path: str) -> str:
    """The file to read for a path: the tar shard of SHARD::MEMBER, else the path itself."""
    # A file name may itself contain "::"; it counts as a member only if no such file exists.
    shard, mark, _ = path.partition("::")
    return shard if mark and not os.path.exists(path) else path


def _stamp(file: str) -> list[int | str]:
    """[bytes, mtime in nanoseconds] of a file, or [version] of a remote shard.

    Returns [] for a file that cannot be read or is not a regular file; a pipe would block.
    """
    store = Store(file)
    try:
        if store.is_remote:
            # Remote stores need not have an mtime.
            return [store.version()]
        found = os.stat(file)
    except OSError:
        return []
    is_readable = stat.S_ISREG(found.st_mode) and os.access(file, os.R_OK)
    return [found.st_size, found.st_mtime_ns] if is_readable else []
