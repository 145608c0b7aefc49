"""Evaluations of one run in which one rank is asked to stop, or fails alone:
`python tests/support/ranks/evaluation_ranks.py BASE OUT CACHE WORD ...`.

OUT gets {case: [[names of losses, number of videos] of each rank]}. CACHE: a folder for `cogfast cache`,
where rank 1 finds all files changed at the second time, and rank 0 none; "" leaves it out.
"""

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from inspect import getattr_static
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from cogfast.data.batches import BatchLoader
from cogfast.distributed import process_groups
from cogfast.distributed.lost_ranks import UnsharedError
from cogfast.extensions.cache.command import cache_latents
from cogfast.extensions.cache.entry_keys import Sources
from cogfast.extensions.sample.evaluate import Evaluator
from cogfast.extensions.sample.generate import VideoMaker
from cogfast.train.encode import Encoder
from cogfast.train.trainer import Trainer
from tests.support.runs import run_of

STOP = SimpleNamespace(is_asked=False)
# Name: where it happens, and whether it is an error or a stop. The first two come before the run has
# chosen how it encodes clips.
CASES: dict[str, tuple[Any, str, str]] = {
    "error in the first batch": (BatchLoader, "__next__", "error"),
    "error in an encoder": (Encoder, "build", "error"),
    "stop in the held-out loss": (Evaluator, "_encoded", "stop"),
    "stop in the samples": (VideoMaker, "condition", "stop"),
    "error in a caption": (Encoder, "encode_text", "error"),
    "error in a clip": (Encoder, "encode_video", "error"),
    "error in the loader": (BatchLoader, "__init__", "error"),
    "error in the conditioning": (VideoMaker, "condition", "error"),
    "none": (Evaluator, "_held_out_loss", "none"),
}


def planted(kind: str, original: Callable) -> Callable:
    def call(*args: object, **named: object) -> object:
        if kind == "error":
            raise ValueError("planted")
        STOP.is_asked = kind == "stop"
        return original(*args, **named)

    return call


def evaluate(trainer: Trainer, name: str) -> tuple[list[str], int]:
    size, evaluator = trainer.parts.size.latents, trainer.evaluator
    step = 1000 * list(CASES).index(name.partition(" on")[0]) + int(name[-1])
    STOP.is_asked = False
    found = evaluator(step, size, STOP)
    trainer.groups.gather(None)
    videos = trainer.folder.glob(f"samples/step-{step:08d}/*.mp4")
    return sorted(found), len(list(videos))


def main() -> None:
    base, out, cache, *words = sys.argv[1:]
    run = run_of(base)
    trainer = run.trainer(*words)
    groups, seen = trainer.groups, {}
    for number, (name, (owner, attribute, kind)) in enumerate(CASES.items()):
        # Each case is on one rank, in turn. Only the first rank of a model reads.
        rank = number % groups.world_size
        if owner is BatchLoader:
            rank -= rank % groups.model_size
        call = getattr_static(owner, attribute)
        if groups.rank == rank:
            call = planted(kind, call)
        with patch.object(owner, attribute, call):
            case = f"{name} on {rank}"
            seen[case] = groups.gather(evaluate(trainer, case))
    if cache:
        as_new = lambda sources, files: list(files)
        of_second = as_new if groups.rank == 1 else Sources.changed
        for changed in (Sources.changed, of_second):
            with patch.object(Sources, "changed", changed):
                cache_latents(run.config(f"args.latent_cache={cache}").run)
    if groups.is_main:
        Path(out).write_text(json.dumps(seen))
    if groups.model is not None:
        fail_alone(trainer)
        return
    groups.close()


def fail_alone(trainer: Trainer) -> None:
    """An error of one rank within the network, for which the other one waits, ends both."""
    process_groups._PATIENCE = timedelta(seconds=1)
    if trainer.groups.rank == 1:
        call = planted("error", Evaluator._band_losses)
        with patch.object(Evaluator, "_band_losses", call):
            try:
                trainer.evaluator(9, trainer.parts.size.latents)
            except UnsharedError as error:
                print(f"alone: {error}", flush=True)
        return
    try:
        trainer.evaluator(9, trainer.parts.size.latents)
    except RuntimeError as error:  # gloo's: the connection is closed
        print(f"lost: {type(error).__name__}", flush=True)


if __name__ == "__main__":
    main()
