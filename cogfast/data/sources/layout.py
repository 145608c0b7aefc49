"""Finds the layouts of a data source: which data sets of `cogfast.data.datasets` can read it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cogfast.data.sources.folders import SourceError, find_videos, label_of, named
from cogfast.data.sources.table import TABLE_ENDINGS, has_table

MODULE = "cogfast.data.datasets"
_LISTS = ("videos.txt", "prompts.txt")  # the defaults of VideoList


def layouts_of(source: str) -> list[str]:
    """Return the names of the data sets that can read a source; [] if there is none."""
    path = Path(source)
    # An address, or shards as webdataset names them: shards-{000..010}.tar
    if "://" in source or ".tar" in source:
        return ["VideoShards"]
    if path.is_file():
        return ["VideoManifest"] if path.suffix.lower() in TABLE_ENDINGS else []
    if not path.is_dir():
        return []
    first = next(find_videos(path), None)
    found = {
        "VideoFolder": first is not None and label_of(first, path) is not None,
        "VideoManifest": has_table(path) or has_table(path / "train"),
        "VideoList": all((path / name).is_file() for name in _LISTS),
        "VideoShards": next(path.glob("*.tar"), None) is not None,
    }
    return [name for name, is_one in found.items() if is_one]


def layout_of_all(sources: Sequence[str]) -> str | None:
    """Return the name of the data set that can read all sources that exist; None if there is none.

    SourceError if there are several.
    """
    each = [found for source in sources if (found := layouts_of(source))]
    fits = [name for name in (each[0] if each else []) if all(name in found for found in each)]
    if len(fits) > 1:
        choices = " or ".join(f"data.target={MODULE}.{name}" for name in fits)
        raise SourceError(f"{named(sources)}: has the layouts of several data sets; set {choices}")
    return fits[0] if fits else None
