"""Reads the files of `cogfast sample` that give a model its conditions and its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cogfast.core.values import nearest
from cogfast.data.bad_samples import BadSample
from cogfast.data.buckets import have_same_shape
from cogfast.data.datasets import mask_of
from cogfast.data.sources.arrays import KEY, open_array, values_of
from cogfast.data.sources.folders import is_picture
from cogfast.data.sources.headers import probe
from cogfast.data.video.clip import ClipSettings, read_clip, resize_picture
from cogfast.extensions.conditions.given_frames import GivenFrames
from cogfast.extensions.sample.flags import sampled_tensors
from cogfast.extensions.sample.prompt_files import files_of_prompts
from cogfast.extensions.sample.sizes import open_image, read_image
from cogfast.train.video_size import DEFAULT_FPS, LatentSize

_SETTINGS = ("fps", "frame_selection", "short_clips", "resize")


def read_inputs(
    files: Mapping[str, Sequence[Path | None]],
    sizes: Sequence[LatentSize],
    data: Mapping[str, Any],
    given_frames: GivenFrames | None = None,
) -> list[dict[str, Tensor]]:
    """Return the tensors of each prompt's conditions by the names of Prompt's fields; each file is read once.

    files: by option, with underscores, one for each prompt. sizes: of the prompts' videos. data: data.params,
    whose rate and choice of frames are those of the clips that were trained.
    """
    settings = {name: data[name] for name in _SETTINGS if data.get(name) is not None}
    num_given = 0 if given_frames is None else given_frames.number  # frames of a video; 0: all
    # Each option, file and size once
    read = cache(partial(_read, settings, num_given))
    found = []
    for i, size in enumerate(sizes):
        given = {name: path for name, of_name in files.items() if (path := of_name[i]) is not None}
        names = [name for name in ("image", "control", "video") if name in given]
        own = {name: read(name, given[name], size) for name in names}
        ends = [name for name in ("first_frame", "last_frame") if name in given]
        if "video" in given and "mask" in given:
            paths = given["video"], given["mask"]
            of_video, of_mask = (probe(str(path), path.stat().st_size) for path in paths)
            # Both are cropped: those of other shapes to other parts.
            if not of_mask.reason and not have_same_shape(of_video, of_mask):
                text = f"--mask {given['mask']} is {of_mask.height}x{of_mask.width}"
                text += f", --video {given['video']} {of_video.height}x{of_video.width}; give one of the same shape"
                raise ValueError(text)
            own["mask"] = read("mask", given["mask"], size)
        elif "video" in given or ends:
            own["mask"] = torch.ones(size.num_frames, 1, *size.pixels, dtype=torch.uint8)
        if "video" not in given and ends:
            # A video [F, 3, H, W] that is black but for the given ends, which the mask leaves out
            own["video"] = torch.zeros(size.num_frames, 3, *size.pixels, dtype=torch.uint8)
            for name in ends:
                at = 0 if name == "first_frame" else -1
                own["video"][at], own["mask"][at] = read(name, given[name], size), 0
        found.append(own)
    return found


def read_tensors(
    words: Sequence[str], num_prompts: int, network: str, data: Mapping[str, Any]
) -> dict[str, list[Tensor]]:
    """Return the tensors that the network needs by name, one for each prompt. words: NAME=FILE of --tensor.
    network: the name of its class. data: the data set's arguments."""
    shapes, files = sampled_tensors(network, data), dict[str, list[str]]()
    takes = f"{network} takes {', '.join(shapes) or 'none'} of {KEY}"
    for word in words:
        name, _, file = word.partition("=")
        if name not in shapes or not file:
            fix = nearest(name, shapes) or "; leave it out" * (not shapes)
            raise ValueError(f"--tensor {word[:200]} is not NAME=FILE.npy: {takes}{fix}")
        files.setdefault(name, []).append(file)
    if missing := [name for name in shapes if name not in files]:
        raise ValueError(f"{takes}; give --tensor {missing[0]}=FILE.npy")

    @cache
    def read(name: str, file: str) -> Tensor:
        try:
            return values_of(open_array(name, file, shapes[name]), name, file)
        except BadSample as error:
            raise ValueError(f"--tensor: {error.reason}") from None

    given = {n: files_of_prompts(f"--tensor {n}", f, num_prompts) for n, f in files.items()}
    return {name: [read(name, str(path)) for path in paths] for name, paths in given.items()}


def _read(
    settings: Mapping[str, Any], num_given: int, name: str, path: Path, size: LatentSize
) -> Tensor:
    """Read one file at the size of a video: an image [3, H, W] in [-1, 1], a picture of an end uint8, a video
    uint8 [F, 3, H, W], or a mask uint8 [F, 1, H, W].

    num_given: frames of a video that the model is given; 0: all.
    """
    option, resize = f"--{name.replace('_', '-')}", settings.get("resize", "crop")
    if name == "image":
        return read_image(path, size.pixels, resize, option)
    if name.endswith("frame"):
        return resize_picture(open_image(path, option), size.pixels, resize)
    try:
        if name == "mask" and is_picture(str(path)):
            picture = resize_picture(open_image(path, option), size.pixels, resize)
            frames = picture.expand(size.num_frames, -1, -1, -1)
        else:
            clip = ClipSettings(
                video_size=size.pixels,
                max_num_frames=num_given or size.num_frames,
                video_backend="pyav",
                **{"fps": DEFAULT_FPS, **settings},
            )
            frames = read_clip(str(path), clip)[0]
            if missing := size.num_frames - len(frames):
                frames = torch.cat([frames, frames.new_zeros(missing, *frames.shape[1:])])
        return mask_of(frames, str(path), "it") if name == "mask" else frames
    except BadSample as error:
        fix = "; or sample fewer (--frames)" if ", need " in error.reason else ""
        raise ValueError(f"{option} {path}: {error.reason}{fix}") from None
