"""The cases of bench.step for 2B, 5B and 1.5-5B on one GPU, those that decide most first.

With float32 masters, moments and EMA, neither side of a whole 5B fits into 78 GiB (computed, not
measured). The 2B of diffusers without checkpointing takes 76.4 GiB, as PyTorch's allocator counted on the
null runtime, so that it may not fit. There are cases of fewer layers for both, and their rows have the
number. At the 45,104 tokens of 1.5-5B a step of the whole model takes ten seconds or
more (computed, not measured), so that only one policy of ours is measured on it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from bench.harness.outcome import Outcome, Settings
from bench.step import measure_cases
from bench.steps.step_cases import Case, Plan
from bench.steps.step_models import Options
from bench.steps.step_sides import Policy

_LARGE_GIB = 120.0  # an H200 has more
_PAIRS, _SECONDS = 20, 6.0
_OURS: tuple[Policy, ...] = ("attention_kept", "pointwise")  # that the model of diffusers lacks
_FA4 = (Options("fa4"), Options("fa4 on both sides"))
_FASTER = (Options(sparse=0.8), Options("fa4", sparse=0.8), Options(quantize_base="fp8"))
_NUM_LAYERS_15 = 4  # of 1.5-5B, for cases that would not fit into memory or time


def cases_2b(memory_gib: float) -> list[Case]:
    """Return cases of the whole 2B, and without checkpointing also of as many layers as fit."""
    none, lora = Case("2b"), Case("2b", mode="lora")
    fewer = [] if memory_gib > _LARGE_GIB else [replace(none, num_layers=20)]
    full = [replace(case, checkpointing="full") for case in (none, lora)]
    shown = [none, _compiled(none), lora, _compiled(lora)]  # in the README's table
    ours = [replace(none, checkpointing=policy) for policy in _OURS]
    faster = [replace(_compiled(none), options=options) for options in _FA4]
    return [*shown, *faster, *full, *fewer, *map(_compiled, full), *ours]


def cases_5b(memory_gib: float) -> list[Case]:
    """Return cases that train all weights of as many layers as fit, and LoRA on the whole 5B."""
    is_large = memory_gib > _LARGE_GIB
    none, lora = Case("5b", num_layers=16 if is_large else 10), Case("5b", mode="lora")
    full, lora_full = (replace(case, checkpointing="full") for case in (none, lora))
    whole = [replace(full, num_layers=None)] if is_large else []
    ours = [replace(case, checkpointing=policy) for case in (lora, *whole) for policy in _OURS]
    shown = [*whole, none, _compiled(none), _compiled(lora)]
    faster = [replace(_compiled(lora), options=options) for options in (*_FA4, *_FASTER)]
    rest = [full, lora, lora_full]
    return [*shown, *faster, *rest, *map(_compiled, [*whole, full, lora_full]), *ours]


def cases_15_5b(memory_gib: float) -> list[Case]:
    """Return LoRA on the whole 1.5-5B by the policy that keeps attention, then cases of fewer layers."""
    whole, *fewer = cases_15_5b_i2v(memory_gib, "1.5-5b")
    ours = [replace(fewer[-1], checkpointing=policy) for policy in _OURS]
    return [whole, *fewer, *map(_compiled, fewer), *ours]


def cases_15_5b_i2v(memory_gib: float, model: str = "1.5-5b-i2v") -> list[Case]:
    """Return the steps of 1.5-5B-I2V, whose blocks are those of 1.5-5B."""
    whole = Case(model, mode="lora", checkpointing="attention_kept")
    none = Case(model, num_layers=_NUM_LAYERS_15)
    both = [none, replace(none, mode="lora")]
    return [whole, *(replace(case, checkpointing="full") for case in both), *both]


def cases_sampling(memory_gib: float) -> list[Case]:
    """Return a guided forward pass of 2B and 5B."""
    cases = [Case(model, mode="sampling") for model in ("2b", "5b")]
    return [*cases, *map(_compiled, cases)]


def _compiled(case: Case) -> Case:
    return replace(case, engine="compiled")


CASES = {
    "2b": cases_2b,
    "5b": cases_5b,
    "1.5-5b": cases_15_5b,
    "1.5-5b-i2v": cases_15_5b_i2v,
    "sampling": cases_sampling,
}


def _measure(piece: str, settings: Settings) -> Outcome:
    device, memory_gib = settings.device, 0.0
    if device.type == "cuda":
        memory_gib = torch.cuda.get_device_properties(device).total_memory / 2**30
    words = settings.cases or [""]
    cases = [case for case in CASES[piece](memory_gib) if any(word in str(case) for word in words)]
    plan = Plan(device, torch.bfloat16, num_pairs=_PAIRS, seconds=_SECONDS)
    if settings.is_tiny:
        # No compilation: it would take longer on a CPU than everything else.
        eager = [replace(case, engine="eager") for case in cases]
        cases = [replace(each, model=f"{each.model}-smallest", num_layers=None) for each in eager]
        cases = list(dict.fromkeys(cases))  # cases that differed only in their layers are now equal
        plan = replace(plan, num_pairs=3)
    return measure_cases(cases, plan, settings.deadline, settings.keep)


# The pieces of bench.gpu_run
measure_2b, measure_5b, measure_15_5b, measure_15_5b_i2v, measure_sampling = (
    partial(_measure, piece) for piece in CASES
)
