"""Write benchmark tables from committed results:

    python -m bench.results_table [FOLDER ...] [--into docs/benchmarks.md] [--readme README.md]

A folder holds the JSON files of bench.gpu_run, bench.data, bench.step or bench.steps.cpu_peers --out from one machine; the
default is every folder under bench/results. --into writes all tables, --readme writes one compact
table. Both replace the text between two comments of the file. What has not been measured on a GPU is
listed as such. Without either option the tables are printed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.harness.command import parser_of
from bench.harness.outcome import WRONG, Row

Report = Mapping[str, object]
Show = Callable[[Row], str]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
START = "<!-- benchmarks: start. Written by python -m bench.results_table; edits are lost. -->"
END = "<!-- benchmarks: end -->"
NOT_MEASURED = "not measured"
_NULL_RUNTIME = "null runtime"  # in the device's name, of tests/cuda/runtime
STEP_PIECES = ("step", "2b", "5b", "1.5-5b", "1.5-5b-i2v", "sampling")
_EMPTY = "–"
# Names of the two sides in JSON keys, and as they are shown.
_SIDES = {"ours": "cogfast", "diffusers": "diffusers"}
# Keys of a side that was not timed, and the reason that is shown.
_NOT_TIMED = {
    "does_not_fit": "does not fit",
    "lacks_policy": "has no such checkpointing",
    "unavailable": "not installed",
    "error": "failed",
}
# Figures that only a GPU can give, by the piece of bench.gpu_run that measures it.
_GPU_PIECES = {
    "op_times": "fused operations against the copy rate, eager PyTorch and torch.compile",
    "products": "products with int8 and fp8 weights against bf16",
    "attention": "attention backends at 17,776 tokens",
    "2b": "2B: training step against diffusers",
    "5b": "5B: training step against diffusers",
    "1.5-5b": "1.5-5B: training step against diffusers",
    "1.5-5b-i2v": "1.5-5B-I2V: training step against diffusers",
    "sampling": "a step of sampling against diffusers",
    "diffusers_kernels": "forward and backward of diffusers' model with `apply_to_diffusers`",
    "run": "`cogfast train` of a LoRA of 2B from H.264 videos",
    "data": "H.264 decoded by DALI against the CPU readers",
    "data_runs": "`cogfast cache`, and how long 2B training waits for H.264 decoded by DALI",
}
# Ratios of bench.steps.cpu_peers, and as they are shown.
PEERS = {
    "speed-up over diffusers": "over diffusers",
    "over compiled diffusers": "over compiled diffusers",
}
_COMPILED = "vs torch.compile"
_MODES = {"sft": "all weights", "lora": "LoRA", "sampling": "a step of sampling"}


@dataclass(frozen=True, slots=True)
class Results:
    """The reports of one folder, by file name."""

    folder: Path
    reports: Mapping[str, Report]

    def of(self, *pieces: str) -> list[Report]:
        return [report for report in self.reports.values() if report["piece"] in pieces]

    def rows(self, *pieces: str) -> list[Row]:
        """Return the rows of some pieces, with the number of threads of their report."""
        return [
            {"threads": report.get("threads"), **row}
            for report in self.of(*pieces)
            for row in report["rows"]
        ]

    @property
    def is_gpu(self) -> bool:
        return any(str(report["device"]).startswith("cuda") for report in self.reports.values())

    @property
    def machine(self) -> str:
        return str(next(iter(self.reports.values()))["machine"])


def read_results(folder: Path) -> Results:
    """Read a folder of results; ValueError if it is empty or has results whose numbers mean nothing."""
    reports = {}
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text())
        if not isinstance(report, dict) or "piece" not in report or "rows" not in report:
            continue  # a piece that was skipped, or another program's file
        if report.get("is_tiny"):
            raise ValueError(f"{path}: made with --tiny, whose numbers mean nothing; delete it")
        if _NULL_RUNTIME in str(report.get("machine")):
            raise ValueError(
                f"{path}: made on the {_NULL_RUNTIME}, which computes nothing; delete it"
            )
        reports[path.name] = report
    if not reports:
        raise ValueError(f"{folder}: no results of bench.gpu_run or bench.step in it")
    return Results(folder, reports)


def write_section(results: Sequence[Results]) -> str:
    """Return all tables, GPUs first."""
    lines = [
        "Speed-up is the time of diffusers over that of cogfast, for the same weights (where they took turns, the median of rounds, which",
        "may differ from the ratio of the median times); rows whose outputs or gradients disagree say so. Both clip gradients,",
        "update with AdamW and keep an EMA of the weights. TFLOP/s and MFU count three forward passes",
        "(LoRA: two for the frozen linears) and no recomputation.",
    ]
    # False sorts before True, and the order of machines of a kind stays.
    for each in sorted(results, key=lambda each: not each.is_gpu):
        lines += ["", *_of_machine(each)]
    gpus = [report for each in results if each.is_gpu for report in each.reports.values()]
    measured = {report["piece"] for report in gpus if report["rows"]}
    missing = [what for piece, what in _GPU_PIECES.items() if piece not in measured]
    if missing:
        cells = [(what, NOT_MEASURED) for what in missing]
        lines += ["", "### Not measured on a GPU yet", "", *_lines(("what", "result"), cells)]
    return "\n".join(lines)


def _of_machine(results: Results) -> list[str]:
    first = next(iter(results.reports.values()))
    # A package that was not installed has null. Only those that the timed code runs on are shown.
    versions = {name: version for name, version in first["versions"].items() if version}
    kept = [f"{n} {versions[n]}" for n in ("torch", "triton", "diffusers", "peft") if n in versions]
    lines = [f"### {results.machine}", "", f"{', '.join(kept)}; {_dates(results.reports.values())}"]
    lines += _steps(results)
    lines += _ops(results.rows("op_times"))
    lines += _products(results.rows("products"))
    lines += _attention(results.rows("attention"))
    lines += _data(results.rows("data"))
    lines += _data_runs(results.rows("run", "data_runs"))
    lines += _cpu_peers(results.rows("cpu_peers"))
    lines += _diffusers_kernels(results.rows("diffusers_kernels"))
    return lines


def _dates(reports: Iterable[Report]) -> str:
    return " and ".join(sorted({str(report["started_utc"])[:10] for report in reports}))


def _question(text: str, columns: Mapping[str, Show], rows: Iterable[Row]) -> list[str]:
    """Return a table under the question that it answers; nothing where there are no rows.

    columns: {head: how to show a row}. Columns that are empty in every row are left out.
    """
    cells = [[show(row) for show in columns.values()] for row in rows]
    return ["", f"**{text}**", "", *_lines([*columns], cells)] if cells else []


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    # MFU and peak memory are empty on a CPU, for example.
    kept = [i for i in range(len(head)) if any(row[i] != _EMPTY for row in rows)]
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cells[i] for i in kept) + " |" for cells in lines]


# --- how values are shown ---


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(value: float) -> str:
    return f"{value:.2f}x"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _kernel(names: str | Sequence[str]) -> str:
    # A pipe would end the cell of the table.
    name = (names if isinstance(names, str) else names[0]).replace("|", " ")
    return f"`{name}`" if len(name) <= 60 else f"`{name[:57]}...`"


def _of(key: str, show: Callable[..., str] = _number) -> Show:
    """Return how to show a key of a row: nothing where the row lacks it."""
    return lambda row: _EMPTY if row.get(key) in (None, []) else show(row[key])


def _spread(prefix: str) -> Show:
    low, high = f"{prefix}p10_ms", f"{prefix}p90_ms"
    return lambda row: f"{_number(row[low])} to {_number(row[high])}" if low in row else _EMPTY


def _both(key: str, show: Callable[..., str] = _number) -> Show:
    """Return how to show a key of both sides, once if they are shown alike."""

    def both(row: Row) -> str:
        ours, theirs = (_of(f"{side}_{key}", show)(row) for side in _SIDES)
        return ours if ours == theirs else f"{ours} / {theirs}"

    return both


def threads_of(row: Row) -> str:
    number = row.get("threads")
    return "" if number is None else ", one thread" if number == 1 else f", {number} threads"


# --- the tables of a machine ---


def _steps(results: Results) -> list[str]:
    rows = results.rows(*STEP_PIECES)
    case = lambda row: (
        f"{case_of(row)}, {row['engine']}, checkpointing {row['checkpointing']}{threads_of(row)}"
    )
    lines = _question(
        "How long does a step take with the same checkpointing?",
        {
            "case": case,
            "speed-up": _speed_up,
            "cogfast, ms": _of("ours_median_ms"),
            "diffusers, ms": _of("diffusers_median_ms"),
            "cogfast, p10 to p90": _spread("ours_"),
        },
        rows,
    )
    return lines + _question(
        "How well does a step use the machine?",
        {
            "case, cogfast / diffusers": case,
            "TFLOP/s": _both("model_tflop_per_s"),
            "MFU": _both("mfu", _percent),
            "peak GiB": _both("peak_memory_gib"),
        },
        (row for row in rows if any(f"{side}_median_ms" in row for side in _SIDES)),
    )


def case_of(row: Row) -> str:
    layers, whole = row["num_layers"], row["num_layers_of_model"]
    fewer = f" with {layers} of {whole} layers" if layers != whole else ""
    name = str(row["model"])
    name = name.upper() if name in _GPU_PIECES else name
    options = f", {row['options']}" if "options" in row else ""
    return f"{name}{fewer}, {_MODES[str(row['mode'])]}, {row['dtype']}{options}"


def _speed_up(row: Row) -> str:
    """Return the speed-up over diffusers, or why there is none."""
    if "ratio" in row:
        mark = " (the sides disagree)" if "disagrees" in row else ""
        return f"{1 / row['ratio']:.2f}x{mark}"
    for side, name in _SIDES.items():
        for key, text in _NOT_TIMED.items():
            if f"{side}_{key}" in row:
                return f"{name}: {text}"
    return str(row.get("error", NOT_MEASURED))


def _ops(rows: Sequence[Row]) -> list[str]:
    timed = [row for row in rows if "percent_of_copy" in row]
    is_wrong = lambda row: " (its results are wrong)" if row.get("status") == WRONG else ""
    whole = lambda percent: f"{percent:.0f}%"
    lines = _question(
        "How close to the copy rate are the fused operations?",
        {
            "operation": lambda row: f"{row['op']} {row['way']}, {row['model']}{is_wrong(row)}",
            "ms": _of("median_ms"),
            "GB/s": _of("gb_per_s"),
            "of the copy rate": _of("percent_of_copy", whole),
            "goal": _of("goal_percent", whole),
        },
        timed,
    )
    # One table for each operation: each has peers of its own.
    for op in dict.fromkeys(row["op"] for row in timed):
        of_op = [row for row in timed if row["op"] == op]
        peers = list(dict.fromkeys(key for row in of_op for key in row if key.startswith("vs ")))
        # Eager PyTorch and torch.compile first.
        peers.sort(key=lambda name: not ("eager" in name or "compile" in name))
        columns = {"": lambda row: f"{row['way']}, {row['model']}"}
        columns |= {peer.removeprefix("vs "): _of(peer, _ratio) for peer in peers}
        lines += _question(f"{op}: speed-up over", columns, of_op if peers else [])
    return lines


def _attention(rows: Sequence[Row]) -> list[str]:
    columns = {
        "[B, S, H, D]": _of("shape_bshd", str),
        "backend": _of("backend", str),
        "TFLOP/s forward": _of("forward_tflop_per_s"),
        "TFLOP/s backward": _of("backward_tflop_per_s"),
        "kernel": _of("forward_kernel", _kernel),
    }
    timed = (row for row in rows if "forward_tflop_per_s" in row)
    return _question("How fast is attention by each backend?", columns, timed)


def _products(rows: Sequence[Row]) -> list[str]:
    """Return a line for each product: the time in bf16, and the speed-up of weights of 8 bits over it."""
    merged: dict[tuple, dict[str, object]] = {}
    for row in rows:
        key = (row["width"], row["linear"], row["product"])
        figure = row["median_ms"] if row["kind"] == "bf16" else row["vs bf16"]
        merged.setdefault(key, dict(row))[str(row["kind"])] = figure
    columns = {
        "product": lambda row: f"{row['linear']} {row['product']}, width {row['width']}",
        "bf16, ms": _of("bf16"),
        "TFLOP/s": _of("tflop_per_s"),
        "int8 weight": _of("int8", _ratio),
        "fp8": _of("fp8", _ratio),
    }
    return _question(
        "How fast are the products of the linears, and with weights of 8 bits?",
        columns,
        merged.values(),
    )


def _data(rows: Sequence[Row]) -> list[str]:
    """Return a table for each number of readers: the rate of each side on each clip."""
    lines = []
    for count in sorted({row["readers"] for row in rows}):
        clips: dict[str, dict[str, Row]] = {}
        for row in (row for row in rows if row["readers"] == count):
            clips.setdefault(row["clip"], {"clip": row["clip"]})[row["side"]] = row
        columns: dict[str, Show] = {"clips of 17 frames, 240x360": _of("clip", str)}
        for side in dict.fromkeys(side for sides in clips.values() for side in sides):
            if side != "clip":
                rate = lambda sides, side=side: _of("clips_per_s")(sides.get(side, {}))
                columns[side.replace("ours", "cogfast")] = rate
        if count == 0:
            columns["cogfast / decord, per CPU second"] = lambda sides: (
                f"{sides['ours']['clips_per_cpu_s'] / sides['decord']['clips_per_cpu_s']:.2f}"
            )
        who = f"do {count} readers" if count > 1 else f"does one {'reader' if count else 'process'}"
        lines += _question(f"How many clips per second {who} read?", columns, clips.values())
    return lines


def _data_runs(rows: Sequence[Row]) -> list[str]:
    counts = {"clips": _of("clips", str), "clips per second": _of("clips_per_s")}
    training = {
        "ms per step": _of("step_median_ms"),
        "wait for data": _of("data_wait_percent", lambda value: f"{value:.2f}%"),
    }
    seconds, run = {"seconds in all": _of("seconds")}, _of("run", str)
    lines = _question(
        "How long does training wait for data?",
        {"run": run, **counts, **training, **seconds},
        (row for row in rows if "data_wait_percent" in row),
    )
    return lines + _question(
        "How long does `cogfast cache` take, its start included?",
        {"command": run, **counts, **seconds, "MiB": _of("mib")},
        (row for row in rows if "data_wait_percent" not in row),
    )


def _cpu_peers(rows: Sequence[Row]) -> list[str]:
    columns = {
        "case": lambda row: f"{row['model']}, {row['dtype']}{threads_of(row)}",
        **{shown: _of(key, _ratio) for key, shown in PEERS.items()},
        "cogfast, ms": _of("ours median_ms"),
        "diffusers / compiled, ms": lambda row: " / ".join(
            _number(row[f"{side} median_ms"]) for side in ("diffusers", "diffusers compiled")
        ),
        "matmuls and attention alone, ms": _of("floor median_ms"),
    }
    return _question("How long does a training step take on a CPU?", columns, rows)


def _diffusers_kernels(rows: Sequence[Row]) -> list[str]:
    columns = {
        "case": lambda row: (
            f"{row['model']}, {row['batch_size']} x {row['num_tokens']} tokens, {row['num_layers']} layers, "
            f"{row['dtype']}{threads_of(row)}"
        ),
        "over diffusers, eager": _of("with kernels ratio", _ratio),
        "diffusers compiled": _of("diffusers compiled ratio", _ratio),
        "with kernels, compiled": _of("with kernels compiled ratio", _ratio),
        "matmuls and attention alone": _of("floor ratio", _ratio),
        "diffusers / with kernels, ms": lambda row: " / ".join(
            _number(row[f"{side} median_ms"]) for side in ("diffusers", "with kernels")
        ),
    }
    question = (
        "How much faster are forward and backward of diffusers' model with apply_to_diffusers?"
    )
    return _question(question, columns, rows)


# --- the table of the README ---


def write_compact(results: Sequence[Results]) -> str:
    """Return one table of what is measured: the result, where and when; and a sentence on the rest."""
    rows, missing = [], []
    for what, is_gpu, piece, summarize in COMPACT_ROWS:
        found = [
            (what, text, each.machine, _dates(each.of(piece)))
            for each in results
            if each.is_gpu == is_gpu and (text := summarize(each.rows(piece))) is not None
        ]
        rows += [row for row in found if row[3] == max(row[3] for row in found)]  # the newest
        if not found:
            missing.append(f"{what} ({'GPU' if is_gpu else 'CPU'})")
    table = _lines(("what", "result", "where", "date"), rows) if rows else []
    return "\n".join([*table, *(["", f"Not measured: {'; '.join(missing)}."] if missing else [])])


def _range(values: Iterable[float]) -> str | None:
    """Return the smallest and the largest value, as `1.01x to 1.02x`; None of no values."""
    shown = list(dict.fromkeys(_ratio(value) for value in sorted(values)))
    return f"{shown[0]} to {shown[-1]}" if len(shown) > 1 else next(iter(shown), None)


def _peer_speed_up(rows: Sequence[Row]) -> str | None:
    found = []
    for dtype in sorted({row["dtype"] for row in rows}):
        eager, compiled = (_range(r[k] for r in rows if r["dtype"] == dtype) for k in PEERS)
        found.append(f"{dtype}: {eager} ({compiled})")
    return "; ".join(found) or None


def _step_speed_up(rows: Sequence[Row]) -> str | None:
    timed = [row for row in rows if "ratio" in row and "options" not in row]
    eager, compiled = _of_layers(timed, "eager"), _of_layers(timed, "compiled")
    both = f" ({compiled} with both compiled)" if compiled else ""
    return _marked(eager, timed) and f"{_marked(eager, timed)}{both}"


def _of_layers(timed: Sequence[Row], engine: str) -> str | None:
    """Return the speed-ups of whole models, or of a part of the layers where no whole model was timed."""
    rows = [row for row in timed if row["engine"] == engine]
    whole = [row for row in rows if row["num_layers"] == row["num_layers_of_model"]]
    text = _range(1 / row["ratio"] for row in whole or rows)
    layers = sorted({f"{row['num_layers']} of {row['num_layers_of_model']}" for row in rows})
    return text if whole or not rows else f"{text} with {' or '.join(layers)} layers"


def _op_speed_up(rows: Sequence[Row]) -> str | None:
    timed = [row for row in rows if _COMPILED in row]
    return _marked(_range(row[_COMPILED] for row in timed), timed)


def _marked(text: str | None, rows: Sequence[Row]) -> str | None:
    """Mark a result whose rows include one with a wrong answer."""
    is_wrong = any("disagrees" in row or row.get("status") == WRONG for row in rows)
    return f"{text} (not all agree)" if is_wrong else text


def _reading_speed_up(
    rows: Sequence[Row], above: tuple[str, int], below: tuple[str, int], key: str
) -> str | None:
    of = {(row["clip"], row["side"], row["readers"]): row[key] for row in rows}
    clips = [clip for clip, *side in of if tuple(side) == above and (clip, *below) in of]
    return _range(of[clip, *above] / of[clip, *below] for clip in clips)


def _data_wait(rows: Sequence[Row]) -> str | None:
    waits = [
        f"{row['data_wait_percent']:.1f}% ({row['run'].removeprefix('training from ')})"
        for row in rows
        if "data_wait_percent" in row and "," not in row["run"]
    ]
    return ", ".join(waits) or None


def _attention_rate(rows: Sequence[Row]) -> str | None:
    rate = lambda row: row["forward_tflop_per_s"]
    best = max((row for row in rows if "forward_tflop_per_s" in row), key=rate, default=None)
    if best is None:
        return None
    back = _number(best["backward_tflop_per_s"])
    return f"{best['backend']}: {_number(rate(best))} TFLOP/s forward, {back} backward"


_BY_DALI = partial(_reading_speed_up, above=("DALI", 8), below=("ours", 8), key="clips_per_s")
_PER_CPU_SECOND = partial(
    _reading_speed_up, above=("ours", 0), below=("decord", 0), key="clips_per_cpu_s"
)
# Each row: what it shows, whether a GPU is needed, the piece, and its summary (None without an answer)
COMPACT_ROWS: tuple[tuple[str, bool, str, Callable[[Sequence[Row]], str | None]], ...] = (
    ("2B training step, speed-up over diffusers", True, "2b", _step_speed_up),
    ("5B training step, speed-up over diffusers", True, "5b", _step_speed_up),
    ("fused operations, speed-up over torch.compile", True, "op_times", _op_speed_up),
    ("attention at 17,776 tokens, best backend", True, "attention", _attention_rate),
    ("clips decoded by DALI, speed-up over 8 CPU readers", True, "data", _BY_DALI),
    ("training step, speed-up over diffusers (compiled)", False, "cpu_peers", _peer_speed_up),
    ("clips read per CPU second, speed-up over decord", False, "data", _PER_CPU_SECOND),
    ("share of a step that waits for data", False, "data_runs", _data_wait),
)


def replace_section(text: str, section: str) -> str:
    """Replace the text between the comments; ValueError unless each occurs once, in order."""
    # Text outside of the comments is written by hand and stays.
    before, found, rest = text.partition(START)
    _, closed, after = rest.partition(END)
    if not found or not closed or text.count(START) != 1 or text.count(END) != 1:
        raise ValueError(f"the file must hold the lines\n{START}\n{END}\nonce, in this order")
    return f"{before}{START}\n\n{section}\n\n{END}{after}"


def all_folders() -> list[Path]:
    return sorted(path for path in RESULTS.glob("*") if path.is_dir())


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("folders", nargs="*", type=Path, help="default: all under bench/results")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="write all tables into this file")
    parser.add_argument("--readme", type=Path, help="write the compact table into this file")
    arguments = parser.parse_args(argv)
    into, readme = arguments.into, arguments.readme
    try:
        folders = [path.resolve() for path in arguments.folders] or all_folders()
        results = [read_results(folder) for folder in folders]
        sections = {into: lambda: write_section(results)} if into else {}
        sections |= {readme: lambda: write_compact(results)} if readme else {}
        for path, write in sections.items():
            changed = replace_section(path.read_text(encoding="utf-8"), write())
            path.write_text(changed, encoding="utf-8")
        if not sections:
            print(write_section(results))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
