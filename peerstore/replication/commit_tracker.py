"""Commit messages between nodes: part reports to the leader, and its decisions broadcast to all members."""

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

_TOLD_S = 5.0
_TELLERS = 16
_MESSENGERS = 2
"""How many others are asked to pass on what the commit leader is to know."""


@dataclass
class ReplicationTotals:
    """Counted since the agent started."""

    copies: int = 0
    sent_bytes: int = 0
    skipped_bytes: int = 0
    seconds: float = 0.0
    errors: int = 0
    replicated: int = 0
    lag_s: float = 0.0
    """From the last shard's seal to its last copy."""


class CommitTracker:
    """One job's :class:`~peerstore.commit_protocol.CommitReports`, sent and received. ``changed`` guards them."""

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
        self._first: tuple[Mapping[str, object], tuple[str, ...], str | None] = ({}, (), None)
        self._announcing = threading.Lock()
        self._undelivered: dict[str, CommitDecision] = {}
        """What nodes are to be told, whose turn has not come."""
        self._tellers = ThreadPoolExecutor(_TELLERS, thread_name_prefix="peerstore-settled")

    def report(self, sender: str, notes: Iterable[PartsReport]) -> bool:
        """Tell the leader which parts of which versions are here and have copies; whether it heard all of that."""
        heard = True
        for note in notes:
            if self._deliver(sender, note):
                with self._changed:
                    self._reports.mark_reported(sender, note)
            else:
                heard = False
        self._decide()  # somebody may answer by now for what a dead node did
        return heard

    def _deliver(self, sender: str, note: PartsReport) -> bool:
        """Whether the leader heard it: from here, or by way of others, so that one bad path holds up no version."""
        me = self._membership.this_node.id
        if sender == me:
            self.handle_report(note)
            return True
        others = [
            node for node in sorted(self._membership.alive) if node not in (me, sender, *self._membership.standby)
        ]
        for node in [sender, *others[:_MESSENGERS]]:
            try:
                self._tell(node, note, timeout_s=_TOLD_S if node == sender else 2 * _TOLD_S)
            except (PeerStoreError, OSError) as error:
                log.debug("job %s: %s was not told by %s what is here: %s", self._job, sender, node, error)
            else:
                return True
        return False

    def _tell(self, node: str, note: PartsReport, *, timeout_s: float) -> None:
        self._membership.client_for(node).call("report_parts", note, type(None), timeout_s=timeout_s)

    def handle_report(self, note: PartsReport) -> None:
        """A node of the job says which parts it answers for. Raises when the commit leader cannot be told."""
        with self._changed:
            self._reports.add(note)
        if not self._decide():
            sender = self._leader()
            if sender is not None and sender < self._membership.this_node.id:  # always down, so never in circles
                self._tell(sender, note, timeout_s=_TOLD_S)

    def _leader(self) -> str | None:
        """Thousands of nodes tell of one version: who the first of the living is is not found out for each."""
        living, standby = self._membership.alive, self._membership.standby
        known, without_vote, found = self._first
        if known is not living or without_vote != standby:
            found = commit_leader(living, standby)
            self._first = living, standby, found
        return found

    def _decide(self) -> bool:
        """Whether something follows from what was told so far. Then all hear of it."""
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
        """Have these nodes told, several at a time: whoever reported the last part does not wait for all of them."""
        with self._announcing:
            new = [node for node in nodes if node not in self._undelivered]
            for node in nodes:
                self._undelivered[node] = self._undelivered.get(node, CommitDecision()) | found
        for node in new:
            with contextlib.suppress(RuntimeError):  # this agent ends, and the others hear it by the pings
                self._tellers.submit(self._tell_decided, node)

    def _tell_decided(self, node: str) -> None:
        with self._announcing:
            found = self._undelivered.pop(node)  # all that was decided while it waited for its turn
        try:
            self._say(node, "commit_decision", found)
        except (PeerStoreError, OSError) as error:  # it learns with the next version, or by the next ping
            log.debug("job %s: %s was not told %s: %s", self._job, node, found, error)

    def _say(self, node: str, what: str, body: object) -> None:
        self._membership.client_for(node).call(what, body, type(None), timeout_s=_TOLD_S, within_s=_TOLD_S)

    def close(self) -> None:
        self._tellers.shutdown(cancel_futures=True)

    def handle_decision(self, found: CommitDecision) -> None:
        """What the commit leader has come to: noted here, and what is given up for it goes."""
        before = self._store.jobs.versions(self._job).replicated
        self._store.replicas.apply_decision(self._job, found)
        if found.replicated is not None and (before is None or before < found.replicated):
            self._totals.replicated += 1
        with self._changed:
            self._changed.notify_all()
