"""`cogfast report`: writes the page of a run again, or one page that compares several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cogfast.core.files import WriteError
from cogfast.extensions.page.page import NAME, page_of, write_page
from cogfast.extensions.page.record import is_run, read_run
from cogfast.model.weights.checkpoint_manifest import is_in_run, run_of


def report(paths: Sequence[Path], out: Path | None) -> Path:
    """Write the page of the runs and return its path.

    out: None: index.html in the folder of a single run, report.html for several. ValueError if a path
    is no run, or the page cannot be written.
    """
    runs = [_run(path) for path in paths]
    for i, run in enumerate(runs):
        if any(run.samefile(other) for other in runs[:i]):
            raise ValueError(f"{paths[i]}: the same run is given twice; give each run once")
    if out is None:
        out = runs[0] / NAME if len(runs) == 1 else Path("report.html")
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder; give the path of a file, such as {out / NAME}")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: the folder {out.parent} does not exist; create it")
    records = [read_run(run) for run in runs]
    try:
        write_page(out, page_of(records, out))
    except (OSError, WriteError) as error:
        raise ValueError(f"{error}; give another file with --out FILE") from None
    return out


def _run(path: Path) -> Path:
    """Return the folder of a run, or that of a checkpoint's run."""
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder; give the folder of a run")
    # A path such as `.` has no name of its own, which decides what it is.
    if not is_run(path) and is_in_run(path.absolute()):
        path = run_of(path.absolute())
    if not is_run(path):
        raise ValueError(
            f"{path} is not the folder of a run, since it has neither metrics.jsonl nor "
            "training_config.yaml; give a folder that `cogfast train` has written"
        )
    return path
