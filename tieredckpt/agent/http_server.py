"""What the agent's two HTTP listeners have in common: who may hold a connection, and which requests are a browser's."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerstore.transport.addresses import join_address
from peerstore.transport.admission import Admission, Stranger

if TYPE_CHECKING:
    import ssl
    from email.message import Message
    from io import BufferedIOBase

log = logging.getLogger(__name__)

UNIX = "unix:"
REQUEST_S = 10.0
"""How long somebody may take who has proven nothing: over a request, and its answer where nothing is ever proven."""
_MOST_CONNECTIONS = 1024
_PAUSE_S = 0.1
_FAREWELL_S = 5.0
_OWN_DOMAINS = ("localhost", "local", "internal", "svc", "home.arpa")
"""Nobody on the internet has a name that ends so, and can have a browser ask for it."""


class HttpServer(ThreadingHTTPServer):
    """A thread for every connection; a handler tells ``proven`` when its client has shown who it is."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 256
    allow_reuse_address = True

    def __init__(
        self,
        name: str,
        address: tuple[str, int] | Path,
        handler: type[BaseHTTPRequestHandler],
        *,
        tls: ssl.SSLContext | None = None,
        within_s: float = REQUEST_S,
    ) -> None:
        self._path = address if isinstance(address, Path) else None
        if self._path is not None:
            self._path.unlink(missing_ok=True)  # of an agent that was killed
            self.address_family = socket.AF_UNIX
        elif not isinstance(address, Path) and ":" in address[0]:
            self.address_family = socket.AF_INET6
        self._tls = tls
        self._open: dict[Any, Stranger] = {}
        self._changed = threading.Condition()
        self._admission = Admission(name, within_s=within_s)
        super().__init__(address, handler)  # type: ignore[arg-type]  # AF_UNIX takes a path

    def server_bind(self) -> None:
        """A socket of this machine is for this user alone, and has no name or port."""
        if self._path is None:
            super().server_bind()
            return
        before = os.umask(0o177)
        try:
            self.socket.bind(str(self._path))
        finally:
            os.umask(before)
        self.server_name, self.server_port = "localhost", 0

    @property
    def bound(self) -> str:
        """``host:port``, or ``unix:/path``."""
        if self._path is not None:
            return f"{UNIX}{self._path}"
        host, port = self.server_address[:2]
        return join_address(str(host), port)

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Serve while the block runs; yields where."""
        thread = threading.Thread(target=self.serve_forever, args=(0.05,), name="tieredckpt-http", daemon=True)
        thread.start()
        try:
            yield self.bound
        finally:
            if self._path is not None:
                self._path.unlink(missing_ok=True)
            self._admission.close()
            self.shutdown()
            self._end()
            thread.join()

    def proven(self, request: Any) -> None:
        with self._changed:
            stranger = self._open.get(request)
        if stranger is not None:
            stranger.proven()

    def get_request(self) -> tuple[Any, Any]:
        try:
            connection, address = self.socket.accept()
        except OSError as error:  # too many open files, most likely: they become fewer
            self._admission.turned_away(f"it could not be accepted: {error}")
            time.sleep(_PAUSE_S)
            raise
        if self._path is not None:
            return connection, (str(self._path),)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is None:
            return connection, address
        return self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._changed:
            full = len(self._open) >= _MOST_CONNECTIONS
        if full:
            self._admission.turned_away("there are too many connections", client_address[0])
            return False
        stranger = self._admission.enter(request, client_address[0])
        if stranger is None:
            return False
        with self._changed:
            self._open[request] = stranger
        return True

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._changed:
            stranger = self._open.pop(request, None)
            self._changed.notify_all()
        if stranger is not None:
            stranger.leave()

    def service_actions(self) -> None:
        self._admission.sweep()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a connection ended: %s", sys.exc_info()[1])

    def _end(self) -> None:
        """End all connections; requests in progress end with them."""
        self.server_close()
        with self._changed:
            for one in self._open:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(one, socket.SHUT_RDWR)
            self._changed.wait_for(lambda: not self._open, _FAREWELL_S)


class HttpHandler(BaseHTTPRequestHandler):
    """Requests whose lines mean one thing to everybody: a proxy in front may read a lone CR, or a VT, as their end."""

    server_version = "tieredckpt"
    sys_version = ""
    raw_requestline: bytes

    def parse_request(self) -> bool:
        lines = _Lines(self.rfile)
        try:
            _check_line(self.raw_requestline)
            self.rfile = lines  # type: ignore[assignment]
            return super().parse_request()
        except _LineError as error:
            self.close_connection = True
            self.requestline, self.request_version, self.command = "", "HTTP/1.1", ""
            self.send_error(HTTPStatus.BAD_REQUEST, str(error))
            return False
        finally:
            self.rfile = lines.file

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        log.debug(format, *args)


class _LineError(Exception):
    """A line of a request's head has something in it that no line has."""


class _Lines:
    def __init__(self, file: BufferedIOBase) -> None:
        self.file = file

    def readline(self, size: int = -1) -> bytes:
        return _check_line(self.file.readline(size))


def _check_line(line: bytes) -> bytes:
    if any(byte < 0x20 and byte != 0x09 for byte in line.removesuffix(b"\n").removesuffix(b"\r")):
        raise _LineError("A line of the request has control characters")
    return line


def refused(headers: Message) -> tuple[HTTPStatus, str] | None:
    """Why a request is not served: it was made by a web page, or under a name that a web page may have made up.

    A page of any site can have its reader's browser ask an address of this machine, and under a name of its own that
    leads here it also reads the answer. Programs send no ``Origin``, and use a name or an address of this machine.
    """
    if headers.get("Origin") is not None or headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        return HTTPStatus.FORBIDDEN, "Web pages are not served here: the request has an Origin"
    host = headers.get("Host")
    if host is not None and is_foreign(host):
        return (
            HTTPStatus.MISDIRECTED_REQUEST,
            f"{host[:100]!r} is not known as a name of this machine: use its address or its host name",
        )
    return None


def is_foreign(host: str) -> bool:
    """Whether this may be a name that somebody on the internet has."""
    name = host.strip().lower()
    bracketed = name.startswith("[")
    name = name[1:].partition("]")[0] if bracketed else name.partition(":")[0].rstrip(".")
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name.partition("%")[0])
        return False
    if bracketed:
        return True
    if "." not in name or name.endswith(tuple(f".{domain}" for domain in _OWN_DOMAINS)):
        return False
    return name not in (socket.gethostname().lower(), socket.getfqdn().lower())
