"""Programs on the null CUDA runtime: how they are started, and the counters that they read."""

import atexit
import ctypes
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Set by conftest.py and a shell, for tests without a GPU
_OTHERWISE = ("TRITON_INTERPRET", "PYTHONPATH", "DS_ACCELERATOR")


def start(
    arguments: Sequence[str], ranks: int = 1, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` of TEST_CUDA_VENV on the null runtime, in the project's root.

    ranks: processes that torchrun starts, each with a device of its own, if there are several.
    """
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        arguments = [*launcher, *arguments]
    venv = Path(os.environ["TEST_CUDA_VENV"])
    runtime = ROOT / "build" / "null_cuda" / venv.name  # setup.sh builds it
    kept = {key: value for key, value in os.environ.items() if key not in _OTHERWISE}
    kept |= {
        "LD_PRELOAD": str(runtime / "libnullcuda.so"),
        "LD_LIBRARY_PATH": str(runtime),
        "TRITON_LIBCUDA_PATH": str(runtime),
        "TRITON_CACHE_DIR": str(runtime / "triton"),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(ranks))),
        "NULLCUDA_DEVICES": str(ranks),
        "OMP_NUM_THREADS": "1",
        # Larger than a batch, which the host reads, and smaller than weights, which nothing reads.
        "NULLCUDA_COPY_MAX": "1000000",
        **environment,
    }
    command = [str(ROOT / venv / "bin" / "python"), *arguments]
    return subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True)


class Counters:
    """The runtime's counters. Only for processes that run on it."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)  # the preloaded one; the file may have been built again
        self._library.nullcuda_counters.restype = ctypes.c_size_t
        self._library.nullcuda_counters.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        self._observer: object = None  # the runtime keeps no reference

    def take(self) -> dict[str, int]:
        """Return all counters since the last call, by name."""
        size = 0
        text = ctypes.create_string_buffer(1)
        while (needed := self._library.nullcuda_counters(text, size)) > size:
            size, text = 2 * needed, ctypes.create_string_buffer(2 * needed)
        self._library.nullcuda_reset()
        lines = (line.rpartition("\t") for line in text.value.decode().splitlines())
        return {name: int(number) for name, _, number in lines}

    def observe_syncs(self, observer: Callable[[bytes], None]) -> None:
        """Call `observer` with the name of each call that makes the host wait for the device."""
        self._observer = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(observer)
        self._library.nullcuda_observe_syncs(self._observer)
        # Libraries wait for the device when Python has ended.
        atexit.register(self._library.nullcuda_observe_syncs, None)
