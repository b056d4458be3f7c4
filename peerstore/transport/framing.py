"""Messages on a stream of bytes.

::

    "tPS" | version, 1 byte | header length, uint32 | payload length, uint64 | header | payload     (big endian)

What moves the bytes is a :class:`Stream`; limits, timeouts and what ends a channel are the same for all of them.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from peerstore.errors import PeerUnreachableError, ProtocolError, RequestError, ShardDamagedError
from peerstore.transport.seam import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, FileSlice, Incoming, Payload, Seen
from peerstore.transport.views import Cursor

VERSION = 1
MAGIC = b"tPS"
PREFIX = struct.Struct(">3sBIQ")

_WINDOW_BYTES = 256 << 10
"""Most bytes in one call to the kernel: what has just been copied is still in the cache when it is copied again."""
_SLOWEST_BYTES_PER_S = 64 << 10
"""A payload that comes more slowly than this is given up, however steadily its bytes trickle in."""
_STEP_BYTES = 1 << 20


class Stream(Protocol):
    """Bytes to and from one peer. ``within_s`` is how long to wait for any progress at all.

    Whatever goes wrong is a :class:`~peerstore.errors.PeerUnreachableError` or a
    :class:`~peerstore.errors.PeerRefusedError`. One thread sends and one receives at a time.
    """

    def now(self) -> float: ...

    def send(self, views: list[memoryview], *, more: bool, within_s: float) -> int:
        """Send some of ``views``, at least a byte; ``more`` is coming at once."""

    def send_file(self, piece: FileSlice, *, within_s: float) -> int:
        """Send some of ``piece``; 0 when the file has ended."""

    def receive(self, views: list[memoryview], *, within_s: float | None) -> int:
        """Fill some of ``views``; 0 when the peer sends nothing any more."""

    def shut(self) -> None:
        """End both directions; who waits, returns. From any thread."""

    def close(self) -> None:
        """Give everything back. Nobody is in any other method, or will be."""


class FramedChannel:
    """A :class:`~peerstore.transport.seam.Channel` over a stream of bytes."""

    def __init__(self, stream: Stream, peer: str, timeout_s: float) -> None:
        self.peer = peer
        self.max_header_bytes = MAX_HEADER_BYTES
        self.max_payload_bytes = MAX_PAYLOAD_BYTES
        self.timeout_s = timeout_s
        self.on_proven: Callable[[], None] = lambda: None
        """Of whoever accepted the channel."""
        self.is_proven = False
        self._stream = stream
        self._left = 0
        """Bytes of a payload that were announced and not taken yet."""
        self._over = ""
        """Why nothing more can be sent or received."""
        self._closing = threading.Lock()
        self._closed = False
        self._sending = threading.Lock()
        self._receiving = threading.Lock()

    def send(self, header: bytes, payload: Payload = ()) -> None:
        size = payload_size(payload)
        if len(header) > MAX_HEADER_BYTES or size > MAX_PAYLOAD_BYTES:
            raise ProtocolError(
                f"a message of {len(header)} + {size} bytes is above the limit of {MAX_HEADER_BYTES} for its header or "
                f"{MAX_PAYLOAD_BYTES} for its payload"
            )
        run = [memoryview(PREFIX.pack(MAGIC, VERSION, len(header), size)), memoryview(header)]
        with self._sending:
            self._check()
            with self._or_over():
                for part in payload:
                    if isinstance(part, FileSlice):
                        self._send_views(run, more=part.size > 0)
                        run = []
                        self._send_file(part)
                    else:
                        run.append(part)
                self._send_views(run, more=False)

    def receive(self, *, idle_s: float | None = None, within_s: float | None = None) -> Incoming | None:
        latest = None if within_s is None else self._stream.now() + within_s
        patience_s = min((limit for limit in (idle_s, within_s) if limit is not None), default=None)
        with self._receiving:
            self._check()
            if self._left:
                raise RequestError(f"{self._left} bytes of the message before have not been taken")
            with self._or_over():
                prefix = bytearray(PREFIX.size)
                with memoryview(prefix) as view:
                    count = self._stream.receive([view], within_s=patience_s)
                    if count == 0:
                        if self._closed:
                            raise PeerUnreachableError("the connection ended")
                        return None
                    deadline = self._stream.now() + self.timeout_s
                    deadline = deadline if latest is None else min(deadline, latest)
                    self._fill(view, count, deadline)
                header_bytes, payload_bytes = self._announced(prefix)
                header = self._header(header_bytes, deadline)
                self._left = payload_bytes
                return Incoming(header, payload_bytes)

    def receive_into(self, views: Sequence[memoryview], seen: Seen | None = None) -> None:
        with self._receiving, Cursor(views, seen) as cursor:
            self._check()
            if cursor.left != self._left:
                raise RequestError(f"{cursor.left} bytes were given to fill, the payload has {self._left}")
            if any(view.readonly for view in views):
                raise RequestError("a view that is to be filled is read-only")
            deadline = self._stream.now() + self.timeout_s + cursor.left / _SLOWEST_BYTES_PER_S
            with self._or_over():
                while cursor.left:
                    cursor.advance(self._some(cursor.window(_WINDOW_BYTES), deadline))

    def proven(self) -> None:
        self.is_proven = True
        self.on_proven()

    def discard(self) -> None:
        with self._receiving:
            self._check()
            deadline = self._stream.now() + self.timeout_s + self._left / _SLOWEST_BYTES_PER_S
            with self._or_over(), memoryview(bytearray(min(self._left, _WINDOW_BYTES))) as scratch:
                while self._left:
                    with scratch[: self._left] as room:
                        self._some([room], deadline)

    def close(self) -> None:
        """Whoever waits in ``send`` or ``receive`` is woken first: what they use is given back only after them."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._over = self._over or "closed on this side"
            self._stream.shut()
            with self._sending, self._receiving:
                self._stream.close()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._over:
            raise PeerUnreachableError(f"the channel to {self.peer} is over: {self._over}")

    @contextlib.contextmanager
    def _or_over(self) -> Iterator[None]:
        """Whatever interrupts a message ends the channel: the next one would begin in the middle of this."""
        try:
            yield
        except BaseException as error:
            why = "closed on this side" if self._closed else str(error) or type(error).__name__
            self._over = self._over or why
            self._stream.shut()
            if isinstance(error, PeerUnreachableError):
                raise PeerUnreachableError(f"{self.peer}: {why}") from error
            raise

    def _send_views(self, views: list[memoryview], *, more: bool) -> None:
        with Cursor(views) as cursor:
            while cursor.left:
                window = cursor.window(_WINDOW_BYTES)
                cursor.advance(self._stream.send(window, more=more, within_s=self.timeout_s))

    def _send_file(self, piece: FileSlice) -> None:
        fd, start, left = piece
        while left:
            count = self._stream.send_file(FileSlice(fd, start, left), within_s=self.timeout_s)
            if count == 0:
                raise ShardDamagedError(
                    f"a file ended at byte {start}, {left} bytes before the end of what was to be sent"
                )
            start, left = start + count, left - count

    def _announced(self, prefix: bytearray) -> tuple[int, int]:
        return announced(
            prefix, self.peer, max_header_bytes=self.max_header_bytes, max_payload_bytes=self.max_payload_bytes
        )

    def _header(self, size: int, deadline: float) -> bytes:
        """``size`` bytes; memory is taken for what has come, not for what was announced."""
        data = bytearray()
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

    def _some(self, window: list[memoryview], deadline: float) -> int:
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


def announced(
    prefix: bytes | bytearray, peer: str, *, max_header_bytes: int, max_payload_bytes: int
) -> tuple[int, int]:
    """How many bytes of header and of payload follow this prefix, or :class:`ProtocolError`."""
    magic, version, header_bytes, payload_bytes = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise ProtocolError(f"{peer} sent something else than a message: {bytes(prefix)!r}")
    if version != VERSION:
        raise ProtocolError(f"{peer} sends messages of version {version}, this is version {VERSION}")
    if header_bytes > max_header_bytes:
        raise ProtocolError(f"{peer} announced a header of {header_bytes} bytes, the limit is {max_header_bytes}")
    if payload_bytes > max_payload_bytes:
        raise ProtocolError(f"{peer} announced a payload of {payload_bytes} bytes, the limit is {max_payload_bytes}")
    return header_bytes, payload_bytes


def payload_size(payload: Payload) -> int:
    """How much it is; files that are too short are found before anything is sent."""
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
            raise ShardDamagedError(f"a file has {found} bytes, {end} of which were to be sent")
    return total
