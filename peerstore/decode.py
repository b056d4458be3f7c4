"""Bytes as a type, from any thread.

msgspec makes a type ready when something is decoded as it for the first time, and two threads that do that at once end
the process (seen with 0.22). Here one thread at a time does.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")

_decoders: dict[tuple[Any, Any], Any] = {}
_making = threading.Lock()


@overload
def from_msgpack(data: bytes | bytearray | memoryview | msgspec.Raw, kind: type[T]) -> T: ...
@overload
def from_msgpack(data: bytes | bytearray | memoryview | msgspec.Raw, kind: Any) -> Any: ...
def from_msgpack(data: bytes | bytearray | memoryview | msgspec.Raw, kind: Any) -> Any:
    """``data`` as a ``kind``; raises what ``msgspec.msgpack.decode`` raises."""
    return _decoder(msgspec.msgpack.Decoder, kind).decode(data)


@overload
def from_json(data: bytes | bytearray | memoryview | str, kind: type[T]) -> T: ...
@overload
def from_json(data: bytes | bytearray | memoryview | str, kind: Any) -> Any: ...
def from_json(data: bytes | bytearray | memoryview | str, kind: Any) -> Any:
    """``data`` as a ``kind``; raises what ``msgspec.json.decode`` raises."""
    return _decoder(msgspec.json.Decoder, kind).decode(data)


def _decoder(of: Any, kind: Any) -> Any:
    found = _decoders.get((of, kind))
    if found is None:
        with _making:
            found = _decoders[of, kind] = of(kind)
    return found
