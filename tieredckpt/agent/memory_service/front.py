"""The memory service's front door: HTTP/1.1 with kept connections, on plain TCP or over TLS."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

import msgspec

from peerstore.errors import PeerStoreError
from peerstore.pages import Mapping
from tieredckpt.agent.http_server import REQUEST_S, HttpHandler, HttpServer, refused
from tieredckpt.agent.memory_service.access import Access
from tieredckpt.agent.memory_service.answers import RefusedError
from tieredckpt.agent.memory_service.bodies import Chunked, Sized, body_of
from tieredckpt.agent.memory_service.lending import Piece
from tieredckpt.agent.memory_service.requests import (
    Asked,
    CreateNamespace,
    DeleteNamespace,
    Get,
    Health,
    Latest,
    Put,
    Remove,
    Reset,
    ShowNamespace,
    asked,
    range_of,
)
from tieredckpt.agent.memory_service.service import MemoryService
from tieredckpt.errors import TieredCheckpointError, UsageError

if TYPE_CHECKING:
    import ssl

log = logging.getLogger(__name__)

_IDLE_S = 75.0
"""How long a connection may be silent: between two requests, and in the middle of a body."""
_SHAKE_S = 10.0
_MOST_HEADER_BYTES = 16 << 10
_SMALL_BYTES = 16 << 10
"""A body that nobody wants, and that is not worth a new connection."""
_DISCARDED_S = 10.0


@contextlib.contextmanager
def serving(
    service: MemoryService,
    host: str,
    port: int,
    access: Access,
    tls: ssl.SSLContext | None,
    *,
    within_s: float = REQUEST_S,
) -> Iterator[str]:
    """Serve while the block runs; yields ``host:port``. Who shows no token within ``within_s`` is hung up on."""

    class Handler(_Handler):
        pass

    Handler.service, Handler.access = service, access
    try:
        server = HttpServer("the memory service", (host, port), Handler, tls=tls, within_s=within_s)
    except (OSError, OverflowError, UnicodeError) as error:
        raise UsageError(f"agent.memory_service: {host}:{port} cannot be served: {error}") from error
    with server.running() as bound:
        yield bound


class _Handler(HttpHandler, BaseHTTPRequestHandler):
    service: MemoryService
    access: Access
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    connection: socket.socket
    server: HttpServer
    _body: Sized | Chunked | None = None
    _begun = False

    def setup(self) -> None:
        if hasattr(self.request, "do_handshake"):
            self.request.settimeout(_SHAKE_S)
            self.request.do_handshake()
        self._leftover = bytearray(_SMALL_BYTES)
        super().setup()

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def do_PATCH(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def do_OPTIONS(self) -> None:
        self._serve()

    def handle_expect_100(self) -> bool:
        """Not before it is known that the body is wanted."""
        return True

    # -- one request --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        self._body, self._begun = None, False
        try:
            self._body = body_of(self.headers, self.rfile)  # type: ignore[arg-type]
            self._answer()
        except RefusedError as error:
            self._refuse(error)
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except (PeerStoreError, TieredCheckpointError, OSError) as error:
            log.warning("memory service: %s %s failed: %s", self.command, self.path[:200], error)
            self._refuse(RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, str(error)))
        except Exception as error:
            log.exception("memory service: %s %s failed", self.command, self.path[:200])
            text = f"internal error: {type(error).__name__}: {error}"
            self._refuse(RefusedError(HTTPStatus.INTERNAL_SERVER_ERROR, text))

    def _answer(self) -> None:
        problem = None if self.access.asks else refused(self.headers)
        if problem is not None:
            raise RefusedError(*problem)
        if self.path.partition("?")[0] != "/health":
            self.access.check(self.headers.get("Authorization"))
            self.server.proven(self.request)
        want = asked(self.command, self.path)
        self.service.counted[type(want).__name__] += 1
        if isinstance(want, Put):
            self._put(want)
        elif isinstance(want, Get):
            self._get(want)
        else:
            self._tell(HTTPStatus.OK, self._done(want))

    def _done(self, want: Asked) -> Any:
        service = self.service
        match want:
            case ShowNamespace(name):
                found = service.namespace(name)
                return {"num_ranks": found.num_ranks, "steps_to_retain_per_rank": found.steps_retained}
            case CreateNamespace(name, num_ranks, steps_retained):
                service.create(name, num_ranks=num_ranks, steps_retained=steps_retained)
                return {"status": "created"}
            case DeleteNamespace(name):
                service.delete(name)
                return {"status": "deleted"}
            case Latest(name, limit):
                return service.latest(name, limit)
            case Remove(name, rank, step):
                service.remove(name, rank, step)
                return {"status": "deleted"}
            case Reset():
                service.reset()
                return {"status": "reset"}
            case Health():
                return {"status": "healthy"}
        raise AssertionError(want)

    def _put(self, want: Put) -> None:
        header = self._shard_meta()
        self.service.namespace(want.name)
        if self._body is not None and self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(HTTPStatus.CONTINUE)
            self.end_headers()
        if self._body is not None:
            self.service.put(want.name, want.rank, want.step, header, self._body)
        self._tell(HTTPStatus.OK, {"status": "ok"})

    def _shard_meta(self) -> bytes | None:
        value = self.headers.get("Shard-Meta")
        if value is None:
            return None
        raw = value.encode("latin-1", "replace")
        if len(raw) > _MOST_HEADER_BYTES or any(byte < 0x20 and byte != 0x09 for byte in raw):
            raise RefusedError(HTTPStatus.BAD_REQUEST, "Shard-Meta is too long, or has characters that no header has")
        return raw

    def _get(self, want: Get) -> None:
        found = self.service.find(want.name, want.rank, want.step)
        part = range_of(self.headers.get("Range"), found.size_bytes)
        start, stop = part or (0, found.size_bytes)
        with self.service.reading(found, start, stop) as pieces:
            self._begun = True
            self.send_response(HTTPStatus.PARTIAL_CONTENT if part else HTTPStatus.OK)
            self.send_header("Content-Length", str(stop - start))
            if found.header:
                self.send_header("Shard-Meta", found.header.decode("latin-1"))
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Accept-Ranges", "bytes")
            if part:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{found.size_bytes}")
            self.end_headers()
            for piece in pieces:
                self._send(piece)

    def _send(self, piece: Piece) -> None:
        if isinstance(piece, memoryview):
            self.connection.sendall(piece)
        elif not hasattr(self.connection, "do_handshake"):
            with open(piece.fd, "rb", closefd=False) as file:
                self.connection.sendfile(file, piece.start, piece.stop - piece.start)
        else:
            with Mapping(piece.fd, piece.stop) as mapping, mapping.view as view, view[piece.start :] as part:
                self.connection.sendall(part)

    # -- answers ------------------------------------------------------------------------------------------------------

    def _tell(self, status: HTTPStatus, said: Any, headers: dict[str, str] | None = None) -> None:
        body = msgspec.json.encode(said)
        over = not self._at_end()
        self.close_connection = self.close_connection or over
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        if over:
            self._discard()

    def _at_end(self) -> bool:
        """Whether the next thing on the connection is the next request."""
        body = self._body
        if isinstance(body, Sized) and not body.problem and (body.size_bytes or 0) <= len(self._leftover):
            body.fill(memoryview(self._leftover))
        return body is not None and body.at_end and not body.problem

    def _refuse(self, error: RefusedError) -> None:
        self.service.counted["refused"] += 1
        if self._begun:  # of an answer that has begun nothing can be taken back: it ends too early, which is noticed
            log.warning("memory service: an answer to %s was cut off: %s", self.path[:200], error.detail)
            self.close_connection = True
            return
        headers = {"WWW-Authenticate": 'Bearer, Basic realm="memory service"'} if error.status == 401 else {}
        if error.status in (HTTPStatus.INSUFFICIENT_STORAGE, HTTPStatus.SERVICE_UNAVAILABLE):
            headers["Retry-After"] = "1"
        with contextlib.suppress(OSError):
            self._tell(error.status, {"detail": error.detail}, headers)

    def _discard(self) -> None:
        """Closed with bytes unread, the kernel would throw the answer away: let the client send some of the rest."""
        with contextlib.suppress(OSError):
            self.connection.settimeout(_DISCARDED_S)
            socket.socket.shutdown(self.connection, socket.SHUT_WR)
            until, buffer = time.monotonic() + _DISCARDED_S, bytearray(1 << 16)
            while time.monotonic() < until and self.connection.recv_into(buffer):
                pass
