"""Gradients of ranks that split the rows of a sample: `torchrun ... context_parallel_ranks.py FOLDER CASE...`.

Each case leaves FOLDER/<case>.pt: the output, and the gradients after ZeRO's average over the ranks.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from cogfast.distributed.context_parallel import split_context
from cogfast.distributed.process_groups import start_processes
from cogfast.train.activation_checkpointing import apply_policies
from tests.distributed.test_context_parallel import CASES, loss_of, model_of

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
        found = loss_of(transformer, name)
        for value in found.values():
            dist.all_reduce(value)
            value /= groups.world_size
        if groups.is_main:
            torch.save(found, Path(folder) / f"{name}.pt")
    groups.close()
