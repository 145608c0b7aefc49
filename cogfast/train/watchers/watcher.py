"""The protocol of watchers: metrics, non-finite values, memory, replicas, hangs, profiles, and those of extensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from cogfast.distributed.process_groups import StopRequest


class Watcher:
    """Watches a run; it changes no weight. Each method is optional, and is called on every rank.

    is_done: it has seen all steps that it watches for, and gets no more of them.
    """

    is_done = False

    def at_start(self) -> None:
        """Training is about to start."""

    def before_step(self, step: int) -> None:
        """step: completed optimizer steps."""

    def after_backward(self, loss: Tensor) -> None:
        """loss: of a micro-batch, on the device."""

    def after_step(self, step: int) -> Mapping | None:
        """Look at optimizer step `step`, which counts from 1. Metrics returns the line that it logs."""

    def after_log(self, line: Mapping) -> None:
        """line: what the last step has logged, the same on every rank. The last watcher is called first."""

    def after_save(self, step: int, path: Path) -> None:
        """The checkpoint `path` of completed steps is being written, which may still fail."""

    def after_evaluation(
        self, step: int, losses: Mapping[str, float], samples: Path | None
    ) -> None:
        """losses: of held-out data, by name; empty without any. samples: folder of the videos; None without any."""

    def at_end(self, stop: StopRequest, is_complete: bool) -> None:
        """Training has ended without an error, and its last checkpoint is written.

        is_complete: all steps are done and saved. stop: says whether a signal ended it, or asks to end now.
        """

    def close(self, error: BaseException | None) -> None:
        """End with the run. error: what ends it, if it fails."""


class Watchers(AbstractContextManager):
    """Calls watchers in their order, and closes them in the reverse one."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self.watchers = self.active = watchers

    def at_start(self) -> None:
        for watcher in self.watchers:
            watcher.at_start()

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
                # Metrics leaves out of its next line the time that those behind it take.
                for reader in reversed(self.watchers):
                    reader.after_log(line)

    def after_save(self, step: int, path: Path) -> None:
        for watcher in self.watchers:
            watcher.after_save(step, path)

    def after_evaluation(
        self, step: int, losses: Mapping[str, float], samples: Path | None
    ) -> None:
        for watcher in self.watchers:
            watcher.after_evaluation(step, losses, samples)

    def at_end(self, stop: StopRequest, is_complete: bool) -> None:
        for watcher in self.watchers:
            watcher.at_end(stop, is_complete)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with ExitStack() as stack:
            for watcher in self.watchers:
                stack.callback(watcher.close, error)
