"""Pictures as clips of one frame: decoded as Pillow does, in every layout; the unusable are named."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from cogfast.data.bad_samples import BadSample
from cogfast.data.batches import BatchLoader
from cogfast.data.buckets import in_buckets, survey
from cogfast.data.datasets import (
    CaptionedVideos,
    VideoFolder,
    VideoList,
    VideoManifest,
    VideoShards,
)
from cogfast.data.sources.headers import read_headers
from cogfast.data.video.picture import read_pixels
from tests.extensions.tar.test_tar_shards import _tar
from tests.support.refusals import assert_refused
from tests.support.video_files import constant_rate, write_clip

SIZE = (32, 48)
CLIP = {"video_size": SIZE, "fps": 8, "max_num_frames": 9}
BUCKETS = [[9, *SIZE], [1, *SIZE], [1, *SIZE[::-1]]]


def pixels(seed: int, channels: int = 3, size: tuple[int, int] = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*size, channels), dtype=np.uint8)


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


RGB, RGBA = Image.fromarray(pixels(0)), Image.fromarray(pixels(1, 4))
GREY = RGB.convert("L")
# {file: (picture, options of its format)}
PICTURES: dict[str, tuple[Image.Image, dict]] = {
    "rgb.png": (RGB, {}),
    "alpha.png": (RGBA, {}),
    "palette.png": (RGB.convert("P"), {"transparency": 3}),
    "grey_alpha.png": (RGBA.convert("LA"), {}),
    "two_levels.png": (RGB.convert("1"), {}),
    "cmyk.jpg": (RGB.convert("CMYK"), {}),
    "alpha.webp": (RGBA, {"lossless": True}),
    "grey.bmp": (GREY, {}),
    "still.gif": (GREY, {}),
    "cmyk.tif": (RGB.convert("CMYK"), {}),
}
TURNED = [(3, "png"), (6, "png"), (8, "webp"), (2, "tiff"), (6, "tiff")]
TURNED += [(n, "jpg") for n in range(1, 9)]
PICTURES |= {f"turned{n}.{kind}": (RGB, {"exif": turned(n)}) for n, kind in TURNED}


def manifest(folder: Path, rows: list[dict], **params: object) -> CaptionedVideos:
    """The samples of a manifest in their buckets."""
    (folder / "metadata.json").write_text(json.dumps([{"text": "x", **row} for row in rows]))
    given = {**CLIP, "buckets": BUCKETS, **params}
    data = VideoManifest(str(folder), **given)
    return in_buckets(data, survey(data))


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_those_of_pillow(tmp_path: Path, name: str) -> None:
    picture, options = PICTURES[name]
    picture.save(tmp_path / name, **options)
    with Image.open(tmp_path / name) as image:
        expected = np.array(ImageOps.exif_transpose(image).convert("RGB"))
    data = manifest(tmp_path, [{"file_path": name, "type": "image"}])
    (header,) = read_headers(data.clips)
    assert (header.height, header.width) == expected.shape[:2] and header.is_picture
    # A picture that is turned by a quarter has the other bucket.
    sample = data[0]
    assert sample["video"].shape[0] == 1 == sample["num_frames"]
    assert np.array_equal(sample["video"][0].permute(1, 2, 0).numpy(), expected)


def test_another_size_is_scaled_as_pillow_does(tmp_path: Path) -> None:
    wide = Image.fromarray(pixels(2, 3, (64, 120)))
    wide.save(tmp_path / "x.png")
    data = manifest(tmp_path, [{"file_path": "x.png"}])
    expected = np.array(ImageOps.fit(wide, SIZE[::-1], Image.Resampling.BICUBIC), np.int16)
    found = data[0]["video"][0].permute(1, 2, 0).numpy().astype(np.int16)
    inner = np.s_[:, 2:-2]  # at the edges of the crop Pillow sees no pixels beyond them
    assert np.abs(found - expected)[inner].max() <= 1


def write(folder: Path) -> None:
    """A clip and two pictures, one of which is named .mp4, with their captions in every layout."""
    write_clip(folder / "videos/a.mp4", constant_rate(9, 8), size=SIZE)
    Image.fromarray(pixels(4)).save(folder / "videos/b.PNG")
    Image.fromarray(pixels(5)).save(folder / "videos/c.mp4", format="PNG")
    files = sorted((folder / "videos").iterdir())
    (folder / "labels").mkdir()
    for file in files:
        (folder / "labels" / f"{file.stem}.txt").write_text(file.stem)
    (folder / "videos.txt").write_text("".join(f"videos/{file.name}\n" for file in files))
    (folder / "prompts.txt").write_text("a\nb\nc\n")
    rows = [{"file_path": f"videos/{file.name}", "text": file.stem} for file in files]
    rows[1]["type"] = "image"
    (folder / "metadata.json").write_text(json.dumps(rows))
    members = {file.name: file.read_bytes() for file in files}
    members |= {f"{stem}.txt": stem.encode() for stem in "abc"}
    _tar(folder / "shards/0.tar", members)


LAYOUTS: dict[str, Callable[..., CaptionedVideos]] = {
    "folder": lambda folder, **params: VideoFolder(str(folder), **params),
    "lists": lambda folder, **params: VideoList(str(folder), **params),
    "manifest": lambda folder, **params: VideoManifest(str(folder), **params),
    "shards": lambda folder, **params: VideoShards(str(folder / "shards"), **params),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_same_pictures(tmp_path: Path, layout: str) -> None:
    write(tmp_path)
    data = LAYOUTS[layout](tmp_path, **CLIP, buckets=BUCKETS)
    found = survey(data)
    assert found.buckets.tolist() == [0, 1, 1] and not found.reasons and "slow" not in found.notes
    data = in_buckets(data, found)
    for i, seed in ((1, 4), (2, 5)):
        sample = data[i]
        assert sample["txt"] == "abc"[i] and sample["fps"] == 8 and sample["num_padded"] == 0
        assert np.array_equal(sample["video"][0].permute(1, 2, 0).numpy(), pixels(seed))
    assert data[0]["video"].shape[0] == 9
    # No pictures are read if no bucket has one frame; one that the source names is a bad sample.
    without = LAYOUTS[layout](tmp_path, **CLIP)
    reasons = survey(without).reasons
    assert len(without) == (3 if layout == "lists" else 2)
    assert set(reasons) == set(range(1, len(without)))
    assert all(r.startswith("a picture, not a video; to train on pict") for r in reasons.values())


def animated(path: Path) -> None:
    frames = [Image.fromarray(pixels(i)) for i in range(3)]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=125)


def deep(path: Path) -> None:
    Image.fromarray(pixels(0)[..., 0].astype(np.uint16) * 257).save(path)


def clip(path: Path) -> None:
    write_clip(path.with_suffix(".mp4"), constant_rate(9, 8), size=SIZE).rename(path)


def truncated(path: Path) -> None:
    RGB.save(path)
    path.write_bytes(path.read_bytes()[:900])


# {what: (file, how it is written, other columns of its row, the reason)}
BAD = {
    "APNG": ("x.png", animated, {}, "a PNG of 3 frames or pages, not a still picture; convert it"),
    "WebP": ("x.webp", animated, {}, "a WEBP of 3 frames or pages, not a still picture"),
    "pages": ("x.tif", animated, {}, "a TIFF of 3 frames or pages, not a still picture"),
    "GIF": ("x.gif", animated, {"type": "image"}, "type image, but the file is a video; set type"),
    "16 bits": ("x.png", deep, {}, "a picture of mode I;16, more than 8 bits of grey; save it with 8"),
    "floats": ("x.tif", lambda p: RGB.convert("F").save(p), {}, "a picture of mode F, more than 8"),
    "a clip": ("x.png", clip, {"type": "image"}, "type image, but the file is a video; set type to v"),
    "a picture": ("x.mp4", lambda p: RGB.save(p, "png"), {"type": "video"}, "the file is a picture"),
    "a part": ("x.png", RGB.save, {"start": 1}, "a picture, of which start and end select nothing"),
    "text": ("x.png", lambda p: p.write_bytes(b"\x89PNG no"), {}, "not a readable image; use PNG, "),
    "too large": ("x.png", lambda p: Image.new("1", (2**14, 2**13)).save(p), {}, "8192 x 16384 pix"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("what", BAD)
def test_what_is_no_still_picture_is_named_before_training(tmp_path: Path, what: str) -> None:
    name, spoil, columns, reason = BAD[what]
    RGB.save(tmp_path / "good.png")
    spoil(tmp_path / name)
    rows = [{"path": name, **columns}, {"path": "good.png", "type": "image"}]
    (tmp_path / "metadata.json").write_text(json.dumps([{"text": "", **row} for row in rows]))
    data = VideoManifest(str(tmp_path), **CLIP, buckets=BUCKETS, allow_empty_captions=True)
    found = survey(data)
    assert list(found.reasons) == [0] and reason in found.reasons[0]
    assert "\n" not in found.reasons[0] and found.buckets.tolist() == [-1, 1]


def test_a_truncated_picture_is_replaced(tmp_path: Path) -> None:
    truncated(tmp_path / "bad.png")
    RGB.save(tmp_path / "good.png")
    data = manifest(tmp_path, [{"file_path": f"{n}.png", "type": "image"} for n in ("bad", "good")])
    assert_refused(lambda: data[0], "not a readable image <...>truncated<...>; use PNG", BadSample)
    with BatchLoader(data, data.order(0, 2), micro_batch=2, num_workers=0, num_steps=2) as loader:
        for batch in loader:
            assert batch["paths"] == [str(tmp_path / "good.png")] * 2
    assert list(loader.bad_samples.reasons) == [str(tmp_path / "bad.png")]


def test_a_video_does_not_become_a_picture(tmp_path: Path) -> None:
    """A clip that is too short for all other buckets is a bad sample, one of a single frame is not."""
    for frames in (1, 5, 9):
        write_clip(tmp_path / f"{frames}.mp4", constant_rate(frames, 8), size=SIZE)
    rows = [{"file_path": f"{frames}.mp4", "type": "video"} for frames in (1, 5, 9)]
    data = manifest(tmp_path, rows)
    assert data.clips.buckets is not None and data.clips.buckets.tolist() == [1, -1, 0]
    assert survey(data).reasons[1].startswith("5 frames at 8 fps = 0.6 s, need 1.1 s")
    padded = manifest(tmp_path, rows, short_clips="pad")
    assert padded.clips.buckets is not None and padded.clips.buckets.tolist() == [1, 0, 0]
    # Videos give one of their frames if all sizes have one.
    single = manifest(tmp_path, rows, buckets=BUCKETS[1:])
    assert single.clips.buckets is not None and single.clips.buckets.tolist() == [0, 0, 0]


def test_controls_of_pictures_are_pictures(tmp_path: Path) -> None:
    RGB.save(tmp_path / "a.png")
    GREY.save(tmp_path / "a_edges.png")
    RGB.resize((48, 48)).save(tmp_path / "square.png")
    clip(tmp_path / "clip.mp4")
    controls = ("a_edges.png", "clip.mp4", "square.png", "a.png")
    rows = [{"file_path": "a.png", "control_file_path": c, "type": "image"} for c in controls]
    data = manifest(tmp_path, rows)
    reasons = survey(data).reasons
    assert list(reasons) == [1, 2, 3]
    assert "clip.mp4 is a video, and the file is a picture; give a picture" in reasons[1]
    assert "square.png is 48x48, the clip 32x48" in reasons[2]
    assert "a.png is the clip itself" in reasons[3]
    control = data[0]["control"]
    assert control.shape == (1, 3, *SIZE)
    assert torch.equal(control[0].permute(1, 2, 0), read_pixels(str(tmp_path / "a_edges.png")))


def test_a_mask_may_be_an_animated_gif(tmp_path: Path) -> None:
    half = np.zeros((32, 48, 3), np.uint8)
    half[:, :24] = 255
    frames = [Image.fromarray(np.roll(half, 3 * i, axis=1)) for i in range(9)]
    frames[0].save(tmp_path / "m.gif", save_all=True, append_images=frames[1:], duration=100)
    write_clip(tmp_path / "c.mp4", constant_rate(9, 10), size=(32, 48))
    row = {"path": "c.mp4", "caption": "a", "mask": "m.gif"}
    (tmp_path / "clips.jsonl").write_text(json.dumps(row))
    params = {"video_size": [32, 48], "fps": 10, "max_num_frames": 9}
    found = VideoManifest([str(tmp_path / "clips.jsonl")], **params)[0]["mask"]
    for mask, frame in zip(found, frames, strict=True):
        assert np.array_equal(255 * mask[0].numpy(), np.asarray(frame)[..., 0])
