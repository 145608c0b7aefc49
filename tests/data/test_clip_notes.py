"""Lines about the clips of a run: what is cropped, padded, repeated, too short, and at which speed it runs."""

from pathlib import Path

import pytest

from cogfast.data.buckets import join_surveys, survey
from cogfast.data.datasets import VideoFolder, VideoManifest
from tests.support.video_files import constant_rate, write_clip

CLIP = {"video_size": [32, 48], "fps": 8, "max_num_frames": 17, "allow_empty_captions": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four clips of 24 frames a second: 4 s of the size, 4 s turned on its side, 1 s, and 2 s at 4 fps."""
    folder = tmp_path_factory.mktemp("clips")
    write_clip(folder / "a.mp4", constant_rate(96, 24), size=(64, 96))
    write_clip(folder / "b.mp4", constant_rate(96, 24), size=(96, 64))
    write_clip(folder / "c.mp4", constant_rate(26, 24), size=(64, 96))
    write_clip(folder / "d.mp4", constant_rate(12, 4), size=(64, 96))
    return folder


def _lines(folder: Path, **params: object) -> str:
    data = VideoFolder(folder, **{**CLIP, **params})
    parts = [survey(data, range(start, start + 2)) for start in (0, 2)]  # of two ranks
    notes = join_surveys(parts).notes
    short = notes.too_short(len(data), data.settings)
    return "\n".join([*notes.lines(len(data), data.settings, data.name), short])


SHORT = "1 of 4 clips are shorter than 17 frames at 8/s (2.1 s; shortest 1.1 s): "


@pytest.mark.parametrize(
    "params, wanted",
    [
        ({}, ["1 of 4 clips are cropped to the shape of 32x48, which cuts 55.6%", "first: {}/b.mp4",
              "1 of 4 clips have fewer frames per second than are read, down to 4",
              SHORT + "data.params.max_num_frames=9 takes all, data.params.short_clips=pad"]),
        ({"short_clips": "pad"}, ["1 of 4 clips are shorter than the clips", "repeated 8 times"]),
        ({"frame_selection": "sat", "skip_frms_num": 3, "max_num_frames": 33},
         ["are shorter than the clips that are read"]),
        ({"frame_selection": "uniform"}, ["4 of 4 clips run at 0.333 to 2 times their speed"]),
        ({"frame_selection": "uniform", "max_num_frames": 1}, ["are cropped"]),
        ({"resize": "stretch"}, [SHORT]),
        ({"buckets": [[17, 32, 48], [25, 32, 48]]}, [SHORT + "a bucket of frames=9 takes all"]),
    ],
    ids=str,
)  # fmt: skip
def test_lines(params: dict, wanted: list[str], folder: Path) -> None:
    found = _lines(folder, **params)
    assert all(line.format(folder) in found for line in wanted), found
    assert ("cropped" in found) == ("resize" not in params)
    assert "0 to" not in found and "at 0 times" not in found


def test_the_advice_takes_all(folder: Path) -> None:
    assert not survey(VideoFolder(folder, **{**CLIP, "max_num_frames": 9})).reasons


def test_starts_without_an_end_are_compared_once(folder, monkeypatch) -> None:
    """NaN never equals NaN: each of a million rows chose its bucket again."""
    rows = "".join(f"{folder}/a.mp4,x,{start}\n" for start in [1, 2] * 20)
    (folder / "rows.csv").write_text("path,caption,start\n" + rows)
    data = VideoManifest(folder / "rows.csv", **{**CLIP, "max_num_frames": 9})
    chosen = []
    monkeypatch.setattr("cogfast.data.buckets.choose", lambda *given: chosen.append(given) or 0)
    survey(data)
    assert len(chosen) == 2
