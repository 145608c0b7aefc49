"""Compare outputs, losses and gradients on a device with stored numbers of upstream's model.

The numbers are in tests/golden. In float32, the limits are the tolerances in the notes of the golden
files, times a factor for the summation order of a GPU. In bf16, a relative error may be twice that of
the CPU in bf16 plus a floor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from bench.harness.outcome import Outcome, Row, Settings
from cogfast.config import load_config
from cogfast.model.embeddings import sinusoid
from cogfast.model.transformer import DiffusionTransformer, build_transformer
from cogfast.model.weights.load import load_transformer
from cogfast.model.weights.names import sat_name

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden"
CASES = ("t2v_2b", "t2v_5b", "i2v_1.5_5b")

# Limits for float32 on the CPU that made the files. Upstream's own float32 numbers differ from float64
# by a fifth of these.
_OUTPUT, _LOSS, _GRADIENT, _GRADIENT_FLOOR = 1e-5, 1e-6, 1e-5, 1e-8
_SINUSOID = 4e-5  # timestep 863 turns the last bit of a frequency into 2.6e-5
_GPU_FACTOR = 4.0  # a different summation order, and another attention algorithm
_STORED_IN_BF16 = 2**-8  # some gradients of the 1.5 case are stored in bf16
_BF16_FLOOR = 2e-3  # half of bf16's spacing
# The gradient of a key norm's bias in 2B is zero in exact arithmetic, so it has no relative error.
_SMALLEST_GRADIENT = 1e-6


@dataclass(frozen=True, slots=True)
class Answers:
    """Outputs in SAT's layout, loss and gradients of a case, moved to the CPU in float32."""

    outputs: dict[str, Tensor]
    loss: float
    gradients: dict[str, Tensor]


def check_goldens(settings: Settings) -> Outcome:
    """Check every case in float32 and bf16: one row each."""
    torch.set_float32_matmul_precision("highest")  # no TF32
    torch.backends.cudnn.allow_tf32 = False
    factor = tolerance_factor(settings.device)
    rows: list[Row] = []
    problems: list[str] = []
    numbers = {"float32_tolerance_factor": factor, "bf16_relative_floor": _BF16_FLOOR}
    shown = ("case", "output_largest_error", "output_relative_error", "loss_relative_error")
    shown += ("gradient_worst_error_of_largest", "gradient_worst_relative_error", "num_gradients")
    for name in CASES:
        stored = load_file(GOLDEN / name / "io.safetensors")
        for dtype in (torch.float32, torch.bfloat16):
            answers = answer(build(name), stored, settings.device, dtype)
            if dtype == torch.float32:
                row, wrong = compare_float32(stored, answers, factor)
                row["sinusoid_largest_error"] = error = _sinusoid_error(stored, settings.device)
                if not error <= _SINUSOID * factor:
                    wrong.append(f"sinusoid: {error:.2e} > {_SINUSOID * factor:.2e}")
            else:
                on_cpu = answer(build(name), stored, torch.device("cpu"), dtype)
                row, wrong = compare_bf16(stored, answers, on_cpu)
            label = f"{name} {str(dtype).removeprefix('torch.')}"
            rows.append({"case": label, **row})
            problems += [f"{label}: {text}" for text in wrong]
            settings.keep(Outcome(numbers, rows, shown, problems))
    return Outcome(numbers, rows, shown, problems)


def tolerance_factor(device: torch.device) -> float:
    """Return the factor on float32 limits for a device."""
    return _GPU_FACTOR if device.type == "cuda" else 1.0


def build(name: str) -> DiffusionTransformer:
    """Build the model of a case with its weights, in float32 on the CPU."""
    transformer = build_transformer(load_config([GOLDEN / name / "config.yaml"]).model)
    report = load_transformer(transformer, GOLDEN / name)
    assert not report.missing and not report.unexpected, str(report)
    return transformer


def answer(
    transformer: DiffusionTransformer,
    stored: dict[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> Answers:
    """Compute every stored output, the loss mean(output^2) and its gradients."""
    transformer.to(device, dtype)
    for parameter in transformer.parameters():
        parameter.requires_grad_(True)
    given = {key: value.to(device) for key, value in stored.items() if "grad." not in key}
    # The gradient of fc1 is proportional to the timestep sinusoid, whose float32 exp rounds differently on
    # each machine. So fc1 gets the stored sinusoid, and _sinusoid_error checks the computed one.
    transformer.time_embedding.fc1.register_forward_pre_hook(
        lambda _, __: (given["act.time_embed_in"].to(dtype),)
    )
    x, context = (given[k].to(dtype).clone().requires_grad_() for k in ("x", "context"))
    output = _run(transformer, given, x, context, given.get("concat_images"))
    loss = output.float().square().mean()
    loss.backward()
    gradients = {f"grad.{sat_name(n)}": p.grad for n, p in transformer.named_parameters()}
    gradients |= {"grad.input.x": x.grad, "grad.input.context": context.grad}
    outputs = {"output": output}
    with torch.no_grad():
        image = given.get("concat_images")
        image = None if image is None else image[:, :2]
        outputs["short.output"] = _run(transformer, given, given["short.x"], context, image)
        if "reshaped.x" in given:
            image = given["reshaped.concat_images"]
            outputs["reshaped.output"] = _run(
                transformer, given, given["reshaped.x"], context, image
            )
    on_cpu = lambda tensors: {k: v.detach().float().cpu() for k, v in tensors.items()}
    kept = {k: v for k, v in gradients.items() if k in stored}
    assert all(v is not None for v in kept.values()), "a stored gradient was not computed"
    return Answers(on_cpu(outputs), loss.item(), on_cpu(kept))


def _run(
    transformer: DiffusionTransformer,
    given: dict[str, Tensor],
    x: Tensor,
    context: Tensor,
    image: Tensor | None,
) -> Tensor:
    """Run the model on latents and image latents [B, T, C, h, w]; return the same layout (SAT's)."""
    image = None if image is None else image.transpose(1, 2)
    output = transformer(x.transpose(1, 2), given["timesteps"], context, image, given.get("ofs"))
    return output.transpose(1, 2)


def compare_float32(
    stored: dict[str, Tensor], answers: Answers, factor: float
) -> tuple[dict[str, object], list[str]]:
    """Return a row of errors, and a sentence for each error above `factor` times its limit."""
    wrong = []

    def check(what: str, error: float, limit: float) -> float:
        if not error <= limit * factor:  # also true for NaN
            wrong.append(f"{what}: {error:.2e} > {limit * factor:.2e}")
        return error

    largest = max(
        check(key, (value - stored[key]).abs().max().item(), _OUTPUT)
        for key, value in answers.outputs.items()
    )
    expected = stored["loss"].item()
    loss = check("loss", abs(answers.loss - expected) / abs(expected), _LOSS)
    worst, worst_name = 0.0, ""
    for key, gradient in answers.gradients.items():
        truth = stored[key].float()
        # Limits are relative to the largest entry of the gradient.
        top = truth.abs().max().item()
        error = (gradient.reshape(truth.shape) - truth).abs().max().item()
        relative = _STORED_IN_BF16 if stored[key].dtype == torch.bfloat16 else _GRADIENT
        check(key, error, relative * top + _GRADIENT_FLOOR)
        if relative == _GRADIENT and error / (top + _GRADIENT_FLOOR / _GRADIENT) > worst:
            worst, worst_name = error / (top + _GRADIENT_FLOOR / _GRADIENT), key
    row = {
        "output_largest_error": largest,
        "loss_relative_error": loss,
        "gradient_worst_error_of_largest": worst,
        "gradient_worst_name": worst_name,
        "num_gradients": len(answers.gradients),
    }
    return row, wrong


def compare_bf16(
    stored: dict[str, Tensor], answers: Answers, on_cpu: Answers
) -> tuple[dict[str, object], list[str]]:
    """Return relative errors against the stored float32 numbers, and the sentences of those too large."""
    ours, cpu = _relative_errors(stored, answers), _relative_errors(stored, on_cpu)
    wrong = [
        f"{key}: {error:.2e} > twice the CPU's {cpu[key]:.2e} + {_BF16_FLOOR:.0e}"
        for key, error in ours.items()
        if not error <= 2 * cpu[key] + _BF16_FLOOR
    ]
    gradients = {key: error for key, error in ours.items() if key.startswith("grad.")}
    worst = max(gradients, key=gradients.__getitem__)
    row: dict[str, object] = {"gradient_worst_name": worst, "num_gradients": len(gradients)}
    for name, errors in (("", ours), ("_of_cpu", cpu)):
        row[f"output_relative_error{name}"] = errors["output"]
        row[f"loss_relative_error{name}"] = errors["loss"]
        row[f"gradient_worst_relative_error{name}"] = errors[worst]
    return row, wrong


def _relative_errors(stored: dict[str, Tensor], answers: Answers) -> dict[str, float]:
    norm: Callable[[Tensor], float] = lambda x: x.double().norm().item()
    errors = {
        key: norm(value - stored[key]) / norm(stored[key]) for key, value in answers.outputs.items()
    }
    expected = stored["loss"].item()
    errors["loss"] = abs(answers.loss - expected) / abs(expected)
    for key, gradient in answers.gradients.items():
        truth = stored[key].float()
        if truth.abs().max() >= _SMALLEST_GRADIENT:
            errors[key] = norm(gradient.reshape(truth.shape) - truth) / norm(truth)
    return errors


def _sinusoid_error(stored: dict[str, Tensor], device: torch.device) -> float:
    expected = stored["act.time_embed_in"]
    ours = sinusoid(stored["timesteps"].to(device), expected.shape[1])
    return (ours.cpu() - expected).abs().max().item()
