"""Names the first loss or gradient of a run that is not finite; then args.nonfinite decides.

Each step leaves a mark on the device. Order and random draws of the data depend on the step alone: after
a log line that reports a bad step, all ranks read its micro-batches again and run them forward.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cogfast.core.values import printable
from cogfast.data.batches import Batch
from cogfast.data.datasets import CaptionedVideos, SizedDataset
from cogfast.data.global_order import GlobalOrder
from cogfast.distributed.lost_ranks import UnsharedError, is_of_another_rank
from cogfast.distributed.process_groups import OtherRankError, ProcessGroups
from cogfast.distributed.zero_engine import ZeroEngine
from cogfast.model.transformer import DiffusionTransformer
from cogfast.train.assembly import assemble_batches
from cogfast.train.keys import TrainKeys
from cogfast.train.watchers.watcher import Watcher

logger = logging.getLogger(__name__)

MOST_IN_A_ROW = 20  # steps that are skipped
_MOST_REPORTS = 3  # in one process: each takes time
_MOST_RANKS = 8  # whose findings are logged


class NonfiniteCheck(Watcher):
    """Reports bad steps after log lines. A step is bad if a loss is not finite, or if it was skipped.

    loss_at: returns the loss of a micro-batch of a step, as compute_loss. save: saves a checkpoint of
    the current step and returns whether that succeeded.
    """

    def __init__(
        self,
        args: TrainKeys,
        groups: ProcessGroups,
        folder: Path,
        engine: ZeroEngine,
        dataset: SizedDataset,
        order: GlobalOrder,
        loss_at: Callable[[int, Batch], Tensor],
        save: Callable[[], bool],
    ) -> None:
        self.args, self.groups, self.folder, self.engine = args, groups, folder, engine
        self.dataset, self.order, self.loss_at, self.save = dataset, order, loss_at, save
        self._losses = torch.zeros((), device=groups.device)  # sum over the step's micro-batches
        # This rank's first bad step since the last log line.
        self._first = torch.full((), math.inf, device=groups.device)
        self._num_skipped = self._num_reports = 0
        self._is_fp16 = args.precision == "fp16"
        self._was_bad = False  # whether the step of the last log line was skipped
        self._next_look: int | None = None  # step

    def before_step(self, step: int) -> None:
        """End the run after MOST_IN_A_ROW skipped steps, wherever log lines are."""
        if self._next_look is None:
            self._next_look = step + MOST_IN_A_ROW
        elif step >= self._next_look:
            num_skipped = int(self.engine.num_skipped_in_a_row)  # sync: one in 20 good steps
            self._next_look = step + MOST_IN_A_ROW - num_skipped
            if num_skipped >= MOST_IN_A_ROW:
                self._react(step, num_skipped)

    def after_backward(self, loss: Tensor) -> None:
        self._losses += loss.detach()

    def after_step(self, step: int) -> None:
        """Mark a bad step on the device, without a wait for it."""
        is_bad = ~self._losses.isfinite()
        # In fp16, gradients overflow while the loss scale is searched.
        if not self._is_fp16:
            is_bad |= self.engine.num_skipped_in_a_row > 0
        # Division by 0 where the step is good: infinity, which is never the smallest.
        self._first = torch.minimum(self._first, step / is_bad.float())
        self._losses.zero_()

    def after_log(self, line: Mapping) -> None:
        """React to bad steps that a line of metrics.jsonl, the same on all ranks, has counted: args.nonfinite,
        MOST_IN_A_ROW or a spent loss scale may end the run by a RuntimeError."""
        before, self._num_skipped = self._num_skipped, line["skipped"]
        if line["skipped"] == before and not line["nonfinite_losses"]:
            self._was_bad = False
        else:
            self._react(line["step"], line["skipped_in_a_row"])

    def _react(self, step: int, num_skipped: int) -> None:
        first = min(self.groups.gather(self._first.item()))  # sync: after a bad step
        self._first.fill_(math.inf)
        is_scale_spent = bool(self.engine.is_loss_scale_spent)  # sync: after a bad step
        if is_scale_spent:
            first = min(first, step)
        if math.isinf(first):
            return
        was_bad, self._was_bad = self._was_bad, num_skipped > 0
        texts = [f"step {first:.0f}: a loss or gradient is not finite"]
        # One event for steps that are bad in a row.
        if not was_bad and self._num_reports < _MOST_REPORTS:
            self._num_reports += 1
            texts = self._report(int(first), step)
            self.engine.clock.restart()
        if self.args.nonfinite == "stop":
            end = f"the checkpoint of step {step} is saved"
            if not self.save():
                end = "its state is not saved: resume from an earlier checkpoint"
            raise RuntimeError(f"args.nonfinite=stop: {texts[0]}; {end}")
        check_skipped(step, num_skipped, is_scale_spent)

    def _report(self, bad: int, step: int) -> list[str]:
        """Run the bad step's micro-batches forward on all ranks; log and return what they show."""
        self.engine.transformer.eval()
        try:
            texts = self._run_again(bad)
        # `on_all` raises on all ranks what one has met, and training continues on all.
        except Exception as error:
            is_shared = isinstance(error, OtherRankError) or not is_of_another_rank(error)
            if isinstance(error, UnsharedError) or not is_shared:
                raise
            texts = [f"step {bad}: it cannot be run again ({type(error).__name__}: {error})"]
        self.engine.transformer.train()
        if self.groups.is_main:
            for text in texts[:_MOST_RANKS]:
                logger.warning("%s (run again with the weights after step %d)", text, step)
        return texts

    def _run_again(self, bad: int) -> list[str]:
        groups = self.groups
        network_ranks = groups.control if self.engine.stage == 3 else groups.model_control
        # In this process: workers would read ahead far more than is needed.
        args = self.args.changed(num_workers=0, max_bad_fraction=1.0)
        given = (self.dataset, args, groups, self.folder, bad - 1)
        with groups.on_all(lambda: assemble_batches(*given)) as batches:
            for _ in range(args.gradient_accumulation_steps):
                batch = groups.on_all(partial(next, batches), groups.model_control)
                found = groups.on_all(partial(self._find, bad, batch), network_ranks)
                ranks = [(*f, rank) for rank, f in enumerate(groups.gather(found)) if f is not None]
                if ranks:
                    # Ranks that share a model have the cause, or numbers that follow: cause first.
                    ranks.sort(key=lambda each: each[0])
                    return [f"step {bad}, rank {rank}: {text}" for _, text, rank in ranks]
        return [f"step {bad}: a loss or gradient is not finite, but all outputs of modules are"]

    @torch.no_grad()
    def _find(self, bad: int, batch: Batch) -> tuple[int, str] | None:
        """Return what is not finite in a micro-batch's forward pass, and how many tensors came before."""
        slots = list(batch["slots"])
        names = sample_names(batch, bad - 1, slots, self.dataset, self.order)
        with _watched(self.engine.transformer, len(slots)) as first:
            loss = self.loss_at(bad, batch)
        if not first.place and not loss.isfinite():  # sync: after a bad step
            first.place = "the loss, with a finite output of the network"
        if not first.place:
            return None
        if first.timesteps:
            pairs = zip(names, first.timesteps, strict=False)
            names = [f"{name} at timestep {timestep}" for name, timestep in pairs]
        samples = ", ".join(names[i] for i in first.rows or range(len(names)))
        return first.order, f"samples: {samples}; not finite: {first.place}"


class _FirstPlace:
    """The first tensor of a forward pass that is not finite, and the samples that have such numbers.

    order: number of tensors before it. rows: empty if its rows are no samples.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.place, self.order = "", 0
        self.rows: list[int] = []
        self.timesteps: list[int] = []

    def note_inputs(self, module: nn.Module, args: tuple, named: dict) -> None:
        inputs = inspect.signature(module.forward).bind(*args, **named).arguments
        if "timesteps" in inputs:
            self.timesteps = inputs["timesteps"].tolist()  # sync: after a bad step
        for name, value in inputs.items():
            self.check(f"the network's input {name}", value)

    def note_output(self, name: str, module: nn.Module, args: tuple, output: Any) -> None:
        self.check(f"the output of {name or 'the network'}", output)

    def check(self, what: str, values: Any) -> None:
        for value in tree_leaves(values):
            if self.place or not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            is_bad = ~value.isfinite()
            number = int(is_bad.sum())  # sync: after a bad step
            if not number:
                self.order += 1
                continue
            self.place = f"{what} ({number} of {value.numel()} values)"
            if value.ndim and len(value) == self.batch_size:
                rows = is_bad.reshape(len(value), -1).any(1)
                self.rows = rows.nonzero().flatten().tolist()  # sync: after a bad step


@contextmanager
def _watched(transformer: DiffusionTransformer, batch_size: int) -> Iterator[_FirstPlace]:
    """Look at inputs of the network and outputs of its modules in the block."""
    first = _FirstPlace(batch_size)
    with ExitStack() as stack:
        hook = transformer.register_forward_pre_hook(first.note_inputs, with_kwargs=True)
        stack.callback(hook.remove)
        for name, module in transformer.named_modules():
            hook = module.register_forward_hook(partial(first.note_output, name))
            stack.callback(hook.remove)
        # Compiled blocks would not call the hooks. Without any, torch._dynamo need not be imported.
        if any(block._compiled_call_impl is not None for block in transformer.blocks):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield first


def check_skipped(step: int, num_skipped: int, is_scale_spent: bool) -> None:
    """Raise RuntimeError if too many steps in a row were skipped, or if fp16's scale is spent."""
    if is_scale_spent:
        text = "gradients overflowed with fp16's loss scale at its minimum (deepspeed.fp16.min_loss_scale) by step "
        text += f"{step}; the steps that overflowed did not change the weights: resume from the last checkpoint "
        raise RuntimeError(f"{text}with a lower learning rate, or in bf16 instead of fp16")
    if num_skipped >= MOST_IN_A_ROW:
        text = f"{num_skipped} steps in a row had non-finite gradients at step {step}"
        text += "; they did not change the weights: resume from the last checkpoint with a lower learning rate"
        raise RuntimeError(f"{text}, or in bf16 instead of fp16")


def sample_names(
    batch: Batch, step: int, slots: list[int], dataset: SizedDataset, order: GlobalOrder
) -> list[str]:
    """Return a name for each sample of a micro-batch: its file and its number in the data set."""
    files, names = batch.get("paths") or [None] * len(slots), []
    for slot, file in zip(slots, files, strict=True):
        parts = [str(file)] if file else []
        if not batch.get("bad"):  # else another sample took the place of a bad one
            number = order.index(step, slot)
            if file is None and isinstance(dataset, CaptionedVideos):
                parts = [dataset.name(number)]
            parts.append(f"sample {number}")
        names.append(printable(" = ".join(parts) or f"slot {slot}"))
    return names
