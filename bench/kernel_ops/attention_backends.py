"""Time attention forward and backward at the token count of 49 x 480 x 720, by every backend.

Rates count 4 S^2 H D operations forward and 2.5 times that backward, as FlashAttention does. Output
and gradients of every backend are compared with plain float32 arithmetic on two heads: the error may
be twice that of plain bf16 arithmetic plus a floor. A backend of another package runs in a process of
its own, python -m bench.kernel_ops.attention_backends NAME: what breaks its CUDA context, or hangs,
costs the other backends nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.harness.outcome import Outcome, Row, Settings
from bench.harness.timing import spread, time_calls, wait_for
from cogfast.extensions.sparse.attention import (
    BLOCK,
    Blocks,
    choose_blocks_reference,
    sparse_attention,
)
from cogfast.kernels.attention_backends import (
    BACKENDS,
    flash_attention,
    flash_attention_reference,
    reason_unavailable,
)

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v [B, S, H, D] -> [B, S, H, D]

_SHAPES = ((1, 17776, 48, 64), (1, 17776, 30, 64))  # 5B, 2B
_MATH_SHAPE = (1, 2048, 48, 64)  # it needs seconds at the full size
_TINY_SHAPES, _TINY_MATH_SHAPE = ((1, 160, 3, 64), (1, 144, 2, 64)), (1, 96, 3, 64)
_DTYPE = torch.bfloat16
_BACKWARD = 2.5  # times the operations of forward: five products instead of two
_RELATIVE_FLOOR = 1e-3  # a quarter of bf16's spacing
_LEAST_SECONDS = 10.0  # a backend is left out when less is left
# Block-sparse attention: a share of 0 is dense attention by FlexAttention.
_SPARSE = {"sparse:0": 0.0, "sparse:0.8": 0.8, "sparse:0.8 by fa4": 0.8}
_MARK = "row: "  # before each row that a process prints
_MOST_SECONDS = 100.0  # of the process of another package, which may compile for a minute


def _attend_sparsely(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    library = "fa4" if _library(name) == "fa4" else None
    return sparse_attention(q, k, v, _num_text(q.shape[1]), _SPARSE[name], library)[0]


def _num_text(rows: int) -> int:
    return min(226, rows // 4)


def _library(name: str) -> str:
    """Return the name of BACKENDS that an entry of ATTENTION needs, if it needs one."""
    return name.rpartition(" by ")[2]


# The functions to time, by the names that results show
ATTENTION: dict[str, Attention] = {
    "default": flash_attention,
    **{name: partial(flash_attention, backend=name) for name in BACKENDS},
    **{name: partial(_attend_sparsely, name) for name in _SPARSE},
}


def measure_attention(settings: Settings) -> Outcome:
    """Measure a row for every backend and shape; those of other packages come last."""
    names = sorted(ATTENTION, key=lambda name: (_is_foreign(name), name == "math"))
    rows: list[Row] = []
    problems: list[str] = []
    for backend in names:
        measure = _measure_apart if _is_foreign(backend) else _measure_here
        for row, wrong in measure(settings, backend):
            rows.append(row)
            problems += wrong
            settings.keep(_outcome(rows, problems))
    return _outcome(rows, problems)


def _is_foreign(backend: str) -> bool:
    library = _library(backend)
    return library in BACKENDS and BACKENDS[library].module is not None


def _shapes(settings: Settings, backend: str) -> Sequence[Sequence[int]]:
    if backend == "math":
        return (_TINY_MATH_SHAPE if settings.is_tiny else _MATH_SHAPE,)
    return _TINY_SHAPES if settings.is_tiny else _SHAPES


def _measure_here(settings: Settings, backend: str) -> Iterator[tuple[Row, list[str]]]:
    """Yield the row and the problems of each shape."""
    for shape in _shapes(settings, backend):
        if settings.seconds_left < _LEAST_SECONDS:
            yield _row(backend, shape) | {"unavailable": "left out: no time"}, []
        else:
            yield measure_backend(settings, backend, shape, ATTENTION[backend])


def _measure_apart(settings: Settings, backend: str) -> Iterator[tuple[Row, list[str]]]:
    """Yield the same from a process, and for the shapes that it did not get to, why not."""
    shapes = _shapes(settings, backend)
    case = (settings.device, _DTYPE, shapes[0][-1])
    reasons = [reason_unavailable(_library(backend), *case)] * len(shapes)
    seconds = min(_MOST_SECONDS, settings.seconds_left)
    if all(reasons) or seconds < _LEAST_SECONDS:
        for shape, reason in zip(shapes, reasons, strict=True):
            yield _row(backend, shape) | {"unavailable": reason or "left out: no time"}, []
        return
    if settings.device.type == "cuda":
        torch.cuda.empty_cache()  # the process uses the same GPU
    command = [sys.executable, "-m", "bench.kernel_ops.attention_backends", backend]
    command += ["--device", settings.device.type, *["--tiny"] * settings.is_tiny]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds)
        output, end = done.stdout, f"its process ended with status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output, end = (error.stdout or b"").decode(), f"its process took more than {seconds:.0f} s"
    # A row is a line; a package may print others.
    lines = [line for line in output.splitlines() if line.startswith(_MARK)]
    found = [json.loads(line.removeprefix(_MARK)) for line in lines]
    yield from ((each["row"], each["problems"]) for each in found)
    for shape in shapes[len(found) :]:
        yield _row(backend, shape) | {"error": end}, [f"{backend} {list(shape)}: {end}"]


def _outcome(rows: Sequence[Row], problems: Sequence[str]) -> Outcome:
    shown = ("backend", "shape_bshd", "forward_median_ms", "forward_tflop_per_s")
    shown += ("backward_median_ms", "backward_tflop_per_s", "out_relative_error")
    shown += ("unavailable", "error", "forward_kernel", "backward_kernel")
    return Outcome({}, list(rows), shown, list(problems))


def _row(backend: str, shape: Sequence[int]) -> dict[str, object]:
    return {"backend": backend, "shape_bshd": list(shape)}


def measure_backend(
    settings: Settings, backend: str, shape: Sequence[int], run: Attention
) -> tuple[Row, list[str]]:
    """Return a row of figures, or of the reason why the backend cannot run, and the problems."""
    row = _row(backend, shape)
    if _library(backend) in BACKENDS:
        reason = reason_unavailable(_library(backend), settings.device, _DTYPE, shape[-1])
        if reason is not None:
            return {**row, "unavailable": reason}, []
    try:
        figures, wrong = _measure(settings, run, shape, _SPARSE.get(backend))
    except Exception as error:  # the other backends are measured after any failure
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return {**row, "error": text}, [f"{backend} {list(shape)}: {text}"]
    return {**row, **figures}, [f"{backend} {list(shape)}: {text}" for text in wrong]


def _measure(
    settings: Settings, run: Attention, shape: Sequence[int], share: float | None
) -> tuple[Row, list[str]]:
    b, s, h, d = shape
    draw = lambda *size: torch.randn(size, dtype=_DTYPE, device=settings.device)
    make_v = lambda: draw(b, s, 3, h, d)[:, :, 2]  # a view of packed qkv, as in the model
    make = lambda: draw(b, s, h, d)
    bytes_per_set = 4 * 2 * b * s * h * d
    sets = [
        ([x.requires_grad_() for x in (make(), make(), make_v())], make())
        for _ in range(settings.num_buffer_sets(bytes_per_set))
    ]
    # Backward runs on stored outputs, so that its times contain no forward.
    outputs = [run(*qkv) for qkv, _ in sets]
    forward = [lambda qkv=qkv: run(*qkv) for qkv, _ in sets]
    backward = [
        lambda out=out, qkv=qkv, given=given: torch.autograd.grad(
            out, qkv, given, retain_graph=True
        )
        for out, (qkv, given) in zip(outputs, sets, strict=True)
    ]
    figures: dict[str, object] = {}
    # Backends are compared at the full size: small sizes hide indexing mistakes.
    errors, wrong = compare(outputs[0], *sets[0], share)
    pairs = s**2
    if share is not None:
        blocks = Blocks.of(s, _num_text(s))
        pairs = blocks.attended(s, blocks.num_kept(share))
    flops = 4 * b * h * d * pairs
    for way, calls, factor in (("forward", forward, 1.0), ("backward", backward, _BACKWARD)):
        times = spread(time_calls(calls, settings.device, settings.seconds))
        figures |= {f"{way}_{key}": value for key, value in times.items()}
        figures[f"{way}_tflop_per_s"] = factor * flops / times["median_ms"] / 1e9
        kernels = kernels_by_time(calls[0], settings.device)
        figures[f"{way}_kernel"] = kernels[0] if kernels else "the trace shows none"
    return {**figures, **errors}, wrong


def compare(
    output: Tensor, qkv: Sequence[Tensor], given: Tensor, share: float | None = None
) -> tuple[dict[str, float], list[str]]:
    """Return the relative errors of an output [B, S, H, D] and its gradients on the first and last head.

    q, k, v and the gradient `given` of the output are [B, S, H, D] in bf16. share: of blocks left out.
    """
    gradients = torch.autograd.grad(output, qkv, given, retain_graph=True)
    actual = dict(zip(("out", "dq", "dk", "dv"), (output, *gradients), strict=True))
    errors: dict[str, float] = {}
    wrong = []
    # All heads would need tens of GB in float32: S^2 scores each.
    for head in sorted({0, output.shape[2] - 1}):
        of_head = [x.detach()[:, :, head : head + 1] for x in (*qkv, given)]
        pairs = None if share is None else _attended(*of_head[:2], share)
        exact, plain = (_reference(x, pairs) for x in ([x.float() for x in of_head], of_head))
        for name, whole in actual.items():
            off = lambda x, truth=exact[name]: ((x.float() - truth).norm() / truth.norm()).item()
            error = off(whole.detach()[:, :, head : head + 1])
            limit = 2 * off(plain[name]) + _RELATIVE_FLOOR
            if not error <= limit:  # also true for NaN
                wrong.append(f"{name} of head {head}: relative error {error:.2e} > {limit:.2e}")
            for key, value in (("error", error), ("limit", limit)):
                key = f"{name}_relative_{key}"
                errors[key] = max(errors.get(key, value), value)
    return errors, wrong


def _attended(q: Tensor, k: Tensor, share: float) -> Tensor:
    """Return which pairs of rows of a head, q and k [B, S, 1, D], are attended, bool [B, 1, S, S]."""
    rows = q.shape[1]
    blocks = Blocks.of(rows, _num_text(rows))
    choice = choose_blocks_reference(q, k, _num_text(rows), blocks.num_kept(share))
    place = torch.arange(blocks.count, device=q.device)
    is_chosen = place < choice.kv_counts[..., None]
    chosen = torch.zeros_like(is_chosen.expand_as(choice.kv_indices))
    chosen = chosen.scatter(-1, choice.kv_indices.long(), is_chosen.expand_as(chosen))
    block_of = torch.arange(rows, device=q.device) // BLOCK
    return chosen[:, :, block_of][..., block_of]


def _reference(tensors: Sequence[Tensor], pairs: Tensor | None = None) -> dict[str, Tensor]:
    """Compute output and gradients of q, k, v and the output's gradient [B, S, 1, D], in their dtype.

    pairs: of rows that are attended, [B, 1, S, S]; None: all.
    """
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    if pairs is None:
        output = flash_attention_reference(q, k, v)
    else:
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~pairs, -torch.inf).softmax(-1)
        output = torch.einsum("bhij,bjhd->bihd", weights, v)
    gradients = torch.autograd.grad(output, (q, k, v), tensors[3])
    return dict(zip(("out", "dq", "dk", "dv"), (output.detach(), *gradients), strict=True))


def kernels_by_time(call: Callable[[], object], device: torch.device) -> list[str]:
    """Return the kernels (on a CPU: the operators) of a call by a trace, the slowest first."""
    is_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
    with profile(activities=activities) as trace:
        call()
        wait_for(device)
    kind = DeviceType.CUDA if is_gpu else DeviceType.CPU
    events = [event for event in trace.key_averages() if event.device_type == kind]
    cost = (lambda e: e.self_device_time_total) if is_gpu else (lambda e: e.self_cpu_time_total)
    return [event.key for event in sorted(events, key=cost, reverse=True)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("backend", choices=ATTENTION)
    parser.add_argument("--device", required=True)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args(argv)
    settings = Settings(torch.device(arguments.device), arguments.tiny)
    for row, problems in _measure_here(settings, arguments.backend):
        print(_MARK + json.dumps({"row": row, "problems": problems}), flush=True)


if __name__ == "__main__":
    main()
