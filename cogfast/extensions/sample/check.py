"""Checks the prompts of evaluations and of `cogfast sample` before any GPU work."""

from __future__ import annotations

import re

from cogfast.core.component import Component
from cogfast.core.json_files import brief
from cogfast.core.values import KeyProblem
from cogfast.extensions.sample.flags import check_negative_prompt
from cogfast.extensions.sample.prompt_files import given_prompts
from cogfast.extensions.sample.sizes import open_image
from cogfast.model.keys import ModelKeys
from cogfast.train.keys import TrainKeys


def check_evaluation(
    args: TrainKeys, model: ModelKeys, data: Component | None, sampler: Component | None
) -> None:
    """Check the prompts and images that evaluations sample, and read every image once."""
    if sampler is not None:
        check_negative_prompt(args.negative_prompt, sampler)
    if args.eval_prompt_file is not None and args.eval_prompts:
        key = args.key("eval_prompt_file")
        text = f"{key}={brief(args.eval_prompt_file)} and args.eval_prompts are both set"
        raise KeyProblem(key, f"{text}; set args.eval_prompts=[] or {key}=null")
    name = args.key("eval_prompt_file" if args.eval_images is None else "eval_images")
    try:
        # Reads the files once more than the evaluation does, which is cheap, and reports before it.
        images = [image for _, image in given_prompts(args) if image is not None]
        if images and "image" not in model.inputs:
            text = f"has the image {images[0]}, but a text-to-video model does not use images"
            raise ValueError(f"{name}={getattr(args, name[5:])} {text}; leave them out")
        for image in images:
            open_image(image, name)
    except ValueError as error:
        # Its messages begin with the key.
        key = re.match(r"args\.\w+", str(error))
        raise KeyProblem(key[0] if key else args.key("eval_prompts"), str(error)) from None
