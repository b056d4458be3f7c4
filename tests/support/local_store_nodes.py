"""Several nodes in one process, each with a store and peers, on a network that tests can break."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from peerstore.errors import NoQuorumError
from peerstore.membership.swim import MembershipSettings
from peerstore.membership.topology import NodeId, member_list, parse_labels
from peerstore.peers.range_reader import RangeReader, ReadRequest, ReadTarget
from peerstore.server.job_peers import JobPeers
from peerstore.server.node_peers import NodeIdentity, NodePeers
from peerstore.settings import JobPeersConfig, ReplicationSettings, StoreSettings
from peerstore.shard_records import ShardKey, ShardRecord
from peerstore.store.arena import TmpfsArena
from peerstore.store.node_store import NodeStore
from peerstore.testing import MemoryNetwork
from tests.support.leaks import process_prefix
from tests.support.stores import load_shard
from tieredckpt.agent.peer_tier import SHARED_BLOBS

JOB = "job"
QUICK = MembershipSettings(heartbeat_s=0.2, ping_timeout_s=1.0, suspect_after=2, dead_after_s=0.3)
PATIENT = MembershipSettings(heartbeat_s=0.2, ping_timeout_s=1.0, dead_after_s=600.0)
"""Settings under which no absent node is declared dead during a test."""
SECRET = b"0123456789abcdef0123456789abcdef"


@dataclass
class StoreNode:
    """One node."""

    name: str
    network: MemoryNetwork
    budget: str = "64MiB"
    labels: str = ""
    membership: MembershipSettings = QUICK
    directory: Path = field(
        default_factory=lambda: Path("/dev/shm") / (process_prefix("peerstore") + uuid.uuid4().hex[:8])
    )
    up: bool = False

    def start(self) -> None:
        self.store = NodeStore(TmpfsArena(self.directory), StoreSettings(budget=self.budget))
        identity = NodeIdentity(
            NodeId(self.name), f"{self.name}:7070", parse_labels(self.labels), membership=self.membership
        )
        self.hood = NodePeers(
            self.store, identity, self.network.transport(self.name, timeout_s=5.0), shared=SHARED_BLOBS
        )
        self.up = True
        self.hood.start()

    @property
    def job_peers(self) -> JobPeers:
        team = self.hood.job_peers(JOB)
        assert team is not None
        return team

    def stop(self) -> None:
        """Stop the agent; the data stays in memory."""
        if self.up:
            self.up = False
            self.network.kill_node(self.name)
            self.hood.close()
            self.store.close()

    def lose(self) -> None:
        """Lose the machine with everything in its memory."""
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def shards(self) -> set[ShardKey]:
        return {fact.key for fact in self.store.list_shards(JOB)}


class StoreNodes:
    """Nodes of a job."""

    def __init__(
        self,
        settings: ReplicationSettings,
        *names: str,
        labels: Callable[[str], str],
        budgets: dict[str, str],
        membership: MembershipSettings,
    ):
        self.settings = settings
        self.network = MemoryNetwork()
        self.all = {
            name: StoreNode(name, self.network, budgets.get(name, "64MiB"), labels(name), membership)
            for name in sorted(names)
        }
        for node in self.all.values():
            node.start()
        self.join_all()
        self.claim_job("a", 1)

    def join_all(self) -> None:
        """Join all live nodes to the job."""
        here = self.live_nodes
        roster = member_list(time.time_ns(), [node.hood.this_node for node in here])
        for node in here:
            node.hood.join(JOB, JobPeersConfig(SECRET, self.settings, member_list=roster), wait_s=0)

    def claim_job(self, incarnation: str, epoch: int) -> None:
        """Claim the job for an incarnation on every live node, waiting for a quorum."""

        def begun(node: StoreNode) -> bool:
            try:
                return node.store.claim(JOB, incarnation, at_least=epoch - 1) == epoch
            except NoQuorumError:
                return False

        for node in self.live_nodes:
            wait_until(lambda node=node: begun(node))  # type: ignore[misc]

    def __getitem__(self, name: str) -> StoreNode:
        return self.all[name]

    @property
    def live_nodes(self) -> list[StoreNode]:
        return [node for node in self.all.values() if node.up]

    def lose(self, name: str) -> None:
        """Lose a node and wait until the others notice."""
        self.all[name].lose()
        wait_until(lambda: all(name not in node.job_peers.membership.alive for node in self.live_nodes))

    def is_replicated(self, version: int) -> bool:
        """Whether every live node knows that this version is replicated."""
        return all(
            node.job_peers.newest_replicated is not None and node.job_peers.newest_replicated.version >= version
            for node in self.live_nodes
        )

    def has_no_pending_copies(self) -> bool:
        """Whether no replication is pending."""
        return all(not node.job_peers.replicator.has_pending for node in self.live_nodes)

    def read(self, record: ShardRecord) -> bytes:
        """Read a shard from any live node that has it."""
        for node in self.live_nodes:
            sources = node.job_peers.shard_sources(fresh=True).get(record.key, ())
            if node.name in sources:
                return load_shard(node.store, record.key)
            if sources:
                data = bytearray(record.size_bytes)
                wish = ReadRequest(record, [ReadTarget(0, len(data), memoryview(data))], sources)
                pulled = RangeReader(node.job_peers.membership.client_for).read([wish])
                assert not pulled.failed
                return bytes(data)
        raise AssertionError(f"no live node has {record.key}")

    def holders(self, key: ShardKey) -> list[str]:
        return [node.name for node in self.live_nodes if key in node.shards()]

    def sealed_bytes(self) -> int:
        return sum(node.store.status().arena.sealed_bytes for node in self.live_nodes)

    def close(self) -> None:
        for node in self.all.values():
            node.lose()


def wait_until(ready: Callable[[], bool], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while not ready():
        assert time.monotonic() < deadline, f"the condition did not hold within {within_s:.0f} s"
        pause.wait(0.02)


@contextlib.contextmanager
def store_nodes(
    settings: ReplicationSettings,
    *names: str,
    labels: Callable[[str], str] = lambda name: f"rack=r-{name}",
    budgets: dict[str, str] | None = None,
    membership: MembershipSettings = QUICK,
) -> Iterator[StoreNodes]:
    made = StoreNodes(settings, *names, labels=labels, budgets=budgets or {}, membership=membership)
    try:
        yield made
    finally:
        made.close()
