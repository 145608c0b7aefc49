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
import logging
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor, nn

from cogfast.train.process_groups import OtherRankError, ProcessGroups
from cogfast.train.zero_engine import Slice, ZeroEngine

logger = logging.getLogger(__name__)

FORMAT = "cogfast-checkpoint-1"


def newest_checkpoint(run: Path) -> Path | None:
    """The complete checkpoint that `<run>/checkpoints/latest` names, or None."""
    latest = run / "checkpoints" / "latest"
    if not latest.is_file():
        return None
    return run / "checkpoints" / latest.read_text().strip()


def save_checkpoint(
    folder: Path, step: int, engine: ZeroEngine, groups: ProcessGroups, extra: dict, keep_last: int
) -> Path | None:
    """Write checkpoint `<folder>/<step>`, move `latest`, remove all but the last `keep_last`.

    Every rank calls it. Returns the path, or None where writing failed (a full disk): the
    checkpoints before stay as they were and training can go on. keep_last = 0 keeps all.
    """
    from safetensors import SafetensorError  # what save_file raises on a full disk

    try:
        return _save(folder, step, engine, groups, extra, keep_last)
    except (OSError, SafetensorError, OtherRankError) as error:
        if groups.is_main:
            shutil.rmtree(_draft(folder, step), ignore_errors=True)
            logger.error("checkpoint of step %d failed: %s; the one before stays", step, error)
        return None


def _save(
    folder: Path, step: int, engine: ZeroEngine, groups: ProcessGroups, extra: dict, keep_last: int
) -> Path:
    """save_checkpoint without its way out: an error of one rank is raised on all."""
    draft, final = _draft(folder, step), folder / f"{step:08d}"
    groups.on_main(lambda: _make_empty(draft))
    name, slices, error = f"rank-{groups.rank:05d}.safetensors", {}, None
    try:
        slices = _write_rank(draft / name, engine, groups)
    except Exception as caught:
        error = caught
    groups.agree(error)
    reports = groups.gather((name, slices, _counters(engine)))
    groups.on_main(lambda: _complete(draft, final, engine, step, reports, extra))
    if groups.is_main:
        _prune(folder, step, keep_last)
    return final


def _draft(folder: Path, step: int) -> Path:
    return folder / f"{step:08d}.incomplete"


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _write_rank(path: Path, engine: ZeroEngine, groups: ProcessGroups) -> dict:
    """Write what this rank owns; returns {tensor key: {parameter, kind, start, numel}}."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    slices: dict[str, dict] = {}

    def add(kind: str, piece: Slice, values: Tensor) -> None:
        key = f"{kind}/{piece.parameter}/{piece.start}"
        tensors[key] = values.cpu().clone() if values.device.type == "cpu" else values.cpu()
        slices[key] = {"parameter": piece.parameter, "kind": kind, "start": piece.start}
        slices[key]["numel"] = piece.numel

    for kind in ("master", *engine.state_kinds()):
        for piece in engine.slices:
            add(kind, piece, engine.view(piece, kind))
    for name, parameter in _frozen_to_keep(engine).items():
        with engine.whole(parameter) as values:
            if groups.is_main:
                add("frozen", Slice(name, 0, values.numel(), 0, 0), values.flatten())
    save_file(tensors, path)
    _sync(path)
    return slices


def _frozen_to_keep(engine: ZeroEngine) -> dict[str, nn.Parameter]:
    parameters = dict(engine.transformer.named_parameters())
    frozen = {n: p for n, p in parameters.items() if not p.requires_grad}
    num_frozen = sum(_numel(p) for p in frozen.values())
    num_trained = sum(_numel(p) for p in parameters.values()) - num_frozen
    return frozen if num_frozen < num_trained else {}


def _numel(parameter: Tensor) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())  # ZeRO-3 empties what it partitions


def _shape(parameter: Tensor) -> list[int]:
    return list(getattr(parameter, "ds_shape", parameter.shape))


def _counters(engine: ZeroEngine) -> dict[str, dict[str, float]]:
    """{parameter: the optimizer's counters}, such as its number of steps."""
    out = {}
    for piece in engine.slices:
        state = engine.state(piece.part)
        out[piece.parameter] = {
            key: float(value)
            for key, value in state.items()
            if not isinstance(value, Tensor) or value.ndim == 0
        }
    return out


def _complete(
    draft: Path, final: Path, engine: ZeroEngine, step: int, reports: list, extra: dict
) -> None:
    """Write the manifest, give the folder its name, then move `latest`: in this order."""
    counters: dict[str, dict[str, float]] = {}
    for report in reports:
        counters.update(report[2])
    manifest = {
        "format": FORMAT,
        "step": step,
        "parameters": {
            name: {"shape": _shape(p), "dtype": str(p.dtype).removeprefix("torch.")}
            for name, p in engine.transformer.named_parameters()
            if p.requires_grad
        },
        "slices": {name: slices for name, slices, _ in reports},
        "bytes": {name: (draft / name).stat().st_size for name, _, _ in reports},
        "optimizer": type(engine.optimizer).__name__,
        "counters": counters,
        "loss_scaler": engine.loss_scaler_state(),
        **extra,
    }
    (draft / "manifest.json").write_text(json.dumps(manifest))
    _sync(draft / "manifest.json")
    _sync(draft)
    if final.exists():  # of a run that goes on from a step before; never gone while it is needed
        replaced = final.with_suffix(".incomplete.old")
        final.rename(replaced)
        draft.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        draft.rename(final)
    latest = final.parent / "latest"
    (final.parent / "latest.incomplete").write_text(final.name)
    _sync(final.parent / "latest.incomplete")
    (final.parent / "latest.incomplete").replace(latest)
    _sync(final.parent)


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prune(folder: Path, step: int, keep_last: int) -> None:
    """Remove old checkpoints and what killed runs left unfinished.

    Steps after `step` stay: the run went on from a checkpoint before them, which it was asked to.
    """
    for path in folder.glob("*.incomplete*"):
        shutil.rmtree(path, ignore_errors=True)
    complete = sorted(p for p in folder.iterdir() if p.is_dir() and p.name.isdigit())
    done = [path for path in complete if int(path.name) <= step]
    for path in done[:-keep_last] if keep_last > 0 else []:
        shutil.rmtree(path, ignore_errors=True)


def read_manifest(path: Path) -> dict:
    """The manifest of a checkpoint folder, after a look at its files.

    ValueError where the folder is missing, incomplete or damaged; it names the last good one.
    """
    reason = None
    manifest: dict = {}
    if not path.is_dir():
        reason = "no such folder"
    elif not (path / "manifest.json").is_file():
        reason = "it has no manifest.json"
    else:
        try:
            manifest = json.loads((path / "manifest.json").read_text())
        except json.JSONDecodeError as error:
            reason = f"its manifest.json is damaged ({error})"
        for name, size in manifest.get("bytes", {}).items():
            if not (path / name).is_file() or (path / name).stat().st_size != size:
                reason = f"{name} is missing or cut short"
    if reason is None:
        return manifest
    siblings = path.parent.iterdir() if path.parent.is_dir() else ()
    good = [p for p in sorted(siblings) if p.name.isdigit() and p != path and p.is_dir()]
    hint = f"; the last good one may be {good[-1]}" if good else ""
    raise ValueError(f"args.resume={path}: cannot resume from it: {reason}{hint}")


def load_checkpoint(path: Path, engine: ZeroEngine) -> dict:
    """Fill the engine's master weights, moments, EMA and counters from a checkpoint.

    Every rank reads only its own slices, whatever number of ranks wrote them. Returns the
    manifest. ValueError where the checkpoint holds another model.
    """
    manifest = read_manifest(path)
    _check_same_model(path, manifest, engine)
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
    for piece in engine.slices:
        for key, value in manifest["counters"][piece.parameter].items():
            engine.set_counter(piece.part, key, value)
    engine.load_loss_scaler_state(manifest["loss_scaler"])
    engine.publish("master")
    return manifest


def _check_same_model(path: Path, manifest: dict, engine: ZeroEngine) -> None:
    optimizer = type(engine.optimizer).__name__
    if manifest.get("optimizer", optimizer) != optimizer:
        raise ValueError(
            f"args.resume={path}: its optimizer is {manifest['optimizer']}, whose state does not "
            f"fit {optimizer}; resume with that deepspeed.optimizer.type, or start a new run with "
            f"args.load={path}"
        )
    have = {n: _shape(p) for n, p in engine.transformer.named_parameters() if p.requires_grad}
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
