"""Attention without mask, one function over many libraries.

    s_ij = q_i k_j / sqrt(D)      p_ij = exp(s_ij) / sum_j exp(s_ij)      out_i = sum_j p_ij v_j

PyTorch's kernels, of which "flash" is flash-attn 2, are called by scaled_dot_product_attention, those of
flash-attn 3 by its own function. Their forward passes are ops that return out and lse_i = log sum_j
exp(s_ij), so that activation checkpointing can keep both and need not run them again (`keeps_output`).
flash-attn 4 has no such ops, and gets them here. docs/kernels.md says why there is no Triton kernel.

"cogfast" is a C++ kernel for CPUs (cpu/vector/attention.cpp), with all arithmetic in float32, but for products of
bfloat16 where the processor has them. Backward has
p_ij = exp(s_ij - lse_i), delta_i = dout_i out_i, and ds_ij = p_ij (dout_i v_j - delta_i) / sqrt(D):

    dv_j = sum_i p_ij dout_i      dk_j = sum_i ds_ij q_i      dq_i = sum_j ds_ij k_j
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cogfast.kernels import torch_library
from cogfast.kernels.argument_checks import check_qkv
from cogfast.kernels.gpu import flash_attn
from cogfast.kernels.gpu.flash_attn import is_deterministic
from cogfast.kernels.torch_library import CPU_DTYPES, register_gradient, register_op

_OP = "flash_attention"
_HALF = (torch.bfloat16, torch.float16)
_LEAST_CUDNN = 91501  # before 9.15.1, results are wrong if S is not a multiple of 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """A library that computes attention, and the inputs that it supports on a GPU."""

    kernel: SDPBackend | None = None  # of PyTorch
    module: str | None = None  # of flash-attn; imported on first use
    dtypes: Sequence[torch.dtype] | None = _HALF  # None: all
    max_width: int | None = 256  # head width, a multiple of 8; None: any width
    capability: tuple[int, ...] = (8, 0)  # least compute capability; (): not for a GPU
    is_for_cpu: bool = False  # takes CPU tensors
    is_deterministic: bool = True  # its gradients repeat bit for bit


# Limits of dtype, head width and compute capability are those of each library's kernels.
BACKENDS = {
    "cudnn": Backend(kernel=SDPBackend.CUDNN_ATTENTION, max_width=128, is_deterministic=False),
    "flash": Backend(kernel=SDPBackend.FLASH_ATTENTION, is_for_cpu=True),
    "efficient": Backend(
        kernel=SDPBackend.EFFICIENT_ATTENTION,
        dtypes=(*_HALF, torch.float32),
        max_width=None,
        capability=(5, 0),
    ),
    "fa3": Backend(module=flash_attn.MODULES["fa3"], capability=(9, 0)),
    "fa4": Backend(module=flash_attn.MODULES["fa4"], max_width=128, capability=(9, 0)),
    "cogfast": Backend(dtypes=CPU_DTYPES, max_width=None, capability=(), is_for_cpu=True),
    "math": Backend(dtypes=None, max_width=None, capability=(0, 0), is_for_cpu=True),
}


def flash_attention_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of q, k, v [B, S, H, D] with the whole score matrix [B, H, S, S] in memory, in float32 for
    inputs of 16 bits, as in PyTorch's fused kernels."""
    b, s, h, d = q.shape
    q, k, v = (x.transpose(1, 2).reshape(b * h, s, d) for x in (q, k, v))
    if q.dtype in _HALF:
        q, k = q.float(), k.float()
    zero = q.new_zeros(())  # added with factor 0: baddbmm scales the product by alpha in one pass
    scores = torch.baddbmm(zero, q, k.transpose(1, 2), beta=0, alpha=d**-0.5)
    return torch.bmm(scores.softmax(-1).to(v.dtype), v).view(b, h, s, d).transpose(1, 2)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, backend: str | None = None) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v, [B, S, H, D].

    q, k, v: [B, S, H, D] with a dense last dim, otherwise with any strides.
    backend: a name of BACKENDS that can run here (`reason_unavailable`), after `flash_attn.load`. None: on
        a GPU PyTorch's own choice, on a CPU `fastest_on_cpu`.
    """
    check_qkv(_OP, q, k, v)
    device = q.device.type
    if backend not in (None, *BACKENDS):
        raise ValueError(f"{_OP}: backend={backend!r} must be None or one of {', '.join(BACKENDS)}")
    if device == "cpu" and backend is None:
        backend = fastest_on_cpu(q.dtype) or fastest_of_pytorch(q)
    if backend == "math":
        return flash_attention_reference(q, k, v)
    if backend in flash_attn.LOADED:
        return (_attention_by_fa4 if backend == "fa4" else flash_attn.attention_3)(q, k, v)
    if backend == "cogfast" and device == "cpu":
        return _attention_on_cpu(q, k, v)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, S, D]
    if device == "meta":
        # scaled_dot_product_attention would choose the score matrix there.
        out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0]
    elif backend is None:
        out = F.scaled_dot_product_attention(q, k, v)
    else:
        kernel = BACKENDS[backend].kernel
        if kernel is None:
            text = f"{_OP}: backend={backend!r} is not loaded; call flash_attn.load on a GPU"
            raise ValueError(f"{text} with it, or leave backend out")
        with sdpa_kernel(kernel):
            out = F.scaled_dot_product_attention(q, k, v)
    return out.transpose(1, 2)


def fastest_on_cpu(dtype: torch.dtype) -> str | None:
    """Return the backend for all shapes on this CPU; None: the shape decides.

    Every process of a machine has the same answer. docs/kernels.md says what was measured, and where.
    """
    return "cogfast" if torch_library.HAS_CPU_KERNELS and dtype in CPU_DTYPES else None


def fastest_of_pytorch(q: Tensor) -> str | None:
    """Return the faster of plain PyTorch and PyTorch's fused kernel on a CPU; None on a GPU: PyTorch chooses."""
    if q.device.type != "cpu":
        return None
    # With AVX512_BF16, plain and fused, in ms: [16, 80, 4, 64] 5.5 and 20.5, [1, 400, 12, 64] 15.7 and 16.2,
    # [1, 1000, 4, 64] 33.8 and 26.2. One sample decides, so that a split batch has the same numbers.
    is_small = q.shape[2] * q.shape[1] ** 2 <= 1 << 20  # scores, 4 MiB in float32: caches hold them
    return "math" if q.requires_grad and q.dtype in _HALF and is_small else "flash"


def _register(
    name: str, gpu: Callable | None = None, gpu_backward: Callable | None = None
) -> tuple[Any, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Define an op of q, k, v that returns out and lse, and that of its gradients; return the op, and out alone."""
    forward = register_op(
        f"{name}(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)",
        gpu=gpu,
        fake=lambda q, k, v: (
            q.new_empty(q.shape),
            q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32),
        ),
    )
    gradients = register_op(
        f"{name}_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse)"
        " -> (Tensor, Tensor, Tensor)",
        gpu=gpu_backward,
        fake=lambda dout, q, k, v, out, lse: tuple(x.new_empty(x.shape) for x in (q, k, v)),
    )

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, lse = run(q, k, v)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, *output_gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return gradients(output_gradients[0], *ctx.saved_tensors)

    run = register_gradient(forward, _save_of_op, Attention.backward)
    return forward, Attention.apply


def _save_of_op(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])  # lse


_fa4, _attention_by_fa4 = _register(
    "flash_attention_4", flash_attn.forward_4, flash_attn.backward_4
)
_cpu, _attention_on_cpu = _register("cpu_attention")
_FORWARD_OPS = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    _fa4,
    _cpu,
}
# Block-sparse attention: the op of a CPU, FlexAttention in a compiled block, and the compiled
# region that it is otherwise.
_SPARSE_NAMES = {"cogfast::sparse_attention", "flex_attention", "inductor_compiled_code"}


def keeps_output(op: Any) -> bool:
    """Return whether an op of a forward pass is attention, whose results checkpointing can keep."""
    return op in _FORWARD_OPS or op.namespace == "flash_attn_3" or op.name() in _SPARSE_NAMES


def reason_unavailable(
    name: str, device: torch.device, dtype: torch.dtype, width: int, must_repeat: bool | None = None
) -> str | None:
    """Return why a backend cannot run here at a head width, or None if it can.

    must_repeat: gradients must repeat bit for bit; None: torch's setting, see is_deterministic.
    """
    backend = BACKENDS[name]
    must_repeat = is_deterministic() if must_repeat is None else must_repeat
    is_cpu = device.type == "cpu"
    if not (backend.is_for_cpu if is_cpu else backend.capability):
        return f"it needs a {'CUDA GPU' if is_cpu else 'CPU'}"
    if name == "cogfast" and not torch_library.HAS_CPU_KERNELS:
        return "the C++ kernels are not compiled; cogfast doctor says why"
    if is_cpu and name != "cogfast":
        return None
    if backend.dtypes is not None and dtype not in backend.dtypes:
        *takes, given = (str(x).removeprefix("torch.") for x in (*backend.dtypes, dtype))
        return f"it takes {', '.join(takes)}, not {given}"
    if (width % 8 and name not in ("cogfast", "math")) or width > (backend.max_width or width):
        most = "" if backend.max_width is None else f" up to {backend.max_width}"
        return f"it takes head widths that are multiples of 8{most}, not {width}"
    if is_cpu:
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability < backend.capability:
        needed, here = (".".join(map(str, x)) for x in (backend.capability, capability))
        return f"it needs a GPU of compute capability {needed}, this is {here}"
    # flash-attn 4 has no deterministic backward for compute capability 12.
    if must_repeat and not (backend.is_deterministic and (name, capability[0]) != ("fa4", 12)):
        return "its gradients do not repeat bit for bit, as deterministic runs must"
    if name == "cudnn" and (torch.backends.cudnn.version() or 0) < _LEAST_CUDNN:
        return f"cuDNN {torch.backends.cudnn.version()} is older than 9.15.1 ({_LEAST_CUDNN})"
    module = None if backend.module is None else flash_attn.load(name)
    return module if isinstance(module, str) else None


def backends_that_run(
    device: torch.device, dtype: torch.dtype, width: int, must_repeat: bool | None = None
) -> list[str]:
    """Return the names of all backends that can run here at a head width."""
    return [n for n in BACKENDS if reason_unavailable(n, device, dtype, width, must_repeat) is None]
