"""Frames compared with PyAV's own decoding, times with the file's, and all kinds of broken files."""

import contextlib
import gc
from fractions import Fraction

import av
import numpy as np
import pytest
import torch

from cogfast.data.bad_samples import BadSample
from cogfast.data.sources.headers import probe
from cogfast.data.video.reader import PyAVReader, open_video
from cogfast.data.video.transform import select_frames_timestamp
from tests.support.refusals import assert_refused
from tests.support.video_files import (
    BIKES,
    BUNNY,
    CARPHONE,
    RATES,
    constant_rate,
    decode_all,
    write_clip,
)

_LAYERS = "b-adapt=0:keyint=24:log-level=none"
_OPEN = "open-gop=1:keyint=24:scenecut=0"
READERS = pytest.mark.parametrize("reader", ["decord", "pyav"])


@READERS
@pytest.mark.parametrize(
    "clip, indices",
    [
        (BIKES, [0, 3, 6, 100, 101, 249]),
        (CARPHONE, list(range(5, 120, 4))),
        (BUNNY, [0, 40, 40, 41, 131]),
    ],
    ids=["bikes", "carphone", "bigbuckbunny"],
)
def test_frames_are_pyavs_bit_for_bit(reader, clip, indices):
    path = str(clip)
    video = open_video(path, reader)
    half = len(indices) // 2
    # The second half first: a reader may go back.
    frames = [video.read(indices[half:]), video.read(indices[:half])]
    assert np.array_equal(torch.cat(frames[::-1]).numpy(), decode_all(path)[indices])


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
    """Compare with PyAV's frames and its times of them, frame by frame."""
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
def test_frames_are_rotated_for_display(degrees, reader, tmp_path):
    """Phones store portrait videos in landscape, with a rotation."""
    path = str(tmp_path / "a.mp4")
    with av.open(path, "w") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = 128, 96, "yuv420p"
        stream.set_display_rotation(degrees)
        picture = np.zeros((96, 128, 3), np.uint8)
        picture[:48, :64] = 200
        stream.options = {"g": "2"}
        for _ in range(5):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    frames = open_video(path, reader).read([1, 4]).numpy()
    assert np.array_equal(frames[0], np.rot90(decode_all(path)[1], degrees // 90))
    assert np.array_equal(frames[1], np.rot90(decode_all(path)[4], degrees // 90))


def test_a_codec_that_decord_does_not_know(tmp_path):
    """decord 0.6 is built with an FFmpeg without AV1."""
    path = write_clip(tmp_path / "a.mp4", constant_rate(6, 8), codec="libsvtav1", size=(64, 96))
    assert_refused(lambda: open_video(str(path), "decord"), "not a readable video", BadSample)
    assert np.array_equal(open_video(str(path)).read([1, 5]).numpy(), decode_all(path)[[1, 5]])


@pytest.mark.parametrize("width", [16, 48, 50, 98])
def test_narrow_frames(width, tmp_path):
    """dmlc/decord issue 336: it reads four channels if padding makes a row a third longer."""
    path = write_clip(tmp_path / "a.mp4", constant_rate(5, 8), size=(34, width))
    assert np.array_equal(open_video(str(path)).read([0, 2, 4]).numpy(), decode_all(path)[::2])
    if width == 48:
        with pytest.raises(BadSample, match="frames 0..4 of 5 do not decode"):
            open_video(str(path), "decord").read([0, 2, 4])


# {name: (suffix, codec, options of the encoder)}
_CODED = {
    "pyramid": (".mp4", "libx264", {"x264-params": "bframes=6:b-adapt=0:keyint=24"}),
    "open GOP": (".mp4", "libx264", {"x264-params": f"{_OPEN}:bframes=6:b-adapt=0"}),
    "open GOP, ts": (".ts", "libx264", {"x264-params": f"{_OPEN}:bframes=4:b-adapt=0"}),
    "mkv": (".mkv", "libx264", {"g": "24"}),
    "interlaced": (".mp4", "libx264", {"x264-params": "interlaced=1:keyint=24"}),
    "HEVC": (".mp4", "libx265", {"x265-params": f"{_OPEN}:bframes=4:log-level=none"}),
    "HEVC, layers": (".mp4", "libx265", {"x265-params": f"temporal-layers=3:bframes=7:{_LAYERS}"}),
    "VP9": (".webm", "libvpx-vp9", {"g": "24", "auto-alt-ref": "1", "cpu-used": "8"}),
    "MPEG-4": (".mp4", "mpeg4", {"g": "24", "bf": "2"}),
    "intra refresh": (".mp4", "libx264", {"x264-params": "intra-refresh=1:keyint=24"}),
    "H.264 in AVI": (".avi", "libx264", {"g": "24"}),
    "H.263": (".avi", "h263p", {"g": "24"}),
}
# Files in which frames must be counted. In this order: packets marked as keyframes that do not decode
# alone; no times of display; all packets marked as keyframes.
_COUNTED = ("intra refresh", "H.264 in AVI", "H.263")
_DECORD_IS_RIGHT = ("pyramid", "mkv", "VP9")  # for the others decord returns wrong frames


@pytest.mark.parametrize("name", _CODED)
def test_skipped_frames_change_no_pixel(name, tmp_path, monkeypatch):
    """Compare chosen frames with a decode of the whole file."""
    suffix, codec, options = _CODED[name]
    path = tmp_path / f"a{suffix}"
    write_clip(path, constant_rate(80, 30), codec=codec, options=options)
    expected = decode_all(path)
    assert len(expected) == 80
    if name not in _COUNTED:
        monkeypatch.delattr(PyAVReader, "_by_count")
    video = open_video(str(path))
    decord = open_video(str(path), "decord") if name in _DECORD_IS_RIGHT else None
    np.testing.assert_allclose(video.times, constant_rate(80, 30), atol=1e-3)
    chosen = [
        list(range(80)),
        list(range(1, 80, 4)),  # 8 per second
        list(range(62, 79, 2)),  # the end of a long file
        [2, 41, 76],
        sorted(np.random.default_rng(1).integers(0, 80, 9).tolist()),
    ]
    chosen += [[i] for i in range(45, 55)]  # on both sides of a keyframe
    for indices in chosen:
        for reader in filter(None, (video, decord)):
            assert np.array_equal(reader.read(indices).numpy(), expected[indices]), indices


def test_frames_that_an_edit_list_cuts_off(tmp_path):
    """Such frames are stored to decode others, and are not shown."""
    whole = write_clip(tmp_path / "whole.mp4", constant_rate(40, 20))
    path = str(tmp_path / "cut.mp4")
    options = {"avoid_negative_ts": "disabled"}
    with av.open(str(whole)) as source, av.open(path, "w", options=options) as container:
        stream = source.streams.video[0]
        copy = container.add_stream_from_template(stream)
        for packet in source.demux(stream):
            if packet.size:
                packet.pts -= round(0.75 / packet.time_base)
                packet.dts -= round(0.75 / packet.time_base)
                packet.stream = copy
                container.mux(packet)
    video = open_video(path)
    np.testing.assert_allclose(video.times, constant_rate(25, 20), atol=1e-4)
    frames = video.read(list(range(25))).numpy()
    assert np.array_equal(frames, decode_all(path))
    assert np.array_equal(frames, decode_all(whole)[15:])
    assert np.array_equal(video.read([3, 20]).numpy(), frames[[3, 20]])


def test_decords_bridge_may_be_set_for_the_process(tmp_path):
    """CogVideo's diffusers trainer sets it when it is imported, and a user's class may import that."""
    import decord

    path = str(write_clip(tmp_path / "a.mp4", constant_rate(25, 8)))
    plain = open_video(path, "decord").read([0, 3])
    decord.bridge.set_bridge("torch")
    try:
        assert torch.equal(open_video(path, "decord").read([0, 3]), plain)
    finally:
        decord.bridge.set_bridge("native")


def test_no_decoder_outlives_its_sample(tmp_path):
    """A decoder kept alive by a traceback would hang forked workers that collect it."""
    import decord

    write_clip(tmp_path / "a.mp4", constant_rate(5, 8), size=(34, 48))  # decord opens it alone
    (tmp_path / "text.mp4").write_text("not a video")
    gc.collect()
    gc.disable()
    try:
        for reader in ("decord", "pyav"):
            for file in ("a.mp4", "text.mp4"):
                with contextlib.suppress(BadSample):
                    video = open_video(str(tmp_path / file), reader)
                    video.read([0, 1])
                    video.close()
        alive = [o for o in gc.get_objects() if isinstance(o, decord.VideoReader)]
        readers = [o for o in alive if o._handle is not None]
        containers = [o for o in gc.get_objects() if type(o).__name__ == "InputContainer"]
    finally:
        gc.enable()
    assert not readers and not containers


@READERS
@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "empty"),
        (b"caption, not a video\n", "not a readable video"),
        (None, "cannot be opened"),
    ],
    ids=["zero bytes", "text", "missing"],
)
def test_files_that_are_not_videos(reader, content, reason, tmp_path):
    path = tmp_path / "x.mp4"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadSample, match=reason) as error:
        open_video(str(path), reader)
    assert error.value.path == str(path)
    assert "\n" not in error.value.reason


@pytest.mark.parametrize("faststart", [False, True], ids=["index at the end", "index in front"])
@READERS
def test_truncated_file(reader, faststart, tmp_path):
    path = write_clip(tmp_path / "t.mp4", constant_rate(60, 30), faststart=faststart)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 7 // 10])
    with pytest.raises(BadSample, match="not a readable video|truncated: [0-9]+ of 60 frames"):
        open_video(str(path), reader).read(list(range(60)))


def test_an_unknown_codec(tmp_path):
    path = write_clip(tmp_path / "u.mp4", constant_rate(9, 8))
    path.write_bytes(path.read_bytes().replace(b"avc1", b"zzz1"))
    assert_refused(lambda: open_video(str(path)), "no decoder for its video", BadSample)
    assert probe(str(path), 1).reason.startswith("no decoder for its video")


def test_a_size_that_changes_within_the_video(tmp_path):
    """Recordings of calls may change size: later frames are scaled to the size of the first."""
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
