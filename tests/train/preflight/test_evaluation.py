"""Prompts and images of evaluations are checked before training, each mistake in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cogfast.config import load_config
from cogfast.config.arguments import TrainArguments
from cogfast.sample.prompt_files import GivenPrompt, given_prompts
from cogfast.train.preflight.check import check_train
from tests.support.tiny_run import write_clips, write_config


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_clips(tmp_path_factory.mktemp("data"), num_clips=1)
    files = {
        "two.txt": "a bar\n\n  another bar \n",
        "pairs.txt": "a bar@@red.png\nanother bar@@ pictures/blue.png\n",
        "half.txt": "a bar@@red.png\nno image\n",
        "blank.txt": "\n  \n",
        "images.txt": "red.png\r\npictures/blue.png\r\n",
        "one_image.txt": "red.png\n",
        "missing.txt": "red.png\nwhite.png\n",
        "damaged.txt": "red.png\ndamaged.png\n",
    }
    for name, text in files.items():
        (folder / name).write_bytes(text.encode())
    (folder / "latin.txt").write_bytes("é".encode("latin-1"))
    (folder / "pictures").mkdir()
    pixels = np.zeros((32, 32, 3), np.uint8)
    Image.fromarray(pixels).save(folder / "red.png")
    Image.fromarray(pixels).save(folder / "pictures" / "blue.png")
    (folder / "damaged.png").write_bytes((folder / "red.png").read_bytes()[:40])
    return folder


def arguments(data: Path, files: dict) -> dict:
    return {
        key: str(data / value) if key[5:] != "prompts" else value for key, value in files.items()
    }


def check(tmp_path: Path, data: Path, family: str, files: dict, **more) -> None:
    args = {"eval_interval": 2, **arguments(data, files), **more}
    check_train(load_config([write_config(tmp_path / "base.yaml", data, family, **args)]))


PROMPTS, IMAGES = "eval_prompt_file", "eval_images"
WRONG = [
    (
        "5b",
        {PROMPTS: "two.txt", "eval_prompts": ["a bar"]},
        r"base.yaml: args.eval_prompt_file=.*two.txt and args.eval_prompts are both set; set args.eval_p",
    ),
    ("5b", {PROMPTS: "no.txt"}, r"args.eval_prompt_file=.*no.txt does not exist; set it to a"),
    ("5b", {PROMPTS: "blank.txt"}, r"blank.txt has no prompt; write one per line"),
    ("5b", {PROMPTS: "latin.txt"}, r"latin.txt: not UTF-8; save the prompts as UTF-8"),
    (
        "5b",
        {PROMPTS: "pairs.txt"},
        r"pairs.txt has the image .*red.png, but a text-to-video model does not use images; leave",
    ),
    (
        "5b",
        {PROMPTS: "two.txt", IMAGES: "images.txt"},
        r"args.eval_images=.*images.txt has the image .*, but a text-to-video model does not use images",
    ),
    (
        "5b_i2v",
        {IMAGES: "images.txt"},
        r"args.eval_images=.*images.txt names 2 images for 0 prompts; name one for each",
    ),
    (
        "5b_i2v",
        {PROMPTS: "pairs.txt", IMAGES: "images.txt"},
        r"but the lines of args.eval_prompt_file have images \(prompt@@image\), too; remove those",
    ),
    (
        "5b_i2v",
        {PROMPTS: "half.txt"},
        r"1 of 2 lines are prompt@@image, but 'no image' has no image; give every prompt an image, or",
    ),
    (
        "5b_i2v",
        {PROMPTS: "two.txt", IMAGES: "one_image.txt"},
        r"args.eval_images=.*one_image.txt names 1 image for 2 prompts; name one for each",
    ),
    (
        "5b_i2v",
        {PROMPTS: "two.txt", IMAGES: "missing.txt"},
        r"args.eval_images=.*missing.txt line 2: white.png: no such file; give a path relative to",
    ),
    (
        "5b_i2v",
        {PROMPTS: "two.txt", IMAGES: "damaged.txt"},
        r"args.eval_images .*damaged.png: not a readable image",
    ),
]


@pytest.mark.parametrize(("family", "files", "message"), WRONG)
def test_a_mistake_is_one_line(
    tmp_path: Path, data: Path, family: str, files: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check(tmp_path, data, family, files)
    assert "\n" not in str(caught.value)
    # The files are not used if nothing is evaluated.
    check(tmp_path, data, family, files, eval_interval=None)


@pytest.mark.parametrize(
    "files",
    [
        {PROMPTS: "pairs.txt"},
        {PROMPTS: "two.txt", IMAGES: "images.txt"},
        {"eval_prompts": ["a bar", "another bar"], IMAGES: "images.txt"},
    ],
    ids=["lines", "two files", "list and file"],
)
def test_prompts_have_their_images(
    tmp_path: Path, data: Path, files: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(tmp_path, data, "5b_i2v", files)
    config = load_config(
        [write_config(tmp_path / "base.yaml", data, "5b_i2v", **arguments(data, files))]
    )
    assert given_prompts(TrainArguments.from_config(config)) == [
        GivenPrompt("a bar", data / "red.png"),
        GivenPrompt("another bar", data / "pictures" / "blue.png"),
    ]
    # A path may also be relative to the folder in which the command runs, as in SAT.
    (tmp_path / "list.txt").write_text("a bar@@red.png\n")
    monkeypatch.chdir(data)
    (found,) = given_prompts(TrainArguments(eval_prompt_file=str(tmp_path / "list.txt")))
    assert found.image == Path("red.png")
