"""SAT's checkpoint folders: <folder>/latest, <folder>/<iteration>/mp_rank_00_model_states.pt."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cogfast.model.config import TransformerConfig
from cogfast.model.positions import PositionTable, RotaryPositions
from cogfast.model.weights.formats.position_facts import grid_facts
from cogfast.model.weights.formats.safetensors_files import write_json
from cogfast.model.weights.formats.sat_names import (
    PREFIX,
    ROTARY_BUFFERS,
    from_sat_name,
    merge_model_parallel,
    model_parallel_cut,
    sat_name,
)
from cogfast.model.weights.formats.tensor_stream import Outgoing, new_folder
from cogfast.model.weights.formats.torch_files import (
    only_tensors,
    read_torch_file,
    write_torch_file,
)
from cogfast.model.weights.shard import Shard
from cogfast.model.weights.source import WeightSource, check_tensors, with_flat_patches
from cogfast.schema.json_files import brief, read_name

logger = logging.getLogger(__name__)


_UNUSED_TABLE = "unused_position_embeddings"
_TABLE = "position_table.weight"
ITERATION = "1"  # of what we write, as upstream's own downloads have it


def find_sat_files(path: Path, ema: bool = False) -> list[Path]:
    """The mp_rank files of a SAT folder, of one iteration's folder, or a single file."""
    if path.is_file():
        return [path]
    folder = path
    latest = path / "latest"
    if latest.is_file():
        folder = path / (read_name(latest) + ("-ema" if ema else ""))
    elif not any(path.glob("mp_rank_*")):
        iterations = sorted(p.parent.name for p in path.glob("*/mp_rank_00_model_states.pt"))
        hint = f"write {iterations[-1]} into it" if iterations else "check the folder's name"
        raise ValueError(
            f"{path}: no file `latest` that names the iteration (nor a diffusers config.json, nor "
            f"a checkpoint of ours); {hint}"
        )
    files = sorted(folder.glob("mp_rank_*_model_states.pt"))
    if not files:
        named = f"{latest} names it but " if folder != path else ""
        raise ValueError(f"{folder}: {named}it holds no mp_rank_00_model_states.pt")
    expected = [f"mp_rank_{i:02d}_model_states.pt" for i in range(len(files))]
    absent = [name for name in expected if not (folder / name).is_file()]
    if absent:
        raise ValueError(f"{folder}: {absent[0]} is missing beside {files[-1].name}; copy it again")
    return [folder / name for name in expected]


def open_sat(files: list[Path]) -> WeightSource:
    """The transformer's weights in the mp_rank files of one iteration, merged."""
    shards = [_read_module(file) for file in files]
    ours, ignored, unexpected = {}, [], []
    for key in shards[0]:
        name = from_sat_name(key)
        if name is not None:
            ours[name] = key
        elif key.removeprefix(PREFIX) in ROTARY_BUFFERS or not key.startswith(PREFIX):
            ignored.append(key)  # tables that we compute, the VAE, the text encoder
        else:
            unexpected.append(key)
    if not ours:
        raise ValueError(
            f"{files[0]}: no tensor named {PREFIX}...; it is not a transformer of CogVideoX's SAT "
            "trainer"
        )
    if len(files) > 1:
        _check_shards(files, shards, ours)

    def read(name: str, shard: Shard | None) -> Tensor:
        whole = merge_model_parallel(name, [s[ours[name]] for s in shards])
        return whole if shard is None else shard.of(whole)

    def shape(name: str) -> tuple[int, ...]:
        cut, held = model_parallel_cut(name), shards[0][ours[name]].shape
        if cut is None or len(shards) == 1:
            return tuple(held)
        dim, num_parts = cut
        if len(held) <= dim or held[dim] % num_parts:
            raise ValueError(
                f"{files[0]}: {ours[name]} has shape {list(held)}, which is no share of one of "
                f"{len(files)} files; copy them again"
            )
        return (*held[:dim], held[dim] * len(shards), *held[dim + 1 :])

    dtypes = {name: shards[0][key].dtype for name, key in ours.items()}
    shapes = {name: shape(name) for name in ours}
    check_tensors(files[0], shapes, dtypes)
    tables = [shards[0].get(PREFIX + name) for name in ROTARY_BUFFERS]
    fixed = shards[0].get(ours.get(_TABLE, ""))
    is_rotary = _UNUSED_TABLE in ours  # 2B's code deletes that table
    merged = f", {len(files)} model-parallel files merged" if len(files) > 1 else ""
    source = WeightSource(
        description=f"SAT checkpoint {files[0].parent}{merged}",
        shapes=shapes,
        read=read,
        dtypes=dtypes,
        ignored=ignored,
        unexpected=unexpected,
        facts=grid_facts(*tables, table=fixed, is_rotary=is_rotary, where=str(files[0])),
    )
    return with_flat_patches(source)


def _read_module(path: Path) -> dict[str, Tensor]:
    content = read_torch_file(path)
    return only_tensors(path, content.get("module", content))


def _check_shards(files: list[Path], shards: list[dict[str, Tensor]], ours: dict[str, str]) -> None:
    """ValueError where the files are not the shares of one model."""
    first = shards[0]
    for file, shard in zip(files[1:], shards[1:], strict=True):
        differing = sorted(first.keys() ^ shard.keys())
        differing += [k for k in first if k in shard and first[k].shape != shard[k].shape]
        if differing:
            raise ValueError(
                f"{file}: {len(differing)} tensors are not as in {files[0].name}, first "
                f"{brief(differing[0])}; the files are shares of different models, copy them again"
            )
    # a random matrix of which no two shares can be equal
    name = next((n for n in ours if n.startswith("blocks.") and n.endswith("fc1.weight")), None)
    for i, one in enumerate(shards if name else []):
        for j in range(i):
            if torch.equal(one[ours[name]], shards[j][ours[name]]) and one[ours[name]].any():
                raise ValueError(
                    f"{files[i]}: it holds the same share as {files[j].name}; one was copied over "
                    "the other, copy them again"
                )


def write_sat(
    source: WeightSource,
    config: TransformerConfig | None,
    path: Path,
    model_parallel_size: int = 1,
    dtype: torch.dtype | None = None,
) -> None:
    """A SAT folder with the tensors of `source`, cut over model_parallel_size files, and the tables
    that SAT's code expects beside them. config: None for adapters alone; dtype: of the weights,
    None for the source's."""
    count = model_parallel_size
    heads = 1 if config is None else config.num_attention_heads
    if count < 1 or heads % count:
        fits = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise ValueError(
            f"--model-parallel-size {count} must divide num_attention_heads={heads}; use "
            f"{', '.join(fits)}"
        )
    if config is not None and config.has_rescaled_positions:
        logger.warning(
            "%s: the model has the positions of diffusers' pipelines, SAT's code has integer ones: "
            "they agree at %dx%d latent pixels alone",
            *(path, config.latent_height, config.latent_width),
        )
    files = [list(sat_tensors(source, config, i, count, dtype)) for i in range(count)]
    with new_folder(path, sum(t.nbytes for file in files for t in file)) as folder:
        (folder / ITERATION).mkdir()
        for i, tensors in enumerate(files):
            place = folder / ITERATION / f"mp_rank_{i:02d}_model_states.pt"
            write_torch_file(place, "module", tensors)
        about = {"model_class": "SATVideoDiffusionEngine", "model_parallel_size": count}
        write_json(folder / "model_config.json", about)
        (folder / "latest").write_text(ITERATION)


def sat_tensors(
    source: WeightSource,
    config: TransformerConfig | None,
    index: int = 0,
    count: int = 1,
    dtype: torch.dtype | None = None,
) -> Iterator[Outgoing]:
    """What file `index` of `count` holds, under SAT's names."""
    tables = () if config is None else _tables(source, config)
    for name, tensor in (*tables, *_weights(source, dtype)):
        shape, read = tensor.shape, tensor.read
        if name == "patch_embedding.weight" and config.patch_size.t == 1:  # a convolution there
            shape = (shape[0], config.in_channels, config.patch_size.h, config.patch_size.w)
        cut = model_parallel_cut(name)
        if cut is not None and count > 1:
            shard = Shard(shape, *cut, index, count)
            shape, read = shard.share_shape, partial(source.read, name, shard)
        yield Outgoing(tensor.name, shape, tensor.dtype, read)


def _weights(source: WeightSource, dtype: torch.dtype | None) -> Iterator[tuple[str, Outgoing]]:
    for name, shape in source.shapes.items():
        read = partial(source.read, name, None)
        yield name, Outgoing(sat_name(name), shape, source.dtype_in_target(name, dtype), read)


def _tables(source: WeightSource, config: TransformerConfig) -> Iterator[tuple[str, Outgoing]]:
    """What SAT's code expects and `source` has not."""
    if config.position == "sincos" and _TABLE not in source.shapes:
        rows = PositionTable(
            config.grid,
            config.text_length,
            config.hidden_size,
            (config.time_interpolation, config.height_interpolation, config.width_interpolation),
        ).weight
        yield _TABLE, Outgoing(sat_name(_TABLE), tuple(rows.shape), rows.dtype, lambda: rows)
    if config.position == "rotary" and config.patch_size.t == 1:
        rotary = RotaryPositions(config.grid, config.head_width, config.rope_theta)
        turns = rotary(config.grid).per_row(num_text=0)  # [V, D/2] complex
        shape = (turns.shape[0], config.head_width)
        for name, part in zip(ROTARY_BUFFERS, (turns.imag, turns.real), strict=True):
            read = partial(part.repeat_interleave, 2, dim=-1)
            yield "", Outgoing(PREFIX + name, shape, torch.float32, read)
    if config.position == "rotary" and _UNUSED_TABLE not in source.shapes:
        shape = (config.max_sequence_length, config.hidden_size)
        dtype = source.dtypes["patch_embedding.weight"]
        read = partial(torch.zeros, shape)
        yield _UNUSED_TABLE, Outgoing(sat_name(_UNUSED_TABLE), shape, dtype, read)
