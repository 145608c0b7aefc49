"""The arguments of CogVideo's diffusers trainer: its names, types and defaults, checked by cogfast.

Imports no torch, so that `cogfast finetune --help` answers at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

from cogfast.cli.options import Parser
from cogfast.schema.arguments import DiffusersSchedule, TrainArguments
from cogfast.schema.json_files import Range
from cogfast.schema.values import cut, describe_type, fits, printable, show

Count = Annotated[int, Range(1, 10**9)]
Positive = Annotated[float, Range(0, 10**6)]
Decay = Annotated[float, Range(0, 0.999999)]  # of a moment: 1 would divide by 0
# Value that both train_ddp scripts of CogVideo pass as shipped.
PLACEHOLDER = "/absolute/path/to/checkpoint_dir"
_REQUIRED_IN_SHELL = ("training_type", "output_dir")  # as upstream's parser has it
_OWN = "Only in cogfast"


def _option(group: str, text: str, default: Any = MISSING, factory: Any = MISSING) -> Any:
    metadata = {"group": group, "help": text}
    return dataclasses.field(default=default, default_factory=factory, metadata=metadata)


_model, _output, _data = (
    partial(_option, "Model"),
    partial(_option, "Output"),
    partial(_option, "Data"),
)
_train, _system = partial(_option, "Training"), partial(_option, "System")
_save, _lora, _valid = (
    partial(_option, "Checkpoints"),
    partial(_option, "LoRA"),
    partial(_option, "Validation"),
)
_own = partial(_option, _OWN)


def _dated_folder() -> Path:
    return Path(f"train_results/{datetime.now():%Y-%m-%d-%H-%M-%S}")


@dataclass(frozen=True, kw_only=True)
class Args:
    """One run's arguments, checked when they are built.

    Values may be text, as on a command line. Raises ValueError with option, value, rule and fix.
    """

    model_path: Path = _model("folder or hub id of a diffusers pipeline")
    model_name: str = _model("cogvideox-t2v, cogvideox-i2v, cogvideox1.5-t2v or cogvideox1.5-i2v")
    model_type: Literal["i2v", "t2v"] = _model("i2v (image-to-video) or t2v (text-to-video)")
    training_type: Literal["lora", "sft"] = _model("lora (adapters) or sft (all weights)", "lora")

    output_dir: Path = _output("folder of the run", factory=_dated_folder)
    report_to: Literal["tensorboard", "wandb", "all"] | None = _output(
        "tensorboard, wandb or all; TensorBoard files are always written", None
    )
    tracker_name: str = _output("project name in Weights & Biases", "finetrainer-cogvideo")

    data_root: Path = _data("folder of the training data")
    caption_column: Path = _data("file in data_root with a caption per line")
    video_column: Path = _data(
        "file with the path of a video per line; if equal to caption_column: a metadata file with both"
    )
    image_column: Path | None = _data(
        "file with the path of a first frame per line; default: the first frames of the videos",
        None,
    )
    train_resolution: tuple[Count, Count, Count] = _data(
        "frames x height x width, such as 49x480x720"
    )
    num_workers: Annotated[int, Range(0, 256)] = _data("processes per rank that read videos", 8)
    pin_memory: bool = _data("no effect: batches for a GPU are always pinned", True)

    seed: Annotated[int, Range(-(2**62), 2**62)] | None = _train("seed of data order and noise", 42)
    train_epochs: Count = _train("passes over the data; train_steps replaces it", 10)
    train_steps: Count | None = _train("optimizer steps", None)
    batch_size: Count = _train("samples per rank and micro-batch", 1)
    gradient_accumulation_steps: Count = _train("micro-batches per step", 1)
    mixed_precision: Literal["no", "fp16", "bf16"] = _train(
        "no (float32), fp16 or bf16 weights and activations; optimizer state is float32", "no"
    )
    learning_rate: Positive = _train("peak learning rate", 2e-5)
    optimizer: str = _train("adamw or adam", "adamw")
    beta1: Decay = _train("decay of the first moment", 0.9)
    beta2: Decay = _train("decay of the second moment", 0.95)
    beta3: Decay = _train("no effect: adamw and adam have two betas", 0.98)
    epsilon: Positive = _train("Adam's epsilon, added to the denominator", 1e-8)
    weight_decay: Positive = _train("weight decay, without norms and biases", 1e-4)
    max_grad_norm: Positive = _train("largest norm of a step's gradients; 0: not clipped", 1.0)
    lr_scheduler: DiffusersSchedule = _train(
        "constant, constant_with_warmup, linear, cosine, cosine_with_restarts or polynomial",
        "constant_with_warmup",
    )
    lr_warmup_steps: Annotated[int, Range(0, 10**9)] = _train("steps of linear warm-up", 100)
    lr_num_cycles: Count = _train("restarts of cosine_with_restarts", 1)
    lr_power: Positive = _train("exponent of polynomial", 1.0)

    gradient_checkpointing: bool = _system(
        "recompute activations that do not fit into memory", True
    )
    enable_slicing: bool = _system("encode and decode one video at a time", True)
    enable_tiling: bool = _system(
        "encode whole videos, 8 frames at a time or in tiles, whichever fits first; false: 8 frames",
        True,
    )
    nccl_timeout: Count = _system("seconds that a rank waits for another one in a collective", 1800)

    checkpointing_steps: Count = _save("steps between checkpoints", 200)
    checkpointing_limit: Count = _save("number of latest checkpoints to keep", 10)
    resume_from_checkpoint: Path | None = _save("latest, a checkpoint or a run's folder", None)

    rank: Annotated[int, Range(1, 2**15)] = _lora("rank of the adapters", 128)
    lora_alpha: Annotated[int, Range(1, 10**6)] = _lora("adapters are scaled by alpha / rank", 64)
    target_modules: list[str] = _lora(
        "linear layers that get adapters", factory=lambda: ["to_q", "to_k", "to_v", "to_out.0"]
    )

    do_validation: bool = _valid("sample videos during training and at the end", False)
    validation_steps: Count | None = _valid(
        "steps between validations; do_validation needs it", None
    )
    validation_dir: Path | None = _valid(
        "folder of the following files; do_validation needs it", None
    )
    validation_prompts: str | None = _valid(
        "file with a prompt per line; do_validation needs it", None
    )
    validation_images: str | None = _valid(
        "file with the path of a first frame per line; do_validation of i2v needs it", None
    )
    validation_videos: str | None = _valid("not supported: CogVideoX takes no videos", None)
    gen_fps: Annotated[int, Range(1, 1000)] = _valid("frames per second of sampled videos", 15)

    fps: Annotated[float, Range(0.01, 1000)] | None = _own(
        "read clips at this frame rate; default: spread the frames over the clip", None
    )
    frame_selection: Literal["uniform", "timestamp"] | None = _own(
        "uniform (over the clip) or timestamp; default: timestamp with --fps, else uniform", None
    )
    resize: Literal["crop", "stretch"] = _own(
        "crop what exceeds the shape, or stretch, as CogVideo's trainer does", "crop"
    )
    latent_cache: Path | None = _own(
        "folder of encoded clips; default: data_root/cache/cogfast; none: encode in each step", None
    )
    trust_cache: bool = _own(
        "use the clips and captions that CogVideo's trainer encoded into data_root/cache", False
    )
    export_interval: Count | None = _own(
        "steps between sft checkpoints with a model for diffusers; default: only the last",
        None,
    )
    deepspeed_config: Path | None = _own("file with a DeepSpeed configuration", None)
    overrides: list[str] = _own(
        "set a key of the configuration, such as args.log_interval=1", factory=list
    )
    dry_run: bool = _own("print the configuration with the origin of each value, and stop", False)
    plan: str | None = _own(
        "predict memory and step time on a GPU (h100-80, 4090 or another name, or GiB), and stop",
        None,
    )

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(Args, include_extras=True)
        for field in _fields():
            value = _value(field.name, getattr(self, field.name), hints[field.name])
            # A frozen dataclass allows no other assignment.
            object.__setattr__(self, field.name, value)
        _check_combinations(self)

    @classmethod
    def parse_args(cls, words: Sequence[str] | None = None) -> Args:
        """Parse a command line; None reads sys.argv, as upstream's `parse_args` does."""
        found = vars(_parser().parse_intermixed_args(words))
        # A list takes the key=value words that follow it.
        modules = found.get("target_modules", [])
        found["overrides"] += [word for word in modules if "=" in word]
        if modules:
            found["target_modules"] = [word for word in modules if "=" not in word]
        missing = [f"--{f.name}" for f in _fields() if _is_required(f) and f.name not in found]
        if missing:
            raise ValueError(
                f"cogfast finetune needs {', '.join(missing)}; --help lists all options"
            )
        return cls(**found)

    def model_dump(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in _fields()}


def _fields() -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(Args)


def _is_required(field: dataclasses.Field) -> bool:
    has_default = field.default is not MISSING or field.default_factory is not MISSING
    return field.name in _REQUIRED_IN_SHELL or not has_default


def _value(name: str, value: Any, annotation: Any) -> Any:
    """Return an option's value in its type, from that type or from text."""
    if value is None and fits(None, annotation):
        return None
    # `X | None` as X: None has been handled.
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    if get_origin(annotation) in (Union, UnionType) and len(kinds) == 1:
        annotation = kinds[0]
    kind = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    rule = describe_type(annotation)
    read: Any = value
    # Upstream's option is one text, frames x height x width; callers from Python pass three numbers.
    if name == "train_resolution":
        annotation, kind = tuple[int, int, int], tuple
        rule = "frames x height x width in whole numbers, such as 49x480x720"
        parts = value.split("x") if isinstance(value, str) else value
        if isinstance(parts, list | tuple):
            read = tuple(_number(int, part) for part in parts)
            read = read if all(isinstance(n, int) and 0 < n < 2**16 for n in read) else None
    elif kind is bool and isinstance(value, str):
        read = {"true": True, "false": False}.get(value.lower(), value)
    elif kind in (int, float) and isinstance(value, str):
        read = _number(kind, value)
    elif kind is Path and isinstance(value, Path):
        read = str(value)
    # A zero byte in a path would otherwise fail deep inside the code that opens it.
    if not fits(read, annotation) or "\0" in str(read):
        raise ValueError(f"--{name} {printable(cut(str(value)))}: must be {rule}")
    return Path(read) if kind is Path else read


def _shown(default: Any) -> str:
    if isinstance(default, list):
        return " ".join(default)
    return "not set" if default is None else show(default).strip("'")


def _number(kind: type, text: Any) -> Any:
    try:
        return kind(text) if isinstance(text, str) else text
    except ValueError:  # also for thousands of digits
        return text


def _check_combinations(args: Args) -> None:
    """Raise ValueError for options that need or exclude others, and for words without "="."""
    # argparse collects every word that is no option in `overrides`.
    for word in args.overrides:
        if "=" not in word:
            raise ValueError(
                f"cogfast finetune: {cut(word)!r} is neither an option nor key=value; options begin "
                "with --"
            )
    # Names that users registered may end in anything; those with upstream's endings must agree.
    if args.model_name.endswith(("-t2v", "-i2v")) and args.model_type != args.model_name[-3:]:
        raise ValueError(
            f"--model_type {args.model_type} with --model_name {args.model_name}: the name is one of "
            f"a {args.model_name[-3:]} model; change one of them"
        )
    if args.validation_videos is not None:
        raise ValueError(
            f"--validation_videos {cut(args.validation_videos)}: no CogVideoX model here takes a "
            "video as its condition; leave it out"
        )
    frames, height, width = args.train_resolution
    if frames % 8 != 1 and width % 8 == 1:
        given = f"{frames}x{height}x{width}"
        raise ValueError(
            f"--train_resolution {given}: it is frames x height x width, and {frames} is no number of "
            f"frames (8N+1); did you mean {width}x{frames}x{height}?"
        )
    if args.trust_cache and str(args.latent_cache) == "none":
        raise ValueError(
            "--trust_cache copies entries into the latent cache, but --latent_cache none has none; leave "
            "one of them out"
        )
    if not args.do_validation:
        return
    needed = ["validation_steps", "validation_dir", "validation_prompts"]
    needed += ["validation_images"] * (args.model_type == "i2v")
    for name in needed:
        if getattr(args, name) is None:
            raise ValueError(
                f"--do_validation true needs --{name}; set it, or leave --do_validation out"
            )


class _Parser(Parser):
    def error(self, message: str) -> NoReturn:
        # argparse says "unrecognized arguments: --name=value ..."; other errors have no name.
        name = message.split()[2].partition("=")[0] if message.startswith("unrecog") else ""
        plain = name.lstrip("-").replace("-", "_").lower()
        same = [f.name for f in _fields() if f.name.replace("_", "") == plain.replace("_", "")]
        if same:
            raise ValueError(f"{self.prog} has no option {name}; did you mean --{same[0]}?")
        if plain in {field.name for field in dataclasses.fields(TrainArguments)}:
            raise ValueError(f"{self.prog} has no option {name}; args.{plain}=VALUE sets it")
        super().error(message)


def _parser() -> _Parser:
    parser = _Parser(
        prog="cogfast finetune",
        usage="cogfast finetune --model_path PATH --model_name NAME ... [key=value ...]",
        description="Fine-tune CogVideoX with the arguments of CogVideo's diffusers trainer.",
        formatter_class=partial(argparse.HelpFormatter, max_help_position=44, width=150),
        allow_abbrev=False,
        # Defaults are the dataclass's.
        argument_default=argparse.SUPPRESS,
    )
    hints = typing.get_type_hints(Args)
    groups = {
        name: parser.add_argument_group(name)
        for name in dict.fromkeys(field.metadata["group"] for field in _fields())
    }
    for field in _fields():
        group, kind = field.metadata["group"], hints[field.name]
        if field.name == "overrides":
            groups[group].add_argument(
                field.name, nargs="*", default=[], metavar="key=value", help=field.metadata["help"]
            )
            continue
        options: dict[str, Any] = {"metavar": field.name.rpartition("_")[2].upper()}
        # Upstream's scripts write `--do_validation false`; a bare option means true.
        if kind is bool:
            options = {"nargs": "?", "const": "true", "metavar": "true|false"}
        elif get_origin(kind) is list:
            options = {"nargs": "+", "metavar": ("NAME", "NAME")}
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        shown = "required" if _is_required(field) else _shown(default)
        flags = dict.fromkeys([f"--{field.name}", f"--{field.name.replace('_', '-')}"])
        # Only our own options have both spellings, as in `cogfast train`.
        spellings = list(flags) if group == _OWN else [f"--{field.name}"]
        # argparse formats help texts with %.
        text = f"{field.metadata['help']} [{shown}]".replace("%", "%%")
        groups[group].add_argument(*spellings, help=text, **options)
    return parser
