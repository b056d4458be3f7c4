"""SWIM failure detection and gossip: ping, indirect ping, suspect, refute, dead, quorum. Pure.

::

    not seen ──it, or somebody, says so──> ALIVE ──3 pings without an answer──> SUSPECT ──5 s──> DEAD
                                             ^     (nor reached by two others)     │               │
                                             └──────── its own higher number ──────┴───────────────┘

Each node pings its few neighbours on a ring of the living and one random node of the whole member list every period, so
the traffic of a node does not grow with the job, and a partition heals without anybody's help. What changed travels
with the pings. Nobody's word brings a node back but its own: it hears that it is suspected and raises its number. And
while a node speaks to this one, another's word that it is dead makes it a suspect.

Who belongs to the job is not decided here: that is the list, and it comes from discovery. A node of the list counts
for the quorum even when it was never seen; one outside of it never does.
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
"""Epoch and incarnation of a job. What is below the highest one anybody has heard of is of the past."""


class MemberState(str, Enum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    """It did not answer. It counts as a holder of copies until it is dead, and no longer for a quorum."""
    DEAD = "dead"


_WEIGHT = {MemberState.ALIVE: 0, MemberState.SUSPECT: 1, MemberState.DEAD: 2}


class MemberUpdate(msgspec.Struct, frozen=True, array_like=True):
    """What one node says of another."""

    node: PeerNode
    generation: NonNegativeInt
    """The subject's own count of its lives and refutations. Only the subject raises it."""
    state: MemberState

    def supersedes(self, other: MemberUpdate) -> bool:
        """A higher number wins; with one number the worse news does. A total order: all who hear both agree."""
        if self.generation != other.generation:
            return self.generation > other.generation
        if self.state is not other.state:
            return _WEIGHT[self.state] > _WEIGHT[other.state]
        return self.node > other.node


class GossipMessage(msgspec.Struct, frozen=True, array_like=True):
    """What travels with a ping and with the answer to one."""

    updates: tuple[MemberUpdate, ...]
    list_version: MemberListVersion | None
    """Which list the sender has. Lists themselves are asked for: see ``SwimMembership.newer_list_holder``."""
    fence: FencingToken


class BroadcastQueue:
    """What is told next: first what changed, the least told and newest first, then everything in turn.

    A change is told, and heard from others, a few times for every doubling of the nodes: that reaches all but the
    unlucky. The turn through everything reaches those too, and nodes that were away.
    """

    def __init__(self, subjects: Sequence[NodeId], *, begin: int = 0) -> None:
        self._subjects = tuple(subjects)
        self._turn = begin
        self._fresh: list[dict[NodeId, None]] = [{} for _ in range(3 * len(self._subjects).bit_length())]
        """By how often it was told, the newest last."""
        self._times: dict[NodeId, int] = {}

    def add(self, subject: NodeId) -> None:
        """Something changed about ``subject``."""
        self._move(subject, 0)

    def mark_sent(self, subject: NodeId) -> None:
        """Somebody was told the latest about ``subject``, or knew it."""
        if subject in self._times:
            self._move(subject, self._times[subject] + 1)

    def pick(self, count: int, *, leave_out: Collection[NodeId]) -> list[NodeId]:
        """Up to ``count`` subjects; those picked count as told once more."""
        fresh = itertools.chain.from_iterable(map(reversed, self._fresh))
        picked = list(itertools.islice((subject for subject in fresh if subject not in leave_out), count))
        for subject in picked:
            self.mark_sent(subject)
        seen = {*picked, *leave_out}
        rest = (subject for subject in self._in_turn() if subject not in seen)
        return picked + list(itertools.islice(rest, count - len(picked)))

    def _move(self, subject: NodeId, times: int) -> None:
        if subject in self._times:
            del self._fresh[self._times.pop(subject)][subject]
        if times < len(self._fresh):
            self._fresh[times][subject] = None
            self._times[subject] = times

    def _in_turn(self) -> Iterator[NodeId]:
        """Once round at most, from where the last one stopped."""
        for _ in range(len(self._subjects)):
            self._turn = (self._turn + 1) % len(self._subjects)
            yield self._subjects[self._turn]


_NAMED = 8


@dataclass(frozen=True)
class MembershipSettings:
    """How fast a dead node is noticed, and how much is sent for it."""

    heartbeat_s: float = 1.0
    """How often :meth:`SwimMembership.tick` is called."""
    ping_timeout_s: float = 1.0
    suspect_after: int = 3
    """Pings in a row without an answer until a node is suspected."""
    dead_after_s: float = 5.0
    """How long a suspected node has to refute it in a job of up to 32 nodes. Larger ones get more, as news takes
    longer: twice that for 1,024 nodes."""
    ring_neighbours: int = 3
    """How many living nodes each node watches, and is watched by."""
    gossip_max: int = 48
    """How many nodes one message tells about."""

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "ping_timeout_s", "dead_after_s"):
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and seconds > 0):
                raise RequestError(f"{name}={seconds}: write a number of seconds above 0")
        for name, least in (("suspect_after", 1), ("ring_neighbours", 1), ("gossip_max", 4)):
            if getattr(self, name) < least:
                raise RequestError(f"{name}={getattr(self, name)}: write a number from {least} on")


@dataclass(slots=True)
class MemberRecord:
    configured: PeerNode
    """As the member list has it."""
    miss_limit: int
    update: MemberUpdate | None = None
    state_since: float = 0.0
    heard_at: float = -math.inf
    """When it spoke to this node itself."""
    misses: int = 0
    suspected_here: bool = False
    """Suspected by this node, which has had no answer from it since."""

    @property
    def state(self) -> MemberState:
        return self.update.state if self.update else MemberState.DEAD

    @property
    def node(self) -> PeerNode:
        """As it describes itself, and where it says nothing as the member list does."""
        if self.update is None:
            return self.configured
        said, listed = self.update.node, self.configured
        return PeerNode(
            said.id,
            said.address or listed.address,
            said.labels or listed.labels,
            said.memory_bytes or listed.memory_bytes,
        )


def ring_order(me: NodeId, others: Iterable[NodeId]) -> tuple[NodeId, ...]:
    """The others in the order of a ring on which everybody agrees, from ``me`` on."""

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
    """Whom a node sees and whom not, for people. ``me`` is ``None`` when it does not belong to the job itself."""
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
    text = f"sees {len(seen)} of {total} nodes: {_listed(names) or 'none'}"
    if missing:
        text += f"; not {_listed(missing)}"
    return f"{text}; {objection}" if objection else text


def _listed(names: Iterable[str]) -> str:
    all_names = list(names)
    more = len(all_names) - _NAMED
    return ", ".join(all_names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


_LEAP_PERIODS = 5
_SAMPLE = 12
_SAMPLE_PERIODS = 16
_PATIENCE = 16
_HELPERS = 2


class PingToSend(NamedTuple):
    """Send this. Then say what came of it: ``answered`` and ``heard``, or ``failed``."""

    node: PeerNode
    gossip: GossipMessage


class IndirectPingToSend(NamedTuple):
    """Have ``helper`` ping ``node``, which has not answered this one. Then, where it did answer: ``vouched``."""

    helper: PeerNode
    node: NodeId


class _Sent(NamedTuple):
    at: float
    believed: bool
    """Whether it was believed alive: then what comes of it says how good the beliefs are."""


class _Newer(NamedTuple):
    mark: MemberListVersion
    reporter: NodeId
    at: float


class SwimMembership:
    """One job's nodes as seen from ``me``.

    Every ``heartbeat_s`` call :meth:`tick` and send what it returns. The receiver gives what it got to
    :meth:`receive_gossip` and answers with :meth:`gossip_for` the sender; the answer is for :meth:`ping_acked` and
    :meth:`receive_gossip`. ``number`` must be higher in each life of the node than in the one before (the time it
    started, in microseconds).
    """

    def __init__(self, me: PeerNode, number: int, settings: MembershipSettings | None = None, *, seed: int = 0) -> None:
        self.settings = settings or MembershipSettings()
        self.changes = 0
        """Rises with every change of who lives, in which of its lives, of the member list and of the fence."""
        self.fence: FencingToken = (0, "")
        self._me = MemberUpdate(me, number, MemberState.ALIVE)
        self._random = random.Random(f"{me.id} {number} {seed}")
        self._member_list: MemberList | None = None
        self._mark: MemberListVersion | None = None
        self._newer: _Newer | None = None
        self._members: dict[NodeId, MemberRecord] = {}
        self._ring: tuple[NodeId, ...] = ()
        self._news = BroadcastQueue(())
        self._sent: dict[NodeId, _Sent] = {}
        self._missing: set[NodeId] = set()
        """Who was missed since others were asked last."""
        self._suspects: set[NodeId] = set()
        self._recent_probes: dict[NodeId, tuple[float, bool]] = {}
        """Of the last nodes that were believed alive and pinged: when, and whether they answered."""
        self._now: float | None = None
        self._awake_at = -math.inf
        self._living: tuple[int, tuple[PeerNode, ...]] | None = None
        self._enough: tuple[int, bool] | None = None
        """At which change the living were counted last, and whether they were a quorum."""

    # -- what the shell reports ---------------------------------------------------------------------------------------

    def tick(self, now: float) -> tuple[PingToSend, ...]:
        """Whom to ping in this period, with what."""
        now = self._arrive(now)
        for name in [name for name, sent in self._sent.items() if now - sent.at >= self.settings.ping_timeout_s]:
            self._missed(now, name)
        for name in [name for name in self._suspects if now - self._members[name].state_since >= self._dead_after_s]:
            rumour = self._members[name].update
            if rumour is not None:
                self._apply_update(now, MemberUpdate(rumour.node, rumour.generation, MemberState.DEAD))
        watched = self._watched()
        pings = []
        for name in [*watched, *self._strangers(watched)]:
            member = self._members[name]
            self._sent[name] = _Sent(now, member.state is MemberState.ALIVE)
            pings.append(PingToSend(member.node, self.gossip_for(name)))
        return tuple(pings)

    def ping_new_members(self, now: float) -> tuple[PingToSend, ...]:
        """Whom to ping at once, since the member list is new: the next ones on the ring that nobody has seen.

        Until they answer there may be no quorum, and nobody knows whether they live: that need not take a period.
        """
        now = self._arrive(now)
        unseen = [name for name in self._ring if self._members[name].update is None and name not in self._sent]
        pings = []
        for name in unseen[: self.settings.ring_neighbours + 1]:
            self._sent[name] = _Sent(now, believed=False)
            pings.append(PingToSend(self._members[name].node, self.gossip_for(name)))
        return tuple(pings)

    def unsent(self, nodes: Iterable[NodeId]) -> None:
        """These were not pinged after all, and are not missed."""
        for name in nodes:
            self._sent.pop(name, None)

    def pings_queued(self, nodes: Iterable[NodeId]) -> None:
        """The pings to these are not on their way yet: until :meth:`ping_sent` they cannot be late."""
        for name in nodes:
            if name in self._sent:
                self._sent[name] = self._sent[name]._replace(at=math.inf)

    def ping_sent(self, now: float, node: NodeId) -> None:
        """The ping to ``node`` goes out now."""
        now = self._arrive(now)
        if node in self._sent:
            self._sent[node] = self._sent[node]._replace(at=now)

    def indirect_pings(self) -> tuple[IndirectPingToSend, ...]:
        """Whom others are to ping, because it did not answer this node: it may be the way there that is bad."""
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
        """Another one has reached ``node``, which did not answer this one."""
        now = self._arrive(now)
        member = self._members.get(node)
        if member is not None and member.state is MemberState.ALIVE:
            member.misses = 0
            self._sample(now, node, answered=True)

    def gossip_for(self, node: NodeId) -> GossipMessage:
        """What to tell ``node``: about this node, what is said about itself, and the latest."""
        told = [self._me]
        about = self._members.get(node)
        if about is not None and about.update is not None:
            told.append(about.update)
        picked = self._news.pick(self.settings.gossip_max - len(told), leave_out=(node, self._me.node.id))
        told += [rumour for name in picked if (rumour := self._members[name].update) is not None]
        return GossipMessage(tuple(told), self._mark, self.fence)

    def receive_gossip(self, now: float, sender: NodeId, gossip: GossipMessage) -> None:
        """``sender`` said this, in a ping or in an answer. Late, doubled and reordered messages do no harm."""
        now = self._arrive(now)
        self.advance_fence(gossip.fence)
        if gossip.list_version is not None:
            self._compare(now, sender, gossip.list_version)
        if sender in self._members:
            self._members[sender].heard_at = now
        for rumour in gossip.updates:
            if rumour.node.id == self._me.node.id:
                self._refute(rumour)
            elif rumour.node.id in self._members:
                self._apply_update(now, self._limit_to_suspect(now, rumour))

    def ping_acked(self, now: float, node: NodeId) -> None:
        """``node`` answered a ping, however late."""
        now = self._arrive(now)
        sent = self._sent.pop(node, None)
        if sent is not None and sent.believed:
            self._sample(now, node, answered=True)
        member = self._members.get(node)
        if member is not None:
            member.misses, member.suspected_here, member.miss_limit = 0, False, self.settings.suspect_after
            member.heard_at = now

    def ping_failed(self, now: float, node: NodeId) -> None:
        """``node`` could not be pinged. A ping of which nothing is said counts as failed after ``ping_timeout_s``."""
        now = self._arrive(now)
        if node in self._sent:
            self._missed(now, node)

    def set_member_list(self, now: float, member_list: MemberList) -> bool:
        """Use a discovered or received member list if it is newer; return whether it is now in use."""
        self._arrive(now)
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
        self._news = BroadcastQueue(self._ring, begin=self._random.randrange(len(self._ring) + 1))
        for name, member in self._members.items():
            if member.update is not None:
                self._news.add(name)
        self._suspects &= self._members.keys()
        self._sent = {name: sent for name, sent in self._sent.items() if name in self._members}
        self._member_list, self._mark = member_list, mark
        self.changes += 1
        return True

    def advance_fence(self, fence: FencingToken) -> bool:
        """A newer incarnation than any known so far is now the job's. Everybody will hear of it."""
        if fence <= self.fence:
            return False
        self.fence = fence
        self.changes += 1
        return True

    # -- what is to be known ------------------------------------------------------------------------------------------

    @property
    def standby(self) -> tuple[NodeId, ...]:
        """Nodes of the job that have no rank and no vote."""
        return self._member_list.standby if self._member_list is not None else ()

    @property
    def generation(self) -> int:
        """This node's own number by now."""
        return self._me.generation

    @property
    def member_list(self) -> MemberList | None:
        """The newest one known here, for whoever asks for it; ``None`` when none is known yet."""
        return self._member_list

    @property
    def newer_list_holder(self) -> NodeId | None:
        """A node that has a newer member list: ask it, and hand what it sends to :meth:`set_member_list`."""
        return self._newer.reporter if self._newer is not None else None

    @property
    def alive(self) -> tuple[PeerNode, ...]:
        """The member list's nodes that are alive or only suspected, by id. Placement starts from these."""
        if self._living is None or self._living[0] != self.changes:
            nodes = [member.node for member in self._members.values() if member.state is not MemberState.DEAD]
            if self._belongs:
                nodes.append(self._me.node)
            self._living = self.changes, tuple(sorted(nodes))
        return self._living[1]

    def node(self, name: NodeId) -> PeerNode | None:
        """A node of the list as it describes itself, and as the list does when it is dead; ``None``: a stranger."""
        if name == self._me.node.id:
            return self._me.node if self._belongs else None
        member = self._members.get(name)
        if member is None:
            return None
        return member.configured if member.state is MemberState.DEAD else member.node

    def state_of(self, node: NodeId) -> MemberState | None:
        """``None`` for who does not belong to the job. A node nobody has seen yet is as good as dead."""
        if node == self._me.node.id:
            return MemberState.ALIVE if self._belongs else None
        member = self._members.get(node)
        return None if member is None else member.state

    def generation_of(self, node: NodeId) -> int:
        """The number ``node`` has given itself, as far as it is known here. It rises with each of its lives, so while
        it stays the same the node has not lost what it had.
        """
        if node == self._me.node.id:
            return self._me.generation
        member = self._members.get(node)
        return member.update.generation if member is not None and member.update is not None else 0

    @property
    def has_quorum(self) -> bool:
        """Whether this node sees enough of the list alive to decide for the job. See :meth:`MemberList.has_quorum`.

        As fresh as failure detection: a side that was just cut off needs a few periods to notice. What must not
        happen on two sides even then has to be acknowledged by a quorum of nodes, one by one.
        """
        return not self._why_no_quorum()

    def explain_quorum(self) -> str:
        """Why there is a quorum or none, in words."""
        objection = self._why_no_quorum()
        if self._member_list is None:
            return objection
        me = self._me.node.id if self._belongs else None
        return describe_members(me, self._members, self._now or 0.0, objection, self.standby)

    # -- decisions ----------------------------------------------------------------------------------------------------

    @property
    def _belongs(self) -> bool:
        return self._member_list is not None and len(self._member_list.nodes) > len(self._members)

    @property
    def _dead_after_s(self) -> float:
        return self.settings.dead_after_s * max(1.0, math.log2(len(self._members) + 1) / 5)

    def _why_no_quorum(self) -> str:
        if self._member_list is None:
            return "nobody has said yet which nodes belong to the job"
        if not self._belongs:
            return f"{self._me.node.id} is not in member list {self._member_list.version}"
        if self._newer is not None:
            newer = self._newer
            return f"{newer.reporter} has member list {newer.mark.version}, this is {self._member_list.version}"
        if self._enough is None or self._enough[0] != self.changes:  # asked for with every report of thousands of nodes
            alive = {name for name, member in self._members.items() if member.state is MemberState.ALIVE}
            self._enough = self.changes, self._member_list.has_quorum({self._me.node.id, *alive})
        if not self._enough[1]:
            return "that is no quorum"
        now = self._now or 0.0
        if now < self._awake_at:
            return "its clock leapt, and it has not looked at the others for long enough since"
        return self._doubt(now)

    def _doubt(self, now: float) -> str:
        """A node that is cut off with few others believes for long that the rest is alive: it cannot ask them all.

        But it notices soon that most of those it asks do not answer.
        """
        oldest = now - _SAMPLE_PERIODS * self.settings.heartbeat_s
        answers = [answered for at, answered in self._recent_probes.values() if at >= oldest]
        missing = answers.count(False)
        if missing > 2 and 2 * missing > len(answers) + 1:
            return f"{missing} of the last {len(answers)} it pinged did not answer"
        return ""

    def _sample(self, now: float, name: NodeId, *, answered: bool) -> None:
        if self._member_list is not None and name in self._member_list.standby:
            return  # it has no vote, so the quorum does not depend on it
        self._recent_probes.pop(name, None)
        self._recent_probes[name] = now, answered
        if len(self._recent_probes) > _SAMPLE:
            del self._recent_probes[next(iter(self._recent_probes))]

    def _arrive(self, now: float) -> float:
        """``now`` as it counts here: never backwards, and after a leap everybody has as much time as before it."""
        before, period = self._now, self.settings.heartbeat_s
        if before is not None and -period <= now - before <= _LEAP_PERIODS * period:
            now = max(now, before)
        elif before is not None:
            for member in self._members.values():
                member.state_since = now if member.state is MemberState.SUSPECT else member.state_since + (now - before)
                member.misses = 0
                member.heard_at += now - before
            self._sent.clear()
            self._recent_probes.clear()
            self._awake_at = now + (self.settings.suspect_after + 2) * period + self.settings.ping_timeout_s
        self._now = now
        if self._newer is not None and now - self._newer.at > self.settings.dead_after_s:
            self._newer = None
        return now

    def _watched(self) -> list[NodeId]:
        """The next living nodes on the ring. As many suspects on the way are pinged too: they are to hear about it."""
        alive: list[NodeId] = []
        suspects: list[NodeId] = []
        for name in self._ring:
            standing = self._members[name].state
            if standing is MemberState.ALIVE:
                alive.append(name)
            elif standing is MemberState.SUSPECT and len(suspects) < self.settings.ring_neighbours:
                suspects.append(name)
            if len(alive) == self.settings.ring_neighbours:
                break
        return [name for name in alive + suspects if name not in self._sent]

    def _strangers(self, watched: list[NodeId]) -> list[NodeId]:
        """Random others of the member list: one, or more while few are known to live."""
        known = {*watched, *self._sent}
        count = max(1, self.settings.ring_neighbours + 1 - len(known))
        drawn = self._random.sample(self._ring, min(len(self._ring), count + len(known)))
        return [name for name in drawn if name not in known][:count]

    def _missed(self, now: float, name: NodeId) -> None:
        sent, member = self._sent.pop(name), self._members[name]
        if sent.believed:
            self._sample(now, name, answered=False)
        member.misses += 1
        self._missing.add(name)
        if member.misses >= member.miss_limit and member.update is not None and member.state is MemberState.ALIVE:
            member.misses, member.suspected_here = 0, True
            self._apply_update(now, MemberUpdate(member.update.node, member.update.generation, MemberState.SUSPECT))

    def _apply_update(self, now: float, rumour: MemberUpdate) -> None:
        member = self._members[rumour.node.id]
        before = member.update
        if before is not None and not rumour.supersedes(before):
            if not before.supersedes(rumour):
                self._news.mark_sent(rumour.node.id)
            return
        member.update, member.state_since = rumour, now
        if rumour.state is MemberState.ALIVE and member.suspected_here:
            # Others reach it and this node does not: the path is bad, not the node. Accuse it less often.
            member.suspected_here = False
            member.miss_limit = min(2 * member.miss_limit, _PATIENCE * self.settings.suspect_after)
        (self._suspects.add if rumour.state is MemberState.SUSPECT else self._suspects.discard)(rumour.node.id)
        self._news.add(rumour.node.id)
        self.changes += 1

    def _limit_to_suspect(self, now: float, rumour: MemberUpdate) -> MemberUpdate:
        """Of a node that has just spoken to this one nobody else's word makes more than a suspect: it may refute it,
        and what is not refuted becomes its death in time.
        """
        silent_s = self.settings.suspect_after * self.settings.heartbeat_s + self.settings.ping_timeout_s
        if rumour.state is MemberState.DEAD and now - self._members[rumour.node.id].heard_at <= silent_s:
            return msgspec.structs.replace(rumour, state=MemberState.SUSPECT)
        return rumour

    def _refute(self, rumour: MemberUpdate) -> None:
        """Whatever is said about this node beyond what it says itself, it says louder."""
        if rumour.generation > self._me.generation or (rumour.generation == self._me.generation and rumour != self._me):
            self._me = MemberUpdate(self._me.node, rumour.generation + 1, MemberState.ALIVE)
            self.changes += 1  # what it has told others they count no more

    def _compare(self, now: float, sender: NodeId, mark: MemberListVersion) -> None:
        if self._member_list is None or self._mark is None:
            self._newer = _Newer(mark, sender, now)
        elif mark > self._mark and mark.digest == self._mark.digest:
            self._member_list, self._mark = msgspec.structs.replace(self._member_list, version=mark.version), mark
        elif mark > self._mark and (self._newer is None or mark >= self._newer.mark):
            self._newer = _Newer(mark, sender, now)
