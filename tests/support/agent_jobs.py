"""A job on several real node agents, without trainers: tests write, find and read shards as bytes."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from peerstore.errors import PeerStoreError
from peerstore.membership.topology import PeerNode, member_list
from peerstore.peers.peer_client import PeerClient, PeerCredentials
from peerstore.peers.peer_messages import GetShardRecords
from peerstore.peers.range_reader import RangeReader, ReadRequest, ReadResult, ReadTarget
from peerstore.settings import AgentPaths, JobPeersConfig, ReplicationSettings
from peerstore.shard_records import ShardKey, ShardRecord
from peerstore.transport.tcp import TcpTransport
from tests.support.agents import stop_agent
from tests.support.clusters import AgentNode
from tests.support.leaks import process_prefix
from tests.support.local_nodes import SECRET, wait_until
from tests.support.stores import MIB, load_shard, open_client, save_shard, shard_content, shard_key

SIZE = 3 * MIB + 17


@dataclass
class AgentJob:
    """A job and its nodes, each with its own agent."""

    hosts: dict[str, AgentNode]
    settings: ReplicationSettings = field(default_factory=ReplicationSettings)
    job: str = field(default_factory=lambda: f"job-{uuid.uuid4().hex[:8]}")
    nodes: dict[str, PeerNode] = field(default_factory=dict)
    rosters: int = 0

    def __getitem__(self, name: str) -> AgentNode:
        return self.hosts[name]

    # -- nodes --------------------------------------------------------------------------------------------------------

    def start(self, crash_at: Mapping[str, str]) -> None:
        """Start all agents in parallel; ``crash_at`` maps a node to its agent's crash points."""
        with ThreadPoolExecutor(len(self.hosts)) as pool:
            list(pool.map(lambda host: host.start(crash_at=crash_at.get(host.name, "")), self.hosts.values()))

    def join_all(self) -> None:
        """Send the job's member list to every agent and wait until each one sees all nodes alive."""
        for name, host in self.hosts.items():
            with host.agent(self.job) as agent:
                self.nodes[name] = agent.this_node()
        self.rosters += 1
        roster = member_list(self.rosters, [self.nodes[name] for name in self.hosts])
        plan = JobPeersConfig(SECRET, self.settings, member_list=roster)

        def join(host: AgentNode) -> None:
            with host.agent(self.job) as agent:
                agent.join_peers(self.job, plan)

        with ThreadPoolExecutor(len(self.hosts)) as pool:  # joining blocks until other nodes join
            list(pool.map(join, self.hosts.values()))
        for name in self.hosts:
            wait_until(lambda name=name: self.alive_nodes(name) == set(self.hosts), f"{name} sees all others")

    def alive_nodes(self, name: str) -> set[str]:
        """Return the IDs of the nodes that this node sees alive."""
        with self.hosts[name].agent() as agent:
            view = agent.cluster_status(self.job)
        return {one.node.id for one in view.nodes if one.state == "alive"}

    def lose_node(self, name: str) -> None:
        """Kill the node's agent and delete its memory."""
        self.hosts.pop(name).lose()

    # -- shards -------------------------------------------------------------------------------------------------------

    def shard_keys(self, version: int, parts: int = 3) -> list[ShardKey]:
        return [shard_key(version, part, job=self.job) for part in range(parts)]

    def save(self, version: int, *names: str, parts: int = 3, size_bytes: int = SIZE) -> list[ShardKey]:
        """Write one part of a version on each node, ignoring agents that die meanwhile."""
        keys = self.shard_keys(version, parts)
        for of, name in zip(keys, names or sorted(self.hosts), strict=True):
            place = AgentPaths(self.hosts[name].directory)
            with contextlib.suppress(PeerStoreError), open_client(place.socket, job=self.job, retry_s=0.0) as store:
                save_shard(store, of, size_bytes, parts=parts)
        return keys

    def newest_replicated(self, name: str) -> int:
        with self.hosts[name].agent() as agent:
            found = [job.newest_replicated for job in agent.store.status().jobs if job.job == self.job]
        return -1 if not found or found[0] is None else found[0]

    def wait_replicated(self, version: int, *names: str) -> None:
        """Wait until the named nodes (default: all) know that a version is replicated."""
        for name in names or self.hosts:
            wait_until(
                lambda name=name: self.newest_replicated(name) >= version, f"version {version} is replicated on {name}"
            )

    def holders(self, of: ShardKey) -> tuple[str, ...]:
        """Return the nodes whose agent lists the shard, including shards recovered after a restart."""
        found = []
        for name, host in self.hosts.items():
            with host.agent() as agent:
                if any(fact.key == of for fact in agent.store.list_shards(self.job)):
                    found.append(name)
        return tuple(sorted(found))

    def slot_path(self, name: str, of: ShardKey) -> Path:
        """Return the path of the file that holds the shard's bytes on a node."""
        with self.hosts[name].agent() as agent:
            pin = agent.store.pin(of)
            agent.store.unpin(pin.id)
        return Path(f"/proc/self/fd/{pin.fd}").readlink()

    def assert_copies(self, keys: Sequence[ShardKey], *, copies: int = 2, size_bytes: int = SIZE) -> None:
        """Wait until every shard has ``copies`` copies; fail if one differs from the written bytes."""
        for of in keys:
            wait_until(lambda of=of: len(self.holders(of)) >= copies, f"{of} has {copies} copies")
            for name in self.holders(of):
                with self.hosts[name].agent() as agent:
                    assert load_shard(agent.store, of) == shard_content(of, size_bytes), f"{of} on {name}"

    # -- as a trainer on another node ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def range_reader(
        self, me: str = "elsewhere", *, streams: int = 2
    ) -> Iterator[tuple[RangeReader, dict[str, PeerClient]]]:
        peers = {}
        for name, host in self.hosts.items():
            with host.agent() as agent:
                peers[name] = PeerClient(
                    TcpTransport(), agent.this_node().address, PeerCredentials(self.job, me, SECRET)
                )  # type: ignore[arg-type]
        try:
            yield RangeReader(peers.__getitem__, streams=streams), peers
        finally:
            for peer in peers.values():
                peer.close()

    def read(self, of: ShardKey, sources: Sequence[str]) -> tuple[bytes, ReadResult]:
        """Read a whole shard from these nodes, as a rank on a new node does."""
        with self.prepared_read(of, sources) as read:
            return read()

    @contextlib.contextmanager
    def prepared_read(self, of: ShardKey, sources: Sequence[str]) -> Iterator[Callable[[], tuple[bytes, ReadResult]]]:
        """Fetch the shard's record and yield a function that reads the shard."""
        with self.range_reader() as (puller, peers):
            records: list[ShardRecord] = peers[sources[-1]].call(
                "shard_records", GetShardRecords(of.version_id), list[ShardRecord]
            )
            record = next(record for record in records if record.key == of)

            def read() -> tuple[bytes, ReadResult]:
                """Read through the current entries of ``peers``, which a test may have replaced."""
                data = bytearray(record.size_bytes)
                pulled = puller.read([ReadRequest(record, [ReadTarget(0, len(data), memoryview(data))], list(sources))])
                return bytes(data), pulled

            read.peers = peers  # type: ignore[attr-defined]
            yield read


@contextlib.contextmanager
def agent_job(
    *names: str,
    settings: ReplicationSettings = ReplicationSettings(),  # noqa: B008 - never mutated
    quick: bool = True,
    crash_at: Mapping[str, str] | None = None,
) -> Iterator[AgentJob]:
    """Start one agent per name, join them into a job, and stop them at the end."""
    places = {name: Path("/dev/shm") / (process_prefix("tieredckpt") + uuid.uuid4().hex[:8]) for name in names}
    made = AgentJob({name: AgentNode(name, places[name], budget="256MiB", quick=quick) for name in names}, settings)
    everybody = list(made.hosts.values())
    try:
        made.start(crash_at or {})
        made.join_all()
        yield made
    finally:
        for host in everybody:
            host.resume_agent()
            stop_agent(host.directory)
            host.lose()
