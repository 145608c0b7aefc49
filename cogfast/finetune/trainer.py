"""The trainer that users of CogVideo's diffusers trainer see: cogfast's own, built from `Args`."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from inspect import isfunction, signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import cogfast.train.trainer
from cogfast.cli.launchers import check_ranks
from cogfast.cli.streams import start_logging
from cogfast.config.sat_network import transformer_arguments
from cogfast.core.addresses import shown
from cogfast.core.files import write_text
from cogfast.core.json_files import read_json
from cogfast.core.shapes import SPATIAL_COMPRESSION, TokenGrid, num_latent_frames
from cogfast.core.slot_random import SlotRandom
from cogfast.core.values import cut
from cogfast.data.bad_samples import BadSample
from cogfast.data.batches import in_unit_range, to_device
from cogfast.data.video.clip import on_readers_device, read_clip
from cogfast.door.merged_config import Config
from cogfast.extensions.sample.prompt_files import given_prompts, listed_files
from cogfast.finetune.components import SHARED_MODEL, Accelerator, RunComponents, rotary_tables
from cogfast.finetune.overrides import (
    OVERRIDABLE,
    SAMPLE_KEYS,
    StepVideos,
    check_collated,
    check_encoded,
    described,
    identity,
    overridden,
    samples_of,
)
from cogfast.finetune.schemas import Args
from cogfast.finetune.translate import notices, translate
from cogfast.model.config import TransformerConfig
from cogfast.train.encode import Encoder
from cogfast.train.frozen_encoders import EncodeOverrides
from cogfast.train.run.terminal import log_misspelt

logger = logging.getLogger(__name__)

_DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_PREPARATION = (
    "cogfast prepares a run from its configuration; pass key=value words in Args.overrides, and build "
    "networks of your own in __init__, after super().__init__(args), on self.accelerator.device"
)
_VALIDATION = (
    "cogfast reads --validation_prompts, --validation_images and --validation_videos and calls "
    "validation_step for each; override that"
)
_DATA = (
    "cogfast reads the data; collate_fn gets the path of each sample, and self.read_video reads "
    "what lies beside it"
)
_UNUSED = (
    "check_setting prepare_models prepare_dataset prepare_trainable_parameters prepare_optimizer "
    "prepare_for_training prepare_for_validation prepare_trackers validate"
)
# Methods of upstream's Trainer that nothing calls here -> the reason
_NOT_CALLED = dict.fromkeys(_UNUSED.split(), _PREPARATION) | {"prepare_dataset": _DATA}
_NOT_CALLED |= {"prepare_for_validation": _VALIDATION, "validate": _VALIDATION}


class _Facts(dict):
    """A dict whose items are attributes, too, as those of diffusers' configurations."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            from diffusers import CogVideoXTransformer3DModel

            # Published files lack keys that their version of diffusers did not have.
            default = signature(CogVideoXTransformer3DModel).parameters.get(name)
            if default is None:
                raise AttributeError(f"transformer/config.json has no {name}") from None
            return default.default


@dataclass
class RunState:
    """Facts about a run. The last two numbers are 0 until Trainer.fit prepares it.

    generator: seeded by step and sample before each call of an overridden method.
    """

    train_frames: int
    train_height: int
    train_width: int
    weight_dtype: torch.dtype
    transformer_config: Any  # transformer/config.json, whose keys are attributes, too
    num_trainable_parameters: int = 0
    total_batch_size_count: int = 0
    generator: torch.Generator | None = None


class _Run(cogfast.train.trainer.Trainer):
    """The run. Its loss, batches and encoders are those of `owner`, which users may have overridden."""

    def __init__(self, config: Config, owner: Trainer) -> None:
        self.owner, self.methods = owner, overridden(type(owner), Trainer)
        self._kind = type(owner)
        super().__init__(config, owner._encode_overrides(self.methods))
        if self.evaluator and {"initialize_pipeline", "validation_step"} & self.methods.keys():
            self.evaluator.make_videos = partial(StepVideos, owner)

    def compute_loss(self, batch: dict) -> Tensor:
        # Overridden methods read upstream's keys; cogfast's own loss reads the moments that a cache has.
        if {"compute_loss", "collate_fn"} & self.methods.keys():
            rng = self._random(batch)
            batch = self._of_upstream(batch, rng)
            self.owner.seed_generators(rng, "compute_loss")
        loss: Any = self.owner.compute_loss(batch)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            return loss
        what = f"{type(self.owner).__name__}.compute_loss returned {described(loss)}"
        raise ValueError(f"{what}; return the loss alone, a tensor of one number")

    def _of_upstream(self, batch: dict, rng: SlotRandom) -> dict:
        """Return a batch with upstream's keys, collated. If collate_fn cannot read what belongs to a sample,
        others take the place of the micro-batch."""
        for attempt in itertools.count(1):
            videos = {"videos": batch["mp4"].transpose(1, 2)} if "mp4" in batch else {}
            encoded = self.encoder.encode_batch(batch, rng) | videos
            try:
                return self._collate(encoded, rng) if "collate_fn" in self.methods else encoded
            except BadSample as error:  # of read_video
                if self.batches is None:
                    raise
                batch = self.batches.replaced(batch, error, attempt)
        raise AssertionError("the attempts end with an error of the loader")

    def _collate(self, batch: dict, rng: SlotRandom) -> dict:
        samples = samples_of(batch, len(rng.slots))
        self.owner.seed_generators(rng, "collate_fn")
        what = f"{type(self.owner).__name__}.collate_fn"
        is_loss_own = "compute_loss" in self.methods
        found: Any = None
        bad: BadSample | None = None
        try:
            found = self.owner.collate_fn(samples)
        except BadSample as error:
            bad = error
        # The first of the ranks that share a model decides for all of them.
        agreed = self.groups.broadcast_in_model(bad)
        if agreed is not None:
            raise agreed
        if bad is not None:
            raise ValueError(f"{bad}; another rank of the model has read it") from bad
        found = to_device(check_collated(what, found, samples, is_loss_own), self.groups.device)
        for key, value in found.items():
            if isinstance(value, Tensor):
                found[key] = self.groups.broadcast_tensor_in_model(value)
        return {key: value for key, value in batch.items() if key not in SAMPLE_KEYS} | found


class Trainer:
    """One run. Subclasses may override the methods of OVERRIDABLE (overrides.py); overriding another of
    upstream's methods is a TypeError.

    config: the same run as a configuration of `cogfast train`. dataset, optimizer and lr_scheduler are
    None until `fit`. UNLOAD_LIST has no effect: encoders that are not used are never loaded.
    """

    def __init__(self, args: Args) -> None:
        # A user's script may have configured logging itself.
        if not logging.getLogger("cogfast").handlers:
            start_logging()
        self.args = args
        self.config = translate(args)
        for line in notices(args):
            logger.warning("%s", line)
        facts = _Facts(read_json(Path(self.config.args.load, "transformer", "config.json")))
        self.state = RunState(*args.train_resolution, _DTYPES[args.mixed_precision], facts)
        self.dataset: Any = None
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        self._run: _Run | None = None
        self._encoding: tuple[Encoder, SlotRandom] | None = None  # of the sample that is encoded
        self.accelerator = Accelerator()
        self._has_components = False  # whether load_components was called
        self._components = RunComponents(self, Path(self.config.args.load))
        self._check_methods()

    def __init_subclass__(cls) -> None:
        # A method that silently never runs would cost a whole run; this fails when it is defined.
        for name, reason in _NOT_CALLED.items():
            if name in vars(cls):
                raise TypeError(f"{cls.__name__}.{name} would never be called: {reason}")
        log_misspelt(cls, Trainer, OVERRIDABLE)

    def _check_methods(self) -> None:
        """Raise ValueError for overridden methods that the configuration cannot serve."""
        methods, train = overridden(type(self), Trainer), self.config.run.args
        if train.model_parallel_size * train.context_parallel_size > 1:
            for name, functions in methods.items():
                own = [function for function in functions if isfunction(function)]
                if any("components" in function.__code__.co_names for function in own):
                    what = f"{type(self).__name__}.{name} reads self.components, which"
                    raise ValueError(f"{what} {SHARED_MODEL}")
        self._videos: list[Path] = []  # of the lines of --validation_videos
        videos = self.args.validation_videos
        if videos is None:
            return
        if "validation_step" not in methods:
            text = f"--validation_videos {cut(videos)}: no CogVideoX model here takes a video as its condition"
            raise ValueError(f"{text}; leave it out, or override validation_step")
        if self.args.do_validation:
            assert self.args.validation_dir is not None, "Args asks for it"
            path, number = self.args.validation_dir / videos, len(given_prompts(train))
            self._videos = listed_files("--validation_videos", path, "video", number)

    @property
    def components(self) -> RunComponents:
        """transformer, vae, text_encoder, tokenizer, scheduler and pipeline_cls, as upstream's methods use them."""
        if not self._has_components:
            self._has_components = True  # first: load_components may read them
            self._components.take(self.load_components(), f"{type(self).__name__}.load_components")
        return self._components

    def load_components(self) -> Any:
        """Return the components. An override may replace scheduler, tokenizer and pipeline_cls."""
        return self._components

    def initialize_pipeline(self) -> Any:
        """Return the pipeline that validation_step gets."""
        parts = self.components
        names = ("tokenizer", "text_encoder", "vae", "transformer", "scheduler")
        pipe = parts.pipeline_cls(**{name: getattr(parts, name) for name in names})
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def validation_step(self, eval_data: dict[str, Any], pipe: Any) -> list[tuple[str, Any]]:
        """Return the video of a prompt as ("video", PIL images).

        eval_data: "prompt", "image" (a PIL image or None) and "video" (PIL images of a line of
        --validation_videos, or None).
        """
        given = {"prompt": eval_data["prompt"], "num_frames": self.state.train_frames}
        given |= {"height": self.state.train_height, "width": self.state.train_width}
        given["max_sequence_length"] = self.state.transformer_config.max_text_seq_length
        if eval_data["image"] is not None:
            given["image"] = eval_data["image"]
        return [("video", pipe(**given, generator=self.state.generator).frames[0])]

    def validation_video(self, index: int) -> Tensor | None:
        """Read the clip [3, F, H, W] in [-1, 1] of a line of --validation_videos; None without them."""
        return self.read_video(self._videos[index])[0] if self._videos else None

    def read_video(self, path: str | Path) -> Tensor:
        """Read a file as the clips of the data are read: [1, 3, F, H, W] in [-1, 1], on the CPU.

        The last frame of a shorter one is repeated.
        """
        dataset: Any = self._prepare().datasets.train
        settings = replace(dataset.settings, short_clips="pad")
        with on_readers_device(settings.video_backend):
            clip, _ = read_clip(str(path), settings)
        return in_unit_range(clip.cpu()).transpose(0, 1)[None]

    def prepare_rotary_positional_embeddings(
        self, height: int, width: int, num_frames: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor] | None:
        """Return the network's rotary tables of a video of num_frames latent frames and height x width
        pixels, cosines and sines [V, D]; None for a model without them. Upstream's other arguments, such
        as transformer_config, are known here."""
        transformer = self._prepare().engine.transformer
        patch = transformer.patch_size
        rows, columns = (side // SPATIAL_COMPRESSION for side in (height, width))
        grid = TokenGrid(-(-num_frames // patch.t), rows // patch.h, columns // patch.w)
        rotation = transformer.rotary and transformer.rotary(grid)
        return None if rotation is None else rotary_tables(rotation)

    def seed_generators(self, rng: SlotRandom, purpose: str) -> None:
        """Seed what a method may draw from, so that a resumed run draws the same."""
        rng.seed_generators(purpose)
        if self.state.generator is None:
            self.state.generator = torch.Generator(rng.device)
        self.state.generator.manual_seed(torch.initial_seed())

    def is_in_step(self) -> bool:
        """Return whether a training step runs, and no encoding or validation."""
        run = self._run
        return run is not None and self._encoding is None and run.engine.transformer.training

    def fit(self) -> None:
        """Prepare the run, and train to its end or until a signal asks to stop."""
        check_ranks()
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
        return cogfast.train.trainer.Trainer.compute_loss(self._prepare(), batch)

    def collate_fn(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Stack samples to the batch of `compute_loss`.

        samples: {"encoded_video": [C, T, h, w], "prompt_embedding": [L, E], "video_metadata", "path",
        "prompt"}, for image-to-video "image": [3, H, W] in [-1, 1], and without a latent cache "video":
        [3, F, H, W] in [-1, 1], on the CPU.
        """
        keys = [(key, name) for key, name in SAMPLE_KEYS.items() if name in samples[0]]
        return {key: torch.stack([sample[name] for sample in samples]) for key, name in keys}

    def encode_video(self, video: Tensor) -> Tensor:
        """Encode clips [B, 3, F, H, W] in [-1, 1] to scaled latents [B, C, T, h, w] in float32."""
        encoder, rng = self._encoder()
        purpose = "first_stage"
        if self._encoding is None:
            # Each call of a method that is seeded has draws of its own: those of a clip's latents must
            # not be those of a second clip's.
            purpose = f"encode_video {torch.randint(2**31, ()).item()}"  # sync: none, on the CPU
            rng = replace(rng, slots=range(len(video)))
        return encoder.encode_video(video.to(rng.device), rng, purpose)

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
        params = self.config.model.network_config.params
        network = TransformerConfig(**transformer_arguments(params))
        is_cached = self.config.args.latent_cache is not None

        def encode(name: str, encoder: Encoder, rng: SlotRandom, sample: Any) -> Tensor:
            shape = (1, network.text_length, network.text_hidden_size)
            if name == "encode_video":
                frames, *sides = sample.shape[2:]
                rows, columns = (side // SPATIAL_COMPRESSION for side in sides)
                shape = (1, network.out_channels, num_latent_frames(frames), rows, columns)
            self._encoding = encoder, rng
            self.seed_generators(rng, name)
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
            if self._encoding is not None:
                text = "encode_video and encode_text run before the network is built"
                raise ValueError(f"{text}; use it in compute_loss or validation_step")
            _ = self.components  # a mistake in load_components ends the run here
            run = self._run = _Run(self.config, self)
            self.dataset, self.optimizer = run.datasets.train, run.engine.optimizer
            # A method of PyTorch's schedulers; between two steps, the rate is that of the next step.
            rate = lambda: [run.learning_rate(run.step)]
            self.lr_scheduler = SimpleNamespace(get_last_lr=rate)
            self.state.num_trainable_parameters = run.parts.model.num_trained
            self.state.total_batch_size_count = run.parts.data.global_batch
            # For the user: nothing reads this file.
            if run.groups.is_main:
                text = json.dumps(shown(self.args.model_dump(mode="json")), indent=2, default=str)
                write_text(run.folder / "args.json", text + "\n")
        return self._run
