"""Write benchmark tables from committed results:

    python -m bench.results_table [FOLDER ...] [--into docs/benchmarks.md] [--readme README.md]

A folder holds the JSON files of bench.gpu_run, bench.data, bench.step or bench.steps.cpu_peers --out from one machine; the
default is every folder under bench/results. --into writes all tables and redraws their plots,
--readme writes one compact table. Both replace the text between two comments of the file. What has
not been measured is listed as such. Without either option the tables are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.harness.compact_rows import COMPACT_ROWS, PEERS, Row, number
from bench.harness.outcome import WRONG

Report = Mapping[str, object]
Cells = Sequence[str]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
START = "<!-- benchmarks: start. Written by python -m bench.results_table; edits are lost. -->"
END = "<!-- benchmarks: end -->"
NOT_MEASURED = "not measured"
_NULL_RUNTIME = "null runtime"  # in the device's name, of tests/cuda/runtime
_STEP_PIECES = ("step", "2b", "5b", "1.5-5b", "1.5-5b-i2v")
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
    "op_times": "fused operations against the copy rate, eager PyTorch, torch.compile and other kernels",
    "quantized": "products with int8 and fp8 weights against bf16",
    "attention": "attention backends at 17,776 tokens",
    "2b": "2B: block and training step against diffusers",
    "5b": "5B: block and training step against diffusers",
    "1.5-5b": "1.5-5B: block and training step against diffusers",
    "1.5-5b-i2v": "1.5-5B-I2V: training step against diffusers",
    "data": "H.264 decoded by DALI against the CPU readers",
    "data_runs": "`cogfast cache`, and how long 2B training waits for H.264 decoded by DALI",
}
_CPU_PIECE = "a tiny model's training step against diffusers (`make bench`)"
_FIRSTPEERS = ("eager", "compile")  # words in the names of the peers that are shown first


@dataclass(frozen=True, slots=True)
class Results:
    """The reports of one folder, by file name."""

    folder: Path
    reports: Mapping[str, Report]

    def of(self, *pieces: str) -> list[Report]:
        return [report for report in self.reports.values() if report["piece"] in pieces]

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


def write_section(results: Sequence[Results], page: Path | None = None) -> str:
    """Return all tables, GPUs first. Links to plots are relative to the folder of `page`."""
    lines = [
        "Speed-up is the time of diffusers over that of cogfast, for the same weights; outputs and",
        "gradients of the two are compared first, and rows that disagree say so. Both clip gradients,",
        "update with AdamW and keep an EMA of the weights. TFLOP/s and MFU count three forward passes",
        "(LoRA: two for the frozen linears) and no recomputation.",
    ]
    gpus = [each for each in results if each.is_gpu]
    for each in _gpus_first(results):
        lines += ["", *_of_machine(each, page.parent if page else ROOT)]
    measured = {report["piece"] for r in gpus for report in r.reports.values() if report["rows"]}
    missing = [what for piece, what in _GPU_PIECES.items() if piece not in measured]
    if missing:
        rows = [(what, NOT_MEASURED) for what in missing]
        lines += ["", "### Not measured on a GPU yet", "", *_table(("what", "result"), rows)]
    # No results of a CPU at all.
    if len(gpus) == len(results):
        rows = [(_CPU_PIECE, NOT_MEASURED)]
        lines += ["", "### Not measured on a CPU yet", "", *_table(("what", "result"), rows)]
    return "\n".join(lines)


def write_compact(results: Sequence[Results]) -> str:
    """Return one table of at most eight rows: what is measured, the result, where and when."""
    rows = []
    for row in COMPACT_ROWS:
        # The first machine with a result gives the row.
        cells = (row.what, NOT_MEASURED, "a GPU" if row.is_gpu else "a CPU", _EMPTY)
        for each in results:
            reports = each.of(*row.pieces) if each.is_gpu == row.is_gpu else []
            text = row.summarize([line for report in reports for line in report["rows"]])
            if text is not None:
                cells = (row.what, text, each.machine, _dates(reports))
                break
        rows.append(cells)
    return "\n".join(_table(("what", "result", "where", "date"), rows))


def _gpus_first(results: Sequence[Results]) -> list[Results]:
    # False sorts before True, and the order of machines of a kind stays.
    return sorted(results, key=lambda each: not each.is_gpu)


def _dates(reports: Iterable[Report]) -> str:
    return " and ".join(sorted({str(report["started_utc"])[:10] for report in reports}))


def _of_machine(results: Results, folder_of_page: Path) -> list[str]:
    first = next(iter(results.reports.values()))
    # A package that was not installed has null.
    versions = {name: version for name, version in first["versions"].items() if version}
    # Only the packages that the timed code runs on.
    kept = [f"{n} {versions[n]}" for n in ("torch", "triton", "diffusers", "peft") if n in versions]
    lines = [f"### {results.machine}", "", f"{', '.join(kept)}; {_dates(results.reports.values())}"]
    steps = results.of(*_STEP_PIECES)
    lines += [*_same_policy(steps), *_best_policy(steps), *_rates(steps)]
    renders = {"op_times": _ops, "quantized": _quantized, "attention": _attention}
    renders |= {"data": _data, "data_runs": _data_runs}
    renders |= {"cpu_peers": _cpu_peers, "sampling_peers": _sampling}
    for piece, render in renders.items():
        for report in results.of(piece):
            lines += render(report["rows"])
    for report in results.of("finetune_step"):
        lines += _finetune_steps(report)
    for path in sorted(results.folder.glob("*.png")):
        link = Path(os.path.relpath(path, folder_of_page)).as_posix()
        lines += ["", f"![{path.stem} on {results.machine}]({link})"]
    return lines


def _question(text: str, head: Cells, rows: Sequence[Cells]) -> list[str]:
    """A table under the question that it answers; nothing where there are no rows."""
    return ["", f"**{text}**", "", *_table(head, rows)] if rows else []


def _same_policy(reports: Sequence[Report]) -> list[str]:
    rows = []
    for report in reports:
        for row in report["rows"]:
            name = _case(row, report)
            if "error" in row:
                rows.append((name, str(row["error"]), *[_EMPTY] * 3))
                continue
            # A side that does not fit into memory has no times.
            spread = _EMPTY
            if "ours_p10_ms" in row:
                spread = f"{number(row['ours_p10_ms'])} to {number(row['ours_p90_ms'])}"
            rows.append((name, _speed_up(row), *_each(row, "median_ms", _ms), spread))
    head = ("case", "speed-up", "cogfast, ms", "diffusers, ms", "cogfast, p10 to p90")
    return _question("How long does a step take with the same checkpointing?", head, rows)


def _best_policy(reports: Sequence[Report]) -> list[str]:
    rows = [
        (
            f"{_model(row)}, against {row['against']}",
            _speed_up(row),
            _policy(row, "ours"),
            _policy(row, "diffusers"),
            _both(row, "mfu", _percent),
            _both(row, "peak_memory_gib", number),
        )
        for report in reports
        for row in report["numbers"].get("best", ())
        if row["ours_policy"] != row["diffusers_policy"]  # else the table above has this row
    ]
    head = ("case", "speed-up", *_SIDES.values(), "MFU", "peak GiB")
    return _question("How long does a step take with the best policy of each side?", head, rows)


def _policy(row: Row, side: str) -> str:
    return f"{row[f'{side}_policy']}: {_ms(row[f'{side}_median_ms'])} ms"


def _rates(reports: Sequence[Report]) -> list[str]:
    rows = [
        (
            _case(row, report),
            _both(row, "model_tflop_per_s", number),
            _both(row, "mfu", _percent),
            _both(row, "peak_memory_gib", number),
            _both(row, "attention_kernels", _first),
        )
        for report in reports
        for row in report["rows"]
        if "ours_median_ms" in row or "diffusers_median_ms" in row
    ]
    head = ("case, cogfast / diffusers", "TFLOP/s", "MFU", "peak GiB", "attention kernel")
    return _question("How well does a step use the machine?", head, rows)


def _cpu_peers(rows: Sequence[Row]) -> list[str]:
    body = []
    for row in rows:
        case = f"{row['model']}, {row['dtype']}, {_threads(row['threads'])}"
        ratios = [f"{row[key]:.2f}x" for key in PEERS]
        of = lambda side, row=row: _ms(row[f"{side} median_ms"])
        theirs = f"{of('diffusers')} / {of('diffusers compiled')}"
        body.append((case, *ratios, of("ours"), theirs, of("floor")))
    times = ("cogfast, ms", "diffusers / compiled, ms", "matmuls and attention alone, ms")
    head = ("case", *PEERS.values(), *times)
    return _question("How long does a training step take on a CPU?", head, body)


def _sampling(rows: Sequence[Row]) -> list[str]:
    """Rows of bench.steps.sampling_peers; those without a speed-up were not timed."""
    body = []
    for row in rows:
        if "speed-up" in row:
            case = (
                f"{row['model']}, {row['steps']} steps, {row['dtype']}, {_threads(row['threads'])}"
            )
            ours, theirs = (_ms(row[f"{side} median_ms"]) for side in _SIDES)
            spread = f"{_ms(row['ours p10_ms'])} to {_ms(row['ours p90_ms'])}"
            body.append((case, f"{row['speed-up']:.2f}x", ours, theirs, spread))
    head = ("case", "speed-up", "cogfast, ms", "diffusers' pipeline, ms", "cogfast, p10 to p90")
    return _question("How long does sampling take, both from the same noise?", head, body)


def _ops(rows: Sequence[Row]) -> list[str]:
    timed = [row for row in rows if "percent_of_copy" in row]
    body = []
    for row in timed:
        name = f"{row['op']} {row['way']}, {row['model']}"
        name += " (its results are wrong)" if row.get("status") == WRONG else ""
        goal = row.get("goal_percent")
        cells = (number(row["median_ms"]), number(row["gb_per_s"]))
        cells += (f"{row['percent_of_copy']:.0f}%", _EMPTY if goal is None else f"{goal:.0f}%")
        body.append((name, *cells))
    head = ("operation", "ms", "GB/s", "of the copy rate", "goal")
    lines = _question("How close to the copy rate are the fused operations?", head, body)
    # One table for each operation: each has peers of its own.
    for op in dict.fromkeys(row["op"] for row in timed):
        of_op = [row for row in timed if row["op"] == op]
        peers = list(dict.fromkeys(key for row in of_op for key in row if key.startswith("vs ")))
        # Eager PyTorch and torch.compile first.
        peers.sort(key=lambda name: not any(word in name for word in _FIRSTPEERS))
        speed_ups = lambda row: [f"{row[p]:.2f}x" if p in row else _EMPTY for p in peers]  # noqa: B023
        body = [(f"{row['way']}, {row['model']}", *speed_ups(row)) for row in of_op]
        if peers:
            lines += _question(f"{op}: speed-up over", ("", *(p[3:] for p in peers)), body)
    return lines


def _attention(rows: Sequence[Row]) -> list[str]:
    head = ("[B, S, H, D]", "backend", "TFLOP/s forward", "TFLOP/s backward", "kernel")
    body = [
        (
            str(row["shape_bshd"]),
            str(row["backend"]),
            number(row["forward_tflop_per_s"]),
            number(row["backward_tflop_per_s"]),
            _first([row["forward_kernel"]]),
        )
        for row in rows
        if "forward_tflop_per_s" in row
    ]
    return _question("How fast is attention by each backend?", head, body)


def _quantized(rows: Sequence[Row]) -> list[str]:
    """A line for each product: the time in bf16, and with weights of 8 bits the speed-up over it."""
    of = {(row["width"], row["linear"], row["product"], row["kind"]): row for row in rows}
    body = []
    for width, linear, product in dict.fromkeys(key[:3] for key in of):
        bf16, int8, fp8 = (
            of.get((width, linear, product, kind)) for kind in ("bf16", "int8", "fp8")
        )
        ratios = [_EMPTY if row is None else f"{row['vs bf16']:.2f}x" for row in (int8, fp8)]
        time = _EMPTY if bf16 is None else number(bf16["median_ms"])
        body.append((f"{linear} {product}, width {width}", time, *ratios))
    head = ("product", "bf16, ms", "int8 weight", "fp8")
    return _question("How fast are products with weights of 8 bits?", head, body)


def _data(rows: Sequence[Row]) -> list[str]:
    """A table for each number of readers, and what a second reader adds."""
    of = {(row["clip"], row["side"], row["readers"]): row for row in rows}
    clips = list(dict.fromkeys(row["clip"] for row in rows))
    counts = sorted({row["readers"] for row in rows})
    lines = []
    for count in counts:
        if count == 1 and 2 in counts:
            continue  # the table of two readers shows what the second adds
        sides = list(dict.fromkeys(row["side"] for row in rows if row["readers"] == count))
        extra = {}
        if count == 0:
            extra["cogfast / decord, per CPU second"] = lambda clip: _quotient(
                of.get((clip, "ours", 0)), of.get((clip, "decord", 0)), "clips_per_cpu_s"
            )
        if count == 2:
            extra["cogfast, 2 readers / 1"] = lambda clip: _quotient(
                of.get((clip, "ours", 2)), of.get((clip, "ours", 1)), "clips_per_s"
            )
            extra["a reader of cogfast, MiB"] = lambda clip: _memory(of.get((clip, "ours", 1)))
        body = []
        for clip in clips:
            rates = [number(of[clip, side, count]["clips_per_s"]) for side in sides]
            body.append([str(clip), *rates, *(show(clip) for show in extra.values())])
        head = ["clips of 17 frames, 240x360", *map(shown_side, sides), *extra]
        who = f"do {count} readers" if count > 1 else f"does one {'reader' if count else 'process'}"
        lines += _question(f"How many clips per second {who} read?", head, body)
    return lines


def shown_side(side: str) -> str:
    """The name of a side of bench.data in tables and plots: its JSON says "ours" for cogfast."""
    return side.replace("ours", "cogfast")


def _quotient(above: Row | None, below: Row | None, key: str) -> str:
    return _EMPTY if above is None or below is None else f"{above[key] / below[key]:.2f}"


def _memory(row: Row | None) -> str:
    return _EMPTY if row is None else number(row["resident_mib"])


def _data_runs(rows: Sequence[Row]) -> list[str]:
    def cells(row: Row, keys: Iterable[str]) -> Cells:
        return [str(row["run"]), *(_SHOWN_OF_RUN[k](row[k]) if k in row else _EMPTY for k in keys)]

    keys = ("clips", "clips_per_s", "step_median_ms", "data_wait_percent", "seconds")
    head = ("run", "clips", "clips per second", "ms per step", "wait for data", "seconds in all")
    body = [cells(row, keys) for row in rows if "data_wait_percent" in row]
    lines = _question("How long does training wait for data?", head, body)
    keys = ("clips", "clips_per_s", "seconds", "mib")
    head = ("command", "clips", "clips per second", "seconds in all", "MiB")
    body = [cells(row, keys) for row in rows if "data_wait_percent" not in row]
    return lines + _question("How long do `cogfast cache` and a start take?", head, body)


def _finetune_steps(report: Report) -> list[str]:
    """A step of `cogfast finetune` against the loop of CogVideo's trainer, with the same arguments."""
    sides, body = ("ours", "theirs"), []
    for row in report["rows"]:
        trained = "all weights" if row["mode"] == "sft" else "LoRA"
        flag = str(row["gradient_checkpointing"]).lower()
        name = f"{row['model']}, {trained}, {row['dtype']}, --gradient_checkpointing {flag}, {_threads(report['threads'])}"
        if "not_timed" in row:
            body.append((name, str(row["not_timed"]), *[_EMPTY] * 4))
            continue
        medians = [_ms(row[f"{side}_median_ms"]) for side in sides]
        spreads = [f"{_ms(row[f'{s}_p10_ms'])} to {_ms(row[f'{s}_p90_ms'])}" for s in sides]
        body.append((name, f"{row['ratio']:.2f}", *medians, *spreads))
    columns = [
        f"{side}, {what}" for what in ("ms", "p10 to p90") for side in ("cogfast", "CogVideo")
    ]
    question = (
        "How long does a step of `cogfast finetune` take against CogVideo's diffusers trainer?"
    )
    lines = _question(question, ("case", "time of cogfast / CogVideo", *columns), body)
    load, cores = report["load_average"], report["cpu_cores"]
    note = "Ratios are medians over pairs that follow each other. CogVideo's trainer keeps no EMA. Load"
    average = f"{load['before']:.1f} before and {load['after']:.1f} after, on {cores} cores"
    return [*lines, "", f"{note} average: {average}."]


def _case(row: Row, report: Report) -> str:
    threads = f", {_threads(report['threads'])}" if "threads" in report else ""
    engine = f"{row['engine']}, checkpointing {row['checkpointing']}"
    return f"{_model(row)}, {engine}{threads}"


def _threads(number: int) -> str:
    return "one thread" if number == 1 else f"{number} threads"


def _model(row: Row) -> str:
    layers, whole = row["num_layers"], row["num_layers_of_model"]
    fewer = f" with {layers} of {whole} layers" if layers != whole and row["what"] == "step" else ""
    name = str(row["model"])
    name = name.upper() if name in _GPU_PIECES else name
    trained = "all weights" if row["mode"] == "sft" else "LoRA"
    return f"{name}{fewer} {row['what']}, {trained}, {row['dtype']}"


def _speed_up(row: Row) -> str:
    """The speed-up over diffusers, or why there is none."""
    if "ratio" in row:
        mark = " (the sides disagree)" if "disagrees" in row else ""
        return f"{1 / row['ratio']:.2f}x{mark}"
    for side, name in _SIDES.items():
        for key, text in _NOT_TIMED.items():
            if f"{side}_{key}" in row:
                return f"{name}: {text}"
    return NOT_MEASURED


def _each(row: Row, key: str, show: Callable[[object], str]) -> list[str]:
    values = [row.get(f"{side}_{key}") for side in _SIDES]
    return [_EMPTY if value is None or value == [] else show(value) for value in values]


def _both(row: Row, key: str, show: Callable[[object], str]) -> str:
    shown = _each(row, key, show)
    return shown[0] if shown[0] == shown[1] else " / ".join(shown)


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else number(value)


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _first(names: Sequence[str]) -> str:
    # A pipe would end the cell of the table.
    name = names[0].replace("|", " ")
    return f"`{name}`" if len(name) <= 60 else f"`{name[:57]}...`"


_SHOWN_OF_RUN: dict[str, Callable[[object], str]] = {
    "clips": str,
    "clips_per_s": number,
    "step_median_ms": _ms,
    "data_wait_percent": lambda value: f"{value:.2f}%",
    "seconds": number,
    "mib": number,
}


def _table(head: Cells, rows: Sequence[Cells]) -> list[str]:
    """Lines of Markdown, without the columns that are empty in every row."""
    # MFU and peak memory are empty on a CPU, for example.
    kept = [i for i in range(len(head)) if any(row[i] != _EMPTY for row in rows)]
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cells[i] for i in kept) + " |" for cells in lines]


def replace_section(text: str, section: str) -> str:
    """Replace the text between the comments; ValueError unless each occurs once, in order."""
    # Text outside of the comments is written by hand and stays.
    before, found, rest = text.partition(START)
    _, closed, after = rest.partition(END)
    if not found or not closed or text.count(START) != 1 or text.count(END) != 1:
        raise ValueError(f"the file must hold the lines\n{START}\n{END}\nonce, in this order")
    return f"{before}{START}\n\n{section}\n\n{END}{after}"


def draw_plots(results: Sequence[Results]) -> None:
    """Draw the plots of bench.data from its JSON files; other pieces draw theirs when they run."""
    from bench.data import plots
    from bench.harness.outcome import draw

    for each in results:
        for report in each.of("data"):
            for name, bars in plots(report["rows"]).items():
                draw(bars, each.folder / f"{name}.png")


def all_folders() -> list[Path]:
    return sorted(p for p in RESULTS.glob("*") if p.is_dir()) if RESULTS.is_dir() else []


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, help="default: all under bench/results")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="write all tables into this file")
    parser.add_argument("--readme", type=Path, help="write the compact table into this file")
    arguments = parser.parse_args(argv)
    into, readme = arguments.into, arguments.readme
    try:
        folders = [path.resolve() for path in arguments.folders] or all_folders()
        results = [read_results(folder) for folder in folders]
        if into is not None:
            text = into.read_text(encoding="utf-8")
            replace_section(text, "")  # a file without the comments is refused before any drawing
            draw_plots(results)
            section = write_section(results, into.resolve())
            into.write_text(replace_section(text, section), encoding="utf-8")
        if readme is not None:
            changed = replace_section(readme.read_text(encoding="utf-8"), write_compact(results))
            readme.write_text(changed, encoding="utf-8")
        if into is readme is None:
            print(write_section(results))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
