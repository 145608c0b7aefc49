"""Time the products of a block's linears in bf16, and with weights of 8 bits against it, and check them.

They are interleaved: bf16, int8 and fp8 of one product take turns. What a product returns is compared
with float32 products of the same rounded numbers in plain PyTorch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from bench.harness.outcome import Outcome, Row, Settings
from bench.harness.timing import spread, time_calls
from cogfast.extensions.memory import quantized_linear as linears
from cogfast.extensions.memory.quantized_linear import DTYPES, FP8, dequantize_rows, quantize_rows

_NUM_TOKENS, _TINY_NUM_TOKENS = 17776, 96  # 226 of text and 13 x 30 x 45 of video
_WIDTHS, _TINY_WIDTHS = (1920, 3072), (64,)  # 2B, 5B
# Inputs and outputs, in units of the width
_LINEARS = {"qkv": (1, 3), "out": (1, 1), "fc1": (1, 4), "fc2": (4, 1)}
_FP8_CAPABILITY = (8, 9)
_ROUNDS = 4
_MOST_ERROR = 0.01  # relative, of the norms: bf16's rounding, and fp8's sums in fewer bits


def measure_products(settings: Settings) -> Outcome:
    """Measure a row for every width, linear, product and kind of weight."""
    numbers, kinds = {}, ["bf16", *DTYPES]
    if settings.device.type == "cuda":
        capability = torch.cuda.get_device_capability(settings.device)
        if capability < _FP8_CAPABILITY:
            kinds.remove("fp8")
            numbers["no figure for fp8"] = "this GPU has no fp8 products"
    rows: list[Row] = []
    problems: list[str] = []
    shown = ("width", "linear", "product", "kind", "median_ms", "tflop_per_s", "vs bf16", "error")
    for width in _TINY_WIDTHS if settings.is_tiny else _WIDTHS:
        for linear in _LINEARS:
            for product in ("forward", "dgrad", "wgrad"):
                # A weight of 8 bits is frozen, and has no gradient.
                of_product = kinds if product != "wgrad" else ["bf16"]
                rows += _measure(settings, width, linear, product, of_product, problems)
                settings.keep(Outcome(numbers, rows, shown, problems))
    return Outcome(numbers, rows, shown, problems)


def _measure(
    settings: Settings,
    width: int,
    linear: str,
    product: str,
    kinds: list[str],
    problems: list[str],
) -> list[Row]:
    num_tokens = _TINY_NUM_TOKENS if settings.is_tiny else _NUM_TOKENS
    num_in, num_out = (factor * width for factor in _LINEARS[linear])
    draw = lambda *shape: torch.randn(shape, dtype=torch.bfloat16, device=settings.device)
    given = draw(num_tokens, num_in if product == "forward" else num_out)
    weight = draw(num_tokens if product == "wgrad" else num_out, num_in)
    calls = {kind: _call(kind, product, given, weight) for kind in kinds}
    flops = 2 * num_tokens * num_in * num_out
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    # The activations alone are larger than a GPU's cache.
    for _ in range(_ROUNDS):
        for kind, call in calls.items():
            share = settings.seconds / (2 * _ROUNDS)
            found = spread(time_calls([call, call], settings.device, share))
            times[kind].append(found["median_ms"])
    medians = {kind: statistics.median(each) for kind, each in times.items()}
    rows = []
    for kind in kinds:
        error = _error(kind, product, given, weight, calls[kind]())
        name = f"{width} {linear} {product} {kind}"
        # A NaN is no small error either.
        if not error <= _MOST_ERROR:
            problems.append(f"{name}: {error:.2g} off, more than {_MOST_ERROR}")
        rows.append(
            {
                "width": width,
                "linear": linear,
                "product": product,
                "kind": kind,
                "num_tokens": num_tokens,
                "median_ms": medians[kind],
                "tflop_per_s": flops / medians[kind] / 1e9,
                "vs bf16": medians["bf16"] / medians[kind],
                "error": error,
            }
        )
    return rows


def _call(kind: str, product: str, given: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    if kind == "bf16":
        return lambda: _product(product, given, weight)
    q, scale = quantize_rows(weight, DTYPES[kind])  # pyright: ignore[reportArgumentType]
    ops = torch.ops.cogfast
    if product == "forward":
        op = ops.int8_linear if kind == "int8" else ops.fp8_linear
        return lambda: op(given, q, scale, None)
    op = ops.int8_linear_backward if kind == "int8" else ops.fp8_linear_backward
    return lambda: op(given, q, scale)


def _product(product: str, given: Tensor, other: Tensor) -> Tensor:
    """x W^T, dy W, or dy^T x."""
    given = given.t() if product == "wgrad" else given
    return given @ (other.t() if product == "forward" else other)


def _error(kind: str, product: str, given: Tensor, weight: Tensor, found: Tensor) -> float:
    """Return the relative error of a product with the numbers that `kind` rounds to."""
    given, whole = given.float(), weight.float()
    if kind == "int8":
        whole = dequantize_rows(*linears.quantize_rows(weight, torch.int8), torch.bfloat16)
        whole = whole.float()
    elif kind == "fp8":
        q, scale = linears.quantize_rows(weight, FP8)
        as_rounded = lambda x: dequantize_rows(*linears.quantize_rows(x, FP8), x.dtype)
        if product == "forward":
            given, whole = as_rounded(given), q.float() * scale[:, None]
        else:
            given, whole = as_rounded(given * scale), q.float()
    wanted = _product(product, given, whole)
    return ((found.float() - wanted).norm() / wanted.norm()).item()
