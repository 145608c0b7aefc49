"""Compare outputs and gradients of the two sides of bench.step before anything is timed.

The reference is diffusers' model in float32 with two blocks, embeddings and output layer, at the full
number of tokens. The error of cogfast may be twice that of diffusers in the timed dtype plus a floor,
for the output and for each gradient.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bench.steps.step_models import Batch, Variant, draw_batch
from bench.steps.step_sides import SIDES, Side, Theirs, free_memory

_NUM_LAYERS = 2
_FACTOR = 2.0
# Relative to the norm of a tensor: the spacing of half-precision numbers; in float32, the effect of a
# different summation order.
_FLOORS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 1e-4}
# A constant added to every key does not change the softmax. So without a rotation this gradient is zero
# in exact arithmetic, and its computed value is rounding noise.
_WITHOUT_MEANING = ".norm_k.bias"


def compare_sides(variant: Variant, is_compiled: bool) -> tuple[dict[str, object], list[str]]:
    """Return the largest errors of both sides, and a sentence for each error above its limit.

    ImportError if diffusers, or peft for LoRA, is not installed.
    """
    layers = min(_NUM_LAYERS, variant.config.num_layers)
    variant = replace(variant, config=replace(variant.config, num_layers=layers))
    batch = draw_batch(variant)
    tensors = (batch.latents, batch.timesteps, batch.text, batch.target)
    float32 = Batch(*(x.float() if x.is_floating_point() else x for x in tensors))
    reference = Theirs(variant, torch.float32)
    reference.use_checkpointing("full")  # 1.5-5B does not fit otherwise; the results are the same
    truth = _answer(reference, float32)
    del reference
    free_memory(variant.device)
    answers = {}
    for name, build in SIDES.items():
        side = build(variant)
        if is_compiled:
            torch._dynamo.reset()
            side.compile_blocks()
        answers[name] = _answer(side, batch)
        del side
        free_memory(variant.device)
    return judge(truth, answers["ours"], answers["diffusers"], _FLOORS[variant.dtype])


def _answer(side: Side, batch: Batch) -> dict[str, Tensor]:
    """Compute the output and the gradients of its squared distance to the target."""
    output = side.forward(batch)
    (output - batch.target).float().square().mean().backward()
    return {"output": output.detach(), **side.gradients()}


def judge(
    truth: dict[str, Tensor], ours: dict[str, Tensor], theirs: dict[str, Tensor], floor: float
) -> tuple[dict[str, object], list[str]]:
    """Judge the answers, which have diffusers' names, by the relative errors of their norms."""
    assert truth.keys() == theirs.keys() == ours.keys(), truth.keys() ^ ours.keys()
    worst, problems = {"ours": 0.0, "diffusers": 0.0}, []
    for name, expected in truth.items():
        if name.endswith(_WITHOUT_MEANING):
            continue
        errors = {
            side: _relative_error(given[name], expected)
            for side, given in (("ours", ours), ("diffusers", theirs))
        }
        limit = _FACTOR * errors["diffusers"] + floor
        if not errors["ours"] <= limit:  # also true for NaN
            problems.append(f"{name}: relative error {errors['ours']:.2e} > {limit:.2e}")
        if name != "output":
            worst = {side: max(worst[side], error) for side, error in errors.items()}
    output = {
        "ours_output_relative_error": _relative_error(ours["output"], truth["output"]),
        "diffusers_output_relative_error": _relative_error(theirs["output"], truth["output"]),
    }
    gradients = {f"{side}_worst_gradient_relative_error": e for side, e in worst.items()}
    return {**output, **gradients, "num_gradients_compared": len(truth) - 1}, problems


def _relative_error(values: Tensor, truth: Tensor) -> float:
    values = values.float().reshape(truth.shape)
    return ((values - truth).norm() / truth.norm()).item()
