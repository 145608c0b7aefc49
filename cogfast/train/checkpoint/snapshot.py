"""Host copies of a run's state, and the file that a rank writes of them.

On a GPU the copy into pinned memory is asynchronous, and the writing thread waits for its event. The host
buffers hold this rank's partitions (16 bytes per element with FusedEmaAdam: weights, two moments, EMA; 10 with
8-bit moments, which the thread decodes: their files are those of float32 moments).
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cogfast.core.device_memory import host_buffer
from cogfast.distributed.zero_engine import Slice, ZeroEngine
from cogfast.kernels.fused_ema_adam import largest_key, read_moment
from cogfast.model.weights.shard import shard_of, whole_shape
from cogfast.model.weights.tensor_files import Outgoing, write_safetensors
from cogfast.train.assembly import frozen_to_keep


class DamagedWeights(RuntimeError):
    """The weights have NaN or infinity, so the earlier checkpoints are worth more than a new one."""


class Snapshot:
    """Host copies of the state that this rank saves: partitions, counters and frozen weights."""

    def __init__(self, engine: ZeroEngine) -> None:
        self.engine = engine
        # FusedEmaAdam's state, which has the EMA, even if all steps so far were skipped.
        engine.allocate_state([])
        self.kinds = ("master", *engine.state_kinds())
        named = dict(engine.transformer.named_parameters())
        self.shards = {name: shard_of(parameter) for name, parameter in named.items()}
        self.frozen = frozen_to_keep(engine.transformer)
        kept = engine.transformer.kept_buffers()
        own = lambda x: x.dtype if x.is_floating_point() else torch.float64  # for whole numbers
        self.buffers = {name: host_buffer(x, own(x)) for name, x in kept.items()}
        # The manifest's entries. The thread must not read modules: within a forward pass, ZeRO-3
        # gathers a parameter that is read, which is a collective of every rank.
        self.about = {
            "parameters": {n: _about(p) for n, p in named.items() if p.requires_grad},
            "frozen": {n: _about(p) for n, p in {**self.frozen, **kept}.items()},
        }
        partitions, numbers = self._live_state()
        self.partitions = {key: host_buffer(x) for key, x in partitions.items()}
        self.numbers = {key: host_buffer(x) for key, x in numbers.items()}
        self.frozen_values: dict[str, Tensor] = {}
        self.copied: torch.cuda.Event | None = None

    def _live_state(self) -> tuple[dict[tuple[str, int], Tensor], dict[tuple[int, str], Tensor]]:
        """Return the optimizer's live tensors: {(kind, part): flat}, with what 8-bit moments need to be
        decoded, and {(part, key): scalar} of counters, such as its step count."""
        flat, numbers = {}, {}
        kept = {key for kind in self.kinds for key in (kind, largest_key(kind))}
        for part, whole in enumerate(self.engine.parts):
            flat["master", part] = whole.detach()
            for key, value in self.engine.state(part).items():
                if key in kept:
                    flat[key, part] = value
                elif not isinstance(value, Tensor) or value.ndim == 0:
                    numbers[part, key] = torch.as_tensor(value)
        return flat, numbers

    def take(self) -> None:
        """Copy the current state. Under ZeRO-3 every rank must call it."""
        for name, parameter in self.frozen.items():
            with self.engine.whole(parameter) as values:
                # Data-parallel ranks have equal frozen weights: the first one saves them.
                if self.engine.data_rank == 0 and self._is_written_here(name):
                    self.frozen_values[name] = values.flatten().cpu().clone()  # sync: once
        self.frozen = {}  # they never change, so one copy is enough
        self.engine.wait_for_ema()
        flat, numbers = self._live_state()
        # A module may have replaced its buffers.
        live = {**flat, **numbers, **self.engine.transformer.kept_buffers()}
        for key, buffer in {**self.partitions, **self.numbers, **self.buffers}.items():
            buffer.copy_(live[key], non_blocking=True)
        if any(x.is_cuda for x in live.values()):
            # The next step cannot overwrite the state before it is copied: both are on this stream.
            self.copied = torch.cuda.Event()
            self.copied.record()

    def _is_written_here(self, name: str) -> bool:
        """Return whether this rank writes the parameter.

        Every rank writes its shards; a tensor-parallel group's first rank writes replicated parameters.
        """
        return self.engine.tensor_rank == 0 or self.shards[name] is not None

    def write(self, path: Path) -> tuple[dict[str, dict], str]:
        """Write the slices that this rank owns.

        Returns {tensor key: {parameter, kind, start, numel}}, with `share` [index, count] for slices
        of a shard, and the file's checksum. Raises DamagedWeights before it writes anything.
        """
        if self.copied is not None:
            self.copied.synchronize()  # in the writer's thread, so training is not blocked
        self._check_finite()
        outgoing = [
            (kind, p.parameter, p.start, p.numel, partial(self._values, kind, p), torch.float32)
            for kind in self.kinds
            for p in self.engine.slices
            if self._is_written_here(p.parameter) and (kind, p.part) in self.partitions
        ]
        # Each rank has buffers of its own: those of rank 0 are saved.
        buffers = self.buffers if self.engine.data_rank == 0 else {}
        outgoing += [
            ("frozen", name, 0, values.numel(), partial(values.view, -1), values.dtype)
            for name, values in {**self.frozen_values, **buffers}.items()
        ]
        tensors, slices = [], {}
        for kind, parameter, start, numel, read, dtype in outgoing:
            key = f"{kind}/{parameter}/{start}"
            tensors.append(Outgoing(key, (numel,), dtype, read))
            slices[key] = {"parameter": parameter, "kind": kind, "start": start, "numel": numel}
            shard = self.shards.get(parameter)
            if shard is not None:
                slices[key]["share"] = [shard.index, shard.count]
        return slices, write_safetensors(path, tensors)

    def _check_finite(self) -> None:
        """Raise DamagedWeights if the copied weights or their average are not finite."""
        for (kind, part), values in self.partitions.items():
            # A sum needs no temporary memory. Large finite numbers may overflow in it.
            if kind not in ("master", "shadow") or math.isfinite(values.sum()):
                continue
            for piece in self.engine.slices:
                if piece.part == part and not self._values(kind, piece).isfinite().all():
                    name = "weights" if kind == "master" else "EMA weights"
                    raise DamagedWeights(f"its {name} are not finite (first: {piece.parameter})")

    def _values(self, kind: str, piece: Slice) -> Tensor:
        """Return the copied values of a slice, float32 [numel]."""
        state = {key: x for (key, part), x in self.partitions.items() if part == piece.part}
        return read_moment(state, kind, piece.offset, piece.numel)

    def counters(self) -> dict[str, dict[str, float]]:
        """Return {parameter: {counter: value}}. Call it after `write`, which waits for the copies."""
        of_part: dict[int, dict[str, float]] = defaultdict(dict)
        for (part, key), value in self.numbers.items():
            of_part[part][key] = float(value)
        return {piece.parameter: of_part[piece.part] for piece in self.engine.slices}


def _about(parameter: Tensor) -> dict[str, object]:
    """Return a parameter's entry in the manifest; `cut` is [dim, num_parts] of its shards."""
    about = {"shape": whole_shape(parameter), "dtype": str(parameter.dtype).removeprefix("torch.")}
    shard = shard_of(parameter)
    return about if shard is None else {**about, "cut": [shard.dim, shard.num_parts]}
