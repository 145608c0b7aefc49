"""DALI compared with PyAV, on a CPU with VP9: frames, pixels, fall-backs, batches, `cogfast cache`.

`make test-dali` installs DALI and runs this file.
"""

import importlib.util
import logging
import threading
import time
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from cogfast.data.bad_samples import BadSample
from cogfast.data.batches import BatchLoader
from cogfast.data.datasets import VideoFolder, VideoShards
from cogfast.data.video import clip as clip_reader
from cogfast.data.video.clip import ClipSettings, read_clip
from cogfast.data.video.reader import open_video
from cogfast.data.video.transform import resize_and_center_crop, select_frames_timestamp
from cogfast.extensions.cache.command import cache_latents
from cogfast.extensions.dali.dali import DaliReader, DaliRefusal
from tests.extensions.cache.test_cache import Recorder, contents
from tests.extensions.tar.test_tar_shards import _tar
from tests.support.refusals import assert_refused
from tests.support.runs import Run
from tests.support.tiny_run import SIDE, write_clips
from tests.support.video_files import RATES, constant_rate, decode_all, write_clip

HAS_DALI = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali")
WITH_DALI = pytest.mark.skipif(not HAS_DALI, reason="DALI is not installed: make test-dali")
# Levels of 255. Flat colours differ by one or two, from rounding in FFmpeg's conversion to RGB. Sharp
# edges differ by more, because chroma is upsampled differently, and by less when scaled down.
MOST_OFF, MOST_OFF_SCALED_DOWN, MOST_OFF_ON_AVERAGE = 75, 40, 2.5


def _settings(backend: str, **changes: object) -> ClipSettings:
    params = {"video_size": (32, 48), "fps": 8, "max_num_frames": 13, "video_backend": backend}
    return ClipSettings(**{**params, **changes})


def _vp9(path: Path, times: np.ndarray, size: tuple[int, int] = (96, 128)) -> Path:
    return write_clip(path, times, size=size, codec="libvpx-vp9")


def _colours(path: Path, *, matrix: int = 2, turned: int = 0, size=(96, 128)) -> Path:
    """Write five frames of coloured areas. matrix: FFmpeg's number of the colour matrix."""
    height, width = size
    picture = np.zeros((height, width, 3), np.uint8)
    picture[:, : width // 3] = (200, 30, 60)
    picture[: height // 2, width // 3 :] = (20, 180, 40)
    picture[height // 2 :, width // 3 :] = (30, 60, 190)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libvpx-vp9", rate=8)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.colorspace = matrix
        stream.options = {"crf": "10"}
        if turned:
            stream.set_display_rotation(turned)
        for _ in range(5):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


def _assert_near(
    ours: torch.Tensor, pyavs: torch.Tensor, most: int, average: float = MOST_OFF_ON_AVERAGE
) -> None:
    assert ours.dtype == torch.uint8 and ours.shape == pyavs.shape
    off = (ours.int() - pyavs.int()).abs()
    assert off.max() <= most and off.float().mean() <= average, (
        f"{off.max()} levels at most, {off.float().mean():.2f} on average"
    )


@pytest.fixture
def dali() -> DaliReader:
    """The process's DALI reader, newly created."""
    clip_reader._reader_of_process.cache_clear()
    return clip_reader.device_reader("dali")


@WITH_DALI
@pytest.mark.parametrize("rate", RATES)
def test_frames_are_those_of_the_timestamps(rate, dali, tmp_path):
    """Each frame is the source frame shown nearest to k/8 s, identified by its level of grey."""
    path = _vp9(tmp_path / "a.mp4", RATES[rate])
    with av.open(str(path)) as container:
        shown = np.array([frame.time for frame in container.decode(video=0)])
    nearest = [int(abs(shown - shown[0] - k / 8).argmin()) for k in range(13)]
    video = dali.open(str(path))
    chosen = select_frames_timestamp(video.times, 8, 13).indices
    assert chosen.tolist() == nearest
    clip = dali.read(video, chosen, (64, 64))
    assert clip.shape == (13, 3, 64, 64)
    levels = decode_all(path)[:, -20:, 32:96].mean(axis=(1, 2, 3))  # the block moves at the top
    read = clip[:, :, -10:].float().mean(dim=(1, 2, 3)).numpy()
    assert abs(read - levels[nearest]).max() < 1.5  # neighbours are 8 apart
    own = open_video(str(path), "decord").read(chosen.tolist())
    _assert_near(clip, resize_and_center_crop(own, (64, 64)), MOST_OFF_SCALED_DOWN)


@WITH_DALI
@pytest.mark.parametrize(
    ("target", "matrix"),
    [((64, 64), 2), ((32, 80), 1), ((96, 40), 9), ((96, 128), 1), ((120, 90), 2)],
    ids=["smaller", "wide, BT.709", "narrow, BT.2020", "same, BT.709", "larger"],
)
def test_pixels_are_near_pyavs(target, matrix, dali, tmp_path):
    """Frames are scaled, cropped at the centre, and have the colours of the file's matrix; or are
    squeezed to the target."""
    path = str(_colours(tmp_path / "a.mp4", matrix=matrix))
    video, frames = dali.open(path), np.array([0, 3])
    cropped = dali.read(video, frames, target)
    is_smaller = target[0] < 96 and target[1] < 128
    own = resize_and_center_crop(open_video(path).read([0, 3]), target)
    _assert_near(cropped, own, MOST_OFF_SCALED_DOWN if is_smaller else MOST_OFF)
    if matrix == 2:
        own = open_video(path, "pyav", target).read([0, 3]).permute(0, 3, 1, 2)
        # FFmpeg's scaler makes flat colours up to two levels darker than its conversion alone.
        _assert_near(dali.read(video, frames, target, "stretch"), own, 90, 4.0)


@WITH_DALI
def test_colours_of_another_matrix_are_far_off(dali, tmp_path):
    """A control: without the correction the test above would fail."""
    path = _colours(tmp_path / "a.mp4", matrix=1)
    right = resize_and_center_crop(open_video(str(path)).read([0]), (96, 128)).float()
    named = dali.open(str(path))
    unnamed = dali.open(str(_colours(tmp_path / "b.mp4")))
    assert (named.colour_matrix, unnamed.colour_matrix) == (1, 2)
    wrong = dali.read(unnamed, np.array([0]), (96, 128)).float()
    assert (wrong - right).abs().mean() > 3 * MOST_OFF_ON_AVERAGE


@WITH_DALI
def test_pyav_reads_what_dali_cannot_decode(dali, tmp_path, caplog):
    """H.264 on a CPU, rotated frames, and files that are not videos."""
    for name in "abcde":
        write_clip(tmp_path / f"{name}.mp4", constant_rate(30, 15))
    _colours(tmp_path / "turned.mp4", turned=90)
    (tmp_path / "text.mp4").write_text("not a video")
    with caplog.at_level(logging.WARNING, logger="cogfast"):
        for name in ("a", "b", "c", "d", "e", "turned"):
            path = str(tmp_path / f"{name}.mp4")
            is_asked = dali.open(path) is not None
            assert is_asked == (name in "abc")  # then the kind is known
            ours, _ = read_clip(path, _settings("dali", max_num_frames=5))
            own, _ = read_clip(path, _settings("pyav", max_num_frames=5))
            assert torch.equal(ours, own)
    warning = "videos of the kind h264 yuv420p 64x48 that DALI cannot decode are read by PyAV ("
    assert [text.startswith(warning) for text in caplog.messages] == [True]
    assert dali.open(str(tmp_path / "text.mp4")) is None


@WITH_DALI
def test_broken_files_do_not_affect_others(dali, tmp_path):
    """Many broken files before a good one change neither its pixels nor its decoder."""
    good = _vp9(tmp_path / "good.mp4", constant_rate(20, 10))
    alone = DaliReader(torch.device("cpu"))
    expected = alone.read(alone.open(str(good)), np.arange(13), (32, 48))
    content = good.read_bytes()
    middle = content.index(b"mdat") + (content.index(b"moov") - content.index(b"mdat")) // 2
    for i in range(4):
        noise = np.random.default_rng(i).bytes(content.index(b"moov") - middle - 8)
        bad = tmp_path / f"{i}.mp4"
        bad.write_bytes(content[:middle] + noise + content[middle + len(noise) :])
        with pytest.raises(DaliRefusal):
            dali.read(dali.open(str(bad)), np.arange(13), (32, 48))
        with pytest.raises(BadSample, match=r"do(es)? not decode"):
            read_clip(str(bad), _settings("dali", fps=10))
    ours, _ = read_clip(str(good), _settings("dali", fps=10))
    assert torch.equal(ours, expected)
    for _ in range(4):  # as good files that another profile keeps from DALI would
        dali.note_refusal(dali.open(str(good)), DaliRefusal("of another profile"))
    ours, _ = read_clip(str(good), _settings("dali", fps=10))
    assert torch.equal(ours, expected)


def _folder(root: Path) -> Path:
    """Write VP9 clips in SAT's layout: two broken, one too short, one with another codec."""
    (root / "labels").mkdir(parents=True)
    for i in range(12):
        path = root / f"videos/{i:02}.mp4"
        if i == 5:
            write_clip(path, constant_rate(20, 10), size=(96, 128))
        else:
            _vp9(path, constant_rate(8 if i == 4 else 20, 10), size=(96, 112 + 16 * (i % 2)))
        (root / f"labels/{i:02}.txt").write_text(f"clip {i:02}\n")
    (root / "videos/01.mp4").write_text("not a video")
    whole = (root / "videos/02.mp4").read_bytes()
    (root / "videos/02.mp4").write_bytes(whole[: len(whole) // 2])
    return root


@WITH_DALI
@pytest.mark.parametrize("num_workers", [1, 4])
def test_batches_are_those_of_reading_processes(num_workers, tmp_path):
    folder, seen = _folder(tmp_path / "d"), {}
    for backend in ("pyav", "dali"):
        data = VideoFolder(folder, (32, 48), 8, 13, video_backend=backend, short_clips="skip")
        file = tmp_path / f"{backend}.jsonl"
        given = {"micro_batch": 2, "accumulation": 2, "dp_rank": 1, "dp_size": 2}
        given |= {"start_step": 1, "num_steps": 4, "num_workers": num_workers}
        given |= {"bad_samples_path": file, "max_bad_fraction": 0.3}
        with BatchLoader(data, data.order(3, 8), **given) as loader:
            seen[backend] = list(loader), set(loader.bad_samples.reasons)
    assert seen["dali"][1:] == seen["pyav"][1:] and len(seen["dali"][1]) == 3
    assert len(seen["dali"][0]) == 8
    for ours, own in zip(seen["dali"][0], seen["pyav"][0], strict=True):
        assert ours.keys() == own.keys()
        assert [path for path, _ in ours["bad"]] == [path for path, _ in own["bad"]]
        for key in ("step", "slots", "txt", "paths"):
            assert ours[key] == own[key]
        for key in ("fps", "num_frames"):
            assert torch.equal(ours[key], own[key])
        _assert_near(ours["mp4"], own["mp4"], MOST_OFF_SCALED_DOWN)


@WITH_DALI
def test_errors_come_in_their_place_and_close_is_prompt(tmp_path):
    data = VideoFolder(_folder(tmp_path), (32, 48), 8, 13, video_backend="dali")
    loader = BatchLoader(data, data.order(0, 1), micro_batch=1, max_bad_fraction=0.1)
    batches = []
    with pytest.raises(ValueError, match=r"[23]/12 videos unreadable \(>10%\)"):
        for batch in loader:
            batches.append(batch)
    assert [batch["step"] for batch in batches] == list(range(len(batches)))
    loader = BatchLoader(data, data.order(0, 1), micro_batch=1, max_bad_fraction=1.0)
    next(loader)
    start = time.monotonic()
    loader.close()
    assert time.monotonic() - start < 60 and list(loader) == []


@WITH_DALI
def test_no_read_is_in_flight_after_close(tmp_path, monkeypatch):
    """A process that exits while DALI runs is aborted, so a successful run would fail at its end."""
    for i in range(2):
        _vp9(tmp_path / f"videos/{i}.mp4", constant_rate(40, 10), size=(320, 480))
    counts, read = {"begun": 0, "ended": 0}, VideoFolder._read

    def counted(data: VideoFolder, index: int) -> dict:
        counts["begun"] += 1
        try:
            return read(data, index)
        finally:
            counts["ended"] += 1

    monkeypatch.setattr(VideoFolder, "_read", counted)
    data = VideoFolder(tmp_path, (240, 320), 8, 25, allow_empty_captions=True, video_backend="dali")
    with BatchLoader(data, data.order(0, 1), micro_batch=1, num_workers=2) as loader:
        next(loader)
        begun = counts["begun"]
    assert begun > 1 and counts["begun"] == counts["ended"]


@WITH_DALI
def test_members_of_a_shard_are_read_by_dali(dali, tmp_path):
    clip = _vp9(tmp_path / "clip.mp4", constant_rate(20, 10))
    _tar(tmp_path / "s.tar", {"a.mp4": clip.read_bytes(), "a.txt": b"a"})
    shard = VideoShards([str(tmp_path / "s.tar")], (32, 48), 8, 9, video_backend="dali")
    expected, _ = read_clip(str(clip), _settings("dali", max_num_frames=9))
    assert torch.equal(shard[0]["video"], expected)


class Hanging(VideoFolder):
    """Hangs at sample 2."""

    def _read(self, index: int) -> dict:
        if index == 2:
            threading.Event().wait()
        return super()._read(index)


@WITH_DALI
def test_a_file_that_hangs_costs_its_time_out(tmp_path):
    """A file that hangs times out, and the other threads continue."""
    data = Hanging(_folder(tmp_path), (32, 48), 8, 9, video_backend="dali")
    start = time.monotonic()
    with BatchLoader(data, data.order(0, 12), micro_batch=6, accumulation=2, num_steps=4,
                     timeout=1.0, num_workers=2, max_bad_fraction=0.5) as loader:  # fmt: skip
        batches = list(loader)
        reason = "reading took longer than args.decode_timeout=1 s"
        assert loader.bad_samples.reasons[data.paths[2]] == reason
    assert time.monotonic() - start < 60
    assert len(batches) == 8 and all(len(batch["txt"]) == 6 for batch in batches)
    assert "clip 02" not in {text for batch in batches for text in batch["txt"]}


@WITH_DALI
def test_a_cache_is_made_by_dali(tmp_path):
    """An interrupted cache has the same files; training from it, even with another reader
    configured, gets what training from DALI's pixels gets."""
    folder = write_clips(tmp_path / "d", 10)
    for path in (folder / "videos").glob("*.mp4"):
        _vp9(path, constant_rate(9 + int(path.stem), 8), size=(2 * SIDE, 2 * SIDE))
    (folder / "videos/7.mp4").write_text("not a video")
    args = {"train_iters": 4, "num_workers": 1, "max_bad_fraction": 0.2}
    run = Run(folder, tmp_path, "5b_i2v").with_args(**args)

    def reading(backend: str, cache: str | None) -> Run:
        words = [] if cache is None else [f"args.latent_cache={tmp_path / cache}"]
        return run.with_words(f"data.params.video_backend={backend}", *words)

    for cache, backend, more in (
        ("dali", "dali", []),
        ("again", "dali", ["args.num_workers=4"]),
        ("pyav", "pyav", []),
    ):
        cache_latents(reading(backend, cache).config(*more).run)
        if cache == "again":
            lost = sorted((tmp_path / cache).glob("video*/*/*.safetensors"))[0]
            lost.unlink()
            cache_latents(reading("dali", cache).config().run)
            assert contents(tmp_path / "dali") == contents(tmp_path / "again")
    assert contents(tmp_path / "dali") != contents(tmp_path / "pyav")
    cached = reading("pyav", "dali").by(Recorder).train().last
    pixels = reading("dali", None).by(Recorder).train().last
    assert cached.paths == pixels.paths and len(cached.paths) == 16
    for found, expected in zip(cached.seen, pixels.seen, strict=True):
        assert len(found) == 3  # latents, text, the noised image's
        for tensor, other in zip(found, expected, strict=True):
            assert torch.equal(tensor, other)


def test_auto_says_why_pyav_reads(log, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # with a GPU, auto may take DALI
    clip_reader._reader_of_process.cache_clear()
    for _ in range(2):
        assert clip_reader.device_reader("auto") is None
    assert log.text.count("videos are decoded by PyAV, not by DALI: there is no GPU") == 1


@pytest.mark.skipif(bool(HAS_DALI), reason="DALI is installed")
def test_dali_configured_and_missing():
    line = "data.params.video_backend=dali: DALI cannot be imported (<...>; pip install <...>; auto"
    assert_refused(lambda: _settings("dali"), line)
