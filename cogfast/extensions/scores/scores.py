"""Scores the videos of an evaluation with args.eval_command, and keeps the best checkpoint (args.keep_best).

Rank 0 runs the command in the background and looks at it after each step, so that no rank waits for it.
A failure is logged, and training continues.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING

from cogfast.core.component import Component
from cogfast.core.files import WriteError, write_text
from cogfast.core.json_files import brief, read_json
from cogfast.core.values import nearest
from cogfast.train.keys import TrainKeys
from cogfast.train.run.folder import samples_place
from cogfast.train.watchers.watcher import Watcher

if TYPE_CHECKING:  # a check of args.eval_command needs none of them
    from cogfast.distributed.process_groups import StopRequest
    from cogfast.train.run.parts import Parts
    from cogfast.train.run.trackers import Trackers

logger = logging.getLogger(__name__)

SAMPLES = "{samples}"  # in args.eval_command, stands for the folder of the videos
_MOST_BYTES = 1 << 20  # of a file, and read from the end of the command's output
_BETWEEN_LOOKS = 0.1  # seconds, after the last step
# The kernel then kills the command with the process that started it, also if that is killed itself.
_TIE = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
_TIED = [sys.executable, "-I", "-c", _TIE] if sys.platform == "linux" else []
# Variables of this rank: with them, a command that uses torch.distributed would wait for other ranks.
_OF_RANK = ("RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "OMPI_COMM")
_OF_RANK += ("LOCAL_", "GROUP_", "ROLE_")


class Scores(Watcher):
    """Runs the commands of a run's evaluations, one after the other."""

    def __init__(self, parts: Parts, trackers: Trackers) -> None:
        self.args, self.folder, self.trackers = parts.launch.args, parts.folder.path, trackers
        self.writer, self.num_steps = parts.writer, parts.data.num_steps
        self.writer.kept = self.kept
        command = self.args.eval_command or ""
        self.words = shlex.split(command) if trackers.is_main else []
        folder, step = self.folder, parts.folder.step
        self.file = folder / "waiting_scores.json"  # `waiting`, for the run that resumes this one
        # Steps without scores yet; the command runs for the first one.
        self.waiting: list[int] = []
        if self.words and step > 0 and self.file.exists():
            try:
                left = read_json(self.file, list[int], "remove it", _MOST_BYTES)
                self.waiting = sorted({each for each in left if 0 <= each <= step})
            except ValueError as error:
                logger.warning("%s", error)
        self.process: subprocess.Popen | None = None
        self.outputs: list[IO[bytes]] = []  # its output, and its error output
        self.deadline = math.inf

    def after_evaluation(
        self, step: int, losses: Mapping[str, float], samples: Path | None
    ) -> None:
        """Score the videos that were sampled at `step`."""
        if samples is None or not self.words or step in self.waiting:
            return
        # A run that resumes at its last step makes that step's evaluation again.
        logged = (key for line in self.trackers.history if line["step"] == step for key in line)
        if not any(key.startswith("score/") for key in logged):
            self.waiting.append(step)
            self._write_waiting()
            self.after_step(step)

    def after_step(self, step: int) -> None:
        """Take the scores of a command that has ended, and start the next one."""
        if not self.waiting:
            return
        scored = self.waiting[0]
        try:
            if self.process is None:
                self._start(scored)
            numbers = self._result()
            if numbers is None:
                return
            self.trackers.write(scored, {"step": scored, **numbers})
            named = "  ".join(f"{key} {value:.4g}" for key, value in numbers.items())
            logger.info("step %d/%d  %s", scored, self.num_steps, brief(named))
        except (OSError, ValueError) as error:
            text = "args.eval_command at step %d: %s; training continues"
            logger.warning(text, scored, brief(str(error)))
        self._end()
        # Last, since `kept` keeps the checkpoints of these steps, and then of those with scores.
        self.waiting.pop(0)
        self._write_waiting()

    def at_end(self, stop: StopRequest, is_complete: bool) -> None:
        """Wait for the last scores, by which the best checkpoint is kept."""
        if stop.is_stopping:
            return
        if self.waiting:
            logger.info("waiting for args.eval_command at step %d", self.waiting[-1])
        while self.waiting and not stop.is_asked:
            self.after_step(self.waiting[0])
            time.sleep(_BETWEEN_LOOKS)
        if self.args.keep_best is not None:
            self.writer.prune()

    def close(self, error: BaseException | None) -> None:
        self._end()
        if self.waiting:
            logger.info("a resumed run will score steps %s", brief(str(self.waiting)))

    def kept(self, steps: Sequence[int]) -> set[int]:
        """Return the checkpoints that args.keep_best keeps, as steps: the best one, and those whose
        scores are not known yet. steps: all checkpoints. The writer's thread calls it on rank 0.

        A score belongs to the newest checkpoint that is not later than its evaluation.
        """
        best = self.args.keep_best
        if best is None:
            return set()
        key, found = best.removeprefix("-"), {}
        for line in [*self.trackers.history]:
            value, step = line.get(key), line["step"]
            # None and NaN: a value that was not finite, read from the file and from memory.
            if isinstance(value, (int, float)) and math.isfinite(value) and step >= min(steps):
                found[step] = value
        choose = min if best.startswith("-") else max
        wanted = [*self.waiting, *([choose(found, key=found.__getitem__)] if found else [])]
        return {max((s for s in steps if s <= step), default=step) for step in wanted}

    def _write_waiting(self) -> None:
        try:
            write_text(self.file, json.dumps(self.waiting))
        except WriteError as error:
            logger.warning("%s; training continues", error)

    def _start(self, step: int) -> None:
        videos, _ = samples_place(self.folder, step, self.args.folder_layout)
        words = [word.replace(SAMPLES, str(videos.absolute())) for word in self.words]
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_OF_RANK)}
        # cogfast has set it for its own processes; a script may import what lies beside it.
        kept.pop("PYTHONSAFEPATH", None)
        self.deadline = time.monotonic() + self.args.eval_command_timeout
        self.outputs = [TemporaryFile() for _ in range(2)]  # noqa: SIM115 - `_end` closes them
        self.process = subprocess.Popen(
            [*_TIED, *words],
            stdin=subprocess.DEVNULL,
            stdout=self.outputs[0],
            stderr=self.outputs[1],
            env=kept,
            start_new_session=True,  # a group, so that it can be killed with its children
        )

    def _result(self) -> dict[str, float] | None:
        """Return the running command's scores, None until it ends. ValueError says why there are none."""
        assert self.process is not None, "it was started"
        status = self.process.poll()
        if status is None and time.monotonic() < self.deadline:
            return None
        if status is None:
            limit = self.args.eval_command_timeout
            raise ValueError(f"killed after args.eval_command_timeout={limit} s")
        output, errors = map(_tail, self.outputs)
        if status != 0:
            lines = errors.strip().splitlines()
            raise ValueError(f"exit status {status} ({lines[-1] if lines else 'no message'})")
        return scores_of(output)

    def _end(self) -> None:
        """Kill the command if it still runs."""
        if self.process is not None and self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for file in self.outputs:
            file.close()
        self.process, self.outputs = None, []


def check_scores(args: TrainKeys, model: object, data: Component | None, sampler: object) -> None:
    """Check args.eval_command and args.keep_best. data: the data set."""
    command, best, problem = args.eval_command, args.keep_best, None
    if best is not None and not re.fullmatch(r"-?score/.+|-valid_loss", best):
        text = f"args.keep_best={brief(best)} must be score/NAME, -score/NAME if lower is better, or -valid_loss"
        text += " (a minus sign in front means that lower is better)"
        raise args.problem("keep_best", f"{text}{nearest(best, ['-valid_loss'])}")
    if best is not None and "score/" in best and command is None and args.resume is None:
        text = f"args.keep_best={brief(best)} needs args.eval_command, which computes the scores"
        raise args.problem("keep_best", f"{text}; give it on the command line")
    if best == "-valid_loss" and not args.has_evaluation and args.resume is None:
        text = "args.keep_best=-valid_loss needs held-out losses, but there are no evaluations;"
        raise args.problem("keep_best", f"{text} set args.eval_interval")
    # Only a manifest may name held-out rows, which are not read here.
    is_known = str(data and data.target).endswith(("SFTDataset", "VideoFolder", "VideoList"))
    is_all_trained = re.fullmatch(r"[^,]*(,[ 0.]+(,.*)?)?", args.split) and not args.valid_data
    if best == "-valid_loss" and is_known and is_all_trained and args.resume is None:
        text = "args.keep_best=-valid_loss needs held-out losses, but no data is held out;"
        raise args.problem("keep_best", f"{text} set args.valid_data or args.split=9,1,0")
    if command is None:
        return
    try:
        words = shlex.split(command)
    except ValueError as error:  # a quotation mark without its partner
        words, problem = [], f"cannot be split into words ({error}); correct it"
    if problem is None and SAMPLES not in command:
        problem = f"must contain {SAMPLES}, which becomes the folder of the videos"
    if problem is None and shutil.which(words[0]) is None:
        problem = "begins with no program that is found here; correct its path"
    if problem is None and args.folder_layout != "cogfast":
        problem = "scores a folder of videos, but args.folder_layout=finetune has one for all steps; use cogfast"
    if problem is None and not args.has_evaluation:
        problem = "scores the videos of evaluations, but there are none; set args.eval_interval"
    if problem is not None:
        text = f"args.eval_command={brief(command)} {problem}"
        raise args.problem("eval_command", text)


def scores_of(output: str) -> dict[str, float]:
    """Return {"score/<name>": number} of the last line that is a JSON object with numbers."""
    for line in reversed(output.splitlines()):
        with suppress(ValueError, RecursionError):
            found = json.loads(line, parse_int=float)
            pairs = found.items() if isinstance(found, dict) else ()
            scores = {f"score/{name}": v for name, v in pairs if isinstance(v, float)}
            if scores:
                return scores
    raise ValueError('no line of its output is a JSON object with numbers, such as {"clip": 0.3}')


def _tail(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_BYTES))
    return file.read().decode(errors="replace")
