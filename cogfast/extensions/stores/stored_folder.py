"""The folder of a run's checkpoints in an object store.

Each rank uploads its file from its machine, and rank 0 then the manifest, without which there is no
checkpoint, and `latest`. The files of the machine are removed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from cogfast.core.addresses import name_of, url_of
from cogfast.core.files import is_disk_full
from cogfast.extensions.stores import store
from cogfast.extensions.stores.mirror import is_of_rank
from cogfast.model.weights.checkpoint_manifest import (
    checkpoint_file,
    layout_of,
    read_manifest,
    step_of,
)
from cogfast.train.checkpoint.folder import CheckpointFolder, Kept
from cogfast.train.checkpoint.snapshot import Snapshot

_DOWNLOADS = 4  # files at once


def download_checkpoint(folder: Path, sizes: Mapping[str, int]) -> None:
    """Download the files of a checkpoint that this rank reads: for a machine each of them once."""
    store.check_local_cache(sum(sizes.values()))
    with ThreadPoolExecutor(_DOWNLOADS) as pool:
        list(pool.map(partial(checkpoint_file, folder), sorted(sizes)))


class StoredFolder(CheckpointFolder):
    """A CheckpointFolder whose `path` stands for one of a store.

    unsent: the folder of this machine with a newer checkpoint that could not be uploaded; it stays until
    a later one is complete here. upload_logs: uploads what the run has logged until now, which a resumed
    run continues.
    """

    def __init__(self, *given: Any, upload_logs: Callable[[], None] = lambda: None) -> None:
        super().__init__(*given)
        self.upload_logs, self.unsent = upload_logs, None
        # {draft: this rank's file}, until they are uploaded
        self._files: dict[Path, Path] = {}

    def draft(self, step: int) -> Path:
        return self.of_step(step)  # the manifest makes a checkpoint of it

    def begin(self, draft: Path) -> str:
        self.discard(draft)  # the last save may be one of the same step, which failed
        return super().begin(draft)

    def _begin(self, draft: Path) -> str:
        # Without check_owner, which each upload calls: the store may be away for a while.
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        # No save of this step by a machine that has lost the run replaces a file that a manifest names.
        return f"-{os.urandom(4).hex()}"

    def write(self, file: Path, snapshot: Snapshot) -> tuple[dict[str, dict], str, int]:
        self._files[file.parent] = file
        try:
            return super().write(file, snapshot)
        except OSError as error:
            if not is_disk_full(error):
                raise
        # Copies of data, or a checkpoint that was not uploaded, would let no later save succeed.
        folder, limit = store.local_cache()
        num_bytes = sum(4 * values.numel() for values in snapshot.partitions.values())
        store.make_place(folder, limit, min(limit, num_bytes), is_full=True)
        self._drop_earlier(file.parent)
        return super().write(file, snapshot)

    def check_written(self, draft: Path, sizes: Mapping[str, int]) -> None:
        """Other ranks' files may be on their machines."""

    def share(self, draft: Path) -> None:
        def upload_own() -> None:
            self._drop_earlier(draft)
            self.unsent = draft
            self._upload(self._files[draft])

        self.groups.on_all(upload_own)

    def publish(self, draft: Path, final: Path) -> None:
        """Upload what rank 0 has written beside the ranks' files, the manifest last."""
        self.upload_logs()
        files = [file for file in sorted(draft.rglob("*")) if file.is_file()]
        exported = [file for file in files if not is_of_rank(str(file))]
        exported.remove(manifest := draft / "manifest.json")
        for file in (*exported, manifest):
            self._upload(file)
        for file in exported:
            file.unlink()
        self.discard(draft)

    def write_latest(self, newest: Path) -> None:
        super().write_latest(newest)
        self.check_owner()
        store.write(name_of(newest.with_name("latest")), newest.name.encode())

    def discard(self, draft: Path) -> None:
        if (file := self._files.pop(draft, None)) is not None:
            file.unlink(missing_ok=True)
        if self.unsent == draft:
            self.unsent = None

    def abandon(self, draft: Path) -> None:
        if self.unsent != draft:
            self.discard(draft)
            super().abandon(draft)

    def _drop_earlier(self, draft: Path) -> None:
        """Remove files of earlier checkpoints that were not uploaded."""
        for earlier in [path for path in self._files if path != draft]:
            self.discard(earlier)
            super().abandon(earlier)

    def _upload(self, file: Path) -> None:
        self.check_owner()
        store.upload(file, name_of(file))

    def prune(self, newest: Path, keep_last: int, kept: Kept) -> None:
        """Do the same in the store, and remove this machine's files of the removed checkpoints."""
        url, held = url_of(self.path) or "", {}  # held: the URLs of each checkpoint's files
        for file in store.find(url):
            path = self.path / file[len(url) + 1 :].partition("/")[0]
            if step_of(path) is not None and layout_of(path) == self.layout:
                held.setdefault(path, []).append(file)
        manifests = {path: f"{name_of(path)}/manifest.json" for path in held}
        done = [path for path in held if manifests[path] in held[path]]
        gone = self.outdated(done, newest, keep_last, kept)
        store.remove([manifests[path] for path in gone])  # first: the rest is no checkpoint
        files = [file for path in gone for file in held[path]]
        left_over = [file for path in held if path not in done for file in held[path]]
        # In the layout `finetune`, other trainers write such folders, too.
        files += [f for f in left_over if self.layout == "cogfast" or is_of_rank(f)]
        # Another save of the same step had other files.
        names = read_manifest(newest)["bytes"]
        files += [f for f in held[newest] if is_of_rank(f) and f.rpartition("/")[2] not in names]
        store.remove(files)
        for path in gone:
            shutil.rmtree(path, ignore_errors=True)
