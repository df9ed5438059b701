"""Reads pickles without executing them: nothing is imported, called or changed.

It supports only the opcodes that Python's pickler writes for plain values and objects. Objects that a pickle would make
are returned as records, which other code checks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pickle import decode_long
from typing import Any

from lightning_d9d.errors import StateError

_MAX_DEPTH = 200
_MAX_REPEATED = 100  # values of a job share lists and strings, but not as often as this
_MAX_EXTENT = 10**6
_MAX_KEY_ITEMS = 64
_MAX_KEY = 2**64
_STOP = ord(".")
_OLD_NAMES = {"__builtin__": "builtins", "copy_reg": "copyreg"}


class Name(str):
    """The full name of a class, function or constant that a pickle asks for."""

    __slots__ = ()


@dataclass(eq=False, slots=True)
class Made:
    """An object that a pickle would make."""

    by: Name
    """The class or function that is called."""
    args: tuple[Any, ...]
    state: Any = None
    """State that the object is given afterwards."""
    items: dict[Any, Any] | None = None
    """Items that it holds, if it is a dict of another class."""


@dataclass(eq=False, slots=True)
class Persistent:
    """An object stored outside of a pickle, such as the numbers of a tensor."""

    id: Any


def read_pickle(
    content: bytes, check: Callable[[Name | Made | Persistent], None] = lambda _: None, start: int = 0
) -> tuple[Any, int]:
    """Read a pickle; return its content and where it ends.

    Args:
        content: Buffer that holds the pickle.
        check: Function called with everything that the pickle asks for; it raises a `StateError` to refuse it.
        start: Where the pickle begins.

    Raises:
        StateError: The pickle is damaged, uses other opcodes, or is built to need far more time or memory than its
            length.
    """
    reader = _Reader(content, start, check)
    try:
        return reader.read(), reader.at
    except StateError:
        raise
    except Exception as error:
        raise StateError(
            f"is not a pickle of plain values (at byte {reader.at}: {type(error).__name__} {error})"
        ) from error


def check_containers(value: Any, length: int) -> None:
    """Refuse containers that are nested too deeply, or take far longer to traverse than the file's size suggests.

    Args:
        value: Value that holds them.
        length: Length of the file in bytes.

    Raises:
        StateError: Containers are nested too deeply, one holds itself, or they are repeated too often.
    """
    depths: dict[int, int] = {}
    extents: dict[int, int] = {}
    path = [(value, iter(_members_of(value)))]
    open_ids = {id(value)}
    while path:
        container, parts = path[-1]
        for part in parts:
            inner = _members_of(part)
            if not inner or id(part) in depths:
                continue
            if id(part) in open_ids or len(path) > _MAX_DEPTH:
                raise StateError(f"holds containers nested more than {_MAX_DEPTH} deep")
            open_ids.add(id(part))
            path.append((part, iter(inner)))
            break
        else:
            members = _members_of(container)
            depth = 1 + max((depths.get(id(part), 0) for part in members), default=0)
            if depth > _MAX_DEPTH:
                raise StateError(f"holds containers nested more than {_MAX_DEPTH} deep")
            extent = 1 + sum(extents.get(id(part)) or _extent(part) for part in members)
            extent += sum(map(_extent, container)) if type(container) is dict else 0
            if extent > _MAX_EXTENT + _MAX_REPEATED * length:
                raise StateError(f"repeats the same values, more than {_MAX_REPEATED} times in all")
            depths[id(container)], extents[id(container)] = depth, extent
            open_ids.remove(id(container))
            path.pop()


def _extent(part: Any) -> int:
    return 1 + len(part) if type(part) in (str, bytes) else 1


def _members_of(value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        return value.values()
    if kind is list or kind is tuple:
        return value
    return (value.args, value.state, value.items) if kind is Made else ()


def check_key(key: Any) -> None:
    """Refuse keys of dicts and members of sets whose hashes take long or are made equal on purpose.

    Raises:
        StateError: The key has such a hash, or cannot be a key.
    """
    parts: tuple[Any, ...] = key if type(key) is tuple and len(key) <= _MAX_KEY_ITEMS else (key,)
    for part in parts:
        kind = type(part)
        if kind is tuple or kind.__hash__ is None or (kind is int and not -_MAX_KEY < part < _MAX_KEY):
            raise StateError(f"has a key of kind {kind.__name__}, which checkpoints do not need")


class _Reader:
    """The pickle machine: a stack, the stacks below marks, and a memo."""

    def __init__(self, content: bytes, at: int, check: Callable[[Name | Made | Persistent], None]) -> None:
        self.content = content
        self.at = at
        self.check = check
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo: list[Any] = []

    def read(self) -> Any:
        steps, content = _STEPS, self.content
        while (opcode := content[self.at]) != _STOP:
            self.at += 1
            steps[opcode](self)
        self.at += 1
        return self.stack.pop()

    # Effects of the opcodes

    def take(self, length: int) -> bytes:
        taken = self.content[self.at : self.at + length]
        if len(taken) != length:
            raise EOFError("it ends too early")
        self.at += length
        return taken

    def number(self, form: struct.Struct) -> Any:
        (number,) = form.unpack_from(self.content, self.at)
        self.at += form.size
        return number

    def small_number(self) -> None:
        """Read a number of one byte: a fast form of `number`, for most content of long pickles."""
        self.stack.append(self.content[self.at])
        self.at += 1

    def line(self) -> str:
        end = self.content.index(b"\n", self.at)
        line, self.at = self.content[self.at : end], end + 1
        return line.decode()

    def marked(self) -> list[Any]:
        """Return the items above the last mark, which is removed."""
        items, self.stack = self.stack, self.outer.pop()
        return items

    def marked_as_tuple(self) -> None:
        items = tuple(self.marked())
        self.stack.append(items)

    def mark(self) -> None:
        self.outer.append(self.stack)
        self.stack = []

    def put(self, index: int) -> None:
        if index == len(self.memo):
            self.memo.append(self.stack[-1])
        else:
            self.memo[index] = self.stack[-1]

    def name(self, module: str, name: str) -> None:
        asked = Name(f"{_OLD_NAMES.get(module, module)}.{name}")
        self.check(asked)
        self.stack.append(asked)

    def global_of_lines(self) -> None:
        self.name(self.line(), self.line())

    def global_of_stack(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise TypeError("a name is not text")
        self.name(module, name)

    def make(self) -> None:
        args, by = self.stack.pop(), self.stack[-1]
        if type(by) is not Name or type(args) is not tuple:
            raise TypeError("the called object is not a name")
        made = Made(by, args)
        self.check(made)
        self.stack[-1] = made

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is not Made or target.state is not None:
            raise StateError("changes something that is not a new object")
        target.state = state
        self.check(target)

    def persistent(self) -> None:
        found = Persistent(self.stack[-1])
        self.check(found)
        self.stack[-1] = found

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise TypeError("the target of an append is not a list")
        target += items

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is Made and target.by in _DICTS:
            target.items = target = {} if target.items is None else target.items
        if type(target) is not dict or len(items) % 2:
            raise TypeError("the target of items is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str:
                check_key(key)
            target[key] = value

    def top_as_tuple(self, length: int) -> None:
        if len(self.stack) < length:
            raise IndexError("the stack is empty")
        self.stack[-length:] = [tuple(self.stack[-length:])]


_DICTS = ("collections.OrderedDict", "collections.Counter")
_BYTE, _SHORT, _INT, _UNSIGNED, _FLOAT = (struct.Struct(form) for form in ("B", "<H", "<i", "<I", ">d"))
_STEPS: dict[int, Callable[[_Reader], object]] = {
    ord(opcode): step
    for opcode, step in {
        "\x80": lambda r: r.take(1),  # the protocol
        "\x95": lambda r: r.take(8),  # the length of a frame
        "(": _Reader.mark,
        "N": lambda r: r.stack.append(None),
        "\x88": lambda r: r.stack.append(True),
        "\x89": lambda r: r.stack.append(False),
        "K": _Reader.small_number,
        "M": lambda r: r.stack.append(r.number(_SHORT)),
        "J": lambda r: r.stack.append(r.number(_INT)),
        "\x8a": lambda r: r.stack.append(decode_long(r.take(r.number(_BYTE)))),
        "G": lambda r: r.stack.append(r.number(_FLOAT)),
        "\x8c": lambda r: r.stack.append(str(r.take(r.number(_BYTE)), "utf-8", "surrogatepass")),
        "X": lambda r: r.stack.append(str(r.take(r.number(_UNSIGNED)), "utf-8", "surrogatepass")),
        "U": lambda r: r.stack.append(r.take(r.number(_BYTE))),
        ")": lambda r: r.stack.append(()),
        "]": lambda r: r.stack.append([]),
        "}": lambda r: r.stack.append({}),
        "t": _Reader.marked_as_tuple,
        "\x85": lambda r: r.top_as_tuple(1),
        "\x86": lambda r: r.top_as_tuple(2),
        "\x87": lambda r: r.top_as_tuple(3),
        "a": lambda r: r.append([r.stack.pop()]),
        "e": lambda r: r.append(r.marked()),
        "s": lambda r: r.set_items([r.stack.pop(-2), r.stack.pop()]),
        "u": lambda r: r.set_items(r.marked()),
        "\x94": lambda r: r.put(len(r.memo)),
        "q": lambda r: r.put(r.number(_BYTE)),
        "r": lambda r: r.put(r.number(_UNSIGNED)),
        "h": lambda r: r.stack.append(r.memo[r.number(_BYTE)]),
        "j": lambda r: r.stack.append(r.memo[r.number(_UNSIGNED)]),
        "c": _Reader.global_of_lines,
        "\x93": _Reader.global_of_stack,
        "R": _Reader.make,
        "\x81": _Reader.make,
        "b": _Reader.build,
        "Q": _Reader.persistent,
    }.items()
}
