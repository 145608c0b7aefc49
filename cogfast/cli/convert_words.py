"""Reads the words of `cogfast convert`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cogfast.cli.options import Parser

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
