"""Checks a configuration before any GPU work, and says what to change if it cannot work."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cogfast.config.components import own_objective, own_optimizer
from cogfast.config.sat_network import LORA_KEY, NETWORK_KEY
from cogfast.config.sat_unused import OPTIMIZER
from cogfast.config.yaml_files import PLACEHOLDER
from cogfast.core.addresses import is_hub_id, is_url
from cogfast.core.component import Component, is_none
from cogfast.core.json_files import brief
from cogfast.core.keys import DEFAULT, find_origin, names_origins
from cogfast.core.values import KeyProblem, Problems, cut, nearest, one_line, select, show
from cogfast.data.keys import data_param
from cogfast.data.video.clip import checked_batches, checked_buckets, checked_size
from cogfast.extensions.conditions.check import (
    check_conditions,
    check_given,
    check_prefixes,
    check_stated,
)
from cogfast.extensions.formats.adapters import check_config, lacks_alpha, open_adapter
from cogfast.extensions.table import hooks
from cogfast.model.config import Family, TransformerConfig, derived_models
from cogfast.model.keys import ModelKeys
from cogfast.model.lora import SAT_ALPHA
from cogfast.model.transformer import Network, network_class
from cogfast.model.weights.checkpoint_manifest import RESUMABLE, read_manifest, trained_settings
from cogfast.model.weights.diffusers import diffusers_config, find_diffusers_folder
from cogfast.model.weights.identify import identify
from cogfast.model.weights.load import check_depth_and_width, check_family, fitted
from cogfast.model.weights.open import open_source
from cogfast.train.assembly import build_on_meta, frozen_to_keep, video_data
from cogfast.train.frozen_encoders import FrozenParts
from cogfast.train.keys import TrainKeys
from cogfast.train.preflight.attention_choice import check_attention
from cogfast.train.preflight.compilers import check_compilers, check_fp8
from cogfast.train.preflight.mesh import check_global_batch, check_mesh
from cogfast.train.preflight.parts import (
    check_frozen_parts,
    check_offload,
    check_optimizer_state,
    fit_rates,
    missing_frozen,
    try_build,
    try_diffusion,
    try_optimizer,
)
from cogfast.train.run.folder import (
    adapters_to_resume,
    check_changes,
    check_creatable,
    checkpoint_to_resume,
    resumed_in_run_folder,
)
from cogfast.train.run.opened import Run
from cogfast.train.video_size import check_frames, check_latent_frames, check_size

logger = logging.getLogger(__name__)

# Key of args that names a file or a folder -> what to set it to
_WEIGHTS = {"load": "the folder of the weights", "load_lora": "a file or folder of LoRA weights"}
_RUN_FILES = {"resume": "a run's folder, or to auto, which starts a new run if there is none"}
_EVALUATION_FILES = {
    "eval_prompt_file": "a text file with a prompt per line, or to null",
    "eval_images": "a text file with a path per line, or to null",
}
_LOAD = TrainKeys.key("load")
_MOST_NAME_BYTES = 200  # of a folder name, at most 255; date and time are appended


def _check_name(args: TrainKeys) -> None:
    """Check that the run's name is one folder: it must not leave args.save nor make folders in it."""
    name = args.experiment_name
    is_folder = name not in ("", ".", "..") and name.isprintable() and not {"/", "\\"} & set(name)
    if not is_folder or len(name.encode()) > _MOST_NAME_BYTES:
        text = f"args.experiment_name={brief(repr(name))} must be a folder name of at most "
        text += f"{_MOST_NAME_BYTES} bytes, printable and without slashes"
        raise args.problem("experiment_name", f"{text}; args.save sets the folder above it")


def _check_run_folder(
    args: TrainKeys, sections: Mapping[str, Mapping], origins: Mapping[str, str]
) -> None:
    """Check what can be checked before clips are encoded, which may take hours (args.encode_first)."""
    try:
        check_creatable(args)
        is_left_out = args.run_folder is None or is_url(args.run_folder)
        checkpoint = None if is_left_out else resumed_in_run_folder(args)
        if checkpoint is not None and adapters_to_resume(checkpoint) is None:
            manifest = read_manifest(checkpoint, RESUMABLE)
            fitted, _ = fit_rates(origins, args, sys.maxsize, manifest)
            now = {**sections, "args": {**sections["args"], "warmup_steps": fitted.warmup_steps}}
            # Global batch and trainer of this run are not known yet: they are compared when it starts.
            known = manifest["global_batch"], manifest.get("classes", {})
            check_changes(checkpoint, manifest, now, *known)
    except ValueError as error:
        text = str(error)
        key = next((k for k in ("run_folder", "save") if text.startswith(f"args.{k}")), "resume")
        raise args.problem(key, text) from None


def _check_export(args: TrainKeys, model: Mapping[str, Any], network: Network) -> None:
    """Refuse exports of models that diffusers' class cannot represent."""
    if args.export != "none" and (own := own_objective(model)):
        logger.warning("args.export=%s: %s; cogfast sample takes the run's own", args.export, own)
    # LoRA files can represent every model; only whole models have diffusers' limits.
    if args.export == "none" or network.config.lora_rank is not None:
        return
    if network.is_own:
        text = f": diffusers has no class for what {network.target} adds; set args.export=none"
        raise args.refusal("export", text)
    try:
        diffusers_config(network.config)
    except ValueError as error:
        reason = str(error).partition("; use --to")[0]
        raise args.refusal("export", f": {reason}; set args.export=none") from None


def _check_base(args: TrainKeys, network: Network) -> None:
    """Check that a frozen base is in args.load, and the keys that keep it in 8 bits or in host memory."""
    model, sizes = network.model, network.config
    key = "trainable_modules" if model.trainable_modules else "not_trainable_prefixes"
    if args.load is None and getattr(model, key) != getattr(ModelKeys(), key):
        transformer = build_on_meta(network, args)
        kept = {*frozen_to_keep(transformer), *transformer.unused_parameter_names()}
        is_lost = {n not in kept and not p.requires_grad for n, p in transformer.named_parameters()}
        # If all are frozen, nothing is trainable, which is another error.
        if is_lost == {True, False} and checkpoint_to_resume(args) is None:
            text = " freezes random weights, which no checkpoint has; set args.load to the folder of the base model"
            raise model.refusal(key, text)
    is_frozen = model.lora_train or "all" in model.not_trainable_prefixes
    is_frozen = is_frozen and model.trainable_modules is None and not network.is_own
    for key, default in (("quantize_base", "none"), ("offload_blocks", 0)):
        if getattr(args, key) != default and not (is_frozen and sizes.lora_rank is not None):
            text = " is for LoRA with a frozen base, but this run trains other weights; set args.lora_rank=64"
            raise args.refusal(key, f"{text} (or another rank), or args.{key}={default}")
    if args.offload_blocks > sizes.num_layers:
        text = f" exceeds the model's num_layers={sizes.num_layers}; use that or less"
        raise args.refusal("offload_blocks", text)


@names_origins
def check_train(run: Run, world_size: int | None = None) -> None:
    """Check the configuration of `cogfast train`. world_size: None uses that of this launch."""
    args, model, data = run.args, run.model, run.data_arguments
    if args.mode == "inference":
        raise args.refusal("mode", " is for `cogfast sample`; set args.mode=finetune to train")
    # From cheap to expensive: keys and paths, the machine, the sizes, then parts that are built.
    _require(run.sections["model"], "network_config", "denoiser_config", "loss_fn_config")
    _require_data(run.data)
    # All at once: a user with four wrong paths should not start four times.
    _refuse_missing(
        run.origins, _placeholders(run.sections), _missing_paths(args, run.data, run.frozen)
    )
    _check_name(args)
    _check_run_folder(args, run.sections, run.origins)
    _check_steps(args)
    if model.input_key != "mp4":
        raise model.refusal("input_key", " must be mp4, the key of the videos in a batch")
    # Otherwise the run would fail when it opens its metrics, after all weights are loaded.
    if args.wandb and importlib.util.find_spec("wandb") is None:
        raise args.refusal("wandb", ", but wandb is not installed; pip install wandb")
    if args.push_to_hub is not None and not is_hub_id(args.push_to_hub):
        text = f"args.push_to_hub={brief(args.push_to_hub)} must be a repository such as me/my-lora"
        raise args.problem("push_to_hub", f"{text}, and no path here; correct it")
    _check_precision(args)
    check_optimizer_state(args, run.deepspeed)
    check_compilers(args, is_training=True)
    _check_network(run.network_target, run.fields, run.allow_import)
    _check_pipeline(args, model, run.fields)
    network = run.network
    sizes = network.config
    check_mesh(args, sizes, data, network.target, world_size)
    check_global_batch(args, run.deepspeed, world_size)
    check_offload(args)
    check_fp8(args)
    check_attention(args, sizes.head_width)
    _check_export(args, run.sections["model"], network)
    # Weights from scratch have an output layer of zeros, behind which no adapter gets a gradient.
    if sizes.lora_rank is not None and args.load is None:
        text = "args.load is missing: LoRA adapts trained weights, and random weights give it no gradient"
        raise ValueError(f"{text}; set args.load to the folder of the base model")
    optimizer = run.deepspeed.get("optimizer") or {}
    if sizes.lora_rank is not None and own_optimizer(optimizer) == "muon":
        key = f"{OPTIMIZER}.type"
        text = f"{key}={optimizer['type']} is for runs that train all weights: it would "
        text += "orthogonalize the two factors of an adapter, not what they change together"
        raise KeyProblem(key, f"{text}; use Prodigy or sat.ops.FusedEmaAdam")
    _check_base(args, network)
    _check_data(args, run.model, run.data, run.frozen, run.fields)
    # (args, network, data, is_training)
    for check in hooks("check_attention", args):
        check(args, sizes, data, is_training=True)
    # (args, model, data, sampler)
    for check in hooks("check_evaluation", args):
        check(args, model, run.data, run.sampler)
    try_diffusion(run.denoiser, run.loss, run.sampler)
    try_optimizer(args, run.deepspeed, run.allow_import)
    num_steps = args.train_iters or sys.maxsize  # steps of epochs are known only with the data
    try_build(args.key("lr_schedule"), partial(fit_rates, run.origins, args, num_steps))
    if sizes.lora_alpha == 0 and sizes.lora_rank is not None:
        key = f"{LORA_KEY}.lora_alpha"
        text = f"{key}=0 makes the adapters' output and all their gradients 0; set args.lora_alpha"
        raise KeyProblem(key, f"{text} to the rank, {sizes.lora_rank}")
    _check_adapters(args, sizes, run.origins)


@names_origins
def check_cache(run: Run) -> None:
    """Check the configuration of `cogfast cache`."""
    args = run.args
    # Only encoders run here, but they need the network's sizes.
    _require(run.sections["model"], "network_config")
    _require_data(run.data)
    if args.latent_cache is None:
        stored = trained_settings(Path(args.resume)) if args.resume else {}
        own = select(stored.get("args", ({}, ""))[0], "latent_cache") or "PATH"
        fix = f"set it to the folder that the latents are written to: args.latent_cache={own}"
        raise ValueError(f"args.latent_cache is missing; {fix}")
    _refuse_missing(run.origins, _missing_paths(args, run.data, run.frozen))
    _check_precision(args)
    _check_network(run.network_target, run.fields, run.allow_import)
    _check_pipeline(args, run.model, run.fields)
    _check_data(args, run.model, run.data, run.frozen, run.fields)


@names_origins
def check_sample(run: Run, weights: str | None = None, given: Sequence[str] = ()) -> None:
    """Check the configuration of `cogfast sample`. weights: run folder that replaces args.load. given: the
    conditions that prompts have."""
    args, model, data, network = run.args, run.model, run.data_arguments, run.fields
    _require(run.sections["model"], "network_config", "denoiser_config", "sampler_config")
    # A run's own configuration names the files of its training, which sampling need not find.
    if weights is None:
        _refuse_missing(run.origins, _placeholders(run.sections), _missing_files(args, _WEIGHTS))
        if args.load is None and not args.force_inference:
            text = "args.load is missing; set it to the weights to sample with, or give a run's "
            raise ValueError(f"{text}folder; args.force_inference=true samples with random weights")
        _check_network(run.network_target, network, run.allow_import)
        _check_adapters(args, run.network.config, run.origins)
    _check_precision(args)
    check_compilers(args, is_training=False)
    try_diffusion(run.denoiser, run.loss, run.sampler)
    _check_network(run.network_target, run.fields, run.allow_import)
    if weights is None:
        _check_pipeline(args, model, network)
    sizes = run.network.config
    check_mesh(args, sizes, data, run.network.target)
    check_attention(args, sizes.head_width)
    check_conditions(model, network)
    check_given(model, given)
    if args.sampling_image_size is not None:
        check_size(network, *args.sampling_image_size, key=args.key("sampling_image_size"))
    if args.sampling_num_frames is not None:
        check_latent_frames(network, args.sampling_num_frames)
    for check in hooks("check_attention", args):
        check(args, sizes, data, is_training=False)


def _require(model: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if is_none(model.get(name)):
            raise ValueError(f"model.{name} is missing; add a model file to --base")


def _require_data(data: Component | None) -> None:
    if data is None:
        raise ValueError("data.target is missing; add a file with a data section to --base")


def _strings(node: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, str):
        yield key, node
    items = enumerate(node) if isinstance(node, list) else ()
    for name, value in node.items() if isinstance(node, dict) else items:
        yield from _strings(value, f"{key}.{name}")


def _placeholders(sections: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    more = {_LOAD: ", a folder with VAE and text encoder"}
    fix = "set it to your own path, in the file or on the command line"
    of_model = ", or give the folder of a pipeline whose transformer/ has the weights"
    for name, section in sections.items():
        for key, value in _strings(section, name):
            if PLACEHOLDER.search(value):
                text = f"{key}={value!r} is a placeholder of upstream's file; {fix} ({key}=PATH)"
                yield key, text + more.get(key, of_model * (name == "model"))


def _missing_paths(
    args: TrainKeys, data: Component | None, frozen: FrozenParts
) -> list[tuple[str, str]]:
    """Return (key, text) for each missing file or folder that training reads."""
    videos = video_data(data)
    missing = list(_missing_files(args, _WEIGHTS | _RUN_FILES))
    if videos is not None:
        # If nothing is evaluated, valid_data is not read and need not exist.
        for name in ["train_data", *(["valid_data"] if args.has_evaluation else [])]:
            for source in getattr(args, name):
                text = videos.missing_source(f"args.{name}", source)
                missing += [] if text is None else [(f"args.{name}", text)]
        missing += missing_frozen(frozen)
    if args.has_evaluation:
        missing += _missing_files(args, _EVALUATION_FILES)
    return missing


def _refuse_missing(origins: Mapping[str, str], *found: Iterable[tuple[str, str]]) -> None:
    """Raise one error with a line for each (key, text). found: earlier ones have precedence."""
    # An item of a list has the key of the list: a placeholder there is not also a missing path.
    texts: dict[str, list[str]] = {}
    for pairs in found:
        known = set(texts) | {key.rpartition(".")[0] for key in texts}
        for key, text in pairs:
            if key not in known:
                texts.setdefault(key, []).append(text)
    if _LOAD in texts:
        # A pipeline's folder settles VAE and text encoder, too: `model` has no other placeholders.
        texts = {k: t for k, t in texts.items() if k[:6] != "model." or "='{your" not in t[0]}
    if texts:
        texts = {key: texts[key] for key in sorted(texts, key=lambda key: key != _LOAD)}
        named = [(find_origin(origins, key), text) for key in texts for text in texts[key]]
        raise Problems("\n".join(one_line(f"{origin}: {text}") for origin, text in named))


def _missing_files(args: TrainKeys, keys: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (key, text) for each missing path. keys: {key of args: what to set it to}."""
    for name, fix in keys.items():
        path, key = getattr(args, name), f"args.{name}"
        if name == "resume" and is_url(path or "") and path.endswith((".json", ".safetensors")):
            yield key, f"{key}={cut(path, 160)} is a file; set it to {fix}"
        # A run in a store is looked for when its folder is opened.
        is_word = name == "resume" and (path in ("auto", "latest") or is_url(path or ""))
        if path is not None and not is_word and not (path and Path(path).exists()):
            near = nearest(path.lower(), ("latest", "auto")) if name == "resume" else ""
            yield key, f"{key}={cut(path, 160)} does not exist{near or f'; set it to {fix}'}"


def _check_adapters(
    args: TrainKeys, network: TransformerConfig, origins: Mapping[str, str]
) -> None:
    if find_origin(origins, f"{LORA_KEY}.lora_alpha") == DEFAULT and args.resume is None:
        # The rank stands for an alpha that is not stated.
        is_other = network.lora_rank and network.lora_alpha != SAT_ALPHA
        for name in ("load", "load_lora"):
            path, key = getattr(args, name), f"args.{name}"
            if path is not None and is_other and (problem := lacks_alpha(path)):
                text = f"{key}={path} {problem}; here it would be the rank, {network.lora_rank}"
                raise KeyProblem(key, text)
    if args.load_lora is not None:
        try:
            check_config(open_adapter(args.load_lora), network)
        except ValueError as error:
            raise args.problem("load_lora", f"args.load_lora: {error}") from None
    if args.resume is None or not Path(args.resume).is_dir():
        return
    try:
        file = adapters_to_resume(Path(args.resume).absolute())
        if file is not None:
            # CogVideo's trainer stores no alpha: it is the configuration's.
            adapter = dataclasses.replace(open_adapter(file), lora_alpha=None)
            check_config(adapter, network)
    except ValueError as error:
        text = str(error)
        raise args.problem(
            "resume", text if text.startswith("args.") else f"args.resume: {text}"
        ) from None


def _check_pipeline(args: TrainKeys, model: ModelKeys, network: dict[str, Any]) -> None:
    """Compare the configured network with the headers of a diffusers folder before weights load."""
    if args.load is None or find_diffusers_folder(Path(args.load)) is None:
        return
    try:
        source = open_source(Path(args.load))
        if not source.is_partial:
            configured = TransformerConfig(**network)
            found = identify(source, configured.out_channels)
            family = Family.of_config(found)
            has_new = model.new_channels is not None
            if has_new and found.in_channels >= configured.in_channels:
                text = f"the weights have {found.in_channels} input channels, the network {configured.in_channels}: "
                text += f"model.new_channels=zero has none to add; raise {NETWORK_KEY}.in_channels, or leave it out"
                raise ValueError(text)
            fit = fitted(source, configured, has_new, model.learned_positions)
            found = identify(fit, configured.out_channels)
            check_family(f"args.load={args.load}", Family.of_config(found), configured)
            check_depth_and_width(f"args.load={args.load}", source.shapes, configured)
            check_stated(model, Path(args.load), family)
    except ValueError as error:
        raise args.problem("load", str(error)) from None


def _check_steps(args: TrainKeys) -> None:
    if args.train_iters is not None and args.epochs is not None:
        text = f"args.train_iters={args.train_iters} and args.epochs={args.epochs} are both set"
        raise args.problem("epochs", f"{text}; set one of them to null")
    # With export=all every checkpoint has the files, and with none no checkpoint has.
    interval = args.export_interval
    if interval is not None and args.export != "last":
        text = (
            f" adds to args.export=last, but args.export={args.export}; set args.export=last, or "
        )
        raise args.refusal("export_interval", f"{text}args.export_interval=null")
    if interval is not None and (not args.save_interval or interval % args.save_interval):
        text = f" must be a multiple of args.save_interval={show(args.save_interval)}: files are written"
        raise args.refusal("export_interval", f"{text} into checkpoints; change one of them")
    if args.train_iters is not None and (args.profiling or 0) >= args.train_iters:
        text = f" must be below args.train_iters={args.train_iters}, where the run ends; use an earlier step"
        raise args.refusal("profiling", text)
    # The first share must be above 0: something must be left to train on.
    if not re.fullmatch(r"[\d.]*[1-9][\d.]*(,[\d.]+){0,2}", args.split):
        text = f"args.split={args.split!r} must be the shares of training, validation and test data, such"
        raise args.problem("split", f"{text} as 9,1,0")
    key, weights = args.key("train_data_weights"), args.train_data_weights
    if weights is None:
        return
    if len(weights) != len(args.train_data):
        text = f"{key}={weights} must have as many entries as args.train_data,"
        raise KeyProblem(key, f"{text} {len(args.train_data)}; give one weight for each source")
    if not any(weights):
        text = f"{key}={weights}: at least one must be above 0; a source of weight 1 is read once"
        raise KeyProblem(key, f"{text} per epoch")


def _check_precision(args: TrainKeys) -> None:
    if args.bf16 and args.fp16:
        text = "args.bf16 and args.fp16 are both true; set one of them to false"
        raise args.problem("fp16", text)
    if args.fp16 and not torch.cuda.is_available():
        raise args.refusal("fp16", " needs a GPU; on a CPU use args.bf16=true or neither")


def _check_network(target: str, fields: Mapping[str, Any], allow_import: Sequence[str]) -> None:
    network_class(target, allow_import)
    given, made = fields["in_channels"], fields["out_channels"]
    if given % made > 1 or given < made:  # one channel of a mask
        key = f"{NETWORK_KEY}.in_channels"
        rule = f"must equal out_channels={made}, or have those of model.conditions, too"
        texts = f"{key}={given} {rule}", derived_models(given, made)
        raise KeyProblem(key, "; ".join(filter(None, texts)))


def _check_data(
    args: TrainKeys,
    model: ModelKeys,
    data: Component | None,
    frozen: FrozenParts,
    network: dict[str, Any],
) -> None:
    check_conditions(model, network)
    if args.latent_cache is None:
        for name in ("encode_first", "cached_noised_images"):
            if getattr(args, name):
                text = " applies to a latent cache, but args.latent_cache is not set; set that to a folder"
                raise args.refusal(name, f"{text}: args.latent_cache=PATH")
    elif "masked_video" in model.inputs:
        text = " holds no masked videos: masks are drawn in each step; set args.latent_cache=null"
        raise args.refusal("latent_cache", text)
    if args.cached_noised_images and "image" not in model.inputs:
        text = " applies to image-to-video, but the model takes no image; set it to 0"
        raise args.refusal("cached_noised_images", text)
    if data is not None and video_data(data) is not None:
        _check_pixel_data(args, model, data, network)
        check_frozen_parts(frozen, network["text_length"])
    elif args.latent_cache is not None:
        text = f" does not work with {data and data.target}: the cache replaces video files; use a data set of "
        raise args.refusal("latent_cache", f"{text}video files, or set args.latent_cache=null")


def _check_pixel_data(
    args: TrainKeys, model: ModelKeys, data: Component, network: dict[str, Any]
) -> None:
    """Check what training on video files needs: sizes and frame counts."""
    params = data.arguments
    if model.latent_input:
        text = f", but {data.target} returns pixels; set it to false"
        raise model.refusal("latent_input", text)
    if not args.train_data:
        text = "args.train_data is empty; set it to the folders of the training videos"
        raise args.problem("train_data", text)
    # A user's own data set may have constants in place of these params.
    if "max_num_frames" in params:
        check_frames(network, params["max_num_frames"], data_param("max_num_frames"))
    if "video_size" in params:
        size = checked_size(params["video_size"])
        check_size(network, *size, key=data_param("video_size"))
    buckets = checked_buckets(params.get("buckets")) or ()
    checked_batches(params.get("bucket_batch"), buckets)
    check_prefixes(model, params.get("max_num_frames"), buckets)
    for i, bucket in enumerate(buckets):
        key = f"data.params.buckets[{i}]"
        check_frames(network, bucket.num_frames, key)
        check_size(network, bucket.height, bucket.width, key=key)
