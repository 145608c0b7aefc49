"""Writes docs/map.md, a reading list of the core and the extensions: `python -m scripts.write_map`.

A test compares the file with what this writes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from cogfast.core.keys import Keys
from cogfast.extensions.table import TABLE

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "cogfast"
FILE = ROOT / "docs" / "map.md"

# From the mp4 to the checkpoint: what a stop does, and its files
STOPS = {
    "A video becomes a batch": "data/datasets data/video/reader data/video/transform data/video/clip data/global_order "
    "data/batches data/workers",
    "A batch becomes latents and embeddings": "train/encode model/autoencoder model/text_encoder",
    "Noise, estimate and loss": "diffusion/noise_schedule diffusion/timestep_sampling diffusion/denoiser diffusion/loss",
    "The transformer": "model/config model/transformer model/block model/attention model/embeddings model/lora",
    "Its operations": "kernels/adaptive_layernorm kernels/qk_norm_rope3d kernels/gelu kernels/add_low_rank "
    "kernels/attention_backends kernels/block_kernels",
    "Processes": "distributed/process_groups distributed/parallelize distributed/tensor_parallel distributed/zero_engine "
    "distributed/fused_step kernels/fused_ema_adam",
    "The run": "train/keys train/phases train/assembly train/trainer train/optimizer train/watchers/watcher "
    "train/watchers/metrics",
    "The checkpoint": "model/weights/checkpoint_manifest train/checkpoint/snapshot train/checkpoint/folder train/checkpoint/write "
    "train/checkpoint/load",
}

_HEAD = """# Map of the code

`python -m scripts.write_map` writes this page from the source. [Architecture](architecture.md) says how the parts work together.

"""
_CORE = """## Reading list

The core trains, and knows no extension. These {files} files, {lines:,} lines, lead from an mp4 to a checkpoint; begin with the loop,
`Trainer._run_steps` in `train/trainer.py`.

| file of `cogfast/` | lines | what it is |
| --- | --- | --- |
"""
_EXTENSIONS = """
## Extensions

A folder of `cogfast/extensions/` each. To remove one, delete its folder, its row of `TABLE` in `cogfast/extensions/table.py`, and the class of
its keys there; `tests/core/test_removable.py` runs the rest without it. Those without a row are still imported by the core, or by a command
alone.

| folder | lines | turned on by | called by the core at | keys of `args` |
| --- | --- | --- | --- | --- |
"""


def lines_of(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def summary(path: Path) -> str:
    """Return the first sentence of a file's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def keys_of(folder: str) -> list[str]:
    """Return the keys that an extension declares."""
    if not (PACKAGE / "extensions" / folder / "keys.py").exists():
        return []
    found = vars(import_module(f"cogfast.extensions.{folder}.keys")).values()
    kinds = [
        one for one in found if isinstance(one, type) and issubclass(one, Keys) and one is not Keys
    ]
    return list(dict.fromkeys(name for kind in kinds for name in kind.model_fields))


def rows() -> Iterator[str]:
    """Yield the row of each extension."""
    folders = {path.parent.name for path in PACKAGE.glob("extensions/*/__init__.py")}
    for folder in sorted(folders):
        number = sum(map(lines_of, (PACKAGE / "extensions" / folder).rglob("*.py")))
        own = [row for row in TABLE if row.folder == folder]
        switches = ", ".join(dict.fromkeys(f"`{row.switch}`" for row in own))
        seams = ", ".join(dict.fromkeys(f"`{seam}`" for row in own for seam in row.uses))
        keys = ", ".join(f"`{name}`" for name in keys_of(folder))
        yield f"| `{folder}/` | {number:,} | {switches} | {seams} | {keys} |\n"


def page() -> str:
    """Return docs/map.md."""
    listed, total, table = 0, 0, ""
    for stop, names in STOPS.items():
        table += f"| **{stop}** | | |\n"
        for name in names.split():
            path = PACKAGE / f"{name}.py"
            listed, total = listed + 1, total + lines_of(path)
            table += f"| `{name}.py` | {lines_of(path):,} | {summary(path)} |\n"
    return f"{_HEAD}{_CORE.format(files=listed, lines=total)}{table}{_EXTENSIONS}{''.join(rows())}"


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
