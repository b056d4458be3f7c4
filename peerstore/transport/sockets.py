"""Bytes over a socket, without waiting in it."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial

from peerstore.errors import PeerUnreachableError
from peerstore.transport.seam import FileSlice

_ALIVE_IDLE_S = 15
_ALIVE_EVERY_S = 5
_ALIVE_PROBES = 4
_FILE_BYTES = 256 << 10


class TcpStream:
    """A :class:`~peerstore.transport.framing.Stream` over a socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock

    def now(self) -> float:
        return time.monotonic()

    def send(self, views: list[memoryview], *, more: bool, within_s: float) -> int:
        flags = socket.MSG_NOSIGNAL | (socket.MSG_MORE if more else 0)
        return self._attempt(lambda: self._sock.sendmsg(views, (), flags), select.POLLOUT, within_s)

    def send_file(self, piece: FileSlice, *, within_s: float) -> int:
        return self._attempt(partial(self._send_file, piece), select.POLLOUT, within_s)

    def receive(self, views: list[memoryview], *, within_s: float | None) -> int:
        if len(views) == 1:
            return self._attempt(lambda: self._sock.recv_into(views[0]), select.POLLIN, within_s)
        return self._attempt(lambda: self._sock.recvmsg_into(views)[0], select.POLLIN, within_s)

    def shut(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def _attempt(self, action: Callable[[], int], events: int, within_s: float | None) -> int:
        while True:
            try:
                return action()
            except BlockingIOError:
                wait_for(self._sock.fileno(), events, within_s)
            except OSError as error:
                raise PeerUnreachableError(str(error)) from error

    def _send_file(self, piece: FileSlice) -> int:
        fd, start, size = piece
        try:
            return os.sendfile(self._sock.fileno(), fd, start, size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):
                raise
        data = os.pread(fd, min(size, _FILE_BYTES), start)  # a file that the kernel does not send by itself
        return self._sock.send(data) if data else 0


def wait_for(fd: int, events: int, within_s: float | None) -> None:
    """Until ``fd`` is ready, or :class:`PeerUnreachableError` when it is not for so long."""
    poller = select.poll()
    poller.register(fd, events)
    if not poller.poll(None if within_s is None else max(0.0, within_s) * 1000):
        raise PeerUnreachableError(f"silent for {within_s:.3g} s")


def tune(sock: socket.socket, timeout_s: float) -> None:
    """Small messages go at once, and a peer that is gone is noticed. Buffers are the kernel's affair."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ALIVE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _ALIVE_PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(timeout_s * 1000)))


@contextlib.contextmanager
def closed_unless_used(sock: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        sock.close()
        raise
