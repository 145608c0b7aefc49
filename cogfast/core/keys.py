"""What a room declares of the configuration keys that it reads: type, range, default and meaning.

A room's `keys.py` has classes of Keys. `args` is the union of those with the section args, in the order
that `After` gives (`ordered`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, TypeVar

from cogfast.core.values import KeyProblem, Model, Range

__all__ = ["After", "Batch", "Count", "Keys", "Model", "Range", "Share", "Size", "ordered"]

Count = Annotated[int, Range(1, 10**9)]  # steps, epochs, batches
Batch = Annotated[int, Range(1, 10**5)]
Size = Annotated[int, Range(1, 2**16)]  # rows, columns, frames
Share = Annotated[float, Range(0, 1)]


@dataclass(frozen=True, slots=True)
class After:
    """Annotated[..., After("seed")]: the key stands behind that one in lists. Without it a key follows the
    one that its class declares before it."""

    key: str


class Keys(Model):
    """Keys of one section. The string below a field is its meaning in docs/options.md, in `--help-all` and in
    the JSON schema that editors read."""

    section: ClassVar[str] = "args"

    def problem(self, name: str, text: str) -> KeyProblem:
        """Return the error that `text` describes of the key `name`. The caller raises it."""
        return KeyProblem(f"{self.section}.{name}", text)

    def changed(self, **values: Any) -> Self:
        """Return the keys with these values, which are not checked."""
        return self.model_copy(update=values)


K = TypeVar("K", bound=Keys)


def ordered(kind: type[K]) -> type[K]:
    """Put the keys of a class with several bases into the order that `After` gives."""
    following: dict[str | None, list[str]] = {}
    before: dict[type, str] = {}
    for base in reversed(kind.__mro__):
        for name in base.__dict__.get("__annotations__", ()):
            if name not in kind.model_fields:
                continue
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
