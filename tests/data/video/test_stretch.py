"""data.params.resize=stretch compared with decord's scaled frames and with bilinear weights."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from cogfast.data.datasets import VideoList
from cogfast.data.video.clip import ClipSettings, read_clip
from cogfast.data.video.transform import stretch_picture
from tests.support.video_files import BIKES, BUNNY, CARPHONE


def _scaled_by_decord(path: Path, indices: list[int], size: tuple[int, int]) -> np.ndarray:
    """Read frames as CogVideo's diffusers trainer does, with a decord reader of its own."""
    decord = pytest.importorskip("decord")
    reader = decord.VideoReader(str(path), width=size[1], height=size[0], num_threads=1)
    return reader.get_batch(indices).asnumpy().transpose(0, 3, 1, 2)


def _encoded(path: Path, *, degrees: int = 0, pixels: str = "yuv420p", matrix: int = 2) -> Path:
    """Write six frames of a natural video, 270 x 480."""
    with av.open(str(BUNNY)) as source, av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=8, options={"crf": "12"})
        stream.width, stream.height, stream.pix_fmt = 480, 270, pixels
        stream.codec_context.colorspace = matrix
        if degrees:
            stream.set_display_rotation(degrees)
        for i, frame in zip(range(6), source.decode(video=0), strict=False):
            small = frame.reformat(width=480, height=270, format=pixels)
            picture = av.VideoFrame.from_ndarray(small.to_ndarray(), format=pixels)
            picture.pts, picture.time_base = i, Fraction(1, 8)
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize(
    "clip, size", [(BIKES, (96, 160)), (BUNNY, (480, 720)), (CARPHONE, (288, 176))], ids=str
)
def test_frames_are_decords_bit_for_bit(clip, size):
    """Real clips are scaled up and down, to another aspect ratio."""
    params = {"video_size": size, "fps": 12, "max_num_frames": 5, "resize": "stretch"}
    expected = None
    for backend in ("pyav", "decord"):
        frames, selection = read_clip(str(clip), ClipSettings(**params, video_backend=backend))
        if expected is None:
            expected = _scaled_by_decord(clip, selection.indices.tolist(), size)
        assert np.array_equal(frames.numpy(), expected)


KINDS = [{"pixels": "yuv444p"}, {"pixels": "yuv420p10le"}, {"matrix": 1}]
KINDS += [{"degrees": degrees} for degrees in (90, 180, -90)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_kinds_of_videos_are_decords_bit_for_bit(kind, tmp_path):
    path = _encoded(tmp_path / "a.mp4", **kind)
    settings = ClipSettings(video_size=(96, 160), fps=8, max_num_frames=5, resize="stretch")
    expected = _scaled_by_decord(path, [0, 1, 2, 3, 4], (96, 160))
    assert np.array_equal(read_clip(str(path), settings)[0].numpy(), expected)


@pytest.mark.parametrize(
    "clip, size, average, most",
    [(BIKES, (272, 480), 0.09, 6), (BUNNY, (720, 1000), 0.35, 25)],
    ids=["bikes", "bigbuckbunny"],
)
def test_frames_that_keep_their_rows_are_near_decords(clip, size, average, most):
    """FFmpeg 8 upsamples the chroma of such frames otherwise than decord's FFmpeg 4."""
    settings = ClipSettings(video_size=size, fps=2, max_num_frames=3, resize="stretch")
    frames, selection = read_clip(str(clip), settings)
    expected = _scaled_by_decord(clip, selection.indices.tolist(), size)
    off = abs(frames.numpy().astype(int) - expected)
    assert off.mean() <= average and off.max() <= most


@pytest.mark.parametrize("size", [(7, 13), (90, 61), (31, 40)], ids=str)
def test_pictures_have_bilinear_weights(size):
    """cv2.resize's INTER_LINEAR: half-pixel centres, no antialiasing, in float64 here."""
    picture = np.random.default_rng(0).integers(0, 256, (31, 40, 3), dtype=np.uint8)

    def blend(values: np.ndarray, target: int) -> np.ndarray:
        """Interpolate along the first axis."""
        at = np.clip((np.arange(target) + 0.5) * len(values) / target - 0.5, 0, len(values) - 1)
        low = np.floor(at).astype(int)
        high = np.minimum(low + 1, len(values) - 1)
        share = (at - low).reshape(-1, *[1] * (values.ndim - 1))
        return values[low] * (1 - share) + values[high] * share

    rows = blend(picture.astype(np.float64), size[0])
    exact = blend(rows.swapaxes(0, 1), size[1]).swapaxes(0, 1)
    found = stretch_picture(torch.from_numpy(picture), size).numpy().transpose(1, 2, 0)
    assert found.dtype == np.uint8 and abs(found - exact).max() < 0.501


def test_the_picture_of_image_to_video_is_squeezed_as_its_clip(tmp_path):
    """With image_column its pictures, without it the first frame of the squeezed clip."""
    picture = np.random.default_rng(0).integers(0, 256, (31, 40, 3), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / "first.png")
    (tmp_path / "prompts.txt").write_text("one\n")
    (tmp_path / "videos.txt").write_text(f"{BIKES}\n")
    (tmp_path / "images.txt").write_text("first.png\n")
    params = {"video_size": (32, 64), "fps": 8, "max_num_frames": 5, "resize": "stretch"}
    sample = VideoList(tmp_path, **params, image_column="images.txt")[0]
    assert torch.equal(sample["images"], stretch_picture(torch.from_numpy(picture), (32, 64)))
    first = _scaled_by_decord(BIKES, [0], (32, 64))[0]
    assert np.array_equal(sample["video"][0].numpy(), first)
    assert "images" not in VideoList(tmp_path, **params)[0]  # the trainer takes frame 0
