"""PUT requests whose bodies go from a mapping into the socket, over connections that are kept."""

from __future__ import annotations

import http.client
import select
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from tieredckpt.durable.failures import ReplyError, error_code, retry_after

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tieredckpt.durable.stop import Stop

_MAX_DOCUMENT_BYTES = 64 << 10
CONNECT_S = 5.0


@dataclass(frozen=True)
class WireSettings:
    timeout_s: float
    proxy_for: Callable[[str], str] = lambda _: ""
    """The proxy's URL for a URL; empty for none."""
    trusted: str = ""
    """Certificate authorities, as a file or a directory; empty: those of the system."""


class Wire:
    """Any thread may call; a connection is used by one at a time."""

    def __init__(self, settings: WireSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, str], list[http.client.HTTPConnection]] = {}
        self._closed = False
        self._tls: ssl.SSLContext | None = None

    def put(
        self, url: str, body: Iterator[memoryview], size_bytes: int, headers: Mapping[str, str], stop: Stop
    ) -> Mapping[str, str]:
        """Send ``body``; the answer's headers by lower-case name, or :class:`ReplyError`, or ``OSError``."""
        parts = urlsplit(url)
        connection = self._take(parts)
        try:
            with stop.watching(connection.sock):
                request = {"Content-Length": str(size_bytes), **headers}
                reply, document = _exchange(connection, self._target(parts), body, request)
        except BaseException:
            connection.close()
            raise
        if reply.will_close:
            connection.close()
        else:
            self._give_back(parts, connection)
        found = {name.lower(): value for name, value in reply.getheaders()}
        if not 200 <= reply.status < 300:
            code, message = error_code(document.decode(errors="replace"))
            wait_s = retry_after(found.get("retry-after", ""), found.get("date", ""))
            raise ReplyError(reply.status, code, message or reply.reason, wait_s)
        return found

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def _target(self, parts: SplitResult) -> str:
        if parts.scheme == "http" and self._settings.proxy_for(parts.geturl()):
            return parts.geturl()
        return f"{parts.path}?{parts.query}" if parts.query else parts.path

    def _take(self, parts: SplitResult) -> http.client.HTTPConnection:
        key = (parts.scheme, parts.netloc)
        while True:
            with self._lock:
                idle = self._idle.get(key)
                connection = idle.pop() if idle else None
            if connection is None:
                return self._open(parts)
            if not _readable(connection):
                return connection
            connection.close()  # the server has closed it, or says something nobody asked for

    def _give_back(self, parts: SplitResult, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.setdefault((parts.scheme, parts.netloc), []).append(connection)
                return
        connection.close()

    def _open(self, parts: SplitResult) -> http.client.HTTPConnection:
        secure = parts.scheme == "https"
        host, port = parts.hostname or "", parts.port or (443 if secure else 80)
        proxy = urlsplit(self._settings.proxy_for(parts.geturl()))
        to_host, to_port = (proxy.hostname, proxy.port or 80) if proxy.hostname else (host, port)
        timeout_s = min(CONNECT_S, self._settings.timeout_s)
        connection = (
            http.client.HTTPSConnection(to_host, to_port, timeout=timeout_s, context=self._context())
            if secure
            else http.client.HTTPConnection(to_host, to_port, timeout=timeout_s)
        )
        if proxy.hostname and secure:
            connection.set_tunnel(host, port)
        try:
            connection.connect()
            connection.sock.settimeout(self._settings.timeout_s)
        except BaseException:
            connection.close()
            raise
        return connection

    def _context(self) -> ssl.SSLContext:
        with self._lock:
            if self._tls is None:
                where = self._settings.trusted
                directory = bool(where) and Path(where).is_dir()
                self._tls = ssl.create_default_context(
                    cafile=where if where and not directory else None, capath=where if directory else None
                )
            return self._tls


def _exchange(
    connection: http.client.HTTPConnection, target: str, body: Iterator[memoryview], headers: Mapping[str, str]
) -> tuple[http.client.HTTPResponse, bytes]:
    try:
        connection.request("PUT", target, body, dict(headers))
    except (BrokenPipeError, ConnectionResetError) as broken:
        # A server that says no before it has read everything: its answer says more than the broken pipe.
        return _early_answer(connection, broken)
    reply = connection.getresponse()
    return reply, _document(reply)


def _early_answer(connection: http.client.HTTPConnection, broken: OSError) -> tuple[http.client.HTTPResponse, bytes]:
    reply = http.client.HTTPResponse(connection.sock, method="PUT")
    try:
        reply.begin()
        document = _document(reply)
    except (OSError, http.client.HTTPException):
        reply.close()
        raise broken from None
    if 200 <= reply.status < 300:
        raise broken
    reply.will_close = True
    return reply, document


def _document(reply: http.client.HTTPResponse) -> bytes:
    try:
        document = reply.read(_MAX_DOCUMENT_BYTES)
        if not reply.isclosed():
            reply.will_close = True
        return document
    finally:
        reply.close()


def _readable(connection: http.client.HTTPConnection) -> bool:
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))
