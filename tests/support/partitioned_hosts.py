"""One job with real agents on hosts of a network that a test may partition.

::

    with partitioned_job(net, "n1", "n2", "n3") as job:
        job.claim_incarnation("n1")
        job.write(1, size_bytes=MIB)
        job.wait_replicated(1)
        net.cut(job["n1"].host, job["n2"].host)

Calls use the agents' Unix sockets, which no cut affects, so a test can inspect each side of a partition.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from peerstore.client.store_api import Store
from peerstore.membership.topology import validate_node_id
from peerstore.peers.peer_client import PeerClient, PeerCredentials
from peerstore.peers.peer_messages import GetShardRecords
from peerstore.peers.range_reader import RangeReader, ReadRequest, ReadResult, ReadTarget
from peerstore.shard_records import ShardKey, ShardRecord
from peerstore.transport.authentication import generate_secret
from peerstore.transport.tcp import TcpTransport
from tests.support import namespaces
from tests.support.host_agent import HostAgent
from tests.support.hosts import Host, Network
from tests.support.ranks import RankPool
from tests.support.stores import load_shard, save_shard, shard_content, shard_key
from tieredckpt.agent.agent_api import ClusterStatus, ShardReplication
from tieredckpt.agent.agent_client import NodeAgentClient
from tieredckpt.agent.peer_config import configured_peer_plan
from tieredckpt.settings import Settings, settings_from_mapping

JOB = "separated"
PORT = 7070
_PATIENCE_S = 200.0
"""Timeout in seconds. On an idle machine the nodes notice a dead one after about ten seconds."""
_PAUSE_S = 0.05


def wait_until(ready: Callable[[], Any], what: str, *, explain: Callable[[], str] = lambda: "") -> Any:
    """Wait until ``ready`` returns a true value, and return it."""
    deadline = time.monotonic() + _PATIENCE_S
    while not (found := ready()):
        assert time.monotonic() < deadline, f"it did not happen: {what} {explain()}"
        time.sleep(_PAUSE_S)
    return found


class PartitionedNode:
    """One node of the job, as its trainer sees it."""

    def __init__(self, job: PartitionedJob, host: Host) -> None:
        self.name = host.name
        self.host = host
        self.part = len(job.seats)
        self._job = job
        label = f"rack=r-{host.name}"
        options = ["--node", host.name, "--peers", f"{host.address}:{PORT}", "--labels", label]
        self.listed = f"{host.name}={host.address}:{PORT}/{label}"
        self.agent: HostAgent = host.agent(host.directory, *options)
        self._node: NodeAgentClient | None = None

    @property
    def environ(self) -> dict[str, str]:
        """Environment of this node's ranks."""
        return {
            "TIEREDCKPT_AGENT_DIRECTORY": str(self.host.directory),
            "TIEREDCKPT_AGENT_EMBEDDED": "0",
            "TIEREDCKPT_PEER_DISCOVERY": self._job.discovery,
            "TIEREDCKPT_PEER_SECRET": self._job.secret,
            "TIEREDCKPT_PEER_COPIES": str(self._job.copies),
        }

    @property
    def settings(self) -> Settings:
        prefix = "TIEREDCKPT_"
        tree: dict[str, dict[str, str]] = {"agent": {}, "peer": {}}
        for name, value in self.environ.items():
            section, _, rest = name.removeprefix(prefix).lower().partition("_")
            tree[section][rest] = value
        return settings_from_mapping(tree)

    @property
    def node(self) -> NodeAgentClient:
        if self._node is None:
            self._node = NodeAgentClient(self.settings, JOB)
        return self._node

    @property
    def store(self) -> Store:
        return self.node.store

    def join(self) -> None:
        plan = configured_peer_plan(self.settings.peer)
        assert plan is not None
        self.node.join_peers(JOB, plan)

    def close(self) -> None:
        if self._node is not None:
            self._node.close()

    # -- cluster status -----------------------------------------------------------------------------------------------

    @property
    def view(self) -> ClusterStatus:
        return self.node.cluster_status(JOB)

    def state_of(self, name: str) -> str:
        return next(view.state for view in self.view.nodes if view.node.id == name)

    @property
    def partner(self) -> str:
        """Node that receives the copies of this node's shards."""
        (found,) = self.view.partners
        return found

    @property
    def newest_replicated(self) -> int:
        """Newest version that this node knows to have all copies, or -1."""
        found = [job.newest_replicated for job in self.store.status().jobs if job.job == JOB]
        return -1 if not found or found[0] is None else found[0]

    def replication_status(self, of: ShardKey, *, copies: int = 0, timeout_s: float = 0.0) -> ShardReplication:
        return self.node.replication_status(of, copies=copies, timeout_s=timeout_s)

    # -- shards -------------------------------------------------------------------------------------------------------

    def write(self, of: ShardKey, size_bytes: int, *, parts: int) -> ShardRecord:
        return save_shard(self.store, of, size_bytes, parts=parts)

    def keys(self) -> set[ShardKey]:
        return {fact.key for fact in self.store.list_shards(JOB)}

    def parts_of(self, version: int) -> set[int]:
        return {of.part for of in self.keys() if of.version == version}

    def holds(self, of: ShardKey) -> bool:
        return of in self.keys()

    def has_intact_shard(self, of: ShardKey) -> bool:
        """Whether the shard equals what was written and passes verification."""
        data = load_shard(self.store, of)
        return data == shard_content(of, len(data)) and self.store.verify(of) == ()

    def read(self, of: ShardKey, *sources: str, streams: int = 2) -> tuple[bytes, ReadResult]:
        """Read a whole shard from other nodes over this host's network, as a restoring rank does."""
        return namespaces.run_inside(self.host.namespace, lambda: self._read(of, sources, streams))

    def _read(self, of: ShardKey, sources: tuple[str, ...], streams: int) -> tuple[bytes, ReadResult]:
        passport = self.node.peer_credentials(JOB)
        assert passport is not None
        credentials = PeerCredentials(JOB, validate_node_id(passport.node), passport.secret)
        with contextlib.ExitStack() as cleanup:
            peers = {}
            for name in sources:
                address = f"{self._job[name].host.address}:{PORT}"
                peers[name] = cleanup.enter_context(
                    contextlib.closing(PeerClient(TcpTransport(), address, credentials))
                )
            said = peers[sources[0]].call("shard_records", GetShardRecords(of.version_id), list[ShardRecord])
            record = next(record for record in said if record.key == of)
            data = bytearray(record.size_bytes)
            wish = ReadRequest(record, [ReadTarget(0, len(data), memoryview(data))], sources)
            pulled = RangeReader(peers.__getitem__, streams=streams).read([wish])
            return bytes(data), pulled


class PartitionedJob:
    """All nodes of one job. Epochs 1 and 2 are the incarnations "a" and "b"."""

    def __init__(self, net: Network, *, copies: int = 2) -> None:
        self.net = net
        self.copies = copies
        self.seats: dict[str, PartitionedNode] = {}
        path = net.directory / "secret"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(generate_secret())
        self.secret = f"file:{path}"

    def __getitem__(self, name: str) -> PartitionedNode:
        return self.seats[name]

    def __iter__(self) -> Iterator[PartitionedNode]:
        return iter(self.seats.values())

    def select_nodes(self, *names: str) -> list[PartitionedNode]:
        """Return the named nodes, or all."""
        return [self.seats[name] for name in names] or list(self)

    @property
    def discovery(self) -> str:
        return "static:" + ",".join(seat.listed for seat in self)

    def add(self, host: Host) -> PartitionedNode:
        seat = self.seats[host.name] = PartitionedNode(self, host)
        return seat

    def join_all(self) -> None:
        with ThreadPoolExecutor(len(self.seats)) as pool:  # each waits for the others
            list(pool.map(PartitionedNode.join, self))
        names = {seat.name for seat in self}
        for seat in self:
            wait_until(
                lambda seat=seat: {view.node.id for view in seat.view.nodes if view.state == "alive"} == names,
                f"{seat.name} sees all nodes",
            )

    # -- versions -----------------------------------------------------------------------------------------------------

    def claim_incarnation(self, name: str, epoch: int = 1) -> None:
        """Claim a new incarnation of the job on this node."""
        assert self[name].store.claim(JOB, _incarnation(epoch)) == epoch

    def key(self, version: int, name: str, *, epoch: int = 1) -> ShardKey:
        """Return the key of this node's shard of a version."""
        return shard_key(version, self[name].part, job=JOB, epoch=epoch, name=_incarnation(epoch))

    def write(self, version: int, *names: str, size_bytes: int, epoch: int = 1) -> list[ShardKey]:
        """Write one part on each of the named nodes, or on all."""
        writers = self.select_nodes(*names)
        found = []
        for part, seat in enumerate(writers):
            of = shard_key(version, part, job=JOB, epoch=epoch, name=_incarnation(epoch))
            seat.write(of, size_bytes, parts=len(writers))
            found.append(of)
        return found

    def wait_replicated(self, version: int, *names: str) -> None:
        """Wait until these nodes, or all, know that a version has all its copies."""
        for seat in self.select_nodes(*names):
            wait_until(
                lambda seat=seat: seat.newest_replicated >= version,
                f"version {version} is replicated on {seat.name}",
                explain=lambda seat=seat: f"(newest replicated: {seat.newest_replicated}; it {seat.view.sees})",
            )

    def holders(self, of: ShardKey, *names: str) -> set[str]:
        return {seat.name for seat in self.select_nodes(*names) if seat.holds(of)}

    def assert_intact_copies(self, keys: list[ShardKey], *names: str) -> None:
        """Assert that these nodes, or all, hold enough copies of each shard, all of them intact."""
        for of in keys:
            holders = self.holders(of, *names)
            assert len(holders) >= self.copies, f"{of} is on {holders}"
            for name in holders:
                assert self[name].has_intact_shard(of), f"{of} on {name}"

    def run(self, ranks: RankPool, names: Sequence[str], function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``function(inside, *args)`` on one rank per node; ``inside()`` enters the host's network.

        Process groups created outside ``inside()`` use the machine's network and keep working inside.
        """
        places = [(self[name].host.namespace, self[name].environ) for name in names]
        return ranks.run(len(names), _on_host, places, function, args)

    def close(self) -> None:
        for seat in self:
            seat.close()


def _on_host(places: Sequence[tuple[str, dict[str, str]]], function: Callable[..., Any], args: Sequence[Any]) -> Any:
    import torch.distributed as dist

    namespace, environ = places[dist.get_rank()]
    os.environ.update(environ, LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")
    return function(partial(namespaces.inside_namespace, namespace), *args)


def _incarnation(epoch: int) -> str:
    return chr(ord("a") + epoch - 1)


@contextlib.contextmanager
def partitioned_job(
    net: Network, *names: str, copies: int = 2, wire: Callable[[Network], None] = lambda _net: None
) -> Iterator[PartitionedJob]:
    """Run nodes that have joined one job; ``wire`` sets up the network before they connect."""
    with contextlib.closing(PartitionedJob(net, copies=copies)) as job:
        for name in names:
            job.add(net.host(name))
        wire(net)
        job.join_all()
        yield job
