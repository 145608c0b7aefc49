"""Which classes a `target` may name, by the place where it stands. The lists are complete.

A place is the last part of a component's key without `_config`: model.denoiser_config is a
`denoiser`, and scaling_config in its params a `scaling`. SAT's class paths (sat_names.TARGETS) may
stand for ours. Any other class must be defined in a package that --allow-import names on the
command line of the same call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cogfast.schema.sat_classes import TARGETS
from cogfast.schema.values import nearest

NONE = "torch.nn.Identity"  # a part that is left out, in upstream's files


@dataclass(frozen=True, slots=True)
class Place:
    """what: its name in messages; module: where its `names` are; others: dotted paths besides."""

    what: str
    module: str
    names: tuple[str, ...]
    others: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        return (*(f"{self.module}.{name}" for name in self.names), *self.others)


PLACES: dict[str, Place] = {
    "network": Place("network", "cogfast.model.transformer", ("assemble_transformer",)),
    "denoiser": Place("denoiser", "cogfast.diffusion.denoiser", ("DiscreteDenoiser",)),
    "scaling": Place("scaling", "cogfast.diffusion.denoiser", ("VideoScaling",)),
    "discretization": Place(
        "discretization", "cogfast.diffusion.noise_schedule", ("ZeroSNRDDPMDiscretization",)
    ),
    "loss_fn": Place("loss", "cogfast.diffusion.loss", ("VideoDiffusionLoss",), (NONE,)),
    "sigma_sampler": Place(
        "sigma sampler", "cogfast.diffusion.timestep_sampling", ("DiscreteSampling",)
    ),
    "sampler": Place(
        "sampler",
        "cogfast.diffusion.sampler",
        ("VPSDEDPMPP2MSampler", "VPODEDPMPP2MSampler", "VideoDDIMSampler"),
        (NONE,),
    ),
    "guider": Place(
        "guider", "cogfast.diffusion.guidance", ("VanillaCFG", "DynamicCFG", "IdentityGuider")
    ),
    "dyn_thresh": Place(
        "thresholding",
        "cogfast.diffusion.guidance",
        (
            "NoDynamicThresholding",
            "StaticThresholding",
            "DynamicThresholding",
            "DynamicThresholdingV1",
            "DynamicThresholdingV2",
        ),
    ),
    "first_stage": Place(
        "first stage",
        "cogfast.model.autoencoder",
        ("VideoAutoencoder", "video_autoencoder_from_sat"),
        ("cogfast.model.wavelet_autoencoder.WaveletAutoencoder", NONE),
    ),
    "emb_models": Place(
        "text encoder", "cogfast.model.text_encoder", ("T5TextEncoder", "ByteTextEncoder"), (NONE,)
    ),
    "data": Place(
        "data set",
        "cogfast.data.datasets",
        ("VideoFolder", "VideoManifest", "VideoList", "VideoShards"),
    ),
    "optimizer": Place(
        "optimizer",
        "torch.optim",
        (
            "AdamW",
            "Adam",
            "Adafactor",
            "Adagrad",
            "Adadelta",
            "Adamax",
            "ASGD",
            "NAdam",
            "RAdam",
            "RMSprop",
            "Rprop",
            "SGD",
        ),
        ("cogfast.kernels.fused_ema_adam.FusedEmaAdam",),
    ),
}


def place_of(key: str) -> str:
    """The place of a component with that dotted key: `a.emb_models[0]` is in emb_models."""
    return re.sub(r"\[\d+\]$", "", key).rpartition(".")[2].removesuffix("_config")


def our_path(path: str, place: str) -> str | None:
    """Our class path for a target, where its place lists it; place "": any place."""
    ours = TARGETS[path].path if path in TARGETS else path
    places = [PLACES[place]] if place in PLACES else [] if place else PLACES.values()
    return ours if any(ours in one.paths for one in places) else None


def describe_place(path: str, place: str) -> str:
    """What may stand at a place, for the error about `path`: the nearest name, or all of them."""
    if place and place not in PLACES:
        return f"no class of cogfast goes to {place}"
    known = PLACES[place].paths if place else [p for one in PLACES.values() for p in one.paths]
    names = {*known, *(sat for sat, ours in TARGETS.items() if ours.path in known)}
    hint = nearest(path, names).removeprefix("; ")
    if not place:
        return hint or "it is in no list of cogfast/schema/places.py"
    one = PLACES[place]
    listed = " or ".join((f"{', '.join(one.names)} of {one.module}", *one.others))
    return f"no {one.what}; {hint or f'use {listed}'}"
