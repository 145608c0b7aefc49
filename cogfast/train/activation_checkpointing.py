"""Selective activation checkpointing, with a policy for each block.

    none            keep everything
    pointwise       keep the results of matmuls and attention; recompute norms, rotation and gelu
    attention_kept  keep attention's output and lse; recompute the rest
    full            keep only the block's input

All policies give the same gradients, bit for bit where the kernels are deterministic. For `auto`, train/phases.py
asks an extension. With args.compile, pointwise and attention_kept run inside the compiled graph and
guide the compiler's partitioner.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from cogfast.extensions.table import hook
from cogfast.kernels.attention_backends import keeps_output
from cogfast.model.block import Block
from cogfast.model.transformer import BlockCall, DiffusionTransformer
from cogfast.train.keys import TrainKeys

logger = logging.getLogger(__name__)

Keeps = Callable[..., bool]  # of an op and its arguments
Policy = Literal["none", "attention_kept", "pointwise", "full"]

# From the policy that keeps least to the one that keeps most. Each unit of memory saves less
# recomputation from rung to rung: attention for 1 U, the matmuls for 9 U, then the rest.
LADDER: tuple[Policy, ...] = ("full", "attention_kept", "pointwise", "none")

# A matmul counts as low-rank if its inner dim is this many times smaller than both outer dims.
# Recomputing it is as cheap as reading its result.
_LOW_RANK = 4

_aten = torch.ops.aten
# Attention in plain PyTorch, which short sequences in half precision run on a CPU, has no op of its own.
_PLAIN_ATTENTION = {_aten.bmm.default, _aten.baddbmm.default}
_MATMULS = {_aten.mm.default, _aten.addmm.default, _aten.linear.default}


def _is_attention(op: Any, *args: Any) -> bool:
    return op in _PLAIN_ATTENTION or keeps_output(op)


def _is_product(op: Any, *args: Any) -> bool:
    if op in _MATMULS:
        return not _is_low_rank(*args[-2:])
    # Products with frozen weights are ops of our own, such as int8_linear.
    return _is_attention(op) or (op.namespace == "cogfast" and op.name().endswith("_linear"))


def _is_low_rank(a: Tensor, b: Tensor) -> bool:
    """Return whether k is far below n and m in the product of a [n, k] and b [k, m].

    LoRA's second product is low-rank. Keeping its result would cost as much memory as keeping the
    result of the linear that it is added to.
    """
    return a.ndim == 2 and _LOW_RANK * a.shape[1] < min(a.shape[0], b.shape[1])


# Policy -> whether it keeps the results of an op
_KEEPS: dict[Policy, Keeps] = {"attention_kept": _is_attention, "pointwise": _is_product}


@dataclass(frozen=True, slots=True)
class _Argument:
    """Stands for a result that is a tensor argument of its op."""

    number: int


@dataclass(frozen=True, slots=True)
class _Result:
    """A kept tensor. version: PyTorch's count of changes in place, which aliases share."""

    packed: Any
    version: int


class _Keep(TorchDispatchMode):
    """Keeps the results of ops that `keeps` accepts, packed by `pack`, in a forward pass."""

    supports_higher_order_operators = True  # compiled attention is one

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else FlexAttention would run without torch.compile

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first op imports torch's compiler

    def __init__(self, keeps: Keeps, change: Callable[[Any], Any], kept: deque[Any]) -> None:
        super().__init__()
        self.keeps, self.change, self.kept = keeps, change, kept

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        given = _tensors(args)  # a compiled region empties the list of its arguments
        out = func(*args, **(kwargs or {}))
        if self.keeps(func, *args):
            numbers = {id(x): _Argument(i) for i, x in enumerate(given)}
            # A compiled region returns the arguments that its backward pass reads: to keep them would
            # take the memory of q, k and v.
            pack = lambda x: numbers.get(id(x)) or _Result(self.change(x), x._version)
            self.kept.append(tree_map_only(Tensor, pack, out))
        return out


class _Reuse(_Keep):
    """Returns what _Keep has kept, unpacked by `change`, in place of computing it again."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if not self.keeps(func, *args):
            return func(*args, **(kwargs or {}))
        given = _tensors(args)

        def unpack(x: Any) -> Any:
            if isinstance(x, _Argument):
                return given[x.number]
            if not isinstance(x, _Result):
                return x
            if isinstance(x.packed, Tensor) and x.packed._version != x.version:
                text = f"activation checkpointing kept the result of {func}, which was changed in place"
                fix = "leave out inplace=True, or set args.activation_checkpointing=full"
                raise RuntimeError(f"{text} afterwards; {fix}")
            return self.change(x.packed)

        # Out of the list: a result that it held until the end would refer to itself through autograd.
        return tree_map(unpack, self.kept.popleft())


def _alias(x: Tensor) -> Tensor:
    """Return x without its graph, with the same count of changes in place."""
    # Autograd has excluded this key, without which a detached tensor has a count of its own.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


def _tensors(args: Any) -> list[Tensor]:
    return [x for x in tree_leaves(args) if isinstance(x, Tensor)]


def kept_contexts(
    keeps: Keeps, pack: Callable[[Tensor], Any] = _alias, unpack: Callable[[Any], Any] = lambda x: x
) -> tuple[_Keep, _Reuse]:
    """Return contexts for a checkpoint's forward pass and its recomputation."""
    kept: deque[Any] = deque()
    return _Keep(keeps, pack, kept), _Reuse(keeps, unpack, kept)


def _compiled_contexts(keeps: Keeps) -> tuple[Any, Any]:
    """Return such contexts for torch.compile, which knows PyTorch's own."""

    def choose(ctx: object, op: object, *args: Any, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if keeps(op, *args) else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


def checkpoint_options(
    policy: Policy, keep_rng: bool, contexts: Callable, *packing: Any
) -> dict[str, Any]:
    """Return the options of a checkpoint. contexts: makes its contexts of what is kept, and packing."""
    # Only the non-reentrant version accepts a context_fn.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": keep_rng}
    if policy in _KEEPS:
        options["context_fn"] = partial(contexts, _KEEPS[policy], *packing)
    return options


@cache
def _runner(policy: Policy, keep_rng: bool, is_compiled: bool) -> Callable[..., Tensor]:
    """Return a function of a block and its inputs. Blocks with one policy share it and its graphs."""
    contexts = _compiled_contexts if is_compiled else kept_contexts
    options = checkpoint_options(policy, keep_rng, contexts)
    if not is_compiled or policy == "full":
        # full needs no graph of its own: it calls the compiled block twice.
        return partial(checkpoint, **options)

    def run(block: Block, *inputs: object) -> Tensor:
        return checkpoint(block.forward, *inputs, **options)

    return torch.compile(run, fullgraph=True, dynamic=None)


def block_call(
    block: nn.Module, policy: Policy, keep_rng: bool = False, is_compiled: bool = False
) -> BlockCall:
    """Return a call of a block under a policy."""
    return block if policy == "none" else partial(_runner(policy, keep_rng, is_compiled), block)


def apply_policies(
    transformer: DiffusionTransformer, policies: Sequence[Policy], is_compiled: bool = False
) -> None:
    """Run each block under its policy while the transformer is in training mode."""
    keep_rng = transformer.uses_dropout  # no other op in a block uses random numbers
    pairs = zip(transformer.blocks, policies, strict=True)
    calls = [block_call(block, policy, keep_rng, is_compiled) for block, policy in pairs]
    transformer.use_calls(calls)


def apply_checkpointing(
    transformer: DiffusionTransformer,
    args: TrainKeys,
    device: torch.device,
    chosen: tuple[Policy, ...] | None = None,
) -> tuple[Policy, ...]:
    """Run each block under the policy of args.activation_checkpointing; return the policies.

    chosen: those of `auto`; None: the memory of the run cannot be predicted, and `auto` is full.
    """
    number, choice = len(transformer.blocks), args.activation_checkpointing
    assert choice is not None, "the door chooses one"
    policies = chosen or ("full" if choice == "auto" else choice,) * number
    if chosen is not None:
        logger.info("activation checkpointing: %s", describe(policies))
    elif choice == "auto":
        text = "activation checkpointing: %s, because the memory of the run cannot be predicted; "
        more = "args.activation_checkpointing=attention_kept, pointwise or none keeps more"
        logger.warning(text + more, describe(policies))
    # (transformer, policies, device, is_compiled): runs the blocks so, and moves what they keep to host memory
    offload = hook("offload_activations", args)
    if offload is None:
        apply_policies(transformer, policies, args.compile)
    else:
        offload(transformer, policies, device, args.compile)
    return policies


def describe(policies: Sequence[Policy]) -> str:
    """Format policies as `attention_kept in layers 0-23, pointwise in layers 24-41`."""
    if len(set(policies)) == 1:
        return f"{policies[0]} in all {len(policies)} layers"
    runs = groupby(range(len(policies)), key=policies.__getitem__)
    layers = [(policy, [*run]) for policy, run in runs]
    return ", ".join(f"{policy} in layers {run[0]}-{run[-1]}" for policy, run in layers)
