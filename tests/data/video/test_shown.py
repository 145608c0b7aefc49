"""Tests of what players apply to the decoded pixels: aspect, the eight orientations, which stream; and what is only noted."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from cogfast.data.buckets import survey
from cogfast.data.datasets import VideoFolder
from cogfast.data.sources.headers import probe
from cogfast.data.video.clip import ClipSettings, read_clip
from cogfast.data.video.reader import open_video
from cogfast.extensions.sample.writer import write_video
from tests.support.video_files import constant_rate, decode_all, write_clip

READERS = pytest.mark.parametrize("reader", ["pyav", "decord"])
TIMES = constant_rate(9, 8)
CLIP = {"fps": 8, "max_num_frames": 9, "allow_empty_captions": True}
# An ellipse of 20x40 pixels, in a picture of 112x256: decord reads no narrower ones
ELLIPSE = 200 * (
    np.hypot(*np.meshgrid((np.arange(256) - 127.5) / 10, (np.arange(112) - 55.5) / 20)) < 1
)


@READERS
@pytest.mark.parametrize("degrees", [0, 90])
@pytest.mark.parametrize("end", ["mp4", "ts"])  # in the container, and only in the codec
@pytest.mark.parametrize("size", [(64, 96), (96, 64)])
def test_what_a_player_shows_round_is_round(reader, degrees, end, size, tmp_path):
    """An ellipse of 20x40 pixels, each twice as wide as high, is shown as a disc."""
    if end == "ts" and (degrees or reader == "decord"):
        pytest.skip("there is no display matrix, and decord does not read it to its end")
    path = write_clip(
        tmp_path / f"a.{end}", TIMES, size=(112, 256), sample_aspect_ratio=Fraction(2),
        pictures=[np.repeat(ELLIPSE[..., None], 3, 2).astype(np.uint8)] * 9,
        turned=(degrees, False, False) if degrees else None,
    )  # fmt: skip
    clip, _ = read_clip(
        str(path), ClipSettings(video_size=size, fps=8, max_num_frames=9, video_backend=reader)
    )
    is_inside = clip[4, 0].numpy() > 100
    rows, columns = (int(is_inside.any(axis).sum()) for axis in (1, 0))
    assert abs(rows - columns) <= 1 and rows > 20
    shown = (112, 512) if degrees == 0 else (512, 112)
    assert probe(str(path), 1)[2:4] == shown


@READERS
@pytest.mark.parametrize("resize", ["crop", "stretch"])
@pytest.mark.parametrize("flips", [(False, False), (True, False)], ids=["turned", "mirrored"])
@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
def test_the_eight_orientations(reader, resize, flips, degrees, tmp_path):
    """Against NumPy's turns and flips of the stored frames, in the order that FFmpeg documents."""
    picture = np.zeros((96, 128, 3), np.uint8)
    picture[:48, :64], picture[:48, 64:], picture[48:, :64] = 200, 120, 60
    path = write_clip(
        tmp_path / "a.mp4", TIMES, size=(96, 128), pictures=[picture] * 9, turned=(degrees, *flips)
    )
    expected = np.rot90(decode_all(path)[4], degrees // 90)
    expected = expected[:, ::-1] if flips[0] else expected
    size = expected.shape[:2]
    assert probe(str(path), 1)[2:4] == size
    frames = open_video(str(path), reader, size if resize == "stretch" else None).read([4, 4])
    assert np.abs(frames[1].numpy().astype(int) - expected).max() <= (
        2 if resize == "stretch" else 0
    )


def test_the_bucket_is_that_of_the_shown_shape(tmp_path):
    write_clip(tmp_path / "a.mp4", TIMES, size=(64, 96), turned=(90, False, False))
    write_clip(tmp_path / "b.mp4", TIMES, size=(64, 48), sample_aspect_ratio=Fraction(2))
    data = VideoFolder(tmp_path, video_size=[32, 48], buckets=[[9, 32, 48], [9, 48, 32]], **CLIP)
    assert survey(data).buckets.tolist() == [1, 0]


@READERS
def test_an_attached_picture_is_no_video(reader, tmp_path):
    """The cover comes first, as some shops write it."""
    source = write_clip(tmp_path / "a.mp4", TIMES, size=(48, 64))
    Image.new("RGB", (32, 32), "red").save(tmp_path / "cover.jpg")
    path = str(tmp_path / "b.mp4")
    with av.open(str(source)) as video, av.open(str(tmp_path / "cover.jpg")) as cover:  # noqa: SIM117
        with av.open(path, "w") as out:
            streams = [out.add_stream_from_template(one.streams.video[0]) for one in (cover, video)]
            streams[0].disposition = av.stream.Disposition.attached_pic
            for one, stream in zip((cover, video), streams, strict=True):
                for packet in one.demux(video=0):
                    if packet.dts is not None:
                        packet.stream = stream
                        out.mux(packet)
    data = Path(path).read_bytes()
    moov, udta = data.index(b"moov") - 4, data.index(b"udta") - 4
    size = int.from_bytes(data[udta : udta + 4])
    boxes = [data[: moov + 8], data[udta : udta + size], data[moov + 8 : udta], data[udta + size :]]
    Path(path).write_bytes(b"".join(boxes))
    with av.open(path) as container:
        assert container.streams.video[0].width == 32
    header = probe(path, 1)
    assert header[2:4] == (48, 64) and header.notes == ""
    if reader == "pyav":
        frames = open_video(path, reader).read([0, 4])
        assert np.array_equal(frames.numpy(), decode_all(source)[[0, 4]])


HDR = {"color_primaries": 9, "colorspace": 9}
NOTED = {
    "PQ": ("hdr", {"color_trc": 16, **HDR}),
    "HLG": ("hdr", {"color_trc": 18, **HDR}),
    "P3": ("hdr", {"color_primaries": 12}),
    "BT.709": ("", {"color_trc": 1, "color_primaries": 1, "colorspace": 1}),
    "fields": ("interlaced", {"options": {"x264-params": "interlaced=1"}}),
    "alpha": ("alpha", {"codec": "prores_ks", "pix_fmt": "yuva444p10le", "end": "mov"}),
}


@pytest.mark.parametrize("kind", NOTED)
def test_what_is_not_applied_is_noted_in_one_line(kind, tmp_path, caplog):
    note, given = NOTED[kind]
    given = dict(given)
    path = tmp_path / f"a.{given.pop('end', 'mp4')}"
    write_clip(path, TIMES, **given)
    assert probe(str(path), 1).notes == note
    path.rename(tmp_path / "a.mp4")
    data = VideoFolder(tmp_path, video_size=[48, 64], **CLIP)
    for _ in range(2):  # from the file, and from the index
        lines = [*survey(data).notes.lines(1, data.settings, data.name)]
        assert len(lines) == bool(note) and all(
            "1 of 1 clip " in x and "ffmpeg -i" in x for x in lines
        )


def test_what_an_edit_list_cuts_off_is_not_counted(tmp_path):
    source = write_clip(tmp_path / "a.mp4", constant_rate(24, 8), options={"bf": "0", "g": "24"})
    path = tmp_path / "b.mp4"
    with av.open(str(source)) as video, av.open(str(path), "w") as out:
        stream = out.add_stream_from_template(video.streams.video[0])
        for packet in video.demux(video=0):
            if packet.dts is not None:  # the first second has times below 0
                shift = round(1 / packet.time_base)
                packet.pts, packet.dts, packet.stream = (
                    packet.pts - shift,
                    packet.dts - shift,
                    stream,
                )
                out.mux(packet)
    assert probe(str(path), 1).num_frames == len(open_video(str(path))) == len(decode_all(path))


@pytest.mark.parametrize(
    "name, options", [("b.mp4", {"movflags": "frag_keyframe"}), ("b.mkv", {"live": "1"})]
)
def test_frames_that_a_recorder_did_not_count(name, options, tmp_path):
    """In fragments behind the first ones, and in a recording without a duration, as browsers write them."""
    source = write_clip(tmp_path / "a.mp4", constant_rate(24, 8), options={"bf": "0", "g": "8"})
    path = tmp_path / name
    with av.open(str(source)) as video, av.open(str(path), "w", options=options) as out:
        stream = out.add_stream_from_template(video.streams.video[0])
        for packet in filter(lambda each: each.dts is not None, video.demux(video=0)):
            packet.stream = stream
            out.mux(packet)
    header = probe(str(path), 1)
    assert header.num_frames / header.fps == pytest.approx(len(decode_all(path)) / 8)


def test_sampled_videos_have_tags_of_their_colours(tmp_path):
    """A player that trusts the tags shows the colours that were given."""
    picture = np.full((9, 720, 1280, 3), (200, 40, 60), np.uint8)
    write_video(tmp_path / "a.mp4", picture, 8)
    with av.open(str(tmp_path / "a.mp4")) as container:
        context = container.streams.video[0].codec_context
        tags = context.colorspace, context.color_primaries, context.color_trc, context.color_range
        frame = next(container.decode(video=0))
    assert tags == (5, 1, 1, 1)
    y, u, v = (np.frombuffer(plane, np.uint8)[0].astype(float) for plane in frame.planes)
    y, u, v = (y - 16) / 219, (u - 128) / 224, (v - 128) / 224
    red, blue = y + 2 * (1 - 0.299) * v, y + 2 * (1 - 0.114) * u  # BT.601, of the tags 5 and 6
    green = (y - 0.299 * red - 0.114 * blue) / 0.587
    np.testing.assert_allclose(255 * np.array([red, green, blue]), (200, 40, 60), atol=3)
