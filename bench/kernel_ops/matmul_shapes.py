"""Time the matrix products of a block at 49 x 480 x 720: each linear, forward and both gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from bench.harness.outcome import Bars, Outcome, Row, Settings
from bench.harness.rates import matmul_rate
from cogfast.diagnostics.timing import spread, time_calls

_NUM_TOKENS, _TINY_NUM_TOKENS = 17776, 96  # 226 of text and 13 x 30 x 45 of video
_WIDTHS, _TINY_WIDTHS = (1920, 3072), (64,)  # 2B, 5B
_LINEARS = {
    "qkv": (1, 3),
    "out": (1, 1),
    "fc1": (1, 4),
    "fc2": (4, 1),
}  # inputs and outputs, in units of the width
# x [tokens, in], w [out, in], dy [tokens, out]
_PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "forward": lambda x, w, dy: x @ w.T,
    "dgrad": lambda x, w, dy: dy @ w,
    "wgrad": lambda x, w, dy: dy.T @ x,
}


def measure_matmuls(settings: Settings) -> Outcome:
    """Measure a row for every width, linear and product, compared with a large square product."""
    square = matmul_rate(settings)
    rate = square["tflop_per_s"]
    numbers = {f"square_{key}": value for key, value in square.items()}
    shown = ("width", "linear", "product", "median_ms", "p10_ms", "p90_ms", "tflop_per_s")
    shown += ("percent_of_square_rate",)
    rows: list[Row] = []
    for width in _TINY_WIDTHS if settings.is_tiny else _WIDTHS:
        for linear, product in itertools.product(_LINEARS, _PRODUCTS):
            rows.append(_measure(settings, width, linear, product, rate))
            settings.keep(Outcome(numbers, rows, shown))
    kinds = [f"{r['width']} {r['linear']}" for r in rows if r["product"] == "forward"]
    bars = Bars(
        title=f"bf16 matrix products of a block, {rows[0]['num_tokens']} tokens",
        unit="TFLOP/s",
        labels=kinds,
        series={p: [r["tflop_per_s"] for r in rows if r["product"] == p] for p in _PRODUCTS},
        line=(f"{square['size']}^3", rate),
    )
    return Outcome(numbers, rows, shown, bars=bars)


def _measure(settings: Settings, width: int, linear: str, product: str, rate: float) -> Row:
    num_tokens = _TINY_NUM_TOKENS if settings.is_tiny else _NUM_TOKENS
    num_in, num_out = (factor * width for factor in _LINEARS[linear])
    shapes = ((num_tokens, num_in), (num_out, num_in), (num_tokens, num_out))
    draw = lambda shape: torch.randn(shape, dtype=torch.bfloat16, device=settings.device)
    num_bytes = 2 * sum(rows * columns for rows, columns in shapes)
    sets = [[draw(shape) for shape in shapes] for _ in range(settings.num_buffer_sets(num_bytes))]
    # Half the sampling time of other pieces: there are many rows.
    multiply = _PRODUCTS[product]
    calls = [lambda tensors=tensors: multiply(*tensors) for tensors in sets]
    times = spread(time_calls(calls, settings.device, settings.seconds / 2))
    achieved = 2 * num_tokens * num_in * num_out / times["median_ms"] / 1e9
    return {
        "width": width,
        "linear": linear,
        "product": product,
        "num_tokens": num_tokens,
        "tflop_per_s": achieved,
        "percent_of_square_rate": 100 * achieved / rate,
        **times,
    }
