"""The trainer that users of CogVideo's diffusers trainer see: cogfast's own, built from `Args`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

import cogfast.train.trainer
from cogfast.cli.streams import start_logging
from cogfast.config import Config
from cogfast.config.json_files import read_json
from cogfast.config.sat_network import transformer_arguments
from cogfast.core.files import write_text
from cogfast.core.shapes import SPATIAL_COMPRESSION, num_latent_frames
from cogfast.core.slot_random import SlotRandom
from cogfast.data.batches import to_device
from cogfast.finetune.overrides import (
    SAMPLE_KEYS,
    check_collated,
    check_encoded,
    identity,
    overridden,
    samples_of,
)
from cogfast.finetune.schemas import Args
from cogfast.finetune.translate import notices, translate
from cogfast.model.config import TransformerConfig
from cogfast.train.encode import EncodeOverrides, Encoder

logger = logging.getLogger(__name__)

_DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_PREPARATION = (
    "cogfast prepares a run from its configuration; pass key=value words in Args.overrides"
)
# Methods and attributes of upstream's Trainer that nothing calls here -> the reason
_NOT_CALLED = {
    "check_setting": _PREPARATION,
    "load_components": _PREPARATION,
    "initialize_pipeline": _PREPARATION,
    "prepare_models": _PREPARATION,
    "prepare_dataset": _PREPARATION,
    "prepare_trainable_parameters": _PREPARATION,
    "prepare_optimizer": _PREPARATION,
    "prepare_for_training": _PREPARATION,
    "prepare_for_validation": _PREPARATION,
    "prepare_trackers": _PREPARATION,
    "validate": "cogfast samples the prompts itself",
    "validation_step": "cogfast samples the prompts itself",
    "UNLOAD_LIST": "the encoders are unloaded when everything is encoded",
}


# Attributes that upstream's methods read -> what to use in their place
_ABSENT = {
    "components": "call the method of super() for what CogVideo's trainer does with it",
    "accelerator": "use the device of a tensor, such as video.device",
}


class _Facts(dict):
    """A dict whose items are attributes, too, as those of diffusers' configurations."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"transformer/config.json has no {name}") from None


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
    """The run. Its loss, batches and encoders are those of `owner`, which users may have overridden."""

    def __init__(self, config: Config, owner: Trainer) -> None:
        self.owner, self.methods = owner, overridden(type(owner), Trainer)
        super().__init__(config, owner._encode_overrides(self.methods))

    def compute_loss(self, batch: dict) -> Tensor:
        # Overridden methods read upstream's keys; cogfast's own loss reads the moments that a cache has.
        if {"compute_loss", "collate_fn"} & self.methods.keys():
            rng = self._random(batch)
            batch = self.encoder.encode_batch(batch, rng)
            if "collate_fn" in self.methods:
                batch = self._collate(batch, rng)
        return self.owner.compute_loss(batch)

    def own_loss(self, batch: dict) -> Tensor:
        return super().compute_loss(batch)

    def _collate(self, batch: dict, rng: SlotRandom) -> dict:
        samples = samples_of(batch, len(rng.slots))
        # Its random operations must be those of a resumed run.
        rng.seed_pytorch("collate_fn")
        what = f"{type(self.owner).__name__}.collate_fn"
        is_loss_own = "compute_loss" in self.methods
        found = self.owner.collate_fn(samples)
        found = to_device(check_collated(what, found, samples, is_loss_own), self.groups.device)
        for key, value in found.items():
            if isinstance(value, Tensor):
                found[key] = self.groups.broadcast_tensor_in_model(value)
        return {key: value for key, value in batch.items() if key not in SAMPLE_KEYS} | found


class Trainer:
    """One run. Subclasses may override `compute_loss`, `collate_fn`, `encode_video` and `encode_text`;
    overriding another of upstream's methods is a TypeError.

    config: the same run as a configuration of `cogfast train`. dataset, optimizer and lr_scheduler are
    None until `fit`.
    """

    def __init__(self, args: Args) -> None:
        # A user's script may have configured logging itself.
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
            _Facts(read_json(Path(self.config.args.load, "transformer", "config.json"))),
        )
        self.dataset: Any = None
        self.optimizer: Any = None
        self.lr_scheduler: LearningRate | None = None
        self._run: _Run | None = None
        self._encoding: tuple[Encoder, SlotRandom] | None = None  # of the sample that is encoded

    def __init_subclass__(cls) -> None:
        # A method that silently never runs would cost a whole run; this fails when it is defined.
        for name, reason in _NOT_CALLED.items():
            if name in vars(cls):
                raise TypeError(f"{cls.__name__}.{name} would never be called: {reason}")

    def __getattr__(self, name: str) -> NoReturn:
        reason = f" in cogfast's trainer; {_ABSENT[name]}" if name in _ABSENT else ""
        raise AttributeError(f"{type(self).__name__} has no attribute {name}{reason}")

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

    def collate_fn(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Stack samples to the batch of `compute_loss`.

        samples: {"encoded_video": [C, T, h, w], "prompt_embedding": [L, E], "video_metadata"} and, for
        image-to-video, "image": [3, H, W] in [-1, 1], on the CPU.
        """
        keys = [(key, name) for key, name in SAMPLE_KEYS.items() if name in samples[0]]
        return {key: torch.stack([sample[name] for sample in samples]) for key, name in keys}

    def encode_video(self, video: Tensor) -> Tensor:
        """Encode clips [B, 3, F, H, W] in [-1, 1] to scaled latents [B, C, T, h, w] in float32."""
        encoder, rng = self._encoder()
        rng = replace(rng, slots=[*rng.slots] * len(video))
        return encoder.encode_video(video, rng, "first_stage")

    def encode_text(self, prompt: str) -> Tensor:
        """Encode a caption to its embedding [1, L, E]."""
        return self._encoder()[0].encode_text([prompt] if isinstance(prompt, str) else prompt)

    def _encoder(self) -> tuple[Encoder, SlotRandom]:
        """Return the encoders in use, and the draws of the sample that is encoded."""
        if self._encoding is not None:
            return self._encoding
        run = self._prepare()
        return run.encoder, SlotRandom(run.args.seed, run.step, [0], 1, run.groups.device)

    def _encode_overrides(self, methods: dict[str, list[Callable]]) -> EncodeOverrides:
        """Return the overridden encoders among `methods`, after their checks."""
        network = TransformerConfig(
            **transformer_arguments(self.config.model.network_config.params)
        )
        is_cached = self.config.args.latent_cache is not None

        def encode(name: str, encoder: Encoder, rng: SlotRandom, sample: Any) -> Tensor:
            shape = (1, network.text_length, network.text_hidden_size)
            if name == "encode_video":
                frames, *sides = sample.shape[2:]
                rows, columns = (side // SPATIAL_COMPRESSION for side in sides)
                shape = (1, network.out_channels, num_latent_frames(frames), rows, columns)
            self._encoding = encoder, rng
            try:
                found = getattr(self, name)(sample)
            finally:
                self._encoding = None
            found = check_encoded(f"{type(self).__name__}.{name}", found, shape)
            return found.to(rng.device)

        names = [name for name in ("encode_video", "encode_text") if name in methods]
        return EncodeOverrides(
            **{name: partial(encode, name) for name in names},
            identity={n: identity(type(self), n, methods[n]) for n in names if is_cached},
        )

    def _prepare(self) -> _Run:
        if self._run is None:
            run = self._run = _Run(self.config, self)
            self.dataset, self.optimizer = run.datasets.train, run.engine.optimizer
            self.lr_scheduler = LearningRate(run)
            self.state.num_trainable_parameters = run.parts.num_trained
            self.state.total_batch_size_count = run.parts.global_batch
            # For the user: nothing reads this file.
            if run.groups.is_main:
                text = json.dumps(self.args.model_dump(), indent=2, default=str)
                write_text(run.folder / "args.json", text + "\n")
        return self._run
