"""JSON from outside: what fits a schema comes typed, all else is one line that names file and key."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NotRequired

import pytest

from cogfast.config.json_files import (
    InsideName,
    Size,
    check,
    keys,
    read_json,
    read_limited,
)
from cogfast.config.yaml_files import read_yaml


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


# name: text, schema, the message after the file's name
REFUSED = {
    "empty": ("", dict[str, Any], "damaged JSON"),
    "cut": ('{"width": 8', dict[str, Any], r"damaged JSON \(EOF"),
    "nested": ("[" * 10**6, Any, "damaged JSON"),
    "NaN": ('{"width": 8, "scale": NaN}', Settings, "damaged JSON"),
    "half a pair": (r'{"a": "\ud800"}', dict[str, Any], "damaged JSON"),
    "a mark in front": ("\ufeff{}", dict[str, Any], "damaged JSON"),
    "top is a list": ("[1]", dict[str, Any], r"\[1\] must be a mapping"),
    "top is null": ("null", Settings, "null must be a mapping"),
    "missing key": ("{}", Settings, "key width is missing"),
    "missing key of a mapping": ("{}", keys({"a": int}), "key a is missing"),
    "beyond floats": ('{"width": 8, "scale": 1e999}', Settings, r"damaged JSON \(Out of range"),
    "zero": ('{"width": 0}', Settings, r"width=0 must be a whole number from 1 to 1.67772e\+07"),
    "huge": (f'{{"width": {10**30}}}', Settings, "width=10+ must be a whole number from 1"),
    "true": ('{"width": true}', Settings, "width=true must be a whole number"),
    "a float": ('{"width": 8.5}', Settings, "width=8.5 must be a whole number"),
    "text": ('{"width": "8"}', Settings, "width='8' must be a whole number"),
    "union, out of range": ('{"width": 1, "patch": -2}', Settings, "patch=-2 must be .* from 1 to"),
    "other word": ('{"width": 1, "kind": "c"}', Settings, "kind='c' must be one of a, b"),
    "inside": (
        '{"width": 1, "parts": {"f": [{"start": 1}, {"start": []}]}}',
        Settings,
        r"parts.f\[1\].start=\[\] must be a whole number",
    ),
    "three of two": (
        '{"width": 1, "parts": {"f": [{"start": 1, "share": [1, 2, 3]}]}}',
        Settings,
        r"parts.f\[0\].share=\[1, 2, 3\] must be a list of 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_do_not_fit_the_schema_give_one_line(name: str, tmp_path: Path) -> None:
    text, schema, message = REFUSED[name]
    file = tmp_path / "a.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"^{re.escape(str(file))}: .*{message}.*; ask") as error:
        read_json(file, schema, fix="ask who gave it")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) - len(str(file)) < 300


def test_long_values_and_keys_are_cut() -> None:
    for value in ({"a": "x" * 10**6}, {"y\n" * 10**6: "x"}, {"a": [1] * 10**5}):
        with pytest.raises(ValueError) as error:
            check(value, dict[str, int], "f")
        assert len(str(error.value)) < 300 and "\n" not in str(error.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match=r"a.json: damaged JSON \(invalid unicode .* 8\); copy"):
        read_json(tmp_path / "a.json")


def test_a_file_that_would_wait_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc/kmsg counts as a regular file, and a read of it waits for the next message."""
    file = tmp_path / "training_config.yaml"
    os.mkfifo(file)
    writer = os.open(file, os.O_RDWR)  # the pipe has a writer, which writes nothing
    monkeypatch.setattr(stat, "S_ISREG", lambda mode: True)
    with pytest.raises(
        ValueError, match="training_config.yaml: it has no content yet; give a YAML"
    ):
        read_yaml(file, "training_config.yaml")
    os.close(writer)


def test_only_regular_files_of_a_fair_size_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    with pytest.raises(ValueError, match=r"a.json: cannot be read \(No such file or directory\)"):
        read_json(file)
    file.mkdir()
    with pytest.raises(ValueError, match="a.json: .*(a directory|not a regular file)"):
        read_json(file)
    file.rmdir()
    os.mkfifo(file)  # to open it would wait for a writer
    with pytest.raises(ValueError, match="a.json: not a regular file"):
        read_json(file)
    file.unlink()
    file.write_text("{}")
    os.truncate(file, 2**40)  # sparse; reading it all would take hours
    with pytest.raises(ValueError, match="larger than 67108864 bytes"):
        read_json(file)
    os.truncate(file, 2)
    assert read_limited(file, 2) == b"{}"
    (tmp_path / "link").symlink_to(file)  # as download caches have them
    assert read_json(tmp_path / "link") == {}


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../a",
        "a/../../b",
        "a/..",
        "/etc/passwd",
        "//a/b",
        "a\0b",
        "C:\\a",
        "c:a",
        "\\\\host\\share",
        "..\\a",
        "a\\..\\b",
        "x" * 241,
        "a/" + "ä" * 121,
        "a/" * 600 + "a",
    ],
)
def test_names_of_files_stay_inside(name: str) -> None:
    with pytest.raises(ValueError, match="text that names a file inside the folder"):
        check({"x": name}, dict[str, InsideName], "index")


def test_names_inside_are_kept() -> None:
    for name in (
        "a",
        "x" * 240,
        "ä" * 120,
        "a.safetensors",
        "..a",
        "a/b",
        "a..b",
        "./a",
        "1:2",
        "ä b",
    ):
        assert check(name, InsideName, "index") == name
