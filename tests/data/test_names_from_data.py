"""Names and texts that come from data, used as file names and shown in terminals and logs."""

import io
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cogfast.__main__ import main
from cogfast.cli.options import parse_sample, read_prompts
from cogfast.cli.streams import start_logging
from cogfast.core.values import printable
from cogfast.data.bad_samples import BadSampleLog
from cogfast.extensions.sample.generate import Prompt, _Row, _write_overview, file_name
from tests.support.refusals import assert_refused

# Prompts that would do harm as file names.
PATHS = ["../../etc/passwd", "/etc/passwd", "a\\b", "..", ".", "", " ", "-rf", "~", "a/../b", "CON"]
# Control characters, names longer than 255 bytes, and bytes that are not UTF-8.
CHARACTERS = ["a\nb", "a\0b", "\x1b[31mred", "x" * 300, "\u202eabc", "\u4e00" * 300]
CHARACTERS += ["\U0001f600", "\udcff", "\x9b31m"]
# Equal prompts, and characters that a shell or printf interprets.
SPECIAL = ["a b", "a b", "A B", "*?[", "$(touch made)", "`touch made`", "a;b|c", "%s%n"]
PROMPTS = PATHS + CHARACTERS + SPECIAL


def test_a_prompts_file_lies_in_its_folder(tmp_path: Path) -> None:
    names = [file_name(Prompt(i, text, seed=0)) + ".mp4" for i, text in enumerate(PROMPTS)]
    assert len(set(names)) == len(PROMPTS)  # identical prompts, too
    for name in names:
        assert (tmp_path / name).parent == tmp_path and Path(name).name == name
        assert name.isascii() and name.isprintable() and len(name) < 100
        assert name[0].isdigit() and not set(name) & set("/\\ *?[$`;|%~")
    rows = [_Row(name, text, None) for name, text in zip(names, PROMPTS, strict=True)]
    _write_overview(tmp_path, rows, "")
    found = json.loads((tmp_path / "prompts.json").read_text(encoding="utf-8"))
    assert list(found.items()) == list(zip(names, PROMPTS, strict=True))


@pytest.mark.parametrize("text", ["a\0b", "a\udcff"])
def test_prompts_that_are_not_utf8_are_refused_before_anything_is_built(tmp_path, text) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "training_config.yaml").write_text("{}")
    with pytest.raises(ValueError, match="--prompt: .* is not valid text; write it in UTF-8"):
        read_prompts(parse_sample([str(tmp_path), "--prompt", text]), SimpleNamespace())


def test_prompt_files(tmp_path, monkeypatch) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "training_config.yaml").write_text("{}")
    args = SimpleNamespace(input_type="cli")
    asked = lambda *arguments: read_prompts(parse_sample([str(tmp_path), *arguments]), args)
    file = tmp_path / "prompts.txt"
    file.write_bytes("a\u2028b\x0bc\r\nd\re\n\n".encode())
    assert asked("--prompt-file", str(file))[0] == ["a\u2028b\x0bc", "d", "e"]
    file.write_text("a@@" + "x" * 5000)  # longer than a name may be
    with pytest.raises(ValueError, match="--image x{200}: no such file"):
        asked("--prompt-file", str(file))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n")))
    assert_refused(lambda: asked(), "standard input: not UTF-8")


def test_printable() -> None:
    assert printable("plain \u4e00 \u0627 \U0001f600") == "plain \u4e00 \u0627 \U0001f600"
    shown = printable("a\x1b[31m\nb\x9b\x7f\udcff\u202e\u2028")
    assert shown == r"a\x1b[31m\nb\x9b\x7f\udcff\u202e\u2028"
    assert printable("a\nb\t\r", keep="\n\t") == "a\nb\t\\r"


def test_the_log_shows_data_as_text(capsys: pytest.CaptureFixture) -> None:
    """Escapes in captions and names are shown as text, and line breaks in them start no new line."""
    logger = logging.getLogger("cogfast")
    before = logger.handlers, logger.propagate, logger.level
    try:
        start_logging()
        logger.warning("%s of %d: %s %.1f", Path("x\x1b]0;t\x07.mp4"), np.int64(3), "a\nb", 0.5)
        logger.warning("a table\n  \x1b[2Jof two lines")
        logger.warning("in %s", "/c/folders/7-0123456789ab/s3:/b/m")  # a copy of a store
        log = BadSampleLog(None, num_samples=9)
        log.add("bad\x1b[31m\nname", "why\nnot")
    finally:
        logger.handlers, logger.propagate = before[:2]
        logger.setLevel(before[2])
    assert capsys.readouterr().err.splitlines() == [
        r"x\x1b]0;t\x07.mp4 of 3: a\nb 0.5",
        "a table",
        r"  \x1b[2Jof two lines",
        "in s3://b/m",
        r"skipped bad\x1b[31m\nname: why\nnot",
    ]


def test_an_error_shows_data_as_text(capsys: pytest.CaptureFixture) -> None:
    assert main(["train", "--base", "no\x1b[31m\nsuch.yaml"]) == 2
    line = r"cogfast: --base no\x1b[31m such.yaml: no such file; give the path of a YAML file"
    assert capsys.readouterr().err == f"{line}\n"
