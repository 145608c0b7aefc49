"""Keys of scores."""

from __future__ import annotations

from typing import Annotated

from cogfast.core.keys import After, Count, Keys


class ScoreKeys(Keys):
    """Scores of sampled videos."""

    eval_command: Annotated[str | None, After("eval_with_ema")] = None
    """command that scores sampled videos in the background, such as "python score.py {samples}", which
    becomes their folder; numbers of the JSON object that it prints are logged as score/NAME. Only the
    command line can set it"""
    eval_command_timeout: Count = 3600
    """seconds after which eval_command is killed"""
    keep_best: str | None = None
    """score/NAME: also keep the checkpoint with the highest value; -score/NAME or -valid_loss: with
    the lowest. A value belongs to the newest checkpoint at its step or before"""
