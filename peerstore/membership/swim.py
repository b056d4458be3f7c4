"""SWIM failure detection and gossip: ping, indirect ping, suspect, refute, dead, quorum. Pure.

::

    unseen ──reported by itself or another node──> ALIVE ──3 unanswered pings──> SUSPECT ──5 s──> DEAD
                                                     ^     (nor reached by two others)  │            │
                                                     └──── a higher generation of its own ───────────┘

In every period each node pings a few neighbors on a ring of the live nodes and one random node of the whole member
list. So a node's traffic does not grow with the job, and a partition heals without intervention. Changes are gossiped
with the pings. Only a node itself can refute a suspicion: it learns of it and raises its generation. While a node sends
messages to this one, another node's report of its death only makes it a suspect.

The members of the job are not decided here: the member list comes from discovery. A listed node counts for the quorum
even if it was never seen; other nodes never count.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import msgspec

from peerstore.errors import RequestError
from peerstore.membership.topology import MemberList, MemberListVersion, NodeId, PeerNode
from peerstore.shard_records import NonNegativeInt

FencingToken = tuple[NonNegativeInt, str]
"""Epoch and incarnation of a job. Everything below the highest known token is fenced."""


class MemberState(str, Enum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    """A node that did not answer; until dead, it counts as a holder of replicas, but not for a quorum."""
    DEAD = "dead"


_SEVERITY = {MemberState.ALIVE: 0, MemberState.SUSPECT: 1, MemberState.DEAD: 2}


class MemberUpdate(msgspec.Struct, frozen=True, array_like=True):
    """One node's state, as gossiped."""

    node: PeerNode
    generation: NonNegativeInt
    """Number that only the node itself raises, at each restart and refutation."""
    state: MemberState

    def supersedes(self, other: MemberUpdate) -> bool:
        """Return whether this update wins: higher generation, then worse state. This order is total."""
        if self.generation != other.generation:
            return self.generation > other.generation
        if self.state is not other.state:
            return _SEVERITY[self.state] > _SEVERITY[other.state]
        return self.node > other.node


class GossipMessage(msgspec.Struct, frozen=True, array_like=True):
    """Content of a ping and of its response."""

    updates: tuple[MemberUpdate, ...]
    list_version: MemberListVersion | None
    """The sender's list version. Lists are requested separately: see ``SwimMembership.newer_list_holder``."""
    fence: FencingToken


class BroadcastQueue:
    """The order in which updates are gossiped: recent changes first, then all nodes in turn.

    A change is sent or received O(log n) times, which reaches nearly all nodes. The turn through all nodes reaches the
    rest, and nodes that were disconnected.
    """

    def __init__(self, subjects: Sequence[NodeId], *, begin: int = 0) -> None:
        self._subjects = tuple(subjects)
        self._position = begin
        self._by_times_sent: list[dict[NodeId, None]] = [{} for _ in range(3 * len(self._subjects).bit_length())]
        """Changed subjects by the number of times they were sent, the newest last."""
        self._times_sent: dict[NodeId, int] = {}

    def add(self, subject: NodeId) -> None:
        """Record a change of ``subject``."""
        self._move(subject, 0)

    def mark_sent(self, subject: NodeId) -> None:
        """Record that another node received, or already knew, the latest update of ``subject``."""
        if subject in self._times_sent:
            self._move(subject, self._times_sent[subject] + 1)

    def pick(self, count: int, *, leave_out: Collection[NodeId]) -> list[NodeId]:
        """Return up to ``count`` subjects to send, and count them as sent."""
        fresh = itertools.chain.from_iterable(map(reversed, self._by_times_sent))
        picked = list(itertools.islice((subject for subject in fresh if subject not in leave_out), count))
        for subject in picked:
            self.mark_sent(subject)
        seen = {*picked, *leave_out}
        rest = (subject for subject in self._in_turn() if subject not in seen)
        return picked + list(itertools.islice(rest, count - len(picked)))

    def _move(self, subject: NodeId, times: int) -> None:
        if subject in self._times_sent:
            del self._by_times_sent[self._times_sent.pop(subject)][subject]
        if times < len(self._by_times_sent):
            self._by_times_sent[times][subject] = None
            self._times_sent[subject] = times

    def _in_turn(self) -> Iterator[NodeId]:
        """Yield every subject at most once, starting after the last position."""
        for _ in range(len(self._subjects)):
            self._position = (self._position + 1) % len(self._subjects)
            yield self._subjects[self._position]


_MAX_NAMES = 8


@dataclass(frozen=True)
class MembershipSettings:
    """Speed of failure detection, and its traffic."""

    heartbeat_s: float = 1.0
    """Seconds between two calls of :meth:`SwimMembership.tick`."""
    ping_timeout_s: float = 1.0
    suspect_after: int = 3
    """Consecutive unanswered pings after which a node is suspected."""
    dead_after_s: float = 5.0
    """Seconds for which a suspected node can refute, in a job of up to 32 nodes.

    Larger jobs have more time, because gossip takes longer: twice as much for 1,024 nodes.
    """
    ring_neighbours: int = 3
    """Number of living nodes that each node pings, and is pinged by."""
    gossip_max: int = 48
    """Largest number of updates in one message."""

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "ping_timeout_s", "dead_after_s"):
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and seconds > 0):
                raise RequestError(f"{name}={seconds}: write a number of seconds above 0")
        for name, least in (("suspect_after", 1), ("ring_neighbours", 1), ("gossip_max", 4)):
            if getattr(self, name) < least:
                raise RequestError(f"{name}={getattr(self, name)}: write a number of at least {least}")


@dataclass(slots=True)
class MemberRecord:
    configured: PeerNode
    """The node as the member list describes it."""
    miss_limit: int
    update: MemberUpdate | None = None
    state_since: float = 0.0
    heard_at: float = -math.inf
    """Time of the node's last direct message."""
    misses: int = 0
    suspected_here: bool = False
    """Whether this node suspects it and has had no response since."""

    @property
    def state(self) -> MemberState:
        return self.update.state if self.update else MemberState.DEAD

    @property
    def node(self) -> PeerNode:
        """The node as it describes itself, completed by the member list."""
        if self.update is None:
            return self.configured
        reported, listed = self.update.node, self.configured
        return PeerNode(
            reported.id,
            reported.address or listed.address,
            reported.labels or listed.labels,
            reported.memory_bytes or listed.memory_bytes,
        )


def ring_order(me: NodeId, others: Iterable[NodeId]) -> tuple[NodeId, ...]:
    """Return the others in the order of a ring that is equal on all nodes, beginning after ``me``."""

    def place(name: NodeId) -> tuple[bytes, str]:
        return hashlib.blake2b(name.encode(), digest_size=8).digest(), name

    mine = place(me)
    return tuple(sorted(others, key=lambda name: (place(name) < mine, place(name))))


def describe_members(
    me: NodeId | None,
    others: Mapping[NodeId, MemberRecord],
    now: float,
    objection: str,
    standby: Collection[NodeId] = (),
) -> str:
    """Return a text of the seen and missing nodes; ``me`` is ``None`` if this node is not in the list."""
    seen, missing = ([me] if me is not None else []), []
    for name, member in sorted(others.items()):
        if member.state is MemberState.ALIVE:
            seen.append(name)
        elif member.update is None:
            missing.append(f"{name} (never seen)")
        else:
            what = "suspected" if member.state is MemberState.SUSPECT else "dead"
            missing.append(f"{name} ({what} for {max(0.0, now - member.state_since):.0f} s)")
    total = len(others) + (me is not None)
    names = [f"{name} (standby)" if name in standby else name for name in sorted(seen)]
    text = f"sees {len(seen)} of {total} nodes: {_join_names(names) or 'none'}"
    if missing:
        text += f"; not {_join_names(missing)}"
    return f"{text}; {objection}" if objection else text


def _join_names(names: Iterable[str]) -> str:
    all_names = list(names)
    more = len(all_names) - _MAX_NAMES
    return ", ".join(all_names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


_CLOCK_JUMP_PERIODS = 5
_MAX_PROBES = 12
_PROBE_PERIODS = 16
_MAX_MISS_FACTOR = 16
_HELPERS = 2


class PingToSend(NamedTuple):
    """A ping to send. The caller then reports ``ping_acked`` and ``receive_gossip``, or ``ping_failed``."""

    node: PeerNode
    gossip: GossipMessage


class IndirectPingToSend(NamedTuple):
    """A request that ``helper`` ping ``node``, which did not answer.

    The caller reports ``indirect_ack`` on success.
    """

    helper: PeerNode
    node: NodeId


class _Sent(NamedTuple):
    at: float
    believed: bool
    """Whether the node was believed alive, so that the result tests that belief."""


class _Newer(NamedTuple):
    mark: MemberListVersion
    reporter: NodeId
    at: float


class SwimMembership:
    """One job's nodes as seen from ``me``.

    The caller calls :meth:`tick` every ``heartbeat_s`` seconds and sends the returned pings. The receiver of a ping
    passes it to :meth:`receive_gossip` and responds with :meth:`gossip_for` the sender. The response is passed to
    :meth:`ping_acked` and :meth:`receive_gossip`. ``number`` must be higher at each restart of the node (its start time
    in microseconds).
    """

    def __init__(self, me: PeerNode, number: int, settings: MembershipSettings | None = None, *, seed: int = 0) -> None:
        self.settings = settings or MembershipSettings()
        self.changes = 0
        """Counter of changes of states, generations, the member list and the fence."""
        self.fence: FencingToken = (0, "")
        self._me = MemberUpdate(me, number, MemberState.ALIVE)
        self._random = random.Random(f"{me.id} {number} {seed}")
        self._member_list: MemberList | None = None
        self._mark: MemberListVersion | None = None
        self._newer: _Newer | None = None
        self._members: dict[NodeId, MemberRecord] = {}
        self._ring: tuple[NodeId, ...] = ()
        self._broadcasts = BroadcastQueue(())
        self._sent: dict[NodeId, _Sent] = {}
        self._missing: set[NodeId] = set()
        """Nodes that missed a ping since the last indirect pings."""
        self._suspects: set[NodeId] = set()
        self._recent_probes: dict[NodeId, tuple[float, bool]] = {}
        """Time and success of the last pings to nodes that were believed alive."""
        self._now: float | None = None
        self._settled_at = -math.inf
        self._cached_alive: tuple[int, tuple[PeerNode, ...]] | None = None
        self._cached_quorum: tuple[int, bool] | None = None
        """The value of ``changes`` at the last quorum count, and its result."""

    # -- events -------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> tuple[PingToSend, ...]:
        """Return the pings of this period."""
        now = self._advance_clock(now)
        for name in [name for name, sent in self._sent.items() if now - sent.at >= self.settings.ping_timeout_s]:
            self._record_miss(now, name)
        for name in [name for name in self._suspects if now - self._members[name].state_since >= self._dead_after_s]:
            update = self._members[name].update
            if update is not None:
                self._apply_update(now, MemberUpdate(update.node, update.generation, MemberState.DEAD))
        watched = self._ring_targets()
        pings = []
        for name in [*watched, *self._random_others(watched)]:
            member = self._members[name]
            self._sent[name] = _Sent(now, member.state is MemberState.ALIVE)
            pings.append(PingToSend(member.node, self.gossip_for(name)))
        return tuple(pings)

    def ping_new_members(self, now: float) -> tuple[PingToSend, ...]:
        """Return pings to send at once after a new member list, to the next unseen nodes on the ring.

        Until they respond there may be no quorum, and their state is unknown.
        """
        now = self._advance_clock(now)
        unseen = [name for name in self._ring if self._members[name].update is None and name not in self._sent]
        pings = []
        for name in unseen[: self.settings.ring_neighbours + 1]:
            self._sent[name] = _Sent(now, believed=False)
            pings.append(PingToSend(self._members[name].node, self.gossip_for(name)))
        return tuple(pings)

    def unsent(self, nodes: Iterable[NodeId]) -> None:
        """Forget these pings, which were not sent."""
        for name in nodes:
            self._sent.pop(name, None)

    def pings_queued(self, nodes: Iterable[NodeId]) -> None:
        """Record that these pings wait to be sent, so that they cannot time out before :meth:`ping_sent`."""
        for name in nodes:
            if name in self._sent:
                self._sent[name] = self._sent[name]._replace(at=math.inf)

    def ping_sent(self, now: float, node: NodeId) -> None:
        """Record that the ping to ``node`` is sent now."""
        now = self._advance_clock(now)
        if node in self._sent:
            self._sent[node] = self._sent[node]._replace(at=now)

    def indirect_pings(self) -> tuple[IndirectPingToSend, ...]:
        """Return indirect pings for nodes that did not answer, because only the path to them may be down."""
        missing = [name for name in self._missing if name in self._members]
        self._missing.clear()
        helpers = [
            name
            for name in self._ring
            if self._members[name].state is MemberState.ALIVE and not self._members[name].misses
        ]
        asked = []
        for name in missing:
            if self._members[name].state is MemberState.ALIVE and self._members[name].misses:
                some = self._random.sample(helpers, min(_HELPERS, len(helpers)))
                asked += [IndirectPingToSend(self._members[helper].node, name) for helper in some]
        return tuple(asked)

    def indirect_ack(self, now: float, node: NodeId) -> None:
        """Record that another node reached ``node``."""
        now = self._advance_clock(now)
        member = self._members.get(node)
        if member is not None and member.state is MemberState.ALIVE:
            member.misses = 0
            self._record_probe(now, node, answered=True)

    def gossip_for(self, node: NodeId) -> GossipMessage:
        """Return the gossip for ``node``: this node's state, the receiver's own state, and recent changes."""
        updates = [self._me]
        about = self._members.get(node)
        if about is not None and about.update is not None:
            updates.append(about.update)
        picked = self._broadcasts.pick(self.settings.gossip_max - len(updates), leave_out=(node, self._me.node.id))
        updates += [update for name in picked if (update := self._members[name].update) is not None]
        return GossipMessage(tuple(updates), self._mark, self.fence)

    def receive_gossip(self, now: float, sender: NodeId, gossip: GossipMessage) -> None:
        """Apply gossip from ``sender``; late, duplicate and reordered messages are harmless."""
        now = self._advance_clock(now)
        self.advance_fence(gossip.fence)
        if gossip.list_version is not None:
            self._compare_list_version(now, sender, gossip.list_version)
        if sender in self._members:
            self._members[sender].heard_at = now
        for update in gossip.updates:
            if update.node.id == self._me.node.id:
                self._refute(update)
            elif update.node.id in self._members:
                self._apply_update(now, self._limit_to_suspect(now, update))

    def ping_acked(self, now: float, node: NodeId) -> None:
        """Record that ``node`` answered a ping, possibly late."""
        now = self._advance_clock(now)
        sent = self._sent.pop(node, None)
        if sent is not None and sent.believed:
            self._record_probe(now, node, answered=True)
        member = self._members.get(node)
        if member is not None:
            member.misses, member.suspected_here, member.miss_limit = 0, False, self.settings.suspect_after
            member.heard_at = now

    def ping_failed(self, now: float, node: NodeId) -> None:
        """Record that a ping to ``node`` failed; without a report it fails after ``ping_timeout_s`` seconds."""
        now = self._advance_clock(now)
        if node in self._sent:
            self._record_miss(now, node)

    def set_member_list(self, now: float, member_list: MemberList) -> bool:
        """Use a discovered or received member list if it is newer; return whether it is now in use."""
        self._advance_clock(now)
        mark = member_list.list_version
        if self._mark is not None and mark <= self._mark:
            return False
        if self._newer is not None and self._newer.mark <= mark:
            self._newer = None
        before, self._members = self._members, {}
        for node in member_list.nodes:
            if node.id != self._me.node.id:
                member = before.get(node.id) or MemberRecord(node, self.settings.suspect_after)
                member.configured = node
                self._members[node.id] = member
        self._ring = ring_order(self._me.node.id, self._members)
        self._broadcasts = BroadcastQueue(self._ring, begin=self._random.randrange(len(self._ring) + 1))
        for name, member in self._members.items():
            if member.update is not None:
                self._broadcasts.add(name)
        self._suspects &= self._members.keys()
        self._sent = {name: sent for name, sent in self._sent.items() if name in self._members}
        self._member_list, self._mark = member_list, mark
        self.changes += 1
        return True

    def advance_fence(self, fence: FencingToken) -> bool:
        """Record a newer incarnation of the job, which is then gossiped; return whether it is new."""
        if fence <= self.fence:
            return False
        self.fence = fence
        self.changes += 1
        return True

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def standby(self) -> tuple[NodeId, ...]:
        """Nodes of the job without a rank and without a vote."""
        return self._member_list.standby if self._member_list is not None else ()

    @property
    def generation(self) -> int:
        """This node's current generation."""
        return self._me.generation

    @property
    def member_list(self) -> MemberList | None:
        """The newest known member list; ``None`` if none is known."""
        return self._member_list

    @property
    def newer_list_holder(self) -> NodeId | None:
        """A node with a newer member list, to request and pass to :meth:`set_member_list`."""
        return self._newer.reporter if self._newer is not None else None

    @property
    def alive(self) -> tuple[PeerNode, ...]:
        """Listed nodes that are alive or suspected, by id: the nodes for placement."""
        if self._cached_alive is None or self._cached_alive[0] != self.changes:
            nodes = [member.node for member in self._members.values() if member.state is not MemberState.DEAD]
            if self._is_listed:
                nodes.append(self._me.node)
            self._cached_alive = self.changes, tuple(sorted(nodes))
        return self._cached_alive[1]

    def node(self, name: NodeId) -> PeerNode | None:
        """Return a listed node; ``None`` if it is not listed.

        A dead node is returned as listed, any other node as it describes itself.
        """
        if name == self._me.node.id:
            return self._me.node if self._is_listed else None
        member = self._members.get(name)
        if member is None:
            return None
        return member.configured if member.state is MemberState.DEAD else member.node

    def state_of(self, node: NodeId) -> MemberState | None:
        """Return the node's state, ``None`` if it is not listed. A node that was never seen counts as dead."""
        if node == self._me.node.id:
            return MemberState.ALIVE if self._is_listed else None
        member = self._members.get(node)
        return None if member is None else member.state

    def generation_of(self, node: NodeId) -> int:
        """Return the node's last known generation. While it is unchanged, the node has not lost its shards."""
        if node == self._me.node.id:
            return self._me.generation
        member = self._members.get(node)
        return member.update.generation if member is not None and member.update is not None else 0

    @property
    def has_quorum(self) -> bool:
        """Whether this node sees enough listed nodes alive to decide for the job.

        See :meth:`MemberList.has_quorum`. It is only as current as failure detection: a side that was just disconnected
        needs a few periods to notice. An action that must not happen on two sides even then needs the acknowledgment of
        each node of a quorum.
        """
        return not self._why_no_quorum()

    def explain_quorum(self) -> str:
        """Return why this node has or has no quorum, as text."""
        objection = self._why_no_quorum()
        if self._member_list is None:
            return objection
        me = self._me.node.id if self._is_listed else None
        return describe_members(me, self._members, self._now or 0.0, objection, self.standby)

    @property
    def _is_listed(self) -> bool:
        return self._member_list is not None and len(self._member_list.nodes) > len(self._members)

    @property
    def _dead_after_s(self) -> float:
        return self.settings.dead_after_s * max(1.0, math.log2(len(self._members) + 1) / 5)

    def _why_no_quorum(self) -> str:
        if self._member_list is None:
            return "nobody has said yet which nodes belong to the job"
        if not self._is_listed:
            return f"{self._me.node.id} is not in member list {self._member_list.version}"
        if self._newer is not None:
            newer = self._newer
            return f"{newer.reporter} has member list {newer.mark.version}, this is {self._member_list.version}"
        if (
            self._cached_quorum is None or self._cached_quorum[0] != self.changes
        ):  # cached, because it is read for each report of thousands of nodes
            alive = {name for name, member in self._members.items() if member.state is MemberState.ALIVE}
            self._cached_quorum = self.changes, self._member_list.has_quorum({self._me.node.id, *alive})
        if not self._cached_quorum[1]:
            return "that is no quorum"
        now = self._now or 0.0
        if now < self._settled_at:
            return "its clock leapt, and it has not looked at the others for long enough since"
        return self._failed_probes(now)

    def _failed_probes(self, now: float) -> str:
        """Return why the belief that most nodes are alive is doubtful, or "".

        A node that is disconnected with few others cannot ping all nodes, so it believes for long that the rest is
        alive. But it soon notices that most of its pings fail.
        """
        oldest = now - _PROBE_PERIODS * self.settings.heartbeat_s
        answers = [answered for at, answered in self._recent_probes.values() if at >= oldest]
        missing = answers.count(False)
        if missing > 2 and 2 * missing > len(answers) + 1:
            return f"{missing} of the last {len(answers)} it pinged did not answer"
        return ""

    def _record_probe(self, now: float, name: NodeId, *, answered: bool) -> None:
        if self._member_list is not None and name in self._member_list.standby:
            return  # a standby node has no vote, so the quorum does not depend on it
        self._recent_probes.pop(name, None)
        self._recent_probes[name] = now, answered
        if len(self._recent_probes) > _MAX_PROBES:
            del self._recent_probes[next(iter(self._recent_probes))]

    def _advance_clock(self, now: float) -> float:
        """Return the current time, which never goes back; after a clock jump all timeouts start again."""
        before, period = self._now, self.settings.heartbeat_s
        if before is not None and -period <= now - before <= _CLOCK_JUMP_PERIODS * period:
            now = max(now, before)
        elif before is not None:
            for member in self._members.values():
                member.state_since = now if member.state is MemberState.SUSPECT else member.state_since + (now - before)
                member.misses = 0
                member.heard_at += now - before
            self._sent.clear()
            self._recent_probes.clear()
            self._settled_at = now + (self.settings.suspect_after + 2) * period + self.settings.ping_timeout_s
        self._now = now
        if self._newer is not None and now - self._newer.at > self.settings.dead_after_s:
            self._newer = None
        return now

    def _ring_targets(self) -> list[NodeId]:
        """Return the next living nodes on the ring, and up to the same number of suspects.

        A suspect must receive the suspicion to refute it.
        """
        alive: list[NodeId] = []
        suspects: list[NodeId] = []
        for name in self._ring:
            state = self._members[name].state
            if state is MemberState.ALIVE:
                alive.append(name)
            elif state is MemberState.SUSPECT and len(suspects) < self.settings.ring_neighbours:
                suspects.append(name)
            if len(alive) == self.settings.ring_neighbours:
                break
        return [name for name in alive + suspects if name not in self._sent]

    def _random_others(self, watched: list[NodeId]) -> list[NodeId]:
        """Return random other listed nodes: one, or more while few are known to live."""
        known = {*watched, *self._sent}
        count = max(1, self.settings.ring_neighbours + 1 - len(known))
        drawn = self._random.sample(self._ring, min(len(self._ring), count + len(known)))
        return [name for name in drawn if name not in known][:count]

    def _record_miss(self, now: float, name: NodeId) -> None:
        sent, member = self._sent.pop(name), self._members[name]
        if sent.believed:
            self._record_probe(now, name, answered=False)
        member.misses += 1
        self._missing.add(name)
        if member.misses >= member.miss_limit and member.update is not None and member.state is MemberState.ALIVE:
            member.misses, member.suspected_here = 0, True
            self._apply_update(now, MemberUpdate(member.update.node, member.update.generation, MemberState.SUSPECT))

    def _apply_update(self, now: float, update: MemberUpdate) -> None:
        member = self._members[update.node.id]
        before = member.update
        if before is not None and not update.supersedes(before):
            if not before.supersedes(update):
                self._broadcasts.mark_sent(update.node.id)
            return
        member.update, member.state_since = update, now
        if update.state is MemberState.ALIVE and member.suspected_here:
            # Other nodes reach it, so only the path from here is down. Suspect it less readily.
            member.suspected_here = False
            member.miss_limit = min(2 * member.miss_limit, _MAX_MISS_FACTOR * self.settings.suspect_after)
        (self._suspects.add if update.state is MemberState.SUSPECT else self._suspects.discard)(update.node.id)
        self._broadcasts.add(update.node.id)
        self.changes += 1

    def _limit_to_suspect(self, now: float, update: MemberUpdate) -> MemberUpdate:
        """Reduce a reported death to a suspicion if the node has just sent a message to this node.

        The node can refute the suspicion; otherwise it becomes dead after the usual time.
        """
        silent_s = self.settings.suspect_after * self.settings.heartbeat_s + self.settings.ping_timeout_s
        if update.state is MemberState.DEAD and now - self._members[update.node.id].heard_at <= silent_s:
            return msgspec.structs.replace(update, state=MemberState.SUSPECT)
        return update

    def _refute(self, update: MemberUpdate) -> None:
        """Raise this node's generation if another node's update about it differs from its own state."""
        if update.generation > self._me.generation or (update.generation == self._me.generation and update != self._me):
            self._me = MemberUpdate(self._me.node, update.generation + 1, MemberState.ALIVE)
            self.changes += 1  # other nodes ignore its earlier reports

    def _compare_list_version(self, now: float, sender: NodeId, mark: MemberListVersion) -> None:
        if self._member_list is None or self._mark is None:
            self._newer = _Newer(mark, sender, now)
        elif mark > self._mark and mark.digest == self._mark.digest:
            self._member_list, self._mark = msgspec.structs.replace(self._member_list, version=mark.version), mark
        elif mark > self._mark and (self._newer is None or mark >= self._newer.mark):
            self._newer = _Newer(mark, sender, now)
