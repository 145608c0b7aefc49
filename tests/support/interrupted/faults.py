"""Runs in which one rank fails somewhere: `torchrun ... tests/support/interrupted/faults.py BASE SAVE FAULT:WORD,WORD ...`.

Each argument is a run with its overrides, saved below SAVE/<number of the run>. Rank 1 fails where
FAULT names, or rank 0 where only rank 0 does such work.
"""

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from inspect import getattr_static
from pathlib import Path
from unittest.mock import patch

import torch

from cogfast.__main__ import main as cogfast
from cogfast.distributed.process_groups import start_processes
from cogfast.extensions.sample.evaluate import Evaluator
from cogfast.extensions.sample.generate import VideoMaker
from cogfast.train.checkpoint import snapshot
from cogfast.train.checkpoint.write import CheckpointWriter
from cogfast.train.encode import Encoder
from tests.support.runs import run_of

FAULTS: dict[str, tuple[object, str]] = {
    "loss": (Evaluator, "_band_losses"),
    "prompts": (Evaluator, "_prompts"),
    "condition": (VideoMaker, "condition"),
    "write": (snapshot, "write_safetensors"),
    "complete": (CheckpointWriter, "_describe"),
    "first batch": (Encoder, "__call__"),  # in training: it ends the run
}
FATAL = ("first batch",)
ON_RANK_0 = ("prompts", "complete")
ON_DISK = ("write", "complete")


def failing(name: str, original: Callable) -> Callable:
    """`original` out of order; the disk is full only the first time."""
    num_calls = 0

    def call(*args: object, **named: object) -> object:
        nonlocal num_calls
        num_calls += 1
        if name in FATAL:
            raise ZeroDivisionError(name)
        if name not in ON_DISK:
            raise torch.OutOfMemoryError(f"no memory for {name}")
        if num_calls == 1:
            raise OSError(28, "No space left on device")
        return original(*args, **named)

    return call


def main() -> None:
    base, save, *runs = sys.argv[1:]
    rank = int(os.environ["RANK"])
    groups = start_processes()
    for number, run in enumerate(runs):
        name, _, arguments = run.partition(":")
        overrides = [f"args.save={Path(save) / str(number)}", *arguments.split(",")]
        overrides = [argument for argument in overrides if argument]
        planted: AbstractContextManager = nullcontext()
        if name != "none" and rank == (0 if name in ON_RANK_0 else 1):
            owner, attribute = FAULTS[name]
            call = failing(name, getattr_static(owner, attribute))
            planted = patch.object(owner, attribute, call)
        with planted:
            if name in FATAL:
                sys.exit(cogfast(["train", "--base", base, *overrides]))
            run_of(base).train(*overrides)
    groups.close()


if __name__ == "__main__":
    main()
