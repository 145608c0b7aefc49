"""Configuration: reads YAML files, checks every key and builds the objects that they name."""

from cogfast.config.components import instantiate, resolve
from cogfast.config.load import data_arguments, load_config, with_words
from cogfast.config.merged_config import Config

__all__ = ["Config", "data_arguments", "instantiate", "load_config", "resolve", "with_words"]
