"""Prompts and images of evaluations are checked before training, each mistake in one line."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cogfast.extensions.sample.prompt_files import given_prompts
from cogfast.train.keys import TrainKeys
from cogfast.train.preflight.check import check_train
from tests.support.refusals import Refusal, assert_refused, refusals
from tests.support.runs import Run
from tests.support.tiny_run import write_clips


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


@refusals(Path(__file__).with_name("refusals_evaluation.txt"))
def test_a_mistake_is_one_line(run: Run, refusal: Refusal) -> None:
    run = run.of(refusal.base).with_words(*refusal.fill(data=run.data).words)
    assert_refused(lambda: check_train(run.config("args.eval_interval=2").run), refusal.line)
    # The files are not used if nothing is evaluated.
    check_train(run.config("args.eval_interval=null").run)


@pytest.mark.parametrize(
    "words",
    [
        ["args.eval_prompt_file={}/pairs.txt"],
        ["args.eval_prompt_file={}/two.txt", "args.eval_images={}/images.txt"],
        ["args.eval_prompts=[a bar, another bar]", "args.eval_images={}/images.txt"],
    ],
    ids=["lines", "two files", "list and file"],
)
def test_prompts_have_their_images(
    run: Run, tmp_path: Path, data: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run.of("5b_i2v").with_words(*[word.format(data) for word in words])
    check_train(run.config("args.eval_interval=2").run)
    assert given_prompts(run.config().run.args) == [
        ("a bar", data / "red.png"),
        ("another bar", data / "pictures" / "blue.png"),
    ]
    # A path may also be relative to the folder in which the command runs, as in SAT.
    (tmp_path / "list.txt").write_text("a bar@@red.png\n")
    monkeypatch.chdir(data)
    ((_, image),) = given_prompts(TrainKeys(eval_prompt_file=str(tmp_path / "list.txt")))
    assert image == Path("red.png")
