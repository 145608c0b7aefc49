"""Names the first loss or gradient of a run that is not finite, then follows args.nonfinite.

Each step leaves marks on the device, which the next log line reads. Order and random draws of the data
depend on the step alone, so the bad step's micro-batches can be read and run once more.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cogfast.core.files import WriteError
from cogfast.data.batches import Batch
from cogfast.data.datasets import CaptionedVideos, SizedDataset
from cogfast.data.global_order import GlobalOrder
from cogfast.model.weights.formats.checkpoint_manifest import RESUMABLE, read_manifest
from cogfast.schema.arguments import TrainArguments
from cogfast.schema.values import counted, printable
from cogfast.train.assembly import assemble_batches
from cogfast.train.distributed.process_groups import ProcessGroups
from cogfast.train.distributed.process_watch import is_of_another_rank
from cogfast.train.distributed.replica_check import own_values
from cogfast.train.distributed.zero_engine import ZeroEngine
from cogfast.train.run.checkpoint_loader import load_checkpoint
from cogfast.train.run.checkpoint_writer import CheckpointWriter
from cogfast.train.run.health.inspection import Finding, damaged_weights, inspect
from cogfast.train.run.health.recorded_batch import RecordedBatch, model_facts, texts_of

logger = logging.getLogger(__name__)

_MOST_REPORTS = 3  # in one process: every one takes time and disk
_MOST_RANKS = 8  # whose findings are logged
_MOST_ROLLBACKS = 3  # to one checkpoint


class FirstBad:
    """The first bad step since the last log line, marked on the device without a host sync.

    A step is bad if a loss of this rank is not finite, or if it was skipped. After `read`: losses:
    {data rank: its first step with such a loss}; skipped: the first skipped step, or None.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self.rank, self.size = groups.data_rank, groups.data_size
        self.num_steps = 0  # since the last log line
        self._losses = torch.zeros((), device=groups.device)  # sum over the step's micro-batches
        self._first = torch.full((2,), math.inf, device=groups.device)  # bad loss, skipped step
        self.losses: dict[int, int] = {}
        self.skipped: int | None = None

    def add_loss(self, loss: Tensor) -> None:
        """Add a micro-batch's loss."""
        self._losses += loss.detach()

    def end_step(self, num_skipped_in_a_row: Tensor) -> None:
        self.num_steps += 1
        is_bad = torch.stack([~self._losses.isfinite(), num_skipped_in_a_row > 0])
        # Division by 0 where the step is good: infinity, which is never the smallest.
        self._first = torch.minimum(self._first, self.num_steps / is_bad.float())
        self._losses.zero_()

    def marks(self) -> Tensor:
        """Return [data_size + 1] numbers, whose mean over the data-parallel ranks `read` takes."""
        loss, skipped = self._first.where(self._first.isfinite(), 0.0)
        marks = self._first.new_zeros(self.size + 1)
        # All other ranks have 0 in this place.
        marks[self.rank], marks[-1] = self.size * loss, skipped
        self._first.fill_(math.inf)
        return marks

    def read(self, means: Sequence[float], step: int) -> None:
        """Take the means of all ranks' marks, on the host, in the log line of `step`."""
        before = step - self.num_steps
        numbers = [round(mean) for mean in means]
        self.losses = {rank: before + n for rank, n in enumerate(numbers[:-1]) if n}
        self.skipped = before + numbers[-1] if numbers[-1] else None
        self.num_steps = 0


class NonfiniteCheck:
    """Reports bad steps after log lines, and skips them, stops or rolls back.

    loss_at: returns the loss of a micro-batch of a step, as compute_loss.
    """

    def __init__(
        self,
        args: TrainArguments,
        groups: ProcessGroups,
        folder: Path,
        engine: ZeroEngine,
        writer: CheckpointWriter,
        dataset: SizedDataset,
        order: GlobalOrder,
        attention_backend: str | None,
        loss_at: Callable[[int, Batch], Tensor],
    ) -> None:
        self.args, self.groups, self.folder = args, groups, folder
        self.engine, self.writer, self.loss_at = engine, writer, loss_at
        self.dataset, self.order, self.attention_backend = dataset, order, attention_backend
        self.first_bad = FirstBad(groups)
        self.num_reports = 0
        # The step of the last log line, if it was skipped: a bad step behind it is the same event.
        self._streak_end: int | None = None
        self._rolled_back: list[int] = []  # steps of the checkpoints

    def after_step(self) -> None:
        """Mark a bad step on the device. Call it after every optimizer step."""
        self.first_bad.end_step(self.engine.num_skipped_in_a_row)

    def after_log(
        self, step: int, num_skipped: int, is_scale_spent: bool, save: Callable[[], None]
    ) -> bool:
        """Report and react to bad steps since the last log line. Call it after every log line.

        num_skipped: steps skipped in a row until now. is_scale_spent: fp16's loss scale had to fall
        below its minimum. save: starts a checkpoint. Returns whether that took time.

        Raises:
            RuntimeError: args.nonfinite, args.max_nonfinite_steps or a spent loss scale ends the run.
        """
        bad = self._first_bad_step(is_scale_spent)
        continues = self._streak_end is not None and bad == self._streak_end + 1
        self._streak_end = step if num_skipped else None
        if bad is None:
            return False
        texts: list[str] = []
        if not continues and self.num_reports < _MOST_REPORTS:
            self.num_reports += 1
            texts = self._report(bad, step, num_skipped)
        if self.args.nonfinite == "stop":
            self._stop(bad, step, texts, save)
        check_skipped(self.args, step, num_skipped, is_scale_spent)
        if self.args.nonfinite == "rollback":
            self._roll_back(bad, step)
        return True

    def _first_bad_step(self, is_scale_spent: bool) -> int | None:
        found = list(self.first_bad.losses.values())
        # Gradients that overflow are a part of fp16's search for a loss scale.
        is_overflow = self.args.precision == "fp16" and not is_scale_spent
        if self.first_bad.skipped is not None and not is_overflow:
            found.append(self.first_bad.skipped)
        return min(found, default=None)

    def _report(self, bad: int, step: int, num_skipped: int) -> list[str]:
        """Run the bad step's micro-batches once more on every rank; log and return what they show."""
        folder = self.folder / "nonfinite" / f"step-{bad:08d}"
        found: list[tuple[RecordedBatch, Finding]] = []
        problem = None
        try:
            found = self._run_again(bad, step)
        # Whatever stops the inspection, the run itself can continue.
        except Exception as error:
            if is_of_another_rank(error):
                raise
            problem = f"cannot be run again ({type(error).__name__}: {error})"
        first = next(((f.order, r.report) for r, f in found if f.places), None)
        numbers = [recorded.number for recorded, finding in found if finding.places]
        seen = self.groups.gather((first or (problem and (math.inf, problem)), numbers))
        written = any(self.groups.gather(self._write(found, seen, folder, bad)))
        weights = "those of that step"
        if num_skipped < step - bad + 1:
            weights = f"those after step {step}, which later steps have changed"
        # Ranks that share a model have the cause, or only numbers that follow from it: cause first.
        named = [(*first, rank) for rank, (first, _) in enumerate(seen) if first is not None]
        lines = [
            f"step {bad}, rank {rank}: {text}"
            for _, text, rank in sorted(named, key=lambda each: each[0])
        ]
        if not lines:
            lines = [f"step {bad}: a loss or gradient was not finite, but every number is now"]
        if self.groups.is_main:
            for line in lines[:_MOST_RANKS]:
                logger.warning("%s (weights: %s)", line, weights)
            if written:
                logger.warning("to run it again alone: cogfast train --replay %s", folder)
        return lines

    def _run_again(self, bad: int, step: int) -> list[tuple[RecordedBatch, Finding]]:
        """Return this rank's micro-batches of a step, each with what its inspection found."""
        engine, groups = self.engine, self.groups
        engine.wait_for_weights()
        damaged, found = self._damaged_weights(), []
        # In this process: workers would read ahead far more than is needed.
        args = dataclasses.replace(
            self.args, num_workers=0, device_prefetch=0, max_bad_fraction=1.0
        )
        with assemble_batches(self.dataset, args, groups, self.folder, bad - 1) as batches:
            for number in range(args.gradient_accumulation_steps):
                batch, error = None, None
                try:
                    batch = next(batches)
                except Exception as caught:
                    error = caught
                # All ranks run the network together.
                groups.agree(error)
                assert batch is not None, "agree raises where there is none"
                loss_of = partial(self.loss_at, bad, batch)
                scale = float(engine.loss_scaler_state().get("cur_scale", 1.0))
                with engine.bare():
                    seen = inspect(engine.transformer, batch, loss_of, damaged, scale)
                found.append(self._recorded(bad, step, number, batch, scale, *seen))
        return found

    def _recorded(
        self,
        bad: int,
        step: int,
        number: int,
        batch: Batch,
        scale: float,
        finding: Finding,
        inputs: dict[str, Tensor],
    ) -> tuple[RecordedBatch, Finding]:
        slots = list(batch["slots"])
        samples = sample_names(batch, bad - 1, slots, self.dataset, self.order)
        recorded = RecordedBatch(
            step=bad,
            rank=self.groups.rank,
            number=number,
            seed=self.args.seed,
            slots=slots,
            num_slots=self.order.global_batch,
            weights_step=step,
            loss_scale=scale,
            attention_backend=self.attention_backend,
            samples=samples,
            model=model_facts(self.engine.transformer.config),
            texts=texts_of({k: v for k, v in batch.items() if k != "bad"}),
            report=finding.text(samples),
            batch={key: value for key, value in batch.items() if isinstance(value, Tensor)},
            inputs=inputs,
        )
        return recorded, finding

    def _write(
        self,
        found: list[tuple[RecordedBatch, Finding]],
        seen: list[tuple[object, list[int]]],
        folder: Path,
        bad: int,
    ) -> bool:
        """Write the first bad micro-batch of this rank's model, or all of them if its loss alone had
        been bad. seen: of each rank, in its second part the numbers of its bad micro-batches."""
        groups = self.groups
        if not groups.is_first_of_model:
            return False  # the first rank of the group has the same micro-batch
        model = seen[groups.rank : groups.rank + groups.model_size]
        first = min((number for _, numbers in model for number in numbers), default=None)
        chosen = [recorded for recorded, _ in found if recorded.number == first]
        if first is None and self.first_bad.losses.get(groups.data_rank) == bad:
            chosen = [recorded for recorded, _ in found]
        try:
            for recorded in chosen:
                recorded.write(folder)
        except (OSError, WriteError) as error:
            logger.warning("%s: %s; training continues", folder, error)
            return False
        return bool(chosen)

    def _damaged_weights(self) -> list[str]:
        named = self.engine.transformer.named_parameters()
        # Under ZeRO-3 every rank looks at its own part.
        return damaged_weights((name, own_values(parameter)) for name, parameter in named)

    def _stop(self, bad: int, step: int, texts: list[str], save: Callable[[], None]) -> None:
        """End the run. The steps that were skipped changed nothing, so its state is saved."""
        is_damaged = any(self.groups.gather(bool(self._damaged_weights())))
        if is_damaged:
            end = "its weights are damaged and not saved: resume from an earlier checkpoint"
        else:
            save()
            self.writer.wait()
            end = f"the checkpoint of step {step} is saved"
        what = texts[0] if texts else f"step {bad}: a loss or gradient is not finite"
        raise RuntimeError(f"args.nonfinite=stop: {what}; {end}")

    def _roll_back(self, bad: int, step: int) -> None:
        """Load the last checkpoint; training continues with the data after `step`."""
        self.writer.wait()
        saved = self.writer.saved_step
        path = self.writer.path(saved)
        is_there = self.groups.on_main(lambda: saved > 0 and (path / "manifest.json").is_file())
        if not is_there:
            logger.warning("args.nonfinite=rollback: no checkpoint yet; step %d is skipped", bad)
            return
        self._rolled_back.append(saved)
        if self._rolled_back.count(saved) > _MOST_ROLLBACKS:
            raise RuntimeError(
                f"args.nonfinite=rollback: step {bad} is not finite after {_MOST_ROLLBACKS} returns to "
                f"{path}; resume from an earlier checkpoint, with a lower learning rate, or in bf16"
            )
        is_verified = self.args.verify_checkpoints
        manifest = self.groups.on_main(lambda: read_manifest(path, RESUMABLE, is_verified))
        self.engine.wait_for_weights()
        load_checkpoint(path, manifest, self.engine, self.groups, is_verified)
        self.engine.num_skipped_in_a_row.zero_()
        self._streak_end = None
        logger.warning(
            "args.nonfinite=rollback: the weights and the optimizer's state are those of step %d "
            "(%s); steps %d to %d count as skipped",
            saved,
            path,
            saved + 1,
            step,
        )


def check_skipped(args: TrainArguments, step: int, num_skipped: int, is_scale_spent: bool) -> None:
    """Raise RuntimeError if too many steps in a row were skipped, or if fp16's scale is spent."""
    if is_scale_spent:
        raise RuntimeError(
            "gradients overflowed with fp16's loss scale at its minimum "
            f"(deepspeed.fp16.min_loss_scale) by step {step}; the steps that overflowed did "
            "not change the weights: resume from the last checkpoint with a lower learning rate, "
            "or in bf16 instead of fp16"
        )
    if num_skipped >= args.max_nonfinite_steps:
        raise RuntimeError(
            f"{counted(num_skipped, 'step')} in a row had non-finite gradients (args."
            f"max_nonfinite_steps={args.max_nonfinite_steps}) at step {step}; they did not change the "
            "weights: resume from the last checkpoint with a lower learning rate, or in bf16 instead "
            "of fp16"
        )


def sample_names(
    batch: Batch, step: int, slots: Sequence[int], dataset: SizedDataset, order: GlobalOrder
) -> list[str]:
    """Return a name for each sample of a micro-batch: its file and its number in the data set."""
    numbers: list[int | None] = [order.index(step, slot) for slot in slots]
    if batch.get("bad"):  # another sample took the place of a bad one
        numbers = [None] * len(slots)
    paths = batch.get("paths")
    names = []
    for i, number in enumerate(numbers):
        file = str(paths[i]) if paths else None
        if file is None and number is not None and isinstance(dataset, CaptionedVideos):
            file = dataset.name(number)
        parts = ([file] if file else []) + ([f"sample {number}"] if number is not None else [])
        names.append(printable(" = ".join(parts) or f"slot {slots[i]}"))
    return names
