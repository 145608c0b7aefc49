"""Cases that each process of a tensor-parallel group computes: `torchrun ... tests/support/ranks/tensor_parallel_ranks.py
FOLDER SIZE CASE...`, in groups of SIZE neighbours, each group with other inputs. FOLDER/<case>/ holds
the whole model's weights as SAT saves them; each process leaves FOLDER/<case>/<group>-<rank>.pt there.
The case "golden=PATH" is a model of the golden files."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from cogfast.distributed.parallelize import find_shards, parallelize
from cogfast.distributed.tensor_parallel import ParallelGroup
from cogfast.extensions.memory.host_blocks import hold_base
from cogfast.extensions.memory.keys import MemoryKeys
from cogfast.model.transformer import DiffusionTransformer, assemble_transformer, build_transformer
from cogfast.model.weights.load import load_transformer
from cogfast.train.activation_checkpointing import apply_policies
from tests.support.ranks.tensor_parallel_cases import (
    CASES,
    case_inputs,
    kept_bytes,
    loss_and_gradients,
    materialize,
)
from tests.support.runs import run_of


def share_of(
    transformer: DiffusionTransformer,
    group: ParallelGroup,
    weights: Path,
    splits_rows: bool = False,
    hold: Callable[[DiffusionTransformer], None] = lambda transformer: None,
) -> dict:
    """Shard a transformer of the meta device, load `weights` into it and return its shards.

    hold: called before it is allocated.
    """
    parallelize(transformer, group, splits_rows)
    hold(transformer)
    held = materialize(transformer, seed=3)
    shards = find_shards(transformer)
    report = load_transformer(transformer, weights, shards=shards, held=held)
    assert not report.missing and not report.unexpected, report
    return shards


def run_case(name: str, group: ParallelGroup, folder: Path, number: int) -> dict:
    case = CASES[name]
    with torch.device("meta"):
        transformer = assemble_transformer(case.config)
    case.freeze(transformer)
    keys = MemoryKeys(quantize_base=case.quantization, offload_blocks=case.num_offloaded)
    hold = partial(hold_base, args=keys)
    shards = share_of(transformer, group, folder, case.splits_rows, hold)
    transformer.to(case.dtype)
    if case.is_compiled:
        for block in transformer.blocks:
            block.compile(fullgraph=True, backend="aot_eager")
    if case.policy is not None:
        apply_policies(transformer, [case.policy] * len(transformer.blocks))
    given = case_inputs(name, number)
    found = {"shards": shards, **loss_and_gradients(transformer, given)}
    return found if case.is_compiled else {**found, "kept": kept_bytes(transformer, given)}


def run_golden(golden: Path, group: ParallelGroup) -> dict[str, Tensor]:
    """Return the output of SAT's files of two ranks, of which each process reads its own shard."""
    with torch.device("meta"):
        transformer = build_transformer(run_of(golden / "t2v_5b" / "config.yaml").config().model)
    share_of(transformer, group, golden / "t2v_5b")
    io = load_file(golden / "t2v_5b" / "io.safetensors")
    with torch.no_grad():
        output = transformer(io["x"].transpose(1, 2), io["timesteps"], io["context"])
    return {"output": output.transpose(1, 2)}


def main() -> None:
    folder, size, cases = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    dist.init_process_group("gloo")
    number, rank = divmod(dist.get_rank(), size)
    starts = range(0, dist.get_world_size(), size)
    process_groups = [dist.new_group(list(range(start, start + size))) for start in starts]
    group = ParallelGroup(rank, size, process_groups[number])
    for case in cases:
        name, _, golden = case.partition("=")
        if golden:
            found = run_golden(Path(golden), group)
        else:
            found = run_case(name, group, folder / name, number)
        torch.save(found, folder / name / f"{number}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
