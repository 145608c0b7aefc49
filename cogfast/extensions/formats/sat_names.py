"""SAT's tensor names, and how its model-parallel files split tensors; translates both ways."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import Tensor

from cogfast.model.weights.shard import join

PREFIX = "model.diffusion_model."
ROTARY_BUFFERS = ("mixins.pos_embed.freqs_sin", "mixins.pos_embed.freqs_cos")  # 1.0 only

# {cogfast's module: SAT's}, {i} the block; suffixes (.weight, .original.bias, ...) are the same.
_MODULES = {
    "patch_embedding": "mixins.patch_embed.proj",
    "text_embedding": "mixins.patch_embed.text_proj",
    "position_table.weight": "mixins.pos_embed.pos_embedding",
    "time_embedding.fc1": "time_embed.0",
    "time_embedding.fc2": "time_embed.2",
    "ofs_embedding.fc1": "ofs_embed.0",
    "ofs_embedding.fc2": "ofs_embed.2",
    "blocks.{i}.modulation.linear": "mixins.adaln_layer.adaLN_modulations.{i}.1",
    "blocks.{i}.attention_norm": "transformer.layers.{i}.input_layernorm",
    "blocks.{i}.attention.qkv": "transformer.layers.{i}.attention.query_key_value",
    "blocks.{i}.attention.out": "transformer.layers.{i}.attention.dense",
    "blocks.{i}.attention.query_norm": "mixins.adaln_layer.query_layernorm_list.{i}",
    "blocks.{i}.attention.key_norm": "mixins.adaln_layer.key_layernorm_list.{i}",
    "blocks.{i}.mlp_norm": "transformer.layers.{i}.post_attention_layernorm",
    "blocks.{i}.fc1": "transformer.layers.{i}.mlp.dense_h_to_4h",
    "blocks.{i}.fc2": "transformer.layers.{i}.mlp.dense_4h_to_h",
    # SAT has two norms behind the blocks: its transformer's own, and the one of the output layer.
    "final_norm": "transformer.final_layernorm",
    "output_norm": "mixins.final_layer.norm_final",
    "output_modulation": "mixins.final_layer.adaLN_modulation.1",
    "output": "mixins.final_layer.linear",
    "unused_position_embeddings": "transformer.position_embeddings.weight",
}


def _translate(name: str, table: list[tuple[re.Pattern[str], str]]) -> str | None:
    for pattern, replacement in table:
        if match := pattern.fullmatch(name):
            return replacement.replace("{i}", match.groupdict().get("i", "")) + match["rest"]
    return None


def _compile(pairs: Iterable[tuple[str, str]]) -> list[tuple[re.Pattern[str], str]]:
    # The escaped "{i}" matches the block's number; the rest of the name starts with a dot.
    pattern = lambda name: re.escape(name).replace(r"\{i\}", r"(?P<i>\d+)") + r"(?P<rest>(\..+)?)"
    return [(re.compile(pattern(left)), right) for left, right in pairs]


_TO_SAT = _compile(_MODULES.items())
_FROM_SAT = _compile((sat, ours) for ours, sat in _MODULES.items())


def sat_name(our_name: str) -> str:
    """Return SAT's full key of a parameter."""
    name = _translate(our_name, _TO_SAT)
    assert name is not None, f"no SAT name for {our_name}"
    return PREFIX + name


def has_sat_name(our_name: str) -> bool:
    """Return whether SAT has a name for a parameter: it has none for those of a user's own network."""
    return _translate(our_name, _TO_SAT) is not None


def from_sat_name(key: str) -> str | None:
    """Return cogfast's name of SAT's key, with or without SAT's prefix; None for unknown keys."""
    return _translate(key.removeprefix(PREFIX), _FROM_SAT)


# How the mp_rank files of a SAT checkpoint split a tensor: (dim, number of consecutive parts).
_SPLITS = {
    r"blocks\.\d+\.attention\.qkv(\.original)?\.(weight|bias)": (0, 3),  # q, k and v are split each
    r"blocks\.\d+\.fc1(\.original)?\.(weight|bias)": (0, 1),
    r"blocks\.\d+\.(attention\.qkv\.matrix_B\.\d|fc1\.matrix_B\.0)": (0, 1),
    r"blocks\.\d+\.(attention\.out|fc2)(\.original)?\.weight": (1, 1),
    # Row-parallel, as their linears: A is cut along its input, and B is whole in every file.
    r"blocks\.\d+\.(attention\.out\.matrix_A\.\d|fc2\.matrix_A\.0)": (1, 1),
}


def model_parallel_cut(our_name: str) -> tuple[int, int] | None:
    """Return (dim, num_parts) of Shard; None for a tensor that every file has whole."""
    return next((cut for pattern, cut in _SPLITS.items() if re.fullmatch(pattern, our_name)), None)


def merge_model_parallel(our_name: str, shards: list[Tensor]) -> Tensor:
    """Join a tensor from its shards in mp_rank_00, mp_rank_01, ...; a replicated tensor is taken from
    the first."""
    cut = model_parallel_cut(our_name)
    return shards[0] if cut is None else join(shards, *cut)
