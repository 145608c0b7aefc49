"""BatchLoader: one order for every layout, bad samples replaced and listed, workers that end."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from cogfast.data.bad_samples import BadSample
from cogfast.data.batches import BatchLoader, to_device
from cogfast.data.datasets import VideoFolder
from cogfast.data.global_order import GlobalOrder
from tests.support.refusals import assert_refused
from tests.support.video_files import sat_folder

CLIP = {"video_size": [32, 48], "fps": 8, "max_num_frames": 9}


class Latents(Dataset):
    """A user's data set: sample i is filled with i. Samples in `bad` cannot be read."""

    def __init__(self, num_samples: int, bad: tuple[int, ...] = (), slow: int = -1) -> None:
        self.num_samples, self.bad, self.slow = num_samples, bad, slow

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict:
        if index in self.bad:
            raise BadSample(f"sample-{index}", "broken")
        if index == self.slow:
            time.sleep(60)
        return {
            "encoded_videos": torch.full((4, 3, 2, 2), float(index)),
            "prompt_embedding": torch.full((5, 8), index, dtype=torch.bfloat16),
            "name": f"sample-{index}",
        }


def _read(dataset, steps, *, global_batch=4, start_step=0, seed=11, dp_size=1, **layout):
    """Read all ranks' batches: {(step, slot): sample number}, and the bad samples per slot."""
    seen, bad = {}, {}
    for rank in range(dp_size):
        order = GlobalOrder(len(dataset), seed, global_batch)
        arguments = {"micro_batch": global_batch // dp_size, "num_workers": 0, **layout}
        arguments |= {"dp_rank": rank, "dp_size": dp_size}
        arguments |= {"start_step": start_step, "num_steps": steps}
        with BatchLoader(dataset, order, **arguments) as loader:
            for batch in loader:
                numbers = batch["encoded_videos"][:, 0, 0, 0, 0].int().tolist()
                for slot, number in zip(batch["slots"], numbers, strict=True):
                    assert (batch["step"], slot) not in seen
                    seen[batch["step"], slot] = number
                bad.setdefault(batch["step"], set()).update(path for path, _ in batch["bad"])
    return seen, bad


LAYOUTS = [
    {"micro_batch": 1, "accumulation": 2, "dp_size": 2},
    {"micro_batch": 1, "dp_size": 4},
    {"micro_batch": 2, "accumulation": 2, "num_workers": 2, "prefetch_factor": 2},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dataset", [Latents(10), Latents(10, bad=(2, 3))], ids=["good", "two bad"])
def test_every_layout_reads_the_same(layout, dataset):
    expected = _read(dataset, 6, max_bad_fraction=0.2)
    assert len(expected[0]) == 24
    assert _read(dataset, 6, max_bad_fraction=0.2, **layout) == expected


def test_micro_batches_of_all_ranks_together_are_consecutive():
    """Item i of micro-batch a on rank r fills slot a * (2 * 3) + r * 2 + i."""
    layout = {"micro_batch": 2, "accumulation": 2, "dp_size": 3, "num_workers": 0, "num_steps": 1}
    for rank in range(3):
        loader = BatchLoader(Latents(12), GlobalOrder(12, 0, 12), dp_rank=rank, **layout)
        slots = [batch["slots"] for batch in loader]
        assert slots == [[6 * a + 2 * rank, 6 * a + 2 * rank + 1] for a in range(2)]


def test_resume_continues_with_the_next_step():
    straight, _ = _read(Latents(7, bad=(1,)), 9)
    resumed, _ = _read(Latents(7, bad=(1,)), 4, start_step=5, micro_batch=2, accumulation=2)
    assert resumed == {key: value for key, value in straight.items() if key[0] >= 5}


def test_bad_samples_are_replaced_in_their_slot():
    good, _ = _read(Latents(20), 10)
    seen, bad = _read(Latents(20, bad=(6,)), 10)
    assert {key for key in good if seen[key] != good[key]} == {k for k, v in good.items() if v == 6}
    assert 6 not in seen.values()
    assert {step for step in bad if bad[step]} == {step for (step, _), v in good.items() if v == 6}


def test_bad_samples_are_listed_once(tmp_path):
    file = tmp_path / "run/bad_samples.jsonl"
    for start in (0, 20):  # the second stands for the resumed run
        given = {"bad_samples_path": file, "max_bad_fraction": 0.1}
        _read(Latents(20, bad=(4, 9)), 20, start_step=start, dp_size=2, **given)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted(line["path"] for line in lines) == ["sample-4", "sample-9"]
    assert {line["reason"] for line in lines} == {"broken"}


def test_too_many_bad_samples_end_the_run_early():
    bad = tuple(range(0, 60, 5))  # 12 of 60; the limit of 5% is 3
    line = "4/60 videos unreadable (>5%), args.max_bad_fraction=0.05; <...> raise it; first: "
    line += "sample-<...>: broken; sample-<...>: broken; "
    assert_refused(lambda: _read(Latents(60, bad), 30, micro_batch=1, accumulation=4), line)
    # If most of 10,000 samples are bad, the run must not try 500 of them first.
    with pytest.raises(ValueError, match=r"1[0-9]/10000 videos unreadable"):
        _read(Latents(10_000, tuple(range(9_000))), 30, micro_batch=1, accumulation=4)


def test_few_bad_samples_end_no_run_of_many_ranks(tmp_path):
    """3% of an epoch are bad, the limit is 5%. Each rank reads a sixteenth of it, and all share a list."""
    bad = tuple(range(0, 800, 33))
    file = tmp_path / "bad_samples.jsonl"
    layout = {"global_batch": 16, "dp_size": 16, "micro_batch": 1}
    _, found = _read(Latents(800, bad), 50, bad_samples_path=file, **layout)
    assert set().union(*found.values()) == {f"sample-{number}" for number in bad}
    # A rank whose own samples are mostly bad, with fewer than 5% of all, still ends.
    line = "/10000 videos unreadable (100 of the 100 that one rank has read so far), args.max_bad"
    assert_refused(lambda: _read(Latents(10000, tuple(range(10000))), 9, **layout), line)


def test_a_step_without_a_readable_sample_ends_the_run():
    assert_refused(lambda: _read(Latents(2, bad=(0, 1)), 1, num_workers=1), "2/2 videos unreadable")
    line = "step 0: none of 100 samples could be read; <...>last: sample-<...>: broken"
    bad = Latents(200, bad=tuple(range(200)))
    assert_refused(lambda: _read(bad, 1, max_bad_fraction=1.0), line)


def test_to_device():
    levels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 1, 16, 16).expand(1, 2, 3, 16, 16)
    embedding = torch.ones(1, 2, 3, dtype=torch.bfloat16)
    batch = {"mp4": levels, "txt": ["a"], "prompt_embedding": embedding, "step": 3}
    out = to_device(batch, "cpu")
    exact = (torch.arange(256, dtype=torch.float64) - 127.5) / 127.5
    assert out["mp4"].dtype == torch.float32 and out["mp4"].shape == levels.shape
    torch.testing.assert_close(out["mp4"][0, 0, 0].flatten().double(), exact, rtol=0, atol=1e-7)
    assert out["prompt_embedding"].dtype == torch.bfloat16 and out["txt"] == ["a"]
    already = torch.rand(1, 2, 3, 4, 4)  # a user's data set may give SAT's [-1, 1] itself
    assert torch.equal(to_device({"mp4": already}, "cpu")["mp4"], already)
    assert batch["mp4"] is levels


def test_items_that_do_not_fit_together():
    class Uneven(Latents):
        def __getitem__(self, index):
            item = super().__getitem__(index)
            item["encoded_videos"] = torch.zeros(4, 3 + index % 2)
            return item

    with pytest.raises(ValueError, match=r"shape of 'encoded_videos': \[4, [34]\], \[4, [34]\]"):
        _read(Uneven(2), 1, global_batch=2)


def test_a_hung_file_costs_one_thread():
    """A file that hangs leaves one thread behind and times out once, not in every epoch."""
    before, start = set(threading.enumerate()), time.monotonic()
    with BatchLoader(
        Latents(4, slow=2), GlobalOrder(4, 0, 4), micro_batch=4, num_steps=8, num_workers=0,
        timeout=1.0,
    ) as loader:  # fmt: skip
        for batch in loader:
            assert [path for path, _ in batch["bad"]] == ["sample 2"]
    assert len(set(threading.enumerate()) - before) == 1
    assert time.monotonic() - start < 60  # it hangs for none


def test_errors_of_a_users_data_set_are_not_swallowed():
    class Broken(Latents):
        def __getitem__(self, index):
            raise KeyError("my own mistake")

    before = set(_children())
    for num_workers in (0, 1):
        with pytest.raises(KeyError, match="my own mistake") as raised:
            _read(Broken(4), 1, num_workers=num_workers)
        assert raised and set(_children()) <= before  # reading processes end, too


def _children() -> list[int]:
    return [int(p) for p in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def test_a_killed_worker_is_an_error_that_names_files(tmp_path, monkeypatch, request):
    # seconds between torch's checks of its workers
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    data, before = VideoFolder(sat_folder(tmp_path, 4), **CLIP), set(_children())
    ended: list[int] = []
    own = signal.signal(signal.SIGCHLD, lambda number, frame: ended.append(number))
    request.addfinalizer(lambda: signal.signal(signal.SIGCHLD, own))
    with BatchLoader(data, GlobalOrder(4, 0, 2), micro_batch=2, prefetch_factor=1) as loader:
        next(loader)
        for child in set(_children()) - before:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.5)  # torch's own handler would raise here
        assert ended  # that of the program is called
        with pytest.raises(RuntimeError, match=r"killed at or after step \d+, .*/videos/0\d.mp4"):
            for _ in range(10):
                next(loader)


def test_close_is_prompt_and_leaves_no_process():
    before = set(_children())
    loader = BatchLoader(Latents(100), GlobalOrder(100, 0, 2), micro_batch=2, num_workers=2)
    next(loader)
    workers = set(_children()) - before
    assert len(workers) == 2
    start = time.monotonic()
    loader.close()
    assert time.monotonic() - start < 60  # it hangs for none
    assert not workers & set(_children())
    assert list(loader) == []


def _rss_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


@pytest.mark.parametrize(
    "num_clips, first, last, mib",
    [(6, 10, 30, 8), pytest.param(500, 2, 20, 0, marks=pytest.mark.soak)],
    ids=["6 clips", "500 clips"],
)
def test_memory_is_flat_over_epochs(num_clips, first, last, mib, tmp_path):
    """Resident memory of the trainer and its worker grows by at most 5% + `mib` MiB between epochs."""
    data = VideoFolder(sat_folder(tmp_path, num_clips, num_frames=24, fps=24.0), **CLIP)
    before, micro_batch = set(_children()), min(num_clips, 10)
    order = GlobalOrder(num_clips, 0, micro_batch)
    with BatchLoader(data, order, micro_batch=micro_batch, num_workers=1) as loader:
        (worker,) = set(_children()) - before
        own, others = [], []
        for epoch in range(1, last + 1):
            for _ in range(num_clips // micro_batch):
                next(loader)
            if epoch in (first, last):
                own.append(_rss_mib(os.getpid()))
                others.append(_rss_mib(worker))
    assert others[1] <= others[0] * 1.05 + mib, others
    assert own[1] <= own[0] * 1.05 + mib, own
