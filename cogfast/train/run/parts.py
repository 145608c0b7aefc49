"""The parts of a run, as the phases (train/phases.py) build them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cogfast.data.global_order import GlobalOrder
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.distributed.zero_engine import ZeroEngine
from cogfast.model.transformer import DiffusionTransformer
from cogfast.train.activation_checkpointing import Policy
from cogfast.train.assembly import (
    Datasets,
    Diffusion,
)
from cogfast.train.checkpoint.write import CheckpointWriter, Export
from cogfast.train.encode import Encoder
from cogfast.train.keys import TrainKeys
from cogfast.train.preflight.encode_choice import EncodeChoice
from cogfast.train.run.folder import (
    plain_sections,
)
from cogfast.train.run.opened import Run
from cogfast.train.run.own_classes import Classes
from cogfast.train.run.terminal import Hints
from cogfast.train.run.trackers import RunLog
from cogfast.train.video_size import SampleSize
from cogfast.train.watchers.parameter_checks import GradientCheck
from cogfast.train.watchers.training_losses import BandLosses, LoggedValues

if TYPE_CHECKING:
    from cogfast.extensions.stores.mirror import Uploads


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A run and its processes. args: its keys, with what the phases have chosen."""

    run: Run
    args: TrainKeys
    groups: ProcessGroups
    own: Classes  # of the user
    held: ExitStack  # what the run holds until its log ends: the lock of its folder, uploads to a store
    log: RunLog


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """The samples, their order and the number of steps. num_steps: of the whole run. bad: {name of an unusable sample: reason}."""

    datasets: Datasets
    order: GlobalOrder
    num_steps: int
    global_batch: int
    bad: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Folder:
    """The place where the run is written, and the checkpoint that it continues, with completed optimizer steps."""

    path: Path
    checkpoint: Path | None
    manifest: dict[str, Any]
    step: int
    learning_rate: Callable[[int], float]  # by step, from 0
    check_owner: Callable[[], None]
    uploads: Uploads


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """The parts that compute: the transformer, and the frozen encoders before it."""

    transformer: DiffusionTransformer
    attention_backend: str | None  # None: the op's default
    encoder: Encoder
    encode_choice: EncodeChoice
    num_trained: int  # parameters
    gradient_check: GradientCheck
    export: Export


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """All that the training loop uses, as the phases have built it."""

    launch: Launch
    diffusion: Diffusion
    data: Data
    folder: Folder
    model: Model
    engine: ZeroEngine
    size: SampleSize
    policies: tuple[Policy, ...]  # of activation checkpointing, for each block
    bands: BandLosses
    logged: LoggedValues | None  # None: the trainer is cogfast's own, which logs no further values
    evaluator: Any  # of the seam "evaluate"; None without evaluations
    shows_ema: bool  # sampled videos are made with the averaged weights
    writer: CheckpointWriter
    hints: Hints

    def saved_facts(self) -> dict[str, Any]:
        """Return what a checkpoint's manifest has of the run beside its state."""
        data, model, args = self.data, self.model, self.launch.args
        return {
            "classes": self.launch.own,
            "global_batch": data.global_batch,
            "seed": args.seed,
            "num_samples": len(data.datasets.train),
            "data_order": data.order.fingerprint,
            "attention": args.attention,
            "attention_backend": model.attention_backend,
            "encode_way": model.encode_choice.way,
            "video_sizes": self.size.trained(),
            "config": plain_sections(self.launch.run.sections),
        }
