"""Each extension can be deleted: the core trains, saves, resumes and samples without its files."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cogfast.extensions.table import TABLE
from scripts import write_map
from tests.core.structure import FILES, remaining
from tests.support.runs import Run
from tests.support.tiny_run import ROOT, write_clips_with_vae

FOLDERS = {
    name.split("/")[1] for name in FILES if name.count("/") == 2 and name[:11] == "extensions/"
}
# Extensions that the core still imports: these wait for seams of their own.
WOVEN = {word.split(".")[0] for words in remaining().values() for word in words.split()}
REMOVABLE = sorted(FOLDERS - WOVEN)
EXTRA = {row.folder for row in TABLE if row.is_extra}
ALL = ",".join(name for name in REMOVABLE if name != "sample")
# Words that turn on an extension, and so need its files
SWITCHES = {
    "elastic": ["args.elastic=shrink"],
    "exports": ["args.export=all"],
    "publish": ["args.push_to_hub=me/model"],
    "scores": ["args.eval_command=true {samples}", "args.eval_interval=1"],
    "tar": ["data.target=cogfast.data.datasets.VideoShards"],
}
ASKED = sorted(SWITCHES.keys() & {*REMOVABLE})


class Cases:
    """Runs of cogfast in processes in which some extensions are missing."""

    def __init__(self, folder: Path) -> None:
        data = write_clips_with_vae(folder / "data", num_clips=6, latent_channels=8)
        self.folder, self.run = folder, Run(data, folder).with_vae()
        self.commands: dict[str, list[list[str]]] = {}

    def train(self, missing: str) -> None:
        """Train three steps and save, resume for two more, and sample."""
        run = self.run.with_words(
            f"args.run_folder={self.folder}/run-{missing}", "args.save_interval=3"
        )
        first, second = (run.command(f"args.train_iters={n}") for n in (3, 5))
        commands = [first, [*second, "args.resume=latest"]]
        if missing != "sample":
            run_folder, out = f"{self.folder}/run-{missing}", f"{self.folder}/out-{missing}"
            commands.append(["sample", run_folder, "--prompt", "a bar", "--out", out])
        self.commands[missing] = commands

    def results(self) -> dict[str, Any]:
        rows = [
            [key.split()[0] if key else "", words, str(self._file(key))]
            for key, words in self.commands.items()
        ]
        cases = self.folder / "cases.json"
        cases.write_text(json.dumps(rows))
        command = [sys.executable, "-m", "tests.support.without_extension", str(cases)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return {key: json.loads(self._file(key).read_text()) for key in self.commands}

    def _file(self, key: str) -> Path:
        return self.folder / f"result-{key}.json"

    def losses(self, missing: str) -> list[float]:
        lines = (self.folder / f"run-{missing}" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]


def trained(folder: Path, names: Sequence[str]) -> tuple[Cases, dict[str, Any]]:
    """Train with all files, and without those of each of `names`."""
    cases = Cases(folder)
    for name in ("", *names):
        cases.train(name)
    return cases, cases.results()


def check(cases: Cases, results: dict, missing: str) -> None:
    """Check that a run was that with all files, bit for bit."""
    result, losses = results[missing], cases.losses(missing)
    assert result["statuses"] == [0] * len(result["statuses"]), result["printed"]
    assert len(losses) == 5 and losses == cases.losses("")
    assert not loaded(result) & {*missing.split(",")}


def loaded(result: dict) -> set[str]:
    """Return the extensions of which more than keys.py was imported."""
    parts = [
        name.split(".") for name in result["modules"] if name.startswith("cogfast.extensions.")
    ]
    return {part[2] for part in parts if len(part) > 3 and part[3] != "keys"}


def test_a_run_needs_no_extension(tmp_path: Path) -> None:
    cases, results = trained(tmp_path, [ALL])
    check(cases, results, ALL)
    # Sampling itself is asked for; what a run shows is there with all files.
    assert loaded(results[""]) <= WOVEN | {"sample"} | EXTRA


@pytest.mark.soak
def test_a_run_needs_none_of_them(tmp_path: Path) -> None:
    cases, results = trained(tmp_path, REMOVABLE)
    for name in REMOVABLE:
        check(cases, results, name)


def test_a_configuration_that_asks_for_it_says_what_is_missing(tmp_path: Path) -> None:
    cases = Cases(tmp_path)
    for name in ASKED:
        words = f"args.run_folder={tmp_path}/asked-{name}", "args.train_iters=1"
        cases.commands[f"{name} asked"] = [cases.run.command(*SWITCHES[name], *words)]
    for name, result in zip(ASKED, cases.results().values(), strict=True):
        switch = next(row.switch for row in TABLE if row.folder == name)
        line = f"{switch} needs cogfast/extensions/{name}, which is not installed"
        assert result["statuses"] != [0] and line in result["printed"].splitlines()[-1]


def test_the_map_is_that_of_the_source() -> None:
    assert write_map.FILE.read_text() == write_map.page(), "run python -m scripts.write_map"
