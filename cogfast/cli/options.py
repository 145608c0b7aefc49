"""Parses the command lines of the commands that read a configuration, including SAT's own flags, and refuses
words that the command does not read."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import textwrap
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from importlib import metadata
from itertools import filterfalse
from pathlib import Path

from cogfast.cli.parser import RUN_CONFIG, Parser, check_run, local_path, number_up_to, refuse_cut
from cogfast.config.sat_unused import POSITION_KEY, Unused, rules
from cogfast.core.addresses import is_hub_id
from cogfast.core.files import read_limited
from cogfast.core.keys import COMMAND_LINE, DEFAULT, Given, find_origin, level
from cogfast.core.values import nearest_folder
from cogfast.extensions.stores.mirror import copy_of
from cogfast.extensions.stores.weight_addresses import weight_addresses
from cogfast.model.weights.checkpoint_manifest import run_of, trained_settings
from cogfast.train.keys import GROUPS, TrainKeys

# SAT's flags without a value, in addition to the boolean fields of TrainKeys.
_SWITCHES = ("no_load_rng", "no_save_rng", "resume_dataloader", "debug", "force_pretrain")
_SWITCHES += ("save_args", "batch_from_same_dataset", "deepspeed", "sdedit", "image2video")
# SAT's flags that have a legal value here but no field in TrainKeys.
_OTHER_FLAGS = ("sdedit", "iterable_dataset", "deepspeed_config")
_MOST_COLUMNS = 135
# Keys of args that the file of a run to resume or sample does not set: what is run, published, written and
# removed elsewhere, read as prompts, and of one start. The run continues in its folder, wherever that is now.
_OF_CALLER = ("eval_command", "push_to_hub", "encode_first", "local_cache", "output_dir")
_OF_CALLER += ("input_type", "input_file", "run_folder", "accept_changes")
_OF_SAMPLING = ("output_dir", "input_type", "input_file", "force_inference", "only_save_latents")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The parsed command line, before any file is read."""

    base: list[str]
    overrides: list[str]
    allow_import: list[str]
    dry_run: bool = False
    prompts: list[str] | None = None
    prompt_file: str | None = None
    # {option that gives a condition: its files}
    inputs: Mapping[str, list[str]] = field(default_factory=dict)
    tensors: Sequence[str] = ()  # NAME=FILE
    out: str | None = None
    weights: str | None = None  # run folder to sample from; None: use args.load
    # {section: (values, file)} with which `weights` were trained, in place of `base`
    settings: Given = field(default_factory=dict)
    lora: Sequence[str] = ()  # PATH or PATH:SCALE
    ema: bool | None = None  # averaged weights; None: those of runs that have any
    sampling: typing.Any = None  # SamplingFlags


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
    text = "print the merged configuration, check it, and stop"
    parser.add_argument("--dry-run", action="store_true", help=text)
    shown = {
        "seed": "same as args.seed=N",
        "resume": "latest: the newest checkpoint; auto: the same, or a new run if there is none; or "
        "the path or address of a run or checkpoint",
        "accept_changes": "resume even if keys changed that affect training",
    }
    found, request = _parse_run(parser, argv, "args.train_iters=100", shown)
    return replace(request, dry_run=found.dry_run)


def _parse_run(
    parser: Parser, argv: Sequence[str], example: str, shown: Mapping[str, str]
) -> tuple[argparse.Namespace, Request]:
    """Parse the words of a command about a run: a model's folder or --base, and key=value."""
    text = "videos to train on, a path or an address such as s3://bucket/clips, in any layout of docs/data.md; may be repeated"
    parser.add_argument("--data", action="append", metavar="PATH", help=text)
    text = "train LoRA adapters of this rank; without it, all weights"
    parser.add_argument("--lora", type=number_up_to(int, 4096), metavar="RANK", help=text)
    text = "folder or address in which cogfast train creates the run's folder; default: runs"
    parser.add_argument("--out", metavar="DIR", help=text)
    text = "a pipeline's folder, address or hub id, in place of --base; set a key of the configuration, such as "
    parser.add_argument("words", nargs="*", metavar="FOLDER | key=value", help=text + example)
    found = _parse_words(parser, argv, shown)
    # `--base a.yaml b.yaml key=value`: nargs="+" also takes the overrides that follow.
    base, moved = _split_overrides(found.base or [])
    names, overrides = _split_overrides(found.words)
    others = [word for word in base if not word.endswith((".yaml", ".yml"))]
    refuse_cut(argv, [word for word in others + names if not os.path.exists(word)])
    is_model = [os.path.isfile(os.path.join(name, "model_index.json")) for name in names]
    model = names.pop(is_model.index(True) if any(is_model) else 0) if names else None
    example = f"{parser.prog} {model or ('--base ...' if base else 'FOLDER')} --data"
    for word in [*names, *filter(os.path.isdir, others)]:
        if os.path.exists(word):
            before = "".join(f" {source} --data" for source in found.data or [])
            raise ValueError(f"--data is missing before {word!r}; write {example}{before} {word}")
        text = f"{word!r} is neither an option nor key=value; files go after --base"
        raise ValueError(f"{text}, and videos after --data")
    given = (("train_data", found.data, "--data"), ("lora_rank", found.lora, "--lora"))
    given += (("save", found.out, "--out"),)
    settings = {f"args.{key}": (value, name) for key, value, name in given if value is not None}
    overrides = _all_overrides(found, [*moved, *overrides], settings)
    runs = [word.partition("=")[2] for word in overrides if word.startswith("args.resume=")]
    run = json.loads(runs[-1]) if runs and runs[-1].startswith('"') else "".join(runs[-1:])
    is_run = run not in ("", "auto", "latest", "null") and "://" not in run
    if model is None and not base and is_run:  # the run has its configuration
        if not (stored := trained_settings(Path(run))):
            check_run(parser.prog, argv, [run])
            raise ValueError(f"args.resume={run} is not a run or checkpoint; set it to its folder")
        settings = stored | _of_caller(stored, parser.prog.endswith("cache")) | settings
    elif model is None and not base:
        text = f"--resume {run} takes the whole command of the run; " * (run not in ("", "null"))
        text += "--base is missing; give the files of a model and of a run: --base configs/cogvideox_5b.yaml "
        raise ValueError(f"{text}configs/sft.yaml, or a pipeline: {example} PATH")
    if model is not None:
        _refuse_second_load(model, overrides)
        # A plan reads no data and no weights, and a dry run should not take long.
        is_plan = parser.prog.endswith("plan")
        keys = [word.partition("=")[0] for word in overrides]
        has_data = is_plan or "args.train_data" in keys
        is_read = not (is_plan or "args.latent_cache" in keys)
        may_download = not (is_plan or getattr(found, "dry_run", False))
        files, settings = _find_model(model, settings, has_data, may_download, is_read)
        base = [*files, *base]  # the user's own files count more
    allowed = found.allow_import
    return found, Request(base=base, overrides=overrides, allow_import=allowed, settings=settings)


def _find_model(
    folder: str, settings: Given, has_data: bool, may_download: bool, is_read: bool
) -> tuple[list[str], Given]:
    """Return the packaged files for a model's folder, and `settings` with the keys that fit them to it.

    folder: a diffusers pipeline, its id on the hub, or a folder of SAT's. has_data: args.train_data is
    set elsewhere. is_read: all weights of a pipeline are needed.
    """
    from cogfast.extensions.pipeline_folder import pipeline_folder

    folder = copy_of(folder, may_download=may_download)
    path = Path(folder)
    if is_hub_id(folder):
        path = pipeline_folder.hub_folder(folder, "FOLDER", may_download)
    if not path.is_dir():
        text = f"{folder}: no such folder; give the folder of a CogVideoX pipeline"
        text += f", or its id on the hub{'; a file goes after --base' if path.is_file() else nearest_folder(path)}"
        raise ValueError(text)
    if (path / "training_config.yaml").is_file():
        text = f"is a run; train on with --resume {folder} alone, or give --base"
        raise ValueError(f"{folder}: {text} {folder}/training_config.yaml args.load={folder}")
    if not any((path / name).is_file() for name in ("model_index.json", "latest")):
        text = f"{folder}: has no model_index.json; give the folder of a CogVideoX pipeline of diffusers"
        raise ValueError(f"{text}, or SAT's transformer folder")
    if not has_data and "args.train_data" not in settings:
        raise ValueError("--data is missing; give the folder of your videos: --data my_videos")
    is_pipeline = is_read and (path / "model_index.json").is_file()
    if is_pipeline and (lacking := pipeline_folder.missing_file(path)):
        text = f"{folder}: has no {lacking}, as after a download that was interrupted"
        raise ValueError(f"{text}; repeat it: hf download OWNER/MODEL --local-dir {folder}")
    model, values = pipeline_folder.find_config(path)
    if "args.lora_rank" in settings:
        values["args.experiment_name"] = "lora"
    # Training has whole-numbered positions, as both upstream trainers.
    values.pop(f"{POSITION_KEY}.positions", None)
    values["args.mode"] = "finetune"
    names = [*(["lora.yaml"] if "args.lora_rank" in settings else []), "sft.yaml"]
    base = [str(model), *(str(model.with_name(name)) for name in names)]
    return base, {key: (value, str(path)) for key, value in values.items()} | settings


def parse_cache(argv: Sequence[str]) -> tuple[Request, float | None]:
    """Return the run whose data is encoded, and the price of a GPU hour."""
    text = "Encode a run's videos and captions once, into args.latent_cache."
    parser = _new_parser("cache", text)
    text = "price of an hour of one GPU; the log then has the costs"
    price = number_up_to(float, 1000, 0.001)
    parser.add_argument("--price", metavar="DOLLARS_PER_GPU_HOUR", type=price, help=text)
    found, request = _parse_run(parser, argv, "args.latent_cache=PATH", {})
    return request, found.price


def parse_plan(argv: Sequence[str]) -> tuple[Request, argparse.Namespace]:
    """Return the run to plan for, and the options gpu, gpus (sorted, or None) and table."""
    text = "Predict memory and step time of a run on each GPU, without loading weights."
    parser = _new_parser("plan", text)
    text = "h100-80, h200, a100-80, 4090 or another name, or GiB; default: the GPU here"
    parser.add_argument("--gpu", metavar="NAME|GIB", help=text)
    text = "number of GPUs of the run; default: those of this launch; with --table several: 8,64"
    several = lambda text: sorted({int(number_up_to(int, 2**20)(one)) for one in text.split(",")})
    parser.add_argument("--gpus", metavar="N", type=several, help=text)
    text = "predict layouts for 8 to 1,024 GPUs, with the cost of links"
    parser.add_argument("--table", action="store_true", help=text)
    found, request = _parse_run(parser, argv, "args.batch_size=2", {})
    if not found.table and len(found.gpus or ()) > 1:
        raise ValueError("--gpus with several numbers is for the table of layouts; add --table")
    return request, found


def _sample_parser() -> Parser:
    """Return the parser of `cogfast sample`, without the keys of `args`."""
    from cogfast.extensions.sample.flags import INPUTS

    text = "Generate videos with a run, a model folder (diffusers pipeline), or the weights of args.load."
    parser = _new_parser("sample", text)
    text = "prompt of a video; may be repeated"
    parser.add_argument("--prompt", dest="prompts", action="append", metavar="TEXT", help=text)
    text = "text file with a prompt per line"
    parser.add_argument("--prompt-file", type=local_path, metavar="FILE", help=text)
    each = "; once for all prompts, or once per prompt"
    files: dict[str, typing.Any] = {"type": local_path, "action": "append", "metavar": "FILE"}
    for name, (text, _) in INPUTS.items():
        parser.add_argument(f"--{name}", help=text + each, **files)
    text = "tensor of data.params.tensors, for a network of your own" + each
    more: dict[str, typing.Any] = {"action": "append", "default": []}
    parser.add_argument("--tensor", dest="tensors", metavar="NAME=FILE.npy", help=text, **more)
    text = "use the averaged (EMA) weights, or not; default: those of FOLDER and of the runs of --lora, where "
    text += "they have any, and the plain weights of args.load"
    parser.add_argument("--ema", action=argparse.BooleanOptionalAction, help=text)
    text = "merge adapters, with a strength (default: 1): a LoRA file, a SAT folder or a run; may be repeated"
    parser.add_argument("--lora", metavar="PATH[:SCALE]", help=text, **more)
    text = "print the merged configuration, check it, and stop"
    parser.add_argument("--dry-run", action="store_true", help=text)
    text = "output folder, without samples of an earlier call; default: args.output_dir, with a run the folder "
    parser.add_argument("--out", type=local_path, metavar="DIR", help=text + "samples")
    own = "; default: the configuration's"
    count, number = number_up_to(int, 10**5), number_up_to(int, 1000)
    for name, metavar, kind, text in (  # of SamplingFlags
        ("steps", "N", number, "sampling steps" + own),
        ("guidance", "X", number_up_to(float, 1000), "guidance scale; 1: no guidance" + own),
        ("frames", "N", count, "number of frames: 8k+1" + own),
        ("num-videos", "N", count, "videos per prompt, each with a different seed; default: 1"),
        ("size", "HxW", _size, "rows and columns, such as 480x720" + own),
        ("fps", "N", number, "frames per second of the video files" + own),
    ):
        parser.add_argument(f"--{name}", metavar=metavar, type=kind, help=text)
    text = "a run or a model folder, or the address of one, or a hub id; key=value sets a key of the configuration"
    parser.add_argument("sources", nargs="*", metavar="FOLDER | key=value", help=text)
    return parser


def parse_sample(argv: Sequence[str]) -> Request:
    from cogfast.extensions.sample.flags import INPUTS, SamplingFlags

    parser = _sample_parser()
    shown = {
        "seed": "seed of the first video; the next ones count up",
        "negative_prompt": "text that guidance leads away from; default: zeros, as for dropped captions",
    }
    found = _parse_words(parser, argv, shown)
    base, moved = _split_overrides(found.base or [])
    sources, overrides = _split_overrides(found.sources)
    if len(sources) + bool(base) > 1:
        _refuse_words(parser.prog, argv, sources, found.prompts or [])
    if len(sources) + bool(base) != 1:
        raise ValueError("give either --base model.yaml inference.yaml or one folder")
    if sources:
        sources = [copy_of(sources[0], may_download=not found.dry_run)]
        check_run(parser.prog, argv, sources)
    if found.prompts and found.prompt_file:
        raise ValueError("--prompt and --prompt-file are both given; use one")
    overrides = _all_overrides(found, [*moved, *overrides])
    run, settings, fitting = None, {}, []
    if sources:
        run, file, settings, fitting = _find_source(sources[0], overrides, not found.dry_run)
        base = [] if file is None else [str(file)]
    input_names = [name.replace("-", "_") for name in INPUTS]
    # The other fields have the names of their options.
    names = vars(found).keys() & {one.name for one in fields(Request)}
    given = {name: vars(found)[name] for name in names} | {
        "base": base,
        "settings": settings,
        "overrides": [*fitting, *overrides],
        "inputs": {name: vars(found)[name] for name in input_names if vars(found)[name]},
        "weights": run,
        "sampling": SamplingFlags(**{o.name: vars(found)[o.name] for o in fields(SamplingFlags)}),
    }
    return Request(**given)


def _find_source(
    folder: str, overrides: Sequence[str], may_download: bool
) -> tuple[str | None, Path | None, Given, list[str]]:
    """Return the run to sample (None: the folder is a model), its file or its settings, and words that fit them."""
    # A word that is neither a path nor an id is reported below, as a folder that is missing.
    if is_hub_id(folder):
        from cogfast.extensions.pipeline_folder.pipeline_folder import hub_folder

        folder = str(hub_folder(folder, "FOLDER", may_download))
    settings = trained_settings(Path(folder))
    file = None if settings else _run_config(Path(folder))
    if settings or file:
        # Sampling need not use the layout that the run was trained with.
        layout = ("model_parallel_size=1", "context_parallel_size=1", "sequence_parallel=false")
        words = [f"args.{word}" for word in layout]
        return folder, file, settings | _of_caller(settings), words
    # A model folder, with the file of configs/ that fits it
    _refuse_second_load(folder, overrides)
    from cogfast.extensions.pipeline_folder.pipeline_folder import find_config

    file, values = find_config(Path(folder))
    return None, file, {}, [f"{key}={json.dumps(value)}" for key, value in values.items()]


def _refuse_words(
    prog: str, argv: Sequence[str], words: Sequence[str], prompts: Sequence[str]
) -> None:
    """Raise ValueError for a key=value or a prompt that its spaces have cut, and for several runs."""
    # A word with a slash may be an id of the hub.
    missing = [word for word in words if "/" not in word and not os.path.exists(word)]
    refuse_cut(argv, missing)
    behind = argv[argv.index("--prompt") :] if "--prompt" in argv else argv
    loose = [word for word in missing if word in behind]
    if loose:
        whole = " ".join([*prompts[:1], *loose] if len(prompts) < 2 else ["TEXT"])
        text = f"{loose[0]!r} is neither an option nor key=value"
        raise ValueError(f'{text}; put quotes around a prompt: --prompt "{whole}"')
    if len(words) > 1:
        check_run(prog, argv, words)


def _size(text: str) -> tuple[int, int]:
    # Rows first, as in data.params.video_size.
    match = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r} must be rows x columns in pixels, such as 480x720"
        )
    return int(match[1]), int(match[2])


def _refuse_second_load(model: str, overrides: Sequence[str]) -> None:
    if loads := [word for word in overrides if word.startswith("args.load=")]:
        raise ValueError(f"{model!r} and {loads[0]} are both given; give one of them")


def read_prompts(
    request: Request, args: typing.Any
) -> tuple[list[str], dict[str, list[Path | None]]]:
    """Return prompts from the command line, standard input or args.input_file, and the files of their
    conditions by option, with underscores.

    A line of a file may be prompt@@image, as in SAT.
    """
    from cogfast.extensions.sample.flags import INPUTS
    from cogfast.extensions.sample.prompt_files import files_of_prompts, split_prompts, utf8_lines

    fix = "give --prompt TEXT or a file of prompts"
    if request.prompts is not None:
        key, lines = "--prompt", request.prompts
    elif request.prompt_file is None and args.input_type == "cli":
        key, lines = "standard input", utf8_lines(sys.stdin.buffer.read(), "standard input")
    else:
        file = request.prompt_file or args.input_file
        key = f"{'--prompt-file' if request.prompt_file else 'args.input_file'}={file}"
        if not os.path.isfile(file):
            problem = "is a folder" if os.path.isdir(file) else "no such file"
            raise ValueError(f"{key}: {problem}; {fix}")
        lines = utf8_lines(read_limited(file, 1 << 26, fix), key)
    # Blank lines of a file are skipped; an empty --prompt is a prompt.
    pairs = split_prompts([line for line in lines if line.strip() or request.prompts], key)
    if not pairs:
        raise ValueError(f"{key}: there is no prompt; {fix}")
    prompts = [prompt for prompt, _ in pairs]
    # Images may also stand behind the prompts.
    given = {"image": [image for _, image in pairs], **request.inputs}
    files = {}
    for option in INPUTS:
        name = option.replace("-", "_")
        of_option = given.get(name, [""])
        files[name] = files_of_prompts(f"--{option}", of_option, len(prompts))
    return prompts, files


def _new_parser(command: str, what: str) -> Parser:
    more = (
        "Each key of args is an option, too, as in SAT: --train-iters 100 is args.train_iters=100."
    )
    parser = Parser(prog=f"cogfast {command}", description=what, epilog=more, allow_abbrev=False)
    text = "configuration files; a key in a later file replaces that in an earlier one"
    parser.add_argument("--base", nargs="+", action="extend", metavar="YAML", help=text)
    text = "allow `target` in the configuration to name classes of this package, which is installed or on "
    text += "PYTHONPATH; may be repeated"
    parser.add_argument("--allow-import", action="append", default=[], metavar="PKG", help=text)
    text = "print the Python traceback of an error"
    parser.add_argument("--traceback", action="store_true", help=text)
    text = "list all keys that key=value can set, and stop"
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help=text)
    return parser


def _parse_words(
    parser: Parser, argv: Sequence[str], shown: Mapping[str, str]
) -> argparse.Namespace:
    """Add every key of `args` as a flag, as SAT does, and parse.

    shown: {key: what the help says of it}; the help hides the others.
    """
    hints = typing.get_type_hints(TrainKeys)
    unused = [key.removeprefix("args.") for key in rules(Unused, "args")]
    for name in [*TrainKeys.model_fields] + unused + list(_OTHER_FLAGS):
        # Both --train-iters and --train_iters; a name of one word has one spelling.
        flags = dict.fromkeys([f"--{name.replace('_', '-')}", f"--{name}"])
        help_text = shown.get(name, argparse.SUPPRESS)
        options: dict[str, typing.Any] = {"help": help_text, "dest": f"args.{name}"}
        hint = hints.get(name, str)
        kinds = (hint, *typing.get_args(hint))
        # SAT's switches have no value: the flag alone means true.
        if name in _SWITCHES or bool in kinds:
            options |= {"action": "store_const", "const": True}
        elif any(typing.get_origin(kind) is list for kind in kinds):
            options["nargs"] = "*"
        elif name in shown:
            options["metavar"] = "VALUE"
        parser.add_argument(*flags, **options)
    # Intermixed: overrides may stand before, between and after the options.
    return parser.parse_intermixed_args(list(argv))


def _all_overrides(
    found: argparse.Namespace, words: Sequence[str], settings: Given | None = None
) -> list[str]:
    """Return SAT's flags as key=value overrides, then `words`. ValueError if two of them, or of the options
    in `settings`, set one key.

    A flag with a list value also takes the key=value arguments behind it, which stand before `words`.
    """
    hints = typing.get_type_hints(TrainKeys)
    behind: list[str] = []
    flags: dict[str, str] = {}
    for key, value in vars(found).items():
        # A flag that is left out sets nothing, so that it does not overwrite a file's value.
        if not key.startswith("args.") or value is None:
            continue
        hint = hints.get(key[5:], str)
        is_text = str in (hint, *typing.get_args(hint))
        # Quoted: overrides are parsed as YAML, which would read a name such as 007 as a number.
        if isinstance(value, list):
            value, moved = _split_overrides(value)
            items = [json.dumps(v, ensure_ascii=False) if is_text else v for v in value]
            flags[key] = f"[{', '.join(items)}]"
            behind += moved
        elif isinstance(value, str) and is_text:
            flags[key] = json.dumps(value, ensure_ascii=False)
        else:
            flags[key] = str(value).lower() if value is True else str(value)
    words = [*behind, *words]
    by_words = [word.partition("=")[0] for word in words]
    options = [(name, key, [*flags, *by_words]) for key, (_, name) in (settings or {}).items()]
    options += [(f"--{key.removeprefix('args.')}", key, by_words) for key in flags]
    for name, key, others in options:
        if key in others:
            raise ValueError(f"{name} and {key} on the command line set the same; keep one")
    return [*(f"{key}={text}" for key, text in flags.items()), *words]


def _split_overrides(items: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a list from argparse into names of files or folders, and key=value overrides."""
    # A file name may contain "=".
    is_override = lambda item: "=" in item.partition("://")[0] and not os.path.exists(item)
    # Both keep their order: a later override of one key wins.
    return [*filterfalse(is_override, items)], [*filter(is_override, items)]


def _of_caller(stored: Given, writes_cache: bool = False) -> Given:
    """Unset what a run's file, which may come from elsewhere, must not decide, and weights that it need not read."""
    sections, defaults = {name: values for name, (values, _) in stored.items()}, TrainKeys()
    unset = {*weight_addresses(sections)} - {*weight_addresses(sections, is_of_run=True)}
    unset |= {f"args.{name}" for name in (*_OF_CALLER, *["latent_cache"] * writes_cache)}
    return {key: (getattr(defaults, key.removeprefix("args.")), DEFAULT) for key in unset}


def _run_config(folder: Path) -> Path | None:
    """Find the configuration of a run or of a checkpoint's run; None if `folder` is neither."""
    if not folder.is_dir():
        text = "give the folder of a run or of a model, or the id of a model of the hub"
        raise ValueError(f"{folder}: no such folder; {text}")
    # A checkpoint has its run's configuration, in the folder of the run.
    places = (folder / RUN_CONFIG, run_of(folder) / RUN_CONFIG)
    return next((path for path in places if path.is_file()), None)


def refuse_sampling_keys(origins: Mapping[str, str], args: Mapping[str, typing.Any]) -> None:
    """Raise ValueError if the command line of `cogfast train` sets a key that only sampling reads, or the
    place of the run twice."""
    for key in (f"args.{name}" for name in _OF_SAMPLING):
        if level(find_origin(origins, key)) > 0:
            fix = "set args.run_folder" if key.endswith("output_dir") else "leave it out"
            raise ValueError(f"{key} is for cogfast sample and has no effect on training; {fix}")
    if args["run_folder"] is not None and "--out" in origins.values():
        text = f"--out {args['save']} and args.run_folder={args['run_folder']} are both given"
        raise ValueError(f"{text}; keep one")


def refuse_training_keys(origins: Mapping[str, str]) -> None:
    """Raise ValueError if the command line of `cogfast sample` sets a key that only training reads."""
    group = ""
    for name in TrainKeys.model_fields:
        group, key = GROUPS.get(name, group), f"args.{name}"
        is_of_training = group in ("learning rate", "evaluation")
        if is_of_training and find_origin(origins, key) == COMMAND_LINE:
            text = f"{key} has no effect on sampling; leave it out (cogfast sample --help lists the options)"
            raise ValueError(text)


def check_packages(packages: Sequence[str]) -> None:
    """Raise ValueError if --allow-import names Python's own modules, or packages that cogfast depends on.

    A received file could name their functions, such as subprocess.Popen.
    """
    theirs = _of_others() if packages else set()
    for package in packages:
        if "," in package:
            raise ValueError(f"--allow-import {package}: repeat the option for each package")
        if package.partition(".")[0] in theirs:
            text = f"--allow-import {package} is not a package that you wrote: it is part of Python, or cogfast needs it"
            raise ValueError(f"{text}; name your own, and derive your class there")


def _of_others() -> set[str]:
    """Return the top-level modules of Python and of the distributions that cogfast depends on."""
    from packaging.utils import canonicalize_name

    needed, waiting = set[str](), ["cogfast"]
    while waiting:
        if (name := canonicalize_name(waiting.pop())) not in needed:
            needed.add(name)
            with suppress(metadata.PackageNotFoundError):
                lines = [n for n in metadata.requires(name) or () if "extra ==" not in n]
                waiting += [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines]
    found = metadata.packages_distributions().items()
    of_others = {module for module, names in found if needed & {*map(canonicalize_name, names)}}
    return {*sys.stdlib_module_names, *of_others, "cogfast"}
