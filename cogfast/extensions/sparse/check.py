"""Check, use and warm up args.attention=sparse:SHARE: block-sparse attention with a share of blocks left out."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from cogfast.distributed.parallelize import run_without_dynamo
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.extensions.sparse.attention import BLOCK, Blocks, attended_keys, sparse_attention
from cogfast.extensions.sparse.keys import OTHERS_RUN_DENSE
from cogfast.model.config import TransformerConfig
from cogfast.model.transformer import DiffusionTransformer
from cogfast.train.assembly import DTYPES
from cogfast.train.keys import TrainKeys
from cogfast.train.preflight.attention_choice import Shape, find_error, run_shape
from cogfast.train.video_size import bucket_sizes, largest_size
from cogfast.train.watchers.watcher import Watcher

if TYPE_CHECKING:
    from cogfast.train.run.parts import Parts

logger = logging.getLogger(__name__)

_LEAST_TOKENS = 4096  # on a GPU: with fewer, choosing blocks costs about what they save
_MOST_COMPILED = 8  # lengths of videos
_WIDTHS = range(16, 257, 16)  # head widths of FlexAttention's kernels on tensor cores
_KEY = TrainKeys.key("attention")


def check_sparse(
    args: TrainKeys, model: TransformerConfig, data: Mapping[str, Any], is_training: bool
) -> None:
    """Check that args.attention can run here, in training at the size of the data (the data set's arguments).

    Raises ValueError if it cannot.
    """
    share, named = args.sparse_share, f"{_KEY}={args.attention}"
    warmup = f"args.sparse_warmup={args.sparse_warmup}"
    if is_training and args.sparse_warmup and share is None:
        text = f"{warmup} needs args.attention=sparse:SHARE; set it, or args.sparse_warmup=0"
        raise args.problem("sparse_warmup", text)
    if share is None:
        return
    if is_training and args.compile and args.sparse_warmup:
        text = f"{warmup} changes blocks that args.compile=true would compile again for each number of kept "
        raise args.problem("sparse_warmup", f"{text}blocks; set one of the two to its default")
    lengths = {size.num_tokens(model) for size in bucket_sizes(data, model)}
    if is_training and args.compile and len(lengths) > _MOST_COMPILED:
        text = f"args.compile=true compiles blocks again for each of {len(lengths)} lengths of the buckets with "
        raise args.problem("compile", f"{text}{named}, half a minute each; set it to false")
    if args.attention_backend not in ("auto", "fa4"):
        text = f"args.attention_backend={args.attention_backend} has no block-sparse kernels; set it to auto"
        raise args.problem("attention_backend", f"{text} (FlexAttention) or fa4")
    if args.attention_backend == "fa4" and args.deterministic:
        text = "args.attention_backend=fa4 has no block-sparse gradients that repeat bit for bit,"
        text += " as args.deterministic=true asks"
        raise args.problem("attention_backend", f"{text}; set it to auto")
    if not torch.cuda.is_available():
        return
    dense = f"set {_KEY}=dense"
    if (width := model.head_width) not in _WIDTHS:
        text = f"{named} takes head widths that are multiples of 16 up to 256, not {width}; {dense}"
        raise args.problem("attention", text)
    least = (9, 0) if args.attention_backend == "fa4" else (8, 0)
    capability = torch.cuda.get_device_capability(int(os.environ.get("LOCAL_RANK", "0")))
    if capability < least:
        here, needed = (".".join(map(str, x)) for x in (capability, least))
        text = f"{named} needs a GPU of compute capability {needed}, this is {here}; {dense}"
        raise args.problem("attention", text)
    tokens = largest_size(data, model).num_tokens(model) - model.text_length
    if is_training and tokens < _LEAST_TOKENS:
        text = f"{named} gains nothing below {_LEAST_TOKENS:,} video tokens, and the largest clip has {tokens:,}"
        raise args.problem("attention", f"{text} (blocks have {BLOCK}); {dense}, or longer clips")


def sparse_error(
    shape: Shape, num_text: int, share: float, args: TrainKeys, device: torch.device
) -> str | None:
    """Compare block-sparse attention of q, k, v [B, S, H, D] on a device with plain arithmetic over the same
    blocks; return what is wrong, or None."""
    run_without_dynamo(False)  # FlexAttention is compiled
    backend = None if args.attention_backend == "auto" else args.attention_backend
    generator = torch.Generator(device).manual_seed(0)  # the default one's state belongs to the run
    dtype = DTYPES[args.precision]
    draw = lambda: torch.randn(shape, generator=generator, dtype=dtype, device=device)
    q, k, v = (draw().requires_grad_() for _ in range(3))
    run = lambda q, k, v: sparse_attention(q, k, v, num_text, share, backend)[0]
    attended = lambda rows: attended_keys(q, k, num_text, share, rows)
    error = find_error(run, (q, k, v), draw(), attended)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # sync: once, before training
    return error


def use_attention(
    transformer: DiffusionTransformer,
    args: TrainKeys,
    data: Mapping[str, Any],
    groups: ProcessGroups,
    is_training: bool,
) -> None:
    """Let a transformer use args.attention=sparse:SHARE. data: the data set's arguments. ValueError if it cannot."""
    share, model, kind = args.sparse_share, transformer.config, type(transformer)
    if share is None:
        return
    if kind.block_arguments is not DiffusionTransformer.block_arguments:
        text = f"{_KEY}={args.attention} does not work with {kind.__name__}.block_arguments, whose tensors have "
        raise ValueError(f"{text}other rows than the blocks then have; set {_KEY}=dense")
    check_sparse(args, model, data, is_training)
    if groups.is_main:
        rows = largest_size(data, model).num_tokens(model)
        blocks = Blocks.of(rows, model.text_length)
        pairs = blocks.attended(rows, blocks.num_kept(share)) / rows**2
        log = logger.warning if pairs == 1 and share else logger.info
        what = "nothing is left out of so few" if pairs == 1 and share else "of the pairs of rows"
        log("attention: %s, %.1f%% of %s rows: %s", args.attention, 100 * pairs, f"{rows:,}", what)
    if is_training and groups.device.type == "cuda":
        # At the size of a step, since each shape has a kernel of its own.
        shape, num_text = run_shape(data, args, model), model.text_length
        error = groups.on_main(lambda: sparse_error(shape, num_text, share, args, groups.device))
        if error is not None:
            named = f"{_KEY}={args.attention} gives wrong numbers here by args.attention_backend="
            why = f"{named}{args.attention_backend}: {error}; set {_KEY}=dense"
            raise args.problem("attention", why)
    if torch.cuda.is_available():
        run_without_dynamo(False)  # FlexAttention is compiled
    transformer.use_sparse_attention(share)
    if groups.is_main and is_training and args.export != "none":
        text = "args.export=%s and " + OTHERS_RUN_DENSE
        logger.warning(text, args.export, f"args.attention={args.attention}")


class SparseWarmup(Watcher):
    """Sets the share before each step: of step i of `steps`, share * i / steps. Step 0 is dense."""

    def __init__(self, transformer: DiffusionTransformer, steps: int) -> None:
        assert transformer.sparse_share is not None, "args.sparse_warmup without sparse attention"
        self.transformer, self.steps, self.share = transformer, steps, transformer.sparse_share

    def before_step(self, step: int) -> None:
        self.is_done = step >= self.steps
        self.transformer.use_sparse_attention(self.share * min(1.0, step / self.steps))


def watch_warmup(parts: Parts, metrics: object) -> SparseWarmup | None:
    steps = parts.launch.args.sparse_warmup
    return SparseWarmup(parts.engine.transformer, steps) if steps else None
