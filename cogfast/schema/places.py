"""Lists the classes that a `target` may name at each place of a configuration.

A place is the last part of a component's key without `_config`: model.denoiser_config is a
`denoiser`, and scaling_config in its params is a `scaling`. SAT's class paths (TARGETS in
sat_classes.py) are also accepted. Any other class must be defined in a package that --allow-import
names on the same command line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cogfast.schema.sat_classes import TARGETS
from cogfast.schema.values import nearest

NONE = "torch.nn.Identity"  # upstream's files use it for a component that is left out


@dataclass(frozen=True, slots=True)
class Place:
    """what: name in messages. names: classes in `module`. others: further dotted paths."""

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
        ("NoDynamicThresholding", "StaticThresholding"),
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


def is_none(node: Mapping | None) -> bool:
    """Return whether a component is left out of the configuration."""
    return node is None or node["target"] == NONE


def place_of(key: str) -> str:
    """Return the place of a component by its dotted key: `emb_models` for `a.emb_models[0]`."""
    return re.sub(r"\[\d+\]$", "", key).rpartition(".")[2].removesuffix("_config")


def allowed_path(path: str, place: str) -> str | None:
    """Return cogfast's class path for a target that its place lists, else None.

    place: "" searches all places.
    """
    found = TARGETS[path].path if path in TARGETS else path
    places = [PLACES[place]] if place in PLACES else [] if place else PLACES.values()
    return found if any(found in one.paths for one in places) else None


def describe_place(path: str, place: str) -> str:
    """Describe what a place allows, for the error about `path`: the most similar name, or all."""
    if place and place not in PLACES:
        return f"cogfast has no class for {place}"
    known = PLACES[place].paths if place else [p for one in PLACES.values() for p in one.paths]
    names = {*known, *(name for name, sat in TARGETS.items() if sat.path in known)}
    hint = nearest(path, names).removeprefix("; ")
    if not place:
        return hint or "it is not listed in cogfast/schema/places.py"
    one = PLACES[place]
    listed = " or ".join((f"{', '.join(one.names)} of {one.module}", *one.others))
    return f"unknown {one.what}; {hint or f'use {listed}'}"
