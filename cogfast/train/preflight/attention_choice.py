"""Choose a run's attention backend.

The backend is the one that args.attention_backend names, else the checkpoint's, else the fastest
one. Rank 0 measures that at the run's own shape.
"""

from __future__ import annotations

import logging
import os

import torch

from cogfast.config import Config
from cogfast.kernels.attention.backends import BACKENDS, backends_that_run, reason_unavailable
from cogfast.kernels.attention.timing import Shape, fastest_here
from cogfast.model.config import TransformerConfig
from cogfast.schema.arguments import TrainArguments
from cogfast.schema.merged_config import refuse
from cogfast.train.assembly import DTYPES
from cogfast.train.distributed.process_groups import ProcessGroups
from cogfast.train.video_size import largest_size

logger = logging.getLogger(__name__)


def check_attention(config: Config, args: TrainArguments, head_width: int) -> None:
    """Check that args.attention_backend can run on this machine.

    Raises:
        ValueError: it cannot; names the backends that can.
    """
    name = args.attention_backend
    if name == "auto":
        return
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    # These decide whether a backend can run; batch and length do not.
    case = (device, DTYPES[args.precision], head_width, args.deterministic)
    reason = reason_unavailable(name, *case)
    if reason is not None:
        names = ", ".join(["auto", *backends_that_run(*case)])
        text = f"args.attention_backend={name}: {reason}; this machine can run: {names}"
        refuse(config, "args.attention_backend", text)


def choose_for_training(
    config: Config,
    args: TrainArguments,
    model: TransformerConfig,
    groups: ProcessGroups,
    stored: str | None,
) -> str | None:
    """Choose the run's attention backend, the same on every rank; None: the op's default.

    stored: the backend in the checkpoint that the run resumes from. A measured choice is stored in
    checkpoints, so that a resumed run computes as before.
    """
    name = choose_for_sampling(args, model, groups, stored)
    if name is not None or groups.device.type == "cpu":
        return name
    # Every rank must use one backend: two ranks could measure two different winners.
    shape = run_shape(config, args, model)
    return groups.on_main(lambda: fastest_here(shape, groups.device, DTYPES[args.precision]))


def choose_for_sampling(
    args: TrainArguments, model: TransformerConfig, groups: ProcessGroups, stored: str | None
) -> str | None:
    """Choose the backend that args names, else that of the run whose weights are sampled if it can
    run here; None: the op's default."""
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
    logger.warning(
        "attention: the checkpoint's %s cannot run here (%s); another backend is chosen, and numbers "
        "may differ in their last digits",
        stored,
        reason,
    )
    return None


def run_shape(config: Config, args: TrainArguments, model: TransformerConfig) -> Shape:
    """Return attention's input shape in a training step.

    Frames and size are those in the config's data section (the largest bucket), else the largest
    that the model supports. The heads are those of one rank.
    """
    size = largest_size(config, model)
    heads = model.num_attention_heads // (args.model_parallel_size * args.context_parallel_size)
    return args.batch_size, size.num_tokens(model), heads, model.head_width
