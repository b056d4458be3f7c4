"""Which version every part of is kept as well as was asked for: counted by one node, told to all."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from peerstore.crashpoints import reach
from peerstore.errors import PeerStoreError
from peerstore.peers.duties import Reports, scribe, told_at_once
from peerstore.peers.messages import Settled, Settling
from peerstore.peers.tending import Tending
from peerstore.records import Group
from peerstore.store import NodeStore

log = logging.getLogger(__name__)

_TOLD_S = 5.0
_TELLERS = 16
_MESSENGERS = 2
"""How many others are asked to pass on what the scribe is to know."""


@dataclass
class Totals:
    """Counted since the agent started."""

    copies: int = 0
    sent_bytes: int = 0
    skipped_bytes: int = 0
    seconds: float = 0.0
    errors: int = 0
    settled: int = 0
    lag_s: float = 0.0
    """From the last shard's seal to its last copy."""


class Settlement:
    """One job's :class:`~peerstore.peers.duties.Reports`, sent and received. ``changed`` guards them."""

    def __init__(
        self,
        store: NodeStore,
        job: str,
        tending: Tending,
        *,
        reports: Reports,
        totals: Totals,
        changed: threading.Condition,
    ) -> None:
        self._store = store
        self._job = job
        self._tending = tending
        self._reports = reports
        self._totals = totals
        self._changed = changed
        self._first: tuple[Mapping[str, object], str | None] = ({}, None)
        self._announcing = threading.Lock()
        self._newest: Group | None = None
        self._untold: set[str] = set()
        """Nodes that are to be told of the newest version, and whose turn has not come."""
        self._tellers = ThreadPoolExecutor(_TELLERS, thread_name_prefix="peerstore-settled")

    def tell(self, teller: str, notes: Iterable[Settling]) -> bool:
        """Tell the scribe which parts of which versions are kept as they are to be; whether it heard all of that."""
        heard = True
        for note in notes:
            if self._told(teller, note):
                with self._changed:
                    self._reports.reported(teller, note)
            else:
                heard = False
        self._look()  # somebody may answer by now for what a dead node did
        return heard

    def _told(self, teller: str, note: Settling) -> bool:
        """Whether the scribe heard it: from here, or by way of others, so that one bad path holds up no version."""
        me = self._tending.me.id
        if teller == me:
            self.settling(note)
            return True
        others = [node for node in sorted(self._tending.living) if node not in (me, teller)]
        for node in [teller, *others[:_MESSENGERS]]:
            try:
                self._tell(node, note, timeout_s=_TOLD_S if node == teller else 2 * _TOLD_S)
            except (PeerStoreError, OSError) as error:
                log.debug("job %s: %s was not told by %s what is settled: %s", self._job, teller, node, error)
            else:
                return True
        return False

    def _tell(self, node: str, note: Settling, *, timeout_s: float) -> None:
        self._tending.peer(node).call("settling", note, type(None), timeout_s=timeout_s)

    def settling(self, note: Settling) -> None:
        """A node of the job says that these parts are kept as they are to be. Raises when the scribe cannot be told."""
        with self._changed:
            self._reports.count(note)
        if not self._look():
            teller = self._scribe()
            if teller is not None and teller < self._tending.me.id:  # always down, so never in circles
                self._tell(teller, note, timeout_s=_TOLD_S)

    def _scribe(self) -> str | None:
        """Thousands of nodes tell of one version: who the first of the living is is not found out for each."""
        living = self._tending.living
        known, found = self._first
        if known is not living:
            found = scribe(living)
            self._first = living, found
        return found

    def _look(self) -> bool:
        """Whether a version is settled by what was told so far. Then all hear of it."""
        living, settled = self._tending.living, self._store.copies.settled(self._job)
        quorum = self._tending.quorum
        with self._changed:
            group = self._reports.complete(living=living, life=self._tending.life, settled=settled, quorum=quorum)
        if group is None:
            return False
        self.settled(group)
        reach("peer.settling")
        self._announce(group, told_at_once(living, self._tending.me.id))
        return True

    def _announce(self, group: Group, nodes: Iterable[str]) -> None:
        """Have these nodes told, several at a time: whoever reported the last part does not wait for all of them."""
        with self._announcing:
            self._newest = group
            new = [node for node in nodes if node not in self._untold]
            self._untold.update(new)
        for node in new:
            with contextlib.suppress(RuntimeError):  # this agent ends, and the others hear it by the pings
                self._tellers.submit(self._tell_settled, node)

    def _tell_settled(self, node: str) -> None:
        with self._announcing:
            self._untold.discard(node)
            group = self._newest  # who could not be told of an older one in time hears of the newest only
        if group is None:
            return
        try:
            self._tending.peer(node).call("settled", Settled(group), type(None), timeout_s=_TOLD_S, within_s=_TOLD_S)
        except (PeerStoreError, OSError) as error:  # it learns with the next version, or by the next ping
            log.debug("job %s: %s was not told of %s: %s", self._job, node, group, error)

    def close(self) -> None:
        self._tellers.shutdown(cancel_futures=True)

    def settled(self, group: Group) -> None:
        """Every part of this version is kept as it is to be: what is older may go."""
        before = self._store.copies.settled(self._job)
        self._store.copies.settle(self._job, group)
        if before is None or before < group:
            self._totals.settled += 1
        with self._changed:
            self._changed.notify_all()
