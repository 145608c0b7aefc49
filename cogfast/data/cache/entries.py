"""The files of a latent cache, one for each clip and each caption, and the data set that reads them.

video-<id>/spec.json                 what the entries of this folder were made with
video-<id>/<k>/<key>.safetensors     "mean", "logvar" [C, T, h, w], "fps", "num_frames", "num_padded"
                                     and for image-to-video "first_frame" or "noised_image_mean" and
                                     "noised_image_logvar", or "given_frames"; <k>: the first two digits
                                     of the key
video-<id>/<k>/<key>.bad             why this clip cannot be used
text-<id>/<k>/<key>.safetensors      "embedding" [L, E]
sources.jsonl                        content hashes of the videos (keys.py)

Files are written whole or not at all, so an entry is complete if its file exists, and any number of
processes and machines may write at once.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from cogfast.core.files import UNFINISHED, WriteError, write_text, write_whole
from cogfast.data.bad_samples import BadSample
from cogfast.data.cache.keys import hash_text
from cogfast.data.datasets import CaptionedVideos

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


class BadEntry(Exception):
    """An entry that cannot be used. The text gives the reason."""


class Entries:
    """The entries of one kind ("video" or "text") that were made with one spec."""

    def __init__(self, cache: Path, kind: str, spec: Spec) -> None:
        self.kind, self.spec = kind, spec
        self.folder = (
            cache / f"{kind}-{hash_text(json.dumps([_FORMAT, spec], sort_keys=True))[:12]}"
        )

    def keys(self) -> dict[str, bool]:
        """Return {key: whether it is a bad sample} of all entries, by the names of the files alone."""
        found: dict[str, bool] = {}
        try:
            for part in self._parts():
                for name in os.listdir(part):
                    key, kind = os.path.splitext(name)
                    if kind == _ENTRY:
                        found[key] = False
                    elif kind == _BAD:
                        found.setdefault(key, True)
        except OSError as error:
            raise ValueError(
                f"args.latent_cache: {error.filename} cannot be read ({error.strerror}); use a readable "
                "folder"
            ) from None
        return found

    def _parts(self) -> list[str]:
        if not self.folder.is_dir():
            return []
        with os.scandir(self.folder) as found:
            return [part.path for part in found if part.is_dir()]

    def create(self) -> None:
        """Write the spec, and remove temporary files that killed processes left."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WriteError(self.folder, error) from None
        write_text(self.folder / "spec.json", json.dumps(self.spec, indent=1))
        for part in self._parts():
            for name in os.listdir(part):
                path = Path(part, name)
                # Another start may have removed it.
                with suppress(FileNotFoundError):
                    if name.endswith(UNFINISHED) and time.time() - path.stat().st_mtime > _STALE:
                        path.unlink()

    def has(self, key: str) -> bool:
        return self._path(key, _ENTRY).exists() or self._path(key, _BAD).exists()

    def write(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        from safetensors.torch import save

        # safetensors has no checksums: a flipped bit would train on a wrong latent unseen.
        content = save(dict(tensors), metadata={"checksum": _checksum(key, tensors)})
        self._write(key, _ENTRY, content)

    def write_bad(self, key: str, reason: str) -> None:
        self._write(key, _BAD, reason.encode("utf-8", "backslashreplace"))

    def _write(self, key: str, kind: str, content: bytes) -> None:
        path = self._path(key, kind)
        try:
            path.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise WriteError(path, error) from None
        write_whole(path, lambda draft: draft.write_bytes(content))

    def read(self, key: str) -> dict[str, Tensor]:
        """Read an entry: {name: tensor}. FileNotFoundError if there is none; BadEntry if it is a bad
        sample or damaged."""
        from safetensors import SafetensorError, safe_open

        path = self._path(key, _ENTRY)
        try:
            with safe_open(path, framework="pt") as file:
                # Not a dict: `keys` is its only way to the names.
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                is_whole = (file.metadata() or {}).get("checksum") == _checksum(key, tensors)
            missing = [name for name in _TENSORS[self.kind] if name not in tensors]
            missing += [n for n in NUMBERS if n in tensors and tensors[n].numel() != 1]
            why = f"it has no {missing[0]}" if missing else "" if is_whole else "checksum mismatch"
        except FileNotFoundError:
            raise BadEntry(self.reason(key)) from None
        except (OSError, SafetensorError, ValueError) as error:
            why = str(error)[:100]
        else:
            if not why:
                return tensors
        raise BadEntry(f"{path} is damaged ({why}); delete it and run `cogfast cache` again")

    def reason(self, key: str) -> str:
        """Why a sample is bad; FileNotFoundError if there is no entry for it."""
        with open(self._path(key, _BAD), "rb") as file:
            return file.read(_MOST_REASON).decode(errors="replace")

    def _path(self, key: str, kind: str) -> Path:
        return self.folder / key[:2] / (key + kind)


def _checksum(key: str, tensors: Mapping[str, Tensor]) -> str:
    """A hash of the tensors' bytes, and of the key, which shows that a file was renamed."""
    digest = xxhash.xxh3_64(key.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def find_entries(
    cache: Path, kind: str, spec: Spec, wanted: Set[str]
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


def difference(cache: Path, kind: str, spec: Spec) -> str:
    """Describe how `spec` differs from that of the newest entries; "" if there are none, or some fit."""
    files = list(cache.glob(f"{kind}-*/spec.json"))
    if not files or any(Entries(cache, kind, one).folder.is_dir() for one in _allowed(spec)):
        return ""
    try:
        made = json.loads(max(files, key=lambda file: file.stat().st_mtime).read_text())
        others = [n for n in {**made, **spec} if made.get(n) != spec.get(n) != "auto"]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return ""  # damaged, and only of use for this message
    return "; ".join(
        f"cache made by {n} {made.get(n, 'none')}, the config has {spec.get(n, 'none')}"[:300]
        for n in others
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
        self.entries, self.keys, self.refused = entries, keys, videos.refused

    def __getitem__(self, index: int) -> dict:
        if index in self.refused:
            raise BadSample(self.name(index), self.refused[index])
        caption = self.captions[index]
        clip = self._entry("video", self.keys["video"][index], index)
        text = self._entry("text", hash_text(caption), index)
        found = {name: clip[stored] for name, stored in _STORED.items() if stored in clip}
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
        return {
            **found,
            "prompt_embedding": text["embedding"],
            "txt": caption,
            **{name: clip[name].item() for name in NUMBERS},
            "path": self.name(index),
        }

    def first_frame(self, index: int) -> Tensor:
        """Read a sample's conditioning image from its source files, uint8 [3, H, W]."""
        sample = super().__getitem__(index)
        return sample["images"] if self.has_images else sample["video"][0]

    def _entry(self, kind: str, key: str, index: int) -> dict[str, Tensor]:
        try:
            entry = self.entries[kind].read(key)
            if (
                "logvar" in entry
            ):  # one number for all of an entry that has one sample of the latents
                entry["logvar"] = entry["logvar"].expand(entry["mean"].shape)
            return entry
        except FileNotFoundError:
            reason = f"its {kind} entry is gone from the latent cache; run `cogfast cache` again"
        except BadEntry as error:
            reason = str(error)
        raise BadSample(self.name(index), reason)
