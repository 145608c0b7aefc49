"""docs/options.md lists every key of the configuration, with what the schema says today."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from cogfast.cli.option_table import FILE, Comments, Group, groups, render, type_of
from cogfast.cli.options import parse_train
from cogfast.data.datasets import ListedVideos
from cogfast.schema.arguments import ModelArguments, TrainArguments
from cogfast.schema.sat_network import LORA_PARAMS, NETWORK_PARAMS
from tests.support.tiny_run import ROOT


@pytest.fixture(scope="module")
def table() -> list[Group]:
    return list(groups())


def test_the_file_is_what_the_command_writes(table):
    text = "docs/options.md is out of date; run python -m cogfast.cli.option_table"
    assert FILE.read_text(encoding="utf-8") == render(table), text


def test_every_key_has_a_meaning(table):
    missing = [option.key for group in table for option in group.options if not option.meaning]
    assert not missing, f"write a comment above {', '.join(missing)}"


def test_every_key_of_the_schema_has_a_row(table):
    rows = {option.key for group in table for option in group.options}
    for where, schema in (
        ("args", TrainArguments),
        ("model", ModelArguments),
        ("data.params", ListedVideos),
    ):
        assert {f"{where}.{one.name}" for one in dataclasses.fields(schema)} <= rows
    assert {*NETWORK_PARAMS, *LORA_PARAMS} <= rows


def test_rows_show_types_and_defaults(table):
    lines = render(table).splitlines()
    start = lambda key: next(line for line in lines if line.startswith(f"| `{key}`"))
    assert start("args.keep_last").startswith("| `args.keep_last` | whole number >= 0 | `2` |")
    assert "| sat, constant, " in start("args.lr_schedule")
    assert start("args.epochs").startswith("| `args.epochs` | whole number >= 1 or null | `null`")
    assert "| true or false | `false` |" in start("args.compile")
    assert "| required | " in start("hidden_size_head")


def test_a_key_without_a_comment_has_no_meaning(tmp_path, monkeypatch):
    source = (
        "class Own:\n"
        "    # --- first ---\n"
        "    # above the field,\n"
        "    # in two lines\n"
        "    a: int = 1\n"
        "    b: int = 2  # beside it\n"
        "def call(\n"
        "    # of x\n"
        "    x, y,\n"
        "): ...\n"
        "KEYS = {\n"
        "    # of one\n"
        "    'one': 1, 'two': 2,\n"
        "}\n"
    )
    (tmp_path / "own_schema.py").write_text(source.replace("'", '"'))
    monkeypatch.syspath_prepend(tmp_path)
    comments = Comments("own_schema")
    assert comments.of_class("Own") == {
        "a": ("above the field, in two lines", "first"),
        "b": ("", "first"),
    }
    assert comments.of_call("call") == {"x": "of x", "y": ""}
    assert comments.of_mapping("KEYS") == {"one": "of one", "two": ""}


def test_help_all_prints_every_row(capsys, monkeypatch, table):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as done:
        parse_train(["--help-all"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "  args.lr  (number from 0 to 1000; default 0.0001)\n      peak learning rate" in text
    words = " ".join(text.split())
    rows = [option for group in table for option in group.options if option.type]
    assert len(rows) > 200
    for row in rows:
        meaning = row.meaning.replace("None", "null").replace("`", "")
        assert f"{row.key} ({row.type}" in words and " ".join(meaning.split()) in words


def test_help_names_help_all(capsys):
    with pytest.raises(SystemExit):
        parse_train(["--help"])
    assert "--help-all" in capsys.readouterr().out


def test_help_all_imports_no_torch():
    code = (
        "import sys\n"
        "from cogfast.__main__ import main\n"
        "try:\n    main(['train', '--help-all'])\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "args.train_iters" in done.stdout


def test_types_are_short():
    assert type_of(list[str] | None) == "list (text) or null"
    assert type_of(tuple[int, int] | None) == "list of 2 (whole number) or null"
