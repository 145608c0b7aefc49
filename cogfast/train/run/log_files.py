"""Append-only log files that survive a full disk.

A full disk causes a warning, and the missing records are written when there is space again.
TensorBoard's own writer uses a thread, which a full disk ends with a traceback.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_MOST_WAITING = 64 << 20  # bytes kept per file until there is space; older records are dropped


class LogFile:
    """A file of whole records. Records that cannot be written now are kept for the next `append`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[bytes] = []

    def append(self, record: bytes) -> None:
        """Append the waiting records and this one. Logs one warning when the disk is full."""
        was_full = bool(self._waiting)
        self._waiting.append(record)
        try:
            self._write(b"".join(self._waiting))
        except OSError as error:
            if not was_full:
                logger.warning(
                    "%s cannot be written (%s); training continues, and the missing records are "
                    "written when there is space",
                    self.path,
                    error.strerror or error,
                )
            # A disk that stays full must not fill the memory as well.
            while sum(map(len, self._waiting)) > _MOST_WAITING:
                self._waiting.pop(0)
            return
        if was_full:
            logger.info("%s is written again, nothing is missing", self.path)
        self._waiting.clear()

    def _write(self, content: bytes) -> None:
        """Append all of `content` or nothing: half a record would corrupt the next ones."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: the error of a full disk must come from write, not from close.
        with open(self.path, "ab", buffering=0) as file:
            # After an error, the file is cut to the size that it has now.
            start, rest = os.fstat(file.fileno()).st_size, memoryview(content)
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                file.truncate(start)
                raise


class TensorBoardFile:
    """Writes scalars and GIFs in TensorBoard's format, without a thread."""

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        """purge_step: TensorBoard ignores this and later steps of earlier files in the folder."""
        event = _messages("event")
        name = f"events.out.tfevents.{int(time.time()):010d}.{platform.node()}.{os.getpid()}"
        # The name may exist: two runs in one process and second.
        taken = len(list(folder.glob(f"{name}.*")))
        self._file = LogFile(folder / f"{name}.{taken}")
        # TensorBoard expects the version as the first record of a file.
        self._add(event.Event(wall_time=time.time(), file_version="brain.Event:2"))
        if purge_step is not None:
            start = event.SessionLog(status=event.SessionLog.START)
            self._add(event.Event(wall_time=time.time(), step=purge_step, session_log=start))

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        summary = _messages("summary").Summary
        values = [summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]
        event = _messages("event").Event
        self._add(event(wall_time=time.time(), step=step, summary=summary(value=values)))

    def add_gif(
        self, step: int, name: str, gif: bytes, size: tuple[int, int], caption: str
    ) -> None:
        """Add a GIF of size (rows, columns), which TensorBoard's image page plays."""
        rows, columns = size
        summary = _messages("summary")
        image = summary.Summary.Image(
            height=rows, width=columns, colorspace=3, encoded_image_string=gif
        )
        metadata = summary.SummaryMetadata(summary_description=caption)
        metadata.plugin_data.plugin_name = "images"
        value = summary.Summary.Value(tag=name, image=image, metadata=metadata)
        event, values = _messages("event").Event, summary.Summary(value=[value])
        self._add(event(wall_time=time.time(), step=step, summary=values))

    def _add(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        framed = io.BytesIO()  # a record with its length and checksums
        RecordWriter(framed).write(event.SerializeToString())
        self._file.append(framed.getvalue())


def _messages(name: str) -> Any:
    """Import a module of TensorBoard's messages, which get their classes when they are imported."""
    return importlib.import_module(f"tensorboard.compat.proto.{name}_pb2")
