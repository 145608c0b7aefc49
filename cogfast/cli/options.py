"""Reads the words of `cogfast train` and `cogfast sample`, SAT's own flags included."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
import typing
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from cogfast.schema.arguments import TrainArguments
from cogfast.schema.sat_unused import UNUSED
from cogfast.schema.values import nearest

# SAT's flags that take no value, besides those of TrainArguments' true-or-false fields.
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
_OTHER_FLAGS = ("sdedit", "iterable_dataset", "deepspeed_config")
_RUN_CONFIG = "training_config.yaml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the command line asks for, before any file is read."""

    base: list[str]
    overrides: list[str]
    allow_import: list[str]
    dry_run: bool = False
    prompts: list[str] | None = None
    prompt_file: str | None = None
    images: list[str] | None = None
    out: str | None = None
    weights: str | None = None  # the run folder to sample from; none: args.load
    lora: tuple[str, ...] = ()  # PATH or PATH:SCALE
    ema: bool = False


class Parser(argparse.ArgumentParser):
    """argparse, with its errors as the one line that all our errors are."""

    def error(self, message: str) -> NoReturn:
        text = message
        if message.startswith("unrecognized arguments: -"):
            word = message.split()[2].partition("=")[0]
            known = [flag for flag in self._option_string_actions if flag.startswith("--")]
            text = f"{self.prog} has no option {word}{nearest(word, known)}"
        raise ValueError(text)


def parse_train(words: Sequence[str]) -> Request:
    parser = _parser("train", "Train a CogVideoX transformer.")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the merged configuration and stop"
    )
    parser.add_argument("--resume", metavar="WHAT", help="auto, latest, or a run's folder")
    parser.add_argument(
        "--accept-changes",
        action="store_true",
        help="resume though the configuration is not the checkpoint's (as args.accept_changes=true)",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="args.train_iters=100")
    found = _parse(parser, words, visible=("seed", "resume", "accept_changes"))
    return dataclasses.replace(_whole_request(found), dry_run=found.dry_run)


def _whole_request(found: argparse.Namespace) -> Request:
    """Of a verb that takes --base and key=value words."""
    if not found.base:
        raise ValueError("--base is missing; give model.yaml and sft.yaml")
    base, moved = _split_overrides(found.base)
    for word in found.overrides:
        if "=" not in word:
            raise ValueError(f"{word!r} is neither an option nor key=value; files go after --base")
    return Request(
        base=base,
        overrides=[*_flag_overrides(found), *moved, *found.overrides],
        allow_import=found.allow_import,
    )


def parse_cache(words: Sequence[str]) -> Request:
    parser = _parser("cache", "Encode a run's videos and captions once, into args.latent_cache.")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="args.latent_cache=PATH")
    found = _parse(parser, words, visible=("seed",))
    return _whole_request(found)


def parse_sample(words: Sequence[str]) -> Request:
    parser = _parser(
        "sample",
        "Make videos with a run, a model's folder (diffusers pipeline), or what args.load names.",
    )
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated")
    parser.add_argument("--prompt-file", metavar="FILE", help="a prompt per line")
    parser.add_argument("--image", action="append", metavar="PNG", help="first frame, per prompt")
    parser.add_argument("--ema", action=argparse.BooleanOptionalAction, help="averaged weights")
    parser.add_argument(
        "--lora",
        action="append",
        metavar="PATH[:SCALE]",
        help="adapters on top: a LoRA file, a SAT folder or a run; may be repeated",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the merged configuration and stop"
    )
    parser.add_argument("--out", metavar="DIR", help="where the videos go; else args.output_dir")
    parser.add_argument("words", nargs="*", metavar="FOLDER | key=value")
    found = _parse(parser, words, visible=("seed",))
    base, moved = _split_overrides(found.base or [])
    sources, overrides = _split_overrides(found.words)
    if len(sources) + bool(base) != 1:
        raise ValueError("give either --base model.yaml inference.yaml or one folder")
    if found.prompt and found.prompt_file:
        raise ValueError("--prompt and --prompt-file are both given; use one")
    run_config = _run_config(Path(sources[0])) if sources else None
    # How ranks shared the model of a run says nothing of those that make its videos.
    fitting = ["args.model_parallel_size=1", "args.sequence_parallel=false"] if run_config else []
    if sources and run_config is None:
        from cogfast.train.sampling.pipeline_defaults import find_config

        run_config, fitting = find_config(Path(sources.pop()))
    return Request(
        base=base or [str(run_config)],
        overrides=[*fitting, *_flag_overrides(found), *moved, *overrides],
        allow_import=found.allow_import,
        dry_run=found.dry_run,
        prompts=found.prompt,
        prompt_file=found.prompt_file,
        images=found.image,
        out=found.out,
        weights=sources[0] if sources else None,
        ema=bool(sources) if found.ema is None else found.ema,
        lora=tuple(found.lora or ()),
    )


def read_prompts(request: Request, args: typing.Any) -> tuple[list[str], list[Path | None]]:
    """Prompts and first frames from the command line, or from args.input_file as SAT has it.

    A line of a file may be prompt@@image.
    """
    if request.prompts is not None:
        key, lines = "--prompt", request.prompts
    elif request.prompt_file is None and args.input_type == "cli":
        key, lines = "standard input", _utf8_lines(sys.stdin.buffer.read(), "standard input")
    else:
        file = request.prompt_file or args.input_file
        key = "--prompt-file" if request.prompt_file else "args.input_file"
        if not os.path.isfile(file):
            raise ValueError(f"{key}={file}: no such file; give --prompt TEXT or a file of prompts")
        lines = _utf8_lines(Path(file).read_bytes(), f"{key}={file}")
    pairs = [line.partition("@@")[::2] for line in lines if line.strip() or request.prompts]
    if not pairs:
        raise ValueError("there is no prompt; give --prompt TEXT")
    prompts = [prompt.strip() for prompt, _ in pairs]
    for prompt in prompts:  # a shell hands on bytes that are no UTF-8 as surrogates
        if "\0" in prompt or any("\ud800" <= c <= "\udfff" for c in prompt):
            raise ValueError(f"{key}: {prompt[:80]!r} holds bytes that are no text; give UTF-8")
    names = request.images if request.images is not None else [image.strip() for _, image in pairs]
    if len(names) not in (1, len(prompts)):
        raise ValueError(f"--image is given {len(names)} times for {len(prompts)} prompts")
    images = [Path(name) if name else None for name in names] * (len(prompts) // len(names))
    for image in images:
        if image is not None and not os.path.isfile(image):
            raise ValueError(f"--image {str(image)[:200]}: no such file")
    return prompts, images


def _utf8_lines(data: bytes, name: str) -> list[str]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{name}: not UTF-8; save the prompts as UTF-8") from None
    return re.split(r"\r\n|\r|\n", text)  # str.splitlines also splits within prompts


def _parser(verb: str, what: str) -> Parser:
    parser = Parser(prog=f"cogfast {verb}", description=what, allow_abbrev=False)
    parser.add_argument(
        "--base", nargs="+", action="extend", metavar="YAML", help="files; the later wins"
    )
    parser.add_argument("--seed", metavar="N", help="as args.seed=N")
    parser.add_argument(
        "--allow-import",
        action="append",
        default=[],
        metavar="PKG",
        help="a package whose own classes a target may name, besides the listed ones",
    )
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    return parser


def _parse(parser: Parser, words: Sequence[str], visible: Sequence[str]) -> argparse.Namespace:
    """Add every key of `args` as a flag, as SAT has them (not shown in the help), and parse."""
    hints = typing.get_type_hints(TrainArguments)
    unused = [key.removeprefix("args.") for key in UNUSED if key.startswith("args.")]
    for name in [f.name for f in fields(TrainArguments)] + unused + list(_OTHER_FLAGS):
        if name in visible:
            continue
        flags = dict.fromkeys([f"--{name.replace('_', '-')}", f"--{name}"])
        options: dict[str, typing.Any] = {"help": argparse.SUPPRESS, "dest": f"args.{name}"}
        kinds = typing.get_args(hints.get(name)) or (hints.get(name),)
        if name in _SWITCHES or bool in kinds:
            options |= {"action": "store_const", "const": True}
        elif typing.get_origin(hints.get(name)) is list or any(
            typing.get_origin(kind) is list for kind in kinds
        ):
            options["nargs"] = "*"
        parser.add_argument(*flags, **options)
    return parser.parse_intermixed_args(list(words))


def _flag_overrides(found: argparse.Namespace) -> list[str]:
    """SAT's flags as key=value words; key=value words that a list swallowed follow theirs."""
    hints = typing.get_type_hints(TrainArguments)
    values = vars(found)
    overrides = [] if found.seed is None else [f"args.seed={found.seed}"]
    if values.get("resume") is not None:
        overrides.append(f"args.resume={json.dumps(values['resume'])}")
    if values.get("accept_changes"):
        overrides.append("args.accept_changes=true")
    for key, value in values.items():
        if not key.startswith("args.") or value is None:
            continue
        kinds = typing.get_args(hints.get(key[5:])) or (hints.get(key[5:]),)
        if isinstance(value, list):
            value, moved = _split_overrides(value)
            is_text = str in kinds
            items = [json.dumps(v, ensure_ascii=False) if is_text else v for v in value]
            overrides += [f"{key}=[{', '.join(items)}]", *moved]
        elif isinstance(value, str) and (str in kinds or key[5:] not in hints):
            overrides.append(f"{key}={json.dumps(value, ensure_ascii=False)}")
        else:
            overrides.append(f"{key}={str(value).lower() if value is True else value}")
    return overrides


def _split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names of files and folders, and key=value words, which argparse puts into one list."""
    is_override = [("=" in word and not os.path.exists(word)) for word in words]
    names = [word for word, is_one in zip(words, is_override, strict=True) if not is_one]
    return names, [word for word, is_one in zip(words, is_override, strict=True) if is_one]


def _run_config(folder: Path) -> Path | None:
    """The configuration that a run, or the run of a checkpoint, was trained with; None: no run."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    places = (folder / _RUN_CONFIG, folder.parent.parent / _RUN_CONFIG)
    return next((path for path in places if path.is_file()), None)


_WHAT = """\
Turn weights of one format into another. What SRC is, is read from its content: a SAT folder or .pt
file, a diffusers pipeline or transformer folder, a LoRA file, a run of cogfast or one of its
checkpoints, a folder that --to cogfast wrote; or a VAE, SAT's 3d-vae.pt or diffusers' vae folder."""

_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # either name will do


def parse_convert(words: Sequence[str]) -> dict[str, Any]:
    """The arguments of cogfast.model.weights.convert.convert."""
    parser = Parser(prog="cogfast convert", description=_WHAT, allow_abbrev=False)
    parser.add_argument("src", metavar="SRC")
    parser.add_argument("dst", metavar="DST", help="a folder that does not exist yet")
    parser.add_argument("--to", required=True, choices=("sat", "diffusers", "peft", "cogfast"))
    parser.add_argument("--ema", action="store_true", help="the averaged weights")
    parser.add_argument(
        "--merge-lora",
        nargs="?",
        const="",
        metavar="LORA",
        help="add these adapters to the weights, or SRC's own where no LORA is named",
    )
    parser.add_argument(
        "--add-lora",
        metavar="LORA",
        help="write these adapters beside SRC's weights, as LoRA checkpoints of SAT have them",
    )
    parser.add_argument(
        "--lora-alpha",
        type=float,
        metavar="X",
        help="that adapters were trained with, where their files do not say it: those of SAT (1, if "
        "its config names no lora_alpha) and of CogVideo's diffusers trainer (64)",
    )
    parser.add_argument(
        "--extract-lora",
        metavar="BASE",
        help="adapters that come nearest to what SRC changed in the weights of BASE",
    )
    parser.add_argument("--rank", type=int, metavar="R", help="of the adapters to extract")
    parser.add_argument(
        "--model-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="files that a SAT target is cut over",
    )
    parser.add_argument(
        "--dtype",
        type=lambda word: _SHORT.get(word, word),
        choices=tuple(_SHORT.values()),
        metavar="{fp32,fp16,bf16}",
        help="of the target's weights; default: the source's",
    )
    parser.add_argument(
        "--verify", action="store_true", help="reload the target and compare one forward pass"
    )
    parser.add_argument(
        "--allow-unexpected", action="store_true", help="leave out tensors of unknown names"
    )
    parser.add_argument(
        "--scaling-factor",
        type=float,
        default=None,
        metavar="X",
        help="of a VAE in diffusers' config: 1.15258426 for 2B, 0.7 (the default) for the others",
    )
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    found = vars(parser.parse_args(list(words)))
    del found["traceback"]
    return found
