"""Gradients and weights exchanged through shared memory against DeepSpeed's own reduction.

DeepSpeed's stage 1 adds the micro-batches on each rank and averages their sum at the end of a step, as
the exchange through shared memory does for both stages. So all numbers are equal bit for bit.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cogfast.train.distributed import shared_memory, zero_engine
from cogfast.train.distributed.fused_step import WeightGather
from cogfast.train.distributed.process_groups import ProcessGroups, start_processes
from cogfast.train.distributed.shared_memory import SharedGather, map_rows
from tests.support.ranks.communication_ranks import CountedCollectives
from tests.train.distributed.test_fused_step import (
    PLACES,
    Case,
    accumulated_gradient,
    eventful_run,
    everywhere,
    make,
    micro_batch,
    run_everywhere,
    snapshot,
    trajectory,
)

CASES = [
    Case(dtype="fp32", clip=0.05),
    Case(dtype="fp32", accumulation=3),
    Case(dtype="bf16", clip=0.05, accumulation=3),
    Case(1, dtype="bf16"),
    Case(1, dtype="fp32", zero={"contiguous_gradients": False}, accumulation=3),
    Case(1, zero={"overlap_comm": True}, accumulation=3),
    Case(zero={"round_robin_gradients": True, "parameter_alignment": True}),
    Case(2, dtype="fp32", clip=0.05, is_model_shared=True),
]
LONG_SUM = Case(accumulation=8, data_types={"grad_accum_dtype": "fp32"})
EVENTFUL = Case(2, "bf16", 0.05, 3)


def rare_gradients(shares_memory: bool) -> dict:
    """Run steps in which a layer has gradients in all, in one or in no micro-batches."""
    engine = make(Case(1, dtype="fp32", accumulation=2), False, shares_memory)
    network = engine.transformer
    whole = network.forward
    without_middle = lambda x: network.last(network.norm(torch.tanh(network.first(x))))
    for step, use in enumerate(((True, True), (False, False), (False, True), (True, False))):
        for i, is_used in enumerate(use):
            network.forward = whole if is_used else without_middle
            micro_batch(engine, step, i)
            engine.step(1e-2)
    return snapshot(engine)


def sent_in_a_step() -> dict[str, float]:
    """Return the bytes that this rank sends in a step of three micro-batches, by collective."""
    engine = make(Case(dtype="fp32", accumulation=3), False, True)
    assert type(engine._gather) is SharedGather
    with CountedCollectives() as counted:
        for i in range(3):
            micro_batch(engine, 0, i)
            engine.step(1e-2)
        engine.wait_for_weights()
    return dict(counted.sent)


def without_memory(groups: ProcessGroups) -> dict:
    """Return a run in which the last rank cannot reserve its row, and whether it uses gloo."""
    reserve = os.posix_fallocate

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    if groups.rank == groups.world_size - 1:
        os.posix_fallocate = full
    try:
        found = trajectory(CASES[0], False, True)
        engine = make(CASES[0], False, True)
        with pytest.raises(OSError, match=r"rank 1: \[Errno 28\] No space left on device"):
            map_rows(100, engine.zero.dp_process_group)
    finally:
        os.posix_fallocate = reserve
    return {"run": found, "is gathered by gloo": type(engine._gather) is WeightGather}


def run_cases(out: Path) -> None:
    """Save what the tests compare: {(what, whether memory is shared): ...} and a few facts."""
    groups = start_processes()
    found: dict = {}
    cases = [c for c in CASES if groups.world_size > 1 or not c.is_model_shared]
    for case in cases:
        found[case.name, True] = trajectory(case, False, True)
        found[case.name, False] = trajectory(replace(case, stage=1), False)
    for shares_memory in (True, False):
        found["rare gradients", shares_memory] = rare_gradients(shares_memory)
    found["sum"] = accumulated_gradient(LONG_SUM, True)
    if groups.world_size > 1:
        for waits in (True, False):
            folder = out / f"saved, {waits}"
            found["waits", waits] = eventful_run(EVENTFUL, waits, groups, folder, True)
        found["sent"] = sent_in_a_step()
        found["mapped"] = [
            line.split(maxsplit=5)[-1].strip()
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "cogfast-" in line
        ]
        found["no memory"] = without_memory(groups)
    torch.save(found, out / f"{groups.rank}-of-{groups.world_size}.pt")
    groups.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], dict]:
    module = "tests.train.distributed.test_shared_memory"
    return run_everywhere(run_cases, module, tmp_path_factory.mktemp("shared memory"))


def assert_equal(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@everywhere(CASES)
def test_runs_equal_deepspeeds_reduction(runs: dict, case: Case, place: tuple[int, int]) -> None:
    """Losses, norms, weights, moments and EMA are equal; one step is skipped on all ranks."""
    shared, stock = (dict(runs[place][case.name, is_shared]) for is_shared in (True, False))
    assert shared["skipped"] == 1
    for ours, theirs in zip(shared.pop("bad step"), stock.pop("bad step"), strict=True):
        assert_equal(ours, theirs)
    assert_equal(shared.pop("state"), stock.pop("state"))
    assert_equal(shared, stock)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_parameters_without_gradients_get_zeros(runs: dict, place: str) -> None:
    """A gradient of an earlier step or micro-batch is not used again."""
    found = runs[PLACES[place]]
    assert_equal(found["rare gradients", True], found["rare gradients", False])


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_bf16_gradients_add_up_in_float32(runs: dict, place: str) -> None:
    """The sum is over micro-batches and over ranks."""
    got, want = runs[PLACES[place]]["sum"]
    assert ((got - want).norm() / want.norm()).item() < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_every_reader_waits_for_the_weights(runs: dict, rank: int) -> None:
    """Evaluations, a save and forward passes right after a step use the new weights of all ranks."""
    found = runs[2, rank]
    assert_equal(found["waits", False], found["waits", True])
    alike = [name for name in found["waits", True] if name.startswith(("model", "weights"))]
    for name in alike:
        assert torch.equal(runs[2, 0]["waits", True][name], runs[2, 1]["waits", True][name]), name
    assert len(alike) > 3


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_large_goes_through_sockets(runs: dict, rank: int) -> None:
    """A step sends the norm, a float64, in an all-reduce; barriers send no tensors."""
    assert runs[2, rank]["sent"] == {"all_reduce": 8}


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_rows_have_no_file(runs: dict, rank: int) -> None:
    """Nothing stays in /dev/shm, however a rank ends: rows are files without a name."""
    mapped = runs[2, rank]["mapped"]
    assert len(set(mapped)) >= 2
    assert all(m.startswith("/memfd:cogfast-") and m.endswith("(deleted)") for m in mapped)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_gloo_is_used_where_a_rank_has_no_memory(runs: dict, rank: int) -> None:
    found = runs[2, rank]["no memory"]
    assert found["is gathered by gloo"]
    wanted = runs[2, rank][CASES[0].name, False]
    assert_equal(found["run"]["state"], wanted["state"])


def test_the_log_says_why_gloo_is_used(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    def refuse(zero: object) -> None:
        raise OSError("rank 1: No space left on device")

    start_processes()
    monkeypatch.setattr(zero_engine, "share_memory", refuse)
    with caplog.at_level("INFO", logger="cogfast"):
        make(CASES[0], False, True)
    (line,) = [r.getMessage() for r in caplog.records if "gloo" in r.getMessage()]
    assert (
        line == "ranks exchange gradients through gloo, not memory: rank 1: No space left on device"
    )


def test_a_file_of_another_machine_is_not_mapped() -> None:
    """Process and file number are another file on another machine, or none."""
    file = os.memfd_create("other")
    try:
        for process, name in ((os.getpid(), "cogfast-1"), (2**22 + 1, "other")):
            with pytest.raises(OSError, match="on several machines or in several containers"):
                shared_memory._map_row(100, process, file, name)
    finally:
        os.close(file)


if __name__ == "__main__":
    run_cases(Path(sys.argv[1]))
