"""Memory of the frozen encoders: weights, and the peaks of encoding and decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cogfast.core.component import Component
from cogfast.core.shapes import num_latent_frames
from cogfast.extensions.conditions.given_frames import GivenFrames
from cogfast.model.autoencoder import VideoAutoencoder, tiled, video_autoencoder_from_sat
from cogfast.model.keys import ModelKeys
from cogfast.model.text_encoder import T5TextEncoder
from cogfast.train.assembly import DTYPES, video_data
from cogfast.train.frozen_encoders import FrozenParts
from cogfast.train.keys import TrainKeys

_FLOAT32 = 4
# google/t5-v1_1-xxl, which all CogVideoX models use: elements of its encoder, and those of its `wo`,
# which fp16 keeps in float32
T5_NUMEL, _T5_WO_NUMEL = 4_762_310_656, 24 * 10_240 * 4096
_T5_WIDTH, _T5_INNER, _T5_HEADS = 4096, 10_240, 64

# The VAE of all CogVideoX models. Bytes of its activations are for 16-bit numbers, and per pixel:
# of all frames if it encodes whole clips, else of one frame. They come from dry runs of diffusers'
# code (model/autoencoder.py), without the workspace of convolutions.
VAE_NUMEL = 215_583_907
_WHOLE, _IN_FRAMES, _IN_TILES, _FIRST_FRAME = 1900, 23_000, 19_300, 5361
_PIXELS = 28  # per pixel of all frames: uint8, float32, and twice the encoder's dtype; moments
_DECODED = {1: 14_500, 3: 48_100}  # by latent frames, with workspace; more take what 5 take
_DECODED_MORE = 64_100
_TILE = (240, 360)


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoders:
    """The frozen encoders of a run.

    text_bytes, stage_bytes: of weights. text_peak: of encoding a micro-batch's captions. in_step:
    whether training steps use (text encoder, first stage). in_evaluation: whether evaluations use both.
    encodes_clips: whether steps encode whole clips, not only first frames. shape: (B, F, H, W) of a
    micro-batch. num_videos: of a sample, with a control or masked video. mode: that of
    first_stage_config.params.encode_chunks, or auto. are_offloaded: args.offload_encoders.
    """

    text_bytes: int = 0
    text_peak: int = 0
    stage_bytes: int = 0
    in_step: tuple[bool, bool] = (False, False)
    in_evaluation: bool = False
    encodes_clips: bool = False
    num_videos: int = 1
    shape: tuple[int, int, int, int]
    mode: str = "auto"
    number_bytes: int = 2
    are_offloaded: bool = False

    @property
    def is_known(self) -> bool:
        """Whether the first stage is the VAE of CogVideoX, whose peaks are known."""
        return self.stage_bytes > 0

    def resident(self, is_evaluated: bool = False) -> int:
        """Return the bytes of weights that stay on the device."""
        if self.are_offloaded:
            return 0
        text, stage = (used or (self.in_evaluation and is_evaluated) for used in self.in_step)
        return self.text_bytes * text + self.stage_bytes * stage

    def fetched(self, num_bytes: int) -> dict[str, int]:
        """Return the part of a phase for num_bytes of weights that are on the device in it alone."""
        return {"encoders": num_bytes} if self.are_offloaded else {}

    def encode_peak(self, budget: int) -> tuple[str, int]:
        """Return the mode that encoding a micro-batch takes with `budget` bytes, and its peak; ("", 0) for none."""
        batch, frames, rows, columns = self.shape
        scale, area = self.number_bytes / 2, rows * columns
        if not self.is_known or not self.in_step[1]:
            return "", 0
        if not self.encodes_clips or frames == 1:
            return "whole", int(batch * area * _FIRST_FRAME * scale)
        pixels = batch * frames * area * _PIXELS
        tile = min(_TILE[0], rows) * min(_TILE[1], columns)
        one = int(frames * area * _WHOLE * scale)
        few = int(area * _IN_FRAMES * scale) + pixels
        of_tiles = int(tile * _IN_TILES * scale) + pixels
        # The preferred one first
        ways = [("whole", batch * one)]
        ways += [("whole, one by one", one + pixels)] * (batch > 1)
        ways += [("frames", min(few, one)), ("tiles", min(of_tiles, one))]
        ways = [way for way in ways if self.mode in ("auto", way[0].split(",")[0])]
        least = min(ways, key=lambda way: way[1], default=("", 0))
        return next((way for way in ways if way[1] <= budget), least)

    def decode_peak(self, budget: int) -> tuple[str, int]:
        """Return how a video is decoded with `budget` bytes, and the peak; ("", 0) if nothing is."""
        if not (self.is_known and self.in_evaluation):
            return "", 0
        _, frames, rows, columns = self.shape
        scale, latents = self.number_bytes / 2, num_latent_frames(frames)
        per_pixel = _DECODED.get(latents, _DECODED_MORE) * scale
        video = 3 * frames * rows * columns * self.number_bytes
        whole = int(rows * columns * per_pixel) + 2 * video
        if whole <= budget:
            return "whole frames", whole
        return "tiles", tiled(rows, columns, _TILE, per_pixel, video).num_bytes


def find_encoders(
    args: TrainKeys,
    model: ModelKeys,
    data: Component | None,
    frozen: FrozenParts,
    shape: tuple[int, int, int, int],
    text_length: int,
    num_captions: int,
) -> Encoders:
    """Return what the encoders of a run take; files that are missing need not exist.
    num_captions: the most of a micro-batch."""
    text_encoder, number_bytes = frozen.text_encoder, DTYPES[args.precision].itemsize
    # A data section that is still to come counts as one of clips.
    is_of_clips = data is None or video_data(data) is not None
    reads_clips = is_of_clips and not model.latent_input
    is_cached = args.latent_cache is not None
    frames = GivenFrames.parse(model.given_frames)
    encodes_clips = reads_clips and (not is_cached or (frames is not None and frames.is_clip))
    is_noised = "image" in model.inputs and not (is_cached and args.cached_noised_images)
    encodes_images = frames is not None or is_noised
    in_step = (reads_clips and not is_cached, encodes_clips or encodes_images)
    given = bool(args.eval_prompts or args.eval_prompt_file)
    in_evaluation = args.has_evaluation and (given or bool(args.valid_data) or "," in args.split)
    if args.mode == "inference":
        in_step, in_evaluation = (False, False), True
    text_bytes = text_peak = 0
    if text_encoder is not None and text_encoder.kind is T5TextEncoder:
        text_bytes = T5_NUMEL * number_bytes
        if args.precision == "fp16":
            text_bytes += _T5_WO_NUMEL * (_FLOAT32 - number_bytes)
        scores = 2 * _T5_HEADS * text_length**2 * (_FLOAT32 + number_bytes)
        rows = text_length * (3 * _T5_INNER + 6 * _T5_WIDTH) * number_bytes
        text_peak = num_captions * (scores + rows)
    is_known, mode = _first_stage(frozen.first_stage)
    return Encoders(
        text_bytes=text_bytes,
        text_peak=text_peak,
        stage_bytes=VAE_NUMEL * number_bytes if is_known else 0,
        in_step=in_step,
        in_evaluation=in_evaluation,
        encodes_clips=encodes_clips,
        num_videos=1 + len({"control", "masked_video"} & set(model.inputs)),
        shape=shape,
        mode=mode,
        number_bytes=number_bytes,
        are_offloaded=args.offload_encoders,
    )


def _first_stage(stage: Component | None) -> tuple[bool, str]:
    """Return whether the first stage is the VAE of CogVideoX, and its encode_chunks."""
    if stage is None:
        return False, "auto"
    target, params = stage.kind, stage.arguments
    mode = str(params.get("encode_chunks") or "auto")
    if params.get("use_tiling"):
        mode = "tiles"
    if target is VideoAutoencoder:
        return True, mode
    encoder: Any = params.get("encoder_config") or {}
    encoder = encoder.get("params", encoder)
    sizes = encoder.get("ch", 128), list(encoder.get("ch_mult", [1, 2, 2, 4]))
    return target is video_autoencoder_from_sat and sizes == (128, [1, 2, 2, 4]), mode
