"""The training loop. Start with `Trainer._run_steps`: batch, loss, backward, step, save, evaluate."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from cogfast.core.slot_random import SlotRandom
from cogfast.core.values import counted
from cogfast.data.batches import Batch
from cogfast.data.datasets import CaptionedVideos
from cogfast.diffusion.denoiser import Conditioning
from cogfast.diffusion.loss import Noised, VideoDiffusionLoss, mask_weights
from cogfast.distributed.model_batches import ModelBatches
from cogfast.distributed.process_groups import StopRequest
from cogfast.distributed.step_clock import CLOCK
from cogfast.distributed.stop_signals import keep_in_last_line
from cogfast.extensions.publish.publish import push
from cogfast.extensions.stores.mirror import name_of
from cogfast.extensions.stores.store import is_url, local_cache
from cogfast.model.lora import without_adapters
from cogfast.train.assembly import assemble_batches
from cogfast.train.frozen_encoders import NO_OVERRIDES, EncodeOverrides
from cogfast.train.phases import assemble, assemble_watchers, write_run_facts
from cogfast.train.preflight.parts import warn_of_image_scale
from cogfast.train.run.folder import plain_sections
from cogfast.train.run.opened import Opens
from cogfast.train.run.terminal import log_commands, log_facts, log_misspelt, log_results

logger = logging.getLogger(__name__)

_WITHOUT_GRADIENT = (
    "compute_loss returned a loss without a gradient; compute it from the output of the model, outside "
    "torch.no_grad(), without .item() and .detach()",
    "the loss has no gradient: none of model.trainable_modules took part in it; give the samples what "
    "these modules read (data.params.tensors), or train other weights, too",
)


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
        self.groups = launch.groups
        self.diffusion, self.encoder, self.engine = (
            parts.diffusion,
            parts.model.encoder,
            parts.engine,
        )
        self.datasets, self.order, self.num_steps = data.datasets, data.order, data.num_steps
        self.folder, self.learning_rate = folder.path, folder.learning_rate
        self.size, self.bands = parts.size, parts.bands
        self.evaluator, self.writer = parts.evaluator, parts.writer
        self.step = folder.step  # optimizer steps done
        self.batches: ModelBatches | None = None  # while it trains

    def train(self) -> None:
        """Train from the current step to the last, or until a signal asks to stop."""
        try:
            self._train()
        except Exception as error:
            if isinstance(error, KeyError) and error.args == ("mp4",):
                error.add_note("a latent cache holds no pixels; set args.latent_cache=null")
            # On a line of its own: error messages are cut, and this is all that names the command.
            if (text := self.parts.hints.how_to_upload()) and self.groups.is_main:
                logger.error("%s", text)
            # For the last line, also if torchrun ends this rank because of another one's error.
            hint = self.parts.hints.how_to_resume()
            keep_in_last_line(f"; {hint}")
            if (self.writer.saved or self.writer.unsent) and hint not in str(error):
                error.add_note(hint)
            self.parts.launch.log.end(error)
            raise
        finally:
            self.parts.launch.log.end()
            self.parts.launch.held.close()

    def _train(self) -> None:
        args, groups = self.args, self.groups
        batches = self.batches = assemble_batches(
            self.datasets.train, args, groups, self.folder, self.step
        )
        self._announce()
        with StopRequest(groups, args.max_hours, self.parts.hints.how_to_resume) as stop:
            self.watchers, self.metrics, self.scores = assemble_watchers(
                self.parts, batches, self._loss_at, self._save_now
            )
            # The writer exits first: a pending save is complete before anything else is closed.
            with self.watchers, batches, self.writer:
                # Training mode also selects the checkpointed versions of the blocks (use_calls).
                self.engine.transformer.train()
                if args.eval_at_start and self.step == 0:
                    self._evaluate(stop)
                self._run_steps(stop)
                CLOCK.enter("end")
                # saved_step is valid only after this.
                self.writer.wait()
                # A last save may have failed, or the run ended between two of them.
                if self.step > self.writer.saved_step:
                    self._save(stop.is_stopping)
                batches.share_bad()
                # After the save: a run that is killed meanwhile keeps its last step.
                is_last = self.step >= self.num_steps and not self._is_due(args.eval_interval)
                if args.eval_at_end and is_last and not stop.is_stopping:
                    self._evaluate(stop)
                if not stop.is_stopping:
                    self.scores.wait(lambda: stop.is_asked)
                    if args.keep_best is not None:
                        self.writer.prune()
            is_saved = self.writer.saved == self.writer.path(self.step)
            is_complete = is_saved and self.step == self.num_steps and not stop.is_stopping
            if args.push_to_hub is not None and groups.is_main and is_complete:
                thread = push(self.writer.path(self.step), args.push_to_hub)
                while thread.is_alive() and not stop.is_asked:
                    thread.join(0.2)
            # No rank may leave while another waits for its part of a collective.
            stop.finish()
            self.engine.wait_for_weights()
            if self.step > self.writer.saved_step:
                text = f"step {self.step} could not be saved (see the error above); {self.parts.hints.how_to_resume()}"
                raise RuntimeError(text)
            self._log_end(stop)
            if not groups.is_main:  # before rank 0 gives the run's folder to others
                self.parts.folder.uploads.close()
            groups.close(ends_idle=not stop.is_by_signal)
            if args.elastic != "off" and stop.is_by_signal and not stop.is_asked:
                # Status 1: torchrun restarts these ranks, but not those of the machine with the signal.
                raise RuntimeError("a signal to another machine ended these ranks, too")
            num_skipped = int(self.engine.num_skipped)  # sync: once
            if self.parts.folder.step == 0 and self.step == num_skipped == self.num_steps:
                text = f"the run has trained nothing: all {counted(num_skipped, 'step')} had non-finite gradients "
                raise RuntimeError(f"{text}and were skipped; look at the first warning above")

    def _run_steps(self, stop: StopRequest) -> None:
        args, engine, watchers = self.args, self.engine, self.watchers
        while self.step < self.num_steps and not stop.is_agreed():
            watchers.before_step(self.step)
            for batch in self._micro_batches():
                loss = self.compute_loss(batch)
                if not loss.requires_grad:
                    has_own = self.parts.launch.run.model.trainable_modules is not None
                    raise ValueError(_WITHOUT_GRADIENT[has_own])
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
            with CLOCK.part("data"):
                batch = next(self.batches)
            CLOCK.enter("forward")  # a compute_loss of a subclass need not say so
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
        with CLOCK.part("encode"):
            latents, conditioning = self.encoder(batch, rng)
        num_text, num_frames = conditioning.text.shape[1], self.encoder.num_frames(batch)
        self.size.note(batch, latents, num_text, num_frames)
        # nn.Dropout draws from PyTorch's generator: seed it by step and slot, too.
        if self.engine.transformer.uses_dropout:
            rng.seed_generators("lora dropout")
        with CLOCK.part("forward"):
            noised, is_prior = self.add_noise(batch, latents, rng), self._is_prior(batch)
            mask = mask_weights(self.loss, batch, self.encoder.patch)
            # Before the pass with gradients, which keeps its activations.
            base = None if is_prior is None else self._predict_by_base(noised, conditioning)
            if mask is not None or base is not None:
                noised = self.loss.for_samples(noised, mask, base, is_prior)
            losses = self.losses(batch, noised, conditioning)
        if losses.shape != latents.shape[:1]:
            text = f"losses returned the shape {list(losses.shape)} for {len(latents)} samples"
            raise ValueError(f"{text}; return one loss for each sample, before their mean")
        self.bands.add(noised.timesteps, losses, is_prior)
        return losses.mean()

    def losses(self, batch: dict, noised: Noised, conditioning: Conditioning) -> Tensor:
        """Return the loss of each sample of a micro-batch, [B] float32.

        batch: as in `compute_loss`. noised, conditioning: what the network gets. `rng` of add_noise has
        drawn them by step and slot; draws of torch's generators are not repeated by a resumed run.
        """
        given = noised.latents, noised.timesteps, conditioning
        return self.loss.of(self.predict(*given, noised.alpha_sqrt), noised)

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

    def _is_prior(self, batch: dict) -> Tensor | None:
        """Return which samples [B] have the base model's own estimate as target; None if it is not needed.

        Ranks of one model have the same samples. Under ZeRO-3 all ranks run each micro-batch together.
        """
        dataset = self.datasets.train
        if not isinstance(dataset, CaptionedVideos) or dataset.clips.prior is None:
            return None
        is_prior = batch["prior"]  # a list, so that the decision waits for no device
        if not any(is_prior) and self.engine.stage < 3:
            return None
        return torch.tensor(is_prior).to(self.groups.device, non_blocking=True)

    @torch.no_grad()
    def _predict_by_base(self, noised: Noised, conditioning: Conditioning) -> Tensor:
        """Return the estimate of the model without its adapters, [B, C, T, h, w]."""
        transformer = self.engine.transformer
        # Evaluation mode leaves out activation checkpointing, which a pass without gradients has no use for.
        is_training = transformer.training
        transformer.eval()
        with without_adapters(transformer):
            given = noised.latents, noised.timesteps, conditioning
            estimate = self.predict(*given, noised.alpha_sqrt)
        transformer.train(is_training)
        return estimate

    def _loss_at(self, step: int, batch: dict) -> Tensor:
        """Return the loss of a micro-batch of `step`, which counts from 1, with the current weights."""
        now, self.step = self.step, step - 1
        try:
            return self.compute_loss(batch)
        finally:
            self.step = now
            # Zero since the log line: training did not compute this loss.
            self.bands.sums.zero_()

    def _random(self, batch: dict) -> SlotRandom:
        first = next(v for v in batch.values() if isinstance(v, Tensor))
        # A batch without slots is taken for consecutive samples of the global batch.
        start = self.groups.data_rank * len(first)
        slots = batch.get("slots") or range(start, start + len(first))
        num_slots = self.order.num_slots(self.step)
        return SlotRandom(self.args.seed, self.step, slots, num_slots, self.groups.device)

    def _evaluate(self, stop: StopRequest) -> None:
        CLOCK.enter("evaluation")
        given = (self.step, self.size.latents, stop)
        self.metrics.add_evaluation(self.step, self.evaluator(*given, self.metrics.add_videos))
        if self.evaluator.sampled_step == self.step:
            self.scores.add(self.step)
        self.parts.folder.uploads.ask()

    def _save(self, is_stopping: bool = False) -> None:
        """Start writing a checkpoint. If that fails, training continues without it. is_stopping: a
        signal or time limit ends the run."""
        CLOCK.enter("save")
        model = self.parts.model
        state = {
            "global_batch": self.parts.data.global_batch,
            "seed": self.args.seed,
            "num_samples": len(self.datasets.train),
            "data_order": self.order.fingerprint,
            "attention": self.args.attention,
            "attention_backend": model.attention_backend,
            "encode_way": model.encode_choice.way or model.encode_choice.stored,
            "video_sizes": self.size.trained(),
            "config": plain_sections(self.parts.launch.run.sections),
        }
        is_exported = model.exporter.is_due(self.step, is_stopping)
        self.writer.save(self.step, state, model.exporter.write if is_exported else None)
        self.metrics.write_page()
        self.parts.folder.uploads.ask()
        CLOCK.restart()

    def _save_now(self) -> bool:
        """Save a checkpoint of this step, and return whether that succeeded."""
        self._save()
        self.writer.wait()
        return self.writer.saved_step == self.step

    def _announce(self) -> None:
        args, config, groups = self.args, self.engine.transformer.config, self.groups
        names = ("GPU", "GPUs") if groups.device.type == "cuda" else ("process", "processes")
        rows = ", rows split" if args.sequence_parallel else ""
        context = f" x cp {groups.context_size}" if groups.context_size > 1 else ""
        mesh = f"dp {groups.data_size}{context} x tp {groups.tensor_size}{rows}"
        ranks = f"{counted(groups.world_size, *names)} ({mesh})"
        parts = f"dp {groups.data_size} x batch {args.batch_size}"
        accumulation = args.gradient_accumulation_steps
        places = [*args.train_data, *args.valid_data, args.latent_cache or "", name_of(self.folder)]
        rate = f"{args.lr:g}, {args.lr_schedule}"
        if self.learning_rate is not self.parts.folder.learning_rate:
            rate = f"{self.learning_rate(self.step):g} in the first step, set by the trainer"
        own = self.writer.classes.get("trainer", {}).get("name")
        facts = {
            "run folder": name_of(self.folder),
            "local cache": str(local_cache()[0]) if any(map(is_url, places)) else None,
            "trained on": f"{ranks}, ZeRO-{self.engine.stage}, {args.precision}",
            "global batch": f"{self.parts.data.global_batch} = {parts} x accumulation {accumulation}",
            "data": counted(len(self.datasets.train), "sample"),
            "steps": f"{self.step} to {self.num_steps}",
            "model": f"{counted(config.num_layers, 'layer')} of width {config.hidden_size}",
            "conditions": ", ".join(self.encoder.conditions) or None,
            "trained": f"{self.parts.model.num_trained / 1e6:.2f} M parameters",
            "adapters": config.adapters,
            "learning rate": f"{rate}, weight decay {args.weight_decay:g}",
            "trainer": f"{own}; held-out losses are the configured loss" if own else None,
        }
        log_facts({name: fact for name, fact in facts.items() if fact is not None})
        self.parts.memory.start()
        write_run_facts(self.parts, self.num_steps, self.evaluator.shows_ema)

    def _log_end(self, stop: StopRequest) -> None:
        """Log why the run ended, where its checkpoint is, its last results, and what may follow."""
        is_finished, run = self.step >= self.num_steps, self.parts.launch.run
        if is_finished:
            path = name_of(self.writer.path(self.step))
            logger.info("finished at step %d; checkpoint: %s", self.step, path)
        else:
            key = f"args.exit_interval={self.args.exit_interval}"
            reason, how = stop.reason if stop.is_stopping else key, self.parts.hints.how_to_resume()
            text = "stopped at step %d of %d by %s; %s"
            logger.info(text, self.step, self.num_steps, reason, how)
        log_results(self.metrics.history, self.evaluator.samples)
        if is_finished:
            is_lora, shows_ema = run.network.config.lora_rank is not None, self.evaluator.shows_ema
            log_commands(run, name_of(self.folder), self.step, is_lora, shows_ema)
        warn_of_image_scale(run.model, run.args.load, run.network.config, is_end=True)
