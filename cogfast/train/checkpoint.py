"""Checkpoints of a run: files that know no layout, written whole or not at all.

    <run>/checkpoints/<step>/manifest.json           what is where, counters, how far the run is
    <run>/checkpoints/<step>/rank-00000.safetensors  the slices that rank 0 owned: master weights,
                                                     moments and EMA, flat float32
    <run>/checkpoints/latest                         the newest step that is complete

A slice is a range of a flattened parameter, so any other number of ranks can read what it needs.
Frozen weights are kept too where they are the smaller part (the fixed position table of a full
fine-tune), not where they are the larger (the base of a LoRA run).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from cogfast.train.zero_engine import ZeroEngine

FORMAT = "cogfast-checkpoint-1"


def newest_checkpoint(run: Path) -> Path | None:
    """The complete checkpoint that `<run>/checkpoints/latest` names, or None."""
    latest = run / "checkpoints" / "latest"
    if not latest.is_file():
        return None
    checkpoint = run / "checkpoints" / latest.read_text().strip()
    replaced = replaced_name(checkpoint)
    # A run was killed between the two renames that put a new checkpoint in an old one's place.
    return replaced if replaced.is_dir() and not checkpoint.is_dir() else checkpoint


def replaced_name(checkpoint: Path) -> Path:
    """What a checkpoint is called while another of its step takes its place."""
    return checkpoint.with_name(f"{checkpoint.name}.incomplete.old")


def parameter_shape(parameter: Tensor) -> list[int]:
    """The whole parameter's, which ZeRO-3 empties."""
    return list(getattr(parameter, "ds_shape", parameter.shape))


def read_manifest(path: Path) -> dict:
    """The manifest of a checkpoint folder, after a look at its files.

    ValueError where the folder is missing, incomplete or damaged; it names the last good one.
    """
    try:
        return _intact_manifest(path)
    except _DamageError as error:
        raise ValueError(_refusal(path, error)) from None


class _DamageError(Exception):
    """What is wrong with a checkpoint."""


def _intact_manifest(path: Path) -> dict:
    if not path.is_dir():
        raise _DamageError("no such folder")
    if not (path / "manifest.json").is_file():
        raise _DamageError("it has no manifest.json")
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _DamageError(f"its manifest.json is damaged ({error})") from None
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise _DamageError(f"its manifest.json says format {found}, not {FORMAT}")
    for name, size in manifest["bytes"].items():
        if not (path / name).is_file():
            raise _DamageError(f"{name} is missing")
        if (path / name).stat().st_size != size:
            wrong = (path / name).stat().st_size
            raise _DamageError(f"{name} has {wrong} bytes instead of {size}")
    return manifest


def _refusal(path: Path, error: Exception) -> str:
    """The line that says what is wrong, and where the run can go on instead."""
    siblings = path.parent.iterdir() if path.parent.is_dir() else ()
    hint = "there is no other one in its folder"
    for other in sorted((p for p in siblings if p.name.isdigit() and p != path), reverse=True):
        try:
            _intact_manifest(other)
        except _DamageError:
            continue
        hint = f"the last good one is that of step {int(other.name)}: --resume {other}"
        break
    return f"args.resume={path}: cannot resume from it: {error}; {hint}"


def load_checkpoint(path: Path, engine: ZeroEngine) -> dict:
    """Fill the engine's master weights, moments, EMA and counters from a checkpoint.

    Every rank reads only its own slices, whatever number of ranks wrote them. Returns the
    manifest. ValueError where the checkpoint holds another model.
    """
    from safetensors import SafetensorError

    manifest = read_manifest(path)
    _check_same_model(path, manifest, engine)
    try:
        _fill(path, manifest, engine)
    except SafetensorError as error:
        raise ValueError(_refusal(path, error)) from None
    for piece in engine.slices:
        for key, value in manifest["counters"][piece.parameter].items():
            engine.set_counter(piece.part, key, value)
    engine.load_loss_scaler_state(manifest["loss_scaler"])
    engine.publish("master")
    return manifest


def _fill(path: Path, manifest: dict, engine: ZeroEngine) -> None:
    """Read this rank's slices, and the frozen weights that the checkpoint keeps."""
    index: dict[tuple[str, str], list[tuple[int, int, str, str]]] = {}
    for name, slices in manifest["slices"].items():
        for key, s in slices.items():
            entry = (s["start"], s["numel"], name, key)
            index.setdefault((s["parameter"], s["kind"]), []).append(entry)
    kinds = sorted({kind for _, kind in index} - {"master", "frozen"})
    engine.allocate_state(kinds)
    with _Files(path) as files:
        for piece in engine.slices:
            for kind in ("master", *kinds):
                files.fill(engine.view(piece, kind), piece.start, index[piece.parameter, kind])
        parameters = dict(engine.transformer.named_parameters())
        for name in sorted(name for name, kind in index if kind == "frozen"):
            with engine.whole(parameters[name], is_written=True) as whole:
                values = torch.empty(whole.numel(), dtype=torch.float32)
                files.fill(values, 0, index[name, "frozen"])
                whole.copy_(values.view_as(whole))


def _check_same_model(path: Path, manifest: dict, engine: ZeroEngine) -> None:
    optimizer = type(engine.optimizer).__name__
    if manifest.get("optimizer", optimizer) != optimizer:
        raise ValueError(
            f"args.resume={path}: its optimizer is {manifest['optimizer']}, whose state does not "
            f"fit {optimizer}; resume with that deepspeed.optimizer.type, or start a new run with "
            f"args.load={path}"
        )
    have = {
        n: parameter_shape(p) for n, p in engine.transformer.named_parameters() if p.requires_grad
    }
    saved = {n: p["shape"] for n, p in manifest["parameters"].items()}
    if have == saved:
        return
    differ = sorted(n for n in have.keys() | saved.keys() if have.get(n) != saved.get(n))
    raise ValueError(
        f"args.resume={path}: the checkpoint holds another model: {len(differ)} trained parameters "
        f"differ, first {differ[0]} (config {have.get(differ[0])}, checkpoint "
        f"{saved.get(differ[0])}); resume with the config of that run"
    )


class _Files:
    """The safetensors files of a checkpoint, opened once each, read by ranges."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._open = folder, {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()

    def fill(self, out: Tensor, start: int, entries: list[tuple[int, int, str, str]]) -> None:
        """Fill `out` with elements [start, start + len(out)) of a flattened parameter."""
        from safetensors import safe_open

        filled = 0
        for begin, numel, name, key in entries:
            low, high = max(start, begin), min(start + out.numel(), begin + numel)
            if low >= high:
                continue
            if name not in self._open:
                self._open[name] = safe_open(self.folder / name, framework="pt")
            values = self._open[name].get_slice(key)[low - begin : high - begin]
            out[low - start : high - start].copy_(values)
            filled += high - low
        assert filled == out.numel(), f"checkpoint covers {filled} of {out.numel()} elements"
