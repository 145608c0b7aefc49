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
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from cogfast import __version__

Status = Literal["ok", "note", "missing", "error"]

_GIB = 2**30
_SHARED_MEMORY = 1 * _GIB  # Docker's default is 64 MiB, in which a reader's second batch fails
_DISK = 50 * _GIB
_SMI_SECONDS = 20  # nvidia-smi may hang if a GPU has failed


@dataclass(frozen=True, slots=True)
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


def judge(
    what: str, is_well: bool, found: str, cost: str, fix: str, otherwise: Status = "note"
) -> Finding:
    """Return a finding that is ok, or what it costs that it is not."""
    return Finding(what, "ok", found) if is_well else Finding(what, otherwise, found, cost, fix)


def examine(folder: Path) -> list[Finding]:
    """Examine the machine. folder: where the runs will be written."""
    system = f"{platform.python_version()} on {platform.platform(terse=True)}"
    findings = [Finding("python", "ok", system), *_packages()]
    torch = _import("torch")
    if torch is not None:
        findings += [*_devices(torch), *_kernels(torch), *_optional(torch)]
    return [*findings, _processor(), *_shared_memory(), _disk(folder)]


def _packages() -> Iterator[Finding]:
    """Compare the installed packages with those that cogfast requires."""
    try:
        needed = importlib.metadata.requires("cogfast") or []
    except importlib.metadata.PackageNotFoundError:
        cost = "its requirements cannot be checked"
        yield Finding("cogfast", "note", "not installed as a package", cost, "pip install -e .")
        return
    from packaging.requirements import Requirement

    good = 0
    for requirement in map(Requirement, needed):
        # Requirements of extras, such as [gpu], are optional parts.
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found, wanted = "not installed", f"{requirement.name}{requirement.specifier}"
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(requirement.name)
            if requirement.specifier.contains(version, prereleases=True):
                good += 1
                continue
            found = f"version {version}"
        cost, fix = f"cogfast needs {wanted}", f"pip install '{wanted}'"
        yield Finding(requirement.name, "error", found, cost, fix)
    yield Finding("packages", "ok", f"{good} required packages are installed")


def _devices(torch: Any) -> Iterator[Finding]:
    """List the GPUs; where torch sees none though the machine has some, say why."""
    versions = f"torch {torch.__version__}"
    listed = _output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    name, _, driver = (listed or "").partition("\n")[0].partition(", ")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield _gpu(torch, index, driver or "unknown")
    # A machine without a GPU is fine; a GPU that torch cannot use is an error.
    elif listed is None and not Path("/dev/nvidia0").exists():
        cost = "training runs on the processor, for models of some million parameters"
        fix = "use a machine with NVIDIA GPUs for the published models"
        yield Finding("gpu", "note", f"none; {versions}", cost, fix)
    elif torch.version.cuda is None:
        fix = "pip install --force-reinstall torch"
        yield Finding("gpu", "error", name or "a GPU", f"{versions} is built for CPUs", fix)
    else:
        cost = f"{versions} for CUDA {torch.version.cuda} cannot use driver {driver or 'none'}"
        fix = "install a newer driver, or a torch that is built for this driver's CUDA"
        yield Finding("gpu", "error", name or "a GPU, whose driver does not answer", cost, fix)


def _gpu(torch: Any, index: int, driver: str) -> Finding:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    memory = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    what, found = f"gpu {index}", f"{properties.name}, {memory}, driver {driver}"
    found += f", CUDA {torch.version.cuda}"
    # Code for 8.0 runs on 8.9, too, but not on 9.0.
    codes = [name[3:] for name in torch.cuda.get_arch_list() if name[3:].isdigit()]
    major, minor = properties.major, properties.minor
    if not any(int(c[:-1]) == major and int(c[-1]) <= minor for c in codes):
        cost = f"torch has no code for compute capability {major}.{minor}"
        return Finding(what, "error", found, cost, "pip install --upgrade torch")
    # The driver itself and an idle desktop take a few percent.
    if free < 0.9 * total:
        cost = f"another process holds {(total - free) / _GIB:.1f} GiB"
        return Finding(what, "note", found, cost, "nvidia-smi lists it; end it")
    if (major, minor) < (8, 0):
        cost = "no bf16: only fp16 and float32 train here, and flash-attention needs 8.0"
        return Finding(what, "note", found, cost, "set deepspeed.fp16.enabled=true")
    return Finding(what, "ok", found)


def _kernels(torch: Any) -> Iterator[Finding]:
    """Look for the compiled C++ kernels, and for what Triton needs."""
    if not torch.cuda.is_available():
        yield _cpu_kernels()
    elif _import("triton") is None:
        cost = "args.kernels=triton is not possible; plain PyTorch takes more time and memory"
        yield _part("triton", None, cost, "pip install triton")
    elif not any(shutil.which(name) for name in (os.environ.get("CC", ""), "gcc", "clang") if name):
        cost = "Triton cannot build the code that launches its kernels"
        fix = "apt install gcc, or set args.kernels=torch"
        yield Finding("C compiler", "error", "neither gcc nor clang", cost, fix)


def _cpu_kernels() -> Finding:
    from cogfast.kernels.cpu.library import library_file, missing_compiler

    try:
        file, lack = library_file(), missing_compiler()
    except RuntimeError as error:
        file, lack = None, f"none: {error}"
    if file is not None and file.exists():
        return Finding("C++ kernels", "ok", str(file))
    if lack:
        cost = "plain PyTorch replaces them, which is slower"
        fix = "install g++" if file else "use such a machine"
        return Finding("C++ kernels", "missing", lack, cost, fix)
    cost, fix = "the first run on a CPU compiles them", "cogfast doctor --build-kernels"
    return Finding("C++ kernels", "note", "not compiled yet", cost, fix)


def _optional(torch: Any) -> Iterator[Finding]:
    """Look for the parts that make training faster or more convenient."""
    if torch.cuda.is_available():
        from cogfast.extensions.plan import gpus
        from cogfast.kernels.attention_backends import BACKENDS

        attention = ("flash_attn.cute", "flash_attn_interface")
        # Importing `flash_attn` proves nothing: with version 4 it is a namespace that may be empty.
        found = next((name for name in attention if _import(name) is not None), None)
        device = torch.cuda.get_device_properties(0)
        gpu = gpus.find_gpu(device.name, device.total_memory / _GIB)
        is_supported = (device.major, device.minor) >= BACKENDS["fa4"].capability
        lack = gpus.cost_without_flash_attention(gpu) if is_supported else None
        if found or lack:
            yield _part("flash-attention", found, lack or "", gpus.INSTALL_FLASH_ATTENTION)
        dali, cost = _import("nvidia.dali"), "clips are decoded by the processor"
        yield _part("DALI", dali and dali.__version__, cost, "pip install '.[dali]'")
        if dali is not None:
            loads = ""
            with contextlib.suppress(OSError):
                loads = ctypes.CDLL("libnvcuvid.so.1") and "loads"
            fix = "start the container with NVIDIA_DRIVER_CAPABILITIES=all, or install the driver's libnvidia-decode"
            yield _part("libnvcuvid", loads, f"DALI cannot use it: {cost}", fix)


def _part(what: str, found: str | None, cost: str, fix: str) -> Finding:
    shown = found or "not installed, or it does not load"
    return judge(what, bool(found), shown, cost, fix, "missing")


def _processor() -> Finding:
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # ValueError for "max"
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        if quota / period < cores:
            found = f"{cores} cores, of which the container may use {quota / period:g}"
            fix = (
                f"export OMP_NUM_THREADS={max(1, quota // period)}, or raise the container's limit"
            )
            return Finding("processor", "note", found, "threads wait for each other", fix)
    return Finding("processor", "ok", f"{cores} cores")


def _shared_memory() -> Iterator[Finding]:
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        found = f"{free / _GIB:.2g} GiB free in {shared}"
        cost = "reader processes pass data through it; they end with a bus error when it is full"
        fix = "docker run --shm-size=16g (or --ipc=host), or mount -o remount,size=16G /dev/shm"
        yield judge("shared memory", free >= _SHARED_MEMORY, found, cost, fix)


def _disk(folder: Path) -> Finding:
    # The folder of a first run does not exist yet; its disk is that of the nearest parent.
    there = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    if not os.access(there, os.W_OK):
        fix = "set args.save to another folder, and give it to --folder"
        return Finding("disk", "error", f"{there} cannot be written", "a run cannot save", fix)
    free = shutil.disk_usage(there).free
    found = f"{free / _GIB:.0f} GiB free in {there}"
    cost = "a checkpoint with optimizer and EMA takes 27 GB for 2B and 89 GB for 5B"
    fix = "set args.save to a larger disk, or args.keep_last=1"
    return judge("disk", free >= _DISK, found, cost, fix)


def _import(module: str) -> Any:
    """Import a module, or return None if it is missing or broken."""
    try:
        return importlib.import_module(module)
    except Exception:  # a broken installation raises any type
        return None


def _output_of(*argv: str) -> str | None:
    """Return what a program prints, or None if it is missing, fails or prints nothing."""
    options: Any = {"capture_output": True, "text": True, "timeout": _SMI_SECONDS, "check": True}
    try:
        return subprocess.run(argv, **options).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def to_text(findings: Sequence[Finding]) -> str:
    """Format findings as a table, with cost and fix below each that is not ok."""
    width = max(len(f.what) for f in findings)
    lines = []
    for f in findings:
        sign = "ERROR" if f.status == "error" else f.status
        lines.append(f"{f.what:<{width}}  {sign:<7}  {f.found}")
        indent = " " * (width + 11)
        lines += [indent + f.cost] * bool(f.cost) + [f"{indent}fix: {f.fix}"] * bool(f.fix)
    return "\n".join(lines) + "\n"


def to_json(findings: Sequence[Finding]) -> str:
    """Format findings as {"cogfast": version, "findings": [...]}."""
    found = {"cogfast": __version__, "findings": [asdict(f) for f in findings]}
    return json.dumps(found, indent=1) + "\n"
