"""Gradients of ranks that split the rows of a sample: `torchrun ... context_parallel_ranks.py FOLDER CASE...`.

Each case leaves FOLDER/<case>.pt: the output, the gradients after ZeRO's average over the ranks, and the
bytes that a rank sends in all-to-alls ("sent").
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from cogfast.distributed.context_parallel import split_context
from cogfast.distributed.process_groups import start_processes
from cogfast.train.memory.activation_checkpointing import apply_policies
from tests.distributed.test_context_parallel import CASES, loss_of, model_of


class SentBytes(TorchDispatchMode):
    """Counts the bytes that a rank sends to others in all-to-alls."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(
        self, op: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if op is torch.ops._c10d_functional.all_to_all_single.default:
            others = sum(n for rank, n in enumerate(args[2]) if rank != dist.get_rank())
            self.total += others * args[0].element_size()
        return op(*args, **(kwargs or {}))


if __name__ == "__main__":
    folder, *cases = sys.argv[1:]
    groups = start_processes(context_size=2)
    assert groups.context is not None
    for name in cases:
        transformer = model_of(name)
        split_context(transformer, groups.context)
        policy = CASES[name].policy
        apply_policies(transformer, [policy] * len(transformer.blocks))
        if CASES[name].is_compiled:
            for block in transformer.blocks:
                block.compile(fullgraph=True, backend="aot_eager")
        # PyTorch would compile the counting, too.
        sent = SentBytes()
        with contextlib.nullcontext() if CASES[name].is_compiled else sent:
            found = loss_of(transformer, name)
        found["sent"] = torch.tensor(sent.total)
        for value in found.values():
            dist.all_reduce(value)
            value /= groups.world_size
        if groups.is_main:
            torch.save(found, Path(folder) / f"{name}.pt")
    groups.close()
