"""The registry on all nodes: each keeps what it knows in a blob, hands that to the others when it changes, and asks
those that it meets for theirs.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

import msgspec

from peerstore.errors import PeerStoreError, ShardNotFoundError
from peerstore.peers.messages import AskBlob, PutBlob
from peerstore.peers.team import Team
from peerstore.store import NodeStore
from tieredckpt.agent.memory_service.names import JOB, REGISTRY
from tieredckpt.agent.memory_service.registry import Registry, decode, encode, merged

log = logging.getLogger(__name__)

_TOLD_S = 5.0


class Spreading:
    """What this node has heard of namespaces. Any thread may call."""

    def __init__(self, store: NodeStore, me: str, clock_ns: Callable[[], int]) -> None:
        self._store = store
        self._mine = REGISTRY + me
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        """Guards what was read last; never held while another node is spoken to."""
        self._changing = threading.Lock()
        """One change after the other, so that nobody is told an older one last."""
        self._team: Team | None = None
        self._met: dict[str, int] = {}
        """Whose registry is known here, and of which of their lives."""
        self._untold: set[str] = set()
        """Nodes that lived when something changed and could not be told."""
        self._read: tuple[dict[str, bytes], Registry] = ({}, Registry())

    def join(self, team: Team) -> None:
        self._team = team

    def known(self) -> Registry:
        """Everything this node has heard; others may have put something here meanwhile."""
        with self._lock:
            raw = {name: data for name in self._store.blobs(JOB) if (data := self._blob(name)) is not None}
            if raw != self._read[0]:
                whole = Registry()
                for name, data in raw.items():
                    whole = merged(whole, _decoded(data, name), now_ns=self._clock_ns())
                self._read = raw, whole
            return self._read[1]

    def _blob(self, name: str) -> bytes | None:
        if not name.startswith(REGISTRY):
            return None
        with contextlib.suppress(ShardNotFoundError):
            return self._store.get_blob(JOB, name)
        return None

    def change(self, changed: Callable[[Registry], Registry]) -> Registry:
        """Make a change, keep it, and tell all other nodes that are there before it counts."""
        with self._changing:
            fresh = changed(self.known())
            data = encode(fresh)
            self._store.put_blob(JOB, self._mine, data)
            for node in self._others():
                self._tell(node, data)
            return fresh

    def meet(self) -> bool:
        """Ask nodes that came, or came back, what they know; tell those that were not told. Whether there was news."""
        if self._team is None:
            return False
        tending, news = self._team.tending, False
        living = self._others()
        for node in living:
            life = tending.life(node)
            if self._met.get(node) == life:
                continue
            data = self._ask(node)
            if data is not None:
                self._met[node] = life
                news = self._learn(node, data) or news
        self._met = {node: life for node, life in self._met.items() if node in living}
        self._tell_again(living)
        return news

    def _others(self) -> list[str]:
        if self._team is None:
            return []
        return [node for node in sorted(self._team.tending.living) if node != self._team.me.id]

    def _tell(self, node: str, data: bytes) -> None:
        note, team = PutBlob(self._mine), self._team
        if team is None:
            return
        self._untold.discard(node)
        try:
            peer = team.tending.peer(node)
            peer.call("put_blob", note, type(None), payload=[memoryview(data)], within_s=_TOLD_S)
        except (PeerStoreError, OSError) as error:
            log.warning("memory service: %s was not told of a change yet: %s", node, error)
            self._untold.add(node)

    def _tell_again(self, living: list[str]) -> None:
        with self._changing:
            self._untold &= set(living)  # who comes back later asks
            data = self._blob(self._mine) if self._untold else None
            for node in sorted(self._untold) if data is not None else ():
                self._tell(node, data or b"")

    def _ask(self, node: str) -> bytes | None:
        team = self._team
        try:
            if team is not None:
                data: bytes = team.tending.peer(node).call("blob", AskBlob(REGISTRY + node), bytes, within_s=_TOLD_S)
                return data
        except ShardNotFoundError:
            return b""
        except (PeerStoreError, OSError) as error:
            log.debug("memory service: %s was not asked: %s", node, error)
        return None

    def _learn(self, node: str, data: bytes) -> bool:
        if not data:
            return False
        said = _decoded(data, node)
        with self._changing:
            before = self.known()
            now = merged(before, said, now_ns=self._clock_ns())
            if now == before:
                return False
            self._store.put_blob(JOB, self._mine, encode(now))
            return True


def _decoded(data: bytes, of: str) -> Registry:
    try:
        return decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        log.error("memory service: what %s says is not a registry: %s", of, error)
        return Registry()
