"""One job whose nodes are hosts of a network that a test may cut: real agents, and what trainers ask of them.

::

    with separated(net, "n1", "n2", "n3") as job:
        job.begin("n1")
        job.write(1, size_bytes=MIB)
        job.settle(1)
        net.cut(job["n1"].host, job["n2"].host)

Calls go through the agents' Unix sockets, which no cut touches, so a test sees what each side of a partition sees.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from peerstore.membership.topology import validate_node_id
from peerstore.peers.peer_client import PeerClient, PeerCredentials
from peerstore.peers.peer_messages import GetShardRecords
from peerstore.peers.range_reader import RangeReader, ReadRequest, ReadResult, ReadTarget
from peerstore.server.store_api import Store
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
"""A dead node is noticed after some ten seconds where nobody else uses the machine."""
_PAUSE_S = 0.05


def wait_until(ready: Callable[[], Any], what: str, *, explain: Callable[[], str] = lambda: "") -> Any:
    """Wait for something that happens in other processes; what ``ready`` said in the end."""
    deadline = time.monotonic() + _PATIENCE_S
    while not (found := ready()):
        assert time.monotonic() < deadline, f"it did not happen: {what} {explain()}"
        time.sleep(_PAUSE_S)
    return found


class PartitionedNode:
    """One of the job's nodes, as a trainer on it sees it."""

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
        """For ranks of this node, wherever they run."""
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

    # -- how things stand ---------------------------------------------------------------------------------------------

    @property
    def view(self) -> ClusterStatus:
        return self.node.cluster_status(JOB)

    def state_of(self, name: str) -> str:
        return next(view.state for view in self.view.nodes if view.node.id == name)

    @property
    def partner(self) -> str:
        """Where the copies of what it writes go."""
        (found,) = self.view.partners
        return found

    @property
    def newest_replicated(self) -> int:
        """The newest version that has all its copies as far as this node knows; -1 for none."""
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
        """Bit for bit what was written, and what was sealed."""
        data = load_shard(self.store, of)
        return data == shard_content(of, len(data)) and self.store.verify(of) == ()

    def read(self, of: ShardKey, *sources: str, streams: int = 2) -> tuple[bytes, ReadResult]:
        """A whole shard from other nodes' agents, over this host's network, as a loading rank gets it."""
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
    """All nodes of one job. Shards are written under incarnations by number: 1 is called "a", 2 is called "b"."""

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
        """These, or all."""
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
        everybody = {seat.name for seat in self}
        for seat in self:
            wait_until(
                lambda seat=seat: {view.node.id for view in seat.view.nodes if view.state == "alive"} == everybody,
                f"{seat.name} sees all nodes",
            )

    # -- versions -----------------------------------------------------------------------------------------------------

    def claim_incarnation(self, name: str, epoch: int = 1) -> None:
        """A new incarnation of the job, claimed on this node."""
        assert self[name].store.claim(JOB, _incarnation(epoch)) == epoch

    def key(self, version: int, name: str, *, epoch: int = 1) -> ShardKey:
        """What this node writes for a version."""
        return shard_key(version, self[name].part, job=JOB, epoch=epoch, name=_incarnation(epoch))

    def write(self, version: int, *names: str, size_bytes: int, epoch: int = 1) -> list[ShardKey]:
        """Every node (of these) writes its part."""
        writers = self.select_nodes(*names)
        found = []
        for part, seat in enumerate(writers):
            of = shard_key(version, part, job=JOB, epoch=epoch, name=_incarnation(epoch))
            seat.write(of, size_bytes, parts=len(writers))
            found.append(of)
        return found

    def wait_replicated(self, version: int, *names: str) -> None:
        """Until these nodes (all) know that a version has its copies."""
        for seat in self.select_nodes(*names):
            wait_until(
                lambda seat=seat: seat.newest_replicated >= version,
                f"version {version} is settled on {seat.name}",
                explain=lambda seat=seat: f"({seat.newest_replicated} is, and it {seat.view.sees})",
            )

    def holders(self, of: ShardKey, *names: str) -> set[str]:
        return {seat.name for seat in self.select_nodes(*names) if seat.holds(of)}

    def assert_intact_copies(self, keys: list[ShardKey], *names: str) -> None:
        """Each of these shards has its copies on these nodes (all), and all of them are good."""
        for of in keys:
            holders = self.holders(of, *names)
            assert len(holders) >= self.copies, f"{of} is on {holders}"
            for name in holders:
                assert self[name].has_intact_shard(of), f"{of} on {name}"

    def run(self, ranks: RankPool, names: Sequence[str], function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(inside, *args)`` on one rank per node. Within ``inside()`` it is on its host's network.

        The ranks' own collectives stay on the machine's: make groups before, they last.
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
    """Nodes that know each other; ``wire`` is done to the network before they do, so it holds for all connections."""
    with contextlib.closing(PartitionedJob(net, copies=copies)) as job:
        for name in names:
            job.add(net.host(name))
        wire(net)
        job.join_all()
        yield job
