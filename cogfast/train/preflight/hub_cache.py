"""Finds a model of the Hugging Face hub by its id: in the local cache, or by downloading it.

Only the files that cogfast reads are downloaded. None of them can run code.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

from cogfast.schema.json_files import InsideName, read_json

logger = logging.getLogger(__name__)

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_WEIGHTS = {
    "transformer": "diffusion_pytorch_model.safetensors",
    "vae": "diffusion_pytorch_model.safetensors",
    "text_encoder": "model.safetensors",
}
WANTED = ["model_index.json", "scheduler/*.json", "tokenizer/*.json", "tokenizer/spiece.model"]
WANTED += [f"{part}/*.{suffix}" for part in _WEIGHTS for suffix in ("json", "safetensors")]
DUPLICATES = ["*.fp16*"]  # the same weights, rounded
_VOCABULARY = ("spiece.model", "tokenizer.json")


def is_hub_id(name: str) -> bool:
    """Whether `name` is the id of a model of the hub and no path on this machine."""
    return _ID.fullmatch(name) is not None and not Path(name).exists()


def hub_folder(name: str, key: str = "args.load", may_download: bool = True) -> Path:
    """Return the folder of a diffusers pipeline of the hub, with all files that cogfast reads.

    name: its id, OWNER/MODEL. The local cache is used without a look at the network if it has every
    file. Otherwise the first rank of each machine that gets here downloads, and the others wait.
    """
    folder = _cached(name, key)
    if folder is not None and _first_missing(folder) is None:
        return folder
    if not may_download:
        raise _not_here(
            name, key, folder, "--dry-run and the configuration of a run download nothing"
        )
    from huggingface_hub import constants
    from huggingface_hub.utils import WeakFileLock

    if constants.is_offline_mode():
        raise _not_here(name, key, folder, "HF_HUB_OFFLINE is set")
    cache = Path(constants.HF_HUB_CACHE)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # All ranks of a machine come here at once; a second look finds what the first has
        # downloaded.
        with WeakFileLock(cache / f".cogfast-{name.replace('/', '--')}.lock"):
            folder = _cached(name, key)
            if folder is None or _first_missing(folder) is not None:
                folder = _download(name, key, folder)
    except OSError as error:
        text = f"{key}={name}: cannot be downloaded to {cache} ({error})"
        raise ValueError(
            f"{text}; free disk space in that folder, or set HF_HOME to another folder"
        ) from None
    missing = _first_missing(folder)
    if missing is not None:
        raise ValueError(
            f"{key}={name}: the hub's model has no {missing}, so it is not a complete CogVideoX "
            "pipeline of diffusers; use a model that has this file"
        )
    return folder


def _download(name: str, key: str, partly: Path | None) -> Path:
    from huggingface_hub import snapshot_download

    # HTTPError is that of the HTTP package that this version of the hub's client uses.
    from huggingface_hub.errors import HTTPError, RepositoryNotFoundError

    logger.info("%s=%s: downloading the files of the pipeline from the hub", key, name)
    try:
        found = snapshot_download(name, allow_patterns=WANTED, ignore_patterns=DUPLICATES)
    except RepositoryNotFoundError as error:  # also for gated and private models
        raise ValueError(
            f"{key}={name}: no such folder, and no model of this name on the hub that you may read "
            f"(status {error.response.status_code}); correct the path or the name, or run hf auth login"
        ) from None
    except (HTTPError, FileNotFoundError, ConnectionError) as error:
        raise _not_here(name, key, partly, f"the hub cannot be reached ({error})") from None
    return Path(found)


def _not_here(name: str, key: str, folder: Path | None, why: str) -> ValueError:
    from huggingface_hub import constants

    missing = "" if folder is None else _first_missing(folder)
    has = f"has it without {missing}" if missing else "does not have it"
    why = " ".join(why.split())[:120]
    return ValueError(
        f"{key}={name}: no such folder, and the hub's cache {constants.HF_HUB_CACHE} {has}; {why}: "
        f"run hf download {name} on a machine with network access, set HF_HOME to the folder of its "
        f"cache, or set {key} to the folder of a pipeline"
    )


def _cached(name: str, key: str) -> Path | None:
    """Return the newest snapshot of a model in the local cache, which may lack files."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        # Looks at the local cache alone, without the network.
        index = try_to_load_from_cache(name, "model_index.json")
    except HFValidationError as error:
        raise ValueError(
            f"{key}={name}: no such folder, and not a model id ({error}); correct it"
        ) from None
    return Path(index).parent if isinstance(index, str) else None


def _first_missing(folder: Path) -> str | None:
    return next((name for name in _needed(folder) if not (folder / name).is_file()), None)


def _needed(folder: Path) -> Iterator[str]:
    """Yield the files that a whole pipeline has, shards included."""
    yield from ("model_index.json", "scheduler/scheduler_config.json")
    # Either file is enough for the tokenizer; the message names the first if there is none.
    is_there = [name for name in _VOCABULARY if (folder / "tokenizer" / name).is_file()]
    yield f"tokenizer/{(is_there or _VOCABULARY)[0]}"
    for part, whole in _WEIGHTS.items():
        yield f"{part}/config.json"
        index = f"{part}/{whole}.index.json"
        if (folder / index).is_file():
            shards = read_json(folder / index, {"weight_map": dict[str, InsideName]})["weight_map"]
            yield from (f"{part}/{name}" for name in sorted(set(shards.values())))
        else:
            yield f"{part}/{whole}"
