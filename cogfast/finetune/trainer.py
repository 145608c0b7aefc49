"""The trainer that users of CogVideo's diffusers trainer see: cogfast's own, built from `Args`."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cogfast.train.trainer
from cogfast.cli.log_lines import start_logging
from cogfast.config import Config
from cogfast.core.files import write_text
from cogfast.finetune.schemas import Args
from cogfast.finetune.translate import notices, translate
from cogfast.schema.json_files import read_json

logger = logging.getLogger(__name__)

_DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_PREPARATION = (
    "cogfast prepares a run from its configuration; pass key=value words in Args.overrides"
)
_ENCODING = "clips are encoded once, into a cache that all trainer classes share; change the batch at the start of compute_loss"
# Methods and attributes of upstream's Trainer that nothing calls here -> the reason
_NOT_CALLED = {
    **dict.fromkeys(
        (
            "check_setting",
            "load_components",
            "initialize_pipeline",
            "prepare_models",
            "prepare_dataset",
            "prepare_trainable_parameters",
            "prepare_optimizer",
            "prepare_for_training",
            "prepare_for_validation",
            "prepare_trackers",
        ),
        _PREPARATION,
    ),
    **dict.fromkeys(("encode_video", "encode_text"), _ENCODING),
    "collate_fn": "readers return whole batches; change the batch at the start of compute_loss",
    "validate": "cogfast samples the prompts itself",
    "validation_step": "cogfast samples the prompts itself",
    "UNLOAD_LIST": "the encoders are unloaded when everything is encoded",
}


@dataclass
class State:
    """Facts about a run. The last two are 0 until Trainer.fit prepares it."""

    train_frames: int
    train_height: int
    train_width: int
    weight_dtype: torch.dtype
    transformer_config: dict[str, Any]  # of transformer/config.json
    num_trainable_parameters: int = 0
    total_batch_size_count: int = 0


class LearningRate:
    """The run's learning rate, under the name that PyTorch's schedulers have."""

    def __init__(self, run: cogfast.train.trainer.Trainer) -> None:
        self._run = run

    def get_last_lr(self) -> list[float]:
        """Return the rate of the current step; between two steps, that of the next step."""
        return [self._run.learning_rate(self._run.step)]


class _Run(cogfast.train.trainer.Trainer):
    """The run. Its loss is that of `owner`, which users may have overridden."""

    def __init__(self, config: Config, owner: Trainer) -> None:
        super().__init__(config)
        self.owner = owner

    def compute_loss(self, batch: dict) -> Tensor:
        # An overridden loss reads upstream's keys; cogfast's own reads the moments that a cache has.
        if type(self.owner).compute_loss is not Trainer.compute_loss:
            batch = self.encoder.encode_batch(batch, self._random(batch))
        return self.owner.compute_loss(batch)

    def own_loss(self, batch: dict) -> Tensor:
        return super().compute_loss(batch)


class Trainer:
    """One run. Subclasses may override `compute_loss`; overriding another of upstream's is a TypeError.

    config: what `cogfast train` would read. dataset, optimizer and lr_scheduler are None until `fit`.
    """

    def __init__(self, args: Args) -> None:
        if not logging.getLogger("cogfast").handlers:
            start_logging()
        self.args = args
        self.config = translate(args)
        for line in notices(args):
            logger.warning("%s", line)
        frames, height, width = args.train_resolution
        self.state = State(
            frames,
            height,
            width,
            _DTYPES[args.mixed_precision],
            read_json(Path(self.config.args.load, "transformer", "config.json"), {}),
        )
        self.dataset: Any = None
        self.optimizer: Any = None
        self.lr_scheduler: LearningRate | None = None
        self._run: _Run | None = None

    def __init_subclass__(cls) -> None:
        for name, reason in _NOT_CALLED.items():
            if name in vars(cls):
                raise TypeError(f"{cls.__name__}.{name} would never be called: {reason}")

    def fit(self) -> None:
        """Prepare the run, and train to its end or until a signal asks to stop."""
        self._prepare().train()

    def train(self) -> None:
        """Do as `fit`; upstream's example calls it right after the constructor."""
        self.fit()

    @property
    def data_loader(self) -> Any:
        """Iterator over this rank's micro-batches; None before training."""
        return None if self._run is None else self._run.batches

    def compute_loss(self, batch: dict) -> Tensor:
        """Return the mean loss, a float32 scalar, of a micro-batch on the device.

        batch: {"encoded_videos": [B, C, T, h, w], "prompt_embedding": [B, L, E]} and, for
        image-to-video, "images": [B, 3, H, W] in [-1, 1].
        """
        return self._prepare().own_loss(batch)

    def _prepare(self) -> _Run:
        if self._run is None:
            run = self._run = _Run(self.config, self)
            self.dataset, self.optimizer = run.datasets.train, run.engine.optimizer
            self.lr_scheduler = LearningRate(run)
            self.state.num_trainable_parameters = run.num_trained
            self.state.total_batch_size_count = run.global_batch
            if run.groups.is_main:
                text = json.dumps(self.args.model_dump(), indent=2, default=str)
                write_text(run.folder / "args.json", text + "\n")
        return self._run
