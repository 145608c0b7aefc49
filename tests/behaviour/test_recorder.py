"""The recorder itself: what it compares, what it takes for equal, and how it stores texts."""

import json
from pathlib import Path

import pytest

from scripts.behaviour import difference
from scripts.behaviour.difference import ERROR_TEXT, Difference, compare_values, normalized
from scripts.behaviour.on_disk.snapshot import compare_texts
from scripts.behaviour.words.store import read_cases, write_cases

SAME = {
    "{work}/out/a-2026-11-28-00-08-11": "<work>/out/a-<time>",
    "{root}/cogfast/configs/sft.yaml": "<cogfast>/cogfast/configs/sft.yaml",
    "took 12 s, 0.4 s, process 1523": "took <number> s, <number> s, process <pid>",
    "127.0.0.1:4711 at 09:08:07": "127.0.0.1:<port> at <time>",
    "{work}er and {work}/b": "{work}er and <work>/b",
}


@pytest.mark.parametrize("text", SAME)
def test_what_belongs_to_the_machine_and_the_moment_is_replaced(text: str, tmp_path: Path) -> None:
    places = {"work": tmp_path, "root": difference.ROOT}
    found = normalized(text.format(**places), tmp_path)
    assert found == SAME[text].format(**places)


@pytest.mark.parametrize(
    "text", ["waits 10 s", "args.lr=0.1", "5 of 6 GiB", "shape [8, 16]", "seed 12", "1.0 -> 1.10"]
)
def test_other_numbers_count(text: str, tmp_path: Path) -> None:
    assert normalized(text, tmp_path) == text


def test_each_leaf_that_differs_is_a_difference() -> None:
    one = {"a": {"b": 1, "c": [1]}, "d": "x"}
    two = {"a": {"b": 1.0, "c": [1], "e": None}, "d": "x"}
    found = {it.what: (it.recorded, it.found) for it in compare_values("part", "case", one, two)}
    assert found == {"a.b": ("1", "1.0"), "a.e": ("(nothing)", "null")}
    assert not list(compare_values("part", "case", one, json.loads(json.dumps(one))))


def test_only_listed_texts_of_errors_may_change(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "changed_texts.json"
    monkeypatch.setattr(difference, "CHANGED", file)
    rows = [{"case": "words:key-1", "recorded": "old", "found": "new"}]
    file.write_text(json.dumps(rows))
    text = Difference("words", "key-1", ERROR_TEXT, "old", "new")
    status = Difference("words", "key-1", "status", "old", "new")
    assert difference.without_listed([text, status], ["words"]) == [status]
    # One that does not occur is a difference, where all cases were compared.
    (left,) = difference.without_listed([], ["words"])
    assert "changed_texts.json" in left.what and left.case == "key-1"
    assert not difference.without_listed([], ["words"], is_whole=False)
    assert not difference.without_listed([], ["names"])
    file.write_text(json.dumps([{**rows[0], "found": str(i)} for i in range(61)]))
    found = difference.without_listed([], ["names"])
    assert [it.found for it in found] == ["61"]


def test_stored_texts_come_back(tmp_path: Path) -> None:
    long = "".join(f"  key_{i}: {'x' * 40}\n" for i in range(60))
    cases = [
        {"id": "b", "kind": "k", "words": ["x", "\0ü"], "stdout": long, "status": 0},
        {"id": "a", "kind": "k", "words": ["y" * 500], "stdout": long[:-9] + "end", "status": 2},
        {
            "id": "c",
            "kind": "k",
            "words": [],
            "stdout": long,
            "files": {"f": None, "g": "\r\n" * 99},
        },
    ]
    write_cases(tmp_path, cases)
    assert read_cases(tmp_path) == sorted(cases, key=lambda case: str(case["id"]))
    # A text that is like another takes a few lines.
    assert (tmp_path / "texts.jsonl").stat().st_size < 1.5 * len(long) + 600


# {on another processor, this line of this file ...: {... and this one: whether they differ by rounding}}
ROUNDED = {
    ("output", "step 3/9 loss 0.4303 lr 1.00e-03"): {
        "step 3/9 loss 0.4304 lr 1.00e-03": True,
        "step 3/9 loss 0.4305 lr 1.00e-03": False,
        "step 3/9 loss 0.4303 lr 1.01e-03": True,
        "step 3/9 loss 0.4303 lr 1.00e-02": False,
        "step 4/9 loss 0.4303 lr 1.00e-03": False,
    },
    ("log.txt", "lr 0.001"): {"lr 0.002": False},
    ("log.txt", "eps 1e-08"): {"eps 1e-02": False},
    ("metrics.jsonl", '{"loss": 0.43032917380332947, "lr": 0.001}'): {
        '{"loss": 0.43032915, "lr": 0.001}': True,
        '{"loss": 0.43033, "lr": 0.001}': False,
        '{"loss": 0.43032917380332947, "lr": 0.002}': False,
    },
    ("manifest.json", '"checksums": {"a": "3104ea945e602"}'): {
        '"b": {"a": "3104ea945e603"}': False
    },
    ("manifest.json", '"names": ["3104e9"]'): {'"names": ["3104e8"]': False},
    ("rank.safetensors", "master/a float32 [2] norm=1.5 bits=0123456789abcdef"): {
        "master/a float32 [2] norm=1.50001 bits=0123456789abcdee": True,
        "master/a float32 [2] norm=1.6 bits=0123456789abcdef": False,
        "master/a float32 [3] norm=1.5 bits=0123456789abcdef": False,
    },
    ("training_config.yaml", "  weight_decay: 0.0001"): {"  weight_decay: 0.00010000001": False},
    ("manifest.json", '"config": {"lr": 0.001}'): {'"config": {"lr": 0.001000000001}': False},
}


@pytest.mark.parametrize("place", ROUNDED, ids=" ".join)
def test_another_processor_rounds_and_does_nothing_else(place: tuple[str, str]) -> None:
    name, line = place
    for other, is_rounded in ROUNDED[place].items():
        assert bool(list(compare_texts("a case", name, line, other, False))) is not is_rounded, (
            other
        )
        assert list(compare_texts("a case", name, line, other, True))
        assert not list(compare_texts("a case", name, line, line, False))
