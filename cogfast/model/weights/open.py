"""Opens weights of any supported format; the format is detected from the content."""

from __future__ import annotations

from pathlib import Path

from cogfast.extensions.formats.peft import open_peft
from cogfast.extensions.formats.sat import find_sat_files, open_sat
from cogfast.model.weights.checkpoint_manifest import find_run_checkpoint
from cogfast.model.weights.diffusers import find_diffusers_folder, open_diffusers
from cogfast.model.weights.run_checkpoint import open_run
from cogfast.model.weights.source import WeightSource
from cogfast.model.weights.tensor_files import open_tensors


def open_source(path: Path, ema: bool | None = False) -> WeightSource:
    """Open the transformer's weights or adapters at `path`.

    path: a SAT folder, one iteration of it or its .pt file; a diffusers pipeline or transformer
    folder; a PEFT file or folder; a run of cogfast or one of its checkpoints. ema: open the moving average, which SAT folders and runs may have; None: that of a run,
    if it has one. Reading a tensor that is not finite raises ValueError.
    """
    # Runs first: their checkpoints are safetensors files, too.
    if (checkpoint := find_run_checkpoint(path)) is not None:
        return open_run(checkpoint, ema).checked()
    source = _open_named(path)
    if source is not None and ema:
        text = f"{source.description}: has no EMA weights"
        raise ValueError(f"{text}; only SAT folders and runs can have them, use the plain weights")
    if source is None and ema and path.is_file():
        text = f"{path}: is one file, and EMA weights are in a folder; give the SAT folder"
        raise ValueError(text)
    return (source or open_sat(find_sat_files(path, bool(ema)))).checked()


def _open_named(path: Path) -> WeightSource | None:
    """Open weights under diffusers' names, or adapters; None if there are none."""
    is_file = path.is_file()
    folder = find_diffusers_folder(path.parent if is_file else path)
    if is_file and path.suffix not in (".safetensors", ".bin"):
        return None
    loras = [] if is_file else [*path.glob("*.safetensors"), *path.glob("pytorch_lora_weights.bin")]
    if is_file or (folder is None and loras):
        # LoRA files and diffusers' weights share the suffix: only the tensors' names differ.
        names = open_tensors(path if is_file or len(loras) > 1 else loras[0]).names()
        if any("lora" in name for name in names) or (is_file and folder is None):
            return open_peft(path)
    return None if folder is None else open_diffusers(folder)
