"""RDMA transport over NIXL: registered buffers, payloads that the receiver reads itself, TCP for everything else.

Who may connect is decided over TCP, by the handshake; until then nothing is offered or read. NIXL itself asks nobody
who they are: the network it uses has to be one where everybody is trusted. A payload that was changed is noticed by
those who verify it, as always.

::

    sender                                      receiver
      OFFERED | header, size, introduction ──>                     (over the other channel, as is PIECE)
      PIECE | address, size, ticket        ──>
              registered buffer            <──  reads it by itself
              told: the ticket is done     <──
      PIECE ...

A sender fills a buffer and says where it is; the receiver reads it from there into a buffer of its own, and NIXL tells
the sender when that is done. A buffer whose reader went away without a word is not filled again while that reader might
still be reading.
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
    """``carrier`` finds peers and carries what is small; ``backend`` and its ``options`` are NIXL's. Which adapters UCX
    uses is for its own variables to say (``UCX_NET_DEVICES=mlx5_0:1``).

    From its first use on it holds ``buffers`` times ``buffer_bytes`` of registered memory, for all channels together.
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
        nixl_bindings()  # or nothing will work
        self._carrier = carrier or TcpTransport(timeout_s=timeout_s)
        self._least_bytes = least_bytes
        self._register = partial(
            RegisteredMemory, backend, options or {}, buffer_bytes=buffer_bytes, buffers=buffers, timeout_s=timeout_s
        )
        self._lock = threading.Lock()
        self._registered: RegisteredMemory | None = None

    def listen(self, address: str, serve: Callable[[MessageChannel], None]) -> Listener:
        memory = self._memory  # so that a backend that is not there is said to who starts, not to who connects
        return self._carrier.listen(address, partial(self._serve, memory, serve))

    def connect(self, address: str, *, timeout_s: float = 5.0) -> MessageChannel:
        return NixlChannel(self._carrier.connect(address, timeout_s=timeout_s), self._memory, self._least_bytes)

    def close(self) -> None:
        """Give the registered memory back, after all listeners and channels were closed."""
        with self._lock:
            registered, self._registered = self._registered, None
        if registered is not None:
            registered.close()

    @property
    def _memory(self) -> RegisteredMemory:
        """Registered by the first channel: most processes of a job never open one."""
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
_INLINE, _OFFERED, _PIECE, _STILL_THERE = _KINDS
_MAX_OFFER_BYTES = 64 << 10
_MAX_NIXL_HEADER_BYTES = MAX_MESSAGE_HEADER_BYTES - _MAX_OFFER_BYTES - _ENVELOPE.size
_ASK_EVERY_S = 0.2
_AHEAD = 4
"""Buffers of one channel that are filled before the first of them was read."""
_encode = msgspec.msgpack.Encoder().encode


class NixlChannel:
    """A :class:`~peerstore.transport.base.MessageChannel` that carries large payloads beside another channel."""

    def __init__(self, carrier: MessageChannel, memory: RegisteredMemory, least_bytes: int) -> None:
        self.peer = carrier.peer
        self._carrier = carrier
        self._memory = memory
        self._least_bytes = least_bytes
        self._limits = MAX_MESSAGE_HEADER_BYTES, MAX_PAYLOAD_BYTES
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
            self._check()
            if size < self._least_bytes:
                self._carrier.send(_ENVELOPE.pack(_INLINE, len(header)) + header, payload)
                return
            with self._closing_on_error():
                self._offer(header, size)
                self._send_pieces([part for part in payload if payload_part_size(part)])

    def receive(self, *, idle_s: float | None = None, within_s: float | None = None) -> IncomingMessage | None:
        begun = time.monotonic()
        with self._receiving:
            self._check()
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
                    kind, header, rest = self._opened(incoming)
                    if kind != _STILL_THERE:
                        return self._arrived(kind, header, rest, incoming.payload_bytes)

    def receive_into(self, views: Sequence[memoryview], seen: ProgressCallback | None = None) -> None:
        with self._receiving:
            self._check()
            if not self._left:
                self._carrier.receive_into(views, seen)
                self._inline = 0
                return
            with BufferCursor(views, seen) as cursor:
                if cursor.left != self._left:
                    raise RequestError(f"{cursor.left} bytes were given to fill, the payload has {self._left}")
                if any(view.readonly for view in views):
                    raise RequestError("a view that is to be filled is read-only")
                with self._closing_on_error():
                    self._read_pieces(cursor)

    def mark_authenticated(self) -> None:
        self._carrier.mark_authenticated()

    def discard(self) -> None:
        with self._receiving:
            self._check()
            if not self._left:
                self._carrier.discard()
                self._inline = 0
                return
            with self._closing_on_error():
                while self._left:
                    self._memory.skip(self._source, self._next_piece().ticket)

    def close(self) -> None:
        self._closed_reason = self._closed_reason or "closed on this side"
        self._carrier.close()
        with self._sending, self._receiving:
            self._memory.abandon_tickets(self._tickets)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _limit(self, header_bytes: int, payload_bytes: int) -> None:
        """Strangers, who may send no payload, may offer none either."""
        self._limits = header_bytes, payload_bytes
        self._carrier.max_header_bytes = header_bytes + _ENVELOPE.size + (_MAX_OFFER_BYTES if payload_bytes else 0)
        self._carrier.max_payload_bytes = payload_bytes

    def _check(self) -> None:
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
        introduction = b"" if self._introduced else self._memory.agent_metadata
        envelope = _ENVELOPE.pack(_OFFERED, len(header))
        self._carrier.send(envelope + header + _encode(PayloadOffer(size, introduction)))
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
        """Until the peer has not too much to read. Asked whether it is still there, the kernel says if it is not."""
        asked = time.monotonic()
        for _ in poll_until_timeout(self.timeout_s, self._check, f"silent for {self.timeout_s:g} s"):
            self._tickets = self._memory.unread_tickets(self._tickets)
            if len(self._tickets) < _AHEAD:
                return
            if time.monotonic() > asked + _ASK_EVERY_S:
                self._carrier.send(_ENVELOPE.pack(_STILL_THERE, 0))
                asked = time.monotonic()

    def _opened(self, incoming: IncomingMessage) -> tuple[int, bytes, bytes]:
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

    def _arrived(self, kind: int, header: bytes, rest: bytes, inline_bytes: int) -> IncomingMessage:
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
            kind, _, rest = self._opened(incoming)
            if kind == _STILL_THERE:
                continue
            piece = decode_message(rest, PayloadPiece) if kind == _PIECE else None
            if piece is None or not 0 < piece.size <= self._left:
                raise ProtocolError(f"{self.peer} sent something else than the rest of a payload of {self._left} bytes")
            self._left -= piece.size
            return piece
        raise PeerUnreachableError(f"{self.peer}: the connection ended {self._left} bytes before the end of a payload")

    def _read_pieces(self, cursor: BufferCursor) -> None:
        """While one buffer is being filled, the one before is copied to where it belongs."""
        before: RdmaRead | None = None
        try:
            while self._left:
                for address, size, ticket in split_payload_piece(self._next_piece(), self._memory.buffer_bytes):
                    read = self._memory.read(self._source, address, size, ticket, self._check)
                    try:
                        if before is not None:
                            copy_to_cursor(before, cursor)
                        read.wait(self.timeout_s, self._check)
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
    """A piece in as many reads as it takes; the sender is told after the last."""
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
    """As much of ``part``, from ``start`` on, as there is room for."""
    size = min(payload_part_size(part) - start, room.nbytes)
    with room[:size] as target:
        if isinstance(part, FileSlice):
            count = os.preadv(part.fd, [target], part.start + start)
            if count == 0:
                raise ShardDamagedError(f"a file ended at byte {part.start + start}, within what was to be sent")
            return count
        with part.cast("B") as flat, flat[start : start + size] as source:
            target[:] = source
    return size


_POLL_US = 500
"""How long NIXL's own thread sleeps when there is nothing to do; without, it takes a core."""
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3
_MODULES = ("nixl_cu12._bindings", "nixl_cu13._bindings")
"""Imported by name: the package above them asks torch which of them it is to be."""
_TICKET = struct.Struct(">Q")


@dataclass(eq=False)
class RdmaBuffer:
    address: int
    view: memoryview
    free_at: float = math.inf
    """When nobody can be reading it any more, although nobody said so."""


class RegisteredMemory:
    """One NIXL agent and its buffers. Every method may be called from any thread."""

    def __init__(
        self, backend: str, options: Mapping[str, str], *, buffer_bytes: int, buffers: int, timeout_s: float
    ) -> None:
        self._nixl = nixl_bindings()
        self.buffer_bytes = buffer_bytes
        self._timeout_s = timeout_s
        self._agent = self._make(backend, options)
        self._memory = mmap.mmap(-1, buffer_bytes * buffers)
        start = _address(self._memory)
        self._places = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(start, buffer_bytes * buffers, 0, "")])
        self._agent.registerMem(self._places, [])
        self.agent_metadata: bytes = self._agent.getLocalMD()
        """What others have to be told before they can read here."""
        self._lock = threading.Lock()
        whole = memoryview(self._memory)
        starts = range(0, buffer_bytes * buffers, buffer_bytes)
        self._free = [RdmaBuffer(start + at, whole[at : at + buffer_bytes]) for at in starts]
        self._lent: dict[int, RdmaBuffer] = {}
        self._unfinished: list[tuple[int, RdmaBuffer]] = []
        """Reads that were given up but go on, and where they write."""
        self._tickets = itertools.count(1)
        self._known: dict[bytes, str] = {}

    def _make(self, backend: str, options: Mapping[str, str]) -> Any:
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = _POLL_US
        agent = self._nixl.nixlAgent(uuid.uuid4().hex, config)
        try:
            agent.createBackend(backend, dict(options))
        except Exception as error:  # NIXL has a class for each of its numbers
            known = ", ".join(agent.getAvailPlugins())
            raise RequestError(f"NIXL cannot use {backend!r} here ({error}); it comes with {known}") from error
        return agent

    def close(self) -> None:
        """Nobody uses it any more."""
        with self._lock:
            self._agent.deregisterMem(self._places, [])
            del self._agent  # its threads end with it

    # -- for who sends --------------------------------------------------------------------------------------------

    def take(self, check: Callable[[], None]) -> RdmaBuffer:
        """A buffer nobody reads. ``check`` raises when waiting for one makes no sense any more."""
        for _ in poll_until_timeout(self._timeout_s, check, "no buffer came free"):
            with self._lock:
                self._collect()
                if self._free:
                    return self._free.pop()
        raise PeerUnreachableError("no buffer came free")

    def publish(self, buffer: RdmaBuffer) -> int:
        """Somebody will read it; under this ticket is said later that it was done."""
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
        """Perhaps nobody will ever say that these were read."""
        with self._lock:
            for buffer in [self._lent[ticket] for ticket in tickets if ticket in self._lent]:
                buffer.free_at = time.monotonic() + 2 * self._timeout_s

    def _collect(self) -> None:
        """Take back what is free again."""
        said = [ticket for tickets in self._agent.getNotifs({}).values() for ticket in tickets]
        read = [_TICKET.unpack(ticket)[0] for ticket in said if len(ticket) == _TICKET.size]
        now = time.monotonic()
        late = [ticket for ticket, buffer in self._lent.items() if buffer.free_at <= now]
        self._free += [self._lent.pop(ticket) for ticket in {*read, *late} if ticket in self._lent]
        ended = [write for write in self._unfinished if self._ended(write[0])]
        self._unfinished = [write for write in self._unfinished if write not in ended]
        self._free += [buffer for _, buffer in ended]

    # -- for who receives -----------------------------------------------------------------------------------------

    def add_remote_agent(self, introduction: bytes) -> str:
        """Who introduced itself so; from now on its buffers can be read."""
        with self._lock:
            if introduction not in self._known:
                try:
                    name = self._agent.loadRemoteMD(introduction)
                except Exception as error:
                    raise PeerUnreachableError(f"NIXL does not know how to reach it: {error}") from error
                self._known[introduction] = name.decode()
            return self._known[introduction]

    def read(self, source: str, address: int, size: int, ticket: int | None, check: Callable[[], None]) -> RdmaRead:
        """Begin to read ``size`` bytes at ``address`` of ``source``, which is told by ``ticket`` when it is done."""
        buffer = self.take(check)
        nixl, agent = self._nixl, self._agent
        said = b"" if ticket is None else _TICKET.pack(ticket)
        try:
            here = nixl.nixlXferDList(nixl.DRAM_SEG, [(buffer.address, size, 0)])
            there = nixl.nixlXferDList(nixl.DRAM_SEG, [(address, size, 0)])
            handle = agent.createXferReq(nixl.NIXL_READ, here, there, source, said, [])
        except Exception as error:
            self.put_back(buffer)
            raise self._lost(source, error) from error
        read = RdmaRead(self, source, handle, buffer, size)
        try:
            agent.postXferReq(handle)
        except Exception as error:
            read.release()
            raise self._lost(source, error) from error
        return read

    def skip(self, source: str, ticket: int) -> None:
        """What the ticket stands for will not be read."""
        with contextlib.suppress(Exception):  # then it is left behind over there
            self._agent.genNotif(source, _TICKET.pack(ticket), [])

    def done(self, read: RdmaRead) -> bool:
        try:
            return bool(self._agent.getXferStatus(read.handle) == self._nixl.NIXL_SUCCESS)
        except Exception as error:
            raise self._lost(read.source, error) from error

    def release(self, read: RdmaRead) -> None:
        with self._lock:
            self._unfinished.append((read.handle, read.buffer))
            self._collect()

    def _ended(self, handle: int) -> bool:
        """Whether a read writes nothing any more; one that goes on is told to stop."""
        try:
            self._agent.releaseXferReq(handle)
        except Exception:  # noqa: BLE001 - it could not be stopped, and will be asked again
            return False
        return True

    def _lost(self, source: str, error: Exception) -> PeerUnreachableError:
        """The next channel introduces it again."""
        with self._lock, contextlib.suppress(Exception):
            self._known = {said: name for said, name in self._known.items() if name != source}
            self._agent.invalidateRemoteMD(source)
        return PeerUnreachableError(f"NIXL could not read from it: {error}")


@dataclass(eq=False)
class RdmaRead:
    """Bytes on their way into a buffer."""

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
        """The buffer is somebody else's once nothing is written into it any more."""
        self.memory.release(self)


def poll_until_timeout(within_s: float, check: Callable[[], None], otherwise: str) -> Iterator[None]:
    """Again and again, at first often, until it is too late."""
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
    """NIXL, where it is installed."""
    for name in _MODULES:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise RequestError("the nixl transport is not installed here: pip install 'tieredckpt[nixl]'")


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
