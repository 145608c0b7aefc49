"""Starts the commands of a case in forked processes whose current folder is a scratch folder."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from scripts.behaviour.difference import machine
from tests.support.ranks.forked import Forked

# These decide how floating-point numbers are rounded, as far as that can be set.
PINS = {
    "OMP_NUM_THREADS": "1",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
BUCKET = "behaviour"
_SECONDS = 600
_FORKING = threading.Lock()  # Forked changes the current folder of the process for a moment

# argv: folder, name of a fault, program, its words. Relative paths in a configuration are the same
# in every scratch folder, so that manifests with checksums need not be changed.
_CODE = """
import os, runpy, signal, sys
folder, fault, *words = sys.argv[1:]
os.chdir(folder)
sys.path[:0] = [folder + "/own", folder + "/fakes"]

def die_at(name):
    real = getattr(os, name)
    def rename(source, target, *others, **named):
        if str(source).endswith(".incomplete") and str(target).endswith(fault):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(source, target, *others, **named)
    setattr(os, name, rename)

if fault:
    die_at("rename")
    die_at("replace")
if words[0] == "-m":
    if words[1] == "torch.distributed.run":
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
        from tests.support.ranks.forked import ForkedPopen
        subprocess_handler.Popen = ForkedPopen
    sys.argv = words[1:]
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)
else:
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
"""


def pin() -> None:
    """Set PINS in this process, for those that it starts. Call it before anything computes."""
    os.environ.update(PINS)


def pinned_machine() -> dict[str, str]:
    """Return what the bits of floating-point numbers may depend on."""
    return machine() | {key: os.environ.get(key, "") for key in PINS} | {"OMP_NUM_THREADS": "1"}


def kernels_folder() -> Path:
    """Return where this user's compiled kernels are, which take half a minute to compile."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "cogfast" / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def launch(
    root: Path,
    user: Path,
    program: Sequence[str],
    ranks: int,
    variables: dict[str, str],
    fault: str = "",
) -> tuple[int, str]:
    """Run `python PROGRAM` as so many ranks in the folder `root`.

    user: the user's cache folder. Return the first exit status that is not 0, or 0, and what rank 0
    has printed.
    """
    own = user / "cogfast" / "kernels"
    if not own.is_symlink():
        own.parent.mkdir(parents=True, exist_ok=True)
        own.symlink_to(kernels_folder())
    environment = {
        **os.environ,
        **variables,
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(user),
        "COGFAST_LOCAL_CACHE": str(root / "local"),
        "HF_HUB_OFFLINE": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # as docs/launch.md says
        "CUDA_VISIBLE_DEVICES": "",
    }
    port = _free_port()
    started = []
    for rank in range(ranks):
        own_variables = {} if ranks == 1 else _variables(rank, ranks, port)
        words = ["-c", _CODE, str(root), fault, *program]
        with _FORKING:
            started.append(Forked(words, environment | own_variables))
    end, statuses = time.monotonic() + _SECONDS, []
    try:
        for process in started:
            statuses.append(process.wait(max(1.0, end - time.monotonic())))
    finally:
        for process in started:
            if process.poll() is None:
                process.send_signal(9)
                process.wait(60)
    output = started[0].communicate()[0]
    status = next((status for status in statuses if status), 0)
    if status and ranks > 1:
        output += "".join(process.communicate()[0] for process in started[1:])
    return status, output


def _variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Bucket:
    """A bucket of an S3 server on the loopback, whose objects are copied from and to a folder."""

    def __init__(self, variables: dict[str, str]) -> None:
        import boto3

        self.variables = variables
        self._client = boto3.client(
            "s3",
            endpoint_url=variables["AWS_ENDPOINT_URL"],
            aws_access_key_id=variables["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=variables["AWS_SECRET_ACCESS_KEY"],
            region_name=variables["AWS_DEFAULT_REGION"],
        )
        self._client.create_bucket(Bucket=BUCKET)

    def upload(self, folder: Path) -> None:
        """Make the bucket's objects those of a folder."""
        for key in self._keys():
            self._client.delete_object(Bucket=BUCKET, Key=key)
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            key = str(file.relative_to(folder))
            self._client.put_object(Bucket=BUCKET, Key=key, Body=file.read_bytes())

    def download(self, folder: Path) -> None:
        """Write the bucket's objects into a folder; files that have not changed are left alone."""
        keys = self._keys()
        for file in [path for path in folder.rglob("*") if path.is_file()]:
            if str(file.relative_to(folder)) not in keys:
                file.unlink()
        for key in keys:
            content = self._client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
            file = folder / key
            if not file.is_file() or file.read_bytes() != content:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)

    def _keys(self) -> set[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        return {one["Key"] for page in pages for one in page.get("Contents", ())}


@contextmanager
def bucket() -> Iterator[Bucket]:
    """Start an S3 server with the bucket BUCKET."""
    from tests.support.s3_server import s3_server

    with s3_server() as server:
        yield Bucket(server.environment)


def command(*words: str) -> list[str]:
    """Return the program `cogfast WORDS`."""
    return ["-m", "cogfast", *words]


def torchrun(ranks: int, *words: str) -> list[str]:
    """Return the program torchrun that starts `cogfast WORDS`, as elastic runs need it."""
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--max-restarts=1"]
    launcher += ["--nnodes=1:1", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{_free_port()}"]
    return [*launcher, "-m", "cogfast", *words]


assert sys.platform == "linux", "forked processes, and paths of Linux in the fixtures"
