"""Loads a run's checkpoint (model/weights/checkpoint_manifest.py) into ranks of any parallel layout.

Frozen weights are saved if they are the smaller part of the model (the fixed position table of a
full fine-tune), not if they are the larger part (the base of a LoRA run).
"""

from __future__ import annotations

import platform
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import torch

from cogfast.core.addresses import name_of, url_of
from cogfast.core.files import DamageError
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.distributed.zero_engine import ZeroEngine
from cogfast.extensions.table import hook
from cogfast.kernels.fused_ema_adam import FusedEmaAdam
from cogfast.model.weights.checkpoint_manifest import refusal, verify_files
from cogfast.model.weights.run_checkpoint import RunFiles
from cogfast.model.weights.shard import shard_of, whole_shape


def load_checkpoint(path: Path, manifest: dict, engine: ZeroEngine, groups: ProcessGroups) -> None:
    """Fill the engine's master weights, moments, EMA and counters from a checkpoint.

    Every rank reads only its own slices, from a checkpoint of any layout. A thread compares the
    checksums of the files meanwhile. All ranks raise ValueError for another model and for damage.
    """
    # Before anything is read, so that a refusal leaves the engine as it was.
    _check_same_model(path, manifest, engine)
    files, damage = RunFiles(path, manifest), None
    _check_has_state(path, files, engine)
    needed = files.holding({piece.parameter for piece in engine.slices} | set(files.frozen))
    if url_of(path) is not None:  # (folder, {name: bytes}): downloads a checkpoint's files
        sizes = {name: manifest["bytes"][name] for name in needed}
        groups.on_all(lambda: hook("download_checkpoint")(path, sizes))
    mine = _share_of_files(needed, groups)
    with ThreadPoolExecutor(1, thread_name_prefix="checksums") as pool:
        verifying = pool.submit(verify_files, path, manifest, mine)
        # Damage may show while reading or in the checksums; run both before the ranks agree.
        for step in (lambda: _fill_slices(files, engine), verifying.result):
            try:
                step()
            except DamageError as error:
                damage = str(error)
    found = next((text for text in groups.gather(damage) if text is not None), None)
    if found is not None:
        # Rank 0 raises the error, so that the user reads it once.
        groups.agree(refusal(path, DamageError(found)) if groups.is_main else None)
    _fill_frozen(files, engine)
    for piece in engine.slices:
        # Counters are those of a parameter; all of a partition have had the same steps.
        for key, value in manifest["counters"][piece.parameter].items():
            engine.set_counter(piece.part, key, value)
    engine.load_loss_scaler_state(manifest["loss_scaler"])
    # The model still has its initial weights; the partitions have the checkpoint's.
    engine.publish("master")


def _share_of_files(needed: Collection[str], groups: ProcessGroups) -> list[str]:
    """Return the files that this rank verifies.

    The ranks of a machine share the files that any of them reads, so that each machine hashes a file once.
    """
    host = platform.node()
    reports = groups.gather((host, needed))
    here = [rank for rank, (other, _) in enumerate(reports) if other == host]
    together = sorted(set().union(*(reports[rank][1] for rank in here)))
    return together[here.index(groups.rank) :: len(here)]


def _fill_slices(files: RunFiles, engine: ZeroEngine) -> None:
    """Read this rank's slices, without communication."""
    parameters = dict(engine.transformer.named_parameters())
    kinds = sorted(files.kinds - {"master", "frozen"})
    engine.allocate_state(kinds)
    # The order of the files, so that the thread that hashes them and this one read the disk once.
    for kind, part in product(("master", *kinds), range(len(engine.parts))):
        if kind != "master" and kind not in engine.state(part):
            continue
        with engine.filled(part, kind) as whole:
            for piece in engine.slices:
                if piece.part == part:
                    shard = shard_of(parameters[piece.parameter])
                    out = whole.narrow(0, piece.offset, piece.numel)
                    files.fill(out, piece.parameter, kind, shard, piece.start)


def _fill_frozen(files: RunFiles, engine: ZeroEngine) -> None:
    """Read the frozen weights and the buffers of the checkpoint. Collective under ZeRO-3."""
    parameters: dict[str, Any] = dict(engine.transformer.named_parameters())
    parameters |= engine.transformer.kept_buffers()
    # A base that is held elsewhere (extensions/memory) has been read from args.load.
    for name in filter(parameters.__contains__, files.frozen):
        with engine.whole(parameters[name], is_written=True) as whole:
            values = torch.empty(whole.numel(), dtype=whole.dtype)
            files.fill(values, name, "frozen", shard_of(parameters[name]))
            whole.copy_(values.view_as(whole))


def _check_has_state(path: Path, files: RunFiles, engine: ZeroEngine) -> None:
    """Refuse a checkpoint without the state that cogfast's optimizers keep. PyTorch's optimizers have none
    before their first step that is not skipped."""
    engine.allocate_state([])
    missing = sorted({*engine.state_kinds()} - files.kinds)
    if isinstance(engine.optimizer, FusedEmaAdam) and missing:
        name = name_of(path)
        text = f"args.resume={name}: the checkpoint has no {', '.join(missing)} of "
        text += f"{type(engine.optimizer).__name__}; resume from another one"
        raise ValueError(f"{text}, or start a new run from its weights with args.load={name}")


def _check_same_model(path: Path, manifest: dict, engine: ZeroEngine) -> None:
    optimizer, name = type(engine.optimizer).__name__, name_of(path)
    if manifest.get("optimizer", optimizer) != optimizer:
        text = f"args.resume={name}: its optimizer is {manifest['optimizer']}, whose state does not fit {optimizer}"
        text += "; resume with that deepspeed.optimizer.type"
        raise ValueError(f"{text}, or start a new run with args.load={name}")
    have = {n: whole_shape(p) for n, p in engine.transformer.named_parameters() if p.requires_grad}
    # Whole shapes on both sides, so that the layouts of both runs do not matter.
    saved = {n: p["shape"] for n, p in manifest["parameters"].items()}
    differ = sorted(n for n in have.keys() | saved.keys() if have.get(n) != saved.get(n))
    if differ:
        text = f"args.resume={name}: the checkpoint is of another model: {len(differ)} trained parameters "
        text += f"differ, first {differ[0]} (config {have.get(differ[0])}, checkpoint {saved.get(differ[0])})"
        raise ValueError(f"{text}; resume with the config of that run")
