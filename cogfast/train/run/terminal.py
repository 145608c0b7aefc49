"""Log lines at the start and the end of a run, and what errors say of how to continue it."""

from __future__ import annotations

import contextlib
import difflib
import logging
import math
import shlex
from collections.abc import Mapping, Sequence
from inspect import iscode, isfunction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cogfast.config.sat_unused import own_defaults
from cogfast.core.addresses import name_of
from cogfast.core.files import open_regular
from cogfast.core.keys import find_origin, level
from cogfast.core.values import counted
from cogfast.model.weights.checkpoint_manifest import run_of
from cogfast.train.keys import TrainKeys

if TYPE_CHECKING:
    from cogfast.train.checkpoint.write import CheckpointWriter

logger = logging.getLogger(__name__)

# Commands that copy a folder to a store, by its scheme
_COPIES = {"s3": "aws s3 cp --recursive", "gs": "gcloud storage cp --recursive"}


def log_misspelt(found: type, base: type, names: Sequence[str]) -> None:
    """Log public methods of a subclass of `base` that neither cogfast nor the subclass calls."""
    own = vars(found)
    codes = [value.__code__ for value in own.values() if isfunction(value)]
    for code in codes:  # also functions inside of functions
        codes += [inner for inner in code.co_consts if iscode(inner)]
    used = {word for code in codes for word in code.co_names}
    for name in sorted(own.keys() - {*dir(base)}):
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.9)
        if near or (isfunction(own[name]) and name[0] != "_" and name not in used):
            hint = f"did you mean {near[0]}?" if near else f"it calls {', '.join(names)}"
            logger.warning("cogfast does not call %s.%s; %s", found.__name__, name, hint)


def log_facts(facts: Mapping[str, object]) -> None:
    """Log a line for each named fact, with the facts below each other."""
    width = max(map(len, facts))
    for name, fact in facts.items():
        logger.info("%s  %s", name.ljust(width), fact)


def log_results(lines: Sequence[Mapping], samples: Path | None) -> None:
    """Log the last losses and the place of the last samples, in one line.

    lines: those of metrics.jsonl. samples: None if nothing was sampled.
    """
    parts = []
    for key, name in (("loss", "loss"), ("loss_running", "mean"), ("valid_loss", "held-out loss")):
        line = next((line for line in reversed(lines) if line.get(key) is not None), None)
        if line is not None and math.isfinite(line[key]):
            step = f" (step {line['step']})" if key == "valid_loss" else ""
            parts.append(f"{name} {line[key]:.4f}{step}")
    if samples is not None:
        parts.append(f"videos: {name_of(samples)}")
    if parts:
        logger.info("%s", ", ".join(parts))


def resume_words(args: TrainKeys, origins: Mapping[str, str], folder: str) -> str:
    """Return the option that resumes the run in `folder`, for the command that started it."""
    # cogfast finetune sets this key by its own option, and resumes by its own, too.
    if origins.get(args.key("run_folder")) == "--output_dir":
        return f"--resume_from_checkpoint {shlex.quote(folder)}"
    # Its option takes no address, and cogfast train has the key, too.
    option = "args.resume=" if args.folder_layout == "finetune" else "--resume "
    return option + shlex.quote(folder)


class Hints:
    """Describes how to continue a run in `folder`. writer: of its checkpoints; None until the run has one."""

    def __init__(
        self, args: TrainKeys, origins: Mapping[str, str], folder: Path, world_size: int
    ) -> None:
        self.args, self.origins, self.folder, self.world_size = args, origins, folder, world_size
        self.writer: CheckpointWriter | None = None

    def how_to_upload(self) -> str | None:
        """Return the commands for a checkpoint that is not in its store and from which no restart continues."""
        unsent = None if self.writer is None else self.writer.folder.unsent
        # With args.elastic a restart removes these files, and continues from what is in the store.
        if unsent is None or self.args.elastic != "off":
            return None
        url = name_of(unsent)
        copy = _COPIES.get(url.partition("://")[0], "copy") + f" {unsent} {url}"
        where = " on each machine" if self.world_size > 1 else ""
        how = f"run `{copy}`{where}, then the same command with {self._resume_words(url)}"
        return f"{url} is not in the store; {how}"

    def _resume_words(self, folder: str) -> str:
        return resume_words(self.args, self.origins, folder)

    def how_to_resume(self) -> str:
        """Describe the last checkpoint and the command that resumes from it."""
        path, folder = None if self.writer is None else self.writer.saved, self.folder
        if self.writer is not None and self.how_to_upload():
            return f"its files are in {self.writer.folder.unsent}, but not in the store; the log says how to upload them"
        if path is None:
            how = "" if self.args.run_folder is None else f" with {self._resume_words('auto')}"
            return (
                f"nothing is saved in {name_of(folder)}; run the same command{how} to start again"
            )
        # A run that continues another one in a folder of its own may not have saved yet.
        is_own = run_of(path).absolute() == folder.absolute()
        if self.args.elastic != "off":
            return f"the last checkpoint is {name_of(path)}; torchrun, or the same command, resumes from it"
        resume = self._resume_words(name_of(folder if is_own else path))
        return (
            f"the last checkpoint is {name_of(path)}; run the same command with {resume} to resume"
        )


def log_unused(
    unused: Mapping[str, str], args: Mapping[str, Any], origins: Mapping[str, str]
) -> None:
    """Log how many keys are accepted but not used, the defaults that are not SAT's, and where the steps
    of a SAT run in args.load begin. args: the section."""
    # The short names once each: SAT's files repeat some of them in several sections.
    names = {key.rpartition("params.")[2] for key in unused}
    if names:
        text = counted(len(names), "key of the configuration has", "keys of the configuration have")
        logger.info("%s no effect (--dry-run lists them with the reasons)", text)
    command = TrainKeys.key("eval_command")
    for key, why in unused.items():
        if key == command or level(find_origin(origins, key)) > 0:  # of the command line
            logger.warning("%s: %s", key, why if key == command else f"no effect, {why}")
    if own := own_defaults(args, origins):
        logger.info("no file sets %s", ", ".join(own))
    # Only rank 0 comes here, so that nothing may be raised.
    iteration = b""
    with contextlib.suppress(OSError), open_regular(f"{args['load']}/latest") as file:
        iteration = file.read(20).strip()
    if args["mode"] == "pretrain" and iteration.isdigit() and int(iteration) > 1:
        text = "args.load=%s is SAT's iteration %d, from which SAT's mode: pretrain continues to count: "
        text += "this run starts at step 0 and trains all of its steps"
        logger.info(text, args["load"], int(iteration))
