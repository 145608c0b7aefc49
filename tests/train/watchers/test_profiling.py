"""args.profiling: the ranges, PyTorch's trace and table, when nsys captures, and its script."""

import dataclasses
import gzip
import json
import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg

from cogfast.cli.options import parse_train
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.distributed.step_clock import StepClock
from cogfast.train.preflight.check import check_train
from cogfast.train.watchers import profiling
from cogfast.train.watchers.profiling import Profiler, tables
from tests.support.runs import Run
from tests.support.tiny_run import ROOT

SCRIPT = ROOT / "scripts" / "profile_nsys.sh"
NSYS = ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH")


TWICE = "deepspeed.gradient_accumulation_steps=2"


@pytest.fixture(scope="module")
def profiled(shared_run: Run) -> Run:
    """A run of five steps, of two micro-batches each, of which the first and the last are not profiled."""
    return shared_run.with_args(train_iters=5, profiling=1).train(TWICE)


@pytest.fixture(scope="module")
def events(profiled: Run) -> list[dict]:
    """Return the trace's events that have a duration, by start time."""
    with gzip.open(profiled.path / "profile" / "rank0-trace.json.gz", "rt") as file:
        trace = json.load(file)
    whole = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    return sorted(whole, key=lambda event: event["ts"])


def ranges(events: list[dict]) -> list[dict]:
    return [event for event in events if event.get("cat") == "user_annotation"]


def test_ranges_of_the_trace(events: list[dict]) -> None:
    """Each range occurs as often as in the steps, and inside one of them."""
    named = Counter(event["name"] for event in ranges(events))
    steps = {f"step {i}" for i in (1, 2, 3)}
    wanted = {**dict.fromkeys(steps, 1), "log": 3}
    wanted |= dict.fromkeys(["data", "encode", "forward", "backward", "optimizer"], 6)
    assert {name: named[name] for name in wanted} == wanted
    assert {name for name in named if name.startswith("step")} == steps
    for event in ranges(events):
        if event["name"] in wanted.keys() - steps:
            outer = {
                step["name"]
                for step in ranges(events)
                if step["ts"] <= event["ts"]
                if event["ts"] + event["dur"] <= step["ts"] + step["dur"] + 0.01  # nanoseconds
            }
            assert outer & steps, event


def test_the_tables_have_ranges_and_ops(profiled: Run, events: list[dict]) -> None:
    text = (profiled.path / "profile" / "top_ops.txt").read_text()
    assert text.startswith("times are totals over 3 steps\n")
    (_, *of_ranges), (_, *tops) = rows_of(text)
    assert {row[0] for row in of_ranges} == {event["name"] for event in ranges(events)}
    assert len(tops) == 30 and {"aten::mm", "aten::copy_"} <= {row[0] for row in tops}


def rows_of(text: str) -> list[list[list]]:
    """Return the rows of each of torch's tables, with percentages and milliseconds as numbers."""
    number = lambda cell: (
        float(cell.rstrip("%ms")) if re.fullmatch(r"[\d.]+(%|ms)?", cell) else cell
    )
    split = lambda line: [number(cell) for cell in re.split(r"\s{2,}", line.strip())]
    found: list[list[list]] = []
    for line in text.splitlines()[1:]:
        if line.strip().startswith("Name "):
            found.append([])
        if re.search(r"\S {2,}\S", line) and "---" not in line:
            found[-1].append(split(line))
    return found


def test_a_profile_changes_no_number_and_comes_once(profiled: Run, run: Run) -> None:
    run = run.with_args(profiling=-1).train(TWICE, steps=5)
    assert run.losses == profiled.losses
    assert not (run.path / "profile").exists()


def test_a_run_that_is_stopped_has_its_profile(run: Run) -> None:
    """exit_interval ends it between the profiled steps."""
    run = run.with_args(profiling=1, exit_interval=2).train(TWICE, steps=5)
    text = (run.path / "profile" / "top_ops.txt").read_text()
    assert text.startswith("times are totals over 1 step\n")
    clock = run.last.engine.clock
    assert clock.part("data") is clock.part("log")  # one object that does nothing


class Cuda:
    """Stands for torch.cuda: notes what is called on it, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        note = lambda name: lambda *given: self.calls.append(" ".join([name, *given]))
        monkeypatch.setattr(torch.cuda, "synchronize", note("synchronize"))
        for name in ("start", "stop"):
            monkeypatch.setattr(torch.cuda.profiler, name, note(name))
        monkeypatch.setattr(torch.cuda.nvtx, "range_push", note("push"))
        monkeypatch.setattr(torch.cuda.nvtx, "range_pop", note("pop"))


GPU = ProcessGroups(0, 1, 0, torch.device("cuda", 0), None, is_owner=False)


def run_steps(profiler: Profiler, num_steps: int = 7) -> list[int]:
    """Run steps with a forward range; return those after which a profile was finished."""
    finished = []
    for step in range(num_steps):
        was_done = profiler.is_done
        profiler.before_step(step)
        with profiler.clock.part("forward"):
            pass
        profiler.after_step(step + 1)
        if profiler.is_done and not was_done:
            finished.append(step + 1)
    profiler.close(None)
    return finished


def test_nsys_captures_these_steps_with_nvtx_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log
) -> None:
    cuda = Cuda(monkeypatch)
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    assert run_steps(Profiler(tmp_path / "profile", GPU, 2, StepClock())) == [5]
    steps = [[f"push step {i}", "push forward", "pop", "pop"] for i in (2, 3, 4)]
    assert cuda.calls == ["synchronize", "start", *sum(steps, []), "synchronize", "stop"]
    assert not (tmp_path / "profile").exists()
    assert "NSYS_PROFILING_SESSION_ID is set, so nsys captures the profile" in log.text


def test_one_rank_of_a_machine_starts_nsys_and_only_rank_0_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = Cuda(monkeypatch)
    for name in NSYS:
        monkeypatch.delenv(name, raising=False)
    second = dataclasses.replace(GPU, rank=1, world_size=4, local_rank=1)
    assert run_steps(Profiler(tmp_path / "profile", second, 2, StepClock())) == [5]
    assert "push forward" in cuda.calls and not {"start", "stop"} & set(cuda.calls)
    other_machine = dataclasses.replace(second, rank=2, local_rank=0)
    run_steps(Profiler(tmp_path / "profile", other_machine, 2, StepClock()))
    assert {"start", "stop"} <= set(cuda.calls)
    assert not (tmp_path / "profile").exists()


def test_a_step_that_a_run_does_not_reach_is_logged(tmp_path: Path, caplog) -> None:
    run_steps(Profiler(tmp_path, GPU, 7, StepClock()), num_steps=7)
    assert "args.profiling=7: this run did not reach that step" in caplog.text


def test_a_real_limit_on_files_leaves_no_part_of_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog, file_limit
) -> None:
    """PyTorch itself does not notice that it could not write its trace."""
    on_cpu = dataclasses.replace(GPU, device=torch.device("cpu"))
    for name in NSYS:
        monkeypatch.delenv(name, raising=False)
    profiler = Profiler(tmp_path / "profile", on_cpu, 2, StepClock())
    write = profiler._write

    def write_on_full_disk(trace: torch.profiler.profile) -> None:
        with file_limit(100):
            write(trace)

    monkeypatch.setattr(profiler, "_write", write_on_full_disk)
    assert run_steps(profiler) == [5]
    warnings = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1 and re.match("profile: .*cannot be written", warnings[0]), warnings
    assert list((tmp_path / "profile").iterdir()) == []


def test_tables_of_a_gpu_count_kernels() -> None:
    """The time on the device by kernel, without the ranges that lie over the kernels."""

    def event(key: str, device: DeviceType, is_range: bool, host: int, gpu: int, count: int):
        average = FunctionEventAvg()
        times = {"cpu_time_total": host, "device_time_total": gpu}
        vars(average).update(times, **{f"self_{name}": time for name, time in times.items()})
        vars(average).update(key=key, count=count, device_type=device, use_device="cuda")
        vars(average).update(is_user_annotation=is_range, overload_name="", node_id=-1)
        return average

    cpu, gpu = DeviceType.CPU, DeviceType.CUDA
    events = [
        event("aten::mm", cpu, False, 900, 6000, 6),
        event("forward", gpu, True, 0, 7000, 3),
        event("forward", cpu, True, 2000, 0, 3),
        event("gemm", gpu, False, 0, 6000, 6),
        event("norm" * 30, gpu, False, 0, 2000, 2),
    ]
    text = tables(events, 3)
    assert text.startswith("times are totals over 3 steps\n")
    of_ranges, of_kernels = rows_of(text)
    assert of_ranges[0][6:9] == ["Self CUDA", "Self CUDA %", "CUDA total"]
    assert [(row[0], row[4], row[8], row[10]) for row in of_ranges[1:]] == [
        ("forward", 2.0, 0, 3),
        ("forward", 0, 7.0, 3),
    ]
    assert [(row[0], row[6], row[7], row[10]) for row in of_kernels[1:]] == [
        ("gemm", 6.0, 75.0, 6),
        ("norm" * 17 + "n...", 2.0, 25.0, 2),
    ]


def test_sats_flag_and_value_work(run: Run) -> None:
    run = run.with_args(profiling=-1)
    check_train(run.config().run)
    request = parse_train(["--base", str(run.base), "--profiling", "-1"])
    assert request.overrides == ["args.profiling=-1"]
    assert run.config(*request.overrides).args.profiling == -1


FAKE_NSYS = """#! /bin/bash
printf '%s\\0' "$@" >> "$RECORD"; printf '\\n' >> "$RECORD"
for word in "$@"; do case $word in
    --output=*) [ "$1" = profile ] && [ -z "${NO_REPORT:-}" ] && touch "${word#*=}.nsys-rep" ;;
    --report=nvtx_gpu_proj_sum) exit 1 ;;
    --report=*) echo "the report ${word#*=}" ;;
esac; done
exit 0
"""


def run_script(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    (folder / "bin").mkdir(exist_ok=True)
    environment = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "RECORD": str(folder / "record")}
    environment |= {"OUT": str(folder / "out" / "report"), **variables}
    return subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True)


def fake_nsys(folder: Path) -> None:
    program = folder / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(FAKE_NSYS)
    program.chmod(0o755)


@pytest.mark.parametrize("processes", [1, 8])
def test_script_runs_nsys_around_a_launch_and_prints_reports(
    tmp_path: Path, processes: int
) -> None:
    fake_nsys(tmp_path)
    arguments = ["--base", "a b.yaml", "c.yaml", "args.load=x y"]
    done = run_script(tmp_path, *arguments, NPROC=str(processes), START="20")
    assert done.returncode == 0, done.stderr
    capture, *reports = [
        line.split("\0")[:-1] for line in (tmp_path / "record").read_text().splitlines()
    ]
    report = tmp_path / "out" / "report"
    # The profiler starts and ends the capture.
    assert {"--capture-range=cudaProfilerApi", "--capture-range-end=stop"} <= set(capture)
    launch = ["python"] if processes == 1 else ["torchrun", "--standalone", "--nproc_per_node=8"]
    start, at = capture.index(f"--output={report}") + 1, capture.index("train")
    assert capture[start:at] == [*launch, "-m", "cogfast"]
    request = parse_train(capture[at + 1 :])
    assert request.base == ["a b.yaml", "c.yaml"]
    end = f"args.exit_interval={20 + profiling.NUM_STEPS}"
    assert set(request.overrides) == {"args.load=x y", "args.profiling=20", end}
    assert len(reports) == 5 and {words[-1] for words in reports} == {f"{report}.nsys-rep"}
    assert done.stdout.count("the report ") == 4
    assert done.stdout.endswith(f"\n{report}.nsys-rep\n")
    assert done.stderr == "nvtx_gpu_proj_sum: this version of nsys lacks this report\n"


def test_script_says_what_is_missing_in_one_line(tmp_path: Path) -> None:
    done = run_script(tmp_path, "--base", "a.yaml", START="7")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert re.search("nsys is not on PATH; install NVIDIA Nsight.*args.profiling=7`", done.stderr)
    (tmp_path / "bin").rmdir()
    fake_nsys(tmp_path)
    done = run_script(tmp_path, "--base", "a.yaml", NO_REPORT="1")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "no report: the run ended before step 10, or found no GPU" in done.stderr


def test_names_of_environment_are_those_that_the_profiler_looks_for() -> None:
    assert profiling._NSYS == NSYS
    assert not set(NSYS) & set(os.environ)
