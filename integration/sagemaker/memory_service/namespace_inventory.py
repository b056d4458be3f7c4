"""The registry of namespaces gossiped between nodes, the inventory of all nodes, and eviction."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from integration.sagemaker.memory_service.namespaces import (
    Namespace,
    NamespaceShard,
    NamespaceView,
    Registry,
    complete_namespace_steps,
    decode_registry,
    encode_registry,
    merge_registries,
    namespace_view,
    surplus_shards,
)
from peerstore.errors import PeerStoreError, ShardNotFoundError
from peerstore.peers.peer_messages import GetPeerBlob, PutPeerBlob
from peerstore.server.job_peers import JobPeers
from peerstore.shard_records import ShardInfo, ShardRecord
from peerstore.store.node_store import NodeStore, StoreListener
from tieredckpt.memory_service_options import MEMORY_SERVICE_JOB, REGISTRY_BLOB_PREFIX

log = logging.getLogger(__name__)

_TOLD_S = 5.0


class RegistryGossip:
    """What this node has heard of namespaces. Any thread may call."""

    def __init__(self, store: NodeStore, me: str, clock_ns: Callable[[], int]) -> None:
        self._store = store
        self._mine = REGISTRY_BLOB_PREFIX + me
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        """Guards what was read last; never held while another node is spoken to."""
        self._changing = threading.Lock()
        """One change after the other, so that nobody is told an older one last."""
        self._team: JobPeers | None = None
        self._met: dict[str, int] = {}
        """Whose registry is known here, and of which of their lives."""
        self._untold: set[str] = set()
        """Nodes that lived when something changed and could not be told."""
        self._read: tuple[dict[str, bytes], Registry] = ({}, Registry())

    def join(self, team: JobPeers) -> None:
        self._team = team

    def registry(self) -> Registry:
        """Everything this node has heard; others may have put something here meanwhile."""
        with self._lock:
            raw = {
                name: data
                for name in self._store.list_blobs(MEMORY_SERVICE_JOB)
                if (data := self._blob(name)) is not None
            }
            if raw != self._read[0]:
                whole = Registry()
                for name, data in raw.items():
                    whole = merge_registries(whole, _decoded(data, name), now_ns=self._clock_ns())
                self._read = raw, whole
            return self._read[1]

    def _blob(self, name: str) -> bytes | None:
        if not name.startswith(REGISTRY_BLOB_PREFIX):
            return None
        with contextlib.suppress(ShardNotFoundError):
            return self._store.get_blob(MEMORY_SERVICE_JOB, name)
        return None

    def change(self, changed: Callable[[Registry], Registry]) -> Registry:
        """Make a change, keep it, and tell all other nodes that are there before it counts."""
        with self._changing:
            fresh = changed(self.registry())
            data = encode_registry(fresh)
            self._store.put_blob(MEMORY_SERVICE_JOB, self._mine, data)
            for node in self._others():
                self._tell(node, data)
            return fresh

    def exchange(self) -> bool:
        """Ask nodes that came, or came back, what they know; tell those that were not told. Whether there was news."""
        if self._team is None:
            return False
        membership, news = self._team.membership, False
        living = self._others()
        for node in living:
            life = membership.generation_of(node)
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
        return [node for node in sorted(self._team.membership.alive) if node != self._team.this_node.id]

    def _tell(self, node: str, data: bytes) -> None:
        note, team = PutPeerBlob(self._mine), self._team
        if team is None:
            return
        self._untold.discard(node)
        try:
            peer = team.membership.client_for(node)
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
                data: bytes = team.membership.client_for(node).call(
                    "blob", GetPeerBlob(REGISTRY_BLOB_PREFIX + node), bytes, within_s=_TOLD_S
                )
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
            before = self.registry()
            now = merge_registries(before, said, now_ns=self._clock_ns())
            if now == before:
                return False
            self._store.put_blob(MEMORY_SERVICE_JOB, self._mine, encode_registry(now))
            return True


def _decoded(data: bytes, of: str) -> Registry:
    try:
        return decode_registry(data)
    except (msgspec.DecodeError, ValueError) as error:
        log.error("memory service: what %s says is not a registry: %s", of, error)
        return Registry()


_TICK_S = 0.5
_AGAIN_S = 5.0
_GATHER_S = 0.2
"""Shards that are put one soon after the other are looked at together."""


@dataclass(frozen=True)
class NamespaceSnapshot:
    """One look at everything."""

    view: NamespaceView
    registry: Registry
    unanswered: Mapping[str, str]
    """Nodes that may hold something and could not be asked."""

    def complete_steps(self, namespace: str, of: Namespace) -> list[int]:
        return complete_namespace_steps(self.view.of(namespace), of.num_ranks)


class NamespaceInventory(StoreListener):
    """One node's eyes and broom. Any thread may call."""

    def __init__(self, store: NodeStore, me: str, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._store = store
        self._me = me
        self.gossip = RegistryGossip(store, me, clock_ns)
        self.team: JobPeers | None = None
        self.evicted_count = 0
        self._wanted = threading.Event()
        self._stop = threading.Event()
        self._tidying = threading.Lock()
        self._unsure = False
        """Somebody was silent at the last look: there may be more to give up once it speaks."""
        self._keeper = threading.Thread(target=self._keep, name="memory-service-keep", daemon=True)

    def start(self, team: JobPeers | None) -> None:
        """From now on, look at other nodes too, where there are any."""
        self.team = team
        if team is not None:
            self.gossip.join(team)
            self.gossip.exchange()
            self._store.subscribe(self)
            self._keeper.start()
        self.evict_surplus()

    def close(self) -> None:
        self._stop.set()
        self._wanted.set()
        if self._keeper.ident is not None:
            self._keeper.join()

    # -- looking ------------------------------------------------------------------------------------------------------

    def local_facts(self) -> list[ShardInfo]:
        return self._store.list_shards(MEMORY_SERVICE_JOB)

    def nearest(self, namespace: str, rank: int, step: int) -> NamespaceShard | None:
        """What this node itself has."""
        view = namespace_view({self._me: self.local_facts()}, self.gossip.registry())
        return view.of(namespace).get(step, {}).get(rank)

    def snapshot(self) -> NamespaceSnapshot:
        """What all nodes have, as of now. Who asks while another does waits for one look with them."""
        held: dict[str, list[ShardInfo]] = {}
        silent: dict[str, str] = {}
        if self.team is not None:
            sight = self.team.inventory(fresh=True)
            held = {node: list(looked.shards) for node, looked in sight.nodes.items()}
            silent = {node: why for node, why in sight.unreachable.items() if not self.team.membership.is_dead(node)}
            verifying = {node for node, looked in sight.nodes.items() if looked.verifying and node != self._me}
            silent |= dict.fromkeys(verifying, "it still verifies what its last agent left")
            if not self.team.membership.has_quorum:
                silent |= {"": self.team.membership.explain_quorum()}
        held[self._me] = self.local_facts()
        registry = self.gossip.registry()
        return NamespaceSnapshot(namespace_view(held, registry), registry, silent)

    # -- giving up ----------------------------------------------------------------------------------------------------

    def on_replica_stored(self, record: ShardRecord, holders: tuple[str, ...]) -> None:
        """Another node's shard came here."""
        if record.key.job == MEMORY_SERVICE_JOB:
            self._wanted.set()

    def shard_changed(self) -> None:
        """A shard was put, or deleted: others may be superfluous now."""
        if self.team is None:
            self.evict_surplus()
        else:
            self._wanted.set()

    def evict_surplus(self) -> int:
        """Give up what is not kept any more, of what is here; how many shards that were."""
        with self._tidying:
            look = self.snapshot()
            self._unsure = bool(look.unanswered)
            mine = {fact.key for fact in self.local_facts()}
            gone = [key for key in surplus_shards(look.view, look.registry, sure=not look.unanswered) if key in mine]
            if not gone:
                return 0
            count = self._store.delete_versions(MEMORY_SERVICE_JOB, [key.version_id for key in gone])
            self.evicted_count += count
            for key in gone:
                log.info("memory service: step %d of rank %d is not kept any more", key.version, key.part)
            return count

    def _keep(self) -> None:
        seen, again_at = self.gossip.registry(), float("inf")
        while not self._stop.is_set():
            asked = self._wanted.wait(_TICK_S)
            if self._stop.is_set():
                return
            try:
                self.gossip.exchange()
                registry = self.gossip.registry()
                if not (asked or registry is not seen or time.monotonic() >= again_at):
                    continue
                self._stop.wait(_GATHER_S)
                self._wanted.clear()
                seen, again_at = registry, float("inf")
                self.evict_surplus()
            except (PeerStoreError, OSError) as error:
                log.warning("memory service: looking after namespaces failed, and is tried again: %s", error)
                again_at = time.monotonic() + _AGAIN_S
            except Exception:  # the thread must outlive any one look
                log.exception("memory service: looking after namespaces failed")
                again_at = time.monotonic() + _AGAIN_S
            else:
                if self._unsure:
                    again_at = time.monotonic() + _AGAIN_S
