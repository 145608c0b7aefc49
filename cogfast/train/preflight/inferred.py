"""Infers what a configuration leaves open: the precision from weights, the layout of the data from paths."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import torch
from omegaconf import OmegaConf

from cogfast.config import Config, data_arguments
from cogfast.config.merged_config import COMMAND_LINE, refuse
from cogfast.data.sources.folders import SourceError, named
from cogfast.data.sources.layout import MODULE, layout_of_all, layouts_of
from cogfast.model.weights.open import open_source
from cogfast.model.weights.source import WeightSource

logger = logging.getLogger(__name__)


def precision_values(source: WeightSource) -> dict[str, bool]:
    """Return the precision keys for the dtype of a checkpoint.

    fp16 needs a GPU. Without one, fp16 weights run in float32, which represents them exactly.
    """
    dtype = source.main_dtype
    return {
        "deepspeed.fp16.enabled": dtype == torch.float16 and torch.cuda.is_available(),
        "deepspeed.bf16.enabled": dtype == torch.bfloat16,
    }


def infer_precision(config: Config) -> None:
    """If the config sets neither bf16 nor fp16, use the dtype of args.load's weights.

    Modifies `config`.
    """
    load = config.args.get("load")
    # A value in any file counts, false too: a user who writes bf16: false means float32.
    is_configured = {"bf16", "fp16"} & set(config.deepspeed) or any(
        config.origins.get(f"args.{name}", "default") != "default" for name in ("bf16", "fp16")
    )
    if is_configured or not load or not Path(load).exists():
        return
    for key, is_on in precision_values(open_source(Path(load))).items():
        # A false value is left out: an absent section and a disabled one mean the same.
        if is_on:
            name = key.split(".")[1]
            config.deepspeed[name] = {"enabled": True}
            config.args[name] = True
            config.origins[key] = config.origins[f"args.{name}"] = "args.load"
            logger.info("precision: %s, the dtype of the weights of args.load=%s", name, load)


def infer_layout(config: Config) -> Config:
    """Return `config` with the data set that can read args.train_data and args.valid_data.

    Only in place of a VideoFolder of a file that cannot read one of them: the models' files name it,
    and users then give a manifest, say. ValueError if several data sets could read them.
    """
    target, key = config.data.get("target"), "args.train_data"
    sources = [*config.args.train_data, *config.args.valid_data]
    is_given = config.origins.get("data.target") == COMMAND_LINE
    if is_given or target not in ("data_video.SFTDataset", f"{MODULE}.VideoFolder"):
        return config
    if all("VideoFolder" in (layouts_of(source) or ["VideoFolder"]) for source in sources):
        return config
    try:
        found = layout_of_all(sources)
    except SourceError as error:
        refuse(config, key, f"{key}={error}")
    if found is None:
        return config
    # With the defaults of SAT's class.
    params = data_arguments(config)
    section = OmegaConf.create({"target": f"{MODULE}.{found}", "params": dict(params)})
    logger.info(
        "data.target=%s, the layout of %s, in place of %s", section.target, named(sources), target
    )
    origins = config.origins | {"data.target": key}
    return dataclasses.replace(config, data=section, origins=origins)
