"""Counts the memory of tensors while code runs, on the meta device without allocating any."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages that ops create; `peak` is the maximum so far.

    block: sizes are rounded up to a multiple of it, as PyTorch's CUDA allocator does with 512.
    scratch: returns the bytes that an op with these arguments needs besides its results.
    """

    def __init__(
        self, block: int = 1, scratch: Callable[[Any, Sequence[Any]], int] = lambda op, args: 0
    ) -> None:
        super().__init__()
        self.block, self.scratch = block, scratch
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would import torch's compiler at the first op, which takes a second.
        return False

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these, such as weights, when an op returns a view of one."""
        self._sizes |= {tensor.untyped_storage()._cdata: 0 for tensor in tensors}

    def __torch_dispatch__(
        self,
        func: Callable,
        types: Sequence[type],
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            # Views share one storage, which counts once.
            storage = leaf.untyped_storage() if isinstance(leaf, Tensor) else None
            if storage is not None and (key := storage._cdata) not in self._sizes:
                self._sizes[key] = -(-storage.nbytes() // self.block) * self.block
                self.live += self._sizes[key]
                weakref.finalize(storage, self._drop, key)
        self.peak = max(self.peak, self.live + self.scratch(func, args))
        return out

    def _drop(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
