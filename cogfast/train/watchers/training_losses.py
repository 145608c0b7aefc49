"""Sums on the device that training adds to in each micro-batch, and that a log line reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cogfast.diffusion.loss import NUM_BANDS, VideoDiffusionLoss
from cogfast.distributed.process_groups import ProcessGroups


class BandLosses:
    """Sums training losses by band of timesteps, on the device. Bands are those of the held-out loss.

    loss: the run's loss, whose timesteps are counted; one of a user's own class may count others.
    """

    def __init__(self, loss: object, device: torch.device) -> None:
        self.starts: Tensor | None = None  # of all bands but the first
        if isinstance(loss, VideoDiffusionLoss):
            width = loss.sigma_sampler.num_idx / NUM_BANDS
            self.starts = torch.arange(1, NUM_BANDS, device=device) * width
        # Sums of losses, and their number; the last column has the samples of column prior.
        self.sums = torch.zeros(2, NUM_BANDS + 1, device=device)

    def add(self, timesteps: Tensor, losses: Tensor, is_prior: Tensor | None = None) -> None:
        """Add the losses [B] of a micro-batch at timesteps [B]. No host sync."""
        if self.starts is None:
            return
        losses = losses.detach().float()
        # A user's own add_noise may draw timesteps of any range and type.
        bands = torch.bucketize(timesteps.float(), self.starts, right=True)
        is_finite = losses.isfinite()
        added = torch.stack([losses.where(is_finite, 0.0), is_finite.float()])
        self.sums.index_add_(1, bands, added)
        if is_prior is not None:
            self.sums[:, NUM_BANDS] += (added * is_prior).sum(dim=1)

    def named(self, sums: Sequence[float]) -> dict[str, float | None]:
        """Return the means by key, None for a band without samples. sums: those of all ranks."""
        totals, numbers = sums[: NUM_BANDS + 1], sums[NUM_BANDS + 1 :]
        *bands, prior = [s / n if n else None for s, n in zip(totals, numbers, strict=True)]
        named = {f"train_loss_band_{i}": band for i, band in enumerate(bands)}
        return named if prior is None else {**named, "loss_prior": prior}


class LoggedValues:
    """Means of the values that a user's trainer logs by name (`Trainer.log`), until the next line."""

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups
        # By name: sum and number of finite values, [2]
        self.sums: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor | float) -> None:
        """Add a number, or the mean of a tensor's numbers. No host sync."""
        device = self.groups.device
        if not isinstance(value, Tensor):
            value = torch.full((), float(value), device=device)
        value = value.detach().to(device, torch.float32, non_blocking=True).mean()
        is_finite = value.isfinite()
        added = torch.stack([value.where(is_finite, 0.0), is_finite.float()])
        self.sums[name] = self.sums[name] + added if name in self.sums else added

    def agreed(self) -> tuple[list[str], Tensor]:
        """Return the names that any rank has, and this rank's sums of them, [2 * names]. A collective."""
        names = sorted({name for names in self.groups.gather([*self.sums]) for name in names})
        nothing = torch.zeros(2, device=self.groups.device)
        sums = [self.sums.get(name, nothing) for name in names]
        return names, torch.cat([nothing[:0], *sums])
