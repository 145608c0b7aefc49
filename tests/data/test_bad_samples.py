"""The list of bad samples, which all ranks of a run share and a resumed run reads."""

import json
import os
import pickle

import pytest

from cogfast.data import bad_samples
from cogfast.data.bad_samples import BadSample, BadSampleLog
from tests.support.refusals import assert_refused


def test_ranks_share_the_list_and_its_count(tmp_path):
    """Two ranks find three bad samples each, one of them in common: five, with a limit of four."""
    file = tmp_path / "bad_samples.jsonl"
    ranks = [BadSampleLog(file, num_samples=80) for _ in range(2)]
    for rank, paths in zip(ranks, ("abc", "cde"), strict=True):
        for path in paths:
            rank.add(path, "broken")
    assert [json.loads(line)["path"] for line in file.read_text().splitlines()] == list("abcde")
    ranks[0].check()  # has not read the list since the other rank added to it
    assert_refused(lambda: ranks[1].check(), "5/80 videos unreadable (>5%)<...>all in <...>jsonl")


def test_lines_are_whole_when_processes_write_at_once(tmp_path):
    file = tmp_path / "bad_samples.jsonl"
    children = []
    for name in range(4):
        child = os.fork()
        if child == 0:
            log = BadSampleLog(file, num_samples=1)
            for i in range(50):
                log.add(f"{name if i % 2 else 'shared'}-{i}", "r" * 200)
            os._exit(0)  # without pytest's clean-up in the child
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    paths = [json.loads(line)["path"] for line in file.read_text().splitlines()]
    assert len(paths) == len(set(paths)) == 4 * 25 + 25


def test_repaired_files_do_not_count_in_the_resumed_run(tmp_path):
    file = tmp_path / "bad_samples.jsonl"
    first = BadSampleLog(file, num_samples=20)
    for path in "abcdef":
        first.add(path, "broken")
    resumed = BadSampleLog(file, num_samples=20)
    assert not resumed.add("f", "still broken")
    resumed.check()
    resumed.add("e", "this one too")
    assert_refused(lambda: resumed.check(), "2/20")


def test_bad_sample_travels_between_processes():
    error = pickle.loads(pickle.dumps(BadSample("a.mp4", "why")))
    assert (error.path, error.reason, str(error)) == ("a.mp4", "why", "a.mp4: why")


@pytest.mark.parametrize("number, fraction", [(1, 0.05), (3, 1.0)])
def test_all_samples_bad_is_too_many(number, fraction):
    log = BadSampleLog(None, number, fraction)
    for name in "abc"[:number]:
        log.check()
        log.add(name, "broken")
    assert_refused(lambda: log.check(), f"{number}/{number} videos unreadable<...>first: a: broken")


def test_a_list_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    log = BadSampleLog(tmp_path / "run/bad_samples.jsonl", num_samples=20)
    (tmp_path / "run").rmdir()
    assert log.add("a", "broken") and not log.add("a", "broken") and log.reasons == {"a": "broken"}
    assert "run/bad_samples.jsonl cannot be written (No such file or directory)" in caplog.text
    assert "skipped a: broken" in caplog.text


@pytest.mark.parametrize("line", [b"\xff", b"[]", b"7", b'{"path": "a"}', b"null", b"[" * 99999])
def test_a_damaged_line_is_skipped(line, tmp_path):
    file = tmp_path / "bad_samples.jsonl"
    file.write_bytes(b'{"path": "b", "reason": "x"}\n' + line + b"\n")
    log = BadSampleLog(file, 100)
    assert log.add("a", "broken") and not log.add("b", "broken")
    assert json.loads(file.read_bytes().splitlines()[-1]) == {"path": "a", "reason": "broken"}


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_or_folder_in_place_of_the_list_is_left_alone(make, tmp_path, caplog):
    make(tmp_path / "bad_samples.jsonl")
    assert BadSampleLog(tmp_path / "bad_samples.jsonl", 100).add("a", "broken")
    assert "bad_samples.jsonl cannot be written (it is not a regular file)" in caplog.text


def test_a_long_list_is_read_once(tmp_path, monkeypatch):
    """Two ranks write in turns: each line is read once, by the other rank."""
    read, num_lines = json.loads, 0

    def counted(line: bytes) -> object:
        nonlocal num_lines
        num_lines += 1
        return read(line)

    monkeypatch.setattr(bad_samples.json, "loads", counted)
    file = tmp_path / "bad_samples.jsonl"
    file.write_text('{"path": "before", "reason": "r"}\n{"path": "torn')
    ranks = [BadSampleLog(file, num_samples=100) for _ in range(2)]
    for i in range(40):
        assert ranks[i % 2].add(str(i), "broken") and not ranks[1 - i % 2].add(str(i), "broken")
    # Reading the whole list at every call would be 20 times as much.
    assert num_lines < 2 * 42
    lines = file.read_text().splitlines()
    assert [read(line)["path"] for line in lines if not line.endswith("torn")] == [
        "before",
        *map(str, range(40)),
    ]
    assert ranks[0].reasons == ranks[1].reasons and len(ranks[0].reasons) == 40
