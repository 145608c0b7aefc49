"""SAT's checkpoint folders: <folder>/latest and <folder>/<iteration>/mp_rank_00_model_states.pt."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cogfast.core.json_files import brief, read_name
from cogfast.core.shapes import TokenGrid
from cogfast.core.values import counted
from cogfast.extensions.formats.foreign import refuse_foreign
from cogfast.model.config import TransformerConfig
from cogfast.model.embeddings import PositionTable, RotaryPositions
from cogfast.model.transformer import DiffusionTransformer
from cogfast.model.weights.diffusers import outgoing
from cogfast.model.weights.names import PREFIX, from_sat_name, sat_name
from cogfast.model.weights.shard import Shard, join
from cogfast.model.weights.source import (
    WeightSource,
    check_finite,
    check_tensors,
    with_flat_patches,
)
from cogfast.model.weights.tensor_files import (
    Outgoing,
    new_folder,
    only_tensors,
    read_torch_file,
    write_json,
    write_torch_file,
)

logger = logging.getLogger(__name__)

_UNUSED_TABLE = "unused_position_embeddings"
_TABLE = "position_table.weight"
ITERATION = "1"  # the iteration that is written, as in upstream's downloads
_ROTARY_BUFFERS = ("mixins.pos_embed.freqs_sin", "mixins.pos_embed.freqs_cos")  # 1.0 only
# How the mp_rank files of a checkpoint split a tensor: (dim, number of consecutive parts).
_SPLITS = {
    r"blocks\.\d+\.attention\.qkv(\.original)?\.(weight|bias)": (0, 3),  # q, k and v are split each
    r"blocks\.\d+\.fc1(\.original)?\.(weight|bias)": (0, 1),
    r"blocks\.\d+\.(attention\.qkv\.matrix_B\.\d|fc1\.matrix_B\.0)": (0, 1),
    r"blocks\.\d+\.(attention\.out|fc2)(\.original)?\.weight": (1, 1),
    # Row-parallel, as their linears: A is cut along its input, and B is whole in every file.
    r"blocks\.\d+\.(attention\.out\.matrix_A\.\d|fc2\.matrix_A\.0)": (1, 1),
}
_LEAST_WIDTH = 16  # of a position table: in a narrower one an axis has no column


def grid_facts(
    sin: Tensor | None, cos: Tensor | None, table: Tensor | None, is_rotary: bool, where: str
) -> dict[str, Any]:
    """Derive fields of TransformerConfig from SAT's position tables, for patches of 2x2 and a VAE
    that compresses four frames to one latent frame.

    sin, cos: the rotary tables [V, D]; table: 2B's sincos table or a learned one [1, L + V, M].
    where: the file's name in errors. ValueError for tensors that are no such tables.
    """
    facts: dict[str, Any] = {}
    # The stored dtype limits how exact the table's values are.
    eps = 0.0 if table is None else torch.finfo(table.dtype).eps
    sin, cos, table = (
        None if t is None else check_finite(where, "a position table", t.float())
        for t in (sin, cos, table)
    )
    if table is not None and (table.dim() != 3 or len(table) != 1 or table.shape[2] < _LEAST_WIDTH):
        text = f"{where}: its position table has shape {list(table.shape)} instead of [1, rows"
        raise ValueError(f"{text}, width]; copy it again")
    if sin is not None and cos is not None:
        if sin.dim() != 2 or sin.shape != cos.shape or sin.shape[1] < _LEAST_WIDTH:
            text = f"{where}: its rotary tables have shapes {list(sin.shape)} and {list(cos.shape)} instead of "
            raise ValueError(f"{text}[positions, width of a head]; copy it again")
        both = torch.stack([sin, cos], -1)
        width = sin.shape[1]
        rows, columns = width // 4, width // 4 + width // 8 * 3
        facts = {"position": "rotary"}
        facts |= _video_of(_grid(both[:, :rows], both[:, rows:columns], both[:, columns:]))
        if table is not None:
            # 5B-I2V has a learned table beside the rotary ones.
            facts["text_length"] = table.shape[1] - sin.shape[0]
    elif table is not None and not is_rotary:
        width = table.shape[2]
        columns, rows = width // 4, width // 4 + width // 8 * 3
        # Rows for text are zero, rows for video are not: the first cosine is 1.
        text_length = int(table[0].any(dim=1).int().argmax())
        video = table[0, text_length:]
        grid = _grid(video[:, :columns], video[:, rows:], video[:, columns:rows])
        facts = {"text_length": text_length, **_video_of(grid)}
        # The first frequency is 1, so the sine at position 1 is sin(1 / interpolation).
        steps = {"time": (grid[1] * grid[2], 0), "height": (grid[2], rows), "width": (1, columns)}
        for axis, (row, column) in steps.items():
            if row < len(video) and 0 < video[row, column] < 1:
                scale = 1 / math.asin(float(video[row, column]))
                facts[f"{axis}_interpolation"] = _simplest_near(scale, scale * eps)
    return facts


def _grid(time: Tensor, row: Tensor, column: Tensor) -> tuple[int, int, int]:
    """Derive (t, h, w) of V tokens in this order from the table's columns of each axis, [V, ...]."""
    num_tokens = len(time)
    width = _period(column, 1)
    height = _period(row, width) // width
    return num_tokens // (height * width), height, width


def _period(values: Tensor, step: int) -> int:
    """Return the first multiple of `step` at which values repeat; their number if they never do."""
    starts = values[::step].flatten(1)
    again = (starts[1:] == starts[0]).all(dim=1).nonzero()
    return (int(again[0]) + 1) * step if len(again) else len(values)


def _video_of(grid: tuple[int, int, int]) -> dict[str, int]:
    t, h, w = grid
    return {"num_frames": (t - 1) * 4 + 1, "latent_height": 2 * h, "latent_width": 2 * w}


def _simplest_near(number: float, error: float) -> float:
    """Return the fraction with the smallest denominator within `error` of `number`."""
    # Tables in half precision do not show 1.875 exactly.
    for denominator in range(1, 64):
        found = round(number * denominator) / denominator
        if abs(found - number) <= error:
            return found
    return number


def model_parallel_cut(our_name: str) -> tuple[int, int] | None:
    """Return (dim, num_parts) of Shard; None for a tensor that every file has whole."""
    return next((cut for pattern, cut in _SPLITS.items() if re.fullmatch(pattern, our_name)), None)


def merge_model_parallel(our_name: str, shards: list[Tensor]) -> Tensor:
    """Join a tensor from its shards in mp_rank_00, mp_rank_01, ...; a replicated one is the first's."""
    cut = model_parallel_cut(our_name)
    return shards[0] if cut is None else join(shards, *cut)


def find_sat_files(path: Path, ema: bool = False) -> list[Path]:
    """Return the mp_rank files of a SAT folder, of one iteration's folder, or the file itself."""
    refuse_foreign(path)
    if path.is_file():
        return [path]
    folder = path
    latest = path / "latest"
    if latest.is_file():
        folder = path / (read_name(latest) + ("-ema" if ema else ""))
    files = sorted(folder.glob("mp_rank_*_model_states.pt"))
    if not files:
        iterations = sorted(p.parent.name for p in path.glob("*/mp_rank_00_model_states.pt"))
        hint = f", write {iterations[-1]} into its file latest" if iterations else ""
        text = f"{folder}: has no mp_rank_00_model_states.pt of SAT, no config.json of diffusers and no checkpoint "
        raise ValueError(f"{text}of cogfast; check its name{hint}")
    expected = [f"mp_rank_{i:02d}_model_states.pt" for i in range(len(files))]
    if absent := [name for name in expected if not (folder / name).is_file()]:
        raise ValueError(f"{folder}: has {files[-1].name} but no {absent[0]}; copy it again")
    return [folder / name for name in expected]


def open_sat(files: list[Path]) -> WeightSource:
    """Open the transformer's weights in the mp_rank files of one iteration and merge their shards."""
    contents = ((file, read_torch_file(file)) for file in files)
    shards = [only_tensors(file, content.get("module", content)) for file, content in contents]
    ours, unexpected = {}, []
    for key in shards[0]:
        name = from_sat_name(key)
        if name is not None:
            ours[name] = key
        # Not the tables that cogfast computes, the VAE and the text encoder.
        elif key.startswith(PREFIX) and key.removeprefix(PREFIX) not in _ROTARY_BUFFERS:
            unexpected.append(key)
    if not ours:
        text = f"{files[0]}: has no tensor named {PREFIX}..."
        raise ValueError(f"{text}; use a transformer's checkpoint of CogVideo's SAT trainer")
    if len(files) > 1:
        _check_shards(files, shards)

    def read(name: str, shard: Shard | None) -> Tensor:
        # The files are mapped into memory, so only the pages of this tensor are read.
        whole = merge_model_parallel(name, [s[ours[name]] for s in shards])
        return whole if shard is None else shard.of(whole)

    def shape(name: str) -> tuple[int, ...]:
        cut, held = model_parallel_cut(name), shards[0][ours[name]].shape
        if cut is None or len(shards) == 1:
            return tuple(held)
        dim, num_parts = cut
        if len(held) <= dim or held[dim] % num_parts:
            text = f"{files[0]}: {ours[name]} has shape {list(held)}, which cannot be one of {len(files)} shards"
            raise ValueError(f"{text}; copy the files again")
        return (*held[:dim], held[dim] * len(shards), *held[dim + 1 :])

    dtypes = {name: shards[0][key].dtype for name, key in ours.items()}
    shapes = {name: shape(name) for name in ours}
    check_tensors(files[0], shapes, dtypes)
    tables = [shards[0].get(PREFIX + name) for name in _ROTARY_BUFFERS]
    fixed = shards[0].get(ours.get(_TABLE, ""))
    is_rotary = _UNUSED_TABLE in ours  # SAT deletes this table in 2B, which is not rotary
    merged = f", {len(files)} model-parallel files merged" if len(files) > 1 else ""
    source = WeightSource(
        description=f"SAT checkpoint {files[0].parent}{merged}",
        shapes=shapes,
        read=read,
        dtypes=dtypes,
        unexpected=unexpected,
        facts=grid_facts(*tables, table=fixed, is_rotary=is_rotary, where=str(files[0])),
    )
    return with_flat_patches(source)


def _check_shards(files: list[Path], shards: list[dict[str, Tensor]]) -> None:
    """Raise ValueError if the files are not the shards of one model."""
    first = shards[0]
    for file, shard in zip(files[1:], shards[1:], strict=True):
        differing = sorted(first.keys() ^ shard.keys())
        differing += [k for k in first if k in shard and first[k].shape != shard[k].shape]
        if differing:
            text = f"{file}: {counted(len(differing), 'tensor')} not as in {files[0].name}"
            text += f", first {brief(differing[0])}; the files are shards of different models, copy them again"
            raise ValueError(text)


def write_sat(
    source: WeightSource,
    config: TransformerConfig,
    path: Path,
    model_parallel_size: int = 1,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a SAT folder with the tensors of `source`, split over model_parallel_size files, and the
    tables that SAT's code expects. dtype: of the weights, None for the source's."""
    count, heads = model_parallel_size, config.num_attention_heads
    if count < 1 or heads % count:
        fits = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        text = f"--model-parallel-size {count} must divide num_attention_heads={heads}; use {', '.join(fits)}"
        raise ValueError(text)
    if config.has_rescaled_positions:
        text = "%s: the model has the positions of diffusers' pipelines, but SAT's code uses integer ones; they "
        text += "agree only at %dx%d latent pixels"
        logger.warning(text, path, config.latent_height, config.latent_width)
    # Descriptions only: a tensor is read when it is written.
    files = [list(sat_tensors(source, config, i, count, dtype)) for i in range(count)]
    sizes = [sum(t.nbytes for t in tensors) for tensors in files]
    with new_folder(path, sum(sizes) + max(sizes)) as folder:  # write_torch_file needs twice a file
        (folder / ITERATION).mkdir()
        for i, tensors in enumerate(files):
            place = folder / ITERATION / f"mp_rank_{i:02d}_model_states.pt"
            write_torch_file(place, "module", tensors)
        about = {"model_class": "SATVideoDiffusionEngine", "model_parallel_size": count}
        write_json(folder / "model_config.json", about)
        (folder / "latest").write_text(ITERATION)


def sat_tensors(
    source: WeightSource,
    config: TransformerConfig,
    index: int = 0,
    count: int = 1,
    dtype: torch.dtype | None = None,
) -> Iterator[Outgoing]:
    """Yield the tensors of file `index` of `count`, under SAT's names."""
    yield from _tables(source, config)
    for name, shape in source.shapes.items():
        cut = model_parallel_cut(name)
        shard = None if cut is None or count == 1 else Shard(shape, *cut, index, count)
        yield outgoing(source, config, name, sat_name(name), shard, dtype)


def _tables(source: WeightSource, config: TransformerConfig) -> Iterator[Outgoing]:
    """Yield the tables that SAT's code expects and `source` lacks."""
    if config.position == "sincos" and _TABLE not in source.shapes:
        rows = PositionTable(
            config.grid,
            config.text_length,
            config.hidden_size,
            (config.time_interpolation, config.height_interpolation, config.width_interpolation),
        ).weight
        yield Outgoing(sat_name(_TABLE), tuple(rows.shape), rows.dtype, lambda: rows)
    if config.position == "rotary" and not config.patch_size.joins_frames:
        rotary = RotaryPositions(config.grid, config.head_width, config.rope_theta)
        for name, table in _rotary_tables(rotary, config.grid):
            yield Outgoing(name, tuple(table.shape), torch.float32, table.clone)
    if config.position == "rotary" and _UNUSED_TABLE not in source.shapes:
        shape = (config.max_sequence_length, config.hidden_size)
        dtype = source.dtypes["patch_embedding.weight"]
        # SAT loads the tensor and never reads its values.
        yield Outgoing(sat_name(_UNUSED_TABLE), shape, dtype, partial(torch.zeros, shape))


def _rotary_tables(rotary: RotaryPositions, grid: TokenGrid) -> Iterator[tuple[str, Tensor]]:
    """Yield (SAT's name, values [V, D]) of the two rotary tables of CogVideoX 1.0."""
    turns = rotary(grid).per_row(num_text=0)  # [V, D/2] complex
    # Sine before cosine, as in _ROTARY_BUFFERS, each for both entries that it rotates.
    for name, part in zip(_ROTARY_BUFFERS, (turns.imag, turns.real), strict=True):
        yield PREFIX + name, part.repeat_interleave(2, dim=-1)


def to_sat_state_dict(transformer: DiffusionTransformer) -> dict[str, Tensor]:
    """Return {SAT key: tensor} with SAT's shapes; tensors share memory with the parameters.

    For CogVideoX 1.0 (one latent frame per patch) the patch embedding is a convolution weight
    [M, C, 2, 2] and, with rotary positions, the flattened tables [V, D] are included.
    """
    config, rotary = transformer.config, transformer.rotary
    patch = config.patch_size
    state = {sat_name(n): p.detach() for n, p in transformer.named_parameters()}
    if not patch.joins_frames:
        key = sat_name("patch_embedding.weight")
        state[key] = state[key].view(config.hidden_size, config.in_channels, patch.h, patch.w)
        if isinstance(rotary, RotaryPositions):
            state |= _rotary_tables(rotary, config.grid)
    return state
