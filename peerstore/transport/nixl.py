"""RDMA transport over NIXL: receivers read registered buffers; TCP carries everything else.

The handshake over TCP authenticates peers; before that no payload is offered or read. NIXL itself does not
authenticate, so all hosts of its network must be trusted. Receivers that verify payloads detect changed bytes as with
other transports.

::

    sender                                      receiver
      OFFERED | header, size, metadata     ──>                     (over the TCP channel, like PIECE)
      PIECE | address, size, ticket        ──>
              registered buffer            <──  reads it
              notification                 <──  the ticket is done
      PIECE ...

The sender fills a buffer and sends its address. The receiver reads it into one of its buffers, and NIXL notifies the
sender. If the receiver disconnects without a notification, the buffer is not filled again while a read may still run.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import math
import mmap
import os
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from peerstore.errors import PeerUnreachableError, ProtocolError, RequestError, ShardDamagedError
from peerstore.message_codec import decode_message
from peerstore.optional_packages import missing_package_error
from peerstore.transport.base import (
    MAX_MESSAGE_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    BufferCursor,
    FileSlice,
    IncomingMessage,
    Listener,
    MessageChannel,
    Payload,
    ProgressCallback,
    Transport,
)
from peerstore.transport.framing import payload_size
from peerstore.transport.tcp import TcpTransport


class NixlTransport:
    """Transport over NIXL, with a ``carrier`` for connections and small messages.

    ``options`` configure the NIXL ``backend``. UCX selects its adapters by its own variables
    (``UCX_NET_DEVICES=mlx5_0:1``). After the first use, ``buffers`` times ``buffer_bytes`` of memory are registered for
    all channels together.
    """

    name = "nixl"

    def __init__(
        self,
        *,
        carrier: Transport | None = None,
        backend: str = "UCX",
        options: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
        buffer_bytes: int = 4 << 20,
        buffers: int = 16,
        least_bytes: int = 256 << 10,
    ) -> None:
        nixl_bindings()  # fails early if NIXL is not installed
        self._carrier = carrier or TcpTransport(timeout_s=timeout_s)
        self._least_bytes = least_bytes
        self._register = partial(
            RegisteredMemory, backend, options or {}, buffer_bytes=buffer_bytes, buffers=buffers, timeout_s=timeout_s
        )
        self._lock = threading.Lock()
        self._registered: RegisteredMemory | None = None

    def listen(self, address: str, serve: Callable[[MessageChannel], None]) -> Listener:
        memory = self._memory  # a missing backend fails here, not at the first connection
        return self._carrier.listen(address, partial(self._serve, memory, serve))

    def connect(self, address: str, *, timeout_s: float = 5.0) -> MessageChannel:
        return NixlChannel(self._carrier.connect(address, timeout_s=timeout_s), self._memory, self._least_bytes)

    def close(self) -> None:
        """Release the registered memory, after all listeners and channels were closed."""
        with self._lock:
            registered, self._registered = self._registered, None
        if registered is not None:
            registered.close()

    @property
    def _memory(self) -> RegisteredMemory:
        """The registered memory, created for the first channel: most processes of a job never open one."""
        with self._lock:
            if self._registered is None:
                self._registered = self._register()
            return self._registered

    def _serve(
        self, memory: RegisteredMemory, serve: Callable[[MessageChannel], None], carrier: MessageChannel
    ) -> None:
        with contextlib.closing(NixlChannel(carrier, memory, self._least_bytes)) as channel:
            serve(channel)


_ENVELOPE = struct.Struct(">BI")
_KINDS = range(4)
_INLINE, _OFFERED, _PIECE, _KEEPALIVE = _KINDS
_MAX_OFFER_BYTES = 64 << 10
_MAX_NIXL_HEADER_BYTES = MAX_MESSAGE_HEADER_BYTES - _MAX_OFFER_BYTES - _ENVELOPE.size
_KEEPALIVE_S = 0.2
_PIPELINE_DEPTH = 4
"""Number of buffers that one channel fills before the first one is read."""
_encode = msgspec.msgpack.Encoder().encode


class NixlChannel:
    """Message channel that sends large payloads over RDMA and the rest over its carrier."""

    def __init__(self, carrier: MessageChannel, memory: RegisteredMemory, least_bytes: int) -> None:
        self.peer = carrier.peer
        self._carrier = carrier
        self._memory = memory
        self._least_bytes = least_bytes
        self._limits = MAX_MESSAGE_HEADER_BYTES, MAX_PAYLOAD_BYTES
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._metadata_sent = False
        self._tickets: list[int] = []
        """Tickets of buffers that the peer has not read."""
        self._source = ""
        """NIXL's name of the peer."""
        self._left = 0
        """Bytes of an offered payload that have not been received."""
        self._inline = 0
        self._closed_reason = ""

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
        if len(header) > _MAX_NIXL_HEADER_BYTES or size > MAX_PAYLOAD_BYTES:
            raise ProtocolError(
                f"a message of {len(header)} + {size} bytes is above the limit of {_MAX_NIXL_HEADER_BYTES} for its "
                f"header "
                f"or {MAX_PAYLOAD_BYTES} for its payload"
            )
        with self._sending:
            self._check_usable()
            if size < self._least_bytes:
                self._carrier.send(_ENVELOPE.pack(_INLINE, len(header)) + header, payload)
                return
            with self._closing_on_error():
                self._offer(header, size)
                self._send_pieces([part for part in payload if payload_part_size(part)])

    def receive(self, *, idle_s: float | None = None, within_s: float | None = None) -> IncomingMessage | None:
        begun = time.monotonic()
        with self._receiving:
            self._check_usable()
            if self._left or self._inline:
                raise RequestError(f"{self._left or self._inline} bytes of the message before have not been taken")
            with self._closing_on_error():
                while True:
                    spent = time.monotonic() - begun
                    incoming = self._carrier.receive(
                        idle_s=None if idle_s is None else max(0.0, idle_s - spent),
                        within_s=None if within_s is None else max(0.0, within_s - spent),
                    )
                    if incoming is None:
                        return None
                    kind, header, rest = self._parse_envelope(incoming)
                    if kind != _KEEPALIVE:
                        return self._accept_message(kind, header, rest, incoming.payload_bytes)

    def receive_into(self, views: Sequence[memoryview], seen: ProgressCallback | None = None) -> None:
        with self._receiving:
            self._check_usable()
            if not self._left:
                self._carrier.receive_into(views, seen)
                self._inline = 0
                return
            with BufferCursor(views, seen) as cursor:
                if cursor.left != self._left:
                    raise RequestError(f"{cursor.left} bytes were given to fill, the payload has {self._left}")
                if any(view.readonly for view in views):
                    raise RequestError("cannot receive into a read-only view")
                with self._closing_on_error():
                    self._read_pieces(cursor)

    def mark_authenticated(self) -> None:
        self._carrier.mark_authenticated()

    def discard(self) -> None:
        with self._receiving:
            self._check_usable()
            if not self._left:
                self._carrier.discard()
                self._inline = 0
                return
            with self._closing_on_error():
                while self._left:
                    self._memory.skip(self._source, self._next_piece().ticket)

    def abandon(self) -> None:
        self._closed_reason = "the process was forked"
        self._carrier.abandon()

    def close(self) -> None:
        self._closed_reason = self._closed_reason or "closed on this side"
        self._carrier.close()
        with self._sending, self._receiving:
            self._memory.abandon_tickets(self._tickets)

    def _limit(self, header_bytes: int, payload_bytes: int) -> None:
        """Set the limits; unauthenticated peers, which may send no payload, may not offer one either."""
        self._limits = header_bytes, payload_bytes
        self._carrier.max_header_bytes = header_bytes + _ENVELOPE.size + (_MAX_OFFER_BYTES if payload_bytes else 0)
        self._carrier.max_payload_bytes = payload_bytes

    def _check_usable(self) -> None:
        if self._closed_reason:
            raise PeerUnreachableError(f"the channel to {self.peer} is over: {self._closed_reason}")

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._closed_reason = self._closed_reason or str(error) or type(error).__name__
            self._carrier.close()
            raise

    def _offer(self, header: bytes, size: int) -> None:
        metadata = b"" if self._metadata_sent else self._memory.agent_metadata
        envelope = _ENVELOPE.pack(_OFFERED, len(header))
        self._carrier.send(envelope + header + _encode(PayloadOffer(size, metadata)))
        self._metadata_sent = True

    def _send_pieces(self, parts: list[memoryview | FileSlice]) -> None:
        at, start = 0, 0
        while at < len(parts):
            self._wait_until_read()
            buffer = self._memory.take(self._check_usable)
            filled = 0
            try:
                while at < len(parts) and filled < self._memory.buffer_bytes:
                    with buffer.view[filled:] as room:
                        count = copy_payload_part(room, parts[at], start)
                    filled, start = filled + count, start + count
                    if start == payload_part_size(parts[at]):
                        at, start = at + 1, 0
            except BaseException:
                self._memory.put_back(buffer)
                raise
            ticket = self._memory.publish(buffer)
            self._tickets.append(ticket)
            self._carrier.send(_ENVELOPE.pack(_PIECE, 0) + _encode(PayloadPiece(buffer.address, filled, ticket)))

    def _wait_until_read(self) -> None:
        """Wait until the peer has few unread buffers; messages in between detect a dead peer."""
        asked = time.monotonic()
        for _ in poll_until_timeout(self.timeout_s, self._check_usable, f"silent for {self.timeout_s:g} s"):
            self._tickets = self._memory.unread_tickets(self._tickets)
            if len(self._tickets) < _PIPELINE_DEPTH:
                return
            if time.monotonic() > asked + _KEEPALIVE_S:
                self._carrier.send(_ENVELOPE.pack(_KEEPALIVE, 0))
                asked = time.monotonic()

    def _parse_envelope(self, incoming: IncomingMessage) -> tuple[int, bytes, bytes]:
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

    def _accept_message(self, kind: int, header: bytes, rest: bytes, inline_bytes: int) -> IncomingMessage:
        if kind == _INLINE:
            self._inline = inline_bytes
            return IncomingMessage(header, inline_bytes)
        if kind != _OFFERED:
            raise ProtocolError(f"{self.peer} sent a piece of a payload that it did not offer")
        offer = decode_message(rest, PayloadOffer)
        if not 0 < offer.payload_bytes <= self.max_payload_bytes:
            raise ProtocolError(
                f"{self.peer} announced a payload of {offer.payload_bytes} bytes, the limit is {self.max_payload_bytes}"
            )
        if offer.agent_metadata:
            self._source = self._memory.add_remote_agent(offer.agent_metadata)
        self._left = offer.payload_bytes
        return IncomingMessage(header, offer.payload_bytes)

    def _next_piece(self) -> PayloadPiece:
        while (incoming := self._carrier.receive(idle_s=self.timeout_s)) is not None:
            kind, _, rest = self._parse_envelope(incoming)
            if kind == _KEEPALIVE:
                continue
            piece = decode_message(rest, PayloadPiece) if kind == _PIECE else None
            if piece is None or not 0 < piece.size <= self._left:
                raise ProtocolError(f"{self.peer} sent something else than the rest of a payload of {self._left} bytes")
            self._left -= piece.size
            return piece
        raise PeerUnreachableError(f"{self.peer}: the connection ended {self._left} bytes before the end of a payload")

    def _read_pieces(self, cursor: BufferCursor) -> None:
        """Read all pieces; the copy of one buffer overlaps with the read of the next one."""
        before: RdmaRead | None = None
        try:
            while self._left:
                for address, size, ticket in split_payload_piece(self._next_piece(), self._memory.buffer_bytes):
                    read = self._memory.read(self._source, address, size, ticket, self._check_usable)
                    try:
                        if before is not None:
                            copy_to_cursor(before, cursor)
                        read.wait(self.timeout_s, self._check_usable)
                    finally:
                        if before is not None:
                            before.release()
                        before = read
            if before is not None:
                copy_to_cursor(before, cursor)
        finally:
            if before is not None:
                before.release()


class PayloadOffer(msgspec.Struct, frozen=True, array_like=True):
    payload_bytes: int
    agent_metadata: bytes


class PayloadPiece(msgspec.Struct, frozen=True, array_like=True):
    address: int
    size: int
    ticket: int


def split_payload_piece(piece: PayloadPiece, most_bytes: int) -> Iterator[tuple[int, int, int | None]]:
    """Yield the reads for a piece; only the last one has the ticket, which notifies the sender."""
    for start in range(0, piece.size, most_bytes):
        last = start + most_bytes >= piece.size
        yield piece.address + start, min(most_bytes, piece.size - start), piece.ticket if last else None


def copy_to_cursor(read: RdmaRead, cursor: BufferCursor) -> None:
    done = 0
    while done < read.size:
        for view in cursor.window(read.size - done):
            view[:] = read.buffer.view[done : done + view.nbytes]
            done += view.nbytes
            cursor.advance(view.nbytes)


def payload_part_size(part: memoryview | FileSlice) -> int:
    return part.size if isinstance(part, FileSlice) else part.nbytes


def copy_payload_part(room: memoryview, part: memoryview | FileSlice, start: int) -> int:
    """Copy ``part`` from ``start``, as far as it fits, and return the number of bytes."""
    size = min(payload_part_size(part) - start, room.nbytes)
    with room[:size] as target:
        if isinstance(part, FileSlice):
            count = os.preadv(part.fd, [target], part.start + start)
            if count == 0:
                raise ShardDamagedError(f"a file ended at byte {part.start + start}, before the end of its slice")
            return count
        with part.cast("B") as flat, flat[start : start + size] as source:
            target[:] = source
    return size


_POLL_US = 500
"""Microseconds that NIXL's thread sleeps when idle; without a pause it uses a full core."""
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3
_MODULES = ("nixl_cu12._bindings", "nixl_cu13._bindings")
"""Modules of NIXL's bindings. The package above them would import torch to choose one."""
_TICKET = struct.Struct(">Q")


@dataclass(eq=False)
class RdmaBuffer:
    address: int
    view: memoryview
    free_at: float = math.inf
    """Time after which no read can still run, if no notification arrives."""


class RegisteredMemory:
    """One NIXL agent and its buffers. Thread-safe."""

    def __init__(
        self, backend: str, options: Mapping[str, str], *, buffer_bytes: int, buffers: int, timeout_s: float
    ) -> None:
        self._nixl = nixl_bindings()
        self.buffer_bytes = buffer_bytes
        self._timeout_s = timeout_s
        self._agent = self._create_agent(backend, options)
        self._memory = mmap.mmap(-1, buffer_bytes * buffers)
        start = _address(self._memory)
        self._places = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(start, buffer_bytes * buffers, 0, "")])
        self._agent.registerMem(self._places, [])
        self.agent_metadata: bytes = self._agent.getLocalMD()
        """Metadata that other agents need to read from this one."""
        self._lock = threading.Lock()
        whole = memoryview(self._memory)
        starts = range(0, buffer_bytes * buffers, buffer_bytes)
        self._free = [RdmaBuffer(start + at, whole[at : at + buffer_bytes]) for at in starts]
        self._lent: dict[int, RdmaBuffer] = {}
        self._unfinished: list[tuple[int, RdmaBuffer]] = []
        """Handles of abandoned reads that still run, with their target buffers."""
        self._tickets = itertools.count(1)
        self._remote_agents: dict[bytes, str] = {}

    def _create_agent(self, backend: str, options: Mapping[str, str]) -> Any:
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = _POLL_US
        agent = self._nixl.nixlAgent(uuid.uuid4().hex, config)
        try:
            agent.createBackend(backend, dict(options))
        except Exception as error:  # NIXL has an exception class for each error code
            known = ", ".join(agent.getAvailPlugins())
            raise RequestError(f"NIXL cannot use {backend!r} here ({error}); it comes with {known}") from error
        return agent

    def close(self) -> None:
        """Release the memory and the agent; no channel uses it any longer."""
        with self._lock:
            self._agent.deregisterMem(self._places, [])
            del self._agent  # deleting it ends its threads

    # -- sender ---------------------------------------------------------------------------------------------------

    def take(self, check: Callable[[], None]) -> RdmaBuffer:
        """Return a free buffer, waiting for one; ``check`` raises to end the wait."""
        for _ in poll_until_timeout(self._timeout_s, check, "no buffer came free"):
            with self._lock:
                self._collect()
                if self._free:
                    return self._free.pop()
        raise PeerUnreachableError("no buffer came free")

    def publish(self, buffer: RdmaBuffer) -> int:
        """Return the ticket under which the peer's read of the buffer is notified."""
        with self._lock:
            ticket = next(self._tickets)
            buffer.free_at = math.inf
            self._lent[ticket] = buffer
        return ticket

    def unread_tickets(self, tickets: Iterable[int]) -> list[int]:
        with self._lock:
            self._collect()
            return [ticket for ticket in tickets if ticket in self._lent]

    def put_back(self, buffer: RdmaBuffer) -> None:
        with self._lock:
            self._free.append(buffer)

    def abandon_tickets(self, tickets: Iterable[int]) -> None:
        """Free these buffers after a timeout, because their notifications may never arrive."""
        with self._lock:
            for buffer in [self._lent[ticket] for ticket in tickets if ticket in self._lent]:
                buffer.free_at = time.monotonic() + 2 * self._timeout_s

    def _collect(self) -> None:
        """Free buffers that were read, timed out, or whose abandoned reads ended."""
        notified = [ticket for tickets in self._agent.getNotifs({}).values() for ticket in tickets]
        read = [_TICKET.unpack(ticket)[0] for ticket in notified if len(ticket) == _TICKET.size]
        now = time.monotonic()
        late = [ticket for ticket, buffer in self._lent.items() if buffer.free_at <= now]
        self._free += [self._lent.pop(ticket) for ticket in {*read, *late} if ticket in self._lent]
        ended = [write for write in self._unfinished if self._has_ended(write[0])]
        self._unfinished = [write for write in self._unfinished if write not in ended]
        self._free += [buffer for _, buffer in ended]

    # -- receiver -------------------------------------------------------------------------------------------------

    def add_remote_agent(self, metadata: bytes) -> str:
        """Register a peer's metadata and return its name; its buffers can be read afterwards."""
        with self._lock:
            if metadata not in self._remote_agents:
                try:
                    name = self._agent.loadRemoteMD(metadata)
                except Exception as error:
                    raise PeerUnreachableError(f"NIXL does not know how to reach it: {error}") from error
                self._remote_agents[metadata] = name.decode()
            return self._remote_agents[metadata]

    def read(self, source: str, address: int, size: int, ticket: int | None, check: Callable[[], None]) -> RdmaRead:
        """Start a read of ``size`` bytes at ``address`` of ``source``; the ``ticket`` notifies it at the end."""
        buffer = self.take(check)
        nixl, agent = self._nixl, self._agent
        notification = b"" if ticket is None else _TICKET.pack(ticket)
        try:
            here = nixl.nixlXferDList(nixl.DRAM_SEG, [(buffer.address, size, 0)])
            there = nixl.nixlXferDList(nixl.DRAM_SEG, [(address, size, 0)])
            handle = agent.createXferReq(nixl.NIXL_READ, here, there, source, notification, [])
        except Exception as error:
            self.put_back(buffer)
            raise self._peer_lost(source, error) from error
        read = RdmaRead(self, source, handle, buffer, size)
        try:
            agent.postXferReq(handle)
        except Exception as error:
            read.release()
            raise self._peer_lost(source, error) from error
        return read

    def skip(self, source: str, ticket: int) -> None:
        """Notify the peer that the ticket's buffer will not be read."""
        with contextlib.suppress(Exception):  # then the peer frees the buffer after its timeout
            self._agent.genNotif(source, _TICKET.pack(ticket), [])

    def done(self, read: RdmaRead) -> bool:
        try:
            return bool(self._agent.getXferStatus(read.handle) == self._nixl.NIXL_SUCCESS)
        except Exception as error:
            raise self._peer_lost(read.source, error) from error

    def release(self, read: RdmaRead) -> None:
        with self._lock:
            self._unfinished.append((read.handle, read.buffer))
            self._collect()

    def _has_ended(self, handle: int) -> bool:
        """Return whether a read has ended; a running one is canceled."""
        try:
            self._agent.releaseXferReq(handle)
        except Exception:  # noqa: BLE001 - the read could not be canceled, and is checked again later
            return False
        return True

    def _peer_lost(self, source: str, error: Exception) -> PeerUnreachableError:
        """Forget the peer, so that the next channel registers it again, and return the error to raise."""
        with self._lock, contextlib.suppress(Exception):
            self._remote_agents = {metadata: name for metadata, name in self._remote_agents.items() if name != source}
            self._agent.invalidateRemoteMD(source)
        return PeerUnreachableError(f"NIXL could not read from it: {error}")


@dataclass(eq=False)
class RdmaRead:
    """A read into a buffer."""

    memory: RegisteredMemory
    source: str
    handle: int
    buffer: RdmaBuffer
    size: int

    def wait(self, within_s: float, check: Callable[[], None]) -> None:
        for _ in poll_until_timeout(within_s, check, f"silent for {within_s:.3g} s"):
            if self.memory.done(self):
                return

    def release(self) -> None:
        """Free the buffer after the read has ended."""
        self.memory.release(self)


def poll_until_timeout(within_s: float, check: Callable[[], None], otherwise: str) -> Iterator[None]:
    """Yield with growing pauses; raise :class:`PeerUnreachableError` after ``within_s`` seconds."""
    deadline = time.monotonic() + within_s
    pause_s = _FIRST_PAUSE_S
    while True:
        check()
        yield
        if time.monotonic() > deadline:
            raise PeerUnreachableError(otherwise)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def nixl_bindings() -> Any:
    """Return NIXL's bindings; raise :class:`MissingPackageError` if NIXL is not installed."""
    for name in _MODULES:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise missing_package_error("the nixl transport", "nixl", "'tieredckpt[nixl]'")


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
