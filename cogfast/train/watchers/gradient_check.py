"""Checks that something is trainable and that every trainable parameter gets a gradient."""

from __future__ import annotations

from torch import Tensor, nn

from cogfast.config.values import counted
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.model.transformer import DiffusionTransformer
from cogfast.train.memory.host_blocks import stored_base
from cogfast.train.watchers.watcher import Watcher


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
    gates: list[Tensor] = [p for name, p in named if ".modulation." in name]
    stored = stored_base(transformer).items()
    gates += [tensors["weight"] for path, tensors in stored if ".modulation." in path]
    # Each rank of a tensor-parallel group has a part of the modulation, which may be zero.
    is_learning = groups.decide(any(bool(p.any()) for p in gates))
    return None if is_learning else "the blocks' modulation is zero"


class GradientCheck(Watcher):
    """Raises an error if nothing is trainable, or if a parameter has no gradient in the first step."""

    def __init__(self, model: nn.Module) -> None:
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trainable:
            raise ValueError(
                "nothing is trainable: model.not_trainable_prefixes freezes all parameters and "
                "there is no lora_config; remove the prefix or add network_config's lora_config"
            )
        self.num_trainable = len(trainable)
        self.is_lora = all("lora" in name or "matrix_" in name for name in trainable)
        self.waiting = set(trainable)
        # Hooks, because ZeRO moves gradients away from the parameters as they arrive.
        self.hooks = [p.register_hook(self._seen(name)) for name, p in trainable.items()]

    def _seen(self, name: str):
        def hook(gradient: Tensor) -> None:
            self.waiting.discard(name)

        return hook

    def after_step(self, step: int) -> None:
        """Check once, after the first step. Call it after every step."""
        if not self.hooks:
            return
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        if self.waiting:
            kind = "LoRA tensor" if self.is_lora else "trainable tensor"
            raise RuntimeError(
                f"no gradient in step {step} for {len(self.waiting)} of "
                f"{counted(self.num_trainable, kind)}, such as "
                f"{', '.join(sorted(self.waiting)[:3])}; freeze them with "
                "model.not_trainable_prefixes, or check that the network uses them"
            )
