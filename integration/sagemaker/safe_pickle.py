"""Pickles parsed as data: names and calls become values, nothing is imported or executed. No torch.

AWS's library stores its metadata as a pickle and fetches it over plain HTTP. Here a pickle is only parsed. Every class
or function becomes a :class:`PickledName`, every call a :class:`PickledCall`, and nothing is imported, resolved or
called. Unexpected names, unexpected opcodes and too many values are errors.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

MAX_PICKLE_VALUES = 1 << 25
"""Maximum containers and objects of one pickle; each takes some dozen bytes here."""
_MAX_INTEGER_BYTES = 9
"""Maximum bytes of an integer: enough for 64 bits and a sign."""


class RefusedPickleError(ValueError):
    """The pickle is invalid or has unexpected content. No part of it was executed."""


class PickledName(NamedTuple):
    """Name of a class or function in a pickle, unresolved."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class PickledCall:
    """Unexecuted call of ``kind`` with ``args``, followed by a change of the result's state to ``state``."""

    __slots__ = ("args", "kind", "state")

    def __init__(self, kind: PickledName, args: tuple[Any, ...]) -> None:
        self.kind = kind
        self.args = args
        self.state: Any = None


class PersistentRef(NamedTuple):
    """Reference to an object stored outside the pickle."""

    name: Any


def parse_pickle(
    data: bytes | memoryview, names: Collection[PickledName], *, most_values: int = MAX_PICKLE_VALUES
) -> Any:
    """Return the value that ``data`` describes, or raise :class:`RefusedPickleError`."""
    try:
        return _PickleMachine(bytes(data), names, most_values).run()
    except (IndexError, struct.error) as error:
        raise RefusedPickleError("the pickle is cut short") from error
    except (UnicodeDecodeError, MemoryError) as error:
        raise RefusedPickleError(f"the pickle is damaged: {error}") from error


class _Mark:
    """Position on the stack at which a container begins."""


_MARK = _Mark()


class _PickleMachine:
    """Stack machine that runs a pickle's opcodes, restricted to those of data."""

    def __init__(self, data: bytes, names: Collection[PickledName], most_values: int) -> None:
        self._data = data
        self._names = names
        self._left = most_values
        self._at = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, stack, codes = self._data, self._stack, _CODES
        while True:
            code = data[self._at]
            self._at += 1
            if code == _STOP:
                break
            do = codes.get(code)
            if do is None:
                raise RefusedPickleError(f"opcode {bytes([code])!r} at byte {self._at - 1} has no place in data")
            do(self)
        if len(stack) != 1 or self._at != len(data):
            raise RefusedPickleError("the pickle does not end with its value")
        return stack[0]

    # -- reading ----------------------------------------------------------------------------------------------

    def _read_bytes(self, size: int) -> bytes:
        found = self._data[self._at : self._at + size]
        if len(found) != size:
            raise RefusedPickleError("the pickle is cut short")
        self._at += size
        return found

    def _number(self, form: struct.Struct) -> Any:
        (value,) = form.unpack_from(self._data, self._at)
        self._at += form.size
        return value

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at, self._at + 256)
        if end < 0:
            raise RefusedPickleError("a name in the pickle does not end")
        line = self._data[self._at : end].decode()
        self._at = end + 1
        return line

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise RefusedPickleError("the pickle has more values than a checkpoint's metadata")

    def _since_mark(self) -> list[Any]:
        stack = self._stack
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise RefusedPickleError("the pickle ends a container that it did not begin")
        values = stack[at + 1 :]
        del stack[at:]
        return values

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise RefusedPickleError("the pickle takes a container's beginning for a value")
        return value

    # -- opcodes ----------------------------------------------------------------------------------------------

    def proto(self) -> None:
        if not 2 <= self._read_bytes(1)[0] <= 5:
            raise RefusedPickleError("a pickle of another protocol than 2 to 5")

    def frame(self) -> None:
        self._read_bytes(8)

    def mark(self) -> None:
        self._stack.append(_MARK)

    def integer(self) -> None:
        size = self._read_bytes(1)[0]
        if size > _MAX_INTEGER_BYTES:
            raise RefusedPickleError(f"an integer of {size} bytes in the pickle")
        self._stack.append(int.from_bytes(self._read_bytes(size), "little", signed=True))

    def text(self, form: struct.Struct) -> None:
        self._stack.append(self._read_bytes(self._number(form)).decode())

    def octets(self, form: struct.Struct) -> None:
        self._stack.append(self._read_bytes(self._number(form)))

    def empty(self, kind: type) -> None:
        self._count()
        self._stack.append(kind())

    def tuple_of(self, size: int) -> None:
        self._count()
        values = [self._pop() for _ in range(size)]
        self._stack.append(tuple(reversed(values)))

    def tuple_since(self) -> None:
        self._count()
        self._stack.append(tuple(self._since_mark()))

    def _list(self) -> list[Any]:
        found = self._stack[-1]
        if type(found) is not list:
            raise RefusedPickleError("the pickle appends to a value that is not a list")
        return found

    def append(self) -> None:
        value = self._pop()
        self._list().append(value)

    def appends(self) -> None:
        values = self._since_mark()
        self._list().extend(values)

    def _set(self, pairs: list[Any]) -> None:
        into = self._stack[-1]
        if type(into) is not dict or len(pairs) % 2:
            raise RefusedPickleError("the pickle sets items of a value that is not a dict")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            # A PickledCall hashes by identity. The hash of a nested tuple could take forever.
            if type(key) not in (str, int, PickledCall):
                raise RefusedPickleError(f"a key in the pickle is a {type(key).__name__}")
            into[key] = value

    def set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._set([key, value])

    def set_items(self) -> None:
        self._set(self._since_mark())

    def name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise RefusedPickleError("the pickle has a name that is not a string")
        found = PickledName(module, name)
        if found not in self._names:
            raise RefusedPickleError(f"the pickle names {str(found)[:200]!r}, which no checkpoint's metadata needs")
        self._stack.append(found)

    def global_line(self) -> None:
        module = self._line()
        self.name(module, self._line())

    def global_stack(self) -> None:
        name, module = self._pop(), self._pop()
        self.name(module, name)

    def make(self) -> None:
        self._count()
        args, kind = self._pop(), self._pop()
        if type(kind) is not PickledName or type(args) is not tuple:
            raise RefusedPickleError("the pickle calls a value that is not a name")
        self._stack.append(PickledCall(kind, args))

    def build(self) -> None:
        state = self._pop()
        made = self._stack[-1]
        if type(made) is not PickledCall or made.state is not None:
            raise RefusedPickleError("the pickle sets a state that its target cannot have")
        made.state = state

    def persistent(self) -> None:
        self._count()
        self._stack.append(PersistentRef(self._pop()))

    def recall(self, form: struct.Struct) -> None:
        index = self._number(form)
        if index not in self._memo:
            raise RefusedPickleError("the pickle recalls what it never had")
        self._stack.append(self._memo[index])

    def note(self, form: struct.Struct | None) -> None:
        # A dict, because the C unpickler's memo allocates entries up to the highest index.
        index = len(self._memo) if form is None else self._number(form)
        value = self._stack[-1]
        if value is _MARK:
            raise RefusedPickleError("the pickle keeps a container's beginning")
        self._memo[index] = value


_STOP = ord(".")
_U1, _U2, _U4 = struct.Struct("<B"), struct.Struct("<H"), struct.Struct("<I")
_I4, _F8 = struct.Struct("<i"), struct.Struct(">d")


def _push(value: Any) -> Callable[[_PickleMachine], None]:
    return lambda machine: machine._stack.append(value)


def _push_number(form: struct.Struct) -> Callable[[_PickleMachine], None]:
    return lambda machine: machine._stack.append(machine._number(form))


_CODES: dict[int, Callable[[_PickleMachine], None]] = {
    ord(code): do
    for code, do in {
        b"\x80": _PickleMachine.proto,
        b"\x95": _PickleMachine.frame,
        b"(": _PickleMachine.mark,
        b"N": _push(None),
        b"\x88": _push(True),
        b"\x89": _push(False),
        b"J": _push_number(_I4),
        b"K": _push_number(_U1),
        b"M": _push_number(_U2),
        b"G": _push_number(_F8),
        b"\x8a": _PickleMachine.integer,
        b"\x8c": lambda machine: machine.text(_U1),
        b"X": lambda machine: machine.text(_U4),
        b"C": lambda machine: machine.octets(_U1),
        b"B": lambda machine: machine.octets(_U4),
        b")": _push(()),
        b"]": lambda machine: machine.empty(list),
        b"}": lambda machine: machine.empty(dict),
        b"\x85": lambda machine: machine.tuple_of(1),
        b"\x86": lambda machine: machine.tuple_of(2),
        b"\x87": lambda machine: machine.tuple_of(3),
        b"t": _PickleMachine.tuple_since,
        b"a": _PickleMachine.append,
        b"e": _PickleMachine.appends,
        b"s": _PickleMachine.set_item,
        b"u": _PickleMachine.set_items,
        b"c": _PickleMachine.global_line,
        b"\x93": _PickleMachine.global_stack,
        b"R": _PickleMachine.make,
        b"\x81": _PickleMachine.make,
        b"b": _PickleMachine.build,
        b"Q": _PickleMachine.persistent,
        b"h": lambda machine: machine.recall(_U1),
        b"j": lambda machine: machine.recall(_U4),
        b"q": lambda machine: machine.note(_U1),
        b"r": lambda machine: machine.note(_U4),
        b"\x94": lambda machine: machine.note(None),
    }.items()
}
