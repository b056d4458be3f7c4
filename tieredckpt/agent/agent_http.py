"""The agent's HTTP listener: a page for browsers, ``/metrics`` for Prometheus, ``/status`` as JSON."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from peerstore.daemon_process import is_same_file
from peerstore.network_addresses import join_address
from peerstore.server.job_peers import JobPeers
from peerstore.transport.tcp import ConnectionAdmission, UnauthenticatedConnection
from tieredckpt.agent.agent_service import NodeAgentService
from tieredckpt.agent.cluster_settings import ClusterSettingsWatcher
from tieredckpt.errors import UsageError
from tieredckpt.memory_service_options import jobs_in_use

if TYPE_CHECKING:
    import ssl
    from email.message import Message
    from io import BufferedIOBase

    from prometheus_client.core import Metric

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


SOCKET = "http.sock"
"""Name of the listener's Unix socket in the agent's directory."""


class StatusSource(Protocol):
    """A service in the agent process that reports its own state."""

    def status(self) -> dict[str, Any]:
        """Return plain values for ``/status``."""

    def collect(self) -> Iterator[Metric]:
        """Yield metrics for ``/metrics``."""


@contextlib.contextmanager
def serve_metrics(
    node: NodeAgentService,
    address: str,
    memory: StatusSource | None = None,
    *,
    directory: Path | None = None,
    within_s: float = HTTP_REQUEST_TIMEOUT_S,
) -> Iterator[str]:
    """Serve while the block runs; yield ``host:port``, ``unix:/path``, or "" when ``address`` is "off".

    The address "socket" is a Unix socket in ``directory``, which no other user can open. Clients do not authenticate,
    so request and response together take at most ``within_s`` seconds.
    """
    if address == "off":
        yield ""
        return
    bind_address = _bind_address(address, directory)

    class Handler(_MetricsHandler):
        service = node
        reporting = memory

    try:
        server = HttpServer("/metrics and /status", bind_address, Handler, within_s=within_s)
    except (OSError, OverflowError, UnicodeError) as error:
        raise UsageError(f"agent.http: {address} cannot be served: {error}") from error
    with server.running() as bound:
        yield bound


def _bind_address(address: str, directory: Path | None) -> tuple[str, int] | Path:
    if address == "socket" and directory is not None:
        return directory / SOCKET
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        raise UsageError(f"agent.http: {address!r} is neither socket, HOST:PORT nor off")
    return host.strip("[]") or "127.0.0.1", int(port)


class _MetricsHandler(HttpHandler, BaseHTTPRequestHandler):
    service: NodeAgentService
    reporting: StatusSource | None
    timeout = 10

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        problem = browser_refusal(self.headers)
        if problem is not None:
            self._reply(problem[0], f"{problem[1]}\n".encode(), "text/plain")
        elif path == "/metrics":
            self._reply(200, _metrics(self.service, self.reporting), "text/plain; version=0.0.4; charset=utf-8")
        elif path == "/status":
            self._reply(200, msgspec.json.encode(agent_status(self.service, self.reporting)), "application/json")
        elif path == "/":
            self._reply(200, _live_page(self.service).encode(), "text/html; charset=utf-8")
        elif path == "/health":
            self._reply(200, b"ok: see /, /metrics and /status\n", "text/plain")
        else:
            self._reply(404, b"paths are /, /metrics, /status and /health\n", "text/plain")

    def _reply(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)


def agent_status(node: NodeAgentService, memory: StatusSource | None = None) -> dict[str, Any]:
    """Return the state of the agent as plain values."""
    store = node.store.status()
    jobs = [job.job for job in store.jobs]
    return {
        "store": msgspec.to_builtins(store),
        "drain": {
            "totals": vars(node.drain.totals),
            "jobs": {job: msgspec.to_builtins(node.drain.status(job)) for job in jobs},
        },
        "protected": {job: msgspec.to_builtins(node.protection(job)) for job in jobs},
        "peers": {team.job: _peers(team) for team in node.teams},
        "trainers": {job: dict(node.trainers.metrics[job]) for job in list(node.trainers.metrics)},
        "memory_service": memory.status() if memory is not None else None,
        "cluster": _cluster(node.cluster_settings),
    }


def _cluster(watcher: ClusterSettingsWatcher | None) -> dict[str, Any] | None:
    """Return the state of the cluster settings watcher, or ``None`` without one."""
    if watcher is None:
        return None
    return {
        "source": watcher.source,
        "budget": watcher.budget,
        "needs_restart": list(watcher.needs_restart),
        "problem": watcher.problem or None,
    }


def _live_page(node: NodeAgentService) -> str:
    from tieredckpt.agent.live_page import JobOnNode, live_page

    store = node.store.status()
    teams = {team.job: team for team in node.teams}
    jobs = [
        JobOnNode(
            one,
            node.protection(one.job),
            node.store.list_shards(one.job),
            node.drain.status(one.job),
            _peers(teams[one.job]) if one.job in teams else None,
            teams[one.job].newest_replicated if one.job in teams else None,
        )
        for one in jobs_in_use(store.jobs)
    ]
    name = node.peers.node_peers.node_id if node.peers is not None else socket.gethostname()
    return live_page(name, node.writer, store, jobs, time.time_ns())


def _peers(team: JobPeers) -> dict[str, Any]:
    sending = team.replicator.in_flight
    return {
        "node": team.this_node.id,
        "sees": team.membership.explain_quorum(),
        "quorum": team.membership.has_quorum,
        "nodes": {name: team.membership.state_of(name) for name in sorted(team.membership.alive)},
        "partners": team.replicator.partners,
        "newest_replicated": team.newest_replicated.version if team.newest_replicated is not None else None,
        "sending": f"{sending[0].key} to {sending[0].target}" if sending is not None else None,
        "totals": vars(team.replicator.totals),
    }


def _metrics(node: NodeAgentService, memory: StatusSource | None) -> bytes:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_Collector(node))
    if memory is not None:
        registry.register(memory)
    return generate_latest(registry)


class _Collector:
    """The agent's state as Prometheus metrics. A new one serves each scrape, so nothing is counted twice."""

    def __init__(self, node: NodeAgentService) -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        state = self._node.store.status()
        arena, counted, drain = state.arena, state.counters, self._node.drain.totals
        for name, text, value in (
            ("arena_budget_bytes", "Memory that shards may use.", arena.budget_bytes),
            ("arena_allocated_bytes", "Memory in slots.", arena.allocated_bytes),
            ("arena_sealed_bytes", "Memory in sealed shards.", arena.sealed_bytes),
            ("arena_slots", "Slots.", arena.slots),
            ("arena_free_slots", "Unused slots.", arena.free_slots),
            ("arena_leases", "Slots that a save is writing.", arena.leases),
            ("arena_pins", "Reads in progress.", arena.pins),
            ("files_open", "Open files and connections of the agent.", counted["files_open"]),
            ("files_limit", "Limit of open files.", counted["files_limit"]),
            (
                "arena_unrecognized_bytes",
                "Memory in slots that another version of the agent wrote.",
                arena.unrecognized_bytes,
            ),
            ("unrecognized_slots", "Slots that another version of the agent wrote.", len(state.unrecognized)),
            ("recovering_shards", "Shards of an earlier agent that are not verified yet.", state.verifying),
            ("drain_lag_seconds", "Time from the seal of the last durable step to its manifest.", drain.lag_s),
        ):
            yield GaugeMetricFamily(f"tieredckpt_{name}", text, value=value)
        for name, text, value in (
            ("seals", "Sealed shards.", counted.get("sealed", 0)),
            ("sealed_bytes", "Sealed bytes.", counted.get("sealed_bytes", 0)),
            ("seal_seconds", "Time spent on checksums.", counted.get("seal_seconds", 0)),
            ("evictions", "Shards evicted for newer ones.", counted.get("evicted", 0)),
            ("leases", "Slots leased to saves.", counted.get("leases", 0)),
            ("leases_lost", "Leases revoked from dead or fenced writers.", counted.get("leases_lost", 0)),
            ("leases_busy", "Saves that found every slot in use.", counted.get("leases_busy", 0)),
            ("leases_over_budget", "Saves that did not fit the budget.", counted.get("leases_over_budget", 0)),
            ("recovered_shards", "Shards adopted from an earlier agent.", counted.get("recovered", 0)),
            ("damaged_copies", "Copies with wrong checksums.", counted.get("damaged", 0)),
            (
                "unreadable_reads",
                "Failed reads of shards that are kept.",
                counted.get("unreadable_reads", 0),
            ),
            ("rejected_busy", "Requests refused near the limit of open files.", counted["rejected_busy"]),
            (
                "listener_errors",
                "Events of shards that a part of the agent failed to handle.",
                counted["listener_errors"],
            ),
            ("drained_steps", "Steps made durable.", drain.steps),
            ("drained_bytes", "Uploaded bytes.", drain.bytes),
            ("drain_seconds", "Time spent on uploads.", drain.seconds),
            ("drain_skips", "Steps not uploaded because a newer one was ready.", drain.skipped),
            ("drain_errors", "Failed attempts to make a step durable.", drain.errors),
            ("deleted_steps", "Durable steps deleted by retention.", drain.deleted),
        ):
            yield CounterMetricFamily(f"tieredckpt_{name}", text, value=value)
        yield from self._jobs()
        yield from self._peers()

    def _peers(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        teams = self._node.teams
        gauges: dict[str, tuple[str, Callable[[JobPeers], float]]] = {
            "peers_alive": ("Live nodes of the job, including this one.", lambda t: len(t.membership.alive)),
            "peers_quorum": (
                "1 if this node reaches a quorum of them, else 0.",
                lambda t: float(t.membership.has_quorum),
            ),
            "shards_under_replicated": (
                "Shards of this node that lack replicas.",
                lambda t: sum(one.is_owner and one.missing > 0 for one in t.replicator.statuses()),
            ),
            "shards_unplaceable": (
                "Shards of this node for whose replicas no node is suitable.",
                lambda t: sum(one.is_owner and one.unplaceable > 0 for one in t.replicator.statuses()),
            ),
            "replicated_step": (
                "Newest step with all its replicas; -1: none.",
                lambda t: t.newest_replicated.version if t.newest_replicated is not None else -1,
            ),
            "copy_lag_seconds": (
                "Time from the seal of the last replicated shard to its replica.",
                lambda t: t.replicator.totals.lag_s,
            ),
        }
        counters: dict[str, tuple[str, Callable[[JobPeers], float]]] = {
            "copies": ("Replicas made on other nodes.", lambda t: t.replicator.totals.copies),
            "copied_bytes": ("Bytes sent for replicas.", lambda t: t.replicator.totals.sent_bytes),
            "copies_unchanged_bytes": (
                "Bytes of replicas that were unchanged and not sent.",
                lambda t: t.replicator.totals.skipped_bytes,
            ),
            "copy_seconds": ("Time spent on sending replicas.", lambda t: t.replicator.totals.seconds),
            "copy_errors": ("Replicas that failed and were retried.", lambda t: t.replicator.totals.errors),
            "copy_throttled_seconds": (
                "Time that peer.bandwidth delayed replicas.",
                lambda t: t.rate_limiter.throttled_s,
            ),
            "shards_repaired": ("Damaged shards fetched again from other nodes.", lambda t: t.repaired),
            "shards_taken_over": (
                "Shards of lost nodes that this node is now responsible for.",
                lambda t: t.taken_over,
            ),
        }
        for kind, families in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, value) in families.items():
                family = kind(f"tieredckpt_{name}", text, labels=["job"])
                for team in teams:
                    family.add_metric([team.job], value(team))
                yield family
        paths = GaugeMetricFamily(
            "tieredckpt_path_bytes_per_second", "Measured speed of replicas to another node.", labels=["job", "node"]
        )
        for team in teams:
            for name, rate in team.replicator.path_monitor.bytes_per_s.items():
                paths.add_metric([team.job, name], rate)
        yield paths

    def _jobs(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        newest = GaugeMetricFamily("tieredckpt_newest_complete_step", "Newest complete step in memory.", labels=["job"])
        epoch = GaugeMetricFamily("tieredckpt_job_epoch", "Epoch of the job.", labels=["job"])
        for state in self._node.store.status().jobs:
            epoch.add_metric([state.job], state.epoch)
            if state.newest_committed is not None:
                newest.add_metric([state.job], state.newest_committed)
        yield newest
        yield epoch
        protected = GaugeMetricFamily(
            "tieredckpt_protected_step",
            "Newest step that has all its replicas or is durable; -1: none.",
            labels=["job"],
        )
        unprotected = GaugeMetricFamily(
            "tieredckpt_unprotected_seconds",
            "Time for which newer saves have been unprotected; 0: they are protected.",
            labels=["job"],
        )
        for state in self._node.store.status().jobs:
            protection, now = self._node.protection(state.job), time.time()
            protected.add_metric([state.job], protection.step)
            since = protection.unprotected_since
            unprotected.add_metric([state.job], 0.0 if since is None else max(0.0, now - since))
        yield protected
        yield unprotected
        measured = CounterMetricFamily("tieredckpt_trainer", "Values that the trainers report.", labels=["job", "what"])
        for job, values in list(self._node.trainers.metrics.items()):
            for name, value in list(values.items()):
                measured.add_metric([job, name], value)
        yield measured
