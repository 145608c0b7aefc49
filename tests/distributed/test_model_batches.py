"""Copies to the device ahead of time: order of batches, waits, and errors at their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from cogfast.distributed.model_batches import DeviceAhead, ModelBatches

CPU = torch.device("cpu")


class LazyStream:
    """Stands for a CUDA stream: a copy is done when something waits for it, as late as a GPU may do it.
    Its memory is overwritten if no use was recorded."""

    current: LazyStream | None = None

    def __init__(self, device: torch.device) -> None:
        self.work: list[Callable[[], object]] = []
        self.num_started = 0

    def record_event(self) -> Callable[[], None]:
        work = list(self.work)
        self.num_started += 1
        return lambda: [do() for do in work]

    def wait_event(self, event: Callable[[], None]) -> None:
        event()


@pytest.fixture
def recorded(monkeypatch) -> list[torch.Tensor]:
    """Replace CUDA's stream by LazyStream; return the tensors whose use was recorded."""
    main, tensors = LazyStream(CPU), []
    to = torch.Tensor.to

    @contextmanager
    def inside(stream: LazyStream) -> Iterator[None]:
        LazyStream.current = stream
        yield
        LazyStream.current = None

    def lazy_to(self: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        if LazyStream.current is None:
            return to(self, *args, **kwargs)
        assert kwargs == {"non_blocking": True}
        out = torch.full_like(self, 255)
        LazyStream.current.work.append(lambda: out.copy_(self))
        return out

    def record(self: torch.Tensor, stream: LazyStream) -> None:
        assert stream is main
        tensors.append(self)

    monkeypatch.setattr(torch.cuda, "Stream", LazyStream)
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.Tensor, "to", lazy_to)
    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    return tensors


def _batches(asked: list[int], until: int, error: Exception | None = None) -> Iterator[dict]:
    for i in range(until):
        asked.append(i)
        yield {"mp4": torch.full((2, 3), i, dtype=torch.uint8), "txt": [f"clip {i}"], "step": i}
    if error is not None:
        raise error


@pytest.mark.parametrize("depth", [1, 2])
def test_batches_come_whole_and_in_order(depth, recorded):
    asked: list[int] = []
    ahead = DeviceAhead(_batches(asked, 6), CPU, depth)
    for i in range(6):
        batch = next(ahead)
        assert asked == list(range(min(6, i + depth + 1)))
        assert batch["txt"] == [f"clip {i}"] and batch["step"] == i
        assert torch.equal(batch["mp4"], torch.full((2, 3), i, dtype=torch.uint8))
        assert recorded[-1] is batch["mp4"] and len(recorded) == i + 1
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(ahead)


def test_an_error_comes_in_its_place(recorded):
    ahead = DeviceAhead(_batches([], 3, ValueError("too many bad")), CPU, 2)
    assert [next(ahead)["step"] for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(ValueError, match="too many bad"):
            next(ahead)


def test_no_batch_is_read_behind_the_last_that_is_needed(recorded):
    """The next batch may be in a shard of a cache that is never written."""
    asked: list[int] = []
    groups = SimpleNamespace(is_first_of_model=True, device=torch.device("cuda"), model=None)
    batches = ModelBatches(_batches(asked, 9), groups, 2, num_needed=4)
    for i in range(4):
        assert next(batches._batches)["step"] == i
        assert asked == list(range(min(4, i + 3)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    device = torch.device("cuda")
    pinned = ({k: v.pin_memory() if k == "mp4" else v for k, v in b.items()}
              for b in _batches([], 50))  # fmt: skip
    ahead = DeviceAhead(pinned, device, 2)
    busy = torch.rand(2000, 2000, device=device)
    for i in range(50):
        batch = next(ahead)
        busy = busy @ busy / 1000
        assert torch.equal(batch["mp4"].cpu(), torch.full((2, 3), i, dtype=torch.uint8))
