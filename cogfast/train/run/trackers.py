"""Writes what a run logs: lines to log.txt, numbers to metrics.jsonl, TensorBoard and W&B.

Losing one of them does not end training.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cogfast.core.files import open_own
from cogfast.core.values import one_line, printable
from cogfast.train.keys import TrainKeys
from cogfast.train.run.folder import command_line, wandb_id
from cogfast.train.run.metrics_file import history_until

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

_MOST_WAITING = 64 << 20  # bytes kept until there is space; older records are dropped


class LogFile:
    """A file of whole records. Records that cannot be written now are kept for the next `append`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[bytes] = []

    def append(self, record: bytes) -> bool:
        """Append the waiting records and this one, and return whether they are written. Logs one warning
        when the disk is full."""
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
            return False
        if was_full:
            logger.info("%s is written again, nothing is missing", self.path)
        self._waiting.clear()
        return True

    def _write(self, content: bytes) -> None:
        """Append all of `content` or nothing: half a record would corrupt the next ones."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: the error of a full disk must come from write, not from close.
        with open_own(self.path, "ab", buffering=0) as file:
            # After an error, the file is cut to the size that it has now.
            start, rest = os.fstat(file.fileno()).st_size, memoryview(content)
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                file.truncate(start)
                raise


class RunLog(logging.Handler):
    """log.txt of a run's folder: what rank 0 has logged, as on the screen, under the command line.

    Keeps the lines of rank 0 from its start on, and writes them once the run's folder is known.
    """

    def __init__(self) -> None:
        super().__init__()
        self._file: LogFile | None = None
        self._is_writing = False
        self._lines = [f"\n{datetime.now():%Y-%m-%d %H:%M:%S}  {command_line()}"]
        logger = logging.getLogger("cogfast")
        for other in [each for each in logger.handlers if isinstance(each, RunLog)]:
            other.end()  # of a run that was built and not trained
        if os.environ.get("RANK", "0") == "0":
            logger.addHandler(self)

    def open(self, folder: Path) -> None:
        """Write the lines so far, and from now on each line at once, to log.txt of the folder."""
        self._file = LogFile(folder / "log.txt")
        self._flush()

    def emit(self, record: logging.LogRecord) -> None:
        # The screen's handler comes first, and has escaped the arguments.
        self._write(printable(record.getMessage(), keep="\n\t"))
        # Python prints warnings where there is no handler, as in a program that uses cogfast.
        last = logging.lastResort
        is_alone = logging.getLogger("cogfast").handlers == [self] and not logging.root.handlers
        if is_alone and last is not None and record.levelno >= last.level:
            last.handle(record)

    def end(self, error: BaseException | None = None) -> None:
        """Stop. error: what ends the run; it is written as the command prints it."""
        logging.getLogger("cogfast").removeHandler(self)
        if error is not None and self._file is not None:
            notes = getattr(error, "__notes__", ())
            self._write("cogfast: " + "; ".join(one_line(str(each)) for each in (error, *notes)))

    def _write(self, text: str) -> None:
        self._lines.append(text)
        self._flush()

    def _flush(self) -> None:
        if self._file is None or self._is_writing:
            return
        self._is_writing = True  # a full disk logs a line, which comes with the next one
        lines, self._lines = self._lines, []
        self._file.append("".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))
        self._is_writing = False


class _Tracker:
    """A failure is logged once, and again only after something was written in between."""

    name: str
    _is_lost = False

    def _attempt(self, what: str, action: Callable[[], None]) -> bool:
        """Return whether `action` succeeded. what: what it writes."""
        try:
            action()
        # wandb has many types of exceptions, and a broken installation has more.
        except Exception as error:
            if not self._is_lost:
                logger.warning(
                    "%s does not take %s (%s); training continues", self.name, what, error
                )
            self._is_lost = True
        else:
            self._is_lost = False
        return not self._is_lost


class TensorBoardRun(_Tracker):
    """Writes numbers into a folder that TensorBoard reads.

    purge_step: TensorBoard ignores this and later steps of files that the folder has already.
    """

    name = "TensorBoard's file"

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        shown = threading.excepthook
        # The next call raises the error of the writer's thread, so that no traceback is needed.
        threading.excepthook = lambda e: "tensorboard" in type(e.thread).__module__ or shown(e)
        self._folder, self._purge_step = folder, purge_step
        self._writer: SummaryWriter | None = None

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if not self._attempt(f"step {step}", lambda: self._log(step, numbers)):
            # The writer's thread has ended with the error: the next numbers go into a new file.
            self._writer = None

    def _log(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
            self._purge_step = None
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()  # else a run that is killed loses the last two minutes

    def close(self) -> None:
        """End the writer's thread."""
        if self._writer is not None:
            self._attempt("its end", self._writer.close)


class WandbRun(_Tracker):
    """Sends numbers and videos to W&B. wandb is imported here, since it is optional.

    Raises RuntimeError if the run cannot be started.
    """

    name = "W&B"

    def __init__(self, folder: Path, project: str) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports] - optional

            self._wandb: Any = wandb
            self._run = wandb.init(
                project=project,
                name=folder.name,
                id=wandb_id(folder),  # a resumed run continues the same W&B run
                resume="allow",
                dir=str(folder),
            )
            # W&B's own steps cannot go back, as those of a resumed run do.
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        except Exception as error:
            text = f"args.wandb=true, but W&B does not start ({one_line(str(error))})"
            text += "; run `wandb login`, set WANDB_MODE=offline in the environment, or set args.wandb=false"
            raise RuntimeError(text) from error

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._attempt(f"step {step}", lambda: self._run.log({**numbers, "step": step}))

    def log_videos(self, step: int, videos: Sequence[tuple[Path, str]]) -> None:
        """Upload mp4 files, each with its prompt as caption, under the key `samples`."""

        def log() -> None:
            # fps is left out: W&B warns that the file decides it.
            files = [self._wandb.Video(str(p), caption=text, format="mp4") for p, text in videos]
            self._run.log({"samples": files, "step": step})

        self._attempt(f"the videos of step {step}", log)

    def finish(self, has_failed: bool) -> None:
        self._attempt("the run's end", lambda: self._run.finish(exit_code=int(has_failed)))


class Trackers:
    """Writes the numbers of a run to metrics.jsonl, TensorBoard and W&B. Only rank 0 writes.

    start_step: where the run resumes; later lines of an earlier start are removed. history: the lines of
    metrics.jsonl, empty on other ranks.
    """

    def __init__(self, args: TrainKeys, folder: Path, start_step: int, is_main: bool) -> None:
        self.is_main = is_main
        self.history: list[dict] = []
        self._wandb: WandbRun | None = None
        if not is_main:
            return
        path = folder / "metrics.jsonl"
        self.history, self._lines = history_until(start_step, path), LogFile(path)
        name = "logs" if args.folder_layout == "finetune" else "tensorboard"
        self._tensorboard = TensorBoardRun(folder / name, start_step + 1 if start_step else 0)
        if args.wandb:
            self._wandb = WandbRun(folder, args.wandb_project_name)

    def write(self, step: int, line: dict) -> None:
        """Write numbers. line: has `step`, too."""
        if not self.is_main:
            return
        self.history.append(line)
        # JSON has no NaN and no infinities.
        is_odd = lambda value: isinstance(value, float) and not math.isfinite(value)
        plain = {key: None if is_odd(value) else value for key, value in line.items()}
        is_written = self._lines.append(json.dumps(plain).encode() + b"\n")
        numbers = {k: v for k, v in line.items() if isinstance(v, (int, float)) and k != "step"}
        if is_written:  # else the disk is full for TensorBoard's file, too
            self._tensorboard.log(step, numbers)
        if self._wandb is not None:
            self._wandb.log(step, numbers)

    def add_videos(self, step: int, videos: Sequence[tuple[Path, str]]) -> None:
        """Copy sampled videos, each with its prompt, to W&B."""
        if self._wandb is not None:
            self._wandb.log_videos(step, videos)

    def close(self, error: BaseException | None) -> None:
        if self._wandb is not None:
            self._wandb.finish(has_failed=error is not None)
        if self.is_main:
            self._tensorboard.close()
