"""A list of strings in two buffers, which forked workers share instead of copying."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


class PackedStrings(Sequence[str]):
    """Strings by index.

    A plain list of a million paths grows in every forked worker: reading an element changes its
    reference count, and so copies the memory page that it is on.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        # surrogatepass: file names need not be valid UTF-8.
        encoded = [s.encode("utf-8", "surrogatepass") for s in strings]
        self._bytes = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self._ends = np.cumsum([0, *(len(e) for e in encoded)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:
        if not -len(self) <= index < len(self):
            raise IndexError(f"{index=} of {len(self)} strings")
        index %= len(self)
        text = self._bytes[self._ends[index] : self._ends[index + 1]].tobytes()
        return text.decode("utf-8", "surrogatepass")
