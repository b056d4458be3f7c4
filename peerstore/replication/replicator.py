"""Thread that protects a job's shards by replicas or parities, and reports to the commit leader.

::

    wake ──> strategy.step: one transfer, one parity or one rebuild ──> report to the commit leader ──> next step
                                                                        └──> nothing to do: wait, report
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from peerstore import deadlines
from peerstore.commit_protocol import CommitReports
from peerstore.membership.topology import NodeId, PeerNode
from peerstore.network_addresses import PathMonitor
from peerstore.peers.heartbeat_loop import SHUTDOWN_GRACE_S, HeartbeatLoop
from peerstore.rate_limiter import RateLimiter
from peerstore.replication.commit_tracker import CommitTracker, ReplicationTotals
from peerstore.replication.replication_policy import (
    REPLICATION_RETRY_S,
    ReplicationPolicy,
    ReplicationStatus,
    ReplicationTask,
    ReplicationView,
    pending_reports,
)
from peerstore.shard_records import ShardInfo, ShardKey
from peerstore.store.node_store import NodeStore

log = logging.getLogger(__name__)


@dataclass
class ReplicationContext:
    """One job's store, members, lock and counters, which the loop and its strategy share."""

    store: NodeStore
    job: str
    membership: HeartbeatLoop
    policy: ReplicationPolicy
    pace: RateLimiter
    blobs_of: Callable[[ShardInfo], tuple[str, ...]] = lambda _fact: ()
    clock: Callable[[], float] = time.monotonic
    totals: ReplicationTotals = field(default_factory=ReplicationTotals)
    path_monitor: PathMonitor = field(default_factory=PathMonitor)
    in_flight: tuple[ReplicationTask, int] | None = None
    """The running transfer of a shard to another node, and the shard's size in bytes."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    """Notified after every change of the protection, and by a wake-up."""
    stop: threading.Event = field(default_factory=threading.Event)
    woken: bool = True

    def wake(self) -> None:
        with self.changed:
            self.woken = True
            self.changed.notify_all()

    def view(self) -> ReplicationView:
        """Return the job as this node sees it now."""
        facts = self.store.replicas.list_shards(self.job)
        known = self.store.jobs.versions(self.job)
        return ReplicationView(
            self.clock(),
            self.membership.alive,
            facts,
            known.replicated,
            known.epoch,
            known.resume_point,
            self.membership.generation_of,
            known.aborted_parts,
            self.membership.standby,
        )


class ReplicationStrategy(Protocol):
    """The way to protect shards: what to send to which node, and the redundancy that results.

    The loop holds ``changed`` while it calls any method but ``step``.
    """

    def step(self, look: ReplicationView) -> float:
        """Do one piece of work; return the seconds to wait for the next one, 0 if it may be due."""

    def partners(self, living: Mapping[str, PeerNode], standby: tuple[NodeId, ...]) -> tuple[str, ...]: ...

    def statuses(self, look: ReplicationView) -> list[ReplicationStatus]: ...

    def confirm_holder(self, key: ShardKey, node: str, life: int) -> None: ...

    def confirmed_holders(self, key: ShardKey, life: Callable[[str], int]) -> tuple[str, ...]: ...

    def redundancy(
        self, key: ShardKey, holders: Collection[PeerNode], look: ReplicationView, level: str
    ) -> tuple[int, int]: ...

    def last_errors(self, key: ShardKey) -> str: ...

    def has_pending(self, look: ReplicationView) -> bool: ...

    def leader_unreachable(self, leader: str, now: float) -> None: ...


class Replicator:
    """Replication of one job: the thread that runs the strategy's steps and reports protected parts."""

    def __init__(self, shared: ReplicationContext, strategy: ReplicationStrategy) -> None:
        self._shared = shared
        self._strategy = strategy
        self._changed = shared.changed
        self._stop = shared.stop
        self._me = shared.membership.this_node
        self.totals = shared.totals
        self.path_monitor = shared.path_monitor
        self.reports = CommitReports(self._me.id)
        self.commit_tracker = CommitTracker(
            shared.store,
            shared.job,
            shared.membership,
            reports=self.reports,
            totals=shared.totals,
            changed=shared.changed,
        )
        self._undelivered: tuple[str, float] = ("", 0.0)
        """The leader that the last report did not reach, and the time of the next attempt."""
        self._thread = threading.Thread(target=self._run, name="peerstore-protect", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; work in progress gets ``SHUTDOWN_GRACE_S`` seconds to finish."""
        self._stop.set()
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(deadlines.remaining_s(SHUTDOWN_GRACE_S))
            if self._thread.is_alive():
                self._shared.membership.close_connections()
                self._thread.join()
        self.commit_tracker.close()

    def wake(self) -> None:
        """Check for new work, because shards, members or reports changed."""
        self._shared.wake()

    @property
    def in_flight(self) -> tuple[ReplicationTask, int] | None:
        """The running transfer, and its shard's size in bytes."""
        return self._shared.in_flight

    @property
    def partners(self) -> tuple[str, ...]:
        """The nodes that store replicas or parities of this node's shards."""
        living, standby = self._shared.membership.alive, self._shared.membership.standby
        with self._changed:
            return self._strategy.partners(living, standby)

    def statuses(self) -> list[ReplicationStatus]:
        """Return the replication state of the shards on this node; with parity, of those that this node owns."""
        look = self._shared.view()
        with self._changed:
            return self._strategy.statuses(look)

    def holders(self, key: ShardKey) -> tuple[PeerNode, ...]:
        """Return the live nodes that are known to hold a shard of this node, this node first."""
        living = self._shared.membership.alive
        with self._changed:
            confirmed = self._strategy.confirmed_holders(key, self._shared.membership.generation_of)
        return (self._me, *(living[node] for node in confirmed if node in living))

    def redundancy(self, key: ShardKey, level: str) -> tuple[int, int]:
        """Return the number of copies that the protection equals, and the number of failure domains.

        The shard survives the loss of all but one of them.
        """
        holders, look = self.holders(key), self._shared.view()
        with self._changed:
            return self._strategy.redundancy(key, holders, look, level)

    def last_errors(self, key: ShardKey) -> str:
        """Return the last errors of a shard's protection, or ""."""
        with self._changed:
            return self._strategy.last_errors(key)

    def confirm_holder(self, key: ShardKey, node: str, life: int) -> None:
        """Record that ``node``, in its generation ``life``, holds a shard."""
        with self._changed:
            self._strategy.confirm_holder(key, node, life)
            self._changed.notify_all()

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``ready()`` is true; return ``False`` at the timeout or at shutdown.

        Every change calls ``ready`` again.
        """
        with self._changed:
            return self._changed.wait_for(lambda: ready() or self._stop.is_set(), timeout_s) and not self._stop.is_set()

    @property
    def has_pending(self) -> bool:
        """Whether this node can still protect or rebuild a shard."""
        look = self._shared.view()
        with self._changed:
            return self._strategy.has_pending(look)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                wait_s = self._step()
                if wait_s and self._wait(wait_s):
                    self._report_to_leader()  # before the next transfer, which takes longer
            except Exception:  # the thread must outlive any one shard
                log.exception("job %s: protecting failed", self._shared.job)
                self._stop.wait(REPLICATION_RETRY_S)

    def _step(self) -> float:
        """Do one piece of work and report; return the seconds to wait for the next one, 0 if it may be due."""
        with self._changed:
            self._shared.woken = False
        wait_s = self._strategy.step(self._shared.view())
        self._report_to_leader()
        return wait_s

    def _wait(self, wait_s: float) -> bool:
        """Wait for a change or the next attempt to report; return whether the loop continues."""
        until_report_s = self._undelivered[1] - self._shared.clock()
        if until_report_s > 0:
            wait_s = min(wait_s, until_report_s)
        with self._changed:
            self._changed.wait_for(lambda: self._shared.woken or self._stop.is_set(), wait_s)
        return not self._stop.is_set()

    def _report_to_leader(self) -> None:
        """Report the sealed and protected parts of this node to the commit leader."""
        if not (self._shared.policy.reports_commits and self._shared.membership.is_converged):
            return  # other members may be unknown, and without replicas
        look = self._shared.view()
        with self._changed:
            leader, notes = pending_reports(self.reports, self._strategy.statuses(look), look, me=self._me.id)
        unreached, retry_at = self._undelivered
        if leader == unreached and look.now < retry_at:
            return
        if self.commit_tracker.report(leader, notes):
            self._undelivered = ("", 0.0)
        else:
            now = self._shared.clock()
            self._undelivered = (leader, now + REPLICATION_RETRY_S)
            with self._changed:
                self._strategy.leader_unreachable(leader, now)


def redundancy_of_copies(holders: Collection[PeerNode], level: str) -> tuple[int, int]:
    """Return the number of copies, and of failure domains with a copy."""
    return len(holders), len({node.failure_domain(level) for node in holders})
