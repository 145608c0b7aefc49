"""The names of the transformer's tensors in SAT's and in diffusers' files; translates both ways."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

PREFIX = "model.diffusion_model."  # of SAT's keys
_LAYER, _ADALN, _BLOCK = "transformer.layers.{i}.", "mixins.adaln_layer.", "transformer_blocks.{i}."
_NORM_LINEARS = [_BLOCK + f"norm{half}.linear" for half in (1, 2)]
_QKV = [_BLOCK + f"attn1.to_{x}" for x in "qkv"]
# {cogfast's module: (SAT's, diffusers' that it consists of)}, {i} the block. The suffixes (.weight,
# .original.bias, ...) are the same.
_MODULES = {
    "patch_embedding": ("mixins.patch_embed.proj", "patch_embed.proj"),
    "text_embedding": ("mixins.patch_embed.text_proj", "patch_embed.text_proj"),
    "position_table.weight": ("mixins.pos_embed.pos_embedding", "patch_embed.pos_embedding"),
    "time_embedding.fc1": ("time_embed.0", "time_embedding.linear_1"),
    "time_embedding.fc2": ("time_embed.2", "time_embedding.linear_2"),
    "ofs_embedding.fc1": ("ofs_embed.0", "ofs_embedding.linear_1"),
    "ofs_embedding.fc2": ("ofs_embed.2", "ofs_embedding.linear_2"),
    "blocks.{i}.attention_norm": (_LAYER + "input_layernorm", _BLOCK + "norm1.norm"),
    "blocks.{i}.modulation.linear": (_ADALN + "adaLN_modulations.{i}.1", *_NORM_LINEARS),
    "blocks.{i}.attention.qkv": (_LAYER + "attention.query_key_value", *_QKV),
    "blocks.{i}.attention.out": (_LAYER + "attention.dense", _BLOCK + "attn1.to_out.0"),
    "blocks.{i}.attention.query_norm": (
        _ADALN + "query_layernorm_list.{i}",
        _BLOCK + "attn1.norm_q",
    ),
    "blocks.{i}.attention.key_norm": (_ADALN + "key_layernorm_list.{i}", _BLOCK + "attn1.norm_k"),
    "blocks.{i}.mlp_norm": (_LAYER + "post_attention_layernorm", _BLOCK + "norm2.norm"),
    "blocks.{i}.fc1": (_LAYER + "mlp.dense_h_to_4h", _BLOCK + "ff.net.0.proj"),
    "blocks.{i}.fc2": (_LAYER + "mlp.dense_4h_to_h", _BLOCK + "ff.net.2"),
    # SAT has two norms behind the blocks: its transformer's own, and the one of the output layer.
    "final_norm": ("transformer.final_layernorm", "norm_final"),
    "output_norm": ("mixins.final_layer.norm_final", "norm_out.norm"),
    "output_modulation": ("mixins.final_layer.adaLN_modulation.1", "norm_out.linear"),
    "output": ("mixins.final_layer.linear", "proj_out"),
    "unused_position_embeddings": ("transformer.position_embeddings.weight",),
}
# cogfast's linears, all of which adapters may have.
LINEARS = [name for name in _MODULES if not name.endswith(("norm", ".weight", "_embeddings"))]


def _pattern(module: str, rest: str = r"(\..+)?") -> re.Pattern[str]:
    return re.compile(re.escape(module).replace(r"\{i\}", r"(?P<i>\d+)") + f"(?P<rest>{rest})")


_TO_SAT = {_pattern(ours): [sat] for ours, (sat, *_) in _MODULES.items()}
_FROM_SAT = {_pattern(sat): [ours] for ours, (sat, *_) in _MODULES.items()}
_TO_DIFFUSERS = {_pattern(ours): theirs for ours, (_, *theirs) in _MODULES.items()}
# The first of a module's parts finds it.
_FROM_DIFFUSERS = {
    _pattern(theirs[0], r"(\.[a-z]+)?"): ours for ours, (_, *theirs) in _MODULES.items() if theirs
}


def _filled(name: str, match: re.Match[str]) -> str:
    return name.replace("{i}", match.groupdict().get("i", "")) + match["rest"]


def _translate(name: str, table: Mapping[re.Pattern[str], Sequence[str]]) -> list[str]:
    for pattern, others in table.items():
        if match := pattern.fullmatch(name):
            return [_filled(other, match) for other in others]
    return []


def sat_name(our_name: str) -> str:
    """Return SAT's full key of a parameter."""
    (name,) = _translate(our_name, _TO_SAT)
    return PREFIX + name


def has_sat_name(our_name: str) -> bool:
    """Return whether SAT has a name for a parameter: it has none for those of a user's own network."""
    return bool(_translate(our_name, _TO_SAT))


def from_sat_name(key: str) -> str | None:
    """Return cogfast's name of SAT's key, with or without SAT's prefix; None for unknown keys."""
    return next(iter(_translate(key.removeprefix(PREFIX), _FROM_SAT)), None)


def diffusers_names(our_name: str) -> list[str]:
    """Return the tensors, or the modules, of diffusers' CogVideoXTransformer3DModel that form one of cogfast's."""
    return _translate(our_name, _TO_DIFFUSERS)


def our_names(theirs: list[str]) -> dict[str, list[str]]:
    """Return {cogfast's name: diffusers' names} of the tensors whose parts are all in `theirs`."""
    given, found = set(theirs), {}
    for pattern, ours in _FROM_DIFFUSERS.items():
        for our_name in (_filled(ours, m) for m in map(pattern.fullmatch, theirs) if m):
            parts = diffusers_names(our_name)
            if given.issuperset(parts):
                found[our_name] = parts
    return found
