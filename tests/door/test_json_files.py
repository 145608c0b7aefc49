"""JSON from outside: what fits a schema comes typed, all else is one line that names file and key."""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NotRequired

import pytest

from cogfast.config.yaml_files import read_yaml
from cogfast.core.files import read_limited
from cogfast.core.json_files import InsideName, Size, check, keys, read_json
from tests.support.refusals import Refusal, assert_refused, refusals


@dataclass(frozen=True)
class Part:
    start: int
    share: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class Settings:
    width: Size
    scale: float = 1.0
    patch: Size | None = None
    kind: Literal["a", "b"] = "a"
    parts: dict[str, list[Part]] = field(default_factory=dict)


def test_values_come_typed(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(
        '{"width": 8, "scale": 2, "patch": null, "kind": "b", "other": [1, {"a": 1.5}],'
        ' "parts": {"f": [{"start": 3, "share": [1, 2], "x": 0}, {"start": 4}]}}'
    )
    found = read_json(file, Settings)
    assert found == Settings(8, 2.0, None, "b", {"f": [Part(3, (1, 2)), Part(4, (0, 1))]})
    assert type(found.scale) is float and type(found.parts["f"][0].share) is tuple
    schema = keys({"width": int, "absent": NotRequired[str]})
    kept = read_json(file, schema)
    assert (kept["width"], kept["other"], "absent" in kept) == (8, [1, {"a": 1.5}], False)
    assert read_json(file)["scale"] == 2


TABLE = Path(__file__).with_name("refusals_json.txt")
SCHEMAS = {
    "Settings": Settings,
    "anything": Any,
    "mapping": dict[str, Any],
    "key a": keys({"a": int}),
}


@refusals(TABLE, *SCHEMAS)
def test_values_that_do_not_fit_the_schema_give_one_line(refusal: Refusal, tmp_path: Path) -> None:
    refusal, file = refusal.fill(nested="[" * 10**6, mark="\ufeff"), tmp_path / "a.json"
    file.write_text(refusal.words[0], encoding="utf-8")
    read = lambda: read_json(file, SCHEMAS[refusal.base], fix="ask who gave it")
    text = assert_refused(read, f"^{file}: <...>{refusal.line}<...>; ask")
    assert len(text) - len(str(file)) < 300


def test_long_values_and_keys_are_cut() -> None:
    for value in ({"a": "x" * 10**6}, {"y\n" * 10**6: "x"}, {"a": [1] * 10**5}):
        with pytest.raises(ValueError) as error:
            check(value, dict[str, int], "f")
        assert len(str(error.value)) < 300 and "\n" not in str(error.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'{"a": "\xff"}')
    line = "a.json: damaged JSON (invalid unicode <...> 8); copy"
    assert_refused(lambda: read_json(tmp_path / "a.json"), line)


def test_a_file_that_would_wait_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc/kmsg counts as a regular file, and a read of it waits for the next message."""
    file = tmp_path / "training_config.yaml"
    os.mkfifo(file)
    writer = os.open(file, os.O_RDWR)  # the pipe has a writer, which writes nothing
    monkeypatch.setattr(stat, "S_ISREG", lambda mode: True)
    line = "training_config.yaml: cannot be read (it is not a regular file); give a YAML"
    assert_refused(lambda: read_yaml(file, "training_config.yaml"), line)
    os.close(writer)


def test_only_regular_files_of_a_fair_size_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    read = lambda: read_json(file)
    assert_refused(read, "a.json: cannot be read (No such file or directory)")
    file.mkdir()
    with pytest.raises(ValueError, match="a.json: .*(a directory|not a regular file)"):
        read_json(file)
    file.rmdir()
    os.mkfifo(file)  # to open it would wait for a writer
    assert_refused(read, "a.json: cannot be read (it is not a regular file)")
    file.unlink()
    file.write_text("{}")
    os.truncate(file, 2**40)  # sparse; reading it all would take hours
    assert_refused(read, "larger than 67108864 bytes")
    os.truncate(file, 2)
    assert read_limited(file, 2) == b"{}"
    (tmp_path / "link").symlink_to(file)  # as download caches have them
    assert read_json(tmp_path / "link") == {}


@refusals(TABLE, "a name inside a folder")
def test_names_of_files_stay_inside(refusal: Refusal) -> None:
    (name,) = refusal.fill(nul="\0", x241="x" * 241, umlauts="ä" * 121, deep="a/" * 600).words
    assert_refused(lambda: check({"x": name}, dict[str, InsideName], "index"), refusal.line)


def test_names_inside_are_kept() -> None:
    texts = ["a", "a.safetensors", "..a", "a/b", "a..b", "./a", "1:2", "ä b"]
    for name in (*texts, "x" * 240, "ä" * 120):
        assert check(name, InsideName, "index") == name
