"""Keys of object stores."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from cogfast.core.keys import After, Keys

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", re.IGNORECASE)


class StoreKeys(Keys):
    """Copies of files of object stores."""

    local_cache: Annotated[
        Annotated[str, AfterValidator(lambda text: parse_cache(text) and text)] | None,
        After("cached_noised_images"),
    ] = None
    """FOLDER or FOLDER:SIZE, such as /nvme:500GB: where this machine keeps copies of files of object stores,
    and at most how many bytes of them. null: COGFAST_LOCAL_CACHE, or ~/.cache/cogfast/objects, and half of its disk"""


def parse_cache(text: str) -> tuple[Path, int | None]:
    """Read FOLDER or FOLDER:SIZE, such as /nvme:500GB. ValueError if the size is none."""
    folder, colon, size = text.rpartition(":")
    if not colon and not _SIZE.fullmatch(text):
        return Path(os.path.expanduser(text)).absolute(), None
    match = _SIZE.fullmatch(size)
    number = 0 if match is None else int(float(match[1]) * _UNITS[match[2].upper()])
    if not folder or number <= 0:
        rule = "must be FOLDER or FOLDER:SIZE, as /nvme:500GB, with a SIZE above 0 in bytes, K, M, G or T"
        raise ValueError(f"args.local_cache={text}: {rule}")
    return Path(os.path.expanduser(folder)).absolute(), number
