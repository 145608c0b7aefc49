"""Checks of a run's parameters: each trainable one gets a gradient, and copies of one stay bitwise equal."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cogfast.core.values import counted
from cogfast.distributed.parallelize import find_shards
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.distributed.tensor_parallel import ParallelGroup
from cogfast.distributed.zero_engine import ZeroEngine
from cogfast.model.keys import ModelKeys
from cogfast.model.transformer import DiffusionTransformer
from cogfast.train.watchers.watcher import Watcher

_CHUNK = 2**20  # elements hashed at a time, with 8 bytes of temporary memory each
_ODD = 0x2545F4914F6CDD1D  # makes the hash depend on the order of the chunks
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio as int64, spreads indices
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by item size


def lora_cannot_learn(transformer: DiffusionTransformer, groups: ProcessGroups) -> str | None:
    """Return why no adapter would get a gradient, or None; the same on every rank. Collective.

    Zero weights behind the adapters, in the output layer or in all gates, stop every gradient.
    """
    # sync: once, before the first step
    if transformer.config.lora_rank is None:
        return None
    if not transformer.output.weight.any():
        return "the output layer is zero"
    named = transformer.blocks.named_parameters()
    named = (*named, *transformer.runtime.held.items())
    gates: list[Any] = [p for name, p in named if ".modulation." in name]
    # Each rank of a tensor-parallel group has a part of the modulation, which may be zero.
    is_learning = groups.decide(any(bool(p.any()) for p in gates))
    return None if is_learning else "the blocks' modulation is zero"


def check_has_gradient(loss: Tensor, model: ModelKeys) -> None:
    """Refuse a loss that no trained parameter has a part in."""
    if loss.requires_grad:
        return
    if model.trainable_modules is not None:
        text = "the loss has no gradient: none of model.trainable_modules took part in it; give the samples what "
        text += "these modules read (data.params.tensors), or train other weights, too"
    else:
        text = "compute_loss returned a loss without a gradient; compute it from the output of the model, outside "
        text += "torch.no_grad(), without .item() and .detach()"
    raise ValueError(text)


class GradientCheck(Watcher):
    """Raises an error if nothing is trainable, or if a parameter has no gradient in the first step."""

    def __init__(self, model: nn.Module) -> None:
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trainable:
            text = "nothing is trainable: model.not_trainable_prefixes freezes all parameters and there is no "
            raise ValueError(f"{text}lora_config; remove the prefix or set args.lora_rank=64")
        self.num_trainable = len(trainable)
        self.is_lora = all("lora" in name or "matrix_" in name for name in trainable)
        self.waiting = set(trainable)
        # Hooks, because ZeRO moves gradients away from the parameters as they arrive.
        seen = lambda name: lambda gradient: self.waiting.discard(name)
        self.hooks = [p.register_hook(seen(name)) for name, p in trainable.items()]

    def after_step(self, step: int) -> None:
        """Check the first step."""
        self.is_done = True
        for hook in self.hooks:
            hook.remove()
        if self.waiting:
            kind = "LoRA tensor" if self.is_lora else "trainable tensor"
            raise RuntimeError(
                f"no gradient in step {step} for {len(self.waiting)} of "
                f"{counted(self.num_trainable, kind)}, such as "
                f"{', '.join(sorted(self.waiting)[:3])}; freeze them with "
                "model.not_trainable_prefixes, or check that the network uses them"
            )


class ReplicaCheck(Watcher):
    """Ends a run whose tensor-parallel ranks differ in a replicated parameter.

    All ranks of a group compute the same update of it from the same gradient. If their copies diverge (a
    non-deterministic sum, a memory fault), nothing else notices: each rank trains a different model.
    Each check reads the replicated parameters once, sends 8 bytes per parameter to the other ranks of
    the group, and has one host-device sync.

    every: optimizer steps between checks.
    """

    def __init__(self, engine: ZeroEngine, group: ParallelGroup, every: int) -> None:
        shards = find_shards(engine.transformer)
        named = engine.transformer.named_parameters()
        self.replicated = {n: p for n, p in named if n not in shards}
        self.group, self.every, self.await_weights = group, every, engine.wait_for_weights

    def after_step(self, step: int) -> None:
        """Raise RuntimeError on every rank of the group if a check is due and the copies differ."""
        if step % self.every:
            return
        self.await_weights()
        mine = hash_parameters(list(self.replicated.values()))
        hashes = mine.new_empty(self.group.size * len(mine))
        dist.all_gather_into_tensor(hashes, mine, group=self.group.process_group)
        hashes = hashes.view(self.group.size, -1).cpu()  # sync: once per `every` steps
        differs = hashes != hashes[0]  # [size, P]
        names = [n for n, is_one in zip(self.replicated, differs.any(0), strict=True) if is_one]
        if names:
            first = differs[:, list(self.replicated).index(names[0])]
            differing = first.nonzero().flatten().tolist()  # sync: none, a CPU tensor
            ranks = ", ".join(map(str, differing))
            others = f" and {len(names) - 1} more" if names[1:] else ""
            raise RuntimeError(
                f"step {step}: the tensor-parallel ranks no longer have the same {names[0]}{others}: "
                f"rank {ranks} differs from rank 0. Resume from the last checkpoint (--resume latest); "
                "if it happens again, try args.deterministic=true, then another machine, and report it "
                "with this line"
            )


def hash_parameters(parameters: list[nn.Parameter]) -> Tensor:
    """Hash the bits and positions of each parameter's elements: [P] int64, on their device.

    Under ZeRO-3 it hashes the part that this rank owns, the same one throughout a tensor-parallel group.
    """
    device = parameters[0].device
    place = torch.arange(1, _CHUNK + 1, device=device) * _GOLDEN
    # Odd weights always detect a change of one element. Other changes are missed with a probability
    # of at most 2^-32.
    weights = (place ^ (place >> 32)) * _GOLDEN | 1
    return torch.stack([_hash(own_values(p).to(device), weights) for p in parameters])


def _hash(values: Tensor, weights: Tensor) -> Tensor:
    """Hash values [N] of any dtype -> [] int64."""
    # Bits and not values: 0.0 equals -0.0, and NaN differs from itself.
    bits = values.view(_INTEGERS[values.element_size()])
    # int64 sums wrap around without an error, which a hash may.
    sums = [(chunk * weights[: len(chunk)]).sum() for chunk in bits.split(_CHUNK)]
    return reduce(lambda total, chunk: total * _ODD + chunk, sums)


def own_values(parameter: Any) -> Tensor:  # Any: ZeRO-3 adds attributes to a Parameter
    """Return the elements that this rank has, [N]; under ZeRO-3, those of its partition."""
    partition = getattr(parameter, "ds_tensor", None)
    if partition is None:
        return parameter.detach().flatten()
    # The last rank's partition ends with padding, whose values are arbitrary.
    before = parameter.ds_zero_partition_rank * partition.ds_numel
    return partition.detach()[: max(0, parameter.ds_numel - before)]
