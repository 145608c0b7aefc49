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
from omegaconf import OmegaConf

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
    return groups.on_main(lambda: _find(Path(save), experiment, resume))


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
        except OSError as error:
            raise ValueError(
                f"args.save={save}: cannot make a run's folder there ({error.strerror}); name "
                "another folder"
            ) from None
        else:
            return run, None


def _named(path: Path) -> tuple[Path, Path]:
    if not path.is_dir():
        raise ValueError(
            f"args.resume={path}: no such folder; refusing to start from scratch; "
            "name a run or checkpoint folder, or use auto"
        )
    if (path / "manifest.json").is_file() or path.parent.name == "checkpoints":
        path = path.absolute()
        return path.parent.parent, path
    checkpoint = newest_checkpoint(path)
    if checkpoint is None:
        raise ValueError(f"args.resume={path}: it has no checkpoints/latest; name a run folder")
    return path, checkpoint


def describe_run(folder: Path, checkpoint: Path | None, config_text: str, world_size: int) -> None:
    """Write down what runs: the merged config, versions, devices, git commit and changes.

    checkpoint: where the run goes on, None for a new one. A resumed run's files stand beside the
    first ones; keys of the config that are other than then are logged.
    """
    mark = "" if checkpoint is None else f"-from-{checkpoint.name}"
    first = folder / "training_config.yaml"
    changed = _changed_keys(first.read_text(), config_text) if first.is_file() else []
    if changed:
        logger.warning("the configuration is not the one before: %s", "; ".join(changed))
    if changed or not first.is_file():
        (folder / f"training_config{mark if changed else ''}.yaml").write_text(config_text)
    environment = json.dumps(_environment(world_size), indent=2)
    (folder / f"environment{mark}.json").write_text(environment + "\n")
    changes = _git("diff", "HEAD")
    if changes:
        (folder / f"changes{mark}.diff").write_text(changes + "\n")


def _changed_keys(before: str, after: str) -> list[str]:
    """`key: value -> value` of every key that differs between two configurations."""
    old, new = (_leaves(OmegaConf.to_container(OmegaConf.create(text))) for text in (before, after))
    keys = [k for k in {**old, **new} if old.get(k) != new.get(k) and k != "args.resume"]
    return [f"{key}: {old.get(key)} -> {new.get(key)}" for key in keys]


def _leaves(node: object, key: str = "") -> dict[str, object]:
    if not isinstance(node, dict):
        return {key: node}
    dot = "." if key else ""
    return {k: v for name, n in node.items() for k, v in _leaves(n, f"{key}{dot}{name}").items()}


def _environment(world_size: int) -> dict[str, object]:
    import deepspeed

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "host": platform.node(),
        "world_size": world_size,
        "commit": _git("rev-parse", "HEAD"),
    }


def _git(*words: str) -> str | None:
    """What git says of the source, or None where it is installed without git."""
    source = Path(__file__).resolve().parents[2]
    if not (source / ".git").exists():  # git would speak of a project around it
        return None
    try:
        done = subprocess.run(
            ["git", *words], cwd=source, capture_output=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()
