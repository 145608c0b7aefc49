"""Where what was found out about files is kept between runs: headers of videos, members of shards."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path


def index_file(kind: str, names: Iterable[str]) -> Path:
    """The file of an index of `names`, in the user's cache folder (XDG_CACHE_HOME, ~/.cache)."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.blake2b("\n".join(names).encode("utf-8", "surrogatepass"), digest_size=10)
    return Path(folder) / "cogfast" / f"{kind}-{digest.hexdigest()}.jsonl"
