"""A small part of `python -m scripts.compare_behaviour`: nothing that a user has has changed."""

import importlib
import tempfile
from pathlib import Path

import pytest

from scripts.behaviour.difference import FIXTURES, without_listed

# {part: the least number of cases that its small part compares}
PARTS = {"words": 100, "names": 140, "disks": 4}


@pytest.mark.parametrize("part", PARTS)
def test_nothing_has_changed(part: str) -> None:
    """A change that is wanted is recorded again: see scripts/compare_behaviour.py."""
    compare = importlib.import_module(f"scripts.behaviour.{part}").compare
    # Not pytest's folder: texts are compared at one length of the path.
    with tempfile.TemporaryDirectory() as work:
        number, found = compare(FIXTURES / part, Path(work).resolve(), small=True)
    assert number >= PARTS[part]
    assert not [str(one) for one in without_listed(found, [part], is_whole=False)]
