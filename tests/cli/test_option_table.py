"""docs/options.md lists every key of the configuration, with what the schema says today."""

import dataclasses
import importlib
import json
import re

import pytest
from omegaconf import OmegaConf

from cogfast.__main__ import main
from cogfast.cli.option_table import Group, comments_of, groups
from cogfast.cli.options import parse_train
from cogfast.core.values import show
from cogfast.data.datasets import ListedVideos
from cogfast.train.keys import ModelKeys, TrainKeys
from scripts.write_options import FILE, SCHEMA, page, yaml_schema
from tests.support.tiny_run import ROOT, write_clips

FOLDERS = [ROOT / "configs", ROOT / "tests/golden/sat_configs"]
FILES = [file for folder in FOLDERS for file in sorted(folder.glob("*.yaml"))]


@pytest.fixture(scope="module")
def table() -> list[Group]:
    return list(groups())


def test_the_file_is_what_the_command_writes(table):
    text = "docs/options.md is out of date; run python -m scripts.write_options"
    assert FILE.read_text(encoding="utf-8") == page(table), text


def test_the_schema_for_editors_is_what_the_command_writes():
    text = "configs/cogfast.schema.json is out of date; run python -m scripts.write_options"
    assert json.loads(SCHEMA.read_text(encoding="utf-8")) == yaml_schema(), text


@pytest.mark.parametrize("file", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_schema_for_editors_takes_our_files_and_upstreams(file):
    """Without jsonschema, the models check the same files in tests/door/."""
    jsonschema = pytest.importorskip("jsonschema")
    plain = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    checker = jsonschema.Draft202012Validator(yaml_schema())
    assert not [error.message for error in checker.iter_errors(plain)]
    plain.setdefault("args", {})["train_iter"] = 1
    assert not checker.is_valid(plain)


def test_our_files_name_the_schema():
    for file in (ROOT / "configs").glob("*.yaml"):
        first = file.read_text().splitlines()[0]
        assert first == f"# yaml-language-server: $schema={SCHEMA.name}", file.name


def test_every_key_has_a_meaning(table):
    rows = {option.key: option for group in table for option in group.options}
    assert not [key for key, option in rows.items() if not option.meaning]
    fields = {"args": TrainKeys.model_fields, "model": ModelKeys.model_fields}
    fields["data.params"] = [one.name for one in dataclasses.fields(ListedVideos)]
    for where, names in fields.items():
        assert {f"{where}.{name}" for name in names} <= rows.keys()
    assert {"hidden_size", "lora_alpha"} <= rows.keys()


def test_a_parameter_without_a_comment_has_no_meaning(tmp_path, monkeypatch):
    source = (
        "class Own:\n"
        "    def __init__(\n"
        "        self,\n"
        "        # above the parameter,\n"
        "        # in two lines\n"
        "        a: int = 1,\n"
        "        b: int = 2,  # beside it\n"
        "    ): ...\n"
    )
    (tmp_path / "own_schema.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("own_schema").Own
    found = comments_of(own)
    assert (found["a"], found["b"]) == ("above the parameter, in two lines", "")


def test_help_all_prints_every_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as done:
        parse_train(["--help-all"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "- args.lr (a number from 0 to 1000; default 0.0001): peak learning rate" in text
    section = re.search(r"\n## Defaults of .*?(?=\n## )", FILE.read_text(), re.DOTALL)
    assert section
    assert text.split() == FILE.read_text().replace(section[0], "").replace("`", "").split()


@pytest.mark.parametrize("words", [[], ["--lora", "4"]], ids=["all weights", "LoRA"])
def test_the_table_of_a_start_is_what_a_start_prints(pipelines, tmp_path, capsys, words):
    write_clips(tmp_path / "clips", 1)
    command = ["train", str(pipelines.path("5b")), "--data", str(tmp_path / "clips"), *words]
    assert main([*command, "--dry-run"]) == 0
    # Defaults of components are comments.
    text = re.sub(r"^( *)# (?=\w+:)", r"\1", capsys.readouterr().out, flags=re.MULTILINE)
    printed = OmegaConf.create(text)
    rows = re.findall(r"^\| `([\w.]+)` \| `.+` \| (.+) \| (.+) \|$", FILE.read_text(), re.MULTILINE)
    found = {key: cells[len(words) > 0].strip("`") for key, *cells in rows}
    assert {"args.lr", "data.params.skip_frms_num"} <= found.keys()
    for key, cell in found.items():
        value = OmegaConf.select(printed, key)
        assert cell in ("the model's", str(value), show(value)), key
