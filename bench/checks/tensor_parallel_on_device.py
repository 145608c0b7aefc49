"""Check tensor parallelism of two ranks on one device against upstream's stored numbers.

The ranks share the GPU and communicate by gloo through host memory, so that a machine with one GPU can
check the Triton kernels under tensor parallelism, with and without sequence parallelism. Nothing is
timed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from bench.checks.goldens_on_device import (
    GOLDEN,
    Answers,
    answer,
    compare_float32,
    tolerance_factor,
)
from bench.harness.outcome import Outcome, Row, Settings
from cogfast.config import load_config
from cogfast.distributed.parallelize import allocate, find_shards, parallelize
from cogfast.distributed.tensor_parallel import ParallelGroup
from cogfast.model.transformer import build_transformer
from cogfast.model.weights.load import load_transformer
from cogfast.model.weights.names import sat_name
from cogfast.model.weights.shard import Shard

_ops = torch.ops._c10d_functional
_CASE, _SIZE = "t2v_5b", 2
# Variants: whether the rows of the hidden state are split over the ranks between the blocks.
_VARIANTS = {"whole rows": False, "rows split": True}


def check_tensor_parallel(settings: Settings) -> Outcome:
    """Launch the ranks and compare their joined results: one row per variant."""
    stored = load_file(GOLDEN / _CASE / "io.safetensors")
    factor = tolerance_factor(settings.device)
    rows: list[Row] = []
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        # If a rank fails, the other one is killed and the error is raised here.
        torch.multiprocessing.spawn(_run, (Path(folder), settings.device), nprocs=_SIZE)
        for name in _VARIANTS:
            found = [_read(Path(folder), name, rank) for rank in range(_SIZE)]
            row, wrong = compare_float32(stored, join_ranks(found), factor)
            wrong += find_differences(found)
            rows.append({"case": f"{_CASE}, {_SIZE} ranks, {name}", **row})
            problems += [f"{name}: {text}" for text in wrong]
    shown = ("case", "output_largest_error", "loss_relative_error")
    shown += ("gradient_worst_error_of_largest", "num_gradients")
    return Outcome({"float32_tolerance_factor": factor}, rows, shown, problems)


def _read(folder: Path, variant: str, rank: int) -> tuple[Answers, dict[str, Shard]]:
    with torch.serialization.safe_globals([Answers, Shard]):
        return torch.load(folder / f"{variant}-{rank}.pt")


def join_ranks(found: Sequence[tuple[Answers, dict[str, Shard]]]) -> Answers:
    """Gather sharded gradients into the answers of a single process."""
    first, cuts = found[0]
    gradients = dict(first.gradients)
    for key in cuts.keys() & gradients.keys():
        shards = [shards[key] for _, shards in found]
        gradients[key] = torch.empty(shards[0].shape)
        for shard, (answers, _) in zip(shards, found, strict=True):
            # A shard may hold several ranges, such as a part of each of q, k and v.
            pieces = answers.gradients[key].split([b - a for a, b in shard.ranges], shard.dim)
            for (start, stop), piece in zip(shard.ranges, pieces, strict=True):
                gradients[key].narrow(shard.dim, start, stop - start).copy_(piece)
    return Answers(first.outputs, first.loss, gradients)


def find_differences(found: Sequence[tuple[Answers, dict[str, Shard]]]) -> list[str]:
    """List replicated tensors that are not bitwise equal on all ranks."""
    (first, shards), *rest = found
    common = {k: v for k, v in first.gradients.items() if k not in shards} | first.outputs
    return [
        f"{key}: rank {rank} differs from rank 0"
        for rank, (answers, _) in enumerate(rest, start=1)
        for key, value in common.items()
        if not torch.equal({**answers.gradients, **answers.outputs}[key], value)
    ]


def _gather(x: Tensor, size: int, name: str) -> Tensor:
    """Gather as the op of this name does. That one reads device memory on the host with gloo, which copies to
    the host for this one."""
    out = x.new_empty(size * x.shape[0], *x.shape[1:])
    return _ops.all_gather_into_tensor_out(x, size, name, out=out)


def _run(rank: int, folder: Path, device: torch.device) -> None:
    torch.set_float32_matmul_precision("highest")  # no TF32
    store = dist.FileStore(str(folder / "store"), _SIZE)
    # gloo: NCCL refuses two ranks on one GPU.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_SIZE)
    _ops.all_gather_into_tensor = _gather
    group = ParallelGroup(rank, _SIZE, dist.group.WORLD)
    stored = load_file(GOLDEN / _CASE / "io.safetensors")
    for name, splits_rows in _VARIANTS.items():
        with torch.device("meta"):
            transformer = build_transformer(load_config([GOLDEN / _CASE / "config.yaml"]).model)
        parallelize(transformer, group, splits_rows)
        allocate(transformer, device)
        shards = find_shards(transformer)
        load_transformer(transformer, GOLDEN / _CASE, shards=shards)
        answers = answer(transformer, stored, device, torch.float32)
        named = {f"grad.{sat_name(n)}": shard for n, shard in shards.items()}
        torch.save((answers, named), folder / f"{name}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
