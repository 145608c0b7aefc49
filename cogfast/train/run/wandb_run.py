"""A run in Weights & Biases. Losing the connection to it does not end training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cogfast.config.values import one_line
from cogfast.train.run.folder import wandb_id

logger = logging.getLogger(__name__)


class WandbRun:
    """Sends numbers and videos to W&B. wandb is imported here, since it is optional.

    Raises RuntimeError if the run cannot be started. A later failure is logged once, and again only
    after something was sent in between.
    """

    def __init__(self, folder: Path, project: str) -> None:
        self._is_lost = False
        try:
            import wandb  # pyright: ignore[reportMissingImports] - optional

            self._wandb: Any = wandb
            self._run = wandb.init(
                project=project,
                name=folder.name,
                id=wandb_id(folder),  # a resumed run continues the same W&B run
                resume="allow",
                dir=str(folder),
            )
            # W&B's own steps cannot go back, as those of a resumed run do.
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        # wandb has many types of exceptions, and a broken installation has more.
        except Exception as error:
            raise RuntimeError(
                f"args.wandb=true, but W&B does not start ({one_line(str(error))}); run `wandb login`, "
                "set WANDB_MODE=offline in the environment, or set args.wandb=false"
            ) from error

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._attempt(f"step {step}", lambda: self._run.log({**numbers, "step": step}))

    def log_videos(self, step: int, videos: Sequence[tuple[Path, str]]) -> None:
        """Upload mp4 files, each with its prompt as caption, under the key `samples`."""

        def log() -> None:
            # fps is left out: W&B warns that the file decides it.
            files = [
                self._wandb.Video(str(path), caption=text, format="mp4") for path, text in videos
            ]
            self._run.log({"samples": files, "step": step})

        self._attempt(f"the videos of step {step}", log)

    def finish(self, has_failed: bool) -> None:
        self._attempt("the run's end", lambda: self._run.finish(exit_code=int(has_failed)))

    def _attempt(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if not self._is_lost:
                logger.warning("W&B does not take %s (%s); training continues", what, error)
            self._is_lost = True
        else:
            self._is_lost = False
