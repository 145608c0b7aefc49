"""Checkpoints of a run: files that know no layout, written whole or not at all.

    <run>/checkpoints/<step>/manifest.json           what is where, counters, how far the run is
    <run>/checkpoints/<step>/rank-00000.safetensors  the slices that rank 0 owned: master weights,
                                                     moments and EMA, flat float32
    <run>/checkpoints/latest                         the newest step that is complete

A slice is a range of a flattened parameter; where tensor parallelism cuts the parameter, of one
flattened share, and the manifest says of which of how many. So ranks of any other data- and
tensor-parallel size can read what they need (model/weights/run.py).
Frozen weights are kept too where they are the smaller part (the fixed position table of a full
fine-tune), not where they are the larger (the base of a LoRA run).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from cogfast.model.weights.run import FORMAT, FORMATS, DamageError, RunFiles
from cogfast.train.zero_engine import ZeroEngine, shard_of, whole_shape


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


def read_manifest(path: Path) -> dict:
    """The manifest of a checkpoint folder, after a look at its files.

    ValueError where the folder is missing, incomplete or damaged; it names the last good one.
    """
    try:
        return _intact_manifest(path)
    except DamageError as error:
        raise ValueError(_refusal(path, error)) from None


def _intact_manifest(path: Path) -> dict:
    if not path.is_dir():
        raise DamageError("no such folder")
    if not (path / "manifest.json").is_file():
        raise DamageError("it has no manifest.json")
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DamageError(f"its manifest.json is damaged ({error})") from None
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found not in FORMATS:
        raise DamageError(f"its manifest.json says format {found}, not {FORMAT}")
    for name, size in manifest["bytes"].items():
        if not (path / name).is_file():
            raise DamageError(f"{name} is missing")
        if (path / name).stat().st_size != size:
            wrong = (path / name).stat().st_size
            raise DamageError(f"{name} has {wrong} bytes instead of {size}")
    return manifest


def _refusal(path: Path, error: Exception) -> str:
    """The line that says what is wrong, and where the run can go on instead."""
    siblings = path.parent.iterdir() if path.parent.is_dir() else ()
    hint = "there is no other one in its folder"
    for other in sorted((p for p in siblings if p.name.isdigit() and p != path), reverse=True):
        try:
            _intact_manifest(other)
        except DamageError:
            continue
        hint = f"the last good one is that of step {int(other.name)}: --resume {other}"
        break
    return f"args.resume={path}: cannot resume from it: {error}; {hint}"


def load_checkpoint(path: Path, engine: ZeroEngine) -> dict:
    """Fill the engine's master weights, moments, EMA and counters from a checkpoint.

    Every rank reads only its own slices, whatever layout wrote them. Returns the manifest.
    ValueError where the checkpoint holds another model.
    """
    manifest = read_manifest(path)
    _check_same_model(path, manifest, engine)
    try:
        _fill(RunFiles(path, manifest), engine)
    except DamageError as error:
        raise ValueError(_refusal(path, error)) from None
    for piece in engine.slices:
        for key, value in manifest["counters"][piece.parameter].items():
            engine.set_counter(piece.part, key, value)
    engine.load_loss_scaler_state(manifest["loss_scaler"])
    engine.publish("master")
    return manifest


def _fill(files: RunFiles, engine: ZeroEngine) -> None:
    """Read this rank's slices, and the frozen weights that the checkpoint keeps."""
    parameters = dict(engine.transformer.named_parameters())
    kinds = sorted(files.kinds - {"master", "frozen"})
    engine.allocate_state(kinds)
    for piece in engine.slices:
        shard = shard_of(parameters[piece.parameter])
        for kind in ("master", *kinds):
            out = engine.view(piece, kind)
            files.fill(out, piece.parameter, kind, shard, piece.start)
    for name in files.frozen:
        with engine.whole(parameters[name], is_written=True) as whole:
            values = torch.empty(whole.numel(), dtype=torch.float32)
            files.fill(values, name, "frozen", shard_of(parameters[name]))
            whole.copy_(values.view_as(whole))


def _check_same_model(path: Path, manifest: dict, engine: ZeroEngine) -> None:
    optimizer = type(engine.optimizer).__name__
    if manifest.get("optimizer", optimizer) != optimizer:
        raise ValueError(
            f"args.resume={path}: its optimizer is {manifest['optimizer']}, whose state does not "
            f"fit {optimizer}; resume with that deepspeed.optimizer.type, or start a new run with "
            f"args.load={path}"
        )
    parameters = engine.transformer.named_parameters()
    have = {n: whole_shape(p) for n, p in parameters if p.requires_grad}
    saved = {n: p["shape"] for n, p in manifest["parameters"].items()}
    if have == saved:
        return
    differ = sorted(n for n in have.keys() | saved.keys() if have.get(n) != saved.get(n))
    raise ValueError(
        f"args.resume={path}: the checkpoint holds another model: {len(differ)} trained parameters "
        f"differ, first {differ[0]} (config {have.get(differ[0])}, checkpoint "
        f"{saved.get(differ[0])}); resume with the config of that run"
    )
