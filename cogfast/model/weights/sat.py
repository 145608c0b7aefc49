"""The public names of this module have moved, see cogfast/moved.py."""

from typing import TYPE_CHECKING

from cogfast.moved import attributes_of

if TYPE_CHECKING:
    from cogfast.extensions.formats.sat import to_sat_state_dict

__all__ = ["to_sat_state_dict"]
__getattr__, __dir__ = attributes_of(__name__)
