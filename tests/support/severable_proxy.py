"""Proxy whose connections a test can cut, allow again at the same address, or slow down."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

_LOOK_S = 0.1


class SeverableProxy:
    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_LOOK_S)
        self.port = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._is_cut = self._ended = False
        self._trickles_after: int | None = None
        self._over = threading.Event()
        self.refused = threading.Event()
        """Set once a client tried to connect during a cut."""
        self._threads = [threading.Thread(target=self._accept, name="cut-line")]

    @contextlib.contextmanager
    def running(self) -> Iterator[SeverableProxy]:
        self._threads[0].start()
        try:
            yield self
        finally:
            self._ended = True
            self._over.set()
            self.cut()
            for thread in self._threads:
                thread.join()
            self._listener.close()

    def cut(self) -> None:
        with self._lock:
            self._is_cut = True
            self.refused.clear()
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def reconnect(self) -> None:
        with self._lock:
            self._is_cut = False

    def trickle(self, *, after_bytes: int) -> None:
        """Pass ``after_bytes`` of server data per connection at once, then a byte every 0.1 s."""
        self._trickles_after = after_bytes

    def _accept(self) -> None:
        while not self._ended:
            try:
                client = self._listener.accept()[0]
            except TimeoutError:
                continue
            with self._lock:
                if self._is_cut:
                    client.close()
                    self.refused.set()
                    continue
                server = socket.create_connection(self._target)
                self._open |= {client, server}
            for source, sink, pump in ((client, server, self._pump), (server, client, self._pump_back)):
                thread = threading.Thread(target=pump, args=(source, sink), name="cut-line")
                self._threads.append(thread)
                thread.start()

    def _pump_back(self, source: socket.socket, sink: socket.socket) -> None:
        if (left := self._trickles_after) is not None:
            with contextlib.suppress(OSError):
                while left > 0 and (data := source.recv(min(65536, left))):
                    sink.sendall(data)
                    left -= len(data)
                while not self._over.wait(_LOOK_S) and (data := source.recv(1)):
                    sink.sendall(data)
        self._pump(source, sink)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for sock in (source, sink):  # the other thread may have shut it down already
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._open.discard(source)
        source.close()
