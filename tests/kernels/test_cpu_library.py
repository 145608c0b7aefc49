"""Compiling the library of the CPU kernels at first use, and what happens where that is not possible."""

import fcntl
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest

from cogfast.__main__ import main
from cogfast.core import files
from cogfast.core.files import is_private
from cogfast.kernels import torch_library
from cogfast.kernels.cpu import library
from tests.support.kernels.cpu_kernels import NEEDS_CPU_KERNELS

pytestmark = NEEDS_CPU_KERNELS


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a program in g++'s place that writes what g++ has compiled before.

    It adds a line to a file whenever it links; the function returns that file.
    """
    done, log = library.library_file(), tmp_path / "log"
    program = tmp_path / "compiler"
    program.write_text(
        '#!/bin/sh\nsleep 0.1\nfor last; do :; done\ncase "$*" in\n'
        f'*-shared*) echo link >> {shlex.quote(str(log))}; cp {shlex.quote(str(done))} "$last";;\n'
        '*) : > "$last";;\nesac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert library.library_file() != done
    return log


def left_in_cache() -> list[str]:
    return sorted({path.suffix for path in library.cache_folder().iterdir()})


def test_processes_that_start_together_compile_once(compiler: Path) -> None:
    """Locks of two open files exclude each other in one process as in two."""
    with ThreadPoolExecutor(3) as pool:
        files = {pool.submit(library.compile_library) for _ in range(3)}
        assert {one.result() for one in files} == {library.library_file()}
    assert compiler.read_text().split() == ["link"]
    assert left_in_cache() == [".lock", ".so"]
    assert library.compile_library().exists() and compiler.read_text().split() == ["link"]


def test_a_process_that_waits_for_one_that_is_killed_compiles(
    compiler: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file = library.library_file()
    half = file.parent / f"{file.stem}-half"  # it was left by another one
    half.mkdir(parents=True)
    lock = shlex.quote(str(file.with_suffix(".lock")))
    holder = subprocess.Popen(
        ["sh", "-c", f"exec 9> {lock}; flock 9; echo locked; exec sleep 60"], stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(library.compile_library)
        while "another process compiles" not in caplog.text:
            assert not waiting.done()
            time.sleep(0.02)
        holder.kill()
        holder.communicate()
        assert waiting.result() == file
    assert not half.exists() and left_in_cache() == [".lock", ".so"]


def test_a_process_that_compiles_for_ever_is_named_and_passed(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "SECONDS_OF_LOCK", 0.3)
    file = library.library_file()
    file.parent.mkdir(parents=True, mode=0o700)
    with open(file.with_suffix(".lock"), "w") as frozen:
        frozen.write("process 7 on other")
        frozen.flush()
        fcntl.flock(frozen, fcntl.LOCK_EX)
        assert library.compile_library() == file and file.exists()
    assert "held by 'process 7 on other', without progress for" in caplog.text


def test_processes_that_wait_for_one_that_fails_fail_with_it(
    compiler: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of their own would fail after half a minute, one after the other."""
    caplog.set_level(logging.INFO)
    script = f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; exit 1"
    (tmp_path / "compiler").write_text(f"#!/bin/sh\n{script}\n")
    with ThreadPoolExecutor(3) as pool:
        started = [pool.submit(library.compile_library) for _ in range(3)]
        while caplog.text.count("another process compiles") < 2:
            assert not any(one.done() for one in started)
            time.sleep(0.02)
        (tmp_path / "go").touch()
        texts = [str(one.exception()) for one in started]
    assert texts.count("another process failed to compile the C++ kernels") == 2
    with pytest.raises(RuntimeError, match="compiler failed: "):  # a later start tries again
        library.compile_library()


@pytest.mark.parametrize(
    "script, why",
    [
        ("echo 'a.cpp:1: fatal error: no such header' >&2; exit 1", "fatal error: no such header"),
        ("printf 'rat\\351: error\\n' >&2; exit 1", "rat.: error"),
        ('for last; do :; done; echo no library > "$last"', "OSError: .*(file too short|ELF)"),
    ],
    ids=["it does not compile", "its message is not UTF-8", "it cannot be loaded"],
)
def test_a_build_that_fails_leaves_nothing(
    script: str, why: str, compiler: Path, tmp_path: Path
) -> None:
    (tmp_path / "compiler").write_text(f"#!/bin/sh\n{script}\n")
    with pytest.raises(RuntimeError, match=f"failed: .*{why}") as raised:
        library.compile_library()
    assert "\n" not in str(raised.value)
    assert left_in_cache() == [".lock"]


def test_a_cache_that_cannot_be_written(compiler: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(RuntimeError, match="Not a directory: .*cache"):
        library.compile_library()


def test_a_compiler_with_half_a_quotation_is_left_out(monkeypatch) -> None:
    """An import, which every command makes, does not fail."""
    monkeypatch.setenv("CXX", "g++ '")
    monkeypatch.setattr(torch_library, "HAS_CPU_KERNELS", False)
    torch_library._load_cpu_kernels()
    assert "cannot be split into words" in torch_library.compile_cpu_kernels()


def test_another_pytorch_compiler_or_processor_has_another_library(monkeypatch) -> None:
    def changed(name: str, value: object) -> Path:
        with monkeypatch.context() as change:
            change.setattr(name, value)
            return library.library_file()

    files = {
        library.library_file(),
        changed("torch.__version__", "2.99.0"),
        changed("cogfast.kernels.cpu.library._OPS", 99),
        changed("cogfast.kernels.cpu.library._OPTIONS", ["-O2"]),
        changed("cogfast.kernels.cpu.library._compiler", lambda: ["clang++"]),
        changed("torch.backends.cpu.get_cpu_capability", lambda: "AVX2"),
        changed("torch.backends.cpu.get_cpu_capability", lambda: "AVX512"),
    }
    assert len(files) == 6  # this processor has one of the last two
    for name, value in (("sys.platform", "darwin"), ("torch.backends.cpu.get_cpu_capability", str)):
        with pytest.raises(RuntimeError, match="are for Linux on an x86-64 processor with AVX2"):
            changed(name, value)


def test_a_change_of_any_source_makes_another_library(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(library, "_HERE", Path(shutil.copytree(library._HERE, tmp_path / "cpu")))
    files = [file for file in library._HERE.rglob("*") if file.suffix in (".cpp", ".h")]
    found = {library.library_file()}
    for file in files:
        file.write_text(file.read_text() + "\n")
        found.add(library.library_file())
    assert len(found) == 1 + len(files) > 10


def test_the_doctor_compiles_and_says_where(compiler: Path, monkeypatch, capsys, answer) -> None:
    shown = answer("doctor")
    assert "not compiled yet" in shown and "fix: cogfast doctor --build-kernels" in shown
    assert answer("doctor", "--build-kernels") == f"C++ kernels: {library.library_file()}\n"
    assert str(library.library_file()) in answer("doctor")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["doctor", "--build-kernels"]) == 1
    assert capsys.readouterr().err == (
        "cogfast: there is no no-such-compiler; install g++, or set CXX to another\n"
    )


def test_a_library_that_cannot_be_loaded_is_left_out(tmp_path: Path, monkeypatch, caplog) -> None:
    file = tmp_path / "library.so"
    file.write_text("no library")
    monkeypatch.setattr(torch_library, "library_file", lambda: file)
    monkeypatch.setattr(torch_library, "HAS_CPU_KERNELS", False)
    torch_library._load_cpu_kernels()
    (line,) = caplog.messages
    assert "the C++ kernels cannot be loaded" in line and str(file) in line
    assert not torch_library.HAS_CPU_KERNELS


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The user's cache, and a folder like /tmp in which the compiled library lies for this user."""
    compiled, cache, tmp = library.library_file(), tmp_path / "cache", tmp_path / "tmp"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp))
    tmp.mkdir()
    tmp.chmod(0o1777)
    own = tmp / f"cogfast-{os.geteuid()}" / compiled.name
    own.parent.mkdir(mode=0o700)
    shutil.copy(compiled, own)
    own.chmod(0o755)
    return cache / "cogfast" / "kernels" / compiled.name, own


def test_make_setup_compiles_beside_pip() -> None:
    """scripts/setup.sh starts to compile with few packages; all others are hidden from the import here."""
    setup = Path("scripts/setup.sh").read_text()
    before, compiling, _ = setup.partition("import compile_library; compile_library()")
    assert compiling
    there, waiting = set[str](), re.findall(r"pip install --quiet ([\w ]+)\n", before)[-1].split()
    waiting.append("torch")
    while waiting:
        name = re.split(r"[^\w.-]", waiting.pop())[0].lower().replace("_", "-")
        if name not in there:
            there.add(name)
            with suppress(metadata.PackageNotFoundError):
                waiting += [n for n in metadata.requires(name) or () if "extra ==" not in n]
    packages = metadata.packages_distributions()
    absent = {
        n for n, of in packages.items() if not there & {d.lower().replace("_", "-") for d in of}
    }
    absent -= {"cogfast", "setuptools"}
    assert {"pydantic", "xxhash"} & absent == {"pydantic"}
    program = (
        f"import sys; sys.modules |= dict.fromkeys({absent}); import cogfast.kernels.cpu.library"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


OTHERS = {  # what others can do to: the cache's folder, one above it, the file
    "a folder for all": lambda file: file.parent.chmod(0o777),
    "a folder of a group": lambda file: file.parent.chmod(0o770),
    "a folder above": lambda file: file.parent.parent.parent.chmod(0o777),
    "a folder of another user": lambda file: os.chown(file.parent, 65534, 65534),
    "a folder above of another user": lambda file: os.chown(file.parents[2], 65534, 65534),
}


@pytest.mark.parametrize("how", OTHERS)
def test_a_library_that_others_may_have_put_there_is_not_loaded(
    places: tuple[Path, Path], how: str
) -> None:
    planted, own = places
    planted.parent.mkdir(parents=True)
    planted.write_bytes(b"code of another user")
    if "user" in how and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    OTHERS[how](planted)
    assert library.compile_library() == own


@pytest.mark.parametrize("of_outside", ["/", "a folder above", "the folder"])
def test_owners_who_are_outside_of_a_user_namespace(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_outside: str
) -> None:
    """They all have one id, which may be root's only for folders above."""
    (planted, own), stat = places, os.stat
    planted.parent.mkdir(parents=True)
    shutil.copy(own, planted)
    theirs = {"a folder above": planted.parents[1], "the folder": planted.parent}.get(of_outside)

    def stat_inside(path, **options) -> os.stat_result:
        about, path = stat(path, **options), Path(str(path))
        is_mine = path.is_relative_to(tmp_path) and path != theirs
        return about if is_mine else os.stat_result((*about[:4], 65534, 65534, *about[6:]))

    monkeypatch.setattr(os, "stat", stat_inside)
    assert library.compile_library() == (own if theirs == planted.parent else planted)


def test_a_link_that_others_can_change_leads_to_no_library(places: tuple[Path, Path]) -> None:
    planted, own = places
    shared = planted.parents[2].with_name("shared")
    shared.mkdir()
    (shared / "mine").mkdir(mode=0o700)
    shared.chmod(0o777)
    planted.parents[2].symlink_to(shared / "mine")
    assert library.compile_library() == own


def test_a_library_of_a_file_that_others_can_write_is_compiled_again(
    compiler: Path, tmp_path: Path
) -> None:
    file = library.compile_library()
    assert file.stat().st_mode & 0o777 == 0o755 and file.parent.stat().st_mode & 0o777 == 0o700
    file.chmod(0o777)
    assert library.compile_library() == file
    assert compiler.read_text().split() == ["link", "link"]


def test_a_folder_of_temporary_files_that_is_anothers_is_not_taken(places: tuple) -> None:
    """One that ends with the process is in its place."""
    planted, own = places
    planted.parent.mkdir(parents=True)
    planted.parent.chmod(0o777)
    own.parent.chmod(0o777)
    folder = library.library_file().parent
    assert folder not in (planted.parent, own.parent) and folder.stat().st_mode & 0o777 == 0o700
    library._temporary().cleanup()  # as Python does at its end
    library._temporary.cache_clear()
    assert not folder.exists() and own.parent.exists()


@pytest.mark.parametrize(
    "umask", [0o002, *(pytest.param(mask, marks=pytest.mark.soak) for mask in (0o022, 0, 0o077))]
)
def test_folders_of_the_cache_are_the_users_alone(compiler: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        file = library.compile_library()
    finally:
        os.umask(before)
    assert [f.stat().st_mode & 0o777 for f in (file, *file.parents[:3])] == [0o755, *[0o700] * 3]
    assert is_private(file) and library.compile_library() == file
    assert compiler.read_text().split() == ["link"]
