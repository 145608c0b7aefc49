"""Compare FusedEmaAdam on a device with stored float64 numbers (tests/golden/fused_ema_adam)."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import torch
from safetensors.torch import load_file

from bench.harness.outcome import Row
from cogfast.kernels.fused_ema_adam import FusedEmaAdam

_HYPER = {
    "lr": 1e-3,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.01,
}  # those of the golden files
_RTOL, _ATOL = 1e-6, 1e-7  # for float32, from the notes of the golden files
# adam_w_mode, use_num_updates, bias_correction
VARIANTS = (
    (True, True, True),
    (True, True, False),
    (True, False, True),
    (False, True, True),
    (False, False, True),
)


def check_optimizer(golden: Path, device: torch.device) -> tuple[list[Row], list[str]]:
    """Check five steps of every variant, on a GPU with each choice of kernels.

    Returns rows with the worst error in units of the tolerance, and the problems found.
    """
    stored = load_file(golden / "fused_ema_adam" / "golden_f64.safetensors")
    rows: list[Row] = []
    problems = []
    choices = ("triton", "torch") if device.type == "cuda" else ("torch",)
    for (adam_w_mode, num_updates, bias_correction), kernels in product(VARIANTS, choices):
        key = f"adamw_{adam_w_mode}.num_updates_{num_updates}.bias_correction_{bias_correction}"
        case = f"FusedEmaAdam {kernels} {key}"
        p = stored["p0"].float().to(device).requires_grad_()
        optimizer = FusedEmaAdam(
            [p],
            adam_w_mode=adam_w_mode,
            use_num_updates=num_updates,
            bias_correction=bias_correction,
            kernels=kernels,
            **_HYPER,
        )
        copy = optimizer.low_precision_copies[p] = torch.zeros_like(p, dtype=torch.bfloat16)
        worst = 0.0
        for i, gradient in enumerate(stored["grads"]):
            p.grad = gradient.float().to(device)
            optimizer.found_inf = torch.zeros((), device=device)  # a tensor, as ZeRO sets it
            optimizer.step()
            for name, value in _tensors(optimizer, p).items():
                truth = stored.get(f"{key}.{name}")
                if truth is not None:
                    error = (value.double().cpu() - truth[i]).abs()
                    worst = max(worst, (error / (_RTOL * truth[i].abs() + _ATOL)).max().item())
        if not worst <= 1:
            problems.append(f"{case}: {worst:.3g} times the tolerance")
        if not torch.equal(copy, p.detach().bfloat16()):
            problems.append(f"{case}: the bf16 copy differs from the rounded weights")
        # A step with found_inf = 1 must change nothing.
        before = {name: value.clone() for name, value in _tensors(optimizer, p).items()}
        optimizer.found_inf = torch.ones((), device=device)
        optimizer.step()
        after = _tensors(optimizer, p)
        problems += [
            f"{case}: {name} changes in a step that must be skipped"
            for name, value in before.items()
            if not torch.equal(value, after[name])
        ]
        rows.append({"case": case, "worst_error_over_tolerance": worst})
    return rows, problems


def _tensors(optimizer: FusedEmaAdam, p: torch.Tensor) -> dict[str, torch.Tensor]:
    state = optimizer.state[p]
    kept = {"m": state["exp_avg"], "v": state["exp_avg_sq"], "shadow": state["shadow"]}
    return {"p": p.detach(), **kept}
