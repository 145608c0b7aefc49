"""Looks through a pickle before it is read, and refuses work that a file of tensors does not need.

torch's unpickler for weights runs no foreign code, but a pickle of a hundred bytes can keep it busy
for ever: a tuple of two tuples of two tuples and so on, each stored once, is hashed as if it were
written out. The scan follows the opcodes, makes no objects, and adds up the sizes.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass, replace

from cogfast.schema.json_files import brief

_MOST_OPCODES = 4_000_000  # a model has about 40 for each tensor
_MOST_WORK = 1 << 25  # elements and bytes of all tuples and arguments, written out
# Calls that keep a mapping. Others would read through theirs, which may be as long as the file.
_KEEP_MAPPINGS = ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")
_CALLS_ANYTHING = "_rebuild_from_type_v2"
_COLLECTIONS = ("OrderedDict", "Counter", "set", "bytearray")
_ALLOCATE = ("_reconstruct", "ndarray", "bytearray")  # as many bytes as their argument says
_MOST_ALLOCATED = 1 << 20
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_INTEGERS = ("BININT", "BININT1", "BININT2", "LONG1")
_VALUES = ("NONE", "NEWFALSE", "NEWTRUE", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING", *_INTEGERS)


class PickleError(Exception):
    """Raised with a few words for what a pickle asks for and a file of tensors does not."""


@dataclass(frozen=True, slots=True)
class _Item:
    """An entry of the unpickler's stack.

    kind: "value", "tuple", "collection" (which may still grow) or "global". name: a global's name.
    size: elements and bytes, including those of a tuple's tuples. largest: the largest of its
    integers. has_collections: whether a tuple has one, at any depth. is_shared: from the memo.
    """

    kind: str
    size: int = 1
    name: str = ""
    largest: int = 0
    has_collections: bool = False
    is_shared: bool = False


def check_pickle(data: bytes) -> None:
    """PickleError for work out of proportion, and for opcodes and calls that torch.save of tensors
    does not write; ValueError, IndexError or KeyError for damaged bytes."""
    scan = _Scan()
    for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if number == _MOST_OPCODES:
            raise PickleError(f"it has more than {_MOST_OPCODES} opcodes")
        scan.follow(opcode.name, argument)


class _Scan:
    """The unpickler's stack and memo, with descriptions in place of objects."""

    def __init__(self) -> None:
        self.stack: list[_Item] = []
        self.below: list[list[_Item]] = []  # the stacks below marks
        self.memo: dict[object, _Item] = {}
        self.work = 0

    def follow(self, opcode: str, argument: object) -> None:
        stack = self.stack
        if opcode in _VALUES:
            size = len(argument) if isinstance(argument, str | bytes) else 1
            number = argument if isinstance(argument, int) else 0
            stack.append(_Item("value", size, largest=number))
        elif opcode in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = replace(stack[-1], is_shared=True)
        elif opcode in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        # A collection can still grow after it is stored elsewhere, so its size is not known here.
        elif opcode in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_SET"):
            stack.append(_Item("collection"))
        elif opcode == "MARK":
            self.below.append(stack)
            self.stack = []
        elif opcode == "TUPLE":
            self._add_tuple(self._pop_mark())
        elif opcode in _TUPLES:
            self._add_tuple(self._pop(_TUPLES[opcode]))
        elif opcode in ("SETITEM", "SETITEMS"):
            items = self._pop(2) if opcode == "SETITEM" else self._pop_mark()
            for key in items[::2]:
                self._count(key.size)  # it is hashed
        elif opcode in ("APPEND", "APPENDS"):
            self._pop(1) if opcode == "APPEND" else self._pop_mark()
        # torch.save refers to the bytes of a tensor by a persistent id, which is a tuple.
        elif opcode == "BINPERSID":
            self._count(self._pop(1)[0].size)
            self.stack.append(_Item("value"))
        # torch permits a list of functions; this one would call any of the others.
        elif opcode == "GLOBAL":
            name = str(argument).rpartition(" ")[2]
            if name == _CALLS_ANYTHING:
                raise PickleError(f"it calls {name}")
            stack.append(_Item("global", name=name))
        elif opcode in ("REDUCE", "NEWOBJ"):
            self._call(*self._pop(2))
        elif opcode == "BUILD":
            self._build(self._pop(1)[0])
        elif opcode not in ("PROTO", "STOP"):
            raise PickleError(f"it has opcode {opcode}")

    def _count(self, size: int) -> None:
        self.work += size
        if self.work > _MOST_WORK:
            raise PickleError("its tuples refer to one another so often that they never end")

    def _pop(self, number: int) -> list[_Item]:
        if number > len(self.stack):
            raise IndexError("the stack is empty")
        items = self.stack[len(self.stack) - number :]
        del self.stack[len(self.stack) - number :]
        return items

    def _pop_mark(self) -> list[_Item]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def _add_tuple(self, items: list[_Item]) -> None:
        size = 1 + sum(item.size for item in items)
        self._count(size)
        largest = max((item.largest for item in items), default=0)
        has_collections = any(i.kind == "collection" or i.has_collections for i in items)
        self.stack.append(_Item("tuple", size, "", largest, has_collections))

    def _call(self, function: _Item, arguments: _Item) -> None:
        if function.kind != "global" or arguments.kind != "tuple":
            raise PickleError("it calls something that is not a function by name")
        if arguments.has_collections and function.name not in _KEEP_MAPPINGS:
            raise PickleError(f"it calls {brief(function.name)} with a list or mapping")
        if arguments.largest > _MOST_ALLOCATED and function.name in _ALLOCATE:
            raise PickleError(f"{brief(function.name)} of {arguments.largest} bytes")
        self._count(arguments.size)
        kind = "collection" if function.name in _COLLECTIONS else "value"
        self.stack.append(_Item(kind, arguments.size))

    def _build(self, state: _Item) -> None:
        """The object that gets a state; a shared one could be copied over and over."""
        if state.has_collections or (state.kind == "collection" and state.is_shared):
            raise PickleError("the state of an object in it is shared or nested")
        self._count(state.size)
