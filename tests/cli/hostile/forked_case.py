"""Run a hostile input in a forked process and report what it did: exit status, output, memory, time,
commands that it started and files that it wrote outside of its folder.

The child has no rights of root, and Python reports to an audit hook (PEP 578), which cannot be removed.
"""

import contextlib
import ctypes
import importlib
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch.distributed as dist

MAX_SECONDS = 10.0  # of CPU time, so that other jobs on the machine do not count
# Wall clock without progress: a process that waits for something that never comes. A process that
# other jobs slow down still gets some processor time.
MAX_WAIT = 60.0
_PROGRESS = 0.5  # seconds of processor time
MAX_BYTES = 2 * 2**30
MAX_LINE = 400
# Programs that record the commit and the machine of a run. DeepSpeed's ZeRO-3 lists the cores by numactl.
COMMANDS = {"numactl", "git", "nvidia-smi", "lscpu", "uname", "ldconfig"}
COMMANDS |= {"gcc", "cc", "c++", "g++"}

_SCRATCH = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR")
_STARTS = {"os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn"}
_WRITES = {"remove", "rename", "rmdir", "mkdir", "link", "symlink", "truncate", "chmod", "chown"}
_WRITES = {f"os.{name}" for name in _WRITES | {"utime"}} | {"shutil.rmtree", "shutil.move"}
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Commands import these when they need them; forked cases have them already.
_OURS = ["cli.options", "door.load", "door.run", "finetune.models"]
_OURS += ["extensions.cache.command"]
_OURS += ["extensions.sample.command", "extensions.sample.lora_overlay"]
_THEIRS = ["deepspeed", "deepspeed.runtime.zero.muon.original_muon", "encodings.cp437", "networkx"]
_THEIRS += ["omegaconf._impl", "omegaconf.vendor.antlr4.LL1Analyzer", "torch._dynamo"]
_THEIRS += ["torch._inductor.compile_fx", "torch.utils.tensorboard", "transformers"]
_THEIRS += ["transformers.convert_slow_tokenizer", "transformers.integrations.mistral"]
_THEIRS += ["transformers.models.encoder_decoder", "transformers.models.t5.modeling_t5"]
_THEIRS += ["transformers.models.t5.tokenization_t5"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """status: the exit status, negative for a signal. seconds: CPU time, with its children's.
    peak_bytes: resident memory at its highest, above that of the process it was forked from."""

    status: int
    output: str
    seconds: float
    is_hung: bool
    peak_bytes: int
    commands: tuple[str, ...]
    writes_outside: tuple[str, ...]
    processes_left: bool

    @property
    def last_line(self) -> str:
        lines = self.output.strip().splitlines()
        return lines[-1] if lines else ""


@cache
def preload() -> None:
    """Import what commands import lazily."""
    for module in [*_THEIRS, *(f"cogfast.{name}" for name in _OURS)]:
        importlib.import_module(module)
    from cogfast.model.text_encoder import ByteTextEncoder

    ByteTextEncoder(max_length=8, d_model=16, d_ff=32, num_layers=1)


def drop_rights() -> None:
    """Give up root's right to read and write files of every mode, as no user has it."""
    set_rights(0)


def set_rights(rights: int) -> None:
    """Keep these capabilities of Linux alone, by bit."""
    library = ctypes.CDLL(None, use_errno=True)
    version_3 = (ctypes.c_uint32 * 2)(0x20080522, 0)
    kept = (ctypes.c_uint32 * 6)(rights, rights)
    assert library.capset(version_3, kept) == 0, os.strerror(ctypes.get_errno())


def run_case(
    call: Callable[[], int | None],
    root: Path,
    max_wait: float = MAX_WAIT,
    become: Callable[[], None] = drop_rights,
) -> Outcome:
    """Run `call` in a forked child that may write below `root` only; its result is the exit status.

    become: gives up the rights that the case does not have, or takes those of another user.
    """
    assert not dist.is_initialized(), "a fork lacks the threads of its parent's process groups"
    root = root.resolve()
    beside = _entries(root.parent)
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as report:
        child = os.fork()
        if child == 0:
            _be_child(call, root, become, output.fileno(), report.fileno())
        peak, is_hung, status, usage = _watch(child, max_wait)
        left = _stop_group(child)
        output.seek(0)
        report.seek(0)
        text, events = (f.read().decode(errors="replace") for f in (output, report))
    lines = [event.partition(" ") for event in events.splitlines()]
    start = next((int(what) for kind, _, what in lines if kind == "memory"), 0)
    outside = [what for kind, _, what in lines if kind == "wrote"]
    outside += sorted(_entries(root.parent) - beside)
    return Outcome(
        status=status,
        output=text,
        seconds=usage.ru_utime + usage.ru_stime,
        is_hung=is_hung,
        peak_bytes=max(0, peak - start),
        commands=tuple(dict.fromkeys(what for kind, _, what in lines if kind == "started")),
        writes_outside=tuple(dict.fromkeys(outside)),
        processes_left=left,
    )


def faults(outcome: Outcome, max_bytes: int = MAX_BYTES) -> list[str]:
    """List what a user must never see; empty for a success and for an error of one line."""
    found, line = [], outcome.last_line
    if "Traceback (most recent call last)" in outcome.output:
        found.append(f"traceback: {line[:200]}")
    elif outcome.is_hung:
        found.append("hangs")
    elif outcome.status not in (0, 1, 2):
        found.append(f"exit status {outcome.status}: {line[:200]}")
    elif outcome.status != 0 and not line.startswith("cogfast"):
        found.append(f"ends without a line of cogfast's: {line[:200]!r}")
    elif outcome.status != 0 and len(line) > MAX_LINE:
        found.append(f"a line of {len(line)} characters: {line[:120]}...")
    if outcome.seconds > MAX_SECONDS:
        found.append(f"took {outcome.seconds:.1f} s of CPU time")
    if outcome.peak_bytes > max_bytes:
        found.append(f"took {outcome.peak_bytes / 2**30:.1f} GiB")
    found += [f"started {command}" for command in outcome.commands]
    found += [f"wrote {path}" for path in outcome.writes_outside]
    if outcome.processes_left:
        found.append("left processes behind")
    return found


def _be_child(
    call: Callable[[], int | None], root: Path, become: Callable[[], None], output: int, report: int
) -> None:
    """Run a case in the forked process; never returns."""
    status = 1
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        sys.dont_write_bytecode = True
        scratch = root / "scratch"
        scratch.mkdir(parents=True, exist_ok=True)
        os.environ.update(dict.fromkeys(_SCRATCH, str(scratch)))
        tempfile.tempdir = None
        os.chdir(root)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        spent = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
        resource.setrlimit(resource.RLIMIT_CPU, (spent + int(2 * MAX_SECONDS),) * 2)  # endless loop
        _clear_peak()
        os.write(report, f"memory {_memory(os.getpid(), 'VmRSS:')}\n".encode())
        become()
        sys.addaudithook(_auditor(root, report))
        status = call() or 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _auditor(root: Path, report: int) -> Callable[[str, tuple], None]:
    """The hook: it writes a line for each command and each write outside of `root`."""
    inside, process = str(root) + os.sep, os.getpid()

    def is_outside(path: object) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return False  # a file descriptor: it was opened before
        text = os.path.realpath(os.fsdecode(path))
        # The index of videos is the one file that is written beside the data (docs/data.md).
        is_allowed = text.startswith("/dev/") or os.path.basename(text) == ".cogfast-index"
        return not is_allowed and not (text + os.sep).startswith(inside)

    def report_event(kind: str, what: object) -> None:
        os.write(report, f"{kind} {str(what)[:300]!r}\n".encode(errors="replace"))

    def hook(event: str, arguments: tuple) -> None:
        if event == "open":
            path, mode, flags = arguments
            is_write = (flags or 0) & _WRITE_FLAGS or set(str(mode or "")) & set("wax+")
            if is_write and is_outside(path):
                report_event("wrote", os.fsdecode(path))
        elif event in _STARTS:
            argv = arguments[1] if event == "subprocess.Popen" else arguments[0]
            name = argv[0] if isinstance(argv, list | tuple) else argv
            if os.path.basename(os.fsdecode(name)) not in COMMANDS and os.getpid() == process:
                report_event("started", f"{event} {argv}")
        elif event in _WRITES:
            for path in arguments[:2] if event in ("os.rename", "shutil.move") else arguments[:1]:
                makes_nothing = event == "os.mkdir" and os.path.isdir(path)
                if is_outside(path) and not makes_nothing:
                    report_event("wrote", f"{event} {os.fsdecode(path)}")

    return hook


def _watch(child: int, max_wait: float) -> tuple[int, bool, int, resource.struct_rusage]:
    """Peak of resident bytes, whether it had to be killed, status and usage of the child."""
    peak, is_hung, deadline, spent = 0, False, time.monotonic() + max_wait, 0.0
    while True:
        peak = max(peak, _memory(child, "VmHWM:"))
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            return peak, is_hung, os.waitstatus_to_exitcode(status), usage
        if _cpu_seconds(child) > spent + _PROGRESS:
            spent, deadline = _cpu_seconds(child), max(deadline, time.monotonic() + max_wait)
        if time.monotonic() > deadline or peak > 4 * MAX_BYTES:
            is_hung = time.monotonic() > deadline
            os.kill(child, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.02)


def _cpu_seconds(pid: int) -> float:
    """Return the processor time of a process, from the 14th and 15th field of its stat file."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _stop_group(child: int) -> bool:
    """Whether processes of the child's session still run some seconds after its end; kill them."""
    for _ in range(20):
        try:
            os.killpg(child, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    return True


def _entries(folder: Path) -> set[str]:
    return {str(path) for path in folder.iterdir()}


def _memory(process: int, field: str) -> int:
    """Bytes of a field of /proc/PID/status; 0 where the process has ended."""
    try:
        rows = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(row.split()[1]) * 1024 for row in rows if row.startswith(field)), 0)


def _clear_peak() -> None:
    """Let the peak of resident memory start at what is resident now."""
    with contextlib.suppress(OSError):  # some containers forbid it: the peak is that of the fork
        Path("/proc/self/clear_refs").write_text("5")
