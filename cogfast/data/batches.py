"""Stop 3 of nine: micro-batches of one data-parallel rank, in the global order, read by workers.

The order alone decides what a slot reads, so a batch does not depend on the number of ranks or
workers, or on restarts. A bad sample is reported and replaced within its slot. The run ends only
if too many samples are bad.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate

from cogfast.data.bad_samples import BadSample, BadSampleLog
from cogfast.data.datasets import CaptionedVideos, SizedDataset
from cogfast.data.global_order import GlobalOrder
from cogfast.data.video.clip import device_reader
from cogfast.data.workers import Reads, read_ahead

Batch = dict[str, Any]

_BATCH_KEY = {"video": "mp4", "path": "paths", "encoded_video": "encoded_videos"}
_MAX_ATTEMPTS = 100  # bad samples in a row that one slot passes over
_MIDDLE = 127.5  # uint8 0..255 -> [-1, 1]


class BatchLoader(Iterator[Batch], AbstractContextManager["BatchLoader"]):
    """Iterator over the micro-batches of one data-parallel rank, endless or `num_steps` long.

    A step has `accumulation` micro-batches. Item i of micro-batch a on rank r fills slot
    a * (micro_batch * dp_size) + r * micro_batch + i of the global batch; the order may multiply
    micro_batch by a number for each bucket. A micro-batch is
    {"mp4": uint8 [B, F, 3, H, W], "txt": [str], "fps": [B], "num_frames": [B], "paths": [str]}, or
    the keys of the data set's items (tensors stacked, strings listed), plus
    {"step": int, "slots": [int], "bad": [(path, reason)] of the samples replaced in it}.

    start_step: first step of a resumed run. num_workers: reading processes, 0 to read in this
    process. With DALI or a latent cache they are threads, and DALI's videos lie on its device.
    timeout: seconds that reading one sample may take, 0 for no limit.
    bad_samples_path: see BadSampleLog.
    """

    def __init__(
        self,
        dataset: SizedDataset,
        order: GlobalOrder,
        *,
        micro_batch: int,
        accumulation: int = 1,
        dp_rank: int = 0,
        dp_size: int = 1,
        start_step: int = 0,
        num_steps: int | None = None,
        num_workers: int = 1,
        prefetch_factor: int = 4,
        timeout: float = 60.0,
        bad_samples_path: str | Path | None = None,
        max_bad_fraction: float = 0.05,
    ) -> None:
        assert order.global_batch == micro_batch * accumulation * dp_size, (
            f"{order.global_batch=} is not {micro_batch=} * {accumulation=} * {dp_size=}"
        )
        assert order.num_samples == len(dataset), f"{order.num_samples=}, {len(dataset)=}"
        self.bad_samples = BadSampleLog(bad_samples_path, len(dataset), max_bad_fraction)
        self._tried = bytearray(len(dataset))  # 1 for each sample that this rank has tried
        self._bad: set[str] = set()  # the bad ones of these
        is_cached, reader = False, None
        if isinstance(dataset, CaptionedVideos):
            is_cached = dataset.is_cached
            reader = None if is_cached else device_reader(dataset.settings.video_backend)
        self._reads = _MicroBatches(dataset, order, timeout)
        steps = itertools.islice(itertools.count(start_step), num_steps)
        self._batches = read_ahead(
            self._reads,
            _slots_of_steps(order, accumulation, dp_rank, dp_size, steps),
            reader=reader,
            by_threads=is_cached and num_workers > 0,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
        )

    def __next__(self) -> Batch:
        return self._accounted(next(self._batches))

    def replaced(self, batch: Batch, error: BadSample, attempt: int) -> Batch:
        """Return the batch whose slots have their candidates of `attempt`, as what belongs to a sample of
        `batch` is bad."""
        found = self._reads[batch["step"], batch["slots"], attempt]
        found["bad"].append((error.path, error.reason))
        return self._accounted(found)

    def _accounted(self, batch: Batch) -> Batch:
        for index in batch.pop("tried"):
            self._tried[index] = 1
        for path, reason in batch["bad"]:
            self._bad.add(path)
            self.bad_samples.add(path, reason)
        if batch["bad"]:
            # First, because its message has the number of bad samples and the file that lists them.
            self.bad_samples.check((len(self._bad), sum(self._tried)))
            if batch.pop("unfilled", False):
                last = "{}: {}".format(*batch["bad"][-1])
                text = f"step {batch['step']}: none of {len(batch['bad'])} samples could be read"
                raise ValueError(f"{text}; repair the files under args.train_data; last: {last}")
        batch.pop("num_padded", None)
        return batch

    def close(self) -> None:
        """Stop the workers; later calls of next() end the iteration."""
        self._batches.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def to_device(batch: Batch, device: torch.device | str) -> Batch:
    """Move a batch's tensors to `device`; "mp4" and "control" become float32 [B, F, 3, H, W] in [-1, 1].

    Videos are copied as uint8 and scaled on the device; other tensors keep their dtype.
    """
    move = lambda x: x.to(device, non_blocking=True) if isinstance(x, torch.Tensor) else x
    out = {key: move(value) for key, value in batch.items()}
    return out | {key: in_unit_range(out[key]).float() for key in ("mp4", "control") if key in out}


def in_unit_range(pixels: torch.Tensor) -> torch.Tensor:
    """Convert uint8 pixels to float32 in [-1, 1]; other pixels are in that range already."""
    return pixels.float().sub_(_MIDDLE).div_(_MIDDLE) if pixels.dtype == torch.uint8 else pixels


class TooSlow(BadSample):
    """Raised if reading a sample took longer than the timeout."""


def _slots_of_steps(
    order: GlobalOrder, accumulation: int, dp_rank: int, dp_size: int, steps: Iterable[int]
) -> Iterator[tuple[int, list[int], int]]:
    assert 0 <= dp_rank < dp_size, f"{dp_rank=} {dp_size=}"
    for step in steps:
        micro_batch = order.num_slots(step) // (accumulation * dp_size)
        # The micro-batches of all ranks together fill consecutive slots.
        for number in range(dp_rank, accumulation * dp_size, dp_size):
            yield step, list(range(number * micro_batch, (number + 1) * micro_batch)), 0


class _MicroBatches(Reads):
    """Reads the micro-batch of a (step, slots, attempt), from that candidate of each slot on."""

    def __init__(self, dataset: SizedDataset, order: GlobalOrder, timeout: float) -> None:
        self._dataset, self._order, self._timeout = dataset, order, timeout
        # {sample: reason}. They are not tried again: each try leaves a hanging thread behind.
        self._timed_out: dict[int, str] = {}

    def name(self, key: tuple[int, list[int], int]) -> str:
        step, slots, _ = key
        names = [_sample_name(self._dataset, self._order.index(step, slot)) for slot in slots]
        return f"step {step}, {', '.join(names)}"

    def __getitem__(self, key: tuple[int, list[int], int]) -> Batch:
        dataset, (step, slots, first) = self._dataset, key
        if isinstance(dataset, CaptionedVideos):
            dataset.fetch([self._order.index(step, slot, first) for slot in slots])
        items, bad, tried = [], [], []
        batch: Batch = {"step": step, "slots": slots, "bad": bad, "tried": tried}
        for slot in slots:
            for attempt in range(first, min(_MAX_ATTEMPTS, self._order.num_candidates(step))):
                index = self._order.index(step, slot, attempt)
                tried.append(index)
                # The first ones were fetched above. A slow store does not count for the timeout.
                if attempt > first and isinstance(dataset, CaptionedVideos):
                    dataset.fetch([index])
                try:
                    if index in self._timed_out:
                        raise BadSample(_sample_name(dataset, index), self._timed_out[index])
                    items.append(read_sample(dataset, index, self._timeout))
                    break
                except BadSample as error:
                    bad.append((error.path, error.reason))
                    if isinstance(error, TooSlow):
                        self._timed_out[index] = error.reason
            else:  # no candidate of the slot can be read
                return {**batch, "unfilled": True}
        return {**_collate(items), **batch}


def read_sample(dataset: SizedDataset, index: int, timeout: float) -> Any:
    """Read a sample; raise TooSlow after `timeout` seconds (0: no limit)."""
    if timeout == 0:
        return dataset[index]
    # No signal interrupts a decoder that hangs in native code, so a thread reads. A hanging
    # thread is abandoned; it is a daemon, so it does not keep the process from ending.
    result: Future[Any] = Future()

    def read(future: Future[Any]) -> None:
        try:
            future.set_result(dataset[index])
        # The caller raises it; an exception that leaves a thread would only be printed.
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=read, args=(result,), daemon=True).start()
    if not wait([result], timeout).done:
        reason = f"reading took longer than args.decode_timeout={timeout:g} s"
        raise TooSlow(_sample_name(dataset, index), reason)
    try:
        return result.result()
    finally:
        # The traceback of an error holds this frame, which holds the error: break the cycle.
        del result


def _sample_name(dataset: SizedDataset, index: int) -> str:
    """The sample's name in logs; a user's own data set may have no `name` method."""
    return dataset.name(index) if isinstance(dataset, CaptionedVideos) else f"sample {index}"


def _collate(items: list[dict]) -> Batch:
    """Collate items with the same keys: tensors stacked, numbers as a tensor, strings and prior listed."""
    keys, batch = list(items[0]), {}
    for item in items[1:]:
        if list(item) != keys:
            text = f"samples of one batch differ in keys: {keys} and {list(item)}"
            raise ValueError(f"{text}; return the same keys, in the same order, for every sample")
    for key in keys:
        values = [item[key] for item in items]
        if isinstance(values[0], torch.Tensor) and len({v.shape for v in values}) > 1:
            shapes = ", ".join(str(list(v.shape)) for v in values)
            text = f"samples of one batch differ in the shape of {key!r}: {shapes}"
            raise ValueError(f"{text}; return one shape for every sample, or use batch_size 1")
        # prior decides what is computed, so that it stays on the CPU. default_collate stacks straight into
        # shared memory when it runs in a worker.
        batch[_BATCH_KEY.get(key, key)] = values if key == "prior" else default_collate(values)
    return batch
