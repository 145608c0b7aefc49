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

import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from cogfast.files import DamageError
from cogfast.model.weights.formats.run_checkpoint import RunFiles
from cogfast.model.weights.formats.run_manifest import refusal, verify_files
from cogfast.train.distributed.process_groups import ProcessGroups
from cogfast.train.distributed.zero_engine import ZeroEngine, shard_of, whole_shape


def load_checkpoint(
    path: Path,
    manifest: dict,
    engine: ZeroEngine,
    groups: ProcessGroups,
    is_verified: bool = True,
) -> None:
    """Fill the engine's master weights, moments, EMA and counters from a checkpoint.

    Every rank reads only its own slices, whatever layout wrote them. is_verified: a thread compares
    the checksums of the files meanwhile. ValueError, on all ranks, where the checkpoint holds
    another model or is damaged.
    """
    _check_same_model(path, manifest, engine)
    files, damage = RunFiles(path, manifest), None
    mine = _share_of_files(files, engine, groups) if is_verified else []
    with ThreadPoolExecutor(1, thread_name_prefix="checksums") as pool:
        verifying = pool.submit(verify_files, path, manifest, mine)
        for step in (lambda: _fill_slices(files, engine), verifying.result):
            try:
                step()
            except DamageError as error:
                damage = str(error)
    _refuse_damage(path, groups, damage)
    _fill_frozen(files, engine)
    for piece in engine.slices:
        for key, value in manifest["counters"][piece.parameter].items():
            engine.set_counter(piece.part, key, value)
    engine.load_loss_scaler_state(manifest["loss_scaler"])
    engine.publish("master")


def _share_of_files(files: RunFiles, engine: ZeroEngine, groups: ProcessGroups) -> list[str]:
    """Of the files that the ranks of this machine read, those that this rank verifies: each file
    is hashed once on each machine that reads it."""
    needed = files.holding({piece.parameter for piece in engine.slices} | set(files.frozen))
    host = platform.node()
    reports = groups.gather((host, needed))
    here = [rank for rank, (other, _) in enumerate(reports) if other == host]
    together = sorted(set().union(*(reports[rank][1] for rank in here)))
    return together[here.index(groups.rank) :: len(here)]


def _refuse_damage(path: Path, groups: ProcessGroups, damage: str | None) -> None:
    """End all ranks with one line where one of them has found damage."""
    found = next((text for text in groups.gather(damage) if text is not None), None)

    def refuse() -> None:
        if found is not None:
            raise ValueError(refusal(path, DamageError(found)))

    groups.on_main(refuse)


def _fill_slices(files: RunFiles, engine: ZeroEngine) -> None:
    """Read this rank's slices; no rank waits for another."""
    parameters = dict(engine.transformer.named_parameters())
    kinds = sorted(files.kinds - {"master", "frozen"})
    engine.allocate_state(kinds)
    for piece in engine.slices:
        shard = shard_of(parameters[piece.parameter])
        for kind in ("master", *kinds):
            out = engine.view(piece, kind)
            files.fill(out, piece.parameter, kind, shard, piece.start)


def _fill_frozen(files: RunFiles, engine: ZeroEngine) -> None:
    """Read the frozen weights that the checkpoint keeps; under ZeRO-3 the ranks do it together."""
    parameters = dict(engine.transformer.named_parameters())
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
