"""The page in headless Chromium: it draws, plays, reloads, fits a telephone, and runs no other script."""

import functools
import http.server
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cogfast.extensions.page.page import page_of, write_page
from cogfast.extensions.page.record import read_run
from tests.cli.hostile.web_server import serving
from tests.extensions.page.browser import CHROMIUM, HOW_TO_INSTALL, Browser
from tests.extensions.page.run_folders import lines, write_run

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
  const shown = [...document.querySelectorAll("video")].filter((v) => v.checkVisibility());
  return shown.length > 0 && shown.every((v) => v.currentTime > 0 && v.videoWidth === 48);
})()"""
LEGEND = """[...document.querySelector(".plot").querySelectorAll(".u-series:not(.raw) .u-value")]
  .map((value) => value.textContent)"""


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def write(*runs: Path, is_active: bool = False) -> Path:
    path = runs[0] / "index.html" if len(runs) == 1 else runs[0].parent / "report.html"
    write_page(path, page_of([read_run(run) for run in runs], path, is_active))
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


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[str]:
    """The address at which a web server has the run's folder."""
    handler = functools.partial(QuietHandler, directory=run)
    with serving(handler) as server:
        yield server.address


@pytest.mark.parametrize("how", ["light", "dark", "web server"])
def test_plots_are_drawn_and_videos_play(
    browser: Browser, page: Path, server: str, how: str
) -> None:
    address = f"{server}/{page.name}" if how == "web server" else page.as_uri()
    browser.open(address, dark=how == "dark")
    counts = browser.evaluate(COLOURED)
    assert len(counts) == 8 and min(counts) > 200
    assert browser.evaluate("document.querySelectorAll('video').length") == 4
    browser.evaluate("document.querySelector('#samples').scrollIntoView()")
    browser.wait_until(PLAYING)
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(15, 18, 22)" if how == "dark" else "rgb(247, 248, 250)")
    assert browser.errors == []


def test_text_of_a_run_is_no_script(browser: Browser, page: Path) -> None:
    browser.open(page.as_uri())
    assert browser.evaluate("window.attacked") is None
    assert browser.evaluate("document.images.length") == 0
    assert HOSTILE in browser.evaluate("document.querySelector('#samples').textContent")
    # A script that came into the page some other way does not run either.
    browser.evaluate(
        "{ const added = document.createElement('script');"
        " added.textContent = 'window.attacked = 1'; document.body.append(added); }"
    )
    assert browser.evaluate("window.attacked") is None


def choose(browser: Browser, selector: str, value: object) -> None:
    browser.evaluate(
        f"{{ const input = document.querySelector('{selector}'); input.value = '{value}';"
        " input.dispatchEvent(new Event('input')); }"
    )


def test_values_smoothing_and_the_time_axis(browser: Browser, page: Path) -> None:
    """The legend shows the last values, or those at the cursor."""
    browser.open(page.as_uri())
    losses = [(line["step"], line["loss"]) for line in lines(20) if "loss" in line]
    choose(browser, "#smoothing", 0)
    step, loss, held_out = map(float, browser.evaluate(LEGEND))
    assert (step, loss) == pytest.approx(losses[-1], rel=1e-4) and held_out > loss
    choose(browser, "#smoothing", 0.5)
    mean = weight = 0.0
    for _, value in losses:
        mean, weight = (mean + value) / 2, (weight + 1) / 2
    assert float(browser.evaluate(LEGEND)[1]) == pytest.approx(mean / weight, rel=1e-4)
    x, y, width = browser.evaluate(
        "(() => { const r = document.querySelector('.u-over').getBoundingClientRect();"
        " return [r.x, r.y + r.height / 2, r.width]; })()"
    )
    browser.mouse("mouseMoved", x + width / 2, y, "none")
    browser.wait_until(f"[100, 110].includes(Number({LEGEND}[0]))")
    browser.mouse("mouseMoved", 0, 0, "none")
    choose(browser, "#axis", "time")
    hours = sum(10 * line["step_ms"] for line in lines(20) if "step_ms" in line) / 3.6e6
    assert float(browser.evaluate(LEGEND)[0]) == pytest.approx(hours, rel=1e-3)
    # A curve that the legend hides is not drawn, smoothed or not.
    before = browser.evaluate(COLOURED)[0]
    browser.evaluate("document.querySelectorAll('.u-series:not(.raw) th')[1].click()")
    browser.evaluate("document.querySelectorAll('.u-series:not(.raw) th')[2].click()")
    browser.wait_until(f"{COLOURED}[0] < {before} / 10")
    # Chromium's advice on reading a canvas several times, as COLOURED does.
    assert [text for text in browser.errors if "willReadFrequently" not in text] == []


def test_a_page_that_reloads_keeps_what_was_chosen(browser: Browser, folder: Path) -> None:
    """Its period is set to a second here."""
    run = write_run(folder / "active", steps=(50,))
    path = write(run, is_active=True)
    text = path.read_text()
    assert '"reload": 60' in text
    path.write_text(text.replace('"reload": 60', '"reload": 1'))
    browser.open(path.as_uri(), width=390, height=844)
    choose(browser, "#smoothing", 0.9)
    choose(browser, "#axis", "time")
    browser.evaluate("document.querySelectorAll('details')[1].open = true")
    browser.evaluate("scrollTo(0, 1500); window.isOld = true")
    browser.wait_until(
        "window.isOld === undefined && document.readyState === 'complete' && scrollY"
    )
    chosen = "['#smoothing', '#axis'].map((name) => document.querySelector(name).value)"
    assert browser.evaluate(chosen) == ["0.9", "time"]
    assert browser.evaluate("document.querySelectorAll('details')[1].open")
    assert browser.evaluate("scrollY") == 1500
    # The run's last page ends it.
    write(run)
    browser.wait_until("document.body?.textContent.includes('reloads itself') === false")
    browser.evaluate("window.isOld = true")
    time.sleep(2)
    assert browser.evaluate("window.isOld") and browser.errors == []


def test_a_narrow_screen(browser: Browser, page: Path) -> None:
    browser.open(page.as_uri(), width=390, height=844)
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    browser.evaluate("document.querySelector('#samples').scrollIntoView()")
    browser.wait_until(
        "[...document.querySelectorAll('video')].filter((v) => v.currentTime > 0).length >= 2"
    )
    browser.evaluate("document.querySelector('#play').click()")
    assert browser.evaluate("[...document.querySelectorAll('video')].every((v) => v.paused)")
    assert browser.errors == []


def test_a_comparison(browser: Browser, folder: Path, run: Path) -> None:
    """Each run shows its last samples at or before the chosen step."""
    other = write_run(folder / "other", num_lines=15, prompts=["a red circle"], steps=(70,), seed=5)
    path = write(run, other)
    browser.open(path.as_uri())
    counts = browser.evaluate(COLOURED)
    assert len(counts) >= 7 and min(counts) > 200
    shown = (
        "[...document.querySelector('.strip').querySelectorAll('figure')]"
        ".filter((figure) => !figure.hidden).map((figure) => figure.textContent.trim())"
    )
    assert browser.evaluate(shown) == ["run, step 100", "other, step 70"]
    choose(browser, "#step", 1)  # of 50, 70 and 100
    assert browser.evaluate("document.querySelector('#chosen').textContent") == "70"
    assert browser.evaluate(shown) == ["run, step 50", "other, step 70"]
    choose(browser, "#step", 0)
    assert browser.evaluate(shown) == ["run, step 50"]
    browser.evaluate("document.querySelector('#samples').scrollIntoView()")
    browser.wait_until(PLAYING)
    browser.open(path.as_uri(), width=390, height=844)
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    assert browser.errors == []


def test_videos_outside_of_the_view_are_not_loaded(browser: Browser, folder: Path) -> None:
    run = write_run(folder / "long", steps=(0,), prompts=[f"prompt {i}" for i in range(4)])
    first = run / "samples" / "step-00000000"
    for step in range(10, 500, 10):
        made = run / "samples" / f"step-{step:08d}"
        made.mkdir()
        for path in first.iterdir():
            os.link(path, made / path.name)
    browser.open(write(run).as_uri())
    browser.evaluate("document.querySelector('#samples').scrollIntoView()")
    loaded = "[...document.querySelectorAll('video')].filter((v) => v.currentTime > 0).length"
    browser.wait_until(f"{loaded} >= 4")
    assert browser.evaluate(loaded) < 50  # of 200
    assert browser.errors == []
