"""The public names of this module have moved, see cogfast/moved.py."""

from typing import TYPE_CHECKING

from cogfast.moved import attributes_of

if TYPE_CHECKING:
    from cogfast.extensions.diffusers_kernels.diffusers_kernels import apply_to_diffusers, restore

__all__ = ["apply_to_diffusers", "restore"]
__getattr__, __dir__ = attributes_of(__name__)
