"""The attention kernels that flash_attention can call, by name, and why one cannot run somewhere.

All share one form: q, k, v [B, S, H, D] with a dense last dim go in as they are, strided or not;
out [B, S, H, D] and lse [B, H, S] = log sum_j exp(q_i k_j / sqrt(D)) in float32 (float64 for
float64) come out; dq, dk, dv [B, S, H, D] follow from dout and those five. Packages are imported
when a backend is first asked for; `flash_attn` alone says nothing, version 4 makes it a namespace.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from cogfast.kernels.plain_attention import plain_backward, plain_forward

aten = torch.ops.aten
Gradients = tuple[Tensor, Tensor, Tensor]  # dq, dk, dv

_HALF = (torch.bfloat16, torch.float16)
_LSE_ALIGNMENT = 32  # rows that the efficient backward reads at a time
_RIGHT_CUDNN = 91501  # before 9.15.1: wrong where S is no multiple of 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """A pair of kernels and what they take; CPU tensors are taken where is_for_cpu."""

    forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Gradients]
    module: str | None = None  # imported on first use
    dtypes: Sequence[torch.dtype] | None = _HALF  # on a GPU; None: all
    max_width: int | None = 256  # and multiples of 8; None: every width
    capability: tuple[int, int] = (8, 0)  # the least compute capability
    is_for_cpu: bool = False
    is_deterministic: bool = True  # its backward can repeat bit for bit


def is_deterministic() -> bool:
    """Whether torch was asked to refuse what does not repeat bit for bit."""
    is_asked = torch.are_deterministic_algorithms_enabled()
    return is_asked and not torch.is_deterministic_algorithms_warn_only_enabled()


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]  # [B, S, H, D] -> [B, H, S, D], a view


# --- PyTorch's own. Without dropout the seeds are not read; cum_seq and bias must be undefined.


def _flash_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    inputs = _heads_first(q, k, v)
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*inputs)
    else:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(*inputs)
    return out.transpose(1, 2), lse


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Gradients:
    dout, q, k, v, out = _heads_first(dout, q, k, v, out)
    if q.device.type == "cpu":
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, False
        )
    else:
        rows = q.shape[2]
        seed, unused = (q.new_empty(shape, dtype=torch.uint64) for shape in ((2,), ()))
        gradients = aten._scaled_dot_product_flash_attention_backward(
            *(dout, q, k, v, out, lse),
            *(None, None, rows, rows, 0.0, False, seed, unused),
        )
    dq, dk, dv = _heads_first(*gradients)
    return dq, dk, dv


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(*_heads_first(q, k, v), None, True)
    return out.transpose(1, 2), lse.flatten(2)


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Gradients:
    dout, q, k, v, out = _heads_first(dout, q, k, v, out)
    rows = q.shape[2]
    seed, offset = (q.new_empty((), dtype=torch.int64) for _ in range(2))
    gradients = aten._scaled_dot_product_cudnn_attention_backward(
        *(dout, q, k, v, out, lse.unsqueeze(-1) if _is_cudnn_lse_4d() else lse, seed, offset),
        *(None, None, None, rows, rows, 0.0, False),
    )
    dq, dk, dv = _heads_first(*gradients)
    return dq, dk, dv


@cache
def _is_cudnn_lse_4d() -> bool:
    """PyTorch's releases differ: [B, H, S, 1] or [B, H, S]; its backward wants what forward gave."""
    x = torch.empty(1, 1, 8, 8, dtype=torch.bfloat16, device="meta")
    return aten._scaled_dot_product_cudnn_attention(x, x, x, None, True)[1].ndim == 4


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    inputs = _heads_first(q, k, v)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(*inputs, None, True)
    return out.transpose(1, 2), lse[..., : q.shape[1]]


def _efficient_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Gradients:
    # forward pads lse with infinity, the weight of a row that is not there being exp(s - lse) = 0
    lse = F.pad(lse, (0, -lse.shape[-1] % _LSE_ALIGNMENT), value=torch.inf)
    seed, offset = (q.new_empty((), dtype=torch.int64, device="cpu") for _ in range(2))
    dout, q, k, v, out = _heads_first(dout, q, k, v, out)
    gradients = aten._scaled_dot_product_efficient_attention_backward(
        dout, q, k, v, None, out, lse, seed, offset, 0.0, [True, True, True, False]
    )
    dq, dk, dv = _heads_first(*gradients[:3])
    return dq, dk, dv


# --- flash-attn 2, 3 and 4


def _fa2_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _module("flash_attn.flash_attn_interface")._flash_attn_forward(
        q,
        k,
        v,
        dropout_p=0.0,
        softmax_scale=q.shape[-1] ** -0.5,
        causal=False,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        return_softmax=False,
    )
    return out, lse


def _fa2_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Gradients:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    _module("flash_attn.flash_attn_interface")._flash_attn_backward(
        *(dout, q, k, v, out, lse, dq, dk, dv),
        dropout_p=0.0,
        softmax_scale=q.shape[-1] ** -0.5,
        causal=False,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=is_deterministic(),
    )
    return dq, dk, dv


# Version 3's Python functions changed from commit to commit; the operators below them did not.
def _fa3_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    _module("flash_attn_interface")
    out, lse, *_ = torch.ops.flash_attn_3.fwd(
        q, k, v, softmax_scale=q.shape[-1] ** -0.5, is_causal=False, num_splits=1
    )
    return out, lse


def _fa3_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Gradients:
    _module("flash_attn_interface")
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    torch.ops.flash_attn_3.bwd(
        *(dout, q, k, v, out, lse, dq, dk, dv),
        softmax_scale=q.shape[-1] ** -0.5,
        is_causal=False,
        deterministic=is_deterministic(),
    )
    return dq, dk, dv


def _fa4_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    # what follows out and lse differs from release to release
    out, lse, *_ = _module("flash_attn.cute.interface")._flash_attn_fwd(
        q, k, v, softmax_scale=q.shape[-1] ** -0.5, causal=False, return_lse=True
    )
    return out, lse


def _fa4_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Gradients:
    dq, dk, dv, *_ = _module("flash_attn.cute.interface")._flash_attn_bwd(
        *(q, k, v, out, dout, lse),
        softmax_scale=q.shape[-1] ** -0.5,
        causal=False,
        deterministic=is_deterministic(),
    )
    return dq, dk, dv


BACKENDS = {
    "cudnn": Backend(
        forward=_cudnn_forward, backward=_cudnn_backward, max_width=128, is_deterministic=False
    ),
    "flash": Backend(forward=_flash_forward, backward=_flash_backward, is_for_cpu=True),
    "efficient": Backend(
        forward=_efficient_forward,
        backward=_efficient_backward,
        dtypes=(*_HALF, torch.float32),
        max_width=None,
        capability=(5, 0),
    ),
    "fa2": Backend(
        forward=_fa2_forward, backward=_fa2_backward, module="flash_attn.flash_attn_interface"
    ),
    "fa3": Backend(
        forward=_fa3_forward,
        backward=_fa3_backward,
        module="flash_attn_interface",
        capability=(9, 0),
    ),
    "fa4": Backend(
        forward=_fa4_forward,
        backward=_fa4_backward,
        module="flash_attn.cute.interface",
        max_width=128,
        capability=(9, 0),
    ),
    "math": Backend(
        forward=plain_forward,
        backward=plain_backward,
        dtypes=None,
        max_width=None,
        capability=(0, 0),
        is_for_cpu=True,
    ),
}
_DEFAULT_ORDER = ("cudnn", "flash", "efficient", "math")  # PyTorch's own on a recent GPU


@cache
def _import(module: str) -> ModuleType | str:  # or why there is none
    try:
        return importlib.import_module(module)
    except Exception as error:  # a package that is there and broken raises all kinds
        return f"{module} does not import: {type(error).__name__}: {error}".splitlines()[0]


def _module(name: str) -> ModuleType:
    module = _import(name)
    assert isinstance(module, ModuleType), module
    return module


def why_not(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    must_repeat: bool | None = None,
) -> str | None:
    """Why a backend cannot run with these on this machine, for a head width; None: it can.
    must_repeat: its gradients, bit for bit; None: as torch was asked, see is_deterministic."""
    backend = BACKENDS[name]
    must_repeat = is_deterministic() if must_repeat is None else must_repeat
    if device.type == "cpu":
        return None if backend.is_for_cpu else "it needs a CUDA GPU"
    short = str(dtype).removeprefix("torch.")
    if backend.dtypes is not None and dtype not in backend.dtypes:
        takes = ", ".join(str(x).removeprefix("torch.") for x in backend.dtypes)
        return f"it takes {takes}, not {short}"
    if (width % 8 and name != "math") or width > (backend.max_width or width):
        most = "" if backend.max_width is None else f" up to {backend.max_width}"
        return f"it takes head widths that are multiples of 8{most}, not {width}"
    capability = torch.cuda.get_device_capability(device)
    if capability < backend.capability:
        needed, here = (".".join(map(str, x)) for x in (backend.capability, capability))
        return f"it needs a GPU of compute capability {needed}, this is {here}"
    can_repeat = backend.is_deterministic and (name, capability[0]) != ("fa4", 12)
    if must_repeat and not can_repeat:
        return "its gradients do not repeat bit for bit, as deterministic runs must"
    if name == "cudnn" and (torch.backends.cudnn.version() or 0) < _RIGHT_CUDNN:
        return f"cuDNN {torch.backends.cudnn.version()} is older than 9.15.1 ({_RIGHT_CUDNN})"
    if backend.module is not None and isinstance(_import(backend.module), str):
        return _import(backend.module)
    return None


def backends_that_run(
    device: torch.device, dtype: torch.dtype, width: int, must_repeat: bool | None = None
) -> list[str]:
    return [n for n in BACKENDS if why_not(n, device, dtype, width, must_repeat) is None]


def default_backend(device: torch.device, dtype: torch.dtype, width: int) -> str:
    return next(n for n in _DEFAULT_ORDER if why_not(n, device, dtype, width) is None)
