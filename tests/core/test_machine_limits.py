"""A lack of the machine ends a command in one line; other errors stay as they are."""

import errno
import resource
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from cogfast.__main__ import _COMMANDS, main
from cogfast.core.machine_limits import describe_lack
from cogfast.data.workers import Reads, read_ahead
from tests.cli.hostile.forked_case import faults, run_case

SHARED_MEMORY = (
    "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback: ...\nRuntimeError: unable "
    "to allocate shared memory(shm) for file </torch_1_2>: No space left on device (28)"
)


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (FileExistsError(errno.EEXIST, "File exists", "a/b"), 2, "a/b: File exists; correct the"),
        (OSError(errno.EMFILE, "Too many open files"), 1, "too many open files; raise the limit"),
        (RuntimeError(SHARED_MEMORY), 1, "/dev/shm, through which reading processes pass batches"),
        (RuntimeError("could not create a primitive"), 1, "out of memory of this machine, or of"),
        (RuntimeError("can't start new thread"), 1, "too many processes or threads; raise"),
    ],
    ids=["exists", "files", "shm", "onednn", "threads"],
)
def test_a_lack_ends_a_command_in_one_line(
    error: Exception,
    status: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    # The last frame of the traceback is not cogfast's, as in a library.
    monkeypatch.setitem(_COMMANDS, "doctor", lambda argv: (_ for _ in ()).throw(error))
    assert main(["doctor"]) == status
    (found,) = capsys.readouterr().err.splitlines()
    assert found.startswith(f"cogfast: {line}")
    with pytest.raises((ValueError, RuntimeError)) as raised:
        main(["doctor", "--traceback"])
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [FileNotFoundError(errno.ENOENT, "No such file", "a"), KeyError("a"), OSError("a")]
)
def test_other_errors_keep_their_traceback(error: Exception) -> None:
    assert describe_lack(error) is None


def test_too_few_open_files_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (40, 40))
    assert main(["doctor"]) == 2
    assert "ulimit -n is 40, but a run opens 64 files and more; raise" in capsys.readouterr().err


class Tensors(Reads):
    """Reads tensors, and can open no more files from the twentieth on."""

    def __getitem__(self, key: int) -> torch.Tensor:
        if key == 20:  # the process has sent some by then, so that all it needs is imported
            resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
        return torch.ones(2)

    def name(self, key: int) -> str:
        return f"sample {key}"


class Handed(Tensors):
    """Does as Python's thread that hands tensors over, when it cannot accept a connection."""

    def __getitem__(self, key: int) -> torch.Tensor:
        if key == 20:
            sys.excepthook(OSError, OSError(errno.EMFILE, "Too many open files"), None)
        return torch.ones(2)


class Full(Tensors):
    def __getitem__(self, key: int) -> torch.Tensor:
        raise RuntimeError(SHARED_MEMORY)


def read_all(reads: Reads) -> int:
    with pytest.raises(
        RuntimeError, match=r"at or after sample \d+; if memory, .*\(ulimit -n\) ran"
    ):
        list(read_ahead(reads, range(50), reader=None, num_workers=1, prefetch_factor=8))
    return 0


@pytest.mark.forks
@pytest.mark.parametrize("kind", [Tensors, Handed])
def test_a_reading_process_that_cannot_send_ends(kind: type[Reads]) -> None:
    """Python's threads would print why and drop the tensors, and the trainer would wait for ever."""
    # The paths of sockets are short, and pytest's folders may be too long for them.
    with tempfile.TemporaryDirectory() as root:
        # Other programs write beside it in the folder of temporary files, which is no fault.
        inner = Path(root) / "r"
        inner.mkdir()
        outcome = run_case(lambda: read_all(kind()), inner, max_wait=20)
    assert outcome.status == 0 and not faults(outcome), outcome.output
    assert "cogfast: a reading process ends: too many open files" in outcome.output


def test_a_full_shared_memory_names_the_batch() -> None:
    with pytest.raises(RuntimeError, match="^batches cannot be read .* after sample 0: /dev/shm, "):
        next(read_ahead(Full(), range(2), reader=None, num_workers=0, prefetch_factor=1))
