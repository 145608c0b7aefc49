"""Damaged and hostile folders of weights and of runs, of every format: read as they are meant, or refused
in one line; nothing runs, nothing hangs, nothing is written elsewhere."""

import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.hostile.damage import files_of, header_of
from tests.cli.hostile.forked_case import Outcome, faults, preload, run_case
from tests.cli.hostile.formats import FORMATS, SAMPLE, WEIGHTS, Read, load_models, run

pytestmark = pytest.mark.forks

NUM_QUICK, NUM_SOAKED = {"run": 12}, 300  # of each format; 5 of the others
Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A whole folder of each format, made when it is first asked for."""
    root = tmp_path_factory.mktemp("whole")
    preload()
    load_models()

    def make(name: str) -> Path:
        folder = root / name / "in"
        if not folder.exists():
            folder.mkdir(parents=True)
            FORMATS[name].make(folder)
        return folder

    return make


def read_in(case: Path, read: Read) -> Outcome:
    return run_case(lambda: run(read), case)


def examine(name: str, whole: Path, seed: int, folder: Path) -> list[str]:
    """Damage a copy of `whole`, read it, and return the faults of the outcome."""
    reads, damages = FORMATS[name].reads, FORMATS[name].damages
    read, draw = reads[seed % len(reads)], random.Random(seed)
    case = folder / "beside" / f"case-{seed}"
    shutil.copytree(whole, case / "in")
    done = None
    while done is None:
        done = draw.choice(damages)(case / "in", draw)
    outcome = read_in(case, read)
    found = faults(outcome)
    if outcome.status == 2 and not re.search(r"\bin[/: ]|\.yaml|--|=", outcome.last_line):
        found.append(f"names no file: {outcome.last_line}")
    if outcome.status != 0 and "out" in os.listdir(case) and read[:1] == ("convert",):
        found.append("left a target")
    if (folder / "written").exists():
        found.append("ran what a pickle says")
        (folder / "written").unlink()
    shutil.rmtree(case)
    return [f"seed {seed}, {read}, {done}: {fault}" for fault in found]


@pytest.mark.parametrize("name", FORMATS)
def test_whole_folders_are_read(name: str, made: Make, tmp_path: Path) -> None:
    """Undamaged folders are read, so the refusals below are due to the damage."""
    for i, read in enumerate(FORMATS[name].reads):
        shutil.copytree(made(name), tmp_path / str(i) / "in")
        outcome = read_in(tmp_path / str(i), read)
        assert outcome.status == 0 and not faults(outcome), (read, outcome.output)


QUICK = [pytest.param(name, range(NUM_QUICK.get(name, 5))) for name in FORMATS]
SOAK = range(100, 100 + NUM_SOAKED)
SOAKED = [pytest.param(name, SOAK, marks=pytest.mark.soak) for name in FORMATS]


@pytest.mark.parametrize(("name", "seeds"), [*QUICK, *SOAKED])
def test_damaged_folders_end_in_one_line(
    name: str, seeds: range, made: Make, tmp_path: Path
) -> None:
    found = [fault for seed in seeds for fault in examine(name, made(name), seed, tmp_path)]
    assert found == []


# A tensor that every reader of a format reads, adapters first.
READ = r"matrix_A|lora_A|qkv.bias|query_key_value.bias|to_q.bias|conv_in.conv.bias|wo.weight"


def spoil(folder: Path, value: float) -> None:
    """Replace one number of one tensor, in a folder of any format."""
    for file in files_of(folder, ".safetensors", ".pt"):
        content = torch.load(file, weights_only=True) if file.suffix == ".pt" else {}
        state = content[min(content)] if content else load_file(file)
        found = [n for part in READ.split("|") for n in state if re.search(part, n)]
        if found:
            state[found[0]].view(-1)[-1] = value
            metadata = None if content else header_of(file)[0].get("__metadata__")
            torch.save(content, file) if content else save_file(state, file, metadata)
            return


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_number_that_is_not_finite_is_refused(name: str, made: Make, tmp_path: Path) -> None:
    for i, read in enumerate(read for read in WEIGHTS[name].reads if read is not SAMPLE):
        case = tmp_path / str(i)
        shutil.copytree(made(name), case / "in")
        spoil(case / "in", float("-inf" if i % 2 else "nan"))
        outcome = read_in(case, read)
        assert faults(outcome) == [] and outcome.status == 2, outcome.output
        assert re.search("has 1 of .* NaN or infinite; copy it again", outcome.last_line)
        assert re.search(r"\bin[:/]", outcome.last_line) and "out" not in os.listdir(case)


@pytest.mark.parametrize("name", ["sat", "diffusers", "diffusers in shards", "peft", "vae", "t5"])
def test_files_without_rights_are_named_with_the_cause(
    name: str, made: Make, tmp_path: Path
) -> None:
    shutil.copytree(made(name), tmp_path / "case" / "in")
    for file in files_of(tmp_path / "case" / "in", ".safetensors", ".pt"):
        file.chmod(0)
    outcome = read_in(tmp_path / "case", FORMATS[name].reads[0])
    assert faults(outcome) == [] and outcome.status == 2, outcome.output
    assert "Permission denied" in outcome.last_line, outcome.last_line
    assert "out" not in os.listdir(tmp_path / "case")


@pytest.mark.parametrize("folder", ["checkpoints", "checkpoints/00000004"])
def test_folders_of_a_run_without_rights_end_in_one_line(
    folder: str, made: Make, tmp_path: Path
) -> None:
    for i, read in enumerate(FORMATS["run"].reads[1:3]):  # convert and sample
        case = tmp_path / str(i)
        shutil.copytree(made("run"), case / "in")
        (case / "in" / "run" / folder).chmod(0)
        outcome = read_in(case, read)
        (case / "in" / "run" / folder).chmod(0o755)
        assert faults(outcome) == [] and outcome.status == 2, outcome.output
        assert f"{folder}/" in outcome.last_line and "Permission denied" in outcome.last_line
