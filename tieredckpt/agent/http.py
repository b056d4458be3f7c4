"""``/metrics`` for Prometheus and ``/status`` as JSON, read-only, on a local address unless told otherwise."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import msgspec

from tieredckpt.agent.service import NodeService
from tieredckpt.errors import UsageError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)


@contextlib.contextmanager
def serving(node: NodeService, address: str) -> Iterator[str]:
    """Serve while the block runs; yields ``host:port``, or "" when ``address`` is "off"."""
    if address == "off":
        yield ""
        return
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        raise UsageError(f"agent.http: {address!r} is neither HOST:PORT nor off")

    class Handler(_Handler):
        service = node

    try:
        server = ThreadingHTTPServer((host.strip("[]") or "127.0.0.1", int(port)), Handler)
    except (OSError, OverflowError, UnicodeError) as error:
        raise UsageError(f"agent.http: {address} cannot be served: {error}") from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="tieredckpt-http", daemon=True)
    thread.start()
    try:
        bound_host, bound_port = server.server_address[:2]
        yield f"{bound_host!s}:{bound_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    service: NodeService
    timeout = 10
    server_version = "tieredckpt"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._reply(200, _metrics(self.service), "text/plain; version=0.0.4; charset=utf-8")
        elif path == "/status":
            self._reply(200, msgspec.json.encode(status(self.service)), "application/json")
        elif path in ("/", "/health"):
            self._reply(200, b"ok: see /metrics and /status\n", "text/plain")
        else:
            self._reply(404, b"there is /metrics, /status and /health\n", "text/plain")

    def _reply(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        log.debug(format, *args)


def status(node: NodeService) -> dict[str, Any]:
    """Everything the agent knows about itself, as plain values."""
    store = node.store.status()
    jobs = [job.job for job in store.jobs]
    return {
        "store": msgspec.to_builtins(store),
        "drain": {
            "totals": vars(node.drain.totals),
            "jobs": {job: msgspec.to_builtins(node.drains(job)) for job in jobs},
        },
        "trainers": {job: dict(node.observed[job]) for job in list(node.observed)},
    }


def _metrics(node: NodeService) -> bytes:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_Collector(node))
    return generate_latest(registry)


class _Collector:
    """The agent's numbers in Prometheus' words; made anew for each scrape, so nothing is counted twice."""

    def __init__(self, node: NodeService) -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        state = self._node.store.status()
        arena, counted, drain = state.arena, state.counters, self._node.drain.totals
        for name, text, value in (
            ("arena_budget_bytes", "How much memory shards may use.", arena.budget_bytes),
            ("arena_allocated_bytes", "Memory in slots.", arena.allocated_bytes),
            ("arena_sealed_bytes", "Memory in sealed shards.", arena.sealed_bytes),
            ("arena_slots", "Slots.", arena.slots),
            ("arena_free_slots", "Slots nobody uses.", arena.free_slots),
            ("arena_leases", "Slots being written.", arena.leases),
            ("arena_pins", "Reads in progress.", arena.pins),
            ("adopting_shards", "Shards of a killed agent still to be verified.", state.adopting),
            ("drain_lag_seconds", "From the last durable step's seal to its manifest.", drain.lag_s),
        ):
            yield GaugeMetricFamily(f"tieredckpt_{name}", text, value=value)
        for name, text, value in (
            ("seals", "Shards sealed.", counted.get("sealed", 0)),
            ("sealed_bytes", "Bytes sealed.", counted.get("sealed_bytes", 0)),
            ("seal_seconds", "Time spent checksumming.", counted.get("seal_seconds", 0)),
            ("evictions", "Shards given up for newer ones.", counted.get("evicted", 0)),
            ("leases", "Slots handed out.", counted.get("leases", 0)),
            ("leases_lost", "Leases taken back from dead or fenced writers.", counted.get("leases_lost", 0)),
            ("lease_busy", "Saves that found every slot in use.", counted.get("lease_busy", 0)),
            ("lease_full", "Saves that did not fit the budget.", counted.get("lease_full", 0)),
            ("adoptions", "Shards taken over from a killed agent.", counted.get("adopted", 0)),
            ("damages", "Copies that could not be trusted.", counted.get("damaged", 0)),
            ("drained_steps", "Steps made durable.", drain.steps),
            ("drained_bytes", "Bytes uploaded.", drain.bytes),
            ("drain_seconds", "Time spent making steps durable.", drain.seconds),
            ("drain_skips", "Steps left out because a newer one was ready.", drain.skipped),
            ("drain_errors", "Failed attempts to make a step durable.", drain.errors),
            ("deleted_steps", "Durable steps deleted by retention.", drain.deleted),
        ):
            yield CounterMetricFamily(f"tieredckpt_{name}", text, value=value)
        yield from self._jobs()

    def _jobs(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        newest = GaugeMetricFamily("tieredckpt_newest_whole_step", "Newest whole step in memory.", labels=["job"])
        epoch = GaugeMetricFamily("tieredckpt_job_epoch", "The job's incarnation.", labels=["job"])
        for state in self._node.store.status().jobs:
            epoch.add_metric([state.job], state.epoch)
            if state.newest_whole is not None:
                newest.add_metric([state.job], state.newest_whole)
        yield newest
        yield epoch
        seen = CounterMetricFamily("tieredckpt_trainer", "What the trainers measured.", labels=["job", "what"])
        for job, values in list(self._node.observed.items()):
            for what, value in list(values.items()):
                seen.add_metric([job, what], value)
        yield seen
