"""The lines at the start of a run on the speed of spread frames and on cut pictures."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cogfast.data.buckets import survey
from cogfast.data.clip_notes import ClipNotes
from cogfast.data.datasets import VideoFolder, VideoManifest
from cogfast.data.video.settings import ClipSettings
from cogfast.data.video.transform import resize_and_center_crop
from cogfast.train.assembly import Datasets
from cogfast.train.preflight.header_scan import survey_datasets
from tests.support.video_files import constant_rate, decode_all, write_clip

CLIP = {"video_size": (32, 48), "fps": 8, "max_num_frames": 9, "frame_selection": "uniform"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Videos of 1.5 to 4 s with another rate each; one of them is too short, one is portrait."""
    root = tmp_path_factory.mktemp("clips")
    kinds = [(36, 12, (32, 48)), (64, 16, (32, 48)), (6, 4, (32, 48)), (30, 10, (64, 48))]
    for i, (frames, fps, size) in enumerate(kinds):
        write_clip(root / f"videos/{i}.mp4", constant_rate(frames, fps), size=size)
        label = root / f"labels/{i}.txt"
        label.parent.mkdir(exist_ok=True)
        label.write_text("a clip")
    return root


def test_both_lines(folder):
    """Strides of 4, 7, 1 and 3 frames at 12, 16, 4 and 10 a second, shown at 8."""
    speeds = [4 / 12 * 8, 7 / 16 * 8, 1 / 4 * 8, 3 / 10 * 8]
    assert (f"{min(speeds):.1f}", f"{max(speeds):.1f}") == ("2.0", "3.5")
    speed, shape = survey(VideoFolder(folder, **CLIP)).notes
    assert speed == (
        "frames spread over 4 clips of 1.5 to 4.0 s: 9 frames shown at 8 fps run at 2.0 to 3.5 times "
        "the clip's speed; data.params.frame_selection=timestamp (cogfast finetune: --fps) picks frames "
        "by time. 1 is padded."
    )
    assert shape == (
        "cropping 1 of 4 clips to the shape of 32x48 cuts 50% of the picture "
        "(data.params.resize=stretch, in cogfast finetune --resize stretch, squeezes it instead)"
    )


def test_a_run_logs_them_once(folder, caplog):
    groups = SimpleNamespace(is_main=True, on_main=lambda work: work(), world_size=1)
    args = SimpleNamespace(check_videos=True, max_bad_fraction=0.05)
    data = VideoFolder(folder, **CLIP)
    with caplog.at_level("INFO"):
        survey_datasets(Datasets(data, data.part([0])), args, groups, global_batch=1)
    lines = [record.getMessage() for record in caplog.records]
    assert [line[:28] for line in lines if "clips" in line and "held-out" not in line] == [
        "frames spread over 4 clips o",
        "cropping 1 of 4 clips to the",
    ]


def test_the_speed_is_that_of_the_frames(folder):
    """The frames of a clip are as far apart in the video as its speed says."""
    notes = ClipNotes()
    notes.add(64, 16, (32, 48), ClipSettings(**CLIP))
    sample = VideoFolder(folder, **CLIP)[1]["video"].float().mean((1, 2, 3))
    levels = decode_all(folder / "videos/1.mp4").mean((1, 2, 3))
    stride = round(notes.speeds[0] * 16 / 8)
    assert np.allclose(levels[: 9 * stride : stride], sample.numpy(), atol=0.01)


def test_the_cut_is_that_of_the_crop():
    """A picture whose left part is white: the share of white that the crop removes."""
    notes = ClipNotes()
    notes.add(9, 8, (100, 200), ClipSettings(**CLIP))
    picture = torch.zeros(1, 100, 200, 3, dtype=torch.uint8)
    picture[:, :, :25] = 255
    kept = resize_and_center_crop(picture, (32, 48))  # 150 of 200 columns: the white is gone
    assert notes.cuts == [pytest.approx(0.25)] and kept.max() <= 128


@pytest.mark.parametrize(
    "changes",
    [
        {"frame_selection": "timestamp", "short_clips": "pad", "resize": "stretch"},
        {"frame_selection": "timestamp", "resize": "stretch"},
    ],
    ids=["padded", "skipped"],
)
def test_clips_at_their_own_speed_and_shape_need_no_note(folder, changes):
    assert survey(VideoFolder(folder, **{**CLIP, **changes})).notes == []


def test_parts_and_rates_of_a_manifest(folder):
    """A part of a video counts with its own length, and a clip with its own rate."""
    file = folder / "rows.csv"
    file.write_text(
        "path,caption,start,end,fps\nvideos/0.mp4,a,0,1.5,12\nvideos/1.mp4,b,1,3,16\n"
        "videos/1.mp4,b,1,3,16\n"
    )
    (line,) = survey(VideoManifest([str(file)], **CLIP)).notes
    assert line.startswith(
        "frames spread over 3 clips of 1.5 to 2.0 s: 9 frames shown at 12 to 16 fps"
    )
    assert "run at 2.0 to 3.0 times the clip's speed" in line and "padded" not in line


def test_same_speed_and_shape_need_no_line(tmp_path):
    write_clip(tmp_path / "a.mp4", constant_rate(9, 8), size=(32, 48))
    (tmp_path / "a.txt").write_text("a")
    assert survey(VideoFolder(tmp_path, **CLIP)).notes == []


def test_buckets_have_several_sizes(folder):
    """The portrait clip fits its own bucket; a bucket's frames and size are those of its clips."""
    sizes = [[9, 32, 48], [17, 32, 48], [9, 64, 48]]
    (line,) = survey(VideoFolder(folder, **CLIP, buckets=sizes)).notes
    assert "clips of 1.5 to 4.0 s: 9 to 17 frames shown" in line


def test_ranks_that_find_other_files_are_refused(folder):
    """The order of the samples and the number of steps follow from what each rank lists itself."""
    args = SimpleNamespace(check_videos=True, max_bad_fraction=0.05)
    data = VideoFolder(folder, **CLIP)
    groups = SimpleNamespace(world_size=2, gather=lambda found: [found, (3, "another")])
    with pytest.raises(ValueError, match="train_data: rank 0 finds 4 samples, and rank 1 finds 3"):
        survey_datasets(Datasets(data, None), args, groups, global_batch=1)
