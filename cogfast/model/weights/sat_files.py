"""SAT's checkpoint folders: <folder>/latest, <folder>/<iteration>/mp_rank_00_model_states.pt."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import Tensor

from cogfast.model.weights.sat import PREFIX, ROTARY_BUFFERS, from_sat_name, merge_model_parallel
from cogfast.model.weights.shard import Shard
from cogfast.model.weights.source import WeightSource


def find_sat_files(path: Path, ema: bool = False) -> list[Path]:
    """The mp_rank files of a SAT folder, of one iteration's folder, or a single file."""
    if path.is_file():
        return [path]
    folder = path
    latest = path / "latest"
    if latest.is_file():
        folder = path / (latest.read_text().strip() + ("-ema" if ema else ""))
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
    return files


def open_sat(files: list[Path]) -> WeightSource:
    """The transformer's weights in the mp_rank files of one iteration, merged."""
    shards = [_read_torch_file(f) for f in files]
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

    def read(name: str, shard: Shard | None) -> Tensor:
        whole = merge_model_parallel(name, [s[ours[name]] for s in shards])
        return whole if shard is None else shard.of(whole)

    def shape(name: str) -> tuple[int, ...]:
        pieces = [s[ours[name]].to("meta") for s in shards]
        return tuple(merge_model_parallel(name, pieces).shape)

    merged = f", {len(files)} model-parallel files merged" if len(files) > 1 else ""
    return WeightSource(
        description=f"SAT checkpoint {files[0].parent}{merged}",
        shapes={name: shape(name) for name in ours},
        read=read,
        ignored=ignored,
        unexpected=unexpected,
        is_rotary="unused_position_embeddings" in ours,  # 2B's code deletes that table
    )


def _read_torch_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a .pt file, mapped into memory, nothing but tensors and plain data unpickled."""
    try:
        with torch.serialization.safe_globals(_numpy_rng_globals()):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()
        named = next((line.strip() for line in reason if "GLOBAL" in line), reason[0])
        raise ValueError(
            f"{path}: refused, since reading it would run pickled code ({named}); save it again "
            "with tensors only: torch.save({'module': state_dict}, path)"
        ) from None
    except (RuntimeError, EOFError, OSError) as error:
        raise ValueError(
            f"{path}: truncated or not a file of torch.save ({str(error).splitlines()[0]}); copy "
            "it again and compare its size with the original"
        ) from None
    module = content.get("module", content) if isinstance(content, dict) else {}
    return {k: v for k, v in module.items() if isinstance(v, Tensor)}


def _numpy_rng_globals() -> list[object]:
    """What SAT's training checkpoints hold beside tensors: the state of numpy's generator."""
    import numpy as np
    from numpy._core.multiarray import _reconstruct

    return [_reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32)), np.uint32]
