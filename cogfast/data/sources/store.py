"""Access to a shard's bytes, on local disk or through fsspec."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO


def index_file(kind: str, names: Iterable[str]) -> Path:
    """The path of the index of `names` in the user's cache folder (XDG_CACHE_HOME or ~/.cache)."""
    # surrogatepass: file names need not be valid UTF-8.
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.blake2b("\n".join(names).encode("utf-8", "surrogatepass"), digest_size=10)
    return Path(folder) / "cogfast" / f"{kind}-{digest.hexdigest()}.jsonl"


@dataclass(frozen=True, slots=True)
class Store:
    """A shard on local disk, or behind fsspec if its name has a scheme such as s3://."""

    url: str

    @property
    def is_remote(self) -> bool:
        return "://" in self.url

    def open(self) -> BinaryIO:
        if not self.is_remote:
            return open(self.url, "rb")
        file_system, path = _file_system(self.url)
        return file_system.open(path, "rb")

    def version(self) -> str:
        """A version string that changes whenever the shard is rewritten."""
        if not self.is_remote:
            stat = Path(self.url).stat()
            return f"{stat.st_size}-{stat.st_mtime_ns}"
        file_system, path = _file_system(self.url)
        return str(file_system.ukey(path))

    def read(self, offset: int, size: int) -> bytes:
        """Read `size` bytes from `offset`, or fewer if the shard ends before."""
        if not self.is_remote:
            with open(self.url, "rb") as file:
                # Python allocates `size` bytes before it notices that the file is shorter.
                left = os.fstat(file.fileno()).st_size - offset
                file.seek(offset)
                return file.read(max(0, min(size, left)))
        file_system, path = _file_system(self.url)
        return file_system.cat_file(path, start=offset, end=offset + size)

    def beside(self, name: str) -> bytes | None:
        """Read a file in the shard's folder; None if there is none."""
        url = self.url.rpartition("/")[0] + "/" + name if "/" in self.url else name
        if "://" not in url and os.path.exists(url) and not os.path.isfile(url):
            raise ValueError(
                f"{url}: not a file but a folder, pipe or device; put the file of captions there, or "
                "remove it"
            )
        try:
            with Store(url).open() as file:
                return file.read()
        except FileNotFoundError:
            return None


def _file_system(url: str):
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    # No installed package handles the scheme.
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"{url}: fsspec cannot open it ({error}); install the package for its scheme, or correct it"
        ) from None
