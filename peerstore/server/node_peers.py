"""The peer tier of all jobs on one node: listens, joins and leaves jobs, rejoins them after a restart."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from peerstore import deadlines
from peerstore.errors import ArenaFullError, PeerStoreError, ShardNotFoundError, UnavailableError
from peerstore.membership.discovery import Discovery, parse_discovery
from peerstore.membership.swim import MembershipSettings
from peerstore.membership.topology import MemberList, NodeId, PeerNode, validate_node_id
from peerstore.message_codec import from_msgpack
from peerstore.peers.heartbeat_loop import SHUTDOWN_GRACE_S
from peerstore.peers.peer_client import PeerCredentials
from peerstore.peers.peer_messages import JoinJob
from peerstore.server.job_peers import JobPeers
from peerstore.server.peer_server import PeerServer
from peerstore.settings import JOB_PEERS_BLOB, BlobAccess, JobPeersConfig
from peerstore.shard_records import ShardInfo, ShardKey, ShardRecord, VersionId
from peerstore.store.node_store import NodeStore
from peerstore.store.store_listener import StoreListener
from peerstore.transport.base import Listener, PartitionableTransport, Transport

log = logging.getLogger(__name__)

_JOIN_S = 5.0


@dataclass(frozen=True)
class NodeIdentity:
    """This node's id, address and labels."""

    node: NodeId
    listen: str
    """``host:port`` to listen on for other nodes' agents; port 0 picks one."""
    labels: tuple[tuple[str, str], ...] = ()
    memory_bytes: int = 0
    port_file: Path | None = None
    """File that stores the chosen port, so that the next agent of this node listens on the same one."""
    membership: MembershipSettings = field(default_factory=MembershipSettings)


class FixedMembers:
    """Discovery that returns a given member list."""

    def __init__(self, member_list: MemberList) -> None:
        self._member_list = member_list

    def member_list(self) -> MemberList:
        return self._member_list


class NodePeers(StoreListener):
    """The peer tier of one node agent, for all jobs."""

    def __init__(
        self,
        store: NodeStore,
        identity: NodeIdentity,
        transport: Transport,
        *,
        version: str = "",
        blobs_of: Callable[[ShardInfo], tuple[str, ...]] = lambda _fact: (),
        shared: BlobAccess = BlobAccess(),  # noqa: B008 - it is never changed
    ) -> None:
        self._store = store
        self._identity = identity
        self._transport = PartitionableTransport(transport)
        self._blobs_of = blobs_of
        self._lock = threading.RLock()
        self._job_peers: dict[str, JobPeers] = {}
        self._configs: dict[str, JobPeersConfig] = {}
        self._listener: Listener | None = None
        self._standby_secret: bytes | None = None
        self.server = PeerServer(
            store,
            identity.node,
            team_of=self.job_peers,
            join=self._join_invited,
            standby_secret=lambda: self._standby_secret,
            version=version,
            shared=shared,
        )

    def start(self) -> None:
        """Rejoin the jobs of a killed agent, and subscribe to the store's events."""
        for job in self._store.jobs.names():
            try:
                plan = from_msgpack(self._store.blobs.get(job, JOB_PEERS_BLOB), JobPeersConfig)
                self.join(job, plan, wait_s=0.0)
            except ShardNotFoundError:  # a job without other nodes
                continue
            except (PeerStoreError, msgspec.DecodeError, OSError) as error:
                log.warning("job %s: its other nodes are not looked after: %s", job, error)
        self._store.subscribe(self)  # from now on damaged shards can be repaired

    def close(self) -> None:
        with self._lock:
            teams, self._job_peers = list(self._job_peers.values()), {}
            listener, self._listener = self._listener, None
        with deadlines.timeout_scope(SHUTDOWN_GRACE_S):
            for team in teams:
                team.replicator.close()  # stop outgoing transfers before connections close
        if listener is not None:
            listener.close()
        for team in teams:
            team.close()
        self.server.close()
        self._transport.close()

    def partition(self, seconds: float) -> None:
        """Block all traffic between this node and others for ``seconds``, as an injected fault."""
        log.warning("cut off from all other nodes for %g s, on purpose", seconds)
        self._transport.partition(seconds)

    # -- this node ----------------------------------------------------------------------------------------------------

    @property
    def this_node(self) -> PeerNode:
        """This node with its address; the first access starts listening."""
        with self._lock:
            if self._listener is None:
                self._listener = self._listen()
                log.info("node %s listens for others on %s", self._identity.node, self._listener.address)
            identity = self._identity
            return PeerNode(
                validate_node_id(identity.node), self._listener.address, identity.labels, identity.memory_bytes
            )

    def _listen(self) -> Listener:
        """Listen on the previous agent's port if possible, because other nodes know it."""
        wanted, noted = self._identity.listen, self._identity.port_file
        host, _, port = wanted.rpartition(":")
        if noted is None or port != "0":
            return self._transport.listen(wanted, self.server.serve)
        with contextlib.suppress(OSError, ValueError):
            before = int(noted.read_text())
            try:
                return self._transport.listen(f"{host}:{before}", self.server.serve)
            except (PeerStoreError, OSError) as error:
                log.warning("port %d, where others know this node, cannot be had (%s): another one", before, error)
        listener = self._transport.listen(wanted, self.server.serve)
        try:
            noted.write_text(listener.address.rpartition(":")[2])
        except OSError as error:
            log.warning("cannot record the port, so a restarted agent will use another port: %s", error)
        return listener

    @property
    def node_id(self) -> NodeId:
        return self._identity.node

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def job_peers(self, job: str) -> JobPeers | None:
        with self._lock:
            return self._job_peers.get(job)

    @property
    def all_job_peers(self) -> list[JobPeers]:
        with self._lock:
            return [self._job_peers[job] for job in sorted(self._job_peers)]

    def join(self, job: str, plan: JobPeersConfig, *, wait_s: float = _JOIN_S) -> JobPeers:
        """Join ``job`` with this configuration; an equal configuration changes nothing."""
        discovery: Discovery = (
            FixedMembers(plan.member_list) if plan.member_list is not None else parse_discovery(plan.discovery)
        )
        with self._lock:
            team, known = self._job_peers.get(job), self._configs.get(job)
            if team is not None and known == plan:
                return team
            replaced, fresh = None, False
            if team is not None and known is not None and known.same_except_members(plan):
                self._save_config(job, plan)
                team.membership.set_discovery(discovery)
            else:
                replaced = self._job_peers.pop(job, None)
                team = self._job_peers[job] = self._new_job_peers(job, plan)
                self._save_config(job, plan)
                fresh = True
        if replaced is not None:
            replaced.close()
        if fresh:
            team.start(discovery)
        team.membership.wait_quorum(wait_s)  # a changed member list may have new nodes to contact
        return team

    def accept_standby(self, secret: bytes) -> PeerNode:
        """Let nodes that prove ``secret`` make this node join their job and store replicas; return this node.

        A later secret replaces it. Jobs that this node has already joined keep their own secret.
        """
        self._standby_secret = secret
        return self.this_node

    def _join_invited(self, job: str, secret: bytes, invitation: JoinJob) -> JobPeers:
        team = self.job_peers(job)
        if team is not None:  # another node's request, or a rank of this node, came first
            return team
        log.info("job %s: this node joins it as a standby node", job)
        return self.join(
            job, JobPeersConfig(secret, invitation.settings, member_list=invitation.member_list), wait_s=0.0
        )

    def _new_job_peers(self, job: str, plan: JobPeersConfig) -> JobPeers:
        me = self.this_node
        return JobPeers(
            self._store,
            me,
            PeerCredentials(job, me.id, plan.secret),
            self._transport,
            plan.settings,
            membership=self._identity.membership,
            blobs_of=self._blobs_of,
        )

    def _save_config(self, job: str, plan: JobPeersConfig) -> None:
        self._configs[job] = plan
        try:
            self._store.blobs.put(job, JOB_PEERS_BLOB, msgspec.msgpack.encode(plan))
        except (ArenaFullError, UnavailableError) as error:
            log.warning("job %s: a restarted agent will not know the job's other nodes: %s", job, error)

    def leave(self, job: str) -> None:
        with self._lock:
            team = self._job_peers.pop(job, None)
            self._configs.pop(job, None)
        if team is not None:
            team.close()
            if job in self._store.jobs.names():
                self._store.blobs.remove(job, JOB_PEERS_BLOB)
                self._store.jobs.incarnations.set_replication_guard(job, guarded=False)

    # -- events of the store ------------------------------------------------------------------------------------------

    def on_shard_sealed(self, record: ShardRecord) -> None:
        team = self.job_peers(record.key.job)
        if team is not None:
            team.replicator.wake()

    def on_replica_stored(self, record: ShardRecord, holders: tuple[str, ...]) -> None:
        self.on_shard_sealed(record)

    def on_job_expired(self, job: str) -> None:
        self.leave(job)

    def on_shard_damaged(self, key: ShardKey, record: ShardRecord, reason: str) -> None:
        team = self.job_peers(key.job)
        if team is not None:
            team.schedule_repair(record)

    def on_parity_changed(self, record: ShardRecord) -> None:
        self.on_shard_sealed(record)

    def on_version_decided(self, job: str, group: VersionId, *, torn: bool) -> None:
        team = self.job_peers(job)
        if team is not None:
            team.replicator.wake()
