"""The list of planted faults (scripts/plant.py) moves with the code."""

import ast
import json
from pathlib import Path

import pytest

from scripts.plant import FAULTS, Fault, read_faults

ROOT = Path(__file__).resolve().parents[2]
ALL = read_faults()


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.name)
def test_a_fault_fits_its_file(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text()
    assert text.count(fault.old) == 1
    planted = text.replace(fault.old, fault.new)
    assert planted != text
    if fault.file.endswith(".py"):
        ast.parse(planted)
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).exists()
        assert f"def {name}(" in (ROOT / file).read_text() or not name


def test_the_list_covers_the_package() -> None:
    names = [fault.name for fault in ALL]
    assert len(set(names)) == len(names) >= 60
    code = (file.parent for file in (ROOT / "cogfast").rglob("*.py") if file.name != "__init__.py")
    parts = {folder.relative_to(ROOT).parts[:2] for folder in code}
    assert parts == {Path(fault.file).parent.parts[:2] for fault in ALL}


def test_the_tests_noticed_the_faults_when_they_were_last_planted() -> None:
    found = json.loads((FAULTS / "results.json").read_text())
    assert list(found["noticed_by"]) == [fault.name for fault in ALL]
    assert sum(map(bool, found["noticed_by"].values())) == found["noticed"] >= 0.95 * len(ALL)
