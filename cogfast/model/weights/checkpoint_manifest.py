"""A run's checkpoint folders: finds a checkpoint, reads its manifest and verifies its files.

    <run>/checkpoints/<step>/manifest.json           lists the slices in the files; its last entry is
                                                     a checksum of all text before it
    <run>/checkpoints/<step>/rank-00000.safetensors  rank 0's slices: master weights, moments and EMA,
                                                     flat float32; its checksum is in the manifest
    <run>/checkpoints/latest                         the name of the newest complete step

A slice is a range of a flattened parameter, or of one flattened shard of it, whose index and count
are in the manifest. So ranks of any data- and tensor-parallel size can read the parts they need.
With args.folder_layout=finetune, the checkpoints are <run>/checkpoint-<step> beside <run>/latest.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NotRequired

import cogfast.extensions.stores.mirror as mirror
from cogfast.core.addresses import each_text, name_of, shown, url_of
from cogfast.core.files import (
    DamageError,
    check_checksum,
    check_size,
    checksum_of_bytes,
    read_limited,
)
from cogfast.core.json_files import Size, brief, is_inside, keys, parse_json, read_json
from cogfast.core.values import Range

FORMAT = "cogfast-checkpoint-3"
_MOST_BYTES = 1 << 30  # of a manifest; with 512 ranks and 2,000 parameters it has about 2**28
_STEP = re.compile(r"(?:checkpoint-)?(\d{1,12})")
_HASHING_THREADS = 4  # files read in parallel; hashing alone takes 0.15 s per GiB
_SEAL = re.compile(rb', "checksum": "([0-9a-f]{16})"\}\Z')

_Count = Annotated[int, Range(0, 2**48)]
_Part = Annotated[int, Range(0, 2**20)]
_FORMAT = keys({"format": str})
# cut: dim, num_parts
_PARAMETER = keys({"shape": list[_Count], "cut": NotRequired[tuple[_Part, Size]]})
_SLICE = keys(
    {
        "parameter": str,
        "kind": str,
        "start": _Count,
        "numel": _Count,
        "share": NotRequired[tuple[_Part, Size]],  # index, count
    }
)
_CLASS = keys({"name": str, "code": str | None})  # see train/run/own_classes.py
_MANIFEST = {
    "format": str,
    "step": _Count,
    "parameters": dict[str, _PARAMETER],
    "frozen": dict[str, _PARAMETER],
    "slices": dict[str, dict[str, _SLICE]],
    "bytes": dict[str, _Count],
    "checksums": dict[str, str],
    "attention": NotRequired[str],  # args.attention, chosen
    "attention_backend": NotRequired[str | None],
    "encode_way": NotRequired[tuple[str, bool] | None],  # of clips: mode, is_sliced
    "video_sizes": NotRequired[list[tuple[Size, Size, Size]]],  # see TransformerConfig.trained_size
    "config": NotRequired[dict[str, dict[str, Any]]],  # see config_of
    "classes": NotRequired[dict[str, _CLASS]],
}
MANIFEST = keys(_MANIFEST)
# Fields that a run needs to resume, besides the weights.
RESUMABLE = keys(
    {
        **_MANIFEST,
        "counters": dict[str, dict[str, float]],
        "loss_scaler": dict[str, bool | int | float],
        "global_batch": _Count,
        "optimizer": NotRequired[str],
        "num_samples": NotRequired[_Count],
        "data_order": NotRequired[str],
    }
)


def checkpoint_name(step: int, layout: str) -> str:
    """Return the name of the checkpoint of `step`. layout: args.folder_layout."""
    return f"checkpoint-{step}" if layout == "finetune" else f"{step:08d}"


def checkpoints_folder(run: Path, layout: str) -> Path:
    """Return the folder that holds a run's checkpoints. layout: args.folder_layout."""
    return run if layout == "finetune" else run / "checkpoints"


def layout_of(checkpoint: Path) -> str:
    """Return the args.folder_layout of the run that a checkpoint, or its draft, belongs to."""
    return "finetune" if checkpoint.name.startswith("checkpoint-") else "cogfast"


def run_of(checkpoint: Path) -> Path:
    """Return the folder of the run that a checkpoint, or its draft, belongs to."""
    return checkpoint.parent if layout_of(checkpoint) == "finetune" else checkpoint.parent.parent


def step_of(checkpoint: Path) -> int | None:
    """Return the step that the name of a checkpoint says; None if it is not such a name."""
    match = _STEP.fullmatch(checkpoint.name)
    return None if match is None else int(match[1])


def is_in_run(path: Path) -> bool:
    """Return whether a path is that of a checkpoint in a run, which may be damaged."""
    is_at_place = path.parent.name == "checkpoints" or layout_of(path) == "finetune"
    return is_at_place and step_of(path) is not None  # runs may lie in a folder checkpoints, too


def newest_checkpoint(run: Path) -> Path | None:
    """Return the checkpoint that a run's `latest` names; None if the run has none.

    ValueError if that file is damaged; the message names the last good checkpoint.
    """
    folder = run if _has_checkpoints(run) else run / "checkpoints"
    latest = folder / "latest"
    if not latest.is_symlink() and not latest.exists():
        # A run killed before it wrote `latest` for the first time leaves one checkpoint. With several,
        # it is unknown which one `latest` named.
        found = _complete(folder)
        if len(found) > 1:
            raise DamagedRun(f"{name_of(latest)}: missing", folder)
        return found[0] if found else None
    try:
        name = read_limited(latest, 64).decode("ascii").strip()
    except ValueError:  # includes UnicodeDecodeError
        name = ""
    if not _STEP.fullmatch(name):
        raise DamagedRun(f"{name_of(latest)}: damaged, it names no step", folder)
    checkpoint = folder / name
    replaced = replaced_name(checkpoint)
    # The run was killed between the two renames that replace a checkpoint by a new one of its step.
    return replaced if replaced.is_dir() and not checkpoint.is_dir() else checkpoint


def find_run_checkpoint(path: Path) -> Path | None:
    """Return `path` if it is a checkpoint, or the newest checkpoint if it is a run or a folder of
    checkpoints; None if it is none of these."""
    if _is_checkpoint(path):
        return path
    if path.name == "checkpoints" and _complete(path):
        return newest_checkpoint(path.parent)
    if not (path / "checkpoints").is_dir() and not _has_checkpoints(path):
        return None
    return newest_checkpoint(path)


def _has_checkpoints(folder: Path) -> bool:
    """Return whether a folder holds cogfast's checkpoint-<step>, the layout `finetune`."""
    # Other trainers have folders of that name, too. A step's old one stays until its new one has the name.
    return folder.is_dir() and any(map(_is_checkpoint, folder.glob("checkpoint-*")))


def _is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint, whose manifest may be missing."""
    has_manifest = (path / "manifest.json").is_file()
    return has_manifest or (path.is_dir() and any(path.glob("rank-*.safetensors")))


def _complete(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder that have a manifest, newest first."""
    paths = folder.iterdir() if folder.is_dir() else ()
    steps = {path: step for path in paths if (step := step_of(path)) is not None}
    found = [path for path in steps if (path / "manifest.json").is_file()]
    return sorted(found, key=steps.__getitem__, reverse=True)


def replaced_name(checkpoint: Path) -> Path:
    """Return the temporary name of a checkpoint while a new one of its step replaces it."""
    return checkpoint.with_name(f"{checkpoint.name}.incomplete.old")


def write_manifest(folder: Path, manifest: dict) -> None:
    """Write manifest.json, with the checksum of its text as its last entry."""
    # The text ends before the closing brace: its checksum follows as the last entry.
    text = json.dumps(manifest)[:-1]
    checksum = checksum_of_bytes(text.encode())
    file, config = folder / "manifest.json", manifest.get("config")
    file.touch(0o666 if shown(config) == config else 0o600)
    file.write_text(f'{text}, "checksum": "{checksum}"}}')


def read_manifest(path: Path, schema: dict = MANIFEST) -> dict:
    """Read the manifest of a checkpoint folder and check its checksum and the sizes of its files.

    ValueError, which names the last good checkpoint, if the folder is missing, incomplete or damaged.
    """
    try:
        return _intact_manifest(path, schema)
    except DamageError as error:
        raise refusal(path, error) from None


def config_of(checkpoint: Path, manifest: dict) -> dict[str, dict[str, Any]]:
    """Return the sections of the configuration with which a checkpoint was trained. A resumed run may
    have others than at its first start."""
    from cogfast.config.yaml_files import check_plain  # here: OmegaConf has many modules

    sections = manifest.get("config", {})
    try:
        check_plain(sections)
    except ValueError as error:
        raise refusal(checkpoint, DamageError(f"manifest.json: {error}")) from None
    # JSON has no infinities, which are stored as text.
    number = lambda text: float(text) if text in ("Infinity", "-Infinity") else text
    found = {name: each_text(values, number) for name, values in sections.items()}
    load = (found.get("args") or {}).get("load")
    if isinstance(load, str) and "://" not in load and not os.path.isabs(load):
        found["args"]["load"] = _from_start(run_of(checkpoint), load)
    return found


def _from_start(run: Path, path: str) -> str:
    """Return a relative path from the folder in which a run was started, if it is there, else as it is."""
    # That of the first start comes before those of resumes.
    for file in sorted(run.glob("environment*.json"), reverse=True):
        folder = read_json(file).get("working_folder")
        if isinstance(folder, str) and os.path.exists(found := os.path.join(folder, path)):
            return path if folder == os.getcwd() else found
    return path


def trained_settings(path: Path) -> dict[str, tuple[object, str]]:
    """Return {section: (values, file)} with which a checkpoint, or the newest one of a run, was trained;
    {} if `path` is neither."""
    is_gone = is_in_run(path) and _complete(path.parent)  # the error names one that is left
    checkpoint = find_run_checkpoint(path) or (path if is_gone else None)
    if checkpoint is None:
        return {}
    file, sections = checkpoint / "manifest.json", config_of(checkpoint, read_manifest(checkpoint))
    return {name: (values, str(file)) for name, values in sections.items()}


class DamagedRun(ValueError):
    """The newest checkpoint of a run is damaged. good: the newest other one in `folder` that is not."""

    def __init__(self, what: str, folder: Path, bad: Path | None = None) -> None:
        self.good = next((p for p in _complete(folder) if p != bad and _is_good(p)), None)
        text = "its folder has no other checkpoint"
        if self.good is not None:
            text = f"the last good one is that of step {step_of(self.good)}: "
            text += f"give {name_of(self.good)} (training: with --resume)"
        super().__init__(f"{what}; {text}")


def refusal(path: Path, error: DamageError) -> DamagedRun:
    """Return an error about a damaged checkpoint that names the last good one."""
    return DamagedRun(f"{name_of(path)}: cannot be read: {error}", path.parent, path)


def _is_good(checkpoint: Path) -> bool:
    try:
        manifest = _intact_manifest(checkpoint, RESUMABLE)
        # A checkpoint in a store would have to be downloaded.
        if url_of(checkpoint) is None:
            verify_files(checkpoint, manifest, manifest["checksums"])
    except DamageError:
        return False
    return True


def verify_files(folder: Path, manifest: dict, names: Iterable[str]) -> None:
    """Raise DamageError if the checksum of one of these files differs from the manifest's."""
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        check = lambda name: check_checksum(
            checkpoint_file(folder, name), manifest["checksums"][name], name
        )
        deque(pool.map(check, names), maxlen=0)  # raises the first error


def checkpoint_file(folder: Path, name: str) -> Path:
    """Return a file of a checkpoint, which is downloaded if the folder stands for one in a store."""
    try:
        return mirror.fetch(folder / name)
    except FileNotFoundError:
        raise DamageError(f"{name} is missing") from None


def _intact_manifest(path: Path, schema: dict) -> dict:
    if not path.is_dir():
        raise DamageError("no such folder")
    file = path / "manifest.json"
    if not file.exists():
        raise DamageError("it has no manifest.json")
    try:
        text = read_limited(file, _MOST_BYTES)
        seal = _SEAL.search(text)
        # Check this first: nothing else in a damaged manifest can be relied on.
        if seal and checksum_of_bytes(text[: seal.start()]) != seal[1].decode():
            raise DamageError("manifest.json is damaged: it has another checksum")
        manifest = parse_json(text, _FORMAT, "manifest.json", "it is damaged")
        if manifest["format"] != FORMAT:
            found = brief(manifest["format"])
            raise DamageError(f"its manifest.json says format {found}, not {FORMAT}")
        if not seal:
            raise DamageError("its manifest.json has no checksum")
        manifest = parse_json(text, schema, "manifest.json", "it is damaged")
    except ValueError as error:
        raise DamageError(str(error).replace(str(file), file.name)) from None
    _check_consistent(manifest)
    stored = mirror.sizes(path)
    for name, size in manifest["bytes"].items():
        if stored is None:
            check_size(path / name, size)
        elif stored.get(name) != size:
            raise DamageError(f"{name} has {stored.get(name, 'no')} bytes instead of {size}")
    return manifest


def _check_consistent(manifest: dict) -> None:
    """Raise DamageError if the manifest's tables contradict each other or name outside files."""
    names = manifest["slices"].keys()
    for name in names:
        if "/" in name or not is_inside(name):
            raise DamageError(f"its manifest.json names {brief(name)}, which is not in the folder")
    for table in ("bytes", "checksums"):
        if manifest[table].keys() != names:
            raise DamageError(f"the {table} in its manifest.json are not those of its files")
    if lacking := manifest["parameters"].keys() - manifest.get("counters", manifest["parameters"]):
        raise DamageError(f"its manifest.json has no counters of {brief(min(lacking))}")
    known = {**manifest["frozen"], **manifest["parameters"]}
    for slices in manifest["slices"].values():
        for piece in slices.values():
            about, name = known.get(piece["parameter"]), brief(piece["parameter"])
            if about is None:
                raise DamageError(f"its manifest.json has slices of {name} and not its shape")
            if not _fits(piece, about):
                raise DamageError(f"its manifest.json has a slice that does not fit {name}")


def _fits(piece: dict, about: dict) -> bool:
    """Return whether a slice lies inside its parameter, and its shard is possible for the shape."""
    shape, (index, count) = about["shape"], piece.get("share", (0, 1))
    if piece["start"] + piece["numel"] > math.prod(shape) or index >= count:
        return False
    if count == 1:
        return True
    dim, num_parts = about.get("cut", (len(shape), 1))
    return dim < len(shape) and shape[dim] % (num_parts * count) == 0
