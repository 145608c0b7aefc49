"""The public names of this module have moved, see cogfast/moved.py."""

from cogfast.moved import attributes_of

__getattr__ = attributes_of(__name__)
