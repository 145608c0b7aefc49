"""Where a run writes: `<args.save>/<experiment_name>-<date and time>/`, and finding one again."""

from __future__ import annotations

import json
import logging
import platform
import re
import subprocess
import time
from datetime import datetime
from pathlib import Path

import torch

from cogfast.train.checkpoint import newest_checkpoint
from cogfast.train.process_groups import ProcessGroups

logger = logging.getLogger(__name__)

_STAMP = re.compile(r"-\d{4}-\d\d-\d\d-\d\d-\d\d-\d\d$")


def open_run_folder(
    save: str, experiment: str, resume: str | None, groups: ProcessGroups
) -> tuple[Path, Path | None]:
    """The run's folder and the checkpoint that it goes on from, the same on every rank.

    resume: None starts afresh; "latest" goes on with the newest run of that experiment that has a
    checkpoint; "auto" the same or, where there is none, afresh; a path names a run or checkpoint.
    """
    found = None
    error = None
    if groups.is_main:
        try:
            found = _find(Path(save), experiment, resume)
        except ValueError as caught:
            error = str(caught)
    found, error = groups.broadcast((found, error))
    if error is not None:
        raise ValueError(error)
    return found


def _find(save: Path, experiment: str, resume: str | None) -> tuple[Path, Path | None]:
    if resume not in (None, "auto", "latest"):
        return _named(Path(resume))
    if resume is not None:
        runs = [p for p in save.glob(f"{experiment}-*") if _STAMP.sub("", p.name) == experiment]
        for run in sorted(runs, reverse=True):
            checkpoint = newest_checkpoint(run)
            if checkpoint is not None:
                return run, checkpoint
        if resume == "latest":
            raise ValueError(
                f"args.resume=latest: no run of {experiment!r} with a checkpoint in {save}; "
                "use --resume auto to start afresh where there is none"
            )
    while True:
        stamp = datetime.now().strftime("%Y-%m-%d-%H-%M-%S")
        run = save / f"{experiment}-{stamp}"
        try:
            run.mkdir(parents=True)
        except FileExistsError:  # another run began in this second
            time.sleep(0.2)
        else:
            return run, None


def _named(path: Path) -> tuple[Path, Path]:
    if not path.is_dir():
        raise ValueError(
            f"args.resume={path}: no such folder; refusing to start from scratch; "
            "name a run or checkpoint folder, or use auto"
        )
    if (path / "manifest.json").is_file() or path.parent.name == "checkpoints":
        return path.parent.parent, path
    checkpoint = newest_checkpoint(path)
    if checkpoint is None:
        raise ValueError(f"args.resume={path}: it has no checkpoints/latest; name a run folder")
    return path, checkpoint


def describe_environment(folder: Path, config_text: str, world_size: int) -> None:
    """Write down what runs: the merged config, versions, devices, git commit and changes."""
    (folder / "training_config.yaml").write_text(config_text)
    import deepspeed

    source = Path(__file__).resolve().parents[2]
    environment = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "host": platform.node(),
        "world_size": world_size,
        "commit": _git(source, "rev-parse", "HEAD"),
    }
    (folder / "environment.json").write_text(json.dumps(environment, indent=2) + "\n")
    changes = _git(source, "diff", "HEAD")
    if changes:
        (folder / "changes.diff").write_text(changes + "\n")


def _git(folder: Path, *words: str) -> str | None:
    """What git says of the source, or None where it is installed without git."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
