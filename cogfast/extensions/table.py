"""The one list of extensions. The core imports this file, and no other of this folder.

An extension is a folder that the core runs without: delete it with its row of TABLE and its keys below. What it
does goes through seams, by name; the core calls what `hooks` or `hook` returns there, and names no extension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from cogfast.extensions.cache.keys import CacheKeys
from cogfast.extensions.elastic.keys import ElasticKeys
from cogfast.extensions.exports.keys import ExportKeys
from cogfast.extensions.memory.keys import MemoryKeys
from cogfast.extensions.plan.keys import FitKeys
from cogfast.extensions.publish.keys import PublishKeys
from cogfast.extensions.sample.keys import EvaluationKeys, SamplingKeys
from cogfast.extensions.scores.keys import ScoreKeys
from cogfast.extensions.sparse.keys import SparseKeys
from cogfast.extensions.stores.keys import StoreKeys


class ExtensionKeys(
    ExportKeys,
    PublishKeys,
    CacheKeys,
    StoreKeys,
    ElasticKeys,
    SparseKeys,
    FitKeys,
    MemoryKeys,
    EvaluationKeys,
    ScoreKeys,
    SamplingKeys,
):
    """Keys of the section `args` that extensions declare."""


@dataclass(frozen=True, slots=True)
class Extension:
    """A row of TABLE.

    folder: below cogfast/extensions. switch: what turns it on, as a user writes it. uses: {seam: "module:name"}
    in the folder. is_on: whether these keys of `args` turn it on. is_extra: it only shows more of a run, so that a
    run without its files trains all the same.
    """

    folder: str
    switch: str
    uses: Mapping[str, str] = field(default_factory=dict)
    is_on: Callable[[Any], bool] = lambda args: True
    is_extra: bool = False

    def load(self, seam: str) -> Any:
        """Import what the extension has for a seam."""
        module, _, name = self.uses[seam].partition(":")
        try:
            return getattr(import_module(f"cogfast.extensions.{self.folder}.{module}"), name)
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("cogfast.extensions."):
                raise
            text = f"{self.switch} needs cogfast/extensions/{self.folder}, which is not installed"
            raise MissingExtension(f"{text}; install cogfast again, or leave it out") from None


class MissingExtension(ValueError):
    """A configuration turns on an extension whose files are missing."""


# In the order in which their hooks of one seam are called.
TABLE: tuple[Extension, ...] = (
    Extension(
        "sparse",
        "args.attention=sparse:SHARE",
        {
            "check_attention": "check:check_sparse",
            "attention": "check:use_attention",
            "sparse_attention": "attention:SparseAttention",
            "watch": "check:watch_warmup",
        },
        # None: of a transformer's own share
        lambda args: args is None or args.sparse_share is not None or args.sparse_warmup > 0,
    ),
    Extension(
        "elastic",
        ElasticKeys.key("elastic"),
        {"follow_world": "elastic:follow_world", "fall_back": "elastic:fall_back"},
        lambda args: args.elastic != "off",
    ),
    Extension(
        "exports",
        ExportKeys.key("export"),
        {"export": "export:Exporter"},
        lambda args: args.export != "none",
    ),
    Extension(
        "scores",
        ScoreKeys.key("eval_command"),
        {"check_evaluation": "scores:check_scores", "watch": "scores:Scores"},
        lambda args: args.eval_command is not None or args.keep_best is not None,
    ),
    Extension(
        "publish",
        PublishKeys.key("push_to_hub"),
        {"warn": "publish:warn_of_missing_token", "watch": "publish:Push"},
        lambda args: args.push_to_hub is not None,
    ),
    Extension("page", "index.html of a run", {"watch": "watch:RunPage"}, is_extra=True),
    Extension(
        "cache",
        CacheKeys.key("encode_first"),
        {"before_data": "command:encode_first"},
        lambda args: args.encode_first,
    ),
    Extension(
        "cache",
        CacheKeys.key("latent_cache"),
        {"read_data": "cached_data:read_from_cache"},
        lambda args: args.latent_cache is not None,
    ),
    # (sections, origins, may_download, is_of_run) -> Settings that weights from elsewhere decide
    Extension(
        "pipeline_folder",
        "a pipeline's folder or hub id",
        {"fill": "pipeline_folder:fill_from_pipeline"},
    ),
    Extension(
        "wavelet",
        "cogfast.model.wavelet_autoencoder.WaveletAutoencoder",
        {"first_stage": "wavelet_autoencoder:WaveletAutoencoder"},
    ),
    Extension(
        "memory",
        MemoryKeys.key("quantize_base") + " or offload_blocks",
        {"model_change": "host_blocks:hold_base", "allocate_held": "host_blocks:allocate_base"},
        lambda args: args.quantize_base != "none" or args.offload_blocks > 0,
    ),
    Extension("memory", "8-bit moments", {"coded_moment": "moment_codes:coded_moment"}),
    Extension(
        "memory",
        MemoryKeys.key("optimizer_moments") + " or ema_device",
        {"optimizer_state": "host_ema:keep_state"},
        lambda args: args.optimizer_moments == "8bit" or args.ema_device == "cpu",
    ),
    Extension(
        "stores",
        "an address in args.save, args.run_folder or args.resume",
        {
            "stored_checkpoints": "stored_folder:StoredFolder",
            "download_checkpoint": "stored_folder:download_checkpoint",
        },
    ),
    Extension("formats", "an image-to-video model", {"image_scale": "image_scale:warn_of_scale"}),
    Extension(
        "sample",
        EvaluationKeys.key("eval_interval"),
        {"check_evaluation": "check:check_evaluation", "evaluate": "evaluate:Evaluator"},
        lambda args: args.has_evaluation,
    ),
    Extension(
        "sample", "cogfast sample", {"next_commands": "next_commands:log_commands"}, is_extra=True
    ),
    Extension(
        "prodigy_muon",
        "cogfast.distributed.optimizers.Prodigy",
        {"optimizer": "optimizers:Prodigy"},
    ),
    Extension(
        "prodigy_muon",
        "cogfast.distributed.optimizers.Muon",
        {"optimizer": "optimizers:Muon"},
    ),
    Extension(
        "dali",
        "data.params.video_backend=dali",
        {"video_reader": "dali:DaliReader"},
        is_extra=True,  # auto does without it
    ),
    Extension(
        "tar",
        "data.target=cogfast.data.datasets.VideoShards",
        {"missing_shard": "tar_shards:missing_source", "list_shards": "tar_shards:list_source"},
    ),
    Extension(
        "memory",
        MemoryKeys.key("offload_activations"),
        {"offload_activations": "offloaded_activations:offload_activations"},
        lambda args: args.offload_activations,
    ),
    Extension("plan", FitKeys.key("fit"), {"fit": "ladder:fit"}, lambda args: args.fit == "auto"),
    Extension(
        "plan",
        "the prediction of memory and time",
        {
            "policies": "out_of_memory:choose",
            "watch_memory": "out_of_memory:MemoryWatch",
            "out_of_memory": "out_of_memory:explain",
            "peak_flops": "gpus:peak_flops",
            "without_flash_attention": "gpus:without_flash_attention",
        },
        is_extra=True,
    ),
    Extension(
        "plan",
        "cogfast plan",
        {
            "describe_plan": "command:describe_plan",
            "find_layouts": "command:find_layouts",
            "describe_table": "command:describe_table",
        },
    ),
)


def component_rows(place: str) -> dict[str, Extension]:
    """Return {public name of a class: its row} of the classes that extensions add to a place of components."""
    return {row.switch: row for row in TABLE if place in row.uses}


def hooks(seam: str, args: Any = None) -> list[Any]:
    """Return what the extensions that `args` turns on have for a seam.

    args: keys of the section `args`, for rows that ask them.
    """
    found = []
    for row in TABLE:
        if seam in row.uses and row.is_on(args):
            try:
                found.append(row.load(seam))
            except MissingExtension:
                if not row.is_extra:
                    raise
    return found


def hook(seam: str, args: Any = None) -> Any:
    """Return the one thing that extensions have for a seam; None if no extension that is on has it."""
    return next(iter(hooks(seam, args)), None)
