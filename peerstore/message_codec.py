"""Typed msgpack messages, and length-prefixed frames on a Unix socket that can carry an open file descriptor.

msgspec makes a type ready when something is decoded as it for the first time, and two threads that do that at once end
the process (seen with 0.22). Here one thread at a time does.

A connection starts with a greeting from each side; then the client asks and the server answers, one at a time.
Everything is decoded into a declared type before anybody looks at it, and no length is trusted before it was
compared with a limit. An answer may bring an open file with it, as a descriptor beside its first byte (SCM_RIGHTS).
"""

from __future__ import annotations

import math
import os
import socket
import struct
import threading
import time
from typing import Any, TypeVar, overload

import msgspec

from peerstore.errors import AgentUnreachableError, ProtocolError

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


AGENT_PROTOCOL_VERSION = 3
MAX_AGENT_HELLO_BYTES = 4 << 10
MAX_FRAME_BYTES = 64 << 20

_READ_STEP_BYTES = 1 << 20
_LENGTH = struct.Struct(">I")
_FD = struct.Struct("i")
encode_message = msgspec.msgpack.Encoder().encode


class AgentHello(msgspec.Struct, frozen=True):
    """The first frame in each direction."""

    protocol: int
    job: str
    """What the client works on; "" to only look."""
    server: str = ""
    """The server's version, in its answer."""
    arena: str = ""
    """Which arena it serves, in its answer."""
    start_id: str = ""
    """Which start of the agent it is, in its answer."""
    refused: str = ""
    """Why the server does not go on, in its answer."""


class AgentRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    op: str
    body: msgspec.Raw
    remaining_s: float = math.inf
    """How long the client waits for the answer."""


class AgentResponse(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    error: str
    """Class name of the error, or "" for a result."""
    body: msgspec.Raw


def send_frame(
    sock: socket.socket, message: object, *, limit_bytes: int = MAX_FRAME_BYTES, fd: int | None = None
) -> None:
    """One frame out; the message must stay below the limit the other side enforces. ``fd`` goes with its first byte."""
    body = encode_message(message)
    if len(body) > limit_bytes:
        raise ProtocolError(f"a message of {len(body)} bytes is above the limit of {limit_bytes}")
    data = _LENGTH.pack(len(body)) + body
    if fd is not None:
        sent = sock.sendmsg([data[:1]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _FD.pack(fd))])
        data = data[sent:]
    sock.sendall(data)


def receive_frame(
    sock: socket.socket, kind: type[T], *, limit_bytes: int = MAX_FRAME_BYTES, within_s: float | None = None
) -> T | None:
    """One frame in, as a ``kind``; ``None`` when the other side closed the connection between frames.

    A frame that has begun must be complete ``within_s``; how long its first byte takes is the socket's own timeout.
    """
    first = sock.recv(1)  # a descriptor that comes with it is closed by the kernel
    return decode_message(_rest(sock, first, limit_bytes, within_s), kind) if first else None


def receive_frame_with_fd(sock: socket.socket, kind: type[T]) -> tuple[T | None, int | None]:
    """One frame in, and the descriptor that came with it, which is the caller's from here on."""
    first, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(_FD.size), socket.MSG_CMSG_CLOEXEC)
    fds = [
        _FD.unpack_from(data)[0]
        for level, what, data in ancillary
        if (level, what) == (socket.SOL_SOCKET, socket.SCM_RIGHTS) and len(data) >= _FD.size
    ]
    fd = fds[0] if fds else None
    if not first:
        return None, fd
    try:
        return decode_message(_rest(sock, first, MAX_FRAME_BYTES, None), kind), fd
    except BaseException:
        if fd is not None:
            os.close(fd)
        raise


def _rest(sock: socket.socket, first: bytes, limit_bytes: int, within_s: float | None) -> bytearray:
    patience = sock.gettimeout()
    deadline = None if within_s is None else time.monotonic() + within_s
    try:
        (length,) = _LENGTH.unpack(first + _read(sock, _LENGTH.size - 1, deadline))
        if length > limit_bytes:
            raise ProtocolError(f"a frame of {length} bytes was announced, the limit is {limit_bytes}")
        return _read(sock, length, deadline)
    finally:
        sock.settimeout(patience)


def decode_message(body: bytes | bytearray | msgspec.Raw, kind: type[T]) -> T:
    """``body`` as a ``kind``, or :class:`ProtocolError`."""
    try:
        return from_msgpack(body, kind)
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as error:
        raise ProtocolError(f"not a {getattr(kind, '__name__', kind)}: {error}") from error


def encode_raw_message(value: object) -> msgspec.Raw:
    return msgspec.Raw(encode_message(value))


def _read(sock: socket.socket, size: int, deadline: float | None) -> bytearray:
    """``size`` bytes; memory is taken for what has come, not for what was announced."""
    data = bytearray()
    while len(data) < size:
        if deadline is not None:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
        start = len(data)
        data.extend(bytes(min(size - start, _READ_STEP_BYTES)))
        with memoryview(data) as view, view[start:] as rest:
            count = sock.recv_into(rest)
        del data[start + count :]
        if count == 0:
            raise AgentUnreachableError(f"the connection ended after {start} of {size} bytes of a frame")
    return data
