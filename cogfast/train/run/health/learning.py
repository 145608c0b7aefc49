"""Is the run learning? The training loss by band of timesteps, and hints, each logged once.

The loss counts as flat if two things hold for all logged losses since the warm-up:
- it does not fall: the t value of its slope is above the 1% point of Student's distribution;
- a fall would show: with 99% confidence it fell by less than 5% from the first step to the last.
The noise is that of the logged losses around the line, so it is the run's own. It is tested after
200, 400, 800, ... steps, until one of the two tests decides. A run whose loss falls by 5% or more is
called flat in about 1% of the tests.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

import torch
from torch import Tensor

from cogfast.core.slot_random import SlotRandom
from cogfast.diffusion.loss import VideoDiffusionLoss
from cogfast.schema.arguments import TrainArguments
from cogfast.train.distributed.process_groups import ProcessGroups
from cogfast.train.distributed.zero_engine import ZeroEngine
from cogfast.train.run.health.update_ratio import UpdateRatio

logger = logging.getLogger(__name__)

FIRST_TEST = 200  # steps since the warm-up
_LEAST_LINES = 10  # fewer logged losses say little about their noise
_LEVEL = 0.01  # of both tests
_USEFUL_FALL = 0.05  # of the loss, from the first tested step to the last
_LOW = 0.1  # of args.lr: below, next to nothing is learned
_WARM = 0.5  # of args.lr: above, losses are tested
_SHORT_WARMUP = 10  # steps
# Root mean square of a gradient. Adam's eps is 1e-8 by default: below it, updates shrink with gradients.
_LEAST_GRADIENT = 1e-8
_VANISHED_LINES = 3  # in a row


class BandLosses:
    """Sums training losses by band of timesteps, on the device. Bands are those of the held-out loss.

    loss: the run's loss; one of a user's own class draws timesteps that are not known here.
    """

    def __init__(self, num_bands: int, loss: object, device: torch.device) -> None:
        self.num_bands = num_bands
        self.sampler = loss.sigma_sampler if isinstance(loss, VideoDiffusionLoss) else None
        self.sums = torch.zeros(2, num_bands, device=device)  # of losses, and their number

    def add(self, rng: SlotRandom, losses: Tensor) -> None:
        """Add the losses [B] of a micro-batch whose draws are those of `rng`. No host sync."""
        if self.sampler is None:
            return
        losses = losses.detach().float()
        # A draw is a function of its key: these are the timesteps that the loss has drawn.
        bands = self.sampler.sample(rng) * self.num_bands // self.sampler.num_idx
        is_finite = losses.isfinite()
        self.sums[0].index_add_(0, bands, losses.where(is_finite, 0.0))
        self.sums[1].index_add_(0, bands, is_finite.float())

    def named(self, sums: Sequence[float]) -> dict[str, float | None]:
        """Return the means by key, None for a band without samples. sums: those of all ranks."""
        totals, numbers = sums[: self.num_bands], sums[self.num_bands :]
        pairs = enumerate(zip(totals, numbers, strict=True))
        return {f"train_loss_band_{i}": s / n if n else None for i, (s, n) in pairs}


@dataclass(frozen=True, slots=True)
class Trend:
    """A straight line through losses. change: from the first to the last, as a fraction of their
    mean; error: its standard error; margin: the error times the 1% point of Student's t."""

    change: float
    error: float
    margin: float

    @property
    def falls(self) -> bool:
        return self.change < -self.margin

    @property
    def is_flat(self) -> bool:
        return not self.falls and -self.change + self.margin < _USEFUL_FALL


def trend(steps: Sequence[float], losses: Sequence[float]) -> Trend:
    """Fit a line by least squares; at least three losses, of independent noise."""
    middle, mean = fmean(steps), fmean(losses)
    spread = sum((x - middle) ** 2 for x in steps)
    slope = sum((x - middle) * y for x, y in zip(steps, losses, strict=True)) / spread
    left = [y - mean - slope * (x - middle) for x, y in zip(steps, losses, strict=True)]
    freedom = len(losses) - 2
    scale = (steps[-1] - steps[0]) / abs(mean) if mean else math.inf
    error = math.sqrt(sum(r * r for r in left) / freedom / spread) * scale
    return Trend(slope * scale, error, error * student_point(freedom))


def student_point(freedom: int) -> float:
    """Return the 1 - _LEVEL point of Student's t, within 1% from 8 degrees of freedom on."""
    # Cornish and Fisher's expansion; Abramowitz and Stegun 26.7.5.
    z = NormalDist().inv_cdf(1 - _LEVEL)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


class LearningHints:
    """Logs a hint when the loss is flat, when gradients vanish, and while SAT's warm-up holds the rate.

    rate: learning rate by step, from 0. num_trained: parameters.
    """

    def __init__(
        self, args: TrainArguments, rate: Callable[[int], float], num_steps: int, num_trained: int
    ) -> None:
        self.args, self.rate, self.num_steps = args, rate, num_steps
        self.least_norm = _LEAST_GRADIENT * math.sqrt(num_trained)
        self.warm_step = num_steps
        self.num_vanished = 0  # lines in a row
        self.is_decided = self.has_vanished = False

    def start(self, step: int) -> None:
        """Note the warm-up of the steps from `step` on. Call it before the first line."""
        lr, steps = self.args.lr, range(self.num_steps)
        self.warm_step = next((s for s in steps if self.rate(s) >= _WARM * lr), self.num_steps)
        low = next((s for s in steps[step:] if self.rate(s) > _LOW * lr), self.num_steps)
        warmup_steps = self.args.warmup_steps
        # warn_of_long_warmup has reported it already.
        is_reported = warmup_steps is not None and warmup_steps > self.num_steps
        if self.args.lr_schedule != "sat" or is_reported or low - step < _SHORT_WARMUP:
            return
        until = "to the end of the run"
        if low < self.num_steps:
            until = f"until step {low}; then it is {self.rate(low):.2g}"
        below = round(100 * _LOW)
        text = f"SAT's warm-up keeps the learning rate below {below}%% of args.lr=%g %s"
        logger.info(text, lr, until)

    def after_line(self, step: int, lines: Sequence[dict]) -> None:
        """Look at the lines of metrics.jsonl; the last is that of `step`."""
        self._check_gradient(lines[-1])
        before = next((line["step"] for line in reversed(lines[:-1]) if "loss" in line), 0)
        if not self.is_decided and _is_test_due(before - self.warm_step, step - self.warm_step):
            self._check_loss(lines)

    def _check_gradient(self, line: dict) -> None:
        norm = line.get("grad_norm")
        is_small = norm is not None and norm < self.least_norm
        self.num_vanished = self.num_vanished + 1 if is_small else 0
        if self.num_vanished < _VANISHED_LINES or self.has_vanished:
            return
        self.has_vanished = True
        logger.warning(
            "gradients have vanished: norm %.2g at step %d, less than %.0e per weight, where Adam hardly "
            "moves them; check that args.load has trained weights, without which LoRA cannot learn",
            norm,
            line["step"],
            _LEAST_GRADIENT,
        )

    def _check_loss(self, lines: Sequence[dict]) -> None:
        found = [line for line in lines if line["step"] > self.warm_step and _loss_of(line)]
        if len(found) < _LEAST_LINES:
            return
        # Equal weights take out how many timesteps of each band were drawn.
        bands = [[v for k, v in line.items() if k.startswith("train_loss_band_")] for line in found]
        losses = [_loss_of(line) for line in found]
        if all(values and None not in values for values in bands):
            losses = [fmean(values) for values in bands]
        line = trend([line["step"] for line in found], losses)
        self.is_decided = line.falls or line.is_flat
        if line.is_flat:
            logger.warning(
                "the loss %s from step %d to %d (%+.2f%% +- %.2f%%); compare valid_loss and the videos "
                "of two evaluations: if they are alike, args.lr may be too low",
                "rises" if line.change > line.margin else "is flat within its noise",
                found[0]["step"],
                found[-1]["step"],
                100 * line.change,
                100 * line.error,
            )


class Learning:
    """All that says whether a run learns. loss: the run's, see BandLosses."""

    def __init__(
        self,
        args: TrainArguments,
        loss: object,
        engine: ZeroEngine,
        groups: ProcessGroups,
        hints: LearningHints,
    ) -> None:
        self.bands = BandLosses(args.eval_timestep_bands, loss, groups.device)
        self.update_ratio = UpdateRatio(engine, groups)
        self.hints = hints


def _loss_of(line: dict) -> float:
    """Return the training loss of a line of metrics.jsonl, 0 if it has none."""
    loss = line.get("loss")
    return loss if loss is not None and math.isfinite(loss) else 0.0


def _is_test_due(before: int, now: int) -> bool:
    """Whether 200 steps, or a doubling of them, lie between two logged steps."""
    if now < FIRST_TEST:
        return False
    due = FIRST_TEST * 2 ** int(math.log2(now / FIRST_TEST))
    return before < due <= now
