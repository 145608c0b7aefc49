"""The files of a latent cache, one for each clip and each caption, and the data set that reads them.

video-<id>/spec.json                 what the entries of this folder were made with
video-<id>/<k>/<key>.safetensors     "mean", "logvar" [C, T, h, w], "fps", "num_frames", "num_padded"
                                     and for image-to-video "first_frame" or "noised_image_mean" and
                                     "noised_image_logvar", or "given_frames"; <k>: the first two digits
                                     of the key
video-<id>/<k>/<key>.bad             why this clip cannot be used
text-<id>/<k>/<key>.safetensors      "embedding" [L, E]
sources.jsonl, sources/*.jsonl       content hashes of the videos (keys.py)

Files are written whole or not at all, so an entry is complete if its file exists, and any number of
processes and machines may write at once. The cache is a folder or lies in an object store; entries never
change under their name, so the local copy of one stays valid.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Collection, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from cogfast.core.addresses import is_url
from cogfast.core.files import MOST_BYTES, UNFINISHED, open_regular
from cogfast.data.bad_samples import BadSample
from cogfast.data.datasets import CaptionedVideos
from cogfast.extensions.cache.entry_keys import hash_text
from cogfast.extensions.stores import store
from cogfast.extensions.stores.store import StoreError

# Values that entries depend on besides their source, such as weights and dtype: {name: plain value}.
Spec = dict[str, object]

# How clips are encoded. A configuration with "auto" takes entries of any way.
ENCODE_CHUNKS = "encode_chunks"

# Part of every id: change it with the content of entries.
_FORMAT = "cogfast-latents-3"
_ENTRY, _BAD = ".safetensors", ".bad"
NUMBERS = ("fps", "num_frames", "num_padded")  # stored as tensors [] beside a clip
_TENSORS = {"video": ("mean", *NUMBERS), "text": ("embedding",)}
_MOST_REASON = 300  # characters of a reason that is read
_STALE = 3600.0  # seconds after which a temporary file is one of a killed process
_FRESH = 10.0  # seconds for which `has` takes a listing as it is


class Entries:
    """The entries of one kind ("video" or "text") that were made with one spec."""

    def __init__(self, cache: str | Path, kind: str, spec: Spec) -> None:
        self.kind, self.spec = kind, spec
        digest = hash_text(json.dumps([_FORMAT, spec], sort_keys=True))
        self.folder = store.join(str(cache), f"{kind}-{digest[:12]}")
        # The first digits of keys, when they were listed, and the keys of entries that were found.
        self._listed: tuple[str, float, Set[str]] = "", -_FRESH, frozenset()

    def keys(self, digits: str = "") -> dict[str, bool]:
        """Return {key: whether it is a bad sample} of all entries, or of those whose keys begin with two
        digits, by the names of the files alone."""
        try:
            files = []
            if is_url(self.folder):
                files = store.find(store.join(self.folder, digits))
            elif os.path.isdir(self.folder):
                parts = [part for part in os.scandir(self.folder) if part.name.startswith(digits)]
                every = (one for part in parts if part.is_dir() for one in os.scandir(part))
                # Reading a pipe would not end.
                files = [one.name for one in every if one.is_file()]
            pairs = [os.path.splitext(os.path.basename(name)) for name in files]
            bad = {key: True for key, kind in pairs if kind == _BAD}
            return bad | {key: False for key, kind in pairs if kind == _ENTRY}
        except StoreError:
            raise
        except OSError as error:
            text = f"args.latent_cache: {error.filename} cannot be read ({error.strerror})"
            raise ValueError(f"{text}; use a readable folder") from None

    def create(self) -> None:
        """Write the spec, and remove temporary files that killed processes left."""
        store.write(store.join(self.folder, "spec.json"), json.dumps(self.spec, indent=1).encode())
        for path in Path(self.folder).glob(f"*/*{UNFINISHED}"):  # none for a URL
            with suppress(FileNotFoundError):  # another start removes them, too
                if time.time() - path.stat().st_mtime > _STALE:
                    path.unlink()

    def has(self, key: str) -> bool:
        """Return whether there is an entry, or was a moment ago.

        Keys that begin with the same digits should follow each other: their files are listed together.
        """
        now = time.monotonic()
        if self._listed[0] != key[:2] or now - self._listed[1] > _FRESH:
            self._listed = key[:2], now, self.keys(key[:2]).keys()
        return key in self._listed[2]

    def ask(self, keys: Collection[str]) -> dict[str, bool]:
        """Return what `keys` does for some that its listing lacks, up to the first that is not there either: for a
        minute NFS may list files without those of other machines, but it looks up a name."""
        found: dict[str, bool] = {}
        for key in () if is_url(self.folder) else keys:
            is_whole = os.path.isfile(self.path(key))
            if not is_whole and not os.path.isfile(self.path(key, _BAD)):
                break
            found[key] = not is_whole
        return found

    def write(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        from safetensors.torch import save

        # safetensors has no checksums: a flipped bit would train on a wrong latent unseen.
        content = save(dict(tensors), metadata={"checksum": _checksum(key, tensors)})
        store.write(self.path(key), content)

    def write_bad(self, key: str, reason: str) -> None:
        store.write(self.path(key, _BAD), reason.encode("utf-8", "backslashreplace"))

    def read(self, key: str, is_again: bool = False) -> dict[str, Tensor]:
        """Read an entry: {name: tensor}. FileNotFoundError if there is none; BadSample if it is a bad
        sample or damaged."""
        from safetensors import SafetensorError, safe_open

        path = copy = self.path(key)
        try:
            copy = store.local_copy(path, "-")
            about = os.stat(copy)
            if not stat.S_ISREG(about.st_mode) or about.st_size > MOST_BYTES:
                raise ValueError(f"no file, or one of more than {MOST_BYTES} bytes")
            with safe_open(copy, framework="pt") as file:
                # Not a dict: `keys` is its only way to the names.
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                is_whole = (file.metadata() or {}).get("checksum") == _checksum(key, tensors)
            missing = [name for name in _TENSORS[self.kind] if name not in tensors]
            missing += [n for n in NUMBERS if n in tensors and tensors[n].numel() != 1]
            why = f"it has no {missing[0]}" if missing else "" if is_whole else "checksum mismatch"
        except FileNotFoundError:
            raise BadSample(path, self.reason(key)) from None
        except StoreError as error:
            raise BadSample(path, str(error)) from None
        except (OSError, SafetensorError, ValueError) as error:
            why = str(error)[:100]
        else:
            if not why:
                return tensors
        if is_url(path) and not is_again:  # it may be the copy that is damaged
            Path(copy).unlink(missing_ok=True)
            return self.read(key, is_again=True)
        fix = "delete it and run `cogfast cache` again"
        raise BadSample(path, f"{path} is damaged ({why}); {fix}")

    def remove_cut(self, keys: Sequence[str]) -> list[str]:
        """Remove the entries on a disk whose files have not the size that they state, and return their keys."""
        from safetensors import SafetensorError, safe_open

        def remove(key: str) -> str | None:
            path = self.path(key)
            with suppress(FileNotFoundError):  # another launch removes them, too
                # This reads the header, and compares; "pt" would map the rest, too.
                with suppress(SafetensorError):
                    safe_open(path, framework="np")
                    return None
                os.rename(path, aside := f"{path}.{os.urandom(6).hex()}{UNFINISHED}")
                with suppress(SafetensorError):
                    safe_open(aside, framework="np")
                    os.rename(aside, path)  # another launch has written it again since
                os.unlink(aside)
            return key

        return [*filter(None, store.in_threads(remove, [] if is_url(self.folder) else keys))]

    def reason(self, key: str) -> str:
        """Why a sample is bad; FileNotFoundError if there is no entry for it."""
        with open_regular(store.local_copy(self.path(key, _BAD), "-")) as file:
            return file.read(_MOST_REASON).decode(errors="replace")

    def path(self, key: str, kind: str = _ENTRY) -> str:
        return f"{self.folder}/{key[:2]}/{key}{kind}"


def _checksum(key: str, tensors: Mapping[str, Tensor]) -> str:
    """A hash of the tensors' bytes, and of the key, which shows that a file was renamed."""
    digest = xxhash.xxh3_64(key.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def find_entries(
    cache: str | Path, kind: str, spec: Spec, wanted: Set[str]
) -> tuple[Entries, dict[str, bool]]:
    """Return the entries that fit a spec, and what `keys` of them returns.

    If the spec says "auto", they are those of the way to encode that has most of the `wanted` keys.
    """
    found = [(one, one.keys()) for one in (Entries(cache, kind, each) for each in _allowed(spec))]
    return max(found, key=lambda pair: len(wanted & pair[1].keys()))


def _allowed(spec: Spec) -> list[Spec]:
    """Return the specs whose entries fit `spec`: those of each way to encode, if it says "auto"."""
    if spec.get(ENCODE_CHUNKS) != "auto":
        return [spec]
    return [{**spec, ENCODE_CHUNKS: way} for way in ("whole", "frames", "tiles")]


def folders_of(cache: str | Path, kind: str) -> list[str]:
    """Return the folders of entries of a kind, which differ in their specs."""
    if is_url(cache):
        found = [url for url, about in store.list_folder(str(cache)).items() if about is None]
        return [url for url in found if os.path.basename(url).startswith(f"{kind}-")]
    return [str(path) for path in Path(cache).glob(f"{kind}-*") if path.is_dir()]


def difference(cache: str | Path, kind: str, spec: Spec) -> str:
    """Describe how `spec` differs from that of the entries that are most like it; "" if there are none,
    or some fit."""
    there, found = folders_of(cache, kind), [({}, [])]
    if {Entries(cache, kind, one).folder for one in _allowed(spec)} & {*there}:
        return ""
    for folder in there:
        # Damaged ones do not matter: they are only of use for this message.
        with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
            made = json.loads(store.read(store.join(folder, "spec.json")))
            names = [n for n in {**made, **spec} if made.get(n) != spec.get(n) != "auto"]
            found.append((made, names))
    made, names = min(found[1:] or found, key=lambda pair: len(pair[1]))
    return "; ".join(
        f"cache made by {n} {made.get(n, 'none')}, the config has {spec.get(n, 'none')}"[:300]
        for n in names
    )


# {key of an item: tensor of an entry}; entries need not have all of them.
_STORED = {
    "latent_mean": "mean",
    "latent_logvar": "logvar",
    "images": "first_frame",
    "noised_image_mean": "noised_image_mean",
    "noised_image_logvar": "noised_image_logvar",
    "given_frames": "given_frames",
}


class CachedVideos(CaptionedVideos):
    """The samples of a data set of video files, as encoded by `cogfast cache`.

    An item is {"latent_mean" [C, T, h, w], "latent_logvar" (if the autoencoder has one), "images"
    uint8 [3, H, W] (the first frame, if cached) or instead "noised_image_mean" [N, C, 1, h, w] and
    "noised_image_logvar", "given_frames" uint8 [P, 3, H, W], "control_mean" and "control_logvar" (as
    latent_mean, of a control), "mask" and tensors (read from their files), "prior",
    "prompt_embedding" [L, E], "txt", "fps", "num_frames", "path", "num_padded"}.

    videos: the data set that this one replaces. entries: those of "video" and of "text". keys: of the
    samples' videos, by the names of `CaptionedVideos.encoded`.
    """

    def __init__(
        self,
        videos: CaptionedVideos,
        entries: Mapping[str, Entries],
        keys: Mapping[str, Sequence[str]],
    ) -> None:
        super().__init__(videos.clips, videos.settings, videos.source_sizes)
        self.is_cached = True
        self.entries, self.keys, self.refused = entries, keys, videos.refused
        self.encode_chunks = entries["video"].spec.get(ENCODE_CHUNKS)

    def __getitem__(self, index: int) -> dict:
        if index in self.refused:
            raise BadSample(self.name(index), self.refused[index])
        caption = self.captions[index]
        clip = self._entry("video", self.keys["video"][index], index)
        text = self._entry("text", hash_text(caption), index)
        found: dict[str, Any] = {n: clip[stored] for n, stored in _STORED.items() if stored in clip}
        if "control" in self.keys:
            control = self._entry("video", self.keys["control"][index], index)
            found |= {f"control_{n}": control[n] for n in ("mean", "logvar") if n in control}
        try:
            if "mask" in self.others:
                # Threads read here, whose current device is not that of the process.
                on_cpu = replace(self.settings_of(index), video_backend=self.settings.cpu_reader)
                found["mask"] = self._other("mask", index, on_cpu, None)
            found |= self.read_tensors(index)
        except BadSample as error:
            raise BadSample(self.name(index), error.reason) from None
        if self.clips.prior is not None:
            found["prior"] = bool(self.clips.prior[index])
        found |= {"prompt_embedding": text["embedding"], "txt": caption}
        found |= {name: clip[name].item() for name in NUMBERS}
        return found | {"path": self.name(index)}

    def fetch(self, indices: Sequence[int], names: Collection[str] | None = None) -> None:
        def copy(url: str) -> None:
            with suppress(OSError):
                store.local_copy(url, "-")

        if is_url(self.entries["video"].folder):
            # Controls have entries of "video", too.
            urls = [self.entries["video"].path(k[i]) for k in self.keys.values() for i in indices]
            urls += [self.entries["text"].path(hash_text(self.captions[i])) for i in indices]
            list(store.in_threads(copy, urls))
        super().fetch(indices, self.clips.others.keys() - self.keys.keys())

    def first_frame(self, index: int) -> Tensor:
        """Read a sample's conditioning image from its source files, uint8 [3, H, W]."""
        sample = super().__getitem__(index)
        return sample["images"] if "images" in sample else sample["video"][0]

    def _entry(self, kind: str, key: str, index: int) -> dict[str, Tensor]:
        try:
            entry = self.entries[kind].read(key)
            # One number for all of an entry that has one sample of the latents
            if "logvar" in entry:
                entry["logvar"] = entry["logvar"].expand(entry["mean"].shape)
            return entry
        except FileNotFoundError:
            reason = f"its {kind} entry is gone from the latent cache; run `cogfast cache` again"
        except BadSample as error:
            reason = error.reason
        raise BadSample(self.name(index), reason)
