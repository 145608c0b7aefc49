"""Bytes that ranks keep and those that the plan counts: `torchrun ... held_memory_ranks.py FILE
'[[BASE, WORD, ...], ...]'`.

FILE gets for each run, by rank, {part: [kept, planned]}, after a few steps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor

from cogfast.config import load_config
from cogfast.distributed.process_groups import start_processes
from cogfast.kernels.quantized.moment_codes import MOMENTS, largest_key
from cogfast.model.transformer import DiffusionTransformer
from cogfast.plan.memory import host_parts
from cogfast.train.memory import offloaded_activations
from cogfast.train.memory.host_blocks import HostBlocks
from cogfast.train.trainer import Trainer


def weight_bytes(transformer: DiffusionTransformer, stage: int) -> int:
    """Return the bytes of parameters, or ZeRO-3's partitions of them, buffers and slots."""
    parameters: Iterator[Any] = transformer.parameters()  # Any: ZeRO-3 adds attributes
    tensors = [p.ds_tensor if stage == 3 else p for p in parameters]
    source = transformer.block_source
    slots = source._slots if isinstance(source, HostBlocks) else []
    return sum(x.nbytes for x in [*tensors, *transformer.buffers(), *(s.memory for s in slots)])


def compare(words: list[str]) -> dict[str, list[int]]:
    """Train and return {part: [kept, planned]}."""
    copies: list[Tensor] = []
    allocate = offloaded_activations.host_buffer

    def noted(like: Tensor) -> Tensor:
        copies.append(allocate(like))
        return copies[-1]

    with patch.object(offloaded_activations, "host_buffer", noted):
        trainer = Trainer(load_config([words[0]], words[1:]))
        trainer.train()
    setup, engine = trainer.parts.memory.setup, trainer.engine
    assert setup is not None, "the run can be predicted"
    planned = setup.state
    on_host = host_parts(setup, trainer.parts.checkpointing.policies)
    states = [engine.state(i) for i in range(len(engine.parts))]
    keys = [*MOMENTS, *map(largest_key, MOMENTS)]
    moments = sum(state[key].nbytes for state in states for key in keys if key in state)
    average = sum(state["shadow"].nbytes for state in states)
    source = engine.transformer.block_source
    blocks = source._host.values() if isinstance(source, HostBlocks) else []
    is_host_ema = setup.rules.has_host_ema
    return {
        "weights": [weight_bytes(engine.transformer, engine.stage), planned.weights],
        "master": [sum(part.nbytes for part in engine.parts), planned.master],
        "moments": [moments, planned.moments],
        "EMA": [average, planned.host_ema if is_host_ema else planned.ema],
        "blocks on the host": [sum(x.nbytes for x in blocks), on_host["blocks"]],
        "activations on the host": [sum(x.nbytes for x in copies), on_host["activations"]],
    }


if __name__ == "__main__":
    file, runs = sys.argv[1:]
    groups = start_processes()
    found = []
    for words in json.loads(runs):
        found.append(groups.gather(compare(words)))
    if groups.is_main:
        Path(file).write_text(json.dumps(found))
    groups.close()
