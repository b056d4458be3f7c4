"""What nodes tell each other about one another, and which of it goes into the next message."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from enum import Enum

import msgspec

from peerstore.cluster.nodes import Node, NodeId
from peerstore.cluster.roster import RosterMark
from peerstore.names import Number

Fence = tuple[Number, str]
"""Epoch and incarnation of a job. What is below the highest one anybody has heard of is of the past."""


class Standing(str, Enum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    """It did not answer. It counts as a holder of copies until it is dead, and no longer for a quorum."""
    DEAD = "dead"


_WEIGHT = {Standing.ALIVE: 0, Standing.SUSPECT: 1, Standing.DEAD: 2}


class Rumour(msgspec.Struct, frozen=True, array_like=True):
    """What one node says of another."""

    node: Node
    number: Number
    """The subject's own count of its lives and refutations. Only the subject raises it."""
    standing: Standing

    def beats(self, other: Rumour) -> bool:
        """A higher number wins; with one number the worse news does. A total order: all who hear both agree."""
        if self.number != other.number:
            return self.number > other.number
        if self.standing is not other.standing:
            return _WEIGHT[self.standing] > _WEIGHT[other.standing]
        return self.node > other.node


class Gossip(msgspec.Struct, frozen=True, array_like=True):
    """What travels with a ping and with the answer to one."""

    rumours: tuple[Rumour, ...]
    roster: RosterMark | None
    """Which roster the sender has. Rosters themselves are asked for: see ``Membership.wanted``."""
    fence: Fence


class News:
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

    def told(self, subject: NodeId) -> None:
        """Somebody was told the latest about ``subject``, or knew it."""
        if subject in self._times:
            self._move(subject, self._times[subject] + 1)

    def pick(self, count: int, *, leave_out: Collection[NodeId]) -> list[NodeId]:
        """Up to ``count`` subjects; those picked count as told once more."""
        fresh = itertools.chain.from_iterable(map(reversed, self._fresh))
        picked = list(itertools.islice((subject for subject in fresh if subject not in leave_out), count))
        for subject in picked:
            self.told(subject)
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
