"""Describes the cogfast that this process imports: `python -P probe.py ASKED.json FOUND.json`.

It runs beside a checkout and beside a wheel, and imports nothing but public names. ASKED has the names,
targets and families to describe, or examples to run in the current folder.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Words of annotations that are kept: all others are names of the package that may move.
_KNOWN = [
    "bool",
    "int",
    "float",
    "str",
    "bytes",
    "bytearray",
    "object",
    "type",
    "None",
    "list",
    "tuple",
    "dict",
    "set",
    "frozenset",
    "Any",
    "Callable",
    "Mapping",
    "MutableMapping",
    "Sequence",
    "Iterable",
    "Iterator",
    "Collection",
    "Literal",
    "Annotated",
    "Optional",
    "Union",
    "Path",
    "Tensor",
    "Module",
    "Parameter",
    "Generator",
    "torch",
    "nn",
    "device",
    "dtype",
    "Self",
]
_OUTSIDE = ("torch", "pydantic", "builtins", "typing", "abc", "enum", "collections")


def main() -> None:
    """Answer what ASKED.json asks."""
    source, target = map(Path, sys.argv[1:])
    asked = json.loads(source.read_text())
    found: dict[str, Any] = {}
    if "names" in asked:
        found["names"] = {name: describe(name) for name in asked["names"]}
        found["targets"] = {name: target_of(name) for name in asked["targets"]}
        found["version"] = {"cogfast": importlib.import_module("cogfast").__version__}
    if "families" in asked:
        found["models"] = _answered(lambda: models(asked["families"]))
        found["optimizers"], found["ops"] = _answered(optimizers), _answered(ops)
    if "examples" in asked:
        found["examples"] = {name: run_example(one) for name, one in asked["examples"].items()}
    place = Path(importlib.import_module("cogfast").__file__ or "").parent
    found["place"] = str(place)
    target.write_text(json.dumps(found))


def _answered(question: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the answer, or which public name is missing that the question is asked with."""
    try:
        return question()
    except (ImportError, AttributeError) as error:
        return {"all": {"missing": str(error)}}


# --- names ---


def find(dotted: str) -> Any:
    """Import what a dotted name stands for."""
    module, _, name = dotted.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return importlib.import_module(dotted)  # a module


def describe(dotted: str) -> dict[str, Any]:
    """Return kind, signature, bases and public attributes of a name."""
    try:
        found = find(dotted)
    except Exception as error:
        return {"missing": f"{type(error).__name__}: {error}"}
    if inspect.ismodule(found):
        return {"kind": "module"}
    if not inspect.isclass(found):
        kind = "function" if callable(found) else type(found).__name__
        return {"kind": kind, "signature": signature_of(found)}
    bases = [base for base in inspect.getmro(found)[1:] if base is not object]
    attributes = {}
    for name in dir(found):
        owner = next((b for b in inspect.getmro(found) if name in vars(b)), None)
        is_ours = owner is not None and not owner.__module__.startswith(_OUTSIDE)
        is_public = not name.startswith("_") or name == "_random"
        if is_ours and is_public:
            attributes[name] = _attribute(vars(owner)[name])
    fields = getattr(found, "__dataclass_fields__", None)
    fields = getattr(found, "model_fields", None) if fields is None else fields
    return {
        "kind": "protocol" if getattr(found, "_is_protocol", False) else "class",
        "bases": [base.__name__ for base in bases if base.__module__.startswith(_OUTSIDE)],
        "signature": signature_of(found),
        "attributes": attributes,
        "fields": sorted(fields or ()),
        "annotations": sorted(n for n in getattr(found, "__annotations__", {}) if n[0] != "_"),
    }


def _attribute(value: Any) -> str:
    if isinstance(value, property) or type(value).__name__ == "cached_property":
        return "property"
    if isinstance(value, staticmethod | classmethod):
        return f"{type(value).__name__} {signature_of(value.__func__)}"
    if inspect.isfunction(value):
        return f"method {signature_of(value)}"
    if inspect.isclass(value):
        return f"class {value.__name__}"
    return "value"


def signature_of(call: Callable) -> str:
    """Return the signature as text, with names of the package's own types left out."""
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return "?"
    shown = []
    for parameter in signature.parameters.values():
        annotation = parameter.annotation
        if annotation is not parameter.empty:
            annotation = _annotation(annotation)
        default = parameter.default
        if default is not parameter.empty and not _is_plain(default):
            default = _Shown(type(default).__name__)
        shown.append(parameter.replace(annotation=parameter.empty, default=default))
        shown[-1] = f"{shown[-1]}{': ' + annotation if isinstance(annotation, str) else ''}"
    return f"({', '.join(shown)})"


class _Shown:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return f"<{self.text}>"


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _annotation(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    if "Annotated" in text or "FieldInfo" in text:
        return "Annotated"
    text = text.replace("pathlib._local.", "pathlib.")  # Python 3.13
    # A quoted word is a value, as those of Literal are.
    parts = re.compile(r"'[^']*'|[A-Za-z_][\w.]*")
    keep = lambda word: word[0] == "'" or _is_known(word)
    return parts.sub(lambda match: match[0] if keep(match[0]) else "_", text)


def _is_known(word: str) -> bool:
    return word.rpartition(".")[2] in _KNOWN or word.partition(".")[0] in ("torch", "typing")


def target_of(path: str) -> dict[str, Any]:
    """Return what `target: PATH` stands for in a configuration, and the params that it takes."""
    from cogfast.config import resolve

    try:
        found, _ = resolve({"target": path, "params": {}})
    except Exception as error:
        return {"refused": str(error)}
    return {"name": getattr(found, "__name__", "?"), "signature": signature_of(found)}


# --- models, optimizers, ops ---


def models(families: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """{family and variant: its parameters and buffers, and the keys of SAT's state dict}."""
    import torch

    from cogfast.config import load_config
    from cogfast.model.transformer import build_transformer
    from cogfast.model.weights.sat import to_sat_state_dict

    found = {}
    for name, one in families.items():
        config = load_config(one["files"], one["words"])
        with torch.device("meta"):
            network = build_transformer(config.model)
        shapes = {
            key: [list(value.shape), str(value.dtype), value.requires_grad]
            for key, value in network.named_parameters()
        }
        buffers = {key: list(value.shape) for key, value in network.named_buffers()}
        sat = to_sat_state_dict(network)
        found[name] = {
            "parameters": shapes,
            "buffers": buffers,
            "order": list(shapes),
            "sat": {key: list(value.shape) for key, value in sat.items()},
        }
    return found


def optimizers() -> dict[str, Any]:
    """{optimizer: keys of its state dict, after two steps}."""
    import torch

    found = {}
    for path, options in (
        ("cogfast.kernels.fused_ema_adam.FusedEmaAdam", {}),
        ("cogfast.kernels.fused_ema_adam.FusedEmaAdam", {"has_8bit_moments": True}),
        ("cogfast.distributed.optimizers.Prodigy", {}),
        ("cogfast.distributed.optimizers.Muon", {}),
    ):
        torch.manual_seed(0)
        network = torch.nn.Linear(16, 8)
        optimizer = find(path)(network.parameters(), lr=1e-3)
        for name, value in options.items():
            setattr(optimizer, name, value)
        for _ in range(2):
            network(torch.ones(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()
        found[" ".join([path, *options])] = {
            "state": {str(i): _shapes(one) for i, one in state["state"].items()},
            "groups": [sorted(group) for group in state["param_groups"]],
        }
    return found


def _shapes(state: dict) -> dict[str, str]:
    return {
        key: f"{list(value.shape)} {value.dtype}" if hasattr(value, "shape") else repr(value)
        for key, value in state.items()
    }


def ops() -> dict[str, str]:
    """{name: schema} of the ops that importing the public names registers."""
    import torch

    return {
        str(schema.name): str(schema)
        for schema in torch._C._jit_get_all_schemas()
        if str(schema.name).startswith("cogfast::")
    }


# --- examples ---


def run_example(one: dict[str, Any]) -> dict[str, Any]:
    """Run an example of the documentation as it is written; see what it leaves."""
    namespace: dict[str, Any] = {"__name__": one.get("run_as", "example")}
    sys.argv = ["example.py", *one.get("words", ())]
    if "file" in one:  # a module that a configuration names
        Path(one["file"]).write_text(one["code"])
        sys.path.insert(0, os.getcwd())
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            for code in one.get("before", ()):
                exec(code, namespace)
            exec(one["code"], namespace)
            if "after" in one:
                exec(one["after"], namespace)
        status: object = 0
    except SystemExit as end:
        status = end.code
    except BaseException:
        return {"error": traceback.format_exc(limit=-1), "shown": shown.getvalue()[-2000:]}
    if status:
        return {"status": status, "shown": shown.getvalue()[-2000:]}
    found: dict[str, Any] = {"status": status}
    if "run" in one:
        found["losses"] = _losses(Path(one["run"]))
    else:
        found["shapes"] = {
            name: list(value.shape) for name, value in namespace.items() if hasattr(value, "shape")
        }
    return found


def _losses(folder: Path) -> list[float]:
    (file,) = folder.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


if __name__ == "__main__":
    main()
