"""Test support: an in-memory network with faults and a controllable clock, a store without files.

::

    network = MemoryNetwork()
    here, there = network.transport("n1"), network.transport("n2")
    with contextlib.closing(there.listen("n2:7070", serve)):
        channel = here.connect("n2:7070")
        network.cut("n1", "n2")
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from peerstore.errors import PeerUnreachableError, RequestError
from peerstore.settings import StoreSettings
from peerstore.store.arena import MemfdArena
from peerstore.store.node_store import NodeStore
from peerstore.transport.base import FileSlice, MessageChannel, Payload
from peerstore.transport.connection_threads import ConnectionThreads
from peerstore.transport.framing import FRAME_PREFIX, FramedChannel


class MemoryNetwork:
    """Nodes, links and faults. Faults also apply to open channels.

    A channel buffers at most ``capacity_bytes`` in each direction, like a socket.
    """

    def __init__(self, *, clock: NetworkClock | None = None, capacity_bytes: int = 256 << 10) -> None:
        self._clock = clock or RealClock()
        self._clock.on_change(self._wake)
        self._capacity = capacity_bytes
        self._lock = threading.RLock()
        self._links: dict[tuple[str, str], LinkState] = {}
        self._listeners: dict[str, MemoryListener] = {}
        self._endpoints: weakref.WeakKeyDictionary[Pipe, frozenset[str]] = weakref.WeakKeyDictionary()
        self._ports = itertools.count(50_000)

    def transport(self, node: str, *, timeout_s: float = 30.0) -> MemoryTransport:
        """Return the transport of ``node``."""
        return MemoryTransport(self, node, timeout_s)

    # -- faults ---------------------------------------------------------------------------------------------------

    def cut(self, source: str, target: str, *, both: bool = True) -> None:
        """Block all bytes from ``source`` to ``target`` and, with ``both``, back.

        Bytes in flight wait, as TCP would retransmit them. No new channel can be opened in either direction.
        """
        self._change(source, target, both=both, open=False, flowing=False)

    def stall(self, source: str, target: str) -> None:
        """Block the bytes from ``source`` to ``target``; channels can still be opened."""
        self._change(source, target, both=False, flowing=False)

    def delay(self, source: str, target: str, seconds: float) -> None:
        """Delay all later bytes by ``seconds``."""
        self._change(source, target, both=False, delay_s=seconds)

    def heal(self, source: str, target: str) -> None:
        """Remove all faults in both directions; waiting bytes are delivered."""
        self._change(source, target, both=True, open=True, flowing=True, delay_s=0.0, drop_after=None, flips={})

    def drop_after(self, source: str, target: str, size_bytes: int) -> None:
        """Break the channel that sends the last of the next ``size_bytes`` bytes."""
        self._change(source, target, both=False, drop_after=size_bytes)

    def flip_bit(self, source: str, target: str, *, payload: int = 0, byte: int = 0, bit: int = 0) -> None:
        """Flip one bit of a payload; ``payload`` counts payloads that begin from now on, from 0."""
        with self._lock:
            way = self._way(source, target)
            way.flips[way.payloads + payload] = (byte, bit)

    def kill_node(self, node: str) -> None:
        """Break all channels of the node and remove its listeners, until it listens again."""
        with self._lock:
            for address in [at for at, listener in self._listeners.items() if listener.node == node]:
                del self._listeners[address]
            for pipe, nodes in list(self._endpoints.items()):
                if node in nodes:
                    pipe.reset(f"{node} is gone")

    def _change(self, source: str, target: str, *, both: bool, **changes: object) -> None:
        with self._lock:
            for way in [self._way(source, target), *([self._way(target, source)] if both else [])]:
                for name, value in changes.items():
                    setattr(way, name, value)
            self._wake()

    def _way(self, source: str, target: str) -> LinkState:
        return self._links.setdefault((source, target), LinkState())

    def _wake(self) -> None:
        with self._lock:
            for pipe in list(self._endpoints):
                pipe.wake()

    # -- channels -------------------------------------------------------------------------------------------------

    def listen(self, node: str, address: str, serve: Callable[[MessageChannel], None]) -> MemoryListener:
        host, colon, port = address.rpartition(":")
        if not colon:
            raise RequestError(f"address {address!r} is not node:port")
        with self._lock:
            address = f"{host or node}:{next(self._ports) if port == '0' else port}"
            if address in self._listeners:
                raise OSError(errno.EADDRINUSE, f"{address} is in use already")
            listener = self._listeners[address] = MemoryListener(
                self, node, address, ConnectionThreads(serve, most=1024)
            )
        return listener

    def unlisten(self, listener: MemoryListener) -> None:
        with self._lock:
            if self._listeners.get(listener.address) is listener:
                del self._listeners[listener.address]

    def connect(self, node: str, address: str, timeout_s: float) -> MessageChannel:
        """Return a channel; raise at once if the link is cut, instead of after a timeout."""
        with self._lock:
            listener = self._listeners.get(address)
            if listener is None:
                raise PeerUnreachableError(f"{address} cannot be reached: no process listens there")
            there, back = self._way(node, listener.node), self._way(listener.node, node)
            if not (there.open and back.open):
                raise PeerUnreachableError(f"{address} cannot be reached from {node}: the way is cut")
            out, into = (
                Pipe(*ways, self._clock, self._lock, self._capacity) for ways in ((there, back), (back, there))
            )
            for pipe in (out, into):
                self._endpoints[pipe] = frozenset((node, listener.node))
                pipe.on_drop = partial(_reset_pipes, out, into)
            here = PipeStream(out, into, self._clock, self._lock)
            far = PipeStream(into, out, self._clock, self._lock)
            peer = f"{node}:{next(self._ports)}"
            channels = self._channel(far, back, peer, timeout_s), self._channel(here, there, address, timeout_s)
        if not listener.serving.serve(lambda: channels[0], peer):
            raise PeerUnreachableError(f"{address} cannot be reached: it has too many connections")
        return channels[1]

    def _channel(self, stream: PipeStream, way: LinkState, peer: str, timeout_s: float) -> MemoryChannel:
        return MemoryChannel(stream, way, self._lock, peer, timeout_s)


def _reset_pipes(*pipes: Pipe) -> None:
    for pipe in pipes:
        pipe.reset("the connection was reset")


class MemoryChannel(FramedChannel):
    """A channel that can damage a payload, because it knows where payloads begin."""

    def __init__(self, stream: PipeStream, way: LinkState, lock: threading.RLock, peer: str, timeout_s: float) -> None:
        super().__init__(stream, peer, timeout_s)
        self._pipes = stream
        self._way = way
        self._lock = lock

    def send(self, header: bytes, payload: Payload = ()) -> None:
        if any(part.size if isinstance(part, FileSlice) else part.nbytes for part in payload):
            with self._lock:
                flip = self._way.flips.pop(self._way.payloads, None)
                self._way.payloads += 1
                if flip is not None:
                    self._pipes.flip_at(FRAME_PREFIX.size + len(header) + flip[0], flip[1])
        super().send(header, payload)


class MemoryListener:
    def __init__(self, network: MemoryNetwork, node: str, address: str, serving: ConnectionThreads) -> None:
        self.node = node
        self.address = address
        self.serving = serving
        self._network = network

    def close(self) -> None:
        self._network.unlisten(self)
        self.serving.close()


class MemoryTransport:
    """One node's end of a :class:`MemoryNetwork`. Addresses are ``node:port``; port 0 is any free one."""

    name = "memory"

    def __init__(self, network: MemoryNetwork, node: str, timeout_s: float = 30.0) -> None:
        self._network = network
        self._node = node
        self._timeout_s = timeout_s

    def listen(self, address: str, serve: Callable[[MessageChannel], None]) -> MemoryListener:
        return self._network.listen(self._node, address, serve)

    def connect(self, address: str, *, timeout_s: float = 5.0) -> MessageChannel:
        return self._network.connect(self._node, address, self._timeout_s)

    def close(self) -> None:
        """Do nothing: the transport has no shared resources."""


_BLOCK_BYTES = 64 << 10


@dataclass
class LinkState:
    """The link from one node to another, for all its channels."""

    open: bool = True
    """Whether new channels can be opened; while false, bytes of open ones wait."""
    flowing: bool = True
    delay_s: float = 0.0
    drop_after: int | None = None
    """Number of bytes after which the sending channel breaks."""
    payloads: int = 0
    """Number of payloads sent on this link."""
    flips: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Bit to flip as (byte, bit), by payload number."""


class Pipe:
    """One direction of a channel. Callers hold the network's lock, which all conditions share."""

    def __init__(
        self, way: LinkState, back: LinkState, clock: NetworkClock, lock: threading.RLock, capacity_bytes: int
    ) -> None:
        self._way = way
        self._back = back
        self._clock = clock
        self._capacity = capacity_bytes
        self._pieces: deque[tuple[float, memoryview]] = deque()
        self._held = 0
        self._flips: dict[int, int] = {}
        self._sent = 0
        self._changed = threading.Condition(lock)
        self._ended = False
        """The writer has closed."""
        self._reader_closed = False
        """The reader has closed."""
        self._broken = ""
        self.on_drop: Callable[[], None] = self.wake

    def wake(self) -> None:
        self._clock.notify(self._changed)

    def end(self) -> None:
        self._ended = True
        self.wake()

    def stop_reading(self) -> None:
        self._reader_closed = True
        self.wake()

    def reset(self, why: str) -> None:
        self._broken = self._broken or why
        self.wake()

    def flip_at(self, ahead: int, bit: int) -> None:
        """Flip ``bit`` of the byte that is sent ``ahead`` bytes later."""
        self._flips[self._sent + ahead] = self._flips.get(self._sent + ahead, 0) ^ 1 << bit

    def put(self, views: list[memoryview], within_s: float) -> int:
        self._wait(lambda: self._held < self._capacity or self._send_error() or bool(self._broken), within_s)
        if why := self._broken or self._send_error():
            raise PeerUnreachableError(why)
        ready_at = self._clock.now() + self._way.delay_s
        total = 0
        for view in views:
            with view[: self._capacity - self._held] as fitting:
                for start in range(0, fitting.nbytes, _BLOCK_BYTES):
                    total += self._put(bytearray(fitting[start : start + _BLOCK_BYTES]), ready_at)
        self.wake()
        if self._way.drop_after == 0:
            self._way.drop_after = None
            self.on_drop()
        return total

    def take(self, views: list[memoryview], within_s: float | None) -> int:
        self._wait(lambda: self._ready() or self._at_end() or bool(self._broken), within_s)
        if self._reader_closed:
            return 0
        if self._broken and not self._ready():
            raise PeerUnreachableError(self._broken)
        total = 0
        for view in views:
            filled = self._pour(view)
            total += filled
            if filled < view.nbytes:
                break
        self._held -= total
        self.wake()
        return total

    def _pour(self, view: memoryview) -> int:
        filled = 0
        while filled < view.nbytes and self._ready():
            ready_at, piece = self._pieces.popleft()
            count = min(piece.nbytes, view.nbytes - filled)
            view[filled : filled + count] = piece[:count]
            filled += count
            if count < piece.nbytes:
                self._pieces.appendleft((ready_at, piece[count:]))
        return filled

    def _put(self, piece: bytearray, ready_at: float) -> int:
        left = self._way.drop_after
        if left is not None:
            del piece[left:]
            self._way.drop_after = left - len(piece)
        for at in [at for at in self._flips if self._sent <= at < self._sent + len(piece)]:
            piece[at - self._sent] ^= self._flips.pop(at)
        self._sent += len(piece)
        self._held += len(piece)
        if piece:
            self._pieces.append((ready_at, memoryview(piece)))
        return len(piece)

    def _ready(self) -> bool:
        return bool(self._pieces) and self._way.flowing and self._pieces[0][0] <= self._clock.now()

    def _at_end(self) -> bool:
        return self._reader_closed or (self._ended and not self._pieces and self._way.flowing)

    def _send_error(self) -> str:
        """Return why sending is useless, or "". The reader's close is known only while the reverse link works."""
        if self._ended:
            return "closed on this side"
        return "the peer has closed the connection" if self._reader_closed and self._back.flowing else ""

    def _wait(self, done: Callable[[], object], within_s: float | None) -> None:
        deadline = None if within_s is None else self._clock.now() + within_s
        while not done():
            now = self._clock.now()
            if deadline is not None and now >= deadline:
                raise PeerUnreachableError(f"silent for {within_s:.3g} s")
            next_at = self._pieces[0][0] if self._pieces else now
            times = [at for at in (deadline, next_at if next_at > now else None) if at is not None]
            self._clock.wait(self._changed, min(times, default=None))


class PipeStream:
    """A :class:`~peerstore.transport.framing.ByteStream` over two pipes."""

    def __init__(self, out: Pipe, into: Pipe, clock: NetworkClock, lock: threading.RLock) -> None:
        self._out = out
        self._into = into
        self._clock = clock
        self._lock = lock

    def now(self) -> float:
        return self._clock.now()

    def send(self, views: list[memoryview], *, more: bool, within_s: float) -> int:
        with self._lock:
            return self._out.put(views, within_s)

    def send_file(self, piece: FileSlice, *, within_s: float) -> int:
        data = os.pread(piece.fd, min(piece.size, _BLOCK_BYTES), piece.start)
        return self.send([memoryview(data)], more=False, within_s=within_s) if data else 0

    def receive(self, views: list[memoryview], *, within_s: float | None) -> int:
        with self._lock:
            return self._into.take(views, within_s)

    def flip_at(self, ahead: int, bit: int) -> None:
        with self._lock:
            self._out.flip_at(ahead, bit)

    def shut(self) -> None:
        with self._lock:
            self._out.end()
            self._into.stop_reading()

    def close(self) -> None:
        """Do nothing: the stream only holds memory."""


class NetworkClock(Protocol):
    """Time of a memory network. Callers hold the lock of the condition that they pass."""

    def now(self) -> float: ...

    def wait(self, condition: threading.Condition, until: float | None) -> None:
        """Wait until the condition is notified, or the time is ``until``; may return early."""

    def notify(self, condition: threading.Condition) -> None:
        """Wake all waiting threads."""

    def on_change(self, wake: Callable[[], None]) -> None:
        """Register ``wake``, which is called when the time has moved without ending waits."""


class RealClock:
    def now(self) -> float:
        return time.monotonic()

    def wait(self, condition: threading.Condition, until: float | None) -> None:
        condition.wait(None if until is None else max(0.0, until - time.monotonic()))

    def notify(self, condition: threading.Condition) -> None:
        condition.notify_all()

    def on_change(self, wake: Callable[[], None]) -> None:
        """Do nothing: real waits end at their time."""


class StepClock:
    """A clock that only :meth:`advance` moves."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._wakes: list[Callable[[], None]] = []
        self._waiting: dict[threading.Condition, int] = {}
        self._changed = threading.Condition()

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds
        for wake in list(self._wakes):
            wake()

    def until_waiting(self, threads: int = 1, *, patience_s: float = 20.0) -> None:
        """Wait until ``threads`` threads wait for the clock, so that the effect of :meth:`advance` is certain."""
        with self._changed:
            if not self._changed.wait_for(lambda: sum(self._waiting.values()) >= threads, patience_s):
                waiting = sum(self._waiting.values())
                raise TimeoutError(f"{waiting} of {threads} threads wait for the time after {patience_s:g} s")

    def wait(self, condition: threading.Condition, until: float | None) -> None:
        with self._changed:
            self._waiting[condition] = self._waiting.get(condition, 0) + 1
            self._changed.notify_all()
        condition.wait()

    def notify(self, condition: threading.Condition) -> None:
        with self._changed:
            self._waiting.pop(condition, None)
        condition.notify_all()

    def on_change(self, wake: Callable[[], None]) -> None:
        self._wakes.append(wake)


@contextlib.contextmanager
def memory_store(budget: str = "256MiB", **settings: object) -> Iterator[NodeStore]:
    """Yield a store in this process's memory; its contents are lost when the block ends."""
    arena = MemfdArena()
    store = NodeStore(arena, StoreSettings(budget=budget, **settings))  # type: ignore[arg-type]
    try:
        yield store
    finally:
        store.close()
        arena.purge()
