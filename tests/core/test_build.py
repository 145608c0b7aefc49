"""Building a wheel as pip does in an isolated environment: without PyTorch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "configs", "docs", "cogfast")


def test_a_wheel_is_built_without_torch(tmp_path: Path) -> None:
    source, hiding = tmp_path / "source", tmp_path / "hiding"
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        else:
            source.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, source)
    # This environment has what pip would install into an isolated one, which has no torch.
    hiding.mkdir()
    (hiding / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index"]
    done = subprocess.run(
        [*command, "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)],
        env={**os.environ, "PYTHONPATH": str(hiding)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    (wheel,) = tmp_path.glob("cogfast-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "cogfast").rglob("*.py")}
    assert modules | {"cogfast/py.typed"} <= set(names)
    assert any(name.endswith("share/cogfast/docs/options.md") for name in names)
    assert not [name for name in names if name.endswith(".so")]
