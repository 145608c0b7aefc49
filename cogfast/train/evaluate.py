"""Evaluation during training: held-out loss by timestep band, and sampled videos.

Both use the same noise every time, so that two evaluations differ by the weights alone. A failure
is logged and training goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import Dataset, Subset

from cogfast.data.batches import BatchLoader, to_device
from cogfast.data.datasets import CaptionedVideos
from cogfast.data.global_order import GlobalOrder
from cogfast.slot_random import SlotRandom
from cogfast.train.arguments import TrainArguments
from cogfast.train.assembly import Diffusion
from cogfast.train.encode import Encoder
from cogfast.train.generate import LatentSize, Prompt, generate, write_samples
from cogfast.train.process_groups import ProcessGroups
from cogfast.train.zero_engine import ZeroEngine

logger = logging.getLogger(__name__)

_SEED = 0  # of held-out noise and samples: the same in every run, so that runs can be compared
_NUM_TIMESTEPS = 1000


class Evaluator:
    """Held-out loss and samples of one run; `dataset` is the held-out data or None."""

    def __init__(
        self,
        engine: ZeroEngine,
        diffusion: Diffusion,
        encoder: Encoder,
        dataset: Dataset | None,
        args: TrainArguments,
        groups: ProcessGroups,
        folder: Path,
    ) -> None:
        self.engine, self.diffusion, self.encoder = engine, diffusion, encoder
        self.dataset, self.args, self.groups, self.folder = dataset, args, groups, folder
        self.batch_size = args.eval_batch_size or args.batch_size

    def __call__(self, step: int, size: LatentSize | None) -> dict[str, float]:
        """Evaluate after `step`; returns the held-out losses. size: of the videos to sample."""
        has_ema = self.args.eval_with_ema and "shadow" in self.engine.state_kinds()
        self.engine.transformer.eval()
        losses: dict[str, float] = {}
        with self.engine.weights("shadow" if has_ema else "master"):
            if self.dataset is not None:
                losses = self._held_out_loss(step)
            if size is not None and self.diffusion.sampler is not None:
                self._sample(step, size)
        self.engine.transformer.train()
        return losses

    @torch.no_grad()
    def _held_out_loss(self, step: int) -> dict[str, float]:
        """Mean loss over the first held-out batches, at the middle of each timestep band."""
        num_bands = self.args.eval_timestep_bands
        sums = torch.zeros(num_bands, device=self.groups.device)
        count, error = 0, None
        try:
            for batch in self._batches():
                batch = to_device(batch, self.groups.device)
                rng = self._random(batch)
                latents, conditioning = self.encoder(batch, rng, has_dropout=False)
                noise = rng.normal("held-out noise", latents.shape)
                offset = rng.normal("held-out offset noise", latents.shape[:1])
                for band in range(num_bands):
                    middle = int((band + 0.5) / num_bands * _NUM_TIMESTEPS)
                    idx = torch.full((len(latents),), middle, device=latents.device)
                    sums[band] += self.diffusion.loss.at(
                        self.engine,
                        self.diffusion.denoiser,
                        latents,
                        conditioning,
                        idx,
                        noise,
                        offset,
                    ).sum()
                count += len(latents)
        except Exception as caught:
            error = caught
            logger.exception("held-out loss of step %d failed; training goes on", step)
        reports = self.groups.gather((sums.tolist(), count, error is None))  # sync: an evaluation
        if not all(ok for _, _, ok in reports):
            return {}
        total = max(1, sum(number for _, number, _ in reports))
        bands = [sum(part[0][band] for part in reports) / total for band in range(num_bands)]
        named = {f"valid_loss_band_{i}": value for i, value in enumerate(bands)}
        return {"valid_loss": sum(bands) / num_bands, **named}

    def _batches(self) -> BatchLoader:
        args, ranks = self.args, self.groups.data_size
        order = GlobalOrder(len(self.dataset), _SEED, self.batch_size * ranks)
        return BatchLoader(
            self.dataset,
            order,
            micro_batch=self.batch_size,
            dp_rank=self.groups.data_rank,
            dp_size=ranks,
            num_steps=order.num_steps(1) if args.strict_eval else args.eval_iters,
            num_workers=min(1, args.num_workers),
            timeout=args.decode_timeout,
            bad_samples_path=self.folder / "bad_samples.jsonl",
            max_bad_fraction=args.max_bad_fraction,
        )

    def _random(self, batch: dict) -> SlotRandom:
        ranks = self.groups.data_size
        return SlotRandom(
            _SEED, batch["step"], batch["slots"], self.batch_size * ranks, self.groups.device
        )

    def _sample(self, step: int, size: LatentSize) -> None:
        folder = self.folder / "samples" / f"step-{step:08d}"
        try:
            prompts = self._prompts()
            if not prompts:
                return
            write_samples(
                folder,
                lambda part: generate(
                    self.engine,
                    self.diffusion,
                    self.encoder,
                    part,
                    size,
                    seed=_SEED,
                    device=self.groups.device,
                    num_steps=self.args.eval_sampling_steps,
                ),
                prompts,
                self.encoder,
                size,
                self.groups,
                at_a_time=self.batch_size,
                latents_only=self.args.only_log_video_latents,
                is_padded=self.engine.stage == 3,
            )
        except Exception:
            logger.exception("sampling at step %d failed; training goes on", step)

    def _prompts(self) -> list[Prompt]:
        """args.eval_prompts, or the first held-out captions, with first frames for I2V."""
        texts: Sequence[str] = self.args.eval_prompts
        if texts and not self.encoder.image_input:
            return [Prompt(i, text) for i, text in enumerate(texts)]
        if self.dataset is None:
            return []
        number = min(self.args.eval_num_samples, len(self.dataset))
        chosen = [i * len(self.dataset) // number for i in range(number)]  # spread over the data
        captions = None if self.encoder.image_input else _captions(self.dataset)
        if captions is not None:
            return [Prompt(i, captions[sample]) for i, sample in enumerate(chosen)]
        prompts = []
        for i, sample in enumerate(chosen):
            item = self.dataset[sample]
            frame = item["video"][0].float() / 127.5 - 1 if self.encoder.image_input else None
            prompts.append(Prompt(i, texts[i] if i < len(texts) else item["txt"], frame))
        return prompts


def _captions(dataset: Dataset) -> Sequence[str] | None:
    """The captions where the data set lists them without decoding."""
    if isinstance(dataset, Subset):
        inner = _captions(dataset.dataset)
        return None if inner is None else [inner[i] for i in dataset.indices]
    return dataset.captions if isinstance(dataset, CaptionedVideos) else None
