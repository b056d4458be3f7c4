"""What the nodes of other districts hold, by way of one lookout in each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait

from peerstore import frames
from peerstore.cluster.lookouts import Errand
from peerstore.errors import PeerRefusedError, PeerStoreError, ProtocolError, RequestError
from peerstore.peers.messages import MOST_LOOKED_FOR, Looked, LookedFor, LookFor
from peerstore.peers.tending import Tending

LATE_S = 2.0
"""A lookout that has not answered by then may still do so; the next one is asked as well."""
WITHIN_S = 11.0
"""A lookout may have to end one look before it begins the one that is wanted; each takes as long as a silent node."""
MOST_BYTES = 32 << 20
"""In one answer, whatever the nodes hold: half of what a message may have."""
_ASKERS = 64

Found = Looked | str
"""What a node holds, or why that is not known."""


class Afar:
    """Asks lookouts, several at a time. Any thread may call."""

    def __init__(self, tending: Tending, look_at: Callable[[Mapping[str, float | None]], dict[str, Found]]) -> None:
        self._tending = tending
        self._look_at = look_at
        """Looks at these nodes directly, each within so many seconds."""
        self.pool = ThreadPoolExecutor(_ASKERS, thread_name_prefix="peerstore-ask")

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)

    def look(self, districts: Iterable[Sequence[str]], *, short_s: float) -> dict[str, Found]:
        """All nodes of these districts, each in the order in which its members are asked to look.

        Where nobody looks its nodes are looked at from here. So are, for ``short_s``, those that a lookout did not
        reach and that live as far as this node knows: it may be the lookout's way that is bad, and not the node.
        """
        errands = [Errand(members, gone=self._tending.gone) for members in districts]
        answers = _Asking(self, errands).answers()
        found: dict[str, Found] = {}
        directly: dict[str, float | None] = {}
        for errand, answer in zip(errands, answers, strict=True):
            if answer is None:
                directly |= dict.fromkeys(errand.members)
                continue
            for node in errand.members:
                found[node] = one = _said(answer, node)
                if isinstance(one, str) and self._tending.standing(node) != "dead":
                    directly[node] = short_s
        return found | self._look_at(directly)

    def ask(self, lookout: str, nodes: tuple[str, ...], within_s: float) -> LookedFor:
        asked = LookFor(nodes[:MOST_LOOKED_FOR])
        found: LookedFor = self._tending.peer(lookout).call("look_for", asked, LookedFor, within_s=within_s)
        return found


class _Asking:
    """One round of questions. Used by one thread."""

    def __init__(self, afar: Afar, errands: Sequence[Errand]) -> None:
        self._afar = afar
        self._errands = errands
        self._deadline = time.monotonic() + WITHIN_S
        self._answers: list[LookedFor | None] = [None] * len(errands)
        self._asked: dict[Future[LookedFor], int] = {}
        self._late_at: dict[int, float] = {}
        """The districts that the next lookout is to be asked for, and when."""

    def answers(self) -> list[LookedFor | None]:
        """What was said of each district; ``None`` where nobody said anything."""
        for number in range(len(self._errands)):
            self._ask_next(number)
        while self._asked and (now := time.monotonic()) < self._deadline:
            until = min([self._deadline, *self._late_at.values()])
            done, _ = wait(self._asked, max(0.0, until - now), FIRST_COMPLETED)
            for future in done:
                number = self._asked.pop(future)
                if self._answers[number] is None:
                    self._hear(number, future)
            for number in [number for number, at in self._late_at.items() if at <= time.monotonic()]:
                self._ask_next(number)
        self._let_go(self._asked)
        return self._answers

    def _ask_next(self, number: int) -> None:
        errand = self._errands[number]
        self._late_at.pop(number, None)
        lookout = errand.next()
        if lookout is not None:
            now = time.monotonic()
            future = self._afar.pool.submit(self._afar.ask, lookout, errand.members, self._deadline - now)
            self._asked[future] = number
            self._late_at[number] = now + LATE_S

    def _hear(self, number: int, future: Future[LookedFor]) -> None:
        try:
            self._answers[number] = future.result()
        except (PeerStoreError, OSError, CancelledError) as error:
            if _knows_nothing_of_it(error):
                self._errands[number].give_up()
            self._ask_next(number)
            return
        self._late_at.pop(number, None)
        self._let_go([other for other, of in self._asked.items() if of == number])

    def _let_go(self, futures: Iterable[Future[LookedFor]]) -> None:
        """Nobody waits for those any more."""
        for future in list(futures):
            future.cancel()
            del self._asked[future]


def _knows_nothing_of_it(error: Exception) -> bool:
    """An agent of an older version: the others of its district are likely to be as old."""
    return isinstance(error, RequestError) and not isinstance(error, ProtocolError | PeerRefusedError)


def _said(answer: LookedFor, node: str) -> Found:
    raw = answer.nodes.get(node)
    if raw is None:
        return answer.silent.get(node, "its lookout said nothing of it")
    try:
        return frames.decode(raw, Looked)
    except ProtocolError as error:
        return f"its lookout did not repeat what it said: {error}"
