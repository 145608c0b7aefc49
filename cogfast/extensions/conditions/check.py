"""Checks that the conditions of a configuration, its network and its weights fit each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cogfast.config.sat_network import NETWORK_KEY, POSITION_KEY
from cogfast.core.json_files import read_json
from cogfast.core.values import KeyProblem, show
from cogfast.data.keys import data_param
from cogfast.data.video.clip import Bucket
from cogfast.extensions.conditions.given_frames import KINDS, GivenFrames
from cogfast.model.config import Family, derived_models, inpainting_channels, num_condition_channels
from cogfast.model.keys import ModelKeys
from cogfast.model.weights.diffusers import NOISE_KEY
from cogfast.model.weights.names import sat_name

_KEYS = ("conditions", "noised_image_input", "given_frames", "masked_video_noise")
_CONDITIONS, _IMAGE, _GIVEN, _NOISE = map(ModelKeys.key, _KEYS)
_MOST_FRAMES = data_param("max_num_frames")
_INPAINTING = ("mask", "masked_video")
# Classes in model_index.json that tell which conditions a model has
_STATED = {
    "CogVideoXFunControlPipeline": ("control",),
    "CogVideoXImageToVideoPipeline": ("image",),
    "CogVideoXFunInpaintPipeline": _INPAINTING,
    "CogVideoXInterpolationPipeline": ("frames",),  # CogVideoX-Interpolation's
}
# The inputs that options of `cogfast sample` give
_NAMES = {
    "image": "an image",
    "control": "a control video",
    "first_frame": "a first frame",
    "last_frame": "a last frame",
    "video": "a video",
    "mask": "a mask",
}
_ENDS = ["first_frame", "last_frame"]
# Models with each condition, and the option of `cogfast sample` that gives it
_SAMPLED = {
    "image": ("an image-to-video model", "--image PNG or prompts as prompt@@image"),
    "control": ("a control model", "--control VIDEO"),
}


def _list(inputs: Sequence[str]) -> str:
    return ", ".join(inputs) or "none"


def check_conditions(model: ModelKeys, network: dict[str, Any]) -> None:
    """Check that model.conditions, noised_image_input and the network's channels fit each other."""
    inputs, key = model.inputs, _CONDITIONS
    given, made = network["in_channels"], network["out_channels"]
    shown = f"{key}={show(model.conditions)}"
    if len(set(inputs)) < len(inputs):
        raise KeyProblem(key, f"{shown} lists a condition twice; remove one")
    if model.noised_image_input and "image" not in inputs:
        text = f"{shown} has no image, but model.noised_image_input=true asks for one"
        raise KeyProblem(key, f"{text}; set that to false, or add image")
    if model.image_latent_scale != "trainer" and not {"image", "frames"} & set(inputs):
        text = f"{model.image_latent_scale} is a scale of image-to-video models; leave the key out"
        raise model.problem("image_latent_scale", f"model.image_latent_scale={text}")
    if model.conditions is not None and "image" not in inputs:
        for name in ("noised_image_dropout", "noised_image_all_concat"):
            if value := getattr(model, name):
                text = f"model.{name}={show(value)} is for the image, which {shown} leaves out"
                raise model.problem(name, f"{text}; leave it out")
    if model.condition_dropout > 0 and not set(inputs) - {"image"}:
        text = f"model.condition_dropout={model.condition_dropout:g}, but the conditions are"
        fix = "leave it out (noised_image_dropout is that of the image)"
        raise model.problem("condition_dropout", f"{text} {_list(inputs)}; {fix}")
    if model.new_channels is not None and not _trains_patches(model):
        key, shown_new = model.key("new_channels"), f"model.new_channels={model.new_channels}"
        text = f"{shown_new}: the run does not train the patch embedding, whose new channels would stay zero; "
        text += "train all weights or add patch_embedding to model.trainable_modules, or start from a model "
        raise KeyProblem(key, f"{text}that has the channels")
    if model.learned_positions == "drop" and network.get("learnable_position"):
        key, flag = model.key("learned_positions"), f"{POSITION_KEY}.learnable_pos_embed"
        text = f"{key}=drop leaves out the learned position table of args.load, but the network has one"
        raise KeyProblem(key, f"{text}; set {flag}=false, or {key}=resize")
    _check_frames_and_masks(model)
    if given == (needed := made + num_condition_channels(inputs, made)):
        return
    sizes = f"in_channels={given} and out_channels={made}"
    if model.conditions is not None:
        fix = f"set {NETWORK_KEY}.in_channels={needed}, or the conditions that the model has"
        text = f"{shown} needs {needed} input channels, but the network has {sizes}; {fix}"
        raise KeyProblem(key, text)
    key = _IMAGE
    text = f"{key}={show(model.noised_image_input)} does not fit {sizes}"
    if given == made:
        fix = f"set {key}=false, or use the file of an image-to-video model"
    elif given == 2 * made:
        text += ": the other half of the channels is a first frame, a control video or given frames"
        fix = f"set {key}=true, or model.conditions=[control], or [frames]"
    else:
        text, fix = f"{sizes}: the model has conditions", "name them in model.conditions"
        text += f" ({derived_models(given, made)})" if derived_models(given, made) else ""
    raise KeyProblem(key, f"{text}; {fix}")


def _check_frames_and_masks(model: ModelKeys) -> None:
    inputs, shown = model.inputs, f"model.conditions={show(model.conditions)}"
    found = [inputs.index(name) for name in _INPAINTING if name in inputs]
    if found and (len(found) < 2 or found[1] != found[0] + 1):
        text = f"{shown}: mask and masked_video are the inputs of inpainting models, in this order"
        raise KeyProblem(_CONDITIONS, f"{text}; name both, mask, masked_video")
    if model.masked_video_noise and not found:
        raise KeyProblem(_NOISE, f"{_NOISE}=true is for masked_video; leave it out")
    key, value = _GIVEN, model.given_frames
    if (value is None) == ("frames" in inputs):
        text = f"{key}={show(value)}, but the conditions are {_list(inputs)}"
        fix = "leave it out" if value is not None else f"set it to one of {', '.join(KINDS)}"
        raise KeyProblem(key, f"{text}; {fix}")
    if value is not None:
        try:
            GivenFrames.parse(value)
        except ValueError as error:
            raise KeyProblem(key, f"{key}={show(value)}: {error}") from None


def check_prefixes(model: ModelKeys, num_frames: int | None, buckets: Sequence[Bucket]) -> None:
    """Check that clips have more frames than their given prefix. num_frames: data.params.max_num_frames."""
    key, given = _GIVEN, GivenFrames.parse(model.given_frames)
    frames = {f"data.params.buckets[{i}]": bucket.num_frames for i, bucket in enumerate(buckets)}
    if num_frames is not None:
        frames[_MOST_FRAMES] = num_frames
    for place, number in frames.items():
        # Pictures are given no frames.
        if given is not None and 1 < number <= given.number:
            text = f"{key}={model.given_frames} is the whole clip of {place}={number}"
            raise KeyProblem(key, f"{text}; give fewer frames")


def check_given(model: ModelKeys, given: Sequence[str]) -> None:
    """Raise ValueError if prompts of `cogfast sample` lack a condition, or have one that is not used.

    given: the options without "--" and with underscores.
    """
    inputs, frames = model.inputs, GivenFrames.parse(model.given_frames)
    used = [name for name in ("image", "control") if name in inputs]
    for name, (model_of, fix) in _SAMPLED.items():
        if name in used and name not in given:
            raise ValueError(f"{model_of} needs {_NAMES[name]}; give {fix}")
    wanted: list[str] = []
    if frames is not None:
        ends = {"first": _ENDS[:1], "last": _ENDS[1:]}
        of_frames = ["video"] if frames.is_clip else ends.get(frames.kind, _ENDS)
        used += of_frames
        if frames.kind != "random" or set(of_frames).isdisjoint(given):
            wanted += of_frames
    # A model that is given none of them makes the whole video.
    if "masked_video" in inputs and not {"video", "mask"}.isdisjoint(given):
        wanted += ["video", "mask"]
        for name in _ENDS if frames is None else ():
            if name in given:
                text = "stands for --video and --mask; give one or the other"
                raise ValueError(f"{_option(name)} {text}")
    if "masked_video" in inputs:
        used += ["video", "mask", *_ENDS]
    for name in wanted:
        if name not in given:
            kind = "VIDEO" if name in ("video", "mask") else "PNG"
            text = f"the model needs {_NAMES[name]} (model.conditions: {_list(inputs)})"
            raise ValueError(f"{text}; give {_option(name)} {kind}")
    for name in given:
        if name not in used:
            text = f"the model does not use {_NAMES[name]} (its conditions: {_list(inputs)})"
            raise ValueError(f"{text}; leave {_option(name)} out")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def stated_conditions(folder: Path, family: Family) -> tuple[str, ...] | None:
    """Return the conditions of a pipeline's model as its folder tells them; None if it does not.

    The class in model_index.json tells them. CogVideoX-Fun's control models are published with the class
    of text-to-video; a network that has twice the channels, but no learned position table, is none of
    image-to-video there (2B has no learned table in any case).
    """
    if not (file := folder / "model_index.json").is_file():
        return None
    kind = read_json(file).get("_class_name")
    if kind in _STATED:
        return _STATED[kind]
    if family.in_channels == family.out_channels:
        return ()
    if family.in_channels == inpainting_channels(family.out_channels):
        return _INPAINTING
    is_control = family.is_derived and family.is_rotary and kind == "CogVideoXPipeline"
    return ("control",) if is_control else None


def _trains_patches(model: ModelKeys) -> bool:
    """Return whether a run trains the patch embedding (transformer.freeze)."""
    if model.trainable_modules is not None:
        return "patch_embedding" in model.trainable_modules
    prefixes = tuple(model.not_trainable_prefixes)
    is_frozen = sat_name("patch_embedding.weight").startswith(prefixes)
    return not (model.lora_train or "all" in prefixes or is_frozen)


def condition_values(folder: Path, family: Family) -> dict[str, Any]:
    """Return the keys by which a configuration of the family's member takes the model's conditions."""
    stated = stated_conditions(folder, family)
    published = ("image",) if family.member.has_image else ()
    if stated is None or stated == published:
        return {}
    off: dict[str, Any] = {}
    if published:  # keys of the member's file for the image, which this model does not have
        off = {_IMAGE: False, ModelKeys.key("noised_image_dropout"): 0.0}
    if "frames" in stated:
        off[_GIVEN] = "first_last"
    elif stated == _INPAINTING:
        file = folder / "transformer" / "config.json"
        off[_NOISE] = bool((read_json(file) if file.is_file() else {}).get(NOISE_KEY))
        if family.patch.joins_frames:  # 85 frames in VideoX-Fun's scripts, where the file has 8N+1
            off[_MOST_FRAMES] = 85
    return {_CONDITIONS: list(stated), **off}


def check_stated(model: ModelKeys, folder: Path, family: Family) -> None:
    """Raise ValueError if a configuration takes other conditions than the model's folder tells."""
    inputs, stated = model.inputs, stated_conditions(folder, family)
    if stated is None or stated == inputs:
        return
    kind = read_json(folder / "model_index.json").get("_class_name")
    # Given frames have the shapes of image-to-video, which is a usual start for them.
    if inputs == ("frames",) and kind != "CogVideoXFunControlPipeline":
        return
    fix = "or correct the file"
    if stated == inputs[: len(stated)]:
        if model.new_channels is not None:
            return
        fix = "or add channels to the model with model.new_channels=zero"
    text = f"args.load={folder}: its model_index.json ({kind}) tells a model with the conditions {_list(stated)}, the "
    text += f"configuration has {_list(inputs)}; set model.conditions={show(list(stated))}"
    raise ValueError(f"{text}, {fix}")
