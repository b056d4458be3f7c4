"""Who of a job's nodes is alive, as seen from one of them. Pure: no threads, no clocks, no sockets.

::

    not seen ──it, or somebody, says so──> ALIVE ──3 pings without an answer──> SUSPECT ──5 s──> DEAD
                                             ^     (nor reached by two others)     │               │
                                             └──────── its own higher number ──────┴───────────────┘

Each node pings its few neighbours on a ring of the living and one random node of the whole roster every period, so
the traffic of a node does not grow with the job, and a partition heals without anybody's help. What changed travels
with the pings. Nobody's word brings a node back but its own: it hears that it is suspected and raises its number. And
while a node speaks to this one, another's word that it is dead makes it a suspect.

Who belongs to the job is not decided here: that is the roster, and it comes from discovery. A node of the roster counts
for the quorum even when it was never seen; one outside of it never does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from peerstore.cluster.gossip import Fence, Gossip, News, Rumour, Standing
from peerstore.cluster.members import Member, MembershipSettings, describe, ring_from
from peerstore.cluster.nodes import Node, NodeId
from peerstore.cluster.roster import Roster, RosterMark

_LEAP_PERIODS = 5
_SAMPLE = 12
_SAMPLE_PERIODS = 16
_PATIENCE = 16
_HELPERS = 2


class Ping(NamedTuple):
    """Send this. Then say what came of it: ``answered`` and ``heard``, or ``failed``."""

    node: Node
    gossip: Gossip


class AskAnother(NamedTuple):
    """Have ``helper`` ping ``node``, which has not answered this one. Then, where it did answer: ``vouched``."""

    helper: Node
    node: NodeId


class _Sent(NamedTuple):
    at: float
    believed: bool
    """Whether it was believed alive: then what comes of it says how good the beliefs are."""


class _Newer(NamedTuple):
    mark: RosterMark
    teller: NodeId
    at: float


class Membership:
    """One job's nodes as seen from ``me``.

    Every ``heartbeat_s`` call :meth:`tick` and send what it returns. The receiver gives what it got to :meth:`heard`
    and answers with :meth:`gossip_for` the sender; the answer is for :meth:`answered` and :meth:`heard`. ``number``
    must be higher in each life of the node than in the one before (the time it started, in microseconds).
    """

    def __init__(self, me: Node, number: int, settings: MembershipSettings | None = None, *, seed: int = 0) -> None:
        self.settings = settings or MembershipSettings()
        self.changes = 0
        """Rises with every change of who lives, in which of its lives, of the roster and of the fence."""
        self.fence: Fence = (0, "")
        self._me = Rumour(me, number, Standing.ALIVE)
        self._random = random.Random(f"{me.id} {number} {seed}")
        self._roster: Roster | None = None
        self._mark: RosterMark | None = None
        self._newer: _Newer | None = None
        self._members: dict[NodeId, Member] = {}
        self._ring: tuple[NodeId, ...] = ()
        self._news = News(())
        self._sent: dict[NodeId, _Sent] = {}
        self._missing: set[NodeId] = set()
        """Who was missed since others were asked last."""
        self._suspects: set[NodeId] = set()
        self._came_of: dict[NodeId, tuple[float, bool]] = {}
        """Of the last nodes that were believed alive and pinged: when, and whether they answered."""
        self._now: float | None = None
        self._awake_at = -math.inf
        self._living: tuple[int, tuple[Node, ...]] | None = None
        self._enough: tuple[int, bool] | None = None
        """At which change the living were counted last, and whether they were a quorum."""

    # -- what the shell reports ---------------------------------------------------------------------------------------

    def tick(self, now: float) -> tuple[Ping, ...]:
        """Whom to ping in this period, with what."""
        now = self._arrive(now)
        for name in [name for name, sent in self._sent.items() if now - sent.at >= self.settings.ping_timeout_s]:
            self._missed(now, name)
        for name in [name for name in self._suspects if now - self._members[name].since >= self._dead_after_s]:
            rumour = self._members[name].rumour
            if rumour is not None:
                self._believe(now, Rumour(rumour.node, rumour.number, Standing.DEAD))
        watched = self._watched()
        pings = []
        for name in [*watched, *self._strangers(watched)]:
            member = self._members[name]
            self._sent[name] = _Sent(now, member.standing is Standing.ALIVE)
            pings.append(Ping(member.node, self.gossip_for(name)))
        return tuple(pings)

    def meet(self, now: float) -> tuple[Ping, ...]:
        """Whom to ping at once, since the roster is new: the next ones on the ring that nobody has seen.

        Until they answer there may be no quorum, and nobody knows whether they live: that need not take a period.
        """
        now = self._arrive(now)
        unseen = [name for name in self._ring if self._members[name].rumour is None and name not in self._sent]
        pings = []
        for name in unseen[: self.settings.neighbours + 1]:
            self._sent[name] = _Sent(now, believed=False)
            pings.append(Ping(self._members[name].node, self.gossip_for(name)))
        return tuple(pings)

    def unsent(self, nodes: Iterable[NodeId]) -> None:
        """These were not pinged after all, and are not missed."""
        for name in nodes:
            self._sent.pop(name, None)

    def queued(self, nodes: Iterable[NodeId]) -> None:
        """The pings to these are not on their way yet: until :meth:`sending` they cannot be late."""
        for name in nodes:
            if name in self._sent:
                self._sent[name] = self._sent[name]._replace(at=math.inf)

    def sending(self, now: float, node: NodeId) -> None:
        """The ping to ``node`` goes out now."""
        now = self._arrive(now)
        if node in self._sent:
            self._sent[node] = self._sent[node]._replace(at=now)

    def indirect(self) -> tuple[AskAnother, ...]:
        """Whom others are to ping, because it did not answer this node: it may be the way there that is bad."""
        missing = [name for name in self._missing if name in self._members]
        self._missing.clear()
        helpers = [
            name
            for name in self._ring
            if self._members[name].standing is Standing.ALIVE and not self._members[name].misses
        ]
        asked = []
        for name in missing:
            if self._members[name].standing is Standing.ALIVE and self._members[name].misses:
                some = self._random.sample(helpers, min(_HELPERS, len(helpers)))
                asked += [AskAnother(self._members[helper].node, name) for helper in some]
        return tuple(asked)

    def vouched(self, now: float, node: NodeId) -> None:
        """Another one has reached ``node``, which did not answer this one."""
        now = self._arrive(now)
        member = self._members.get(node)
        if member is not None and member.standing is Standing.ALIVE:
            member.misses = 0
            self._sample(now, node, answered=True)

    def gossip_for(self, node: NodeId) -> Gossip:
        """What to tell ``node``: about this node, what is said about itself, and the latest."""
        told = [self._me]
        about = self._members.get(node)
        if about is not None and about.rumour is not None:
            told.append(about.rumour)
        picked = self._news.pick(self.settings.gossip_max - len(told), leave_out=(node, self._me.node.id))
        told += [rumour for name in picked if (rumour := self._members[name].rumour) is not None]
        return Gossip(tuple(told), self._mark, self.fence)

    def heard(self, now: float, sender: NodeId, gossip: Gossip) -> None:
        """``sender`` said this, in a ping or in an answer. Late, doubled and reordered messages do no harm."""
        now = self._arrive(now)
        self.advance_fence(gossip.fence)
        if gossip.roster is not None:
            self._compare(now, sender, gossip.roster)
        if sender in self._members:
            self._members[sender].heard_at = now
        for rumour in gossip.rumours:
            if rumour.node.id == self._me.node.id:
                self._refute(rumour)
            elif rumour.node.id in self._members:
                self._believe(now, self._as_hearsay(now, rumour))

    def answered(self, now: float, node: NodeId) -> None:
        """``node`` answered a ping, however late."""
        now = self._arrive(now)
        sent = self._sent.pop(node, None)
        if sent is not None and sent.believed:
            self._sample(now, node, answered=True)
        member = self._members.get(node)
        if member is not None:
            member.misses, member.accused, member.patience = 0, False, self.settings.suspect_after
            member.heard_at = now

    def failed(self, now: float, node: NodeId) -> None:
        """``node`` could not be pinged. A ping of which nothing is said counts as failed after ``ping_timeout_s``."""
        now = self._arrive(now)
        if node in self._sent:
            self._missed(now, node)

    def set_roster(self, now: float, roster: Roster) -> bool:
        """``roster`` was discovered, or sent by a peer. Whether it is newer than the one before, and now in use."""
        self._arrive(now)
        mark = roster.mark
        if self._mark is not None and mark <= self._mark:
            return False
        if self._newer is not None and self._newer.mark <= mark:
            self._newer = None
        before, self._members = self._members, {}
        for node in roster.nodes:
            if node.id != self._me.node.id:
                member = before.get(node.id) or Member(node, self.settings.suspect_after)
                member.listed = node
                self._members[node.id] = member
        self._ring = ring_from(self._me.node.id, self._members)
        self._news = News(self._ring, begin=self._random.randrange(len(self._ring) + 1))
        for name, member in self._members.items():
            if member.rumour is not None:
                self._news.add(name)
        self._suspects &= self._members.keys()
        self._sent = {name: sent for name, sent in self._sent.items() if name in self._members}
        self._roster, self._mark = roster, mark
        self.changes += 1
        return True

    def advance_fence(self, fence: Fence) -> bool:
        """A newer incarnation than any known so far is now the job's. Everybody will hear of it."""
        if fence <= self.fence:
            return False
        self.fence = fence
        self.changes += 1
        return True

    # -- what is to be known ------------------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """This node's own number by now."""
        return self._me.number

    @property
    def roster(self) -> Roster | None:
        """The newest one known here, for whoever asks for it; ``None`` when none is known yet."""
        return self._roster

    @property
    def wanted(self) -> NodeId | None:
        """A node that has a newer roster: ask it, and hand what it sends to :meth:`set_roster`."""
        return self._newer.teller if self._newer is not None else None

    @property
    def living(self) -> tuple[Node, ...]:
        """The roster's nodes that are alive or only suspected, by id. Placement starts from these."""
        if self._living is None or self._living[0] != self.changes:
            nodes = [member.node for member in self._members.values() if member.standing is not Standing.DEAD]
            if self._belongs:
                nodes.append(self._me.node)
            self._living = self.changes, tuple(sorted(nodes))
        return self._living[1]

    def node(self, name: NodeId) -> Node | None:
        """A node of the roster as it describes itself, and as the roster does when it is dead; ``None``: a stranger."""
        if name == self._me.node.id:
            return self._me.node if self._belongs else None
        member = self._members.get(name)
        if member is None:
            return None
        return member.listed if member.standing is Standing.DEAD else member.node

    def standing(self, node: NodeId) -> Standing | None:
        """``None`` for who does not belong to the job. A node nobody has seen yet is as good as dead."""
        if node == self._me.node.id:
            return Standing.ALIVE if self._belongs else None
        member = self._members.get(node)
        return None if member is None else member.standing

    def life(self, node: NodeId) -> int:
        """The number ``node`` has given itself, as far as it is known here. It rises with each of its lives, so while
        it stays the same the node has not lost what it had.
        """
        if node == self._me.node.id:
            return self._me.number
        member = self._members.get(node)
        return member.rumour.number if member is not None and member.rumour is not None else 0

    @property
    def quorum(self) -> bool:
        """Whether this node sees enough of the roster alive to decide for the job. See :meth:`Roster.quorum`.

        As fresh as failure detection: a side that was just cut off needs a few periods to notice. What must not
        happen on two sides even then has to be acknowledged by a quorum of nodes, one by one.
        """
        return not self._objection()

    def explain(self) -> str:
        """Why there is a quorum or none, in words."""
        objection = self._objection()
        if self._roster is None:
            return objection
        return describe(self._me.node.id if self._belongs else None, self._members, self._now or 0.0, objection)

    # -- decisions ----------------------------------------------------------------------------------------------------

    @property
    def _belongs(self) -> bool:
        return self._roster is not None and len(self._roster.nodes) > len(self._members)

    @property
    def _dead_after_s(self) -> float:
        return self.settings.dead_after_s * max(1.0, math.log2(len(self._members) + 1) / 5)

    def _objection(self) -> str:
        if self._roster is None:
            return "nobody has said yet which nodes belong to the job"
        if not self._belongs:
            return f"{self._me.node.id} is not in roster {self._roster.version}"
        if self._newer is not None:
            return f"{self._newer.teller} has roster {self._newer.mark.version}, this is {self._roster.version}"
        if self._enough is None or self._enough[0] != self.changes:  # asked for with every report of thousands of nodes
            alive = {name for name, member in self._members.items() if member.standing is Standing.ALIVE}
            self._enough = self.changes, self._roster.quorum({self._me.node.id, *alive})
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
        answers = [answered for at, answered in self._came_of.values() if at >= oldest]
        missing = answers.count(False)
        if missing > 2 and 2 * missing > len(answers) + 1:
            return f"{missing} of the last {len(answers)} it pinged did not answer"
        return ""

    def _sample(self, now: float, name: NodeId, *, answered: bool) -> None:
        self._came_of.pop(name, None)
        self._came_of[name] = now, answered
        if len(self._came_of) > _SAMPLE:
            del self._came_of[next(iter(self._came_of))]

    def _arrive(self, now: float) -> float:
        """``now`` as it counts here: never backwards, and after a leap everybody has as much time as before it."""
        before, period = self._now, self.settings.heartbeat_s
        if before is not None and -period <= now - before <= _LEAP_PERIODS * period:
            now = max(now, before)
        elif before is not None:
            for member in self._members.values():
                member.since = now if member.standing is Standing.SUSPECT else member.since + (now - before)
                member.misses = 0
                member.heard_at += now - before
            self._sent.clear()
            self._came_of.clear()
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
            standing = self._members[name].standing
            if standing is Standing.ALIVE:
                alive.append(name)
            elif standing is Standing.SUSPECT and len(suspects) < self.settings.neighbours:
                suspects.append(name)
            if len(alive) == self.settings.neighbours:
                break
        return [name for name in alive + suspects if name not in self._sent]

    def _strangers(self, watched: list[NodeId]) -> list[NodeId]:
        """Random others of the roster: one, or more while few are known to live."""
        known = {*watched, *self._sent}
        count = max(1, self.settings.neighbours + 1 - len(known))
        drawn = self._random.sample(self._ring, min(len(self._ring), count + len(known)))
        return [name for name in drawn if name not in known][:count]

    def _missed(self, now: float, name: NodeId) -> None:
        sent, member = self._sent.pop(name), self._members[name]
        if sent.believed:
            self._sample(now, name, answered=False)
        member.misses += 1
        self._missing.add(name)
        if member.misses >= member.patience and member.rumour is not None and member.standing is Standing.ALIVE:
            member.misses, member.accused = 0, True
            self._believe(now, Rumour(member.rumour.node, member.rumour.number, Standing.SUSPECT))

    def _believe(self, now: float, rumour: Rumour) -> None:
        member = self._members[rumour.node.id]
        before = member.rumour
        if before is not None and not rumour.beats(before):
            if not before.beats(rumour):
                self._news.told(rumour.node.id)
            return
        member.rumour, member.since = rumour, now
        if rumour.standing is Standing.ALIVE and member.accused:
            # Others reach it and this node does not: the path is bad, not the node. Accuse it less often.
            member.accused = False
            member.patience = min(2 * member.patience, _PATIENCE * self.settings.suspect_after)
        (self._suspects.add if rumour.standing is Standing.SUSPECT else self._suspects.discard)(rumour.node.id)
        self._news.add(rumour.node.id)
        self.changes += 1

    def _as_hearsay(self, now: float, rumour: Rumour) -> Rumour:
        """Of a node that has just spoken to this one nobody else's word makes more than a suspect: it may refute it,
        and what is not refuted becomes its death in time.
        """
        silent_s = self.settings.suspect_after * self.settings.heartbeat_s + self.settings.ping_timeout_s
        if rumour.standing is Standing.DEAD and now - self._members[rumour.node.id].heard_at <= silent_s:
            return msgspec.structs.replace(rumour, standing=Standing.SUSPECT)
        return rumour

    def _refute(self, rumour: Rumour) -> None:
        """Whatever is said about this node beyond what it says itself, it says louder."""
        if rumour.number > self._me.number or (rumour.number == self._me.number and rumour != self._me):
            self._me = Rumour(self._me.node, rumour.number + 1, Standing.ALIVE)
            self.changes += 1  # what it has told others they count no more

    def _compare(self, now: float, sender: NodeId, mark: RosterMark) -> None:
        if self._roster is None or self._mark is None:
            self._newer = _Newer(mark, sender, now)
        elif mark > self._mark and mark.digest == self._mark.digest:
            self._roster, self._mark = Roster(mark.version, self._roster.nodes), mark
        elif mark > self._mark and (self._newer is None or mark >= self._newer.mark):
            self._newer = _Newer(mark, sender, now)
