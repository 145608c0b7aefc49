"""Triton's interpreter, and shared fixtures: the golden files, one thread, NaN in uninitialised memory."""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

# Before anything imports the kernels: their Triton versions then run on CPU tensors. The model takes
# the CPU's own versions all the same; tests of the kernels call the launchers. A GPU is hidden, so
# that the tests are the same everywhere; those that need one, with gpu or cuda in their names, run
# with COGFAST_TEST_ON_GPU=1 (bench/checks/kernels_on_device.py).
if os.environ.get("COGFAST_TEST_ON_GPU") != "1":
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest  # noqa: E402
import torch  # noqa: E402

from cogfast.kernels.cpu.library import compile_library, library_file, missing_compiler  # noqa: E402
from tests.support.s3_server import S3Server, s3_server  # noqa: E402

if TYPE_CHECKING:
    from tests.support.runs import Run

# A shell that starts the tests in the background ignores Ctrl-C and hang-ups for all below it.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)

ROOT = Path(__file__).resolve().parent
# A mistyped path with one slash looks like a model of the Hugging Face hub: no test asks it.
os.environ["HF_HUB_OFFLINE"] = "1"
# One thread here and in launched processes: results do not depend on the cores, and tests that run
# beside each other do not fight for them.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)


def _compile_cpu_kernels() -> None:
    """Compile the C++ kernels where `make setup` has not: else their tests are skipped, and forks compile them."""
    try:
        library_file()
    except RuntimeError:
        return  # this machine has none
    if not missing_compiler():
        compile_library()


_compile_cpu_kernels()


# Files that take longest although none of their tests is slow.
LONG = (
    "test_matrix.py",
    "test_cache.py",
    "test_own_network.py",
    "test_scores.py",
    "test_ladder.py",
    "test_small_part.py",
    "test_own_classes.py",
    "test_folders.py",
    "test_train_folder.py",
    "test_pages.py",
    "test_sample_sources.py",
    "test_evaluate.py",
    "test_trainer.py",
    "test_runs.py",
    "test_derived_runs.py",
    "test_inputs.py",
    "test_optimizer_memory.py",
    "test_bench_step.py",
    "test_autoencoder.py",
    "test_gpu_run.py",
    "test_quickstart.py",
)


def _soaked_seconds() -> dict[Path, int]:
    """Return how long each file took in the last `make soak`."""
    result = ROOT / "docs" / "soak.json"
    found = json.loads(result.read_text()) if result.is_file() else {"seconds_of_files": {}}
    return {ROOT / name: seconds for name, seconds in found["seconds_of_files"].items()}


def _is_soak(item: pytest.Item) -> bool:
    return item.get_closest_marker("soak") is not None


@pytest.hookimpl(trylast=True)  # behind the choice of -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files that fork first, before any test leaves threads; then the long ones and those with
    slow tests, so that no long file is the last."""
    long = {
        item.path for item in items if item.get_closest_marker("slow") or item.path.name in LONG
    }
    seconds = _soaked_seconds() if all(map(_is_soak, items)) else {}
    items.sort(
        key=lambda item: (
            not item.get_closest_marker("forks"),
            -seconds.get(item.path, 0),
            item.path not in long,
        )
    )


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collections, which took half a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def running() -> Iterator[S3Server]:
    """An S3 server for the tests of a file."""
    with s3_server() as server:
        yield server


@pytest.fixture
def server(
    running: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[S3Server]:
    """The file's S3 server, without faults, and a local cache of the test's own."""
    running.prepare(monkeypatch, tmp_path / "local")
    yield running
    running.faults, running.watch = [], lambda method, path: None


@pytest.fixture(scope="session")
def golden() -> Path:
    """Numbers that upstream's own code computed."""
    return ROOT / "tests" / "golden"


@pytest.fixture(scope="session")
def sat_configs() -> Path:
    """Upstream's ten YAML files, as they are."""
    return ROOT / "tests" / "golden" / "sat_configs"


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The clips of a tiny run; tests only read them."""
    from tests.support.tiny_run import write_clips

    return write_clips(tmp_path_factory.mktemp("data"))


@pytest.fixture
def run(data: Path, tmp_path: Path) -> Run:
    """A tiny run whose files lie in the test's folder."""
    from tests.support.runs import Run

    return Run(data, tmp_path)


@pytest.fixture(scope="module")
def shared_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A tiny run whose files lie in a folder of the tests of a file; tests train it `into` theirs."""
    from tests.support.runs import Run

    return Run(data, tmp_path_factory.mktemp("run"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's folder, in which commands run."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run `cogfast WORDS`, which must succeed, and return what it prints to stdout."""
    from cogfast.__main__ import main

    def printed(*words: object) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 0
        return capsys.readouterr().out

    return printed


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Return what is logged, with the lines of level INFO."""
    caplog.set_level("INFO", logger="cogfast")
    return caplog


@pytest.fixture(scope="session")
def pipelines(tmp_path_factory: pytest.TempPathFactory):
    """A tiny pipeline of diffusers for each family; tests only read them."""
    from tests.support.pipelines import write_pipelines  # imports diffusers

    return write_pipelines(tmp_path_factory.mktemp("pipelines"))


@pytest.fixture(autouse=True)
def _nan_filled_empty():
    """`torch.empty` holds NaN, so that a value that was never written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True)
def _own_file_size_limit() -> Iterator[None]:
    """Restore the limit on file sizes, also if a test that simulates a full disk fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def file_limit() -> Callable[[int], AbstractContextManager[None]]:
    """Simulate a full disk: within `with file_limit(100)` no file can grow beyond 100 bytes."""

    @contextmanager
    def limited(num_bytes: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


@pytest.fixture(autouse=True)
def _own_scheduling_policy() -> Iterator[None]:
    """Fail the test in which a library gives this process real-time priority."""
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    yield
    left = os.sched_getscheduler(0)
    os.sched_setscheduler(0, policy, priority)
    assert left == policy, f"the test left scheduling policy {left}; it began with {policy}"


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """Undo what commands and trainers of a test have configured for logging."""
    yield
    logger = logging.getLogger("cogfast")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def _pages_only_where_they_are_looked_at(request, monkeypatch) -> None:
    """A run of this process writes no page, except in the page's tests."""
    watch = sys.modules.get("cogfast.extensions.page.watch")
    if watch is not None and request.path.name not in ("test_metrics.py", "test_page.py"):
        monkeypatch.setattr(watch.RunPage, "write", lambda self, is_active=True: None)


@pytest.fixture(autouse=True)
def _own_linear(monkeypatch):
    """Restore torch's `linear`: DeepSpeed's ZeRO-3 replaces it by one that rounds differently."""
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)


@pytest.fixture(autouse=True, scope="session")
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep indices of videos and shards in the test's folder, also those of launched runs."""
    from cogfast.kernels.cpu.library import cache_folder

    before, kernels = os.environ.get("XDG_CACHE_HOME"), cache_folder()
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    # The C++ kernels take half a minute to compile: launched runs find the user's.
    kernels.mkdir(parents=True, exist_ok=True)
    cache_folder().parent.mkdir(exist_ok=True)
    cache_folder().symlink_to(kernels)
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before
