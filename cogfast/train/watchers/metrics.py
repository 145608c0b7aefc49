"""Metrics of a run: log lines, metrics.jsonl, TensorBoard, W&B and the run's page."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path

import psutil
import torch
from torch import Tensor

from cogfast.core.files import WriteError, set_aside, write_text
from cogfast.diffusion.loss import NUM_BANDS, VideoDiffusionLoss
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.distributed.step_clock import CLOCK
from cogfast.distributed.zero_engine import ZeroEngine
from cogfast.extensions.page.metrics_table import read_metrics
from cogfast.extensions.page.page import RunPage
from cogfast.extensions.plan.gpus import peak_flops
from cogfast.extensions.plan.trace import train_flops
from cogfast.extensions.sample.generate import SampledVideo
from cogfast.model.attention import Attention
from cogfast.train.keys import TrainKeys
from cogfast.train.run.trackers import LogFile, TensorBoardRun, WandbRun
from cogfast.train.video_size import SampleSize
from cogfast.train.watchers.watcher import Watcher


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
_PAGE_SECONDS = 60.0  # between two pages that log lines write, at least
_SLOW_DATA = 0.1  # fraction of the step time above which waiting for data is logged with a hint


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


class Metrics(Watcher):
    """Collects a run's numbers on the device and reads them only at logging steps.

    Rank 0 writes; the other ranks only take part in the means. num_slots: returns the number of samples
    of a step, which counts from 0.
    """

    def __init__(
        self,
        args: TrainKeys,
        folder: Path,
        groups: ProcessGroups,
        engine: ZeroEngine,
        size: SampleSize,
        bands: BandLosses,
        *,
        start_step: int,
        num_steps: int,
        num_slots: Callable[[int], int],
    ) -> None:
        self.folder, self.groups, self.engine = folder, groups, engine
        self.config, self.sparse_share = engine.transformer.config, engine.transformer.sparse_share
        self.is_compiled = args.compile
        self.size, self.bands, self.log_interval = size, bands, args.log_interval
        self.num_steps, self.num_slots = num_steps, num_slots
        self.timed_samples, self.timed_tokens, self.timed_flops = 0, 0, 0.0
        # Sum and number of finite losses, of clips and of pictures
        self.loss_sum = torch.zeros(2, 2, device=groups.device)
        self.num_unlogged_steps = self.num_unlogged_losses = 0  # since the last line
        self.paused_seconds, self.num_steps_here = 0.0, 0  # of this start of the run
        self.running_loss = math.nan  # until the first line
        self.has_logged = False  # the first line's data wait includes the start of the workers
        self.history: list[dict] = []
        self.lines = LogFile(folder / "metrics.jsonl")
        self.page, self.next_page = RunPage(folder), -math.inf  # the first line writes a page
        self.tensorboard = self.wandb = None
        CLOCK.restart()
        CLOCK.paused.clear()  # of an earlier run
        if groups.is_main:
            self.history = _history_until(start_step, folder / "metrics.jsonl")
            running = [line["loss_running"] for line in self.history if line.get("loss_running")]
            self.running_loss = running[-1] if running else math.nan
            # Drop the lines that an earlier run wrote after the checkpoint that this run resumes from.
            purge_step = start_step + 1 if start_step else 0
            name = "logs" if args.folder_layout == "finetune" else "tensorboard"
            self.tensorboard = TensorBoardRun(folder / name, purge_step)
            if args.wandb:
                self.wandb = WandbRun(folder, args.wandb_project_name)

    def close(self, error: BaseException | None) -> None:
        if self.wandb is not None:
            self.wandb.finish(has_failed=error is not None)
        if self.tensorboard is not None:
            self.tensorboard.close()
        if self.history:
            self.write_page(is_active=False)

    def before_step(self, step: int) -> None:
        CLOCK.begin_step(step, self.groups.device, self._is_logged(step + 1))

    def _is_logged(self, step: int) -> bool:
        return step == self.num_steps or step % self.log_interval == 0

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
        if CLOCK.num_steps == 0:  # it has been restarted
            self.timed_samples, self.timed_tokens, self.timed_flops = 0, 0, 0.0
        CLOCK.num_steps += 1
        samples = self.num_slots(step - 1)
        self.timed_samples += samples
        self.timed_tokens += samples * self.size.num_tokens
        self.timed_flops += samples * self._flops()
        self.num_unlogged_steps += 1
        if not self._is_logged(step):
            return None
        with CLOCK.part("log"):
            return self._log(step)

    def _log(self, step: int) -> dict:
        """Write the line of `step`, and return it on every rank."""
        engine = self.engine
        groups, size = self.groups, self.groups.data_size
        # Gather every rank's wait: the slowest rank holds up all others in collectives. One slot per
        # rank turns the sum into a gather.
        waits = self.loss_sum.new_zeros(size)
        waits[groups.data_rank].fill_(CLOCK.data_seconds)  # an assignment would wait for a copy
        parts = [self.loss_sum.flatten() / size, self.bands.sums.flatten(), waits]
        # All ranks of one model have the same losses: its first rank gives them.
        if not groups.is_first_of_model:
            parts = [torch.zeros_like(part) for part in parts]
        masses = self._kept_masses() / groups.world_size  # of the heads of all ranks
        parts += [masses]
        sums = groups.sum(torch.cat(parts))
        # Equal on all ranks already, so they are not summed.
        numbers = (engine.grad_norm, engine.num_skipped, engine.num_skipped_in_a_row)
        parts.append(torch.stack([number.to(sums) for number in numbers]))
        packed = iter(torch.cat([sums, parts[-1]]).tolist())  # sync: one per interval
        by_kind, bands, waits, masses, (norm, skipped, in_a_row) = (
            [*islice(packed, len(part))] for part in parts
        )
        seconds, num_timed = time.perf_counter() - CLOCK.started, CLOCK.num_steps
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
        save_seconds, eval_seconds = CLOCK.paused["save"], CLOCK.paused["evaluation"]
        CLOCK.paused.clear()
        self.paused_seconds += save_seconds + eval_seconds
        self.num_steps_here += self.num_unlogged_steps
        flops = self.timed_flops / seconds / self.groups.world_size
        peak = peak_flops(self.groups.device)
        line = {
            "step": step,
            "loss": loss,
            "loss_running": self.running_loss,
            **(means if self.size.has_both else {}),
            "lr": engine.optimizer.param_groups[0]["lr"],
            "grad_norm": norm if norm >= 0 else math.nan,  # DeepSpeed: -1 for a non-finite norm
            "step_ms": 1000 * seconds / num_timed,
            "data_wait_ms": 1000 * max(waits) / num_timed,
            **CLOCK.take(),
            "save_wait_ms": 1000 * save_seconds / self.num_unlogged_steps,
            "eval_seconds": eval_seconds,
            "samples_per_s": self.timed_samples / seconds,
            "tokens_per_s": self.timed_tokens / seconds,
            "model_tflops": flops / 1e12,
            "mfu": None if peak is None else flops / peak,
            "skipped": int(skipped),
            "skipped_in_a_row": int(in_a_row),
            "nonfinite_losses": self.num_unlogged_losses * size - round(number * size),
            **memory_gib(self.groups.device),
            **self.bands.named(bands),
            **({"attention_kept": sum(masses) / len(masses)} if masses else {}),
            **{f"attention_kept_layer_{i:02d}": mass for i, mass in enumerate(masses)},
        }
        self.loss_sum.zero_()
        self.bands.sums.zero_()
        self.num_unlogged_steps = self.num_unlogged_losses = 0
        self.write(step, line)
        self._log_line(step, line)
        if time.perf_counter() >= self.next_page:
            self.write_page()
        CLOCK.restart()
        return line

    def _kept_masses(self) -> Tensor:
        """Return the estimated share of attention that sparse attention keeps in each layer, [layers], of
        this rank's heads; [0] if it is dense or in compiled graphs."""
        if self.sparse_share is None or self.is_compiled:
            return self.loss_sum.new_zeros(0)
        nothing = self.loss_sum.new_zeros(())
        modules = self.engine.transformer.modules()
        masses = [one.kept_mass for one in modules if isinstance(one, Attention)]
        return torch.stack([nothing if mass is None else mass.mean() for mass in masses])

    def _flops(self) -> float:
        """Return the FLOPs of a sample; in between while args.sparse_warmup lets the share grow."""
        count = partial(train_flops, self.config, self.size.num_tokens)
        share, now = self.sparse_share, self.engine.transformer.sparse_share
        if not share or now == share:
            return count(share)
        return count(0.0) + (now or 0.0) / share * (count(share) - count(0.0))

    def add_evaluation(self, step: int, losses: dict[str, float]) -> None:
        """Write the held-out losses, if any, and restart the step timer."""
        if losses:
            self.write(step, {"step": step, **losses})
            named = "  ".join(f"{key} {value:.4f}" for key, value in losses.items())
            logger.info("step %d/%d  %s", step, self.num_steps, named)
        self.write_page()
        CLOCK.restart()

    def write(self, step: int, line: dict) -> None:
        """Write numbers to metrics.jsonl, TensorBoard and W&B, on rank 0."""
        if not self.groups.is_main:
            return
        self.history.append(line)
        # JSON has no NaN and no infinities.
        is_odd = lambda value: isinstance(value, float) and not math.isfinite(value)
        plain = {key: None if is_odd(value) else value for key, value in line.items()}
        is_written = self.lines.append(json.dumps(plain).encode() + b"\n")
        numbers = {k: v for k, v in line.items() if isinstance(v, (int, float)) and k != "step"}
        assert self.tensorboard is not None, "rank 0 opens the writers"
        if is_written:  # else the disk is full for this file, too
            self.tensorboard.log(step, numbers)
        if self.wandb is not None:
            self.wandb.log(step, numbers)

    def add_videos(self, step: int, videos: Sequence[SampledVideo]) -> None:
        """Copy sampled videos to W&B."""
        if self.wandb is not None:
            self.wandb.log_videos(step, [(video.path, video.text) for video in videos])

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

    def write_page(self, is_active: bool = True) -> None:
        """Write the run's page, on rank 0. is_active: the page reloads itself."""
        if self.groups.is_main:
            self.page.write(self.history, is_active)
        self.next_page = time.perf_counter() + _PAGE_SECONDS


def _history_until(step: int, path: Path) -> list[dict]:
    """Return the lines up to `step`, where the run resumes, and remove later ones from the file.

    A damaged file is renamed; its readable lines are kept.
    """
    if not path.exists():
        return []
    found = read_metrics(path)
    # A run that starts again evaluates again before its first step.
    lines = [line for line in found.lines if line["step"] <= step and step > 0]
    try:
        if found.problems:
            kept = set_aside(path)
            logger.warning("%s is damaged (%s): renamed to %s", path, found.problems[0], kept.name)
        # Always, since a line that a crash has cut would swallow the next one.
        write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
    except (OSError, WriteError) as error:
        logger.warning("%s: cannot remove the lines after step %d (%s)", path, step, error)
    return lines
