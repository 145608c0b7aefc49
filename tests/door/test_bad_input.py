"""A user's mistake in a configuration ends in one line that names the key and the fix."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cogfast.config import load_config
from tests.support.refusals import Refusal, assert_refused, refusals
from tests.support.runs import Run
from tests.support.tiny_run import ROOT

TABLE = Path(__file__).with_name("refusals.txt")
Files = Callable[[str], list[Path]]


@pytest.fixture
def files(sat_configs: Path, run: Run) -> Files:
    """Return the YAML files of a base of the table."""
    upstream = [sat_configs / "cogvideox_2b.yaml", sat_configs / "sft.yaml"]
    found = {"5b": [ROOT / "configs" / "cogvideox_5b.yaml"], "2b and sft": upstream, "nothing": []}
    return lambda base: [run.base] if base == "tiny" else found[base]


@refusals(TABLE, "2b and sft", "5b", "tiny", "nothing")
def test_one_line_names_origin_key_and_fix(refusal: Refusal, files: Files) -> None:
    assert_refused(lambda: load_config(files(refusal.base), refusal.words), refusal.line)


@refusals(TABLE, "a file")
def test_files_that_cannot_be_read(tmp_path: Path, refusal: Refusal) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(refusal.words[0])
    assert_refused(lambda: load_config([file]), refusal.line)


@refusals(TABLE, "the path of a file")
def test_paths_that_are_no_files(refusal: Refusal) -> None:
    assert_refused(lambda: load_config(refusal.words), refusal.line)


@pytest.mark.parametrize("value", ["{a: 1}", "[a]", '"${args.nothing}"'])
def test_a_command_of_a_file_is_ignored_whatever_it_is(tmp_path: Path, value: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"args: {{eval_command: {value}}}\n")
    config = load_config(["cogvideox_2b.yaml", file])
    assert config.args.eval_command is None
    assert config.unused["args.eval_command"].startswith("a.yaml sets it")


def test_a_list_with_braces_is_a_list(sat_configs, log):
    """YAML takes the braces of tar shards for a mapping. Without quotes a shell makes two words of them."""
    files = [sat_configs / "cogvideox_2b.yaml", sat_configs / "sft.yaml"]
    config = load_config(files, ["args.train_data=[s3://b/s-{000..001}.tar, t-{0..1}.tar]"])
    assert list(config.args.train_data) == ["s3://b/s-{000..001}.tar", "t-{0..1}.tar"]
    assert "given twice" not in log.text
    load_config(files, ["args.train_data=[a-0.tar]", "args.train_data=[a-1.tar]"])
    assert "args.train_data is given twice, and only the last one counts: ['a-1.tar']" in log.text
