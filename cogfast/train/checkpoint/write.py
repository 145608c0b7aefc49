"""Writes checkpoints while training continues: copies to host memory, then writes in a thread.

Training only waits for the copy. On a GPU the copy into pinned memory is asynchronous, and
the writing thread waits for its event. The host buffers hold this rank's partitions
(16 bytes per element with FusedEmaAdam: weights, two moments, EMA; 10 with 8-bit moments, which the
thread decodes: their files are those of float32 moments). Every save uses the same buffers
and first waits for the save before it.

The ranks' threads use a separate control group. Every rank starts the same saves in the same order,
one at a time, so that the collectives always match. `latest` moves when all files are on disk.

In a store, each thread uploads its file from its machine, and rank 0 then the manifest, without which
there is no checkpoint, and `latest`. The files of the machine are removed.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from threading import Thread

import torch
from torch import Tensor

import cogfast.extensions.stores.store as store
from cogfast.core.files import WriteError, is_disk_full, read_limited, sync, write_text
from cogfast.distributed.lost_ranks import is_of_another_rank
from cogfast.distributed.process_groups import OtherRankError, ProcessGroups
from cogfast.distributed.zero_engine import Slice, ZeroEngine
from cogfast.extensions.memory.host_memory import host_buffer
from cogfast.extensions.memory.moment_codes import largest_key, read_moment
from cogfast.extensions.stores.mirror import is_of_rank, name_of, url_of
from cogfast.extensions.stores.store import StoreError
from cogfast.model.weights.checkpoint_manifest import (
    FORMAT,
    check_files,
    checkpoint_name,
    layout_of,
    read_manifest,
    replaced_name,
    step_of,
    write_manifest,
)
from cogfast.model.weights.shard import shard_of, whole_shape
from cogfast.model.weights.tensor_files import Outgoing, write_safetensors
from cogfast.train.assembly import frozen_to_keep
from cogfast.train.keys import FolderLayout
from cogfast.train.run.own_classes import Classes

logger = logging.getLogger(__name__)


Export = Callable[[Path, dict], None]  # gets the checkpoint's draft and its manifest; never raises


class DamagedWeights(RuntimeError):
    """The weights have NaN or infinity, so the earlier checkpoints are worth more than a new one."""


class _LatestError(RuntimeError):
    """A checkpoint is complete, but `latest` still names the one before."""


_LOGGED = (OSError, WriteError, OtherRankError, DamagedWeights, _LatestError)


class CheckpointWriter(AbstractContextManager):
    """Writes the checkpoints of a run into `folder` and keeps the newest `keep_last` (0: all).

    Every rank creates one and calls its methods at the same steps. layout: args.folder_layout, which
    decides the checkpoints' names. saved_step, saved: step and folder of the newest complete checkpoint,
    valid after `wait`. unsent: the folder of this machine with a newer one that could not be uploaded to
    its store; it stays until a later one is complete here.
    """

    def __init__(
        self,
        folder: Path,
        engine: ZeroEngine,
        groups: ProcessGroups,
        keep_last: int,
        layout: FolderLayout = "cogfast",
        classes: Classes | None = None,  # of a user's own
    ) -> None:
        self.folder, self.engine, self.keep_last = folder, engine, keep_last
        self.layout: FolderLayout = layout
        # The writing thread's collectives must not mix with those of the training loop.
        self.groups = groups.with_own_control()
        # Returns the steps of the checkpoints that are kept in addition. Rank 0's thread calls it.
        self.kept: Callable[[Sequence[int]], set[int]] = lambda _: set()
        # Raises an error if the folder is another run's now. Rank 0's thread calls it before it writes, and
        # in a store those of all ranks.
        self.check_owner: Callable[[], None] = lambda: None
        # Uploads what the run has logged until now: a resumed run continues it. The same thread calls it.
        self.upload_logs: Callable[[], None] = lambda: None
        self.classes, self.url = classes or {}, url_of(folder)
        self.saved_step = 0
        self.saved: Path | None = None
        self.unsent: Path | None = None
        # {checkpoint: this rank's file} of saves in a store, until they are uploaded
        self._files: dict[Path, Path] = {}
        self._snapshot: _Snapshot | None = None
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self._has_failed = False  # whether the last save failed

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Complete the pending save, also if the run ends with an error."""
        try:
            self.wait()
        except Exception as error:
            if kind is None:
                raise
            # Only log it: the error that ends the run must reach the user.
            why = "another rank was lost" if is_of_another_rank(error) else error
            last = "none" if self.saved is None else name_of(self.saved)
            logger.error("a save was not completed: %s; the last complete one: %s", why, last)

    def save(self, step: int, extra: dict, export: Export | None = None) -> None:
        """Copy the state of `step` and start to write it; `extra` goes into the manifest.

        export: called on rank 0, in the thread, before the checkpoint gets its name. If the disk is
        full, an error is logged, the earlier checkpoints are kept, and training continues.
        """
        self.wait()
        try:
            kinds = self.engine.state_kinds()
            if self._snapshot is None or not set(kinds) <= set(self._snapshot.kinds):
                # At the first save and not at the start: a run that never saves needs no host memory for it.
                # PyTorch's optimizers make their state in the first step that is not skipped.
                self._snapshot = None
                self._snapshot = self.groups.on_all(lambda: _Snapshot(self.engine))
        except (MemoryError, RuntimeError) as error:
            self._report_failure(step, error)
            return
        # `wait` has returned, so the thread no longer reads the buffers that this overwrites.
        self._snapshot.take()
        # Read now: training changes the scale while the thread writes.
        scaler = self.engine.loss_scaler_state()
        about = {"step": step, "loss_scaler": scaler, "classes": self.classes, **extra}
        self._thread = Thread(
            target=self._write, args=(about, export), name=f"checkpoint {step}", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait for the pending save. Raises the thread's error, if there was one."""
        if self._thread is not None:
            self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

    def _write(self, about: dict, export: Export | None) -> None:
        """Write one checkpoint, in the thread.

        Errors that a user can fix are logged; `wait` raises all other errors.
        """
        try:
            self._write_all(about, export)
            self.saved_step, self.saved = about["step"], self.path(about["step"])
            if self._has_failed and self.groups.is_main:
                logger.info("checkpoint of step %d is written", self.saved_step)
            self._has_failed = False
        except _LOGGED as error:
            self._report_failure(about["step"], error)
        except Exception as error:
            self._discard(self._draft(about["step"]))
            self._error = error

    def _write_all(self, about: dict, export: Export | None) -> None:
        """Write the files of all ranks, the manifest and `latest`. One rank's error ends all."""
        draft, groups, snapshot = self._draft(about["step"]), self.groups, self._snapshot
        assert snapshot is not None, "save takes it before it starts this thread"
        # This is a barrier, too: no rank writes before the folder is empty.
        self._discard(draft)  # the last save may be one of the same step, which failed
        mark = groups.on_main(lambda: self._begin(draft))
        file = draft / f"rank-{groups.rank:05d}{mark}.safetensors"
        slices, checksum, size = groups.on_all(lambda: self._write_file(file, snapshot))
        reports = groups.gather((file.name, slices, checksum, snapshot.counters(), size))
        groups.on_main(lambda: self._describe(draft, reports, about, export))
        if self.url is not None:
            groups.on_all(lambda: self._upload_own(draft))
        groups.on_main(lambda: self._make_newest(draft, self.path(about["step"])))
        self._discard(draft)

    def _begin(self, draft: Path) -> str:
        """Empty the draft, and return a mark of its files' names."""
        if self.url is None:  # else each upload asks: the store may be away for a while
            self.check_owner()
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        # No save of this step by a machine that has lost the run replaces a file that a manifest names.
        return "" if self.url is None else f"-{os.urandom(4).hex()}"

    def _write_file(self, file: Path, snapshot: _Snapshot) -> tuple[dict[str, dict], str, int]:
        """Write this rank's file, and return its slices, checksum and size."""
        if self.url is not None:
            self._files[file.parent] = file
        file.parent.mkdir(exist_ok=True, parents=True)  # this machine may not be rank 0's
        try:
            slices, checksum = snapshot.write(file)
        except OSError as error:
            if self.url is None or not is_disk_full(error):
                raise
            # Copies of data, or a checkpoint that was not uploaded, would let no later save succeed.
            folder, limit = store.local_cache()
            num_bytes = sum(4 * values.numel() for values in snapshot.partitions.values())
            store.make_place(folder, limit, min(limit, num_bytes), is_full=True)
            self._drop_earlier(file.parent)
            slices, checksum = snapshot.write(file)
        return slices, checksum, file.stat().st_size

    def _discard(self, checkpoint: Path) -> None:
        """Remove this rank's file of a checkpoint in a store from this machine."""
        if (file := self._files.pop(checkpoint, None)) is not None:
            file.unlink(missing_ok=True)
        if self.unsent == checkpoint:
            self.unsent = None

    def _describe(self, draft: Path, reports: list, about: dict, export: Export | None) -> None:
        """Write the manifest and what is exported."""
        assert self._snapshot is not None, "save takes it before it starts this thread"
        manifest = {
            "format": FORMAT,
            **self._snapshot.about,
            "slices": {name: slices for name, slices, *_ in reports},
            "bytes": {name: size for name, *_, size in reports},
            "checksums": {name: checksum for name, _, checksum, *_ in reports},
            "optimizer": type(self.engine.optimizer).__name__,
            # Every rank knows those of its own partitions; together they cover all parameters.
            "counters": {
                name: counters for report in reports for name, counters in report[3].items()
            },
            **about,
        }
        if self.url is None:
            check_files(draft, manifest["bytes"])
        write_manifest(draft, manifest)
        if export is not None:
            export(draft, manifest)
        # All content must be on disk before the folder gets its final name.
        sync(draft / "manifest.json")
        sync(draft)

    def _make_newest(self, draft: Path, final: Path) -> None:
        """Give the checkpoint its name, or upload its manifest, and remove old ones."""
        self.check_owner()
        if self.url is None:
            _publish(draft, final)
        else:
            self.upload_logs()
            self._upload_all(draft)
            self._discard(draft)
        self._write_latest(final)
        self._remove_old(final)

    def _write_latest(self, newest: Path) -> None:
        latest = newest.with_name("latest")
        try:
            write_text(latest, newest.name)
            if self.url is not None:
                self.check_owner()
                store.write(name_of(latest), newest.name.encode())
        except (StoreError, WriteError) as error:
            raise _LatestError(str(error)) from None

    def resume(self, checkpoint: Path, step: int) -> None:
        """Note which checkpoint was loaded, on all ranks. If `latest` names an older one of the run, as after
        an upload by hand, let it name this one."""
        self.saved_step, self.saved = step, checkpoint

        def check_latest() -> None:
            steps = [step_of(path) or 0 for path in checkpoint.parent.iterdir()]
            if checkpoint.parent == self.folder and step_of(checkpoint) == max(steps):
                with suppress(OSError, ValueError):
                    if read_limited(self.folder / "latest", 255).decode() == checkpoint.name:
                        return
                self._write_latest(checkpoint)

        self.groups.on_main(check_latest)

    def _remove_old(self, newest: Path) -> None:
        try:
            self.check_owner()
            prune = _prune if self.url is None else _prune_stored
            prune(newest, self.keep_last, self.kept)
        except OSError as error:
            logger.warning("old checkpoints are not removed: %s", error)

    def _upload_own(self, draft: Path) -> None:
        """Upload this rank's file of a checkpoint, which is complete on the ranks' machines now."""
        self._drop_earlier(draft)
        self.unsent = draft
        self._upload(self._files[draft])

    def _drop_earlier(self, draft: Path) -> None:
        """Remove files of earlier checkpoints that were not uploaded."""
        for earlier in [path for path in self._files if path != draft]:
            self._discard(earlier)
            if self.groups.is_main:
                shutil.rmtree(earlier, ignore_errors=True)

    def _upload(self, file: Path) -> None:
        self.check_owner()
        store.upload(file, name_of(file))

    def _upload_all(self, draft: Path) -> None:
        """Upload what rank 0 has written beside the ranks' files, the manifest last."""
        files = [file for file in sorted(draft.rglob("*")) if file.is_file()]
        exported = [file for file in files if not is_of_rank(str(file))]
        exported.remove(manifest := draft / "manifest.json")
        for file in (*exported, manifest):
            self._upload(file)
        for file in exported:
            file.unlink()

    def prune(self) -> None:
        """Remove checkpoints that `kept` no longer names, on rank 0, after the pending save."""
        self.wait()
        # A run that resumed another one has not saved here yet.
        if self.groups.is_main and self.saved is not None and self.saved.parent == self.folder:
            self._remove_old(self.saved)

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of `step`."""
        return self.folder / checkpoint_name(step, self.layout)

    def _draft(self, step: int) -> Path:
        path = self.path(step)
        # In a store, the manifest makes a checkpoint of it.
        return path.with_name(f"{path.name}.incomplete") if self.url is None else path

    def _report_failure(self, step: int, error: Exception) -> None:
        self._has_failed, draft = True, self._draft(step)
        if self.unsent != draft:
            self._discard(draft)
            if self.groups.is_main:
                shutil.rmtree(draft, ignore_errors=True)
        if self.groups.is_main:
            has_one = self.saved is not None or self.unsent is not None
            state = "the previous one is kept" if has_one else "there is no earlier one"
            if self.unsent is not None:
                state += f", and {self.unsent} stays until a later one is complete here"
            if isinstance(error, _LatestError):
                state = f"it is complete; resume from it with --resume {name_of(self.path(step))}"
            logger.error("checkpoint of step %d failed: %s; %s", step, error, state)


class _Snapshot:
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


def _publish(draft: Path, final: Path) -> None:
    """Give a complete checkpoint its final name, on disk before `latest` has it."""
    replaced = replaced_name(final)
    if final.exists():
        # A run that resumed from an earlier step saves this step again. Rename the old checkpoint
        # first, so that a complete one exists at every moment.
        final.rename(replaced)
    draft.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)
    sync(final.parent)


def _prune(newest: Path, keep_last: int, kept: Callable[[Sequence[int]], set[int]]) -> None:
    """Remove old checkpoints, except `kept`, and the unfinished ones of killed runs.

    Checkpoints of later steps than `newest` stay: the user resumed from an earlier one on purpose.
    """
    folder, layout = newest.parent, layout_of(newest)
    for path in folder.glob("*.incomplete*"):
        # In the layout `finetune`, other threads write their files into this folder, too.
        name = path.with_name(path.name.partition(".")[0])
        if name.name != "latest" and step_of(name) is None:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    steps = {p: step for p in folder.iterdir() if p.is_dir() and (step := step_of(p)) is not None}
    done = [p for p in steps if layout_of(p) == layout and steps[p] <= steps[newest]]
    if layout == "finetune":
        # Another trainer's checkpoint of such a name has no manifest.
        done = [p for p in done if (p / "manifest.json").is_file()]
    for path in _outdated({path: steps[path] for path in done}, keep_last, kept):
        shutil.rmtree(path, ignore_errors=True)


def _outdated(
    steps: Mapping[Path, int], keep_last: int, kept: Callable[[Sequence[int]], set[int]]
) -> list[Path]:
    """Return the checkpoints that are not kept. steps: the step of each."""
    others = kept([*steps.values()])
    old = sorted(steps, key=steps.__getitem__)[:-keep_last] if keep_last > 0 else []
    return [path for path in old if steps[path] not in others]


def _prune_stored(newest: Path, keep_last: int, kept: Callable[[Sequence[int]], set[int]]) -> None:
    """Do the same in a store, and remove this machine's files of the removed checkpoints."""
    url, held = url_of(newest.parent) or "", {}  # held: the URLs of each checkpoint's files
    for file in store.find(url):
        path = newest.parent / file[len(url) + 1 :].partition("/")[0]
        if step_of(path) is not None and layout_of(path) == layout_of(newest):
            held.setdefault(path, []).append(file)
    manifests = {path: f"{name_of(path)}/manifest.json" for path in held}
    steps = {path: step_of(path) or 0 for path in held if manifests[path] in held[path]}
    done = {path: step for path, step in steps.items() if step <= (step_of(newest) or 0)}
    gone = _outdated(done, keep_last, kept)
    store.remove([manifests[path] for path in gone])  # first: the rest is no checkpoint
    files = [file for path in gone for file in held[path]]
    left_over = [file for path in held if path not in steps for file in held[path]]
    # In the layout `finetune`, other trainers write such folders, too.
    files += [f for f in left_over if layout_of(newest) == "cogfast" or is_of_rank(f)]
    # Another save of the same step had other files.
    names = read_manifest(newest)["bytes"]
    files += [f for f in held[newest] if is_of_rank(f) and f.rpartition("/")[2] not in names]
    store.remove(files)
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)
