"""The cases of bench.step for 2B, 5B and 1.5-5B on one GPU, the most important first.

With float32 masters, moments and EMA, neither side of a whole 5B fits into 78 GiB (computed, not
measured). The 2B of diffusers without checkpointing takes 76.4 GiB, as PyTorch's allocator counted on the
null runtime, so that it may not fit. There are cases of fewer layers for both, and their rows have the
number. At the 45,104 tokens of 1.5-5B a step of the whole model takes ten seconds or
more (computed, not measured), so that only one policy of ours is measured on it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from bench.harness.outcome import Outcome, Settings
from bench.step import measure_cases
from bench.steps.step_cases import Case, Plan
from bench.steps.step_sides import Policy

_LARGE_GIB = 120.0  # an H200 has more
_PAIRS, _SECONDS = 20, 6.0
_OURS: tuple[Policy, ...] = ("attention_kept", "pointwise")  # that the model of diffusers lacks
_NUM_LAYERS_15 = 4  # of 1.5-5B, for cases that would not fit into memory or time


def measure_2b(settings: Settings) -> Outcome:
    """Run the piece 2b of bench.gpu_run."""
    return _measure("2b", cases_2b(_memory_gib(settings.device)), settings)


def measure_5b(settings: Settings) -> Outcome:
    """Run the piece 5b of bench.gpu_run."""
    return _measure("5b", cases_5b(_memory_gib(settings.device)), settings)


def measure_15_5b(settings: Settings) -> Outcome:
    """Run the piece 1.5-5b of bench.gpu_run."""
    return _measure("1.5-5b", cases_15_5b(), settings)


def measure_15_5b_i2v(settings: Settings) -> Outcome:
    """Run the piece 1.5-5b-i2v of bench.gpu_run."""
    return _measure("1.5-5b-i2v", cases_15_5b_i2v(), settings)


def cases_2b(memory_gib: float) -> list[Case]:
    """Return cases of the whole 2B, and without checkpointing also of as many layers as fit."""
    block, none = Case("2b", what="block"), Case("2b")
    full, lora = replace(none, checkpointing="full"), replace(none, mode="lora")
    lora_full = replace(full, mode="lora")
    fewer = [] if memory_gib > _LARGE_GIB else [replace(none, num_layers=20)]
    ours = [replace(none, checkpointing=policy) for policy in _OURS]
    cases = [full, none, *fewer, lora, block, _compiled(full), lora_full, _compiled(block)]
    cases += [_compiled(none), *map(_compiled, fewer), _compiled(lora), _compiled(lora_full)]
    return cases + [replace(block, mode="lora"), replace(block, checkpointing="full"), *ours]


def cases_5b(memory_gib: float) -> list[Case]:
    """Return cases that train all weights of as many layers as fit, and LoRA on the whole 5B."""
    is_large = memory_gib > _LARGE_GIB
    block, lora = Case("5b", what="block"), Case("5b", mode="lora")
    none = Case("5b", num_layers=16 if is_large else 10)
    full, lora_full = (replace(case, checkpointing="full") for case in (none, lora))
    whole = [replace(full, num_layers=None)] if is_large else []
    ours = [replace(case, checkpointing=p) for case in (lora, *whole) for p in _OURS]
    cases = [*whole, full, none, lora, block, lora_full, _compiled(full), _compiled(block)]
    cases += [_compiled(none), _compiled(lora_full), *map(_compiled, whole), _compiled(lora)]
    return cases + [replace(block, mode="lora"), replace(block, checkpointing="full"), *ours]


def cases_15_5b() -> list[Case]:
    """Return LoRA on the whole 1.5-5B by the policy that keeps attention, then cases of fewer layers."""
    block = Case("1.5-5b", what="block")
    whole, full, lora_full, none, lora = steps = _steps_15("1.5-5b")
    cases = [whole, full, block, lora_full, _compiled(full), _compiled(block), none, lora]
    cases += [_compiled(case) for case in steps[2:]]
    return cases + [replace(lora, checkpointing=policy) for policy in _OURS]


def cases_15_5b_i2v() -> list[Case]:
    """Return the steps of 1.5-5B-I2V, whose blocks are those of 1.5-5B."""
    return _steps_15("1.5-5b-i2v")


def _steps_15(model: str) -> list[Case]:
    whole = Case(model, mode="lora", checkpointing="attention_kept")
    none = Case(model, num_layers=_NUM_LAYERS_15)
    both = [none, replace(none, mode="lora")]
    return [whole, *(replace(case, checkpointing="full") for case in both), *both]


def _compiled(case: Case) -> Case:
    return replace(case, engine="compiled")


def _measure(model: str, cases: list[Case], settings: Settings) -> Outcome:
    plan = Plan(settings.device, torch.bfloat16, num_pairs=_PAIRS, seconds=_SECONDS)
    if settings.is_tiny:
        # No compilation: it would take longer on a CPU than everything else.
        eager = [case for case in cases if case.engine == "eager"]
        cases = [replace(case, model=f"{model}-smallest", num_layers=None) for case in eager]
        cases = list(dict.fromkeys(cases))  # cases that differed only in their layers are now equal
        plan = replace(plan, num_pairs=3)
    return measure_cases(cases, plan, settings.deadline, settings.keep)


def _memory_gib(device: torch.device) -> float:
    if device.type != "cuda":
        return 0.0
    return torch.cuda.get_device_properties(device).total_memory / 2**30
