"""Finds the first number of a forward and backward pass that is not finite.

Every op of the network's forward pass is checked, so a pass takes many times longer than in training.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cogfast.model.transformer import DiffusionTransformer

# Ops whose results have no values yet. Those of collectives arrive when they are waited for.
_UNFILLED = ("empty", "new_empty", "resize", "set_")
_COLLECTIVES = ("c10d", "_c10d_functional")
_NUM_WEIGHTS = 3  # damaged weights that are named


@dataclass
class Finding:
    """The result of one inspected micro-batch.

    places: where numbers are not finite, in the order of computation; empty if all are finite.
    order: how many results and gradients were checked up to the first of them; 0 for weights and
    inputs. Ranks that share a model compute in the same order. bad_samples: positions in the
    micro-batch of the samples with such numbers in the network's inputs or output; empty if only
    gradients have them. largest: the largest activation before the first such number, and the op that
    returned it.
    """

    places: list[str] = field(default_factory=list)
    order: float = math.inf
    bad_samples: list[int] = field(default_factory=list)
    timesteps: list[int] = field(default_factory=list)
    loss: float = math.nan
    largest: float = 0.0
    largest_at: str = ""

    def text(self, samples: list[str]) -> str:
        """Describe the finding in one line. samples: the names of the micro-batch's samples."""
        bad = self.bad_samples or range(len(samples))
        steps = self.timesteps or [None] * len(samples)
        named = ", ".join(
            samples[i] if steps[i] is None else f"{samples[i]} at timestep {steps[i]}" for i in bad
        )
        parts = [f"samples: {named}"]
        if self.places:
            parts += [f"not finite: {'; then '.join(self.places)}"]
        else:
            parts += [f"every number is finite when it runs again (loss {self.loss:.4g})"]
        if self.largest_at:
            before = " before it" if self.places else ""
            parts += [f"largest activation{before}: {self.largest:.4g} ({self.largest_at})"]
        return "; ".join(parts)


def inspect(
    transformer: DiffusionTransformer,
    batch: Mapping[str, Any],
    loss_of: Callable[[], Tensor],
    damaged: Iterable[str] = (),
    loss_scale: float = 1.0,
) -> tuple[Finding, dict[str, Tensor]]:
    """Run a micro-batch forward and backward, and check its numbers.

    Changes neither weights nor gradients. All ranks of a tensor-parallel group, and under ZeRO-3 all
    ranks, must call it together.

    batch: the micro-batch on the device. loss_of: returns its loss, through `transformer`. damaged:
    weights that are not finite. Returns the finding and the inputs of the network by name.
    """
    watch = OpWatch(transformer)
    finding = watch.finding
    named = list(damaged)
    if named:
        finding.order = 0
        more = f" and {len(named) - _NUM_WEIGHTS} more" if len(named) > _NUM_WEIGHTS else ""
        finding.places.append(f"weights {', '.join(named[:_NUM_WEIGHTS])}{more}")
    for key, value in batch.items():
        if isinstance(value, Tensor):
            watch.note_samples(f"the batch's {key}", value)
    with watch, _without_compiling(transformer):
        loss = loss_of()
        finding.loss = float(loss.detach())  # sync: inspection
        # Bad samples make every later number bad.
        if watch.first_op is not None and not watch.has_bad_inputs:
            finding.places.append(watch.first_op)
            finding.order = min(finding.order, watch.num_checked)
        elif not math.isfinite(finding.loss) and not finding.places:
            finding.places.append("the loss, with a finite output of the network")
            finding.order = watch.num_checked
        watch.backward(loss * loss_scale)
    # A loss that is not finite makes every gradient so.
    if math.isfinite(finding.loss) and watch.first_gradient is not None:
        finding.places.append(watch.first_gradient)
        finding.order = min(finding.order, watch.num_checked)
    return finding, watch.inputs


def damaged_weights(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return a text for each of the named tensors that is not finite."""
    found = ((name, _describe_bad(values)) for name, values in named)
    return [f"{name} ({text})" for name, text in found if text is not None]


class OpWatch(TorchDispatchMode):
    """Checks what the ops of the network return, its inputs and the gradients."""

    def __init__(self, transformer: DiffusionTransformer) -> None:
        super().__init__()
        self.transformer, self.finding = transformer, Finding()
        self.inputs: dict[str, Tensor] = {}
        self.has_bad_inputs = False
        self.first_op: str | None = None
        self.num_checked = 0  # results and gradients, up to the first that is not finite
        self.first_gradient: str | None = None
        self._path: list[str] = []  # of the modules that are running; empty outside of the network
        self._hooks: list[Any] = []

    def __enter__(self) -> OpWatch:
        for name, module in self.transformer.named_modules():
            before = partial(self._begin, name)
            self._hooks += [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(partial(self._end, name), always_call=True),
            ]
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._path and self.first_op is None and _returns_new_values(func):
            self.num_checked += 1
            for value in tree_leaves(out):
                if isinstance(value, Tensor):
                    self._check_op(str(func).removesuffix(".default"), value)
        return out

    def _check_op(self, op: str, value: Tensor) -> None:
        largest = _largest(value)
        where = f"{self._path[-1] or 'the network'}: output of {op}"
        if not math.isfinite(largest):
            self.first_op = f"{where} ({_describe_bad(value)})"
        elif largest > self.finding.largest:
            self.finding.largest, self.finding.largest_at = largest, where

    def _begin(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if module is self.transformer:
            self._note_inputs(args, kwargs)
        # Recomputation in the backward pass runs modules, too, but not the network itself.
        if self._path or module is self.transformer:
            self._path.append(name)

    def _end(self, name: str, module: nn.Module, args: tuple, out: Any) -> None:
        if not self._path:
            return
        self._path.pop()
        if isinstance(out, Tensor) and out.requires_grad:
            where = f"the gradient of the output of {name or 'the network'}"
            out.register_hook(partial(self._check_gradient, where))
        if module is self.transformer and isinstance(out, Tensor) and not self.finding.bad_samples:
            self.finding.bad_samples = _bad_rows(out.detach())

    def _note_inputs(self, args: tuple, kwargs: dict) -> None:
        # A loss may call the network more than once; the first call counts.
        if self.inputs:
            return
        names = ("latents", "timesteps", "text", "image_latents", "ofs")
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        self.inputs = {k: v.detach() for k, v in named.items() if isinstance(v, Tensor)}
        steps = self.inputs.get("timesteps", torch.zeros(0))
        self.finding.timesteps = [int(step) for step in steps.tolist()]  # sync: inspection
        for key, value in self.inputs.items():
            self.note_samples(f"the network's input {key}", value)

    def note_samples(self, what: str, values: Tensor) -> None:
        """Check a tensor [B, ...] of the micro-batch's samples."""
        text = None if self.has_bad_inputs else _describe_bad(values)
        if text is not None:
            self.has_bad_inputs = True
            self.finding.places.append(f"{what} ({text})")
            self.finding.order = 0
            self.finding.bad_samples = _bad_rows(values)

    def _check_gradient(self, what: str, gradient: Tensor) -> None:
        if self.first_gradient is not None:
            return
        # Gradients follow from a result that is not finite, which is the first then.
        self.num_checked += self.first_op is None
        if not math.isfinite(_largest(gradient)):
            self.first_gradient = f"{what} ({_describe_bad(gradient)})"

    def backward(self, loss: Tensor) -> None:
        """Check all gradients in the order in which they arrive, without keeping them."""
        trained = {n: p for n, p in self.transformer.named_parameters() if p.requires_grad}

        def hook(name: str, gradient: Tensor) -> Tensor:
            self._check_gradient(f"the gradient of {name}", gradient)
            # One element in place of the gradient: all of them together may not fit into memory.
            return gradient.new_zeros(1).expand_as(gradient)

        hooks = [p.register_hook(partial(hook, name)) for name, p in trained.items()]
        try:
            # Not backward(), which would hand the gradients to DeepSpeed.
            torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        finally:
            for registered in hooks:
                registered.remove()


def _returns_new_values(func: Any) -> bool:
    """Return whether an op fills what it returns; views and unfilled memory have no new values."""
    namespace, _, name = func._schema.name.partition("::")
    if namespace in _COLLECTIVES:
        return name == "wait_tensor"
    returned = [value.alias_info for value in func._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in returned)
    return not is_view and not name.startswith(_UNFILLED)


def _largest(values: Tensor) -> float:
    """Return the largest absolute value; inf or NaN if one is not finite, 0 for other than floats."""
    if not values.is_floating_point() or not values.numel():
        return 0.0
    low, high = torch.aminmax(values.detach())  # passes NaN on, and needs no copy
    return torch.maximum(-low, high).item()  # sync: inspection


def _describe_bad(values: Tensor) -> str | None:
    """Say how many numbers are not finite; None if all are finite."""
    if math.isfinite(_largest(values)):
        return None
    values = values.detach()
    num_nan, num_inf = int(values.isnan().sum()), int(values.isinf().sum())  # sync: inspection
    kinds = [f"{n} {kind}" for n, kind in ((num_nan, "NaN"), (num_inf, "inf")) if n]
    return f"{' and '.join(kinds)} of {values.numel()} values"


def _bad_rows(values: Tensor) -> list[int]:
    """Return the indices of the samples of [B, ...] that have a number that is not finite."""
    if not values.ndim or not values.is_floating_point():
        return []
    is_bad = ~values.reshape(len(values), -1).isfinite().all(dim=1)
    return is_bad.nonzero().flatten().tolist()  # sync: inspection


@contextlib.contextmanager
def _without_compiling(transformer: DiffusionTransformer) -> Iterator[None]:
    """Run compiled blocks as plain PyTorch, whose ops can be watched."""
    if all(block._compiled_call_impl is None for block in transformer.blocks):
        yield  # without an import of torch._dynamo
        return
    with torch.compiler.set_stance("force_eager"):
        yield
