"""The coordinator's connections to its nodes: all of them in one thread, which never waits for one.

What has arrived is read when the kernel says that something has; a node that does not take what it is told hears only
the newest of it later, and is given up after a while.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Iterator

from elastic.control.changes import CoordinatorEnd
from elastic.control.messages import MAX_NODE_BYTES, NodeHears, NodeSays
from peerstore.errors import PeerStoreError, PeerUnreachableError
from peerstore.transport.framing import MAGIC, PREFIX, VERSION, announced

PATIENCE_S = 10.0
"""How long a node may take no byte of what it is told, or send no byte of a report that it has begun."""
_READ_BYTES = 256 << 10


class Connection:
    """One node's, from its first report on."""

    def __init__(self, sock: socket.socket, peer: str, node: str, end: CoordinatorEnd) -> None:
        self.peer, self.node, self.end = peer, node, end
        self.life = end.said.life
        self.sock = sock
        self._arrived = bytearray()
        self._unsent = memoryview(b"")
        self._untaken_since: float | None = None
        """Since when the other side has taken nothing of what it is told."""
        self._begun_since: float | None = None
        """Since when it has sent nothing more of a report that it has begun."""
        sock.setblocking(False)

    @property
    def is_sending(self) -> bool:
        return len(self._unsent) > 0

    def say(self, hears: NodeHears, now: float) -> None:
        """Only when it is not sending: what is not taken at once is sent by ``flush``."""
        body = self.end.encode(hears)
        self._unsent = memoryview(PREFIX.pack(MAGIC, VERSION, len(body), 0) + body)
        self._untaken_since = now
        self.flush(now)

    def flush(self, now: float) -> None:
        sent = -1
        with contextlib.suppress(BlockingIOError):
            sent = self._attempt()
        if sent >= 0:
            self._unsent = self._unsent[sent:]
            self._untaken_since = now if self.is_sending else None

    def read(self, now: float) -> Iterator[NodeSays]:
        """The reports that are complete by now; :class:`PeerUnreachableError` when there will be no more."""
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerUnreachableError(f"{self.peer}: {error}") from error
        if not data:
            raise PeerUnreachableError(f"{self.peer} closed the connection")
        self._arrived += data
        while (body := self._next()) is not None:
            yield self.end.decode(body)
        self._begun_since = now if self._arrived else None

    @property
    def is_between(self) -> bool:
        """Nothing is under way, in neither direction."""
        return self._untaken_since is None and self._begun_since is None

    def is_stuck(self, now: float) -> bool:
        since = [one for one in (self._untaken_since, self._begun_since) if one is not None]
        return any(now - one > PATIENCE_S for one in since)

    def _attempt(self) -> int:
        try:
            return self.sock.send(self._unsent, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            raise
        except OSError as error:
            raise PeerUnreachableError(f"{self.peer}: {error}") from error

    def _next(self) -> bytes | None:
        if len(self._arrived) < PREFIX.size:
            return None
        size, _ = announced(
            self._arrived[: PREFIX.size], self.peer, max_header_bytes=MAX_NODE_BYTES, max_payload_bytes=0
        )
        end = PREFIX.size + size
        if len(self._arrived) < end:
            return None
        body = bytes(self._arrived[PREFIX.size : end])
        del self._arrived[:end]
        return body


class Connections:
    """All of them, and what wakes who waits for them."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._alarm, self._alarmed = socket.socketpair()
        for one in (self._alarm, self._alarmed):
            one.setblocking(False)
        self._selector.register(self._alarmed, selectors.EVENT_READ)
        self._all: set[Connection] = set()
        self._unfinished: set[Connection] = set()

    def __len__(self) -> int:
        return len(self._all)

    def wake(self) -> None:
        """From any thread, and from a signal's handler."""
        with contextlib.suppress(OSError):  # it is full, so who waits is woken anyway; or it is closed
            self._alarm.send(b"!")

    def add(self, connection: Connection) -> None:
        self._all.add(connection)
        self._selector.register(connection.sock, selectors.EVENT_READ, connection)

    def wait(self, within_s: float) -> list[tuple[Connection, bool]]:
        """Who has something to read (``True``), or takes more of what it is told."""
        ready = []
        for key, events in self._selector.select(within_s):
            connection: Connection | None = key.data
            if connection is None:
                with contextlib.suppress(BlockingIOError):
                    self._alarmed.recv(4096)
                continue
            if events & selectors.EVENT_WRITE:
                ready.append((connection, False))
            if events & selectors.EVENT_READ:
                ready.append((connection, True))
        return ready

    def look(self, connection: Connection) -> None:
        """After something was sent or read: what to wait for from now on."""
        if connection not in self._all:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.is_sending else 0)
        if self._selector.get_key(connection.sock).events != events:
            self._selector.modify(connection.sock, events, connection)
        if connection.is_between:
            self._unfinished.discard(connection)
        else:
            self._unfinished.add(connection)

    def stuck(self, now: float) -> list[Connection]:
        return [connection for connection in self._unfinished if connection.is_stuck(now)]

    def end(self, connection: Connection) -> None:
        if connection in self._all:
            self._all.remove(connection)
            self._unfinished.discard(connection)
            self._selector.unregister(connection.sock)
            connection.sock.close()

    def close(self, now: float) -> None:
        """What can be sent at once is sent."""
        for connection in list(self._all):
            with contextlib.suppress(PeerStoreError):
                connection.flush(now)
            self.end(connection)
        self._selector.close()
        self._alarm.close()
        self._alarmed.close()
