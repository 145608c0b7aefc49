"""The block and the step of 2B and of 5B on one GPU, against diffusers', what counts most first.

Neither side of a 5B, nor diffusers' 2B without checkpointing, fits whole into 78 GiB with float32
masters, moments and EMA: those cases have fewer layers, and their rows say how many.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from bench.outcome import Outcome, Settings
from bench.step import measure_cases
from bench.step_cases import Case, Plan

_LARGE_GIB = 120.0  # an H200 has more
_PAIRS, _SECONDS = 20, 6.0


def measure_2b(settings: Settings) -> Outcome:
    return _measure("2b", cases_2b(_memory_gib(settings.device)), settings)


def measure_5b(settings: Settings) -> Outcome:
    return _measure("5b", cases_5b(_memory_gib(settings.device)), settings)


def cases_2b(memory_gib: float) -> list[Case]:
    fewer = None if memory_gib > _LARGE_GIB else 20
    step, block = Case("2b"), Case("2b", what="block")
    lora = replace(step, mode="lora")
    return [
        replace(step, checkpointing="full"),
        replace(block),
        replace(step, checkpointing="full", engine="compiled"),
        replace(step),
        replace(lora, checkpointing="full"),
        replace(block, engine="compiled"),
        replace(lora),
        replace(step, engine="compiled"),
        *([replace(step, num_layers=fewer)] if fewer else []),
        replace(lora, engine="compiled"),
        replace(block, mode="lora"),
        *([replace(step, num_layers=fewer, engine="compiled")] if fewer else []),
        replace(lora, checkpointing="full", engine="compiled"),
        replace(block, checkpointing="full"),
    ]


def cases_5b(memory_gib: float) -> list[Case]:
    is_large = memory_gib > _LARGE_GIB
    with_full = replace(Case("5b"), checkpointing="full", num_layers=None if is_large else 20)
    with_none = replace(Case("5b"), num_layers=16 if is_large else 10)
    lora, block = Case("5b", mode="lora"), Case("5b", what="block")
    return [
        with_full,
        replace(block),
        replace(lora, checkpointing="full"),
        replace(with_full, engine="compiled"),
        replace(block, engine="compiled"),
        replace(with_none),
        replace(lora),
        replace(lora, checkpointing="full", engine="compiled"),
        replace(with_none, engine="compiled"),
        replace(lora, engine="compiled"),
        replace(block, mode="lora"),
        replace(block, checkpointing="full"),
    ]


def _measure(model: str, cases: list[Case], settings: Settings) -> Outcome:
    plan = Plan(settings.device, torch.bfloat16, num_pairs=_PAIRS, seconds=_SECONDS)
    if settings.is_tiny:
        # without compilation, which takes a CPU longer than all the rest
        eager = [case for case in cases if case.engine == "eager"]
        cases = [replace(case, model=f"{model}-smallest", num_layers=None) for case in eager]
        cases = list(dict.fromkeys(cases))  # fewer layers are none fewer here
        plan = replace(plan, num_pairs=3)
    return measure_cases(cases, plan, settings.deadline, settings.keep)


def _memory_gib(device: torch.device) -> float:
    if device.type != "cuda":
        return 0.0
    return torch.cuda.get_device_properties(device).total_memory / 2**30
