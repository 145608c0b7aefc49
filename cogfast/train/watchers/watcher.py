"""The protocol of watchers: metrics, non-finite values, memory, replicas, hangs, profiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack

from torch import Tensor


class Watcher:
    """Watches the steps of a run; it changes no weight. Each method is optional.

    is_done: it has seen all that it watches for, and is only closed.
    """

    is_done = False

    def before_step(self, step: int) -> None:
        """step: completed optimizer steps."""

    def after_backward(self, loss: Tensor) -> None:
        """loss: of a micro-batch, on the device."""

    def after_step(self, step: int) -> Mapping | None:
        """Look at optimizer step `step`, which counts from 1. Metrics returns the line that it logs."""

    def after_log(self, line: Mapping) -> None:
        """line: what the last step has logged, the same on every rank."""

    def close(self, error: BaseException | None) -> None:
        """End with the run. error: what ends it, if it fails."""


class Watchers(AbstractContextManager):
    """Calls watchers in their order, and closes them in the reverse one."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self.watchers = self.active = watchers

    def before_step(self, step: int) -> None:
        self.active = [watcher for watcher in self.watchers if not watcher.is_done]
        for watcher in self.active:
            watcher.before_step(step)

    def after_backward(self, loss: Tensor) -> None:
        for watcher in self.active:
            watcher.after_backward(loss)

    def after_step(self, step: int) -> None:
        for watcher in self.active:
            line = watcher.after_step(step)
            if line is not None:
                for reader in self.active:
                    reader.after_log(line)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with ExitStack() as stack:
            for watcher in self.watchers:
                stack.callback(watcher.close, error)
