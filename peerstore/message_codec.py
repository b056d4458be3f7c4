"""Typed msgpack messages, and frames on a Unix socket that can carry an open file descriptor.

msgspec prepares a type at its first decoding, and two threads that do so at once crash the process (seen with 0.22).
This module serializes that step.

A connection starts with a greeting from each side; then the client sends requests and the server responds, one at a
time. Everything is decoded into a declared type before use, and every length is compared with a limit. A response may
contain an open file, as a descriptor with its first byte (SCM_RIGHTS).
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
    """The client's job; "" for a client without one."""
    server: str = ""
    """Release of the server; only in its greeting."""
    arena: str = ""
    """Id of the arena; only in the server's greeting."""
    start_id: str = ""
    """Id of the agent's start; only in the server's greeting."""
    refused: str = ""
    """Why the server refuses the client; only in the server's greeting."""


class AgentRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    op: str
    body: msgspec.Raw
    remaining_s: float = math.inf
    """Seconds that the client waits for the response."""


class AgentResponse(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    error: str
    """Class name of the error, or "" for a result."""
    body: msgspec.Raw


def send_frame(
    sock: socket.socket, message: object, *, limit_bytes: int = MAX_FRAME_BYTES, fd: int | None = None
) -> None:
    """Send one frame, at most ``limit_bytes``, the receiver's limit; ``fd`` is sent with its first byte."""
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
    """Receive one frame as a ``kind``; return ``None`` if the peer closed the connection between frames.

    A frame must be complete ``within_s`` seconds after its first byte, which has the socket's own timeout.
    """
    first = sock.recv(1)  # the kernel closes a descriptor that comes with it
    return decode_message(_rest(sock, first, limit_bytes, within_s), kind) if first else None


def receive_frame_with_fd(sock: socket.socket, kind: type[T]) -> tuple[T | None, int | None]:
    """Receive one frame and its descriptor, which the caller closes."""
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
    """Decode ``body`` as a ``kind``; raise :class:`ProtocolError` if it is none."""
    try:
        return from_msgpack(body, kind)
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as error:
        raise ProtocolError(f"not a {getattr(kind, '__name__', kind)}: {error}") from error


def encode_raw_message(value: object) -> msgspec.Raw:
    return msgspec.Raw(encode_message(value))


def _read(sock: socket.socket, size: int, deadline: float | None) -> bytearray:
    """Receive ``size`` bytes; memory is allocated for received bytes, not for announced ones."""
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
