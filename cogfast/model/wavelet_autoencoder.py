"""The public names of this module have moved, see cogfast/moved.py."""

from typing import TYPE_CHECKING

from cogfast.moved import attributes_of

if TYPE_CHECKING:
    from cogfast.extensions.wavelet.wavelet_autoencoder import WaveletAutoencoder, WaveletState

__all__ = ["WaveletAutoencoder", "WaveletState"]
__getattr__, __dir__ = attributes_of(__name__)
