"""Progress bar of a long command on a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


def open_bar(what: str, total: int) -> Progress | None:
    """Start a progress bar with one task; None if stderr is not a terminal.

    The bar ends with the task's field `note`.
    """
    if not sys.stderr.isatty():
        return None
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
    )
    # While it runs, rich replaces sys.stderr and prints log lines above the bar.
    bar.start()
    bar.add_task(what, total=total, note="")
    return bar
