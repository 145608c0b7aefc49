"""Plot how many times as fast as diffusers a training step is, from the results under bench/results:

    python -m bench.results_plot [--out FILE]    # writes docs/images/benchmarks.png

A bar is a case of bench.gpu_run, bench.step or bench.steps.cpu_peers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bench import results_table
from bench.harness.command import parser_of
from bench.results_table import Results, case_of, threads_of

_PICTURE = results_table.ROOT / "docs" / "images" / "benchmarks.png"
_COLORS = {"diffusers": "tab:blue", "compiled diffusers": "tab:orange"}


def bars_of(results: Results) -> list[tuple[str, dict[str, float]]]:
    """Return (case, {peer: speed-up over it}) of the cases that have both sides."""
    cases: dict[str, dict[str, float]] = {}
    for row in results.rows(*results_table.STEP_PIECES):
        if "ratio" in row:
            case = f"{case_of(row)}, checkpointing {row['checkpointing']}{threads_of(row)}"
            peer = "compiled diffusers" if row["engine"] == "compiled" else "diffusers"
            cases.setdefault(case, {})[peer] = 1 / row["ratio"]
    bars = [*cases.items()]
    for row in results.rows("cpu_peers"):
        speed_ups = dict(zip(_COLORS, (row[key] for key in results_table.PEERS), strict=True))
        bars.append((f"{row['model']}, {row['dtype']}{threads_of(row)}", speed_ups))
    return bars


def plot(results: Sequence[Results]) -> Figure:
    """Return a figure with a panel for each machine that has cases."""
    machines = [(each.machine, bars) for each in results if (bars := bars_of(each))]
    heights = [len(bars) for _, bars in machines]
    figure = Figure(figsize=(11, 1.5 + 0.32 * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(machines), sharex=True, squeeze=False, height_ratios=heights)
    for axes, (machine, bars) in zip(panels[:, 0], machines, strict=True):
        for i, (_, speed_ups) in enumerate(bars):
            width = 0.8 / len(speed_ups)
            for j, (peer, speed_up) in enumerate(speed_ups.items()):
                axes.barh(i - 0.4 + (j + 0.5) * width, speed_up, width, color=_COLORS[peer])
        axes.set_yticks(range(len(bars)), [case for case, _ in bars])
        axes.invert_yaxis()
        axes.axvline(1, color="black", linewidth=1)
        axes.set_title(machine, fontsize="medium")
    panels[-1, 0].set_xlabel("speed-up of a step: time of diffusers over time of cogfast")
    legend = [Patch(color=color, label=f"over {peer}") for peer, color in _COLORS.items()]
    figure.legend(handles=legend, loc="outside upper center", ncols=2)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=_PICTURE, help="the picture, a PNG")
    out = parser.parse_args(argv).out
    every = [results_table.read_results(folder) for folder in results_table.all_folders()]
    plot(every).savefig(out, dpi=110)
    return 0


if __name__ == "__main__":
    sys.exit(main())
