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
from peerstore.parity.parity_replicator import ParityReplicator
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
from peerstore.replication.replication_policy import original_holders, shards_to_take_over, should_retry_repair
from peerstore.replication.replicator import ReplicationPolicy, Replicator
from peerstore.settings import ReplicationSettings
from peerstore.shard_records import ShardInfo, ShardKey, ShardRecord, VersionId
from peerstore.store.arena import FileMapping, closing_fd, prefault_file
from peerstore.store.node_store import NodeStore
from peerstore.store.received_replicas import is_same_shard
from peerstore.transport.base import Transport

log = logging.getLogger(__name__)

_REPAIRS = 64
_MEND_S, _MEND_MAX_S = 1.0, 60.0
_TELLERS, _TELL_S = 64, 5.0
_REBUILT_S = 0.3
"""Between two looks whether others have rebuilt what was lost."""


class JobPeers:
    """The peer tier of one job on one node. Any thread may call."""

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
        self.replicator: Replicator | ParityReplicator
        if settings.mode == "parity":
            self.replicator = ParityReplicator(
                store,
                self.job,
                self.membership,
                protection,
                pace=self.rate_limiter,
                blobs_of=blobs_of,
                fetch_blob=self.fetch_blob,
                sight=lambda: self.inventory(fresh=True),
                clock=clock,
            )
        else:
            self.replicator = Replicator(
                store, self.job, self.membership, protection, pace=self.rate_limiter, blobs_of=blobs_of, clock=clock
            )
        self.inventory_service = InventoryService(
            self.membership,
            self.local_inventory,
            seen=self._on_inventory,
            split_from=settings.partition_min_nodes,
            clock=clock,
        )
        self._repairs: deque[tuple[ShardRecord, float]] = deque(maxlen=_REPAIRS)
        """What was damaged here, and how long to wait when it cannot be fetched yet."""
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
        """A node came, went or is suspected."""
        self.inventory_service.invalidate()
        self.replicator.wake()
        self._take_over()

    def _take_over(self) -> None:
        """Shards whose writer's node is gone, and which this node answers for now, are its own: it drains them."""
        living, facts = self.membership.alive, self._store.replicas.list_shards(self.job)
        dead = {node for fact in facts for node in fact.holders[:1] if self.membership.is_dead(node)}
        for fact in shards_to_take_over(facts, me=self.this_node.id, living=living, dead=dead):
            log.info("job %s: %s is taken over from %s", self.job, fact.key, fact.holders[0])
            self._store.take_ownership(fact.key)
            self.taken_over += 1

    @property
    def uses_parity(self) -> bool:
        """Whether parities are kept instead of copies."""
        return isinstance(self.replicator, ParityReplicator)

    @property
    def parity_replicator(self) -> ParityReplicator:
        if not isinstance(self.replicator, ParityReplicator):
            raise RequestError(f"job {self.job} keeps copies here, not parities: its nodes have different settings")
        return self.replicator

    @property
    def newest_replicated(self) -> VersionId | None:
        """The newest version all of whose parts have their copies, as far as this node knows."""
        return self._store.jobs.versions(self.job).replicated

    # -- looking ------------------------------------------------------------------------------------------------------

    def local_inventory(self) -> NodeInventory:
        """What this node itself holds of the job."""
        facts, known = tuple(self._store.replicas.list_shards(self.job)), self._store.jobs.versions(self.job)
        parities = tuple(one.info for one in self.parity_replicator.stored_parities) if self.uses_parity else ()
        verifying = self._store.status().verifying
        return NodeInventory(facts, *known.owner, known.replicated, verifying, parities, known.last_committed())

    def inventory(self, *, fresh: bool = False) -> JobInventory:
        """What all nodes hold, ``fresh`` as of now. Those that do not answer are named, not left out."""
        return self.inventory_service.get(fresh=fresh)

    def _on_inventory(self, others: Mapping[str, NodeInventory], lives: Mapping[str, int]) -> None:
        """Who owns the job, as those say who were looked at, and what they hold of what is here, or in parities here.

        ``lives``: which of its lives each was in when it was asked.
        """
        owner = max(((looked.epoch, looked.incarnation) for looked in others.values()), default=(0, ""))
        self._store.jobs.incarnations.fence(self.job, *owner)
        mine = {fact.key for fact in self._store.replicas.list_shards(self.job)}
        if self.uses_parity:
            mine |= self.parity_replicator.protected_keys
        for node, looked in others.items():
            for fact in looked.shards:
                if fact.key in mine:
                    self.replicator.confirm_holder(fact.key, node, lives.get(node, 0))

    def fetch_records(self, node: str, group: VersionId, parts: tuple[int, ...] = ()) -> list[ShardRecord]:
        """The sealed parts of a version on another node, or only these of them."""
        asked = GetShardRecords(group, parts)
        found: list[ShardRecord] = self.membership.client_for(node).call("shard_records", asked, list[ShardRecord])
        return [record for record in found if record.key.job == self.job and record.key.version_id == group]

    def fetch_blob(self, name: str, nodes: tuple[str, ...]) -> bytes:
        """Something small that is kept beside the shards, from the first of ``nodes`` that has it; kept here then."""
        problem: PeerStoreError = ShardNotFoundError(f"job {self.job}: no node was asked for {name}")
        for node in nodes:
            try:
                data: bytes = self.membership.client_for(node).call("blob", GetPeerBlob(name), bytes)
            except PeerStoreError as error:
                problem = error
                continue
            self._store.put_blob(self.job, name, data)
            return data
        raise problem

    def fetch_blobs(self, node: str, names: Sequence[str]) -> dict[str, bytes]:
        """What another node has of these small things; several questions where they do not fit into one answer."""
        found: dict[str, bytes] = {}
        left = list(names)
        while left:
            asked = GetPeerBlobs(tuple(left[:MAX_BLOBS_PER_REQUEST]))
            said: dict[str, bytes] = self.membership.client_for(node).call("blobs", asked, dict[str, bytes])
            found |= said
            # Left out are those that are not there, and those behind the last one that still fitted.
            last = max((at for at, name in enumerate(asked.names) if name in said), default=len(asked.names) - 1)
            left = left[last + 1 :]
        return found

    def broadcast_delete(self, groups: Sequence[VersionId]) -> dict[str, str]:
        """Have the other nodes give up these versions; who could not be told, and why. Silent ones delay no other."""
        return self._broadcast("delete_versions", DeleteVersions(tuple(groups)))

    def broadcast_not_durable(self, group: VersionId, why: str) -> dict[str, str]:
        """Have the other nodes hear that this version does not become durable; who could not be told, and why."""
        return self._broadcast("version_not_durable", VersionNotDurable(group, why[:MAX_REASON_CHARS]))

    def _broadcast(self, op: str, said: object) -> dict[str, str]:
        others = [node for node in self.membership.node_ids if node != self.this_node.id]

        def tell(node: str) -> str:
            try:
                self.membership.client_for(node).call(op, said, type(None), timeout_s=_TELL_S, within_s=2 * _TELL_S)
            except (PeerStoreError, OSError) as error:
                return str(error) or repr(error)
            return ""

        with ThreadPoolExecutor(_TELLERS, thread_name_prefix="peerstore-tell") as senders:
            return {node: why for node, why in zip(others, senders.map(tell, others), strict=True) if why}

    # -- mending ------------------------------------------------------------------------------------------------------

    def schedule_repair(self, record: ShardRecord) -> None:
        """A shard of this node turned out damaged and was dropped: it is fetched again from a node that has it."""
        self.inventory_service.invalidate()
        with self._repairing:
            self._repairs.append((record, _MEND_S))
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
            except Exception as error:  # noqa: BLE001 - the next one may work, and this one has been reported as damaged
                log.warning("job %s: %s was not fetched again: %s", self.job, record.key, error)
                if should_retry_repair(record, error, self.newest_replicated):
                    self._retry_later(record, wait_s)

    def _retry_later(self, record: ShardRecord, wait_s: float) -> None:
        """Who has the shard cannot be reached, or there is no slot for it: again, a little later."""
        with self._repairing:
            self._repairing.wait_for(self._stop.is_set, wait_s)
            self._repairs.append((record, min(2 * wait_s, _MEND_MAX_S)))

    def fetch_replica(self, record: ShardRecord) -> bool:
        """Have a shard here that other nodes hold, verified; False when it is here already."""
        others = [node for node in self.shard_sources().get(record.key, ()) if node != self.this_node.id]
        if not others and self.uses_parity:
            return self.parity_replicator.rebuild(record, self._original_holders(record.key))
        if not others:
            raise PeerUnreachableError(f"no node that is reached holds {record.key}")
        record = self._as_described(record, others)
        lease = self._store.begin_replica(record, whole=True)
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
            self._store.seal_replica(lease.id, record, self._original_holders(record.key))
        except BaseException:
            self._store.release(lease.id)
            raise
        return True

    def _as_described(self, record: ShardRecord, others: list[str]) -> ShardRecord:
        """What a shard is that turned out damaged here: it may be its record that was, and not its bytes."""
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
        """Who was to hold a shard, as the others remember it; empty when this node wrote it."""
        said = {
            node: fact.holders
            for node, looked in self.inventory().nodes.items()
            for fact in looked.shards
            if node != self.this_node.id and fact.key == key
        }
        return original_holders(self.this_node.id, said)

    def wait_for_recovery(self, timeout_s: float) -> None:
        """With parity, until the newest version is whole, or nothing that is under way can make it so: nodes that have
        not answered yet and are not known to be gone, and rebuilds of what was lost with others.
        """
        began = self._clock()
        told = ""
        while self.uses_parity and not self._stop.is_set():
            waited_s = self._clock() - began
            reason = self._pending_recovery()
            if not reason or waited_s >= timeout_s or deadlines.expired():
                break
            if reason != told:
                log.warning("job %s: waiting, up to %.0f s: %s", self.job, timeout_s, reason)
                told = reason
            self._stop.wait(_REBUILT_S)
        if told:
            what = f"going on without: {reason}" if reason else "going on"
            log.warning("job %s: waited %.1f s, %s", self.job, self._clock() - began, what)

    def _pending_recovery(self) -> str:
        """What may still make a newer version whole, in words; nothing when nothing will."""
        sight = self.inventory(fresh=True)
        return pending_recovery(sight.nodes, sight.unreachable, self.membership.alive)

    def shard_sources(self, *, fresh: bool = False) -> dict[ShardKey, tuple[str, ...]]:
        """Which nodes hold each shard, this one first."""
        return self.inventory(fresh=fresh).sources

    def resolve_record(self, records: Mapping[str, ShardRecord]) -> tuple[ShardRecord, tuple[str, ...]]:
        """What several nodes say one shard is. Where they differ each compares its own bytes with what it says."""
        kinds = _kinds(records)
        if len(kinds) > 1:
            key = next(iter(records.values())).key
            log.error("job %s: %s is described in different ways: by %s", self.job, key, list(kinds.values()))
            stands = {node: self._verifies(node, record) for node, record in records.items()}
            kinds = _kinds({node: record for node, record in records.items() if stands[node]})
            if not kinds and None in stands.values():
                raise UnavailableError(f"{key}: nodes describe it in different ways, and not all could look at theirs")
            if not kinds:
                raise ShardDamagedError(f"{key}: no node has the bytes that it describes")
        nodes = max(kinds.values(), key=lambda nodes: (len(nodes), self.this_node.id in nodes, nodes))
        return records[nodes[0]], tuple(nodes)

    def _verifies(self, node: str, record: ShardRecord) -> bool | None:
        """Whether a node's bytes are what it says they are; it drops them when they are not. None: it cannot tell."""
        chunks = (0, chunk_count(record.size_bytes, record.chunk_bytes))
        try:
            if node == self.this_node.id:
                return not self._store.verify(record.key, chunks)
            return not self.membership.client_for(node).call("verify_chunks", VerifyChunks(record.key, (chunks,)), bool)
        except (PeerStoreError, OSError) as error:
            log.warning("job %s: %s did not look at %s again: %s", self.job, node, record.key, error)
            return None


def _kinds(records: Mapping[str, ShardRecord]) -> dict[bytes, list[str]]:
    """Who says the same; when it was sealed does not matter."""
    kinds: dict[bytes, list[str]] = defaultdict(list)
    for node, record in records.items():
        kinds[msgspec.msgpack.encode(msgspec.structs.replace(record, sealed_ns=0))].append(node)
    return kinds
