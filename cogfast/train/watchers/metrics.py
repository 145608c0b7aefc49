"""Metrics of a run: means and rates of the steps between two log lines."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from torch import Tensor

from cogfast.extensions.table import hook
from cogfast.model.attention import Attention
from cogfast.model.transformer import DiffusionTransformer
from cogfast.train.run.trackers import Trackers
from cogfast.train.watchers.model_flops import train_flops
from cogfast.train.watchers.watcher import Watcher

if TYPE_CHECKING:
    from cogfast.train.run.parts import Parts


def memory_gib(device: torch.device) -> dict[str, float]:
    """Return memory in GiB: on a GPU the peaks since the start, on a CPU resident memory."""
    if device.type == "cuda":
        return {
            "memory_allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30,
            "memory_reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
        }
    return {"memory_rss_gib": psutil.Process().memory_info().rss / 2**30}


logger = logging.getLogger(__name__)

_SMOOTHING = 0.98  # decay per step of the loss's running mean, about 50 steps
_SLOW_DATA = 0.1  # fraction of the step time above which waiting for data is logged with a hint


class Throughput:
    """Counts the samples, tokens and FLOPs of the steps since the clock's last restart."""

    def __init__(self, transformer: DiffusionTransformer) -> None:
        self.transformer, self.sparse_share = transformer, transformer.sparse_share
        self.clear()

    def clear(self) -> None:
        self.samples, self.tokens, self.flops = 0, 0, 0.0

    def add(self, samples: int, num_tokens: int) -> None:
        """Count samples of `num_tokens` each."""
        self.samples += samples
        self.tokens += samples * num_tokens
        self.flops += samples * self._flops(num_tokens)

    def _flops(self, num_tokens: int) -> float:
        """Return the FLOPs of a sample; in between while args.sparse_warmup lets the share grow."""
        count = partial(train_flops, self.transformer.config, num_tokens)
        share, now = self.sparse_share, self.transformer.sparse_share
        if not share or now == share:
            return count(share)
        return count(0.0) + (now or 0.0) / share * (count(share) - count(0.0))


class Metrics(Watcher):
    """Collects a run's numbers on the device and reads them only at logging steps.

    Rank 0 writes; the other ranks only take part in the means.
    """

    def __init__(self, parts: Parts, trackers: Trackers) -> None:
        self.args, self.groups, self.engine = parts.launch.args, parts.launch.groups, parts.engine
        self.size, self.bands, self.logged = parts.size, parts.bands, parts.logged
        self.num_steps, self.num_slots = parts.data.num_steps, parts.data.order.num_slots
        groups, engine, self.trackers = self.groups, self.engine, trackers
        self.throughput = Throughput(engine.transformer)
        # Sum and number of finite losses, of clips and of pictures
        self.loss_sum = torch.zeros(2, 2, device=groups.device)
        self.num_unlogged_steps = self.num_unlogged_losses = 0  # since the last line
        self.paused_seconds, self.num_steps_here = 0.0, 0  # of this start of the run
        self.has_logged = False  # the first line's data wait includes the start of the workers
        self.engine.clock.restart()
        running = [line["loss_running"] for line in trackers.history if line.get("loss_running")]
        self.running_loss = running[-1] if running else math.nan  # until the first line

    def close(self, error: BaseException | None) -> None:
        self.trackers.close(error)

    def before_step(self, step: int) -> None:
        self.engine.clock.begin_step(step, self.groups.device, self._is_logged(step + 1))

    def _is_logged(self, step: int) -> bool:
        return step == self.num_steps or step % self.args.log_interval == 0

    def after_backward(self, loss: Tensor) -> None:
        """Add one micro-batch's loss, on the device.

        Non-finite losses are left out of the mean: one would hide all other losses of the interval.
        """
        loss = loss.detach().float()
        is_finite = loss.isfinite()
        self.num_unlogged_losses += 1
        # There is no branch, which would need the loss on the host in every step.
        added = torch.stack([loss.where(is_finite, 0.0), is_finite.float()])
        self.loss_sum[int(self.size.is_picture)] += added

    def after_step(self, step: int) -> dict | None:
        """Count the step, and log a line if one is due. All samples of a step have as many tokens."""
        if self.engine.clock.num_steps == 0:  # it has been restarted
            self.throughput.clear()
        self.engine.clock.num_steps += 1
        self.throughput.add(self.num_slots(step - 1), self.size.num_tokens)
        self.num_unlogged_steps += 1
        if not self._is_logged(step):
            return None
        with self.engine.clock.part("log"):
            return self._log(step)

    def after_log(self, line: Mapping) -> None:
        """Leave out of the next line what this one took, and the watchers that it was shown to."""
        self.engine.clock.restart()

    def _log(self, step: int) -> dict:
        """Write the line of `step`, and return it on every rank."""
        engine, groups, clock = self.engine, self.groups, self.engine.clock
        names, logged = ([], self.loss_sum[0, :0])
        if self.logged is not None:
            names, logged = self.logged.agreed()
        by_kind, bands, waits, own, masses, (norm, skipped, in_a_row) = self._read(logged)
        seconds, num_timed = time.perf_counter() - clock.started, clock.num_steps
        kinds = zip(("loss_video", "loss_image"), by_kind[::2], by_kind[1::2], strict=True)
        means = {key: total / number if number else None for key, total, number in kinds}
        total, number = by_kind[0] + by_kind[2], by_kind[1] + by_kind[3]
        loss = total / number if number else math.nan
        if math.isfinite(loss):
            # Per step, so that the running mean does not depend on the log interval.
            keep = _SMOOTHING**self.num_unlogged_steps
            # The mean begins at the first loss, without a bias towards zero.
            before = self.running_loss if math.isfinite(self.running_loss) else loss
            self.running_loss = keep * before + (1 - keep) * loss
        # Per device: the ranks of one model share the work of a sample.
        save_seconds, eval_seconds = clock.paused["save"], clock.paused["evaluation"]
        clock.paused.clear()
        self.paused_seconds += save_seconds + eval_seconds
        self.num_steps_here += self.num_unlogged_steps
        flops = self.throughput.flops / seconds / groups.world_size
        # (device) -> the peak of a GPU in FLOP/s; None if it is unknown
        peak_of = hook("peak_flops") if groups.device.type == "cuda" else None
        peak = None if peak_of is None else peak_of(groups.device)
        own_means = zip(names, own[::2], own[1::2], strict=True)
        line = {
            "step": step,
            "loss": loss,
            "loss_running": self.running_loss,
            **(means if self.size.has_both else {}),
            "lr": engine.optimizer.param_groups[0]["lr"],
            "grad_norm": norm if norm >= 0 else math.nan,  # DeepSpeed: -1 for a non-finite norm
            "step_ms": 1000 * seconds / num_timed,
            "data_wait_ms": 1000 * max(waits) / num_timed,
            **clock.take(),
            "save_wait_ms": 1000 * save_seconds / self.num_unlogged_steps,
            "eval_seconds": eval_seconds,
            "samples_per_s": self.throughput.samples / seconds,
            "tokens_per_s": self.throughput.tokens / seconds,
            "model_tflops": flops / 1e12,
            "mfu": None if peak is None else flops / peak,
            "skipped": int(skipped),
            "skipped_in_a_row": int(in_a_row),
            "nonfinite_losses": self.num_unlogged_losses * groups.data_size
            - round(number * groups.data_size),
            **memory_gib(groups.device),
            **self.bands.named(bands),
            **({"attention_kept": sum(masses) / len(masses)} if masses else {}),
            **{f"attention_kept_layer_{i:02d}": mass for i, mass in enumerate(masses)},
            **{f"log/{key}": total / n if n else math.nan for key, total, n in own_means},
        }
        self._clear_sums()
        self.trackers.write(step, line)
        self._log_line(step, line)
        return line

    def _read(self, logged: Tensor) -> list[list[float]]:
        """Return the sums of all ranks since the last line, as numbers: of losses by kind, of bands, each
        rank's wait for data, sums of `logged`, kept shares of attention by layer, and the norm of the gradient
        with the skipped steps."""
        engine, groups, size = self.engine, self.groups, self.groups.data_size
        # Gather every rank's wait: the slowest rank holds up all others in collectives. One slot per
        # rank turns the sum into a gather.
        waits = self.loss_sum.new_zeros(size)
        waits[groups.data_rank].fill_(
            self.engine.clock.data_seconds
        )  # an assignment would wait for a copy
        parts = [self.loss_sum.flatten() / size, self.bands.sums.flatten(), waits, logged]
        # All ranks of one model have the same losses: its first rank gives them.
        if not groups.is_first_of_model:
            parts = [torch.zeros_like(part) for part in parts]
        parts += [self._kept_masses() / groups.world_size]  # of the heads of all ranks
        sums = groups.sum(torch.cat(parts))
        # Equal on all ranks already, so they are not summed.
        numbers = (engine.grad_norm, engine.num_skipped, engine.num_skipped_in_a_row)
        parts.append(torch.stack([number.to(sums) for number in numbers]))
        packed = iter(torch.cat([sums, parts[-1]]).tolist())  # sync: one per interval
        return [[*islice(packed, len(part))] for part in parts]

    def _clear_sums(self) -> None:
        self.loss_sum.zero_()
        self.bands.sums.zero_()
        if self.logged is not None:
            self.logged.sums.clear()
        self.num_unlogged_steps = self.num_unlogged_losses = 0

    def _kept_masses(self) -> Tensor:
        """Return the estimated share of attention that sparse attention keeps in each layer, [layers], of
        this rank's heads; [0] if it is dense or in compiled graphs."""
        if self.throughput.sparse_share is None or self.args.compile:
            return self.loss_sum.new_zeros(0)
        nothing = self.loss_sum.new_zeros(())
        modules = self.engine.transformer.modules()
        masses = [one.kept_mass for one in modules if isinstance(one, Attention)]
        return torch.stack([nothing if mass is None else mass.mean() for mass in masses])

    def after_evaluation(
        self, step: int, losses: Mapping[str, float], samples: Path | None
    ) -> None:
        """Write the held-out losses, if any."""
        if losses:
            self.trackers.write(step, {"step": step, **losses})
            named = "  ".join(f"{key} {value:.4f}" for key, value in losses.items())
            logger.info("step %d/%d  %s", step, self.num_steps, named)

    def _log_line(self, step: int, line: dict) -> None:
        parts = [f"step {step}/{self.num_steps}", f"loss {line['loss']:.4f}"]
        parts += [f"mean {line['loss_running']:.4f}", f"lr {line['lr']:.2e}"]
        wait, whole = line["data_wait_ms"], line["step_ms"]
        parts += [f"norm {line['grad_norm']:.3g}", f"{whole:.0f} ms/step ({wait:.0f} data)"]
        parts += [f"{line['samples_per_s']:.2f} samples/s", f"{line['model_tflops']:.3g} TFLOP/s"]
        if line["mfu"] is not None:
            parts += [f"MFU {100 * line['mfu']:.1f}%"]
        parts += [f"{v:.1f} GiB {k.split('_')[1]}" for k, v in line.items() if "memory" in k]
        # Steps as in the last interval, to follow changes of the speed at once, and pauses as in the whole run.
        each = whole / 1000 + self.paused_seconds / self.num_steps_here
        parts += [f"{timedelta(seconds=round((self.num_steps - step) * each))} left"]
        if line["skipped"]:
            parts += [f"{line['skipped']} non-finite steps skipped"]
        save_wait = line["save_wait_ms"]
        if save_wait > _SLOW_DATA * whole:
            parts += [f"{save_wait:.0f} ms/step in saves"]
        if line["eval_seconds"]:
            parts += [f"{line['eval_seconds']:.1f} s of evaluation"]
        if wait > _SLOW_DATA * (whole + save_wait) and self.has_logged:
            parts += ["waiting for data: raise args.num_workers"]
        self.has_logged = True
        logger.info("  ".join(parts))
