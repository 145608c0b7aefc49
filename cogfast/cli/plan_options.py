"""Parses the command line of `cogfast plan`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from cogfast.cli.options import Request, new_parser, number_up_to, parse_words, whole_request


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """The configuration to plan for, and the options of `cogfast plan`."""

    config: Request
    gpu: str | None
    num_gpus: int | None


def parse_plan(argv: Sequence[str]) -> PlanRequest:
    parser = new_parser(
        "plan", "Predict memory and step time of a run on each GPU, without loading weights."
    )
    add_plan_options(parser)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="set a key of the configuration, as for `cogfast train`",
    )
    found = parse_words(parser, argv, visible=("seed",))
    return PlanRequest(config=whole_request(found), gpu=found.gpu, num_gpus=found.gpus)


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say for which GPUs a plan is made."""
    text = (
        "h100-80, h200, a100-80, a100-40, l40s, 4090 or another name, or GiB; default: the GPU here"
    )
    parser.add_argument("--gpu", metavar="NAME|GIB", help=text)
    number = number_up_to(int, 2**20)
    text = "number of GPUs of the run; default: those of this launch"
    parser.add_argument("--gpus", metavar="N", type=number, help=text)
