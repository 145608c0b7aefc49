"""The right to write into a run's folder, which one process has at a time.

On a disk it is the lock of the file run.lock, which ends with its process. In a store it is an object of
that name, too, which its holder writes again every few seconds: if it stays the same for a minute, the
holder is gone. One that was killed on this machine is known at once, since its file's lock is free.
"""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import threading
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import cogfast.extensions.stores.store as store
from cogfast.core.addresses import name_of, url_of
from cogfast.core.files import open_own, refuse_links

logger = logging.getLogger(__name__)

LOCK = "run.lock"
# Time that ranks need to end after their torchrun was killed; see distributed/lost_ranks.py.
_PATIENCE = 15.0  # seconds
# A request that the holder began while it had the lock is not repeated for longer than the lease.
_LEASE, _BETWEEN_RENEWALS = 60.0, 10.0  # seconds
_SETTLING = 1.0  # seconds in which another process may write the object, too
_MOST_BYTES = 255


class RunLock(AbstractContextManager["RunLock"]):
    """Lets no other run train in a folder until its `with` block or this process ends.

    ValueError if another process does; it names the process and its machine. is_new: no run has been
    there, and FileExistsError at once if another process has begun one.
    """

    def __init__(self, run: Path, is_new: bool = False) -> None:
        self.run, self.path = run, run / LOCK
        self.url, self._is_over = url_of(self.path), threading.Event()
        # A random part, since a process may lock a folder again.
        self.holder = f"process {os.getpid()} on {platform.node()} {os.urandom(8).hex()}"
        refuse_links(run)
        try:
            # "w" would erase the line of another run before the lock shows that it is running.
            self._file = open_own(self.path, "a+")  # closed by `__exit__`
        except OSError as error:
            text = f"{self.path}: cannot be written ({error.strerror})"
            raise ValueError(f"{text}; set args.run_folder to another folder") from None
        self._renewing = threading.Thread(target=self._renew, name="run lock", daemon=True)
        try:
            before = self._lock_file()
            if self.url is not None:
                self._take_object(self.url, before, is_new)
                self._renewing.start()
        except BaseException:
            self._file.close()
            raise
        with suppress(OSError):  # a full disk, of which writing the run's description tells more
            self._file.truncate(0)
            self._file.write(f"{self.holder}\n")
            self._file.flush()
            os.fsync(self._file.fileno())  # other machines read it

    def __exit__(self, *_: object) -> None:
        if self.url is not None:
            try:
                self.check()
                self._is_over.set()
                self._renewing.join()
                store.remove([self.url])
            except (OSError, RuntimeError) as error:
                logger.warning("%s", error)
        self._is_over.set()
        with suppress(OSError):  # of the full disk, in place of the error that names it
            self._file.close()

    def check(self) -> None:
        """Raise RuntimeError if another process has taken the folder meanwhile.

        A machine that was frozen or cut off may have lost its lock, and wake when the run continues elsewhere.
        """
        if self._is_over.is_set():
            text = f"{name_of(self.run)}: the run has ended, so nothing more is written"
            raise RuntimeError(text)
        if self.url is not None:
            check_object(self.url, self.holder)
            return
        with suppress(OSError):  # nothing is there
            if not os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno())):
                # The folder was moved or removed, and another run may have made it again.
                _check_holder(str(self.path), _holder_in(self.path), self.holder)
        # Closing a second descriptor of the file would end the lock.
        text = os.pread(self._file.fileno(), _MOST_BYTES, 0).decode(errors="replace")
        _check_holder(str(self.path), text, self.holder)

    def _lock_file(self) -> str:
        """Lock the file, and return who had it before."""
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                # Not flock, whose lock the processes that read data would inherit.
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() > end:
                    raise self._refusal(self._read_file()) from None
                time.sleep(0.2)
            except OSError as error:  # the file system has no locks
                logger.warning("%s cannot be locked (%s)", self.path, error.strerror)
                return ""
        return self._read_file()

    def _read_file(self) -> str:
        self._file.seek(0)
        text = self._file.read(_MOST_BYTES)
        return text.strip() if text.endswith("\n") else ""  # a full disk may have cut it

    def _take_object(self, url: str, dead: str, is_new: bool) -> None:
        """Write the object, once no other process does. dead: a holder that is known to have ended."""
        mine, start, first = self._content(), time.monotonic(), None
        while True:
            try:
                found = _holder_in(url)
            except FileNotFoundError:
                if store.create(url, mine):
                    return
                continue
            if is_new:
                raise FileExistsError(f"{url}: another process has it")
            if first is not None and found != first:
                raise self._refusal(found)
            seconds = _LEASE + start - time.monotonic()
            if seconds < 0 or (dead and found.startswith(dead)):
                store.write(url, mine)
                time.sleep(_SETTLING)
                # Another process may have waited, too: the last one to write has it.
                if (found := _holder_in(url)) != mine.decode():
                    raise self._refusal(found)
                return
            if first is None:
                text = "%s: %s has trained in it; waiting up to %.0f s to see whether it still does"
                who = _brief(found) or "an unknown process (the lock is empty)"
                logger.info(text, name_of(self.run), who, seconds)
            first = found
            time.sleep(_SETTLING)

    def _renew(self) -> None:
        while not self._is_over.wait(_BETWEEN_RENEWALS):
            try:
                self.check()
                store.write(self.url or "", self._content())
            except OSError as error:
                logger.warning("%s", error)
            except RuntimeError:
                return  # `check` says so when the run writes

    def _content(self) -> bytes:
        return f"{self.holder} {time.time():.3f}\n".encode()

    def _refusal(self, holder: str) -> ValueError:
        text = f"{name_of(self.run)}: {_brief(holder) or 'another process'} is training in it"
        fix = "wait for that run, end it, or set args.run_folder to another folder"
        return ValueError(f"{text}; {fix}")


def is_held(run: Path, holder: str) -> bool:
    """Return whether the file of the lock is here, as its holder, another process, has written it."""
    try:
        text = _holder_in(run / LOCK)
    except OSError:
        return False
    return not text or text.startswith(holder)  # a full disk may have cut it


def check_object(url: str, holder: str) -> None:
    """Raise RuntimeError if another process than `holder` has the lock in a store. For any machine of a run."""
    try:
        text = _holder_in(url)
    except FileNotFoundError:  # a run that took the folder has removed it at its end
        text = "another process"
    _check_holder(url, text, holder)


def _holder_in(name: str | Path) -> str:
    return store.read(str(name), 0, _MOST_BYTES).decode(errors="replace")


def _check_holder(name: str, text: str, holder: str) -> None:
    if text.strip() and not text.startswith(holder):
        text = f"{name}: {_brief(text)} has taken the folder"
        raise RuntimeError(f"{text}, so this process ends without writing more")


def _brief(holder: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in " ".join(holder.split()[:4]))
