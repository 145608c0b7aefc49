"""Kernels compiled without a GPU: their limits hold, and a broken limit is reported."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.kernel_ops.compile_cases import CASES
from bench.kernel_ops.compile_report import count_instructions, count_resident, find_over
from tests.support.tiny_run import ROOT

# Kernels with known figures, and limits that they keep or break.
TOY = '''
from dataclasses import replace

import triton.language as tl

from bench.kernel_ops.compile_cases import CompileCase
from cogfast.kernels.gpu.launch import jit


@jit
def _scale_kernel(x_ptr, y_ptr, factor, num, bias_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < num, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + at).to(tl.float32)
    tl.store(y_ptr + at, (x * factor).to(y_ptr.dtype.element_ty), mask=at < num)


@jit
def _center_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """Sum the numbers of 4 warps through shared memory."""
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(y_ptr + tl.arange(0, BLOCK), x - tl.sum(x, 0) / BLOCK)


@jit
def _sums_kernel(x_ptr, y_ptr, num_rows, D: tl.constexpr):
    """Sum D numbers in the registers of 32 threads, which have too few."""
    at = tl.arange(0, D)
    total = tl.zeros([D], tl.float32)
    for row in range(num_rows):
        x = tl.load(x_ptr + row * D + at).to(tl.float32)
        total += x * tl.sum(x, 0)
    tl.store(y_ptr + at, total)


def compile_cases():
    wide = CompileCase(
        name="wide",
        kernel=_scale_kernel,
        arguments={"x_ptr": "*bf16", "y_ptr": "*bf16", "factor": "fp32", "num": "i32"},
        constants={"bias_ptr": None, "BLOCK": 1024},
        num_warps=4,
        divisible=("num",),
        max_registers=40,
        narrow_loads=0,
        narrow_stores=0,
    )
    center = CompileCase(
        name="shared",
        kernel=_center_kernel,
        arguments={"x_ptr": "*fp32", "y_ptr": "*fp32"},
        constants={"BLOCK": 2048},
        num_warps=4,
        max_registers=255,
        max_shared_bytes=1024,
    )
    sums = CompileCase(
        name="spills",
        kernel=_sums_kernel,
        arguments={"x_ptr": "*bf16", "y_ptr": "*fp32", "num_rows": "i32"},
        constants={"D": 8192},
        num_warps=1,
        max_registers=255,
    )
    return [
        wide,
        replace(wide, name="ragged", divisible=()),
        replace(wide, name="ragged, not held", divisible=(), narrow_loads=None, narrow_stores=None),
        replace(wide, name="few registers", max_registers=8),
        replace(wide, name="no argument", arguments={}),
        center,
        replace(center, name="little shared", max_shared_bytes=4),
        sums,
    ]
'''


def run(argv: list[str], folder: Path, code: str | None = None) -> tuple[int, dict, str]:
    """Run the report, or `code`, in a child process; return its exit status, its rows by (op, case,
    arch) and its output.

    Triton caches compiled kernels by source and version in the user's cache.
    """
    start = ["-c", code] if code else ["-m", "bench.kernel_ops.compile_report"]
    out = folder / "report.json"
    done = subprocess.run(
        [sys.executable, *start, *argv, "--out", str(out)],
        cwd=ROOT,
        # Tests set TRITON_INTERPRET: the program must remove it.
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert out.is_file(), done.stdout[-2000:] + done.stderr[-2000:]
    rows = json.loads(out.read_text())["rows"]
    return done.returncode, {(r["op"], r["case"], r["arch"]): r for r in rows}, done.stdout


# Each kernel at the shape of 5B. All cases are a soak.
QUICK = {
    "adaptive_layernorm": ("forward whole 3072 bf16", "backward whole 3072 bf16", "sums 3072"),
    "fused_ema_adam": ("update bf16 g and copy", "factors"),
    "gelu": ("forward 5B", "backward 5B", "dbias 5B"),
    "qk_norm_rope3d": ("forward 5B", "backward 5B"),
}
# One process imports Triton for all: the report of the toy kernels and of QUICK for sm_90, that of some
# toy kernels for sm_80.
REPORTS = f"""
import json, os, sys
os.environ.pop("TRITON_INTERPRET", None)
from bench.kernel_ops import compile_report
import toy_kernels
toys = toy_kernels.compile_cases()
chosen = {{}}
for op, names in {QUICK!r}.items():
    cases = {{case.name: case for case in compile_report.CASES[op]()}}
    chosen[op] = [cases[name] for name in names]
compile_report.CASES.update({{op: lambda cases=cases: cases for op, cases in chosen.items()}})
compile_report.CASES["toy"] = lambda: toys
compile_report.CASES["some toys"] = lambda: [toys[1], toys[3], toys[4], toys[7]]
out = sys.argv[sys.argv.index("--out") + 1]
rows = []
for arguments in (["--op", *chosen], ["--op", "toy"], ["--op", "some toys", "--arch", "80"]):
    status = compile_report.main([*arguments, "--out", out])
    rows += json.load(open(out))["rows"]
    print("status", arguments[1], status)
json.dump({{"rows": rows}}, open(out, "w"))
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> tuple[int, dict, str]:
    folder = tmp_path_factory.mktemp("toy")
    (folder / "toy_kernels.py").write_text(TOY)
    return run([], folder, REPORTS)


def test_a_broken_limit_is_reported(reports) -> None:
    _, rows, printed = reports
    assert "status toy 1" in printed
    over = {case: row["over"] for (op, case, _), row in rows.items() if op == "toy"}
    assert over["wide"] == over["shared"] == over["ragged, not held"] == []
    # 8 accesses of one element per thread.
    assert over["ragged"] == ["narrow_loads 8 > 0", "narrow_stores 8 > 0"]
    registers = rows["toy", "few registers", 90]["registers"]
    assert over["few registers"] == [f"registers {registers} > 8"]
    shared = rows["toy", "shared", 90]["shared_bytes"]
    assert over["little shared"] == [f"shared_bytes {shared} > 4"]
    assert shared == 16  # a float32 of each warp
    assert [text.split()[0] for text in over["spills"]] == ["stack_bytes", "local_accesses"]
    (text,) = over["no argument"]
    assert text.startswith("does not compile: ValueError: missing ['factor', 'num', 'x_ptr'")
    (line,) = (x for x in printed.splitlines() if x.startswith("toy few registers") and " 90 " in x)
    assert line.endswith(f"OVER: registers {registers} > 8")
    assert ", 5 over a limit\nstatus toy" in printed


def test_other_architectures_are_only_checked_for_spills(reports) -> None:
    rows = {case: row for (_, case, arch), row in reports[1].items() if arch == 80}
    assert {"ragged", "few registers"} < set(rows)
    assert {case for case, row in rows.items() if row["over"]} == {"spills", "no argument"}


def test_the_kernels_of_5b_keep_their_limits(reports) -> None:
    _, rows, printed = reports
    assert "status adaptive_layernorm 0" in printed, printed
    found = {(op, case): row for (op, case, _), row in rows.items() if op in QUICK}
    assert set(found) == {(op, name) for op, names in QUICK.items() for name in names}
    for row in found.values():
        assert row["over"] == [] and row["atomics"] == 0


def test_figures_of_known_kernels(reports) -> None:
    wide = reports[1]["toy", "wide", 90]  # 1024 bf16 by 128 threads: 16 bytes each way
    assert (wide["wide_loads"], wide["loads"], wide["async_loads"]) == (1, 1, 0)
    assert (wide["wide_stores"], wide["stores"]) == (1, 1)
    spills = reports[1]["toy", "spills", 90]
    assert spills["local_accesses"] > 100


def test_instructions_are_counted_by_kind() -> None:
    listing = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0020*/              @P1  LDG.E.U16 R5, desc[UR4][R2.64] ;
        /*0030*/                   LDGSTS.E.BYPASS.LTC128B.128 [R7], desc[UR4][R2.64] ;
        /*0040*/                   LDGSTS.E.LTC128B.64 [R7], desc[UR4][R2.64] ;
        /*0050*/             @!UP0 UBLKCP.S.G [UR8], [UR6], UR9 ;
        /*0060*/              @!PT STG.E.64 desc[UR4][R2.64], R4 ;
        /*0070*/                   STG.E.EF.128 desc[UR4][R2.64], R4 ;
        /*0080*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0090*/                   REDG.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R5 ;
        /*00a0*/                   EXIT ;
.L_x_1:
        /*00b0*/                   BRA `(.L_x_1);
        /*00c0*/                   NOP;
"""
    counts = count_instructions(listing)
    assert counts == {
        **{"loads": 4, "wide_loads": 2, "async_loads": 2, "stores": 2, "wide_stores": 1},
        **{"local_accesses": 0, "atomics": 1},
    }


@pytest.mark.parametrize(
    ("registers", "num_warps", "shared", "arch", "resident"),
    [
        (64, 8, 0, 90, 4),  # 65,536 registers / (64 * 256)
        (65, 8, 0, 90, 3),  # 72 are allocated
        (16, 1, 0, 90, 32),  # programs
        (32, 4, 100 * 1024, 90, 2),  # 2 of 101 KB in 228
        (32, 4, 100 * 1024, 80, 1),  # 1 in 164
        (32, 8, 0, 89, 6),  # 48 warps
        (32, 4, 49 * 1024, 120, 2),  # 2 of 50 KB in 100
    ],
)
def test_programs_per_multiprocessor(registers, num_warps, shared, arch, resident) -> None:
    figures = {"registers": registers, "shared_bytes": shared, "num_warps": num_warps}
    assert count_resident(figures, arch) == resident


@pytest.mark.parametrize(("arch", "kilobytes"), [(80, 163), (90, 227)])
def test_a_kernel_that_does_not_fit_on_a_gpu_is_reported(arch: int, kilobytes: int) -> None:
    (case, *_) = CASES["gelu"]()
    case = replace(case, max_shared_bytes=10**9)
    kinds = ("stack_bytes", "local_bytes", "local_accesses", "registers", "loads", "wide_loads")
    figures = dict.fromkeys((*kinds, "stores", "wide_stores"), 0)
    over = lambda size: find_over(case, arch, {**figures, "shared_bytes": size})
    limit = kilobytes * 1024
    assert over(limit) == []
    assert over(limit + 1) == [f"shared_bytes {limit + 1} > {limit}"]


@pytest.mark.soak
@pytest.mark.parametrize("arches", [(90,), (80, 89, 100, 120)], ids=str)
def test_every_kernel_keeps_its_limits(arches: tuple[int, ...], tmp_path: Path) -> None:
    """On GPUs other than sm_90 they are only to spill nowhere."""
    status, rows, printed = run(["--arch", *map(str, arches)], tmp_path)
    assert status == 0, printed
    every = [(op, case) for op, make in CASES.items() for case in make()]
    assert len({(op, case.name) for op, case in every}) == len(every), "two cases of one name"
    of_arch = lambda arch: {(op, case.name, arch) for op, case in every if arch >= case.least_arch}
    assert rows.keys() == set().union(*map(of_arch, arches))
    for row in rows.values():
        assert row["atomics"] == 0, "two runs would differ"
