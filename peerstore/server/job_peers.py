"""The peer tier of one job on one node: membership, replication, inventory, repair of damaged shards."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from peerstore import deadlines
from peerstore.checksums import chunk_count
from peerstore.errors import (
    PeerStoreError,
    PeerUnreachableError,
    RequestError,
    ShardDamagedError,
    ShardNotFoundError,
    UnavailableError,
)
from peerstore.failpoints import failpoint
from peerstore.membership.discovery import Discovery
from peerstore.membership.swim import MembershipSettings
from peerstore.membership.topology import PeerNode
from peerstore.parity.parity_strategy import ParityStrategy
from peerstore.parity.stripes import pending_recovery
from peerstore.peers.heartbeat_loop import HeartbeatLoop
from peerstore.peers.peer_client import PeerCredentials
from peerstore.peers.peer_inventory import InventoryService, JobInventory
from peerstore.peers.peer_messages import (
    MAX_BLOBS_PER_REQUEST,
    MAX_REASON_CHARS,
    DeleteVersions,
    GetPeerBlob,
    GetPeerBlobs,
    GetShardRecords,
    NodeInventory,
    VerifyChunks,
    VersionNotDurable,
)
from peerstore.peers.range_reader import RangeReader, ReadRequest, ReadTarget
from peerstore.rate_limiter import RateLimiter
from peerstore.replication.mirror_strategy import MirrorStrategy
from peerstore.replication.replication_policy import (
    ReplicationPolicy,
    original_holders,
    shards_to_take_over,
    should_retry_repair,
)
from peerstore.replication.replicator import ReplicationContext, Replicator
from peerstore.settings import ReplicationSettings
from peerstore.shard_records import ShardInfo, ShardKey, ShardRecord, VersionId
from peerstore.store.arena import FileMapping, closing_fd, prefault_file
from peerstore.store.node_store import NodeStore
from peerstore.store.received_replicas import is_same_shard
from peerstore.transport.base import Transport

log = logging.getLogger(__name__)

_REPAIRS = 64
_REPAIR_RETRY_S, _MAX_REPAIR_RETRY_S = 1.0, 60.0
_BROADCAST_THREADS, _BROADCAST_S = 64, 5.0
_RECOVERY_POLL_S = 0.3
"""Seconds between two checks whether other nodes have rebuilt lost shards."""


class JobPeers:
    """The peer tier of one job on one node. Thread-safe."""

    def __init__(
        self,
        store: NodeStore,
        me: PeerNode,
        credentials: PeerCredentials,
        transport: Transport,
        settings: ReplicationSettings,
        *,
        membership: MembershipSettings | None = None,
        blobs_of: Callable[[ShardInfo], tuple[str, ...]] = lambda _fact: (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.job = credentials.job
        self.this_node = me
        self.credentials = credentials
        self.settings = settings
        self._store = store
        self._clock = clock
        self.rate_limiter = RateLimiter(settings.bandwidth)
        self.membership = HeartbeatLoop(
            me,
            credentials,
            transport,
            store.replicas,
            settings=membership,
            replication=settings,
            changed=self._changed,
            clock=clock,
        )
        protection = ReplicationPolicy(
            settings.copies, settings.levels, settings.streams, settings.parity_group_size, settings.evicts_superseded
        )
        shared = ReplicationContext(
            store, self.job, self.membership, protection, self.rate_limiter, blobs_of=blobs_of, clock=clock
        )
        self._parity = (
            ParityStrategy(shared, fetch_blob=self.fetch_blob, sight=lambda: self.inventory(fresh=True))
            if settings.mode == "parity"
            else None
        )
        self.replicator = Replicator(shared, self._parity if self._parity is not None else MirrorStrategy(shared))
        self.inventory_service = InventoryService(
            self.membership,
            self.local_inventory,
            seen=self._on_inventory,
            split_from=settings.partition_min_nodes,
            clock=clock,
        )
        self._repairs: deque[tuple[ShardRecord, float]] = deque(maxlen=_REPAIRS)
        """Damaged shards to fetch again, and the seconds to wait after a failed attempt."""
        self._repairing = threading.Condition()
        self._stop = threading.Event()
        self._repair_thread = threading.Thread(target=self._repair_loop, name="peerstore-mend", daemon=True)
        self.repaired = 0
        self.taken_over = 0

    def start(self, discovery: Discovery) -> None:
        guarded = self.settings.requires_replication
        permit = self.membership.check_quorum if guarded else None
        self._store.jobs.incarnations.set_replication_guard(self.job, guarded=guarded, permit=permit)
        self.membership.set_discovery(discovery)
        self.membership.run_period()
        self.membership.start()
        self.replicator.start()
        self._repair_thread.start()

    def close(self) -> None:
        self._stop.set()
        self.replicator.close()
        self.membership.close()
        with self._repairing:
            self._repairing.notify_all()
        if self._repair_thread.ident is not None:
            self._repair_thread.join()
        self.inventory_service.close()

    def _changed(self) -> None:
        """Handle a change of the members: drop caches, wake the replicator, and take over shards."""
        self.inventory_service.invalidate()
        self.replicator.wake()
        self._take_over()

    def _take_over(self) -> None:
        """Take ownership of shards of dead nodes for which this node is first, so that it drains them."""
        living, facts = self.membership.alive, self._store.replicas.list_shards(self.job)
        dead = {node for fact in facts for node in fact.holders[:1] if self.membership.is_dead(node)}
        for fact in shards_to_take_over(facts, me=self.this_node.id, living=living, dead=dead):
            log.info("job %s: %s is taken over from %s", self.job, fact.key, fact.holders[0])
            self._store.replicas.take_ownership(fact.key)
            self.taken_over += 1

    @property
    def uses_parity(self) -> bool:
        """Whether the job uses parities instead of replicas."""
        return self._parity is not None

    @property
    def parity(self) -> ParityStrategy:
        if self._parity is None:
            raise RequestError(f"job {self.job} keeps copies here, not parities: its nodes have different settings")
        return self._parity

    @property
    def newest_replicated(self) -> VersionId | None:
        """The newest version with all parts replicated, as far as this node knows."""
        return self._store.jobs.versions(self.job).replicated

    # -- inventory ----------------------------------------------------------------------------------------------------

    def local_inventory(self) -> NodeInventory:
        """Return this node's inventory of the job."""
        facts, known = tuple(self._store.replicas.list_shards(self.job)), self._store.jobs.versions(self.job)
        parities = tuple(one.info for one in self.parity.stored_parities) if self.uses_parity else ()
        verifying = self._store.status().verifying
        return NodeInventory(facts, *known.owner, known.replicated, verifying, parities, known.last_committed())

    def inventory(self, *, fresh: bool = False) -> JobInventory:
        """Return the inventory of all nodes; nodes that do not respond are listed as unreachable."""
        return self.inventory_service.get(fresh=fresh)

    def _on_inventory(self, others: Mapping[str, NodeInventory], lives: Mapping[str, int]) -> None:
        """Apply the job's owner and the shard holders from the inventories of other nodes.

        Only holders of shards that this node has or protects matter. ``lives`` has each node's generation before its
        query.
        """
        owner = max(((looked.epoch, looked.incarnation) for looked in others.values()), default=(0, ""))
        self._store.jobs.incarnations.fence(self.job, *owner)
        mine = {fact.key for fact in self._store.replicas.list_shards(self.job)}
        if self.uses_parity:
            mine |= self.parity.protected_keys
        for node, looked in others.items():
            for fact in looked.shards:
                if fact.key in mine:
                    self.replicator.confirm_holder(fact.key, node, lives.get(node, 0))

    def fetch_records(self, node: str, group: VersionId, parts: tuple[int, ...] = ()) -> list[ShardRecord]:
        """Return the records of a version's parts on another node (all, or only ``parts``)."""
        asked = GetShardRecords(group, parts)
        found: list[ShardRecord] = self.membership.client_for(node).call("shard_records", asked, list[ShardRecord])
        return [record for record in found if record.key.job == self.job and record.key.version_id == group]

    def fetch_blob(self, name: str, nodes: tuple[str, ...]) -> bytes:
        """Fetch a blob from the first of ``nodes`` that has it, and store it on this node."""
        problem: PeerStoreError = ShardNotFoundError(f"job {self.job}: no node was asked for {name}")
        for node in nodes:
            try:
                data: bytes = self.membership.client_for(node).call("blob", GetPeerBlob(name), bytes)
            except PeerStoreError as error:
                problem = error
                continue
            self._store.blobs.put(self.job, name, data)
            return data
        raise problem

    def fetch_blobs(self, node: str, names: Sequence[str]) -> dict[str, bytes]:
        """Return the blobs that another node has, in several requests if they do not fit into one response."""
        found: dict[str, bytes] = {}
        left = list(names)
        while left:
            asked = GetPeerBlobs(tuple(left[:MAX_BLOBS_PER_REQUEST]))
            received: dict[str, bytes] = self.membership.client_for(node).call("blobs", asked, dict[str, bytes])
            found |= received
            # Missing are blobs that the node does not have, and blobs after the last one that fit.
            last = max((at for at, name in enumerate(asked.names) if name in received), default=len(asked.names) - 1)
            left = left[last + 1 :]
        return found

    def broadcast_delete(self, groups: Sequence[VersionId], *, superseded: bool = False) -> dict[str, str]:
        """Delete these versions on all other nodes in parallel; return the unreachable nodes with the reason.

        With ``superseded``, nodes that wrote no shard of the job also delete all older versions.
        """
        return self._broadcast("delete_versions", DeleteVersions(tuple(groups), superseded))

    def broadcast_not_durable(self, group: VersionId, why: str) -> dict[str, str]:
        """Report to all other nodes that this version is not durable; return the unreachable nodes and why."""
        return self._broadcast("version_not_durable", VersionNotDurable(group, why[:MAX_REASON_CHARS]))

    def _broadcast(self, op: str, body: object) -> dict[str, str]:
        others = [node for node in self.membership.node_ids if node != self.this_node.id]

        def send(node: str) -> str:
            try:
                self.membership.client_for(node).call(
                    op, body, type(None), timeout_s=_BROADCAST_S, within_s=2 * _BROADCAST_S
                )
            except (PeerStoreError, OSError) as error:
                return str(error) or repr(error)
            return ""

        with ThreadPoolExecutor(_BROADCAST_THREADS, thread_name_prefix="peerstore-tell") as senders:
            return {node: why for node, why in zip(others, senders.map(send, others), strict=True) if why}

    # -- repair -------------------------------------------------------------------------------------------------------

    def schedule_repair(self, record: ShardRecord) -> None:
        """Schedule a damaged shard, which was dropped, to be fetched again from another node."""
        self.inventory_service.invalidate()
        with self._repairing:
            self._repairs.append((record, _REPAIR_RETRY_S))
            self._repairing.notify_all()

    def _repair_loop(self) -> None:
        while True:
            with self._repairing:
                self._repairing.wait_for(lambda: self._repairs or self._stop.is_set())
                if self._stop.is_set():
                    return
                record, wait_s = self._repairs.popleft()
            try:
                if self.fetch_replica(record):
                    self.repaired += 1
                    self.replicator.wake()
            except Exception as error:  # noqa: BLE001 - the damage is recorded, and other repairs may succeed
                log.warning("job %s: %s was not fetched again: %s", self.job, record.key, error)
                if should_retry_repair(record, error, self.newest_replicated):
                    self._retry_later(record, wait_s)

    def _retry_later(self, record: ShardRecord, wait_s: float) -> None:
        """Retry after a pause, because no holder is reachable or no slot is free."""
        with self._repairing:
            self._repairing.wait_for(self._stop.is_set, wait_s)
            self._repairs.append((record, min(2 * wait_s, _MAX_REPAIR_RETRY_S)))

    def fetch_replica(self, record: ShardRecord) -> bool:
        """Fetch a shard from other nodes and verify it; return ``False`` if it is stored already."""
        others = [node for node in self.shard_sources().get(record.key, ()) if node != self.this_node.id]
        if not others and self.uses_parity:
            return self.parity.rebuild(record, self._original_holders(record.key))
        if not others:
            raise PeerUnreachableError(f"no node that is reached holds {record.key}")
        record = self._undamaged_record(record, others)
        lease = self._store.replicas.begin_replica(record, whole=True)
        if lease is None:
            return False
        try:
            with closing_fd(self._store.open_slot(lease.slot)) as fd:
                prefault_file(fd, record.size_bytes, self._stop.is_set, start=lease.prefaulted_bytes)
                mapped = FileMapping(fd, record.size_bytes, writable=True)
            with mapped as mapping:
                failpoint("peer.repairing")
                wish = ReadRequest(record, [ReadTarget(0, record.size_bytes, mapping.view)], others)
                pulled = RangeReader(self.membership.client_for).read([wish])
                del wish
            if record.key in pulled.failed:
                raise pulled.failed[record.key]
            self._store.replicas.seal_replica(lease.id, record, self._original_holders(record.key))
        except BaseException:
            self._store.release(lease.id)
            raise
        return True

    def _undamaged_record(self, record: ShardRecord, others: list[str]) -> ShardRecord:
        """Return the record of a damaged shard as other nodes have it.

        This node's record may be damaged as well.
        """
        said: dict[str, ShardRecord] = {}
        for node in others:
            with contextlib.suppress(PeerStoreError, OSError):
                said.update(
                    (node, one) for one in self.fetch_records(node, record.key.version_id) if one.key == record.key
                )
        if not said or any(is_same_shard(one, record) for one in said.values()):
            return record
        return self.resolve_record(said)[0]

    def _original_holders(self, key: ShardKey) -> tuple[str, ...]:
        """Return the shard's holders as other nodes recorded them; empty if this node wrote it."""
        said = {
            node: fact.holders
            for node, looked in self.inventory().nodes.items()
            for fact in looked.shards
            if node != self.this_node.id and fact.key == key
        }
        return original_holders(self.this_node.id, said)

    def wait_for_recovery(self, timeout_s: float) -> None:
        """With parity, wait until the newest version is complete or no pending recovery can complete it.

        Pending are responses of nodes that are not known to be dead, and rebuilds of lost shards.
        """
        began = self._clock()
        logged = ""
        while self.uses_parity and not self._stop.is_set():
            waited_s = self._clock() - began
            reason = self._pending_recovery()
            if not reason or waited_s >= timeout_s or deadlines.expired():
                break
            if reason != logged:
                log.warning("job %s: waiting, up to %.0f s: %s", self.job, timeout_s, reason)
                logged = reason
            self._stop.wait(_RECOVERY_POLL_S)
        if logged:
            what = f"going on without: {reason}" if reason else "going on"
            log.warning("job %s: waited %.1f s, %s", self.job, self._clock() - began, what)

    def _pending_recovery(self) -> str:
        """Return what may still complete a newer version, as text; empty if nothing can."""
        inventory = self.inventory(fresh=True)
        return pending_recovery(inventory.nodes, inventory.unreachable, self.membership.alive)

    def shard_sources(self, *, fresh: bool = False) -> dict[ShardKey, tuple[str, ...]]:
        """Return the nodes that hold each shard, this node first."""
        return self.inventory(fresh=fresh).sources

    def resolve_record(self, records: Mapping[str, ShardRecord]) -> tuple[ShardRecord, tuple[str, ...]]:
        """Return the right record of a shard, and the nodes that have it.

        If the nodes' records differ, each node verifies its own bytes.
        """
        kinds = _nodes_by_record(records)
        if len(kinds) > 1:
            key = next(iter(records.values())).key
            log.error("job %s: %s is described in different ways: by %s", self.job, key, list(kinds.values()))
            verified = {node: self._is_intact(node, record) for node, record in records.items()}
            kinds = _nodes_by_record({node: record for node, record in records.items() if verified[node]})
            if not kinds and None in verified.values():
                raise UnavailableError(f"{key}: nodes describe it in different ways, and not all could look at theirs")
            if not kinds:
                raise ShardDamagedError(f"{key}: no node has the bytes that it describes")
        nodes = max(kinds.values(), key=lambda nodes: (len(nodes), self.this_node.id in nodes, nodes))
        return records[nodes[0]], tuple(nodes)

    def _is_intact(self, node: str, record: ShardRecord) -> bool | None:
        """Return whether a node's bytes match its record, ``None`` if unknown; drop a damaged shard."""
        chunks = (0, chunk_count(record.size_bytes, record.chunk_bytes))
        try:
            if node == self.this_node.id:
                return not self._store.verify(record.key, chunks)
            return not self.membership.client_for(node).call("verify_chunks", VerifyChunks(record.key, (chunks,)), bool)
        except (PeerStoreError, OSError) as error:
            log.warning("job %s: %s could not verify %s: %s", self.job, node, record.key, error)
            return None


def _nodes_by_record(records: Mapping[str, ShardRecord]) -> dict[bytes, list[str]]:
    """Return the nodes by their record, regardless of the time of the seal."""
    kinds: dict[bytes, list[str]] = defaultdict(list)
    for node, record in records.items():
        kinds[msgspec.msgpack.encode(msgspec.structs.replace(record, sealed_ns=0))].append(node)
    return kinds
