"""diffusers' names for the same tensors, and its folders of safetensors files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from torch import Tensor

from cogfast.model.weights.shard import Shard
from cogfast.model.weights.source import WeightSource

# ours -> diffusers', {i} the block; `.weight` or `.bias` goes on the same
_MODULES = {
    "patch_embedding": "patch_embed.proj",
    "text_embedding": "patch_embed.text_proj",
    "position_table.weight": "patch_embed.pos_embedding",
    "time_embedding.fc1": "time_embedding.linear_1",
    "time_embedding.fc2": "time_embedding.linear_2",
    "ofs_embedding.fc1": "ofs_embedding.linear_1",
    "ofs_embedding.fc2": "ofs_embedding.linear_2",
    "blocks.{i}.attention_norm": "transformer_blocks.{i}.norm1.norm",
    "blocks.{i}.attention.out": "transformer_blocks.{i}.attn1.to_out.0",
    "blocks.{i}.attention.query_norm": "transformer_blocks.{i}.attn1.norm_q",
    "blocks.{i}.attention.key_norm": "transformer_blocks.{i}.attn1.norm_k",
    "blocks.{i}.mlp_norm": "transformer_blocks.{i}.norm2.norm",
    "blocks.{i}.fc1": "transformer_blocks.{i}.ff.net.0.proj",
    "blocks.{i}.fc2": "transformer_blocks.{i}.ff.net.2",
    "final_norm": "norm_final",
    "output_norm": "norm_out.norm",
    "output_modulation": "norm_out.linear",
    "output": "proj_out",
}
# ours -> the tensors that make it up
_QKV = ("blocks.{i}.attention.qkv", ["attn1.to_q", "attn1.to_k", "attn1.to_v"])
_MODULATION = ("blocks.{i}.modulation.linear", ["norm1.linear", "norm2.linear"])


def diffusers_names(our_name: str) -> list[str]:
    """The tensors of diffusers' CogVideoXTransformer3DModel that make up one of ours."""
    block = re.match(r"blocks\.(\d+)\.", our_name)
    i = block[1] if block else ""
    for ours, parts in (_QKV, _MODULATION):
        module = ours.replace("{i}", i)
        if our_name.startswith(module + "."):
            kind = our_name.removeprefix(module)
            return [f"transformer_blocks.{i}.{part}{kind}" for part in parts]
    for ours, theirs in _MODULES.items():
        module = ours.replace("{i}", i)
        if our_name == module or our_name.startswith(module + "."):
            return [theirs.replace("{i}", i) + our_name.removeprefix(module)]
    return []  # SAT's unused table


def from_diffusers(our_name: str, parts: list[Tensor]) -> Tensor:
    """One of our tensors from those that diffusers_names lists."""
    if ".modulation." in our_name:
        # each holds shift, scale, gate for video, then for text; ours: video for both, then text
        halves = [p.chunk(2) for p in parts]
        return torch.cat([h[stream] for stream in (0, 1) for h in halves])
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def open_diffusers(folder: Path, our_names: list[str]) -> WeightSource:
    """The weights in a diffusers transformer folder, for those of our_names that it holds."""
    from safetensors import SafetensorError, safe_open

    config = json.loads((folder / "config.json").read_text())
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as opened:
                files.update(dict.fromkeys(opened.keys(), path))
        except SafetensorError as error:
            raise ValueError(f"{path}: truncated or damaged ({error}); copy it again") from None

    def read_raw(key: str) -> Tensor:
        with safe_open(files[key], framework="pt") as opened:
            return opened.get_tensor(key)

    def read(name: str, shard: Shard | None) -> Tensor:
        keys = diffusers_names(name)
        if shard is not None and ".modulation." not in name:
            return torch.cat([read_stretch(keys, shard, *r) for r in shard.ranges], shard.dim)
        whole = from_diffusers(name, [read_raw(key) for key in keys])
        return whole if shard is None else shard.of(whole)

    def read_stretch(keys: list[str], shard: Shard, start: int, stop: int) -> Tensor:
        # q, k and v are a tensor each, and no stretch goes over two
        length = shard.shape[shard.dim] // len(keys)
        which, start = divmod(start, length)
        stop -= which * length
        with safe_open(files[keys[which]], framework="pt") as opened:
            found = opened.get_slice(keys[which])
            return found[start:stop] if shard.dim == 0 else found[:, start:stop]

    def shape(name: str) -> tuple[int, ...]:
        sizes = []
        for key in diffusers_names(name):
            with safe_open(files[key], framework="pt") as opened:
                sizes.append(opened.get_slice(key).get_shape())
        return (sum(s[0] for s in sizes), *sizes[0][1:])

    # ofs tensors are named even where the config has none, so that the family shows
    names = dict.fromkeys([*our_names, *_ALWAYS])
    held = [n for n in names if diffusers_names(n) and all(k in files for k in diffusers_names(n))]
    used = {key for name in held for key in diffusers_names(name)}
    if not held:
        raise ValueError(f"{folder}: no weights of diffusers' CogVideoXTransformer3DModel in it")
    return WeightSource(
        description=f"diffusers folder {folder}",
        shapes={name: shape(name) for name in held},
        read=read,
        unexpected=sorted(files.keys() - used),
        is_rotary=config["use_rotary_positional_embeddings"],
    )


_ALWAYS = ("ofs_embedding.fc1.weight", "position_table.weight")
