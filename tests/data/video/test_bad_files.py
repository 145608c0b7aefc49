"""Files that are not usable clips: reported before training and while reading, and replaced."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from cogfast.data.bad_samples import BadSample
from cogfast.data.batches import BatchLoader
from cogfast.data.buckets import survey
from cogfast.data.datasets import VideoFolder
from cogfast.data.sources import headers as video_headers
from cogfast.data.video import reader as video_file
from cogfast.data.video.clip import read_image
from cogfast.data.video.reader import open_video, read_header
from tests.cli.hostile.media_kinds import BAD
from tests.support.refusals import assert_refused
from tests.support.video_files import constant_rate, sat_folder, write_clip

CLIP = {"video_size": [32, 48], "fps": 8, "max_num_frames": 9}


def _cut_short(path: Path) -> None:
    """Cut off frames, as a broken download does to a file that begins with its index."""
    write_clip(path, constant_rate(9, 8), size=(32, 48), faststart=True)
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b"mdat") + 60])


def _made(kind: str) -> Callable[[Path], None]:
    """Replace a clip by a file of the hostile suite."""
    return lambda path: (path.unlink(), BAD[kind](path))[0]


def _all_at_once(path: Path) -> None:
    """Set the time between frames to one tick of the clock in the file's index."""
    whole = bytearray(path.read_bytes())
    start = whole.index(b"stts") + 8
    for i in range(int.from_bytes(whole[start : start + 4], "big")):
        whole[start + 8 * i + 8 : start + 8 * i + 12] = bytes(3) + b"\x01"
    path.write_bytes(whole)


# {kind: (function that damages a good clip, reason from its header (None: good), reason from reading)}
KINDS = {
    "truncated": (
        _made("cut at 60%"),
        "no video stream in it",
        "no video stream|not a readable video",
    ),
    "cut short": (_cut_short, None, "do not decode|does not decode|truncated|not a readable video"),
    "zero bytes": (_made("zero bytes"), r"empty \(0 bytes\)", r"empty \(0 bytes\)"),
    "audio only": (
        _made("audio alone"),
        "no video stream in it",
        "no video stream in it|not a readable",
    ),
    "one frame": (
        _made("one frame"),
        "1 frame at .* fps = .* s, need 1.1 s",
        "1 frame at .* fps = .* s, need 1.1 s",
    ),
    # A good clip followed by zeros is still a good clip.
    "huge": (lambda p: os.truncate(p, 3 * 2**30), None, None),
    "huge and empty": (
        lambda p: (p.write_bytes(b""), os.truncate(p, 3 * 2**30)),
        "not a readable video",
        "not a readable video",
    ),
    "no video": (_made("text"), "not a readable video", "not a readable video"),
    "unreadable": (_made("a link to itself"), "cannot be opened", "cannot be opened"),
    "a pipe": (_made("a pipe"), "not a file but a folder, pipe", "not a file but a folder, pipe"),
    "a picture": (
        _made("a picture"),
        "a picture, not a video; to train on pictures, add",
        r"image \(png\)|not a readable|1 frame at",
    ),
    "all at once": (
        _all_at_once,
        "9 frames at 90000 fps = 0.0 s, need 1.1 s",
        r"\d frames at .* fps = 0\.\d s, need 1.1 s",  # some frames precede the first shown one
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_unusable_file_is_reported_and_replaced(kind, tmp_path):
    spoil, surveyed, read = KINDS[kind]
    sat_folder(tmp_path / "d", 6)
    path = tmp_path / "d/videos/03.mp4"
    spoil(path)
    data = VideoFolder(tmp_path / "d", **CLIP)
    found = survey(data)
    if surveyed is None:
        assert found.reasons == {}
    else:
        (reason,) = found.reasons.values()
        assert list(found.reasons) == [3] and found.buckets.tolist() == [0, 0, 0, -1, 0, 0]
        assert "\n" not in reason
        assert re.search(surveyed, reason), reason
    file = tmp_path / "bad_samples.jsonl"
    with BatchLoader(data, data.order(0, 3), micro_batch=3, num_steps=4, num_workers=0,
                     bad_samples_path=file, timeout=30.0) as loader:  # fmt: skip
        captions = [text for batch in loader for text in batch["txt"]]
    if read is None:
        assert captions.count("clip 03") == 2 and not file.exists()
        return
    assert len(captions) == 12 and "clip 03" not in captions
    (line,) = map(json.loads, file.read_text().splitlines())
    assert line["path"] == str(path) and re.search(read, line["reason"]), line


def test_frames_too_large_to_hold(tmp_path, monkeypatch):
    sat_folder(tmp_path, 2)
    monkeypatch.setattr(video_file, "MAX_PIXELS", 32 * 48)
    data = VideoFolder(tmp_path, **CLIP)
    (reason,) = survey(data).reasons.values()
    assert reason == "frames of 48 x 48 pixels; at most 1536 are read"
    with pytest.raises(BadSample, match=reason):  # also without a survey
        data[1]


def test_more_frames_than_a_video_has(tmp_path, monkeypatch):
    """A header that claims 2^31 frames must not allocate as many times."""
    sat_folder(tmp_path, 2)
    monkeypatch.setattr(video_headers, "MAX_FRAMES", 8)
    reasons = survey(VideoFolder(tmp_path, **CLIP)).reasons.values()
    assert list(reasons) == ["header claims 9 frames; at most 8 are read"] * 2


def test_a_name_is_not_taken_for_a_url(here):
    """FFmpeg by itself would read a.mp4 for the file name "concat:a.mp4"."""
    sat_folder(Path("."), 1)
    os.rename("videos/00.mp4", "a.mp4")
    Path("concat:a.mp4").write_text("no video")
    assert_refused(lambda: read_header("concat:a.mp4"), "not a readable video", BadSample)
    Path("a.mp4").rename("http:a.mp4")
    assert len(read_header("http:a.mp4").times) == 9


@pytest.mark.parametrize("reader", ["pyav", "decord"])
def test_a_file_that_names_other_files_opens_none(tmp_path, reader):
    """FFmpeg recognizes playlists and lists of parts by content, whatever the file extension."""
    good = sat_folder(tmp_path, 1) / "videos/00.mp4"
    path = tmp_path / "list.mp4"
    path.write_text(f"ffconcat version 1.0\nfile {good.relative_to(tmp_path)}\n")
    with pytest.raises(BadSample, match="damaged, or not a supported format"):
        open_video(str(path), reader)
    assert "damaged, or not a supported" in video_headers.probe(str(path), 50).reason
    path.write_text("#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nvideos/00.mp4\n#EXT-X-ENDLIST\n")
    assert_refused(lambda: open_video(str(path), reader), "not a readable video", BadSample)


def test_a_picture_runs_no_program(tmp_path, monkeypatch):
    """Pillow starts Ghostscript for EPS."""
    from PIL import EpsImagePlugin

    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *a, **k: started.append(a))
    Image.new("RGB", (48, 32)).save(tmp_path / "x.eps")
    (tmp_path / "x.eps").rename(tmp_path / "x.png")
    with pytest.raises(BadSample, match="not a readable image; use PNG, JPEG"):
        read_image(str(tmp_path / "x.png"), (32, 48))
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(BadSample, match="not a file but a folder, pipe or device"):
        read_image(str(tmp_path / "pipe.png"), (32, 48))
    assert not started


def test_the_same_name_in_two_folders(tmp_path):
    """Each is a separate sample with its own caption, also in the list of bad samples."""
    for folder in "ab":
        sat_folder(tmp_path / folder, 1)
        (tmp_path / folder / "labels/00.txt").write_text(f"of {folder}")
    data = VideoFolder([str(tmp_path / "a"), str(tmp_path / "b")], **CLIP)
    assert [(data[i]["txt"], data[i]["path"]) for i in range(2)] == [
        (f"of {folder}", f"{tmp_path}/{folder}/videos/00.mp4") for folder in "ab"
    ]
    (tmp_path / "b/videos/00.mp4").write_bytes(b"")
    data = VideoFolder([str(tmp_path / "a"), str(tmp_path / "b")], **CLIP)
    assert list(survey(data).reasons) == [1] and data.name(1).endswith("b/videos/00.mp4")


def test_a_full_disk_costs_the_index_of_headers_alone(tmp_path, file_limit, caplog):
    data = VideoFolder(sat_folder(tmp_path, 2), **CLIP)
    with file_limit(100):
        assert survey(data).reasons == {}
    (line,) = [
        line for line in caplog.messages if "so the next start reads the files again" in line
    ]
    assert "File too large" in line


def test_unreadable_files_are_tried_again(tmp_path):
    """A change of permissions changes neither size nor mtime."""
    path = sat_folder(tmp_path, 2) / "videos/01.mp4"
    good, stat = path.read_bytes(), path.stat()
    for content, bad in ((bytes(len(good)), [1]), (good, [])):
        path.write_bytes(content)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert list(survey(VideoFolder(tmp_path, **CLIP)).reasons) == bad
