"""Writes the stacks of ranks that make no progress into hang/rank-N.txt in the run's folder.

NCCL and gloo end a collective in which a rank waits for longer than args.collective_timeout, and torchrun
then ends all ranks. The stacks, written at half of that time, show which rank was waited for.
"""

from __future__ import annotations

import faulthandler
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from cogfast.core.files import open_own, read_limited
from cogfast.distributed.lost_ranks import is_of_another_rank
from cogfast.train.watchers.watcher import Watcher

_FRAMES = 3  # innermost frames in a message
# Files and functions in which a rank waits for others.
_WAITS = re.compile(r"/torch/distributed/|/deepspeed/comm/|process_groups\.py| wait_for$")


class HangStacks(Watcher):
    """Arms a dump of this rank's stacks in each step. folder: the run's. limit_s: of a collective."""

    def __init__(self, folder: Path, rank: int, limit_s: float) -> None:
        self.folder, self.seconds = folder / "hang", limit_s / 2
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / f"rank-{rank}.txt"
        # Empty until the rank hangs.
        self.file = open_own(self.path, "w")  # until the end

    def after_step(self, step: int) -> None:
        faulthandler.cancel_dump_traceback_later()  # waits for a dump that is being written
        if os.fstat(self.file.fileno()).st_size:  # a long evaluation, and no hang
            self.file.seek(0)  # else the next dump begins behind a hole
            self.file.truncate()
        # In C, so that it works while the main thread holds Python's lock.
        faulthandler.dump_traceback_later(self.seconds, file=self.file)

    def close(self, error: BaseException | None) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.file.close()
        if error is not None and is_of_another_rank(error):
            if found := list(hanging(self.folder)):
                error.add_note(f"no progress: {'; '.join(found)}; stacks are in hang/")
            return
        with suppress(OSError):  # the last rank removes the folder
            self.path.unlink()
            self.folder.rmdir()


def hanging(folder: Path) -> Iterator[str]:
    """Yield rank and innermost frames of ranks that were not waiting for others, as far as known here."""
    stacks = {p.stem: read_limited(p).decode(errors="replace") for p in folder.glob("rank-*.txt")}
    if not any(stacks.values()):
        return  # a rank failed before the time was over
    for rank, text in sorted(stacks.items()):
        frames = frames_of_main(text)
        if not any(_WAITS.search(f"{file} {name}") for file, _, name in frames[:_FRAMES]):
            shown = [f"{Path(file).name}:{line} {name}" for file, line, name in frames[:_FRAMES]]
            # A process that is stopped writes nothing.
            yield f"{rank.replace('-', ' ')} ({' < '.join(shown) or 'no stack'})"


def frames_of_main(dump: str) -> list[tuple[str, str, str]]:
    """Return file, line and function of the main thread's frames in faulthandler's text, innermost first."""
    # It lists the newest thread first, and the main thread last.
    main = re.split(r"^(?:Current thread|Thread) .*$", dump, flags=re.MULTILINE)[-1]
    return re.findall(r'File "([^"]*)", line (\d+) in (\S+)', main)
