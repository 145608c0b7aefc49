"""args.profiling: the ranges, PyTorch's trace and table, when nsys captures, and its script."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg

from cogfast.cli.options import parse_train
from cogfast.config import load_config
from cogfast.config.arguments import TrainArguments
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.distributed.step_clock import CLOCK
from cogfast.train.preflight.check import check_train
from cogfast.train.trainer import Trainer
from cogfast.train.watchers import profiling
from cogfast.train.watchers.profiling import Profiler, tables
from tests.support.tiny_run import ROOT, losses, run_folder, write_config

SCRIPT = ROOT / "scripts" / "profile_nsys.sh"
NSYS = ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH")


def train(folder: Path, data: Path, *arguments: str, **args: object) -> tuple[Path, Trainer]:
    args = {"train_iters": 4, "activation_checkpointing": "full", **args}
    base = write_config(folder / "base.yaml", data, **args)
    trainer = Trainer(load_config([base], arguments))
    trainer.train()
    return run_folder(folder / "runs"), trainer


@pytest.fixture(scope="module")
def profiled(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, of two micro-batches each, with the second and the third profiled."""
    args = {"profiling": 1, "profiling_steps": 2, "profiling_blocks": True}
    folder = tmp_path_factory.mktemp("profiled")
    arguments = ["deepspeed.gradient_accumulation_steps=2"]
    run, trainer = train(folder, data, *arguments, **args)
    blocks = trainer.engine.transformer.blocks
    assert all(block._compiled_call_impl is None for block in blocks)
    return run


@pytest.fixture(scope="module")
def events(profiled: Path) -> list[dict]:
    """Return the trace's events that have a duration, by start time."""
    with gzip.open(profiled / "profile" / "rank0-trace.json.gz", "rt") as file:
        trace = json.load(file)
    whole = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    return sorted(whole, key=lambda event: event["ts"])


def ranges(events: list[dict]) -> list[dict]:
    return [event for event in events if event.get("cat") == "user_annotation"]


def test_ranges_of_the_trace(events: list[dict]) -> None:
    """Each range occurs as often as in the step, and inside its parent."""
    named = Counter(event["name"] for event in ranges(events))
    wanted = {"step 1": 1, "step 2": 1, "log": 2}
    wanted |= dict.fromkeys(["data", "encode", "forward", "backward", "optimizer"], 4)
    for i in range(2):
        wanted |= dict.fromkeys([f"block {i} {w}" for w in ("forward", "recompute", "backward")], 4)
    assert {name: named[name] for name in wanted} == wanted
    assert not [name for name in named if re.match("step [^12]", name)]

    def parents(event: dict) -> set[str]:
        end = event["ts"] + event["dur"]
        return {
            outer["name"]
            for outer in ranges(events)
            if outer is not event and outer["ts"] <= event["ts"]
            if end <= outer["ts"] + outer["dur"] + 0.01  # the file has nanoseconds
        }

    for event in ranges(events):
        if event["name"] in wanted and not event["name"].startswith("step"):
            assert parents(event) & {"step 1", "step 2"}, event
        block = re.fullmatch(r"(block \d) (\w+)", event["name"])
        if block is not None:
            outer = {"forward": "forward", "recompute": f"{block[1]} backward"}
            assert outer.get(block[2], "backward") in parents(event), event
    backward = [event for event in ranges(events) if event["name"].endswith(" backward")]
    names = [event["name"] for event in backward]
    assert names == ["block 1 backward", "block 0 backward"] * 4
    (line,) = {event["tid"] for event in backward}
    assert line not in {event["tid"] for event in events if event not in backward}


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


def test_table_of_ops_is_the_trace_summed_up(profiled: Path, events: list[dict]) -> None:
    """Counts and self times against those of the trace: an op's time less that of what it calls."""
    text = (profiled / "profile" / "top_ops.txt").read_text()
    assert text.startswith("times are totals over 2 steps\n")
    stacks, parents, children = {}, [], Counter()
    # the ranges of blocks' backward passes stand on a line of their own
    ops = [event for event in events if event.get("cat") in ("cpu_op", "user_annotation")]
    for i, event in enumerate(ops):
        stack = stacks.setdefault(event["tid"], [])
        while stack and event["ts"] >= ops[stack[-1]]["ts"] + ops[stack[-1]]["dur"] - 1e-3:
            stack.pop()
        parents.append(stack[-1] if stack else None)
        children[parents[-1]] += 1
        stack.append(i)
    self_time, count = Counter(), Counter()
    for event, parent in zip(ops, parents, strict=True):
        name, outer = event["name"], None if parent is None else ops[parent]["name"]
        if outer == name and children[parent] == 1:
            continue  # an op that only calls itself, on its way through the dispatcher
        self_time[outer] -= event["dur"]
        self_time[name] += event["dur"]
        count[name] += 1

    (_, *of_ranges), (header, *tops) = rows_of(text)
    assert header[:3] == ["Name", "Self CPU %", "Self CPU"] and len(tops) == 30
    assert [row[2] for row in tops] == sorted((row[2] for row in tops), reverse=True)
    whole = float(re.findall(r"Self CPU time total: ([\d.]+)ms", text)[1])
    for name, share, ms, *_, number in tops:
        assert number == count[name], name
        assert ms == pytest.approx(self_time[name] / 1e3, rel=0.02, abs=0.005), name
        assert share == pytest.approx(100 * ms / whole, abs=0.05)
    assert {"aten::mm", "aten::copy_"} <= {row[0] for row in tops}
    assert {row[0] for row in of_ranges} == {event["name"] for event in ranges(events)}
    for name, _, _, _, ms, _, number in of_ranges:
        durations = [event["dur"] for event in ranges(events) if event["name"] == name]
        assert number == len(durations)
        assert ms == pytest.approx(sum(durations) / 1e3, abs=0.01)


def test_a_profile_changes_no_number_and_comes_once(
    profiled: Path, data: Path, tmp_path: Path
) -> None:
    run, _ = train(tmp_path, data, "deepspeed.gradient_accumulation_steps=2", profiling=-1)
    assert losses(run) == losses(profiled)
    assert not (run / "profile").exists()


def test_compiled_blocks_have_ranges_and_a_run_that_is_stopped_has_its_profile(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled call stands for any that nn.Module.compile leaves; exit_interval ends the run
    between the profiled steps."""
    calls = []

    def compiled(transformer: nn.Module) -> None:
        for block in transformer.blocks:
            block._compiled_call_impl = lambda *x, b=block: (calls.append(b), b._call_impl(*x))[1]

    monkeypatch.setattr("cogfast.train.assembly.compile_blocks", compiled)
    args = {"compile": True, "profiling": 1, "profiling_blocks": True, "exit_interval": 2}
    run, trainer = train(tmp_path, data, **args)
    blocks = list(trainer.engine.transformer.blocks)
    once = [*blocks, *reversed(blocks)]  # forward, and recomputed
    assert calls == once * 2
    text = (run / "profile" / "top_ops.txt").read_text()
    assert text.startswith("times are totals over 1 step\n") and re.search(
        r"block 1 recompute .* 1 +\n", text
    )
    assert blocks[0]._compiled_call_impl.__name__ == "<lambda>"


class Cuda:
    """Stands for torch.cuda: notes what is called on it, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        note = lambda name: lambda *given: self.calls.append(" ".join([name, *given]))
        cudart = SimpleNamespace(cudaProfilerStart=note("start"), cudaProfilerStop=note("stop"))
        monkeypatch.setattr(torch.cuda, "synchronize", note("synchronize"))
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
        monkeypatch.setattr(torch.cuda.nvtx, "range_push", note("push"))
        monkeypatch.setattr(torch.cuda.nvtx, "range_pop", note("pop"))


GPU = ProcessGroups(0, 1, 0, torch.device("cuda", 0), None, is_owner=False)


def make_profiler(folder: Path, groups: ProcessGroups, **args: object) -> Profiler:
    values = TrainArguments(**{"profiling": 2, "profiling_steps": 2, "log_interval": 100, **args})
    return Profiler(folder, groups, nn.ModuleList([nn.Linear(2, 2)]), values, num_steps=9)


def run_steps(profiler: Profiler, num_steps: int = 6) -> list[int]:
    """Steps with a forward range; returns those after which a profile was finished."""
    finished = []
    for step in range(num_steps):
        was_captured = profiler.has_captured and not profiler.is_capturing
        profiler.before_step(step)
        with CLOCK.part("forward"):
            pass
        profiler.after_step(step + 1)
        if profiler.has_captured and not profiler.is_capturing and not was_captured:
            finished.append(step + 1)
    profiler.close(None)
    return finished


def test_nsys_captures_these_steps_with_nvtx_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    caplog.set_level("INFO")
    cuda = Cuda(monkeypatch)
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    assert run_steps(make_profiler(tmp_path / "profile", GPU)) == [4]
    steps = [[f"push step {i}", "push forward", "pop", "pop"] for i in (2, 3)]
    assert cuda.calls == ["synchronize", "start", *steps[0], *steps[1], "synchronize", "stop"]
    assert not (tmp_path / "profile").exists()
    assert "NSYS_PROFILING_SESSION_ID is set, so nsys captures the profile" in caplog.text


def test_one_rank_of_a_machine_starts_nsys_and_only_rank_0_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = Cuda(monkeypatch)
    for name in NSYS:
        monkeypatch.delenv(name, raising=False)
    second = dataclasses.replace(GPU, rank=1, world_size=4, local_rank=1)
    assert run_steps(make_profiler(tmp_path / "profile", second)) == [4]
    assert "push forward" in cuda.calls and not {"start", "stop"} & set(cuda.calls)
    other_machine = dataclasses.replace(second, rank=2, local_rank=0)
    run_steps(make_profiler(tmp_path / "profile", other_machine))
    assert {"start", "stop"} <= set(cuda.calls)
    assert not (tmp_path / "profile").exists()


def test_outside_of_the_capture_a_range_is_one_object_that_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = Cuda(monkeypatch)
    for off in (None, -1):
        profiler = make_profiler(tmp_path, GPU, profiling=off)
        assert CLOCK.part("data") is CLOCK.part("log")
        assert run_steps(profiler) == [] and cuda.calls == []


def test_a_step_that_a_run_does_not_reach_is_logged(tmp_path: Path, caplog) -> None:
    run_steps(make_profiler(tmp_path, GPU, profiling=7), num_steps=6)
    assert "args.profiling=7: this run did not reach that step" in caplog.text


def test_a_full_disk_costs_the_profile_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    (tmp_path / "profile").touch()  # a file where the folder would be
    on_cpu = dataclasses.replace(GPU, device=torch.device("cpu"))
    for name in NSYS:
        monkeypatch.delenv(name, raising=False)
    assert run_steps(make_profiler(tmp_path / "profile", on_cpu)) == [4]
    assert "training continues" in caplog.text


@pytest.mark.parametrize("limit", [100, 1000])
def test_a_real_limit_on_files_leaves_no_part_of_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog, file_limit, limit: int
) -> None:
    """PyTorch itself does not notice that it could not write its trace."""
    on_cpu = dataclasses.replace(GPU, device=torch.device("cpu"))
    for name in NSYS:
        monkeypatch.delenv(name, raising=False)
    profiler = make_profiler(tmp_path / "profile", on_cpu)
    write = profiler._write

    def write_on_full_disk(trace: torch.profiler.profile) -> None:
        with file_limit(limit):
            write(trace)

    monkeypatch.setattr(profiler, "_write", write_on_full_disk)
    assert run_steps(profiler) == [4]
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
    text = tables(
        [
            event("aten::mm", cpu, False, 900, 6000, 6),
            event("forward", gpu, True, 0, 7000, 3),
            event("forward", cpu, True, 2000, 0, 3),
            event("gemm", gpu, False, 0, 6000, 6),
            event("norm" * 30, gpu, False, 0, 2000, 2),
        ],
        3,
    )
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


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["args.profiling=-2"], "args.profiling=-2 must be a whole number from -1 to"),
        (["args.profiling=4"], "args.profiling=4 must be below args.train_iters=4, where"),
        (
            ["args.profiling=1", "args.profiling_steps=0"],
            "args.profiling_steps=0 must be a whole number from 1 to 1000",
        ),
    ],
)
def test_bad_values_are_refused(
    tmp_path: Path, data: Path, arguments: list[str], text: str
) -> None:
    base = write_config(tmp_path / "base.yaml", data)
    with pytest.raises(ValueError, match=f"command line: {text}"):
        check_train(load_config([base], arguments))


def test_sats_flag_and_value_work(tmp_path: Path, data: Path) -> None:
    base = write_config(tmp_path / "base.yaml", data, profiling=-1)
    check_train(load_config([base], []))
    request = parse_train(["--base", str(base), "--profiling", "-1"])
    assert request.overrides == ["args.profiling=-1"]
    assert load_config([base], request.overrides).args.profiling == -1


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
    arguments = ["--base", "a b.yaml", "c.yaml", "args.load=x y", "--seed", "3"]
    done = run_script(
        tmp_path, *arguments, NPROC=str(processes), START="20", STEPS="4", BLOCKS="true"
    )
    assert done.returncode == 0, done.stderr
    capture, *reports = [
        line.split("\0")[:-1] for line in (tmp_path / "record").read_text().splitlines()
    ]
    start = capture.index("python" if processes == 1 else "torchrun")
    report = tmp_path / "out" / "report"
    assert capture[:start] == [
        "profile",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--trace=cuda,nvtx,osrt,cudnn,cublas",
        "--cuda-memory-usage=true",
        "--sample=none",
        "--cpuctxsw=none",
        f"--output={report}",
    ]
    launch = ["python"] if processes == 1 else ["torchrun", "--standalone", "--nproc_per_node=8"]
    at = capture.index("train")
    assert capture[start:at] == [*launch, "-m", "cogfast"]
    request = parse_train(capture[at + 1 :])
    assert request.base == ["a b.yaml", "c.yaml"]
    assert set(request.overrides) == {
        "args.seed=3",
        "args.load=x y",
        "args.profiling=20",
        "args.profiling_steps=4",
        "args.profiling_blocks=true",
        "args.exit_interval=24",
    }
    names = ["nvtx_sum", "nvtx_gpu_proj_sum", "cuda_gpu_kern_sum", "cuda_gpu_mem_time_sum"]
    names.append("cuda_api_sum")
    assert reports == [["stats", f"--report={name}", f"{report}.nsys-rep"] for name in names]
    shown = [f"the report {name}" for name in names if name != "nvtx_gpu_proj_sum"]
    assert done.stdout.splitlines() == [*shown, f"{report}.nsys-rep"]
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
