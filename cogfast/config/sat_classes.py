"""Maps SAT's class paths and keys to cogfast's.

TARGETS maps class paths; other classes are refused (components.py). KEYS (sat_unused.py) lists keys that are not read. Source: CogVideo's sat/ folder
(tag v1.0 and main) and SwissArmyTransformer's sat/arguments.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cogfast.config.sat_network import autoencoder_arguments, transformer_arguments
from cogfast.config.sat_unused import NETWORKS, why_unused
from cogfast.core.values import KeyProblem, join, show

_DIFFUSION = "sgm.modules.diffusionmodules"
# Module below _DIFFUSION -> cogfast's module, and the classes that both have with the same params
_SAME = {
    "denoiser_scaling": ("denoiser", "VideoScaling"),
    "discretizer": ("noise_schedule", "ZeroSNRDDPMDiscretization"),
    "sampling": ("sampler", "VPSDEDPMPP2MSampler VPODEDPMPP2MSampler VideoDDIMSampler"),
    "guiders": ("guidance", "VanillaCFG DynamicCFG IdentityGuider"),
    "sampling_utils": ("guidance", "NoDynamicThresholding StaticThresholding"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SatClass:
    """How a class of SAT translates to cogfast.

    path: cogfast's class. only: params with one legal value. defaults: SAT's defaults where they
    differ from cogfast's. arguments: translates the params where their nesting differs; called with
    (params, dotted key of params, dict that receives unused keys and reasons).
    """

    path: str
    only: Mapping[str, object] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    arguments: Callable[[Mapping, str, dict], dict] | None = None

    def translate(
        self, params: Mapping, where: str, sat_path: str, unused: dict[str, str]
    ) -> dict[str, object]:
        """Return the params of cogfast's constructor. A key may still be `foo_config` for `foo`."""
        if self.arguments:
            return self.arguments(params, where, unused)
        class_name, kept = sat_path.rpartition(".")[2], dict(self.defaults)
        for name, value in params.items():
            key = join(where, name)
            if name in self.only:
                only = self.only[name]
                if value != only:
                    text = f"{key}={show(value)}: only {show(only)} is supported; use it"
                    raise KeyProblem(key, text)
            elif why := why_unused(f"{class_name}.{name}"):
                unused[key] = why
            else:
                kept[name] = value
        return kept


_TABLE = {"do_append_zero": False, "flip": True}  # the table that idx indexes
_DENOISER = SatClass(
    path="cogfast.diffusion.denoiser.DiscreteDenoiser", only={**_TABLE, "quantize_c_noise": False}
)
_AUTOENCODER = SatClass(
    path="cogfast.model.autoencoder.video_autoencoder_from_sat", arguments=autoencoder_arguments
)
_FUSED_EMA_ADAM = SatClass(path="cogfast.kernels.fused_ema_adam.FusedEmaAdam")

# SAT's data params -> cogfast's
_RENAMED = {"image_size": "video_size", "num_frames": "max_num_frames", "txt_key": "caption_key"}
# Params of SAT's streaming data set that have no effect when samples are read by index.
_STREAM_ONLY = {
    "seed": "args.seed sets the order",
    "shuffle_buffer": "the whole data set is shuffled, by index",
    "nshards": "an epoch reads every sample",
    "meta_names": "captions are looked for in every .meta.jsonl",
}


def _shard_arguments(
    params: Mapping[str, object], where: str, unused: dict[str, str]
) -> dict[str, object]:
    """Translate the params of SAT's VideoDataset, which streams shards; cogfast reads them by index."""
    kept: dict[str, object] = {}
    for name, value in params.items():
        key, own = join(where, name), _RENAMED.get(name, name)
        if name in ("path", "include_dirs"):
            text = f"{key}={show(value)}: args.train_data lists the shards; move it there"
            raise KeyProblem(key, text)
        if name in _STREAM_ONLY:
            unused[key] = _STREAM_ONLY[name]
        elif own in kept:
            raise KeyProblem(key, f"{key}: {own} means the same; remove one of them")
        else:
            kept[own] = value
    return kept


TARGETS: dict[str, SatClass] = {
    **dict.fromkeys(
        NETWORKS,
        SatClass(
            path="cogfast.model.transformer.assemble_transformer",
            # components.py converts the fields to a TransformerConfig.
            arguments=lambda *given: {"config": transformer_arguments(*given)},
        ),
    ),
    f"{_DIFFUSION}.denoiser.DiscreteDenoiser": _DENOISER,
    "cogfast.diffusion.denoiser.DiscreteDenoiser": _DENOISER,
    f"{_DIFFUSION}.sigma_sampling.DiscreteSampling": SatClass(
        path="cogfast.diffusion.timestep_sampling.DiscreteSampling", only=_TABLE
    ),
    f"{_DIFFUSION}.loss.VideoDiffusionLoss": SatClass(
        path="cogfast.diffusion.loss.VideoDiffusionLoss",
        only={"block_scale": None, "block_size": None},
    ),
    **{
        f"{_DIFFUSION}.{module}.{name}": SatClass(path=f"cogfast.diffusion.{own}.{name}")
        for module, (own, names) in _SAME.items()
        for name in names.split()
    },
    "vae_modules.autoencoder.VideoAutoencoderInferenceWrapper": _AUTOENCODER,
    "vae_modules.autoencoder.VideoAutoencodingEngine": _AUTOENCODER,
    "sgm.models.autoencoder.VideoAutoencoderInferenceWrapper": _AUTOENCODER,
    "sgm.models.autoencoder.VideoAutoencodingEngine": _AUTOENCODER,
    "cogfast.model.autoencoder.video_autoencoder_from_sat": _AUTOENCODER,
    "sgm.modules.encoders.modules.FrozenT5Embedder": SatClass(
        path="cogfast.model.text_encoder.T5TextEncoder", only={"freeze": True}
    ),
    "data_video.SFTDataset": SatClass(
        path="cogfast.data.datasets.VideoFolder", defaults={"skip_frms_num": 3}
    ),
    "data_video.VideoDataset": SatClass(
        path="cogfast.data.datasets.VideoShards", arguments=_shard_arguments
    ),
    "sat.ops.FusedEmaAdam": _FUSED_EMA_ADAM,
    "sat.ops.fused_ema_adam.FusedEmaAdam": _FUSED_EMA_ADAM,
}
