"""SWIM with a clock, threads and connections: heartbeats, gossip, discovery, and the members alive right now."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from peerstore import deadlines
from peerstore.commit_protocol import CommitDecision
from peerstore.errors import NoQuorumError, PeerStoreError
from peerstore.membership.discovery import Discovery
from peerstore.membership.swim import GossipMessage, IndirectPingToSend, MembershipSettings, PingToSend, SwimMembership
from peerstore.membership.topology import MemberList, NodeId, PeerNode
from peerstore.peers.peer_client import PeerClient, PeerCredentials
from peerstore.peers.peer_messages import GetMemberList, IndirectPing, PingMessage
from peerstore.store.received_replicas import ReplicaStore
from peerstore.transport.base import Transport

log = logging.getLogger(__name__)

_DISCOVER_S = 10.0
_PINGERS = 24
_CONNECT_S = 5.0
"""How long one ping may take, a connection that is made for it included; its answer has less."""
SHUTDOWN_GRACE_S = 2.0
"""How long what is on its way has to come to its end, once this node's agent ends."""


class HeartbeatLoop:
    """Membership of one job with a clock, connections and threads. Any thread may call."""

    def __init__(
        self,
        me: PeerNode,
        credentials: PeerCredentials,
        transport: Transport,
        copies: ReplicaStore,
        *,
        settings: MembershipSettings | None = None,
        changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.me = me
        self._pass = credentials
        self._transport = transport
        self._copies = copies
        self._changed = changed
        self._clock = clock
        self._lock = threading.RLock()
        self._seen = threading.Condition(self._lock)
        self._members = SwimMembership(me, time.time_ns() // 1000, settings or MembershipSettings(), seed=hash(me.id))
        self._discovery: Discovery | None = None
        self._discovered_at = float("-inf")
        self._newcomers = PendingMembers(self._members.settings)
        self._peers: dict[str, PeerClient] = {}
        self._lived: set[str] = set()
        self._flying: set[str] = set()
        """Nodes that a ping is on its way to."""
        self._unmet: set[str] = set()
        """Those of them that were to be met meanwhile: what they answer now may be of the roster before."""
        self._living: tuple[int, Mapping[str, PeerNode]] = (-1, {})
        self._waited = False
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(_PINGERS, thread_name_prefix="peerstore-ping")
        self._hung_up = False
        self._thread = threading.Thread(target=self._run, name="peerstore-tend", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hang_up(self) -> None:
        """Nobody is called any more, and who waits for an answer has none."""
        with self._lock:
            self._hung_up = True
            peers = list(self._peers.values())
        for peer in peers:
            peer.close()

    def close(self) -> None:
        self._stop.set()
        self.hang_up()
        if self._thread.ident is not None:
            self._thread.join()
        self._pool.shutdown(cancel_futures=True)

    # -- what is known ------------------------------------------------------------------------------------------------

    @property
    def living(self) -> Mapping[str, PeerNode]:
        """The nodes that take part, this one included, and those that were just announced and not met yet."""
        with self._lock:
            if self._newcomers.awaited:
                return self._newcomers.among(self._clock(), self._members.living or (self.me,))
            changes = self._members.changes
            if self._living[0] != changes:
                self._living = changes, {node.id: node for node in self._members.living or (self.me,)}
            return self._living[1]

    @property
    def listed(self) -> list[str]:
        """The job's nodes, whether they live or not."""
        with self._lock:
            roster = self._members.roster
            return sorted({*self.living, *((node.id for node in roster.nodes) if roster is not None else ())})

    @property
    def roster(self) -> MemberList | None:
        with self._lock:
            return self._members.roster

    def standing(self, node: str) -> str:
        with self._lock:
            found = self._members.standing(NodeId(node))
            return found.value if found is not None else "stranger"

    def life(self, node: str) -> int:
        """What changes when a node starts again: it may have lost what it held."""
        with self._lock:
            return self._members.life(NodeId(node))

    @property
    def lives(self) -> Mapping[str, int]:
        """The same of all nodes of the job, as of now."""
        with self._lock:
            roster = self._members.roster
            return {node.id: self._members.life(node.id) for node in roster.nodes} if roster is not None else {}

    @property
    def knows(self) -> bool:
        """Whether it has heard of all others, or waited for them long enough, to say who lives and who does not."""
        with self._lock:
            return self._newcomers.met(self._clock(), self._members.living)

    def gone(self, node: str) -> bool:
        """Whether a node is dead, and not only one that was not met yet."""
        with self._lock:
            return self.standing(node) == "dead" and not self._newcomers.waits_for(self._clock(), node)

    def explain(self) -> str:
        with self._lock:
            return self._members.explain()

    @property
    def quorum(self) -> bool:
        with self._lock:
            return self._members.quorum

    def check_quorum(self) -> None:
        """Raise when this side of a partition must not let a new incarnation begin."""
        with self._lock:
            if not self._members.quorum:
                raise NoQuorumError(
                    f"job {self._pass.job} cannot go on from here: this node {self._members.explain()}. When the "
                    "others are gone for good, say so where the list of nodes comes from"
                )

    def wait_quorum(self, timeout_s: float) -> bool:
        with self._seen:
            return self._seen.wait_for(
                lambda: self._members.quorum or self._stop.is_set(), deadlines.remaining_s(timeout_s)
            )

    def peer(self, node: str) -> PeerClient:
        """A node's agent, to be called."""
        with self._lock:
            address = self._address(node)
            known = self._peers.get(node)
            if known is None or known.address != address:
                if known is not None:
                    known.close()
                known = self._peers[node] = PeerClient(self._transport, address, self._pass)
                if self._hung_up:
                    known.close()
            return known

    def _address(self, node: str) -> str:
        found = self._members.node(NodeId(node))
        return found.address if found is not None else ""

    @property
    def fence(self) -> tuple[int, str]:
        with self._lock:
            return self._members.fence

    # -- what comes in ------------------------------------------------------------------------------------------------

    def follow(self, discovery: Discovery) -> None:
        """Ask ``discovery`` who belongs to the job, now and from time to time."""
        with self._lock:
            self._discovery, self._discovered_at = discovery, float("-inf")
        self._discover()

    def set_roster(self, roster: MemberList) -> None:
        with self._lock:
            news = self._members.set_roster(self._clock(), roster)
            if news:
                self._newcomers.announce(self._clock(), roster, self._members.living)
        if news:
            log.info("job %s: roster %d has %d nodes", self._pass.job, roster.version, len(roster.nodes))
            self._meet()
            self._noticed()

    def _meet(self) -> None:
        with self._lock:
            pings = self._members.meet(self._clock())
            flying = [ping.node.id for ping in pings if ping.node.id in self._flying]
            self._members.unsent(flying)
            self._unmet.update(flying)
        self._send([ping for ping in pings if ping.node.id not in flying])

    def pinged(self, sender: NodeId, ping: PingMessage) -> PingMessage:
        before = self._members.changes
        self._share()
        with self._lock:
            self._members.heard(self._clock(), sender, ping.gossip)
            answer = self._members.gossip_for(sender)
        self._take_over(ping)
        if self._members.changes != before:
            self._noticed()
        return self._ping_with(answer)

    def _ping_with(self, gossip: GossipMessage) -> PingMessage:
        return build_ping(gossip, self._copies, self._pass.job)

    def _share(self) -> None:
        owner = self._copies.owner_of(self._pass.job)
        with self._lock:
            self._members.advance_fence(owner)

    def _take_over(self, ping: PingMessage) -> None:
        apply_ping(self._copies, self._pass.job, self.fence, ping)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            self.beat()
            self._stop.wait(self._members.settings.heartbeat_s)

    def beat(self) -> None:
        """One period: discover when it is time, ping, and see what came of it."""
        try:
            if self._clock() - self._discovered_at >= _DISCOVER_S:
                self._discover()
            self._share()
            before = self._members.changes
            with self._lock:
                pings = self._members.tick(self._clock())
                indirect = self._members.indirect()
            self._send(pings)
            self._ask_others(indirect)
            waited, self._waited = self._waited, self._newcomers.met(self._clock(), self._members.living)
            if self._members.changes != before or waited != self._waited:
                self._noticed()
            wanted = self._members.wanted
            if wanted is not None:
                self._pool.submit(self._fetch_roster, wanted)
        except Exception:  # the next period may be better
            log.exception("job %s: watching the other nodes failed", self._pass.job)

    def _discover(self) -> None:
        with self._lock:
            discovery, self._discovered_at = self._discovery, self._clock()
        if discovery is None:
            return
        try:
            self.set_roster(discovery.roster())
        except PeerStoreError as error:
            log.warning("job %s: who belongs to it could not be found out: %s", self._pass.job, error)

    def _send(self, pings: Iterable[PingToSend]) -> None:
        """Each counts from when its turn comes: one that waits behind others is not late. One at a time per node."""
        with self._lock:
            due = [ping for ping in pings if ping.node.id not in self._flying]
            self._flying |= {ping.node.id for ping in due}
            self._members.queued([ping.node.id for ping in due])
        with contextlib.suppress(RuntimeError):  # it is closed meanwhile, and nobody waits for an answer any more
            for ping in due:
                self._pool.submit(self._ping, ping)

    def _ping(self, ping: PingToSend) -> None:
        node, before = ping.node.id, self._members.changes
        try:
            with self._lock:
                self._members.sending(self._clock(), node)
            answer = self._asked(node, ping.gossip)
        except (PeerStoreError, OSError) as error:
            log.debug("job %s: %s did not answer: %s", self._pass.job, node, error)
            with self._lock:
                self._members.failed(self._clock(), node)
        else:
            self._came(node, answer)
        finally:
            with self._lock:
                self._flying.discard(node)
                is_met = node not in self._unmet
                self._unmet.discard(node)
        if not is_met:
            self._meet()
        if self._members.changes != before:
            self._noticed()

    def _asked(self, node: NodeId, gossip: GossipMessage) -> PingMessage:
        timeout_s = self._members.settings.ping_timeout_s
        within_s = max(_CONNECT_S, timeout_s)
        answer: PingMessage = self.peer(node).call(
            "ping", self._ping_with(gossip), PingMessage, timeout_s=timeout_s, within_s=within_s
        )
        return answer

    def _came(self, node: NodeId, answer: PingMessage) -> None:
        with self._lock:
            self._members.answered(self._clock(), node)
            self._members.heard(self._clock(), node, answer.gossip)
        self._take_over(answer)

    def _ask_others(self, asked: Iterable[IndirectPingToSend]) -> None:
        with contextlib.suppress(RuntimeError):
            for one in asked:
                self._pool.submit(self._ask_another, one)

    def _ask_another(self, asked: IndirectPingToSend) -> None:
        helper, node = asked.helper.id, asked.node
        within_s = _CONNECT_S + self._members.settings.ping_timeout_s
        try:
            reached = self.peer(helper).call(
                "ping_for", IndirectPing(node), bool, timeout_s=within_s, within_s=within_s
            )
        except (PeerStoreError, OSError) as error:  # of another release, or gone: nothing is known by it
            log.debug("job %s: %s did not say whether %s lives: %s", self._pass.job, helper, node, error)
            return
        if reached:
            with self._lock:
                self._members.vouched(self._clock(), node)

    def reaches(self, node: NodeId) -> bool:
        """Whether a node that did not answer another one answers this one."""
        with self._lock:
            if node == self.me.id or self.standing(node) in ("stranger", "dead"):
                return node == self.me.id
            gossip = self._members.gossip_for(node)
        before = self._members.changes
        try:
            self._came(node, self._asked(node, gossip))
        except (PeerStoreError, OSError):
            return False
        if self._members.changes != before:
            self._noticed()
        return True

    def _fetch_roster(self, node: NodeId) -> None:
        try:
            self.set_roster(self.peer(node).call("roster", GetMemberList(), MemberList, timeout_s=5.0))
        except (PeerStoreError, OSError) as error:
            log.debug("job %s: %s did not tell its roster: %s", self._pass.job, node, error)

    def _noticed(self) -> None:
        with self._seen:
            self._seen.notify_all()
        self._hang_up()
        self._changed()

    def _hang_up(self) -> None:
        """Nobody waits any longer for the answer of a node that is dead by now."""
        with self._lock:
            before, self._lived = self._lived, {node.id for node in self._members.living}
            gone = [self._peers.pop(node) for node in before - self._lived if node in self._peers]
        for peer in gone:
            peer.close()


def build_ping(gossip: GossipMessage, copies: ReplicaStore, job: str) -> PingMessage:
    """Gossip, and what this node's store knows of the job."""
    known = copies.decided(job)
    return PingMessage(
        gossip, known.settled, copies.active(job), copies.base(job), copies.kept(job), known.whole, known.torn
    )


def apply_ping(copies: ReplicaStore, job: str, fence: tuple[int, str], ping: PingMessage) -> None:
    """What others have learned, for this node's store."""
    if ping.base is not None:
        copies.learn(job, ping.base)
    if fence > copies.owner_of(job):
        copies.fence(job, *fence)
    copies.decide(job, CommitDecision(ping.whole, ping.settled, ping.torn))
    copies.keep(job, ping.kept)
    if ping.active:
        copies.touch(job)


class PendingMembers:
    """Who was announced and is neither known to live nor, for as long as it takes to find out, taken for dead.

    Without them the first version would be protected by nobody, before a node has met its partners.
    """

    def __init__(self, settings: MembershipSettings) -> None:
        self._longest_s = settings.dead_after_s + settings.suspect_after * (
            settings.heartbeat_s + settings.ping_timeout_s
        )
        self._nodes: dict[str, PeerNode] = {}
        self._until = float("-inf")

    def announce(self, now: float, roster: MemberList, living: Iterable[PeerNode]) -> None:
        """A new roster is in use; some of its nodes are known to live already."""
        seen = {node.id for node in living}
        self._nodes = {node.id: node for node in roster.nodes if node.id not in seen}
        self._until = now + self._longest_s

    def among(self, now: float, living: Collection[PeerNode]) -> dict[str, PeerNode]:
        """The living, and the newcomers. Those that are met are none any more: they may die like any other."""
        found: dict[str, PeerNode] = {node.id: node for node in living}
        if self._nodes:
            self._nodes = {name: node for name, node in self._nodes.items() if name not in found}
            if now < self._until:
                found |= {str(name): node for name, node in self._nodes.items()}
            else:
                self._nodes = {}
        return found

    @property
    def awaited(self) -> bool:
        """Whether anybody may be missing among the living."""
        return bool(self._nodes)

    def met(self, now: float, living: Iterable[PeerNode]) -> bool:
        """Whether all were met, or waited for long enough, to say who lives and who does not."""
        return not self._nodes or now >= self._until or not self._nodes.keys() - {node.id for node in living}

    def waits_for(self, now: float, node: str) -> bool:
        """Whether a node that does not live by what is known may just not have been met yet."""
        return node in self._nodes and now < self._until
