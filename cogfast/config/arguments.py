"""The `args` and `model` sections: what all rooms and extensions declare, with SAT's names."""

from __future__ import annotations

from omegaconf import OmegaConf

from cogfast.config.merged_config import Config, to_dict
from cogfast.core.keys import ordered
from cogfast.core.values import validated
from cogfast.train.keys import ModelKeys, TrainKeys

# SAT's key of the network; args.checkpoint_activations replaces it.
_RECOMPUTE = "network_config.params.transformer_args.checkpoint_activations"
# First key of each group of `args` -> the group's heading in docs/options.md
GROUPS = {
    "experiment_name": "run and weights",
    "train_data": "data",
    "batch_size": "training step",
    "lr": "learning rate",
    "eval_interval": "evaluation",
    "force_inference": "sampling",
}


@ordered
class TrainArguments(TrainKeys):
    """The `args` section."""

    @classmethod
    def from_config(cls, config: Config) -> TrainArguments:
        """Build the arguments from a checked configuration."""
        known = cls.model_fields
        values = {k: v for k, v in to_dict(config.args).items() if k in known}
        if values.get("activation_checkpointing") is None:
            asks = values.get("checkpoint_activations")
            asks = OmegaConf.select(config.model, _RECOMPUTE) if asks is None else asks
            values["activation_checkpointing"] = "auto" if asks else "none"
        if values.get("train_iters") is None and values.get("epochs") is None:
            values["train_iters"] = 10000  # SAT's default
        return validated(values, cls, "args")


class ModelArguments(ModelKeys):
    """The `model` section without its components."""

    @classmethod
    def from_config(cls, config: Config) -> ModelArguments:
        known = cls.model_fields
        values = {k: v for k, v in to_dict(config.model).items() if k in known}
        return validated(values, cls, "model")
