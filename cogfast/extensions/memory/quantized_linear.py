"""A linear with a frozen weight of 8 bits: q [N, K] in int8 or fp8 (e4m3), and a float32 scale for each row.

    W = scale q,    y = x W^T + b,    dx = dy W,    db = sum of dy over all rows

int8: the largest magnitude of a row of q is 127, and the error of an entry is at most half a scale. W is
computed in the dtype of x right before a product and freed right after it, forward and backward, so that
autograd keeps q alone. In bf16 this moves 3 bytes per entry beside the 2 R FLOPs of a product of R rows.

fp8: the largest magnitude of a row of q is 448, and the error of an entry is at most 1/16 of itself. The
products run on the fp8 tensor cores of a GPU, at twice bf16's rate, so x and dy are rounded as well,
with a scale for each row. The row's scale of W is on the summed dimension of dx: dy takes it up before
it is rounded. This is torchao.float8's recipe `rowwise` for a weight that does not change. A CPU computes
the same roundings with products in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from cogfast.kernels.argument_checks import check_tensor, refuse
from cogfast.kernels.torch_library import from_gpu, register_gradient, register_op

Quantization = Literal["int8", "fp8"]
FP8 = torch.float8_e4m3fn
DTYPES: dict[Quantization, torch.dtype] = {"int8": torch.int8, "fp8": FP8}
LARGEST = {torch.int8: 127.0, FP8: 448.0}  # magnitude in q; -128 is not used: q is symmetric
# A row of smaller numbers than this is scaled to fp8 as if this were its largest: 448 / it stays finite.
LEAST_FP8 = 1e-35
_MULTIPLE = 16  # of rows and columns of a matrix, for the fp8 tensor cores

Product = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]  # x, q, scale, bias -> y
Gradient = Callable[[Tensor, Tensor, Tensor], Tensor]  # dy, q, scale -> dx


def row_maxima(weight: Tensor) -> Tensor:
    """Return the largest magnitude of each row, [N] float32; infinite if the row is not finite."""
    return weight.float().abs().amax(dim=1).nan_to_num_(nan=math.inf, posinf=math.inf)


def quantize_rows(
    weight: Tensor, dtype: torch.dtype, maxima: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return q [N, K] of a dtype of DTYPES and the scales [N] float32 of a weight [N, K].

    maxima: [N] of `row_maxima`; None: of this weight. The scale of a non-finite row is not finite.
    """
    values = weight.float()
    maxima = row_maxima(values) if maxima is None else maxima
    if dtype == FP8:
        maxima = maxima.clamp_min(LEAST_FP8)
        return (values * (LARGEST[FP8] / maxima)[:, None]).to(FP8), maxima / LARGEST[FP8]
    most = LARGEST[torch.int8]
    scale = maxima / most
    # A row of zeros has scale 0.
    q = values / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    return q.nan_to_num_(0.0).round_().clamp_(-most, most).to(torch.int8), scale


def dequantize_rows(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [N, K] in `dtype`: products in float32, rounded once."""
    if q.dtype == FP8:
        return (q.float() * scale[:, None]).to(dtype)
    # In one pass, without a float32 copy of q.
    return torch.mul(q, scale[:, None], out=torch.empty_like(q, dtype=dtype))


def _int8_product(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    weight = dequantize_rows(q, scale, x.dtype).t()
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


def _int8_gradient(dy: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    return dy @ dequantize_rows(q, scale, dy.dtype)


_launch_quantize = from_gpu("fp8_linear", "launch", "cogfast.extensions.memory")


def _fp8_product_on_gpu(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    rounded, scales = _launch_quantize(x, None)
    return torch._scaled_mm(
        rounded,
        q.t(),
        scale_a=scales[:, None],
        scale_b=scale[None],
        bias=bias,
        out_dtype=torch.bfloat16,
        # An H100's products keep fewer bits of partial sums, as in torchao.
        use_fast_accum=True,
    )


def _fp8_gradient_on_gpu(dy: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    rounded, scales = _launch_quantize(dy, scale)
    # The second operand's columns must be contiguous. Not every copy kernel knows float8.
    return torch._scaled_mm(
        rounded,
        q.view(torch.uint8).t().contiguous().view(FP8).t(),
        scale_a=scales[:, None],
        scale_b=torch.ones(1, q.shape[1], device=q.device),
        out_dtype=torch.bfloat16,
    )


def _fp8_product_on_cpu(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    rounded, scales = quantize_rows(x, FP8)
    out = (rounded.float() @ q.float().t()) * scales[:, None] * scale
    return (out if bias is None else out + bias).to(x.dtype)


def _fp8_gradient_on_cpu(dy: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    rounded, scales = quantize_rows(dy.float() * scale, FP8)
    return ((rounded.float() @ q.float()) * scales[:, None]).to(dy.dtype)


def _of_rows(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `op`, which takes and returns matrices, for x or dy [.., K] -> [.., N]."""
    return lambda x, *given: op(x.reshape(-1, x.shape[-1]), *given).view(*x.shape[:-1], -1)


def _flops(x: torch.Size, q: torch.Size, *others: Any, **out: Any) -> int:
    return 2 * q.numel() * x.numel() // x[-1]


def _register_linear(
    name: str, gpu: tuple[Product, Gradient], cpu: tuple[Product, Gradient]
) -> Product:
    """Register the ops `name` and `name`_backward, and return the linear as a function with gradients.

    They are ops, so that neither autograd nor torch.compile keeps the weight or what is rounded.
    """
    product = register_op(
        f"{name}(Tensor x, Tensor q, Tensor scale, Tensor? bias) -> Tensor",
        gpu=_of_rows(gpu[0]),
        cpu=_of_rows(cpu[0]),
        fake=lambda x, q, scale, bias: x.new_empty(*x.shape[:-1], q.shape[0]),
        flops=_flops,
    )
    gradient = register_op(
        f"{name}_backward(Tensor dy, Tensor q, Tensor scale) -> Tensor",
        gpu=_of_rows(gpu[1]),
        cpu=_of_rows(cpu[1]),
        fake=lambda dy, q, scale: dy.new_empty(*dy.shape[:-1], q.shape[1]),
        flops=_flops,
    )

    class FrozenLinear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
            ctx.save_for_backward(q, scale)
            return run(x, q, scale, bias)

        @staticmethod
        def backward(ctx, *output_gradients: Tensor) -> tuple[Tensor | None, ...]:
            (dy,) = output_gradients
            dx = gradient(dy, *ctx.saved_tensors) if ctx.needs_input_grad[0] else None
            db = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[3] else None
            return dx, None, None, db

    keep = lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:3])
    run = register_gradient(product, keep, FrozenLinear.backward)
    return FrozenLinear.apply


_int8_on_any = (_int8_product, _int8_gradient)
_int8_linear = _register_linear("int8_linear", gpu=_int8_on_any, cpu=_int8_on_any)
_fp8_linear = _register_linear(
    "fp8_linear",
    gpu=(_fp8_product_on_gpu, _fp8_gradient_on_gpu),
    cpu=(_fp8_product_on_cpu, _fp8_gradient_on_cpu),
)


def quantized_linear(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias, [.., N], with W = scale q; for fp8 of the rounded rows of x.

    x: [.., K]. q: [N, K] int8 or float8_e4m3fn; scale: [N] float32; both without gradients. bias: [N] in
    the dtype of x, or None. fp8 on a GPU takes bfloat16, and N and K that are multiples of 16.
    """
    op = "int8_linear" if q.dtype == torch.int8 else "fp8_linear"
    check_tensor(op, "x", x, (*x.shape[:-1], q.shape[-1]))
    if q.dtype not in LARGEST or q.ndim != 2:
        refuse(op, "q", q, "it must be a matrix of int8 or float8_e4m3fn")
    if scale.dtype != torch.float32 or scale.shape != q.shape[:1]:
        refuse(op, "scale", scale, f"it must be float32 of shape [{q.shape[0]}]")
    check_tensor(op, "bias", bias, q.shape[:1], like=x)
    if q.dtype == torch.int8:
        return _int8_linear(x, q, scale, bias)
    if x.device.type == "cuda":
        if x.dtype != torch.bfloat16:
            refuse(op, "x", x, "its dtype must be bfloat16 on a GPU")
        if q.shape[0] % _MULTIPLE or q.shape[1] % _MULTIPLE:
            refuse(op, "q", q, f"its sides must be multiples of {_MULTIPLE} on a GPU")
    return _fp8_linear(x, q, scale, bias)
