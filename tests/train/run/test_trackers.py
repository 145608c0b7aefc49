"""Numbers of a run on a disk that is full for a while, and without a connection to W&B."""

import re
import sys
import threading
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cogfast.train.run.trackers import LogFile, TensorBoardRun, WandbRun
from tests.support.runs import Run


def test_lines_follow_when_there_is_space(
    tmp_path: Path, file_limit, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="cogfast")
    log = LogFile(tmp_path / "new" / "log")
    log.append(b"1 before\n")
    with file_limit(13):  # the second record would end in its middle
        for number in (2, 3, 4):
            log.append(b"%d within\n" % number)
        assert log.path.read_bytes() == b"1 before\n"
    assert caplog.text.count("cannot be written (File too large); training continues") == 1
    log.append(b"5 after\n")
    log.append(b"6 after\n")
    lines = log.path.read_bytes().splitlines()
    assert lines == [b"1 before", b"2 within", b"3 within", b"4 within", b"5 after", b"6 after"]
    assert caplog.text.count("is written again, nothing is missing") == 1


def test_tensorboard_lacks_the_step_of_a_full_disk_alone(
    tmp_path: Path, file_limit, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer's thread ends with the error. A run that resumes hides the later steps of the first."""
    now = [time.time()]
    monkeypatch.setattr(time, "time", lambda: now[0])  # the files' names begin with it
    tracebacks = []
    monkeypatch.setattr(threading, "excepthook", tracebacks.append)
    first = TensorBoardRun(tmp_path, purge_step=None)
    for step in range(1, 7):
        now[0] += 1
        with file_limit(150 if step == 3 else 10_000):
            first.log(step, {"loss": 1 / step, "lr": 0.5})
    found = EventAccumulator(str(tmp_path)).Reload()
    assert [(s.step, s.value) for s in found.Scalars("loss")] == [
        (step, pytest.approx(1 / step)) for step in (1, 2, 4, 5, 6)
    ]
    assert [s.value for s in found.Scalars("lr")] == [0.5] * 5
    assert caplog.text.count("TensorBoard's file does not take step") == 1 and not tracebacks
    other = threading.Thread(target=lambda: 1 / 0)
    other.start()
    other.join()
    assert [error.exc_type for error in tracebacks] == [ZeroDivisionError]
    assert "step 3 ([Errno 27] File too large); training continues" in caplog.text
    now[0] += 1
    TensorBoardRun(tmp_path, purge_step=2).log(2, {"loss": 7.0})
    found = EventAccumulator(str(tmp_path)).Reload()
    assert [(s.step, s.value) for s in found.Scalars("loss")] == [(1, 1.0), (2, 7.0)]


def test_a_run_that_saved_nothing_starts_again_by_the_words_of_its_last_line(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorBoard then shows the second start alone, as metrics.jsonl does."""
    run = run.with_words(f"args.run_folder={run.folder}/own")
    first = run.trainer("args.exit_interval=3")
    first.writer.save = lambda *_: None  # on a full disk
    with pytest.raises(RuntimeError) as error:
        first.train()
    words = re.findall(
        r"nothing is saved in .*/own; run the same command with (.*) to start again",
        str(error.value),
    )
    assert words == ["--resume auto"]
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 60)  # the files' names begin with it
    assert run.train("args.resume=auto", steps=2).logged("step") == [1, 2]
    found = EventAccumulator(f"{run.folder}/own/tensorboard").Reload()
    assert [one.step for one in found.Scalars("loss")] == [1, 2]


WANDB = """
is_down = False
def init(**named):
    if named["project"] == "no key":
        raise OSError("api_key not configured\\nuse wandb login")
    return Run()
class Run:
    define_metric = lambda self, *given, **named: None
    def log(self, values):
        if is_down:
            raise BrokenPipeError("the service is gone")
    finish = lambda self, exit_code: self.log({})
class Video:
    def __init__(self, path, **named):
        raise ValueError(f"no file {path}")
"""


def test_losing_wandb_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    wanted = (
        r"args.wandb=true, but W&B does not start \(api_key.*\); run `wandb login`, set WANDB_MODE"
    )
    with pytest.raises(RuntimeError, match=wanted) as caught:
        WandbRun(tmp_path, "no key")
    assert "\n" not in str(caught.value)
    run = WandbRun(tmp_path, "clips")
    wandb = sys.modules.pop("wandb")
    run.log_videos(1, [(tmp_path / "a.mp4", "a bar")])
    assert "W&B does not take the videos of step 1 (no file " in caplog.text
    run.log(1, {"loss": 1.0})
    wandb.is_down = True
    for step in range(2, 5):
        run.log(step, {"loss": 1.0})
    run.finish(has_failed=False)
    assert caplog.text.count("W&B does not take step ") == 1
    assert "step 2 (the service is gone); training continues" in caplog.text
    assert len(caplog.records) == 2
