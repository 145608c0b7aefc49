"""The arguments of CogVideo's diffusers trainer: its names, types and defaults, checked by cogfast.

Imports no torch, so that `cogfast finetune --help` answers at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from cogfast.cli.parser import Parser
from cogfast.core.keys import Count
from cogfast.core.values import Range, cut, json_schema, problem_of, show
from cogfast.train.keys import DiffusersSchedule, TrainKeys

Positive = Annotated[float, Range(0, 10**6)]
Decay = Annotated[float, Range(0, 0.999999)]  # of a moment: 1 would divide by 0
# Value that both train_ddp scripts of CogVideo pass as shipped.
PLACEHOLDER = "/absolute/path/to/checkpoint_dir"
_REQUIRED_IN_SHELL = ("training_type", "output_dir")  # as upstream's parser has it


# First option of each group -> the group's heading in `--help`
_GROUPS = {
    "model_path": "Model",
    "output_dir": "Output",
    "data_root": "Data",
    "seed": "Training",
    "gradient_checkpointing": "System",
    "checkpointing_steps": "Checkpoints",
    "rank": "LoRA",
    "do_validation": "Validation",
    "fps": "Only in cogfast",
}


_Side = Annotated[int, Range(1, 2**16 - 1)]
_Resolution = Annotated[
    tuple[_Side, _Side, _Side],
    # Callers from Python pass three numbers.
    BeforeValidator(lambda value: value.split("x") if isinstance(value, str) else value),
    WithJsonSchema({"format": "frames x height x width in whole numbers, such as 49x480x720"}),
]


class Components(BaseModel):
    """Holds what upstream's load_components returns, as attributes of any name."""

    model_config = ConfigDict(extra="allow")


class Args(BaseModel):
    """One run's arguments, checked when they are built. The fields of a subclass are options, too.

    Values may be text, as on a command line. Raises ValueError with option, value, rule and fix.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    model_path: Path
    """folder or hub id of a diffusers pipeline"""
    model_name: str
    """cogvideox-t2v, cogvideox-i2v, cogvideox1.5-t2v or cogvideox1.5-i2v"""
    model_type: Literal["i2v", "t2v"]
    """i2v (image-to-video) or t2v (text-to-video)"""
    training_type: Literal["lora", "sft"] = "lora"
    """lora (adapters) or sft (all weights)"""
    output_dir: Path = Field(
        default_factory=lambda: Path(f"train_results/{datetime.now():%Y-%m-%d-%H-%M-%S}")
    )
    """folder of the run"""
    report_to: Literal["tensorboard", "wandb", "all"] | None = None
    """tensorboard, wandb or all; TensorBoard files are always written"""
    tracker_name: str = "finetrainer-cogvideo"
    """project name in Weights & Biases"""
    data_root: Path
    """folder of the training data"""
    caption_column: Path
    """file in data_root with a caption per line"""
    video_column: Path
    """file with the path of a video per line; if equal to caption_column: a metadata file with both"""
    image_column: Path | None = None
    """file with the path of a first frame per line; default: the first frames of the videos"""
    train_resolution: _Resolution
    """frames x height x width, such as 49x480x720"""
    num_workers: Annotated[int, Range(0, 256)] = 8
    """processes per rank that read videos"""
    pin_memory: bool = True
    """no effect: batches for a GPU are always pinned"""
    seed: Annotated[int, Range(-(2**62), 2**62)] | None = 42
    """seed of data order and noise"""
    train_epochs: Count = 10
    """passes over the data; train_steps replaces it"""
    train_steps: Count | None = None
    """optimizer steps"""
    batch_size: Count = 1
    """samples per rank and micro-batch"""
    gradient_accumulation_steps: Count = 1
    """micro-batches per step"""
    mixed_precision: Literal["no", "fp16", "bf16"] = "no"
    """no (float32), fp16 or bf16 weights and activations; optimizer state is float32"""
    learning_rate: Positive = 2e-5
    """peak learning rate"""
    optimizer: str = "adamw"
    """adamw, adam or prodigy, whose learning_rate is a factor, usually 1"""
    beta1: Decay = 0.9
    """decay of the first moment"""
    beta2: Decay = 0.95
    """decay of the second moment"""
    beta3: Decay = 0.98
    """prodigy: decay of the sums that it estimates its rate from; adamw and adam have two betas"""
    epsilon: Positive = 1e-8
    """Adam's epsilon, added to the denominator"""
    weight_decay: Positive = 1e-4
    """weight decay, without norms and biases"""
    max_grad_norm: Positive = 1.0
    """largest norm of a step's gradients; 0: not clipped"""
    lr_scheduler: DiffusersSchedule = "constant_with_warmup"
    """constant, constant_with_warmup, linear, cosine, cosine_with_restarts or polynomial"""
    lr_warmup_steps: Annotated[int, Range(0, 10**9)] = 100
    """steps of linear warm-up"""
    lr_num_cycles: Count = 1
    """restarts of cosine_with_restarts"""
    lr_power: Positive = 1.0
    """exponent of polynomial"""
    gradient_checkpointing: bool = True
    """recompute activations that do not fit into memory"""
    enable_slicing: bool = True
    """encode and decode one video at a time"""
    enable_tiling: bool = True
    """encode whole videos, 8 frames at a time or in tiles, whichever fits first; false: 8 frames"""
    nccl_timeout: Count = 1800
    """seconds that a rank waits for another one in a collective"""
    checkpointing_steps: Count = 200
    """steps between checkpoints"""
    checkpointing_limit: Count = 10
    """number of latest checkpoints to keep"""
    resume_from_checkpoint: Path | None = None
    """latest, a checkpoint or a run's folder"""
    rank: Annotated[int, Range(1, 2**15)] = 128
    """rank of the adapters"""
    lora_alpha: Annotated[int, Range(1, 10**6)] = 64
    """adapters are scaled by alpha / rank"""
    target_modules: list[str] = Field(default_factory=lambda: ["to_q", "to_k", "to_v", "to_out.0"])
    """linear layers that get adapters"""
    do_validation: bool = False
    """sample videos during training and at the end"""
    validation_steps: Count | None = None
    """steps between validations; do_validation needs it"""
    validation_dir: Path | None = None
    """folder of the following files; do_validation needs it"""
    validation_prompts: str | None = None
    """file with a prompt per line; do_validation needs it"""
    validation_images: str | None = None
    """file with the path of a first frame per line; do_validation of i2v needs it"""
    validation_videos: str | None = None
    """file with the path of a video per line, for a validation_step of your own"""
    gen_fps: Annotated[int, Range(1, 1000)] = 15
    """frames per second of sampled videos"""
    fps: Annotated[float, Range(0.01, 1000)] | None = None
    """read clips at this frame rate; default: spread the frames over the clip"""
    frame_selection: Literal["uniform", "timestamp"] | None = None
    """uniform (over the clip) or timestamp; default: timestamp with --fps, else uniform"""
    resize: Literal["crop", "stretch"] = "crop"
    """crop what exceeds the shape, or stretch, as CogVideo's trainer does"""
    latent_cache: str | None = None
    """folder or URL of encoded clips; default: data_root/cache/cogfast; none: encode in each step"""
    export_interval: Count | None = None
    """steps between sft checkpoints with a model for diffusers; default: only the last"""
    deepspeed_config: Path | None = None
    """file with a DeepSpeed configuration"""
    overrides: list[str] = Field(default_factory=list)
    """set a key of the configuration, such as args.log_interval=1"""
    dry_run: bool = False
    """print the configuration with the origin of each value, check it, and stop"""
    plan: str | None = None
    """predict memory and step time on a GPU (h100-80, 4090 or another name, or GiB), and stop"""

    def __init__(self, **given: Any) -> None:
        for name, value in given.items():
            field = type(self).model_fields.get(name)
            is_path = field is not None and Path in (field.annotation, *get_args(field.annotation))
            if is_path and ":/" in str(value):  # pathlib shortens ://
                text = "must be a path of this machine; give one, or use cogfast train, which takes addresses"
                raise ValueError(f"--{name} {value}: {text}")
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise problem_of(error, json_schema(type(self)), given, "", is_option=True) from None

    @classmethod
    def parse_args(cls, words: Sequence[str] | None = None) -> Args:
        """Parse a command line; None reads sys.argv, as upstream's `parse_args` does."""
        found = vars(_parser(cls).parse_intermixed_args(words))
        # A list takes the key=value words that follow it.
        modules = found.get("target_modules", [])
        found["overrides"] += [word for word in modules if "=" in word]
        if modules:
            found["target_modules"] = [word for word in modules if "=" not in word]
        if missing := [f"--{name}" for name in _required(cls) if name not in found]:
            text = f"cogfast finetune needs {', '.join(missing)}; --help lists all options"
            raise ValueError(text)
        return cls(**found)

    @model_validator(mode="after")
    def _check(self) -> Args:
        """Raise ValueError for options that need or exclude others, and for words without "="."""
        # argparse collects every word that is no option in `overrides`.
        for word in self.overrides:
            if "=" not in word:
                text = f"cogfast finetune: {cut(word)!r} is neither an option nor key=value; options begin with --"
                raise ValueError(text)
        # Names that users registered may end in anything; those with upstream's endings must agree.
        kind = self.model_name[-3:]
        if self.model_name.endswith(("-t2v", "-i2v")) and self.model_type != kind:
            text = f"--model_type {self.model_type} with --model_name {self.model_name}: "
            raise ValueError(f"{text}the name is one of a {kind} model; change one of them")
        needed = ["validation_steps", "validation_dir", "validation_prompts"]
        needed += ["validation_images"] * (self.model_type == "i2v")
        for name in needed if self.do_validation else ():
            if getattr(self, name) is None:
                text = f"--do_validation true needs --{name}; set it, or leave --do_validation out"
                raise ValueError(text)
        return self


def _required(cls: type[Args]) -> list[str]:
    fields = cls.model_fields.items()
    return [name for name, field in fields if name in _REQUIRED_IN_SHELL or field.is_required()]


class _Parser(Parser):
    def error(self, message: str) -> NoReturn:
        # argparse says "unrecognized arguments: --name=value ..."; other errors have no name.
        name = message.split()[2].partition("=")[0] if message.startswith("unrecog") else ""
        plain = name.lstrip("-").replace("-", "_")
        if plain in TrainKeys.model_fields:
            raise ValueError(f"{self.prog} has no option {name}; args.{plain}=VALUE sets it")
        if plain == "trust_cache":
            raise ValueError(f"{name} was removed: caches of CogVideo's trainer are encoded again")
        super().error(message)


def _parser(cls: type[Args]) -> _Parser:
    parser = _Parser(
        prog="cogfast finetune",
        usage="cogfast finetune --model_path PATH --model_name NAME ... [key=value ...]",
        description="Fine-tune CogVideoX with the arguments of CogVideo's diffusers trainer.",
        formatter_class=partial(argparse.HelpFormatter, max_help_position=44, width=150),
        allow_abbrev=False,
        # Defaults are those of Args.
        argument_default=argparse.SUPPRESS,
    )
    added = [name for name in cls.model_fields if name not in Args.model_fields]
    headings = _GROUPS | dict.fromkeys(added[:1], f"Of {cls.__name__}")
    required = _required(cls)
    group: Any = None
    is_own = False  # from the first option that upstream does not have
    for name, field in cls.model_fields.items():
        if name in headings:
            group, is_own = parser.add_argument_group(headings[name]), is_own or name == "fps"
        kind, text = field.annotation, (field.description or "").replace("\n", " ")
        if name == "overrides":
            group.add_argument(name, nargs="*", default=[], metavar="key=value", help=text)
            continue
        options: dict[str, Any] = {"metavar": name.rpartition("_")[2].upper()}
        # Upstream's scripts write `--do_validation false`; a bare option means true.
        if kind is bool:
            options = {"nargs": "?", "const": "true", "metavar": "true|false"}
        elif get_origin(kind) is list:
            options = {"nargs": "+", "metavar": ("NAME", "NAME")}
        default = field.get_default(call_default_factory=True)
        if name in required:
            shown = "required"
        elif isinstance(default, list):
            shown = " ".join(default)
        else:
            shown = "not set" if default is None else show(default).strip("'")
        # Only our own options have both spellings, as in `cogfast train`.
        spellings = dict.fromkeys([f"--{name}", f"--{name.replace('_', '-') if is_own else name}"])
        # argparse formats help texts with %.
        group.add_argument(*spellings, help=f"{text} [{shown}]".replace("%", "%%"), **options)
    return parser
