"""Two ranks list and survey data sets. They are threads that exchange values, as processes do with gloo."""

import builtins
import json
import os
import re
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, get_ident

import numpy as np
import pytest
import torch

from cogfast.data.datasets import DataDir, ListedVideos, VideoFolder
from cogfast.data.sources.clip_list import ClipList, PackedStrings
from cogfast.data.sources.file_index import to_lines
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.train.assembly import Datasets
from cogfast.train.preflight.header_scan import survey_datasets
from tests.support.refusals import assert_refused
from tests.support.runs import Run, datasets_of
from tests.support.video_files import sat_folder

CLIP = {"video_size": [32, 48], "fps": 8, "max_num_frames": 9}
WORDS = [f"data.params.{key}={value}" for key, value in CLIP.items()]
MAIN: list[int] = []  # the thread that stands for rank 0
LISTED: list[int] = []  # the threads that listed files


class Ranks(ProcessGroups):
    values: dict[int, object] = {}  # noqa: RUF012
    barrier = Barrier(2, timeout=60)

    def gather(self, value: object) -> list:
        self.barrier.wait()
        self.values[self.rank] = value
        self.barrier.wait()
        return [self.values[0], self.values[1]]

    def broadcast(self, value):
        return self.gather(value)[0]


class Keeps(VideoFolder):
    def find(self, data_dir: DataDir, allow_empty_captions: bool) -> list[ClipList]:
        LISTED.append(get_ident())
        self.tags = ["a tag"]
        return super().find(data_dir, allow_empty_captions)


class Wraps(ListedVideos):
    def find(self, data_dir: DataDir, allow_empty_captions: bool) -> list[ClipList]:
        LISTED.append(get_ident())
        return [VideoFolder([one], **CLIP).clips for one in data_dir]  # pyright: ignore


class Differs(ListedVideos):
    def find(self, data_dir: DataDir, allow_empty_captions: bool) -> list[ClipList]:
        (column,), is_main = data_dir, get_ident() in MAIN  # pyright: ignore
        captions = ["a", "b" if is_main or column != "captions" else "c"]
        number = "2" if is_main or column != "weights" else "5"
        weights = np.array([1, float(number)], object)  # as of a table of numbers of two types
        files, texts = PackedStrings(["a.mp4", "b.mp4"]), PackedStrings(captions)
        return [ClipList(files=files, captions=texts, weights=weights)]


def on_ranks(run: Run, name: str, sources: list[str], is_surveyed: bool = True) -> list[Datasets]:
    run = run.of_files().by(run.kind, "tests").with_words(f"data.target={name}", *WORDS)
    config = run.config(f"args.train_data=[{','.join(sources)}]")
    args = config.run.args

    def of_rank(rank: int) -> Datasets:
        if rank == 0:
            MAIN[:] = [get_ident()]
        Ranks.barrier.wait()  # so that each has a thread of its own
        groups = Ranks(rank, 2, rank, torch.device("cpu"), None, False)
        found = datasets_of(config, args, groups)
        return survey_datasets(found, args, groups, 2)[0] if is_surveyed else found

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(of_rank, range(2)))


def test_an_index_of_other_numbers_is_named(run: Run, tmp_path: Path) -> None:
    """An index that another tool or an attacker has written says twice the rate of all videos."""
    folder = sat_folder(tmp_path / "data", 3)
    on_ranks(run, "cogfast.data.datasets.VideoFolder", [str(folder)])
    index = next(folder.rglob(".cogfast-index"))
    rows = [json.loads(line) for line in index.read_text().split("\n") if line]
    index.write_bytes(to_lines([[*row[:3], 2 * row[3], *row[4:]] for row in rows]))
    line = f"{index} keeps the lengths that were found; remove it if they are wrong"
    with pytest.raises(ValueError, match=re.escape(line)):
        on_ranks(run, "cogfast.data.datasets.VideoFolder", [str(folder)])


@pytest.mark.parametrize("name", ["Keeps", "Wraps"])
def test_a_find_of_a_users_own_is_called_on_each_rank(run: Run, name: str, tmp_path: Path) -> None:
    """It may keep something in its data set, and build others of cogfast's."""
    LISTED.clear()
    sources = [str(sat_folder(tmp_path / part, 2)) for part in "ab"]
    found = [each.train for each in on_ranks(run, f"{__name__}.{name}", sources)]
    assert list(found[0].paths) == list(found[1].paths)
    assert [path.split("/")[-3] for path in found[0].paths] == ["a", "a", "b", "b"]
    assert len(set(LISTED)) == 2
    assert name == "Wraps" or [data.tags for data in found] == [["a tag"]] * 2


@pytest.mark.parametrize("column", ["captions", "weights"])
def test_ranks_that_find_other_samples_are_refused(run: Run, column: str) -> None:
    """Other weights are another order, and another number of steps."""
    line = "args.train_data: rank 0 finds 2 samples, and rank 1 finds 2, or others; give all ranks"
    assert_refused(lambda: on_ranks(run, f"{__name__}.Differs", [column]), line)
    line = "2/2 videos unreadable"
    assert_refused(lambda: on_ranks(run, f"{__name__}.Differs", ["nothing"]), line)


@pytest.mark.parametrize("name", ["VideoFolder", "VideoManifest", "VideoList", "VideoShards"])
def test_rank_0_alone_lists_for_cogfasts_own_data_sets(
    run: Run, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each rank would ask for each of millions of files."""
    for part in ("videos", "labels"):
        (tmp_path / part).mkdir()
    (tmp_path / "videos" / "a.mp4").write_bytes(b"a")
    (tmp_path / "labels" / "a.txt").write_text("a clip")
    (tmp_path / "metadata.jsonl").write_text('{"video": "videos/a.mp4", "caption": "a clip"}')
    (tmp_path / "videos.txt").write_text("videos/a.mp4")
    (tmp_path / "prompts.txt").write_text("a clip")
    with tarfile.open(tmp_path / "0.tar", "w") as shard:
        shard.add(tmp_path / "videos" / "a.mp4", "a.mp4")
        shard.add(tmp_path / "labels" / "a.txt", "a.txt")
    asked: list[int] = []  # threads

    def note(module: object, function: str) -> None:
        real: Callable = getattr(module, function)

        def noted(*given: object, **named: object) -> object:
            if str(tmp_path) in str(given[:1]):
                asked.append(get_ident())
            return real(*given, **named)

        monkeypatch.setattr(module, function, noted)

    note(builtins, "open"), note(os, "scandir"), note(os, "listdir")
    found = on_ranks(run, f"cogfast.data.datasets.{name}", [str(tmp_path)], is_surveyed=False)
    assert set(asked) == set(MAIN)
    for each in found:
        assert list(each.train.captions) == ["a clip"]  # pyright: ignore
