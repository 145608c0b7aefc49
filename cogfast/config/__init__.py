"""What a configuration may name. load_config, which reads one, is in cogfast/door."""

from cogfast.moved import attributes_of

__getattr__, __dir__ = attributes_of(__name__)
