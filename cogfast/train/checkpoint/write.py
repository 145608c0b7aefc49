"""Writes checkpoints while training continues: copies to host memory, then writes in a thread.

Training only waits for the copy. Every save uses the same buffers and first waits for the save before it.

The ranks' threads use a separate control group. Every rank starts the same saves in the same order,
one at a time, so that the collectives always match. `latest` moves when all files are on disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from threading import Thread

from cogfast.core.addresses import name_of
from cogfast.core.files import WriteError, read_limited, sync
from cogfast.distributed.lost_ranks import is_of_another_rank
from cogfast.distributed.process_groups import OtherRankError
from cogfast.distributed.zero_engine import ZeroEngine
from cogfast.model.weights.checkpoint_manifest import FORMAT, step_of, write_manifest
from cogfast.train.checkpoint.folder import CheckpointFolder, Kept
from cogfast.train.checkpoint.snapshot import DamagedWeights, Snapshot

logger = logging.getLogger(__name__)


Write = Callable[[Path, dict], None]  # gets the checkpoint's draft and its manifest; never raises
# Gets the step, and whether a signal or time limit ends the run; returns what adds files to its checkpoint
Export = Callable[[int, bool], Write | None]
no_export: Export = lambda step, is_stopping: None


class _LatestError(RuntimeError):
    """A checkpoint is complete, but `latest` still names the one before."""


_LOGGED = (OSError, WriteError, OtherRankError, DamagedWeights, _LatestError)


class CheckpointWriter(AbstractContextManager):
    """Writes the checkpoints of a run into `folder` and keeps the newest `keep_last` (0: all).

    Every rank creates one and calls its methods at the same steps. saved_step, saved: step and folder of
    the newest complete checkpoint, valid after `wait`.
    """

    def __init__(self, folder: CheckpointFolder, engine: ZeroEngine, keep_last: int) -> None:
        self.folder, self.engine, self.keep_last = folder, engine, keep_last
        self.groups = folder.groups
        # Returns the steps of the checkpoints that are kept in addition. Rank 0's thread calls it; a watcher
        # may set it.
        self.kept: Kept = lambda _: set()
        self.saved_step = 0
        self.saved: Path | None = None
        self._snapshot: Snapshot | None = None
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self._has_failed = False  # whether the last save failed

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Complete the pending save, also if the run ends with an error."""
        try:
            self.wait()
        except Exception as error:
            if kind is None:
                raise
            # Only log it: the error that ends the run must reach the user.
            why = "another rank was lost" if is_of_another_rank(error) else error
            last = "none" if self.saved is None else name_of(self.saved)
            logger.error("a save was not completed: %s; the last complete one: %s", why, last)

    def save(self, step: int, extra: dict, export: Write | None = None) -> None:
        """Copy the state of `step` and start to write it; `extra` goes into the manifest.

        export: called on rank 0, in the thread, before the checkpoint gets its name. If the disk is
        full, an error is logged, the earlier checkpoints are kept, and training continues.
        """
        self.wait()
        try:
            kinds = self.engine.state_kinds()
            if self._snapshot is None or not set(kinds) <= set(self._snapshot.kinds):
                # At the first save and not at the start: a run that never saves needs no host memory for it.
                # PyTorch's optimizers make their state in the first step that is not skipped.
                self._snapshot = None
                self._snapshot = self.groups.on_all(lambda: Snapshot(self.engine))
        except (MemoryError, RuntimeError) as error:
            self._report_failure(step, error)
            return
        # `wait` has returned, so the thread no longer reads the buffers that this overwrites.
        self._snapshot.take()
        # Read now: training changes the scale while the thread writes.
        scaler = self.engine.loss_scaler_state()
        about = {"step": step, "loss_scaler": scaler, **extra}
        self._thread = Thread(
            target=self._write, args=(about, export), name=f"checkpoint {step}", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait for the pending save. Raises the thread's error, if there was one."""
        if self._thread is not None:
            self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

    def _write(self, about: dict, export: Write | None) -> None:
        """Write one checkpoint, in the thread.

        Errors that a user can fix are logged; `wait` raises all other errors.
        """
        try:
            self._write_all(about, export)
            self.saved_step, self.saved = about["step"], self.folder.of_step(about["step"])
            if self._has_failed and self.groups.is_main:
                logger.info("checkpoint of step %d is written", self.saved_step)
            self._has_failed = False
        except _LOGGED as error:
            self._report_failure(about["step"], error)
        except Exception as error:
            self.folder.discard(self.folder.draft(about["step"]))
            self._error = error

    def _write_all(self, about: dict, export: Write | None) -> None:
        """Write the files of all ranks, the manifest and `latest`. One rank's error ends all."""
        folder, groups, snapshot = self.folder, self.groups, self._snapshot
        assert snapshot is not None, "save takes it before it starts this thread"
        draft, final = folder.draft(about["step"]), folder.of_step(about["step"])
        mark = folder.begin(draft)
        file = draft / f"rank-{groups.rank:05d}{mark}.safetensors"
        slices, checksum, size = groups.on_all(lambda: folder.write(file, snapshot))
        reports = groups.gather((file.name, slices, checksum, snapshot.counters(), size))
        groups.on_main(lambda: self._describe(draft, reports, about, export))
        folder.share(draft)
        groups.on_main(lambda: self._make_newest(draft, final))
        folder.discard(draft)

    def _describe(self, draft: Path, reports: list, about: dict, export: Write | None) -> None:
        """Write the manifest and what is exported."""
        assert self._snapshot is not None, "save takes it before it starts this thread"
        manifest = {
            "format": FORMAT,
            **self._snapshot.about,
            "slices": {name: slices for name, slices, *_ in reports},
            "bytes": {name: size for name, *_, size in reports},
            "checksums": {name: checksum for name, _, checksum, *_ in reports},
            "optimizer": type(self.engine.optimizer).__name__,
            # Every rank knows those of its own partitions; together they cover all parameters.
            "counters": {
                name: counters for report in reports for name, counters in report[3].items()
            },
            **about,
        }
        self.folder.check_written(draft, manifest["bytes"])
        write_manifest(draft, manifest)
        if export is not None:
            export(draft, manifest)
        # All content must be on disk before the folder gets its final name.
        sync(draft / "manifest.json")
        sync(draft)

    def _make_newest(self, draft: Path, final: Path) -> None:
        """Give the checkpoint its name, and remove old ones."""
        self.folder.check_owner()
        self.folder.publish(draft, final)
        self._write_latest(final)
        self._remove_old(final)

    def _write_latest(self, newest: Path) -> None:
        try:
            self.folder.write_latest(newest)
        except (OSError, WriteError) as error:
            raise _LatestError(str(error)) from None

    def resume(self, checkpoint: Path, step: int) -> None:
        """Note which checkpoint was loaded, on all ranks. If `latest` names an older one of the run, as after
        an upload by hand, let it name this one."""
        self.saved_step, self.saved = step, checkpoint

        def check_latest() -> None:
            steps = [step_of(path) or 0 for path in checkpoint.parent.iterdir()]
            if checkpoint.parent == self.folder.path and step_of(checkpoint) == max(steps):
                with suppress(OSError, ValueError):
                    if read_limited(self.folder.path / "latest", 255).decode() == checkpoint.name:
                        return
                self._write_latest(checkpoint)

        self.groups.on_main(check_latest)

    def _remove_old(self, newest: Path) -> None:
        try:
            self.folder.check_owner()
            self.folder.prune(newest, self.keep_last, self.kept)
        except OSError as error:
            logger.warning("old checkpoints are not removed: %s", error)

    def prune(self) -> None:
        """Remove checkpoints that `kept` no longer names, on rank 0, after the pending save."""
        self.wait()
        # A run that resumed another one has not saved here yet.
        if self.groups.is_main and self.saved is not None and self.saved.parent == self.folder.path:
            self._remove_old(self.saved)

    def _report_failure(self, step: int, error: Exception) -> None:
        self._has_failed, folder = True, self.folder
        folder.abandon(folder.draft(step))
        if self.groups.is_main:
            has_one = self.saved is not None or folder.unsent is not None
            state = "the previous one is kept" if has_one else "there is no earlier one"
            if folder.unsent is not None:
                state += f", and {folder.unsent} stays until a later one is complete here"
            if isinstance(error, _LatestError):
                name = name_of(folder.of_step(step))
                state = f"it is complete; resume from it with --resume {name}"
            logger.error("checkpoint of step %d failed: %s; %s", step, error, state)
