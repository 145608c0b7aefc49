"""Converts weights from one format to another, tensor by tensor."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from cogfast.config.components import own_objective
from cogfast.core.json_files import read_json
from cogfast.core.values import counted
from cogfast.extensions.formats.adapters import (
    adapters_of,
    check_member,
    merge_lora,
    only_adapters,
    open_adapter,
    split_scale,
    with_adapters,
    without_adapters,
)
from cogfast.extensions.formats.compare import compare_adapters, compare_networks
from cogfast.extensions.formats.completed import as_in_run, completed
from cogfast.extensions.formats.image_scale import difference_of_run
from cogfast.extensions.formats.peft import with_strength_in_b, write_peft
from cogfast.extensions.formats.sat import write_sat
from cogfast.extensions.formats.vae import convert_vae, open_vae, verify_vae
from cogfast.extensions.sparse.keys import OTHERS_RUN_DENSE
from cogfast.model.config import Family, inpainting_channels
from cogfast.model.lora import DEFAULT_TARGETS, SAT_ALPHA, is_lora_parameter
from cogfast.model.weights.checkpoint_manifest import find_run_checkpoint, read_manifest
from cogfast.model.weights.diffusers import NOISE_KEY, log_positions, write_diffusers
from cogfast.model.weights.identify import check_complete, identify
from cogfast.model.weights.names import has_sat_name
from cogfast.model.weights.open import open_source
from cogfast.model.weights.source import WeightSource, first_of
from cogfast.model.weights.source import verify as verify_target

logger = logging.getLogger(__name__)

_TRAINING_FACTS = ("rotary_positions", "trained_size")


def convert(
    src: str | Path,
    dst: str | Path,
    to: str,
    ema: bool = False,
    merge_lora: str | None = None,
    add_lora: str | None = None,
    lora_alpha: float | None = None,
    model_parallel_size: int = 1,
    dtype: str | None = None,
    verify: bool = False,
    allow_unexpected: bool = False,
    scaling_factor: float | None = None,
) -> None:
    """Run `cogfast convert`.

    merge_lora: adapters to merge into the model, "" for its own; add_lora: adapters to write beside
    the model; lora_alpha: overrides the alpha of the adapters' files. ValueError for user errors.
    """
    # The cheap checks first: opening a source of 11 GB may take a while.
    source_path, target_path = Path(src), Path(dst)
    if not source_path.exists():
        raise ValueError(f"{src}: no such file or folder; give the path of the weights to convert")
    if to != "sat" and model_parallel_size != 1:
        text = f"--model-parallel-size {model_parallel_size} has a meaning with --to sat only; leave it out"
        raise ValueError(text)
    kind = None if dtype is None else getattr(torch, dtype)
    # A VAE has formats and options of its own, and nothing in common with adapters.
    if (vae := open_vae(source_path)) is not None:
        options = {"--ema": ema, "--merge-lora": merge_lora is not None, "--add-lora": add_lora}
        options |= {"--lora-alpha": lora_alpha is not None, "--allow-unexpected": allow_unexpected}
        if given := ", ".join(name for name, is_given in options.items() if is_given):
            raise ValueError(f"{src} is a VAE, for which {given} has no meaning; leave it out")
        convert_vae(vae, target_path, to, kind, scaling_factor)
        if verify:
            logger.info("%s: %s", dst, verify_vae(vae, target_path, kind))
        return
    if scaling_factor is not None:
        text = f"--scaling-factor {scaling_factor} applies to a VAE, but {src} is a transformer; leave it out"
        raise ValueError(text)
    lora = add_lora or (split_scale(merge_lora, "--merge-lora")[0] if merge_lora else None)
    # A run's adapters were trained beside the plain weights of the model that it started from.
    has_averages = ema and (lora is None or find_run_checkpoint(Path(lora)) is None)
    source = completed(_without_own(open_source(source_path, has_averages)))
    # Files of a run may need code in diffusers' pipeline.
    for run in map(Path, filter(None, (source_path, lora))):
        _warn_of_training(run)
        if to in ("peft", "diffusers") and (found := difference_of_run(run)):
            logger.warning("%s: %s; before sampling there: %s", run, *found)
    source = with_lora_options(source, merge_lora, add_lora, lora_alpha, ema)
    if source.unexpected and not allow_unexpected:
        text = f"{source.description}: {counted(len(source.unexpected), 'tensor')} with unknown "
        text += f"names: {first_of(source.unexpected)}; cogfast convert skips them with --allow-unexpected"
        raise ValueError(text)
    trained = source
    if to == "sat":
        source = _with_sat_strength(source)
    if to in ("peft", "fun"):
        write_adapters(source, target_path, kind, verify, to)
        return
    if all(is_lora_parameter(name) for name in source.shapes):
        text = f"{source.description}: has adapters only; use --to peft, or give their base: cogfast convert BASE "
        raise ValueError(f"{text}{dst} --to {to} --merge-lora {src} (SAT: or --add-lora {src})")
    config = identify(source)
    check_complete(source, config)
    family, count = Family.of_config(config), counted(len(source.shapes), "tensor")
    logger.info("%s: %s, %s", source.description, family, count)
    if to == "sat":
        write_sat(source, config, target_path, model_parallel_size, kind)
    else:
        write_diffusers(source, config, target_path, kind, _has_noise(source_path))
        log_positions(config, target_path)
    logger.info("%s: written for %s", dst, to)
    if verify:
        found = open_source(target_path)
        result = verify_target(source.as_written(kind), target_path, found)
        logger.info("%s: %s; %s", dst, result, compare_networks(trained, found, target_path))


def _warn_of_training(path: Path) -> None:
    """Log a warning if weights of a run were trained in a way that other programs do not sample."""
    run = find_run_checkpoint(path)
    manifest = {} if run is None else read_manifest(run)
    if own := own_objective(manifest.get("config", {}).get("model", {})):
        logger.warning("%s was %s; cogfast sample takes the run's own", path, own)
    attention = manifest.get("attention")
    if attention not in (None, "dense"):
        text = "%s was trained with " + OTHERS_RUN_DENSE
        logger.warning(text, path, f"args.attention={attention}")


def _has_noise(path: Path) -> bool:
    """Whether an inpainting model of a run, a transformer folder or a pipeline has noise in its masked video."""
    if (run := find_run_checkpoint(path)) is not None:
        model = (read_manifest(run).get("config") or {}).get("model") or {}
        return bool(model.get("masked_video_noise"))
    files = (path / "config.json", path / "transformer" / "config.json")
    found = next((file for file in files if file.is_file()), None)
    return found is not None and bool(read_json(found).get(NOISE_KEY))


def _without_own(source: WeightSource) -> WeightSource:
    """Return weights in which the tensors that a user's own network adds are unexpected ones."""
    own = [name for name in source.shapes if not has_sat_name(name)]
    if own and len(own) == len(source.shapes):
        text = "has only tensors of a network of its own, which no other format has; sample the run"
        raise ValueError(f"{source.description}: {text}")
    kept = {name: shape for name, shape in source.shapes.items() if name not in own}
    return replace(source, shapes=kept, unexpected=[*source.unexpected, *own])


def with_lora_options(
    source: WeightSource, merge: str | None, add: str | None, alpha: float | None, ema: bool = False
) -> WeightSource:
    """Apply --merge-lora (merge; "" for the source's own adapters), --add-lora and --lora-alpha. ema: take the
    averaged adapters of a run.

    ValueError if the options do not fit each other or the source.
    """
    if merge is not None and add is not None:
        raise ValueError("--merge-lora and --add-lora: leave one of them out")
    lora, has_own = merge or add, any(map(is_lora_parameter, source.shapes))
    if lora is not None and has_own:
        option = "--add-lora" if merge is None else "--merge-lora"
        text = f"{source.description}: has adapters of its own, but {option} {lora} needs a plain model; first "
        raise ValueError(f"{text}merge its own with --merge-lora and no name")
    if lora is None and alpha is not None:
        # --lora-alpha is for the adapters: here they are the source's own.
        if not has_own:
            text = f"--lora-alpha {alpha:g} is for adapters, but {source.description} has none; leave it out"
            raise ValueError(f"{text}, or name the adapters with --merge-lora or --add-lora")
        source = replace(source, lora_alpha=alpha)
    if merge == "":
        # Both views share the one reader, so the model is opened once.
        base = without_adapters(source)
        if not has_own:
            text = f"{source.description}: has no LoRA tensors to merge; use --merge-lora LORA"
            raise ValueError(text)
        if not base.shapes:
            text = f"{source.description}: has adapters only"
            raise ValueError(f"{text}; give the base as SRC and the adapters as --merge-lora LORA")
        return merge_lora(base, only_adapters(source, with_others=True))
    if lora is None:
        return source
    path, scale = (lora, 1.0) if merge is None else split_scale(lora, "--merge-lora")
    adapter = _without_own(open_adapter(path, ema, with_others=True))
    if alpha is not None:
        adapter = replace(adapter, lora_alpha=alpha)
    source = as_in_run(source, adapter)
    check_member(adapter, Family.of_config(identify(source)), source.description)
    whole = with_adapters(source, adapter) if merge is None else merge_lora(source, adapter, scale)
    # The adapters were trained later, so their facts replace the base's.
    trained = {k: adapter.facts[k] for k in _TRAINING_FACTS if k in adapter.facts}
    unexpected = [*source.unexpected, *adapter.unexpected]
    return replace(whole, facts={**whole.facts, **trained}, unexpected=unexpected)


def write_adapters(
    source: WeightSource, path: Path, dtype: torch.dtype | None, is_verified: bool, to: str = "peft"
) -> None:
    """Write the adapters of `source`, without a model, as a LoRA file. to: "fun" for VideoX-Fun."""
    source = only_adapters(source)
    written = write_peft(source, path, dtype, to)
    logger.info("%s: the adapters of %s: %s", written, source.description, adapters_of(source))
    channels = source.facts.get("in_channels"), source.facts.get("out_channels", 0)
    if to == "peft" and channels[0] == inpainting_channels(channels[1]):
        text = "%s: VideoX-Fun, which has the pipeline of inpainting models, reads --to fun, not this file"
        logger.warning(text, written)
    if is_verified:
        expected = source if to == "fun" else with_strength_in_b(source)
        found = open_source(written)
        result = verify_target(expected.as_written(dtype), written, found)
        logger.info("%s: %s; %s", written, result, compare_adapters(source, found, written))


def _with_sat_strength(source: WeightSource) -> WeightSource:
    """Return `source` with adapters of SAT's alpha, which its files do not store: B is multiplied by the rest.
    ValueError if there are adapters that SAT has not."""
    found = adapters_of(source)
    if found is None:
        return source
    if others := {*found.targets, *found.others}.difference(DEFAULT_TARGETS):
        text = f"{source.description}: has adapters of {', '.join(sorted(others))}"
        text += ", but SAT's LoRA adapts query_key_value and dense only"
        raise ValueError(f"{text}; use --to peft, or merge them with --merge-lora")
    if source.alpha == SAT_ALPHA:
        return source
    text = "%s: matrices B are multiplied by alpha %g, since SAT's files store no alpha and SAT's default is %g"
    logger.info(text, source.description, source.alpha / SAT_ALPHA, SAT_ALPHA)
    return replace(with_strength_in_b(source, SAT_ALPHA), lora_alpha=SAT_ALPHA)
