"""LoRA adapters as weights: describes them, checks whether they fit a model, merges them."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cogfast.config.sat_network import LORA_KEY, LORA_SHORT
from cogfast.core.json_files import brief
from cogfast.core.values import counted
from cogfast.extensions.formats.peft import PAIR, check_pairs
from cogfast.extensions.stores.mirror import copy_of
from cogfast.model.block import MLP_RATIO
from cogfast.model.config import MEMBERS, Family, TransformerConfig
from cogfast.model.lora import SAT_ALPHA, TARGETS, is_lora_parameter
from cogfast.model.weights.checkpoint_manifest import find_run_checkpoint
from cogfast.model.weights.diffusers import from_diffusers
from cogfast.model.weights.names import diffusers_names
from cogfast.model.weights.open import open_source
from cogfast.model.weights.shard import Shard
from cogfast.model.weights.source import WeightSource, check_finite, first_of, num_blocks

logger = logging.getLogger(__name__)
_FAMILIES = {1920: "a 2B adapter", 3072: "a 5B adapter"}  # by model width
_TARGET_OF = {place: target for target, place in TARGETS.items()}


@dataclass(frozen=True, slots=True)
class Adapters:
    """Description of a set of adapters. ranks: all that occur; alpha: None if unknown; layers: those
    with adapters; targets: keys of lora.TARGETS; others: adapted linears that cogfast cannot train
    adapters for."""

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
        return f"rank {ranks}, alpha {alpha}, {counted(len(self.layers), 'layer')}, {names}"


def split_scale(text: str, option: str) -> tuple[str, float]:
    """Return path and scale of `PATH` or `PATH:SCALE`, the value of a command's option; of an address, the path
    of its copy."""
    path, colon, scale = text.rpartition(":")
    # An existing path may contain a colon, as a URL without a scale does.
    if not colon or os.path.exists(text) or scale.startswith("//"):
        return copy_of(text), 1.0
    try:
        number = float(scale)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"{option} {text}: no such file or folder, nor PATH:SCALE with a finite number; use "
            "lora.safetensors:0.8"
        )
    return copy_of(path), number


def open_adapter(
    path: str | Path, ema: bool | None = False, with_others: bool = False
) -> WeightSource:
    """Open the adapters of a LoRA file, or of a SAT folder or run that was trained with LoRA.

    ema: of a run, see open_source. with_others: and the other weights that the run trained, for a base that
    has them. ValueError if there are none, or tensors have unknown names; see only_adapters.
    """
    if not Path(path).exists():
        raise ValueError(f"{path}: no such file or folder; give the path of LoRA adapters")
    # Only runs have averaged adapters.
    source = open_source(Path(path), ema if find_run_checkpoint(Path(path)) else False)
    if source.unexpected:
        text = f"{source.description}: {counted(len(source.unexpected), 'tensor')} with unknown names, first "
        text += f"{brief(source.unexpected[0])}; remove "
        raise ValueError(f"{text}them with cogfast convert {path} DST --to peft --allow-unexpected")
    return only_adapters(source, with_others)


def only_adapters(source: WeightSource, with_others: bool = False) -> WeightSource:
    """Return the adapters of a source without the rest. with_others: also the other weights that a run trained,
    under the names of a model without LoRA. ValueError if there are no adapters, a matrix has no partner, or a
    run trained other weights, too."""
    names = {name: name for name in filter(is_lora_parameter, source.shapes)}
    if not names and not (with_others and source.trained):
        raise ValueError(f"{source.description}: has no LoRA tensors; use a source with adapters")
    check_pairs(source.description, {name: source.shapes[name] for name in names})
    others = sorted(n for n in source.trained & source.shapes.keys() if not is_lora_parameter(n))
    if others and not with_others:
        text = f"{source.description}: has trained {counted(len(others), 'tensor')} beside the adapters, which "
        text += f"adapters alone lack: {first_of(others)}; write the whole model "
        raise ValueError(f"{text}with cogfast convert BASE DST --to diffusers --merge-lora RUN")
    names |= {name.replace(".original.", "."): name for name in others}
    return replace(selected(source, names), is_partial=True)


def without_adapters(source: WeightSource) -> WeightSource:
    """Return the source without its adapters, under the names of a model without LoRA."""
    names = {n.replace(".original.", "."): n for n in source.shapes if not is_lora_parameter(n)}
    return replace(selected(source, names), facts=_without_lora(source.facts), lora_alpha=None)


def selected(source: WeightSource, names: Mapping[str, str]) -> WeightSource:
    """Return some tensors of a source under other names, {new name: name in the source}."""
    return replace(
        source,
        shapes={new: source.shapes[old] for new, old in names.items()},
        dtypes={new: source.dtypes[old] for new, old in names.items()},
        read=lambda name, shard: source.read(names[name], shard),
    )


def joined(source: WeightSource, more: WeightSource) -> WeightSource:
    """Return the tensors of both sources, which have different names."""
    return replace(
        source,
        shapes=source.shapes | more.shapes,
        dtypes=source.dtypes | more.dtypes,
        read=lambda name, shard: (more if name in more.shapes else source).read(name, shard),
    )


def _without_lora(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in facts.items() if not key.startswith("lora_")}


def adapters_of(source: WeightSource) -> Adapters | None:
    """Describe the adapters among a source's tensors; None if it has none."""
    ranks, layers, targets, others = set(), set(), set(), set()
    # One entry for each pair; only_adapters finds a matrix without its partner.
    pairs = [m for m in map(PAIR.fullmatch, source.shapes) if m and m["side"] == "A"]
    for pair in pairs:
        target = None
        ranks.add(source.shapes[pair[0]][0])
        if pair["module"].startswith("blocks."):
            _, block, linear = pair["module"].split(".", 2)
            layers.add(int(block))
            target = _TARGET_OF.get((linear, int(pair["part"])))
        if target is None:
            others.add(diffusers_names(pair["module"])[int(pair["part"])].split(".", 2)[-1])
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


def lacks_alpha(path: str | Path) -> str | None:
    """Return what is missing if weights have adapters without their alpha, as SAT's do; None otherwise."""
    found = adapters_of(open_source(Path(path), None))
    if found is None or found.alpha is not None:
        return None
    return (
        "has adapters without their alpha, which SAT's files do not store; set args.lora_alpha to the one that "
        f"they were trained with (SAT's default is {SAT_ALPHA:g})"
    )


def model_width(shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """Return the model width that adapters of these shapes belong to; None if they do not show it."""
    for name, shape in shapes.items():
        if name.endswith(".fc2.matrix_B.0"):
            return shape[0]
        if re.search(r"\.(qkv|out|fc1)\.matrix_A\.", name) and name.startswith("blocks."):
            return shape[1]
    return None


def check_member(adapter: WeightSource, family: Family, where: str) -> None:
    """Raise ValueError if adapters were trained on a model of other positions or patches than `family`, which
    shapes do not show. Log a warning if they do not tell, or if it had other inputs. where: the model's name."""
    name = family.member.name
    trained = next((member for member in MEMBERS if member.name == adapter.member), None)
    if trained is None:
        text = "%s does not say on which model it was trained, and others than %s have linears of these shapes, too"
        logger.warning(text, adapter.description, name)
    elif (trained.patch, trained.is_rotary) != (family.member.patch, family.member.is_rotary):
        text = f"{adapter.description}: was trained on {trained.name}, but {where} is {name}"
        raise ValueError(f"{text}; use {trained.name} or adapters of {name}")
    elif trained.name != name:
        text = "%s was trained on %s, and %s is %s, which has other inputs"
        logger.warning(text, adapter.description, trained.name, where, name)


def check_fits(adapter: WeightSource, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError if adapters do not fit a model without LoRA that has these shapes."""
    for name, shape in adapter.shapes.items():
        pair = PAIR.fullmatch(name)
        if pair is None:  # a weight that takes the place of the model's
            if shapes.get(name) != shape:
                text = f"{adapter.description}: {name} {list(shape)} has no place in the model"
                raise ValueError(f"{text}; use the base that it was trained on")
            continue
        rows, columns = shape
        weight = shapes.get(f"{pair['module']}.weight", (0, 0))
        size = columns if pair["side"] == "A" else rows * len(diffusers_names(pair["module"]))
        if size == weight[1 if pair["side"] == "A" else 0]:
            continue
        found = adapters_of(adapter)
        assert found is not None, f"{adapter.description}: no adapters"
        # The width of the adapters names the family that they were trained on.
        width = model_width(adapter.shapes) or columns
        raise ValueError(
            f"{adapter.description}: {name} does not fit the model, which has {num_blocks(shapes)} layers "
            f"of width {shapes['patch_embedding.weight'][0]}: {found.num_tensors} LoRA tensors of "
            f"{max(found.layers, default=-1) + 1} layers of width {width} are "
            f"{_FAMILIES.get(width, 'an adapter of another model')}; use the base model that it was "
            "trained on"
        )


def _adapted(adapter: WeightSource) -> set[str]:
    return {pair["module"] for pair in map(PAIR.fullmatch, adapter.shapes) if pair}


def check_config(adapter: WeightSource, config: TransformerConfig) -> None:
    """Raise ValueError if a model of this config cannot continue to train these adapters."""
    found = adapters_of(adapter)
    assert found is not None, f"{adapter.description}: no adapters"
    if found.others:
        text = f"{adapter.description}: also adapts {', '.join(found.others)}"
        text += f", but cogfast trains adapters of {', '.join(TARGETS)} only; merge it "
        raise ValueError(f"{text}into the base (cogfast convert --merge-lora) and train new ones")
    check_fits(adapter, _adaptable(config))
    if adapter.member is not None:
        check_member(adapter, Family.of_config(config), "the configured model")
    rank, *other_ranks = found.ranks
    if other_ranks:
        text = f"{adapter.description}: its ranks are {', '.join(map(str, found.ranks))}"
        text += ", but a model has the same rank everywhere; merge it into the base (cogfast convert --merge-lora)"
        raise ValueError(text)
    alpha = config.lora_alpha if found.alpha is None else found.alpha
    layers = range(config.num_layers) if config.lora_layers is None else config.lora_layers
    has_places = {*found.targets} <= {*config.lora_targets} and {*found.layers} <= {*layers}
    if has_places and (rank, alpha) == (config.lora_rank, config.lora_alpha):
        return
    has, set_layers = config.adapters or "no adapters", ""
    if config.lora_layers is not None or len(found.layers) < config.num_layers:
        has += f", in layers {list(layers)}"
        set_layers = f" {LORA_KEY}.layer_range=[{','.join(map(str, found.layers))}]"
    modules = ",".join(LORA_SHORT[name] for name in found.targets)
    text = f"{adapter.description}: its {found.num_tensors} LoRA tensors do not fit the config, which has {has}"
    text += f"; set args.lora_rank={rank} args.lora_alpha={alpha:g} args.lora_modules=[{modules}]{set_layers}"
    raise ValueError(f"{text}, or first merge them into the base (cogfast convert --merge-lora)")


def _adaptable(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that TARGETS belong to, and of patch_embedding, which shows the
    model width."""
    width, inner = config.hidden_size, MLP_RATIO * config.hidden_size
    linears = {"attention.qkv": (3 * width, width), "attention.out": (width, width)}
    linears |= {"fc1": (inner, width), "fc2": (width, inner)}
    blocks = range(config.num_layers)
    shapes = {f"blocks.{i}.{name}.weight": size for i in blocks for name, size in linears.items()}
    return shapes | {"patch_embedding.weight": (width, config.in_channels)}


def with_adapters(base: WeightSource, adapter: WeightSource) -> WeightSource:
    """Return `base`, a model without LoRA, with adapters on its linears, as in SAT's LoRA checkpoints.

    ValueError if they do not fit.
    """
    check_fits(adapter, base.shapes)
    base, adapted = _with_others(base, adapter), _adapted(adapter)
    names = {}
    for name in base.shapes:
        module, _, kind = name.rpartition(".")
        names[f"{module}.original.{kind}" if module in adapted else name] = name
    pairs = {name: name for name in filter(is_lora_parameter, adapter.shapes)}
    whole = joined(selected(base, names), selected(adapter, pairs))
    return replace(
        whole,
        description=f"{base.description} with {adapter.description}",
        dtypes=whole.dtypes | adapter.dtypes,
        facts=_without_lora(base.facts),
        lora_alpha=adapter.lora_alpha,
    )


def _with_others(base: WeightSource, adapter: WeightSource, scale: float = 1.0) -> WeightSource:
    """Return `base` with the weights of `adapter` that are no adapters in place of its own, or between both."""

    def read(name: str, shard: Shard | None) -> Tensor:
        if name not in adapter.shapes:
            return base.read(name, shard)
        trained = adapter.read(name, shard)
        return trained if scale == 1 else base.read(name, shard).float().lerp(trained, scale)

    return replace(base, read=read)


def merge_lora(base: WeightSource, adapter: WeightSource, scale: float = 1.0) -> WeightSource:
    """Return `base` with W + scale (alpha / r) B A instead of W for every linear with adapters.

    Merged weights are computed when they are read, and are float32 whatever `dtypes` of the base is.
    base: a model without LoRA; any of its linears may have adapters. Other weights of `adapter` take the place
    of the base's, or `scale` of the way there. ValueError if they do not fit.
    """
    check_fits(adapter, base.shapes)
    base, adapted = _with_others(base, adapter, scale), _adapted(adapter)

    def read(name: str, shard: Shard | None) -> Tensor:
        module, _, kind = name.rpartition(".")
        if kind != "weight" or module not in adapted:
            return base.read(name, shard)
        weight = base.read(name, None)
        deltas = _deltas(adapter, module, weight.shape)
        # In float32: in bf16 most of so small a change would round away.
        merged = weight.float() + from_diffusers(name, deltas).mul_(scale * adapter.alpha)
        check_finite(f"{adapter.description} with scale {scale:g}", name, merged)
        return merged if shard is None else shard.of(merged)

    merged = f"{base.description} with {adapter.description} merged"
    return replace(base, description=merged, read=read)


def _deltas(adapter: WeightSource, module: str, shape: tuple[int, ...]) -> list[Tensor]:
    """Return B A / r of each part of a linear [out, in], float32; zero for parts without a pair."""
    num_parts = len(diffusers_names(module))
    deltas = []
    for part in range(num_parts):
        name = f"{module}.matrix_A.{part}"
        if name in adapter.shapes:
            a, b = (adapter.read(name.replace("_A.", f"_{s}."), None).float() for s in "AB")
            deltas.append((b @ a).div_(a.shape[0]))
        else:
            deltas.append(torch.zeros(shape[0] // num_parts, shape[1]))
    return deltas
