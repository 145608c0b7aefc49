"""LoRA adapters as weights: what they are, whether they fit a model, and adding them to one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cogfast.model.config import TransformerConfig
from cogfast.model.lora import SAT_ALPHA, TARGETS, is_lora_parameter
from cogfast.model.weights.family import num_blocks
from cogfast.model.weights.formats.diffusers import diffusers_names, from_diffusers
from cogfast.model.weights.open import open_source
from cogfast.model.weights.shard import Shard
from cogfast.model.weights.source import WeightSource
from cogfast.schema.json_files import brief

_PAIR = re.compile(r"(?P<module>.+)\.matrix_(?P<side>[AB])\.(?P<part>\d+)")
_LORA_CONFIG = "model.network_config.params.modules.lora_config"
_FAMILIES = {1920: "a 2B adapter", 3072: "a 5B adapter"}  # by width
_TARGET_OF = {place: target for target, place in TARGETS.items()}


@dataclass(frozen=True, slots=True)
class Adapters:
    """What a set of adapters is: ranks that occur; alpha, None where nobody says; layers that have
    some; targets among lora.TARGETS; others: linears that have adapters but cannot be trained with
    them here."""

    num_tensors: int
    ranks: tuple[int, ...]
    alpha: float | None
    layers: tuple[int, ...]
    targets: tuple[str, ...]
    others: tuple[str, ...]

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        alpha = f"unknown (SAT's default is {SAT_ALPHA:g})" if self.alpha is None else self.alpha
        names = ", ".join((*self.targets, *self.others))
        return f"rank {ranks}, alpha {alpha}, {len(self.layers)} layers, {names}"


def open_adapter(path: str | Path, ema: bool = False) -> WeightSource:
    """The adapters at `path` alone: a LoRA file, or a SAT folder or run that was trained with some.

    ValueError where there are none, or tensors of names that nobody knows.
    """
    if not Path(path).exists():
        raise ValueError(f"{path}: no such file or folder of LoRA adapters")
    source = open_source(Path(path), ema)
    if source.unexpected:
        raise ValueError(
            f"{source.description}: {len(source.unexpected)} tensors have unknown names, first "
            f"{brief(source.unexpected[0])}; cogfast convert {path} DST --to peft --allow-unexpected "
            "leaves them out"
        )
    return only_adapters(source)


def only_adapters(source: WeightSource) -> WeightSource:
    """The adapters of a source without the rest. ValueError where there are none."""
    shapes = {name: shape for name, shape in source.shapes.items() if is_lora_parameter(name)}
    if not shapes:
        raise ValueError(f"{source.description}: it has no LoRA tensors")
    return replace(source, shapes=shapes, is_partial=True)


def without_adapters(source: WeightSource) -> WeightSource:
    """The model that a source's adapters adapt, under the names of a plain one."""
    names = {n.replace(".original.", "."): n for n in source.shapes if not is_lora_parameter(n)}
    return replace(
        source,
        shapes={plain: source.shapes[name] for plain, name in names.items()},
        dtypes={plain: source.dtypes[name] for plain, name in names.items()},
        read=lambda name, shard: source.read(names[name], shard),
        facts=_without_lora(source.facts),
        lora_alpha=None,
    )


def _without_lora(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in facts.items() if not key.startswith("lora_")}


def adapters_of(source: WeightSource) -> Adapters | None:
    """Facts about the adapters among a source's tensors; None: it has none."""
    ranks, layers, targets, others = set(), set(), set(), set()
    pairs = [m for m in map(_PAIR.fullmatch, source.shapes) if m and m["side"] == "A"]
    for pair in pairs:
        linear = pair["module"].rpartition(".")[2]
        target = _TARGET_OF.get((linear, int(pair["part"])))
        ranks.add(source.shapes[pair[0]][0])
        if pair["module"].startswith("blocks."):
            layers.add(int(pair["module"].split(".")[1]))
        if target is None:
            others.add(_theirs(pair["module"], int(pair["part"])).split(".", 2)[-1])
        else:
            targets.add(target)
    if not pairs:
        return None
    return Adapters(
        num_tensors=2 * len(pairs),
        ranks=tuple(sorted(ranks)),
        alpha=source.lora_alpha,
        layers=tuple(sorted(layers)),
        targets=tuple(target for target in TARGETS if target in targets),
        others=tuple(sorted(others)),
    )


def _theirs(module: str, part: int) -> str:
    """diffusers' name of a linear, which people know adapters by."""
    return diffusers_names(f"{module}.weight")[part].removesuffix(".weight")


def check_fits(adapter: WeightSource, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """ValueError where adapters are not for a model with tensors of these shapes, by plain name."""
    found, has_layers = adapters_of(adapter), num_blocks(shapes)
    alone = next(
        (n for n, s in adapter.shapes.items() if not _is_paired(n, s, adapter.shapes)), None
    )
    if alone is not None:
        raise ValueError(
            f"{adapter.description}: {brief(alone)} is not one of two matrices [r, in] and [out, r]; "
            "copy it again"
        )
    num_layers = max(found.layers, default=-1) + 1
    for name, (rows, columns) in adapter.shapes.items():
        pair = _PAIR.fullmatch(name)
        weight = shapes.get(f"{pair['module']}.weight")
        if weight is None and num_layers <= has_layers:
            raise ValueError(
                f"{adapter.description}: {name} adapts a linear that the model does not have; use "
                "the base that it was trained on"
            )
        num_parts = len(diffusers_names(f"{pair['module']}.weight"))
        fits = weight is not None and (
            columns == weight[1] if pair["side"] == "A" else rows * num_parts == weight[0]
        )
        if not fits:
            width = next((s[1] for n, s in adapter.shapes.items() if ".qkv.matrix_A" in n), columns)
            kind = _FAMILIES.get(width, "an adapter of another model")
            raise ValueError(
                f"{adapter.description}: {found.num_tensors} LoRA tensors belong to {num_layers} "
                f"layers of width {width}: this is {kind}, the model has {has_layers} of width "
                f"{shapes['patch_embedding.weight'][0]}; use the base that it was trained on"
            )


def _is_paired(name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether matrix A or B of that shape has the other one, of the same rank, beside it."""
    pair = _PAIR.fullmatch(name)
    if pair is None:
        return False
    is_a = pair["side"] == "A"
    other = shapes.get(f"{pair['module']}.matrix_{'B' if is_a else 'A'}.{pair['part']}", ())
    return len(shape) == len(other) == 2 and (
        shape[0] == other[1] if is_a else shape[1] == other[0]
    )


def check_config(adapter: WeightSource, config: TransformerConfig) -> None:
    """ValueError where a model of this config could not go on training adapters."""
    found = adapters_of(adapter)
    where = f"{_LORA_CONFIG}.params"
    alpha = config.lora_alpha if found.alpha is None else found.alpha
    lines = f"r: {found.ranks[0]}, lora_alpha: {alpha:g}"
    if found.others:
        raise ValueError(
            f"{adapter.description}: it adapts {', '.join(found.others)} too, which are not "
            f"trained with adapters here ({', '.join(TARGETS)} are); merge it into the base "
            "(cogfast convert --merge-lora) and train new ones"
        )
    check_fits(adapter, _adaptable(config))
    if len(found.ranks) > 1:
        raise ValueError(
            f"{adapter.description}: its ranks are {', '.join(map(str, found.ranks))}, and a model "
            "has one for all; merge it into the base (cogfast convert --merge-lora)"
        )
    if config.lora_rank is None:
        raise ValueError(
            f"{adapter.description}: {found.num_tensors} LoRA tensors, and the config has no "
            f"adapters; add {_LORA_CONFIG} with params {lines}, or merge them into the base first "
            "(cogfast convert --merge-lora)"
        )
    if (found.ranks[0], alpha) != (config.lora_rank, config.lora_alpha):
        raise ValueError(
            f"{adapter.description}: rank {found.ranks[0]} and alpha {alpha:g}, the config has r="
            f"{config.lora_rank} and lora_alpha={config.lora_alpha:g}; write {lines} in {where}"
        )
    if not set(found.targets) <= set(config.lora_targets):
        raise ValueError(
            f"{adapter.description}: adapters of {', '.join(found.targets)}, the config has "
            f"{', '.join(config.lora_targets)}; write target_modules: "
            f"[{', '.join(found.targets)}] in {where}"
        )
    layers = set(range(config.num_layers) if config.lora_layers is None else config.lora_layers)
    if not layers.issuperset(found.layers):
        raise ValueError(
            f"{adapter.description}: adapters of layers {list(found.layers)}, the config has them "
            f"in {sorted(layers)}; write layer_range: {list(found.layers)} in {where}"
        )


def _adaptable(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights that TARGETS are parts of, and of the one that shows the width."""
    width = config.hidden_size
    shapes = {"patch_embedding.weight": (width, config.in_channels)}
    for i in range(config.num_layers):
        shapes[f"blocks.{i}.attention.qkv.weight"] = (3 * width, width)
        shapes[f"blocks.{i}.attention.out.weight"] = (width, width)
    return shapes


def with_adapters(base: WeightSource, adapter: WeightSource) -> WeightSource:
    """`base`, a plain model, with adapters on its linears: what a LoRA checkpoint of SAT holds.

    ValueError where they do not fit.
    """
    check_fits(adapter, base.shapes)
    adapted = {_PAIR.fullmatch(name)["module"] for name in adapter.shapes}
    names = {}
    for name in base.shapes:
        module, _, kind = name.rpartition(".")
        names[f"{module}.original.{kind}" if module in adapted else name] = name

    def read(name: str, shard: Shard | None) -> Tensor:
        is_base = name in names
        return base.read(names[name], shard) if is_base else adapter.read(name, shard)

    return replace(
        base,
        description=f"{base.description} with {adapter.description}",
        shapes={new: base.shapes[old] for new, old in names.items()} | adapter.shapes,
        dtypes={new: base.dtypes[old] for new, old in names.items()} | adapter.dtypes,
        read=read,
        facts=_without_lora(base.facts),
        lora_alpha=adapter.lora_alpha,
    )


@dataclass(slots=True)
class MergeRounding:
    """How much of the change that adapters make is left when merged weights are rounded to `dtype`
    (None: the base's own). Filled for each merged weight when it is read."""

    dtype: torch.dtype | None
    _sums: dict[str, tuple[float, float, float]] = field(default_factory=dict)

    def add(self, name: str, weight: Tensor, merged: Tensor) -> None:
        """weight: the base's, in its dtype; merged: float32."""
        dtype = self.dtype or weight.dtype
        if name in self._sums or torch.promote_types(torch.float32, dtype) == dtype:
            return
        change = merged - weight.float()
        # What the target differs by from a conversion of the base alone.
        left = merged.to(dtype).float() - weight.to(dtype).float()
        sums = ((left * change).sum(), change.square().sum(), (left - change).square().sum())
        self._sums[name] = tuple(s.item() for s in sums)  # sync: once for each weight

    def report(self, fix: str = "--dtype fp32") -> str | None:
        """None: nothing was rounded. fix: what keeps float32."""
        if not self._sums:
            return None
        kept, total, error = (sum(sums) for sums in zip(*self._sums.values(), strict=True))
        total = total or 1.0
        return (
            f"rounding to {self.dtype or 'the dtype of the base'} keeps {kept / total:.1%} of the "
            f"adapters' change of the weights, with an error of {math.sqrt(error / total):.1%} of "
            f"the change's norm; {fix} keeps all of it"
        ).replace("torch.", "")


def merge_lora(
    base: WeightSource,
    adapter: WeightSource,
    scale: float = 1.0,
    rounding: MergeRounding | None = None,
) -> WeightSource:
    """`base` with W + scale (alpha / r) B A in the place of W wherever there is a pair for it,
    computed when it is read and float32 then, whatever `dtypes` says of the base.

    base: a plain model; any linear of it may have adapters. ValueError where they do not fit.
    """
    check_fits(adapter, base.shapes)
    alpha = SAT_ALPHA if adapter.lora_alpha is None else adapter.lora_alpha
    adapted = {_PAIR.fullmatch(name)["module"] for name in adapter.shapes}

    def read(name: str, shard: Shard | None) -> Tensor:
        module, _, kind = name.rpartition(".")
        if kind != "weight" or module not in adapted:
            return base.read(name, shard)
        weight = base.read(name, None)
        deltas = _deltas(adapter, module, weight.shape)
        merged = weight.float() + from_diffusers(name, deltas).mul_(scale * alpha)
        if rounding is not None:
            rounding.add(name, weight, merged)
        return merged if shard is None else shard.of(merged)

    return replace(
        base, description=f"{base.description} with {adapter.description} merged", read=read
    )


def _deltas(adapter: WeightSource, module: str, shape: tuple[int, ...]) -> list[Tensor]:
    """B A / r of each part of a linear [out, in], float32; zero where a part has no pair."""
    num_parts = len(diffusers_names(f"{module}.weight"))
    deltas = []
    for part in range(num_parts):
        name = f"{module}.matrix_A.{part}"
        if name in adapter.shapes:
            a, b = (adapter.read(name.replace("_A.", f"_{s}."), None).float() for s in "AB")
            deltas.append((b @ a).div_(a.shape[0]))
        else:
            deltas.append(torch.zeros(shape[0] // num_parts, shape[1]))
    return deltas
