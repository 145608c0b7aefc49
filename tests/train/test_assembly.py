"""Messages about a run's data sources name the key, and the file or option, that the user set."""

from pathlib import Path

import pytest

from cogfast.config import load_config
from tests.support.runs import datasets_of
from tests.support.video_files import sat_folder

FOLDERS = {"target": "cogfast.data.datasets.VideoFolder"}
TABLES = {"target": "cogfast.data.datasets.VideoManifest"}
SHARDS = {"target": "cogfast.data.datasets.VideoShards"}
PARAMS = {"video_size": [32, 48], "fps": 8, "max_num_frames": 9}


def load(data: dict, **sources: list[str]):
    settings = {f"data.params.{key}": (value, "default") for key, value in PARAMS.items()}
    settings |= {f"data.{key}": (value, "default") for key, value in data.items()}
    settings |= {f"args.{key}": (value, "--data_root") for key, value in sources.items()}
    config = load_config([], settings=settings)
    return datasets_of(config, config.run.args)


@pytest.mark.parametrize(
    "key, data, source, reason",
    [
        ("train_data", FOLDERS, "nowhere", "no such folder; set it to the folder of your data"),
        ("train_data", FOLDERS, "", "no .mp4 file in it"),
        ("valid_data", FOLDERS, "", "no .mp4 file in it"),
        ("train_data", TABLES, "", "has no metadata.jsonl, metadata.csv or metadata.json, nor"),
        ("train_data", TABLES, "x.parquet", "no such file; give a .csv, .jsonl or .json file"),
        ("train_data", SHARDS, "", "no .tar file in it"),
        ("train_data", SHARDS, "x-{7}.tar", "{7} is not a range or list; use {000..099} or {a,b}"),
        ("train_data", SHARDS, "x.tar;b*x", "no folder b*x; write folders after ; as A,B*2"),
    ],
)
def test_a_source_that_cannot_be_read_is_reported_under_its_key(
    key: str, data: dict, source: str, reason: str, tmp_path: Path
):
    (tmp_path / "bad").mkdir()
    bad = str(tmp_path / "bad" / source)
    good = str(sat_folder(tmp_path / "good", 1))
    with pytest.raises(ValueError) as error:
        load(data, **({"train_data": [good]} | {key: [bad]}))
    assert str(error.value).startswith(f"--data_root: args.{key}={bad}: {reason}")


def test_a_source_that_is_listed_twice_is_logged_with_its_key(tmp_path: Path, caplog):
    good = str(sat_folder(tmp_path, 2))
    assert len(load(FOLDERS, train_data=[good, good]).train) == 4
    assert f"args.train_data lists {good} more than once; its samples are repeated" in caplog.text
