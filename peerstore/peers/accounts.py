"""What one node knows about the copies of a job's shards, and what it does next. Pure: no threads, clocks or sockets.

The shell (:mod:`~peerstore.peers.protecting`) says what this node sees right now, does what comes out, and says how it
went.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from peerstore.cluster.nodes import Node, NodeId
from peerstore.cluster.placement import place
from peerstore.commit import Reports, Settling, is_wanted
from peerstore.errors import (
    ArenaBusyError,
    ArenaFullError,
    FencedError,
    LeaseLostError,
    PeerUnreachableError,
    ShardDamagedError,
    ShardPendingError,
)
from peerstore.peers.duties import Duty, Held, Standing, due, stand_ins, standing
from peerstore.records import Base, Group, ShardFact, ShardKey

AGAIN_S = 1.0
REFUSED_S = 20.0
LOOK_S = 5.0
AWAY_AFTER = 3
"""Tries in a row that did not reach a node, which others say is alive, until another takes its copies."""
BUSY_S = 3.0
"""How long a node may have no room "for the moment": what it keeps it may give up only once a newer version is settled,
and that must not wait for it."""


@dataclass(frozen=True)
class Protection:
    """What is asked for."""

    copies: int = 2
    levels: tuple[str, ...] = ("zone", "rack")
    streams: int = 2
    group: int = 4
    """With parity: nodes of a group that one of its nodes may be lost of, not counting that one."""
    settles: bool = True
    """Whether it is told which versions have all their copies."""


@dataclass(frozen=True)
class Outlook:
    """The job as this node sees it right now."""

    now: float
    living: Mapping[str, Node]
    """The nodes that take part, this one included."""
    facts: Sequence[ShardFact]
    """What is sealed here."""
    settled: Group | None
    epoch: int
    """The newest incarnation this node has heard of."""
    base: Base | None
    """What that one went on from, as far as this node has heard."""
    life: Callable[[str], int]
    """A number for each node that rises when it starts again: it may have lost what it held."""
    left_out: Mapping[Group, Collection[int]] = field(default_factory=dict)
    """Parts that their writers on this node will never seal."""


@dataclass
class _Known:
    """What this node has learned about the copies of one shard."""

    listed: tuple[str, ...] = ()
    confirmed: dict[str, int] = field(default_factory=dict)
    """Who has said that it holds the shard, and in which of its lives."""
    refused: dict[str, float] = field(default_factory=dict)
    """Who has no room, and until when nobody asks again."""
    busy: dict[str, float] = field(default_factory=dict)
    """Who had no room for the moment, and since when."""
    obsolete_until: float = float("-inf")
    """Another node holds this version for one of the past, and may be asked again from then on."""
    why: dict[str, str] = field(default_factory=dict)
    """What kept the last copy from each node."""


class Accounts:
    """One job's copies as ``me`` knows them. Whoever calls sees to it that nobody else does at the same time."""

    def __init__(self, me: NodeId, protection: Protection) -> None:
        self._me = me
        self._protection = protection
        self._known: dict[ShardKey, _Known] = {}
        self._later: dict[str, float] = {}
        """Nodes that did not answer, and when they are tried again."""
        self._misses: dict[str, int] = {}
        """How often in a row they did not."""
        self._away: dict[str, float] = {}
        """Who did not too often, and until when nobody asks again."""
        self.reports = Reports(me)
        self._placed: tuple[tuple[Node, ...], tuple[str, ...]] | None = None
        self._base: Base | None = None
        self._seen: tuple[Outlook, list[Held], tuple[str, ...]] | None = None
        """What the last look came to; nothing was learned since."""

    # -- how things stand ---------------------------------------------------------------------------------------------

    def partners(self, living: Mapping[str, Node]) -> tuple[str, ...]:
        """Where copies of what this node writes go."""
        nodes = tuple(living.values())
        if self._placed is None or self._placed[0] != nodes:  # with thousands of nodes placing takes a while
            placed = place(nodes, copies=self._protection.copies, levels=self._protection.levels)
            self._placed = nodes, placed.partners.get(self._me, ())
        return self._placed[1]

    def _candidates(self, look: Outlook) -> tuple[str, ...]:
        """This node's partners, and then who else could take a copy that one of them cannot take."""
        partners = self.partners(look.living)
        refused = any(until > look.now for known in self._known.values() for until in known.refused.values())
        if not refused and not self._replaced(look):  # nobody looks at all nodes for nothing
            return partners
        return (*partners, *stand_ins(self._me, look.living.values(), partners, self._protection.levels))

    def _replaced(self, look: Outlook) -> frozenset[str]:
        """Living nodes that this one does not reach, as long as there are enough others: else it waits."""
        away = frozenset(node for node, until in self._away.items() if until > look.now)
        if not away:
            return away
        enough = len(look.living.keys() - away - {self._me}) >= self._protection.copies - 1
        return away if enough else frozenset()

    def standings(self, look: Outlook) -> list[Standing]:
        """How well every shard here is kept."""
        shards, candidates = self._view(look)
        return [self._standing(held, look, candidates) for held in shards]

    def confirmed(self, key: ShardKey, life: Callable[[str], int]) -> tuple[str, ...]:
        """Other nodes that are known to hold a shard."""
        known = self._known.get(key)
        return tuple(sorted(_still(known.confirmed, life))) if known is not None else ()

    def trouble(self, key: ShardKey) -> str:
        """Why a shard lacks copies, as far as it is known."""
        known = self._known.get(key)
        return "; ".join(f"{node}: {why}" for node, why in known.why.items()) if known is not None else ""

    def _standing(self, held: Held, look: Outlook, partners: Sequence[str]) -> Standing:
        return standing(held, me=self._me, living=look.living, partners=partners, copies=self._protection.copies)

    def _view(self, look: Outlook) -> tuple[list[Held], tuple[str, ...]]:
        """What is kept here as far as its copies go, and who could take some."""
        if self._seen is None or self._seen[0] is not look:
            self._go_back(look.base)
            self._seen = look, self._held(look), self._candidates(look)
        return self._seen[1:]

    def _go_back(self, base: Base | None) -> None:
        """The job went on from another version than before: what other nodes said of what they hold counts no more.

        Who had not heard of it took that version for superfluous, and may have given it up or not have mended it; now
        it is the one to be kept. Who holds it still says so again for a message.
        """
        if base != self._base:
            self._base = base
            for known in self._known.values():
                known.confirmed.clear()
                known.obsolete_until = float("-inf")

    def _held(self, look: Outlook) -> list[Held]:
        here = {fact.key for fact in look.facts}
        self._known = {key: known for key, known in self._known.items() if key in here}
        replaced = self._replaced(look)
        return [self._one_held(fact, look, replaced) for fact in look.facts]

    def _one_held(self, fact: ShardFact, look: Outlook, replaced: frozenset[str]) -> Held:
        known = self._known.get(fact.key)
        if known is None:
            known = self._known[fact.key] = _Known()
        listed = fact.holders or known.listed or (self._me,)
        return Held(
            fact.key,
            fact.size_bytes,
            listed if self._me in listed else (*listed, self._me),
            _still(known.confirmed, look.life),
            replaced.union(node for node, until in known.refused.items() if until > look.now)
            if known.refused
            else replaced,
            wanted=look.now >= known.obsolete_until
            and is_wanted(
                fact.key.group,
                epoch=look.epoch,
                settled=look.settled,
                whole=is_whole(fact, look.settled),
                base=look.base,
            ),
        )

    # -- what to send -------------------------------------------------------------------------------------------------

    def next(self, look: Outlook) -> Duty | float:
        """The next thing to send; or for how many seconds there is nothing to do, unless something changes."""
        waiting = [node for node, until in self._later.items() if until > look.now]
        shards, candidates = self._view(look)
        duties = due(shards, me=self._me, living=look.living, partners=candidates, copies=self._protection.copies)
        ready = next((duty for duty in duties if duty.to not in waiting), None)
        if ready is not None:
            return ready
        soon = min((self._later[node] - look.now for node in waiting), default=LOOK_S) if duties else LOOK_S
        return min(soon, LOOK_S)

    def done(self, duty: Duty, life: int, base: Base | None) -> None:
        """The copy is there, verified. ``life`` is what the other node's was when this began, and ``base`` what it was
        told then that the job went on from.
        """
        known = self._learning(duty.key)
        known.listed = duty.holders
        if base == self._base:
            known.confirmed[duty.to] = life
        known.busy.pop(duty.to, None)
        known.why.pop(duty.to, None)
        self._misses.pop(duty.to, None)
        self._away.pop(duty.to, None)

    def failed(self, duty: Duty, error: Exception, now: float) -> bool:
        """The copy was not made. Whether this node should look at its own: it may be the bad one."""
        known = self._learning(duty.key)
        known.why[duty.to] = str(error)
        no_room = isinstance(error, ArenaBusyError) and not isinstance(error, ShardPendingError)
        busy_since = known.busy.setdefault(duty.to, now) if no_room else now
        if not no_room:
            known.busy.pop(duty.to, None)
        if isinstance(error, FencedError) and not isinstance(error, LeaseLostError):
            # The other node knows of a newer incarnation, or of a newer version that is safe. So will this one soon,
            # and it may also learn that the job goes on from this version.
            known.obsolete_until = now + REFUSED_S
        elif isinstance(error, ArenaFullError | ShardDamagedError) or now - busy_since >= BUSY_S:
            known.refused[duty.to] = now + REFUSED_S
            known.busy.pop(duty.to, None)
        elif isinstance(error, ArenaBusyError | LeaseLostError | PeerUnreachableError):
            self._later[duty.to] = now + AGAIN_S
            if isinstance(error, PeerUnreachableError):
                self._misses[duty.to] = self._misses.get(duty.to, 0) + 1
                if self._misses[duty.to] >= AWAY_AFTER:
                    self._away[duty.to] = now + REFUSED_S
        else:
            self._later[duty.to] = now + 5 * AGAIN_S
        return isinstance(error, ShardDamagedError)

    def confirm(self, key: ShardKey, node: str, life: int) -> None:
        """``node`` has been seen, in this one of its lives, to hold a shard of this node."""
        known = self._learning(key)
        known.confirmed[node] = max(life, known.confirmed.get(node, life))
        known.why.pop(node, None)

    def _learning(self, key: ShardKey) -> _Known:
        self._seen = None
        return self._known.setdefault(key, _Known())

    # -- what is to be counted ----------------------------------------------------------------------------------------

    def unreported(self, look: Outlook) -> tuple[str, list[Settling]]:
        """Who keeps the tally, and what it has not been told yet."""
        shards, candidates = self._view(look)
        standings = [self._standing(held, look, candidates) for held in shards if held.wanted]
        parts_of = {fact.key.group: fact.parts for fact in look.facts}
        return self.reports.unreported(
            standings,
            parts_of,
            living=look.living,
            settled=look.settled,
            life=look.life(self._me),
            left_out=look.left_out,
        )

    def unreached(self, teller: str, now: float) -> None:
        """The scribe was not told: it is asked for nothing else for a while."""
        self._later.setdefault(teller, now + AGAIN_S)


def _still(confirmed: Mapping[str, int], life: Callable[[str], int]) -> frozenset[str]:
    return frozenset([node for node, then in confirmed.items() if life(node) == then])


def is_whole(fact: ShardFact, settled: Group | None) -> bool:
    """Whether all parts of a shard's version were sealed, as far as this node knows."""
    return fact.marked_whole or fact.key.group == settled
