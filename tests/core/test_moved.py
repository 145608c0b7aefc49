"""Public names whose files have moved: the old names still work, and the package itself uses the new ones."""

import ast
import importlib
import inspect
from types import SimpleNamespace

import pytest

from cogfast.config.components import PLACES, import_target
from cogfast.moved import MOVED, find, public_module
from tests.core import structure
from tests.core.structure import nodes_of_files

OLD_MODULES = sorted({old.rpartition(".")[0] for old in MOVED})


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_the_new_one(old: str) -> None:
    (module, _, name), (home, _, new_name) = old.rpartition("."), MOVED[old].rpartition(".")
    found = getattr(importlib.import_module(module), name)
    here = getattr(importlib.import_module(home), new_name)
    assert found is here is find(old)
    assert found.__module__ == home  # it is defined there, not passed on once more
    assert inspect.signature(found) == inspect.signature(here)
    assert public_module(found) == module


@pytest.mark.parametrize("module", OLD_MODULES)
def test_an_old_module_has_its_public_names(module: str) -> None:
    """To type checkers, to `dir` and to `import *`, too."""
    rows = {old: new for old, new in MOVED.items() if old.rpartition(".")[0] == module}
    names = [old.rpartition(".")[2] for old in rows]
    found = importlib.import_module(module)
    assert sorted(dir(found)) == sorted(names) == sorted(found.__all__)
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'nothing'"):
        _ = found.nothing
    typed = [
        f"{node.module}.{alias.name}"
        for branch in nodes_of_files()[structure.MODULES[module]]
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert sorted(typed) == sorted(rows.values())


def test_targets_keep_their_public_names() -> None:
    """Names in configurations and in cache keys are independent of where files lie."""
    for place in PLACES.values():
        for path in place.paths:
            found = import_target(path, "a.key")
            if path.startswith("cogfast."):
                assert f"{public_module(found)}.{found.__qualname__}" == path
    user = SimpleNamespace(__module__="mine", __qualname__="Encoder")
    assert public_module(user) == "mine"


def test_nothing_in_the_package_uses_an_old_name() -> None:
    used = []
    for path, nodes in nodes_of_files().items():
        for node in nodes:
            names: list[str] = []
            if isinstance(node, ast.ImportFrom):
                names = [str(node.module), *(f"{node.module}.{a.name}" for a in node.names)]
            elif isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            used += [f"{path}:{node.lineno}: {name}" for name in names if name in OLD_MODULES]
    assert not used
