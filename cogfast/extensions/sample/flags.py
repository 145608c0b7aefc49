"""The options of `cogfast sample` whose keys depend on the configuration, such as --steps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cogfast.config.sat_unused import NETWORKS, SAMPLER
from cogfast.core.component import Component, is_none
from cogfast.core.keys import COMMAND_LINE, Settings
from cogfast.core.values import show
from cogfast.extensions.sample.keys import SamplingKeys
from cogfast.train.keys import TrainKeys

_GUIDERS = "cogfast.diffusion.guidance"
_SAMPLER = f"{SAMPLER}.params"

# {option that gives a model its conditions: (what it is, what its value stands for)}
INPUTS = {
    "image": ("first frame for an image-to-video model", "IMAGE.png"),
    "control": ("control video, for a control model", "CONTROL.mp4"),
    "first-frame": ("first frame, for a model of given frames or of inpainting", "FIRST.png"),
    "last-frame": ("last frame, for such a model", "LAST.png"),
    "video": ("video of the given first frames, or to inpaint", "VIDEO.mp4"),
    "mask": ("video or picture that is white where --video is to be made", "MASK.png"),
}


def sampled_tensors(network: str, data: Mapping[str, Any]) -> Mapping[str, Sequence[int]]:
    """Return {name: shape} of data.params.tensors that each sampled video needs: all for a network of the
    user's, none for cogfast's own, which reads none. network: the name of its class."""
    return {} if network in NETWORKS else data.get("tensors") or {}


def input_words(conditions: Sequence[str], given_frames: object) -> str:
    """Return the options of `cogfast sample` that a model's conditions need, as words behind others."""
    names = [name for name in ("image", "control") if name in conditions]
    if "frames" in conditions:
        ends = {"first": ["first-frame"], "last": ["last-frame"]}
        is_clip = str(given_frames).startswith(("prefix", "all"))
        both = ["first-frame", "last-frame"]
        names += ["video"] if is_clip else ends.get(str(given_frames), both)
    if "masked_video" in conditions:
        names += ["video", "mask"]
    return "".join(f" --{name} {INPUTS[name][1]}" for name in dict.fromkeys(names))


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingFlags:
    """The values of the options that were given; None: not given."""

    steps: int | None = None
    guidance: float | None = None
    frames: int | None = None  # of the video, not of its latents
    num_videos: int | None = None  # per prompt
    size: tuple[int, int] | None = None  # rows, columns
    fps: int | None = None  # of the files

    def settings(self, sections: Mapping[str, Any], origins: Mapping[str, str]) -> Settings:
        """Return the settings that the options stand for, with the options as their origins.

        sections: plain, complete and checked: guidance and frames depend on the sampler and on the model.
        """
        from cogfast.config.sat_network import transformer_arguments
        from cogfast.core.shapes import num_latent_frames
        from cogfast.train.video_size import frames_problem, size_problem

        model, found = sections["model"], {}

        def put(key: str, value: object, flag: str) -> None:
            # Two words of one command line that disagree are a mistake.
            if origins.get(key) == COMMAND_LINE:
                raise ValueError(f"{flag} and {key} on the command line set the same; keep one")
            found[key] = value, flag

        if self.steps is not None:
            sampler = _params(model, f"--steps {self.steps}")
            before, guider = sampler.get("num_steps"), sampler.get("guider_config") or {}
            put(f"{_SAMPLER}.num_steps", self.steps, "--steps")
            own = guider.get("params") or {}
            # A guider with another number of steps keeps it: it was set on its own.
            if "num_steps" in own and own["num_steps"] == before:
                put(f"{_SAMPLER}.guider_config.params.num_steps", self.steps, "--steps")
        if self.guidance is not None:
            sampler = _params(model, f"--guidance {self.guidance:g}")
            # Either the whole guider is replaced, or the scale in its params.
            put(*self._guider(sampler.get("guider_config")), "--guidance")
        if self.frames is not None:
            network = transformer_arguments(model["network_config"]["params"])
            if (problem := frames_problem(network, self.frames, "--frames")) is not None:
                raise ValueError(problem)
            latent_frames = num_latent_frames(self.frames)
            # CogVideoX 1.5 pads the latent frames.
            latent_frames += -latent_frames % network["patch_size"].t
            put(SamplingKeys.key("sampling_num_frames"), latent_frames, "--frames")
        if self.num_videos is not None:
            # With this mode, as in SAT's inference.yaml, batch_size is the number of videos per
            # prompt. The settings of a model folder have it already.
            if sections["args"]["mode"] != "inference":
                put(TrainKeys.key("mode"), "inference", "--num-videos")
            put(TrainKeys.key("batch_size"), self.num_videos, "--num-videos")
        if self.size is not None:
            network = transformer_arguments(model["network_config"]["params"])
            if (problem := size_problem(network, *self.size, "--size")) is not None:
                raise ValueError(re.sub(r"\[(\d+), (\d+)\]", r"\1x\2", problem))
            put(SamplingKeys.key("sampling_image_size"), [*self.size], "--size")
        if self.fps is not None:
            put(SamplingKeys.key("sampling_fps"), self.fps, "--fps")
        return found

    def _guider(self, node: Mapping[str, Any] | None) -> tuple[str, object]:
        """Return the key that --guidance sets, and its value. node: the configured guider."""
        key, scale = f"{_SAMPLER}.guider_config", self.guidance
        if scale == 1:
            # The conditional estimate alone, at half the cost.
            return key, {"target": f"{_GUIDERS}.IdentityGuider"}
        if node is None or node["target"].endswith(".IdentityGuider"):
            return key, {"target": f"{_GUIDERS}.VanillaCFG", "params": {"scale": scale}}
        if "scale" not in (node.get("params") or {}):
            text = f"--guidance {scale:g}: {node['target']} has no param scale; set its params as key=value"
            raise ValueError(text)
        return f"{key}.params.scale", scale


def _params(model: dict[str, Any], flag: str) -> dict[str, Any]:
    node = model.get("sampler_config")
    if node is None or is_none(node):
        raise ValueError(f"{flag}: model.sampler_config is missing; sampling needs one")
    return node.get("params") or {}


def check_negative_prompt(prompt: str | None, sampler: Component) -> None:
    """Raise ValueError if args.negative_prompt is set and the sampler has no guidance to use it."""
    guider = sampler.params.get("guider_config")
    if prompt is None or (guider and not guider["target"].endswith(".IdentityGuider")):
        return
    text = f"args.negative_prompt={show(prompt)} is the text of guidance's unconditional half"
    raise ValueError(f"{text}, but there is no guidance; give --guidance 6, or leave it out")
