"""A network in one process, for tests of whoever talks to peers: what happens on it is said by name.

::

    network = MemoryNetwork()
    here, there = network.transport("n1"), network.transport("n2")
    with contextlib.closing(there.listen("n2:7070", serve)):
        channel = here.connect("n2:7070")
        network.cut("n1", "n2")
"""

from __future__ import annotations

import errno
import itertools
import threading
import weakref
from collections.abc import Callable
from functools import partial

from peerstore.errors import PeerUnreachableError, RequestError
from peerstore.transport.clock import Clock, RealClock
from peerstore.transport.framing import PREFIX, FramedChannel
from peerstore.transport.pipes import Pipe, PipeStream, Way
from peerstore.transport.seam import Channel, FileSlice, Payload
from peerstore.transport.serving import Serving


class MemoryNetwork:
    """Nodes, the ways between them, and what is wrong with those. Faults hold for channels that are open already, too.

    A channel holds at most ``capacity_bytes`` in each direction, as the buffers of a socket would.
    """

    def __init__(self, *, clock: Clock | None = None, capacity_bytes: int = 256 << 10) -> None:
        self._clock = clock or RealClock()
        self._clock.on_change(self._wake)
        self._capacity = capacity_bytes
        self._lock = threading.RLock()
        self._ways: dict[tuple[str, str], Way] = {}
        self._listeners: dict[str, MemoryListener] = {}
        self._between: weakref.WeakKeyDictionary[Pipe, frozenset[str]] = weakref.WeakKeyDictionary()
        self._ports = itertools.count(50_000)

    def transport(self, node: str, *, timeout_s: float = 30.0) -> MemoryTransport:
        """How ``node`` sees the network."""
        return MemoryTransport(self, node, timeout_s)

    # -- faults ---------------------------------------------------------------------------------------------------

    def cut(self, source: str, target: str, *, both: bool = True) -> None:
        """Nothing gets from ``source`` to ``target``, and (``both``) back. What is under way waits, as TCP would
        send it again; no new channel comes about in either direction.
        """
        self._change(source, target, both=both, open=False, flowing=False)

    def stall(self, source: str, target: str) -> None:
        """``source`` goes silent towards ``target``: its bytes wait, but it still accepts."""
        self._change(source, target, both=False, flowing=False)

    def delay(self, source: str, target: str, seconds: float) -> None:
        """Everything sent from now on arrives so much later."""
        self._change(source, target, both=False, delay_s=seconds)

    def heal(self, source: str, target: str) -> None:
        """Both ways are as they were at first; what waited goes on."""
        self._change(source, target, both=True, open=True, flowing=True, delay_s=0.0, drop_after=None, flips={})

    def drop_after(self, source: str, target: str, size_bytes: int) -> None:
        """Once so many bytes more were sent this way, the channel that sent the last of them breaks."""
        self._change(source, target, both=False, drop_after=size_bytes)

    def flip(self, source: str, target: str, *, payload: int = 0, byte: int = 0, bit: int = 0) -> None:
        """One bit of a payload arrives turned; ``payload`` counts those that begin from now on, from 0."""
        with self._lock:
            way = self._way(source, target)
            way.flips[way.payloads + payload] = (byte, bit)

    def lose(self, node: str) -> None:
        """The node is gone at once: its channels break and nobody listens there, until it listens again."""
        with self._lock:
            for address in [at for at, listener in self._listeners.items() if listener.node == node]:
                del self._listeners[address]
            for pipe, nodes in list(self._between.items()):
                if node in nodes:
                    pipe.tear(f"{node} is gone")

    def _change(self, source: str, target: str, *, both: bool, **changes: object) -> None:
        with self._lock:
            for way in [self._way(source, target), *([self._way(target, source)] if both else [])]:
                for name, value in changes.items():
                    setattr(way, name, value)
            self._wake()

    def _way(self, source: str, target: str) -> Way:
        return self._ways.setdefault((source, target), Way())

    def _wake(self) -> None:
        with self._lock:
            for pipe in list(self._between):
                pipe.wake()

    # -- channels -------------------------------------------------------------------------------------------------

    def listen(self, node: str, address: str, serve: Callable[[Channel], None]) -> MemoryListener:
        host, colon, port = address.rpartition(":")
        if not colon:
            raise RequestError(f"address {address!r} is not node:port")
        with self._lock:
            address = f"{host or node}:{next(self._ports) if port == '0' else port}"
            if address in self._listeners:
                raise OSError(errno.EADDRINUSE, f"somebody listens at {address} already")
            listener = self._listeners[address] = MemoryListener(self, node, address, Serving(serve, most=1024))
        return listener

    def unlisten(self, listener: MemoryListener) -> None:
        with self._lock:
            if self._listeners.get(listener.address) is listener:
                del self._listeners[listener.address]

    def connect(self, node: str, address: str, timeout_s: float) -> Channel:
        """A way that is cut is said at once: nobody's time is wasted in a double."""
        with self._lock:
            listener = self._listeners.get(address)
            if listener is None:
                raise PeerUnreachableError(f"{address} cannot be reached: nobody listens there")
            there, back = self._way(node, listener.node), self._way(listener.node, node)
            if not (there.open and back.open):
                raise PeerUnreachableError(f"{address} cannot be reached from {node}: the way is cut")
            out, into = (
                Pipe(*ways, self._clock, self._lock, self._capacity) for ways in ((there, back), (back, there))
            )
            for pipe in (out, into):
                self._between[pipe] = frozenset((node, listener.node))
                pipe.on_drop = partial(_tear, out, into)
            here = PipeStream(out, into, self._clock, self._lock)
            far = PipeStream(into, out, self._clock, self._lock)
            peer = f"{node}:{next(self._ports)}"
            channels = self._channel(far, back, peer, timeout_s), self._channel(here, there, address, timeout_s)
        if not listener.serving.take(lambda: channels[0], peer):
            raise PeerUnreachableError(f"{address} cannot be reached: it has too many connections")
        return channels[1]

    def _channel(self, stream: PipeStream, way: Way, peer: str, timeout_s: float) -> MemoryChannel:
        return MemoryChannel(stream, way, self._lock, peer, timeout_s)


def _tear(*pipes: Pipe) -> None:
    for pipe in pipes:
        pipe.tear("the connection was reset")


class MemoryChannel(FramedChannel):
    """Knows where payloads begin, so that one of them can be damaged."""

    def __init__(self, stream: PipeStream, way: Way, lock: threading.RLock, peer: str, timeout_s: float) -> None:
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
                    self._pipes.flip_at(PREFIX.size + len(header) + flip[0], flip[1])
        super().send(header, payload)


class MemoryListener:
    def __init__(self, network: MemoryNetwork, node: str, address: str, serving: Serving) -> None:
        self.node = node
        self.address = address
        self.serving = serving
        self._network = network

    def close(self) -> None:
        self._network.unlisten(self)
        self.serving.end()


class MemoryTransport:
    """One node's end of a :class:`MemoryNetwork`. Addresses are ``node:port``; port 0 is any free one."""

    name = "memory"

    def __init__(self, network: MemoryNetwork, node: str, timeout_s: float = 30.0) -> None:
        self._network = network
        self._node = node
        self._timeout_s = timeout_s

    def listen(self, address: str, serve: Callable[[Channel], None]) -> MemoryListener:
        return self._network.listen(self._node, address, serve)

    def connect(self, address: str, *, timeout_s: float = 5.0) -> Channel:
        return self._network.connect(self._node, address, self._timeout_s)

    def close(self) -> None:
        """Nothing is held beside the channels."""
