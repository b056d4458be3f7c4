"""The transfer of one shard to one node, and the thread that keeps a job's shards replicated."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from peerstore import deadlines
from peerstore.checksums import chunk_count
from peerstore.errors import PeerStoreError, ShardDamagedError, ShardNotFoundError
from peerstore.failpoints import failpoint
from peerstore.membership.topology import PeerNode
from peerstore.network_addresses import PathMonitor
from peerstore.peers.heartbeat_loop import SHUTDOWN_GRACE_S, HeartbeatLoop
from peerstore.peers.peer_client import PeerClient, PeerConnection
from peerstore.peers.peer_messages import (
    AbortReplica,
    CommitReplica,
    FlushChunks,
    OfferReplica,
    OfferReply,
    PutPeerBlob,
    ReplicaChunk,
    VerifyChunks,
)
from peerstore.rate_limiter import RateLimiter
from peerstore.replication.commit_tracker import CommitTracker, ReplicationTotals
from peerstore.replication.replication_policy import (
    REPLICATION_RETRY_S,
    ReplicationPolicy,
    ReplicationState,
    ReplicationStatus,
    ReplicationTask,
    ReplicationView,
    is_committed,
)
from peerstore.shard_records import ResumePoint, ShardInfo, ShardKey, ShardRecord
from peerstore.store.node_store import NodeStore
from peerstore.transport.base import FileSlice

__all__ = ["ReplicationPolicy", "ReplicationTotals", "Replicator"]

log = logging.getLogger(__name__)


class Replicator:
    """Replication of one job: a thread that sends replicas and reports replicated parts."""

    def __init__(
        self,
        store: NodeStore,
        job: str,
        membership: HeartbeatLoop,
        protection: ReplicationPolicy,
        *,
        pace: RateLimiter,
        blobs_of: Callable[[ShardInfo], tuple[str, ...]] = lambda _fact: (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._job = job
        self._membership = membership
        self.policy = protection
        self._pace = pace
        self._blobs_of = blobs_of
        self._clock = clock
        self._replication = ReplicationState(membership.this_node.id, protection)
        self._changed = threading.Condition()
        self._woken = True
        self._stop = threading.Event()
        self.totals = ReplicationTotals()
        self.commit_tracker = CommitTracker(
            store, job, membership, reports=self._replication.reports, totals=self.totals, changed=self._changed
        )
        self.path_monitor = PathMonitor()
        self.in_flight: tuple[ReplicationTask, int] | None = None
        """The running task and its shard's size in bytes."""
        self._thread = threading.Thread(target=self._run, name="peerstore-protect", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; a running transfer gets ``SHUTDOWN_GRACE_S`` seconds to finish."""
        self._stop.set()
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(deadlines.remaining_s(SHUTDOWN_GRACE_S))
            if self._thread.is_alive():
                self._membership.close_connections()
                self._thread.join()
        self.commit_tracker.close()

    def wake(self) -> None:
        """Check for new tasks, because a shard was sealed or the members changed."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def _view(self) -> ReplicationView:
        """Return the job as this node sees it now."""
        facts = self._store.replicas.list_shards(self._job)
        known = self._store.jobs.versions(self._job)
        living, life = self._membership.alive, self._membership.generation_of
        return ReplicationView(
            self._clock(),
            living,
            facts,
            known.replicated,
            known.epoch,
            known.resume_point,
            life,
            known.aborted_parts,
            self._membership.standby,
        )

    @property
    def partners(self) -> tuple[str, ...]:
        """The nodes that store replicas of this node's shards."""
        living, standby = self._membership.alive, self._membership.standby
        with self._changed:
            return self._replication.partners(living, standby)

    def statuses(self) -> list[ReplicationStatus]:
        """Return the replication state of every shard on this node."""
        look = self._view()
        with self._changed:
            return self._replication.statuses(look)

    def holders(self, key: ShardKey) -> tuple[PeerNode, ...]:
        """Return the live nodes that are known to hold a shard of this node, this node first."""
        living = self._membership.alive
        with self._changed:
            confirmed = self._replication.confirmed_holders(key, self._membership.generation_of)
        return (self._membership.this_node, *(living[node] for node in confirmed if node in living))

    def redundancy(self, key: ShardKey, level: str) -> tuple[int, int]:
        """Return the number of the shard's copies, and of failure domains with a copy."""
        holders = self.holders(key)
        return len(holders), len({node.failure_domain(level) for node in holders})

    def last_errors(self, key: ShardKey) -> str:
        """Return the last errors of a shard's replication, or ""."""
        with self._changed:
            return self._replication.last_errors(key)

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``ready()`` is true, which is checked after every copy; return ``False`` at the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: ready() or self._stop.is_set(), timeout_s) and not self._stop.is_set()

    @property
    def has_pending(self) -> bool:
        """Whether copies are missing that can be made."""
        return any(one.is_owner and one.missing for one in self.statuses())

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                task = self._next_task()
                if task is not None:
                    self._run_task(task)
                self._report_to_leader()
            except Exception:  # the thread must outlive any one shard
                log.exception("job %s: protecting failed", self._job)
                self._stop.wait(REPLICATION_RETRY_S)

    def _next_task(self) -> ReplicationTask | None:
        """Return the next task, or ``None`` after a change or a timeout."""
        with self._changed:
            self._woken = False
        look = self._view()
        with self._changed:
            found = self._replication.next_task(look)
        if isinstance(found, ReplicationTask):
            return found
        self._report_to_leader()
        with self._changed:
            self._changed.wait_for(lambda: self._woken or self._stop.is_set(), found)
        return None

    def _run_task(self, task: ReplicationTask) -> None:
        key = task.key
        fact = next((fact for fact in self._store.replicas.list_shards(self._job) if fact.key == key), None)
        if fact is None:
            return
        try:
            pin = self._store.pin(key)
        except (ShardNotFoundError, ShardDamagedError):
            return
        self.in_flight = task, fact.size_bytes
        life = self._membership.generation_of(task.target)
        whole = is_committed(fact, self._store.jobs.versions(self._job).replicated)
        try:
            push = ReplicaPush(
                self._membership.client_for(task.target),
                pin.record,
                pin.fd,
                pace=self._pace,
                streams=self.policy.streams,
                blob=lambda name: self._store.get_blob(self._job, name),
                stopped=self._stop.is_set,
            )
            base = self._store.jobs.versions(self._job).resume_point
            done = push.run(holders=task.holders, whole=whole, blobs=self._blobs_of(fact), base=base)
        except (PeerStoreError, OSError) as error:
            self._record_failure(task, error)
        else:
            with self._changed:
                self._replication.task_done(task, life, base)
                self._changed.notify_all()
            self.totals.copies += 1
            self.totals.sent_bytes += done.sent_bytes
            self.totals.skipped_bytes += done.skipped_bytes
            self.totals.seconds += done.seconds
            if not self._pace.is_limited:
                self.path_monitor.record_transfer(
                    task.target, self._membership.client_for(task.target).address, done.sent_bytes, done.seconds
                )
            self.totals.lag_s = max(0.0, time.time() - fact.sealed_ns / 1e9)
        finally:
            self.in_flight = None
            pin.close()
            self._store.unpin(pin.id)

    def _record_failure(self, task: ReplicationTask, error: Exception) -> None:
        self.totals.errors += 1
        log.warning("job %s: no copy of %s on %s: %s", self._job, task.key, task.target, error)
        with self._changed:
            verify = self._replication.task_failed(task, error, self._clock())
            self._changed.notify_all()
        if verify:
            with contextlib.suppress(PeerStoreError, OSError):
                self._verify_both(task)

    def _verify_both(self, task: ReplicationTask) -> None:
        """Verify the shard on both nodes because their checksums differ; a damaged copy is dropped."""
        for record in self._store.reader.records(self._job, task.key.version_id):
            if record.key == task.key and not self._store.verify(task.key):
                chunks = (0, chunk_count(record.size_bytes, record.chunk_bytes))
                self._membership.client_for(task.target).call("verify_chunks", VerifyChunks(task.key, (chunks,)), bool)

    def confirm_holder(self, key: ShardKey, node: str, life: int) -> None:
        """Record that ``node`` holds a shard, in its generation ``life``."""
        with self._changed:
            self._replication.confirm_holder(key, node, life)
            self._changed.notify_all()

    def _report_to_leader(self) -> None:
        """Report the sealed and replicated parts of this node to the commit leader."""
        if not (
            self.policy.reports_commits and self._membership.is_converged
        ):  # other members may be unknown, and without replicas
            return
        look = self._view()
        with self._changed:
            sender, notes = self._replication.pending_reports(look)
        if not self.commit_tracker.report(sender, notes):
            with self._changed:
                self._replication.leader_unreachable(sender, self._clock())


_COMMIT_S = 120.0
_FLUSH_CHUNKS = 64
"""Number of chunks after which the sender requests the list of damaged chunks."""


@dataclass(frozen=True)
class PushResult:
    """Sent bytes and duration of one push."""

    sent_bytes: int
    skipped_bytes: int
    """Bytes that the other node already had."""
    seconds: float


@dataclass
class _Work:
    """Chunks to send, handed out to the streams in runs."""

    runs: list[tuple[int, int]]
    lock: threading.Lock = field(default_factory=threading.Lock)
    bad: list[int] = field(default_factory=list)
    failure: BaseException | None = None

    def next(self) -> tuple[int, int] | None:
        with self.lock:
            if not self.runs or self.failure is not None:
                return None
            first, stop = self.runs.pop()
            if stop - first > _FLUSH_CHUNKS:
                self.runs.append((first + _FLUSH_CHUNKS, stop))
                stop = first + _FLUSH_CHUNKS
            return first, stop


class ReplicaPush:
    """Transfer of one shard to one node; ``run`` returns when the copy is sealed, or raises."""

    def __init__(
        self,
        peer: PeerClient,
        record: ShardRecord,
        fd: int,
        *,
        pace: RateLimiter,
        streams: int = 2,
        blob: Callable[[str], bytes] = lambda _name: b"",
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._peer = peer
        self._record = record
        self._fd = fd
        self._pace = pace
        self._streams = streams
        self._blob = blob
        self._stopped = stopped

    def run(
        self, *, holders: tuple[str, ...], whole: bool, blobs: tuple[str, ...] = (), base: ResumePoint | None = None
    ) -> PushResult:
        began = time.monotonic()
        offer = OfferReplica(self._record, holders, whole, blobs, base)
        wanted: OfferReply = self._peer.call("offer_replica", offer, OfferReply, timeout_s=_COMMIT_S)
        for name in wanted.blobs:
            self._peer.call("put_blob", PutPeerBlob(name), type(None), payload=[memoryview(self._blob(name))])
        if not wanted.transfer:
            return PushResult(0, self._record.size_bytes, time.monotonic() - began)
        failpoint("peer.offered")
        sent = self._bytes_of(wanted.missing)
        try:
            self._send(wanted.transfer, list(wanted.missing))
            self._peer.call("commit_replica", CommitReplica(wanted.transfer), type(None), timeout_s=_COMMIT_S)
        except BaseException:
            with contextlib.suppress(PeerStoreError):
                self._peer.call("abort_replica", AbortReplica(wanted.transfer), type(None), timeout_s=5.0)
            raise
        return PushResult(sent, self._record.size_bytes - sent, time.monotonic() - began)

    def _bytes_of(self, runs: Sequence[tuple[int, int]]) -> int:
        size, total = self._record.chunk_bytes, self._record.size_bytes
        return sum(min(stop * size, total) - first * size for first, stop in runs)

    def _send(self, transfer: str, runs: list[tuple[int, int]]) -> None:
        bad = self._send_all(transfer, runs)
        # The transfer may have damaged the bytes, so damaged chunks are sent a second time.
        if bad and self._send_all(transfer, [(number, number + 1) for number in bad]):
            raise ShardDamagedError(f"{self._record.key}: {len(bad)} chunks arrived damaged twice, first: {bad[0]}")

    def _send_all(self, transfer: str, runs: list[tuple[int, int]]) -> list[int]:
        work = _Work(sorted(runs, reverse=True))
        streams = min(self._streams, sum(-(-(stop - first) // _FLUSH_CHUNKS) for first, stop in runs))
        helpers = [
            threading.Thread(target=self._stream, args=(transfer, work), name="peerstore-push", daemon=True)
            for _ in range(streams - 1)
        ]
        for thread in helpers:
            thread.start()
        self._stream(transfer, work)
        for thread in helpers:
            thread.join()
        if work.failure is not None:
            raise work.failure
        return work.bad

    def _stream(self, transfer: str, work: _Work) -> None:
        """Send runs of chunks over one connection until none remain."""
        try:
            with self._peer.connection() as line:
                while (run := work.next()) is not None:
                    for number in range(*run):
                        self._send_chunk(line, transfer, number)
                    bad = line.call("flush_chunks", FlushChunks(transfer), tuple[int, ...])
                    with work.lock:
                        work.bad += bad
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that started the streams
            with work.lock:
                work.failure = work.failure or error

    def _send_chunk(self, line: PeerConnection, transfer: str, number: int) -> None:
        if self._stopped():
            raise PeerStoreError("this agent is stopping")
        start = number * self._record.chunk_bytes
        size = min(self._record.chunk_bytes, self._record.size_bytes - start)
        self._pace.acquire(size)
        failpoint("peer.sending")
        line.send("replica_chunk", ReplicaChunk(transfer, number), [FileSlice(self._fd, start, size)])
