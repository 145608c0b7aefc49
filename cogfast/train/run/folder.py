"""The folder of a run, `<args.save>/<experiment_name>-<date and time>/`: create, find, describe."""

from __future__ import annotations

import json
import logging
import platform
import re
import subprocess
import time
from dataclasses import asdict
from datetime import datetime
from fnmatch import fnmatch
from glob import escape
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from cogfast.config import Config
from cogfast.files import WriteError, set_aside, write_text
from cogfast.model.weights.formats.run_manifest import find_run_checkpoint, newest_checkpoint
from cogfast.schema.arguments import ModelArguments, TrainArguments
from cogfast.schema.config import to_dict
from cogfast.schema.yaml_files import read_yaml
from cogfast.train.distributed.process_groups import ProcessGroups

logger = logging.getLogger(__name__)

# Keys that decide what is trained: a resumed run must have the same values as its checkpoint. Paths,
# intervals, logging, evaluation, the number of steps, and the parallel layout may change.
_DECISIVE = (
    "model.*",
    "data.*",
    "args.seed",
    "args.mode",
    "args.cached_noised_images",
    "deepspeed.optimizer.*",
    "deepspeed.gradient_clipping",
    "args.weight_decay",
    "deepspeed.bf16.enabled",
    "deepspeed.fp16.enabled",
    "args.bf16",
    "args.fp16",
    "args.lr",
    "args.lr_*",
    "args.warmup*",
    "args.min_lr_ratio",
)
# Exceptions, which may change: locations of files, sampling, and ways to save memory.
_FREE = (
    "*_path",
    "*_dir",
    "*_folder",
    "model.sampler_config.*",
    "*.checkpoint_activations",
    "model.en_and_decode_n_samples_a_time",
    "data.params.keep_decoded_mib",
    "model.denoiser_config.params.weighting_config.*",
)
_STAMP = re.compile(r"-\d{4}-\d\d-\d\d-\d\d-\d\d-\d\d$")


def open_run_folder(
    save: str, experiment: str, resume: str | None, groups: ProcessGroups
) -> tuple[Path, Path | None]:
    """Return the run's folder and the checkpoint that it resumes from, the same on every rank.

    resume: None: start a new run. "latest": resume the experiment's newest run that has a checkpoint.
    "auto": the same, but start a new run if there is none. Otherwise the path of a run or checkpoint.
    """
    return groups.on_main(lambda: _find(Path(save), experiment, resume))


def _find(save: Path, experiment: str, resume: str | None) -> tuple[Path, Path | None]:
    if resume not in (None, "auto", "latest"):
        return _named(Path(resume))
    if resume is not None:
        # The glob also finds experiments whose names begin with this one's.
        runs = [
            p for p in save.glob(f"{escape(experiment)}-*") if _STAMP.sub("", p.name) == experiment
        ]
        # The names end in date and time, so the newest run comes first.
        for run in sorted(runs, reverse=True):
            checkpoint = newest_checkpoint(run)
            if checkpoint is not None:
                return run, checkpoint
        if resume == "latest":
            raise ValueError(
                f"args.resume=latest: no run of {experiment!r} with a checkpoint in {save}; "
                "use --resume auto to start a new run in that case"
            )
    while True:
        stamp = datetime.now().strftime("%Y-%m-%d-%H-%M-%S")
        run = save / f"{experiment}-{stamp}"
        try:
            # Creating the folder also reserves its name against runs that start now.
            run.mkdir(parents=True)
        except FileExistsError:  # another run started in the same second
            time.sleep(0.2)
        except OSError as error:
            raise ValueError(
                f"args.save={save}: cannot create a run's folder there ({error.strerror}); set "
                "it to another folder"
            ) from None
        else:
            return run, None


def _named(path: Path) -> tuple[Path, Path]:
    if not path.is_dir():
        raise ValueError(
            f"args.resume={path}: no such folder; refusing to start from scratch; "
            "set it to the folder of a run or checkpoint, or to auto"
        )
    path = path.absolute()
    checkpoint = path if path.parent.name == "checkpoints" else find_run_checkpoint(path)
    if checkpoint is None:
        raise ValueError(
            f"args.resume={path}: it has no checkpoints/latest; set it to the folder of a run"
        )
    return checkpoint.parent.parent, checkpoint


def check_changes(checkpoint: Path, manifest: dict, config: Config, global_batch: int) -> None:
    """Check that the keys that decide what is trained are the checkpoint's.

    Raises:
        ValueError: some differ and args.accept_changes is not set; lists them.
    """
    before = _completed(manifest.get("config", {}))
    after = plain_sections(config)
    found = [] if not before else list(_changes(before, after).items())
    changes = [text for key, text in found if _matches(key, _DECISIVE) and not _matches(key, _FREE)]
    if manifest["global_batch"] != global_batch:
        changes.append(f"global batch: {manifest['global_batch']} -> {global_batch}")
    if changes and not config.args.get("accept_changes"):
        raise ValueError(
            f"args.resume={checkpoint}: the configuration differs from the checkpoint's: "
            f"{'; '.join(changes)}; change it back, or resume anyway with --accept-changes"
        )


def plain_sections(config: Config) -> dict:
    """Return the resolved sections as in a manifest: JSON types, infinities as strings."""
    sections = OmegaConf.to_container(OmegaConf.create(config.sections()), resolve=True)
    return json.loads(json.dumps(sections), parse_constant=str)


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(key, pattern) for pattern in patterns)


def describe_run(folder: Path, checkpoint: Path | None, config_text: str, world_size: int) -> None:
    """Write the merged config, versions, devices, git commit and local changes to the run's folder.

    checkpoint: the one that the run resumes from; None for a new run. A resumed run writes new files
    beside the first ones and logs the config keys that changed.
    """
    try:
        _write_description(folder, checkpoint, config_text, world_size)
    except (OSError, WriteError) as error:
        raise ValueError(
            f"args.save={folder.parent}: {error}; free space, or set it to another folder"
        ) from None


def _write_description(
    folder: Path, checkpoint: Path | None, config_text: str, world_size: int
) -> None:
    mark = "" if checkpoint is None else f"-from-{checkpoint.name}"
    first = folder / "training_config.yaml"
    try:
        changed = _changed_keys(first, config_text) if first.is_file() else []
    except ValueError:
        logger.warning("%s is damaged: renamed to %s", first, set_aside(first).name)
        changed = []
    if changed:
        logger.warning("the configuration has changed: %s", "; ".join(changed))
    if changed or not first.is_file():
        write_text(folder / f"training_config{mark if changed else ''}.yaml", config_text)
    environment = json.dumps(_environment(world_size), indent=2)
    write_text(folder / f"environment{mark}.json", environment + "\n")
    changes = git("diff", "HEAD")
    if changes:
        write_text(folder / f"changes{mark}.diff", changes + "\n")


def _changed_keys(before: Path, after: str) -> list[str]:
    """Return `key: old -> new` of every key that differs between a run's file and a configuration."""
    old = read_yaml(before, before.name, is_plain=True)
    new = OmegaConf.create(after)
    assert isinstance(new, DictConfig), "a configuration is a mapping"
    changes = _changes(to_dict(old), to_dict(new))
    of_resume = ("args.resume", "args.accept_changes")
    return [text for key, text in changes.items() if key not in of_resume]


def _completed(sections: dict) -> dict:
    """Add the defaults of keys that the checkpoint's version of cogfast did not have yet."""
    defaults = {"args": asdict(TrainArguments()), "model": asdict(ModelArguments())}
    return sections and sections | {k: v | sections.get(k, {}) for k, v in defaults.items()}


def _changes(before: dict, after: dict) -> dict[str, str]:
    """Return {key: "key: old -> new"} of the keys that differ between two plain configurations."""
    old, new = _leaves(before), _leaves(after)
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return {key: f"{key}: {old.get(key)} -> {new.get(key)}" for key in keys}


def _leaves(node: object, key: str = "") -> dict[str, object]:
    # Compare lists of components item by item, other lists as one value.
    if isinstance(node, list) and any(isinstance(item, dict) for item in node):
        node = {str(i): item for i, item in enumerate(node)}
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
        "commit": git("rev-parse", "HEAD"),
    }


def git(*arguments: str) -> str | None:
    """Return the output of a git command on cogfast's source; None if that is no git checkout."""
    source = Path(__file__).resolve().parents[3]
    if not (source / ".git").exists():  # git would describe a repository that contains the folder
        return None
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=source, capture_output=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()
