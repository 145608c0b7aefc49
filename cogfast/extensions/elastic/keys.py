"""Keys of elastic runs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from cogfast.core.keys import After, Keys


class ElasticKeys(Keys):
    """Runs that lose ranks."""

    elastic: Annotated[
        Literal["off", "shrink", "wait"],
        BeforeValidator(lambda x: x or "off"),
        After("collective_timeout"),
    ] = "off"
    """under torchrun --nnodes=MIN:MAX --max-restarts=N: what a run does that has lost ranks. It resumes
    by itself, without --resume too, with the global batch of its checkpoint. shrink: with the most
    ranks that divide it, and more accumulation; other ranks idle. wait: once there are as many ranks
    as before ([launch.md](launch.md#restart-by-itself)). off: as started"""
