"""The page in headless Chromium: it draws, plays, zooms, fits a telephone, and runs no other script."""

from __future__ import annotations

import functools
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cogfast.train.run.page.document import page_of_run, page_of_runs, write_page
from cogfast.train.run.page.record import read_run
from tests.train.run.page.browser import CHROMIUM, HOW_TO_INSTALL, Browser
from tests.train.run.page.run_folders import write_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=HOW_TO_INSTALL)

HOSTILE = '</script><img src=x onerror="window.attacked = 1"><script>window.attacked = 1</script>'
# Pixels of a plot that are neither transparent nor a grey of its grid.
COLOURED = """[...document.querySelectorAll(".plot canvas")].map((canvas) => {
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let count = 0;
  for (let i = 0; i < pixels.length; i += 4) {
    const [r, g, b] = [pixels[i], pixels[i + 1], pixels[i + 2]];
    if (pixels[i + 3] > 100 && Math.max(r, g, b) - Math.min(r, g, b) > 60) count++;
  }
  return count;
})"""
PLAYING = """(() => {
  const shown = [...document.querySelectorAll(".clip video")].filter((v) => v.offsetParent);
  return shown.length > 0 && shown.every((v) => v.currentTime > 0 && v.videoWidth === 48);
})()"""


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def write(run: Path) -> Path:
    path = run / "index.html"
    write_page(path, page_of_run(read_run(run), path))
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    return write_run(folder / "run", prompts=[HOSTILE, "a red circle"])


@pytest.fixture(scope="module")
def page(run: Path) -> Path:
    return write(run)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_plots_are_drawn_and_videos_play(browser: Browser, page: Path, dark: bool) -> None:
    browser.open(page.as_uri(), dark=dark)
    counts = browser.evaluate(COLOURED)
    assert len(counts) == 9 and min(counts) > 200
    assert browser.evaluate("document.querySelectorAll('.clip video').length") == 4
    browser.evaluate("document.querySelector('#samples').scrollIntoView()")
    browser.wait_until(PLAYING)
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(15, 18, 22)" if dark else "rgb(247, 248, 250)")
    # The details are drawn when they are opened.
    browser.evaluate("document.querySelector('#more-curves').open = true")
    browser.wait_until("document.querySelectorAll('.plot canvas').length === 13")
    assert browser.errors == []


def test_text_of_a_run_is_no_script(browser: Browser, page: Path) -> None:
    browser.open(page.as_uri())
    assert browser.evaluate("window.attacked") is None
    assert browser.evaluate("document.images.length") == 0
    assert HOSTILE in browser.evaluate("document.querySelector('#grid').textContent")
    # A script that came into the page some other way does not run either.
    browser.evaluate(
        "{ const added = document.createElement('script');"
        " added.textContent = 'window.attacked = 1'; document.body.append(added); }"
    )
    assert browser.evaluate("window.attacked") is None


def test_values_at_the_cursor_and_zoom(browser: Browser, page: Path) -> None:
    browser.open(page.as_uri())
    first = "document.querySelector('.plot')"
    assert browser.evaluate(f"{first}.querySelector('.step').textContent") == "last values"
    x, y, width = browser.evaluate(
        f"(() => {{ const r = {first}.querySelector('.u-over').getBoundingClientRect();"
        " return [r.x, r.y + r.height / 2, r.width]; })()"
    )
    browser.mouse("mouseMoved", x + width / 2, y, "none")
    # Twenty lines of ten steps: the middle is near step 100.
    browser.wait_until(f"/^step (100|110)$/.test({first}.querySelector('.step').textContent)")
    values = f"[...{first}.querySelectorAll('.value:not(.step)')].map((v) => v.textContent)"
    assert all(float(value) > 0 for value in browser.evaluate(values))
    is_hidden = f"{first}.querySelector('.small').hidden"
    assert browser.evaluate(is_hidden)
    browser.mouse("mouseMoved", x + width * 0.25, y, "none")
    browser.mouse("mousePressed", x + width * 0.25, y)
    browser.mouse("mouseMoved", x + width * 0.5, y)
    browser.mouse("mouseReleased", x + width * 0.5, y)
    browser.wait_until(f"!{is_hidden}")
    browser.evaluate(f"{first}.querySelector('.canvas').focus()")
    browser.press("0")
    browser.wait_until(is_hidden)
    browser.press("+")
    browser.wait_until(f"!{is_hidden}")
    browser.press("0")
    browser.press("End")
    browser.wait_until(f"{first}.querySelector('.step').textContent === 'step 200'")
    browser.press("ArrowLeft")
    browser.wait_until(f"{first}.querySelector('.step').textContent === 'step 190'")
    assert browser.errors == []


def test_a_narrow_screen_has_a_slider(browser: Browser, page: Path) -> None:
    browser.open(page.as_uri(), width=390, height=844)
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    shown = (
        "[...document.querySelectorAll('.clip video')].filter((v) => v.offsetParent)"
        ".map((v) => v.src.split('/').at(-2))"
    )
    assert browser.evaluate(shown) == ["step-00000100"] * 2
    browser.evaluate(
        "{ const slider = document.querySelector('#frame'); slider.value = 0;"
        " slider.dispatchEvent(new Event('input')); }"
    )
    assert browser.evaluate(shown) == ["step-00000050"] * 2
    assert browser.evaluate("document.querySelector('#frame-name').textContent") == "50"
    browser.evaluate("document.querySelector('#samples').scrollIntoView()")
    browser.wait_until(PLAYING)
    assert browser.errors == []


def test_a_video_is_enlarged_and_its_steps_follow(browser: Browser, page: Path) -> None:
    browser.open(page.as_uri())
    browser.evaluate("document.querySelectorAll('.clip')[2].click()")
    browser.wait_until("document.querySelector('#large').videoWidth === 48")
    name = "document.querySelector('#large-name').textContent"
    assert browser.evaluate(name) == "step 50"
    browser.press("ArrowRight")
    assert browser.evaluate(name) == "step 100"
    assert browser.evaluate("document.querySelector('#later').disabled")
    assert browser.evaluate("document.querySelector('#large-prompt').textContent") == "a red circle"
    browser.evaluate("document.querySelector('#close').click()")
    assert not browser.evaluate("document.querySelector('#viewer').open")


def test_the_theme_is_chosen_and_kept(browser: Browser, page: Path) -> None:
    browser.open(page.as_uri())
    dark = "getComputedStyle(document.body).backgroundColor === 'rgb(15, 18, 22)'"
    for wanted in (False, True):
        browser.evaluate("document.querySelector('#theme').click()")
        assert browser.evaluate(dark) is wanted
    browser.open(page.as_uri())
    assert browser.evaluate(dark)
    assert min(browser.evaluate(COLOURED)) > 200
    browser.evaluate("document.querySelector('#theme').click()")
    assert not browser.evaluate(dark)  # as the system again


def test_a_web_server_serves_it(browser: Browser, run: Path, page: Path) -> None:
    handler = functools.partial(QuietHandler, directory=run)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            browser.open(f"http://127.0.0.1:{server.server_port}/{page.name}")
            browser.evaluate("document.querySelector('#samples').scrollIntoView()")
            browser.wait_until(PLAYING)
            assert min(browser.evaluate(COLOURED)) > 200
        finally:
            server.shutdown()
            thread.join()
    assert browser.errors == []


def test_a_comparison(browser: Browser, folder: Path, run: Path) -> None:
    other = write_run(folder / "other", num_lines=15, prompts=["a red circle"], seed=5)
    path = folder / "report.html"
    write_page(path, page_of_runs([read_run(run), read_run(other)], path))
    browser.open(path.as_uri())
    counts = browser.evaluate(COLOURED)
    assert len(counts) >= 7 and min(counts) > 200
    heads = "[...document.querySelectorAll('#grid th.chosen')].map((h) => h.textContent)"
    assert browser.evaluate(heads) == ["run", "other"]
    browser.evaluate("document.querySelector('#samples').scrollIntoView()")
    browser.wait_until(PLAYING)
    browser.open(path.as_uri(), width=390, height=844)
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    assert browser.errors == []


def test_a_long_run_opens(browser: Browser, folder: Path) -> None:
    """10,000 logged steps and 200 videos. The time is printed, not limited: `pytest -s`."""
    prompts = [f"prompt {i}" for i in range(4)]
    run = write_run(folder / "long", num_lines=10_000, steps=(0,), prompts=prompts)
    first = run / "samples" / "step-00000000"
    for step in range(2000, 100_000, 2000):
        made = run / "samples" / f"step-{step:08d}"
        made.mkdir()
        for path in first.iterdir():
            os.link(path, made / path.name)
    page = write(run)
    milliseconds = browser.open(page.as_uri())
    print(f"page of 10,000 logged steps and 200 videos: {milliseconds:.0f} ms to its load event")
    assert browser.evaluate("document.querySelectorAll('.clip video').length") == 200
    assert min(browser.evaluate(COLOURED)) > 200
    browser.evaluate("document.querySelector('#samples').scrollIntoView()")
    in_view = (
        "[...document.querySelectorAll('.clip video')].filter((v) => v.currentTime > 0).length"
    )
    browser.wait_until(f"{in_view} >= 4")
    # Videos outside of the view are not loaded.
    assert browser.evaluate(in_view) < 50
    assert browser.errors == []
