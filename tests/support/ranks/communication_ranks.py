"""Bytes that collectives move in a training step: `torchrun ... tests/support/ranks/communication_ranks.py BASE FOLDER`
of two processes, or of four that hold two copies of a model. FOLDER/<rank>.json gets {case:
{collective: bytes that this process sends}}."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cogfast.distributed.parallelize import parallelize
from cogfast.distributed.process_groups import start_processes
from cogfast.distributed.tensor_parallel import ParallelGroup
from cogfast.model.transformer import assemble_transformer
from cogfast.train.activation_checkpointing import Policy, apply_policies
from tests.support.ranks.tensor_parallel_cases import CASES as TENSOR_PARALLEL_CASES
from tests.support.ranks.tensor_parallel_cases import materialize
from tests.support.runs import run_of
from tests.support.tiny_transformers import inputs

MICRO = "deepspeed.train_micro_batch_size_per_gpu"
ZERO = "deepspeed.zero_optimization"
TWICE = [f"{MICRO}=1", "deepspeed.gradient_accumulation_steps=2"]
PERSISTENT = 200  # numbers; of a real model 100,000
# Nothing of a model this small would be let go of.
ZERO_3 = [
    f"{ZERO}.stage=3",
    f"{ZERO}.stage3_max_reuse_distance=0",
    f"{ZERO}.stage3_prefetch_bucket_size=0",
    f"{ZERO}.stage3_param_persistence_threshold={PERSISTENT}",
]
RANK = 4
LORA = "model.network_config.params.modules.lora_config"
ADAPTERS = [
    f"{LORA}.target=sat.model.finetune.lora2.LoraMixin",
    f"{LORA}.params.r={RANK}",
    "model.not_trainable_prefixes=[all]",
    "args.load={whole}",  # the folder of the first run
]
# Trainer's runs of two copies of a model: overrides of their configurations.
RUNS = {
    "zero-1": [f"{ZERO}.stage=1", *TWICE],
    "zero-2, lora": [*ADAPTERS, *TWICE],
    "zero-3": [*ZERO_3, *TWICE],
}
# A model whose samples both processes share.
CONTEXT = ["args.context_parallel_size=2", *TWICE]
CONTEXT_RUNS = {
    "rows": CONTEXT,
    "rows, adapters": [*ADAPTERS, "args.activation_checkpointing=pointwise", *CONTEXT],
}
# Two copies of the model, each held by two processes.
MESH = ["args.model_parallel_size=2", *TWICE]
ROWS = "args.sequence_parallel=true"
MESH_RUNS = {"trained": MESH, "adapters, split rows": [ROWS, *ADAPTERS, *MESH]}
CASES = {
    "trained": TENSOR_PARALLEL_CASES["5b"],
    "adapters": TENSOR_PARALLEL_CASES["frozen"],
    "adapters, bf16": replace(TENSOR_PARALLEL_CASES["frozen"], dtype=torch.bfloat16),
}
# Models that both hold together: (case, policy of every block, whether rows are split).
SHARED: dict[str, tuple[str, Policy, bool]] = {
    "trained, none": ("trained", "none", False),
    "trained, attention_kept, split rows": ("trained", "attention_kept", True),
    "adapters, full, split rows": ("adapters", "full", True),
    "adapters, bf16, pointwise": ("adapters, bf16", "pointwise", False),
}


class CountedCollectives(TorchDispatchMode):
    """Counts the bytes that this process sends (as a ring would), by the collective's name,
    after the group's name if `names`, {PyTorch's name: shown name}, has one.

    Every collective of PyTorch is an op of two namespaces, whichever library calls it: c10d (DeepSpeed's and
    our own calls, coalesced ones too) and _c10d_functional (tensor parallelism).
    """

    def __init__(self, names: dict[str, str] | None = None) -> None:
        super().__init__()
        self.names = names or {}
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(
        self, op: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        if op.namespace in ("c10d", "_c10d_functional"):
            self._count(op._opname.strip("_"), args)
        return op(*args, **kwargs)

    def _count(self, name: str, args: tuple) -> None:
        size = lambda value: sum(
            t.numel() * t.element_size() for t in tree_leaves(value) if isinstance(t, Tensor)
        )
        if name in ("wait_tensor", "barrier", "monitored_barrier"):
            return
        group = _find_group(args)
        others = group.size() - 1
        half = others / group.size()
        if name.startswith(("allreduce", "all_reduce")):
            name, sent = "all_reduce", 2 * half * size(args[0])
        elif name == "all_gather_into_tensor":  # the functional one: a share comes in
            name, sent = "gather", others * size(args[0])
        elif name == "reduce_scatter_tensor":  # the functional one: the whole comes in
            name, sent = "scatter", half * size(args[0])
        elif name.startswith("all_to_all"):
            sent = half * size(args[0])
        elif name.startswith("allgather"):
            name, sent = "gather", half * size(args[0])
        elif name.startswith("reduce_scatter"):
            name, sent = "scatter", half * size(args[1])
        elif name in ("reduce", "broadcast"):  # the one at the end of the ring sends nothing
            sent = half * size(args[0])
        else:  # between steps
            sent = size(args[0])
        ours = self.names.get(group.group_name)
        self.sent[name if ours is None else f"{ours} {name}"] += sent


def _find_group(args: tuple) -> dist.ProcessGroup:
    """Return a collective's group from its arguments: c10d gets the group, _c10d_functional its name."""
    if isinstance(args[-1], str):
        return _resolve_process_group(args[-1])
    (group,) = (
        argument
        for argument in args
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type())
    )
    return dist.ProcessGroup.unbox(group)


def training_step(base: str, save: Path, arguments: list[str]) -> Counter[str]:
    """Count the bytes of the third step; the first two set up buffers."""
    arguments = ["args.train_iters=3", *arguments]
    trainer = run_of(base).into(save).trainer(*arguments)
    update, seen, names, groups = trainer.engine.step, [], {}, trainer.groups
    if groups.model is not None:
        names = {groups.model.name: "inside", groups.replicas.group_name: "copies"}
        names[groups.model_control.group_name] = "words"
    with CountedCollectives(names) as counted:

        def step(lr: float) -> None:
            is_update = trainer.engine.engine.is_gradient_accumulation_boundary()
            update(lr)
            if is_update:
                seen.append(Counter(counted.sent))

        trainer.engine.step = step
        trainer.train()
    return seen[2] - seen[1]


def shared_step(name: str, group: ParallelGroup) -> Counter[str]:
    """Count the bytes of a model that both processes share, forward and backward."""
    case, policy, splits_rows = SHARED[name]
    case = CASES[case]
    with torch.device("meta"):
        transformer = assemble_transformer(case.config)
    parallelize(transformer, group, splits_rows)
    materialize(transformer, seed=3)
    case.freeze(transformer)
    transformer.to(case.dtype)
    apply_policies(transformer, [policy] * len(transformer.blocks))
    given = inputs(case.family)
    with CountedCollectives() as counted:
        transformer.train()(**given).float().square().mean().backward()
    return counted.sent


def main() -> None:
    base, folder = sys.argv[1], Path(sys.argv[2])
    groups = start_processes()
    found, runs = {}, RUNS | CONTEXT_RUNS if groups.world_size == 2 else MESH_RUNS
    for name, arguments in runs.items():
        whole = next((folder / next(iter(runs))).glob("*"), None)
        arguments = [argument.format(whole=whole) for argument in arguments]
        found[name] = training_step(base, folder / name, arguments)
    if groups.world_size == 2:
        group = ParallelGroup(groups.rank, groups.world_size, dist.group.WORLD)
        found |= {name: shared_step(name, group) for name in SHARED}
    (folder / f"{groups.rank}.json").write_text(json.dumps(found))
    groups.close()


if __name__ == "__main__":
    main()
