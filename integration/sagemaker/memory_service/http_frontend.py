"""The memory service's HTTP server: requests, token, TLS, metrics, and its start by the agent."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import logging
import os
import secrets
import socket
import ssl
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from integration.sagemaker.memory_service.memory_service import MemoryService
from integration.sagemaker.memory_service.shard_io import BodyPiece
from integration.sagemaker.memory_service.shard_requests import (
    ChunkedBody,
    CreateNamespace,
    DeleteNamespace,
    Get,
    HealthCheck,
    Latest,
    Put,
    Remove,
    RequestRefusedError,
    Reset,
    ShardRequest,
    ShowNamespace,
    SizedBody,
    parse_range,
    parse_request,
    request_body,
)
from peerstore.errors import PeerStoreError, RequestError
from peerstore.membership.topology import validate_node_id
from peerstore.server.job_peers import JobPeers
from peerstore.server.node_peers import NodePeers
from peerstore.settings import JobPeersConfig, ReplicationSettings
from peerstore.store.arena import FileMapping
from peerstore.store.node_store import NodeStore
from peerstore.transport.authentication import check_private_key, read_secret
from tieredckpt.errors import TieredCheckpointError, UsageError
from tieredckpt.http_server import HTTP_REQUEST_TIMEOUT_S, HttpHandler, HttpServer, browser_refusal
from tieredckpt.memory_service_options import (
    MEMORY_SERVICE_JOB,
    MEMORY_SERVICE_TOKEN_FILE,
    AuthMode,
    MemoryServiceOptions,
)

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)

_IDLE_S = 75.0
"""Seconds a connection may be silent, between two requests or within a body."""
_HANDSHAKE_TIMEOUT_S = 10.0
_MAX_HEADER_BYTES = 16 << 10
_MAX_DISCARDED_BYTES = 16 << 10
"""Maximum bytes of an unwanted body that is read instead of closing the connection."""
_DISCARD_TIMEOUT_S = 10.0


@contextlib.contextmanager
def serve_shards(
    service: MemoryService,
    host: str,
    port: int,
    access: TokenCheck,
    tls: ssl.SSLContext | None,
    *,
    within_s: float = HTTP_REQUEST_TIMEOUT_S,
) -> Iterator[str]:
    """Serve while the block runs; yield ``host:port``.

    Connections without a valid token within ``within_s`` seconds are closed.
    """

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
    access: TokenCheck
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    connection: socket.socket
    server: HttpServer
    _body: SizedBody | ChunkedBody | None = None
    _response_started = False

    def setup(self) -> None:
        if hasattr(self.request, "do_handshake"):
            self.request.settimeout(_HANDSHAKE_TIMEOUT_S)
            self.request.do_handshake()
        self._leftover = bytearray(_MAX_DISCARDED_BYTES)
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
        """Postpone ``100 Continue`` until the body is known to be wanted."""
        return True

    def _serve(self) -> None:
        self._body, self._response_started = None, False
        try:
            self._body = request_body(self.headers, self.rfile)  # type: ignore[arg-type]
            self._answer()
        except RequestRefusedError as error:
            self._refuse(error)
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except (PeerStoreError, TieredCheckpointError, OSError) as error:
            log.warning("memory service: %s %s failed: %s", self.command, self.path[:200], error)
            self._refuse(RequestRefusedError(HTTPStatus.SERVICE_UNAVAILABLE, str(error)))
        except Exception as error:
            log.exception("memory service: %s %s failed", self.command, self.path[:200])
            text = f"internal error: {type(error).__name__}: {error}"
            self._refuse(RequestRefusedError(HTTPStatus.INTERNAL_SERVER_ERROR, text))

    def _answer(self) -> None:
        problem = None if self.access.is_required else browser_refusal(self.headers)
        if problem is not None:
            raise RequestRefusedError(*problem)
        if self.path.partition("?")[0] != "/health":
            self.access.check(self.headers.get("Authorization"))
            self.server.mark_authenticated(self.request)
        want = parse_request(self.command, self.path)
        self.service.counted[type(want).__name__] += 1
        if isinstance(want, Put):
            self._put(want)
        elif isinstance(want, Get):
            self._get(want)
        else:
            self._respond(HTTPStatus.OK, self._execute(want))

    def _execute(self, want: ShardRequest) -> Any:
        service = self.service
        match want:
            case ShowNamespace(name):
                namespace = service.namespace(name)
                return {"num_ranks": namespace.num_ranks, "steps_to_retain_per_rank": namespace.steps_retained}
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
            case HealthCheck():
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
        self._respond(HTTPStatus.OK, {"status": "ok"})

    def _shard_meta(self) -> bytes | None:
        value = self.headers.get("Shard-Meta")
        if value is None:
            return None
        raw = value.encode("latin-1", "replace")
        if len(raw) > _MAX_HEADER_BYTES or any(byte < 0x20 and byte != 0x09 for byte in raw):
            raise RequestRefusedError(
                HTTPStatus.BAD_REQUEST, "Shard-Meta is too long, or has characters that no header has"
            )
        return raw

    def _get(self, want: Get) -> None:
        shard = self.service.find(want.name, want.rank, want.step)
        part = parse_range(self.headers.get("Range"), shard.size_bytes)
        start, stop = part or (0, shard.size_bytes)
        with self.service.reading(shard, start, stop) as pieces:
            self._response_started = True
            self.send_response(HTTPStatus.PARTIAL_CONTENT if part else HTTPStatus.OK)
            self.send_header("Content-Length", str(stop - start))
            if shard.header:
                self.send_header("Shard-Meta", shard.header.decode("latin-1"))
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Accept-Ranges", "bytes")
            if part:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{shard.size_bytes}")
            self.end_headers()
            for piece in pieces:
                self._send(piece)

    def _send(self, piece: BodyPiece) -> None:
        if isinstance(piece, memoryview):
            self.connection.sendall(piece)
        elif not hasattr(self.connection, "do_handshake"):
            with open(piece.fd, "rb", closefd=False) as file:
                self.connection.sendfile(file, piece.start, piece.stop - piece.start)
        else:
            with FileMapping(piece.fd, piece.stop) as mapping, mapping.view as view, view[piece.start :] as part:
                self.connection.sendall(part)

    def _respond(self, status: HTTPStatus, content: Any, headers: dict[str, str] | None = None) -> None:
        body = msgspec.json.encode(content)
        unread = not self._at_end()
        self.close_connection = self.close_connection or unread
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
        if unread:
            self._discard()

    def _at_end(self) -> bool:
        """Return whether the connection is at the start of the next request."""
        body = self._body
        if isinstance(body, SizedBody) and not body.problem and (body.size_bytes or 0) <= len(self._leftover):
            body.fill(memoryview(self._leftover))
        return body is not None and body.at_end and not body.problem

    def _refuse(self, error: RequestRefusedError) -> None:
        self.service.counted["refused"] += 1
        if self._response_started:  # a started response cannot be replaced: the client notices its early end
            log.warning("memory service: an answer to %s was cut off: %s", self.path[:200], error.detail)
            self.close_connection = True
            return
        headers = {"WWW-Authenticate": 'Bearer, Basic realm="memory service"'} if error.status == 401 else {}
        if error.status in (HTTPStatus.INSUFFICIENT_STORAGE, HTTPStatus.SERVICE_UNAVAILABLE):
            headers["Retry-After"] = "1"
        with contextlib.suppress(OSError):
            self._respond(error.status, {"detail": error.detail}, headers)

    def _discard(self) -> None:
        """Read some of the unwanted body before closing.

        With unread bytes the kernel would discard the response.
        """
        with contextlib.suppress(OSError):
            self.connection.settimeout(_DISCARD_TIMEOUT_S)
            socket.socket.shutdown(self.connection, socket.SHUT_WR)
            until, buffer = time.monotonic() + _DISCARD_TIMEOUT_S, bytearray(1 << 16)
            while time.monotonic() < until and self.connection.recv_into(buffer):
                pass


class TokenCheck:
    """Check of the requests' token. With an empty ``token`` no token is required.

    The token arrives as ``Authorization: Bearer TOKEN``, or as the password of ``Authorization: Basic``. Clients
    without support for tokens send the latter if their address is ``http://any:TOKEN@host:port``.
    """

    def __init__(self, token: bytes = b"") -> None:
        self._token = token

    @property
    def is_required(self) -> bool:
        return bool(self._token)

    def check(self, authorization: str | None) -> None:
        if self._token and not hmac.compare_digest(_token_of(authorization or ""), self._token):
            raise RequestRefusedError(
                HTTPStatus.UNAUTHORIZED,
                "The memory service asks for its token: send 'Authorization: Bearer TOKEN', or use "
                "http://any:TOKEN@host:port as its address",
            )


def _token_of(authorization: str) -> bytes:
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode("latin-1", "replace")
    if scheme.lower() == "basic":
        with contextlib.suppress(binascii.Error, ValueError):
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    return b""


def token_check(auth: AuthMode, token: str, directory: Path) -> TokenCheck:
    """Return the check that the settings require.

    If a token is required but not set, create one and store it in ``directory``.
    """
    return TokenCheck(_token(token, directory)) if auth == "token" else TokenCheck()


def _token(secret: str, directory: Path) -> bytes:
    if secret:
        try:
            return read_secret(secret)
        except RequestError as error:
            raise UsageError(f"agent.memory_service_token: {error}") from error
    path = directory / MEMORY_SERVICE_TOKEN_FILE
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileExistsError:  # an earlier agent created it, and its clients use it
        try:
            return read_secret(path)
        except RequestError as error:
            raise UsageError(f"the memory service's token: {error}; remove {path} to have a new one made") from error
    with os.fdopen(fd, "wb") as file:
        token = secrets.token_urlsafe(32).encode()
        file.write(token)
    return token


_REQUESTS = ("ShowNamespace", "CreateNamespace", "DeleteNamespace", "Put", "Get", "Remove", "Latest", "Reset")


class MemoryServiceMetrics:
    """Status and metrics of one node's memory service."""

    def __init__(self, service: MemoryService, address: str) -> None:
        self._service = service
        self._address = address

    def status(self) -> dict[str, Any]:
        snapshot = self._service.holdings.snapshot()
        return {
            "address": self._address,
            "namespaces": {
                name: {
                    "num_ranks": namespace.num_ranks,
                    "steps_retained": namespace.steps_retained,
                    "whole_steps": snapshot.complete_steps(name, namespace),
                    "steps": sorted(snapshot.view.of(name), reverse=True),
                    "size_bytes": sum(s.size_bytes for of in snapshot.view.of(name).values() for s in of.values()),
                }
                for name, namespace in sorted(snapshot.registry.live_namespaces.items())
            },
            "not_asked": dict(snapshot.unanswered),
            "counted": dict(self._service.counted),
            "evictions": self._service.holdings.evicted_count,
        }

    def collect(self) -> Iterator[Metric]:
        """Yield metrics of this node only: a scrape must not query other nodes."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counted, holdings = self._service.counted, self._service.holdings
        here = holdings.local_facts()
        registry = holdings.gossip.registry()
        for name, text, value in (
            ("namespaces", "Namespaces of the memory service.", len(registry.live_namespaces)),
            ("shards", "Shards of the memory service on this node, copies included.", len(here)),
            ("shard_bytes", "Their bytes.", sum(fact.size_bytes for fact in here)),
        ):
            yield GaugeMetricFamily(f"tieredckpt_memory_service_{name}", text, value=value)
        requests = CounterMetricFamily("tieredckpt_memory_service_requests", "Requests by kind.", labels=["kind"])
        for kind in _REQUESTS:
            requests.add_metric([kind], counted[kind])
        yield requests
        for name, text, value in (
            ("refused", "Requests that were not done.", counted["refused"]),
            ("put_bytes", "Bytes taken in from clients.", counted["put_bytes"]),
            ("get_bytes", "Bytes handed to clients.", counted["get_bytes"]),
            ("remote_gets", "Shards that came from another node.", counted["remote_gets"]),
            ("evictions", "Shards that were not kept any more.", holdings.evicted_count),
        ):
            yield CounterMetricFamily(f"tieredckpt_memory_service_{name}", text, value=value)


@contextlib.contextmanager
def serve_memory_service(
    store: NodeStore, options: MemoryServiceOptions, node: str, directory: Path, node_peers: NodePeers | None
) -> Iterator[MemoryServiceMetrics]:
    """Serve the memory service while the block runs."""
    problems = [f"agent.{name}: {text}" for name, text in options.problems()]
    if problems:
        raise UsageError("; ".join(problems))
    host, port = options.host_and_port
    access = token_check(options.auth, options.token, directory)
    tls = _tls(options.tls)
    plan = _plan(options)
    with contextlib.ExitStack() as cleanup:
        service = MemoryService(store, validate_node_id(node))
        cleanup.callback(service.close)
        service.start(_join(plan, node_peers))
        address = cleanup.enter_context(serve_shards(service, host, port, access, tls))
        asks = "for a token" if access.is_required else "nobody who they are"
        log.info("memory service on %s, over %s, asks %s", address, "TLS" if tls is not None else "plain HTTP", asks)
        (directory / MEMORY_SERVICE_JOB).write_text(address)
        yield MemoryServiceMetrics(service, address)


def _join(plan: JobPeersConfig | None, node_peers: NodePeers | None) -> JobPeers | None:
    if plan is None:
        if node_peers is not None:
            node_peers.leave(MEMORY_SERVICE_JOB)
        return None
    if node_peers is None:
        raise UsageError("agent.memory_service_nodes: other nodes cannot reach this one while agent.peers is off")
    return node_peers.join(MEMORY_SERVICE_JOB, plan)


def _plan(options: MemoryServiceOptions) -> JobPeersConfig | None:
    if not options.nodes:
        return None
    try:
        settings = ReplicationSettings(copies=options.copies, evicts_superseded=False)
        return JobPeersConfig(read_secret(options.secret), settings, discovery=options.nodes)
    except RequestError as error:
        raise UsageError(f"agent.memory_service_secret: {error}") from error


def _tls(directory: str) -> ssl.SSLContext | None:
    if not directory:
        return None
    folder = Path(directory)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        check_private_key(folder / "tls.key")
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        if (folder / "ca.crt").exists():
            context.load_verify_locations(folder / "ca.crt")
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError, RequestError) as error:
        raise UsageError(f"agent.memory_service_tls: cannot use the certificates in {folder}: {error}") from error
    return context
