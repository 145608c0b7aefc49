"""The folder of a run's checkpoints: their names, their drafts, `latest`, and which of them are removed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from cogfast.core.files import sync, wait_until, write_text
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.model.weights.checkpoint_manifest import (
    checkpoint_name,
    layout_of,
    replaced_name,
    step_of,
)
from cogfast.train.checkpoint.snapshot import Snapshot
from cogfast.train.keys import FolderLayout

# Returns which of these steps' checkpoints are kept, although they are old.
Kept = Callable[[Sequence[int]], set[int]]


class CheckpointFolder:
    """The folder `path` of a run's checkpoints, on a disk that all ranks see.

    Every rank has one. layout: args.folder_layout, which decides the checkpoints' names. check_owner:
    raises an error if the folder is another run's now. unsent: a newer checkpoint on this machine that
    could not be uploaded to its store (extensions/stores); None on a disk.
    """

    unsent: Path | None = None

    def __init__(
        self,
        path: Path,
        layout: FolderLayout,
        groups: ProcessGroups,
        check_owner: Callable[[], None] = lambda: None,
    ) -> None:
        self.path, self.layout, self.check_owner = path, layout, check_owner
        # The writing thread's collectives must not mix with those of the training loop.
        self.groups = groups.with_own_control()

    def of_step(self, step: int) -> Path:
        """Return the folder of the checkpoint of `step`."""
        return self.path / checkpoint_name(step, self.layout)

    def draft(self, step: int) -> Path:
        """Return the folder in which the checkpoint of `step` is written."""
        path = self.of_step(step)
        return path.with_name(f"{path.name}.incomplete")

    def begin(self, draft: Path) -> str:
        """Empty a draft, and return a mark of its files' names. A barrier: no rank writes before."""
        return self.groups.on_main(lambda: self._begin(draft))

    def _begin(self, draft: Path) -> str:
        self.check_owner()
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        return ""

    def write(self, file: Path, snapshot: Snapshot) -> tuple[dict[str, dict], str, int]:
        """Write this rank's file, and return its slices, checksum and size."""
        file.parent.mkdir(exist_ok=True, parents=True)  # this machine may not be rank 0's
        return *snapshot.write(file), file.stat().st_size

    def check_written(self, draft: Path, sizes: Mapping[str, int]) -> None:
        """Raise OSError if rank 0's machine does not see the ranks' files whole."""
        for file, size in ((draft / name, size) for name, size in sizes.items()):
            if not wait_until(lambda: file.is_file() and file.stat().st_size == size):  # noqa: B023
                text = f"{file} is not as its rank has written it; do all machines share it?"
                raise OSError(text)

    def share(self, draft: Path) -> None:
        """Upload this rank's file of a draft that all have written. All ranks call it."""

    def publish(self, draft: Path, final: Path) -> None:
        """Give a complete draft its final name, on disk before `latest` has it. For rank 0."""
        replaced = replaced_name(final)
        if final.exists():
            # A run that resumed from an earlier step saves this step again. Rename the old checkpoint
            # first, so that a complete one exists at every moment.
            final.rename(replaced)
        draft.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
        sync(final.parent)

    def write_latest(self, newest: Path) -> None:
        """Let `latest` name a checkpoint. For rank 0."""
        write_text(newest.with_name("latest"), newest.name)

    def discard(self, draft: Path) -> None:
        """Remove this rank's file of a draft from a machine that keeps none."""

    def abandon(self, draft: Path) -> None:
        """Remove what a save that has failed has written."""
        if self.groups.is_main:
            shutil.rmtree(draft, ignore_errors=True)

    def prune(self, newest: Path, keep_last: int, kept: Kept) -> None:
        """Remove all but the last `keep_last` checkpoints (0: none), except `kept`, and the unfinished ones of
        killed runs. For rank 0.

        Checkpoints of later steps than `newest` stay: the user resumed from an earlier one on purpose.
        """
        for path in self.path.glob("*.incomplete*"):
            # In the layout `finetune`, other threads write their files into this folder, too.
            name = path.with_name(path.name.partition(".")[0])
            if name.name != "latest" and step_of(name) is None:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        found = (path for path in self.path.iterdir() if path.is_dir())
        if self.layout == "finetune":
            # Another trainer's checkpoint of such a name has no manifest.
            found = (path for path in found if (path / "manifest.json").is_file())
        for path in self.outdated(found, newest, keep_last, kept):
            shutil.rmtree(path, ignore_errors=True)

    def outdated(
        self, found: Iterable[Path], newest: Path, keep_last: int, kept: Kept
    ) -> list[Path]:
        """Return the paths, of those `found`, of checkpoints up to `newest` that are not kept."""
        own = [path for path in found if layout_of(path) == self.layout]
        last = step_of(newest) or 0
        steps = {p: step for p in own if (step := step_of(p)) is not None and step <= last}
        others = kept([*steps.values()])
        old = sorted(steps, key=steps.__getitem__)[:-keep_last] if keep_last > 0 else []
        return [path for path in old if steps[path] not in others]
