"""Loss weights by noise level that a SAT config can name.

VideoDiffusionLoss does not read them: its weight is 1 / (1 - alpha_sqrt^2) whatever the config
says, as upstream's is. They serve code that calls `DiscreteDenoiser.weight`.
"""

from __future__ import annotations

from torch import Tensor


class UnitWeighting:
    """1."""

    def __call__(self, level: Tensor) -> Tensor:
        return level.new_ones(level.shape)


class EDMWeighting:
    """(sigma^2 + sigma_data^2) / (sigma * sigma_data)^2, arXiv 2206.00364 table 1."""

    def __init__(self, sigma_data: float = 0.5) -> None:
        self.sigma_data = sigma_data

    def __call__(self, level: Tensor) -> Tensor:
        return (level**2 + self.sigma_data**2) / (level * self.sigma_data) ** 2


class VWeighting:
    """EDM's weight for data of standard deviation 1: 1 + 1 / sigma^2."""

    def __call__(self, level: Tensor) -> Tensor:
        return (level**2 + 1) / level**2


class EpsWeighting:
    """1 / sigma^2; infinite at 0."""

    def __call__(self, level: Tensor) -> Tensor:
        return level**-2.0
