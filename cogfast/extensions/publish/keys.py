"""Keys of publishing."""

from __future__ import annotations

from typing import Annotated

from cogfast.core.keys import After, Keys


class PublishKeys(Keys):
    """Publication of a complete run."""

    push_to_hub: Annotated[str | None, After("log_interval")] = None
    """repository of the Hugging Face hub, such as me/my-lora, to which a run that is complete is published
    as `cogfast publish` does; a failure is logged"""
