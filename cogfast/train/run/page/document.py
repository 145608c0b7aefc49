"""Puts a page together: one HTML file with styles, scripts and numbers inside, and relative links."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path

from cogfast import __version__
from cogfast.core.files import write_text
from cogfast.schema.json_files import read_limited
from cogfast.train.run.page import comparison
from cogfast.train.run.page.markup import Markup, join, tag
from cogfast.train.run.page.metrics_table import MOST_POINTS, encode
from cogfast.train.run.page.plots import plots_of_run, plots_of_runs
from cogfast.train.run.page.record import RunRecord
from cogfast.train.run.page.sections import notes, sections_of, summary

_STATIC = Path(__file__).parent / "static"
_GENERATOR = "cogfast run page"  # in a meta element, by which a page is recognized
_START_BYTES = 1024
_MOST_BYTES = 64 << 20  # of an earlier page
_LEAST_POINTS = 1000
_TIMESTEPS = "model.loss_fn_config.params.sigma_sampler_config.params.num_idx"


def page_of_run(record: RunRecord, page: Path) -> str:
    """Return the page of one run. page: where it will be written, from which its links start."""
    plots = list(plots_of_run(record.columns, record.settings.get(_TIMESTEPS)))
    data = {"runs": [{"name": record.name, **encode(record.columns)}], "plots": plots}
    sections = list(sections_of(record, page))
    return _document(record.name, summary(record), notes(record.notes), sections, data)


def page_of_runs(records: Sequence[RunRecord], page: Path) -> str:
    """Return one page that compares runs."""
    names = comparison.names_of(records)
    runs = list(zip(names, [record.columns for record in records], strict=True))
    # A page of many runs stays about as large as that of one.
    most = max(_LEAST_POINTS, MOST_POINTS // len(records))
    data = {
        "runs": [{"name": name, **encode(columns, most)} for name, columns in runs],
        "plots": list(plots_of_runs(runs)),
    }
    sections = list(comparison.sections_of(records, names, page))
    found = [
        f"{name}: {note}"
        for name, record in zip(names, records, strict=True)
        for note in record.notes
    ]
    head = comparison.summary(records, names, page)
    return _document(f"{len(records)} runs compared", head, notes(found), sections, data)


def write_page(path: Path, document: str) -> None:
    """Write a page atomically. ValueError if the file exists and is no page of cogfast."""
    if path.exists():
        start = read_limited(path, _MOST_BYTES, "move it, or use --out FILE")[:_START_BYTES]
        if _GENERATOR.encode() not in start:
            raise ValueError(f"{path} exists and is no page of cogfast; move it, or use --out FILE")
    write_text(path, document)


def _document(
    title: str,
    head: Markup,
    problems: Markup,
    sections: Sequence[tuple[str, str, Markup]],
    data: Mapping,
) -> str:
    scripts = [_static(name) for name in ("uPlot.min.js", "page.js")]
    theme = _static("theme.js")
    style = _static("uPlot.min.css") + _static("page.css")
    # Everything is inside the file; only pictures and videos of the run are loaded. `self` and `file:`
    # are a web server and a disk.
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes(theme, *scripts)}",
            f"style-src {_hashes(style)}",
            "img-src 'self' file: data:",
            "media-src 'self' file:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    links = [tag("a", name, href=f"#{anchor}") for anchor, name, _ in sections]
    written = datetime.now().astimezone()
    header = tag(
        "header",
        tag(
            "div",
            tag("p", "cogfast", class_="brand"),
            tag("button", "Theme", type="button", id="theme", aria_label="Theme: as the system"),
            class_="bar",
        ),
        tag("h1", title),
        head,
    )
    footer = tag(
        "footer",
        f"Written by cogfast {__version__} on {written:%Y-%m-%d at %H:%M %Z}. Plots: uPlot 1.6.32, MIT "
        "licence, (c) 2022 Leon Sorokin.",
    )
    body = [
        tag("a", "Skip to the content", href="#main", class_="skip"),
        header,
        tag("nav", *links, aria_label="Sections"),
        tag("main", problems, *(part for _, _, part in sections), id="main"),
        footer,
        _dialog(),
        Markup(f'<script type="application/json" id="numbers">{_embedded(data)}</script>'),
    ]
    body += [Markup(f"<script>{script}</script>") for script in scripts]
    parts = [
        Markup('<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'),
        tag("meta", name="generator", content=_GENERATOR),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        # Not through text(): the quotes of the policy are its own.
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        # A browser would ask a web server for an icon that is not there.
        tag("link", rel="icon", href="data:,"),
        tag("title", f"{title} · cogfast"),
        Markup(f"<!-- uPlot, which draws the plots:\n{_static('uPlot.LICENSE')}\n-->\n"),
        Markup(f"<style>{style}</style><script>{theme}</script>\n</head>\n<body>\n"),
        join(body),
        Markup("\n</body>\n</html>\n"),
    ]
    return join(parts)


def _dialog() -> Markup:
    """Return the enlarged video, which the script opens."""
    buttons = [
        tag("button", "←", type="button", id="earlier", aria_label="Earlier"),
        tag("button", "→", type="button", id="later", aria_label="Later"),
        tag("button", "Close", type="button", id="close"),
    ]
    video = tag("video", controls=True, loop=True, muted=True, playsinline=True, id="large")
    bar = tag("div", tag("strong", id="large-name"), *buttons, class_="toolbar")
    return tag("dialog", bar, video, tag("p", id="large-prompt"), id="viewer", aria_label="Video")


def _embedded(data: Mapping) -> str:
    """Return JSON that may stand in a script element: it has no < that could end it."""
    written = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _static(name: str) -> str:
    return (_STATIC / name).read_text(encoding="utf-8")


def _hashes(*sources: str) -> str:
    digests = [hashlib.sha256(source.encode()).digest() for source in sources]
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
