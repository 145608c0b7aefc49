"""Folders of this machine that stand for folders of an object store. Their paths contain the URL.

    <local cache>/runs/s3:/bucket/key               a run that is written here and uploaded
    <local cache>/rank-8/runs/s3:/bucket/key        the same on another machine, by its first rank
    <local cache>/folders/<process>/s3:/bucket/key  a copy that a command reads (`copy_of`)

Files of checkpoints, which are large, are not there: `fetch` downloads one that is read.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from cogfast.core.addresses import url_of
from cogfast.core.files import UNFINISHED
from cogfast.core.run_lock import LOCK
from cogfast.extensions.stores import store
from cogfast.extensions.stores.store import Stat, StoreError

logger = logging.getLogger(__name__)

_COPY = re.compile(r"/[^\s'\",;=]*/folders/\d+-[0-9a-f]{12}/([a-z][a-z0-9+.-]*):/")
_HUB_ID = re.compile(r"hf://([\w.-]+/[\w.-]+)")
_OF_RANK = re.compile(r"(.*)/rank-\d+[\w-]*\.safetensors")
_SETTINGS = re.compile(r".*(\.json|\.yaml|/latest)")  # of a run, which sampling and converting read
_SECONDS_AT_END = 60.0


def named_by_urls(message: str) -> str:
    """Return a message with URLs in place of the paths of their copies."""
    return _COPY.sub(lambda found: f"{found[1]}://{'/' * (found[1] == 'file')}", message)


def folder_of(name: str | Path) -> Path:
    """Return the folder in which this machine writes what `name_of` names."""
    return store.local_cache()[0] / "runs" / name if store.is_url(name) else Path(name)


def is_of_rank(file: str) -> bool:
    """Return whether a path or URL is that of a rank's file in a checkpoint."""
    return _OF_RANK.fullmatch(file) is not None


def fetch(path: Path) -> Path:
    """Return the file `path`, or a local copy of the object that it stands for."""
    url = url_of(path)
    return path if url is None or path.exists() else store.local_copy(url)


def sizes(folder: Path) -> dict[str, int] | None:
    """Return {name: bytes} of the objects that a folder stands for; None for a folder of this machine."""
    if (url := url_of(folder)) is None:
        return None
    return {name[len(url) + 1 :]: about.num_bytes for name, about in store.find(url).items()}


def copy_of(name: str, is_whole: bool = False, may_download: bool = True) -> str:
    """Return a path of this machine for reading a path or URL of weights, a run or a checkpoint.

    That of a folder on the hub, hf://OWNER/MODEL, is its id. is_whole: also what a run has logged and
    sampled. StoreError if it cannot be read, ValueError if it may not be downloaded.
    """
    if not store.is_url(name):
        return name
    if match := _HUB_ID.fullmatch(name):
        return match[1]
    url = name.rstrip("/")
    if not may_download:
        rule = "--dry-run and cogfast plan reach no network"
        raise ValueError(f"{url}: {rule}; copy it to this machine")
    if not (found := store.find(url)):
        raise StoreError(f"{url}: no such folder or file; correct the address")
    if [*found] == [url]:
        folder, _, file = url.rpartition("/")
        return str(_local_folder(folder, *found.items()) / file)
    if len(wanted := _without_checkpoint_files(found)) < len(found) and not is_whole:
        wanted = {file: about for file, about in wanted.items() if _SETTINGS.fullmatch(file)}
    return str(_local_folder(url, *wanted.items()))


@lru_cache  # a command asks several times for one folder
def _local_folder(url: str, *found: tuple[str, Stat]) -> Path:
    """Return a folder of this machine with the objects `found` below a URL, until this process ends."""
    cache = store.local_cache()[0]
    store.check_local_cache(sum(about.num_bytes for _, about in found))
    with store.writing_cache(cache):
        place = _folder_of_process(cache) / url  # the path tells `url_of` the URL
    for name, about in found:
        copy = store.local_copy(name, about.version, num_bytes=about.num_bytes)
        with store.writing_cache(cache, name):
            # It stays when the copy is removed from the cache.
            os.link(copy, _inside(place, url, name))
    return place


def _folder_of_process(cache: Path) -> Path:
    """Return a new folder that ends with this process: without its lock, others remove it."""
    root = cache / "folders" / f"{os.getpid()}-{os.urandom(6).hex()}"
    root.mkdir(parents=True)
    held = os.open(root / "new", os.O_CREAT | os.O_RDWR, 0o666)  # closed when the process ends
    fcntl.flock(held, fcntl.LOCK_EX)
    os.rename(root / "new", root / "lock")
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def download_run(run: Path) -> None:
    """Make a run's folder on this machine as it is in the store."""
    url = url_of(run)
    assert url is not None, "the caller asks"
    remove_earlier_run(run)

    def download(file: str) -> None:
        with store.writing_cache(run, file):  # no shared copy: the run appends to its files
            store.download(file, _inside(run, url, file), 0, wanted[file].num_bytes, True)

    wanted = _without_checkpoint_files(store.find(url))
    wanted.pop(f"{url}/{LOCK}", None)
    list(store.in_threads(download, [*wanted]))


def _inside(folder: Path, url: str, name: str) -> Path:
    """Return where an object below a URL is in the folder that stands for it."""
    path = folder / name[len(url.rstrip("/")) + 1 :]
    if not path.resolve().is_relative_to(folder.resolve()):
        raise StoreError(f"{name}: has .. in its name; rename it")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def remove_earlier_run(run: Path) -> None:
    """Remove what an earlier run has left in a folder, except the lock that is held."""
    for path in [*run.iterdir()] if run.is_dir() else []:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()
    run.mkdir(parents=True, exist_ok=True)


class Uploads:
    """Uploads what a run writes into its folder of this machine, except checkpoints, in a thread.

    Without an effect if the folder is not that of a store. check_owner: raises RuntimeError if the run
    is another process's now, after which nothing is uploaded. is_main: whether the machine is rank 0's,
    whose lists of bad samples have those of all machines.
    """

    def __init__(
        self, run: Path, check_owner: Callable[[], None] = lambda: None, is_main: bool = True
    ) -> None:
        # hub-: scratch folders of `publish`
        of_main = () if is_main else ("bad_samples",)
        self._left_out = ("checkpoint", "latest", LOCK, "hub-", *of_main)
        self.run, self.url, self.check_owner = run, url_of(run), check_owner
        self._sent: dict[str, tuple[int, int]] = {}  # what the store has
        self._sent = self._states()
        self._asked, self._is_over = threading.Event(), False
        self._passes, self._has_failed = threading.Lock(), False
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
        if self.url is not None:
            self._thread.start()

    def ask(self) -> None:
        """Upload the files that have changed, soon."""
        self._asked.set()

    def close(self) -> None:
        """Upload the last changes, within a limit: the run may be about to be killed."""
        self._is_over = True
        self.ask()
        if self.url is None:
            return
        self._thread.join(_SECONDS_AT_END)
        states, sent = self._states(), {**self._sent}
        if left := [name for name, state in states.items() if sent.get(name) != state]:
            text = "%s: the last files are not all uploaded (first: %s); they are in %s, from which the next "
            text += "start of the run removes them; copy them to the store before"
            logger.warning(text, self.url, left[0], self.run)

    def _work(self) -> None:
        while not self._is_over or self._asked.is_set():
            self._asked.wait()
            self._asked.clear()
            try:
                self.upload()
            except OSError as error:
                logger.warning("%s; training continues, and the next upload tries again", error)
            except RuntimeError as error:
                logger.warning("%s", error)
                self.url = None  # uploads nothing more

    def upload(self) -> None:
        """Upload the files that have changed, those of folders, such as videos, last. Their errors are logged."""
        if self.url is None:
            return
        # A writer of checkpoints calls this, too: an older content must not replace a newer one.
        with self._passes:
            now, failed = self._states(), None
            changed = [name for name, state in now.items() if self._sent.get(name) != state]
            # The objects of other files stay: this machine may have lost those.
            gone = [name for name, (size, _) in self._sent.items() if not size and name not in now]
            for name in [*gone, *sorted(changed, key=lambda name: ("/" in name, name))]:
                self.check_owner()
                try:
                    if name not in now:
                        store.remove([f"{self.url}/{name}"])
                        del self._sent[name]
                        continue
                    # The run may append to it meanwhile: then it has another state the next time.
                    with suppress(FileNotFoundError):
                        store.write(f"{self.url}/{name}", (self.run / name).read_bytes())
                        self._sent[name] = now[name]
                except OSError as error:
                    failed = error
            if failed is not None and not self._has_failed:
                logger.warning("%s; training continues, and the next upload tries again", failed)
            self._has_failed = failed is not None

    def _states(self) -> dict[str, tuple[int, int]]:
        """Return size and time of change of each file, by its name in the folder. Empty files are not sent."""
        found = {}
        for path in [] if self.url is None else self.run.rglob("*"):
            name = str(path.relative_to(self.run))
            if not name.startswith(self._left_out) and UNFINISHED not in name:
                with suppress(FileNotFoundError):
                    about = path.stat()
                    if stat.S_ISREG(about.st_mode) and (about.st_size or name in self._sent):
                        found[name] = about.st_size, about.st_mtime_ns
        return found


def _without_checkpoint_files(found: Mapping[str, Stat]) -> dict[str, Stat]:
    """Return the objects without those of checkpoints, of which the manifests stay."""
    checkpoints = {match[1] for file in found if (match := _OF_RANK.fullmatch(file))}
    manifests = {f"{checkpoint}/manifest.json" for checkpoint in checkpoints}
    inside = tuple(f"{checkpoint}/" for checkpoint in checkpoints)
    return {f: about for f, about in found.items() if f in manifests or not f.startswith(inside)}
