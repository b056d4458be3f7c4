"""Protection by replicas: one transfer of one shard to one partner at a time."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from peerstore.checksums import chunk_count
from peerstore.errors import PeerStoreError, ShardDamagedError, ShardNotFoundError
from peerstore.failpoints import failpoint
from peerstore.membership.topology import PeerNode
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
from peerstore.replication.replication_policy import (
    ReplicationState,
    ReplicationTask,
    ReplicationView,
    is_committed,
)
from peerstore.replication.replicator import ReplicationContext, redundancy_of_copies
from peerstore.shard_records import ResumePoint, ShardInfo, ShardKey, ShardRecord
from peerstore.transport.base import FileSlice

log = logging.getLogger(__name__)


class MirrorStrategy(ReplicationState):
    """Replicas on partner nodes, a :class:`~peerstore.replication.replicator.ReplicationStrategy`."""

    def __init__(self, shared: ReplicationContext) -> None:
        super().__init__(shared.membership.this_node.id, shared.policy)
        self._shared = shared
        self._store = shared.store
        self._job = shared.job
        self._membership = shared.membership

    def redundancy(
        self, _key: ShardKey, holders: Collection[PeerNode], _look: ReplicationView, level: str
    ) -> tuple[int, int]:
        return redundancy_of_copies(holders, level)

    def has_pending(self, look: ReplicationView) -> bool:
        return any(one.is_owner and one.missing for one in self.statuses(look))

    def step(self, look: ReplicationView) -> float:
        """Make the next copy; return the seconds to wait for the next one, 0 after a copy."""
        with self._shared.changed:
            task = self.next_task(look)
            if task is None:
                return self.retry_s(look)
        self._copy(task, next(fact for fact in look.shards if fact.key == task.key))
        return 0.0

    def _copy(self, task: ReplicationTask, fact: ShardInfo) -> None:
        try:
            pin = self._store.pin(task.key)
        except (ShardNotFoundError, ShardDamagedError):
            return
        self._shared.in_flight = task, fact.size_bytes
        life = self._membership.generation_of(task.target)
        whole = is_committed(fact, self._store.jobs.versions(self._job).replicated)
        try:
            push = ReplicaPush(self._shared, self._membership.client_for(task.target), pin.record, pin.fd)
            base = self._store.jobs.versions(self._job).resume_point
            done = push.run(holders=task.holders, whole=whole, blobs=self._shared.blobs_of(fact), base=base)
        except (PeerStoreError, OSError) as error:
            self._record_failure(task, error)
        else:
            with self._shared.changed:
                self.task_done(task, life, base)
                self._shared.changed.notify_all()
            totals = self._shared.totals
            totals.record_copy(done.sent_bytes, done.seconds, skipped_bytes=done.skipped_bytes)
            totals.lag_s = max(0.0, time.time() - fact.sealed_ns / 1e9)
            if not self._shared.pace.is_limited:
                self._shared.path_monitor.record_transfer(
                    task.target, self._membership.client_for(task.target).address, done.sent_bytes, done.seconds
                )
        finally:
            self._shared.in_flight = None
            pin.close()
            self._store.unpin(pin.id)

    def _record_failure(self, task: ReplicationTask, error: Exception) -> None:
        self._shared.totals.errors += 1
        log.warning("job %s: no copy of %s on %s: %s", self._job, task.key, task.target, error)
        with self._shared.changed:
            verify = self.task_failed(task, error, self._shared.clock())
            self._shared.changed.notify_all()
        if verify:
            with contextlib.suppress(PeerStoreError, OSError):
                self._verify_both(task)

    def _verify_both(self, task: ReplicationTask) -> None:
        """Verify the shard on both nodes because their checksums differ; a damaged copy is dropped."""
        for record in self._store.reader.records(self._job, task.key.version_id):
            if record.key == task.key and not self._store.verify(task.key):
                chunks = (0, chunk_count(record.size_bytes, record.chunk_bytes))
                self._membership.client_for(task.target).call("verify_chunks", VerifyChunks(task.key, (chunks,)), bool)


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

    def __init__(self, shared: ReplicationContext, peer: PeerClient, record: ShardRecord, fd: int) -> None:
        self._shared = shared
        self._peer = peer
        self._record = record
        self._fd = fd

    def run(
        self, *, holders: tuple[str, ...], whole: bool, blobs: tuple[str, ...], base: ResumePoint | None
    ) -> PushResult:
        began = time.monotonic()
        offer = OfferReplica(self._record, holders, whole, blobs, base)
        wanted: OfferReply = self._peer.call("offer_replica", offer, OfferReply, timeout_s=_COMMIT_S)
        for name in wanted.blobs:
            data = self._shared.store.blobs.get(self._shared.job, name)
            self._peer.call("put_blob", PutPeerBlob(name), type(None), payload=[memoryview(data)])
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
        streams = min(self._shared.policy.streams, sum(-(-(stop - first) // _FLUSH_CHUNKS) for first, stop in runs))
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
        if self._shared.stop.is_set():
            raise PeerStoreError("this agent is stopping")
        start = number * self._record.chunk_bytes
        size = min(self._record.chunk_bytes, self._record.size_bytes - start)
        self._shared.pace.acquire(size)
        failpoint("peer.sending")
        line.send("replica_chunk", ReplicaChunk(transfer, number), [FileSlice(self._fd, start, size)])
