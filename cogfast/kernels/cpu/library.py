"""The C++ library of the CPU kernels: compiled at first use, and kept in the user's cache folder.

Its name has all that it depends on, so that an environment with another PyTorch, and a machine with another
instruction set and the same home folder, have their own.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import torch

from cogfast.core.files import is_private, locked, make_private, own_temporary, user_cache

logger = logging.getLogger(__name__)

# Counts changes of the ops' signatures: a library that was compiled for others is not loaded.
_OPS = 3
_HERE = Path(__file__).parent
# Contraction into FMA is off, so that every compiler rounds alike; the kernels call fmadd.
_OPTIONS = ["-std=c++20", "-O3", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fno-math-errno"]
_OPTIONS += ["-fno-trapping-math", "-w"]
_VECTORS = {
    "AVX2": ["-mavx2", "-mfma", "-mf16c"],
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"],
}
if torch.cpu._is_avx512_bf16_supported():
    _VECTORS["AVX512"].append("-mavx512bf16")
# Some compilers link what cannot be loaded: clang++ without libomp leaves symbols undefined.
_LOAD = "import sys, torch; torch.ops.load_library(sys.argv[1])"
_temporary = cache(partial(tempfile.TemporaryDirectory, prefix="cogfast-"))  # of this process
_MOST_SECONDS = 600  # of one command; all of them take half a minute on two cores


def cache_folder() -> Path:
    """Return the folder of the compiled libraries: in the user's cache, or where no other user can put one."""
    folder = user_cache() / "kernels"
    if not is_private(folder):
        folder = own_temporary()
    return folder if is_private(folder) else Path(_temporary().name)


def library_file() -> Path:
    """Return where the library for this PyTorch, compiler and processor is or would be.

    RuntimeError if there are no kernels for this machine.
    """
    # PyTorch makes this choice, which the environment variable ATEN_CPU_CAPABILITY can lower.
    instructions = torch.backends.cpu.get_cpu_capability()
    if not sys.platform.startswith("linux") or instructions not in _VECTORS:
        raise RuntimeError("the C++ kernels are for Linux on an x86-64 processor with AVX2")
    words = [*_compiler(), *_OPTIONS, *_VECTORS[instructions]]
    digest = hashlib.blake2b("\n".join(words).encode(), digest_size=8)
    for path in sorted(path for path in _HERE.rglob("*") if path.suffix in (".cpp", ".h", ".inc")):
        digest.update(path.read_bytes())
    name = f"cpu-{_OPS}-torch{torch.__version__}-{instructions}-{digest.hexdigest()}.so"
    return cache_folder() / name


def missing_compiler() -> str:
    """Return what to install, or "" if there is a compiler."""
    name = _compiler()[0]
    return "" if shutil.which(name) else f"there is no {name}; install g++, or set CXX to another"


def compile_library() -> Path:
    """Compile the library unless it exists, and return its path. RuntimeError of one line if it cannot be.

    One process compiles. Those that start meanwhile, such as the other ranks, wait for it, and fail with it.
    """
    try:
        file = library_file()
        if file.exists() and is_private(file):
            return file
        if missing := missing_compiler():
            raise RuntimeError(missing)
        make_private(file.parent)
        if not is_private(file.parent):
            raise RuntimeError(f"others can write to {file.parent}")
        if user_cache() not in file.parents:
            text = "others can write to %s or a folder above it: the C++ kernels go to %s"
            logger.info(text, user_cache() / "kernels", file.parent)
        notice = "another process compiles the C++ kernels (half a minute)"
        # A process that dies leaves the file, but not its lock.
        with locked(file.with_suffix(".lock"), notice) as (lock, before, has_waited):
            try:
                # A process that failed has written so into it; after one that was killed, this one compiles.
                if has_waited and not file.exists() and before.endswith("failed"):
                    raise RuntimeError("another process failed to compile the C++ kernels")
                if not (file.exists() and is_private(file)):
                    _compile(file)
            except Exception:
                lock.write(b"failed")
                raise
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or str(error)).splitlines()
        why = next((line for line in lines if "rror" in line), lines[-1])
        raise RuntimeError(f"{error.cmd[0]} failed: {why}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{error}") from None
    return file


def _compiler() -> list[str]:
    words = os.environ.get("CXX", "")
    try:
        return shlex.split(words) or ["g++"]
    except ValueError as error:  # a quotation mark without its partner
        raise RuntimeError(f"CXX={words!r} cannot be split into words ({error})") from None


def _compile(file: Path) -> None:
    """Compile and link into a folder beside `file`, load the result in a new process, and rename it."""
    logger.info("compiling the C++ kernels for this processor, once (half a minute): %s", file)
    for left in file.parent.glob(f"{file.stem}-*"):  # by a process that died
        shutil.rmtree(left, ignore_errors=True)
    root = Path(torch.__file__).parent
    include = [root / "include", root / "include" / "torch" / "csrc" / "api" / "include"]
    command = [*_compiler(), *_OPTIONS, *(f"-I{path}" for path in include)]
    instructions = torch.backends.cpu.get_cpu_capability()
    vector = [*command, *_VECTORS[instructions], f"-DCPU_CAPABILITY={instructions}"]
    vector += [f"-DCPU_CAPABILITY_{instructions}"]
    # The tensor level first: it includes most of PyTorch and takes longest.
    commands = [[*command, f"-DCOGFAST_CPU={instructions}", "-c", f"{_HERE / 'registration.cpp'}"]]
    commands += [[*vector, "-c", str(path)] for path in sorted(_HERE.glob("vector/*.cpp"))]
    with tempfile.TemporaryDirectory(prefix=f"{file.stem}-", dir=file.parent) as folder:
        files = [str(Path(folder, f"{i}.o")) for i in range(len(commands))]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            try:
                list(pool.map(_run, ([*c, "-o", o] for c, o in zip(commands, files, strict=True))))
            finally:
                pool.shutdown(cancel_futures=True)
        new = str(Path(folder, file.name))
        # libgomp is not named: torch_cpu brings the one whose threads PyTorch's ops use.
        link = [*_compiler(), "-shared", *files, f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
        _run([*link, "-o", new])
        # -P leaves out the current folder, which may have a torch.py.
        _run([sys.executable, "-P", "-c", _LOAD, new])
        os.chmod(new, 0o755)  # with a umask of 002 its group could write to it
        os.replace(new, file)


def _run(command: list[str]) -> None:
    options = {"check": True, "capture_output": True, "text": True, "timeout": _MOST_SECONDS}
    options["errors"] = "replace"  # a compiler may write in another encoding than the locale's
    subprocess.run(command, stdin=subprocess.DEVNULL, **options)
