"""What the kernels become on a GPU, without one: python -m bench.compile_report [--arch 90 80 100].

Compiles the compile_cases() of every file of kernels and prints, per kernel and architecture: registers per
thread, bytes spilled, shared memory, programs that fit on a multiprocessor, 16-byte and all accesses
of global memory, accesses of shared memory, barriers and instructions, counted in the machine code.
Where a case breaks a limit of its own (they hold for sm_90, that nothing spills everywhere) the line
ends with OVER and what, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cogfast.kernels.argument_checks import CompileCase

KERNELS = Path(__file__).resolve().parents[1] / "cogfast" / "kernels"
# Files that may have kernels; a file without compile_cases() of its own has none.
NAMES = [
    ".".join(path.relative_to(KERNELS).with_suffix("").parts)
    for path in sorted(KERNELS.rglob("[!_]*.py"))
]
FILES = {name: f"cogfast.kernels.{name}" for name in NAMES}
ARCHES = (90, 80, 100)
_NUM_PROCESSES = 2
_LIMITED_ARCH = 90  # the limits beside the kernels are written for it
# Of a multiprocessor: bytes of shared memory for programs, warps. Registers are 65,536 everywhere,
# handed out to a warp in units of 256; a program takes 1 KB of shared memory for the system.
_MULTIPROCESSOR = {80: (164 * 1024, 64), 90: (228 * 1024, 64), 100: (228 * 1024, 64)}
_REGISTERS, _REGISTER_UNIT, _SYSTEM_SHARED_BYTES, _MOST_PROGRAMS = 65_536, 256, 1024, 32

Figures = dict[str, object]

# `/*0a10*/  @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;` -> LDG.E.128
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?PT?\d*\s+)?([A-Z][A-Z0-9_.]*)", re.M)
_LOADS = ("LDG", "LDGSTS")  # LDGSTS: cp.async, straight into shared memory
_TMA = ("UBLKCP", "UTMALDG", "UTMASTG", "UTMAREDG")
_ATOMIC = ("ATOM", "ATOMG", "RED", "REDG")


def cases_of(module: str) -> list[CompileCase]:
    """The compile_cases() of a file; none of one that has none of its own."""
    make = vars(importlib.import_module(module)).get("compile_cases")
    return make() if make is not None and make.__module__ == module else []


def compile_case(case: CompileCase, arch: int) -> Figures:
    """Compile for sm_<arch> as a launch with these arguments would be, and count."""
    from triton import compile as compile_source
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    given = {*case.arguments, *case.constants}
    if given != set(names):
        raise ValueError(
            f"missing {sorted(set(names) - given)}, no such {sorted(given - set(names))}"
        )
    place = {name: (names.index(name),) for name in names}
    aligned = [n for n, kind in case.arguments.items() if kind.startswith("*")]
    source = ASTSource(
        fn=case.kernel,
        signature={name: case.arguments.get(name, "constexpr") for name in names},
        constexprs={place[name]: value for name, value in case.constants.items()},
        attrs={place[name]: [["tt.divisibility", 16]] for name in (*aligned, *case.divisible)},
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = compile_source(source, target=GPUTarget("cuda", arch, 32), options=options)
    figures = read_machine_code(compiled.asm["cubin"])
    if arch >= 90 and figures["static_shared_bytes"]:  # cuobjdump counts the system's share there
        figures["static_shared_bytes"] -= _SYSTEM_SHARED_BYTES
    figures["dynamic_shared_bytes"] = compiled.metadata.shared
    figures["shared_bytes"] = figures["static_shared_bytes"] + compiled.metadata.shared
    figures["num_warps"] = case.num_warps
    figures["programs_per_multiprocessor"] = count_resident(figures, case.num_warps, arch)
    return figures


def read_machine_code(cubin: bytes) -> Figures:
    """Resources and instruction counts of one kernel's cubin."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

    def ask(tool: str, option: str) -> str:
        words = [str(tools / tool), option, file.name]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = ask("cuobjdump", "--dump-resource-usage")
        code = ask("nvdisasm", "-c")
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    return {
        "registers": used["REG"],
        "stack_bytes": used["STACK"],
        "local_bytes": used["LOCAL"],
        "static_shared_bytes": used["SHARED"],
        **count_instructions(code),
    }


def count_instructions(code: str) -> dict[str, int]:
    """Instructions of nvdisasm's listing by kind; wide: 16 bytes (sm_100 also has 32) a thread."""
    instructions = [name.split(".") for name in _INSTRUCTION.findall(code)]
    kinds, wide = Counter(), Counter()
    for kind, *modifiers in instructions:
        kinds[kind] += 1
        wide[kind] += "128" in modifiers or "256" in modifiers

    def of(counts: Counter, *names: str) -> int:
        return sum(counts[name] for name in names)

    return {
        "wide_loads": of(wide, *_LOADS),
        "loads": of(kinds, *_LOADS),
        "async_loads": kinds["LDGSTS"],
        "wide_stores": wide["STG"],
        "stores": kinds["STG"],
        "tma": of(kinds, *_TMA),
        "shared_loads": of(kinds, "LDS", "LDSM"),
        "shared_stores": of(kinds, "STS", "STSM"),
        "local_accesses": of(kinds, "LDL", "STL"),
        "shuffles": kinds["SHFL"],
        "barriers": kinds["BAR"],
        "atomics": of(kinds, *_ATOMIC),
        "instructions": len(instructions) - kinds["NOP"],
    }


def count_resident(figures: Mapping[str, int], num_warps: int, arch: int) -> int:
    """Programs that fit on a multiprocessor at once."""
    shared, warps = _MULTIPROCESSOR[arch]
    per_warp = -(-figures["registers"] * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    return min(
        _MOST_PROGRAMS,
        warps // num_warps,
        _REGISTERS // (per_warp * num_warps),
        shared // (figures["shared_bytes"] + _SYSTEM_SHARED_BYTES),
    )


def find_over(case: CompileCase, arch: int, figures: Mapping[str, int]) -> list[str]:
    """The limits of a case that the figures break, as `registers 48 > 40`."""
    limits = {"stack_bytes": 0, "local_bytes": 0, "local_accesses": 0}
    if arch == _LIMITED_ARCH:
        limits |= {"registers": case.max_registers, "shared_bytes": case.max_shared_bytes}
        limits |= {"narrow_loads": case.narrow_loads, "narrow_stores": case.narrow_stores}
    reached = {
        **figures,
        "narrow_loads": figures["loads"] - figures["wide_loads"],
        "narrow_stores": figures["stores"] - figures["wide_stores"],
    }
    return [
        f"{name} {reached[name]} > {limit}"
        for name, limit in limits.items()
        if limit is not None and reached[name] > limit
    ]


def _report_case(job: tuple[str, str, int, int]) -> Figures:
    """A row: file, case, arch, the figures and `over`; in a process of the pool."""
    name, module, index, arch = job
    case = cases_of(module)[index]
    row = {"file": name, "case": case.name, "arch": arch}
    try:
        figures = compile_case(case, arch)
    except Exception as error:  # whatever it is, the other kernels are still compiled
        # the last line says what, the others show the kernel's source
        lines = str(error).strip().splitlines() or [""]
        return {**row, "over": [f"does not compile: {type(error).__name__}: {lines[-1].strip()}"]}
    return {**row, **figures, "over": find_over(case, arch, figures)}


def report(names: Sequence[str], arches: Sequence[int]) -> list[Figures]:
    """A row for every case of the files and every architecture."""
    jobs = []
    for name in names:
        num_cases = len(cases_of(FILES[name]))
        jobs += [(name, FILES[name], i, arch) for i in range(num_cases) for arch in arches]
    # a fork has torch and triton imported already
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(_NUM_PROCESSES, mp_context=context) as pool:
        return list(pool.map(_report_case, jobs))


_COLUMNS = {
    "registers": "regs",
    "programs_per_multiprocessor": "resident",
    "shared_bytes": "shared",
    "shared_loads": "LDS",
    "shared_stores": "STS",
    "shuffles": "SHFL",
    "barriers": "BAR",
    "atomics": "atomics",
    "tma": "TMA",
    "instructions": "instr",
}


def table(rows: Sequence[Figures]) -> str:
    """The rows for the screen; `LDG 7/9 (2)`: 7 of 9 loads take 16 bytes, 2 of the 9 are cp.async."""
    cells = [["case", "sm", "warps", "spill", "LDG 16B/all (async)", "STG", *_COLUMNS.values(), ""]]
    for row in rows:
        over = f"OVER: {', '.join(row['over'])}" if row["over"] else ""
        name = f"{row['file']} {row['case']}"
        if "registers" not in row:
            cells.append([name, str(row["arch"]), *[""] * (len(cells[0]) - 3), over])
            continue
        loads = f"{row['wide_loads']}/{row['loads']} ({row['async_loads']})"
        stores = f"{row['wide_stores']}/{row['stores']}"
        spill = row["stack_bytes"] + row["local_bytes"]
        start = [name, row["arch"], row["num_warps"], spill, loads, stores]
        cells.append([str(x) for x in (*start, *(row[key] for key in _COLUMNS), over)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(line.rstrip() for line in lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=__doc__.partition("\n\n")[2]
    )
    parser.add_argument("--arch", type=int, nargs="+", choices=ARCHES, default=[_LIMITED_ARCH])
    parser.add_argument("--op", nargs="+", choices=FILES, default=list(FILES), metavar="FILE")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args(words)
    import triton

    rows = report(arguments.op, arguments.arch)
    print(table(rows))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        result = {"triton": triton.__version__, "rows": rows}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    num_over = sum(bool(row["over"]) for row in rows)
    print(f"{len(rows)} compiled with Triton {triton.__version__}, {num_over} over a limit")
    return 1 if num_over else 0


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        # an interpreted kernel cannot be compiled, and Triton has read this when it was imported
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        words = [sys.executable, "-m", "bench.compile_report", *sys.argv[1:]]
        os.execve(sys.executable, words, environment)
    sys.exit(main())
