"""The agent's HTTP listener: a page for browsers, ``/metrics`` for Prometheus, ``/status`` as JSON."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from peerstore.server.job_peers import JobPeers
from tieredckpt.agent.agent_service import NodeAgentService
from tieredckpt.agent.cluster_settings import ClusterSettingsWatcher
from tieredckpt.errors import UsageError
from tieredckpt.http_server import HTTP_REQUEST_TIMEOUT_S, HttpReply, http_bind_address, resource_server
from tieredckpt.memory_service_options import jobs_in_use

if TYPE_CHECKING:
    from prometheus_client.core import Metric

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
    resources = {
        "/": lambda: HttpReply(_live_page(node).encode(), "text/html; charset=utf-8"),
        "/metrics": lambda: HttpReply(_metrics(node, memory), "text/plain; version=0.0.4; charset=utf-8"),
        "/status": lambda: HttpReply(msgspec.json.encode(agent_status(node, memory)), "application/json"),
        "/health": lambda: HttpReply(b"ok: see /, /metrics and /status\n"),
    }
    try:
        server = resource_server("/metrics and /status", bind_address, resources, within_s=within_s)
    except (OSError, OverflowError, UnicodeError) as error:
        raise UsageError(f"agent.http: {address} cannot be served: {error}") from error
    with server.running() as bound:
        yield bound


def _bind_address(address: str, directory: Path | None) -> tuple[str, int] | Path:
    if address == "socket" and directory is not None:
        return directory / SOCKET
    return http_bind_address("agent.http", address, "socket, HOST:PORT nor off")


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
