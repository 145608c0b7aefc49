"""Measure how fast clips are read, compared with decord and torch's DataLoader.

    python -m bench.data --out DIR [--clips FOLDER]

Every side reads the same 17 frames, 8 per second, of the same files, scaled and cropped to 240 x 360,
with one thread. "ours" is the trainer's BatchLoader, "ours by decord" the same with video_backend:
decord. "decord" calls the library directly, with the frame indices given; "DataLoader" runs this code in
torch's DataLoader. CPU seconds include the reader processes; rates per CPU second
depend little on other load, rates of several readers do. Missing H.264 clips are generated in FOLDER.
On a GPU, `bench.gpu_run data` compares DALI with the first two sides.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bench.clips.video_clips import SIZES, TINY_SIZES, generated_clips, real_clips
from bench.harness.command import finish, parser_of
from bench.harness.outcome import Outcome, Row, Settings
from cogfast.data.batches import BatchLoader
from cogfast.data.datasets import CaptionedVideos
from cogfast.data.sources.clip_list import ClipList, PackedStrings
from cogfast.data.video.clip import (
    ClipSettings,
    VideoBackend,
    find_device_reader,
    select_frames,
)
from cogfast.data.video.reader import open_video
from cogfast.data.video.transform import resize_and_center_crop

SIZE, FPS, NUM_FRAMES = (240, 360), 8, 17
_COPIES = 64  # copies of a file in a data set: more than readers prefetch
_GPU_READERS = (1, 4, 8)
_SHOWN = ("clip", "side", "readers", "clips_per_s", "cpu_s_per_clip", "clips_per_cpu_s")


@dataclass(frozen=True, slots=True)
class Side:
    """A way to read: `clips(path, readers)` yields clips without end.

    readers: number of reader processes (DALI: threads); 0 reads in the calling process.
    """

    name: str
    readers: int
    clips: Callable[[Path, int], Iterator[object]]


def _settings(backend: VideoBackend) -> ClipSettings:
    return ClipSettings(
        video_size=SIZE, fps=FPS, max_num_frames=NUM_FRAMES, video_backend=backend,
        short_clips="pad",
    )  # fmt: skip


def _ours(backend: VideoBackend) -> Callable[[Path, int], Iterator[object]]:
    def clips(path: Path, readers: int) -> Iterator[object]:
        listed = ClipList(
            files=PackedStrings([str(path)] * _COPIES), captions=PackedStrings([""] * _COPIES)
        )
        # Reading needs no captions.
        data = CaptionedVideos(listed, _settings(backend))
        with BatchLoader(data, data.order(0, 1), micro_batch=1, num_workers=readers) as loader:
            yield from loader

    return clips


def _frame_indices(path: Path) -> list[int]:
    """Return the frames that cogfast selects, for the libraries that take indices."""
    video = open_video(str(path))
    try:
        return select_frames(video.times, video.fps, _settings("auto")).indices.tolist()
    finally:
        video.close()


def _read_decord(path: Path, indices: Sequence[int]) -> Tensor:
    import decord

    video = decord.VideoReader(str(path), ctx=decord.cpu(0), num_threads=1)
    return resize_and_center_crop(torch.from_numpy(video.get_batch(indices).asnumpy()), SIZE)


def _decord(path: Path, readers: int) -> Iterator[Tensor]:
    indices = _frame_indices(path)
    while True:
        yield _read_decord(path, indices)


class _DecordClips(Dataset):
    """The data set of the DataLoader side: one clip, read again for every index."""

    def __init__(self, path: Path) -> None:
        self.path, self.indices = path, _frame_indices(path)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Tensor:
        # DataLoader's workers inherit the number of threads of the process.
        torch.set_num_threads(1)
        return _read_decord(self.path, self.indices)


def _data_loader(path: Path, readers: int) -> Iterator[Tensor]:
    yield from DataLoader(_DecordClips(path), batch_size=1, num_workers=readers)


# The names are those of the result files; tables show "ours" as cogfast.
CPU_SIDES = (
    Side("ours", 0, _ours("pyav")),
    Side("ours by decord", 0, _ours("decord")),
    Side("decord", 0, _decord),
    Side("ours", 1, _ours("pyav")),
    Side("ours", 2, _ours("pyav")),
    Side("DataLoader", 1, _data_loader),
    Side("DataLoader", 2, _data_loader),
)
_GPU_BACKENDS: dict[str, VideoBackend] = {
    "DALI": "dali",
    "ours": "pyav",
    "ours by decord": "decord",
}
GPU_SIDES = tuple(
    Side(name, n, _ours(backend)) for name, backend in _GPU_BACKENDS.items() for n in _GPU_READERS
)


def _readers() -> list[int]:
    return [int(p) for p in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its running child processes."""
    total = 0.0
    for process in (os.getpid(), *_readers()):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        # utime and stime of proc(5), in clock ticks
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def _sample(side: Side, path: Path, seconds: float) -> tuple[float, float]:
    """Return clips per second and CPU seconds per clip, after a warm-up of each reader."""
    clips = side.clips(path, side.readers)
    # Warm-up: every reader has delivered clips before the clock starts.
    for _ in range(2 + 2 * side.readers):
        next(clips)
    number, start, cpu = 0, time.perf_counter(), _cpu_seconds()
    while number < 2 or time.perf_counter() - start < seconds:
        next(clips)
        number += 1
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    wall, used = time.perf_counter() - start, _cpu_seconds() - cpu
    clips.close()
    return number / wall, used / number


def measure_clips(
    paths: Mapping[str, Path],
    sides: Sequence[Side],
    seconds: float,
    rounds: int,
    keep: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    """Return a row for every clip and side: medians over `rounds`, in which the sides alternate."""
    rows: list[Row] = []
    for clip, path in paths.items():
        samples: dict[Side, list] = {side: [] for side in sides}
        # The sides alternate, so that a slow phase of the machine affects all.
        for _ in range(rounds):
            for side in sides:
                samples[side].append(_sample(side, path, seconds))
        for side in sides:
            rate, cpu = (statistics.median(each) for each in zip(*samples[side], strict=True))
            rows.append(
                {
                    "clip": clip,
                    "side": side.name,
                    "readers": side.readers,
                    "clips_per_s": rate,
                    "cpu_s_per_clip": cpu,
                    "clips_per_cpu_s": 1 / max(cpu, 1e-9),
                }
            )
        keep(Outcome(rows=rows, shown=_SHOWN))
    return Outcome(rows=rows, shown=_SHOWN)


def measure_data(settings: Settings) -> Outcome:
    """Compare DALI with the CPU readers on H.264; the clips of ./bench_clips are used if it exists."""
    # One thread per process on all sides.
    torch.set_num_threads(1)
    carried = Path("bench_clips")
    sizes = TINY_SIZES if settings.is_tiny else SIZES
    sides, seconds = GPU_SIDES, 4.0
    if settings.is_tiny:
        sides, seconds = [side for side in CPU_SIDES if side.readers < 2], 0.05
    else:
        find_device_reader("dali")
    with tempfile.TemporaryDirectory() as made:
        paths = generated_clips(carried if carried.is_dir() else Path(made), sizes)
        return measure_clips(paths, sides, seconds, rounds=1, keep=settings.keep)


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of data.json")
    parser.add_argument(
        "--clips", type=Path, help="folder of the generated clips; default: a temporary one"
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="sampling time per clip, side and round"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test this program")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as made:
        sizes = TINY_SIZES if arguments.tiny else SIZES
        paths = generated_clips(arguments.clips or Path(made), sizes)
        if not arguments.tiny:
            paths = {**real_clips(), **paths}
        outcome = measure_clips(paths, CPU_SIDES, arguments.seconds, arguments.rounds)
    load_average = {"before": load, "after": os.getloadavg()[0]}  # the bench itself adds 1 to 2
    more = {"is_tiny": arguments.tiny, "load_average": load_average}
    return finish(outcome, arguments.out / "data.json", "data", **more)


if __name__ == "__main__":
    sys.exit(main())
