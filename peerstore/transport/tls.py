"""TLS stream and channel. Imported only when TLS is configured."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from peerstore.errors import PeerRefusedError, PeerUnreachableError
from peerstore.transport.base import FileSlice
from peerstore.transport.framing import FramedChannel, wait_until_ready

T = TypeVar("T")
_RECORD_BYTES = 16 << 10
_FILE_BYTES = 256 << 10
_LINGER_S = 5.0


class TlsStream:
    """A :class:`~peerstore.transport.framing.ByteStream` over TLS.

    OpenSSL does not support two threads in one connection, so each call holds a lock, but never while it waits.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server: bool, name: str = "") -> None:
        sock.setblocking(False)
        self._sock = context.wrap_socket(
            sock, server_side=server, server_hostname=None if server else name or None, do_handshake_on_connect=False
        )
        self._lock = threading.Lock()

    def now(self) -> float:
        return time.monotonic()

    def handshake(self, within_s: float) -> None:
        """Authenticate both sides. A client notices a refusal only when it receives."""
        deadline = time.monotonic() + within_s
        try:
            self._attempt(self._sock.do_handshake, lambda: deadline - time.monotonic())
        except PeerRefusedError:
            self._linger(min(deadline, time.monotonic() + _LINGER_S))
            raise

    def send(self, views: list[memoryview], *, more: bool, within_s: float) -> int:
        """Send one record of small views, or some of the first large one."""
        first = views[0]
        if first.nbytes >= _RECORD_BYTES or len(views) == 1:
            return self._attempt(lambda: self._sock.send(first), lambda: within_s)
        record = bytearray()
        for view in views:
            record += view[: _RECORD_BYTES - len(record)]
            if len(record) == _RECORD_BYTES:
                break
        return self._attempt(lambda: self._sock.send(record), lambda: within_s)

    def send_file(self, piece: FileSlice, *, within_s: float) -> int:
        data = os.pread(piece.fd, min(piece.size, _FILE_BYTES), piece.start)
        return self._attempt(lambda: self._sock.send(data), lambda: within_s) if data else 0

    def receive(self, views: list[memoryview], *, within_s: float | None) -> int:
        return self._attempt(lambda: self._receive(views), lambda: within_s)

    def shut(self) -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def _receive(self, views: list[memoryview]) -> int:
        """Return what has already arrived; wait only if that is nothing."""
        total = 0
        for view in views:
            try:
                count = self._sock.recv_into(view)
            except ssl.SSLWantReadError:
                if not total:
                    raise
                break
            total += count
            if count < view.nbytes:
                break
        return total

    def _linger(self, deadline: float) -> None:
        """Wait until the peer has closed: closing with unread bytes would discard the reason for the refusal."""
        with contextlib.suppress(OSError, PeerUnreachableError):
            socket.socket.shutdown(self._sock, socket.SHUT_WR)
            while True:
                wait_until_ready(self._sock.fileno(), select.POLLIN, deadline - time.monotonic())
                if not socket.socket.recv(self._sock, _RECORD_BYTES):
                    return

    def _attempt(self, action: Callable[[], T], patience: Callable[[], float | None]) -> T:
        while True:
            try:
                with self._lock:
                    return action()
            except ssl.SSLWantReadError:
                events = select.POLLIN
            except ssl.SSLWantWriteError:
                events = select.POLLOUT
            except ssl.SSLError as error:
                raise _tls_error(error) from error
            except OSError as error:
                raise PeerUnreachableError(str(error)) from error
            wait_until_ready(self._sock.fileno(), events, patience())


class TlsChannel(FramedChannel):
    """A channel over TLS; ``handshake`` must be called first."""

    def __init__(self, stream: TlsStream, peer: str, timeout_s: float) -> None:
        super().__init__(stream, peer, timeout_s)
        self._tls = stream

    def handshake(self, within_s: float) -> None:
        with self._sending, self._receiving, self._closing_on_error():
            self._tls.handshake(within_s)


def _tls_error(error: ssl.SSLError) -> PeerRefusedError | PeerUnreachableError:
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return PeerRefusedError(f"its certificate was not accepted here: {error.verify_message}")
    if "ALERT" in reason or "CERTIFICATE" in reason:
        return PeerRefusedError(f"TLS was refused ({reason}): are both certificates signed by the same authority?")
    return PeerUnreachableError(f"TLS ended: {error}")
