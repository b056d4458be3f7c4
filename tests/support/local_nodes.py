"""Several nodes of one job in this process: real stores and peers on a simulated network.

::

    with local_nodes("n1", "n2", "n3") as all_of_them:
        n1, n2, n3 = all_of_them
        n1.write(key(1, 0))
        all_of_them.wait_replicated(1)
        all_of_them.lose("n2")
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from peerstore.errors import PeerStoreError
from peerstore.membership.swim import MembershipSettings
from peerstore.membership.topology import PARTITION_MIN_NODES, NodeId, PeerNode, member_list, parse_labels
from peerstore.peers.range_reader import RangeReader, ReadRequest, ReadResult, ReadTarget
from peerstore.server.job_peers import JobPeers
from peerstore.server.node_peers import NodeIdentity, NodePeers
from peerstore.settings import JobPeersConfig, ReplicationSettings, StoreSettings
from peerstore.shard_records import ShardInfo, ShardKey, ShardRecord
from peerstore.store.arena import TmpfsArena
from peerstore.store.node_store import NodeStore
from peerstore.testing import MemoryNetwork
from peerstore.transport.base import Transport
from tests.support.stores import MIB, load_shard, save_shard, shard_content, store_directory
from tieredckpt.agent.peer_tier import SHARED_BLOBS

JOB = "job"
SECRET = b"a secret of the tests, long enough"
QUICK = MembershipSettings(heartbeat_s=0.1, ping_timeout_s=1.0, dead_after_s=0.5)
PATIENCE_S = 200.0
"""Timeout in seconds of all waits, generous as the machine may be busy."""


def wait_until(ready: Callable[[], Any], what: str = "", timeout_s: float = PATIENCE_S) -> Any:
    """Wait until ``ready`` returns a true value, and return it."""
    deadline = time.monotonic() + timeout_s
    while not (found := ready()):
        assert time.monotonic() < deadline, f"it did not happen: {what or ready}"
        time.sleep(0.01)
    return found


class LocalNode:
    """One node: its store and its peers."""

    def __init__(
        self,
        name: str,
        transport: Transport,
        *,
        labels: str = "",
        budget: str = "256MiB",
        directory: Path,
        listen: str = "",
        membership: MembershipSettings = QUICK,
    ) -> None:
        self.name = name
        self.transport = transport
        self.labels = labels
        self.budget = budget
        self.directory = directory
        self._listen = listen or f"{name}:7070"
        self._membership = membership
        self._plan: JobPeersConfig | None = None
        self.open()

    def open(self) -> None:
        """Start its agent on its directory."""
        self.store = NodeStore(TmpfsArena(self.directory), StoreSettings(budget=self.budget), threads=1)
        identity = NodeIdentity(NodeId(self.name), self._listen, parse_labels(self.labels), membership=self._membership)
        self.node_peers = NodePeers(self.store, identity, self.transport, version="test", shared=SHARED_BLOBS)
        self.node_peers.start()
        self.is_open = True

    def close(self) -> None:
        """Stop its agent, leaving its directory."""
        if self.is_open:
            self.is_open = False
            self.store.table.lock.close()
            self.node_peers.close()
            self.store.close()

    def wipe(self) -> None:
        """Lose the node's memory."""
        shutil.rmtree(self.directory)

    # -- with the others ----------------------------------------------------------------------------------------------

    @property
    def node(self) -> PeerNode:
        return PeerNode(NodeId(self.name), self.node_peers.this_node.address, parse_labels(self.labels))

    @property
    def job_peers(self) -> JobPeers:
        team = self.node_peers.job_peers(JOB)
        assert team is not None, f"{self.name} has not joined"
        return team

    def join(self, plan: JobPeersConfig) -> None:
        self.node_peers.join(JOB, plan, wait_s=0.0)

    @property
    def newest_replicated(self) -> int:
        """Newest version that this node knows to have all copies, or -1."""
        group = self.store.jobs.versions(JOB).replicated
        return -1 if group is None else group.version

    def sees_alive(self, *names: str) -> bool:
        return set(self.job_peers.membership.alive) == set(names)

    # -- shards -------------------------------------------------------------------------------------------------------

    def write(self, of: ShardKey, size_bytes: int = MIB, *, parts: int = 1) -> ShardRecord:
        return save_shard(self.store, of, size_bytes, parts=parts)

    def shard_infos(self) -> dict[ShardKey, ShardInfo]:
        return {fact.key: fact for fact in self.store.replicas.list_shards(JOB)}

    def holds(self, of: ShardKey) -> bool:
        return of in self.shard_infos()

    def has_intact_shard(self, of: ShardKey) -> bool:
        return load_shard(self.store, of) == shard_content(of, self.shard_infos()[of].size_bytes)

    def path(self, of: ShardKey) -> str:
        return self.store.reader.shard_path(of)

    def damage_reports(self) -> list[str]:
        return [damage.reason for damage in self.store.status().damage_reports]

    def read(self, of: ShardKey, *, sources: list[str] | None = None, streams: int = 2) -> tuple[bytes, ReadResult]:
        """Read a whole shard from other nodes, as a restoring rank does."""
        team = self.job_peers
        there = sources or [node for node in team.shard_sources(fresh=True).get(of, ()) if node != self.name]
        said = {}
        for node in there:
            with contextlib.suppress(PeerStoreError):
                said.update((node, record) for record in team.fetch_records(node, of.version_id) if record.key == of)
        record, _ = team.resolve_record(said)
        data = bytearray(record.size_bytes)
        wish = ReadRequest(record, [ReadTarget(0, len(data), memoryview(data))], there)
        pulled = RangeReader(team.membership.client_for, streams=streams).read([wish])
        return bytes(data), pulled


class LocalNodes:
    """Nodes of a job, all closed together."""

    def __init__(
        self,
        *,
        copies: int = 2,
        capacity_bytes: int = 256 << 10,
        secret: bytes = SECRET,
        split_from: int = PARTITION_MIN_NODES,
    ) -> None:
        self.network = MemoryNetwork(capacity_bytes=capacity_bytes)
        self.settings = ReplicationSettings(copies=copies, partition_min_nodes=split_from)
        self.secret = secret
        self.nodes: dict[str, LocalNode] = {}
        self._rosters = 0
        self._cleanup = contextlib.ExitStack()

    def __getitem__(self, name: str) -> LocalNode:
        return self.nodes[name]

    def __iter__(self) -> Iterator[LocalNode]:
        return iter(self.nodes.values())

    def add(self, name: str, labels: str = "", **options: Any) -> LocalNode:
        directory = self._cleanup.enter_context(store_directory())
        node = LocalNode(name, self.network.transport(name), labels=labels, directory=directory, **options)
        self._cleanup.callback(node.close)
        self.nodes[name] = node
        return node

    def peers_config(self, **changes: Any) -> JobPeersConfig:
        self._rosters += 1
        roster = member_list(self._rosters, [node.node for node in self if node.is_open])
        return JobPeersConfig(**{"secret": self.secret, "settings": self.settings, "member_list": roster, **changes})

    def join_all(self) -> None:
        """Join all open nodes to the job and wait until they see each other."""
        here = [node for node in self if node.is_open]
        plan = self.peers_config()
        for node in here:
            node.join(plan)
        names = [node.name for node in here]
        for node in here:
            wait_until(
                lambda node=node: node.sees_alive(*names) and node.job_peers.membership.has_quorum,
                f"{node.name} sees {names}",
            )

    def lose(self, name: str) -> LocalNode:
        """Lose a node with everything in its memory."""
        node = self.nodes.pop(name)
        self.network.kill_node(name)
        node.close()
        return node

    def restart(self, name: str, *, empty: bool = False) -> LocalNode:
        """Restart a node's agent, with an empty memory if ``empty``; the others may not notice."""
        node = self.nodes[name]
        self.network.kill_node(name)
        node.close()
        if empty:
            node.wipe()
        node.open()
        return node

    def wait_replicated(self, version: int, *names: str) -> None:
        """Wait until these nodes, or all, know that a version has all its copies."""
        for node in [self.nodes[name] for name in names] or list(self):
            wait_until(
                lambda node=node: node.newest_replicated >= version, f"version {version} is replicated on {node.name}"
            )

    def holders(self, of: ShardKey) -> set[str]:
        return {node.name for node in self if node.holds(of)}

    def close(self) -> None:
        self._cleanup.close()


@contextlib.contextmanager
def local_nodes(
    *names: str,
    labels: Callable[[str], str] = lambda _name: "",
    membership: MembershipSettings = QUICK,
    **options: Any,
) -> Iterator[LocalNodes]:
    """Run nodes that have joined one job."""
    with contextlib.closing(LocalNodes(**options)) as made:
        for name in names:
            made.add(name, labels(name), membership=membership)
        if names:
            made.join_all()
        yield made
