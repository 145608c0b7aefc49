"""The quickstart's clips as files and as pixels, and their automatic scores."""

import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from cogfast.extensions.wavelet.wavelet_autoencoder import WaveletAutoencoder
from scripts.quickstart_clips import (
    COLOURS,
    DIRECTIONS,
    HELD_OUT,
    SHAPES,
    Look,
    Scores,
    caption_of,
    combinations,
    foreground,
    look_at,
    read_frames,
    render_clip,
    score,
    write_clips,
)
from scripts.quickstart_wavelet import fit_wavelet
from tests.support.ranks.forked import run_forked

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def clips_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the quickstart's data."""
    folder = tmp_path_factory.mktemp("clips")
    prepared = run_quickstart("prepare", str(folder))
    assert prepared.returncode == 0, prepared.stdout
    assert "176 clips" in prepared.stdout
    return folder


@pytest.fixture(scope="module")
def clips(clips_folder: Path) -> tuple[list[np.ndarray], list[str]]:
    """Return the decoded clips [F, H, W, 3] and their captions."""
    paths = sorted(clips_folder.glob("videos/*.mp4"))
    labels = [clips_folder / "labels" / f"{path.stem}.txt" for path in paths]
    return [read_frames(path) for path in paths], [label.read_text().strip() for label in labels]


def test_folder_holds_every_seen_combination_four_times(clips) -> None:
    _, captions = clips
    counts = Counter(captions)
    held_out = {caption_of(*parts) for parts in HELD_OUT}
    assert len(captions) == 176
    assert set(counts.values()) == {4}
    assert set(counts) == {caption_of(*parts) for parts in combinations()} - held_out
    assert "a red circle moves right" in counts
    # Combinations are held out, but every word occurs.
    assert set(" ".join(counts).split()) >= {*COLOURS, *SHAPES, *DIRECTIONS}


def test_the_same_bytes_every_time_but_not_in_every_copy(
    clips_folder: Path, tmp_path: Path
) -> None:
    assert len(write_clips(tmp_path, num_copies=1)) == 44
    for path in tmp_path.glob("*/*"):
        assert path.read_bytes() == (clips_folder / path.relative_to(tmp_path)).read_bytes(), path
    name = "videos/blue-square-up"
    assert len({(clips_folder / f"{name}-{i}.mp4").read_bytes() for i in range(4)}) == 4
    with av.open(str(tmp_path / f"{name}-0.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert (stream.width, stream.height, stream.frames) == (64, 64, 9)


@pytest.mark.parametrize("shape", SHAPES)
def test_areas_and_speeds_by_hand(shape: str) -> None:
    clip = render_clip("green", shape, "left")
    mask = foreground(clip)
    area = {"circle": np.pi * 18**2, "square": np.pi * 18**2, "triangle": 36 * 36 / 2}[shape]
    assert mask.sum(axis=(1, 2)) == pytest.approx(np.full(9, area), rel=0.06)
    columns = [np.argwhere(frame)[:, 1].mean() for frame in mask]
    assert np.diff(columns) == pytest.approx(np.full(8, -2.0), abs=0.05)
    assert columns[4] + 0.5 == pytest.approx(32, abs=0.05)  # the path is centred
    border = np.concatenate([mask[:, 0].ravel(), mask[:, -1].ravel(), mask[:, :, 0].ravel()])
    assert not border.any()


def test_real_clips_are_recognized(clips) -> None:
    scores = score(*clips)
    assert (scores.num_videos, scores.colour, scores.motion) == (176, 1.0, 1.0)
    assert scores.shape >= 0.99


def test_reconstructions_are_recognized(clips) -> None:
    frames, captions = clips
    pixels = torch.from_numpy(np.stack(frames)).permute(0, 4, 1, 2, 3)
    video = pixels.float() / 127.5 - 1
    wavelet = WaveletAutoencoder(state=fit_wavelet(video.split(16), 48))
    decoded = wavelet.decode(wavelet.encode(video).mean).clamp(-1, 1)
    # The prototype's 48 Haar bands: 27.7 dB.
    assert -10 * (decoded - video).div(2).square().mean().log10() == pytest.approx(27.7, abs=0.3)


def test_noise_is_not_recognized() -> None:
    captions = [caption_of(*parts) for parts in combinations()]
    generator = np.random.default_rng(0)
    noise = list(generator.integers(0, 256, (48, 9, 64, 64, 3), dtype=np.uint8))
    scores = score(noise, captions)
    assert (scores.colour, scores.motion) == (0.0, 0.0)
    assert scores.shape <= 0.34  # always the same answer
    assert not scores.has_learned


def test_each_score_depends_on_one_word() -> None:
    clip = render_clip("red", "circle", "right")
    captions = ["a blue circle moves right", "a red square moves right", "a red circle moves up"]
    assert score([clip] * 3, captions) == Scores(2 / 3, 2 / 3, 2 / 3, 3)
    still = np.repeat(clip[:1], 9, axis=0)
    assert look_at(still) == Look("red", "circle", None)


def run_quickstart(*argv: str) -> subprocess.CompletedProcess[str]:
    return run_forked([str(ROOT / "scripts" / "quickstart.py"), *argv])


def test_quickstart_script_prepares_and_looks(clips_folder: Path, tmp_path: Path) -> None:
    data = clips_folder
    assert WaveletAutoencoder(data / "wavelet.safetensors").latent_channels == 48
    assert len((data / "captions.txt").read_text().splitlines()) == 48

    samples = tmp_path / "samples"
    samples.mkdir()
    path = data / "videos" / "red-circle-right-0.mp4"
    (samples / "0.mp4").write_bytes(path.read_bytes())
    (samples / "1.mp4").write_bytes(path.read_bytes())
    prompts = {"0.mp4": "a red circle moves right", "1.mp4": "a blue circle moves right"}
    (samples / "prompts.json").write_text(json.dumps(prompts))
    looked = run_quickstart("look", str(samples), str(data))
    assert "samples: colour 0.50  shape 1.00  motion 1.00  over 2 videos" in looked.stdout
    assert "colour 1.00  shape 1.00  motion 1.00  over 176 videos: learned" in looked.stdout


MEASURED = f"""
import sys
sys.path.insert(0, {str(ROOT / "scripts")!r})
import quickstart
times = {{(1, False): 0.4, (1, True): 0.3, (2, True): 0.2}}
quickstart.measure_step = lambda layout: times[layout.num_processes, layout.use_bf16]
quickstart.os.sched_getaffinity = lambda process: set(range(6))
quickstart.torch.cuda.is_available = lambda: False
quickstart.choose_layout()
"""


def test_quickstart_chooses_how_to_train() -> None:
    """The second layout is timed in the faster dtype only, and the fastest of all is printed."""
    done = run_forked(["-c", MEASURED])
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-2:] == [
        "processes x threads: 2 x 3 in bf16 is the fastest here "
        "(1 x 6 in fp32: 400 ms, 1 x 6 in bf16: 300 ms, 2 x 3 in bf16: 200 ms a step)",
        "2 3 true",
    ]


FORK_COMMANDS = """
import subprocess
from tests.support.ranks.forked import ForkedPopen
subprocess.Popen = ForkedPopen
"""


@pytest.mark.soak
def test_the_notebook_runs_top_to_bottom(clips_folder: Path, tmp_path: Path) -> None:
    """Its commands are forked from the process that runs the cells, which spares them the imports."""
    notebook = json.loads((ROOT / "docs" / "quickstart.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    keys = {"markdown": set(), "code": {"outputs", "execution_count"}}
    for cell in notebook["cells"]:
        assert set(cell) == {"cell_type", "id", "metadata", "source"} | keys[cell["cell_type"]]
        assert not cell.get("outputs") and cell.get("execution_count") is None
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    settings = {
        "ROOT = Path.cwd().parent ": f"ROOT = Path({str(ROOT)!r})",
        "FOLDER = ROOT ": f"FOLDER = Path({str(tmp_path)!r})",
        "STEPS = 1500\n": "STEPS = 2\n",
    }
    for line, value in settings.items():
        assert cells[0].count(line) == 1
        cells[0] = cells[0].replace(line, value)
    shutil.copytree(clips_folder, tmp_path / "quickstart" / "data")  # what its second cell makes

    done = run_forked(["-c", "\n".join([FORK_COMMANDS, *cells])])
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(": loss ") == 2
    (run_folder,) = (tmp_path / "quickstart" / "runs").iterdir()
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]
    samples = json.loads((run_folder / "videos" / "prompts.json").read_text())
    held_out = {caption_of(*parts) for parts in HELD_OUT}
    assert len(samples) == 2 and set(samples.values()) <= held_out
