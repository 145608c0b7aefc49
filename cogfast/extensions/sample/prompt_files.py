"""Reads prompt files (a prompt or prompt@@image per line, as in SAT) and lists of images.

The module imports no torch: the command line reads prompts before anything heavy is imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from cogfast.core.files import read_limited
from cogfast.core.values import counted
from cogfast.train.keys import TrainKeys


def given_prompts(args: TrainKeys) -> list[tuple[str, Path | None]]:
    """Return the prompts of args.eval_prompts or args.eval_prompt_file, with their first frames. ValueError if a
    file cannot be read, an image is missing or the numbers differ."""
    texts = list(args.eval_prompts)
    images: list[Path | None] = [None] * len(texts)
    if args.eval_prompt_file is not None:
        path = Path(args.eval_prompt_file)
        key = f"args.eval_prompt_file={path}"
        pairs = split_prompts([line for _, line in _lines(path, key)], key)
        if not pairs:
            raise ValueError(f"{key} has no prompt; write one per line")
        without = [prompt for prompt, image in pairs if not image]
        # All or none: a model takes an image with every prompt or with no prompt.
        if 0 < len(without) < len(pairs):
            text = f"{key}: {len(pairs) - len(without)} of {len(pairs)} lines are prompt@@image"
            text += f", but {without[0][:80]!r} has no image; give every prompt an image, or none"
            raise ValueError(text)
        texts = [prompt for prompt, _ in pairs]
        images = [_find_file(image, path, key) if image else None for _, image in pairs]
    if args.eval_images is not None:
        if any(images):
            text = f"args.eval_images={args.eval_images}"
            text += ", but the lines of args.eval_prompt_file have images (prompt@@image), too"
            raise ValueError(f"{text}; remove those, or set args.eval_images=null")
        images = [
            *listed_files(args.key("eval_images"), Path(args.eval_images), "image", len(texts))
        ]
    return list(zip(texts, images, strict=True))


def split_prompts(lines: Sequence[str], name: str) -> list[tuple[str, str]]:
    """Return the prompt and the image of each line; the image of a plain prompt is "".

    name: of the file or option, for errors.
    """
    pairs = [line.partition("@@")[::2] for line in lines]
    for prompt, _ in pairs:  # Python decodes argument bytes that are not UTF-8 as surrogates
        text = prompt.strip()
        if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
            raise ValueError(f"{name}: {text[:80]!r} is not valid text; write it in UTF-8")
        is_list = text.endswith((".txt", ".csv", ".jsonl"))
        if name == "--prompt" and is_list and os.path.isfile(text):
            raise ValueError(f"--prompt {text}: is a file; give it with --prompt-file")
    return [(prompt.strip(), image.strip()) for prompt, image in pairs]


def utf8_lines(data: bytes, name: str) -> list[str]:
    """Return the lines of a text file, without their ends. name: of the file, for errors."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{name}: not UTF-8; save the prompts as UTF-8") from None
    return re.split(r"\r\n|\r|\n", text)  # str.splitlines also splits within prompts


def files_of_prompts(option: str, names: Sequence[str], num_prompts: int) -> list[Path | None]:
    """Return the file of each prompt of an option that is given once, or once per prompt. "": none."""
    if len(names) not in (1, num_prompts):
        text = f"{option} names {counted(len(names), 'file')} for {counted(num_prompts, 'prompt')}"
        raise ValueError(f"{text}; give one for all prompts, or one for each")
    files = [Path(name) if name else None for name in names] * (num_prompts // len(names))
    for file in files:
        if file is not None and not os.path.isfile(file):  # also if the name is too long
            raise ValueError(f"{option} {str(file)[:200]}: no such file; correct the path")
    return files


def listed_files(option: str, path: Path, what: str, num_prompts: int) -> list[Path]:
    """Return the files that the lines of a file name, one for each prompt. what: they are."""
    key = f"{option}={path}"
    files = [
        _find_file(line.strip(), path, f"{key} line {number}") for number, line in _lines(path, key)
    ]
    if len(files) != num_prompts:
        text = f"{key} names {counted(len(files), what)} for {counted(num_prompts, 'prompt')}"
        text += "; name one for each prompt of args.eval_prompt_file or args.eval_prompts, in their order"
        raise ValueError(text)
    return files


def _lines(path: Path, key: str) -> list[tuple[int, str]]:
    """Return the lines of a file that are not blank, each with its number."""
    if not path.is_file():
        raise ValueError(f"{key}: no such file; set it to a text file, or to null")
    # Numbers count blank lines, as an editor shows them.
    lines = utf8_lines(read_limited(path, 1 << 26, f"change {key}"), key)
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _find_file(name: str, listing: Path, where: str) -> Path:
    """Return the path of a file, relative to the file that lists it or to the current folder."""
    # Beside the list first, so that a folder with list and files can be moved.
    for path in (listing.parent / name, Path(name)):
        if path.is_file():
            return path
    text = f"{where}: {name[:200]}: no such file; give a path relative to {listing.parent} or to the folder in "
    raise ValueError(f"{text}which the command runs")
