"""Messages of the commit protocol: part reports to the leader, decisions to all members."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from peerstore.commit_protocol import CommitDecision, CommitReports, PartsReport, broadcast_targets, commit_leader
from peerstore.errors import PeerStoreError
from peerstore.failpoints import failpoint
from peerstore.peers.heartbeat_loop import HeartbeatLoop
from peerstore.store.node_store import NodeStore

log = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 5.0
_BROADCAST_THREADS = 16
_RELAYS = 2
"""Number of other nodes that are tried as relays if the commit leader is unreachable."""


@dataclass
class ReplicationTotals:
    """Counters since the agent started."""

    copies: int = 0
    sent_bytes: int = 0
    skipped_bytes: int = 0
    seconds: float = 0.0
    errors: int = 0
    replicated: int = 0
    lag_s: float = 0.0
    """Seconds from the last shard's seal to its last replica."""

    def record_copy(self, sent_bytes: int, seconds: float, *, skipped_bytes: int = 0) -> None:
        self.copies += 1
        self.sent_bytes += sent_bytes
        self.skipped_bytes += skipped_bytes
        self.seconds += seconds


class CommitTracker:
    """Sender and receiver of one job's commit messages.

    ``changed`` guards its :class:`~peerstore.commit_protocol.CommitReports`.
    """

    def __init__(
        self,
        store: NodeStore,
        job: str,
        membership: HeartbeatLoop,
        *,
        reports: CommitReports,
        totals: ReplicationTotals,
        changed: threading.Condition,
    ) -> None:
        self._store = store
        self._job = job
        self._membership = membership
        self._reports = reports
        self._totals = totals
        self._changed = changed
        self._cached_leader: tuple[Mapping[str, object], tuple[str, ...], str | None] = ({}, (), None)
        self._broadcast_lock = threading.Lock()
        self._undelivered: dict[str, CommitDecision] = {}
        """Decisions that wait to be sent, by node."""
        self._broadcast_pool = ThreadPoolExecutor(_BROADCAST_THREADS, thread_name_prefix="peerstore-settled")

    def report(self, sender: str, notes: Iterable[PartsReport]) -> bool:
        """Report the sealed and replicated parts to the leader; return whether all reports were delivered."""
        delivered = True
        for note in notes:
            if self._deliver(sender, note):
                with self._changed:
                    self._reports.mark_reported(sender, note)
            else:
                delivered = False
        self._decide()  # another node may have taken over the parts of a dead node
        return delivered

    def _deliver(self, sender: str, note: PartsReport) -> bool:
        """Deliver a report to the leader, directly or through a relay; return whether that succeeded."""
        me = self._membership.this_node.id
        if sender == me:
            self.handle_report(note)
            return True
        others = [
            node for node in sorted(self._membership.alive) if node not in (me, sender, *self._membership.standby)
        ]
        for node in [sender, *others[:_RELAYS]]:
            try:
                self._send_report(node, note, timeout_s=_CALL_TIMEOUT_S if node == sender else 2 * _CALL_TIMEOUT_S)
            except (PeerStoreError, OSError) as error:
                log.debug("job %s: cannot report to %s through %s: %s", self._job, sender, node, error)
            else:
                return True
        return False

    def _send_report(self, node: str, note: PartsReport, *, timeout_s: float) -> None:
        self._membership.client_for(node).call("report_parts", note, type(None), timeout_s=timeout_s)

    def handle_report(self, note: PartsReport) -> None:
        """Add a node's report, and decide or forward it; raise if the commit leader is unreachable."""
        with self._changed:
            self._reports.add(note)
        if not self._decide():
            sender = self._leader()
            if (
                sender is not None and sender < self._membership.this_node.id
            ):  # only to a smaller id, so reports cannot circulate
                self._send_report(sender, note, timeout_s=_CALL_TIMEOUT_S)

    def _leader(self) -> str | None:
        """Return the commit leader, cached: in a large job thousands of reports arrive for each version."""
        living, standby = self._membership.alive, self._membership.standby
        known, without_vote, found = self._cached_leader
        if known is not living or without_vote != standby:
            found = commit_leader(living, standby)
            self._cached_leader = living, standby, found
        return found

    def _decide(self) -> bool:
        """Apply and broadcast the decision that follows from all reports; return whether there was a new one."""
        living, replicated = self._membership.alive, self._store.jobs.versions(self._job).replicated
        quorum = self._membership.has_quorum
        with self._changed:
            found = self._reports.decide(
                living=living, life=self._membership.generation_of, replicated=replicated, quorum=quorum
            )
        if not found:
            return False
        self.handle_decision(found)
        if found.replicated is not None:
            failpoint("peer.replicated")
        self._broadcast(found, broadcast_targets(living, self._membership.this_node.id))
        return True

    def _broadcast(self, found: CommitDecision, nodes: Iterable[str]) -> None:
        """Send the decision to these nodes in background threads, so that the reporter does not wait."""
        with self._broadcast_lock:
            new = [node for node in nodes if node not in self._undelivered]
            for node in nodes:
                self._undelivered[node] = self._undelivered.get(node, CommitDecision()) | found
        for node in new:
            with contextlib.suppress(
                RuntimeError
            ):  # this agent is closing; the other nodes learn the decision from pings
                self._broadcast_pool.submit(self._send_decision, node)

    def _send_decision(self, node: str) -> None:
        with self._broadcast_lock:
            found = self._undelivered.pop(node)  # all decisions since it was queued
        try:
            self._send(node, "commit_decision", found)
        except (PeerStoreError, OSError) as error:  # the node learns it with the next version or from a ping
            log.debug("job %s: %s did not receive %s: %s", self._job, node, found, error)

    def _send(self, node: str, what: str, body: object) -> None:
        self._membership.client_for(node).call(
            what, body, type(None), timeout_s=_CALL_TIMEOUT_S, within_s=_CALL_TIMEOUT_S
        )

    def close(self) -> None:
        self._broadcast_pool.shutdown(cancel_futures=True)

    def handle_decision(self, found: CommitDecision) -> None:
        """Apply a decision of the commit leader in this node's store."""
        before = self._store.jobs.versions(self._job).replicated
        self._store.replicas.apply_decision(self._job, found)
        if found.replicated is not None and (before is None or before < found.replicated):
            self._totals.replicated += 1
        with self._changed:
            self._changed.notify_all()
