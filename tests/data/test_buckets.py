"""Buckets: assigned from headers alone, one bucket per step on every layout, no sample dropped."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from cogfast.data.batches import BatchLoader
from cogfast.data.buckets import choose, in_buckets, join_surveys, kept_share, survey, table
from cogfast.data.datasets import VideoFolder, VideoShards
from cogfast.data.sources import headers as video_headers
from cogfast.data.sources.clip_list import ClipList, PackedStrings
from cogfast.data.sources.headers import Header, read_headers
from cogfast.data.video.clip import Bucket, ClipSettings
from tests.extensions.tar.test_tar_shards import _tar
from tests.support.refusals import assert_refused
from tests.support.video_files import constant_rate, sat_folder, write_clip

SIZES = [[49, 480, 720], [49, 720, 480], [81, 480, 720], [49, 256, 256], [17, 768, 1360]]
SETTINGS = ClipSettings(video_size=(480, 720), fps=8, max_num_frames=49, buckets=SIZES)


@pytest.mark.parametrize(
    "frames, fps, height, width, wanted",
    [
        (200, 30, 1080, 1920, [49, 480, 720]),  # 6.7 s: too short for 81 frames
        (400, 30, 1080, 1920, [81, 480, 720]),
        (200, 30, 1920, 1080, [49, 720, 480]),
        (200, 30, 256, 256, [49, 256, 256]),  # all of the picture for 49 frames
        (70, 30, 1080, 1920, [17, 768, 1360]),
        (49, 8, 480, 720, [49, 480, 720]),
        (31, 24, 480, 720, "31 frames at 24 fps = 1.3 s, need 2.1 s"),
    ],
    ids=str,
)
def test_a_clip_gets_the_bucket_that_keeps_most(frames, fps, height, width, wanted):
    found = choose(Header(frames, fps, height, width), SETTINGS, SETTINGS.sizes)
    if isinstance(wanted, str):
        assert found.startswith(wanted)
    else:
        assert list(SETTINGS.sizes[found]) == wanted


def test_share_that_scaling_and_cropping_keep():
    assert kept_share(480, 720, Bucket(1, 480, 720)) == 1
    assert kept_share(960, 1440, Bucket(1, 480, 720)) == pytest.approx(0.5)  # sharpness
    assert kept_share(480, 1440, Bucket(1, 480, 720)) == pytest.approx(0.5)  # picture
    assert kept_share(240, 360, Bucket(1, 480, 720)) == 1  # scaled up: nothing of it is lost
    tied = ClipSettings(video_size=(8, 8), fps=8, max_num_frames=9,
                        buckets=[[9, 480, 720], [9, 240, 360]])  # fmt: skip
    assert choose(Header(9, 8, 240, 360), tied, tied.sizes) == 1  # equals: the fewest pixels


def test_a_part_and_its_rate_decide():
    header = Header(300, 24, 480, 720)
    assert "36 frames at 24 fps = 1.5 s" in choose(header, SETTINGS, SETTINGS.sizes, (1.0, 2.5))
    faster = replace(SETTINGS, fps=24)
    assert choose(header, faster, faster.sizes, (1.0, 4.5)) == 2  # 84 frames at 24 fps


SMALL = {"video_size": [32, 48], "fps": 8, "max_num_frames": 9}
BUCKETS = [[9, 32, 48], [9, 48, 32], [5, 32, 32], [17, 32, 48]]


@pytest.fixture
def folder(tmp_path):
    """4 clips of 32x48, 3 of 48x32, 5 of 5 frames, 2 of 17 frames, 2 too short, 1 broken."""
    kinds = [(9, (32, 48))] * 4 + [(9, (48, 32))] * 3 + [(5, (32, 32))] * 5
    kinds += [(17, (32, 48))] * 2 + [(3, (32, 48))] * 2
    for i, (frames, size) in enumerate(kinds):
        write_clip(tmp_path / f"d/videos/{i:02}.mp4", constant_rate(frames, 8), size=size)
    (tmp_path / "d/videos/99.mp4").write_bytes(b"not a video")
    (tmp_path / "d/labels").mkdir()
    for path in (tmp_path / "d/videos").iterdir():
        (tmp_path / f"d/labels/{path.stem}.txt").write_text(f"clip {path.stem}")
    return tmp_path / "d"


WANTED = [0] * 4 + [1] * 3 + [2] * 5 + [3] * 2 + [-1] * 3


def test_survey_and_table(folder):
    data = VideoFolder(folder, **SMALL, buckets=BUCKETS)
    found = survey(data)
    assert found.buckets.tolist() == WANTED
    assert {i: r[:21] for i, r in found.reasons.items()} == {
        14: "3 frames at 8 fps = 0", 15: "3 frames at 8 fps = 0", 16: "not a readable video "
    }  # fmt: skip
    slower = VideoFolder(folder, **{**SMALL, "fps": 9, "max_num_frames": 5})
    assert "slow" not in found.notes and survey(slower).notes["slow"] == (14, 8, 8, 0)
    lines = table(data, found, 4).splitlines()
    assert [line.split()[:2] for line in lines[1:5]] == [
        ["9x32x48", "4"], ["9x48x32", "3"], ["5x32x32", "5"], ["17x32x48", "2"]
    ]  # fmt: skip
    assert "fewer than a step's 4: each up to 2 times in one" in lines[2]
    assert "fewer" not in lines[1]
    assert lines[5].split() == ["left", "out", "3"]
    assert "      2  " in lines[6] and "14.mp4: 3 frames at 8 fps = 0.4 s, need 0.6 s" in lines[6]
    assert "      1  " in lines[7] and "99.mp4: not a readable video" in lines[7]


def test_headers_are_read_once(folder, monkeypatch):
    data = VideoFolder(folder, **SMALL)
    first = read_headers(data.clips)
    opened = []
    really = video_headers.probe
    counted = lambda *a: opened.append(os.path.basename(a[0])) or really(*a)
    monkeypatch.setattr(video_headers, "probe", counted)
    # Files that could not be read are tried again: see test_bad_files.
    assert read_headers(data.clips) == first and opened == ["99.mp4"]
    write_clip(folder / "videos/03.mp4", constant_rate(17, 8), size=(48, 48))
    again = read_headers(data.clips)
    assert sorted(opened[1:]) == ["03.mp4", "99.mp4"]  # threads read them in any order
    assert again[3] == (17, 8, 48, 48, "", "") and again[:3] + again[4:] == first[:3] + first[4:]
    sat_folder(folder / "videos/more", 1)  # a new file is the only one that is opened
    more = VideoFolder(folder, **SMALL, allow_empty_captions=True)
    assert len(read_headers(more.clips)) == 18 and sorted(opened[3:]) == ["00.mp4", "99.mp4"]
    (folder / "videos/02.mp4").unlink()
    assert "cannot be opened" in read_headers(data.clips)[2].reason


def test_a_torn_index_is_read(folder):
    data = VideoFolder(folder, **SMALL)
    first = read_headers(data.clips)
    file = folder / "videos/.cogfast-index"
    torn = file.read_text()[: file.stat().st_size // 2]
    file.write_text(torn)
    # The files of lost lines are read and listed again, after the torn line.
    for _ in range(2):
        assert read_headers(data.clips) == first
    assert file.read_text().startswith(torn + "\n")
    # A line that lost some of its values, too.
    name, version, *values = json.loads(file.read_text().splitlines()[-1])
    with file.open("a") as opened:
        opened.write("\n" + json.dumps([name, version, *values[:2]]))
    assert read_headers(data.clips) == first


def test_parts_are_surveyed_as_the_whole(folder):
    """Each rank surveys its share."""
    data = VideoFolder(folder, **SMALL, buckets=BUCKETS)
    whole = survey(data)
    parts = [survey(data, range(start, min(start + 5, 17))) for start in range(0, 17, 5)]
    joined = join_surveys(parts)
    assert joined.buckets.tolist() == whole.buckets.tolist() and len(joined.buckets) == 17
    assert joined.reasons == whole.reasons and joined.notes == whole.notes


def test_an_index_is_trusted_only_on_request(folder, tmp_path_factory):
    data = VideoFolder(folder, **SMALL)
    first = read_headers(data.clips)
    (folder / "videos/03.mp4").write_bytes(b"not a video")
    (folder / "videos/04.mp4").unlink()
    assert read_headers(data.clips, trust_index=True) == first
    changed = read_headers(data.clips)
    assert "not a readable" in changed[3].reason and "cannot be opened" in changed[4].reason
    write_clip(folder / "videos/05a.mp4", constant_rate(9, 8), size=(32, 48))
    (folder / "labels/05a.txt").write_text("new")
    reasons = [
        list(survey(VideoFolder(folder, **SMALL, buckets=BUCKETS, trust_index=trusts)).reasons)
        for trusts in (True, False)
    ]
    assert reasons == [[14, 15, 16], [3, 14, 15, 16]]
    # The index moves with the data.
    moved = folder.rename(tmp_path_factory.mktemp("moved") / "data")
    data = VideoFolder(moved, **SMALL)
    opened = (moved / "videos/.cogfast-index").read_text()
    assert len(read_headers(data.clips)) == 17
    assert (moved / "videos/.cogfast-index").read_text() == opened


@pytest.mark.parametrize("values", [[-1, 8, 32, 48, ""], [2**30, 8, 32, 48, ""], [9, 0, 32, 48, ""],
    [9, float("nan"), 32, 48, ""], [9, 8, 0, 48, ""], [9, 8, 32, 2**40, ""], ["9", 8, 32, 48, ""],
    [9, 8, 32, 48, "a"], [9, 8, 32], [[[]]]])  # fmt: skip
def test_an_index_from_elsewhere_is_checked(folder, values):
    data = VideoFolder(folder, **SMALL)
    first = read_headers(data.clips)
    file = folder / "videos/.cogfast-index"
    rows = [json.loads(line) for line in file.read_text().split("\n") if line]
    file.write_text("\n".join(json.dumps([*row[:2], *values]) for row in rows))
    for trusts in (False, True):
        assert read_headers(data.clips, trust_index=trusts) == first


def test_an_index_that_is_no_file_or_cannot_be_written(folder, monkeypatch, caplog):
    data = VideoFolder(folder, **SMALL)
    file = folder / "videos/.cogfast-index"
    os.mkfifo(file)
    first = read_headers(data.clips)
    assert "so the next start reads the files again" in caplog.text
    file.unlink()
    (folder / "other").write_text("kept")
    file.symlink_to(folder / "other")
    assert read_headers(data.clips) == first and (folder / "other").read_text() == "kept"
    file.unlink()
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert read_headers(data.clips) == first and not file.exists()
    monkeypatch.setattr(video_headers, "_probe", lambda *_: video_headers.Header(reason="opened"))
    assert read_headers(data.clips)[:16] == first[:16]  # the last one is no video


def test_an_index_of_another_user_is_read(folder, monkeypatch):
    data = VideoFolder(folder, **SMALL)
    file = folder / "videos/.cogfast-index"
    first, before = read_headers(data.clips), file.read_text()
    write_clip(folder / "videos/05a.mp4", constant_rate(9, 8), size=(32, 48))
    (folder / "labels/05a.txt").write_text("new")
    data = VideoFolder(folder, **SMALL)
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != file)
    probed, real = [], video_headers._probe
    monkeypatch.setattr(video_headers, "_probe", lambda *given: (probed.append(1), real(*given))[1])
    for number in (2, 1):  # the new one, and the one that is no video, which is always opened
        probed.clear()
        assert [one for i, one in enumerate(read_headers(data.clips)) if i != 6] == first
        assert len(probed) == number
    assert file.read_text() == before


@pytest.mark.parametrize(
    "names",
    [("/data1/a", "/data2/b"), ("/data/a", "s3://b/a"), ("s3://a/x", "s3://b/x"), ("a", "b")],
)
def test_data_without_a_common_folder_leave_none_in_the_current_one(names, tmp_path, monkeypatch):
    found = []
    for folder in ("one", "two"):
        planted = tmp_path / folder / ".cogfast-index"
        planted.parent.mkdir()
        planted.write_text('["planted", "version", 1]')
        monkeypatch.chdir(planted.parent)
        packed = PackedStrings(names)
        index, common = video_headers.index_of(ClipList(files=packed, captions=packed))
        assert index.last("planted") is None
        index.add([("name", "version", 1)])
        assert not names[0].startswith("/") or common == ""
        found.append(index.path)
    assert "name" not in "".join(file.read_text() for file in tmp_path.glob("*/*"))
    # Only relative names are those of other files there.
    assert (found[0] == found[1]) == (names[0] != "a")


def test_headers_in_shards(folder, tmp_path):
    members = {}
    for path in sorted((folder / "videos").iterdir()):
        members[path.name] = path.read_bytes()
        members[path.stem + ".txt"] = b"a"
    shard = _tar(tmp_path / "x.tar", members)
    data = VideoShards([str(shard)], **SMALL, buckets=BUCKETS)
    assert survey(data).buckets.tolist() == WANTED


def _steps(data, steps, micro_batch, accumulation=1, dp_size=1, start_step=0, num_workers=0):
    """Read all ranks' batches as {(step, slot): (name, shape)}."""
    seen = {}
    for rank in range(dp_size):
        order = data.order(7, micro_batch * accumulation * dp_size)
        with BatchLoader(data, order, micro_batch=micro_batch, accumulation=accumulation,
                         dp_rank=rank, dp_size=dp_size, start_step=start_step, num_steps=steps,
                         num_workers=num_workers) as loader:  # fmt: skip
            for batch in loader:
                for slot, name in zip(batch["slots"], batch["txt"], strict=True):
                    seen[batch["step"], slot] = name, tuple(batch["mp4"].shape[1:])
    return seen


def test_every_layout_and_restart_reads_the_same(folder):
    data = VideoFolder(folder, **SMALL, buckets=BUCKETS)
    data = in_buckets(data, survey(data)).with_source_weights([1.5])
    steps = data.order(7, 4).num_steps(2)
    straight = _steps(data, steps, 4)
    for step in range(steps):
        assert len({straight[step, slot][1] for slot in range(4)}) == 1  # one bucket a step
    for name, shape in set(straight.values()):
        number, (frames, rows, columns) = int(name[-2:]), BUCKETS[WANTED[int(name[-2:])]]
        assert shape == (frames, 3, rows, columns) and WANTED[number] >= 0
    assert {int(name[-2:]) for name, _ in straight.values()} == set(range(14))  # nothing dropped
    assert _steps(data, steps, 1, 2, 2) == straight
    assert _steps(data, steps, 2, 1, 2, num_workers=2) == straight
    rest = {key: value for key, value in straight.items() if key[0] >= 3}
    assert _steps(data, steps - 3, 2, 2, start_step=3) == rest


def test_buckets_are_checked(tmp_path):
    sat_folder(tmp_path, 1)
    for buckets, message in (
        ([[9, 32]], "data.params.buckets[0]=[9, 32] must be [frames, rows, columns]"),
        ([[9, 32, 48], [9, 32, 0]], "buckets[1]=[9, 32, 0] must be"),
        ([[9, 32, 48], [9, 32, 48]], "buckets[1]=[9, 32, 48] is listed twice; remove it"),
    ):
        assert_refused(lambda b=buckets: VideoFolder(tmp_path, **SMALL, buckets=b), message)
