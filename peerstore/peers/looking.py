"""What all nodes of a job hold, asked of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass

from peerstore.errors import PeerStoreError
from peerstore.peers.messages import Look, Looked
from peerstore.peers.tending import Tending
from peerstore.peers.turns import Turns
from peerstore.peers.unreached import Unreached

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


class Looking:
    """One job's nodes, looked at. Any thread may call."""

    def __init__(
        self,
        tending: Tending,
        here: Callable[[], Looked],
        *,
        seen: Callable[[Mapping[str, Looked]], None] = lambda _others: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tending = tending
        self._here = here
        self._seen = seen
        self._clock = clock
        self._lock = threading.Lock()
        self._unreached = Unreached(UNREACHED_S)
        self._turns = Turns(self._look_around, clock=clock)
        self._stop = threading.Event()
        self._lookers = ThreadPoolExecutor(_LOOKERS, thread_name_prefix="peerstore-look")

    def close(self) -> None:
        self._stop.set()
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

    def _look_around(self) -> Sight:
        me, roster = self._tending.me.id, self._tending.roster
        found = self._look_at_all([node.id for node in roster.nodes if node.id != me] if roster else [])
        nodes = {me: self._here(), **{node: one for node, one in found.items() if isinstance(one, Looked)}}
        silent = {node: one for node, one in found.items() if isinstance(one, str)}
        for node, one in nodes.items():
            if one.verifying and node != me:  # what it does not say yet is unknown, not absent
                silent[node] = f"it still verifies {one.verifying} shards that its last agent left"
        self._seen({node: one for node, one in nodes.items() if node != me})
        return Sight(nodes, silent)

    def _look_at_all(self, nodes: Iterable[str]) -> dict[str, Looked | str]:
        """Those that are taken for dead come last: nobody waits for them who could be asked at once."""
        deadline = time.monotonic() + LOOK_S + _MARGIN_S
        asked = {node: self._lookers.submit(self._look_at, node) for node in sorted(nodes, key=self._dead)}
        return {node: _by(deadline, future) for node, future in asked.items()}

    def _look_at(self, node: str) -> Looked | str:
        since = self._clock()
        try:
            peer = self._tending.peer(node)
            dead = self._dead(node)
            if dead and (why := self._remembered(node, peer.address)):
                return why
            within_s = DEAD_S if dead else LOOK_S
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


def _by(deadline: float, future: Future[Looked | str]) -> Looked | str:
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except FutureTimeoutError:  # it accepts connections and says nothing: who asked does not wait for it
        return f"it did not answer within {LOOK_S:.0f} s"
