"""Checks the prompts and images that evaluations sample: before GPU work, not at the first evaluation."""

from __future__ import annotations

import re

from cogfast.config import Config
from cogfast.config.arguments import TrainArguments
from cogfast.config.components import is_none
from cogfast.config.json_files import brief
from cogfast.config.merged_config import refuse
from cogfast.sample.flags import check_negative_prompt
from cogfast.sample.prompt_files import GivenPrompt, given_prompts
from cogfast.sample.sizes import open_image


def check_evaluation(config: Config, args: TrainArguments, takes_image: bool) -> None:
    """Check args.eval_prompts, args.eval_prompt_file and args.eval_images against each other and the
    model, and read every image once. Without evaluations they are not used, and not checked.

    takes_image: whether the model is an image-to-video model.
    """
    if not args.has_evaluation:
        return
    if not is_none(config.model.get("sampler_config")):
        check_negative_prompt(config)
    if args.eval_prompt_file is not None and args.eval_prompts:
        key = "args.eval_prompt_file"
        text = f"{key}={brief(args.eval_prompt_file)} and args.eval_prompts are both set"
        refuse(config, key, f"{text}; set args.eval_prompts=[] or {key}=null")
    if args.eval_images is not None:
        _check_images_key(config, args, takes_image)
    try:
        # Reads the files once more than the evaluation does, which is cheap, and reports before it.
        given = given_prompts(args)
        _check_images(args, given, takes_image)
    except ValueError as error:
        # Its messages begin with the key.
        key = re.match(r"args\.\w+", str(error))
        refuse(config, key[0] if key else "args.eval_prompts", str(error))


def _check_images_key(config: Config, args: TrainArguments, takes_image: bool) -> None:
    key = "args.eval_images"
    shown = f"{key}={brief(str(args.eval_images))}"
    if not takes_image:
        text = "a text-to-video model does not use images"
        refuse(config, key, f"{shown}: {text}; set it to null")
    if args.eval_prompt_file is None and not args.eval_prompts:
        text = "has no prompts; set args.eval_prompt_file, a text file with a prompt per line"
        refuse(config, key, f"{shown} {text}")


def _check_images(args: TrainArguments, given: list[GivenPrompt], takes_image: bool) -> None:
    name = "args.eval_images" if args.eval_images is not None else "args.eval_prompt_file"
    for prompt in given:
        if prompt.image is None:
            continue
        if not takes_image:
            raise ValueError(
                f"{name}: prompt {prompt.text[:80]!r} has the image {prompt.image}, but a text-to-video "
                "model does not use one; remove @@ and what follows"
            )
        open_image(prompt.image, name)
