"""args.eval_command scores an evaluation's videos in the background; args.keep_best keeps a checkpoint."""

import json
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cogfast.__main__ import main
from cogfast.extensions.scores.scores import Scores
from cogfast.train.keys import TrainKeys
from cogfast.train.preflight.check import check_train
from cogfast.train.trainer import Trainer
from tests.support.runs import Run
from tests.support.tiny_run import start, wait_for

# Scores by step, the number of videos that the command finds, and the variables of a rank that it sees.
_SCORE = """
import json, os, pathlib, sys
import beside
folder = pathlib.Path(sys.argv[1])
videos = list(folder.glob("*.mp4"))
step = int(folder.name.removeprefix("step-"))
listed = json.loads((folder / "prompts.json").read_text())
seen = [name for name in os.environ if name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")]
print("loading a model")
print(json.dumps({"clip": beside.TABLE[step], "videos": len(videos), "listed": len(listed),
                  "ranks": len(seen), "name": "text is left out"}))
print("{done}")
"""


def write_script(folder: Path, table: dict[int, float]) -> str:
    """Write score.py and what it imports. Return the command that runs it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "score.py").write_text(_SCORE)
    (folder / "beside.py").write_text(f"TABLE = {table}\n")
    return f"{sys.executable} {shlex.quote(str(folder / 'score.py'))} {{samples}}"


@pytest.fixture
def run(run: Run) -> Run:
    prompts = ["a bar", "a red bar"]
    return run.with_args(train_iters=4, eval_interval=1, save_interval=1, eval_prompts=prompts)


def scored_by(run: Run, command: str) -> Run:
    return run.with_words(f"args.eval_command={command}")


def scores(run: Run) -> dict[int, dict]:
    found = {
        line["step"]: line for line in run.lines if any(key.startswith("score/") for key in line)
    }
    return {
        step: {k[6:]: v for k, v in line.items() if k != "step"} for step, line in found.items()
    }


def saved(run: Run) -> list[int]:
    return sorted(int(path.name) for path in (run.path / "checkpoints").iterdir() if path.is_dir())


def waiting(run: Run) -> list[int]:
    return json.loads((run.path / "waiting_scores.json").read_text())


def test_scores_belong_to_their_step_and_the_best_is_kept_through_a_resume(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as the command `cogfast` sets it
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    table = {1: 0.5, 2: 0.75, 3: 0.25, 4: 0.5, 5: 0.125, 6: 0.25}
    run = scored_by(run, write_script(tmp_path / "a folder", table))
    run = run.with_args(keep_last=1, keep_best="score/clip")
    assert saved(run.train()) == [2, 4]
    assert saved(run.resume(steps=6)) == [2, 6]
    wanted = {"videos": 2, "listed": 2, "ranks": 0}
    assert scores(run) == {step: {"clip": value, **wanted} for step, value in table.items()}
    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    assert {event.step: event.value for event in events.Scalars("score/clip")} == table
    assert main(["report", str(run.path)]) == 0
    assert '"key": "score/clip"' in (run.path / "index.html").read_text()


class Stopped(Trainer):
    """Is asked to stop in its third step, so that the evaluation of that is left out."""

    def compute_loss(self, batch: dict) -> torch.Tensor:
        if self.step == 2:
            signal.raise_signal(signal.SIGUSR1)
        return super().compute_loss(batch)


@pytest.mark.soak
def test_what_was_not_scored_before_a_stop_is_scored_after_the_resume(
    run: Run, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    command = write_script(tmp_path, {1: 0.75, 2: 0.5, 3: 0.25, 4: 0.125})
    run = run.with_args(keep_last=1, keep_best="score/clip")
    scored_by(run, "sh -c 'sleep 600' {samples}").by(Stopped).train()
    assert waiting(run) == [1, 2]
    assert "a resumed run will score steps [1, 2]" in log.text
    scored_by(run, command).resume("args.accept_changes=true")
    assert {n: found["clip"] for n, found in scores(run).items()} == {1: 0.75, 2: 0.5, 4: 0.125}
    assert saved(run) == [1, 4]
    assert waiting(run) == []


def test_the_last_evaluation_that_a_resumed_run_makes_again_is_scored_once(
    run: Run, tmp_path: Path
) -> None:
    run = run.with_args(train_iters=1, eval_interval=None, eval_at_end=True)
    # The command stops the run that waits for it.
    scored_by(run, "sh -c 'kill -USR1 $PPID; sleep 600' {samples}").train()
    assert waiting(run) == [1] and not scores(run)
    run = scored_by(run, write_script(tmp_path, {1: 0.5}))
    for _ in range(2):  # with the step waiting, then scored
        run.resume()
        assert (run.path / "metrics.jsonl").read_text().count('"score/clip"') == 1


@pytest.mark.parametrize("text", ["[1, 2", '["1"]', "{}", "[3, -1, 2, 2]"])
def test_a_damaged_list_of_waiting_scores_ends_no_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "waiting_scores.json").write_text(text)
    launch = SimpleNamespace(args=TrainKeys(eval_command="true {samples}"))
    for step, waiting in ((2, [2] if text.endswith("2]") else []), (0, [])):
        folder, data = SimpleNamespace(path=tmp_path, step=step), SimpleNamespace(num_steps=2)
        writer = SimpleNamespace()
        parts: Any = SimpleNamespace(launch=launch, folder=folder, data=data, writer=writer)
        trackers: Any = SimpleNamespace(is_main=True)
        assert Scores(parts, trackers).waiting == waiting


def test_lower_is_better_and_a_score_between_saves_is_that_of_the_last_one(
    run: Run, tmp_path: Path
) -> None:
    """Steps 2 and 4 are saved, steps 3 and 6 evaluated: step 3's score is that of checkpoint 2."""
    run = scored_by(run, write_script(tmp_path, {3: 1.0, 6: 2.0}))
    run = run.with_args(train_iters=8, save_interval=2, eval_interval=3, keep_last=1)
    assert saved(run.with_args(keep_best="-score/clip").train()) == [2, 8]


FAILURES = {
    "crash": ("raise SystemExit('no model')", r"step 1: exit status 1 \(no model\); training cont"),
    "no JSON": ("print('[1]'); print({'clip': 1})", r"step 1: no line of its output is a JSON obj"),
    "not finite": ("print('{\"clip\": NaN}')", r"step 1/1  score/clip nan"),
    "hang": ("import time; time.sleep(600)", r"step 1: killed after args.eval_command_timeout=1 s"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_is_one_line(run: Run, log: pytest.LogCaptureFixture, kind: str) -> None:
    code, line = FAILURES[kind]
    run = scored_by(run, f"{sys.executable} -c {shlex.quote(code)} {{samples}}")
    seconds = 1 if kind == "hang" else 60  # a busy machine starts Python slowly
    run = run.with_args(train_iters=1, eval_command_timeout=seconds).train()
    found = [r.getMessage() for r in log.records if "score" in r.name]
    assert saved(run) == [1]
    (text,) = (text for text in found if "waiting" not in text)
    assert re.search(line, text)


class Failing(Trainer):
    """Fails in its second step, as soon as the command of the first one runs."""

    def compute_loss(self, batch: dict) -> torch.Tensor:
        if self.step == 1:
            while not Path(self.args.save, "pid").exists():
                time.sleep(0.05)
            raise RuntimeError("the end")
        return super().compute_loss(batch)


def test_the_command_ends_with_the_run(run: Run, tmp_path: Path) -> None:
    """With one that fails, and with one that is killed and has no time to end it."""
    file = tmp_path / "runs" / "pid"
    code = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    run = scored_by(run, f"{sys.executable} -c {shlex.quote(code)} {{samples}}")
    run = run.with_args(train_iters=10**6)
    with pytest.raises(RuntimeError, match="the end"):
        run.by(Failing).train()
    assert not Path("/proc", file.read_text()).exists()
    file.unlink()
    process = start(run.command())
    wait_for(lambda: file.exists() and file.read_text(), process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    command = Path("/proc", file.read_text(), "cmdline")
    end = time.monotonic() + 60
    # A zombie has no command line.
    while command.exists() and command.read_bytes():
        assert time.monotonic() < end, "the command still runs"
        time.sleep(0.05)


def test_the_command_of_a_file_never_runs(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither that of a configuration, nor that of the file of a run, nor that of its checkpoint."""
    mark = tmp_path / "mark"
    command = f"touch {mark} {{samples}}"
    run = run.with_args(train_iters=1, eval_command=command)
    folder = run.train().path
    assert not mark.exists()
    line = "base.yaml sets it, but a command runs only if the command line gives it"
    line = f"args.eval_command: {line}"
    assert [r.getMessage() for r in caplog.records if "eval_command" in r.getMessage()] == [line]
    resumed = run.with_words(f"args.resume={folder}")
    (folder / "training_config.yaml").write_text(run.base.read_text())
    resumed.of_files(folder / "training_config.yaml").train(steps=2)
    assert not mark.exists()
    # Given again, it runs, once for step 3.
    scored_by(resumed, command).train(steps=3)
    assert mark.exists()


def test_a_held_out_loss_may_keep_a_checkpoint(run: Run) -> None:
    words = ["args.keep_best=-valid_loss", "args.valid_data=[]", "args.split='9,1,0'"]
    check_train(run.config(*words).run)
