"""The names that a configuration may have. Its public names are in cogfast/door (cogfast/moved.py)."""

from typing import TYPE_CHECKING

from cogfast.moved import attributes_of

if TYPE_CHECKING:
    from cogfast.config.components import instantiate, resolve
    from cogfast.door.load import load_config
    from cogfast.door.merged_config import Config

__all__ = ["Config", "instantiate", "load_config", "resolve"]
__getattr__, __dir__ = attributes_of(__name__)
