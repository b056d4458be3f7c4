"""A simulated network of :class:`SwimMembership` objects under one fake clock.

Messages may be lost, late, duplicated or out of order; the seed determines everything.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from peerstore.membership.swim import GossipMessage, MembershipSettings, MemberState, SwimMembership
from peerstore.membership.topology import MemberList, NodeId, PeerNode, member_list

SETTINGS = MembershipSettings()


def peer_node(name: str, **labels: str) -> PeerNode:
    return PeerNode(NodeId(name), f"{name}.local:7070", tuple(sorted(labels.items())), 1 << 30)


def peer_nodes(count: int) -> tuple[PeerNode, ...]:
    return tuple(peer_node(f"n{number:04d}", rack=f"r{number // 4}") for number in range(count))


class GossipNetwork:
    def __init__(
        self,
        members: Iterable[PeerNode],
        seed: int,
        *,
        loss: float = 0.0,
        doubled: float = 0.0,
        delay_s: tuple[float, float] = (0.001, 0.01),
        settings: MembershipSettings = SETTINGS,
        tell_all: bool = True,
    ) -> None:
        self.random = random.Random(seed)
        self.seed, self.settings = seed, settings
        self.loss, self.doubled, self.delay_s = loss, doubled, delay_s
        self.now = 0.0
        self.roster = member_list(1, members)
        self.over_the_wire = len(self.roster.nodes) < 20
        """Whether to encode and decode messages; larger networks skip it to save time."""
        self.up: dict[NodeId, SwimMembership] = {}
        self.lives: Counter[NodeId] = Counter()
        self.clock: Counter[NodeId] = Counter()  # seconds that each node's clock is ahead
        self.cut: Callable[[NodeId, NodeId], bool] = lambda a, b: False
        self.messages: Counter[NodeId] = Counter()
        self.largest = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        for one in self.roster.nodes:
            self.start(one, self.roster if tell_all else None)

    # -- node faults --------------------------------------------------------------------------------------------------

    def start(self, one: PeerNode, roster: MemberList | None = None) -> SwimMembership:
        """Start or restart a node."""
        self.lives[one.id] += 1
        number = int((self.now + 1) * 1e6) + self.lives[one.id]
        member = SwimMembership(one, number, self.settings, seed=self.random.getrandbits(32))
        if roster is not None:
            member.set_member_list(self._clock_of(one.id), roster)
        self.up[one.id] = member
        self._schedule(self.now + self.random.random() * self.settings.heartbeat_s, lambda: self._tick(one.id, member))
        return member

    def kill(self, *names: str) -> None:
        for name in names:
            del self.up[NodeId(name)]

    def suspend(self, name: str, seconds: float) -> None:
        """Pause a node for ``seconds``, as a suspended virtual machine."""
        member = self.up.pop(NodeId(name))

        def wake() -> None:
            if name not in self.up:  # not started again meanwhile
                self.up[NodeId(name)] = member
                self._tick(NodeId(name), member)

        self._schedule(self.now + seconds, wake)

    def split(self, *sides: Iterable[str]) -> None:
        """Cut all messages between different sides."""
        side = {name: number for number, names in enumerate(sides) for name in names}
        self.cut = lambda a, b: side.get(a) != side.get(b)

    def heal(self) -> None:
        self.cut = lambda a, b: False

    # -- time ---------------------------------------------------------------------------------------------------------

    def run(self, seconds: float, watch: Callable[[], Any] | None = None) -> None:
        """Run for ``seconds``; call ``watch`` after every message and tick."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, event = heapq.heappop(self._events)
            event()
            if watch is not None:
                watch()
        self.now = end

    def run_until(self, condition: Callable[[], bool], within_s: float) -> float:
        """Run until ``condition`` holds after a heartbeat period; return the seconds it took."""
        begin = self.now
        while not condition():
            assert self.now - begin <= within_s, f"not within {within_s} s (seed {self.seed}): {self.describe()}"
            self.run(self.settings.heartbeat_s)
        return self.now - begin

    # -- membership views ---------------------------------------------------------------------------------------------

    def is_agreed(self, living: Iterable[str] | None = None) -> bool:
        """Return whether the ``living`` nodes (default: all running ones) see exactly each other alive."""
        expected = {one.id for one in self.roster.nodes} & set(self.up if living is None else living)
        return all(self.alive(name) == expected for name in expected)

    def alive(self, name: str) -> set[str]:
        standing = self.up[NodeId(name)].state_of
        return {one.id for one in self.roster.nodes if standing(one.id) is MemberState.ALIVE}

    def with_quorum(self) -> set[str]:
        return {name for name, member in self.up.items() if member.has_quorum}

    def describe(self) -> str:
        return "\n".join(f"{name}: {member.explain_quorum()}" for name, member in sorted(self.up.items()))

    # -- messages -----------------------------------------------------------------------------------------------------

    def _schedule(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _clock_of(self, name: NodeId) -> float:
        return self.now + self.clock[name]

    def _tick(self, name: NodeId, member: SwimMembership) -> None:
        if self.up.get(name) is not member:
            return
        for ping in member.tick(self._clock_of(name)):
            self._send(name, ping.node.id, ping.gossip, answer=True)
        for asked in member.indirect_pings():
            self._ask_another(name, asked.helper.id, asked.node)
        self._schedule(self.now + self.settings.heartbeat_s, lambda: self._tick(name, member))

    def _ask_another(self, a: NodeId, helper: NodeId, node: NodeId) -> None:
        """Ping ``node`` through ``helper``; the ping succeeds only if none of its four messages is lost."""
        self.messages[a] += 1
        ways = [(a, helper), (helper, node), (node, helper), (helper, a)]
        when = self.now + sum(self.random.uniform(*self.delay_s) for _ in ways)

        def answered() -> None:
            member = self.up.get(a)
            if member is not None and {helper, node} <= self.up.keys() and not any(self.cut(*way) for way in ways):
                member.indirect_ack(self._clock_of(a), node)

        if not any(self.random.random() < self.loss for _ in ways):
            self._schedule(when, answered)

    def _send(self, a: NodeId, b: NodeId, gossip: GossipMessage, *, answer: bool) -> None:
        self.messages[a] += 1
        if self.over_the_wire:
            wire = msgspec.msgpack.encode(gossip)
            self.largest = max(self.largest, len(wire))
            gossip = msgspec.msgpack.decode(wire, type=GossipMessage)
        for _ in range(1 + (self.random.random() < self.doubled)):
            if self.random.random() >= self.loss and not self.cut(a, b):
                when = self.now + self.random.uniform(*self.delay_s)
                self._schedule(when, lambda: self._deliver(a, b, gossip, answer=answer))

    def _deliver(self, a: NodeId, b: NodeId, gossip: GossipMessage, *, answer: bool) -> None:
        member = self.up.get(b)
        if member is None or self.cut(a, b):
            return
        member.receive_gossip(self._clock_of(b), a, gossip)
        if answer:
            self._send(b, a, member.gossip_for(a), answer=False)
        else:
            member.ping_acked(self._clock_of(b), a)
        wanted = member.newer_list_holder
        if wanted in self.up and not self.cut(b, wanted) and not self.cut(wanted, b):
            roster = self.up[wanted].member_list
            if roster is not None:
                member.set_member_list(self._clock_of(b), roster)
