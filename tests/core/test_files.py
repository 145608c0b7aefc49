"""cogfast/core/files.py: writing files whole, their modes, and their checksums."""

import os
import random
import weakref
from pathlib import Path

import pytest
import xxhash

from cogfast.core.files import (
    DamageError,
    WriteError,
    check_checksum,
    check_size,
    checksum_of,
    checksum_of_bytes,
    is_disk_full,
    write_hashed,
    write_text,
    write_whole,
)
from cogfast.extensions.stores.copies import is_kept, keep
from tests.support.refusals import assert_refused


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_files_follow_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_text(tmp_path / "text", "a")
        write_hashed(tmp_path / "sum", [b"a"])
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [mode, mode]


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("before")

    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")  # ENOSPC

    with pytest.raises(WriteError, match=r"a.json cannot be written \(No space left on device\)"):
        write_whole(file, fail)
    assert file.read_text() == "before" and list(tmp_path.iterdir()) == [file]
    with pytest.raises(WriteError, match=r"no/b cannot be written \(No such file or directory\)"):
        write_text(tmp_path / "no" / "b", "x")


def test_content_is_on_disk_before_its_name(tmp_path: Path, monkeypatch) -> None:
    """A machine that crashes leaves no name without its content."""
    calls, fsync, replace = [], os.fsync, Path.replace
    name_of = lambda descriptor: os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
    monkeypatch.setattr(os, "fsync", lambda d: calls.append(("sync", name_of(d))) or fsync(d))
    monkeypatch.setattr(
        Path, "replace", lambda self, to: calls.append(("rename", self.name)) or replace(self, to)
    )
    write_text(tmp_path / "text", "a")
    draft = calls[0][1]
    assert draft.startswith("text.")
    assert calls == [("sync", draft), ("rename", draft), ("sync", tmp_path.name)]
    calls.clear()
    keep(tmp_path / "text", tmp_path / "copy")
    assert calls == [("sync", "text"), ("rename", "text")]
    assert is_kept(tmp_path / "copy", 1) and not is_kept(tmp_path / "copy", 2)


def test_a_size_limit_counts_as_a_full_disk(tmp_path: Path, file_limit) -> None:
    with file_limit(1000), pytest.raises(OSError) as error:
        write_hashed(tmp_path / "a", [bytes(900), bytes(900)])
    assert is_disk_full(error.value)
    assert not is_disk_full(PermissionError(13, "Permission denied"))


def test_checksums_while_writing_are_those_of_the_bytes(tmp_path: Path) -> None:
    """Compare pieces of no, one and many bytes with xxhash over all of them at once."""
    # XXH3 changes its algorithm at 240 bytes.
    draw = random.Random(0)
    pieces = [draw.randbytes(n) for n in (0, 1, 7, 240, 241, 1 << 10, 3 << 20, 1, 5 << 20)]
    alive: list[weakref.ref] = []

    def read(piece: bytes) -> memoryview:
        assert all(of() is None for of in alive), "one is in memory at a time"
        alive.append(weakref.ref(view := memoryview(piece)))
        return view

    found = write_hashed(tmp_path / "a", map(read, pieces))
    whole = b"".join(pieces)
    assert (tmp_path / "a").read_bytes() == whole
    expected = f"{xxhash.xxh3_64_intdigest(whole):016x}"
    assert found == checksum_of(tmp_path / "a") == checksum_of_bytes(whole) == expected


def test_the_published_value_of_the_empty_input() -> None:
    assert checksum_of_bytes(b"") == "2d06800538d394c2"  # of XXH3_64bits, seed 0


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path, whole = tmp_path / "a", random.Random(1).randbytes(300)
    path.write_bytes(whole)
    good = checksum_of(path)
    check_checksum(path, good)
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        assert checksum_of_bytes(bytes(damaged)) != good
    path.write_bytes(damaged)
    with pytest.raises(DamageError, match=f"a is damaged: .* it was written with {good}"):
        check_checksum(path, good)


def test_a_path_that_is_not_a_regular_file_counts_as_missing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ".", "none"):
        assert_refused(lambda name=name: check_size(tmp_path / name, 0), "is missing", DamageError)
    (tmp_path / "a").write_bytes(b"abc")
    check_size(tmp_path / "a", 3)
    assert_refused(lambda: check_size(tmp_path / "a", 4), "a has 3 bytes instead of 4", DamageError)
