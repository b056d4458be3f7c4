"""A channel that carries large payloads beside another one: the sender says where they are, the receiver reads them.

::

    sender                                      receiver
      OFFERED | header, size, introduction ──>                     (over the other channel, as is PIECE)
      PIECE | address, size, ticket        ──>
              registered buffer            <──  reads it by itself
              told: the ticket is done     <──
      PIECE ...
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Iterator, Sequence

import msgspec

from peerstore.errors import PeerUnreachableError, ProtocolError, RequestError
from peerstore.frames import decode
from peerstore.transport.framing import payload_size
from peerstore.transport.pieces import Offer, Piece, copy_into, deliver, in_steps, size_of
from peerstore.transport.registered import Read, Registered, patiently
from peerstore.transport.seam import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, Channel, FileSlice, Incoming, Payload, Seen
from peerstore.transport.views import Cursor

_ENVELOPE = struct.Struct(">BI")
_KINDS = range(4)
_INLINE, _OFFERED, _PIECE, _STILL_THERE = _KINDS
_MAX_OFFER_BYTES = 64 << 10
_MAX_HEADER_BYTES = MAX_HEADER_BYTES - _MAX_OFFER_BYTES - _ENVELOPE.size
_ASK_EVERY_S = 0.2
_AHEAD = 4
"""Buffers of one channel that are filled before the first of them was read."""
_encode = msgspec.msgpack.Encoder().encode


class OfferingChannel:
    """A :class:`~peerstore.transport.seam.Channel` that carries large payloads beside another channel."""

    def __init__(self, carrier: Channel, memory: Registered, least_bytes: int) -> None:
        self.peer = carrier.peer
        self._carrier = carrier
        self._memory = memory
        self._least_bytes = least_bytes
        self._limits = MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._introduced = False
        self._tickets: list[int] = []
        """Of the buffers that the peer has not read yet."""
        self._source = ""
        """What NIXL calls the peer."""
        self._left = 0
        """Bytes of an offered payload that were not taken yet."""
        self._inline = 0
        self._over = ""

    @property
    def max_header_bytes(self) -> int:
        return self._limits[0]

    @max_header_bytes.setter
    def max_header_bytes(self, size: int) -> None:
        self._limit(size, self._limits[1])

    @property
    def max_payload_bytes(self) -> int:
        return self._limits[1]

    @max_payload_bytes.setter
    def max_payload_bytes(self, size: int) -> None:
        self._limit(self._limits[0], size)

    @property
    def timeout_s(self) -> float:
        return self._carrier.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._carrier.timeout_s = seconds

    def send(self, header: bytes, payload: Payload = ()) -> None:
        size = payload_size(payload)
        if len(header) > _MAX_HEADER_BYTES or size > MAX_PAYLOAD_BYTES:
            raise ProtocolError(
                f"a message of {len(header)} + {size} bytes is above the limit of {_MAX_HEADER_BYTES} for its header "
                f"or {MAX_PAYLOAD_BYTES} for its payload"
            )
        with self._sending:
            self._check()
            if size < self._least_bytes:
                self._carrier.send(_ENVELOPE.pack(_INLINE, len(header)) + header, payload)
                return
            with self._or_over():
                self._offer(header, size)
                self._send_pieces([part for part in payload if size_of(part)])

    def receive(self, *, idle_s: float | None = None, within_s: float | None = None) -> Incoming | None:
        begun = time.monotonic()
        with self._receiving:
            self._check()
            if self._left or self._inline:
                raise RequestError(f"{self._left or self._inline} bytes of the message before have not been taken")
            with self._or_over():
                while True:
                    spent = time.monotonic() - begun
                    incoming = self._carrier.receive(
                        idle_s=None if idle_s is None else max(0.0, idle_s - spent),
                        within_s=None if within_s is None else max(0.0, within_s - spent),
                    )
                    if incoming is None:
                        return None
                    kind, header, rest = self._opened(incoming)
                    if kind != _STILL_THERE:
                        return self._arrived(kind, header, rest, incoming.payload_bytes)

    def receive_into(self, views: Sequence[memoryview], seen: Seen | None = None) -> None:
        with self._receiving:
            self._check()
            if not self._left:
                self._carrier.receive_into(views, seen)
                self._inline = 0
                return
            with Cursor(views, seen) as cursor:
                if cursor.left != self._left:
                    raise RequestError(f"{cursor.left} bytes were given to fill, the payload has {self._left}")
                if any(view.readonly for view in views):
                    raise RequestError("a view that is to be filled is read-only")
                with self._or_over():
                    self._read_pieces(cursor)

    def proven(self) -> None:
        self._carrier.proven()

    def discard(self) -> None:
        with self._receiving:
            self._check()
            if not self._left:
                self._carrier.discard()
                self._inline = 0
                return
            with self._or_over():
                while self._left:
                    self._memory.refuse(self._source, self._next_piece().ticket)

    def close(self) -> None:
        self._over = self._over or "closed on this side"
        self._carrier.close()
        with self._sending, self._receiving:
            self._memory.leave_behind(self._tickets)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _limit(self, header_bytes: int, payload_bytes: int) -> None:
        """Strangers, who may send no payload, may offer none either."""
        self._limits = header_bytes, payload_bytes
        self._carrier.max_header_bytes = header_bytes + _ENVELOPE.size + (_MAX_OFFER_BYTES if payload_bytes else 0)
        self._carrier.max_payload_bytes = payload_bytes

    def _check(self) -> None:
        if self._over:
            raise PeerUnreachableError(f"the channel to {self.peer} is over: {self._over}")

    @contextlib.contextmanager
    def _or_over(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._over = self._over or str(error) or type(error).__name__
            self._carrier.close()
            raise

    def _offer(self, header: bytes, size: int) -> None:
        introduction = b"" if self._introduced else self._memory.introduction
        envelope = _ENVELOPE.pack(_OFFERED, len(header))
        self._carrier.send(envelope + header + _encode(Offer(size, introduction)))
        self._introduced = True

    def _send_pieces(self, parts: list[memoryview | FileSlice]) -> None:
        at, start = 0, 0
        while at < len(parts):
            self._wait_until_read()
            buffer = self._memory.take(self._check)
            filled = 0
            try:
                while at < len(parts) and filled < self._memory.buffer_bytes:
                    with buffer.view[filled:] as room:
                        count = copy_into(room, parts[at], start)
                    filled, start = filled + count, start + count
                    if start == size_of(parts[at]):
                        at, start = at + 1, 0
            except BaseException:
                self._memory.put_back(buffer)
                raise
            ticket = self._memory.lend(buffer)
            self._tickets.append(ticket)
            self._carrier.send(_ENVELOPE.pack(_PIECE, 0) + _encode(Piece(buffer.address, filled, ticket)))

    def _wait_until_read(self) -> None:
        """Until the peer has not too much to read. Asked whether it is still there, the kernel says if it is not."""
        asked = time.monotonic()
        for _ in patiently(self.timeout_s, self._check, f"silent for {self.timeout_s:g} s"):
            self._tickets = self._memory.still_lent(self._tickets)
            if len(self._tickets) < _AHEAD:
                return
            if time.monotonic() > asked + _ASK_EVERY_S:
                self._carrier.send(_ENVELOPE.pack(_STILL_THERE, 0))
                asked = time.monotonic()

    def _opened(self, incoming: Incoming) -> tuple[int, bytes, bytes]:
        if len(incoming.header) < _ENVELOPE.size:
            raise ProtocolError(f"{self.peer} sent a message without an envelope")
        kind, header_bytes = _ENVELOPE.unpack_from(incoming.header)
        if kind not in _KINDS:
            raise ProtocolError(f"{self.peer} sent a message of kind {kind}")
        if header_bytes > self.max_header_bytes:
            raise ProtocolError(
                f"{self.peer} announced a header of {header_bytes} bytes, the limit is {self.max_header_bytes}"
            )
        rest = _ENVELOPE.size + header_bytes
        if rest > len(incoming.header):
            raise ProtocolError(f"{self.peer} sent a header that is cut short")
        if kind != _INLINE and incoming.payload_bytes:
            raise ProtocolError(f"{self.peer} sent {incoming.payload_bytes} bytes where none belong")
        return kind, incoming.header[_ENVELOPE.size : rest], incoming.header[rest:]

    def _arrived(self, kind: int, header: bytes, rest: bytes, inline_bytes: int) -> Incoming:
        if kind == _INLINE:
            self._inline = inline_bytes
            return Incoming(header, inline_bytes)
        if kind != _OFFERED:
            raise ProtocolError(f"{self.peer} sent a piece of a payload that it did not offer")
        offer = decode(rest, Offer)
        if not 0 < offer.payload_bytes <= self.max_payload_bytes:
            raise ProtocolError(
                f"{self.peer} announced a payload of {offer.payload_bytes} bytes, the limit is {self.max_payload_bytes}"
            )
        if offer.introduction:
            self._source = self._memory.meet(offer.introduction)
        self._left = offer.payload_bytes
        return Incoming(header, offer.payload_bytes)

    def _next_piece(self) -> Piece:
        while (incoming := self._carrier.receive(idle_s=self.timeout_s)) is not None:
            kind, _, rest = self._opened(incoming)
            if kind == _STILL_THERE:
                continue
            piece = decode(rest, Piece) if kind == _PIECE else None
            if piece is None or not 0 < piece.size <= self._left:
                raise ProtocolError(f"{self.peer} sent something else than the rest of a payload of {self._left} bytes")
            self._left -= piece.size
            return piece
        raise PeerUnreachableError(f"{self.peer}: the connection ended {self._left} bytes before the end of a payload")

    def _read_pieces(self, cursor: Cursor) -> None:
        """While one buffer is being filled, the one before is copied to where it belongs."""
        before: Read | None = None
        try:
            while self._left:
                for address, size, ticket in in_steps(self._next_piece(), self._memory.buffer_bytes):
                    read = self._memory.read(self._source, address, size, ticket, self._check)
                    try:
                        if before is not None:
                            deliver(before, cursor)
                        read.wait(self.timeout_s, self._check)
                    finally:
                        if before is not None:
                            before.release()
                        before = read
            if before is not None:
                deliver(before, cursor)
        finally:
            if before is not None:
                before.release()
