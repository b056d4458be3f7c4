"""The parity mode of a simulated agent: production code over simulated messages, time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from peerstore import checksums
from peerstore.commit_protocol import PartsReport
from peerstore.errors import LeaseLostError, PeerStoreError, PeerUnreachableError, ShardDamagedError, ShardNotFoundError
from peerstore.parity.parity_strategy import ParityStrategy
from peerstore.peers.peer_inventory import JobInventory
from peerstore.peers.peer_messages import GetParities, GetShardRecords
from peerstore.rate_limiter import RateLimiter
from peerstore.replication.replication_policy import ReplicationPolicy
from peerstore.replication.replicator import ReplicationContext, Replicator
from peerstore.shard_records import Lease, ShardKey, ShardRecord
from tests.simulation.memory import damaged_chunks

if TYPE_CHECKING:
    from tests.simulation.agent import SimulatedAgent


class SimulatedReplicas:
    """The replicas of a simulated agent, which receives them under one process identity."""

    def __init__(self, agent: SimulatedAgent) -> None:
        from tests.simulation.agent import COPIER

        self._agent, self._owner = agent, COPIER

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent.copies, name)

    def begin_replica(self, record: ShardRecord, *, whole: bool) -> Lease | None:
        return self._agent.copies.begin_replica(record, whole=whole, owner=self._owner)

    def begin_parity(self, key: ShardKey, size_bytes: int, parts: int, *, whole: bool) -> Lease | None:
        return self._agent.copies.begin_parity(key, size_bytes, parts, whole=whole, owner=self._owner)

    def seal_replica(self, lease_id: str, record: ShardRecord, holders: tuple[str, ...]) -> None:
        self._agent.copies.seal_replica(lease_id, record, holders)
        if not record.key.kind:
            self._agent.wake()


class SimulatedStore:
    """The part of :class:`peerstore.store.node_store.NodeStore` that parity uses."""

    def __init__(self, agent: SimulatedAgent) -> None:
        self.agent, self.replicas, self.jobs = agent, SimulatedReplicas(agent), agent.jobs
        self.blobs = agent.shelf.blobs

    def report_damage(self, key: ShardKey, reason: str) -> None:
        self.agent.drop_damaged(key, reason)

    def release(self, lease_id: str) -> None:
        self.agent.leasing.release(lease_id)

    def write(
        self,
        lease: Lease,
        _size_bytes: int,
        chunk_bytes: int,
        chunks: Iterator[tuple[int, bytearray]],
        *,
        stopped: Callable[[], bool],
    ) -> bytes:
        """Write chunks into the slot, as in peerstore/parity/stripes.py."""
        sums = bytearray()
        for number, data in chunks:
            slot = self.agent.machine.arena.bytes.get(lease.slot)
            if slot is None or stopped():
                raise LeaseLostError(f"the lease of {lease.key} was revoked")
            slot[number * chunk_bytes : number * chunk_bytes + len(data)] = data
            sums += checksums.chunk_checksum(data).to_bytes(8, "little")
        return bytes(sums)


class SimulatedMembership:
    """The part of :class:`peerstore.peers.heartbeat_loop.HeartbeatLoop` that parity uses."""

    def __init__(self, agent: SimulatedAgent) -> None:
        self._agent = agent
        self.this_node = agent.machine.node

    @property
    def alive(self) -> Mapping[str, Any]:
        return self._agent.live_nodes

    @property
    def standby(self) -> Any:
        return self._agent.members.standby

    @property
    def member_list(self) -> Any:
        return self._agent.members.member_list

    @property
    def is_converged(self) -> bool:
        return self._agent.newcomers.all_resolved(self._agent.world.now, self._agent.members.alive)

    def generation_of(self, node: Any) -> int:
        return self._agent.members.generation_of(node)

    def client_for(self, node: str) -> SimulatedPeer:
        return SimulatedPeer(self._agent, node)


class SimulatedPeer:
    """A blocking client of another node's agent."""

    def __init__(self, agent: SimulatedAgent, node: str) -> None:
        self._agent, self._node = agent, node

    def call(self, op: str, body: Any, _result: object, *, timeout_s: float = 5.0) -> Any:
        def begin(answered: Callable[[Any], None]) -> None:
            self._agent.call(
                self._node, op, body, lambda found: answered((found, None)), partial(reply_error, answered), timeout_s
            )

        def reply_error(answered: Callable[[Any], None], error: PeerStoreError) -> None:
            answered((None, error))

        found, error = self._agent.world.turns.wait_for_reply(begin)
        if error is not None:
            raise error
        return found


class SimulatedRanges:
    """A reader of complete shards and parities from the first node with an undamaged copy."""

    def __init__(self, store: SimulatedStore, _puller: object, _pace: RateLimiter, *, me: str, sources: int) -> None:
        self._agent = store.agent
        self.bytes_read = 0

    def reader(
        self, record: ShardRecord, nodes: Sequence[str], *, stop: int | None = None
    ) -> Callable[[int, int], bytes]:
        found: list[bytes] = []

        def read(start: int, end: int) -> bytes:
            if not found:
                found.append(self._fetch(record, nodes))
            return found[0][start:end]

        return read

    def _fetch(self, record: ShardRecord, nodes: Sequence[str]) -> bytes:
        agent = self._agent
        problem: PeerStoreError = PeerUnreachableError(f"no reachable node holds {record.key}")
        for node in nodes:
            try:
                found, data = (
                    agent.read(record.key) if node == agent.name else self._call(node, "read_ranges", record.key)
                )
            except PeerStoreError as error:
                problem = error
                continue
            if found.checksums == record.checksums and not damaged_chunks(data, record):
                self.bytes_read += len(data)
                return agent.world.damage_on_wire(data) if node != agent.name else data
            problem = ShardDamagedError(f"{record.key} on {node} is damaged")
            if node == agent.name:
                agent.verify(record.key)
            else:
                agent.call(node, "verify_chunks", record.key)
        raise problem

    def _call(self, node: str, op: str, body: Any) -> Any:
        return SimulatedPeer(self._agent, node).call(op, body, object)

    def __enter__(self) -> SimulatedRanges:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class SimulatedReporter:
    """A sender of reports to the commit leader that does not wait for replies."""

    def __init__(self, agent: SimulatedAgent) -> None:
        self._agent = agent

    def report(self, leader: str, reports: Iterable[PartsReport]) -> bool:
        self._agent.send_reports(leader, reports)
        return True


class SimulatedContext(ReplicationContext):
    """A replication context that wakes the agent instead of a thread."""

    agent: SimulatedAgent

    def wake(self) -> None:
        self.agent.wake()


class SimulatedParityReplicator(Replicator):
    """The parity replicator of one agent. It runs when the agent is woken, without its own thread."""

    def __init__(self, agent: SimulatedAgent) -> None:
        world = agent.world
        store: Any = SimulatedStore(agent)
        membership: Any = SimulatedMembership(agent)
        shared = SimulatedContext(
            store,
            "job",
            membership,
            ReplicationPolicy(1, ("zone", "rack"), parity_group_size=world.shape.parity),
            RateLimiter(0),
            clock=lambda: world.now,
        )
        shared.agent = agent
        self.parity = ParityStrategy(shared, fetch_blob=_raise_no_blob, sight=self._job_inventory)
        super().__init__(shared, self.parity)
        self._agent = agent
        reporter: Any = SimulatedReporter(agent)
        self.commit_tracker = reporter
        self._steps = False
        self.handlers: dict[str, Callable[[str, Any], Any]] = {
            "report_stripe": self.parity.handle_stripe_report,
            "parity_status": self.parity.handle_parity_status,
            "shard_records": lambda _, request: self._records(request),
            "parities": lambda _, request: self._parities(request),
        }

    def work(self) -> None:
        """Run replication steps until none is left."""
        self._shared.woken = True
        if not self._steps:
            self._steps = True
            self._agent.world.turns.start_streams(self._work)

    def _work(self) -> None:
        try:
            while not (wait_s := self._step()) or self._shared.woken:
                pass
        finally:
            self._steps = False
        self._agent.wake(wait_s)

    def _job_inventory(self) -> JobInventory:
        nodes, silent = self._agent.world.turns.wait_for_reply(
            lambda answered: self._agent.job_inventory(lambda nodes, silent: answered((nodes, silent)))
        )
        return JobInventory(dict(sorted(nodes.items(), key=lambda one: one[0] != self._agent.name)), silent)

    def _records(self, request: GetShardRecords) -> list[ShardRecord]:
        return [
            record
            for _, record in self._agent.shelf.slots.available_shards("job")
            if record.key.version_id == request.version_id
        ]

    def _parities(self, request: GetParities) -> list[ShardRecord]:
        return [
            record for record in self._agent.copies.list_parities("job") if record.key.version_id == request.version_id
        ]


def write_parity(store: SimulatedStore, *args: Any, **options: Any) -> bytes:
    return store.write(*args, **options)


def _raise_no_blob(name: str, _nodes: tuple[str, ...]) -> bytes:
    raise ShardNotFoundError(f"the simulation has no blob {name}")
