"""What a run says of itself: a line per logging step, metrics.jsonl, TensorBoard, loss.png."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from cogfast.model.transformer import TransformerConfig
from cogfast.train.process_groups import ProcessGroups
from cogfast.train.throughput import memory_gib, peak_flops, train_flops

logger = logging.getLogger(__name__)

_SMOOTHING = 0.98  # of the running mean of the loss, per step: it looks back over 50 steps
_SLOW_DATA = 0.1  # share of the step above which waiting for data deserves a hint


class Metrics:
    """Collects a run's numbers on the device and reads them at logging steps only.

    tokens_per_sample is known once the first batch was encoded. Rank 0 writes; the others only
    take part in the means.
    """

    def __init__(
        self,
        folder: Path,
        groups: ProcessGroups,
        config: TransformerConfig,
        *,
        start_step: int,
        num_steps: int,
        samples_per_step: int,
        tensorboard_folder: str | None,
        wandb_project: str | None,
    ) -> None:
        self.folder, self.groups, self.config = folder, groups, config
        self.num_steps, self.samples_per_step = num_steps, samples_per_step
        self.tokens_per_sample = 0
        self.loss_sum = torch.zeros((), device=groups.device)
        self.num_losses = self.num_interval_steps = 0
        self.running_loss = math.nan  # before the first line
        self.data_wait = 0.0  # seconds, since the last line
        self.interval_start = time.perf_counter()
        self.history = (
            _history_until(start_step, folder / "metrics.jsonl") if groups.is_main else []
        )
        if self.history:
            self.running_loss = self.history[-1].get("loss_running") or math.nan
        self.tensorboard = self.wandb = self.progress = None
        if groups.is_main:
            self._open_writers(tensorboard_folder, wandb_project)

    def _open_writers(self, tensorboard_folder: str | None, wandb_project: str | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.tensorboard = SummaryWriter(tensorboard_folder or str(self.folder / "tensorboard"))
        if wandb_project is not None:
            import wandb

            self.wandb = wandb.init(
                project=wandb_project, name=self.folder.name, dir=str(self.folder)
            )
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            self.progress = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=Console(stderr=True),
            )
            self.progress.start()
            self.task = self.progress.add_task("training", total=self.num_steps, note="")

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.progress is not None:
            self.progress.stop()
        if self.tensorboard is not None:
            self.tensorboard.close()
        if self.wandb is not None:
            self.wandb.finish(exit_code=int(error is not None))

    def restart_clock(self) -> None:
        """Leave the time since the last line out of the next one (an evaluation, a save)."""
        self.interval_start = time.perf_counter()
        self.num_interval_steps, self.data_wait = 0, 0.0

    def add_loss(self, loss: Tensor) -> None:
        """One micro-batch's loss; it stays on the device."""
        self.loss_sum += loss.detach()
        self.num_losses += 1

    def end_step(self, step: int) -> None:
        """After each optimizer step; `step` counts from 1."""
        self.num_interval_steps += 1
        if self.progress is not None:
            self.progress.update(self.task, completed=step)

    def log(self, step: int, *, lr: float, grad_norm: Tensor, num_skipped: Tensor) -> int:
        """Write the line of `step`; returns how many steps in a row were skipped as non-finite."""
        mean_loss = self.groups.mean(self.loss_sum / max(1, self.num_losses))
        packed = torch.stack([mean_loss, grad_norm.to(mean_loss), num_skipped.to(mean_loss)])
        loss, norm, skipped = packed.tolist()  # sync: the one of this logging interval
        seconds = time.perf_counter() - self.interval_start
        steps = max(1, self.num_interval_steps)
        keep = _SMOOTHING ** max(1, self.num_interval_steps)
        before = self.running_loss if math.isfinite(self.running_loss) else loss
        if math.isfinite(loss):
            self.running_loss = keep * before + (1 - keep) * loss
        per_second = steps * self.samples_per_step / seconds
        flops = per_second * train_flops(self.config, self.tokens_per_sample)
        flops /= self.groups.world_size
        peak = peak_flops(self.groups.device)
        line = {
            "step": step,
            "loss": loss,
            "loss_running": self.running_loss,
            "lr": lr,
            "grad_norm": norm,
            "step_ms": 1000 * seconds / steps,
            "data_wait_ms": 1000 * self.data_wait / steps,
            "samples_per_s": per_second,
            "tokens_per_s": per_second * self.tokens_per_sample,
            "model_tflops": flops / 1e12,
            "mfu": None if peak is None else flops / peak,
            "skipped_in_a_row": int(skipped),
            **memory_gib(self.groups.device),
        }
        if self.num_interval_steps == 0:  # a line right after a resume has no time to tell
            line = {k: v for k, v in line.items() if not k.endswith(("_ms", "_per_s", "tflops"))}
        self.loss_sum.zero_()
        self.num_losses = 0
        self.restart_clock()
        self.write(step, line)
        self._say(step, line)
        return int(skipped)

    def write(self, step: int, line: dict) -> None:
        """Append numbers to metrics.jsonl and hand them to TensorBoard and W&B (rank 0)."""
        if not self.groups.is_main:
            return
        self.history.append(line)
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps({k: _plain(v) for k, v in line.items()}) + "\n")
        numbers = {k: v for k, v in line.items() if isinstance(v, (int, float)) and k != "step"}
        for key, value in numbers.items():
            self.tensorboard.add_scalar(key, value, step)
        if self.wandb is not None:
            self.wandb.log(numbers, step=step)

    def _say(self, step: int, line: dict) -> None:
        parts = [f"step {step}/{self.num_steps}", f"loss {line['loss']:.4f}"]
        parts += [f"mean {line['loss_running']:.4f}", f"lr {line['lr']:.2e}"]
        parts += [f"norm {line['grad_norm']:.3g}"]
        if "step_ms" in line:
            wait, whole = line["data_wait_ms"], line["step_ms"]
            parts += [f"{whole:.0f} ms/step ({wait:.0f} data)"]
            parts += [
                f"{line['samples_per_s']:.2f} samples/s",
                f"{line['model_tflops']:.3g} TFLOP/s",
            ]
            if line["mfu"] is not None:
                parts += [f"MFU {100 * line['mfu']:.1f}%"]
            if wait > _SLOW_DATA * whole:
                parts += ["waiting for data: raise args.num_workers"]
        memory = next(v for k, v in line.items() if k.startswith("memory"))
        parts += [f"{memory:.1f} GiB"]
        if line["skipped_in_a_row"]:
            parts += [f"{line['skipped_in_a_row']} non-finite steps skipped"]
        text = "  ".join(parts)
        if self.progress is not None:
            self.progress.update(self.task, note=f"loss {line['loss_running']:.4f}")
        logger.info(text)

    def draw_loss(self) -> None:
        """loss.png: the training loss, its running mean and the held-out loss over the steps."""
        lines = [line for line in self.history if "loss" in line]
        if not self.groups.is_main or not lines:
            return
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        steps = [line["step"] for line in lines]
        axes.plot(steps, [line["loss"] for line in lines], color="#9db8d9", lw=1, label="loss")
        running = [line["loss_running"] for line in lines]
        axes.plot(steps, running, color="#1f4e9c", lw=2, label="running mean")
        held_out = [line for line in self.history if "valid_loss" in line]
        if held_out:
            axes.plot(
                [line["step"] for line in held_out],
                [line["valid_loss"] for line in held_out],
                "o-",
                color="#d1495b",
                ms=4,
                label="held out",
            )
        axes.set(xlabel="step", ylabel="loss", title=self.folder.name)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(self.folder / "loss.png", dpi=120)


def _plain(value: object) -> object:
    """JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _history_until(step: int, path: Path) -> list[dict]:
    """The lines up to `step` of a run that goes on from there; what came after leaves the file."""
    lines = []
    for text in path.read_text().splitlines() if path.is_file() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:  # a crash cut it short
            continue
        if line["step"] <= step:
            lines.append(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines
