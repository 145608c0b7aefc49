"""Run folders for the tests of the page, written by hand: no training."""

import json
import math
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path

import numpy as np

from cogfast.extensions.sample.writer import write_video
from tests.support.runs import Run

PROMPTS = ("a red circle moves right", "a blue square & a <b>star</b>")
KEYS = ("loss", "loss_running", "lr", "grad_norm", "step_ms", "data_wait_ms", "samples_per_s")
ELEMENTS_WITHOUT_END = ("meta", "link", "input")


def lines(num_lines: int, every: int = 10, evaluated: int = 50) -> Iterator[dict]:
    """Lines of metrics.jsonl: a falling loss, and evaluations."""
    for i in range(1, num_lines + 1):
        step, loss = i * every, 0.1 + math.exp(-i / num_lines * 4) + 0.02 * math.sin(7 * i)
        line = {"step": step, "loss": loss, "loss_running": loss + 0.01, "mfu": None}
        line |= {"lr": 1e-4 * min(1, i / 20), "grad_norm": 1 + 0.5 * math.cos(3 * i)}
        line |= {"step_ms": 800.5 + i % 7, "data_wait_ms": 3.25, "tokens_per_s": 17776.5}
        line |= {"samples_per_s": 10 + 0.01 * (i % 13), "model_tflops": 400.125 + i % 3}
        line |= {"skipped": 0, "skipped_in_a_row": 0}
        line |= {"memory_allocated_gib": 61.2345, "memory_reserved_gib": 64.5}
        bands = {band: loss * (1 + band / 4) for band in range(4)}
        yield line | {f"train_loss_band_{band}": of_band for band, of_band in bands.items()}
        if step % evaluated == 0:
            held_out = {f"valid_loss_band_{band}": of_band for band, of_band in bands.items()}
            yield {"step": step, "valid_loss": loss + 0.05, **held_out}


def write_run(
    run: Path,
    num_lines: int = 20,
    steps: Sequence[int] = (50, 100),
    prompts: Sequence[str] = PROMPTS,
    **args: object,
) -> Path:
    """A run of the layout `cogfast` with metrics, configuration, versions and evaluations."""
    run.mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in lines(num_lines))
    (run / "metrics.jsonl").write_text(text)
    text = Run(run.parent, run.parent / "base").with_args(**args).base
    base = text.rename(text.with_name(f"{run.name}.yaml"))
    config = Run(run.parent, run.parent).of_files(base).config("args.seed=7")
    (run / "training_config.yaml").write_text(config.to_yaml())
    facts = {"num_steps": 1000, "global_batch": 4, "num_samples": 60, "num_trained": 5_830_000}
    facts |= {"allow_import": [], "effective": {"args.attention_backend": "native"}}
    facts["origins"] = {key: of for key, of in config.origins.items() if of != "default"}
    (run / "run_facts.json").write_text(json.dumps(facts))
    environment = {"torch": "2.13.0", "devices": ["NVIDIA H100"] * 2, "world_size": 2}
    (run / "environment.json").write_text(json.dumps(environment))
    for step in steps:
        write_evaluation(run / "samples" / f"step-{step:08d}", "", prompts)
    return run


def write_evaluation(folder: Path, start: str, prompts: Sequence[str]) -> None:
    listing = {}
    for i, prompt in enumerate(prompts):
        name = f"{start}{i:03d}-prompt-{i:06x}.mp4"
        frames = np.zeros((9, 32, 48, 3), np.uint8)
        for t in range(9):
            frames[t, :, 4 * t : 4 * t + 8, i % 3] = 255
        write_video(folder / name, frames, fps=8)
        listing[name] = prompt
    (folder / f"{start}prompts.json").write_text(json.dumps(listing))


class Page(HTMLParser):
    """A parsed page: text by section, tables as lists of rows, links, scripts and their errors."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}  # by id of the section
        self.tables: dict[str, list[list[str]]] = {}
        self.scripts: list[str] = []
        self.code: list[str] = []  # texts of the code elements
        self._section = "head"
        self.feed(document)
        self.close()
        assert not self.open, f"not closed: {self.open}"
        self.data = json.loads(self.scripts[0])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.elements.append((tag, found))
        if tag not in ELEMENTS_WITHOUT_END:
            self.open.append(tag)
        if tag == "section":
            self._section = found["id"] or ""
        elif tag == "tr":
            self.tables.setdefault(self._section, []).append([])
        elif tag in ("td", "th"):
            self.tables[self._section][-1].append("")
        elif tag == "script":
            self.scripts.append("")
        elif tag == "code":
            self.code.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()
        if tag == "section":
            self._section = "outside"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif self.open and self.open[-1] != "style":
            self.texts.setdefault(self._section, []).append(data)
            if self.open[-1] == "code":
                self.code[-1] += data
            if "td" in self.open or "th" in self.open:
                self.tables[self._section][-1][-1] += data

    def text(self, section: str) -> str:
        return " ".join(" ".join(self.texts.get(section, [])).split())

    def attributes(self, tag: str, name: str) -> list[str]:
        return [found[name] or "" for kind, found in self.elements if kind == tag and name in found]

    def values(self, run: int = 0) -> dict[tuple[str, int], float | None]:
        """The numbers of a run's curves, by key and step."""
        axes, columns = (self.data["runs"][run][name] for name in ("axes", "columns"))
        return {
            (key, step): value
            for key, (axis, values) in columns.items()
            for step, value in zip(axes[axis][0], values, strict=True)
        }

    @property
    def sections(self) -> list[str]:
        return self.attributes("section", "id")

    def plots(self) -> dict[str, list[str]]:
        """Titles of the plots, with the labels of their lines."""
        plots = self.data["plots"]
        return {plot["title"]: [line["label"] for line in plot["lines"]] for plot in plots}
