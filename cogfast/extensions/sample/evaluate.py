"""Evaluates during training: held-out loss by timestep band, and sampled videos.

Both use the same noise every time, so two evaluations differ only in the weights. A failure is
logged, and training continues.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Subset

from cogfast.core.files import WriteError
from cogfast.core.json_files import brief
from cogfast.core.slot_random import SlotRandom
from cogfast.core.values import counted, show
from cogfast.data.bad_samples import BadSample
from cogfast.data.batches import in_unit_range
from cogfast.data.datasets import CaptionedVideos, SizedDataset
from cogfast.data.global_order import GlobalOrder
from cogfast.data.video.clip import Bucket, resize_picture
from cogfast.data.video.transform import Resize
from cogfast.diffusion.denoiser import Conditioning
from cogfast.diffusion.loss import NUM_BANDS, mask_weights
from cogfast.distributed.lost_ranks import UnsharedError, is_of_another_rank
from cogfast.distributed.model_batches import ModelBatches
from cogfast.distributed.process_groups import OtherRankError, ProcessGroups, StopRequest
from cogfast.distributed.zero_engine import ZeroEngine
from cogfast.extensions.sample.flags import sampled_tensors
from cogfast.extensions.sample.generate import (
    EvaluationStopped,
    Prompt,
    VideoMaker,
    file_name,
    in_model,
    refuse_fixed_frames,
    write_samples,
)
from cogfast.extensions.sample.prompt_files import given_prompts
from cogfast.extensions.sample.sizes import read_image
from cogfast.extensions.sample.writer import write_video
from cogfast.train.assembly import Diffusion, assemble_batches, assemble_order
from cogfast.train.encode import Encoder
from cogfast.train.keys import TrainKeys
from cogfast.train.preflight.mesh import divide
from cogfast.train.run.folder import samples_place
from cogfast.train.video_size import LatentSize

_MOST_LOGGED = 10  # prompts
logger = logging.getLogger(__name__)

_SEED = 0  # of held-out noise and samples; the same in every run, so that runs are comparable

T = TypeVar("T")


class Evaluator:
    """Computes the held-out loss and samples videos.

    dataset: the held-out data or None. network: the name of the network's class. data: the data set's
    arguments: images get the size of the videos as in training. shows_ema: the averaged weights are evaluated.

    Ranks that share a model, and all ranks under ZeRO-3, call the network together. So they decide
    together to stop, and each part of an evaluation that may fail on one rank ends with an agreement.
    """

    def __init__(
        self,
        engine: ZeroEngine,
        diffusion: Diffusion,
        encoder: Encoder,
        dataset: SizedDataset | None,
        args: TrainKeys,
        groups: ProcessGroups,
        folder: Path,
        network: str = "",
        data: Mapping[str, Any] = MappingProxyType({}),
        shows_ema: bool = False,
    ) -> None:
        # of data.params.tensors, which a sampled video gets from its held-out sample
        self.tensors = tuple(sampled_tensors(network, data))
        self.inputs = (*encoder.conditions, *self.tensors)
        self.engine, self.diffusion, self.encoder = engine, diffusion, encoder
        self.dataset, self.args, self.groups, self.folder = dataset, args, groups, folder
        self.resize: Resize = data.get("resize", "crop")
        self.shows_ema = shows_ema
        self.batch_size, self.accumulation = args.eval_batch_size or args.batch_size, 1
        if args.elastic != "off":
            # Held-out losses before and after a restart compare: both are of the same samples.
            of_rank = args.batch_size * args.gradient_accumulation_steps
            _, self.batch_size, self.accumulation = divide(of_rank, self.batch_size, 1)
        refuse_fixed_frames(diffusion.sampler)
        self.given = given_prompts(args)
        if groups.is_main:
            for text, _ in self.given[:_MOST_LOGGED]:
                logger.info("evaluations sample the prompt %s", brief(repr(text)))
        self.samples: Path | None = None  # folder of the last videos
        self.sampled_step: int | None = None  # of the last videos
        self.make_videos: Callable[..., VideoMaker] = VideoMaker  # with its arguments
        if dataset is None and not self._has_prompts():
            prompts = "args.eval_prompts or args.eval_prompt_file"
            if encoder.image_input:
                prompts = "args.eval_prompt_file with args.eval_images"
            if not {"image"}.issuperset(self.inputs):
                prompts = "args.split, since conditions and tensors come with held-out clips"
            keys = ("eval_interval", "eval_at_start", "eval_at_end")
            given = [f"args.{k}={show(getattr(args, k))}" for k in keys if getattr(args, k)]
            given += ["args.keep_best=-valid_loss"] * (args.keep_best == "-valid_loss")
            text = "%s has nothing to evaluate; set args.valid_data or args.split=9,1,0, or %s"
            logger.warning(text, ", ".join(given), prompts)

    def __call__(
        self,
        step: int,
        size: LatentSize,
        stop: StopRequest | None = None,
        report_videos: Callable[[int, Sequence[tuple[Path, str]]], None] = lambda *_: None,
    ) -> dict[str, float]:
        """Evaluate after `step` and return the held-out losses.

        size: size of the sampled videos. stop: a request ends the evaluation after the current batch
        or video. report_videos: called on rank 0 with `step` and the files that were written, each with its prompt.
        """
        is_asked_to_stop = lambda: stop is not None and stop.is_asked
        compute = partial(self._held_out_loss, is_asked_to_stop)
        sample = partial(self._sample, step, size, is_asked_to_stop, partial(report_videos, step))
        losses: dict[str, float] | None = None
        # This switches the blocks back to their calls without checkpointing, too.
        self.engine.transformer.eval()
        # The master weights come back at the end, also after an error.
        with self.engine.weights("shadow" if self.shows_ema else "master"), self.encoder.visit():
            if self.dataset is not None and self.diffusion.loss is not None:
                losses = self._attempt("the held-out loss", step, compute)
            if self._has_prompts() and self.diffusion.sampler is not None:
                self._attempt("sampling", step, sample)
        self.engine.transformer.train()
        return losses or {}

    def _attempt(self, what: str, step: int, action: Callable[[], T]) -> T | None:
        """Run `action` and log a failure. All ranks fail together, since `action` shares errors."""
        result = None
        try:
            result = action()
        except EvaluationStopped as error:
            logger.info("%s at step %d stopped early: %s", what, step, error)
        except OtherRankError as error:
            logger.info("%s at step %d: %s; training continues", what, step, error)
        except (OSError, WriteError, ValueError) as error:  # a full disk, frames of NaN
            logger.warning("%s at step %d failed (%s); training continues", what, step, error)
        except UnsharedError:
            raise
        except Exception as error:
            if is_of_another_rank(error):  # a rank is lost, so no other can continue
                raise
            logger.exception("%s at step %d failed; training continues", what, step)
        if self.groups.device.type == "cuda":
            gc.collect()  # sync: once per evaluation
            torch.cuda.empty_cache()  # sync: return the memory of decoding to the training step
        return result

    @torch.no_grad()
    def _held_out_loss(self, is_asked_to_stop: Callable[[], bool]) -> dict[str, float]:
        """Return the mean loss of the held-out batches, at the middle of each timestep band."""
        # Sum of losses per band, and number of samples. float64 makes the order negligible.
        sums = torch.zeros(NUM_BANDS + 1, dtype=torch.float64, device=self.groups.device)
        of_rank = self.batch_size * self.accumulation
        order = assemble_order(self._held_out, _SEED, of_rank * self.groups.data_size)
        num_steps = order.num_steps(1) if self.args.strict_eval else self.args.eval_iters
        groups, encoder = self.groups, self.encoder
        num_batches = num_steps * self.accumulation
        with groups.on_all(lambda: self._batches(num_steps)) as batches:
            for number in range(num_batches):
                if groups.decide(is_asked_to_stop()):
                    left = counted(num_batches - number, "batch", "batches")
                    raise EvaluationStopped(f"left out {left}")
                batch = groups.on_all(partial(next, batches), groups.model_control)
                # Before `choose`, which has collectives: building an encoder may fail on one rank.
                groups.on_all(partial(encoder.build, batch))
                encoder.choose(batch)
                with encoder.alone():
                    encoded = groups.on_all(partial(self._encoded, batch, order))
                latents, conditioning, rng, is_counted, mask = encoded
                latents = groups.broadcast_tensor_in_model(latents)
                inputs = latents, in_model(conditioning, groups), rng, is_counted, mask
                sums += groups.on_all(partial(self._band_losses, *inputs), self.network_ranks)
            batches.share_bad()
        of_ranks = groups.gather(sums.tolist())  # sync: the result of the evaluation
        # All ranks of one model have its sums: count them once.
        of_models = of_ranks[:: groups.model_size]
        *bands, number = (sum(column) for column in zip(*of_models, strict=True))
        bands = [band / number for band in bands]
        named = {f"valid_loss_band_{i}": value for i, value in enumerate(bands)}
        return {"valid_loss": sum(bands) / NUM_BANDS, **named}

    @property
    def network_ranks(self) -> dist.ProcessGroup | None:
        """The ranks that must call the network together, as a group for decisions."""
        return self.groups.control if self.engine.stage == 3 else self.groups.model_control

    @property
    def _held_out(self) -> SizedDataset:
        assert self.dataset is not None, "there is held-out data"
        return self.dataset

    def _batches(self, num_steps: int) -> ModelBatches:
        args = self.args.changed(
            batch_size=self.batch_size,
            gradient_accumulation_steps=self.accumulation,
            seed=_SEED,
            # The workers of training stay alive meanwhile.
            num_workers=min(1, self.args.num_workers),
        )
        name = "bad_samples_valid.jsonl"
        return assemble_batches(
            self._held_out, args, self.groups, self.folder, num_steps=num_steps, list_name=name
        )

    def _encoded(
        self, batch: dict, order: GlobalOrder
    ) -> tuple[Tensor, Conditioning, SlotRandom, Tensor, Tensor | None]:
        """Return latents, conditioning, random draws, which samples [B] to count, and the weights of the error.

        With strict_eval each sample counts once. Draws are keyed by the position of a sample in the
        order, so they do not depend on the number of ranks.
        """
        # The position in the whole evaluation stands for the slot, with step 0 for all.
        places = [batch["step"] * order.most_slots + slot for slot in batch["slots"]]
        rng = SlotRandom(_SEED, 0, places, 0, self.groups.device)
        latents, conditioning = self.encoder(batch, rng, has_dropout=False)
        is_strict, step = self.args.strict_eval, batch["step"]
        is_counted = [not is_strict or order.is_in_first_epoch(step, s) for s in batch["slots"]]
        # Held-out data need not have masks.
        loss = self.diffusion.loss if "mask" in batch else None
        mask = mask_weights(loss, batch, self.encoder.patch)
        return latents, conditioning, rng, torch.tensor(is_counted).to(latents.device), mask

    def _band_losses(
        self,
        latents: Tensor,
        conditioning: Conditioning,
        rng: SlotRandom,
        is_counted: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """Return the summed loss per band and the number of samples, [bands + 1] float64."""
        loss_fn = self.diffusion.loss
        assert loss_fn is not None, "__call__ leaves the held-out loss out without one"
        noise = rng.normal("held-out noise", latents.shape)
        offset_noise = rng.normal("held-out offset noise", latents.shape[:1])
        given = (self.engine, self.diffusion.denoiser, latents, conditioning)
        sums = []
        for band in range(NUM_BANDS):
            # Fixed timesteps and noise: losses of two steps differ by the weights alone.
            middle = int((band + 0.5) / NUM_BANDS * loss_fn.sigma_sampler.num_idx)
            idx = torch.full((len(latents),), middle, device=latents.device)
            losses = loss_fn.at(*given, idx, noise, offset_noise, *([] if mask is None else [mask]))
            sums.append((losses.double() * is_counted).sum())
        return torch.stack([*sums, is_counted.double().sum()])

    def _sample(
        self,
        step: int,
        size: LatentSize,
        is_asked_to_stop: Callable[[], bool],
        report_videos: Callable[[Sequence[tuple[Path, str]]], None],
    ) -> None:
        folder, start = samples_place(self.folder, step, self.args.folder_layout)
        prompts = self.groups.on_main(lambda: self._prompts(size, start))
        if self.encoder.encodes_clips:
            # Here, since ranks sample apart: with a latent cache no step has encoded a clip.
            self.groups.on_all(lambda: self.encoder.first_stage)
            self.encoder.choose_for(torch.empty(1, 3, size.num_frames, *size.pixels, device="meta"))
        logger.info("step %d: sampling %s", step, counted(len(prompts), "video"))
        parts = self.engine, self.diffusion, self.encoder, size, self.args, self.groups
        maker = self.make_videos(*parts, self.args.eval_sampling_steps)
        write_samples(
            folder,
            maker,
            prompts,
            at_a_time=self.batch_size,
            latents_only=self.args.only_log_video_latents,
            network_ranks=self.network_ranks,
            is_asked_to_stop=is_asked_to_stop,
            report_videos=report_videos,
            start_of_names=start,
        )
        self.samples, self.sampled_step = folder, step

    def _has_prompts(self) -> bool:
        has_held_out = self.dataset is not None and self.args.eval_num_samples > 0
        return self._are_whole or has_held_out

    @property
    def _are_whole(self) -> bool:
        """Whether there are given prompts that need no held-out data."""
        if not self.given or not self.inputs:
            return bool(self.given)
        # Other conditions, and tensors, come with held-out clips alone.
        return self.inputs == ("image",) and self.given[0][1] is not None

    def _prompts(self, size: LatentSize, start: str) -> list[Prompt]:
        """Return the given prompts or held-out captions. Prompts without a condition that the model needs
        get that of a held-out clip. start: what the names of their samples begin with."""
        if self._are_whole:
            return [
                Prompt(i, text, _SEED + i, self._image(image, size))
                for i, (text, image) in enumerate(self.given)
            ]
        dataset = self._held_out
        # Each text gets the conditions of a held-out video.
        # Given prompts are all sampled; eval_num_samples limits held-out captions alone.
        clips: Sequence[int] = range(len(dataset))
        if isinstance(dataset, CaptionedVideos) and dataset.clips.buckets is not None:
            # Pictures are left out if there are clips.
            is_clip = ~np.isin(dataset.clips.buckets, dataset.settings.picture_buckets)
            clips = np.flatnonzero(is_clip).tolist() or clips
        number = len(self.given) or min(self.args.eval_num_samples, len(clips))
        # Evenly spaced over the data
        chosen = [clips[i * len(clips) // number] for i in range(number)]
        captions = None if self.inputs else _captions(dataset, chosen)
        if captions is not None:
            prompts = [Prompt(i, caption, _SEED + i) for i, caption in enumerate(captions)]
        else:
            prompts = self._of_samples(chosen, size)
        if not self.given:
            for prompt in prompts:
                name = file_name(prompt, start).removeprefix(start)
                path = self.folder / "reference" / f"{name}.mp4"
                if not path.exists():
                    self._write_reference(path, chosen[prompt.index])
        return prompts

    def _write_reference(self, path: Path, sample: int) -> None:
        """Write a held-out clip as it is trained, if it has a video file."""
        dataset, index = _whole(self._held_out, sample)
        if not isinstance(dataset, CaptionedVideos):
            return
        try:
            # Not `dataset[index]`: an item of a cache has latents.
            item = CaptionedVideos.__getitem__(dataset, index)
            frames = item["video"].cpu().permute(0, 2, 3, 1)  # [F, H, W, 3]; sync: once per clip
            write_video(path, frames, item["fps"])
        # A clip on the run's page is worth no run: whatever the libraries raise is logged.
        except Exception as error:
            logger.warning("%s is not written (%s); training continues", path, error)

    def _of_samples(self, chosen: Sequence[int], size: LatentSize) -> list[Prompt]:
        """Return the prompts of held-out samples, without those that cannot be read."""
        found, bad = [], None
        for i, sample in enumerate(chosen):
            try:
                text, path = self.given[i] if self.given else ("", None)
                prompt = self._prompt(i, sample, text, size)
                # A given image replaces that of the held-out clip.
                image = prompt.image if path is None else self._image(path, size)
                found.append(replace(prompt, image=image))
            except BadSample as error:
                bad = error
                logger.warning("a held-out sample is not sampled: %s", error)
        if bad is not None and not found:
            raise bad
        return found

    def _prompt(self, index: int, sample: int, text: str, video: LatentSize) -> Prompt:
        """Build a prompt from a sample of the data set. text: replaces its caption; "": none."""
        dataset: Any = self._held_out  # a cache, or a user's own class, may have first_frame
        item, given = dataset[sample], dict[str, Any]()
        if self.encoder.image_input and "image_latents" in item:
            given["image_latents"] = item["image_latents"]
        elif self.encoder.image_input:
            if "noised_image_mean" in item:  # a cache of noised images holds no clean frame
                pixels = dataset.first_frame(sample)
            else:
                pixels = item["images"] if "images" in item else item["video"][0]
            # DALI's frames are on the GPU in the reader's memory; uint8 pixels are scaled on the CPU.
            pixels = pixels.cpu()  # sync: a picture of an evaluation
            # The sample may be of another bucket.
            if pixels.shape[1:] != video.pixels and pixels.dtype == torch.uint8:
                pixels = resize_picture(pixels.permute(1, 2, 0), video.pixels, self.resize)
            given["image"] = in_unit_range(pixels)
        if "control" in self.encoder.conditions:
            given["control"] = _video(dataset, sample, item, "control", video)
        if {"frames", "masked_video"} & set(self.encoder.conditions):
            given["video"] = _video(dataset, sample, item, "video", video)
            given["mask"] = self._mask(dataset, sample, item, video)
        if not text:
            given["embedding"] = item.get("prompt_embedding")
        given["tensors"] = {name: item[name] for name in self.tensors}
        return Prompt(index, text or item.get("txt", ""), _SEED + index, **given)

    def _mask(
        self, dataset: SizedDataset, index: int, item: Mapping[str, Any], video: LatentSize
    ) -> Tensor:
        """Return what is to be made of a held-out clip, uint8 [F, 1, H, W]: its mask or, without one, all but
        the given frames, of random ones the first and the last."""
        given = self.encoder.given_frames
        if given is None and "mask" in item:
            return _video(dataset, index, item, "mask", video)
        mask = torch.ones(video.num_frames, 1, *video.pixels, dtype=torch.uint8)
        is_random = given is not None and given.kind == "random"
        mask[[0, -1] if is_random else given.pixel_frames(video.num_frames) if given else [0]] = 0
        return mask

    def _image(self, path: Path | None, size: LatentSize) -> Tensor | None:
        """Read a given image as [3, H, W] in [-1, 1] at the size of the videos."""
        return None if path is None else read_image(path, size.pixels, self.resize, "the image")


def _whole(dataset: Any, index: int) -> tuple[Any, int]:
    """Return the data set that a part of one was taken of, and the place of a sample there."""
    while isinstance(dataset, Subset):
        dataset, index = dataset.dataset, dataset.indices[index]
    return dataset, index


def _captions(dataset: SizedDataset, samples: Sequence[int]) -> list[str] | None:
    """Return the captions if the data set lists them without decoding and has no embeddings."""
    captions = []
    for whole, index in (_whole(dataset, sample) for sample in samples):
        if not isinstance(whole, CaptionedVideos) or whole.is_cached:
            return None
        captions.append(whole.captions[index])
    return captions


def _video(
    dataset: SizedDataset, index: int, item: Mapping[str, Any], name: str, video: LatentSize
) -> Tensor:
    """Return the clip, the control or the mask of a held-out sample at the size of the videos, [F, C, H, W]."""
    whole, index = _whole(dataset, index)
    if isinstance(whole, CaptionedVideos):
        pixels = whole.read_video(name, index, Bucket(video.num_frames, *video.pixels))
    else:
        pixels = item[name]
    return pixels.cpu()  # sync: a clip of an evaluation, which DALI has decoded on the GPU
