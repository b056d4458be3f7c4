"""Typed messages in msgpack and JSON: everything is decoded into a declared type before use.

msgspec prepares a type at its first decoding, and two threads that do so at once crash the process (seen with 0.22).
This module serializes that step.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar, overload

import msgspec

from peerstore.errors import ProtocolError

T = TypeVar("T")

_decoders: dict[tuple[Any, Any], Any] = {}
_making = threading.Lock()


@overload
def from_msgpack(data: bytes | bytearray | memoryview | msgspec.Raw, kind: type[T]) -> T: ...
@overload
def from_msgpack(data: bytes | bytearray | memoryview | msgspec.Raw, kind: Any) -> Any: ...
def from_msgpack(data: bytes | bytearray | memoryview | msgspec.Raw, kind: Any) -> Any:
    """Decode ``data`` as a ``kind``; raise the errors of ``msgspec.msgpack.decode``."""
    return _decoder(msgspec.msgpack.Decoder, kind).decode(data)


@overload
def from_json(data: bytes | bytearray | memoryview | str, kind: type[T]) -> T: ...
@overload
def from_json(data: bytes | bytearray | memoryview | str, kind: Any) -> Any: ...
def from_json(data: bytes | bytearray | memoryview | str, kind: Any) -> Any:
    """Decode ``data`` as a ``kind``; raise the errors of ``msgspec.json.decode``."""
    return _decoder(msgspec.json.Decoder, kind).decode(data)


def _decoder(of: Any, kind: Any) -> Any:
    found = _decoders.get((of, kind))
    if found is None:
        with _making:
            found = _decoders[of, kind] = of(kind)
    return found


encode_message = msgspec.msgpack.Encoder().encode


def decode_message(body: bytes | bytearray | msgspec.Raw, kind: type[T]) -> T:
    """Decode ``body`` as a ``kind``; raise :class:`ProtocolError` if it is none."""
    try:
        return from_msgpack(body, kind)
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as error:
        raise ProtocolError(f"not a {getattr(kind, '__name__', kind)}: {error}") from error


def encode_raw_message(value: object) -> msgspec.Raw:
    return msgspec.Raw(encode_message(value))
