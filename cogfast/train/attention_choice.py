"""Which attention kernels a run takes: the one it names, the one its checkpoint names, or the one
that rank 0 finds to be the fastest at the run's own shape."""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cogfast.config import Config, refuse
from cogfast.kernels.attention_backends import BACKENDS, backends_that_run, why_not
from cogfast.kernels.flash_attention import flash_attention
from cogfast.model.transformer import TransformerConfig
from cogfast.train.arguments import TrainArguments
from cogfast.train.assembly import DTYPES
from cogfast.train.process_groups import ProcessGroups
from cogfast.train.video_size import largest_size

logger = logging.getLogger(__name__)

Shape = tuple[int, int, int, int]  # B, S, H, D

_LAST = "math"  # measured where nothing else runs: it can only be slower
_NUM_CALLS = 5  # timed ones, each forward and backward
_NUM_ROWS = 16  # that are compared with plain arithmetic
_RELATIVE_FLOOR = 1e-3  # of errors, a quarter of bfloat16's spacing


def check_attention(config: Config, args: TrainArguments, head_width: int) -> None:
    """ValueError for an args.attention_backend that cannot run on this machine, and what can."""
    name = args.attention_backend
    if name == "auto":
        return
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    case = (device, DTYPES[args.precision], head_width, args.deterministic)
    reason = why_not(name, *case)
    if reason is not None:
        names = ", ".join(["auto", *backends_that_run(*case)])
        text = f"args.attention_backend={name}: {reason}; here these can: {names}"
        refuse(config, "args.attention_backend", text)


def choose_for_training(
    config: Config,
    args: TrainArguments,
    model: TransformerConfig,
    groups: ProcessGroups,
    stored: str | None,
) -> str | None:
    """The name of the run's attention backend, the same on every rank; None: the op's own choice.

    stored: what the checkpoint that the run goes on from was made with. A measured choice is kept
    there, so that a resumed run computes as before.
    """
    name = choose_for_sampling(args, model, groups, stored)
    if name is not None or groups.device.type == "cpu":
        return name
    shape = run_shape(config, args, model)
    return groups.on_main(lambda: _fastest_here(shape, groups.device, DTYPES[args.precision]))


def choose_for_sampling(
    args: TrainArguments, model: TransformerConfig, groups: ProcessGroups, stored: str | None
) -> str | None:
    """The backend that args names, else the one of the run whose weights are sampled, where it can
    run here; None: the op's own choice."""
    name = args.attention_backend
    if name != "auto":
        if stored not in (None, name):
            logger.info("attention: %s instead of the checkpoint's %s", name, stored)
        return name
    if stored is None:
        return None
    reason = "there is no such"
    if stored in BACKENDS:
        reason = why_not(stored, groups.device, DTYPES[args.precision], model.head_width)
    if reason is None:
        logger.info("attention: %s, as in the checkpoint", stored)
        return stored
    logger.warning(
        "attention: the checkpoint's %s cannot run here (%s); another is chosen, and numbers may "
        "differ in their last digits",
        stored,
        reason,
    )
    return None


def run_shape(config: Config, args: TrainArguments, model: TransformerConfig) -> Shape:
    """What attention gets in a step: the data's frames and size (of buckets the largest), where the
    config says them, else the largest that the model takes; the heads of one tensor-parallel part."""
    size = largest_size(config, model)
    heads = model.num_attention_heads // args.model_parallel_size
    return args.batch_size, size.num_tokens(model), heads, model.head_width


@dataclass(frozen=True, slots=True)
class Measured:
    """A backend's milliseconds, or why it is out."""

    name: str
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    reason: str | None = None

    def __str__(self) -> str:
        if self.reason is not None:
            return f"{self.name:<10} out: {self.reason}"
        return f"{self.name:<10} forward {self.forward_ms:8.3f}  backward {self.backward_ms:8.3f}"


def fastest(rows: Sequence[Measured]) -> str:
    """The name of the least sum of forward and backward among those that are not out."""
    able = [row for row in rows if row.reason is None]
    assert able, f"no attention backend runs: {'; '.join(map(str, rows))}"
    return min(able, key=lambda row: row.forward_ms + row.backward_ms).name


def _fastest_here(shape: Shape, device: torch.device, dtype: torch.dtype) -> str:
    """Measure what is present, log the table, take the fastest."""
    rows = [measure(name, shape, device, dtype) for name in BACKENDS if name != _LAST]
    if all(row.reason is not None for row in rows):
        rows.append(measure(_LAST, shape, device, dtype))
    name = fastest(rows)
    what = f"attention of [B, S, H, D] = {list(shape)} in {str(dtype).removeprefix('torch.')}, ms"
    logger.info("\n  ".join([what, *map(str, rows), f"taken: {name}"]))
    if device.type == "cuda":
        torch.cuda.empty_cache()  # sync: once, before training
    return name


def measure(name: str, shape: Shape, device: torch.device, dtype: torch.dtype) -> Measured:
    """Time forward and backward of one backend, after a look at its results."""
    reason = why_not(name, device, dtype, shape[-1])
    if reason is not None:
        return Measured(name, reason=reason)
    b, s, h, d = shape
    generator = torch.Generator(device).manual_seed(0)
    draw = lambda *size: torch.randn(size, generator=generator, dtype=dtype, device=device)
    packed = draw(b, s, 3, h, d)  # v comes as a part of it, as in the model
    qkv = [x.requires_grad_() for x in (draw(b, s, h, d), draw(b, s, h, d), packed[:, :, 2])]
    dout = draw(b, s, h, d)
    try:
        reason = wrong_by(name, qkv, dout)
        if reason is not None:
            return Measured(name, reason=reason)
        forward, backward = [], []
        for _ in range(_NUM_CALLS):
            milliseconds, out = _timed(lambda: flash_attention(*qkv, name), device)
            forward.append(milliseconds)
            run = lambda out=out: torch.autograd.grad(out, qkv, dout)
            backward.append(_timed(run, device)[0])
    except Exception as error:  # a kernel that breaks here must not end the run, others are there
        text = f"it fails: {type(error).__name__}: {error}".splitlines()[0]
        return Measured(name, reason=text)
    return Measured(name, statistics.median(forward), statistics.median(backward))


def _timed(call: Callable[[], object], device: torch.device) -> tuple[float, object]:
    """Milliseconds, from idle to idle, and what the call returns."""
    wait = lambda: None
    if device.type == "cuda":
        wait = torch.cuda.synchronize  # sync: idle at both ends of a timing; before training
    wait()
    start = time.perf_counter()
    result = call()
    wait()
    return 1e3 * (time.perf_counter() - start), result


def wrong_by(name: str, qkv: Sequence[Tensor], dout: Tensor) -> str | None:
    """Compare some rows of a backend with float32 arithmetic; None where it is right: its error is
    twice that of plain arithmetic in the same dtype at most, and a floor.

    q, k, v, dout [B, S, H, D]. With dout at those rows alone, whole dk and dv follow from them.
    """
    rows = torch.linspace(0, dout.shape[1] - 1, _NUM_ROWS, device=dout.device).long().unique()
    few_dout = dout[:, rows]
    out = flash_attention(*qkv, name)
    dq, dk, dv = torch.autograd.grad(out, qkv, torch.zeros_like(dout).index_copy(1, rows, few_dout))
    got = {"out": out.detach()[:, rows], "dq": dq[:, rows], "dk": dk, "dv": dv}
    few = [qkv[0][:, rows], *qkv[1:], few_dout]
    exact, plain = _attend([x.detach().float() for x in few]), _attend([x.detach() for x in few])
    for key, values in got.items():
        truth = exact[key]
        errors = ((x.float() - truth).norm() / truth.norm() for x in (values, plain[key]))
        error, near = (x.item() for x in errors)  # sync: before training
        limit = 2 * near + _RELATIVE_FLOOR
        if not error <= limit:  # NaN too
            return f"{key} is wrong: relative error {error:.1e}, {limit:.1e} is allowed"
    return None


def _attend(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """q, k, v, dout, of q and dout [B, R, H, D] some rows alone -> out, dq, dk, dv."""
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    gradients = torch.autograd.grad(out, (q, k, v), tensors[3])
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))
