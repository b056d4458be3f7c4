"""The state's bytes over plain sockets: ``sendfile`` to ``recv_into`` the final buffers.

Without framing, checksums or verification, it is the reference for a peer tier on TCP. Rank 0 sends to rank 1.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.nodes import tell

_WINDOW_BYTES = 256 << 10
"""Bytes of one receive, the fastest size over loopback."""
_ACK = b"+"
_CONNECT_S = 30.0


def raw_name(streams: int) -> str:
    return f"raw sockets, {streams} stream{'s' * (streams > 1)}"


class Wire:
    """Open connections between the two ranks; each carries an equal share of the bytes."""

    def __init__(self, rank: int, streams: int) -> None:
        self._sockets = _accept(streams) if rank else _dial(streams)
        self._pool = ThreadPoolExecutor(streams)
        for sock in self._sockets:
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, path: Path, size_bytes: int) -> None:
        """Send the file and wait for the acknowledgment."""
        fd = os.open(path, os.O_RDONLY)
        try:
            self._each(size_bytes, lambda sock, start, stop: _send(sock, fd, start, stop))
        finally:
            os.close(fd)

    def receive(self, views: Sequence[memoryview]) -> None:
        """Fill ``views`` in order."""
        size = sum(map(len, views))
        self._each(size, lambda sock, start, stop: _receive(sock, cut(views, start, stop)))

    def _each(self, size_bytes: int, work: Callable[[socket.socket, int, int], None]) -> None:
        count = len(self._sockets)
        edges = [size_bytes * number // count for number in range(count + 1)]
        if count == 1:
            work(self._sockets[0], 0, size_bytes)
            return
        list(self._pool.map(work, self._sockets, edges, edges[1:]))

    def close(self) -> None:
        self._pool.shutdown()
        for sock in self._sockets:
            sock.close()


def cut(views: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    """Return bytes ``[start, stop)`` of the concatenated views."""
    found, at = [], 0
    for view in views:
        first, last = max(start - at, 0), min(stop - at, len(view))
        if first < last:
            found.append(view[first:last])
        at += len(view)
    return found


def _accept(streams: int) -> list[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=streams) as listener:
        listener.settimeout(_CONNECT_S)
        tell(listener.getsockname()[1], 1)
        numbered = {}
        for _ in range(streams):
            sock, _where = listener.accept()
            numbered[struct.unpack("B", sock.recv(1))[0]] = sock
    return [numbered[number] for number in range(streams)]


def _dial(streams: int) -> list[socket.socket]:
    port = tell(None, 1)
    sockets = []
    for number in range(streams):
        sock = socket.create_connection(("127.0.0.1", port), timeout=_CONNECT_S)
        sock.sendall(struct.pack("B", number))
        sockets.append(sock)
    return sockets


def _send(sock: socket.socket, fd: int, start: int, stop: int) -> None:
    while start < stop:
        start += os.sendfile(sock.fileno(), fd, start, stop - start)
    if sock.recv(1) != _ACK:
        raise ConnectionError("the receiver closed the connection without an acknowledgment")


def _receive(sock: socket.socket, views: Sequence[memoryview]) -> None:
    for view in views:
        at = 0
        while at < len(view):
            count = sock.recv_into(view[at : at + _WINDOW_BYTES])
            if not count:
                raise ConnectionError(
                    f"the sender closed the connection {len(view) - at} bytes before the end of a tensor"
                )
            at += count
    sock.sendall(_ACK)
