"""Errors of ReplicaCheck on each of four processes: `torchrun ... tests/support/ranks/replica_check_ranks.py
FOLDER`, in two tensor-parallel groups, (0, 1) and (2, 3). FOLDER/<rank>.json gets {case: its error,
or "" where it passes}, and what a check sent."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cogfast.distributed.parallelize import find_shards, parallelize
from cogfast.distributed.process_groups import start_processes
from cogfast.distributed.tensor_parallel import ParallelGroup
from cogfast.model.transformer import DiffusionTransformer, assemble_transformer
from cogfast.train.watchers import parameter_checks
from cogfast.train.watchers.parameter_checks import ReplicaCheck
from tests.support.ranks.communication_ranks import CountedCollectives
from tests.support.ranks.tensor_parallel_cases import CASES, materialize

EVERY = 3
LARGE = "text_embedding.weight"


def build(name: str, group: ParallelGroup) -> DiffusionTransformer:
    """Build a model with one parameter that two data ranks cannot share evenly."""
    with torch.device("meta"):
        transformer = assemble_transformer(CASES[name].config)
    parallelize(transformer, group)
    materialize(transformer, seed=3)
    transformer.odd = nn.Parameter(torch.arange(7.0))
    return transformer.to(CASES[name].dtype)


def check_of(transformer: nn.Module, group: ParallelGroup, wait=lambda: None) -> ReplicaCheck:
    engine = SimpleNamespace(transformer=transformer, wait_for_weights=wait)
    return ReplicaCheck(engine, group, EVERY)


def outcome(check: ReplicaCheck, step: int = EVERY) -> str:
    try:
        check.after_step(step)
    except RuntimeError as error:
        return str(error)
    return ""


def flip(values: Tensor, index: int, bit: int) -> None:
    integers = {2: torch.int16, 4: torch.int32}[values.element_size()]
    values.detach().flatten().view(integers)[index] ^= 1 << bit


def swap(values: Tensor, one: int, other: int) -> None:
    flat = values.detach().flatten()
    assert flat[one] != flat[other]
    flat[[one, other]] = flat[[other, one]]


def whole_parameters(name: str, group: ParallelGroup, rank: int) -> dict[str, object]:
    """Check parameters that every rank holds whole, of which rank 1's change."""
    found: dict[str, object] = {}
    transformer = build(name, group)
    check = check_of(transformer, group)
    parameter = transformer.get_parameter
    with CountedCollectives() as counted:
        found["equal"] = outcome(check)
    found["sent"] = dict(counted.sent)
    found["copies"] = sum(
        n not in find_shards(transformer) for n, _ in transformer.named_parameters()
    )
    for bit in (0, 8 * parameter(LARGE).element_size() - 2):
        if rank == 1:
            flip(parameter(LARGE), -1, bit)
        found[f"bit {bit}"] = outcome(check)
        found["between"] = outcome(check, EVERY + 1)
        if rank == 1:
            flip(parameter(LARGE), -1, bit)
    found["as before"] = outcome(check)
    if rank == 1:
        flip(parameter(LARGE), -1, 0)
    arrive = lambda: flip(parameter(LARGE), -1, 0) if rank == 1 else None
    found["awaited"] = outcome(check_of(transformer, group, arrive))
    for other in (1, parameter(LARGE).numel() - 1):  # of the same chunk, and of another
        if rank == 1:
            swap(parameter(LARGE), 0, other)
        found[f"swapped with {other}"] = outcome(check)
        if rank == 1:
            swap(parameter(LARGE), 0, other)
    if rank == 1:
        parameter("odd").detach().neg_()  # the sign of zero, too
        swap(parameter(LARGE), 0, 1)
    found["two parameters"] = outcome(check)
    return found


def parts_of_parameters(name: str, group: ParallelGroup, rank: int, data: object) -> dict:
    """ZeRO-3: each data rank has a part; rank 3's changes, the second half."""
    found: dict[str, object] = {}
    transformer = build(name, group)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    deepspeed.zero.Init(transformer, data_parallel_group=data, config_dict_or_path=config)
    assert transformer.odd.numel() == 0
    if rank >= 2:
        transformer.odd.ds_tensor[-1] = rank  # padding
    check = check_of(transformer, group)
    found["zero-3, equal"] = outcome(check)
    if rank == 3:
        flip(transformer.odd.ds_tensor, 2, 0)  # the last element
    found["zero-3, bit"] = outcome(check)
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    groups = start_processes()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # takes 18 s to build
    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False, verbose=False)
    number, rank = divmod(groups.rank, 2)
    shared = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    data = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = ParallelGroup(rank, 2, shared[number])
    parameter_checks._CHUNK = 1000  # the largest parameter here has more
    found = {
        name: whole_parameters(name, group, groups.rank)
        | parts_of_parameters(name, group, groups.rank, data[rank])
        for name in ("5b", "bf16")
    }
    (folder / f"{groups.rank}.json").write_text(json.dumps(found))
    groups.close()


if __name__ == "__main__":
    main()
