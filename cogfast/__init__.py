"""Training of CogVideoX video diffusion transformers."""

__version__ = "0.1.0"
