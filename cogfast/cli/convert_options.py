"""Parses the command line of `cogfast convert`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cogfast.cli.options import Parser

_WHAT = """\
Convert weights from one format to another. The format of SRC is detected: a SAT folder or .pt
file, a diffusers pipeline or transformer folder, a LoRA file, a run of cogfast or one of its
checkpoints, or a VAE (SAT's 3d-vae.pt, diffusers' vae folder)."""
_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # both spellings are accepted


def parse_convert(argv: Sequence[str]) -> dict[str, Any]:
    """Parse `cogfast convert` into the arguments of cogfast.model.weights.convert.convert."""
    parser = Parser(prog="cogfast convert", description=_WHAT, allow_abbrev=False)
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
        type=lambda name: _SHORT.get(name, name),
        choices=tuple(_SHORT.values()),
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
