"""The README's benchmark section, from committed results:

    python -m bench.results_table [bench/results/FOLDER ...] [--readme README.md]

A folder holds the JSON files of bench.gpu_run, or of bench.step --out, from one machine and day.
Without folders, all under bench/results. The section stands between two comments of the README; the
ratio at the same checkpointing policy comes first, and what nothing has measured says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Report = Mapping[str, object]
Cells = Sequence[str]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
START = "<!-- benchmarks: start. Written by python -m bench.results_table; edits are lost. -->"
END = "<!-- benchmarks: end -->"
NOT_MEASURED = "not measured"
_STEP_PIECES = ("step", "2b", "5b")
_NONE = "–"
# What the project has to show on a GPU, by the piece of bench.gpu_run that measures it.
_GPU_PIECES = {
    "op_times": "fused ops against the copy rate, eager PyTorch, torch.compile and other kernels",
    "attention": "attention backends at 17,776 tokens",
    "2b": "2B: block and step against diffusers",
    "5b": "5B: block and step against diffusers",
    "data": "H.264 read by DALI against the CPU's readers",
    "data_runs": "`cogfast cache`, and 2B training on H.264 read by DALI: wait for data",
}
_PEERS_FIRST = ("eager", "compile")  # of the peers of an op, by a word of their names


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


def read_results(folder: Path) -> Results:
    """ValueError for a folder without results, or with those of a test of the program."""
    reports = {}
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text())
        if not isinstance(report, dict) or "piece" not in report or "rows" not in report:
            continue  # a piece that was skipped, or another program's file
        if report.get("is_tiny"):
            raise ValueError(f"{path}: made with --tiny, whose numbers mean nothing; delete it")
        reports[path.name] = report
    if not reports:
        raise ValueError(f"{folder}: no results of bench.gpu_run or bench.step in it")
    return Results(folder, reports)


def write_section(results: Sequence[Results]) -> str:
    """The text between the comments, from any number of machines, GPUs first."""
    lines = [
        "Speed-up is diffusers' time over ours, for the same weights, whose outputs and gradients are",
        "compared before anything is timed. Both sides clip, update with AdamW and keep an EMA.",
        "TFLOP/s and MFU count three forward passes (LoRA: two of the frozen linears), never",
        "recomputation.",
    ]
    gpus = [r for r in results if r.is_gpu]
    for each in [*gpus, *(r for r in results if not r.is_gpu)]:
        lines += ["", *_of_machine(each)]
    measured = {report["piece"] for r in gpus for report in r.reports.values() if report["rows"]}
    missing = [(what, NOT_MEASURED) for piece, what in _GPU_PIECES.items() if piece not in measured]
    if missing:
        lines += ["", *_table(("on a GPU", ""), missing)]
    if not any(r for r in results if not r.is_gpu):
        what = "a tiny model's step against diffusers (`make bench`)"
        lines += ["", *_table(("on a CPU", ""), [(what, NOT_MEASURED)])]
    return "\n".join(lines)


def _of_machine(results: Results) -> list[str]:
    first = next(iter(results.reports.values()))
    versions = {name: version for name, version in first["versions"].items() if version}
    kept = [f"{n} {versions[n]}" for n in ("torch", "triton", "diffusers", "peft") if n in versions]
    dates = sorted({str(report["started_utc"])[:10] for report in results.reports.values()})
    lines = [f"**{first['machine']}**, {', '.join(kept)}, {' and '.join(dates)}"]
    steps = results.of(*_STEP_PIECES)
    for rows in (_equal_policy(steps), _best_policy(steps)):
        lines += ["", *rows] if rows else []
    renders = {"op_times": _ops, "attention": _attention, "data": _data, "data_runs": _data_runs}
    for piece, render in renders.items():
        for report in results.of(piece):
            rows = render(report["rows"])
            lines += ["", *rows] if rows else []
    for path in sorted(results.folder.glob("*.png")):
        relative = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        lines += ["", f"![{path.stem} on {first['machine']}]({relative.as_posix()})"]
    return lines


def _equal_policy(reports: Sequence[Report]) -> list[str]:
    """Both sides with the same checkpointing and the same engine; a row for every case."""
    head = ("same policy on both sides", "speed-up", "ms, ours / diffusers", "p10 to p90, ours")
    head += ("TFLOP/s", "MFU", "peak GiB", "attention kernel")
    rows = []
    for report in reports:
        for row in report["rows"]:
            name = _case(row, report)
            if "not_timed" in row or "error" in row:
                rows.append((name, str(row.get("not_timed") or row["error"]), *[_NONE] * 6))
                continue
            spread = _NONE
            if "ours_p10_ms" in row:
                spread = f"{_number(row['ours_p10_ms'])} to {_number(row['ours_p90_ms'])}"
            cells = (_speed_up(row), _both(row, "median_ms", _ms), spread)
            cells += (_both(row, "model_tflop_per_s", _number), _both(row, "mfu", _percent))
            cells += (
                _both(row, "peak_memory_gib", _number),
                _both(row, "attention_kernels", _first),
            )
            rows.append((name, *cells))
    return _table(head, rows) if rows else []


def _best_policy(reports: Sequence[Report]) -> list[str]:
    head = ("each side's best policy", "speed-up", "ours", "diffusers", "ms, ours / diffusers")
    head += ("MFU", "peak GiB")
    rows = []
    for report in reports:
        for row in report["numbers"].get("best", ()):
            if row["ours_policy"] == row["diffusers_policy"]:
                continue  # stands above
            name = f"{_model(row)}, against {row['against']}"
            cells = (_speed_up(row), row["ours_policy"], row["diffusers_policy"])
            cells += (_both(row, "median_ms", _ms), _both(row, "mfu", _percent))
            rows.append((name, *cells, _both(row, "peak_memory_gib", _number)))
    return _table(head, rows) if rows else []


def _ops(rows: Sequence[Mapping[str, object]]) -> list[str]:
    timed = [row for row in rows if "percent_of_copy" in row or row.get("status") == "FAILED"]
    names = list(dict.fromkeys(key for row in timed for key in row if key.startswith("vs ")))
    names.sort(key=lambda name: not any(word in name for word in _PEERS_FIRST))
    head = ("op", "ms", "GB/s", "of the copy rate", "goal", *(f"speed-up {n}" for n in names))
    body = []
    for row in timed:
        name = f"{row['op']} {row['way']}, {row['model']}"
        if row.get("status") == "FAILED":
            body.append((name, "wrong: not timed", *[_NONE] * (3 + len(names))))
            continue
        goal = row.get("goal_percent")
        cells = (_number(row["median_ms"]), _number(row["gb_per_s"]))
        cells += (f"{row['percent_of_copy']:.0f}%", _NONE if goal is None else f"{goal:.0f}%")
        speed_ups = (f"{row[n]:.2f}x" if n in row else _NONE for n in names)
        body.append((name, *cells, *speed_ups))
    return _table(head, body) if body else []


def _attention(rows: Sequence[Mapping[str, object]]) -> list[str]:
    head = ("attention [B, S, H, D]", "backend", "TFLOP/s forward", "TFLOP/s backward", "kernel")
    body = [
        (
            str(row["shape_bshd"]),
            str(row["backend"]),
            _number(row["forward_tflop_per_s"]),
            _number(row["backward_tflop_per_s"]),
            _first([row["forward_kernel"]]),
        )
        for row in rows
        if "forward_tflop_per_s" in row
    ]
    return _table(head, body) if body else []


def _data(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """A row for every clip; one reader's rates, on a CPU, as what two add to them."""
    of = {(row["clip"], row["side"], row["readers"]): row for row in rows}
    clips = list(dict.fromkeys(row["clip"] for row in rows))
    sides = list(dict.fromkeys((row["side"], row["readers"]) for row in rows))
    shown = [(side, n) for side, n in sides if n != 1 or (side, 2) not in sides]
    names = [f"{side}, {n} readers" if n else side for side, n in shown]
    ratios = {
        "ours / decord, per CPU second": (("ours", 0), ("decord", 0), "clips_per_cpu_s"),
        "ours, 2 readers / 1": (("ours", 2), ("ours", 1), "clips_per_s"),
    }
    body = []
    for clip in clips:
        rates = (_number(of[clip, side, n]["clips_per_s"]) for side, n in shown)
        quotients = []
        for above, below, key in ratios.values():
            pair = [of.get((clip, *side)) for side in (above, below)]
            quotients.append(f"{pair[0][key] / pair[1][key]:.2f}" if all(pair) else _NONE)
        one = of.get((clip, "ours", 1))
        memory = _NONE if one is None else _number(one["resident_mib"])
        body.append((str(clip), *rates, *quotients, memory))
    return _table(
        ("clips of 17 frames, 240x360, per second", *names, *ratios, "a reader of ours, MiB"), body
    )


def _data_runs(rows: Sequence[Mapping[str, object]]) -> list[str]:
    head = ("whole commands", "clips", "clips per second", "ms per step", "wait for data")
    head += ("seconds in all", "MiB")
    shown = {"clips": str, "clips_per_s": _number, "step_median_ms": _ms}
    shown |= {"data_wait_percent": lambda value: f"{value:.2f}%"}
    shown |= {"seconds": _number, "mib": _number}
    body = [
        (str(row["run"]), *(show(row[key]) if key in row else _NONE for key, show in shown.items()))
        for row in rows
    ]
    return _table(head, body)


def _case(row: Mapping[str, object], report: Report) -> str:
    threads = f", {report['threads']} threads" if report.get("threads", 1) > 1 else ""
    if report.get("threads") == 1:
        threads = ", one thread"
    engine = f"{row['engine']}, checkpointing {row['checkpointing']}"
    return f"{_model(row)}, {engine}{threads}"


def _model(row: Mapping[str, object]) -> str:
    layers, whole = row["num_layers"], row["num_layers_of_model"]
    fewer = f" with {layers} of {whole} layers" if layers != whole and row["what"] == "step" else ""
    name = str(row["model"])
    name = name.upper() if name in ("2b", "5b") else name
    trained = "all weights" if row["mode"] == "sft" else "LoRA"
    return f"{name}{fewer} {row['what']}, {trained}, {row['dtype']}"


def _speed_up(row: Mapping[str, object]) -> str:
    """Or why there is none."""
    if "ratio" in row:
        return f"{1 / row['ratio']:.2f}x"
    for side in ("ours", "diffusers"):
        for key, text in (("does_not_fit", "does not fit"), ("unavailable", "not installed")):
            if f"{side}_{key}" in row:
                return f"{side}: {text}"
        if f"{side}_error" in row:
            return f"{side}: failed"
    return NOT_MEASURED


def _both(row: Mapping[str, object], key: str, show: Callable[[object], str]) -> str:
    values = [row.get(f"{side}_{key}") for side in ("ours", "diffusers")]
    if not any(value is not None and value != [] for value in values):
        return _NONE
    shown = [_NONE if value is None or value == [] else show(value) for value in values]
    return shown[0] if shown[0] == shown[1] else " / ".join(shown)


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else _number(value)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _first(names: Sequence[str]) -> str:
    name = names[0].replace("|", " ")
    return f"`{name}`" if len(name) <= 60 else f"`{name[:57]}...`"


def _table(head: Cells, rows: Sequence[Cells]) -> list[str]:
    """Lines of Markdown; a column that says nothing is left out."""
    kept = [i for i in range(len(head)) if any(row[i] != _NONE for row in rows)]
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cells[i] for i in kept) + " |" for cells in lines]


def replace_section(readme: str, section: str) -> str:
    """ValueError where the comments are not there, once each and in order."""
    before, found, rest = readme.partition(START)
    _, closed, after = rest.partition(END)
    if not found or not closed or readme.count(START) != 1 or readme.count(END) != 1:
        raise ValueError(f"the README must hold the lines\n{START}\n{END}\nonce, in this order")
    return f"{before}{START}\n\n{section}\n\n{END}{after}"


def all_folders() -> list[Path]:
    return sorted(p for p in RESULTS.glob("*") if p.is_dir()) if RESULTS.is_dir() else []


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, help="default: all under bench/results")
    parser.add_argument("--readme", type=Path, help="write into this file; else print")
    arguments = parser.parse_args(words)
    try:
        folders = [path.resolve() for path in arguments.folders] or all_folders()
        section = write_section([read_results(folder) for folder in folders])
        if arguments.readme is None:
            print(section)
        else:
            changed = replace_section(arguments.readme.read_text(encoding="utf-8"), section)
            arguments.readme.write_text(changed, encoding="utf-8")
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
