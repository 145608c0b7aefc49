"""The arrays of data.params.tensors: a .npy file of numbers for each sample, all of one shape."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import numpy as np
import torch
from annotated_types import Len
from torch import Tensor

from cogfast.core.values import Range, validated
from cogfast.data.bad_samples import BadSample
from cogfast.data.keys import data_param

KEY = data_param("tensors")
Shapes = dict[str, Annotated[list[Annotated[int, Range(1, 10**6)]], Len(1, 8)]]
# Keys of a batch, which a tensor of that name would replace.
_TAKEN = "mp4 video txt fps num_frames path paths num_padded images control mask step slots bad"
_TAKEN += " tried unfilled encoded_video encoded_videos prompt_embedding prior tensors"


def checked_shapes(shapes: Mapping[str, Sequence[int]] | None) -> dict[str, tuple[int, ...]]:
    """Check data.params.tensors; ValueError with the name and the rule."""
    found = validated(dict(shapes or {}), Shapes, KEY)
    for name in found:
        if name in _TAKEN.split() or name.endswith(("_mean", "_logvar", "_latents")):
            text = f"{KEY}: {name} is the name of a key of a batch"
            raise ValueError(f"{text}; use another, such as flow")
    return {name: tuple(shape) for name, shape in found.items()}


def open_array(
    name: str, file: str, shape: Sequence[int], local: Callable[[str], str] = str
) -> np.ndarray:
    """Return an array whose values are not read yet; BadSample if it is not one of numbers in this shape. local:
    returns the path of a file on this machine."""
    what = f"its {name} {file}"
    path = local(file)
    if not os.path.isfile(path) or not os.path.getsize(path):
        raise BadSample(file, f"{what} does not exist, or is empty")
    try:
        # An array of objects would run code of its file (pickle).
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception:  # NumPy's reader raises many types of exceptions for damaged files
        # Its own text says how to read it unsafely.
        fix = "write its numbers with numpy.save; arrays of Python objects (pickle) are not read"
        raise BadSample(file, f"{what} is not a readable .npy file of numbers; {fix}") from None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiub":
        raise BadSample(file, f"{what} is not an array of numbers; write it with numpy.save")
    if array.shape != tuple(shape):
        rule = f"{KEY} gives {name} the shape {list(shape)}"
        raise BadSample(file, f"{what} has the shape {list(array.shape)}, but {rule}")
    return array


def values_of(array: np.ndarray, name: str, file: str) -> Tensor:
    """Read the values of an array as float32; BadSample if one is not finite."""
    with np.errstate(over="ignore"):
        values = torch.from_numpy(np.array(array, dtype=np.float32, order="C"))
    if not values.isfinite().all():
        raise BadSample(file, f"its {name} {file} has values that are not finite in float32")
    return values
