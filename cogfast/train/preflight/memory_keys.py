"""Checks keys that save memory against each other."""

from __future__ import annotations

from omegaconf import OmegaConf

from cogfast.config import Config
from cogfast.config.arguments import TrainArguments
from cogfast.config.components import own_optimizer
from cogfast.config.merged_config import refuse


def check_optimizer_state(config: Config, args: TrainArguments) -> None:
    device = OmegaConf.select(config.deepspeed, "zero_optimization.offload_optimizer.device")
    offload = f"deepspeed.zero_optimization.offload_optimizer.device={device}"
    if args.ema_device == "cpu" and device in ("cpu", "nvme"):
        text = (
            f"args.ema_device=cpu, but {offload} takes all state of the optimizer off the device, "
            "the EMA included; leave out one of them"
        )
        refuse(config, "args.ema_device", text)
    if args.optimizer_moments == "8bit" and device == "nvme":
        text = (
            f"args.optimizer_moments=8bit does not work with {offload}, which moves float32 state; "
            "use device=cpu, or optimizer_moments=fp32"
        )
        refuse(config, "args.optimizer_moments", text)
    section = config.deepspeed.get("optimizer")
    if own_optimizer(section) and (args.zero_stage == 3 or device in ("cpu", "nvme")):
        cause = "args.zero_stage=3" if args.zero_stage == 3 else offload
        text = f"deepspeed.optimizer.type={section.type} does not work with {cause}, whose step sees a part of "
        text += "the model at a time; use ZeRO 0 to 2 without offload_optimizer, or sat.ops.FusedEmaAdam"
        refuse(config, "deepspeed.optimizer.type", text)


def check_offload(config: Config, args: TrainArguments) -> None:
    if not args.offload_activations:
        return
    key, policy = "args.offload_activations", args.activation_checkpointing
    text = f"{key}=true with args.activation_checkpointing={policy}"
    if policy == "none":
        text += " would copy every activation; use full, attention_kept, pointwise or auto"
        refuse(config, key, text)
    if args.compile and policy != "full":
        text += " does not support args.compile=true, which keeps activations inside compiled"
        refuse(config, key, f"{text} blocks; use full, or args.compile=false")
