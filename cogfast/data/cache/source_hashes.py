"""What stands for the content of files and texts, and which files must be read to know it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from cogfast.data.sources.store import Store
from cogfast.files import write_text

_HASHING_THREADS = 8
_BLOCK = 2**20  # bytes read at once
_UNREADABLE = "unreadable-"  # starts the hash of what cannot be read


def unreadable(path: Path, error: OSError) -> str:
    """What to say where a file of a cache cannot be read."""
    return f"args.latent_cache: {path} cannot be read ({error.strerror}); name a folder that can"


def hash_text(text: str) -> str:
    """What stands for a caption, or any other text."""
    encoded = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()


def hash_file(path: str, start: int = 0, num_bytes: int | None = None) -> str:
    """What stands for a file, or a part of it: its content, or its name where it cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    left = math.inf if num_bytes is None else num_bytes
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
    """Content hashes of files, read again only where size or time of change are other ones."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "sources.json"
        try:
            known = json.loads(self.file.read_text()) if self.file.is_file() else {}
        except OSError as error:
            raise ValueError(unreadable(self.file, error)) from None
        except (ValueError, RecursionError):
            known = {}
        # Of what is not as it was written the files are read again.
        rows = known.items() if isinstance(known, dict) else ()
        self.known = {name: row for name, row in rows if _is_row(row)}

    def changed(self, paths: Iterable[str]) -> list[str]:
        """Those that are new, or look changed, since they were hashed."""
        stamp = cache(_stamp)  # the members of a tar shard have one
        return [
            path
            for path in paths
            if _name(path) not in self.known
            or self.known[_name(path)][:-1] != stamp(_file_of(path))
        ]

    def hash(
        self, paths: Sequence[str], parts: Mapping[str, tuple[int, ...]] | None = None
    ) -> dict[str, list]:
        """{name: [bytes, time of change, content hash]} of the files, several at a time; of what
        cannot be read the last alone.

        parts: {path: offset and bytes of a member of a tar shard, or nothing}.
        """

        def row(path: str) -> list:
            # The stamp first: what changes while it is read looks changed the next time.
            stamp = _stamp(_file_of(path))
            content = hash_file(_file_of(path), *(parts or {}).get(path, ()))
            return [content] if content.startswith(_UNREADABLE) else [*stamp, content]

        with ThreadPoolExecutor(_HASHING_THREADS) as pool:
            return dict(zip(map(_name, paths), pool.map(row, paths), strict=True))

    def was_unreadable(self, path: str) -> bool:
        """Whether it was, when it was last tried; `changed` names it, so that it is tried again."""
        return self.known.get(_name(path), [""])[-1].startswith(_UNREADABLE)

    def recorded(self, path: str) -> str:
        """The content hash of a file when it was last read."""
        return self.known[_name(path)][-1]

    def content(self, path: str) -> str:
        """The content hash of a file; it is read where that must be."""
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
    """Itself, or the tar shard of SHARD::MEMBER."""
    shard, mark, _ = path.partition("::")
    return shard if mark and not os.path.exists(path) else path


def _stamp(file: str) -> list[int | str]:
    """[bytes, time of change in nanoseconds], or a remote shard's version; nothing where the file
    cannot be read, or for ever, as a pipe."""
    store = Store(file)
    try:
        if store.is_remote:
            return [store.version()]
        found = os.stat(file)
    except OSError:
        return []
    is_readable = stat.S_ISREG(found.st_mode) and os.access(file, os.R_OK)
    return [found.st_size, found.st_mtime_ns] if is_readable else []
