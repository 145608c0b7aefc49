"""Compare the speed of a run with the time that was measured for such a step (plan/measured.json)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from cogfast.model.config import TransformerConfig
from cogfast.schema.arguments import TrainArguments
from cogfast.train.plan.activations import Policy
from cogfast.train.plan.measured import MeasuredStep, find_measured

logger = logging.getLogger(__name__)

_NUM_STEPS = 50  # the first steps compile, allocate and start readers
_NOTICEABLE = 0.02  # fraction of the measured time; less in a part is not mentioned


class SpeedCheck:
    """Logs once, at the first log line 50 steps after the start, how the step time compares.

    Without a measurement of the same model, size, policy and device it says nothing.
    """

    def __init__(
        self,
        config: TransformerConfig,
        args: TrainArguments,
        device: torch.device,
        start_step: int,
    ) -> None:
        self.config, self.args, self.device = config, args, device
        self.due = start_step + _NUM_STEPS
        self.is_done = False

    def after_log(self, line: Mapping, num_tokens: int, policies: Sequence[Policy]) -> None:
        """line: that of metrics.jsonl; num_tokens, policies: of the steps that it covers."""
        if self.is_done or line["step"] < self.due:
            return
        self.is_done = True
        found = find_measured(self.config, self.args, num_tokens, policies, self.device)
        if found is not None:
            text = compare(line, found, self.args.gradient_accumulation_steps)
            if text is not None:
                logger.info("step %d: %s", line["step"], text)


def compare(line: Mapping, found: MeasuredStep, accumulation: int) -> str | None:
    """Describe how a run's step compares with a measured one, which has one micro-batch and neither
    data, encoders nor other ranks. None if the number of micro-batches leaves it unknown."""
    wanted = {"data": 0.0, "encode": 0.0, "communication": 0.0}
    found_ms = {"data": line["data_wait_ms"], "encode": line["encode_ms"]}
    found_ms["communication"] = line["communication_ms"]
    forward_backward, optimizer = line["forward_backward_ms"], line["optimizer_ms"]
    if found.forward_backward_ms is not None and found.optimizer_ms is not None:
        wanted["forward and backward"] = accumulation * found.forward_backward_ms
        wanted["optimizer"] = found.optimizer_ms
        found_ms |= {"forward and backward": forward_backward, "optimizer": optimizer}
    elif accumulation == 1:
        name = "forward, backward and optimizer"
        wanted[name] = found.step_ms
        if forward_backward is not None and optimizer is not None:
            found_ms[name] = forward_backward + optimizer
    else:
        return None
    expected = sum(wanted.values())
    text = (
        f"{line['step_ms']:.0f} ms per step, {line['step_ms'] / expected:.2f} times the "
        f"{expected:.0f} ms that were measured for this model, size and policy on "
        f"{found.case.device}, without data, encoders and other ranks ({found.source})"
    )
    excess = {part: ms - wanted[part] for part, ms in found_ms.items() if ms is not None}
    largest = max(excess, key=excess.__getitem__, default=None)
    if largest is None or excess[largest] < _NOTICEABLE * expected:
        return text
    times = f"{found_ms[largest]:.0f} instead of {wanted[largest]:.0f} ms"
    return f"{text}; {largest} takes most of the difference: {times}"
