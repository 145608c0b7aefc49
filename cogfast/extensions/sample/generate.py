"""Generates videos from prompts: draws noise, samples latents, decodes, writes files."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from cogfast.core.addresses import name_of, url_of
from cogfast.core.files import write_whole
from cogfast.core.shapes import pad_latent_frames
from cogfast.core.slot_random import SlotRandom
from cogfast.core.values import counted
from cogfast.data.batches import in_unit_range
from cogfast.diffusion.denoiser import Conditioning, Network
from cogfast.diffusion.sampler import VideoDDIMSampler
from cogfast.distributed.lost_ranks import UnsharedError
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.extensions.sample.keys import SamplingKeys
from cogfast.extensions.sample.writer import contact_sheet, to_frames, write_video
from cogfast.extensions.stores import store
from cogfast.model.weights.tensor_files import Outgoing, write_safetensors
from cogfast.train.assembly import Diffusion
from cogfast.train.encode import Encoder, join_conditions
from cogfast.train.video_size import LatentSize

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A video to sample. index: position among all prompts. seed: determines the noise.

    For image-to-video, image is [3, H, W] in [-1, 1] or image_latents is [C, 1, h, w], scaled. For a
    control model, control is [F, 3, H, W], uint8 or in [-1, 1]. For inpainting and given frames, video is
    the same, and mask uint8 [F, 1, H, W], 1 where the video is to be made; None: everywhere.
    embedding: [L, E], replaces the encoded text. size: if it differs from the default size. tensors: those
    of data.params.tensors by name, for a network of the user's; all prompts of a call have the same names.
    """

    index: int
    text: str
    seed: int
    image: Tensor | None = None
    image_latents: Tensor | None = None
    control: Tensor | None = None
    video: Tensor | None = None
    mask: Tensor | None = None
    embedding: Tensor | None = None
    size: LatentSize | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


def refuse_fixed_frames(sampler: VideoDDIMSampler | None) -> None:
    if sampler is not None and sampler.fixed_frames:
        text = f"model.sampler_config.params.fixed_frames={sampler.fixed_frames}: a video is sampled from noise"
        text += ", which these frames would keep; set it to 0, and give frames "
        raise ValueError(f"{text}with model.conditions=[frames] and model.given_frames=prefix:N")


class StepBar(tqdm):
    """Shows the steps of the videos that rank 0 samples, on a terminal."""

    def __init__(self, num_videos: int, num_steps: int) -> None:
        shape = "{desc}: step {n} of {total}, {remaining} left"
        super().__init__(total=num_steps, bar_format=shape, leave=False, mininterval=0)
        self.num_videos, self.video = num_videos, 1
        self.next_video(0)

    def next_video(self, number: int) -> None:
        self.reset()
        self.video += number
        self.desc = f"video {self.video} of {self.num_videos}"
        self.clear()

    def around(self, network: Network) -> Network:
        """Return a network that shows each of its calls."""

        def call(*args: Any, **kwargs: Any) -> Tensor:
            out = network(*args, **kwargs)
            if out.is_cuda:
                torch.cuda.synchronize(out.device)  # sync: the bar of a terminal shows what is done
            self.update()
            return out

        return call


class VideoMaker:
    """Turns prompts into latents and latents into frames.

    The prompts of one call have one size. The noise of a prompt depends only on its seed.
    """

    def __init__(
        self,
        network: Network,
        diffusion: Diffusion,
        encoder: Encoder,
        size: LatentSize,
        args: SamplingKeys,
        groups: ProcessGroups,
        num_steps: int | None = None,
    ) -> None:
        """size: for prompts without a size. num_steps: replaces the sampler's number of steps."""
        assert diffusion.sampler is not None, "the callers ask for one"
        self.sampler = diffusion.sampler
        if num_steps is not None:
            self.sampler = self.sampler.with_num_steps(num_steps)
        self.network, self.denoiser, self.encoder = network, diffusion.denoiser, encoder
        self.size, self.groups, self.device = size, groups, groups.device
        # Text of guidance's unconditional half; None: zeros, as dropped captions are in training
        self.negative_prompt = args.negative_prompt
        self.bar: StepBar | None = None
        self.negative: Tensor | None = None  # its embedding [1, L, E], once `condition` made it

    def size_of(self, prompt: Prompt) -> LatentSize:
        return prompt.size or self.size

    @torch.no_grad()
    def condition(self, prompts: Sequence[Prompt]) -> Conditioning:
        """Encode prompts to text [B, L, E] and the conditions [B, C', T, h, w] or None.

        Also encodes the negative prompt, at the first call.
        """
        if self.negative_prompt is not None and self.negative is None:
            self.negative = self.encoder.encode_text([self.negative_prompt])
        if prompts[0].embedding is None:
            text = self.encoder.encode_text([p.text for p in prompts])
        else:
            text = _stack([p.embedding for p in prompts]).to(self.device)
        makers = {
            "image": self._image_latents,
            "control": self._control_latents,
            "frames": self._given_latents,
            "masked_video": self._masked_video,  # with the channel of the mask
        }
        found = [makers[name](prompts) for name in self.encoder.conditions if name in makers]
        of = {name: [p.tensors[name] for p in prompts] for name in prompts[0].tensors}
        tensors = {name: torch.stack(values).to(self.device) for name, values in of.items()}
        return Conditioning(text, join_conditions(found), tensors=tensors)

    def latents(self, prompts: Sequence[Prompt], conditioning: Conditioning) -> Tensor:
        """Sample scaled latents [B, C, T, h, w] in float32, one per prompt."""
        size, rng = self.size_of(prompts[0]), self._random(prompts)
        shape = (len(prompts), size.channels, size.frames, size.height, size.width)
        # The text of guidance's unconditional half, [B, L, E]
        text = torch.zeros_like(conditioning.text)
        if self.negative_prompt is not None:
            assert self.negative is not None, "condition has encoded it"
            text = self.negative.to(text).expand_as(text)
        # New noise at every call, keyed by the seed of each prompt
        calls = itertools.count(1)
        noise_like = lambda x: rng.normal(f"sampler step {next(calls)}", x.shape)
        # Guidance is for the text alone: both halves see the image, the control and the tensors.
        return self.sampler(
            self.denoiser,
            self.network if self.bar is None else self.bar.around(self.network),
            rng.normal("sample", shape),
            conditioning,
            dataclasses.replace(conditioning, text=text),
            noise_like,
        )

    def frames(self, latents: Tensor, num_frames: int) -> np.ndarray:
        """Decode one video's latents [C, T, h, w] to uint8 frames [F, H, W, 3]."""
        return to_frames(self.encoder.decode(latents[None], num_frames)[0])

    def _random(self, prompts: Sequence[Prompt]) -> SlotRandom:
        # The seed is in the place of the slot, so a video does not depend on its batch.
        return SlotRandom(0, 0, [p.seed for p in prompts], 0, self.device)

    def _image_latents(self, prompts: Sequence[Prompt]) -> Tensor:
        """Encode the prompts' images without noise and extend them to all latent frames."""
        if prompts[0].image is None:
            given = _stack([p.image_latents for p in prompts]).to(self.device)
            latents = self.encoder.scale_image(given)
        else:
            frames = _stack([p.image for p in prompts]).to(self.device)[:, :, None]
            latents = self.encoder.encode_image(frames, self._random(prompts))
        return self.encoder.pad_to_frames(latents, self.size_of(prompts[0]).frames)

    def _control_latents(self, prompts: Sequence[Prompt]) -> Tensor:
        pixels = in_unit_range(_stack([p.control for p in prompts]).to(self.device))
        return self.encoder.encode_control(pixels.transpose(1, 2))

    def _given_latents(self, prompts: Sequence[Prompt]) -> Tensor:
        """Encode the frames of the prompts' videos that are not to be made, without noise."""
        given = self.encoder.given_frames
        assert given is not None, "the model has the condition frames"
        pixels, masks = self._video_and_mask(prompts)
        frames, known = given.pixel_frames(pixels.shape[2]), masks.flatten(3).amax(dim=3)[:, 0] == 0
        latents = self.encoder.encode_given(
            pixels[:, :, frames],
            given.places(pixels.shape[2]),
            pixels.shape[2],
            self._random(prompts),
            is_given=None if given.is_clip else known[:, frames].cpu(),
        )
        return pad_latent_frames(latents, self.encoder.patch)

    def _masked_video(self, prompts: Sequence[Prompt]) -> Tensor:
        if all(p.video is None for p in prompts):  # text-to-video, as in VideoX-Fun's pipeline
            size = self.size_of(prompts[0])
            shape = (len(prompts), 1 + size.channels, size.frames, size.height, size.width)
            return torch.zeros(shape, device=self.device)
        return self.encoder.encode_masked(*self._video_and_mask(prompts), self._random(prompts))

    def _video_and_mask(self, prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
        """Return the prompts' videos [B, 3, F, H, W] in [-1, 1] and masks [B, 1, F, H, W]."""
        pixels = in_unit_range(_stack([p.video for p in prompts]).to(self.device))
        masks = _stack([p.mask for p in prompts]).to(self.device)
        return pixels.transpose(1, 2), masks.transpose(1, 2)


def _stack(values: Sequence[Tensor | None]) -> Tensor:
    given = [value for value in values if value is not None]
    assert len(given) == len(values), "the prompts of one call have the same inputs"
    return torch.stack(given)


def file_name(prompt: Prompt, start: str = "") -> str:
    """Return a readable file name that is unique to the prompt. start: before the prompt's number."""
    words = re.sub(r"[^a-z0-9]+", "-", prompt.text.lower()).strip("-")[:40].strip("-")
    encoded = prompt.text.encode("utf-8", "surrogatepass")  # YAML escapes can make lone surrogates
    # Prompts that begin alike, and prompts without Latin letters, still differ in it.
    digest = hashlib.blake2b(encoded, digest_size=3).hexdigest()
    number = str(prompt.index) if start else f"{prompt.index:03d}"
    return f"{start}{number}-{words or 'empty'}-{digest}"


class EvaluationStopped(Exception):
    """Raised when the run is asked to stop during an evaluation."""


def write_samples(
    folder: Path,
    maker: VideoMaker,
    prompts: Sequence[Prompt],
    *,
    at_a_time: int,
    latents_only: bool,
    network_ranks: dist.ProcessGroup | None = None,
    is_asked_to_stop: Callable[[], bool] = lambda: False,
    report_videos: Callable[[Sequence[tuple[Path, str]]], None] = lambda _: None,
    start_of_names: str = "",
) -> list[Path]:
    """Sample this rank's prompts and write the files; return all ranks' files on every rank.

    Rank 0 also writes prompts.json and the contact sheet. Where ranks share a sample, the first
    of them decodes and writes. The first error ends the sampling of this rank, and of all that sample in
    step with it; what was written is kept, and the error is raised at the end on every rank.
    network_ranks: the ranks that must call the network together (all of them under ZeRO-3), as a group
    for decisions; None: those that share a sample. is_asked_to_stop: checked before each video; if true,
    the rest are skipped and EvaluationStopped is raised. report_videos: called on rank 0 with the videos
    that were written. start_of_names: before the names of all files.
    """
    groups, done = maker.groups, dict[int, _Row]()
    network_ranks = network_ranks or groups.model_control
    # In turn, so that replicas finish together and the first files are the first prompts'.
    mine = list(prompts[groups.data_rank :: groups.data_size])
    if network_ranks is not None:  # all replicas sample in step, each the same number of batches
        # Another rank makes the same video, so writing its file twice is harmless.
        mine += [prompts[-1]] * (-(-len(prompts) // groups.data_size) - len(mine))
    if groups.is_main and sys.stderr.isatty():
        maker.bar = StepBar(len(mine), maker.sampler.num_steps)
    error: Exception | None = None
    for start in range(0, len(mine), at_a_time):
        part = mine[start : start + at_a_time]
        is_over = is_asked_to_stop()
        if is_over if network_ranks is None else groups.decide(is_over):
            error = EvaluationStopped(f"left out {counted(len(mine) - start, 'video')}")
            break
        begun = time.monotonic()
        try:
            write = partial(_write, folder, maker, latents_only, start_of_names, done)
            _sample_batch(folder, maker, part, network_ranks, write)
            seconds = time.monotonic() - begun
            videos = f"{start + len(part)} of {counted(len(mine), 'video')}"
            logger.info("sampled %s, %.1f s", videos, seconds)
        except UnsharedError:
            raise
        except Exception as caught:
            # Clearing its frames frees their tensors.
            traceback.clear_frames(caught.__traceback__)
            names = ", ".join(f"{p.index} ({p.text!r})" for p in part)
            what = str(caught).partition("\n")[0]
            logger.warning("prompt %s failed: %s: %s", names, type(caught).__name__, what)
            error = caught
            break
    # Every rank comes here, also one whose prompts have failed.
    merged = {index: row for part in groups.gather(done) for index, row in part.items()}
    rows = [merged[index] for index in sorted(merged)]
    try:
        if url_of(folder) is not None:
            own = [row.file for row in done.values()]
            take_to_main(folder, [row.file for row in rows], own, groups)
    except Exception as caught:
        error = error or caught
    try:
        if groups.is_main and rows:
            _write_overview(folder, rows, start_of_names)
            if not latents_only:
                made = [prompt for prompt in prompts if prompt.index in merged]
                report_videos([(folder / merged[p.index].file, p.text) for p in made])
    except Exception as caught:
        error = error or caught
    groups.agree(error)
    return [folder / row.file for row in rows]


def _sample_batch(
    folder: Path,
    maker: VideoMaker,
    prompts: Sequence[Prompt],
    network_ranks: dist.ProcessGroup | None,
    write: Callable[[Sequence[tuple[Prompt, Tensor]]], None],
) -> None:
    """Sample prompts in one call of the network, and write the samples on the first rank of a model."""
    groups = maker.groups
    run = groups.together if network_ranks is None else groups.on_all
    conditioning = in_model(run(partial(_condition, folder, maker, prompts), None), groups)
    if maker.negative is not None:
        maker.negative = groups.broadcast_tensor_in_model(maker.negative)
    latents = run(partial(maker.latents, prompts, conditioning), network_ranks)
    samples = list(zip(prompts, latents, strict=True)) if groups.is_first_of_model else []
    run(partial(write, samples), None)
    if maker.bar is not None:
        maker.bar.next_video(len(prompts))


def take_to_main(
    folder: Path, files: Sequence[str], mine: Sequence[str], groups: ProcessGroups
) -> None:
    """Bring the files of other machines to that of rank 0, which scores and shows all, through the store.

    mine: those that this rank has written.
    """
    missing = groups.broadcast([file for file in files if not (folder / file).exists()])

    def send() -> None:
        for file in missing:
            if file in mine:
                store.write(name_of(folder / file), (folder / file).read_bytes())

    def receive() -> None:
        for file in missing:
            data = store.read(name_of(folder / file))
            write_whole(folder / file, lambda path, data=data: path.write_bytes(data))

    if missing:
        groups.on_all(send)
        groups.on_main(receive)


def _condition(folder: Path, maker: VideoMaker, prompts: Sequence[Prompt]) -> Conditioning:
    folder.mkdir(parents=True, exist_ok=True)
    with maker.encoder.alone():
        return maker.condition(prompts)


def in_model(conditioning: Conditioning, groups: ProcessGroups) -> Conditioning:
    """Return the conditioning of the first of the ranks that share a sample, on each of them."""
    others, send = conditioning.condition_latents, groups.broadcast_tensor_in_model
    return dataclasses.replace(
        conditioning,
        text=send(conditioning.text),
        condition_latents=None if others is None else send(others),
        tensors={name: send(values) for name, values in conditioning.tensors.items()},
    )


@dataclass(frozen=True, slots=True)
class _Row:
    """A sample on the contact sheet. thumbnails: uint8 [n, H, W, 3]."""

    file: str
    text: str
    thumbnails: np.ndarray | None


def _write(
    folder: Path,
    maker: VideoMaker,
    latents_only: bool,
    start: str,
    done: dict[int, _Row],
    samples: Sequence[tuple[Prompt, Tensor]],
) -> None:
    """Write the file of each sample, the video or its latents [C, T, h, w], and note it in `done`."""
    for prompt, latents in samples:
        size, thumbnails = maker.size_of(prompt), None
        name = file_name(prompt, start) + (".safetensors" if latents_only else ".mp4")
        if latents_only:
            about = {
                "prompt": prompt.text,
                "num_frames": str(size.num_frames),
                "fps": str(size.fps),
            }
            tensor = latents.float().cpu()  # sync: into a file, once per video
            held = Outgoing(
                "latents", tuple(tensor.shape), tensor.dtype, lambda values=tensor: values
            )
            write_whole(folder / name, partial(write_safetensors, tensors=[held], metadata=about))
        else:
            frames = maker.frames(latents, size.num_frames)
            write_video(folder / name, frames, size.fps)
            # At most 6, first and last included; unique, since a video may have fewer frames.
            chosen = np.unique(np.linspace(0, len(frames) - 1, 6).round().astype(int))
            stride = max(1, frames.shape[2] // 360)
            thumbnails = frames[chosen][:, ::stride, ::stride]
        done[prompt.index] = _Row(name, prompt.text, thumbnails)


def _write_overview(folder: Path, rows: Sequence[_Row], start: str) -> None:
    listing = json.dumps({row.file: row.text for row in rows}, indent=2, ensure_ascii=False)
    # Characters that UTF-8 cannot encode (lone surrogates) become JSON escapes.
    text = (listing + "\n").encode("utf-8", "backslashreplace")
    write_whole(folder / f"{start}prompts.json", lambda path: path.write_bytes(text))
    if pictures := [(row.thumbnails, row.text) for row in rows if row.thumbnails is not None]:
        contact_sheet(folder / f"{start}contact_sheet.png", *map(list, zip(*pictures, strict=True)))
