"""SWIM membership with a clock, threads and connections: heartbeats, gossip and discovery."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from peerstore import deadlines
from peerstore.commit_protocol import CommitDecision
from peerstore.errors import NoQuorumError, PeerStoreError
from peerstore.membership.discovery import Discovery
from peerstore.membership.swim import GossipMessage, IndirectPingToSend, MembershipSettings, PingToSend, SwimMembership
from peerstore.membership.topology import MemberList, NodeId, PeerNode
from peerstore.peers.peer_client import PeerClient, PeerConnection, PeerCredentials
from peerstore.peers.peer_messages import GetMemberList, IndirectPing, JoinJob, PingMessage
from peerstore.settings import ReplicationSettings
from peerstore.store.received_replicas import ReplicaStore
from peerstore.transport.base import Transport

log = logging.getLogger(__name__)

_DISCOVER_S = 10.0
_PING_THREADS = 24
_PING_TOTAL_S = 5.0
"""Seconds that a ping may take, including connection setup; its reply has less time."""
SHUTDOWN_GRACE_S = 2.0
"""Seconds that in-flight requests get to finish when the agent shuts down."""


class HeartbeatLoop:
    """Membership of one job: heartbeats, gossip and discovery in background threads. Thread-safe."""

    def __init__(
        self,
        me: PeerNode,
        credentials: PeerCredentials,
        transport: Transport,
        copies: ReplicaStore,
        *,
        settings: MembershipSettings | None = None,
        replication: ReplicationSettings = ReplicationSettings(),  # noqa: B008 - it is frozen
        changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.this_node = me
        self._credentials = credentials
        self._transport = transport
        self._replication = replication
        self._replicas = copies
        self._changed = changed
        self._clock = clock
        self._lock = threading.RLock()
        self._members_changed = threading.Condition(self._lock)
        self._members = SwimMembership(me, time.time_ns() // 1000, settings or MembershipSettings(), seed=hash(me.id))
        self._discovery: Discovery | None = None
        self._discovered_at = float("-inf")
        self._pending = PendingMembers(self._members.settings)
        self._peers: dict[str, PeerClient] = {}
        self._previously_alive: set[str] = set()
        self._pings_in_flight: set[str] = set()
        """Nodes with a ping in flight."""
        self._ping_again: set[str] = set()
        """Nodes to ping again, because the reply in flight may predate the newest member list."""
        self._cached_alive: tuple[int, Mapping[str, PeerNode]] = (-1, {})
        self._was_resolved = False
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(_PING_THREADS, thread_name_prefix="peerstore-ping")
        self._connections_closed = False
        self._thread = threading.Thread(target=self._run, name="peerstore-tend", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close_connections(self) -> None:
        """Close all peer connections. Pending requests fail."""
        with self._lock:
            self._connections_closed = True
            peers = list(self._peers.values())
        for peer in peers:
            peer.close()

    def close(self) -> None:
        self._stop.set()
        self.close_connections()
        if self._thread.ident is not None:
            self._thread.join()
        self._pool.shutdown(cancel_futures=True)

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> Mapping[str, PeerNode]:
        """Live members, including this node and nodes announced but not contacted so far."""
        with self._lock:
            if self._pending.any_pending:
                return self._pending.alive_or_pending(self._clock(), self._members.alive or (self.this_node,))
            changes = self._members.changes
            if self._cached_alive[0] != changes:
                self._cached_alive = changes, {node.id: node for node in self._members.alive or (self.this_node,)}
            return self._cached_alive[1]

    @property
    def node_ids(self) -> list[str]:
        """Ids of the job's nodes, live or not."""
        with self._lock:
            member_list = self._members.member_list
            return sorted({*self.alive, *((node.id for node in member_list.nodes) if member_list is not None else ())})

    @property
    def member_list(self) -> MemberList | None:
        with self._lock:
            return self._members.member_list

    @property
    def standby(self) -> tuple[NodeId, ...]:
        """Nodes of the job without a rank and without a vote."""
        with self._lock:
            return self._members.standby

    def state_of(self, node: str) -> str:
        """Return the node's state, or "stranger" if it is not in the member list."""
        with self._lock:
            found = self._members.state_of(NodeId(node))
            return found.value if found is not None else "stranger"

    def generation_of(self, node: str) -> int:
        """Return a number that rises when the node restarts, because it may have lost its shards."""
        with self._lock:
            return self._members.generation_of(NodeId(node))

    @property
    def generations(self) -> Mapping[str, int]:
        """The current generation of every node of the job."""
        with self._lock:
            member_list = self._members.member_list
            return (
                {node.id: self._members.generation_of(node.id) for node in member_list.nodes}
                if member_list is not None
                else {}
            )

    @property
    def is_converged(self) -> bool:
        """Whether membership is known: every node has answered, or the join timeout has passed."""
        with self._lock:
            return self._pending.all_resolved(self._clock(), self._members.alive)

    def is_dead(self, node: str) -> bool:
        """Return whether the node is dead, and not only announced and not contacted so far."""
        with self._lock:
            return self.state_of(node) == "dead" and not self._pending.is_pending(self._clock(), node)

    def explain_quorum(self) -> str:
        with self._lock:
            return self._members.explain_quorum()

    @property
    def has_quorum(self) -> bool:
        with self._lock:
            return self._members.has_quorum

    def check_quorum(self) -> None:
        """Raise :class:`NoQuorumError` if this partition side must not start a new incarnation."""
        with self._lock:
            if not self._members.has_quorum:
                raise NoQuorumError(
                    f"job {self._credentials.job} cannot start a new incarnation: this node "
                    f"{self._members.explain_quorum()}. If the other nodes are permanently lost, remove them from the "
                    "list of nodes"
                )

    def wait_quorum(self, timeout_s: float) -> bool:
        """Wait until this node has a quorum; return ``False`` at the timeout."""
        with self._members_changed:
            return self._members_changed.wait_for(
                lambda: self._members.has_quorum or self._stop.is_set(), deadlines.remaining_s(timeout_s)
            )

    def client_for(self, node: str) -> PeerClient:
        """Return the client of a node's agent; a new address replaces it."""
        with self._lock:
            address = self._address(node)
            known = self._peers.get(node)
            if known is None or known.address != address:
                if known is not None:
                    known.close()
                greet = partial(self._invite, node)
                known = self._peers[node] = PeerClient(self._transport, address, self._credentials, greet=greet)
                if self._connections_closed:
                    known.close()
            return known

    def _invite(self, node: str, line: PeerConnection, until: float | None) -> None:
        """Make a standby node join the job; it may have no rank that configures its agent."""
        members = self.member_list
        if members is not None and node in members.standby:
            line.call("join_job", JoinJob(members, self._replication), type(None), timeout_s=_PING_TOTAL_S, until=until)

    def _address(self, node: str) -> str:
        found = self._members.node(NodeId(node))
        return found.address if found is not None else ""

    @property
    def fence(self) -> tuple[int, str]:
        with self._lock:
            return self._members.fence

    # -- member lists and pings ---------------------------------------------------------------------------------------

    def set_discovery(self, discovery: Discovery) -> None:
        """Query ``discovery`` for the job's nodes, now and every ``_DISCOVER_S`` seconds."""
        with self._lock:
            self._discovery, self._discovered_at = discovery, float("-inf")
        self._discover()

    def set_member_list(self, member_list: MemberList) -> None:
        """Apply a member list if it is newer, and ping its new nodes."""
        with self._lock:
            news = self._members.set_member_list(self._clock(), member_list)
            if news:
                self._pending.announce(self._clock(), member_list, self._members.alive)
        if news:
            log.info(
                "job %s: member list %d has %d nodes",
                self._credentials.job,
                member_list.version,
                len(member_list.nodes),
            )
            self._ping_new_members()
            self._notify_changed()

    def _ping_new_members(self) -> None:
        with self._lock:
            pings = self._members.ping_new_members(self._clock())
            in_flight = [ping.node.id for ping in pings if ping.node.id in self._pings_in_flight]
            self._members.unsent(in_flight)
            self._ping_again.update(in_flight)
        self._send([ping for ping in pings if ping.node.id not in in_flight])

    def handle_ping(self, sender: NodeId, ping: PingMessage) -> PingMessage:
        before = self._members.changes
        self._publish_fence()
        with self._lock:
            self._members.receive_gossip(self._clock(), sender, ping.gossip)
            answer = self._members.gossip_for(sender)
        self._apply_ping(ping)
        if self._members.changes != before:
            self._notify_changed()
        return self._ping_with(answer)

    def _ping_with(self, gossip: GossipMessage) -> PingMessage:
        return build_ping(gossip, self._replicas, self._credentials.job)

    def _publish_fence(self) -> None:
        owner = self._replicas.jobs.versions(self._credentials.job).owner
        with self._lock:
            self._members.advance_fence(owner)

    def _apply_ping(self, ping: PingMessage) -> None:
        apply_ping(self._replicas, self._credentials.job, self.fence, ping)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            self.run_period()
            self._stop.wait(self._members.settings.heartbeat_s)

    def run_period(self) -> None:
        """Run one period: discovery if it is due, pings, and change notifications."""
        try:
            if self._clock() - self._discovered_at >= _DISCOVER_S:
                self._discover()
            self._publish_fence()
            before = self._members.changes
            with self._lock:
                pings = self._members.tick(self._clock())
                indirect = self._members.indirect_pings()
            self._send(pings)
            self._ping_via_helpers(indirect)
            waited, self._was_resolved = (
                self._was_resolved,
                self._pending.all_resolved(self._clock(), self._members.alive),
            )
            if self._members.changes != before or waited != self._was_resolved:
                self._notify_changed()
            wanted = self._members.newer_list_holder
            if wanted is not None:
                self._pool.submit(self._fetch_member_list, wanted)
        except Exception:  # the next period may succeed
            log.exception("job %s: watching the other nodes failed", self._credentials.job)

    def _discover(self) -> None:
        with self._lock:
            discovery, self._discovered_at = self._discovery, self._clock()
        if discovery is None:
            return
        try:
            self.set_member_list(discovery.member_list())
        except PeerStoreError as error:
            log.warning("job %s: cannot discover its nodes: %s", self._credentials.job, error)

    def _send(self, pings: Iterable[PingToSend]) -> None:
        """Queue the pings, at most one per node.

        A ping's timeout starts when a thread sends it, not when it is queued.
        """
        with self._lock:
            due = [ping for ping in pings if ping.node.id not in self._pings_in_flight]
            self._pings_in_flight |= {ping.node.id for ping in due}
            self._members.pings_queued([ping.node.id for ping in due])
        with contextlib.suppress(RuntimeError):  # the pool was closed meanwhile
            for ping in due:
                self._pool.submit(self._ping, ping)

    def _ping(self, ping: PingToSend) -> None:
        node, before = ping.node.id, self._members.changes
        try:
            with self._lock:
                self._members.ping_sent(self._clock(), node)
            answer = self._call_ping(node, ping.gossip)
        except (PeerStoreError, OSError) as error:
            log.debug("job %s: %s did not answer: %s", self._credentials.job, node, error)
            with self._lock:
                self._members.ping_failed(self._clock(), node)
        else:
            self._ping_acked(node, answer)
        finally:
            with self._lock:
                self._pings_in_flight.discard(node)
                is_met = node not in self._ping_again
                self._ping_again.discard(node)
        if not is_met:
            self._ping_new_members()
        if self._members.changes != before:
            self._notify_changed()

    def _call_ping(self, node: NodeId, gossip: GossipMessage) -> PingMessage:
        timeout_s = self._members.settings.ping_timeout_s
        within_s = max(_PING_TOTAL_S, timeout_s)
        answer: PingMessage = self.client_for(node).call(
            "ping", self._ping_with(gossip), PingMessage, timeout_s=timeout_s, within_s=within_s
        )
        return answer

    def _ping_acked(self, node: NodeId, answer: PingMessage) -> None:
        with self._lock:
            self._members.ping_acked(self._clock(), node)
            self._members.receive_gossip(self._clock(), node, answer.gossip)
        self._apply_ping(answer)

    def _ping_via_helpers(self, indirect: Iterable[IndirectPingToSend]) -> None:
        with contextlib.suppress(RuntimeError):
            for ping in indirect:
                self._pool.submit(self._ping_via_helper, ping)

    def _ping_via_helper(self, ping: IndirectPingToSend) -> None:
        helper, node = ping.helper.id, ping.node
        within_s = _PING_TOTAL_S + self._members.settings.ping_timeout_s
        try:
            reached = self.client_for(helper).call(
                "indirect_ping", IndirectPing(node), bool, timeout_s=within_s, within_s=within_s
            )
        except (
            PeerStoreError,
            OSError,
        ) as error:  # the helper is unreachable or of another release, which proves nothing
            log.debug("job %s: %s did not say whether %s lives: %s", self._credentials.job, helper, node, error)
            return
        if reached:
            with self._lock:
                self._members.indirect_ack(self._clock(), node)

    def can_reach(self, node: NodeId) -> bool:
        """Return whether a node that did not answer another node answers this one."""
        with self._lock:
            if node == self.this_node.id or self.state_of(node) in ("stranger", "dead"):
                return node == self.this_node.id
            gossip = self._members.gossip_for(node)
        before = self._members.changes
        try:
            self._ping_acked(node, self._call_ping(node, gossip))
        except (PeerStoreError, OSError):
            return False
        if self._members.changes != before:
            self._notify_changed()
        return True

    def _fetch_member_list(self, node: NodeId) -> None:
        try:
            self.set_member_list(self.client_for(node).call("member_list", GetMemberList(), MemberList, timeout_s=5.0))
        except (PeerStoreError, OSError) as error:
            log.debug("job %s: %s did not tell its member list: %s", self._credentials.job, node, error)

    def _notify_changed(self) -> None:
        with self._members_changed:
            self._members_changed.notify_all()
        self._close_dead_connections()
        self._changed()

    def _close_dead_connections(self) -> None:
        """Close the connections to nodes that died, so that no request waits for them."""
        with self._lock:
            before, self._previously_alive = self._previously_alive, {node.id for node in self._members.alive}
            gone = [self._peers.pop(node) for node in before - self._previously_alive if node in self._peers]
        for peer in gone:
            peer.close()


def build_ping(gossip: GossipMessage, copies: ReplicaStore, job: str) -> PingMessage:
    """Return a ping with the gossip and the store's knowledge of the job."""
    known = copies.jobs.versions(job)
    decided = known.decision
    return PingMessage(
        gossip,
        decided.replicated,
        copies.jobs.clients.has_clients(job),
        known.resume_point,
        tuple(known.retention.values()),
        decided.committed,
        decided.aborted,
    )


def apply_ping(copies: ReplicaStore, job: str, fence: tuple[int, str], ping: PingMessage) -> None:
    """Apply another node's knowledge of the job to this node's store."""
    if ping.resume_point is not None:
        copies.jobs.incarnations.learn_resume_point(job, ping.resume_point)
    if fence > copies.jobs.versions(job).owner:
        copies.jobs.incarnations.fence(job, *fence)
    copies.apply_decision(job, CommitDecision(ping.committed, ping.replicated, ping.aborted))
    copies.apply_retention(job, ping.retention)
    if ping.has_clients:
        copies.jobs.clients.touch(job)


class PendingMembers:
    """Announced nodes that are neither known to live nor taken for dead, until a timeout.

    Without them the first version would have no replicas, because this node has not contacted its partners.
    """

    def __init__(self, settings: MembershipSettings) -> None:
        self._longest_s = settings.dead_after_s + settings.suspect_after * (
            settings.heartbeat_s + settings.ping_timeout_s
        )
        self._nodes: dict[str, PeerNode] = {}
        self._until = float("-inf")

    def announce(self, now: float, member_list: MemberList, living: Iterable[PeerNode]) -> None:
        """Start the timeout for a new member list; nodes in ``living`` are not pending."""
        seen = {node.id for node in living}
        self._nodes = {node.id: node for node in member_list.nodes if node.id not in seen}
        self._until = now + self._longest_s

    def alive_or_pending(self, now: float, living: Collection[PeerNode]) -> dict[str, PeerNode]:
        """Return the live and the pending nodes; a node that has been contacted is no longer pending."""
        found: dict[str, PeerNode] = {node.id: node for node in living}
        if self._nodes:
            self._nodes = {name: node for name, node in self._nodes.items() if name not in found}
            if now < self._until:
                found |= {str(name): node for name, node in self._nodes.items()}
            else:
                self._nodes = {}
        return found

    @property
    def any_pending(self) -> bool:
        """Whether any announced node may be pending."""
        return bool(self._nodes)

    def all_resolved(self, now: float, living: Iterable[PeerNode]) -> bool:
        """Return whether every announced node has been contacted, or the timeout has passed."""
        return not self._nodes or now >= self._until or not self._nodes.keys() - {node.id for node in living}

    def is_pending(self, now: float, node: str) -> bool:
        """Return whether the node was announced and has not been contacted, within the timeout."""
        return node in self._nodes and now < self._until
