"""One word that ends an upload in all of its threads: those that wait, and those that sit in a socket."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

from tieredckpt.durable.store import UploadCancelledError

if TYPE_CHECKING:
    from collections.abc import Iterator

_POLL_S = 0.05


class Stop:
    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._children: list[Stop] = []

    def child(self) -> Stop:
        """One that this one stops, but not the other way round."""
        child = Stop()
        with self._lock:
            self._children.append(child)
        if self.is_set():
            child.set()
        return child

    def set(self) -> None:
        self._event.set()
        with self._lock:
            for child in self._children:
                child.set()
            for sock in self._sockets:
                with contextlib.suppress(OSError):  # closed by its own thread meanwhile
                    sock.shutdown(socket.SHUT_RDWR)

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> None:
        """Sleep, unless told to stop; then raise."""
        self._event.wait(seconds)
        self.check()

    def check(self) -> None:
        if self._event.is_set():
            raise UploadCancelledError(
                "cancelled, because the process ends; a later upload goes on after the parts that are finished"
            )

    @contextlib.contextmanager
    def following(self, cancel: threading.Event | None) -> Iterator[None]:
        """While in here, stop when somebody sets ``cancel``."""
        if cancel is None:
            yield
            return
        done = threading.Event()

        def follow() -> None:
            while not done.is_set():
                if cancel.wait(_POLL_S):
                    self.set()
                    return

        thread = threading.Thread(target=follow, name="tieredckpt-cancel", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    @contextlib.contextmanager
    def watching(self, sock: socket.socket) -> Iterator[None]:
        """While in here, ``set`` from another thread makes this socket's calls fail, and that is raised as a stop."""
        with self._lock:
            self._sockets.add(sock)
        try:
            self.check()
            yield
        except OSError:
            self.check()
            raise
        finally:
            with self._lock:
                self._sockets.discard(sock)
