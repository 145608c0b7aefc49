"""The training loop. Start with `Trainer._run_steps`: batch, loss, backward, step, save, evaluate."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from cogfast.core.slot_random import SlotRandom
from cogfast.diffusion.loss import Noised, VideoDiffusionLoss, mask_weights
from cogfast.distributed.process_groups import StopRequest
from cogfast.train.assembly import assemble_batches, estimate_by_base, prior_samples
from cogfast.train.frozen_encoders import NO_OVERRIDES, EncodeOverrides
from cogfast.train.phases import assemble, assemble_watchers
from cogfast.train.run.summary import check_end, explained, log_end, log_start
from cogfast.train.run.terminal import log_misspelt
from cogfast.train.watchers.parameter_checks import check_has_gradient

if TYPE_CHECKING:
    from cogfast.data.batches import Batch
    from cogfast.diffusion.denoiser import Conditioning
    from cogfast.distributed.model_batches import ModelBatches
    from cogfast.train.run.opened import Opens


class Trainer:
    """One training run. Subclasses may override `losses`, `add_noise` or `compute_loss`, and nothing else
    (docs/extending.md).

    overrides: functions that encode clips and captions in place of the configured encoders.
    """

    _kind: type | None = None  # the class whose code a resumed run must have, if it is not this one

    def __init_subclass__(cls) -> None:
        log_misspelt(cls, Trainer, ("losses", "add_noise", "compute_loss", "predict"))

    def __init__(self, config: Opens, overrides: EncodeOverrides = NO_OVERRIDES) -> None:
        parts = self.parts = assemble(config.run, overrides, self._kind or type(self))
        launch, data, folder = parts.launch, parts.data, parts.folder
        self.config, self.args = config.with_values(launch.run.decided), launch.args
        self.groups, self.diffusion, self.engine = launch.groups, parts.diffusion, parts.engine
        self.encoder, self.evaluator = parts.model.encoder, parts.evaluator
        self.writer, self.datasets, self.num_steps = parts.writer, data.datasets, data.num_steps
        self.folder, self.learning_rate = folder.path, folder.learning_rate
        self.step = folder.step  # optimizer steps done
        self.batches: ModelBatches | None = None  # while it trains

    def train(self) -> None:
        """Train from the current step to the last, or until a signal asks to stop."""
        with explained(self.parts):
            self._train()

    def _train(self) -> None:
        args, groups, parts = self.args, self.groups, self.parts
        batches = self.batches = assemble_batches(
            self.datasets.train, args, groups, self.folder, self.step
        )
        log_start(parts, self.learning_rate)
        with StopRequest(groups, args.max_hours, parts.hints.how_to_resume) as stop:
            watching = assemble_watchers(parts, batches, self._loss_at, self._save_now)
            self.watchers, self.trackers = watching
            # The writer exits first: a pending save is complete before anything else is closed.
            with self.watchers, batches, self.writer:
                self.watchers.at_start()
                # Training mode also selects the checkpointed versions of the blocks (use_calls).
                self.engine.transformer.train()
                if args.eval_at_start and self.step == 0:
                    self._evaluate(stop)
                self._run_steps(stop)
                self._finish(stop)
            # No rank may leave while another waits for its part of a collective.
            stop.finish()
            self.engine.wait_for_weights()
            if self.step > self.writer.saved_step:
                text = f"step {self.step} could not be saved (see the error above); {parts.hints.how_to_resume()}"
                raise RuntimeError(text)
            log_end(parts, self.step, self.trackers.history, stop)
            if not groups.is_main:  # before rank 0 gives the run's folder to others
                parts.folder.uploads.close()
            groups.close(ends_idle=not stop.is_by_signal)
            check_end(parts, self.step, stop)

    def _finish(self, stop: StopRequest) -> None:
        """Save the last step, evaluate it, and tell the watchers that training has ended."""
        self.engine.clock.enter("end")
        # saved_step is valid only after this.
        self.writer.wait()
        # A last save may have failed, or the run ended between two of them.
        if self.step > self.writer.saved_step:
            self._save(stop.is_stopping)
        assert self.batches is not None, "it trains"
        self.batches.share_bad()
        # After the save: a run that is killed meanwhile keeps its last step.
        is_last = self.step >= self.num_steps and not self._is_due(self.args.eval_interval)
        if self.args.eval_at_end and is_last and not stop.is_stopping:
            self._evaluate(stop)
        self.writer.wait()
        is_saved = self.writer.saved == self.writer.folder.of_step(self.step)
        is_complete = is_saved and self.step == self.num_steps and not stop.is_stopping
        self.watchers.at_end(stop, is_complete)

    def _run_steps(self, stop: StopRequest) -> None:
        args, engine, watchers = self.args, self.engine, self.watchers
        while self.step < self.num_steps and not stop.is_agreed():
            watchers.before_step(self.step)
            for batch in self._micro_batches():
                loss = self.compute_loss(batch)
                check_has_gradient(loss, self.parts.launch.run.model)
                engine.backward(loss)
                watchers.after_backward(loss)
                # Updates weights and EMA, once per accumulation.
                engine.step(self.learning_rate(self.step))
            self.step += 1
            watchers.after_step(self.step)
            # First the checkpoint: an evaluation takes long, and may be what ends the run.
            if self._is_due(args.save_interval):
                self._save()
            if self._is_due(args.eval_interval):
                self._evaluate(stop)
            # SAT's key: end here, after the save of `_train`, and let the user resume.
            if self._is_due(args.exit_interval):
                break

    def _micro_batches(self) -> Iterator[Batch]:
        assert self.batches is not None, "it trains"
        for _ in range(self.args.gradient_accumulation_steps):
            with self.engine.clock.part("data"):
                batch = next(self.batches)
            self.engine.clock.enter("forward")  # a compute_loss of a subclass need not say so
            yield batch

    def _is_due(self, interval: int | None) -> bool:
        return bool(interval) and self.step % interval == 0

    def compute_loss(self, batch: dict) -> Tensor:
        """Return the mean loss, a float32 scalar, of a micro-batch on the device.

        batch: {"mp4": [B, F, 3, H, W] in [-1, 1], "txt": [str], "fps", "num_frames"} or
        {"encoded_videos": [B, C, T, h, w], "prompt_embedding": [B, L, E]}. "slots": [int], positions
        of the samples in the global batch; by default this rank's first ones. Call
        `self.engine.wait_for_weights()` before reading weights that the network has not used yet.
        """
        rng = self._random(batch)
        with self.engine.clock.part("encode"):
            latents, conditioning = self.encoder(batch, rng)
        num_text, num_frames = conditioning.text.shape[1], self.encoder.num_frames(batch)
        self.parts.size.note(batch, latents, num_text, num_frames)
        # nn.Dropout draws from PyTorch's generator: seed it by step and slot, too.
        if self.engine.transformer.uses_dropout:
            rng.seed_generators("lora dropout")
        with self.engine.clock.part("forward"):
            noised = self.add_noise(batch, latents, rng)
            mask = mask_weights(self.loss, batch, self.encoder.patch)
            is_prior = prior_samples(batch, self.datasets.train, self.engine, self.groups)
            predict = partial(self._predict, noised, conditioning)
            # Before the pass with gradients, which keeps its activations.
            base = None if is_prior is None else estimate_by_base(self.engine, predict)
            if mask is not None or base is not None:
                noised = self.loss.for_samples(noised, mask, base, is_prior)
            losses = self.losses(batch, noised, conditioning)
        if losses.shape != latents.shape[:1]:
            text = f"losses returned the shape {list(losses.shape)} for {len(latents)} samples"
            raise ValueError(f"{text}; return one loss for each sample, before their mean")
        self.parts.bands.add(noised.timesteps, losses, is_prior)
        return losses.mean()

    def log(self, name: str, value: Tensor | float) -> None:
        """Log a number, or the mean of a tensor's numbers, as `log/<name>` with the next log line: the mean over
        all micro-batches since the last one and all ranks that logged it. No host sync.

        It is in metrics.jsonl, TensorBoard, W&B and the run's page.
        """
        assert self.parts.logged is not None, "a subclass of Trainer has them"
        self.parts.logged.add(name, value)

    def losses(self, batch: dict, noised: Noised, conditioning: Conditioning) -> Tensor:
        """Return the loss of each sample of a micro-batch, [B] float32.

        batch: as in `compute_loss`. noised, conditioning: what the network gets. `rng` of add_noise has
        drawn them by step and slot; draws of torch's generators are not repeated by a resumed run.
        """
        return self.loss.of(self._predict(noised, conditioning), noised)

    def _predict(self, noised: Noised, conditioning: Conditioning) -> Tensor:
        return self.predict(noised.latents, noised.timesteps, conditioning, noised.alpha_sqrt)

    @property
    def loss(self) -> VideoDiffusionLoss:
        assert self.diffusion.loss is not None, "preflight asks for one"
        return self.diffusion.loss

    def add_noise(self, batch: dict, latents: Tensor, rng: SlotRandom) -> Noised:
        """Noise latents [B, C, T, h, w] at timesteps drawn for each sample, as the configuration says."""
        return self.loss.add_noise(latents, rng)

    def predict(
        self,
        latents: Tensor,
        timesteps: Tensor,
        conditioning: Conditioning,
        alpha_sqrt: Tensor | None = None,
    ) -> Tensor:
        """Return the model's estimate of the clean latents, [B, C, T, h, w] float32, with gradients.

        latents: noised, [B, C, T, h, w] float32. timesteps: [B] int64. alpha_sqrt: [B], that of the
        timesteps, if it is at hand.
        """
        if alpha_sqrt is None:
            alpha_sqrt = self.loss.sigma_sampler.alpha_sqrt(timesteps)
        denoise = self.diffusion.denoiser.denoise
        return denoise(self.engine, latents, alpha_sqrt, conditioning, timesteps)

    def _loss_at(self, step: int, batch: dict) -> Tensor:
        """Return the loss of a micro-batch of `step`, which counts from 1, with the current weights."""
        now, self.step = self.step, step - 1
        try:
            return self.compute_loss(batch)
        finally:
            self.step = now
            # Empty since the log line: training did not compute this loss.
            self.parts.bands.sums.zero_()
            if self.parts.logged is not None:
                self.parts.logged.sums.clear()

    def _random(self, batch: dict) -> SlotRandom:
        first = next(v for v in batch.values() if isinstance(v, Tensor))
        # A batch without slots is taken for consecutive samples of the global batch.
        start = self.groups.data_rank * len(first)
        slots = batch.get("slots") or range(start, start + len(first))
        num_slots = self.parts.data.order.num_slots(self.step)
        return SlotRandom(self.args.seed, self.step, slots, num_slots, self.groups.device)

    def _evaluate(self, stop: StopRequest) -> None:
        self.engine.clock.enter("evaluation")
        evaluator, add_videos = self.evaluator, self.trackers.add_videos
        losses = evaluator(self.step, self.parts.size.latents, stop, add_videos)
        samples = evaluator.samples if evaluator.sampled_step == self.step else None
        self.watchers.after_evaluation(self.step, losses, samples)
        self.engine.clock.restart()

    def _save(self, is_stopping: bool = False) -> None:
        """Start writing a checkpoint. If that fails, training continues without it. is_stopping: a
        signal or time limit ends the run."""
        self.engine.clock.enter("save")
        writer, export = self.writer, self.parts.model.export(self.step, is_stopping)
        writer.save(self.step, self.parts.saved_facts(), export)
        self.watchers.after_save(self.step, writer.folder.of_step(self.step))
        self.engine.clock.restart()

    def _save_now(self) -> bool:
        """Save a checkpoint of this step, and return whether that succeeded."""
        self._save()
        self.writer.wait()
        return self.writer.saved_step == self.step
