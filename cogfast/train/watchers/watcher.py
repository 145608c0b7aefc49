"""The protocol of watchers: metrics, non-finite values, memory, replicas, hangs, profiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType

from torch import Tensor


class Watcher:
    """Watches the steps of a run; it changes no weight. Each method is optional."""

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


class Watchers:
    """Calls watchers in their order, and closes them in the reverse one."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self.watchers = watchers

        def having(name: str) -> list[Watcher]:
            return [w for w in watchers if getattr(type(w), name) is not getattr(Watcher, name)]

        self._before_step, self._after_backward = having("before_step"), having("after_backward")
        self._after_step, self._after_log = having("after_step"), having("after_log")

    def before_step(self, step: int) -> None:
        for watcher in self._before_step:
            watcher.before_step(step)

    def after_backward(self, loss: Tensor) -> None:
        for watcher in self._after_backward:
            watcher.after_backward(loss)

    def after_step(self, step: int) -> None:
        for watcher in self._after_step:
            line = watcher.after_step(step)
            if line is not None:
                for reader in self._after_log:
                    reader.after_log(line)

    def __enter__(self) -> Watchers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with ExitStack() as stack:
            for watcher in self.watchers:
                stack.callback(watcher.close, error)
