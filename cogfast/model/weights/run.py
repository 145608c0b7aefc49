"""Weights out of the checkpoints of a run of ours.

A checkpoint is a folder of safetensors files with slices of flattened parameters, and a
manifest.json that says which slice of which parameter lies where; see read_run_weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from cogfast.model.weights.shard import Shard
from cogfast.model.weights.source import WeightSource

FORMAT = "cogfast-checkpoint-1"
_Piece = tuple[int, int, str, str]  # start, numel, file, key in the file


def find_run_checkpoint(path: Path) -> Path | None:
    """The checkpoint folder that `path` is, or the newest of the run that it is, or None."""
    for latest in (path / "checkpoints" / "latest", path / "latest"):
        if latest.is_file():
            newest = latest.parent / latest.read_text().strip()
            if (newest / "manifest.json").is_file():
                return newest
    return path if (path / "manifest.json").is_file() else None


def open_run(checkpoint_dir: Path, ema: bool = False) -> WeightSource:
    """What a run trained: master weights, or their moving average; with them the frozen ones that
    the checkpoint keeps, as flat tensors."""
    from safetensors import SafetensorError, safe_open

    manifest = _read_manifest(checkpoint_dir)
    pieces: dict[tuple[str, str], list[_Piece]] = {}
    for file, slices in manifest["slices"].items():
        for key, s in slices.items():
            piece = (s["start"], s["numel"], file, key)
            pieces.setdefault((s["parameter"], s["kind"]), []).append(piece)
    kind = "shadow" if ema else "master"
    trained = {name: tuple(p["shape"]) for name, p in manifest["parameters"].items()}
    if ema and not any(k == "shadow" for _, k in pieces):
        raise ValueError(
            f"{checkpoint_dir}: it holds no EMA weights, the run's optimizer keeps none; ask for "
            "the plain ones or train with sat.ops.FusedEmaAdam"
        )
    frozen = {
        name: (sum(p[1] for p in found),) for (name, k), found in pieces.items() if k == "frozen"
    }

    def read(name: str, shard: Shard | None) -> Tensor:
        shape = trained.get(name) or frozen[name]
        found = sorted(pieces.get((name, kind if name in trained else "frozen"), []))
        end, parts = 0, []
        for start, numel, file, key in found:
            if start != end:
                break
            try:
                with safe_open(checkpoint_dir / file, framework="pt") as opened:
                    parts.append(opened.get_tensor(key))
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{checkpoint_dir / file}: missing, truncated or damaged ({error}); use an "
                    "older checkpoint of the run"
                ) from None
            end += numel
        if end != torch.Size(shape).numel():
            raise ValueError(
                f"{checkpoint_dir}: its slices of {name} end at element {end} of "
                f"{torch.Size(shape).numel()}; use an older checkpoint of the run"
            )
        whole = torch.cat(parts).view(shape)
        return whole if shard is None else shard.of(whole)

    which = "EMA weights" if ema else "weights"
    return WeightSource(
        description=f"{which} of step {manifest['step']} in {checkpoint_dir}",
        shapes={**frozen, **trained},
        read=read,
        is_partial=True,
    )


def read_run_weights(checkpoint_dir: Path | str, ema: bool = False) -> Iterator[tuple[str, Tensor]]:
    """(our name, float32 tensor) of every parameter that the checkpoint holds, one at a time;
    frozen ones, whose shape the checkpoint does not note, come flat."""
    source = open_run(Path(checkpoint_dir), ema)
    for name in source.shapes:
        yield name, source.read(name, None)


def _read_manifest(checkpoint_dir: Path) -> dict:
    path = checkpoint_dir / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{checkpoint_dir}: not a checkpoint of ours, no manifest.json") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: damaged ({error}); use an older checkpoint") from None
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{path}: format {manifest.get('format')!r}, this version reads {FORMAT!r}; read it "
            "with the version that wrote it"
        )
    return manifest
