"""The wheel: what is in it, and that it works where it is installed, from any folder."""

import email
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.tiny_run import ROOT

# A build reads these files, of which the last three are optional.
SOURCES = ("pyproject.toml", "LICENSE", "docs", "cogfast", "setup.py", "setup.cfg", "MANIFEST.in")
HIDDEN = "import sys\nsys.modules[{!r}] = None\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build as pip does in an isolated environment: without PyTorch, from a copy.

    This environment has what pip would download into an isolated one.
    """
    folder = tmp_path_factory.mktemp("wheel")
    for name in filter(lambda name: (ROOT / name).exists(), SOURCES):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (folder / "source").mkdir(exist_ok=True)
        copy(ROOT / name, folder / "source" / name)
    (folder / "hiding").mkdir()
    (folder / "hiding" / "sitecustomize.py").write_text(HIDDEN.format("torch"))
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, "--wheel-dir", str(folder), str(folder / "source")],
        env={**os.environ, "PYTHONPATH": str(folder / "hiding")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_one_small_wheel_has_all_files_of_the_package(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = {info.filename: info.file_size for info in archive.infolist()}
        (metadata,) = (name for name in files if name.endswith(".dist-info/METADATA"))
        found = email.message_from_bytes(archive.read(metadata))
    paths = [path for path in (ROOT / "cogfast").rglob("*") if path.suffix not in (".pyc", ".so")]
    sources = {path.relative_to(ROOT).as_posix() for path in paths if path.is_file()}
    assert {"cogfast/configs/sft.yaml", "cogfast/kernels/cpu/ops.h", "cogfast/py.typed"} <= sources
    assert {name for name in files if not name.startswith("cogfast-")} == sources
    assert sum(files.values()) < 3e6
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Requires-Python"] == ">=3.11"
    assert found["Description-Content-Type"] == "text/markdown"
    assert "](" not in found.get_payload()  # PyPI has no other files to link to
    assert {"fa4", "dali", "gpu"} <= set(found.get_all("Provides-Extra", []))


def test_an_installed_wheel_trains_from_any_folder(wheel: Path, tmp_path: Path) -> None:
    """Install into a folder in front of this environment's packages; Triton is hidden, as on a Mac."""
    site, work = tmp_path / "site", tmp_path / "work"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True)
    (site / "sitecustomize.py").write_text(HIDDEN.format("triton"))
    work.mkdir()
    command = "train --base cogvideox_5b.yaml configs/sft.yaml --dry-run args.train_iters=7"
    done = subprocess.run(
        [str(site / "bin" / "cogfast"), *command.split()],
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "train_iters: 7 # command line" in " ".join(done.stdout.split())


def test_constraints_have_the_versions_of_the_tested_set() -> None:
    rest = (ROOT / "constraints-no-torch.txt").read_text().splitlines()
    assert "-c constraints-no-torch.txt" in (ROOT / "constraints.txt").read_text().splitlines()
    assert not [line for line in rest if line.startswith(("torch=", "triton="))]
