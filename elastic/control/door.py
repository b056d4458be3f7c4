"""The supervisor's socket for its ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

from elastic.control.messages import MAX_RANK_BYTES, PROTOCOL, Over, RankGreeting, RankHears, RankSays
from peerstore import frames
from peerstore.errors import PeerStoreError, ProtocolError
from peerstore.owners import peer_of

log = logging.getLogger(__name__)

_MOST = 1024
_GREETING_S = 10.0
_FRAME_S = 30.0
_LENGTH = struct.Struct(">I")


class Line:
    """One rank's connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()

    def send(self, hears: RankHears) -> None:
        """Never waits: a rank that does not read so many small messages does not hear them any more."""
        body = frames.encode(hears)
        data = _LENGTH.pack(len(body)) + body
        with self._sending:
            try:
                sent = self._sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError:
                sent = 0
            if sent != len(data):
                self.end()

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


class Door:
    """``came(token, line)`` says why a process is not let in; ``said`` and ``left`` follow, from its threads."""

    def __init__(
        self,
        path: Path,
        *,
        came: Callable[[str, Line], str],
        said: Callable[[str, RankSays], None],
        left: Callable[[str, Line], None],
    ) -> None:
        self.path = path
        self._came, self._said, self._left = came, said, left
        self._lock = threading.Lock()
        self._lines: dict[threading.Thread, socket.socket] = {}
        self._stopping = False
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            self._listener.bind(str(path))
        except OSError:
            self._listener.close()
            raise
        finally:
            os.umask(before)
        self._listener.listen(128)
        self._thread = threading.Thread(target=self._accept, name="elastic-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._stopping = True
            lines = dict(self._lines)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for sock in lines.values():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in lines:
            thread.join()
        with contextlib.suppress(OSError):  # a directory that lets nobody in
            self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._stopping:
                    return
                continue
            thread = threading.Thread(target=self._serve, args=(sock,), name="elastic-line", daemon=True)
            with self._lock:
                if self._stopping or len(self._lines) >= _MOST:
                    sock.close()
                    continue
                self._lines[thread] = sock
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        line, token = Line(sock), ""
        try:
            token = self._admitted(sock, line)
            while token and (says := self._next(sock)) is not None:
                self._said(token, says)
        except (PeerStoreError, OSError) as error:
            log.info("a rank's connection ended: %s", error)
        finally:
            if token:
                self._left(token, line)
            sock.close()
            with self._lock:
                del self._lines[threading.current_thread()]

    def _admitted(self, sock: socket.socket, line: Line) -> str:
        _, uid = peer_of(sock)
        if uid not in (os.getuid(), 0):
            raise ProtocolError(f"user {uid} may not be a rank of user {os.getuid()}")
        sock.settimeout(_GREETING_S)
        greeting = frames.receive(sock, RankGreeting, limit_bytes=frames.MAX_GREETING_BYTES, within_s=_GREETING_S)
        if greeting is None:
            return ""
        if greeting.protocol != PROTOCOL:
            refused = f"protocol {greeting.protocol} is not spoken here, this is {PROTOCOL}"
        else:
            refused = self._came(greeting.token, line)
        if refused:
            line.send(RankHears(over=Over.REFUSED, reason=refused))
            raise ProtocolError(refused)
        return greeting.token

    def _next(self, sock: socket.socket) -> RankSays | None:
        sock.settimeout(None)
        return frames.receive(sock, RankSays, limit_bytes=MAX_RANK_BYTES, within_s=_FRAME_S)
