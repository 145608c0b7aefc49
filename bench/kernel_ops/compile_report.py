"""Compile the kernels without a GPU and count: python -m bench.kernel_ops.compile_report [--arch 90 80 89 ...].

Compiles the cases of bench/kernel_ops/compile_cases.py and prints, per case and architecture:
registers per thread, bytes spilled, shared memory, programs that fit on a multiprocessor, 16-byte
and all accesses of global memory, and atomics, counted in the machine code. A case over one of its
limits ends with OVER and the limit, and the exit status is 1. Limits hold on sm_90; no architecture
may spill registers or lack shared memory.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from bench.harness.command import parser_of
from bench.kernel_ops.compile_cases import CASES, CompileCase

_NUM_PROCESSES = 2
_LIMITED_ARCH = 90  # the architecture of the limits in CompileCase
# Per multiprocessor: bytes of shared memory for programs, warps, and programs (table "Technical
# Specifications per Compute Capability" of NVIDIA's CUDA programming guide). Every architecture has
# 65,536 registers, allocated to a warp in units of 256; the system takes 1 KB of shared memory per
# program, so that one program gets at most 163, 227 and 99 KB.
_MULTIPROCESSOR = {
    80: (164 * 1024, 64, 32),
    89: (100 * 1024, 48, 24),
    90: (228 * 1024, 64, 32),
    100: (228 * 1024, 64, 32),
    120: (100 * 1024, 48, 24),
}
ARCHES = tuple(_MULTIPROCESSOR)
_REGISTERS, _REGISTER_UNIT, _SYSTEM_SHARED_BYTES = 65_536, 256, 1024

Figures = dict[str, object]

# `/*0a10*/  @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;` -> LDG.E.128
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?PT?\d*\s+)?([A-Z][A-Z0-9_.]*)", re.M)
# Figures and their instructions. LDGSTS: cp.async, straight into shared memory.
_COUNTED = {
    "loads": ("LDG", "LDGSTS"),
    "async_loads": ("LDGSTS",),
    "stores": ("STG",),
    "local_accesses": ("LDL", "STL"),
    "atomics": ("ATOM", "ATOMG", "RED", "REDG"),
}


def compile_case(case: CompileCase, arch: int) -> Figures:
    """Compile for sm_<arch> as a launch with these arguments would, and count."""
    from triton import compile as compile_source
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    given = {*case.arguments, *case.constants}
    if given != set(names):
        raise ValueError(
            f"missing {sorted(set(names) - given)}, no such {sorted(given - set(names))}"
        )
    constants = {**case.constants, **case.constants_on.get(arch, {})}
    place = {name: (names.index(name),) for name in names}
    aligned = [n for n, kind in case.arguments.items() if kind.startswith("*")]
    source = ASTSource(
        fn=case.kernel,
        signature={name: case.arguments.get(name, "constexpr") for name in names},
        constexprs={place[name]: value for name, value in constants.items()},
        attrs={place[name]: [["tt.divisibility", 16]] for name in (*aligned, *case.divisible)},
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = compile_source(source, target=GPUTarget("cuda", arch, 32), options=options)
    used, code = read_machine_code(compiled.asm["cubin"])
    static = used["SHARED"]
    if arch >= 90 and static:  # cuobjdump includes the system's share
        static -= _SYSTEM_SHARED_BYTES
    figures: Figures = {
        "num_warps": case.num_warps,
        "registers": used["REG"],
        "stack_bytes": used["STACK"],
        "local_bytes": used["LOCAL"],
        "shared_bytes": static + compiled.metadata.shared,
        **count_instructions(code),
    }
    return {**figures, "programs_per_multiprocessor": count_resident(figures, arch)}


def read_machine_code(cubin: bytes) -> tuple[dict[str, int], str]:
    """Return the resources of a kernel's cubin as cuobjdump names them, and nvdisasm's listing."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

    def ask(tool: str, option: str) -> str:
        command = [str(tools / tool), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = ask("cuobjdump", "--dump-resource-usage")
        code = ask("nvdisasm", "-c")
    used = re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)
    return {key: int(value) for key, value in used}, code


def count_instructions(code: str) -> dict[str, int]:
    """Count the accesses of nvdisasm's listing; wide ones take at least 16 bytes per thread."""
    instructions = [name.split(".") for name in _INSTRUCTION.findall(code)]
    is_wide = lambda modifiers: "128" in modifiers or "256" in modifiers  # sm_100 also has 32 bytes
    counts = {}
    for figure, kinds in _COUNTED.items():
        found = [modifiers for kind, *modifiers in instructions if kind in kinds]
        counts[figure] = len(found)
        if figure in ("loads", "stores"):
            counts[f"wide_{figure}"] = sum(map(is_wide, found))
    return counts


def count_resident(figures: Mapping[str, int], arch: int) -> int:
    """Return how many programs fit on a multiprocessor at once."""
    shared, warps, programs = _MULTIPROCESSOR[arch]
    num_warps = figures["num_warps"]
    per_warp = -(-figures["registers"] * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    return min(
        programs,
        warps // num_warps,
        _REGISTERS // (per_warp * num_warps),
        shared // (figures["shared_bytes"] + _SYSTEM_SHARED_BYTES),
    )


def find_over(case: CompileCase, arch: int, figures: Mapping[str, int]) -> list[str]:
    """Return the limits of a case that the figures exceed, such as `registers 48 > 40`."""
    spilled = case.spilled_bytes.get(arch, 0)
    limits = {"stack_bytes": spilled, "local_bytes": 0, "local_accesses": spilled // 4}
    most_shared = _MULTIPROCESSOR[arch][0] - _SYSTEM_SHARED_BYTES
    limits["shared_bytes"] = most_shared
    if arch == _LIMITED_ARCH:
        limits["shared_bytes"] = min(most_shared, case.max_shared_bytes)
        limits["registers"] = case.max_registers
        limits |= {"narrow_loads": case.narrow_loads, "narrow_stores": case.narrow_stores}
    narrow = {f"narrow_{n}": figures[n] - figures[f"wide_{n}"] for n in ("loads", "stores")}
    reached = {**figures, **narrow}
    return [
        f"{name} {reached[name]} > {limit}"
        for name, limit in limits.items()
        if limit is not None and reached[name] > limit
    ]


def _report_case(job: tuple[str, int, int]) -> Figures:
    """Compute a row of the report in a process of the pool: op, case, arch, figures and `over`."""
    op, index, arch = job
    case = CASES[op]()[index]
    row = {"op": op, "case": case.name, "arch": arch}
    try:
        figures = compile_case(case, arch)
    except Exception as error:  # one kernel's error must not stop the others
        # Triton's error shows the kernel's source; its last line names the error.
        lines = str(error).strip().splitlines() or [""]
        return {**row, "over": [f"does not compile: {type(error).__name__}: {lines[-1].strip()}"]}
    return {**row, **figures, "over": find_over(case, arch, figures)}


def report(ops: Sequence[str], arches: Sequence[int]) -> list[Figures]:
    """Return a row for every case of the ops and every architecture."""
    # Cases hold kernels, which cannot be pickled: a process gets the case's index.
    jobs = [
        (op, i, arch)
        for op in ops
        for i, case in enumerate(CASES[op]())
        for arch in arches
        if arch >= case.least_arch
    ]
    # A forked process has torch and triton imported already.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(_NUM_PROCESSES, mp_context=context) as pool:
        return list(pool.map(_report_case, jobs))


def table(rows: Sequence[Figures]) -> str:
    """Format rows as a table; `LDG 7/9 (2)`: 7 of 9 loads take 16 bytes, 2 are cp.async."""
    head = ["case", "sm", "warps", "spill", "LDG 16B/all (async)", "STG", "atomics", "regs"]
    cells = [[*head, "resident", "shared", ""]]
    for row in rows:
        name = f"{row['op']} {row['case']}"
        over = f"OVER: {', '.join(row['over'])}" if row["over"] else ""
        figures = [""] * (len(cells[0]) - 3)
        if "registers" in row:
            figures = [row["num_warps"], row["stack_bytes"] + row["local_bytes"]]
            figures.append(f"{row['wide_loads']}/{row['loads']} ({row['async_loads']})")
            figures += [f"{row['wide_stores']}/{row['stores']}", row["atomics"], row["registers"]]
            figures += [row["programs_per_multiprocessor"], row["shared_bytes"]]
        cells.append([str(cell) for cell in (name, row["arch"], *figures, over)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(line.rstrip() for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--arch", type=int, nargs="+", choices=ARCHES, default=[_LIMITED_ARCH], metavar="SM"
    )
    parser.add_argument("--op", nargs="+", choices=CASES, default=list(CASES), metavar="OP")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args(argv)
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
        # An interpreted kernel cannot be compiled, and Triton reads the variable at import.
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        command = [sys.executable, "-m", "bench.kernel_ops.compile_report", *sys.argv[1:]]
        os.execve(sys.executable, command, environment)
    sys.exit(main())
