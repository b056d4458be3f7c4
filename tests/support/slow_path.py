"""A TCP proxy with latency, limited bandwidth and faults of a bad line.

::

    with SlowPath(("127.0.0.1", port), latency_s=0.05) as path:
        happened = path.back.flip_bit(at_byte=1000)
        ...connect to path.port...
        happened.wait(200)
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from typing_extensions import Self

_BLOCK = 64 << 10
_BLOCKS_UNDER_WAY = 256
_SO_ORIGINAL_DST = 80
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)

Address = tuple[str, int]


class LineBrokeError(ConnectionError):
    """Connection reset injected by the test."""


@dataclass
class Fault:
    at_byte: int
    """Offset in all bytes of this direction since the proxy started."""
    resets: bool
    happened: threading.Event = field(default_factory=threading.Event)


class Direction:
    """One direction of all connections. Attributes may change while bytes pass."""

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.passed_bytes = 0
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._free_at = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flowing = asyncio.Event()
        self._flowing.set()

    def flip_bit(self, at_byte: int = 0) -> threading.Event:
        """Flip one bit of the byte at this offset from now; the next byte is 0."""
        return self._plan(at_byte, resets=False)

    def reset_after(self, size_bytes: int) -> threading.Event:
        """Reset the connection, on both sides, that carries the byte after the next ``size_bytes``."""
        return self._plan(size_bytes, resets=True)

    def stall(self) -> None:
        """Hold all bytes until :meth:`resume`; connections stay open."""
        self._run_in_loop(self._flowing.clear)

    def resume(self) -> None:
        self._run_in_loop(self._flowing.set)

    # -- for the proxy's thread -----------------------------------------------------------------------------------

    def departure_time(self, now: float, size_bytes: int) -> float:
        """Return when the last of ``size_bytes`` leaves. It arrives ``latency_s`` later."""
        self._free_at = max(now, self._free_at) + size_bytes / self.bytes_per_s
        return self._free_at

    def apply_faults(self, block: bytes) -> tuple[bytes, bool]:
        """Return a block with its faults applied, and whether to reset its connection afterwards."""
        changed = bytearray(block)
        resets = False
        with self._lock:
            for fault in sorted(self._faults, key=lambda fault: fault.at_byte):
                at = fault.at_byte - self.passed_bytes
                if at >= len(changed):
                    break
                self._faults.remove(fault)
                fault.happened.set()
                if fault.resets:
                    del changed[at:]
                    resets = True
                    break
                changed[at] ^= 1
            self.passed_bytes += len(changed)
        return bytes(changed), resets

    async def wait_flowing(self) -> None:
        await self._flowing.wait()

    def _plan(self, at_byte: int, *, resets: bool) -> threading.Event:
        with self._lock:
            fault = Fault(self.passed_bytes + at_byte, resets)
            self._faults.append(fault)
        return fault.happened

    def _run_in_loop(self, change: Callable[[], None]) -> None:
        """Call ``change`` on the proxy's thread and wait for it."""
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (change(), done.set()))
        if not done.wait(200):
            raise RuntimeError("the proxy is not running")


class SlowPath:
    """A proxy to ``target``; ``None`` means the original target of each redirected connection.

    ``enter`` is called on the proxy's thread before it opens sockets. The proxy's packets carry ``mark``.
    """

    def __init__(
        self,
        target: Address | None,
        *,
        latency_s: float = 0.0,
        bytes_per_s: float = math.inf,
        enter: Callable[[], None] = lambda: None,
        mark: int = 0,
    ) -> None:
        self.port = 0
        self.forth = Direction(latency_s, bytes_per_s)
        """Direction from clients to the server."""
        self.back = Direction(latency_s, bytes_per_s)
        self._target = target
        self._enter = enter
        self._mark = mark
        self._ready = threading.Event()
        self._stop: Callable[[], None] = lambda: None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="slow-path")

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        if self._error:
            self._thread.join()
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop accepting and reset open connections."""
        with contextlib.suppress(RuntimeError):  # already closed
            self._stop()
        self._thread.join()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._enter()
            asyncio.run(self._serve())
        except Exception as error:
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        stopped = asyncio.Event()
        self._stop = lambda: loop.call_soon_threadsafe(stopped.set)
        self.forth._loop = self.back._loop = loop
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            self.port = listener.getsockname()[1]
            connections: set[asyncio.Task[None]] = set()
            loop.add_reader(listener, self._accept, listener, connections)
            self._ready.set()
            await stopped.wait()
            loop.remove_reader(listener)
            for task in connections:
                task.cancel()
            await asyncio.gather(*connections, return_exceptions=True)

    def _accept(self, listener: socket.socket, connections: set[asyncio.Task[None]]) -> None:
        """Accept a connection.

        The loop's own accept loses a connection that arrives during cancellation.
        """
        with contextlib.suppress(BlockingIOError):
            client, _ = listener.accept()
            task = asyncio.create_task(self._connection(client))
            connections.add(task)
            task.add_done_callback(connections.discard)
            task.add_done_callback(lambda _: client.close())  # the task may be canceled before it starts

    async def _connection(self, client: socket.socket) -> None:
        with socket.socket() as server:
            for sock in (client, server):
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            with contextlib.suppress(OSError):
                if self._mark:
                    server.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, self._mark)
                await asyncio.get_running_loop().sock_connect(server, self._target or _original_target(client))
                await _run_all(_carry(self.forth, client, server), _carry(self.back, server, client))
                for sock in (client, server):  # both sides have finished: close without a reset
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))


def _original_target(client: socket.socket) -> Address:
    """Return the address a client connected to before redirection."""
    raw = client.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16)
    _, port, host = struct.unpack_from("!HH4s", raw)
    return socket.inet_ntoa(host), port


async def _carry(way: Direction, source: socket.socket, sink: socket.socket) -> None:
    """Carry bytes in one direction until the end, each block with its delay."""
    line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_BLOCKS_UNDER_WAY)
    await _run_all(_take(way, source, line), _deliver(way, line, sink))


async def _take(way: Direction, source: socket.socket, line: asyncio.Queue[tuple[float, bytes]]) -> None:
    loop = asyncio.get_running_loop()
    block = b"first"
    while block:
        await way.wait_flowing()
        block = await loop.sock_recv(source, _BLOCK)
        leaves = way.departure_time(loop.time(), len(block))
        await line.put((leaves + way.latency_s, block))
        await _sleep_until(leaves)


async def _deliver(way: Direction, line: asyncio.Queue[tuple[float, bytes]], sink: socket.socket) -> None:
    while True:
        due, block = await line.get()
        await _sleep_until(due)
        await way.wait_flowing()
        if not block:
            sink.shutdown(socket.SHUT_WR)
            return
        block, resets = way.apply_faults(block)
        await asyncio.get_running_loop().sock_sendall(sink, block)
        if resets:
            raise LineBrokeError


async def _sleep_until(due: float) -> None:
    left = due - asyncio.get_running_loop().time()
    if left > 0:
        await asyncio.sleep(left)


async def _run_all(*works: asyncio.Future[None]) -> None:
    """Wait for all; if one fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
