"""Counts what the structure of the package costs, from its syntax: what test_structure.py limits.

A file is core unless it is an extension (a folder of cogfast/extensions/, and cogfast/finetune/) or of the
command line. An import counts wherever it stands: in a function, by import_module, as a string that names a
module.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

from cogfast.moved import MOVED

PACKAGE = Path(__file__).resolve().parents[2] / "cogfast"
FILES = {
    p.relative_to(PACKAGE).as_posix(): p.read_text(encoding="utf-8")
    for p in sorted(PACKAGE.rglob("*.py"))
}
MODULES = {
    ".".join(("cogfast", *Path(name).with_suffix("").parts)).removesuffix(".__init__"): name
    for name in FILES
}
MAY_NAME = ("extensions/table.py", "moved.py")  # the tables of extensions and of old names
# Files that import modules by a computed name: of the user, of their own folder, of a table, of torch.
COMPUTED = {
    "__init__.py",
    "cli/option_table.py",
    "config/__init__.py",
    "config/components.py",
    "extensions/doctor/doctor.py",
    "extensions/table.py",
    "finetune/__init__.py",
    "kernels/gpu/flash_attn.py",
    "kernels/torch_library.py",
    "moved.py",
}
_MERGED = re.compile(r"\b(Config|Run)\b")
_KEY = re.compile(r"(args|model|data|deepspeed)(\.[a-z_0-9]+)+")
_FILE = re.compile(r".*\.(safetensors|json|yaml|bin|pt|index)")
_PARSE = re.compile(r"\b[A-Z]\w*(?:Arguments|Keys|Params|Section)\.from_config\(")


def part_of(name: str) -> str:
    """Return "core", "cli", or the name of an extension."""
    parts = name.split("/")
    if parts[0] == "extensions" and parts[1] != "table.py":
        return parts[1] if len(parts) > 2 else "extensions"
    if parts[0] == "finetune":
        return "finetune"
    return "cli" if parts[0] in ("cli", "__main__.py") else "core"


@cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(text) for name, text in FILES.items()}


@cache
def nodes_of_files() -> dict[str, list[ast.AST]]:
    return {name: list(ast.walk(tree)) for name, tree in trees().items()}


@cache
def imports(name: str) -> frozenset[str]:
    """Return the files that a file imports, those for type checkers alone left out."""
    hidden = {
        id(inner)
        for node in nodes_of_files()[name]
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for branch in node.body
        for inner in ast.walk(branch)
    }
    found: list[str] = []
    for node in (n for n in nodes_of_files()[name] if id(n) not in hidden):
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
        elif isinstance(node, ast.Import):
            found += [a.name for a in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found += [a.value for a in node.args if isinstance(a, ast.Constant)]
    return frozenset(MODULES[n] for n in found if n in MODULES and n != "cogfast") - {name}


def named(name: str) -> set[str]:
    """Return the files that a file imports, or names in a string."""
    found = set(imports(name))
    for node in nodes_of_files()[name]:
        word = node.value if isinstance(node, ast.Constant) else None
        if isinstance(word, str) and word.startswith("cogfast.") and " " not in word:
            word = MOVED.get(word, word)
            while word and word not in MODULES:
                word = word.rpartition(".")[0]
            if word and word != "cogfast":
                found.add(MODULES[word])
    return found - {name}


def hidden_imports() -> list[str]:
    """Return the imports that the counts cannot see: of a computed or relative name, of a renamed
    `import_module`, of a lazy name of the package itself."""
    found = []
    for name, nodes in nodes_of_files().items():
        for node in nodes:
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import | ast.ImportFrom)
                else []
            )
            is_hidden = isinstance(node, ast.Import) and "cogfast" in names
            if isinstance(node, ast.ImportFrom):
                renamed = [a for a in node.names if a.name == "import_module" and a.asname]
                lazy = [n for n in names if f"cogfast.{n}" not in MODULES and n != "__version__"]
                is_hidden = bool(node.level or renamed or (node.module == "cogfast" and lazy))
            elif isinstance(node, ast.Call):
                call, words = (
                    ast.unparse(node.func).rpartition(".")[2],
                    ", ".join(map(ast.unparse, node.args)),
                )
                is_full = bool(re.fullmatch(r"'\w[\w.]*'", words)) and not node.keywords
                is_hidden = call == "import_module" and not is_full and name not in COMPUTED
                is_hidden |= call == "__import__"
            if is_hidden:
                found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    return found


def remaining() -> dict[str, str]:
    """Return {file of the core: modules of extensions that it imports, in one line}."""
    found = {}
    for name in FILES:
        if part_of(name) == "core" and name not in MAY_NAME:
            others = sorted(n for n in named(name) if part_of(n) not in ("core", "cli"))
            if others:
                words = (n.removesuffix(".py").removeprefix("extensions/") for n in others)
                found[name] = " ".join(word.replace("/", ".") for word in words)
    return found


def circles() -> int:
    """Return the number of sets of files that import each other."""
    below: dict[str, set[str]] = {}
    for name in FILES:
        todo, below[name] = list(imports(name)), set()
        while todo:
            other = todo.pop()
            if other not in below[name]:
                below[name].add(other)
                todo += imports(other)
    return len({frozenset(o for o in below[n] if n in below[o]) for n in FILES if n in below[n]})


def attributes(node: ast.ClassDef) -> int:
    """Return the number of attributes of a class that sets some itself; a set of keys has none of those."""
    stores = {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Store)
        and isinstance(inner.value, ast.Name)
        and inner.value.id == "self"
    }
    fields = {ast.unparse(n.target) for n in node.body if isinstance(n, ast.AnnAssign)}
    return len(stores | fields) if stores else 0


def takes(node: ast.AST) -> bool:
    """Return whether a function or a field takes a merged configuration."""
    annotations: list[ast.expr | None] = []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        annotations = [argument.annotation for argument in arguments]
    elif isinstance(node, ast.AnnAssign):
        annotations = [node.annotation]
    return any(a is not None and _MERGED.search(ast.unparse(a)) for a in annotations)


def is_key(node: ast.AST) -> bool:
    """Return whether a node is a string that is a dotted key of the configuration."""
    word = node.value if isinstance(node, ast.Constant) else None
    return isinstance(word, str) and bool(_KEY.fullmatch(word)) and not _FILE.fullmatch(word)


def figures() -> dict[str, int]:
    """Return all counts by name."""
    lines = {name: text.count("\n") for name, text in FILES.items()}
    core = [name for name in FILES if part_of(name) == "core"]
    tables = re.compile(r"config/sat_(network|classes|unused)\.py|door/sat_.*")
    own = sum(lines[n] for n in core if "gpu" not in n.split("/") and not tables.fullmatch(n))
    room = {name: name.split("/")[0] for name in FILES}
    pairs = Counter(
        (room[a], room[b])
        for a in FILES
        if a not in MAY_NAME
        for b in imports(a)
        if b not in MAY_NAME
    )
    below = [
        n for n in FILES if room[n] not in ("config", "door", "cli", "finetune", "__main__.py")
    ]
    stores = {n for n in FILES if part_of(n) == "stores"}
    functions = [
        (node.end_lineno or 0) - node.lineno + 1
        for name in FILES
        if "gpu" not in name.split("/")
        for node in nodes_of_files()[name]
        if isinstance(node, ast.FunctionDef)
    ]
    classes = [n for name in FILES for n in nodes_of_files()[name] if isinstance(n, ast.ClassDef)]
    left = remaining()
    return {
        "lines of the package": sum(lines.values()),
        "lines of the core": own,
        "the core's share in percent": 100 * own // sum(lines.values()),
        "imports of extensions by the core": sum(len(words.split()) for words in left.values()),
        "files of the core that import extensions": len(left),
        "rooms that import each other": sum(a < b and (b, a) in pairs for a, b in pairs),
        "circles of files": circles(),
        "functions and fields that take a merged configuration": sum(
            takes(n) for f in below if not f.endswith("phases.py") for n in nodes_of_files()[f]
        ),
        "dotted keys": sum(is_key(n) for f in below for n in nodes_of_files()[f]),
        "sections that are parsed again": sum(len(_PARSE.findall(FILES[f])) for f in below),
        "files that import stores": sum(
            bool(imports(n) & stores) for n in FILES if n not in stores
        ),
        "lines of trainer.py": lines["train/trainer.py"],
        "imports of trainer.py": len(imports("train/trainer.py")),
        "lines of the longest function": max(functions),
        "attributes of a class": max(map(attributes, classes)),
    }
