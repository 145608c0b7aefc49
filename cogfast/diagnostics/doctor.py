"""`cogfast doctor`: what this machine lacks for training, what each gap costs, and how to close it.

It imports nothing that may be missing, torch included, before it has looked for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "note", "missing", "error"]

_GIB = 2**30
_SHARED_MEMORY = 1 * _GIB  # Docker's default is 64 MiB, in which a reader's second batch fails
_OPEN_FILES = 4096
_DISK = 50 * _GIB
_SMI_SECONDS = 20  # nvidia-smi may hang if a GPU has failed
_CHECKPOINT_TEXT = "a checkpoint with optimizer and EMA takes 27 GB for 2B and 89 GB for 5B"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A fact of the machine. cost: what the run loses; fix: the command that closes the gap.

    status: ok; note: training works, more slowly or with a risk; missing: an optional part is
    absent; error: training cannot work.
    """

    what: str
    status: Status
    found: str
    cost: str = ""
    fix: str = ""


def examine(folder: Path) -> list[Finding]:
    """Examine the machine. folder: where the runs will be written."""
    findings = [*_python(), *_packages()]
    torch = _import("torch")
    if torch is not None:
        findings += [*_devices(torch), *_kernels(torch), *_optional(torch)]
    findings += [*_processor(), *_memory(), *_limits(), *_disk(folder)]
    return findings


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    yield Finding(what="python", status="ok", found=f"{version} on {platform.platform(terse=True)}")


def _packages() -> Iterator[Finding]:
    """Compare the installed packages with those that cogfast requires."""
    try:
        needed = importlib.metadata.requires("cogfast") or []
        from packaging.requirements import Requirement
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            what="cogfast",
            status="note",
            found="not installed as a package",
            cost="its requirements cannot be checked",
            fix="pip install -e .",
        )
        return
    except ImportError:
        yield _needed("packaging", None, "packaging")
        return
    good = 0
    for text in needed:
        requirement = Requirement(text)
        # Requirements of extras, such as [gpu], are optional parts.
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _version(requirement.name)
        if version is not None and requirement.specifier.contains(version, prereleases=True):
            good += 1
        else:
            yield _needed(requirement.name, version, f"{requirement.name}{requirement.specifier}")
    yield Finding(what="packages", status="ok", found=f"{good} required packages are installed")


def _needed(name: str, version: str | None, wanted: str) -> Finding:
    return Finding(
        what=name,
        status="error",
        found="not installed" if version is None else f"version {version}",
        cost=f"cogfast needs {wanted}",
        fix=f"pip install '{wanted}'",
    )


def _devices(torch: Any) -> Iterator[Finding]:
    """List the GPUs; where torch sees none though the machine has some, say why."""
    versions = f"torch {torch.__version__}"
    listed = _output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    if not torch.cuda.is_available():
        # A machine without a GPU is fine; a GPU that torch cannot use is an error.
        if listed is None and not Path("/dev/nvidia0").exists():
            yield Finding(
                what="gpu",
                status="note",
                found=f"none; {versions}",
                cost="training runs on the processor, for models of some million parameters",
                fix="use a machine with NVIDIA GPUs for the published models",
            )
            return
        name, _, driver = (listed or "a GPU, whose driver does not answer").partition(", ")
        if torch.version.cuda is None:
            cost, fix = f"{versions} is built for CPUs", "pip install --force-reinstall torch"
        else:
            cost = f"{versions} for CUDA {torch.version.cuda} cannot use driver {driver or 'none'}"
            fix = "install a newer driver, or a torch that is built for this driver's CUDA"
        yield Finding(what="gpu", status="error", found=name.splitlines()[0], cost=cost, fix=fix)
        return
    driver = (listed or "").splitlines()[0].rpartition(", ")[2] if listed else "unknown"
    for index in range(torch.cuda.device_count()):
        yield _gpu(torch, index, driver)
    yield from _links(torch)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    yield Finding(what="NCCL", status="ok", found=nccl)


def _gpu(torch: Any, index: int, driver: str) -> Finding:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    found = (
        f"{properties.name}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB free, driver {driver}, "
        f"CUDA {torch.version.cuda}"
    )
    what = f"gpu {index}"
    # Code for 8.0 runs on 8.9, too, but not on 9.0.
    minors = [
        int(name[-1])
        for name in torch.cuda.get_arch_list()
        if name[:-1] == f"sm_{properties.major}" and name[-1].isdigit()
    ]
    if not any(minor <= properties.minor for minor in minors):
        cost = f"torch has no code for compute capability {properties.major}.{properties.minor}"
        return Finding(
            what=what, status="error", found=found, cost=cost, fix="pip install --upgrade torch"
        )
    # The driver itself and an idle desktop take a few percent.
    if free < 0.9 * total:
        cost = f"another process holds {(total - free) / _GIB:.1f} GiB"
        return Finding(
            what=what, status="note", found=found, cost=cost, fix="nvidia-smi lists it; end it"
        )
    if (properties.major, properties.minor) < (8, 0):
        cost = "no bf16: only fp16 and float32 train here, and flash-attention needs 8.0"
        fix = "set deepspeed.fp16.enabled=true"
        return Finding(what=what, status="note", found=found, cost=cost, fix=fix)
    return Finding(what=what, status="ok", found=found)


def _links(torch: Any) -> Iterator[Finding]:
    """Say which GPUs cannot read each other's memory."""
    count = torch.cuda.device_count()
    if count < 2:
        return
    # Access may be one-sided, so both directions are asked for.
    apart = [
        (a, b)
        for a in range(count)
        for b in range(count)
        if a != b and not torch.cuda.can_device_access_peer(a, b)
    ]
    if not apart:
        yield Finding(what="gpu links", status="ok", found="each GPU reads every other's memory")
        return
    yield Finding(
        what="gpu links",
        status="note",
        found=f"GPUs {apart[0][0]} and {apart[0][1]} cannot read each other's memory "
        f"({len(apart) // 2} pairs of {count * (count - 1) // 2})",
        cost="reductions pass through the host's memory; tensor parallelism is slow",
        fix="nvidia-smi topo -m shows the links; keep args.model_parallel_size=1",
    )


def _kernels(torch: Any) -> Iterator[Finding]:
    """Look for the compiled C++ kernels, and for what Triton needs."""
    if not torch.cuda.is_available():
        from cogfast.kernels.torch_library import HAS_CPU_KERNELS

        if HAS_CPU_KERNELS:
            yield Finding(what="C++ kernels", status="ok", found="compiled for this torch")
        else:
            yield Finding(
                what="C++ kernels",
                status="missing",
                found="not compiled for this torch, or the processor has no AVX2",
                cost="plain PyTorch replaces them, which is slower",
                fix="install g++, then pip install --no-build-isolation -e .",
            )
        return
    if _import("triton") is None:
        yield Finding(
            what="triton",
            status="missing",
            found="not installed",
            cost="args.kernels=triton is not possible; plain PyTorch takes more time and memory",
            fix="pip install triton",
        )
    elif not any(shutil.which(name) for name in (os.environ.get("CC", ""), "gcc", "clang") if name):
        yield Finding(
            what="C compiler",
            status="error",
            found="neither gcc nor clang",
            cost="Triton cannot build the code that launches its kernels",
            fix="apt install gcc, or set args.kernels=torch",
        )


def _optional(torch: Any) -> Iterator[Finding]:
    """Look for the parts that make training faster or more convenient."""
    if torch.cuda.is_available():
        attention = ("flash_attn.cute", "flash_attn_interface", "flash_attn.flash_attn_interface")
        # Importing `flash_attn` proves nothing: with version 4 it is a namespace that may be empty.
        found = next((name for name in attention if _import(name) is not None), None)
        yield _part(
            "flash-attention",
            found,
            "PyTorch's cuDNN or flash attention is used, which may be slower",
            "pip install 'cogfast[fa4]'",
        )
        dali = _import("nvidia.dali")
        yield _part(
            "DALI",
            None if dali is None else dali.__version__,
            "clips are decoded by the processor",
            "pip install 'cogfast[dali]'",
        )
        if dali is not None:
            yield _video_decoder()
    decord = _version("decord")
    yield _part("decord", decord, "PyAV decodes clips, more slowly", "pip install decord")
    yield _part("wandb", _version("wandb"), "args.wandb=true is not possible", "pip install wandb")
    if torch.cuda.is_available():
        yield _part(
            "nsys",
            shutil.which("nsys"),
            "no system-wide profiles; args.profiling still works",
            "install NVIDIA Nsight Systems",
        )


def _video_decoder() -> Finding:
    try:
        ctypes.CDLL("libnvcuvid.so.1")
    except OSError as error:
        return Finding(
            what="libnvcuvid",
            status="missing",
            found=f"does not load ({error})",
            cost="DALI cannot decode videos; the processor does",
            fix="start the container with NVIDIA_DRIVER_CAPABILITIES=all, or install the driver's "
            "libnvidia-decode package",
        )
    return Finding(what="libnvcuvid", status="ok", found="loads")


def _part(what: str, found: str | None, cost: str, fix: str) -> Finding:
    if found:
        return Finding(what=what, status="ok", found=found)
    return Finding(what=what, status="missing", found="not installed", cost=cost, fix=fix)


def _processor() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    limit = _cgroup_cores()
    if limit is not None and limit < cores:
        yield Finding(
            what="processor",
            status="note",
            found=f"{cores} cores, of which the container may use {limit:g}",
            cost="threads wait for each other",
            fix=f"export OMP_NUM_THREADS={max(1, int(limit))}, or raise the container's limit",
        )
        return
    yield Finding(what="processor", status="ok", found=f"{cores} cores")


def _cgroup_cores() -> float | None:
    """Return the processor time that the control group allows, in cores; None if it sets no limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return int(quota) / int(period)  # ValueError for "max"
    return None


def _memory() -> Iterator[Finding]:
    psutil = _import("psutil")
    if psutil is not None:
        memory = psutil.virtual_memory()
        found = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB available"
        yield Finding(what="memory", status="ok", found=found)
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return
    free = shutil.disk_usage(shared).free
    found = f"{free / _GIB:.2g} GiB free in {shared}"
    if free >= _SHARED_MEMORY:
        yield Finding(what="shared memory", status="ok", found=found)
        return
    yield Finding(
        what="shared memory",
        status="note",
        found=found,
        cost="reader processes and ranks of one machine pass data through it; they end with a bus "
        "error when it is full",
        fix="docker run --shm-size=16g (or --ipc=host), or mount -o remount,size=16G /dev/shm",
    )


def _limits() -> Iterator[Finding]:
    # The soft limit applies; users may raise it to the hard one.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= _OPEN_FILES or soft == resource.RLIM_INFINITY:
        yield Finding(what="open files", status="ok", found=f"at most {soft}")
        return
    yield Finding(
        what="open files",
        status="note",
        found=f"at most {soft}",
        cost="many readers, tar shards and ranks can run out of them",
        fix=f"ulimit -n {hard if 0 < hard < 65536 else 65536}",
    )


def _disk(folder: Path) -> Iterator[Finding]:
    # The folder of a first run does not exist yet; its disk is that of the nearest parent.
    there = folder.resolve()
    while not there.exists():
        there = there.parent
    if not os.access(there, os.W_OK):
        yield Finding(
            what="disk",
            status="error",
            found=f"{there} cannot be written",
            cost="a run cannot save",
            fix="set args.save to another folder, and give it to --folder",
        )
        return
    free = shutil.disk_usage(there).free
    found = f"{free / _GIB:.0f} GiB free in {there}"
    if free >= _DISK:
        yield Finding(what="disk", status="ok", found=found)
    else:
        yield Finding(
            what="disk",
            status="note",
            found=found,
            cost=_CHECKPOINT_TEXT,
            fix="set args.save to a larger disk, or args.keep_last=1",
        )


def _import(module: str) -> Any:
    """Import a module, or return None if it is missing or broken."""
    try:
        return importlib.import_module(module)
    except Exception:  # a broken installation raises any type
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output_of(*argv: str) -> str | None:
    """Return what a program prints, or None if it is missing, fails or prints nothing."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


_SIGNS: dict[Status, str] = {"ok": "ok", "note": "note", "missing": "missing", "error": "ERROR"}


def to_text(findings: Sequence[Finding]) -> str:
    """Format findings as a table, with cost and fix below each that is not ok."""
    width = max(len(f.what) for f in findings)
    lines = []
    for f in findings:
        lines.append(f"{f.what:<{width}}  {_SIGNS[f.status]:<7}  {f.found}")
        indent = " " * (width + 11)
        lines += [indent + f.cost] * bool(f.cost)
        lines += [f"{indent}fix: {f.fix}"] * bool(f.fix)
    return "\n".join(lines) + "\n"


def to_json(findings: Sequence[Finding]) -> str:
    return json.dumps([asdict(f) for f in findings], indent=1) + "\n"
