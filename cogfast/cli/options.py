"""Parses the command lines of the commands, including SAT's own flags."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import shutil
import sys
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NoReturn

from cogfast.cli import start
from cogfast.config.arguments import TrainArguments
from cogfast.config.json_files import MOST_BYTES, read_limited
from cogfast.config.sat_unused import UNUSED
from cogfast.config.values import counted, nearest
from cogfast.model.weights.formats.checkpoint_manifest import run_of, trained_settings
from cogfast.sample.flags import SamplingFlags
from cogfast.sample.prompt_files import split_prompts, utf8_lines

# SAT's flags without a value, in addition to the boolean fields of TrainArguments.
_SWITCHES = (
    "no_load_rng",
    "no_save_rng",
    "resume_dataloader",
    "debug",
    "force_pretrain",
    "save_args",
    "batch_from_same_dataset",
    "deepspeed",
    "sdedit",
    "image2video",
    "force_train",
    "force_inference",
)
# SAT's flags that have a legal value here but no field in TrainArguments.
_OTHER_FLAGS = ("sdedit", "iterable_dataset", "deepspeed_config")
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # both spellings are accepted
_RUN_CONFIG = "training_config.yaml"


_MOST_COLUMNS = 135


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The parsed command line, before any file is read."""

    base: list[str]
    overrides: list[str]
    allow_import: list[str]
    dry_run: bool = False
    prompts: list[str] | None = None
    prompt_file: str | None = None
    images: list[str] | None = None
    out: str | None = None
    weights: str | None = None  # run folder to sample from; None: use args.load
    # {section: (values, file)} with which `weights` were trained, in place of `base`
    settings: Mapping[str, tuple[object, str]] = field(default_factory=dict)
    lora: tuple[str, ...] = ()  # PATH or PATH:SCALE
    ema: bool | None = None  # averaged weights; None: those of runs that have any
    sampling: SamplingFlags = SamplingFlags()


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one-line ValueErrors, as all of cogfast's errors are."""

    def error(self, message: str) -> NoReturn:
        text = message
        # argparse lists the unknown options, but does not suggest a known one.
        if message.startswith("unrecognized arguments: -"):
            flag_given = message.split()[2].partition("=")[0]
            # All options have the dashes in common, so that these are not compared.
            known = [flag[2:] for flag in self._option_string_actions if flag.startswith("--")]
            hint = nearest(flag_given.lstrip("-"), known).replace("mean ", "mean --")
            text = f"{self.prog} has no option {flag_given}{hint or '; --help lists the options'}"
        raise ValueError(text)


class _HelpAll(argparse.Action):
    """An option like --help that prints every key of the configuration and ends the command."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from cogfast.cli.option_table import groups, render  # imports torch

        # Wide lines are hard to read; a pipe has no width.
        columns = min(shutil.get_terminal_size((_MOST_COLUMNS, 24)).columns, _MOST_COLUMNS)
        for line in render(groups()).replace("`", "").splitlines():
            indent = "    " if line.startswith("- ") else ""
            wrapped = textwrap.wrap(line, columns, subsequent_indent=indent, break_on_hyphens=False)
            sys.stdout.write("\n".join(wrapped) + "\n")
        parser.exit()


def parse_train(argv: Sequence[str]) -> Request:
    parser = _new_parser("train", "Train a CogVideoX transformer.")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the merged configuration and stop"
    )
    shown = {
        "seed": "same as args.seed=N",
        "resume": "latest: the newest checkpoint; auto: the same, or a new run if there is none; or "
        "the path of a run or checkpoint",
        "accept_changes": "resume even if keys changed that affect training",
    }
    start.add_options(parser, rank=_number_up_to(int, 4096))
    found, request = _parse_with_base(parser, argv, "args.train_iters=100", shown, "FOLDER")
    base, settings = request.base, start.settings_of(found)
    if not base:
        has_data = any(word.startswith("args.train_data=") for word in request.overrides)
        base, settings = start.find_model(found.folder, settings, has_data, not found.dry_run)
    return dataclasses.replace(request, base=base, dry_run=found.dry_run, settings=settings)


def _parse_with_base(
    parser: Parser, argv: Sequence[str], example: str, shown: Mapping[str, str], model: str = ""
) -> tuple[argparse.Namespace, Request]:
    """Parse the words of a command that needs --base and takes key=value arguments.

    model: metavar of a model's folder, which the command takes in place of --base; "": it takes none.
    """
    text = f"set a key of the configuration, such as {example}"
    text = f"a pipeline's folder or hub id, in place of --base; {text}" if model else text
    metavar = " | ".join(filter(None, (model, "key=value")))
    parser.add_argument("overrides", nargs="*", metavar=metavar, help=text)
    found = _parse_words(parser, argv, shown)
    folders = [word for word in found.overrides if "=" not in word] if model else []
    found.folder = folders[0] if folders else None
    if found.folder is not None:
        if found.base:
            text = f"{folders[0]!r} and --base are both given; give the folder as args.load={folders[0]}"
            raise ValueError(f"{text}, since files go after --base")
        found.overrides.remove(folders[0])
    elif not found.base:
        raise ValueError(
            "--base is missing; give the files of a model and of a run: --base configs/cogvideox_5b.yaml "
            "configs/sft.yaml"
            + (", or a pipeline: cogfast train FOLDER --data PATH" if model else "")
        )
    # `--base a.yaml b.yaml key=value`: nargs="+" also takes the overrides that follow.
    base, moved = _split_overrides(found.base or [])
    for override in found.overrides:
        if "=" not in override:
            raise ValueError(
                f"{override!r} is neither an option nor key=value; files go after --base"
            )
    overrides = _all_overrides(found, [*moved, *found.overrides])
    return found, Request(base=base, overrides=overrides, allow_import=found.allow_import)


def parse_cache(argv: Sequence[str]) -> Request:
    parser = _new_parser(
        "cache", "Encode a run's videos and captions once, into args.latent_cache."
    )
    return _parse_with_base(parser, argv, "args.latent_cache=PATH", {})[1]


def parse_plan(argv: Sequence[str]) -> tuple[Request, str | None, int | None]:
    """Return the run to plan for, the GPU and the number of GPUs."""
    parser = _new_parser(
        "plan", "Predict memory and step time of a run on each GPU, without loading weights."
    )
    text = (
        "h100-80, h200, a100-80, a100-40, l40s, 4090 or another name, or GiB; default: the GPU here"
    )
    parser.add_argument("--gpu", metavar="NAME|GIB", help=text)
    text = "number of GPUs of the run; default: those of this launch"
    parser.add_argument("--gpus", metavar="N", type=_number_up_to(int, 2**20), help=text)
    found, request = _parse_with_base(parser, argv, "args.batch_size=2", {})
    return request, found.gpu, found.gpus


def parse_sample(argv: Sequence[str]) -> Request:
    parser = _new_parser(
        "sample",
        "Generate videos with a run, a model folder (diffusers pipeline), or the weights of args.load.",
    )
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="prompt of a video; may be repeated"
    )
    parser.add_argument("--prompt-file", metavar="FILE", help="text file with a prompt per line")
    parser.add_argument(
        "--image",
        action="append",
        metavar="FILE",
        help="first frame for an image-to-video model; once for all prompts, or once per prompt",
    )
    parser.add_argument(
        "--ema",
        action=argparse.BooleanOptionalAction,
        help="use the averaged (EMA) weights, or not; default: those of FOLDER and of the runs of --lora, "
        "where they have any, and the plain weights of args.load",
    )
    parser.add_argument(
        "--lora",
        action="append",
        metavar="PATH[:SCALE]",
        help="merge adapters, with a strength (default: 1): a LoRA file, a SAT folder or a run; may be "
        "repeated",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the merged configuration and stop"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="output folder, without samples of an earlier call; default: args.output_dir, with a run the "
        "folder samples",
    )
    _add_sampling_flags(parser)
    text = "a run, a model folder or a hub id; key=value sets a key of the configuration"
    parser.add_argument("sources", nargs="*", metavar="FOLDER | key=value", help=text)
    shown = {
        "seed": "seed of the first video; the next ones count up",
        "negative_prompt": "text that guidance leads away from; default: none",
    }
    found = _parse_words(parser, argv, shown)
    base, moved = _split_overrides(found.base or [])
    sources, overrides = _split_overrides(found.sources)
    if len(sources) + bool(base) != 1:
        raise ValueError("give either --base model.yaml inference.yaml or one folder")
    if found.prompt and found.prompt_file:
        raise ValueError("--prompt and --prompt-file are both given; use one")
    if sources and not Path(sources[0]).exists():
        from cogfast.train.preflight.pipeline_folder import hub_folder, is_hub_id

        # A word that is neither a path nor an id is reported below, as a folder that is missing.
        if is_hub_id(sources[0]):
            folder = hub_folder(sources[0], "FOLDER", may_download=not found.dry_run)
            sources = [str(folder)]
    settings = trained_settings(Path(sources[0])) if sources else {}
    run_config = _run_config(Path(sources[0])) if sources and not settings else None
    # Sampling need not use the layout that the run was trained with.
    layout = ("model_parallel_size=1", "context_parallel_size=1", "sequence_parallel=false")
    fitting = [f"args.{word}" for word in layout] if run_config or settings else []
    # Neither a run nor a checkpoint of one: a model folder, with the file of configs/ that fits it.
    if sources and run_config is None and not settings:
        from cogfast.train.preflight.pipeline_folder import find_config

        run_config, values = find_config(Path(sources.pop()))
        fitting = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    return Request(
        base=base or ([] if settings else [str(run_config)]),
        settings=settings,
        overrides=[*fitting, *_all_overrides(found, [*moved, *overrides])],
        allow_import=found.allow_import,
        dry_run=found.dry_run,
        prompts=found.prompt,
        prompt_file=found.prompt_file,
        images=found.image,
        out=found.out,
        weights=sources[0] if sources else None,
        ema=found.ema,
        lora=tuple(found.lora or ()),
        sampling=SamplingFlags(
            **{one.name: getattr(found, one.name) for one in fields(SamplingFlags)}
        ),
    )


def _add_sampling_flags(parser: Parser) -> None:
    """Add the options that stand for keys of the configuration, those of `args` with the key's `dest`."""
    own = "; default: the configuration's"
    count, number = _number_up_to(int, 10**5), _number_up_to(int, 1000)
    for name, key, metavar, kind, text in (
        ("steps", "", "N", number, "sampling steps" + own),
        ("guidance", "", "X", _number_up_to(float, 1000), "guidance scale; 1: no guidance" + own),
        ("frames", "", "N", count, "number of frames: 8k+1" + own),
        ("num_videos", "", "N", count, "videos per prompt, each with a different seed; default: 1"),
        ("size", "sampling_image_size", "HxW", _size, "rows and columns, such as 480x720" + own),
        ("fps", "sampling_fps", "N", number, "frames per second of the video files" + own),
    ):
        flag, target = f"--{name.replace('_', '-')}", f"args.{key}" if key else name
        parser.add_argument(flag, dest=target, metavar=metavar, type=kind, help=text)


def _number_up_to(kind: type[int] | type[float], most: int) -> Callable[[str], float]:
    """Return a function that reads a number from 1 to `most`."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not 1 <= value <= most:  # true for nan
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text[:80]!r} must be {what} from 1 to {most}")
        return value

    return read


def _size(text: str) -> str:
    # Rows first, as in data.params.video_size.
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r} must be rows x columns in pixels, such as 480x720"
        )
    return f"[{match[1]},{match[2]}]"


def read_prompts(request: Request, args: typing.Any) -> tuple[list[str], list[Path | None]]:
    """Return prompts and first frames from the command line, standard input or args.input_file.

    A line of a file may be prompt@@image, as in SAT.
    """
    if request.prompts is not None:
        key, lines = "--prompt", request.prompts
    elif request.prompt_file is None and args.input_type == "cli":
        key, lines = "standard input", utf8_lines(sys.stdin.buffer.read(), "standard input")
    else:
        file = request.prompt_file or args.input_file
        key = "--prompt-file" if request.prompt_file else "args.input_file"
        if not os.path.isfile(file):
            problem = "is a folder" if os.path.isdir(file) else "no such file"
            raise ValueError(f"{key}={file}: {problem}; give --prompt TEXT or a file of prompts")
        text = read_limited(file, MOST_BYTES, "give --prompt TEXT or a file of prompts")
        key = f"{key}={file}"
        lines = utf8_lines(text, key)
    # Blank lines of a file are skipped; an empty --prompt is a prompt.
    pairs = split_prompts([line for line in lines if line.strip() or request.prompts], key)
    if not pairs:
        raise ValueError(f"{key}: there is no prompt; give --prompt TEXT or a file of prompts")
    prompts = [prompt for prompt, _ in pairs]
    names = request.images if request.images is not None else [image for _, image in pairs]
    if len(names) not in (1, len(prompts)):
        raise ValueError(
            f"--image names {counted(len(names), 'image')} for {counted(len(prompts), 'prompt')}; give "
            "one image for all prompts, or one for each"
        )
    images = [Path(name) if name else None for name in names] * (len(prompts) // len(names))
    for image in images:
        if image is not None and not os.path.isfile(image):
            raise ValueError(f"--image {str(image)[:200]}: no such file; correct the path")
    return prompts, images


def _new_parser(command: str, what: str) -> Parser:
    more = (
        "Each key of args is an option, too, as in SAT: --train-iters 100 is args.train_iters=100."
    )
    parser = Parser(prog=f"cogfast {command}", description=what, epilog=more, allow_abbrev=False)
    parser.add_argument(
        "--base",
        nargs="+",
        action="extend",
        metavar="YAML",
        help="configuration files; a key in a later file replaces that in an earlier one",
    )
    parser.add_argument(
        "--allow-import",
        action="append",
        default=[],
        metavar="PKG",
        help="allow `target` in the configuration to name classes of this package, which is installed or "
        "on PYTHONPATH; may be repeated",
    )
    parser.add_argument(
        "--traceback", action="store_true", help="print the Python traceback of an error"
    )
    parser.add_argument(
        "--help-all",
        action=_HelpAll,
        nargs=0,
        help="list all keys that key=value can set, and stop",
    )
    return parser


def _parse_words(
    parser: Parser, argv: Sequence[str], shown: Mapping[str, str]
) -> argparse.Namespace:
    """Add every key of `args` as a flag, as SAT does, and parse.

    shown: {key: what the help says of it}; the help hides the others.
    """
    hints = typing.get_type_hints(TrainArguments)
    unused = [key.removeprefix("args.") for key in UNUSED if key.startswith("args.")]
    for name in [f.name for f in fields(TrainArguments)] + unused + list(_OTHER_FLAGS):
        # Both --train-iters and --train_iters; a name of one word has one spelling.
        flags = dict.fromkeys([f"--{name.replace('_', '-')}", f"--{name}"])
        help_text = shown.get(name, argparse.SUPPRESS)
        options: dict[str, typing.Any] = {"help": help_text, "dest": f"args.{name}"}
        kinds = typing.get_args(hints.get(name)) or (hints.get(name),)
        # SAT's switches have no value: the flag alone means true.
        if name in _SWITCHES or bool in kinds:
            options |= {"action": "store_const", "const": True}
        elif typing.get_origin(hints.get(name)) is list or any(
            typing.get_origin(kind) is list for kind in kinds
        ):
            options["nargs"] = "*"
        elif name in shown:
            options["metavar"] = "VALUE"
        parser.add_argument(*flags, **options)
    # Intermixed: overrides may stand before, between and after the options.
    return parser.parse_intermixed_args(list(argv))


def _all_overrides(found: argparse.Namespace, words: Sequence[str]) -> list[str]:
    """Return SAT's flags as key=value overrides, then `words`. ValueError if both set one key."""
    flags, moved = _flag_overrides(found)
    words = [*moved, *words]
    by_words = {word.partition("=")[0] for word in words}
    for key in (flag.partition("=")[0] for flag in flags):
        if key in by_words:
            name = f"--{key.removeprefix('args.')}"
            raise ValueError(f"{name} and {key} on the command line set the same; keep one")
    return [*flags, *words]


def _flag_overrides(found: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return SAT's flags as key=value overrides.

    A flag with a list value also takes the key=value arguments behind it, which are returned too.
    """
    hints = typing.get_type_hints(TrainArguments)
    values = vars(found)
    behind: list[str] = []
    overrides: list[str] = []
    for key, value in values.items():
        # A flag that is left out sets nothing, so that it does not overwrite a file's value.
        if not key.startswith("args.") or value is None:
            continue
        kinds = typing.get_args(hints.get(key[5:])) or (hints.get(key[5:]),)
        if isinstance(value, list):
            value, moved = _split_overrides(value)
            is_text = str in kinds
            items = [json.dumps(v, ensure_ascii=False) if is_text else v for v in value]
            overrides.append(f"{key}=[{', '.join(items)}]")
            behind += moved
        elif isinstance(value, str) and (str in kinds or key[5:] not in hints):
            # Quoted: overrides are parsed as YAML, which would read a name such as 007 as a number.
            overrides.append(f"{key}={json.dumps(value, ensure_ascii=False)}")
        else:
            overrides.append(f"{key}={str(value).lower() if value is True else value}")
    return overrides, behind


def _split_overrides(items: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a list from argparse into names of files or folders, and key=value overrides."""
    # A file name may contain "=".
    is_override = [("=" in item and not os.path.exists(item)) for item in items]
    # Both keep their order: a later override of one key wins.
    names = [item for item, is_one in zip(items, is_override, strict=True) if not is_one]
    return names, [item for item, is_one in zip(items, is_override, strict=True) if is_one]


def _run_config(folder: Path) -> Path | None:
    """Find the configuration of a run or of a checkpoint's run; None if `folder` is neither."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    # A checkpoint has its run's configuration, in the folder of the run.
    places = (folder / _RUN_CONFIG, run_of(folder) / _RUN_CONFIG)
    return next((path for path in places if path.is_file()), None)


def parse_doctor(argv: Sequence[str]) -> tuple[Path, bool, bool]:
    """Return the folder of the runs, and whether to compile the C++ kernels and to write JSON."""
    parser = Parser(
        prog="cogfast doctor",
        description="List what this machine has and lacks for training, what each gap costs, and the "
        "command that closes it. The exit status is 1 if training cannot work.",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="where runs will be written; default: the current folder",
    )
    parser.add_argument(
        "--build-kernels",
        action="store_true",
        help="compile the C++ kernels of training on a CPU now, instead of at the first run",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for reports of errors")
    found = parser.parse_args([*argv])
    return found.folder, found.build_kernels, found.json


def parse_report(argv: Sequence[str]) -> tuple[list[Path], Path | None]:
    """Return the folders of the runs, and the file to write; None: the default."""
    parser = Parser(
        prog="cogfast report",
        description="Write the page of a run again: index.html in its folder. With several runs, "
        "write one page that compares them.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the page; default: RUN/index.html, or report.html for several runs",
    )
    found = parser.parse_args([*argv])
    return found.runs, found.out


def parse_publish(argv: Sequence[str]) -> tuple[Path, str, bool]:
    """Return the run, the repository, and whether only to write its files."""
    parser = Parser(
        prog="cogfast publish",
        description="Upload a run to the Hugging Face hub: its weights for diffusers, a model card and four "
        "videos of its last evaluation. Captions and paths of the data stay here.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run or one of its checkpoints")
    parser.add_argument(
        "repo", metavar="OWNER/NAME", help="the repository; created if it is missing"
    )
    text = "write the files to RUN/hub and upload nothing"
    parser.add_argument("--dry-run", action="store_true", help=text)
    found = parser.parse_args([*argv])
    return found.run, found.repo, found.dry_run


def parse_convert(argv: Sequence[str]) -> dict[str, typing.Any]:
    """Parse `cogfast convert` into the arguments of cogfast.model.weights.convert.convert."""
    parser = Parser(
        prog="cogfast convert",
        allow_abbrev=False,
        description="Convert weights from one format to another. The format of SRC is detected: a SAT "
        "folder or .pt file, a diffusers pipeline or transformer folder, a LoRA file, a run of cogfast or "
        "one of its checkpoints, or a VAE (SAT's 3d-vae.pt, diffusers' vae folder).",
    )
    parser.add_argument("src", metavar="SRC", help="the weights to convert")
    parser.add_argument("dst", metavar="DST", help="a folder that does not exist yet")
    parser.add_argument(
        "--to",
        required=True,
        choices=("sat", "diffusers", "peft"),
        help="format of DST; peft: adapters alone, as a LoRA file",
    )
    parser.add_argument("--ema", action="store_true", help="convert the averaged (EMA) weights")
    parser.add_argument(
        "--merge-lora",
        nargs="?",
        const="",
        metavar="LORA",
        help="merge these adapters into the weights; without LORA: SRC's own adapters",
    )
    parser.add_argument(
        "--add-lora",
        metavar="LORA",
        help="keep these adapters separate beside SRC's weights, as in SAT's LoRA checkpoints",
    )
    parser.add_argument(
        "--lora-alpha",
        type=float,
        metavar="X",
        help="alpha used in training, for files that do not store it (SAT: 1 unless configured; "
        "CogVideo's diffusers trainer: 64)",
    )
    parser.add_argument(
        "--model-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="number of mp_rank files to write (--to sat)",
    )
    parser.add_argument(
        "--dtype",
        type=lambda name: _DTYPES.get(name, name),
        choices=tuple(_DTYPES.values()),
        metavar="{fp32,fp16,bf16}",
        help="dtype of the written weights; default: that of the source",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read the written weights back and compare each tensor with the source's",
    )
    parser.add_argument(
        "--allow-unexpected", action="store_true", help="leave out tensors with unknown names"
    )
    parser.add_argument(
        "--scaling-factor",
        type=float,
        default=None,
        metavar="X",
        help="scaling_factor in the diffusers config of a VAE: 1.15258426 for 2B, 0.7 (default) else",
    )
    parser.add_argument(
        "--traceback", action="store_true", help="print the Python traceback of an error"
    )
    found = vars(parser.parse_args(list(argv)))
    del found["traceback"]
    return found
