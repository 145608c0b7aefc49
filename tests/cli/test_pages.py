"""The pages of docs/ and those beside README.md: links, the site's navigation, and commands that run."""

import ast
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml
from PIL import Image

from cogfast.__main__ import _USAGE, main
from cogfast.train.keys import TrainKeys
from scripts.write_options import SCHEMA
from tests.support.ranks.forked import run_forked
from tests.support.tiny_run import ROOT, write_clips

DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


@cache
def anchors(page: Path) -> set[str]:
    """The names of a page's headings in a link, as GitHub makes them."""
    found: dict[str, int] = {}
    for title in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", LINK.sub("]", title).lower()).replace(" ", "-")
        found[name] = found.get(name, -1) + 1
    return {f"{name}-{i}" if i else name for name, last in found.items() for i in range(last + 1)}


def broken_links(page: Path, text: str) -> Iterator[str]:
    text = re.sub(r"`[^`\n]+`", "", FENCE.sub("", text))
    for link in LINK.findall(text):
        if re.match(r"https?:|mailto:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        # The site has the pages of docs/ alone.
        folder = DOCS if page.is_relative_to(DOCS) else ROOT
        is_there = target.is_relative_to(folder) and target.exists()
        if not is_there or anchor and (target.suffix != ".md" or anchor not in anchors(target)):
            yield link


def test_links_point_to_what_exists() -> None:
    wrong = [f"{page}: {link}" for page in PAGES for link in broken_links(page, page.read_text())]
    assert not wrong


def test_a_broken_link_is_found() -> None:
    text = "[a](data.md#layouts) [b](data.md#no) [c](no.md) `[d](no.md)` [e](../README.md) [f](#no)"
    wrong = ["data.md#no", "no.md", "../README.md", "#no"]
    assert [*broken_links(DOCS / "convert.md", text)] == wrong


def named(entry: object) -> Iterator[str]:
    """The pages of a navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from named(inner)


def test_every_page_is_in_the_navigation_once() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    left_out = set(site.get("exclude_docs", "").split())
    pages = {page.relative_to(DOCS).as_posix() for page in PAGES if page.is_relative_to(DOCS)}
    assert sorted(named(site["nav"])) == sorted(pages - left_out)
    assert left_out <= pages


def test_every_command_has_a_row() -> None:
    (names,) = re.findall(r"\{([\w,]+)\}", _USAGE)
    rows = re.findall(r"^\| `cogfast (\w+)` \|", (DOCS / "commands.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(names.split(","))


def options_of(command: str, capsys) -> set[str]:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    keys = {f"--{name.replace('_', '-')}" for name in TrainKeys.model_fields}
    return {*re.findall(r"--[\w-]+", capsys.readouterr().out), *keys}


def test_the_changelog_names_options_that_exist(capsys) -> None:
    """Every option and key of the added part exists, and no option of the removed one (values apart)."""
    (names,) = re.findall(r"\{([\w,]+)\}", _USAGE)
    known = {name: options_of(name, capsys) for name in names.split(",")}
    schema = SCHEMA.read_text()
    added, _, removed = (ROOT / "CHANGELOG.md").read_text().partition("\nRemoved ")
    removed = re.sub(r"\([^)]+\)", "", removed)  # what replaces an option is in parentheses
    wrong = []
    for part, is_there in ((added, True), (removed, False)):
        for span in re.findall(r"`([^`]+)`", part):
            words = span.split()
            if not is_there and not words[-1].startswith("--"):
                continue  # a value was removed
            whose = known.get(words[1]) if words[0] == "cogfast" and len(words) > 1 else None
            options = re.findall(r"(?<!\S)--[\w-]+", span) if whose or span[:2] == "--" else []
            for option in options:
                found = whose or set().union(*known.values())
                wrong += [span] * ((option.replace("_", "-") in found) != is_there)
            key = re.match(r"args\.(\w+)", span)
            wrong += [span] * bool(is_there and key and f'"{key[1]}": {{' not in schema)
    assert not wrong


def test_messages_that_a_page_quotes_are_in_the_code() -> None:
    trees = (ast.parse(file.read_text()) for file in (ROOT / "cogfast").rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    texts = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    quoted = re.findall(r'"([^"]+)"', (DOCS / "guide" / "troubleshooting.md").read_text())
    assert quoted
    assert not [words for words in quoted if not any(words in text for text in texts)]


def test_pages_count_tests_as_they_were_run() -> None:
    """`make test` leaves the long tests out, and the page of the last soak has that soak's figures."""
    assert not [
        page for page in PAGES if re.search(r"make test\b.{0,20}\ball tests", page.read_text())
    ]
    soak = json.loads((DOCS / "soak.json").read_text())
    text = f"{soak['passed']} tests in {soak['minutes']:.0f} minutes on {soak['machine'].split(',')[0]}"
    assert text in (DOCS / "reliability.md").read_text().replace("\n", " ")
    assert (soak["failed"], soak["status"]) == (0, 0)


# Pages whose commands run one after the other, and the tiny model that is in place of the published one.
TUTORIALS = {"first_lora": {"CogVideoX-5b": "5b"}, "all_weights": {"CogVideoX-5b": "5b"}}
TUTORIALS |= {"image_to_video": {"CogVideoX-5b-I2V": "5b_i2v"}, "troubleshooting": {}}
BLOCK = re.compile(r"^(?:<!-- (needs .+) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# The tests add this to the commands, as the pages say.
ADDED = {
    "train": ["args.train_iters=2", "args.num_workers=0"],
    "sample": ["--steps", "2"],
}


def commands(page: Path) -> Iterator[str]:
    """The commands and Python programs of a page that are not marked as `<!-- needs ... -->`."""
    for needs, language, text in BLOCK.findall(page.read_text()):
        if language == "python" and not needs:
            yield text
        elif language in ("", "bash") and not needs:
            yield from text.replace("\\\n", " ").strip().splitlines()


def program(text: str) -> str:
    """Python that does what a command or program of a page does."""
    if "\n" in text:
        text = text.replace('"cuda"', '"cpu"')
        return text.replace('").frames', '", num_inference_steps=2).frames')
    name, command, *words = shlex.split(text, comments=True)
    assert name == "cogfast", text
    argv = [command, *words, *ADDED.get(command, [])]
    return f"import sys\nfrom cogfast.__main__ import main\nsys.exit(main({argv}))"


SOAKED = ("first_lora", "all_weights")


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.soak] * (page in SOAKED)) for page in TUTORIALS]
)
def test_the_commands_of_the_guide_run(page: str, pipelines, here: Path) -> None:
    for name, family in TUTORIALS[page].items():
        (here / name).symlink_to(pipelines.path(family))
    write_clips(here / "my_videos")
    Image.new("RGB", (60, 40), "navy").save(here / "first.png")
    for text in commands(DOCS / "guide" / f"{page}.md"):
        start = "import os\nfrom tests.cli.closure import block_others\nblock_others()\n"
        done = run_forked(["-c", f"{start}os.chdir({str(here)!r})\n{program(text)}"])
        assert done.returncode == 0, f"{text}\n{done.stdout}"
    if page == "first_lora":
        assert Image.open("lighthouse.webp").n_frames == 9
        assert [*Path("videos").glob("*.mp4")]


def test_every_command_runs_or_says_what_it_needs() -> None:
    run = {text for page in TUTORIALS for text in commands(DOCS / "guide" / f"{page}.md")}
    for page in [ROOT / "README.md", *(DOCS / "guide").glob("*.md")]:
        assert set(commands(page)) <= run, page
