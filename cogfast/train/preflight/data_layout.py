"""Finds the data set class that can read args.train_data where the configuration leaves it open."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import cogfast.extensions.stores.store as store
from cogfast.config.components import resolve
from cogfast.config.sat_unused import DATA_PARAMS, DATA_SET
from cogfast.core.keys import COMMAND_LINE, Settings
from cogfast.core.values import KeyProblem
from cogfast.data.sources.folders import VIDEO_ENDINGS, label_of, named, walk_files
from cogfast.data.sources.manifest import is_manifest, tables_in
from cogfast.extensions.stores.store import StoreError
from cogfast.train.keys import TrainKeys

logger = logging.getLogger(__name__)

_MODULE = "cogfast.data.datasets"
_LISTS = ("videos.txt", "prompts.txt")  # the defaults of VideoList


def infer_layout(
    sections: Mapping[str, Mapping[str, Any]],
    origins: Mapping[str, str],
    reads_stores: bool = True,
) -> Settings:
    """Return the settings of the data set that can read args.train_data and args.valid_data.

    Only in place of a VideoFolder of a file that cannot read one of them: the models' files name it,
    and users then give a manifest, say. ValueError if several data sets could read them; StoreError if
    they lie in a store and the local cache cannot be written. reads_stores: or leave such data as they are.
    """
    target, args = sections["data"].get("target"), sections["args"]
    key = TrainKeys.key("train_data")
    sources = [*args["train_data"], *args["valid_data"]]
    if any(map(store.is_url, [*sources, args["latent_cache"] or ""])):
        if not reads_stores:
            return {}
        store.check_local_cache()
    is_given = origins.get(DATA_SET) == COMMAND_LINE
    if is_given or target not in ("data_video.SFTDataset", f"{_MODULE}.VideoFolder"):
        return {}
    # A source without a layout is refused later, with the reason.
    try:
        each = {source: found for source in sources if (found := _layouts_of(source))}
    except StoreError as error:
        raise KeyProblem(key, f"{key}={error}") from None
    if all("VideoFolder" in found for found in each.values()):
        for source, found in each.items():
            if len(found) > 1:
                text = "%s: read as VideoFolder; its files of %s are ignored; data.target=%s.%s reads them"
                logger.info(text, source, " and ".join(found[1:]), _MODULE, found[1])
        return {}
    fits = [name for name in [*each.values()][0] if all(name in of for of in each.values())]
    if len(fits) > 1:
        choices = " or ".join(f"data.target={_MODULE}.{name}" for name in fits)
        text = f"{key}={named(sources)}: has the layouts of several data sets; set {choices}"
        raise KeyProblem(key, text)
    if not fits:
        # Each can be read, but not by one data set.
        shown = ", ".join(f"{source} ({found[0]})" for source, found in each.items())
        text = f"{key}: a run reads one layout, but these have several: {shown}; list all clips in one "
        raise KeyProblem(key, f"{text}manifest, or give sources of one layout")
    # With the defaults of SAT's class.
    params, found = dict(resolve(sections["data"])[1]), f"{_MODULE}.{fits[0]}"
    logger.info("data.target=%s, the layout of %s, in place of %s", found, named(sources), target)
    return {DATA_SET: (found, key), DATA_PARAMS: (params, None)}


def _layouts_of(source: str) -> list[str]:
    """Return the names of the data sets that can read a source; [] if there is none."""
    is_table = is_manifest(source)
    # Shards as webdataset names them: shards-{000..010}.tar
    if ".tar" in source:
        return ["VideoShards"]
    if is_table or os.path.isfile(source):
        return ["VideoManifest"] if is_table and store.exists(source) else []
    if source.startswith("http"):  # a web server lists no folders
        return []
    folder = store.parent(store.join(source, "file"))
    if store.is_url(source):
        # Its folders are not listed here, as that may take minutes.
        names = videos = list(store.list_folder(folder))
    else:
        names = os.listdir(folder) if os.path.isdir(folder) else []
        videos = walk_files(folder)
    if not names or names == [source]:  # an object
        return []
    first = next((file for file in videos if file.lower().endswith(VIDEO_ENDINGS)), None)
    has_labels = store.is_url(source) and store.join(folder, "labels") in names
    found = {
        "VideoFolder": has_labels or bool(first and label_of(first, folder, dict.fromkeys(names))),
        "VideoManifest": bool(tables_in(folder) or tables_in(store.join(folder, "train"))),
        "VideoList": all(store.exists(store.join(folder, name)) for name in _LISTS),
        "VideoShards": any(name.endswith(".tar") for name in names),
    }
    return [name for name, is_one in found.items() if is_one]
