"""Damages that a draw does to the files of a folder, whatever they hold."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ODD = [None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**63, 10**30, -(10**18), 0.5, 1e300, -0.0]
ODD += ["", "x", "NaN", "../../etc/passwd", "/etc/passwd", "a" * 5000, "\x1b[2J\n", "\0"]
ODD += ["os.system", [], {}, [1], [[]], {"a": 1}, [None], [1] * 1000, {"target": "os.system"}]
ODD += ["${oc.env:HOME}"]
DEEP = "[" * 50_000 + "]" * 50_000
TEXT = [b"", b"{", b"[]", b"null", b"1e999", b"\xff\xfe", b'{"a": NaN}', DEEP.encode(), b"\0" * 50]
HOSTILE_YAML = b"a: &a [x]\nmodel: !!python/object/apply:os.system [ls]\n"


def files_of(folder: Path, *ends: str) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name.endswith(ends or ""))


def header_of(file: Path) -> tuple[dict, bytes]:
    """The header of a safetensors file, and the tensors' bytes."""
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def _places(value: object) -> Iterator[tuple[object, object]]:
    """(container, key) of everything in a JSON value."""
    keys = value if isinstance(value, dict) else ()
    for key in list(range(len(value)) if isinstance(value, list) else keys):
        yield value, key
        yield from _places(value[key])


def _odd_json(value: object, draw: random.Random) -> object:
    """Return the value with one entry changed, removed or added."""
    places = list(_places(value))
    if not places or draw.random() < 0.05:
        return draw.choice(ODD)
    container, key = draw.choice(places)
    kind = draw.random()
    if kind < 0.7:
        container[key] = draw.choice(ODD)
    elif kind < 0.85:
        del container[key]
    elif isinstance(container, dict):
        container[draw.choice(["x", "../x", "a" * 3000, str(key) + "2"])] = container[key]
    return value


def damage_json(folder: Path, draw: random.Random) -> str | None:
    files = files_of(folder, ".json")
    if not files:
        return None
    file = draw.choice(files)
    if draw.random() < 0.25:
        file.write_bytes(draw.choice(TEXT))
        return f"other text in {file.name}"
    file.write_text(json.dumps(_odd_json(json.loads(file.read_text()), draw)))
    return f"another value in {file.name}"


def damage_text(folder: Path, draw: random.Random) -> str | None:
    """Replace the text of any file, or a number in it."""
    file = draw.choice(files_of(folder, ".json", ".yaml", ".jsonl", ".txt", "latest"))
    content = file.read_bytes()
    numbers = [match.span() for match in re.finditer(rb"\d+", content)]
    if numbers and draw.random() < 0.5:
        start, end = draw.choice(numbers)
        number = draw.choice([b"9" * 30, b"-1", b"1e999", b"2e9"])
        file.write_bytes(content[:start] + number + content[end:])
        return f"another number in {file.name}"
    paths = [b"../../x", b"/etc/passwd", b"00000099"]
    file.write_bytes(draw.choice([*TEXT, *paths, HOSTILE_YAML, draw.randbytes(50)]))
    return f"other text in {file.name}"


def damage_bits(folder: Path, draw: random.Random) -> str:
    """Flip bits in the first bytes (headers), in the last (a zip's directory) or anywhere."""
    file = draw.choice([f for f in files_of(folder) if f.stat().st_size] or [folder / "none"])
    content = bytearray(file.read_bytes())
    low, high = draw.choice([(0, 2000), (-3000, 0), (0, len(content))])
    low, high = (len(content) + low, len(content)) if low < 0 else (low, min(high, len(content)))
    for _ in range(draw.choice([1, 1, 3, 30])):
        content[draw.randrange(max(0, low), high)] ^= 1 << draw.randrange(8)
    file.write_bytes(content)
    return f"flipped bits of {file.name}"


def damage_size(folder: Path, draw: random.Random) -> str:
    file = draw.choice(files_of(folder))
    content = file.read_bytes()
    kind = draw.randrange(4)
    if kind == 0:
        file.write_bytes(content[: draw.randrange(len(content) + 1)])
    elif kind == 1:
        file.write_bytes(b"")
    elif kind == 2:
        file.write_bytes(content + bytes(draw.randrange(1, 5000)))
    else:
        file.unlink()
    return f"{['cut', 'empty', 'longer', 'no'][kind]} {file.name}"


def damage_kind(folder: Path, draw: random.Random) -> str:
    """Replace a file by a folder, a pipe or a link to itself."""
    file = draw.choice(files_of(folder))
    file.unlink()
    draw.choice([Path.mkdir, os.mkfifo, lambda p: p.symlink_to(p)])(file)
    return f"no regular file {file.name}"


def damage_rights(folder: Path, draw: random.Random) -> str:
    """Take away the rights to read a file or folder, or to write into a folder."""
    entry = draw.choice([folder, *sorted(folder.rglob("*"))])
    mode = draw.choice((0, 0o555)) if entry.is_dir() else 0
    entry.chmod(mode)
    return f"{entry.name} has mode {mode:o}"


def damage_other_file(folder: Path, draw: random.Random) -> str:
    """Replace a file by another one."""
    files = files_of(folder)
    file, other = draw.sample(files, 2) if len(files) > 1 else (files[0], files[0])
    file.write_bytes(other.read_bytes())
    return f"{other.name} as {file.name}"


def damage_header(folder: Path, draw: random.Random) -> str | None:
    """Damage the header of a safetensors file: names, dtypes, shapes, offsets, metadata, nesting or
    length."""
    files = files_of(folder, ".safetensors")
    if not files:
        return None
    file = draw.choice(files)
    header, rest = header_of(file)
    names = [name for name in header if name != "__metadata__"]
    one, other = header[draw.choice(names)], header[draw.choice(names)]
    kind = draw.randrange(8)
    if kind == 0:
        one["dtype"] = draw.choice(["BOOL", "I8", "F8_E4M3", "C64", "I64", "F64", "X", 3])
    elif kind == 1:
        one["shape"] = draw.choice([[], [0], [2**62, 4], [-1], [1] * 70, 3, [one["shape"]]])
    elif kind == 2:
        one["data_offsets"] = draw.choice([other["data_offsets"], [0, 2**60], [5, 1], [], None])
    elif kind == 3:
        name = draw.choice(names)
        odd = ["", "x" * 5000, "\x1b[2J", name + ".", name.replace(".0.", ".99999999.")]
        header[draw.choice(odd)] = header.pop(name)
    elif kind == 4:
        header["__metadata__"] = draw.choice([{"lora_adapter_metadata": DEEP}, {"a": 1}, [], None])
    elif kind == 5:
        header = _odd_json(header, draw)
    elif kind == 6 and "__metadata__" in header:
        about = json.loads(header["__metadata__"].get("lora_adapter_metadata", "{}"))
        header["__metadata__"]["lora_adapter_metadata"] = json.dumps(_odd_json(about, draw))
    text = DEEP.encode() if kind == 7 else json.dumps(header).encode()
    length = draw.choice([len(text)] * 9 + [2**63])
    file.write_bytes(length.to_bytes(8, "little") + text + rest)
    return f"header of {file.name}, kind {kind}"


def _odd_tensor(tensor: torch.Tensor, draw: random.Random) -> object:
    kinds = [torch.bool, torch.int8, torch.complex64, torch.float8_e4m3fn, torch.int64]
    changes = [
        lambda: tensor.to(draw.choice(kinds)),
        lambda: tensor.to(torch.float64),
        lambda: torch.zeros(0),
        lambda: torch.tensor(1.0),
        lambda: tensor.flatten(),
        lambda: tensor[None],
        lambda: torch.cat([tensor, tensor]),
        lambda: tensor[: max(1, len(tensor) // 2)] if tensor.dim() else tensor,
        lambda: tensor.reshape([1] * 6 + list(tensor.shape)),
        lambda: tensor * float("nan"),
    ]
    return draw.choice(changes)().contiguous()


def _change(state: dict[str, torch.Tensor], draw: random.Random) -> None:
    name = draw.choice(sorted(state))
    kind = draw.randrange(5)
    if kind == 0:
        del state[name]
    elif kind == 1:
        odd = [name.replace(".0.", ".7."), name + "x", "x", "a" * 4000, "\n", ""]
        state[draw.choice(odd)] = state.pop(name)
    elif kind == 2:
        state["model.diffusion_model.more"] = torch.zeros(3)
    else:
        state[name] = _odd_tensor(state[name], draw)


def damage_tensors(folder: Path, draw: random.Random) -> str | None:
    """Write intact files with other names, shapes and dtypes."""
    file = draw.choice(files_of(folder, ".safetensors", ".pt"))
    if file.suffix == ".safetensors":
        metadata = header_of(file)[0].get("__metadata__")
        state = load_file(file)
        _change(state, draw)
        save_file({k: v.clone() for k, v in state.items()}, file, metadata)
    else:
        content = torch.load(file, weights_only=True)
        key = draw.choice(sorted(content))
        if draw.random() < 0.2:
            content[key] = draw.choice([None, [], 3, "x", {}, {1: 2}, {"a": {}}, torch.zeros(2)])
        else:
            _change(content[key], draw)
        torch.save(content, file)
    return f"tensors of {file.name}"


class Call:
    """An object whose pickle calls a function when it is read."""

    def __init__(self, call: Callable, *arguments: object) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple:
        return self.call, self.arguments


def damage_pickle(folder: Path, draw: random.Random) -> str | None:
    """A .pt file that would run something, expand to something huge, or nests."""
    files = files_of(folder, ".pt")
    if not files:
        return None
    file = draw.choice(files)
    outside = folder.parent.parent / "written"
    calls = [
        Call(os.system, f"touch {outside}"),
        Call(eval, f"open({str(outside)!r}, 'w')"),
        Call(getattr, torch.Tensor, "backward"),
        Call(exec, "while True: pass"),
        Call(torch.zeros, (2**40,)),
        Call(torch._utils._rebuild_tensor_v2, 1, 2, 3, 4, 5, 6),
        Call(bytearray, 2**40),
    ]
    kind = draw.randrange(6)
    if kind == 0:
        file.write_bytes(pickle.dumps({"module": draw.choice(calls)}, protocol=2))
    elif kind < 4:
        content = torch.load(file, weights_only=True)
        state = content[draw.choice(sorted(content)) if kind == 1 else sorted(content)[0]]
        if kind == 1:
            state["x"] = draw.choice(calls)
        elif kind == 2:  # one number that stands for 2**40
            state[draw.choice(sorted(state))] = torch.zeros(1).expand(2**20, 2**20)
        else:
            one = draw.choice(sorted(state))
            odd = [state[one].to_sparse(), torch.empty(2**20, 2**20, device="meta")]
            state[one] = draw.choice(odd)
        torch.save(content, file)
    else:
        with zipfile.ZipFile(file) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        pickled = next(name for name in entries if name.endswith("data.pkl"))
        if kind == 4:  # packed zeros
            entries[pickled] = bytes(20 << 20)
        else:
            bits = bytearray(entries[pickled])
            for _ in range(draw.choice([1, 3, 20])):
                bits[draw.randrange(len(bits))] = draw.randrange(256)
            entries[pickled] = draw.choice([bytes(bits), b"\x80\x02" + b"(" * 10**6 + b"l" * 10**5])
        how = zipfile.ZIP_DEFLATED if kind == 4 else zipfile.ZIP_STORED
        with zipfile.ZipFile(file, "w", how) as archive:
            for name, content in entries.items():
                archive.writestr(name, content)
    return f"pickle of {file.name}, kind {kind}"


def damage_names(folder: Path, draw: random.Random) -> str | None:
    """Names of files in index files and `latest` that lead elsewhere."""
    files = files_of(folder, "index.json", "latest")
    if not files:
        return None
    file = draw.choice(files)
    elsewhere = ["../secret", "/etc/passwd", "..", "", ".", "\0", "x" * 300, "a/../../b", "\ud800"]
    name = draw.choice(elsewhere)
    if file.suffix != ".json":
        file.write_bytes(name.encode("utf-8", "surrogatepass"))
    else:
        content = json.loads(file.read_text())
        held = content.get("weight_map", content)
        held[draw.choice(sorted(held))] = name
        file.write_text(json.dumps(content))
    return f"{name[:20]!r} in {file.name}"


TO_WEIGHTS = (damage_json, damage_json, damage_bits, damage_size, damage_kind, damage_header)
TO_WEIGHTS += (damage_header, damage_tensors, damage_tensors, damage_pickle, damage_names)
TO_RUNS = (*TO_WEIGHTS, damage_text, damage_text, damage_rights, damage_rights, damage_other_file)
