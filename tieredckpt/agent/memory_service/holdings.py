"""What this node and the others hold of the memory service's namespaces, and giving up what is not kept."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from peerstore.errors import PeerStoreError
from peerstore.listening import SealListener
from peerstore.peers.team import Team
from peerstore.records import ShardFact, ShardRecord
from peerstore.store import NodeStore
from tieredckpt.agent.memory_service.names import JOB
from tieredckpt.agent.memory_service.registry import Namespace, Registry
from tieredckpt.agent.memory_service.retention import superfluous
from tieredckpt.agent.memory_service.spreading import Spreading
from tieredckpt.agent.memory_service.views import Shard, View, view_of, whole_steps

log = logging.getLogger(__name__)

_TICK_S = 0.5
_AGAIN_S = 5.0
_GATHER_S = 0.2
"""Shards that are put one soon after the other are looked at together."""


@dataclass(frozen=True)
class Look:
    """One look at everything."""

    view: View
    registry: Registry
    silent: Mapping[str, str]
    """Nodes that may hold something and could not be asked."""

    def whole(self, namespace: str, of: Namespace) -> list[int]:
        return whole_steps(self.view.of(namespace), of.num_ranks)


class Holdings(SealListener):
    """One node's eyes and broom. Any thread may call."""

    def __init__(self, store: NodeStore, me: str, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._store = store
        self._me = me
        self.spreading = Spreading(store, me, clock_ns)
        self.team: Team | None = None
        self.given_up = 0
        self._wanted = threading.Event()
        self._stop = threading.Event()
        self._tidying = threading.Lock()
        self._unsure = False
        """Somebody was silent at the last look: there may be more to give up once it speaks."""
        self._keeper = threading.Thread(target=self._keep, name="memory-service-keep", daemon=True)

    def start(self, team: Team | None) -> None:
        """From now on, look at other nodes too, where there are any."""
        self.team = team
        if team is not None:
            self.spreading.join(team)
            self.spreading.meet()
            self._store.subscribe(self)
            self._keeper.start()
        self.tidy()

    def close(self) -> None:
        self._stop.set()
        self._wanted.set()
        if self._keeper.ident is not None:
            self._keeper.join()

    # -- looking ------------------------------------------------------------------------------------------------------

    def here(self) -> list[ShardFact]:
        return self._store.inventory(JOB)

    def nearest(self, namespace: str, rank: int, step: int) -> Shard | None:
        """What this node itself has."""
        view = view_of({self._me: self.here()}, self.spreading.known())
        return view.of(namespace).get(step, {}).get(rank)

    def look(self) -> Look:
        """What all nodes have, as of now. Who asks while another does waits for one look with them."""
        held: dict[str, list[ShardFact]] = {}
        silent: dict[str, str] = {}
        if self.team is not None:
            sight = self.team.sight(fresh=True)
            held = {node: list(looked.facts) for node, looked in sight.nodes.items()}
            silent = {node: why for node, why in sight.silent.items() if not self.team.tending.gone(node)}
            verifying = {node for node, looked in sight.nodes.items() if looked.verifying and node != self._me}
            silent |= dict.fromkeys(verifying, "it still verifies what its last agent left")
            if not self.team.tending.quorum:
                silent |= {"": self.team.tending.explain()}
        held[self._me] = self.here()
        registry = self.spreading.known()
        return Look(view_of(held, registry), registry, silent)

    # -- giving up ----------------------------------------------------------------------------------------------------

    def copied(self, record: ShardRecord, holders: tuple[str, ...]) -> None:
        """Another node's shard came here."""
        if record.key.job == JOB:
            self._wanted.set()

    def put(self) -> None:
        """A shard was put, or deleted: others may be superfluous now."""
        if self.team is None:
            self.tidy()
        else:
            self._wanted.set()

    def tidy(self) -> int:
        """Give up what is not kept any more, of what is here; how many shards that were."""
        with self._tidying:
            look = self.look()
            self._unsure = bool(look.silent)
            mine = {fact.key for fact in self.here()}
            gone = [key for key in superfluous(look.view, look.registry, sure=not look.silent) if key in mine]
            if not gone:
                return 0
            count = self._store.forget(JOB, [key.group for key in gone])
            self.given_up += count
            for key in gone:
                log.info("memory service: step %d of rank %d is not kept any more", key.version, key.part)
            return count

    def _keep(self) -> None:
        seen, again_at = self.spreading.known(), float("inf")
        while not self._stop.is_set():
            asked = self._wanted.wait(_TICK_S)
            if self._stop.is_set():
                return
            try:
                self.spreading.meet()
                registry = self.spreading.known()
                if not (asked or registry is not seen or time.monotonic() >= again_at):
                    continue
                self._stop.wait(_GATHER_S)
                self._wanted.clear()
                seen, again_at = registry, float("inf")
                self.tidy()
            except (PeerStoreError, OSError) as error:
                log.warning("memory service: looking after namespaces failed, and is tried again: %s", error)
                again_at = time.monotonic() + _AGAIN_S
            except Exception:  # the thread must outlive any one look
                log.exception("memory service: looking after namespaces failed")
                again_at = time.monotonic() + _AGAIN_S
            else:
                if self._unsure:
                    again_at = time.monotonic() + _AGAIN_S
