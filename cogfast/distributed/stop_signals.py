"""Handles requests to stop: SIGINT (Ctrl-C), SIGTERM, SIGHUP and SIGUSR1.

A command ends at once: `Interrupted` unwinds the main thread, which removes half-written files.
Training saves a checkpoint first (`StopRequest`). In both cases a second Ctrl-C ends the process at
once, even if its main thread is busy.

torchrun forwards signals to its ranks, which run in separate sessions, so a terminal's Ctrl-C reaches
them once. Slurm signals every process, so a rank gets the signal twice within moments. A second
Ctrl-C at torchrun reaches the ranks as SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from cogfast.core.signals import STOP_SIGNALS

_REPEAT_SECONDS = 1.0  # a second signal within this time is the first one from another sender
_CLOSED = 0  # sent through the pipe to end the thread; no signal has this number


class Interrupted(BaseException):
    """A signal ends the command. Not an Exception, so that nothing handles it as an error."""


class StopSignals:
    """Context manager that listens for signals. received: their numbers, in order of arrival.

    last_line: given the reason, returns the line to write if the process is ended while the main
    thread is busy. on_first: called in the main thread for the first signal; may raise. announce:
    called for it in another thread; may log. patience: seconds that the main thread has to end after
    the first signal; None: no limit. kept: text about the work that stays, which follows the reason.

    If two are nested, the inner one listens. When it ends without an error, the work is done, and the
    outer one ignores signals.

    Python runs signal handlers only in the main thread, and not while that waits in C++, such as for
    another rank. So a thread reads the signals too, and ends the process if the main thread does not.
    A signal that is ignored at the start (by nohup) stays ignored.
    """

    _innermost: ClassVar[StopSignals | None] = None

    def __init__(
        self,
        last_line: Callable[[str], str],
        on_first: Callable[[int], None] | None = None,
        announce: Callable[[int], None] | None = None,
        patience: float | None = None,
        kept: str = "",
    ) -> None:
        self.last_line, self.on_first, self.announce = last_line, on_first, announce
        self.patience, self.kept = patience, kept
        self.received: list[int] = []
        self.is_done = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self._outer, StopSignals._innermost = StopSignals._innermost, self
        # It wakes the watching thread even while the main thread waits in C++.
        reader, self._writer = os.pipe()
        # Python writes each signal's number from its handler, which must not block.
        os.set_blocking(self._writer, False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), name="signals", daemon=True).start()
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        StopSignals._innermost = self._outer
        # The outer listener is a command's: once training has saved, there is nothing to stop.
        if self._outer is not None:
            self._outer.is_done = kind is None
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        # Closing the pipe is not enough: a forked process may have it open.
        os.write(self._writer, bytes([_CLOSED]))
        os.close(self._writer)

    def _handle(self, number: int, frame: object) -> None:
        self.received.append(number)
        if len(self.received) == 1 and self.on_first is not None and not self.is_done:
            self.on_first(number)

    def _watch(self, reader: int) -> None:
        first, interrupted_at, deadline = None, None, None
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([reader], [], [], left)[0]:
                assert first is not None, "the deadline counts from the first signal"
                self._end(first, f"ended by {signal_name(first)}")
            for number in os.read(reader, 64):
                if number == _CLOSED:
                    os.close(reader)
                    return
                if number not in STOP_SIGNALS:  # torch listens to its workers' SIGCHLD
                    continue
                now = time.monotonic()
                is_second = interrupted_at is not None and now - interrupted_at > _REPEAT_SECONDS
                if is_second and number in (signal.SIGINT, signal.SIGTERM):
                    self._end(number, f"ended at once by a second {signal_name(signal.SIGINT)}")
                if number == signal.SIGINT and interrupted_at is None:
                    interrupted_at = now
                if first is None:
                    first = number
                    if self.patience is not None and not self.is_done:
                        deadline = now + self.patience
                    if self.announce is not None:
                        self.announce(number)

    def _end(self, number: int, reason: str) -> None:
        """End the process from a thread, without flushing or closing anything.

        The main thread may hold the lock of sys.stderr.
        """
        write_last_line(self.last_line(reason + self.kept))
        # The status that shells give a process that a signal has ended.
        os._exit(128 + number)


@contextlib.contextmanager
def keeping(kept: str) -> Iterator[None]:
    """Let the last line of a command that a signal ends say what is kept of the work inside."""
    before = keep_in_last_line(kept)
    yield
    # Not after an error: the line is written once the command has unwound.
    keep_in_last_line(before)


def keep_in_last_line(text: str) -> str:
    """Let the last line of a command that a signal ends say `text`, such as before its error is written.
    Return the text that it had."""
    if (signals := StopSignals._innermost) is None:
        return ""
    before, signals.kept = signals.kept, text
    return before


def signal_name(number: int) -> str:
    return signal.Signals(number).name


def write_last_line(line: str) -> None:
    """Write a line to stderr without Python's buffers and locks; nothing for an empty line."""
    if line:
        # os.write alone: the thread that holds the buffer's lock may never run again.
        start = "\r" if os.isatty(2) else ""  # over the ^C that a terminal shows
        with contextlib.suppress(OSError):
            os.write(2, f"{start}{line}\n".encode())


def end_by(number: int) -> None:
    """End this process by the signal's default action, so that a calling shell script ends, too."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # reached as process 1 of a container, which ignores its own signals


def settle_signals() -> None:
    """Prepare a process that has finished its work to exit.

    Ctrl-C then ends it without a traceback, and other signals do not change its exit status.
    """
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGINT else signal.SIG_IGN)
