"""Messages framed on a byte stream, with size limits and timeouts, and plain sockets as such streams.

::

    "tPS" | version, 1 byte | header length, uint32 | payload length, uint64 | header | payload     (big endian)

A :class:`ByteStream` moves the bytes; limits, timeouts and error handling are the same for all streams.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

from peerstore.errors import PeerUnreachableError, ProtocolError, RequestError, ShardDamagedError
from peerstore.transport.base import (
    MAX_MESSAGE_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    BufferCursor,
    FileSlice,
    IncomingMessage,
    Payload,
    ProgressCallback,
)

FRAME_VERSION = 1
FRAME_MAGIC = b"tPS"
FRAME_PREFIX = struct.Struct(">3sBIQ")

_WINDOW_BYTES = 256 << 10
"""Maximum bytes per system call, so that copied bytes are still in the cache for the next copy."""
_SLOWEST_BYTES_PER_S = 64 << 10
"""Minimum average rate of a payload; a slower transfer fails."""
_STEP_BYTES = 1 << 20


class ByteStream(Protocol):
    """Bytes to and from one peer. ``within_s`` limits the seconds without any progress.

    Errors are :class:`~peerstore.errors.PeerUnreachableError` or :class:`~peerstore.errors.PeerRefusedError`. One
    thread sends and one receives at a time.
    """

    def now(self) -> float: ...

    def send(self, views: list[memoryview], *, more: bool, within_s: float) -> int:
        """Send at least one byte of ``views`` and return the count.

        ``more`` means that the caller sends more at once.
        """

    def send_file(self, piece: FileSlice, *, within_s: float) -> int:
        """Send some of ``piece`` and return the count; 0 at the end of the file."""

    def receive(self, views: list[memoryview], *, within_s: float | None) -> int:
        """Fill some of ``views`` and return the count; 0 when the peer has closed its side."""

    def shut(self) -> None:
        """End both directions and wake waiting threads; callable from any thread."""

    def close(self) -> None:
        """Release all resources; no other method runs or is called later."""


class FramedChannel:
    """A :class:`~peerstore.transport.base.MessageChannel` over a stream of bytes."""

    def __init__(self, stream: ByteStream, peer: str, timeout_s: float) -> None:
        self.peer = peer
        self.max_header_bytes = MAX_MESSAGE_HEADER_BYTES
        self.max_payload_bytes = MAX_PAYLOAD_BYTES
        self.timeout_s = timeout_s
        self.on_authenticated: Callable[[], None] = lambda: None
        """Called by ``mark_authenticated``; set by the listener."""
        self.is_authenticated = False
        self.describe_refusal: Callable[[ProtocolError], bytes] | None = None
        """Header of the last message to a peer that violates the protocol. Without it, the peer gets none."""
        self._stream = stream
        self._left = 0
        """Announced payload bytes that have not been received."""
        self._closed_reason = ""
        """Why the channel is unusable; empty while it works."""
        self._closing = threading.Lock()
        self._closed = False
        self._sending = threading.Lock()
        self._receiving = threading.Lock()

    def send(self, header: bytes, payload: Payload = ()) -> None:
        size = payload_size(payload)
        if len(header) > self.max_header_bytes or size > MAX_PAYLOAD_BYTES:
            raise ProtocolError(
                f"a message of {len(header)} + {size} bytes is above the limit of {self.max_header_bytes} for its "
                f"header or {MAX_PAYLOAD_BYTES} for its payload"
            )
        run = [memoryview(FRAME_PREFIX.pack(FRAME_MAGIC, FRAME_VERSION, len(header), size)), memoryview(header)]
        with self._sending:
            self._check_usable()
            with self._closing_on_error():
                if not payload and len(header) <= _WINDOW_BYTES:  # most messages leave in one piece
                    sent = self._stream.send(run, more=False, within_s=self.timeout_s)
                    if sent < FRAME_PREFIX.size + len(header):
                        self._send_views([memoryview(encode_frame(header))[sent:]], more=False)
                    return
                for part in payload:
                    if isinstance(part, FileSlice):
                        self._send_views(run, more=part.size > 0)
                        run = []
                        self._send_file(part)
                    else:
                        run.append(part)
                self._send_views(run, more=False)

    def receive(self, *, idle_s: float | None = None, within_s: float | None = None) -> IncomingMessage | None:
        latest = None if within_s is None else self._stream.now() + within_s
        patience_s = min((limit for limit in (idle_s, within_s) if limit is not None), default=None)
        with self._receiving:
            self._check_usable()
            if self._left:
                raise RequestError(f"{self._left} bytes of the message before have not been taken")
            with self._closing_on_error():
                prefix = bytearray(FRAME_PREFIX.size)
                with memoryview(prefix) as view:
                    count = self._stream.receive([view], within_s=patience_s)
                    if count == 0:
                        if self._closed:
                            raise PeerUnreachableError("the connection ended")
                        return None
                    deadline = self._stream.now() + self.timeout_s
                    deadline = deadline if latest is None else min(deadline, latest)
                    if count < view.nbytes:
                        self._fill(view, count, deadline)
                try:
                    header_bytes, payload_bytes = self._parse_prefix(prefix)
                except ProtocolError as error:
                    self.refuse(error)
                    raise
                header = self._header(header_bytes, deadline)
                self._left = payload_bytes
                return IncomingMessage(header, payload_bytes)

    def receive_into(self, views: Sequence[memoryview], seen: ProgressCallback | None = None) -> None:
        with self._receiving, BufferCursor(views, seen) as cursor:
            self._check_usable()
            if cursor.left != self._left:
                raise RequestError(f"{cursor.left} bytes were given to fill, the payload has {self._left}")
            if any(view.readonly for view in views):
                raise RequestError("cannot receive into a read-only view")
            deadline = self._stream.now() + self.timeout_s + cursor.left / _SLOWEST_BYTES_PER_S
            with self._closing_on_error():
                while cursor.left:
                    cursor.advance(self._receive_some(cursor.window(_WINDOW_BYTES), deadline))

    def mark_authenticated(self) -> None:
        self.is_authenticated = True
        self.on_authenticated()

    def discard(self) -> None:
        with self._receiving:
            self._check_usable()
            deadline = self._stream.now() + self.timeout_s + self._left / _SLOWEST_BYTES_PER_S
            with self._closing_on_error(), memoryview(bytearray(min(self._left, _WINDOW_BYTES))) as scratch:
                while self._left:
                    with scratch[: self._left] as room:
                        self._receive_some([room], deadline)

    def close(self) -> None:
        """Wake the threads in ``send`` and ``receive``, and release the stream after they have returned."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._closed_reason = self._closed_reason or "closed on this side"
            self._stream.shut()
            with self._sending, self._receiving:
                self._stream.close()

    def abandon(self) -> None:
        self._closed, self._closed_reason = True, "the process was forked"
        self._stream.close()

    def _check_usable(self) -> None:
        if self._closed_reason:
            raise PeerUnreachableError(f"the channel to {self.peer} is over: {self._closed_reason}")

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        """Close the channel after any error in a message, because the next message would begin inside it."""
        try:
            yield
        except BaseException as error:
            why = "closed on this side" if self._closed else str(error) or type(error).__name__
            self._closed_reason = self._closed_reason or why
            self._stream.shut()
            if isinstance(error, PeerUnreachableError):
                raise PeerUnreachableError(f"{self.peer}: {why}") from error
            raise

    def _send_views(self, views: list[memoryview], *, more: bool) -> None:
        with BufferCursor(views) as cursor:
            while cursor.left:
                window = cursor.window(_WINDOW_BYTES)
                cursor.advance(self._stream.send(window, more=more, within_s=self.timeout_s))

    def _send_file(self, piece: FileSlice) -> None:
        fd, start, left = piece
        while left:
            count = self._stream.send_file(FileSlice(fd, start, left), within_s=self.timeout_s)
            if count == 0:
                raise ShardDamagedError(f"a file ended at byte {start}, {left} bytes before the end of its slice")
            start, left = start + count, left - count

    def _parse_prefix(self, prefix: bytearray) -> tuple[int, int]:
        return parse_frame_prefix(
            prefix, self.peer, max_header_bytes=self.max_header_bytes, max_payload_bytes=self.max_payload_bytes
        )

    def refuse(self, error: ProtocolError) -> None:
        """Send the reason as the last message, if ``describe_refusal`` is set."""
        if self.describe_refusal is not None:
            with contextlib.suppress(PeerUnreachableError), self._sending:
                self._send_views([memoryview(encode_frame(self.describe_refusal(error)))], more=False)

    def _header(self, size: int, deadline: float) -> bytes:
        """Receive ``size`` bytes; memory is allocated for received bytes, not for announced ones."""
        data = bytearray(min(size, _STEP_BYTES))
        with memoryview(data) as view:
            self._fill(view, 0, deadline)
        while len(data) < size:
            start = len(data)
            data.extend(bytes(min(size - start, _STEP_BYTES)))
            with memoryview(data) as view, view[start:] as rest:
                self._fill(rest, 0, deadline)
        return bytes(data)

    def _fill(self, view: memoryview, filled: int, deadline: float) -> None:
        while filled < view.nbytes:
            patience_s = deadline - self._stream.now()
            if patience_s <= 0:
                raise PeerUnreachableError("it took too long over a header")
            with view[filled:] as rest:
                count = self._stream.receive([rest], within_s=patience_s)
            if count == 0:
                raise PeerUnreachableError("the connection ended in the middle of a header")
            filled += count

    def _receive_some(self, window: list[memoryview], deadline: float) -> int:
        left_s = deadline - self._stream.now()
        if left_s <= 0:
            raise PeerUnreachableError(
                f"{self._left} bytes of a payload are missing, at less than {_SLOWEST_BYTES_PER_S >> 10} KiB/s"
            )
        count = self._stream.receive(window, within_s=min(self.timeout_s, left_s))
        if count == 0:
            raise PeerUnreachableError(f"the connection ended {self._left} bytes before the end of a payload")
        self._left -= count
        return count


def parse_frame_prefix(
    prefix: bytes | bytearray, peer: str, *, max_header_bytes: int, max_payload_bytes: int
) -> tuple[int, int]:
    """Return the header and payload sizes in bytes; raise :class:`ProtocolError` if invalid."""
    magic, version, header_bytes, payload_bytes = FRAME_PREFIX.unpack(prefix)
    if magic != FRAME_MAGIC:
        raise ProtocolError(f"{peer} sent something else than a message: {bytes(prefix)!r}")
    if version != FRAME_VERSION:
        raise ProtocolError(f"{peer} sends messages of version {version}, this is version {FRAME_VERSION}")
    if header_bytes > max_header_bytes:
        raise ProtocolError(f"{peer} announced a header of {header_bytes} bytes, the limit is {max_header_bytes}")
    if payload_bytes > max_payload_bytes:
        raise ProtocolError(f"{peer} announced a payload of {payload_bytes} bytes, the limit is {max_payload_bytes}")
    return header_bytes, payload_bytes


def encode_frame(header: bytes) -> bytes:
    """Return a message without payload, to be sent on a plain socket."""
    return FRAME_PREFIX.pack(FRAME_MAGIC, FRAME_VERSION, len(header), 0) + header


def payload_size(payload: Payload) -> int:
    """Return the payload's size in bytes; raise before anything is sent if a file is too short."""
    total = 0
    ends: dict[int, int] = {}
    for part in payload:
        if not isinstance(part, FileSlice):
            if not part.c_contiguous:
                raise RequestError(f"a view of shape {part.shape} with gaps cannot be sent")
            total += part.nbytes
            continue
        if part.start < 0 or part.size < 0:
            raise RequestError(f"no file has such a slice: {part}")
        total += part.size
        ends[part.fd] = max(ends.get(part.fd, 0), part.start + part.size)
    for fd, end in ends.items():
        if (found := os.fstat(fd).st_size) < end:
            raise ShardDamagedError(f"a file has {found} bytes, but its slice ends at byte {end}")
    return total


_NO_SIGNAL = int(socket.MSG_NOSIGNAL)
_NO_SIGNAL_AND_MORE = int(socket.MSG_NOSIGNAL | socket.MSG_MORE)
_ALIVE_IDLE_S = 15
_ALIVE_EVERY_S = 5
_ALIVE_PROBES = 4
_FILE_BYTES = 256 << 10


class SocketStream:
    """A :class:`~peerstore.transport.framing.ByteStream` over a socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock

    def now(self) -> float:
        return time.monotonic()

    def send(self, views: list[memoryview], *, more: bool, within_s: float) -> int:
        flags = _NO_SIGNAL_AND_MORE if more else _NO_SIGNAL
        return self._attempt(lambda: self._sock.sendmsg(views, (), flags), select.POLLOUT, within_s)

    def send_file(self, piece: FileSlice, *, within_s: float) -> int:
        return self._attempt(partial(self._send_file, piece), select.POLLOUT, within_s)

    def receive(self, views: list[memoryview], *, within_s: float | None) -> int:
        if len(views) == 1:
            return self._attempt(lambda: self._sock.recv_into(views[0]), select.POLLIN, within_s)
        return self._attempt(lambda: self._sock.recvmsg_into(views)[0], select.POLLIN, within_s)

    def shut(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def _attempt(self, action: Callable[[], int], events: int, within_s: float | None) -> int:
        while True:
            try:
                return action()
            except BlockingIOError:
                wait_until_ready(self._sock.fileno(), events, within_s)
            except OSError as error:
                raise PeerUnreachableError(str(error)) from error

    def _send_file(self, piece: FileSlice) -> int:
        fd, start, size = piece
        try:
            return os.sendfile(self._sock.fileno(), fd, start, size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):
                raise
        data = os.pread(fd, min(size, _FILE_BYTES), start)  # a file that sendfile does not support
        return self._sock.send(data) if data else 0


def wait_until_ready(fd: int, events: int, within_s: float | None) -> None:
    """Wait until ``fd`` is ready; raise :class:`PeerUnreachableError` after ``within_s`` seconds."""
    poller = select.poll()
    poller.register(fd, events)
    if not poller.poll(None if within_s is None else max(0.0, within_s) * 1000):
        raise PeerUnreachableError(f"silent for {within_s:.3g} s")


def set_tcp_options(sock: socket.socket, timeout_s: float) -> None:
    """Send small messages at once, and detect dead peers. Buffer sizes are left to the kernel."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ALIVE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _ALIVE_PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(timeout_s * 1000)))


@contextlib.contextmanager
def close_on_error(sock: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        sock.close()
        raise
