"""The data and configurations of the recorded runs: tests/behaviour/inputs, as users have them on disk.

data.tar.xz has tiny clips with captions, controls, masks, manifests and first stages; models.json has
a configuration of each family in SAT's keys, and a copy of the quickstart's. They are inputs:
`--record` does not write them.
"""

from __future__ import annotations

import json
import tarfile
from contextlib import suppress
from pathlib import Path

from scripts.behaviour.difference import FIXTURES

FAMILIES = ("2b", "5b", "5b_i2v", "1.5_5b", "1.5_5b_i2v")


def unpack(work: Path) -> Path:
    """Write them to a new folder of `work` and return it. Paths in them are relative to its parent."""
    folder = work / "inputs"
    folder.mkdir(parents=True)
    with tarfile.open(FIXTURES / "inputs" / "data.tar.xz") as tar:
        with suppress(AttributeError):  # Python 3.11.3 and earlier have none
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(folder)
    models = json.loads((FIXTURES / "inputs" / "models.json").read_text())
    for name, sections in models.items():
        (folder / f"{name}.yaml").write_text(json.dumps(sections, indent=1))  # JSON is YAML
    return folder
