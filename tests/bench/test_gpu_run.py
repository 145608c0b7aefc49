"""Pieces of bench.gpu_run at small sizes on the CPU, and the command that runs them."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from bench import gpu_run
from bench.checks import kernels_on_device
from bench.checks.goldens_on_device import (
    CASES,
    GOLDEN,
    Answers,
    answer,
    build,
    compare_bf16,
    compare_float32,
)
from bench.checks.kernels_on_device import run_kernel_tests
from bench.checks.tensor_parallel_on_device import find_differences, join_ranks
from bench.checks.training_on_device import judge
from bench.harness.outcome import Outcome, Settings
from bench.harness.timing import spread, time_calls
from bench.kernel_ops import attention_backends, products
from bench.kernel_ops.attention_backends import measure_backend
from cogfast.model.weights.shard import Shard
from tests.support.ranks.forked import run_forked

ROOT = Path(__file__).resolve().parents[2]
TINY = Settings(torch.device("cpu"), is_tiny=True)


def run_piece(piece: str, folder: Path, status: int = 0) -> dict:
    """Run `python -m bench.gpu_run PIECE` in this process; return its report."""
    argv = [piece, "--device", "cpu", "--tiny", "--out", str(folder)]
    assert gpu_run.main(argv) == status
    report = json.loads((folder / f"{piece}.json").read_text())
    assert report["piece"] == piece and report["is_tiny"]
    assert status or ("error" not in report and report["problems"] == [])
    return report


# Pieces are processes that this one forks, with as many minutes as they need beside other jobs.
SHORT = """
import subprocess, sys
from bench import gpu_run
from tests.support.ranks.forked import ForkedPopen

subprocess.Popen = ForkedPopen
gpu_run.PARTS["short"] = dict.fromkeys(gpu_run.PARTS["short"])
sys.exit(gpu_run.main())
"""
# kernel_tests starts seven runs of pytest, op_times compiles C++, run is data_runs on fewer clips, and 2b and 5b are cases of bench.step.
LEFT_OUT = ("2b", "5b", "op_times", "kernel_tests", "run")


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `bench.gpu_run short`, which finds some pieces there."""
    folder = tmp_path_factory.mktemp("short")
    for name in LEFT_OUT:
        report = {"piece": name, "is_complete": True, "is_tiny": True, "problems": []}
        (folder / f"{name}.json").write_text(json.dumps(report))
    words = ["short", "--device", "cpu", "--tiny", "--minutes", "600", "--out", str(folder)]
    done = run_forked(["-c", SHORT, *words])
    assert done.returncode == 0 and done.stdout.endswith("all well\n"), done.stdout
    return folder


def report_of(short: Path, piece: str) -> dict:
    report = json.loads((short / f"{piece}.json").read_text())
    assert report["piece"] == piece and report["is_tiny"] and report["is_complete"]
    assert report["problems"] == []
    return report


def test_the_pieces_of_short_are_measured(short: Path) -> None:
    for piece in gpu_run.PARTS["short"].keys() - LEFT_OUT:
        report = report_of(short, piece)
        assert report["numbers"] if piece == "facts" else report["rows"], piece
    runs = report_of(short, "train")["rows"]
    assert [row["num_steps"] for row in runs] == [20, 20, 20]


def test_rates_follow_from_times_and_sizes(short: Path) -> None:
    copy, product = report_of(short, "rates")["rows"]
    assert copy["gb_per_s"] == pytest.approx(2 * 8e6 / (copy["median_ms"] * 1e-3) / 1e9)
    assert product["tflop_per_s"] == pytest.approx(
        2 * 256**3 / (product["median_ms"] * 1e-3) / 1e12
    )
    for row in (copy, product):
        assert row["p10_ms"] <= row["median_ms"] <= row["p90_ms"] and row["num_samples"] >= 5


def test_products_of_8_bits_are_timed_and_checked(tmp_path: Path, monkeypatch) -> None:
    rows = run_piece("products", tmp_path)["rows"]
    keys = [(row["linear"], row["product"], row["kind"]) for row in rows]
    assert len(set(keys)) == len(keys) == 4 * (2 * 3 + 1)
    medians = dict(zip(keys, (row["median_ms"] for row in rows), strict=True))
    for row in rows:
        assert 0 < row["error"] < 0.003  # bf16's rounding
        bf16 = medians[row["linear"], row["product"], "bf16"]
        assert row["vs bf16"] == pytest.approx(bf16 / row["median_ms"])
    # Scales of other rows
    right = products.quantize_rows
    swapped = lambda weight, dtype: (right(weight, dtype)[0], right(weight, dtype)[1].flip(0))
    monkeypatch.setattr(products, "quantize_rows", swapped)
    problems = run_piece("products", tmp_path, status=1)["problems"]
    assert len(problems) == 4 * 2 * 2 and "64 qkv forward int8: " in problems[0]


def test_attention_counts_and_compares(short: Path) -> None:
    found = report_of(short, "attention")["rows"]
    rows = {(r["backend"], r["shape_bshd"][1]): r for r in found}
    # math at one shape; the default, six by name and three of sparse attention at two
    assert len(rows) == 1 + 10 * 2
    flash = rows["flash", 160]
    forward_s, backward_s = flash["forward_median_ms"] * 1e-3, flash["backward_median_ms"] * 1e-3
    assert flash["forward_tflop_per_s"] == pytest.approx(4 * 160**2 * 3 * 64 / forward_s / 1e12)
    assert flash["backward_tflop_per_s"] == pytest.approx(10 * 160**2 * 3 * 64 / backward_s / 1e12)
    assert "flash_attention" in flash["forward_kernel"]
    assert "flash_attention" in flash["backward_kernel"]
    for name in ("flash", "default", "sparse:0", "sparse:0.8"):
        row = rows[name, 144]
        for tensor in ("out", "dq", "dk", "dv"):  # bf16: not exact, and not far off
            assert 1e-4 < row[f"{tensor}_relative_error"] <= row[f"{tensor}_relative_limit"] < 0.03
    for name in ("cudnn", "efficient", "fa3", "fa4"):
        assert rows[name, 160]["unavailable"] == "it needs a CUDA GPU"


def test_goldens_within_their_tolerance(short: Path) -> None:
    report = report_of(short, "goldens")
    assert report["numbers"]["float32_tolerance_factor"] == 1.0  # the CPU's own
    rows = {row["case"]: row for row in report["rows"]}
    assert len(rows) == 2 * len(CASES)
    for case in CASES:
        exact, rounded = rows[f"{case} float32"], rows[f"{case} bfloat16"]
        assert exact["output_largest_error"] <= 1e-5 and exact["num_gradients"] > 50
        assert exact["gradient_worst_error_of_largest"] <= 1e-5
        assert 1e-3 < rounded["output_relative_error"] < 0.02
        assert rounded["output_relative_error"] == rounded["output_relative_error_of_cpu"]


def replace_piece(monkeypatch, name: str, function) -> None:
    load = gpu_run.load_piece
    monkeypatch.setattr(gpu_run, "load_piece", lambda n: function if n == name else load(n))


# A piece's process, which gets the path of its file: what it does after its first row.
KEPT = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
report = {"piece": "rates", "is_tiny": True, "is_complete": False, "rows": [1], "problems": []}
path = Path(sys.argv[1])
write = lambda **more: path.write_text(json.dumps({**report, **more}))
write()
"""


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "its process ended with status -11"),
        ("child = subprocess.Popen(['sleep', '60']); write(child=child.pid); time.sleep(60)", ""),
        ("write(is_complete=True)", None),
    ],
    ids=["crash", "hang", "well"],
)
def test_a_piece_that_crashes_or_hangs_keeps_its_rows_and_the_next_runs(
    end: str, message: str | None, tmp_path: Path, monkeypatch, capsys
) -> None:
    real, started = subprocess.Popen, []

    def start(command: list[str], **named) -> subprocess.Popen:
        started.append(command)
        path = tmp_path / f"{command[3]}.json"
        if command[3] == "facts":
            return real([sys.executable, "-c", KEPT + "write(is_complete=True)", str(path)])
        return real([sys.executable, "-c", f"{KEPT}\n{end}", str(path)], **named)

    monkeypatch.setattr(subprocess, "Popen", start)
    is_hanging = "child" in end
    pieces = {"rates": 2 / 60 if is_hanging else 1.0, "facts": 1.0}
    monkeypatch.setitem(gpu_run.PARTS, "short", pieces)
    monkeypatch.setattr(gpu_run, "_LEAST_SECONDS", 0.0)
    (tmp_path / "rates.json").write_text('{"rows": ["of an earlier run"], "problems": []}')
    argv = ["short", "--device", "cpu", "--tiny", "--out", str(tmp_path)]
    assert gpu_run.main(argv) == (0 if end == "write(is_complete=True)" else 1)
    assert [command[3] for command in started] == ["rates", "facts"]
    report = json.loads((tmp_path / "rates.json").read_text())
    assert len(report["rows"]) == 1
    assert ("error" in report) == (message is not None)
    if message is not None:
        assert message in report["error"]["message"]
        assert capsys.readouterr().out.splitlines()[-1] == "failed: rates"
    if is_hanging:
        assert report["error"]["message"] == "it took more than 0.0 minutes"
        wait_until_gone(report["child"])
        return
    # When it is given again, the command runs only what is not complete.
    before = len(started)
    gpu_run.main(argv)
    again = [command[3] for command in started[before:]]
    assert again == ([] if report["is_complete"] else ["rates"])


def wait_until_gone(pid: int) -> None:
    for _ in range(1000):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.01)
    pytest.fail(f"process {pid} is still there")


class Clock:
    """A clock that pieces move on by a share of the minutes that they get."""

    def __init__(self, monkeypatch, share: float) -> None:
        self.seconds, self.given = 0.0, {}
        monkeypatch.setattr(gpu_run, "time", SimpleNamespace(perf_counter=lambda: self.seconds))

        def run(name: str, arguments, minutes: float) -> bool:
            self.given[name] = minutes
            self.seconds += 60 * minutes * share
            report = {"is_complete": True, "is_tiny": True, "problems": []}
            (arguments.out / f"{name}.json").write_text(json.dumps(report))
            return True

        monkeypatch.setattr(gpu_run, "run_apart", run)


def test_short_in_several_commands_measures_every_piece_once(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    clock, argv = Clock(monkeypatch, share=1.0), ["short", "--device", "cpu", "--tiny"]
    argv += ["--out", str(tmp_path), "--minutes", "9"]
    seen: list[str] = []
    for _ in range(3):
        before = clock.seconds
        assert gpu_run.main(argv) == 0
        seen += clock.given
        clock.given.clear()
        assert clock.seconds - before <= 9 * 60
    assert sorted(seen) == sorted(gpu_run.PARTS["short"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "all well"
    assert seen[0] == "facts" and f"  {tmp_path}/facts.json is complete" in "\n".join(lines)


def test_a_piece_that_raises_keeps_its_rows(tmp_path: Path, monkeypatch, capsys) -> None:
    def end(settings: Settings) -> Outcome:
        settings.keep(Outcome(rows=[{"ms": 1.0}], shown=("ms",)))
        raise KeyError("no such thing")

    replace_piece(monkeypatch, "rates", end)
    report = run_piece("rates", tmp_path, status=1)
    assert report["rows"] == [{"ms": 1.0}] and not report["is_complete"]
    assert report["error"]["type"] == "KeyError"
    assert report["error"]["trace"][-1] == "KeyError: 'no such thing'"
    assert capsys.readouterr().out.splitlines()[-1] == "failed: rates"


def test_pieces_beyond_the_minutes_are_skipped(tmp_path: Path, monkeypatch, capsys) -> None:
    clock = Clock(monkeypatch, share=0.7)
    monkeypatch.setitem(
        gpu_run.PARTS, "short", {"rates": 2.0, "goldens": 2.0, "facts": 2.0, "train": 0.4}
    )
    (tmp_path / "facts.json").write_text('{"of": "an earlier call"}')
    argv = ["short", "--device", "cpu", "--tiny", "--out", str(tmp_path), "--minutes", "2.5"]
    assert gpu_run.main(argv) == 0
    assert clock.given == pytest.approx({"rates": 2.0, "train": 0.4})
    note = json.loads((tmp_path / "goldens.json").read_text())
    assert note["piece"] == "goldens" and note["skipped"] == "66 s left; run this piece alone"
    assert (tmp_path / "facts.json").read_text() == '{"of": "an earlier call"}'
    assert capsys.readouterr().out.splitlines()[-2:] == ["skipped: goldens, facts", "all well"]


@pytest.mark.soak  # it starts seven runs of pytest
def test_kernel_tests_are_counted_and_failures_reported(monkeypatch, tmp_path) -> None:
    """pytest itself runs on files that pass, fail, skip, break and crash."""
    folder = tmp_path / "tests"
    folder.mkdir()
    several = """import pytest
def test_gpu_good(): pass
def test_gpu_bad(): assert 3e-2 <= 1e-2, "error too large"
@pytest.mark.skip
def test_gpu_absent(): pass
def test_gpu_broken(no_such_fixture): pass
def test_of_a_cpu(): assert False
"""
    files = {
        "test_several.py": several,
        "test_crash.py": "import os\ndef test_gpu(): os.abort()\n",
        "test_slow.py": "import time\ndef test_gpu(): time.sleep(60)\n",
        "test_good.py": "def test_gpu(): pass\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(kernels_on_device, "_ROOT", tmp_path)
    monkeypatch.setattr(kernels_on_device, "_TESTS", tuple(files))
    monkeypatch.setattr(kernels_on_device, "_FILE_SECONDS", 10)
    kept: list[Outcome] = []
    outcome = run_kernel_tests(replace(TINY, keep=kept.append))
    assert outcome.numbers == {"passed": 2, "failed": 2, "skipped": 1}
    assert [len(each.rows) for each in kept] == [1, 1, 1, 2] and kept[-1] == outcome
    bad, broken, crash, slow = outcome.problems
    assert bad.startswith("tests/test_several.py::test_gpu_bad: AssertionError: error too")
    assert broken.startswith("tests/test_several.py::test_gpu_broken: ")
    assert crash.startswith("test_crash.py: pytest counted no tests, exit status -6")
    assert slow.startswith("test_slow.py: ") and "timed out after" in slow
    late = run_kernel_tests(replace(TINY, deadline=0.0))
    assert len(late.problems) == len(files) and late.problems[0].endswith("left out, no time")


def scaled_wrongly(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.15).transpose(1, 2)


def with_a_wrong_gradient(q, k, v):
    """Return the right output, but halve the gradient of k."""
    q, k, v = (x.transpose(1, 2) for x in (q, k + (k.detach() - k) / 2, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def breaking(q, k, v):
    raise RuntimeError("CUDA error: an illegal memory access")


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (scaled_wrongly, "out of head 0: relative error"),
        (with_a_wrong_gradient, "dk of head 1: relative error 5"),  # half is missing: 5.0e-01
        (breaking, "RuntimeError: CUDA error: an illegal memory access"),
    ],
    ids=["scale", "gradient", "breaks"],
)
def test_a_wrong_attention_is_reported(attention, message) -> None:
    torch.manual_seed(0)
    row, problems = measure_backend(TINY, "wrong", (1, 64, 2, 64), attention)
    assert any(message in text and text.startswith("wrong [1, 64, 2, 64]") for text in problems)
    assert row["backend"] == "wrong"


@pytest.mark.parametrize("how", ["crash", "hang"])
def test_a_package_that_breaks_costs_only_its_own_rows(how: str, monkeypatch) -> None:
    """The first row of a process that crashes or hangs is kept; the other backends are measured."""
    asked, kept = [], []
    right = attention_backends.reason_unavailable
    here = lambda name, *rest: None if name == "fa4" else right(name, *rest)
    monkeypatch.setattr(attention_backends, "reason_unavailable", here)
    for name in {*attention_backends.ATTENTION} - {"default", "cudnn", "fa4"}:
        monkeypatch.delitem(attention_backends.ATTENTION, name)
    row = {"backend": "fa4", "shape_bshd": [1, 160, 3, 64], "forward_median_ms": 1.0}
    text = f"compiling\nrow: {json.dumps({'row': row, 'problems': ['dk is off']})}\n"

    def run(command: list[str], **named) -> subprocess.CompletedProcess:
        asked.append(command[2:])
        if how == "hang":
            raise subprocess.TimeoutExpired(command, named["timeout"], output=text.encode())
        return subprocess.CompletedProcess(command, -11, text)

    monkeypatch.setattr(subprocess, "run", run)
    outcome = attention_backends.measure_attention(replace(TINY, keep=kept.append))
    module = "bench.kernel_ops.attention_backends"
    assert asked == [[module, "fa4", "--device", "cpu", "--tiny"]]
    assert outcome.rows[-2] == row
    end = (
        "its process took more than 100 s" if how == "hang" else "its process ended with status -11"
    )
    assert outcome.rows[-1] == {"backend": "fa4", "shape_bshd": [1, 144, 2, 64], "error": end}
    assert outcome.problems == ["dk is off", f"fa4 [1, 144, 2, 64]: {end}"]
    assert [len(each.rows) for each in kept] == list(range(1, len(outcome.rows) + 1))
    # Rows of PyTorch's own come first.
    assert [r["backend"] for r in outcome.rows[:3]] == ["default", "default", "cudnn"]
    late = attention_backends.measure_attention(replace(TINY, deadline=0.0))
    assert {row["unavailable"] for row in late.rows if row["backend"] != "cudnn"} >= {
        "left out: no time"
    }


@pytest.fixture(scope="module")
def golden_2b():
    stored = load_file(GOLDEN / "t2v_2b" / "io.safetensors")
    cpu = torch.device("cpu")
    return stored, *(
        answer(build("t2v_2b"), stored, cpu, d) for d in (torch.float32, torch.bfloat16)
    )


def test_an_answer_that_differs_from_the_golden_is_reported(golden_2b) -> None:
    stored, exact, rounded = golden_2b
    assert compare_float32(stored, exact, factor=1.0)[1] == []
    off = replace(exact, outputs={"output": exact.outputs["output"] + 5e-5})
    assert "output: 5" in compare_float32(stored, off, factor=4.0)[1][0]
    key = "grad.model.diffusion_model.mixins.patch_embed.proj.bias"
    changed = {**exact.gradients, key: 1.0001 * exact.gradients[key]}
    off = replace(exact, gradients=changed, loss=float("nan"))
    wrong = compare_float32(stored, off, factor=4.0)[1]
    assert [text.partition(":")[0] for text in wrong] == ["loss", key]

    assert compare_bf16(stored, rounded, rounded)[1] == []
    off = replace(rounded, outputs={"output": 1.03 * rounded.outputs["output"]})
    assert "twice the CPU's" in compare_bf16(stored, off, rounded)[1][0]


def line(step: int, loss: float | None) -> dict:
    return {"step": step, "loss": loss, "step_ms": 2.0, "data_wait_ms": 0.1, "memory_rss_gib": 1.0}


def test_training_that_does_not_learn_or_differs_is_reported() -> None:
    falling = [line(i, 1 - 0.01 * i) for i in range(20)]
    assert judge(falling, falling, falling).problems == []
    flat = [line(i, 1.0) for i in range(20)]
    assert "bf16: the loss does not fall" in judge(flat, falling, falling).problems[0]
    off = [*falling[:-1], line(19, falling[-1]["loss"] * 1.002)]
    (problem,) = judge(falling, off, falling).problems
    assert problem.startswith("fp32: the losses differ from the CPU's by 2.00e-03")
    broken = [*falling[:-1], line(19, None)]
    assert judge(broken, falling, falling).problems == ["bf16: a loss is not finite"]


def test_times_are_of_single_calls() -> None:
    cpu = torch.device("cpu")
    calls = [lambda: time.sleep(0.002), lambda: time.sleep(0.004)]  # two buffers in turns
    times = time_calls(calls, cpu, seconds=0.03)
    assert (
        len(times) >= 5 and all(ms >= 2 for ms in times[::2]) and all(ms >= 4 for ms in times[1::2])
    )
    found = spread([1.0, 2.0, 3.0, 4.0, 100.0])
    assert found["median_ms"] == 3.0 and found["num_samples"] == 5
    assert 1.0 < found["p10_ms"] < 2.0 and 4.0 < found["p90_ms"] < 100.0


@pytest.mark.soak
def test_two_ranks_share_a_model_and_the_device(tmp_path: Path, monkeypatch) -> None:
    rows = run_piece("tensor_parallel", tmp_path)["rows"]
    assert [row["case"].rpartition(", ")[2] for row in rows] == ["whole rows", "rows split"]
    for row in rows:
        assert 0 < row["output_largest_error"] < 1e-5 and row["num_gradients"] > 10


def test_ranks_that_differ_or_are_wrong_are_reported(golden_2b) -> None:
    stored, exact, _ = golden_2b
    key = next(key for key in exact.gradients if stored[key].ndim == 2)
    share = Shard(tuple(stored[key].shape), dim=0, num_parts=1, index=0, count=2)
    shards = [share, replace(share, index=1)]
    ranks = [
        (Answers(exact.outputs, exact.loss, {**exact.gradients, key: s.of(stored[key])}), {key: s})
        for s in shards
    ]
    assert torch.equal(join_ranks(ranks).gradients[key], stored[key])
    assert find_differences(ranks) == []
    norm = next(key for key in exact.gradients if stored[key].ndim == 1)
    other = {**ranks[1][0].gradients, norm: exact.gradients[norm] + 1e-7}
    ranks[1] = Answers(exact.outputs, exact.loss, other), ranks[1][1]
    assert find_differences(ranks) == [f"{norm}: rank 1 differs from rank 0"]
