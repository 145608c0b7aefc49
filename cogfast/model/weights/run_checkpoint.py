"""Reads weights from the checkpoints of a cogfast run (checkpoint_manifest.py)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cogfast.core.addresses import name_of
from cogfast.core.files import DamageError
from cogfast.model.config import Family, TransformerConfig
from cogfast.model.lora import SAT_ALPHA
from cogfast.model.weights.checkpoint_manifest import (
    checkpoint_file,
    config_of,
    read_manifest,
    refusal,
    verify_files,
)
from cogfast.model.weights.shard import Shard, join
from cogfast.model.weights.source import WeightSource

_Piece = tuple[int, int, str, str]  # start, numel, file, key in the file


class RunFiles:
    """A checkpoint's tensors, read by ranges; files are opened when they are needed.

    kinds: "master", "shadow" and so on; frozen: names of stored frozen weights; shapes: {name: whole shape}.
    """

    def __init__(self, folder: Path, manifest: dict) -> None:
        self.folder, self._open = folder, {}
        # The slices of each shard, (index, count). A parameter that the run held whole is shard 0 of 1.
        self._pieces: dict[tuple[str, str], dict[tuple[int, int], list[_Piece]]] = {}
        for file, slices in manifest["slices"].items():
            for key, s in slices.items():
                shares = self._pieces.setdefault((s["parameter"], s["kind"]), {})
                index, count = s.get("share", (0, 1))
                shares.setdefault((index, count), []).append((s["start"], s["numel"], file, key))
        for shares in self._pieces.values():
            for pieces in shares.values():
                # The order is that of their starts, since `_read` walks through them once.
                pieces.sort()
        self.kinds = {kind for _, kind in self._pieces}
        self.frozen = sorted(name for name, kind in self._pieces if kind == "frozen")
        self._known = {**manifest["frozen"], **manifest["parameters"]}
        self.shapes = {name: tuple(about["shape"]) for name, about in self._known.items()}

    def fill(
        self, out: Tensor, name: str, kind: str, shard: Shard | None = None, start: int = 0
    ) -> None:
        """Fill `out` [N] with elements [start, start + N) of a flattened parameter, or of its flattened
        shard `shard`. The run may have held it in any number of shards.

        DamageError if slices are missing or files cannot be read.
        """
        count = max((count for _, count in self._pieces.get((name, kind), {})), default=1)
        wanted = (0, 1) if shard is None else (shard.index, shard.count)
        dim, num_parts = cut = tuple(self._known.get(name, {}).get("cut", (0, 1)))
        is_cut_so = count == 1 or shard is None or (shard.dim, shard.num_parts) == cut
        if wanted[1] == count and is_cut_so:
            self._read(out, start, name, kind, wanted)
            return
        # The run had another number of shards: join all of its own, then cut as the caller does.
        stored = []
        for index in range(count):
            values = out.new_empty(
                Shard(self.shapes[name], dim, num_parts, index, count).share_shape
            )
            self._read(values.view(-1), 0, name, kind, (index, count))
            stored.append(values)
        whole = join(stored, *cut)
        values = whole if shard is None else shard.of(whole)
        out.copy_(values.reshape(-1)[start : start + out.numel()])

    def _read(self, out: Tensor, start: int, name: str, kind: str, share: tuple[int, int]) -> None:
        """Fill `out` with elements [start, start + len(out)) of one of the run's flattened shards."""
        at, end = start, start + out.numel()
        for begin, numel, file, key in self._pieces.get((name, kind), {}).get(share, []):
            high = min(begin + numel, end)
            # A gap: the slice with element `at` is missing.
            if begin > at:
                break
            if high > at:
                place = out[at - start : high - start]
                place.copy_(self._values(file, key, at - begin, high - begin))
                at = high
        if at < end:
            of = f"shard {share[0]} of {share[1]} of " if share[1] > 1 else ""
            text = f"{self.folder}: its slices of {of}{name} end at element {at} of {end}"
            raise DamageError(text)

    def _values(self, file: str, key: str, low: int, high: int) -> Tensor:
        from safetensors import SafetensorError, safe_open

        path = None if file in self._open else checkpoint_file(self.folder, file)
        try:
            if path is not None:
                self._open[file] = safe_open(path, framework="pt")
            found = self._open[file].get_slice(key)[low:high]
        except (SafetensorError, OSError) as error:
            text = f"{self.folder / file}: missing, truncated or damaged ({error})"
            raise DamageError(text) from None
        if found.shape != (high - low,):
            raise DamageError(f"{self.folder / file}: {key} ends before element {high}")
        return found

    def holding(self, names: set[str]) -> set[str]:
        """Return the files that hold slices of these parameters, of any kind and shard."""
        return {
            file
            for (name, _), shares in self._pieces.items()
            if name in names
            for pieces in shares.values()
            for _, _, file, _ in pieces
        }


def open_run(
    checkpoint_dir: Path, ema: bool | None = False, manifest: dict | None = None
) -> WeightSource:
    """Open a run's trained weights (master weights, or their moving average) and the frozen weights
    that the checkpoint stores. The first read verifies the checksums of all files.

    ema: None: the moving average if there is one. manifest: of files that this process has just
    written; they are not verified.
    """
    is_verified = manifest is not None
    manifest = read_manifest(checkpoint_dir) if manifest is None else manifest
    files = RunFiles(checkpoint_dir, manifest)
    ema = "shadow" in files.kinds if ema is None else ema
    if ema and "shadow" not in files.kinds:
        text = f"{checkpoint_dir}: has no EMA weights, since the run's optimizer keeps none"
        raise ValueError(f"{text}; use the plain weights or train with sat.ops.FusedEmaAdam")
    trained = "shadow" if ema else "master"

    def read(name: str, shard: Shard | None) -> Tensor:
        nonlocal is_verified
        # Frozen parameters are stored once and have no average.
        kind = trained if name in manifest["parameters"] else "frozen"
        shape = files.shapes[name] if shard is None else shard.share_shape
        # Slices are stored flat, in float32: master weights, whatever dtype the run computed in.
        values = torch.empty(math.prod(shape), dtype=torch.float32)
        try:
            # Not when opened: hashing takes long, and a caller may only want names and shapes.
            if not is_verified:
                verify_files(checkpoint_dir, manifest, manifest["slices"])
                is_verified = True
            files.fill(values, name, kind, shard)
        except DamageError as error:
            raise refusal(checkpoint_dir, error) from None
        return values.view(shape)

    sections = config_of(checkpoint_dir, manifest)
    facts = _config_of_run(checkpoint_dir, sections.get("model", {}))  # {}: it has no network
    # Known if all videos of the run had one size.
    sizes = manifest.get("video_sizes") or []
    trained_size = {"trained_size": tuple(sizes[0])} if len(sizes) == 1 else {}
    which = "EMA weights" if ema else "weights"
    member = Family.of_config(TransformerConfig(**facts)).member if facts else None
    return WeightSource(
        description=f"{which} of step {manifest['step']} in {name_of(checkpoint_dir)}",
        shapes=files.shapes,
        read=read,
        dtypes=dict.fromkeys(files.shapes, torch.float32),
        facts=facts | trained_size,
        is_partial=True,
        trained=frozenset(manifest["parameters"]),
        lora_alpha=facts.get("lora_alpha", SAT_ALPHA) if facts else None,
        base=sections.get("args", {}).get("load"),
        positions=sections.get("model", {}).get("learned_positions"),
        member=None if member is None else member.name,
    )


def _config_of_run(checkpoint_dir: Path, model: dict) -> dict[str, Any]:
    """Return the fields of TransformerConfig with which the checkpoint was trained."""
    from omegaconf.errors import OmegaConfBaseException

    from cogfast.config.sat_network import transformer_arguments

    if "network_config" not in model:
        return {}
    try:
        return transformer_arguments(model["network_config"]["params"])
    except (OmegaConfBaseException, KeyError, TypeError, AttributeError):
        text = f"{checkpoint_dir / 'manifest.json'}: damaged, its config has no network"
        raise ValueError(f"{text}; copy it again") from None
