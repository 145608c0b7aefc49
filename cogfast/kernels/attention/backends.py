"""Attention kernels that flash_attention can call, by name, and the reason if one cannot run.

All have the same signatures. Forward takes q, k, v [B, S, H, D] with any strides but a dense last
dim and returns out [B, S, H, D] and lse [B, H, S] = log sum_j exp(q_i k_j / sqrt(D)) in float32
(float64 for float64). Backward takes dout and those five and returns dq, dk, dv [B, S, H, D].
Packages are imported on first use.
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

aten = torch.ops.aten
Gradients = tuple[Tensor, Tensor, Tensor]  # dq, dk, dv

_HALF = (torch.bfloat16, torch.float16)
_LSE_ALIGNMENT = 32  # rows that the efficient backward reads at a time
_LEAST_CUDNN = 91501  # before 9.15.1, results are wrong if S is not a multiple of 128
_MAX_SCORES = 2**28  # entries of the score matrices in memory at a time, 1 GiB in float32


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """A pair of kernels and the inputs they support."""

    forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Gradients]
    module: str | None = None  # imported on first use
    dtypes: Sequence[torch.dtype] | None = _HALF  # on a GPU; None: all
    max_width: int | None = 256  # head width, a multiple of 8; None: any width
    capability: tuple[int, int] = (8, 0)  # least compute capability
    is_for_cpu: bool = False  # takes CPU tensors
    is_deterministic: bool = True  # its gradients repeat bit for bit


def is_deterministic() -> bool:
    """Whether torch is set to raise an error for nondeterministic operations."""
    is_asked = torch.are_deterministic_algorithms_enabled()
    return is_asked and not torch.is_deterministic_algorithms_warn_only_enabled()


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]  # [B, S, H, D] -> [B, H, S, D], a view


# --- Plain PyTorch, a few heads at a time. The formulas are at the top of flash_attention.py.


def lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def plain_scores(q: Tensor, k: Tensor) -> Tensor:
    """Return q k^T / sqrt(D), [N, S, S], of q, k [N, S, D]."""
    zero = q.new_zeros(())  # added with factor 0: baddbmm scales the product by alpha in one pass
    return torch.baddbmm(zero, q, k.transpose(1, 2), beta=0, alpha=q.shape[-1] ** -0.5)


def _few_heads(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Split tensors [B, S, H, D] into groups of n heads, [n, S, D], within _MAX_SCORES."""
    b, s, h, d = tensors[0].shape
    # At least one head, whatever its score matrix takes.
    at_a_time = max(1, _MAX_SCORES // s**2)
    flat = (x.transpose(1, 2).reshape(b * h, s, d).split(at_a_time) for x in tensors)
    return list(zip(*flat, strict=True))


def _heads_last(pieces: Sequence[Tensor], like: Tensor) -> Tensor:
    """Join [n, S, D] each into [B, S, H, D]."""
    b, s, h, d = like.shape
    return torch.cat(list(pieces)).view(b, h, s, d).transpose(1, 2).contiguous()


def plain_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute out and lse; the score matrices of a few heads are in memory at once."""
    b, s, h, _ = q.shape
    out, lse = [], []
    for few_q, few_k, few_v in _few_heads(q, k, v):
        scores = plain_scores(few_q, few_k)
        lse.append(scores.to(lse_dtype(q)).logsumexp(-1))
        out.append(torch.bmm(scores.softmax(-1), few_v))
    return _heads_last(out, q), torch.cat(lse).view(b, h, s)


def plain_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Gradients:
    """Compute dq, dk, dv; the score matrices are computed again."""
    pieces, zero, scale = [], q.new_zeros(()), q.shape[-1] ** -0.5
    for few_dout, few_q, few_k, few_v in _few_heads(dout, q, k, v):
        # softmax again and not exp(scores - lse): the same rounding as in forward.
        weights = plain_scores(few_q, few_k).softmax(-1)
        dweights = torch.bmm(few_dout, few_v.transpose(1, 2))
        dscores = aten._softmax_backward_data(dweights, weights, -1, q.dtype)
        dq = torch.baddbmm(zero, dscores, few_k, beta=0, alpha=scale)
        dk = torch.baddbmm(zero, dscores.transpose(1, 2), few_q, beta=0, alpha=scale)
        pieces.append((dq, dk, torch.bmm(weights.transpose(1, 2), few_dout)))
    dq, dk, dv = (_heads_last(x, q) for x in zip(*pieces, strict=True))
    return dq, dk, dv


# --- PyTorch's kernels. Without dropout they do not read the seeds.


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
        saved = (dout, q, k, v, out, lse)
        cum_seq_q = cum_seq_k = None  # all sequences have the same length
        gradients = aten._scaled_dot_product_flash_attention_backward(
            *saved, cum_seq_q, cum_seq_k, rows, rows, 0.0, False, seed, unused
        )
    dq, dk, dv = _heads_first(*gradients)
    return dq, dk, dv


# The True asks for lse, None is the bias.
def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(*_heads_first(q, k, v), None, True)
    return out.transpose(1, 2), lse.flatten(2)


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Gradients:
    dout, q, k, v, out = _heads_first(dout, q, k, v, out)
    rows = q.shape[2]
    seed, offset = (q.new_empty((), dtype=torch.int64) for _ in range(2))
    lse = lse.unsqueeze(-1) if _is_cudnn_lse_4d() else lse
    saved = (dout, q, k, v, out, lse, seed, offset)
    bias = cum_seq_q = cum_seq_k = None
    gradients = aten._scaled_dot_product_cudnn_attention_backward(
        *saved, bias, cum_seq_q, cum_seq_k, rows, rows, 0.0, False
    )
    dq, dk, dv = _heads_first(*gradients)
    return dq, dk, dv


@cache
def _is_cudnn_lse_4d() -> bool:
    """Whether this PyTorch's lse is [B, H, S, 1] or [B, H, S]; backward takes the same shape."""
    x = torch.empty(1, 1, 8, 8, dtype=torch.bfloat16, device="meta")
    return aten._scaled_dot_product_cudnn_attention(x, x, x, None, True)[1].ndim == 4


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    # The kernel pads lse to a multiple of 32 rows.
    inputs = _heads_first(q, k, v)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(*inputs, None, True)
    return out.transpose(1, 2), lse[..., : q.shape[1]]


def _efficient_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Gradients:
    # The kernel reads lse in blocks of 32 rows. Infinity gives a padded row the weight 0.
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
    tensors = (dout, q, k, v, out, lse, dq, dk, dv)
    _module("flash_attn.flash_attn_interface")._flash_attn_backward(
        *tensors,
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


# The Python functions of version 3 change between commits; the operators below them do not.
def _fa3_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    # The import registers the operators.
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
    tensors = (dout, q, k, v, out, lse, dq, dk, dv)
    torch.ops.flash_attn_3.bwd(
        *tensors,
        softmax_scale=q.shape[-1] ** -0.5,
        is_causal=False,
        deterministic=is_deterministic(),
    )
    return dq, dk, dv


def _fa4_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    # Releases differ in the outputs after out and lse.
    out, lse, *_ = _module("flash_attn.cute.interface")._flash_attn_fwd(
        q, k, v, softmax_scale=q.shape[-1] ** -0.5, causal=False, return_lse=True
    )
    return out, lse


def _fa4_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Gradients:
    tensors = (q, k, v, out, dout, lse)
    dq, dk, dv, *_ = _module("flash_attn.cute.interface")._flash_attn_bwd(
        *tensors,
        softmax_scale=q.shape[-1] ** -0.5,
        causal=False,
        deterministic=is_deterministic(),
    )
    return dq, dk, dv


# Limits of dtype, head width and compute capability are those of each library's kernels.
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
_DEFAULT_ORDER = (
    "cudnn",
    "flash",
    "efficient",
    "math",
)  # all in PyTorch; the fastest usually first


@cache
def _import(module: str) -> ModuleType | str:
    """Import a module, or return the reason why it does not import."""
    # `import flash_attn` alone proves nothing: version 4 makes it a namespace package.
    try:
        return importlib.import_module(module)
    except Exception as error:  # a broken package may raise anything
        return f"{module} does not import: {type(error).__name__}: {error}".splitlines()[0]


def _module(name: str) -> ModuleType:
    module = _import(name)
    assert isinstance(module, ModuleType), module
    return module


def reason_unavailable(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    must_repeat: bool | None = None,
) -> str | None:
    """Return why a backend cannot run here at a head width, or None if it can.

    must_repeat: gradients must repeat bit for bit; None: torch's setting, see is_deterministic.
    """
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
    # flash-attn 4 has no deterministic backward for compute capability 12.
    can_repeat = backend.is_deterministic and (name, capability[0]) != ("fa4", 12)
    if must_repeat and not can_repeat:
        return "its gradients do not repeat bit for bit, as deterministic runs must"
    if name == "cudnn" and (torch.backends.cudnn.version() or 0) < _LEAST_CUDNN:
        return f"cuDNN {torch.backends.cudnn.version()} is older than 9.15.1 ({_LEAST_CUDNN})"
    if backend.module is not None:
        module = _import(backend.module)
        return module if isinstance(module, str) else None
    return None


def backends_that_run(
    device: torch.device, dtype: torch.dtype, width: int, must_repeat: bool | None = None
) -> list[str]:
    """Return the names of all backends that can run here at a head width."""
    return [n for n in BACKENDS if reason_unavailable(n, device, dtype, width, must_repeat) is None]


def default_backend(device: torch.device, dtype: torch.dtype, width: int) -> str:
    """Return the first of cudnn, flash, efficient and math that can run; math always can."""
    return next(n for n in _DEFAULT_ORDER if reason_unavailable(n, device, dtype, width) is None)
