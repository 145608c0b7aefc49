"""Creates, finds and describes a run's folder: `<args.save>/<experiment_name>-<time>/` or args.run_folder."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from datetime import UTC, datetime
from fnmatch import fnmatch
from glob import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

import cogfast.extensions.stores.store as store
from cogfast import __version__
from cogfast.config.sat_unused import DENOISER, FIRST_STAGE, OPTIMIZER, SAMPLER, take_moved
from cogfast.core.addresses import name_of, shown, url_of, with_urls
from cogfast.core.files import WriteError, read_limited, wait_until, write_text
from cogfast.core.run_lock import RunLock, check_object, is_held
from cogfast.core.values import counted, cut, leaves, printable
from cogfast.data.keys import data_param
from cogfast.distributed.keys import DeepSpeedKeys
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.extensions.stores.mirror import copy_of, download_run, folder_of, remove_earlier_run
from cogfast.extensions.stores.store import StoreError
from cogfast.model.keys import ModelKeys
from cogfast.model.lora import FILE_NAME as LORA_FILE_NAME
from cogfast.model.weights.checkpoint_manifest import (
    find_run_checkpoint,
    is_in_run,
    layout_of,
    newest_checkpoint,
    run_of,
    step_of,
)
from cogfast.train.keys import FolderLayout, TrainKeys
from cogfast.train.optimizer import TENTH
from cogfast.train.run.own_classes import Classes, changes_of_code

logger = logging.getLogger(__name__)

Sections = Mapping[str, Mapping[str, Any]]  # plain values
# Keys that decide what is trained: a resumed run must have the same values as its checkpoint. Paths,
# intervals, logging, evaluation, the number of steps, and the parallel layout may change.
_TRAINED = (
    "seed mode attention sparse_warmup cached_noised_images weight_decay quantize_base bf16 fp16 lr "
    "min_lr_ratio"
)
_DECISIVE = [*map(TrainKeys.key, _TRAINED.split()), DeepSpeedKeys.key("gradient_clipping")]
_DECISIVE += ["trainer*", "model.*", "data.*", "args.lr_*", "args.warmup*", f"{OPTIMIZER}.*"]
# Exceptions, which may change: locations of files, sampling, and ways to save memory.
_FREE = ["*_path", "*_dir", "*_folder", "*.checkpoint_activations", f"{SAMPLER}.*"]
_FREE += [f"{DENOISER}.params.weighting_config.*", f"{FIRST_STAGE}.params.path"]
_FREE += [ModelKeys.key("en_and_decode_n_samples_a_time")]
_FREE += map(data_param, ("keep_decoded_mib", "trust_index"))
_OF_RESUMES = tuple(map(TrainKeys.key, ("resume", "accept_changes", "run_folder")))
_MOST_NAME_BYTES = 255  # of a file or folder, on Linux
_MOST_CHANGES = 6  # in an error message
_CONFIG = "training_config.yaml"
_STAMP = re.compile(r"-\d{4}-\d\d-\d\d-\d\d-\d\d-\d\d$")


Lock = Callable[[Path, bool], None]  # locks a run's folder, of which it gets whether it is new


def open_run_folder(
    args: TrainKeys, groups: ProcessGroups, held: ExitStack
) -> tuple[Path, Path | None, Callable[[], None]]:
    """Return the run's folder and the checkpoint that it resumes from, the same on every rank, and what
    raises RuntimeError if another process has taken the folder, which rank 0 locks until `held` ends.

    In a store, the folder is the one of this machine that stands for it (extensions/stores/mirror.py).

    args.resume: None: start a new run. "latest": resume the newest run with a checkpoint, of the
    experiment or in args.run_folder. "auto": the same, but start a new run if there is none. Otherwise
    the path of a run or checkpoint, which continues in its run's folder or in args.run_folder.
    """
    locks: list[RunLock] = []
    opened: list[Path] = []  # on rank 0, where the checkpoint may be a copy of that of another run

    def lock(run: Path, is_new: bool) -> None:
        locks.append(held.enter_context(RunLock(run, is_new)))
        if url_of(run) is not None:
            download_run(run)

    def open_on_main() -> tuple[list[str], str | None, str]:
        try:
            opened.extend(path for path in _open(args, lock) if path is not None)
        except StoreError as error:
            is_path = args.run_folder is None and _path_to_resume(args) is not None
            text = f"args.{'resume' if is_path else _given_folder(args)[0]}: {error}"
            raise ValueError(text) from None
        return [name_of(path) for path in opened], locks[-1].url, locks[-1].holder

    # Other machines may have their caches elsewhere.
    names, url, holder = groups.on_main(open_on_main)

    def open_here() -> tuple[Path, Path | None]:
        run, *checkpoints = opened or map(folder_of, names)
        first = groups.rank - groups.local_rank  # on this machine
        if first > 0 and url_of(run) is not None:
            # Machines may share a local cache, and each of them uploads its folder.
            run = store.local_cache()[0] / f"rank-{first}" / "runs" / names[0]
            if groups.local_rank == 0:
                remove_earlier_run(run)
        elif groups.rank > 0 and url_of(run) is None:
            _check_shared(args, run, holder)
        return run, next(iter(checkpoints), None)

    run, checkpoint = groups.on_all(open_here)
    if locks:
        return run, checkpoint, locks[-1].check
    return run, checkpoint, lambda: None if url is None else check_object(url, holder)


def _check_shared(args: TrainKeys, run: Path, holder: str) -> None:
    """Raise ValueError if this rank does not see the lock that rank 0 has written into the run's folder."""
    if not wait_until(lambda: is_held(run, holder)):
        key, _ = _given_folder(args)
        text = f"{platform.node()} does not see {run.absolute()} as {' '.join(holder.split()[:4])} has written it"
        fix = "set it to a folder that all machines share, or to an object store"
        raise ValueError(f"args.{key}={getattr(args, key)}: {text}; {fix}")


def _open(args: TrainKeys, lock: Lock) -> tuple[Path, Path | None]:
    """Find or create the run's folder and lock it, and find the checkpoint that it resumes from."""
    checkpoint = None
    if args.run_folder is not None:
        run = folder_of(args.run_folder)
        if url_of(run) is None:
            resumed_in_run_folder(args)
        create_folder(args)
        lock(run, False)
        # Looked for behind the lock: another run may just have saved its last checkpoint.
        checkpoint = resumed_in_run_folder(args)
    elif (found := _find(args, is_logged=True)) is None:
        run = _create_run(args, lock)
    elif adapters_to_resume(found[1]) is not None:
        # CogVideo's trainer gives weights to start from, and no run to continue.
        return _create_run(args, lock), found[1]
    else:
        run, checkpoint = _open_found(args, *found, lock)
    is_theirs = checkpoint is not None and adapters_to_resume(checkpoint) is not None
    if checkpoint is not None and not is_theirs and run_of(checkpoint).samefile(run):
        layout = layout_of(checkpoint)
        if layout != args.folder_layout:
            text = f"args.folder_layout={args.folder_layout}, but {name_of(run)} has the names of {layout}"
            raise ValueError(f"{text}; set args.folder_layout={layout} to resume there")
    return run, checkpoint


def _open_found(
    args: TrainKeys, run: Path, checkpoint: Path, lock: Lock
) -> tuple[Path, Path | None]:
    """Lock the folder of a run that `_find` has found, and return it and the checkpoint to resume."""
    is_stored = url_of(run) is not None
    if is_stored:
        run.mkdir(parents=True, exist_ok=True)
        lock(run, False)
        if _path_to_resume(args) is not None:
            checkpoint = _named(checkpoint)[1]
    if checkpoint.parent.name != "checkpoints" and not (run / _CONFIG).is_file():
        # A copy: what lies beside it is not this run's to write to and remove.
        text = f"args.resume={args.resume}: it is not in the folder of its run, as RUN/checkpoints/STEP; set "
        raise ValueError(f"{text}args.run_folder to the folder in which the run continues")
    if not is_stored:
        lock(run, False)
    # The run may just have saved its last checkpoint.
    return run, checkpoint if _path_to_resume(args) is not None else newest_checkpoint(run)


def checkpoint_to_resume(args: TrainKeys) -> Path | None:
    """Return the checkpoint from which a run would resume now; None starts a new run. Creates nothing."""
    path = _path_to_resume(args)
    if args.run_folder is not None and not store.is_url(args.run_folder):
        return resumed_in_run_folder(args)
    if args.run_folder is not None:
        own = _copied(folder_of(args.run_folder))
        if own is not None or path is None:
            return own
    if (found := _find(args)) is None:
        return None
    run, checkpoint = found
    # In a store, the run's `latest` says which of its checkpoints it is.
    return _copied(run if path is None and url_of(run) is not None else checkpoint)


def _copied(found: Path) -> Path | None:
    """Return a run's or checkpoint's own path, or the checkpoint in a copy of what is in a store, if any."""
    url = url_of(found)
    if url is None or found != folder_of(url):  # on a disk, or a copy
        return found
    return find_run_checkpoint(Path(copy_of(url))) if store.find(url) else None


def resumed_in_run_folder(args: TrainKeys) -> Path | None:
    """Return the checkpoint from which a run in args.run_folder resumes; None starts a new run.

    ValueError if the folder has another run, or has none to resume.
    """
    assert args.run_folder is not None, "the caller asks"
    run, path = folder_of(args.run_folder), _path_to_resume(args)
    if run.exists() and not run.is_dir():
        raise ValueError(f"args.run_folder={run} is a file; set it to a folder")
    # The folder's own checkpoints count before those of a path, so that a restarted job continues.
    own = newest_checkpoint(run)
    if args.resume in ("auto", "latest") and own is not None:
        return own
    if args.resume == "latest":
        text = f"args.resume=latest: args.run_folder={args.run_folder} has no checkpoint"
        raise ValueError(f"{text}; use args.resume=auto to start a new run in that case")
    checkpoint = None
    if path is not None:
        place = folder_of(path)
        is_own = place.is_relative_to(run)  # and so downloaded, if it is in a store
        copy = None if is_own else _their_adapters(place) or Path(copy_of(path))
        checkpoint = _named(copy or place)[1]
    if checkpoint is not None and run.is_dir() and run_of(checkpoint).samefile(run):
        return checkpoint
    problem = None
    # Users of `cogfast finetune` know its option.
    how = "--resume_from_checkpoint " if args.folder_layout == "finetune" else "--resume "
    if own is not None:
        steps = counted(step_of(own) or 0, "step")
        problem = f"has a run of {steps}; resume it with {how}latest"
    elif any(step_of(path) is not None for path in run.glob("checkpoint-*")):
        problem = f"has checkpoints that cogfast did not write; resume one with {how}PATH"
    elif (run / "metrics.jsonl").exists() and args.resume != "auto":
        problem = f"has a run without a checkpoint; start it again with {how}auto"
    if problem is not None:
        raise ValueError(f"args.run_folder={args.run_folder} {problem}, or set another folder")
    return checkpoint


def check_creatable(args: TrainKeys) -> None:
    """Raise ValueError if the folder that the run writes into cannot be created. Leaves nothing there."""
    key, folder = _given_folder(args)
    if (url := url_of(folder)) is not None:
        try:
            store.check_writable(url)
        except StoreError as error:
            raise ValueError(f"args.{key}={error}") from None
    above = folder
    while not os.path.exists(above):
        above = above.parent
    reason = None
    if not above.is_dir():
        reason = f"{cut(str(above))} is a file"
    elif not os.access(above, os.W_OK | os.X_OK):
        reason = f"{cut(str(above))} is not writable"
    elif any(len(os.fsencode(part)) > _MOST_NAME_BYTES for part in folder.parts):
        reason = f"a name in it has more than {_MOST_NAME_BYTES} bytes"
    if reason is not None:
        raise _not_creatable(args, key, reason)


def create_folder(args: TrainKeys) -> None:
    """Create args.run_folder, or args.save, in which the run's folder will be."""
    key, folder = _given_folder(args)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_creatable(args, key, str(error.strerror)) from None


def _path_to_resume(args: TrainKeys) -> str | None:
    """Return the path in args.resume; None for a new run and for the newest one."""
    return None if args.resume in (None, "auto", "latest") else args.resume


def _given_folder(args: TrainKeys) -> tuple[str, Path]:
    """Return the key that sets where the run is written, and its absolute path."""
    path = None if args.run_folder is not None else _path_to_resume(args)
    if path is not None and (own := find_run_checkpoint(folder_of(path).absolute())):
        return "resume", run_of(own)
    key = "run_folder" if args.run_folder is not None else "save"
    return key, folder_of(getattr(args, key) or "runs").absolute()


def _not_creatable(args: TrainKeys, key: str, reason: str) -> ValueError:
    name = cut(str(getattr(args, key) or "runs"))
    what, fix = ("written", "set args.run_folder") if key == "resume" else ("created", "set it")
    return ValueError(f"args.{key}={name}: cannot be {what} ({reason}); {fix} to another folder")


def adapters_to_resume(checkpoint: Path) -> Path | None:
    """Return the LoRA file of a checkpoint of CogVideo's diffusers trainer; None for cogfast's own.

    ValueError if the checkpoint has only DeepSpeed's files.
    """
    if layout_of(checkpoint) != "finetune" or find_run_checkpoint(checkpoint) is not None:
        return None
    file = checkpoint / LORA_FILE_NAME
    if file.is_file():
        return file
    if any(checkpoint.glob("*/*_states.pt")):
        text = f"args.resume={name_of(checkpoint)}: its weights are in DeepSpeed's pickle files, which are not read"
        text += "; make a diffusers folder of them with its zero_to_fp32.py"
        raise ValueError(f"{text}, and start a new run with args.load=FOLDER")
    return None


def wandb_id(run: Path) -> str:
    """Return the id of a run in W&B: the folder's name if it has a date, else one in a file of it."""
    if _STAMP.search(run.name):
        return run.name
    # args.run_folder may have the same name on other machines.
    file = run / "wandb_id"
    if not file.is_file():
        name = re.sub(r"[^\w.-]+", "-", run.absolute().name)[:64]
        write_text(file, f"{name}-{secrets.token_hex(4)}\n")
    return read_limited(file, 1024, "remove it").decode("utf-8").strip()


def samples_place(run: Path, step: int, layout: FolderLayout) -> tuple[Path, str]:
    """Return the folder of the videos that are sampled at a step, and the start of their names."""
    if layout == "finetune":
        return run / "validation_res", f"validation-{step}-"
    return run / "samples" / f"step-{step:08d}", ""


def _find(args: TrainKeys, is_logged: bool = False) -> tuple[Path, Path] | None:
    """Return the run that args.resume names, and its checkpoint; None: there is none to resume.

    In a store, nothing is downloaded. is_logged: the choice between several runs.
    """
    if (name := _path_to_resume(args)) is None:
        return None if args.resume is None else _newest_run(args, is_logged)
    path = folder_of(name)
    if url_of(path) is None:
        return _named(path)
    if (theirs := _their_adapters(path)) is not None:
        return _named(theirs)
    run = path.parent if path.name == "checkpoints" else path
    run = run_of(path) if is_in_run(path) else run
    if run not in _stored_runs(run):
        raise _no_checkpoint(path)
    return run, path


def _newest_run(args: TrainKeys, is_logged: bool) -> tuple[Path, Path] | None:
    """Return the run of the experiment in args.save that has saved last, and its checkpoint."""
    save, experiment = folder_of(args.save or "runs"), args.experiment_name
    url = url_of(save)
    stored = {} if url is None else _stored_runs(save)
    # The glob also finds experiments whose names begin with this one's.
    runs = [p for p in stored if p.parent == save] or save.glob(f"{escape(experiment)}-*")
    runs = [p for p in runs if _STAMP.sub("", p.name) == experiment]
    # Names of earlier versions are in local time. A store has no files here: the newest name comes first.
    files = lambda run: run.glob("checkpoint*/**/manifest.json")
    saved = lambda run: max(map(os.path.getmtime, files(run)), default=0.0)
    for run in sorted(runs, key=lambda run: (saved(run), run.name), reverse=True):
        checkpoint = newest_checkpoint(run) if url is None else stored.get(run)
        if checkpoint is not None:
            if is_logged and len(runs) > 1:
                text = "args.resume=%s continues %s, which has saved last of %d runs of %r"
                logger.info(text, args.resume, name_of(run), len(runs), experiment)
            return run, checkpoint
    if args.resume == "latest":
        text = f"args.resume=latest: no run of {experiment!r} with a checkpoint in {name_of(save)}; use "
        raise ValueError(f"{text}args.resume=auto to start a new run in that case")
    return None


def _create_run(args: TrainKeys, lock: Lock) -> Path:
    """Create the folder of a new run in args.save, and lock it."""
    save = folder_of(args.save or "runs")
    while True:
        stamp = datetime.now(UTC).strftime("%Y-%m-%d-%H-%M-%S")
        run = save / f"{args.experiment_name}-{stamp}"
        try:
            # Creating the folder also reserves its name against runs that start now; in a store, the lock does.
            run.mkdir(parents=True)
            lock(run, True)
            return run
        except FileExistsError:  # another run started in the same second
            time.sleep(0.2)
        except OSError as error:
            text = f"args.save={name_of(save)}: cannot create a run's folder there ({error.strerror or error})"
            raise ValueError(f"{text}; set it to another folder") from None


def _stored_runs(folder: Path) -> dict[Path, Path]:
    """Return {run: a checkpoint of it} of the runs in a store that are a folder or lie in it."""
    url = url_of(folder) or ""
    files = (folder / file[len(url) + 1 :] for file in store.find(url))
    found = [file.parent for file in files if file.name == "manifest.json"]
    return {run_of(path): path for path in found if is_in_run(path)}


def _their_adapters(path: Path) -> Path | None:
    """Return a copy of a checkpoint of CogVideo's trainer in a store: of its LoRA file alone, as files of
    DeepSpeed may lie beside it."""
    url = url_of(path)
    is_one = url is not None and layout_of(path) == "finetune" and is_in_run(path)
    if not is_one or store.exists(f"{url}/manifest.json"):
        return None
    return Path(copy_of(f"{url}/{LORA_FILE_NAME}")).parent


def _no_checkpoint(path: Path) -> ValueError:
    text = "it has no checkpoint of cogfast; set it to the folder of a run"
    return ValueError(f"args.resume={name_of(path)}: {text}")


def _named(path: Path) -> tuple[Path, Path]:
    """Return the run and the checkpoint that a path of a run or a checkpoint names."""
    if not path.is_dir():
        text = f"args.resume={name_of(path)}: no such folder; refusing to start from scratch"
        raise ValueError(f"{text}; set it to the folder of a run or checkpoint, or to auto")
    # A path such as `.` or `..` has no name of its own, which decides what it is.
    path = path.absolute()
    checkpoint = path if is_in_run(path) else find_run_checkpoint(path)
    if checkpoint is None:
        raise _no_checkpoint(path)
    return run_of(checkpoint), checkpoint


def check_changes(
    checkpoint: Path, manifest: dict, sections: Sections, global_batch: int, classes: Classes
) -> None:
    """Check that the keys and the user's classes that decide what is trained are the checkpoint's.

    Raises:
        ValueError: some differ and args.accept_changes is not set; lists them.
    """
    matches = lambda key, patterns: any(fnmatch(key, pattern) for pattern in patterns)
    found = _changes_since(manifest, sections, classes).items()
    changes = [text for key, text in found if matches(key, _DECISIVE) and not matches(key, _FREE)]
    if manifest["global_batch"] != global_batch:
        old, steps = manifest["global_batch"], sections["args"]["gradient_accumulation_steps"] or 1
        same = f" (args.gradient_accumulation_steps={steps * old // global_batch} keeps it)"
        same *= steps * old % global_batch == 0
        changes.append(f"global batch: {old} -> {global_batch}{same}")
    more = len(changes) - _MOST_CHANGES
    if more > 0:
        changes = [*changes[:_MOST_CHANGES], f"and {more} more keys"]
    if changes and not sections["args"].get("accept_changes"):
        text = f"args.resume={name_of(checkpoint)}: "
        text += f"the configuration differs from the checkpoint's: {'; '.join(changes)}"
        raise ValueError(f"{text}; change it back, or resume anyway with args.accept_changes=true")


def plain_sections(sections: Mapping[str, Any]) -> dict:
    """Return the sections as in a manifest: JSON types, infinities as strings."""
    return json.loads(json.dumps(with_urls(dict(sections))), parse_constant=str)


def describe_run(
    folder: Path,
    checkpoint: Path | None,
    manifest: dict,
    sections: Sections,
    origins: Mapping[str, str],
    world_size: int,
    classes: Classes,
) -> None:
    """Write the merged config, versions, devices, git commit and local changes to the run's folder.

    checkpoint, manifest: the one that the run resumes from; None and {} for a new run. A resumed run
    writes new files beside the first ones and logs the config keys that differ from the checkpoint's.
    """
    # A resumed run keeps the files of the first start: both may be needed to explain it.
    mark = "" if checkpoint is None else f"-from-{checkpoint.name}"
    changes = _changes_since(manifest, sections, classes)
    changed = [text for key, text in changes.items() if key not in _OF_RESUMES]
    if TENTH in origins.values():
        text = "args.warmup_steps=%d: the smaller of 100 and a tenth of the steps"
        logger.info(text, sections["args"]["warmup_steps"])
    if changed:
        logger.warning("the configuration has changed: %s", "; ".join(changed))
    for key in [key for key, each in classes.items() if each["code"] is None]:
        text = "%s: the code of %s is in no file, so that a resumed run does not notice its changes"
        logger.warning(text, key, classes[key]["name"])
    shutil.rmtree(folder / "hang", ignore_errors=True)  # stacks of an earlier start
    changes_of_code = shown(diff := git("diff", "HEAD"))
    if changes_of_code != diff:
        logger.info("changes%s.diff does not restore the code: ... is in place of secrets", mark)
    environment = _environment(world_size) | {"has_local_changes": bool(changes_of_code)}
    try:
        if changed or not (folder / _CONFIG).is_file():
            name = f"training_config{mark if changed else ''}.yaml"
            text = OmegaConf.to_yaml(with_urls(dict(sections)))
            write_text(folder / name, text, 0o666 if shown(text) == text else 0o600)
        write_text(folder / f"environment{mark}.json", json.dumps(environment, indent=2) + "\n")
        if changes_of_code:
            write_text(folder / f"changes{mark}.diff", changes_of_code + "\n")
    except (OSError, WriteError) as error:
        text = f"{error}; free space, or set args.save or args.run_folder to another folder"
        raise ValueError(text) from None


def _changes_since(manifest: dict, sections: Sections, classes: Classes) -> dict[str, str]:
    """Return {key: "key: old -> new"} of what differs from a checkpoint, {} without one."""
    stored = manifest.get("config")
    if not stored:
        return {}
    # The sections are completed as this version would have saved them: with the defaults of new keys, and
    # with the values that have moved from the deepspeed section to args.
    defaults = {"args": TrainKeys().model_dump(), "model": ModelKeys().model_dump()}
    before = deepcopy(stored) | {k: v | stored.get(k, {}) for k, v in defaults.items()}
    before["args"] |= {name: value for name, (value, *_) in take_moved(before).items()}
    old, new = leaves(before), leaves(plain_sections(sections))
    # A key that is absent and one that is null count as equal.
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    changes = {key: f"{key}: {old.get(key)} -> {new.get(key)}" for key in keys}
    # Earlier versions stored no classes.
    return changes | changes_of_code(manifest.get("classes", classes), classes)


def _environment(world_size: int) -> dict[str, object]:
    return {
        "command": command_line(),
        "working_folder": os.getcwd(),  # where the relative paths of the configuration start
        "python": platform.python_version(),
        "cogfast": __version__,
        "torch": torch.__version__,
        **{name: version(name) for name in ("deepspeed", "diffusers", "transformers")},
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "host": platform.node(),
        "world_size": world_size,
        "commit": git("rev-parse", "HEAD"),
    }


def command_line() -> str:
    """Return the command of this process as one would type it."""
    program = Path(sys.argv[0]).name
    name = "python -m cogfast" if program == "__main__.py" else program
    return printable(f"{name} {shlex.join(sys.argv[1:])}".strip())


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
    return done.stdout.decode(errors="replace").strip("\n")  # a blank may be a diff's last line
