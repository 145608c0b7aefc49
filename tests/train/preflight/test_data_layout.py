"""The class that reads the data follows from args.train_data where a configuration leaves it open."""

from pathlib import Path

import pytest

from cogfast.train.preflight.check import check_train
from cogfast.train.preflight.data_layout import infer_layout
from tests.support.refusals import assert_refused
from tests.support.runs import Run, datasets_of
from tests.support.tiny_run import write_clips


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two clips without labels, listed in a table and in lists, each in a folder of its own."""
    folder = write_clips(tmp_path_factory.mktemp("clips"), num_clips=2)
    rows = [f"{folder}/videos/{i}.mp4" for i in range(2)]
    table = "path,caption\n" + "".join(f"{row},a bar\n" for row in rows)
    files = {
        "clips.csv": table,
        "table/metadata.csv": table,
        "lists/videos.txt": "\n".join(rows),
        "lists/prompts.txt": "a bar\na bar\n",
    }
    for name, text in files.items():
        for place in {name, f"both/{Path(name).name}"} if "/" in name else {name}:
            (folder / place).parent.mkdir(exist_ok=True)
            (folder / place).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("source", "layout"),
    [(".", "SFTDataset"), ("clips.csv", "VideoManifest"), ("table", "VideoManifest")]
    + [("lists", "VideoList")],
)
def test_the_layout_follows_from_the_path(run: Run, source: str, layout: str) -> None:
    """The models' files name SAT's folders of videos and labels, whose defaults stay."""
    config = run.config(f"args.train_data=[{run.data / source}]").filled(infer_layout)
    assert config.data.target.endswith(f".{layout}")
    check_train(config.run)
    train = datasets_of(config, config.run.args).train
    assert len(train) == 2
    assert train.settings.skip_frms_num == 3


def test_sources_of_several_layouts_are_refused(run: Run, data: Path) -> None:
    target = "data.target=cogfast.data.datasets."
    for sources, line in (
        (
            f"{data}/both",
            "args.train_data=<...>both: has the layouts of several data sets; set "
            f"{target}VideoManifest or {target}VideoList$",
        ),
        (
            f"{data}/clips.csv,{data}/lists",
            f"several: {data}/clips.csv (VideoManifest), {data}/lists (VideoList); list all clips in one m",
        ),
    ):
        config = run.config(f"args.train_data=[{sources}]")
        assert_refused(lambda config=config: config.filled(infer_layout), line)


def test_a_layout_that_is_not_read_is_logged(
    data: Path, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    folder = write_clips(tmp_path / "clips", num_clips=2)
    for name in ("videos.txt", "prompts.txt"):
        (folder / name).write_text((data / "lists" / name).read_text())
    (folder / "labels").mkdir(exist_ok=True)
    for i in range(2):
        (folder / "labels" / f"{i}.txt").write_text("a bar")
    config = Run(folder, tmp_path).config()
    assert config.filled(infer_layout) is config
    text = "read as VideoFolder; its files of VideoList are ignored; data.target=cogfast.data.datasets.VideoList"
    assert f"{folder}: {text} reads them" in log.messages


def test_a_layout_of_the_command_line_stays(run: Run, data: Path) -> None:
    target = "data.target=data_video.SFTDataset"
    config = run.config(f"args.train_data=[{data / 'clips.csv'}]", target).filled(infer_layout)
    line = "clips.csv is a file; give folders <...>VideoManifest"
    assert_refused(lambda: check_train(config.run), line)
