"""Checks keys that save memory against each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cogfast.config.components import own_optimizer
from cogfast.config.sat_unused import OPTIMIZER
from cogfast.core.values import KeyProblem, select
from cogfast.train.keys import TrainKeys


def check_optimizer_state(args: TrainKeys, section: Mapping[str, Any]) -> None:
    """section: DeepSpeed's."""
    device = select(section, "zero_optimization.offload_optimizer.device")
    offload = f"deepspeed.zero_optimization.offload_optimizer.device={device}"
    if args.ema_device == "cpu" and device in ("cpu", "nvme"):
        text = (
            f"args.ema_device=cpu, but {offload} takes all state of the optimizer off the device, "
            "the EMA included; leave out one of them"
        )
        raise args.problem("ema_device", text)
    if args.optimizer_moments == "8bit" and device == "nvme":
        text = (
            f"args.optimizer_moments=8bit does not work with {offload}, which moves float32 state; "
            "use device=cpu, or optimizer_moments=fp32"
        )
        raise args.problem("optimizer_moments", text)
    optimizer = section.get("optimizer") or {}
    if own_optimizer(optimizer) and (args.zero_stage == 3 or device in ("cpu", "nvme")):
        cause = "args.zero_stage=3" if args.zero_stage == 3 else offload
        text = f"deepspeed.optimizer.type={optimizer['type']} does not work with {cause}, whose step sees a part of "
        text += "the model at a time; use ZeRO 0 to 2 without offload_optimizer, or sat.ops.FusedEmaAdam"
        raise KeyProblem(f"{OPTIMIZER}.type", text)


def check_offload(args: TrainKeys) -> None:
    if not args.offload_activations:
        return
    key, policy = args.key("offload_activations"), args.activation_checkpointing
    text = f"{key}=true with args.activation_checkpointing={policy}"
    if policy == "none":
        text += " would copy every activation; use full, attention_kept, pointwise or auto"
        raise KeyProblem(key, text)
    if args.compile and policy != "full":
        text += " does not support args.compile=true, which keeps activations inside compiled"
        raise KeyProblem(key, f"{text} blocks; use full, or args.compile=false")
