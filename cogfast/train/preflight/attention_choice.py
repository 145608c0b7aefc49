"""Choose a run's attention, and its backend.

The backend is the one that args.attention_backend names, else the checkpoint's, else the fastest
one. Rank 0 checks and times those that can run, at the run's own shape.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from cogfast.distributed.process_groups import ProcessGroups
from cogfast.extensions.table import hook, hooks
from cogfast.kernels import torch_library
from cogfast.kernels.attention_backends import (
    BACKENDS,
    backends_that_run,
    fastest_on_cpu,
    flash_attention,
    reason_unavailable,
)
from cogfast.kernels.block_kernels import choose_kernels
from cogfast.model.config import TransformerConfig
from cogfast.model.transformer import DiffusionTransformer
from cogfast.model.weights.checkpoint_manifest import find_run_checkpoint, read_manifest
from cogfast.train.assembly import DTYPES
from cogfast.train.keys import TrainKeys
from cogfast.train.video_size import largest_size

logger = logging.getLogger(__name__)

T = TypeVar("T")
Shape = tuple[int, int, int, int]  # B, S, H, D

_LAST = "math"  # measured only if nothing else runs: it cannot be the fastest
_NUM_CALLS = 5  # timed calls, each forward and backward
_NUM_ROWS = 16  # rows of out and dq that are compared
_RELATIVE_FLOOR = 1e-3  # of errors, a quarter of bfloat16's spacing


@dataclass(frozen=True, slots=True)
class Measured:
    """Milliseconds of a backend, or the reason why it is out."""

    name: str
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    reason: str | None = None

    def __str__(self) -> str:
        if self.reason is not None:
            return f"{self.name:<10} out: {self.reason}"
        return f"{self.name:<10} forward {self.forward_ms:8.3f}  backward {self.backward_ms:8.3f}"


def check_attention(args: TrainKeys, head_width: int) -> None:
    """Refuse an args.attention_backend that cannot run on this machine, and name those that can."""
    name = args.attention_backend
    if name == "auto":
        return
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    else:
        torch_library.compile_cpu_kernels()  # as a run does at its start
    case = (device, DTYPES[args.precision], head_width, args.deterministic)
    reason = reason_unavailable(name, *case)
    if name == "cogfast" and args.kernels == "torch":
        reason = "it is a kernel of cogfast, and args.kernels=torch leaves these out"
    if reason is not None:
        names = ", ".join(["auto", *backends_that_run(*case)])
        text = f": {reason}; this machine can run: {names}"
        raise args.refusal("attention_backend", text)


def follow_weights(args: TrainKeys, loras: Iterable[str] = ()) -> tuple[dict[str, str], str]:
    """Return {key: value} of args.attention of a run's weights, if it is null and they have one, and their path.

    loras: adapters beside args.load and args.load_lora.
    """
    if args.attention is not None:
        return {}, ""
    for path in filter(None, (args.load, args.load_lora, *loras)):
        checkpoint, folder = find_run_checkpoint(Path(path)), Path(path).parent
        if checkpoint is None and (folder / "manifest.json").is_file():
            checkpoint = folder  # of files for diffusers in a checkpoint
        stored = None if checkpoint is None else read_manifest(checkpoint).get("attention")
        if stored not in (None, "dense"):
            text = "attention: %s, as %s was trained; args.attention overrides it"
            logger.info(text, stored, path)
            return {args.key("attention"): stored}, str(path)
    return {}, ""


def choose_attention(
    transformer: DiffusionTransformer,
    args: TrainKeys,
    data: Mapping[str, Any],
    manifest: Mapping[str, Any],
    groups: ProcessGroups,
    is_training: bool = False,
) -> tuple[TrainKeys, str | None]:
    """Let a transformer use args.attention and the kernels of a backend, which a checkpoint's `manifest` keeps.

    data: the data set's arguments. Return the arguments with the attention, and the backend.
    """
    stored, config = manifest.get("attention"), transformer.config
    chosen = args.attention or stored or "dense"
    if groups.is_main and stored is not None and chosen != stored:
        text = "attention: %s instead of the checkpoint's %s, as args.attention says"
        logger.warning(text, chosen, stored)
    args = args.changed(attention=chosen)
    # (transformer, args, data, groups, is_training): ValueError if it cannot.
    for use in hooks("attention", args):
        use(transformer, args, data, groups, is_training)
    stored, is_sparse = manifest.get("attention_backend"), transformer.sparse_share is not None
    if is_training:
        backend = choose_for_training(data, args, config, groups, stored, is_sparse)
    else:
        backend = choose_for_sampling(args, config, groups, stored, is_sparse)
    transformer.use_kernels(choose_kernels(args.kernels, backend))
    return args, backend


def choose_for_training(
    data: Mapping[str, Any],
    args: TrainKeys,
    model: TransformerConfig,
    groups: ProcessGroups,
    stored: str | None,
    is_sparse: bool = False,
) -> str | None:
    """Choose the run's attention backend, the same on every rank; None: the op's default.

    stored: the backend in the checkpoint that the run resumes from. A measured choice is stored in
    checkpoints, so that a resumed run computes as before. is_sparse: the run has block-sparse attention.
    """
    name = choose_for_sampling(args, model, groups, stored, is_sparse)
    if name is not None or is_sparse:
        return name
    if groups.device.type == "cpu":  # not measured, which would not repeat; machines may differ
        dtype, is_own = DTYPES[args.precision], args.kernels == "triton"
        names = groups.gather(fastest_on_cpu(dtype) if is_own else None)
        return names[0] if len({*names}) == 1 else "flash"
    # Every rank must use one backend: two ranks could measure two different winners.
    shape = run_shape(data, args, model)
    return groups.on_main(lambda: fastest_here(shape, groups.device, DTYPES[args.precision]))


def choose_for_sampling(
    args: TrainKeys,
    model: TransformerConfig,
    groups: ProcessGroups,
    stored: str | None,
    is_sparse: bool = False,
) -> str | None:
    """Choose the backend that args names, else that of the run whose weights are sampled if it can
    run here; None: the op's default.

    is_sparse: stored backends are those of dense attention; sparse attention has one default, FlexAttention.
    """
    stored = None if is_sparse or (args.kernels, stored) == ("torch", "cogfast") else stored
    name = args.attention_backend
    if name != "auto":
        # A different backend than the checkpoint's is allowed, but changes the last digits.
        if stored not in (None, name):
            logger.info("attention: %s instead of the checkpoint's %s", name, stored)
        return name
    if stored is None:
        return None
    reason = "unknown backend"  # a checkpoint of a version that had it
    if stored in BACKENDS:
        reason = reason_unavailable(stored, groups.device, DTYPES[args.precision], model.head_width)
    # The GPUs may differ, and all ranks use one backend.
    reason = next((found for found in groups.gather(reason) if found is not None), None)
    if reason is None:
        logger.info("attention: %s, as in the checkpoint", stored)
        return stored
    text = "attention: the checkpoint's %s cannot run here (%s); another backend is chosen, and numbers"
    logger.warning(f"{text} may differ in their last digits", stored, reason)
    return None


def run_shape(data: Mapping[str, Any], args: TrainKeys, model: TransformerConfig) -> Shape:
    """Return attention's input shape in a training step.

    Frames and size are those of the data set's arguments (the largest bucket), else the largest
    that the model supports. The heads are those of one rank.
    """
    size = largest_size(data, model)
    heads = model.num_attention_heads // (args.model_parallel_size * args.context_parallel_size)
    return args.batch_size, size.num_tokens(model), heads, model.head_width


def fastest(rows: Sequence[Measured]) -> str:
    """Return the name with the least sum of forward and backward among those that are not out."""
    # Forward and backward run once each per training step and layer.
    able = [row for row in rows if row.reason is None]
    assert able, f"no attention backend runs: {'; '.join(map(str, rows))}"
    return min(able, key=lambda row: row.forward_ms + row.backward_ms).name


def fastest_here(shape: Shape, device: torch.device, dtype: torch.dtype) -> str:
    """Measure the backends that can run here, log a table and return the name of the fastest."""
    rows = [measure(name, shape, device, dtype) for name in BACKENDS if name != _LAST]
    if all(row.reason is not None for row in rows):
        rows.append(measure(_LAST, shape, device, dtype))
    name = fastest(rows)
    what = f"attention of [B, S, H, D] = {list(shape)} in {str(dtype).removeprefix('torch.')}, ms"
    logger.info("\n  ".join([what, *map(str, rows), f"taken: {name}"]))
    # A backend's package is checked last: dtype, width and GPU are right.
    of_packages = [str(row) for row in rows if BACKENDS[row.name].module is not None]
    if all("does not import" in text for text in of_packages):
        # (device) -> what a run loses there without them, and how to install them; None: nothing
        lose = hook("without_flash_attention")
        if lose is not None and (cost := lose(device)):
            logger.info("attention: flash-attn 3 and 4 are missing; %s", cost)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # sync: once, before training
    return name


def measure(name: str, shape: Shape, device: torch.device, dtype: torch.dtype) -> Measured:
    """Time forward and backward of one backend after checking its results."""
    reason = reason_unavailable(name, device, dtype, shape[-1])
    if reason is not None:
        return Measured(name, reason=reason)
    b, s, h, d = shape
    # The default generator's state belongs to the run.
    generator = torch.Generator(device).manual_seed(0)
    draw = lambda *size: torch.randn(size, generator=generator, dtype=dtype, device=device)
    packed = draw(b, s, 3, h, d)  # v is a part of packed qkv, as in the model
    q, k, v = (x.requires_grad_() for x in (draw(b, s, h, d), draw(b, s, h, d), packed[:, :, 2]))
    dout = draw(b, s, h, d)
    try:
        reason = find_error(lambda q, k, v: flash_attention(q, k, v, name), (q, k, v), dout)
        if reason is not None:
            return Measured(name, reason=reason)
        forward, backward = [], []
        # The check above was the warm-up.
        for _ in range(_NUM_CALLS):
            milliseconds, out = _timed(lambda: flash_attention(q, k, v, name), device)
            forward.append(milliseconds)
            run = lambda out=out: torch.autograd.grad(out, (q, k, v), dout)
            backward.append(_timed(run, device)[0])
    except Exception as error:  # a broken kernel must not end the run: other backends remain
        return Measured(name, reason=f"it fails: {type(error).__name__}: {error}".splitlines()[0])
    return Measured(name, statistics.median(forward), statistics.median(backward))


def _timed(call: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Return the milliseconds of a call, from idle device to idle device, and its result."""
    # A CPU is idle when a call returns; CUDA calls return before the work is done.
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None  # sync: at the start
    wait()
    start = time.perf_counter()
    result = call()
    wait()
    return 1e3 * (time.perf_counter() - start), result


def find_error(
    run: Callable[[Tensor, Tensor, Tensor], Tensor],
    qkv: Sequence[Tensor],
    dout: Tensor,
    is_attended: Callable[[Tensor], Tensor] | None = None,
) -> str | None:
    """Compare some rows of an attention's results with float32 arithmetic; return None if they agree.

    The error may be twice that of plain arithmetic in the same dtype, plus a floor. q, k, v, dout:
    [B, S, H, D]. dout is zero in all other rows, so that dk and dv follow from these rows alone.
    is_attended: of some rows [R], the keys that they attend to, bool [B, H, R, S]; None: all.
    """
    # Evenly spaced rows, the first and the last among them.
    rows = torch.linspace(0, dout.shape[1] - 1, _NUM_ROWS, device=dout.device).long().unique()
    few_dout = dout[:, rows]
    q, k, v = qkv
    out = run(q, k, v)
    dq, dk, dv = torch.autograd.grad(out, qkv, torch.zeros_like(dout).index_copy(1, rows, few_dout))
    got = {"out": out.detach()[:, rows], "dq": dq[:, rows], "dk": dk, "dv": dv}
    few = [q[:, rows], k, v, few_dout]
    mask = None if is_attended is None else is_attended(rows)
    # float32 arithmetic on all S x S scores would not fit into memory: few rows, whole k and v.
    exact = _attend([x.detach().float() for x in few], mask)
    plain = _attend([x.detach() for x in few], mask)
    for key, values in got.items():
        truth = exact[key]
        errors = ((x.float() - truth).norm() / truth.norm() for x in (values, plain[key]))
        error, near = (x.item() for x in errors)  # sync: before training
        limit = 2 * near + _RELATIVE_FLOOR
        if not error <= limit:  # also true for NaN
            return f"{key} is wrong: relative error {error:.1e}, {limit:.1e} is allowed"
    return None


def _attend(tensors: Sequence[Tensor], mask: Tensor | None) -> dict[str, Tensor]:
    """Return out, dq, dk, dv of q, dout [B, R, H, D], which are some rows, and whole k, v."""
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    gradients = torch.autograd.grad(out, (q, k, v), tensors[3])
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))
