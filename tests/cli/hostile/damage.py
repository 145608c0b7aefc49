"""Damages that a draw does to the files of a folder, whatever they hold. None: nothing to damage."""

import json
import os
import pickle
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ODD = [None, True, 0, -1, 1, 3, 2**31, 2**63, 10**30, 0.5, 1e300]
ODD += ["", "x", float("nan"), "a" * 5000, "\0"]
ODD += ["../../etc/passwd", "/etc/passwd", "\x1b[2J\n", "${oc.env:HOME}", [], {}, [1], [[]]]
ODD += [[1] * 1000, {"a": 1}, {"target": "torch.os.system"}, "${args.lr}", "???", "2026-13-45"]
DEEP = "[" * 50_000 + "]" * 50_000
TEXT = [b"", b"{", b"[]", b"null", b"1e999", b"\xff\xfe", b'{"a": NaN}', DEEP.encode(), b"\0" * 50]
TEXT += [b"../../x", b"00000099", b"a: &a [x]\nmodel: !!python/object/apply:os.system [ls]\n"]


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


def odd_json(value: object, draw: random.Random) -> object:
    """Return the value with one entry changed, removed or added."""
    places = list(_places(value))
    if not places or draw.random() < 0.05:
        return draw.choice(ODD)
    container, key = draw.choice(places)
    kind = draw.random()
    if kind < 0.3 and isinstance(container[key], int | float):  # the right type gets further
        container[key] *= draw.choice((0, -1, 3, 1000, 10**9, 0.5))
    elif kind < 0.6:
        container[key] = draw.choice(ODD)
    elif kind < 0.8:
        del container[key]
    elif kind < 0.85:
        container[key] = {"a": [container[key]] * 50}
    elif isinstance(container, dict):
        container[draw.choice(["x", "../x", "a" * 3000, str(key) + "2"])] = container[key]
    return value


def damage_json(folder: Path, draw: random.Random) -> str | None:
    files = files_of(folder, ".json")
    if not files:
        return None
    file = draw.choice(files)
    file.write_text(json.dumps(odd_json(json.loads(file.read_text()), draw)))
    return f"another value in {file.name}"


def damage_text(folder: Path, draw: random.Random) -> str | None:
    files = files_of(folder, ".json", ".yaml", ".jsonl", ".txt", "latest")
    if not files:
        return None
    file = draw.choice(files)
    file.write_bytes(draw.choice([*TEXT, draw.randbytes(50)]))
    return f"other text in {file.name}"


def damage_bytes(folder: Path, draw: random.Random) -> str:
    """Flip bits in the first bytes (headers), in the last (a zip's directory) or anywhere, or cut a
    file, lengthen or remove it."""
    file = draw.choice([f for f in files_of(folder) if f.stat().st_size])
    content = bytearray(file.read_bytes())
    kind = draw.choice(["flipped", "flipped", "cut", "longer", "no"])
    if kind == "flipped":
        low, high = draw.choice([(0, 2000), (len(content) - 3000, len(content)), (0, len(content))])
        for _ in range(draw.choice([1, 3, 30])):
            content[draw.randrange(max(0, low), min(high, len(content)))] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del content[draw.randrange(len(content)) :]
    elif kind == "longer":
        content += bytes(draw.randrange(1, 5000))
    file.unlink() if kind == "no" else file.write_bytes(content)
    return f"{kind} {file.name}"


def damage_kind(folder: Path, draw: random.Random) -> str:
    """Replace a file by a folder, a pipe, a link to itself or another file, or take away rights."""
    files = files_of(folder)
    file, other = draw.choice(files), draw.choice(files)
    content = other.read_bytes()
    if draw.random() < 0.4:
        entry = draw.choice([folder, file.parent, file])
        entry.chmod(draw.choice((0, 0o555)) if entry.is_dir() else 0)
        return f"no rights for {entry.name}"
    file.unlink()
    makes = [Path.mkdir, os.mkfifo, lambda p: p.symlink_to(p), lambda p: p.write_bytes(content)]
    draw.choice(makes)(file)
    return f"another kind of {file.name} ({other.name})"


# Entry of a tensor in the header of a safetensors file -> values
FIELDS = {
    "dtype": ["BOOL", "I8", "F8_E4M3", "C64", "I64", "F64", "X", 3],
    "shape": [[], [0], [2**62, 4], [-1], [1] * 70, 3],
    "data_offsets": [[0, 2**60], [5, 1], [0, 8], [], None],
}


def damage_header(folder: Path, draw: random.Random) -> str | None:
    """Damage the header of a safetensors file: its tensors, metadata, nesting or length."""
    files = files_of(folder, ".safetensors")
    if not files:
        return None
    file = draw.choice(files)
    header, rest = header_of(file)
    name = draw.choice([name for name in header if name != "__metadata__"])
    kind = draw.choice([*FIELDS, "name", "metadata", "any", "deep", "length"])
    if kind in FIELDS:
        header[name][kind] = draw.choice(FIELDS[kind])
    elif kind == "name":
        odd = ["", "x" * 5000, "\x1b[2J", name + ".", name.replace(".0.", ".99999999.")]
        header[draw.choice(odd)] = header.pop(name)
    elif kind == "metadata":
        header["__metadata__"] = draw.choice([{"lora_adapter_metadata": DEEP}, {"a": 1}, [], None])
    elif kind == "any":
        header = odd_json(header, draw)
    text = DEEP.encode() if kind == "deep" else json.dumps(header).encode()
    length = 2**63 if kind == "length" else len(text)
    file.write_bytes(length.to_bytes(8, "little") + text + rest)
    return f"header of {file.name}, {kind}"


def _change(state: dict[str, torch.Tensor], draw: random.Random) -> None:
    """Remove, rename or add a tensor, or give one another shape, dtype or number."""
    name = draw.choice(sorted(state))
    tensor, kind = state.pop(name), draw.randrange(6)
    if kind == 1:
        odd = [name.replace(".0.", ".7."), name + "x", "a" * 4000, "\n", ""]
        state[draw.choice(odd)] = tensor
    elif kind == 2:
        state |= {name: tensor, "model.diffusion_model.more": torch.zeros(3)}
    elif kind > 2:
        dtypes = [torch.bool, torch.int8, torch.complex64, torch.float8_e4m3fn, torch.float64]
        changed = [tensor.to(dtype) for dtype in dtypes]
        changed += [torch.zeros(0), torch.tensor(1.0), tensor.flatten(), tensor[None]]
        changed += [torch.cat([tensor, tensor]) if tensor.dim() else tensor, tensor * float("nan")]
        state[name] = draw.choice(changed).contiguous()


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
    file, kind = draw.choice(files), draw.choice(["call", "call", "huge", "zip"])
    outside = folder.parent.parent / "written"
    if kind == "zip":
        with zipfile.ZipFile(file) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        pickled = next(name for name in entries if name.endswith("data.pkl"))
        noise = bytearray(entries[pickled])
        noise[draw.randrange(len(noise))] = draw.randrange(256)
        entries[pickled] = draw.choice([bytes(20 << 20), noise, b"\x80\x02" + b"(" * 10**6])
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in entries.items():
                archive.writestr(name, content)
        return f"pickle of {file.name}, {kind}"
    content = torch.load(file, weights_only=True)
    state = content[min(content)]
    calls = [Call(os.system, f"touch {outside}"), Call(eval, f"open({str(outside)!r}, 'w')")]
    calls += [Call(torch.zeros, (2**40,)), Call(bytearray, 2**40), Call(exec, "while True: pass")]
    if kind == "call":
        state["x"] = draw.choice(calls)
    else:  # one number that stands for 2**40, or none at all
        huge = [torch.zeros(1).expand(2**20, 2**20), torch.empty(2**20, 2**20, device="meta")]
        state[min(state)] = draw.choice([*huge, state[min(state)].to_sparse()])
    if kind == "call" and draw.random() < 0.5:  # without torch's archive
        file.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, file)
    return f"pickle of {file.name}, {kind}"


def damage_names(folder: Path, draw: random.Random) -> str | None:
    """Names of files in index files and `latest` that lead elsewhere."""
    files = files_of(folder, "index.json", "latest")
    if not files:
        return None
    file = draw.choice(files)
    name = draw.choice(["../secret", "/etc/passwd", "..", "", "\0", "x" * 300, "a/../../b"])
    if file.suffix != ".json":
        file.write_text(name)
    else:
        content = json.loads(file.read_text())
        held = content.get("weight_map", content)
        held[draw.choice(sorted(held))] = name
        file.write_text(json.dumps(content))
    return f"{name[:20]!r} in {file.name}"


TO_WEIGHTS = (damage_json, damage_bytes, damage_kind, damage_header, damage_header, damage_tensors)
TO_WEIGHTS += (damage_tensors, damage_pickle, damage_names)
TO_RUNS = (*TO_WEIGHTS, damage_text, damage_text, damage_kind)
