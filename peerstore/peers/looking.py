"""What all nodes of a job hold, asked of them; and what those of this node's district hold, for others who ask."""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass

import msgspec

from peerstore import frames
from peerstore.cluster.lookouts import SPLIT_FROM, Districts
from peerstore.cluster.roster import Roster
from peerstore.errors import PeerStoreError
from peerstore.peers.afar import MOST_BYTES, Afar, Found
from peerstore.peers.messages import Look, Looked, LookedFor, LookFor
from peerstore.peers.tending import Tending
from peerstore.peers.turns import Turns
from peerstore.peers.unreached import Unreached
from peerstore.records import ShardKey

LOOK_S = 5.0
"""How long one node has to answer, or to verify what its last agent left."""
DEAD_S = 1.0
"""The same for one that is taken for dead, connecting included."""
UNREACHED_S = 10.0
"""How long it is remembered that a node which is taken for dead was not reached, where finding out took time."""
_COSTLY_S = 0.2
_RECENT_S = 2.0
_LOOKERS = 64
_VERIFYING_S = 0.2
"""Between two looks at a node that verifies what its last agent left."""
_MARGIN_S = 0.5


@dataclass(frozen=True)
class Sight:
    """What every node of the job holds, as far as it could be asked."""

    nodes: Mapping[str, Looked]
    """This node included."""
    silent: Mapping[str, str]
    """Nodes that could not be asked, and why."""

    @property
    def sources(self) -> dict[ShardKey, tuple[str, ...]]:
        """Which nodes hold each shard, this one first."""
        found: dict[ShardKey, list[str]] = defaultdict(list)
        for node, looked in self.nodes.items():
            for fact in looked.facts:
                found[fact.key].append(node)
        return {key: tuple(nodes) for key, nodes in found.items()}


@dataclass(frozen=True)
class _Near:
    """What the nodes of this node's district hold, this one included."""

    found: Mapping[str, Found]

    @functools.cached_property
    def encoded(self) -> Mapping[str, bytes]:
        """Once for all who ask."""
        return {node: frames.encode(one) for node, one in self.found.items() if isinstance(one, Looked)}

    def told(self, nodes: Iterable[str]) -> tuple[dict[str, msgspec.Raw], dict[str, str]]:
        """What these nodes hold, as much of it as fits into an answer; and of whom nothing is said, and why."""
        room, told, unsaid = MOST_BYTES, dict[str, msgspec.Raw](), dict[str, str]()
        for node in nodes:
            data = self.encoded.get(node)
            if data is None:
                unsaid[node] = str(self.found.get(node, "it has just come to this district"))
            elif len(data) > room:
                unsaid[node] = f"what it holds, {len(data)} bytes, does not fit into one answer with the others'"
            else:
                room -= len(data)
                told[node] = msgspec.Raw(data)
        return told, unsaid


class Looking:
    """One job's nodes, looked at. Any thread may call."""

    def __init__(
        self,
        tending: Tending,
        here: Callable[[], Looked],
        *,
        seen: Callable[[Mapping[str, Looked], Mapping[str, int]], None] = lambda _seen, _lives: None,
        split_from: int = SPLIT_FROM,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tending = tending
        self._here = here
        self._seen = seen
        self._clock = clock
        self._lock = threading.Lock()
        self._unreached = Unreached(UNREACHED_S)
        self._split_from = split_from
        self._cut: tuple[Roster | None, Districts] = (None, Districts(()))
        self._near = Turns(self._look_near, clock=clock)
        self._turns = Turns(self._look_around, clock=clock)
        self._stop = threading.Event()
        self._lookers = ThreadPoolExecutor(_LOOKERS, thread_name_prefix="peerstore-look")
        self._afar = Afar(tending, self._look_at_all)  # who asks lookouts never takes a thread from who looks

    def close(self) -> None:
        self._stop.set()
        self._afar.close()
        self._lookers.shutdown(cancel_futures=True)

    def sight(self, *, fresh: bool = False) -> Sight:
        """What all nodes hold. Those that do not answer are named, not left out.

        ``fresh``: as of now, not as of a moment ago.
        """
        return self._turns.next() if fresh else self._turns.recent(_RECENT_S)

    def forget(self) -> None:
        """What was seen is not so any more."""
        self._turns.forget()
        with self._lock:
            self._unreached.keep(self._dead)

    def look_for(self, asked: LookFor) -> LookedFor:
        """What nodes of this node's district hold, for one of another. Who else is named is not looked for."""
        me = self._tending.me.id
        district = {me, *self._districts().of(me)}
        silent = dict.fromkeys(asked.nodes, f"{me} does not look at it: it is in another district")
        wanted = [node for node in silent if node in district]
        if not wanted:
            return LookedFor({}, silent)
        nodes, unsaid = self._near.next().told(wanted)
        return LookedFor(nodes, {node: why for node, why in (silent | unsaid).items() if node not in nodes})

    def _look_around(self) -> Sight:
        me = self._tending.me.id
        lives = self._tending.lives  # as of before they were asked: who starts again meanwhile may lose what it said
        beyond = self._districts().beyond(me)
        if beyond:
            near = self._afar.pool.submit(self._near.next)
            found = {**self._afar.look(beyond, short_s=DEAD_S), **near.result().found}
        else:
            found = dict(self._near.next().found)
        nodes = {node: one for node, one in found.items() if isinstance(one, Looked)}
        silent = {node: one for node, one in found.items() if isinstance(one, str)}
        for node, one in nodes.items():
            if one.verifying and node != me:  # what it does not say yet is unknown, not absent
                silent[node] = f"it still verifies {one.verifying} shards that its last agent left"
        self._seen({node: one for node, one in nodes.items() if node != me}, lives)
        return Sight(nodes, silent)

    def _look_near(self) -> _Near:
        me = self._tending.me.id
        others = [node for node in self._districts().of(me) if node != me]
        return _Near({me: self._here(), **self._look_at_all(dict.fromkeys(others))})

    def _districts(self) -> Districts:
        roster = self._tending.roster
        known, districts = self._cut
        if known is not roster:
            nodes = [node.id for node in roster.nodes] if roster is not None else []
            districts = Districts(nodes, split_from=self._split_from)
            self._cut = (roster, districts)
        return districts

    def _look_at_all(self, nodes: Mapping[str, float | None]) -> dict[str, Found]:
        """Those that are taken for dead come last: nobody waits for them who could be asked at once."""
        deadline = time.monotonic() + LOOK_S + _MARGIN_S
        order = sorted(nodes, key=self._dead)
        asked = {node: self._lookers.submit(self._look_at, node, nodes[node] or LOOK_S) for node in order}
        return {node: _by(deadline, future) for node, future in asked.items()}

    def _look_at(self, node: str, within_s: float) -> Found:
        since = self._clock()
        try:
            peer = self._tending.peer(node)
            dead = self._dead(node)
            if dead and (why := self._remembered(node, peer.address)):
                return why
            within_s = min(within_s, DEAD_S) if dead else within_s
            while True:
                found: Looked = peer.call("look", Look(), Looked, within_s=within_s)
                within_s = since + LOOK_S - self._clock()
                if not found.verifying or within_s <= _VERIFYING_S or self._stop.wait(_VERIFYING_S):
                    return found
                within_s -= _VERIFYING_S
        except (PeerStoreError, OSError) as error:
            self._not_reached(node, str(error), self._clock() - since)
            return str(error)

    def _dead(self, node: str) -> bool:
        return self._tending.standing(node) == "dead"

    def _remembered(self, node: str, address: str) -> str:
        with self._lock:
            return self._unreached.why(self._clock(), node, address)

    def _not_reached(self, node: str, why: str, took_s: float) -> None:
        if took_s >= _COSTLY_S and self._dead(node):
            address = self._tending.peer(node).address
            with self._lock:
                self._unreached.add(self._clock(), node, address, why)


def _by(deadline: float, future: Future[Found]) -> Found:
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except FutureTimeoutError:  # it accepts connections and says nothing: who asked does not wait for it
        return f"it did not answer within {LOOK_S:.0f} s"
    except CancelledError:
        return "this node's agent ends"
