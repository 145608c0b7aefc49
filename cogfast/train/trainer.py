"""The training loop. Start with `Trainer.train`: batch, loss, backward, step, log, evaluate, save."""

from __future__ import annotations

import dataclasses
import logging
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cogfast.config import Config, data_arguments
from cogfast.core.shapes import TokenGrid
from cogfast.core.slot_random import SlotRandom
from cogfast.diffusion.denoiser import Conditioning
from cogfast.kernels.block_kernels import choose_kernels
from cogfast.model.transformer import DiffusionTransformer
from cogfast.model.weights.formats.checkpoint_manifest import (
    RESUMABLE,
    checkpoints_folder,
    read_manifest,
    run_of,
    step_of,
)
from cogfast.schema.arguments import TrainArguments
from cogfast.schema.values import counted
from cogfast.train.assembly import (
    DTYPES,
    assemble_batches,
    assemble_datasets,
    assemble_diffusion,
    assemble_encoder,
    assemble_order,
    assemble_transformer,
)
from cogfast.train.caching.cached_data import read_from_cache
from cogfast.train.caching.command import encode_first
from cogfast.train.caching.encode_choice import EncodeChoice
from cogfast.train.distributed.model_batches import ModelBatches
from cogfast.train.distributed.parallelize import count_trained, run_without_dynamo
from cogfast.train.distributed.process_groups import ModelParallelUnit, StopRequest, start_processes
from cogfast.train.distributed.replica_check import ReplicaCheck
from cogfast.train.distributed.zero_engine import ZeroEngine, deepspeed_config
from cogfast.train.encode import NO_OVERRIDES, EncodeOverrides
from cogfast.train.memory.activation_checkpointing import ActivationCheckpointing
from cogfast.train.memory.fit import fit_to_device
from cogfast.train.optimizer import (
    build_learning_rate,
    build_optimizer,
    parameter_groups,
    warn_of_long_warmup,
)
from cogfast.train.plan.out_of_memory import MemoryWatch
from cogfast.train.preflight.attention_choice import choose_for_training
from cogfast.train.preflight.check import check_train, log_unused
from cogfast.train.preflight.dry_build import warn_of_different_schedules
from cogfast.train.preflight.header_scan import record_bad, survey_datasets
from cogfast.train.preflight.pipeline_folder import warn_of_image_scale
from cogfast.train.run.checkpoint_loader import load_checkpoint
from cogfast.train.run.checkpoint_writer import CheckpointWriter
from cogfast.train.run.export import Exporter
from cogfast.train.run.folder import (
    adapters_to_resume,
    check_changes,
    create_folder,
    describe_run,
    open_run_folder,
    plain_sections,
    tensorboard_folder,
)
from cogfast.train.run.health.gradient_check import GradientCheck, lora_cannot_learn
from cogfast.train.run.health.hang import HangStacks
from cogfast.train.run.health.nonfinite import NonfiniteCheck
from cogfast.train.run.health.progress import Progress
from cogfast.train.run.health.speed import SpeedCheck
from cogfast.train.run.metrics import BandLosses, Metrics
from cogfast.train.run.page.page import write_facts
from cogfast.train.run.profiling import Profiler
from cogfast.train.run.stop_signals import keep_in_last_line
from cogfast.train.run.terminal import log_commands, log_facts, log_results, resume_words
from cogfast.train.sampling.evaluate import Evaluator
from cogfast.train.video_size import (
    DEFAULT_FPS,
    LatentSize,
    bucket_sizes,
    sampled_size,
    warn_of_pipeline_positions,
)

logger = logging.getLogger(__name__)


class Trainer:
    """One training run. Subclasses may override `compute_loss` and nothing else.

    overrides: functions that encode clips and captions in place of the configured encoders.
    """

    def __init__(self, config: Config, overrides: EncodeOverrides = NO_OVERRIDES) -> None:
        self.config, self.progress = config, Progress()
        self.args = args = TrainArguments.from_config(config)
        if not args.compile:
            run_without_dynamo()
        # Before process groups and GPU memory, so that a mistake ends the run in seconds.
        check_train(config)
        self.groups = start_processes(
            args.model_parallel_size, args.context_parallel_size, args.collective_timeout
        )
        if args.fit == "auto":
            fitted, args = fit_to_device(config, args, self.groups)
            if fitted is not config:
                check_train(fitted)
            self.config, self.args = config, args = fitted, args
        self.diffusion = assemble_diffusion(config)
        if self.groups.is_main:
            log_unused(config)
            warn_of_different_schedules(self.diffusion)
            warn_of_pipeline_positions(config)
            warn_of_image_scale(config)
        if args.deterministic:
            torch.use_deterministic_algorithms(True)

        if args.encode_first:
            # Encoding may take hours: the folder that the run needs then is created before.
            self.groups.on_main(lambda: create_folder(args))
            encode_first(config, args, self.groups, overrides)
        self.accumulation = args.gradient_accumulation_steps
        self.global_batch = args.batch_size * self.accumulation * self.groups.data_size
        # Before the model is built: headers determine buckets and order, and unreadable data should
        # fail early.
        videos, bad = survey_datasets(
            assemble_datasets(config, args), args, self.groups, self.global_batch
        )
        self.datasets = read_from_cache(videos, config, args, self.groups, overrides)
        self.order = assemble_order(self.datasets.train, args.seed, self.global_batch)
        self.num_steps = self._count_steps()
        self.learning_rate = build_learning_rate(args, self.num_steps)
        if self.groups.is_main:
            warn_of_long_warmup(args, self.num_steps)
        self.folder, self.checkpoint, self.lock = open_run_folder(args, self.groups)
        self.manifest: dict = {}
        self.step = self.first_step = 0  # optimizer steps done, now and before this process
        self.batches: ModelBatches | None = None  # while it trains
        self.metrics: Metrics | None = None  # while it trains
        checkpoint = self.checkpoint
        if checkpoint is not None:
            adapters = self.groups.on_main(partial(adapters_to_resume, checkpoint))
            if adapters is not None:
                args = self._take_adapters(adapters)
        checkpoint = self.checkpoint
        if checkpoint is not None:
            self.manifest = self.groups.on_main(
                lambda: read_manifest(checkpoint, RESUMABLE, args.verify_checkpoints)
            )
            check_changes(checkpoint, self.manifest, config, self.global_batch)
        if self.groups.is_main:
            describe_run(
                self.folder,
                self.checkpoint,
                self.manifest,
                config,
                self.groups.world_size,
                is_run_folder=args.run_folder is not None,
            )
            # The headers were read before the folder existed.
            record_bad(self.folder, bad, len(self.datasets.train))

        transformer = assemble_transformer(
            config, args, self.groups, allow_missing=args.force_train
        )
        reason = lora_cannot_learn(transformer, self.groups)
        if reason is not None:
            text = f"args.load={args.load}: {reason}, so LoRA gets no gradient at first"
            if not args.force_train:
                raise ValueError(
                    f"{text}; set args.load to a trained model, or args.force_train=true to continue"
                )
            logger.warning("%s", text)
        self.exporter = Exporter(
            args.export,
            transformer,
            self.num_steps,
            DTYPES[args.precision],
            args.export_interval,
        )
        self.attention_backend = self._choose_attention(transformer)
        transformer.use_kernels(choose_kernels(args.kernels, self.attention_backend))
        stored = self.manifest.get("encode_way")
        self.encode_choice = EncodeChoice(config, args, self.groups, stored)
        self.encoder = assemble_encoder(
            config, args, transformer, self.groups, self.encode_choice, overrides
        )
        self.num_trained = count_trained(transformer)
        self.gradient_check = GradientCheck(transformer)
        self.profiler = Profiler(
            self.folder / "profile",
            self.groups,
            transformer.blocks,
            args,
            self.num_steps,
            self.progress,
        )
        optimizer = build_optimizer(
            config.deepspeed.get("optimizer") or {},
            parameter_groups(transformer, args.weight_decay, args.optimizer_moments),
            args.kernels,
            config.allow_import,
            args.optimizer_moments,
            args.ema_device,
        )
        # Before ZeRO-3 divides the parameters.
        self.memory = MemoryWatch(
            config, args, self.groups, transformer, self.progress, self.folder, self._how_to_resume
        )
        mpu = None if self.groups.tensor is None else ModelParallelUnit(self.groups)
        # Last, because DeepSpeed copies the loaded weights into its flat partitions.
        settings, timeout_s = deepspeed_config(config, args), args.collective_timeout
        self.engine = ZeroEngine(transformer, optimizer, settings, mpu, timeout_s=timeout_s)
        self.replica_check = ReplicaCheck(
            transformer,
            self.groups.tensor,
            args.replica_check_interval,
            self.engine.wait_for_weights,
        )
        sizes = bucket_sizes(config, transformer.config)
        assert args.activation_checkpointing is not None, "from_config chooses one"
        self.checkpointing = ActivationCheckpointing(
            transformer,
            args.activation_checkpointing,
            self.groups,
            self.memory.setup,
            is_compiled=args.compile,
            has_buckets=bool(sizes),
            is_offloaded=args.offload_activations,
        )
        self.bands = BandLosses(args.eval_timestep_bands, self.diffusion.loss, self.groups.device)
        self.memory.checkpointing = self.checkpointing
        self.evaluator = Evaluator(
            self.engine,
            self.diffusion,
            self.encoder,
            self.datasets.valid,
            args,
            self.groups,
            self.folder,
            data_arguments(config).get("resize", "crop"),
        )
        # The model's largest size until the first batch sets it; compute_loss of a subclass may not.
        # With buckets, evaluations sample the configured size: the last batch's would depend on the
        # step at which the run resumed.
        self.latent_size = sampled_size(config, transformer.config)
        self.num_tokens = self.latent_size.num_tokens(transformer.config)  # per sample
        self.is_size_known = bool(sizes)
        self.writer = CheckpointWriter(
            checkpoints_folder(self.folder, args.folder_layout),
            self.engine,
            self.groups,
            args.keep_last,
            args.folder_layout,
        )
        self.nonfinite = NonfiniteCheck(
            args,
            self.groups,
            self.folder,
            self.engine,
            self.datasets.train,
            self.order,
            self._loss_at,
            self._save_now,
        )
        if checkpoint is not None:
            self._resume(checkpoint)

    def train(self) -> None:
        """Train from the current step to the last, or until a signal asks to stop."""
        try:
            with self.lock:
                self._train()
        except Exception as error:
            # For the last line, also if torchrun ends this rank because of another one's error.
            hint = self._how_to_resume()
            keep_in_last_line(f"; {hint}")
            if self.writer.saved is not None and str(self.writer.saved) not in str(error):
                error.add_note(hint)
            raise

    def _train(self) -> None:
        args, engine, profiler = self.args, self.engine, self.profiler
        checkpointing = self.checkpointing
        batches = self.batches = assemble_batches(
            self.datasets.train, args, self.groups, self.folder, self.step, self.num_steps
        )
        self._announce()
        if self.groups.is_main:
            write_facts(
                self.folder,
                self.config,
                args,
                engine.transformer.config,
                self.attention_backend,
                num_samples=len(self.datasets.train),
                num_steps=self.num_steps,
                global_batch=self.global_batch,
                num_trained=self.num_trained,
            )
        speed = SpeedCheck(engine.transformer.config, args, self.groups.device, self.step)
        hang = HangStacks(self.folder, self.groups.rank, args.collective_timeout)
        with hang, StopRequest(self.groups, args.max_hours, self._how_to_resume) as stop:
            # The writer exits first: a pending save is complete before anything else is closed.
            with self._open_metrics() as metrics, batches, profiler, self.memory, self.writer:
                self.metrics = metrics
                # Training mode also selects the checkpointed versions of the blocks (use_calls).
                engine.transformer.train()
                if args.eval_at_start and self.step == 0:
                    self._evaluate(metrics, stop)
                while self.step < self.num_steps and not stop.is_agreed():
                    lr = self.learning_rate(self.step)
                    profiler.begin_step(self.step)
                    for _ in range(self.accumulation):
                        with profiler.range("data"), metrics.data_wait():
                            batch = next(batches)
                        loss = self.compute_loss(batch)
                        with profiler.backward():
                            engine.backward(loss)
                        checkpointing.after_backward()
                        with profiler.range("optimizer"):
                            engine.step(lr)  # updates weights and EMA, once per accumulation
                        metrics.add_loss(loss)
                        self.nonfinite.after_backward(loss)
                    self.step += 1
                    hang.after_step(self.step)
                    checkpointing.after_step()
                    self.memory.after_step()
                    metrics.end_step(self.step, self.num_tokens)
                    self.gradient_check.after_step(self.step)
                    self.replica_check.after_step(self.step)
                    self.nonfinite.after_step(self.step)

                    if self._is_due(args.log_interval) or self.step == self.num_steps:
                        with profiler.range("log"):
                            line = metrics.log(self.step, lr, engine)
                        speed.after_log(line, self.num_tokens, checkpointing.policies)
                        self.nonfinite.after_log(line)
                        metrics.restart_clock()
                    # True after it has written a profile, which is no training time.
                    if profiler.end_step(self.step):
                        metrics.restart_clock()
                    # First the checkpoint: an evaluation takes long, and may be what ends the run.
                    if self._is_due(args.save_interval):
                        self._save(metrics)
                    if self._is_due(args.eval_interval):
                        self._evaluate(metrics, stop)
                    # SAT's key: end here, after the save below, and let the user resume.
                    if self._is_due(args.exit_interval):
                        break
                self.progress.enter("end")
                # saved_step is valid only after this.
                self.writer.wait()
                # A last save may have failed, or the run ended between two of them.
                if self.step > self.writer.saved_step:
                    self._save(metrics, stop.is_stopping)
                # After the save: a run that is killed meanwhile keeps its last step.
                if self._is_end_evaluated() and not stop.is_stopping:
                    self._evaluate(metrics, stop)
                metrics.draw()
            # No rank may leave while another waits for its part of a collective.
            stop.finish()
            engine.wait_for_weights()
            if self.step > self.writer.saved_step:
                raise RuntimeError(
                    f"step {self.step} could not be saved (see the error above); "
                    f"{self._how_to_resume()}"
                )
            self._log_end(stop, metrics)
            self.groups.close()
            num_skipped = int(engine.num_skipped)  # sync: once
            if self.first_step == 0 and self.step == num_skipped == self.num_steps:
                raise RuntimeError(
                    f"the run has trained nothing: all {counted(num_skipped, 'step')} had non-finite "
                    "gradients and were skipped; look at the first warning above"
                )

    def _log_end(self, stop: StopRequest, metrics: Metrics) -> None:
        """Log why the run ended, where its checkpoint is, its last results, and what may follow."""
        config = self.engine.transformer.config
        if self.step >= self.num_steps:
            path = self.writer.path(self.step)
            logger.info("finished at step %d; checkpoint: %s", self.step, path)
            log_results(metrics.history, self.evaluator.samples)
            is_lora = config.lora_rank is not None
            log_commands(self.config, self.folder, self.num_steps, is_lora)
            warn_of_image_scale(self.config, is_end=True)
            return
        reason = (
            stop.reason if stop.is_stopping else f"args.exit_interval={self.args.exit_interval}"
        )
        logger.info(
            "stopped at step %d of %d by %s; %s",
            self.step,
            self.num_steps,
            reason,
            self._how_to_resume(),
        )
        log_results(metrics.history, self.evaluator.samples)
        warn_of_image_scale(self.config, is_end=True)

    def _how_to_resume(self) -> str:
        """Describe the last checkpoint and the command that resumes from it."""
        path = self.writer.saved
        if path is None:
            return f"nothing is saved in {self.folder}; run the same command to start again"
        # A run that continues another one in a folder of its own may not have saved yet.
        is_own = run_of(path).absolute() == self.folder.absolute()
        resume = resume_words(self.config, self.folder if is_own else path)
        return f"the last checkpoint is {path}; run the same command with {resume} to resume"

    def compute_loss(self, batch: dict) -> Tensor:
        """Return the mean loss, a float32 scalar, of a micro-batch on the device.

        batch: {"mp4": [B, F, 3, H, W] in [-1, 1], "txt": [str], "fps", "num_frames"} or
        {"encoded_videos": [B, C, T, h, w], "prompt_embedding": [B, L, E]}. "slots": [int], positions
        of the samples in the global batch; by default this rank's first ones. Call
        `self.engine.wait_for_weights()` before reading weights that the network has not used yet.
        """
        rng = self._random(batch)
        with self.profiler.range("encode"):
            latents, conditioning = self.encoder(batch, rng)
        self._note_size(batch, latents, conditioning)
        # nn.Dropout draws from PyTorch's generator: seed it by step and slot, too.
        if self.engine.transformer.config.lora_dropout > 0:
            rng.seed_pytorch("lora dropout")
        with self.profiler.range("forward"):
            denoiser, loss_fn = self.diffusion.denoiser, self.diffusion.loss
            assert loss_fn is not None, "preflight asks for one"
            losses = loss_fn(self.engine, denoiser, latents, conditioning, rng)
        self.bands.add(rng, losses)
        return losses.mean()

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
        return SlotRandom(self.args.seed, self.step, slots, self.global_batch, self.groups.device)

    def _note_size(self, batch: dict, latents: Tensor, conditioning: Conditioning) -> None:
        """Record the size of the samples, for throughput and for sampling at the same size."""
        grid = TokenGrid.from_latents(latents, self.engine.transformer.patch_size)
        self.num_tokens = grid.num_tokens + conditioning.text.shape[1]
        if not self.is_size_known:
            of_batch = float(batch["fps"][0]) if "fps" in batch else DEFAULT_FPS  # sync: once
            fps = float(self.args.sampling_fps or of_batch)
            num_frames = self.encoder.num_frames(batch)
            channels, frames, height, width = latents.shape[1:]
            self.latent_size = LatentSize(channels, frames, height, width, num_frames, fps)
            self.is_size_known = True

    def _evaluate(self, metrics: Metrics, stop: StopRequest) -> None:
        self.progress.enter("evaluation")
        given = (self.step, self.latent_size, stop)
        report = [metrics.add_videos] if self.args.log_videos else []
        metrics.add_evaluation(self.step, self.evaluator(*given, *report))

    def _is_end_evaluated(self) -> bool:
        """Return whether args.eval_at_end asks for an evaluation that eval_interval has not made."""
        is_last = self.step >= self.num_steps and not self._is_due(self.args.eval_interval)
        return self.args.eval_at_end and is_last

    def _is_due(self, interval: int | None) -> bool:
        return bool(interval) and self.step % interval == 0

    def _count_steps(self) -> int:
        if self.args.epochs is None:
            assert self.args.train_iters is not None, "from_config sets a default"
            return self.args.train_iters
        return self.order.num_steps(self.args.epochs)

    def _open_metrics(self) -> Metrics:
        return Metrics(
            self.folder,
            self.groups,
            self.engine.transformer.config,
            start_step=self.step,
            num_steps=self.num_steps,
            samples_per_step=self.global_batch,
            tensorboard_folder=tensorboard_folder(self.folder, self.args),
            wandb_project=self.args.wandb_project_name if self.args.wandb else None,
            bands=self.bands,
        )

    def _announce(self) -> None:
        config, groups = self.engine.transformer.config, self.groups
        names = ("GPU", "GPUs") if groups.device.type == "cuda" else ("process", "processes")
        rows = ", rows split" if self.args.sequence_parallel else ""
        context = f" x cp {groups.context_size}" if groups.context_size > 1 else ""
        mesh = f"dp {groups.data_size}{context} x tp {groups.tensor_size}{rows}"
        ranks = f"{counted(groups.world_size, *names)} ({mesh})"
        parts = f"dp {groups.data_size} x batch {self.args.batch_size}"
        layers = counted(config.num_layers, "layer")
        log_facts(
            {
                "run folder": self.folder,
                "trained on": f"{ranks}, ZeRO-{self.engine.stage}, {self.args.precision}",
                "global batch": f"{self.global_batch} = {parts} x accumulation {self.accumulation}",
                "data": counted(len(self.datasets.train), "sample"),
                "steps": f"{self.step} to {self.num_steps}",
                "model": f"{layers} of width {config.hidden_size}",
                "trained": f"{self.num_trained / 1e6:.2f} M parameters",
            }
        )
        self.memory.start()

    def _save(self, metrics: Metrics, is_stopping: bool = False) -> None:
        """Start writing a checkpoint. If that fails, training continues without it. is_stopping: a
        signal or time limit ends the run."""
        self.progress.enter("save")
        state = {
            "global_batch": self.global_batch,
            "seed": self.args.seed,
            "num_samples": len(self.datasets.train),
            "data_order": self.order.fingerprint,
            "attention_backend": self.attention_backend,
            "encode_way": self.encode_choice.way or self.encode_choice.stored,
            "video_sizes": self._video_sizes(),
            "config": plain_sections(self.config),
        }
        is_exported = self.exporter.is_due(self.step, is_stopping)
        self.writer.save(self.step, state, self.exporter.write if is_exported else None)
        metrics.write_page()
        metrics.restart_clock()

    def _save_now(self) -> bool:
        """Save a checkpoint of this step, and return whether that succeeded."""
        assert self.metrics is not None, "it trains"
        self._save(self.metrics)
        self.writer.wait()
        return self.writer.saved_step == self.step

    def _video_sizes(self) -> list[list[int]]:
        """Return the training sizes: [pixel frames, latent rows, latent columns]."""
        sizes = bucket_sizes(self.config, self.engine.transformer.config) or [self.latent_size]
        return [[s.num_frames, s.height, s.width] for s in sizes]

    def _choose_attention(self, transformer: DiffusionTransformer) -> str | None:
        """Return the name of the attention backend, or None. A resumed run keeps its backend."""
        stored = self.manifest.get("attention_backend")
        return choose_for_training(self.config, self.args, transformer.config, self.groups, stored)

    def _take_adapters(self, file: Path) -> TrainArguments:
        """Start from a checkpoint of CogVideo's diffusers trainer: its LoRA file and its step."""
        step = step_of(file.parent)
        assert step is not None, f"{file.parent}: a name of such a checkpoint"
        self.step, self.checkpoint = step, None
        self.args = dataclasses.replace(self.args, load_lora=str(file))
        if self.groups.is_main:
            logger.warning(
                "args.resume=%s: resuming its LoRA weights and its step %d, without the state of its "
                "optimizer, since CogVideo's diffusers trainer wrote it",
                file.parent,
                step,
            )
        return self.args

    def _resume(self, checkpoint: Path) -> None:
        manifest, is_verified = self.manifest, self.args.verify_checkpoints
        load_checkpoint(checkpoint, manifest, self.engine, self.groups, is_verified)
        moments = self.args.optimizer_moments
        saved = (manifest.get("config") or {}).get("args", {}).get("optimizer_moments", "fp32")
        if saved != moments:
            how = "rounded to 8 bits" if moments == "8bit" else "kept in float32 from here on"
            logger.info(
                "args.optimizer_moments=%s, before %s: the moments are %s", moments, saved, how
            )
        num_samples = len(self.datasets.train)
        order = self.order.fingerprint
        before = manifest.get("num_samples", num_samples), manifest.get("data_order", order)
        if before != (num_samples, order):
            logger.warning(
                "the data set has changed (%s, before %d%s): from this step on, the order of the samples "
                "is different",
                counted(num_samples, "sample"),
                before[0],
                "" if before[0] != num_samples else ", with different weights or buckets",
            )
        # A run that ends before its first step need not save this one again.
        self.step = self.first_step = self.writer.saved_step = manifest["step"]
        self.writer.saved = checkpoint
        logger.info("resumed %s at step %d", checkpoint, self.step)
