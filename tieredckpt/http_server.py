"""HTTP server for read-only pages, with limits on connections, requests and their time."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerstore.daemon_process import is_same_file
from peerstore.network_addresses import join_address
from peerstore.transport.tcp import ConnectionAdmission, UnauthenticatedConnection
from tieredckpt.errors import UsageError

if TYPE_CHECKING:
    import ssl
    from email.message import Message
    from io import BufferedIOBase

log = logging.getLogger(__name__)

UNIX = "unix:"
HTTP_REQUEST_TIMEOUT_S = 10.0
"""Seconds that an unauthenticated client may take for a request.

If clients never authenticate, this includes the response.
"""
_MOST_CONNECTIONS = 1024
_PAUSE_S = 0.1
_CLOSE_S = 5.0
_OWN_DOMAINS = ("localhost", "local", "internal", "svc", "home.arpa")
"""Private domains. No website can own such a name and point a browser to this machine with it."""


class HttpServer(ThreadingHTTPServer):
    """HTTP server with a thread for each connection and limits on unauthenticated ones.

    A handler calls ``mark_authenticated`` once its client has authenticated.
    """

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
        within_s: float = HTTP_REQUEST_TIMEOUT_S,
    ) -> None:
        self._path = address if isinstance(address, Path) else None
        if self._path is not None:
            self._path.unlink(missing_ok=True)  # left by a killed agent
            self.address_family = socket.AF_UNIX
        elif not isinstance(address, Path) and ":" in address[0]:
            self.address_family = socket.AF_INET6
        self._tls = tls
        self._open: dict[Any, UnauthenticatedConnection] = {}
        self._changed = threading.Condition()
        self._admission = ConnectionAdmission(name, within_s=within_s)
        super().__init__(address, handler)  # type: ignore[arg-type]  # AF_UNIX takes a path

    def server_bind(self) -> None:
        """Bind. Only this user may open a Unix socket, and it has no port."""
        if self._path is None:
            super().server_bind()
            return
        before = os.umask(0o177)
        try:
            self.socket.bind(str(self._path))
        finally:
            os.umask(before)
        self._socket_file = self._path.lstat()
        self.server_name, self.server_port = "localhost", 0

    @property
    def address(self) -> str:
        """``host:port``, or ``unix:/path``."""
        if self._path is not None:
            return f"{UNIX}{self._path}"
        host, port = self.server_address[:2]
        return join_address(str(host), port)

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Serve while the block runs. Yield the address."""
        thread = threading.Thread(target=self.serve_forever, args=(0.05,), name="tieredckpt-http", daemon=True)
        thread.start()
        try:
            yield self.address
        finally:
            if self._path is not None and is_same_file(self._path, self._socket_file):  # not another agent's by now
                self._path.unlink(missing_ok=True)
            self._admission.close()
            self.shutdown()
            self._close_connections()
            thread.join()

    def mark_authenticated(self, request: Any) -> None:
        with self._changed:
            pending = self._open.get(request)
        if pending is not None:
            pending.mark_authenticated()

    def get_request(self) -> tuple[Any, Any]:
        try:
            connection, address = self.socket.accept()
        except OSError as error:  # probably too many open files: retry after a pause
            self._admission.record_rejected(f"it could not be accepted: {error}")
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
            self._admission.record_rejected("there are too many connections", client_address[0])
            return False
        pending = self._admission.admit(request, client_address[0])
        if pending is None:
            return False
        with self._changed:
            self._open[request] = pending
        return True

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._changed:
            pending = self._open.pop(request, None)
            self._changed.notify_all()
        if pending is not None:
            pending.leave()

    def service_actions(self) -> None:
        self._admission.sweep()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a connection ended: %s", sys.exc_info()[1])

    def _close_connections(self) -> None:
        """Close all connections, including those with a request in progress."""
        self.server_close()
        with self._changed:
            for one in self._open:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(one, socket.SHUT_RDWR)
            self._changed.wait_for(lambda: not self._open, _CLOSE_S)


class HttpHandler(BaseHTTPRequestHandler):
    """Handler that rejects control characters in the request head.

    A proxy in front may treat a lone CR or a VT as the end of a line, and would then see another request.
    """

    server_version = "tieredckpt"
    sys_version = ""
    raw_requestline: bytes

    def parse_request(self) -> bool:
        lines = _CheckedLines(self.rfile)
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
    """A line of the request head contains control characters."""


class _CheckedLines:
    def __init__(self, file: BufferedIOBase) -> None:
        self.file = file

    def readline(self, size: int = -1) -> bytes:
        return _check_line(self.file.readline(size))


def _check_line(line: bytes) -> bytes:
    if any(byte < 0x20 and byte != 0x09 for byte in line.removesuffix(b"\n").removesuffix(b"\r")):
        raise _LineError("A line of the request has control characters")
    return line


def browser_refusal(headers: Message) -> tuple[HTTPStatus, str] | None:
    """Return status and reason to reject a request, or ``None`` to serve it.

    Requests of web pages and requests for a public host name are rejected.

    Any web page can make its reader's browser send requests to this machine. With a host name of its own that resolves
    to this machine (DNS rebinding), it can also read the response. Programs send no ``Origin`` and use a name or
    address of this machine.
    """
    if headers.get("Origin") is not None or headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        return HTTPStatus.FORBIDDEN, "Web pages are not served here: the request has an Origin"
    host = headers.get("Host")
    if host is not None and is_public_hostname(host):
        return (
            HTTPStatus.MISDIRECTED_REQUEST,
            f"{host[:100]!r} is not known as a name of this machine: use its address or its host name",
        )
    return None


def is_public_hostname(host: str) -> bool:
    """Return whether the host may be a public name, not an address or name of this machine or its network."""
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


@dataclass(frozen=True)
class HttpReply:
    body: bytes
    content_type: str = "text/plain"
    status: int = HTTPStatus.OK


HttpResources = Mapping[str, Callable[[], HttpReply]]
"""Functions that make the reply to ``GET``, by path."""


def http_bind_address(setting: str, address: str, forms: str = "HOST:PORT nor off") -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, with the loopback host if none is named."""
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise UsageError(f"{setting}: {address!r} is neither {forms}")
    return host.strip("[]") or "127.0.0.1", int(port)


def resource_server(
    name: str,
    address: tuple[str, int] | Path,
    resources: HttpResources,
    *,
    within_s: float = HTTP_REQUEST_TIMEOUT_S,
) -> HttpServer:
    """Return a server of ``resources``. It listens, and serves while :meth:`HttpServer.running` runs.

    Clients do not authenticate, so request and response together take at most ``within_s`` seconds.
    """

    class Handler(_ResourceHandler):
        served = resources

    return HttpServer(name, address, Handler, within_s=within_s)


class _ResourceHandler(HttpHandler, BaseHTTPRequestHandler):
    served: HttpResources
    timeout = 10

    def do_GET(self) -> None:
        problem = browser_refusal(self.headers)
        if problem is not None:
            self._send(HttpReply(f"{problem[1]}\n".encode(), status=problem[0]))
            return
        resource = self.served.get(self.path.partition("?")[0])
        if resource is None:
            known = f"known paths: {', '.join(self.served)}\n"
            self._send(HttpReply(known.encode(), status=HTTPStatus.NOT_FOUND))
        else:
            self._send(resource())

    def _send(self, reply: HttpReply) -> None:
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(reply.body)))
        self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(reply.body)
