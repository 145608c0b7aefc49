"""Clips of CogVideo's trainer with their lists, and options of its runs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.video_files import constant_rate, write_clip

KINDS = {
    "2b": ("cogvideox-t2v", "t2v"),
    "5b": ("cogvideox-t2v", "t2v"),
    "5b_i2v": ("cogvideox-i2v", "i2v"),
    "1.5_5b": ("cogvideox1.5-t2v", "t2v"),
    "1.5_5b_i2v": ("cogvideox1.5-i2v", "i2v"),
}
SIZE = (32, 48)
# Elements per reduction: the default allocates 0.2 GB, and these models have 0.5 million weights.
SMALL = "deepspeed.zero_optimization.reduce_bucket_size=100000"


def words(options: dict[str, object]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of clips of different lengths, and a validation set of two prompts with videos."""
    folder = tmp_path_factory.mktemp("pairs")
    for i in range(4):
        for name in ("videos", "low"):
            write_clip(folder / name / f"{i}.mp4", constant_rate(9 * (i + 1), 8), size=SIZE)
    (folder / "prompt.txt").write_text("".join(f"a red block, number {i}\n" for i in range(4)))
    (folder / "videos.txt").write_text("".join(f"videos/{i}.mp4\n" for i in range(4)))
    (folder / "prompts.txt").write_text("one block\nanother block\n")
    (folder / "low.txt").write_text("low/1.mp4\nlow/2.mp4\n")
    return folder


@pytest.fixture
def options(pipelines, tmp_path: Path) -> Callable[..., dict]:
    """Build the options of a run, with changes; None leaves an option out."""

    def build(family: str = "5b", **changes: object) -> dict[str, object]:
        name, kind = KINDS[family]
        found = {
            "model_path": pipelines.path(family),
            "model_name": name,
            "model_type": kind,
            "training_type": "lora",
            "output_dir": tmp_path / "out",
            "data_root": tmp_path / "data",
            "caption_column": "prompts.txt",
            "video_column": "videos.txt",
            "train_resolution": f"{17 if family.startswith('1.5') else 9}x32x48",
        }
        return {k: v for k, v in (found | changes).items() if v is not None}

    data = tmp_path / "data"
    data.mkdir()
    (data / "prompts.txt").write_text("one\ntwo\n")
    (data / "videos.txt").write_text("1.mp4\n2.mp4\n")
    return build


@pytest.fixture
def run_options(options: Callable[..., dict], data: Path) -> Callable[..., dict]:
    """Build the options of a run of a step on the clips."""
    short = {"data_root": data, "caption_column": "prompt.txt", "train_steps": 1, "num_workers": 0}
    short["overrides"] = [SMALL, "args.log_interval=1"]
    return lambda family, **changes: options(family, **short | changes)
