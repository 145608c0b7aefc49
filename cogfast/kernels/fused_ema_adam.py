"""Adam and an exponential moving average (EMA) of the weights, in one pass over the weights.

With g the gradient, t the parameter's own count of updates (1 at the first) and d the EMA decay:

    p *= 1 - lr * weight_decay                        (adam_w_mode; else g += weight_decay * p)
    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
    p -= lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    d = min(ema_decay, (1 + t) / (10 + t))            (use_num_updates; else ema_decay)
    shadow += (1 - d) (p - shadow)                    shadow starts as a copy of p

A GPU runs the Triton kernels of gpu/fused_ema_adam.py, a CPU the C++ kernel of cpu/fused_ema_adam.h;
without them both run torch's fused Adam and a lerp, a CPU on one chunk after another. The moments
are float32, or 8-bit codes (extensions/memory/moment_codes.py); the update uses them before they are
rounded.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from cogfast.kernels import torch_library
from cogfast.kernels.argument_checks import GPU_DTYPES, refuse
from cogfast.kernels.torch_library import CPU_DTYPES, from_gpu, on_device_of_tensors, register_op

MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENT_BLOCK = 256  # elements of an 8-bit moment that share the largest code
# Elements that PyTorch's ops update at a time. On a CPU p, g, m, v and shadow of a chunk (5 MB) stay in
# the caches between Adam's pass and the EMA's, and smaller chunks cost more in launches on two threads. A
# GPU has no room for all 8-bit moments in float32 at once.
_CPU_CHUNK, _GPU_CHUNK = 262_144, 1 << 24
# Count of updates at which 1 - b^t is exactly 1: Adam without bias correction.
_UNBIASED = 1e9
_KERNEL_DTYPES = (*CPU_DTYPES, torch.float16)  # of weights, gradients and copies in C++
# p, g, m, v, shadow and copy of some elements
_Chunk = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def fused_ema_adam_reference(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    shadow: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    adam_w_mode: bool,
    step: float,
    ema_decay: float,
) -> None:
    """Update tensors of one shape and dtype in place; `step` is t and `ema_decay` d above."""
    beta1, beta2 = betas
    if adam_w_mode:
        p.mul_(1 - lr * weight_decay)
    else:
        g = g + weight_decay * p
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    denominator = (v.sqrt() / math.sqrt(1 - beta2**step)).add_(eps)
    p.addcdiv_(m, denominator, value=-lr / (1 - beta1**step))
    shadow.lerp_(p, 1 - ema_decay)


# All tensors of a call may differ in length and dtypes; entries of an optional list may be None.
_ema_adam = register_op(
    "ema_adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)?[] shadows, Tensor(e!)?[] copies, Tensor(f!)?[] largest_ms, "
    "Tensor(g!)?[] largest_vs, Tensor(h!)[] steps, *, float lr, float beta1, float beta2, "
    "float eps, float weight_decay, bool bias_correction, bool adam_w_mode, float ema_decay, "
    "bool use_num_updates, float gradient_scale) -> ()",
    fake=lambda *arguments, **options: None,
)
_average = register_op(
    "average_(Tensor(a!) shadow, Tensor p, Tensor weight) -> ()", fake=lambda *arguments: None
)
_sum_of_squares = register_op(
    "sum_of_squares(Tensor[] tensors) -> Tensor",
    fake=lambda tensors: tensors[0].new_empty((), dtype=torch.float64),
)


_new_table = from_gpu("fused_ema_adam", "TensorTable")
_launch_ema_adam = from_gpu("fused_ema_adam", "launch_ema_adam")
_launch_average = on_device_of_tensors(from_gpu("fused_ema_adam", "launch_average"))


class AdamStreams(NamedTuple):
    """Tensors that the update of one parameter reads and writes: of one shape, as the ops take them."""

    p: Tensor  # float32, bfloat16 or float16, as g and copy
    g: Tensor
    m: Tensor  # float32, or uint8 codes
    v: Tensor
    shadow: Tensor | None  # float32
    copy: Tensor | None  # receives the new p
    # [numel / 256, rounded up] int16 beside codes
    largest_m: Tensor | None
    largest_v: Tensor | None
    step: Tensor  # [] float32

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype | None]:
        """Dtypes of p, g and copy, which all tensors of a launch share."""
        return self.p.dtype, self.g.dtype, None if self.copy is None else self.copy.dtype


def num_blocks(numel: int) -> int:
    return -(-numel // MOMENT_BLOCK)


def largest_key(key: str) -> str:
    """Return the name of the state that holds the largest codes of a moment."""
    return f"{key}_largest"


def coded_moment(state: Mapping[str, Tensor], key: str) -> Any:
    """Return a moment of 8-bit codes, which decodes and encodes its elements."""
    from cogfast.extensions.table import hook  # float32 moments need none

    return hook("coded_moment")(state, key)  # (state, key) -> CodedMoment


def read_moment(state: Mapping[str, Tensor], key: str, start: int, numel: int) -> Tensor:
    """Return elements [start, start + numel) of a flat state in float32, decoded if it has codes."""
    if largest_key(key) in state:
        return coded_moment(state, key).decode(start, numel)
    return state[key].detach().narrow(0, start, numel)


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of all elements, []: float64 on a CPU, else float32.

    tensors: on one device; without any the sum is a CPU tensor.

    A CPU reads every tensor once and adds in a fixed order, whatever the number of threads.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    if all(x.is_cpu and torch_library.has_kernel(x) for x in tensors):
        return _sum_of_squares(tensors)
    # A CPU sums element by element, which would lose digits in float32.
    dtype = torch.float64 if all(x.is_cpu for x in tensors) else torch.float32
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=dtype)).square().sum()


def average_(shadow: Tensor, p: Tensor, weight: Tensor, kernels: str = "triton") -> None:
    """Compute shadow += weight (p - shadow) with the bits of a step; float32 [n], weight: []."""
    if shadow.is_cuda and kernels == "triton":
        _launch_average(shadow, p, weight)
    elif shadow.is_cpu and torch_library.HAS_CPU_KERNELS:
        _average(shadow, p, weight)
    else:
        shadow.lerp_(p, weight)


class FusedEmaAdam(torch.optim.Optimizer):
    """Adam with an EMA of the weights in `state[p]["shadow"]`; SAT's arguments and defaults.

    SAT's `FusedEmaAdam` (sat/ops/fused_ema_adam.py) counts calls of step(), of which DeepSpeed
    makes one per parameter group. Here t counts each parameter's own updates, and so does the EMA's
    warm-up.

    State per parameter: exp_avg, exp_avg_sq, shadow (float32, the parameter's shape) and step
    (float32, [], on the parameter's device). Parameters and gradients may be float32, bfloat16 or
    float16; the arithmetic is float32. 8-bit moments are uint8 codes beside exp_avg_largest and
    exp_avg_sq_largest.

    Args:
        use_num_updates: warm up the EMA decay. SAT's spelling `use_num_upates` works as well.
        kernels: "triton" or "torch" implementation on a GPU.

    Optional attributes, to be assigned:
        low_precision_copies: {parameter: tensor of its shape}; they receive the new weights in the
            same pass, rounded to their dtype.
        gradient_scale: tensor [], factor for the gradients, such as a clip factor.
        found_inf: tensor [], not 0 if gradients overflowed: step() then changes nothing, counts and
            copies included.
        has_8bit_moments: keep the moments as 8-bit codes; assign before the first step.
        other_ema: a HostEma (extensions/memory/host_ema.py), which keeps the EMA of float32
            parameters; assign before the first step. None: it is beside the parameter.
    gradient_scale, found_inf and a group's lr may be tensors on the parameters' device; on a GPU
    only the kernel reads them.
    """

    def __init__(
        self,
        params: Iterable,
        # peak learning rate; args.lr if it is left out
        lr: float = 1e-3,
        # divide the moments by 1 - beta^t
        bias_correction: bool = True,
        # decay of the first and the second moment
        betas: tuple[float, float] = (0.9, 0.999),
        # added to the root of the second moment
        eps: float = 1e-8,
        # decoupled weight decay; false: added to the gradient
        adam_w_mode: bool = True,
        # weight decay; args.weight_decay if it is left out
        weight_decay: float = 0.0,
        # only false
        amsgrad: bool = False,
        # no effect: DeepSpeed clears the gradients
        set_grad_none: bool = True,
        # decay of the averaged (EMA) weights
        ema_decay: float = 0.9999,
        # warm up the EMA's decay: at most (1 + n) / (10 + n) after n updates
        use_num_updates: bool = True,
        # SAT's spelling of use_num_updates
        use_num_upates: bool | None = None,
        kernels: Literal["triton", "torch"] = "triton",
    ) -> None:
        if amsgrad:
            raise ValueError("FusedEmaAdam amsgrad=true is not supported; leave it out")
        if not 0 <= ema_decay <= 1:
            raise ValueError(f"FusedEmaAdam ema_decay={ema_decay} must be from 0 to 1; use 0.9999")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"FusedEmaAdam betas={list(betas)} must be in [0, 1); use [0.9, 0.95]")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode
        self.ema_decay = ema_decay
        self.use_num_updates = use_num_updates if use_num_upates is None else use_num_upates
        self.kernels: Literal["triton", "torch"] = kernels
        self.low_precision_copies: dict[Tensor, Tensor] = {}
        self.gradient_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        self.has_8bit_moments = False
        self.other_ema: Any = None
        self._is_lent = False  # within `averaged`
        self._tables: dict[tuple, Any] = defaultdict(_new_table)  # TensorTable of each launch

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what state_dict() returned, in its own dtypes."""
        super().load_state_dict(state_dict)
        # PyTorch has cast moments, codes and EMA to the dtypes of the parameters.
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, params, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    self.state[p][key] = value.to(p.device, copy=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient."""
        assert closure is None, "FusedEmaAdam takes no closure"
        if self._is_lent:
            text = "step() within averaged() would be lost: the parameters have the EMA's weights"
            raise RuntimeError(f"FusedEmaAdam: {text}; call it after the block")
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            if self.other_ema is not None:
                for p in params:
                    self.other_ema.before_update(self.state_of(p)["shadow"])
            self.update(params, group)
            # Lets autograd refuse a backward through the weights before the update.
            copies = self.low_precision_copies
            changed = [*params, *(copies[p] for p in params if p in copies)]
            torch.autograd.graph.increment_version(changed)
            if self.other_ema is not None:
                for p in params:
                    state = self.state_of(p)
                    weight = self.ema_weight(state["step"])
                    self.other_ema.start(p.detach(), state["shadow"], weight)

    def update(self, params: list[Tensor], group: dict) -> None:
        """Update parameters of a group, which all have a gradient, and their EMA."""
        device = params[0].device  # of all of them
        if device.type == "cpu":
            self._update_on_cpu(params, group)
        elif device.type == "cuda" and self.kernels == "triton":
            with torch.cuda.device(device):
                self._update_with_triton(params, group)
        else:
            self._update_with_torch(params, group)

    def state_of(self, p: Tensor) -> dict[str, Tensor]:
        """Return the state of `p`; create what is missing and keep what a resumed run filled in."""
        state = self.state[p]
        # All but codes is float32, whatever the parameter's dtype.
        if "step" not in state:
            state["step"] = torch.zeros((), device=p.device)
        dtype = torch.uint8 if self.has_8bit_moments else torch.float32
        for key in (key for key in self.moments_of(p) if key not in state):
            state[key] = torch.zeros(p.shape, dtype=dtype, device=p.device)
            if self.has_8bit_moments:
                largest = torch.zeros(num_blocks(p.numel()), dtype=torch.int16, device=p.device)
                state[largest_key(key)] = largest
        if "shadow" not in state:
            if self.other_ema is None:
                shadow = torch.empty(p.shape, device=p.device)
            elif p.dtype != torch.float32:
                rule = "it must be float32 for an EMA in host memory"
                refuse("FusedEmaAdam", "a parameter", p, rule)
            else:
                shadow = self.other_ema.empty(p)
            state["shadow"] = shadow.copy_(p.detach())
        step = state["step"]
        # A resumed run may have stored a plain number.
        if not isinstance(step, Tensor) or step.dtype != torch.float32 or step.device != p.device:
            state["step"] = torch.as_tensor(step, dtype=torch.float32, device=p.device)
        return state

    def moments_of(self, p: Tensor) -> Sequence[str]:
        """Return the names of the moments that `p` has."""
        return MOMENTS

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Lend the parameters, and low_precision_copies, the EMA's weights within the block.

        At its end, also after an error, all are as before. Takes their memory once more.
        """
        if self.other_ema is not None:
            self.other_ema.wait()
        # A parameter that has not been updated is its own EMA.
        averaged = [p for p, state in self.state.items() if "shadow" in state]
        pairs = [(x, p) for p in averaged for x in (p, self.low_precision_copies.get(p))]
        lent = [(x.detach(), self.state[p]["shadow"]) for x, p in pairs if x is not None]
        own, was_lent = [x.clone() for x, _ in lent], self._is_lent
        self._is_lent = True
        try:
            for x, shadow in lent:
                x.copy_(shadow)
            yield
        finally:
            self._is_lent = was_lent
            for (x, _), values in zip(lent, own, strict=True):
                x.copy_(values)

    def ema_weight(self, step: Tensor) -> Tensor:
        """Return 1 - d, [] float32 on the device of `step`; 0 in a step that is skipped."""
        weight = torch.full_like(step, 1 - self.ema_decay, dtype=torch.float64)
        if self.use_num_updates:
            weight = (9 / (10 + step.double())).clamp_(min=1 - self.ema_decay)
        if self.found_inf is not None:
            weight = weight * (self.found_inf.reshape(()) == 0)
        return weight.float()

    def _update_on_cpu(self, params: list[Tensor], group: dict) -> None:
        """Update with one call of the C++ kernel, and with PyTorch what the kernel does not take."""
        if self.found_inf is not None and bool(self.found_inf):
            return
        streams, others = [], []
        for p in params:
            t = self._streams(p)
            given = [x for x in (t.p, t.g, t.copy) if x is not None]
            takes = all(x.dtype in _KERNEL_DTYPES and x.is_contiguous() for x in given)
            if takes and torch_library.HAS_CPU_KERNELS:
                streams.append(t)
            else:
                others.append(p)
        if others:
            self._update_with_torch(others, group)
        if not streams:
            return
        beta1, beta2 = group["betas"]
        _ema_adam(
            *zip(*streams, strict=True),
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            **self._options(group),
            gradient_scale=1.0 if self.gradient_scale is None else float(self.gradient_scale),
        )

    def _streams(self, p: Tensor) -> AdamStreams:
        assert p.grad is not None, "step() passes parameters that have a gradient"
        state = self.state_of(p)
        m, v = (state[key] for key in MOMENTS)
        largest_m, largest_v = (state.get(largest_key(key)) for key in MOMENTS)
        shadow = state["shadow"] if self.other_ema is None else None
        copy = self.low_precision_copies.get(p)
        return AdamStreams(p, p.grad, m, v, shadow, copy, largest_m, largest_v, state["step"])

    def _options(self, group: dict) -> dict[str, Any]:
        """Return the options that the CPU's and the GPU's kernel take under the same names."""
        of_group = {key: group[key] for key in ("eps", "weight_decay", "bias_correction")}
        own = ("adam_w_mode", "ema_decay", "use_num_updates")
        return of_group | {key: vars(self)[key] for key in own}

    def _chunks(self, p: Tensor) -> Iterator[_Chunk]:
        """Yield p, g, m, v, shadow and copy of one piece of a parameter after another. 8-bit moments are
        decoded, and encoded again when the next piece is asked for."""
        _, grad, *moments, shadow, copy, largest_m, _, step = self._streams(p)
        coded = None
        if largest_m is not None:
            coded = [coded_moment(self.state[p], key) for key in MOMENTS]
        # A strided tensor has no flat view to cut, so it is one piece.
        is_flat, size = p.is_contiguous(), max(1, p.numel())
        if is_flat:
            size, grad = _CPU_CHUNK if p.is_cpu else _GPU_CHUNK, grad.contiguous()
        for start in range(0, p.numel(), size):
            cut = lambda x, start=start: x.view(-1)[start : start + size] if is_flat else x
            piece = cut(p)
            if coded is None:
                m, v = map(cut, moments)
            else:
                m, v = (each.decode(start, piece.numel()).view(piece.shape) for each in coded)
            cut_copy = None if copy is None else cut(copy)
            yield piece, cut(grad), m, v, None if shadow is None else cut(shadow), cut_copy
            if coded is not None:
                halves = coded[0].random_halves(step, start, piece.numel())
                for moment, values, r in zip(coded, (m, v), halves, strict=True):
                    moment.encode(values.view(-1), start, r)

    def _update_with_triton(self, params: list[Tensor], group: dict) -> None:
        """Update with one launch for all tensors of the same dtypes."""
        all_streams = [self._kernel_streams(p) for p in params]
        launches: dict[tuple, list[AdamStreams]] = defaultdict(list)
        for streams in all_streams:
            launches[streams.dtypes].append(streams)
        for dtypes, streams in launches.items():
            # DeepSpeed steps one group at a time: a group's first parameter identifies its table.
            table = self._tables[id(group["params"][0]), dtypes]
            table.hold(streams)
            _launch_ema_adam(
                table,
                lr=group["lr"],
                betas=group["betas"],
                **self._options(group),
                gradient_scale=self.gradient_scale,
                found_inf=self.found_inf,
            )
        for p, streams in zip(params, all_streams, strict=True):
            if not p.is_contiguous():
                p.copy_(streams.p)

    def _kernel_streams(self, p: Tensor) -> AdamStreams:
        """Return the same for the Triton kernel, which takes contiguous tensors."""
        streams = self._streams(p)
        _, grad, m, v, shadow, copy, *_ = streams
        dtype = torch.uint8 if self.has_8bit_moments else torch.float32
        for x, wanted in ((m, dtype), (v, dtype), (shadow, torch.float32)):
            # The kernel relies on this.
            assert x is None or x.is_contiguous() and (x.shape, x.dtype) == (p.shape, wanted)
        for name, x in (("a parameter", p), ("a gradient", grad), ("a low precision copy", copy)):
            if x is not None and x.dtype not in GPU_DTYPES:
                refuse("FusedEmaAdam", name, x, "its dtype must be bfloat16, float16 or float32")
        if copy is not None and (copy.shape != p.shape or not copy.is_contiguous()):
            rule = f"its shape must be {list(p.shape)}, and it must be contiguous"
            refuse("FusedEmaAdam", "a low precision copy", copy, rule)
        return streams._replace(p=p.detach().contiguous(), g=grad.contiguous())

    def _update_with_torch(self, params: list[Tensor], group: dict) -> None:
        """Update with PyTorch alone: nothing leaves the device, at the cost of more passes."""
        found_inf = None
        if self.found_inf is not None:
            # torch's kernel wants 0 or 1.
            found_inf = (self.found_inf.reshape(()) != 0).to(params[0].device, torch.float32)
        adam = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        for p in params:
            step = self.state_of(p)["step"]
            step += 1.0 if found_inf is None else 1 - found_inf
            ema_weight = self.ema_weight(step)
            for q, g, m, v, shadow, copy in self._chunks(p):
                new, g = q.float().contiguous(), g.float().contiguous()
                adam(
                    [new],
                    [g if self.gradient_scale is None else g * self.gradient_scale],
                    [m],
                    [v],
                    [],  # AMSGrad's maxima
                    [step if group["bias_correction"] else torch.full_like(step, _UNBIASED)],
                    lr=group["lr"],
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    amsgrad=False,
                    maximize=False,
                    grad_scale=None,
                    found_inf=found_inf,
                )
                if new is not q:
                    q.copy_(new)
                if copy is not None:
                    copy.copy_(new if found_inf is None else torch.where(found_inf == 0, new, copy))
                if shadow is not None:
                    shadow.lerp_(new, ema_weight)
