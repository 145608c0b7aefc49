"""Parses the command lines of the commands that read no configuration: doctor, report, publish, convert."""

from __future__ import annotations

import argparse
import os
import shlex
import typing
from collections.abc import Sequence
from pathlib import Path

from cogfast.cli.parser import Parser, check_run, local_path
from cogfast.core.addresses import is_url
from cogfast.extensions.stores.mirror import copy_of

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # both spellings are accepted


def parse_doctor(argv: Sequence[str]) -> tuple[Path, bool, bool]:
    """Return the folder of the runs, and whether to compile the C++ kernels and to write JSON."""
    text = "List what this machine has and lacks for training, what each gap costs, and the command that "
    text += "closes it. The exit status is 1 if training cannot work."
    parser = Parser(prog="cogfast doctor", description=text)
    text = "where runs will be written; default: the current folder"
    parser.add_argument("--folder", type=Path, default=Path(), metavar="DIR", help=text)
    text = "compile the C++ kernels of training on a CPU now, instead of at the first run"
    parser.add_argument("--build-kernels", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON, for reports of errors")
    found = parser.parse_args([*argv])
    return found.folder, found.build_kernels, found.json


def parse_report(argv: Sequence[str]) -> tuple[list[Path], Path | None]:
    """Return the folders of the runs, and the file to write; None: the default."""
    text = "Write the page of a run again: index.html in its folder. With several runs, write one page that "
    parser = Parser(prog="cogfast report", description=text + "compares them.", allow_abbrev=False)
    text = "the folder of a run, or its address"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=text)
    text = (
        "the page; default: RUN/index.html, or report.html for several runs; needed for addresses"
    )
    parser.add_argument("--out", type=local_path, metavar="FILE", help=text)
    found = parser.parse_args([*argv])
    if found.out is None and any(map(is_url, found.runs)):
        text = "give a file of this machine for the page of runs in a store"
        raise ValueError(f"--out is missing; {text}")
    runs = [copy_of(run, is_whole=True) for run in found.runs]
    for run in runs:
        check_run(parser.prog, argv, [run])
    return [*map(Path, runs)], None if found.out is None else Path(found.out)


def parse_publish(argv: Sequence[str]) -> tuple[Path, str, bool, bool | None]:
    """Return the run, the repository, whether only to write its files, and whether a new one is private."""
    text = "Upload a run to the Hugging Face hub: its weights for diffusers, a model card and four videos of "
    text += "its last evaluation. Captions and paths of the data stay here."
    parser = Parser(prog="cogfast publish", description=text, allow_abbrev=False)
    text = "a run or one of its checkpoints, or its address"
    parser.add_argument("run", metavar="RUN", help=text)
    text = "the repository; created if it is missing"
    parser.add_argument("repo", metavar="OWNER/NAME", help=text)
    text = "write the files to RUN/hub and upload nothing"
    parser.add_argument("--dry-run", action="store_true", help=text)
    text = "make a new repository private; default: the owner's setting on the hub"
    parser.add_argument("--private", action="store_const", const=True, help=text)
    found = _parse_of_one_run(parser, argv, "run", "repo", "me/my-lora")
    if is_url(found.run) and found.dry_run:
        text = f"{found.run}: --dry-run writes files into the folder of a run on this machine; copy the run to "
        raise ValueError(f"{text}this machine and give its folder, or publish without --dry-run")
    return Path(copy_of(found.run, is_whole=True)), found.repo, found.dry_run, found.private


def parse_convert(argv: Sequence[str]) -> dict[str, typing.Any]:
    """Parse `cogfast convert` into the arguments of cogfast.extensions.formats.convert.convert."""
    text = "Convert weights from one format to another. The format of SRC is detected: a SAT folder or .pt "
    text += "file, a diffusers pipeline or transformer folder, a LoRA file, a run of cogfast or one of its "
    text += "checkpoints, or a VAE (SAT's 3d-vae.pt, diffusers' vae folder)."
    parser = Parser(prog="cogfast convert", description=text, allow_abbrev=False)
    parser.add_argument("src", metavar="SRC", help="the weights to convert, or their address")
    parser.add_argument("dst", metavar="DST", help="a folder that does not exist yet")
    text = "format of DST; peft: adapters alone, as a LoRA file; fun: as a LoRA file for VideoX-Fun"
    kinds = ("sat", "diffusers", "peft", "fun")
    parser.add_argument("--to", required=True, choices=kinds, help=text)
    parser.add_argument("--ema", action="store_true", help="convert the averaged (EMA) weights")
    text = "merge these adapters into the weights, LORA:0.8 with 0.8 of their strength, and what else a run "
    text += "trained; without LORA: SRC's own adapters"
    parser.add_argument("--merge-lora", nargs="?", const="", metavar="LORA", help=text)
    text = "keep these adapters separate beside SRC's weights, as in SAT's LoRA checkpoints"
    parser.add_argument("--add-lora", metavar="LORA", help=text)
    text = "alpha used in training, for files that do not store it (SAT: 1 unless configured; CogVideo's "
    text += "diffusers trainer: 64)"
    parser.add_argument("--lora-alpha", type=float, metavar="X", help=text)
    text = "number of mp_rank files to write (--to sat)"
    parser.add_argument("--model-parallel-size", type=int, default=1, metavar="N", help=text)
    parser.add_argument(
        "--dtype",
        type=lambda name: _DTYPES.get(name, name),
        choices=tuple(_DTYPES.values()),
        metavar="{fp32,fp16,bf16}",
        help="dtype of the written weights; default: that of the source",
    )
    text = "read the written weights back, and compare each tensor with the source's and the networks' outputs"
    parser.add_argument("--verify", action="store_true", help=text)
    text = "leave out tensors with unknown names"
    parser.add_argument("--allow-unexpected", action="store_true", help=text)
    text = "scaling_factor in the diffusers config of a VAE: 1.15258426 for 2B, 0.7 (default) else"
    parser.add_argument("--scaling-factor", type=float, metavar="X", help=text)
    text = "print the Python traceback of an error"
    parser.add_argument("--traceback", action="store_true", help=text)
    kind = next((word for word in argv if word in ("sat", "peft", "fun")), "diffusers")
    found = vars(_parse_of_one_run(parser, argv, "src", "dst", f"my_folder --to {kind}"))
    del found["traceback"]
    if is_url(found["dst"]):
        text = "DST must be a folder of this machine; give a path, and upload it"
        raise ValueError(f"{found['dst']}: {text}")
    for key in ("src", "add_lora"):  # that of --merge-lora may have a scale behind it
        if found[key]:
            found[key] = copy_of(found[key])
    check_run(parser.prog, argv, [found["src"]])
    return found


def _parse_of_one_run(
    parser: Parser, argv: Sequence[str], source: str, target: str, example: str
) -> argparse.Namespace:
    """Parse the words of a command that takes one source, perhaps a run, and one target."""
    given = argv[0] if argv and not argv[0].startswith("-") else "runs/my-lora"
    parser.example = f"{parser.prog} {shlex.quote(given)} {example}"
    found, more = parser.parse_known_args([*argv])
    # A pattern such as runs/* gives several sources, with the target behind them.
    words = [getattr(found, source), getattr(found, target), *more]
    runs = words[:-1] if all(map(os.path.exists, words[:-1])) else words[:1]
    if not is_url(runs[0]):
        check_run(parser.prog, argv, runs)
    if more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    return found
