"""Describes the files that a command has left as texts, and compares such texts."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from scripts.behaviour.difference import Difference, normalized

# Values that depend on the machine's speed or memory. Their keys stay.
_OF_MACHINE = re.compile(r"(_ms|_per_s|tflops|mfu|_gib|communication|_seconds|_hours)$")
# On another processor: of numbers, of the norm of a tensor that was trained there, and of both in bf16.
_RELATIVE, _RELATIVE_NORM, _RELATIVE_BF16 = 1e-6, 1e-4, 2e-3
_NOTHING = 1e-9  # the rounding of zero: of a loss, and below of norms
_NOTHING_OF = {"exp_avg/": 1e-9, "exp_avg_sq/": 1e-16}
_NOTHING_OF_WEIGHTS = 3e-7  # Adam makes a step of its own of the rounding of a gradient near zero
_MOST = 6  # differences of one file that are listed
_TEXTS = (".json", ".jsonl", ".yaml", ".txt", ".md", ".csv", ".cogfast-index", "latest", "bad")
_INDICES = ("sources.jsonl", ".cogfast-index")
_DRAWN = re.compile(r"(rank-\d{5})-[0-9a-f]{8}")  # names of files in a store
# Lines that belong to the machine: a first compilation, and what DeepSpeed and torchrun print.
_NOISE = re.compile(
    r"compiling the C\+\+ kernels|another process compiles|\[W|W\d{4} |\[20|warn|.*Warning|\s*$"
    r"|\*{10}|.*OMP_NUM_THREADS|.*Gloo\] Rank"
)
_OF_THREAD = re.compile(r"(checkpoint-)?\d+: wrote ")
_STEP = re.compile(r"(step \d+/\d+ .* norm \S+).*")
# A number that is no part of a word, such as a checksum.
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.]*\w)")
_PRINTED = ("output", "log.txt")  # their numbers are rounded to some digits
_RELATIVE_PRINTED = 0.011
_STATED = (
    ".yaml",
    "run_facts.json",
    "environment",
)  # what a user or the code has set, and no result
_EXTRA = (
    (r"(such as this one of \d+): .*", r"\1: <caption>"),  # threads read the captions
    (r"local/folders/\d+-[0-9a-f]{12}", "local/folders/<id>"),
    (r"GiB of \d+\.\d+", "GiB of <number>"),
    (r"\d+(\.\d+)? (GiB|MiB|KiB|GB|MB|kB)\b", r"<number> \2"),
    (r"\b\d+(\.\d+)?(e[+-]\d+)? (s|ms|GPU hours|clips/s|videos/s|samples/s)\b", r"<number> \3"),
    (r"headers: (\d+) of (\d+) videos, \d+/s", r"headers: \1 of \2 videos, <number>/s"),
    (r", \d+(\.\d+)?/s\b", ", <number>/s"),
    (r"127\.0\.0\.1:\d+", "127.0.0.1:<port>"),
    (r"process <?\w+>? on \S+ [0-9a-f]{16}", "process <pid> on <machine> <token>"),
)


def output_text(text: str, root: Path) -> str:
    """Return what a command has printed, without the machine's own lines and numbers."""
    return "\n".join(_line(line, root) for line in text.splitlines() if not _NOISE.match(line))


def _line(line: str, root: Path) -> str:
    line = _STEP.sub(r"\1", normalized(line, root))
    for pattern, replacement in _EXTRA:
        line = re.sub(pattern, replacement, line)
    return line


def plain_name(file: Path, root: Path) -> str:
    """Return a file's name below `root` without what depends on the place, the machine and the time."""
    name = str(file.relative_to(root))
    name = re.sub(r"events\.out\.tfevents\.\S+", "events", name)
    name = re.sub(_DRAWN, r"\1-<id>", name)
    name = re.sub(r"sources/\d{20}-[0-9a-f]{8}", "sources/<time>", name)
    return re.sub(r"(weights|headers|shard)-[0-9a-f]{20}", r"\1-<names>", name)


def snapshot(root: Path, folders: list[str]) -> dict[str, str]:
    """Return {name: text} of all files in these folders of `root`."""
    found: dict[str, list[str]] = {}
    for folder in folders:
        for file in sorted(path for path in (root / folder).rglob("*") if path.is_file()):
            name = plain_name(file, root)
            if "/kernels/" not in name and not re.search(r"/changes[^/]*\.diff$", name):
                found.setdefault(name, []).append(_describe(file, root))
    return {name: "\n".join(sorted(texts)) for name, texts in sorted(found.items())}


def _describe(file: Path, root: Path) -> str:
    if file.name.startswith("events.out.tfevents"):
        return _tensorboard(file)
    if file.suffix == ".safetensors":
        return _safetensors(file)
    if file.suffix == ".pt":
        return _pickle(file)
    if file.name.endswith("metrics.jsonl") or file.name == "wandb.jsonl":
        rows = map(json.loads, file.read_text().splitlines())
        return "\n".join(json.dumps(_without_machine(row)) for row in rows)
    if file.name.startswith("environment"):
        row = json.loads(file.read_text())
        return json.dumps(
            {key: _line(str(v), root) if key == "command" else "" for key, v in row.items()}
        )
    if file.name == "log.txt":
        return output_text(file.read_text(), root)
    if file.name == "manifest.json" and "checksums" in (found := json.loads(file.read_text())):
        # Sections on lines of their own, in the order of the file.
        assert list(found)[-1] == "checksum"
        text = "\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in found.items())
        plain = re.sub(_DRAWN, r"\1-<id>", text)
        return plain if plain == text else re.sub(r'("checksum": )"\w+"', r"\1<of names>", plain)
    if file.suffix in _TEXTS or file.name in _TEXTS or file.name == "run.lock":
        lines = [_line(line, root) for line in file.read_text().splitlines()]
        # Threads append to indices.
        is_index = file.name in _INDICES or file.parent.name == "sources"
        return "\n".join(sorted(lines) if is_index else lines)
    return "(a file)"


def _without_machine(value: object, key: str = "") -> object:
    if isinstance(value, dict):
        return {name: _without_machine(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_machine(inner) for inner in value]
    is_number = isinstance(value, float | int) and not isinstance(value, bool)
    return "<number>" if is_number and _OF_MACHINE.search(key) else value


def _tensorboard(file: Path) -> str:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    lines = []
    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            number = value.tensor.float_val[0] if value.tensor.float_val else value.simple_value
            shown = "<number>" if _OF_MACHINE.search(value.tag) else repr(number)
            lines.append(f"{event.step} {value.tag} {shown}")
    return "\n".join(lines)


def _tensor(name: str, tensor: torch.Tensor) -> str:
    raw = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    digest = hashlib.blake2b(raw, digest_size=8).hexdigest()
    norm = f"{tensor.double().norm().item():.9g}" if tensor.numel() else "0"
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{name} {kind} {list(tensor.shape)} norm={norm} bits={digest}"


def _safetensors(file: Path) -> str:
    with open(file, "rb") as raw:
        header = json.loads(raw.read(int.from_bytes(raw.read(8), "little")))
    metadata = header.pop("__metadata__", None)
    # A checksum of trained numbers is that of one processor.
    lines = [re.sub(r'("checksum": ")([0-9a-f]{16})', r"\1bits=\2", json.dumps(metadata))]
    with safe_open(file, "pt") as tensors:
        lines += [_tensor(name, tensors.get_tensor(name)) for name in header]
    return "\n".join(lines)


def _pickle(file: Path) -> str:
    def leaves(node: object, name: str) -> Iterator[str]:
        if isinstance(node, torch.Tensor):
            yield _tensor(name, node)
        elif isinstance(node, dict):
            for key, inner in node.items():
                yield from leaves(inner, f"{name}.{key}")
        else:
            yield f"{name} {node!r}"

    return "\n".join(leaves(torch.load(file, map_location="cpu", weights_only=True), ""))


def compare_texts(
    case: str, name: str, recorded: str, found: str, is_exact: bool
) -> Iterator[Difference]:
    """Yield the differences of two texts, a line each.

    is_exact: floating-point numbers must be equal in all bits, as on one machine.
    """
    if recorded == found:
        return
    # Threads read the captions: another one may be the first that is too long.
    recorded, found = (
        re.sub(r"such as this one of \d+: <", "such as this one: <", text)
        for text in (recorded, found)
    )
    # When the thread that writes checkpoints has finished depends on the disk.
    ours, theirs = (
        sorted(text.splitlines(), key=lambda line: bool(_OF_THREAD.match(line)))
        for text in (recorded, found)
    )
    count = 0
    for number in range(max(len(ours), len(theirs))):
        one = ours[number] if number < len(ours) else "(nothing)"
        other = theirs[number] if number < len(theirs) else "(nothing)"
        is_stated = any(part in name for part in _STATED) or one.startswith('"config"')
        if one == other or not (is_exact or is_stated or not is_close(one, other, case, name)):
            continue
        count += 1
        if count <= _MOST:
            yield Difference("disks", case, f"{name} line {number + 1}", one, other)
    if count > _MOST:
        rest = f"and {count - _MOST} more lines"
        yield Difference("disks", case, name, rest, rest)


def is_close(one: str, other: str, case: str, name: str) -> bool:
    """Return whether two lines of a file differ in floating-point numbers alone, and these by rounding."""
    one, other = (re.sub(r"bits=[0-9a-f]{16}", "", text) for text in (one, other))
    if one.startswith('"checksum') and other.startswith(one.partition(":")[0]):
        return True  # of the files of trained numbers
    if _NUMBER.sub("#", one) != _NUMBER.sub("#", other):
        return False
    is_printed = name.endswith(_PRINTED)
    for left, right in zip(_NUMBER.finditer(one), _NUMBER.finditer(other), strict=True):
        if left[0] == right[0]:
            continue
        if not re.search("[.e]", left[0] + right[0]):
            return False
        is_norm = one[: left.start()].endswith("norm=")
        relative = _RELATIVE_BF16 if "bf16" in case else _RELATIVE_NORM if is_norm else _RELATIVE
        absolute = _NOTHING
        if is_printed:
            # The last digit may be another one, of numbers with so many that this is rounding.
            values = abs(float(left[0])), abs(float(right[0]))
            absolute = min(1.01 * _last_digit(left[0]), _RELATIVE_PRINTED * max(values))
        elif is_norm:
            kinds = [value for start, value in _NOTHING_OF.items() if one.startswith(start)]
            absolute = kinds[0] if kinds else _NOTHING_OF_WEIGHTS
        if not math.isclose(float(left[0]), float(right[0]), rel_tol=relative, abs_tol=absolute):
            return False
    return True


def _last_digit(number: str) -> float:
    """Return what one more in the last digit of a printed number adds to it."""
    digits, _, exponent = number.partition("e")
    return 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
