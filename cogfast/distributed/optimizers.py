"""The public names of this module have moved, see cogfast/moved.py."""

from typing import TYPE_CHECKING

from cogfast.moved import attributes_of

if TYPE_CHECKING:
    from cogfast.extensions.prodigy_muon.optimizers import Muon, Prodigy

__all__ = ["Muon", "Prodigy"]
__getattr__, __dir__ = attributes_of(__name__)
