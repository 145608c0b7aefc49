"""Declares configuration keys in the rooms that read them: type, range, default and meaning.

A room's `keys.py` has classes of Keys. `args` is the union of those with the section args, in the order
that `After` gives (`ordered`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any, ClassVar, ParamSpec, Self, TypeVar

from cogfast.core.values import KeyProblem, Model, Range, show

Count = Annotated[int, Range(1, 10**9)]  # steps, epochs, batches
Batch = Annotated[int, Range(1, 10**5)]
Size = Annotated[int, Range(1, 2**16)]  # rows, columns, frames
Share = Annotated[float, Range(0, 1)]
SECTIONS = ("model", "data", "args", "deepspeed")  # in the order in which they are printed
# Origins of values that no file has
COMMAND_LINE = "command line"
DEFAULT = "default"
# {dotted key: (value, its origin; None: the origins stay)}
Settings = Mapping[str, tuple[Any, str | None]]
Given = dict[str, tuple[Any, str]]  # by options and files, each of which has an origin


@dataclass(frozen=True, slots=True)
class After:
    """Annotated[..., After("seed")]: the key stands behind that one in lists. Without it a key follows the
    one that its class declares before it."""

    key: str


class Keys(Model):
    """Keys of one section. The string below a field is its meaning in docs/options.md, in `--help-all` and in
    the JSON schema that editors read."""

    section: ClassVar[str] = "args"

    @classmethod
    def key(cls, name: str) -> str:
        """Return the dotted key of a field."""
        assert name in cls.model_fields, name
        return f"{cls.section}.{name}"

    def problem(self, name: str, text: str) -> KeyProblem:
        """Return the error that `text` describes of the key `name`. The caller raises it."""
        return KeyProblem(self.key(name), text)

    def refusal(self, name: str, text: str) -> KeyProblem:
        """Return the error `args.name=value`, followed by `text`, of the key `name`."""
        value = getattr(self, name)
        shown = value if isinstance(value, str) else show(value)
        return self.problem(name, f"{self.key(name)}={shown}{text}")

    def changed(self, **values: Any) -> Self:
        """Return the keys with these values, which are not checked."""
        return self.model_copy(update=values)


K = TypeVar("K", bound=Keys)
T = TypeVar("T")
P = ParamSpec("P")


def ordered(kind: type[K]) -> type[K]:
    """Put the keys of a class with several bases into the order that `After` gives."""
    following: dict[str | None, list[str]] = {}
    before: dict[type, str] = {}
    owners: dict[str, type] = {}
    for base in reversed(kind.__mro__):
        for name in base.__dict__.get("__annotations__", ()):
            if name not in kind.model_fields:
                continue
            assert owners.setdefault(name, base) is base, f"{name}: {owners[name]} and {base}"
            marks = [m.key for m in kind.model_fields[name].metadata if isinstance(m, After)]
            following.setdefault(marks[0] if marks else before.get(base), []).append(name)
            before[base] = name

    def names(behind: str | None) -> Iterator[str]:
        for name in following.get(behind, ()):
            yield name
            yield from names(name)

    kind.__pydantic_fields__ = {name: kind.model_fields[name] for name in names(None)}
    kind.model_rebuild(force=True)
    return kind


@contextmanager
def with_origins(origins: Mapping[str, str]) -> Iterator[None]:
    """Put the file or the option that set the key in front of a KeyProblem."""
    try:
        yield
    except KeyProblem as problem:
        raise ValueError(f"{find_origin(origins, problem.key)}: {problem}") from problem


def names_origins(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function of a configuration, or of what has its `origins`, `with_origins`."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        config: Any = args[0]
        with with_origins(config.origins):
            return function(*args, **kwargs)

    return call


def find_origin(origins: Mapping[str, str], key: str) -> str:
    """Return the origin of the value of `key`. An item of a list has the origin of the list."""
    path = key.replace("[", ".").replace("]", "")
    if key in origins or path in origins:  # a key may itself have brackets
        return origins.get(key) or origins[path]
    # A mapping has no origin of its own: use that of one of its values, if possible not a default.
    below = [origin for name, origin in origins.items() if name.startswith(path + ".")]
    if below:
        return next((origin for origin in reversed(below) if origin != DEFAULT), DEFAULT)
    while path := path.rpartition(".")[0]:
        if path in origins:
            return origins[path]
    return DEFAULT


def level(origin: str) -> int:
    """Return 2 for key=value words, 1 for options such as --lora, 0 for files and defaults.

    Where two keys set the same, the one of the higher level counts.
    """
    return 2 if origin == COMMAND_LINE else int(origin.startswith("--"))
