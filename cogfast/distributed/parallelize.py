"""Apply tensor parallelism to a built transformer: each rank keeps its shard of every block.

Modulation layers are sharded too, and their outputs gathered. They have 12 M x 512 weights per
block, 793 of 5B's 5570 million; replicated on two ranks they would waste 7.9 GB each (20 bytes per
weight with gradients, master weights, moments and EMA). The gather moves 12 M numbers per sample and
block, 74 kB for 5B in bf16, against 109 MB for each all-reduce of a block's activations.
"""

from __future__ import annotations

import importlib
import logging
import math
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._decomp import global_decomposition_table
from torch.optim import Optimizer
from torch.utils import checkpoint

from cogfast.distributed.sequence_parallel import SequenceParallelBlock
from cogfast.distributed.tensor_parallel import (
    ColumnParallelLinear,
    GatheredLinear,
    ParallelGroup,
    ParallelLinear,
    ParallelLora,
    RowParallelLinear,
    SharedHeadNorm,
)
from cogfast.model.block import Block
from cogfast.model.lora import LoraLinear
from cogfast.model.transformer import DiffusionTransformer
from cogfast.model.weights.shard import Shard

logger = logging.getLogger(__name__)

# Limit on the compiled graphs of a block. Training, held-out loss and sampling differ in gradients,
# batch size and sizes of one. PyTorch's limit is 8, and with fullgraph the ninth graph is an error.
_MOST_GRAPHS = 64
_HIDDEN_FROM_DYNAMO = (
    Optimizer.add_param_group,
    Optimizer.zero_grad,
    Optimizer.state_dict,
    Optimizer.load_state_dict,
    checkpoint.checkpoint,
    vars(checkpoint).get("_run_fn_with_dynamo_disabled"),  # since PyTorch 2.9
)
_HIDING = Optimizer.zero_grad.__code__  # of all functions that torch._disable_dynamo returns


def parallelize(
    transformer: DiffusionTransformer, group: ParallelGroup, splits_rows: bool = False
) -> None:
    """Replace the linears of every block by this rank's shards, in place. Parameter names stay.

    A transformer on the meta device stays there, so that the whole model is never in memory.
    splits_rows: split the sequence between the ranks outside of the linears (sequence_parallel.py).
    """
    if group.size == 1:
        return
    # A column-parallel linear feeds a row-parallel one: one sum per pair, none between them.
    columns = partial(ColumnParallelLinear, group=group, splits_rows=splits_rows)
    rows = partial(RowParallelLinear, group=group, splits_rows=splits_rows)
    cuts = {"attention.out": rows, "fc1": columns, "fc2": rows}
    # q, k and v are each cut, so that a rank has the same heads of all three.
    cuts["attention.qkv"] = partial(columns, num_parts=3)
    last = len(transformer.blocks) - 1
    for i, block in enumerate(transformer.blocks):
        assert isinstance(block, Block), f"{type(block).__name__} among the blocks"
        for path, cut in cuts.items():
            linear: Any = block.get_submodule(path)  # perhaps with adapters
            is_lora = isinstance(linear, LoraLinear)
            shard = ParallelLora(linear, cut(linear.original)) if is_lora else cut(linear)
            block.set_submodule(path, shard)
        for name in ("query_norm", "key_norm"):
            norm = getattr(block.attention, name)
            # A norm that has no weights has no gradient to sum.
            if norm is not None and norm.elementwise_affine:
                setattr(block.attention, name, SharedHeadNorm(norm, group))
        gathered = GatheredLinear(block.modulation.linear, group, sums_gradient=splits_rows)
        block.set_submodule("modulation.linear", gathered)
        if splits_rows:
            # The new block takes over the modules of the old one, so parameter names stay.
            transformer.blocks[i] = SequenceParallelBlock(block, group, i == 0, i == last)
    _mark(transformer)


def find_shards(transformer: nn.Module) -> dict[str, Shard]:
    """Return {parameter name: this rank's shard} of all sharded parameters."""
    return {
        f"{path}.{name}": shard
        for path, module in transformer.named_modules()
        if isinstance(module, ParallelLinear | ParallelLora)
        for name, shard in module.shards.items()
    }


def count_trained(transformer: DiffusionTransformer) -> int:
    """Return the number of trained elements of the whole model, over all shards."""
    trained = [p for p in transformer.parameters() if p.requires_grad]
    return sum(math.prod(getattr(p, "shard", p).shape) for p in trained)


def _mark(transformer: DiffusionTransformer) -> None:
    """Mark sharded parameters for DeepSpeed's gradient norm and for checkpoints."""
    parameters: dict[str, Any] = dict(transformer.named_parameters())  # Any: they get attributes
    for name, shard in find_shards(transformer).items():
        if name in parameters:
            # DeepSpeed counts parameters without it once per tensor-parallel group.
            parameters[name].tensor_model_parallel, parameters[name].shard = True, shard


def allocate(transformer: DiffusionTransformer, device: torch.device) -> None:
    """Allocate a transformer that was built, and possibly parallelized, on the meta device."""
    # Not by to_empty, whose empty_like of a meta tensor imports sympy.
    transformer._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device))
    _mark(transformer)  # the parameters are new objects


def run_without_dynamo(is_without: bool = True) -> None:
    """Let torch call optimizers, checkpointing and ops on the meta device without importing
    torch._dynamo.

    torch hides these functions from torch.compile and imports its compiler for that when one is
    first called, which takes 1.6 s of a start and 1 s of `cogfast plan`. A run that compiles nothing
    needs none of it.
    """
    if "torch._dynamo" not in sys.modules:
        if is_without:
            torch.__dict__["_dynamo"] = _UnusedDynamo("torch._dynamo")
        else:
            torch.__dict__.pop("_dynamo", None)
    functions = [*_HIDDEN_FROM_DYNAMO]
    for decompositions in global_decomposition_table.values():
        functions += decompositions.values()
    for hidden in _hidden_from_dynamo(functions):
        # torch's cache of the hidden function; None is an empty one.
        hidden.__dict__["__dynamo_disable"] = hidden if is_without else None


class _UnusedDynamo(ModuleType):
    """Stands for torch._dynamo until something imports it: what PyTorch 2.13's checkpoint reads of it."""

    config = SimpleNamespace(error_on_nested_fx_trace=True)

    @staticmethod
    def disable(function: FunctionType) -> FunctionType:
        return function

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("torch._dynamo"), name)


def _hidden_from_dynamo(functions: Iterable[object]) -> Iterator[FunctionType]:
    """Yield what torch._disable_dynamo wraps, within any number of other wrappers."""
    seen: set[FunctionType] = set()
    waiting = [*functions]
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        cells = function.__closure__ or ()
        held = dict(zip(function.__code__.co_freevars, cells, strict=True))
        if function.__code__ is _HIDING:
            yield held["fn"].cell_contents
        waiting += [cell.cell_contents for cell in cells]


def compile_blocks(transformer: DiffusionTransformer) -> None:
    """Compile every block in place. Parameter names stay.

    All blocks share their graphs: a static one for the first shape, and a dynamic one for all later
    shapes. fullgraph makes a graph break an error. A block with a selective checkpointing policy is
    compiled once more, with the checkpoint inside (activation_checkpointing.py).
    """
    run_without_dynamo(False)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_GRAPHS)
    for block in transformer.blocks:
        block.compile(fullgraph=True, dynamic=None)
    logger.info("args.compile: blocks are compiled as they first run")
