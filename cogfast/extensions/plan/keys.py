"""Keys of the memory plan."""

from __future__ import annotations

from typing import Annotated, Literal

from cogfast.core.keys import After, Keys


class FitKeys(Keys):
    """Keys that a run changes to fit into the memory."""

    fit: Annotated[Literal["none", "auto"], After("activation_checkpointing")] = "none"
    """auto: if the memory plan does not fit, change keys that save memory, the cheapest first,
    until it does; the log has each change with its cost. none: train as configured"""
