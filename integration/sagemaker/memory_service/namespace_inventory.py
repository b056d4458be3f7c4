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
from peerstore.store.node_store import NodeStore
from peerstore.store.store_listener import StoreListener
from tieredckpt.memory_service_options import MEMORY_SERVICE_JOB, REGISTRY_BLOB_PREFIX

log = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 5.0


class RegistryGossip:
    """This node's registry of namespaces, and its exchange with other nodes.

    Any thread may call it.
    """

    def __init__(self, store: NodeStore, me: str, clock_ns: Callable[[], int]) -> None:
        self._store = store
        self._mine = REGISTRY_BLOB_PREFIX + me
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        """Guards ``_read``; never held during a call to another node."""
        self._changing = threading.Lock()
        """Serializes changes, so that an older registry never follows a newer one."""
        self._team: JobPeers | None = None
        self._known_generations: dict[str, int] = {}
        """Generation of each node at the last exchange."""
        self._unsent: set[str] = set()
        """Live nodes that did not receive the last change."""
        self._read: tuple[dict[str, bytes], Registry] = ({}, Registry())

    def join(self, team: JobPeers) -> None:
        self._team = team

    def registry(self) -> Registry:
        """Return the merged registry of all blobs on this node, which other nodes also write."""
        with self._lock:
            raw = {
                name: data
                for name in self._store.blobs.list_names(MEMORY_SERVICE_JOB)
                if (data := self._blob(name)) is not None
            }
            if raw != self._read[0]:
                merged = Registry()
                for name, data in raw.items():
                    merged = merge_registries(merged, _decode_or_empty(data, name), now_ns=self._clock_ns())
                self._read = raw, merged
            return self._read[1]

    def _blob(self, name: str) -> bytes | None:
        if not name.startswith(REGISTRY_BLOB_PREFIX):
            return None
        with contextlib.suppress(ShardNotFoundError):
            return self._store.blobs.get(MEMORY_SERVICE_JOB, name)
        return None

    def change(self, changed: Callable[[Registry], Registry]) -> Registry:
        """Apply a change, store it, and send it to all live nodes before returning."""
        with self._changing:
            fresh = changed(self.registry())
            data = encode_registry(fresh)
            self._store.blobs.put(MEMORY_SERVICE_JOB, self._mine, data)
            for node in self._others():
                self._send(node, data)
            return fresh

    def exchange(self) -> bool:
        """Read the registries of new and restarted nodes, and resend missed changes.

        Return whether the registry changed.
        """
        if self._team is None:
            return False
        membership, news = self._team.membership, False
        living = self._others()
        for node in living:
            generation = membership.generation_of(node)
            if self._known_generations.get(node) == generation:
                continue
            data = self._fetch(node)
            if data is not None:
                self._known_generations[node] = generation
                news = self._merge(node, data) or news
        self._known_generations = {
            node: generation for node, generation in self._known_generations.items() if node in living
        }
        self._resend(living)
        return news

    def _others(self) -> list[str]:
        if self._team is None:
            return []
        return [node for node in sorted(self._team.membership.alive) if node != self._team.this_node.id]

    def _send(self, node: str, data: bytes) -> None:
        note, team = PutPeerBlob(self._mine), self._team
        if team is None:
            return
        self._unsent.discard(node)
        try:
            peer = team.membership.client_for(node)
            peer.call("put_blob", note, type(None), payload=[memoryview(data)], within_s=_CALL_TIMEOUT_S)
        except (PeerStoreError, OSError) as error:
            log.warning("memory service: %s has not received a change yet: %s", node, error)
            self._unsent.add(node)

    def _resend(self, living: list[str]) -> None:
        with self._changing:
            self._unsent &= set(living)  # restarted nodes read the registry themselves
            data = self._blob(self._mine) if self._unsent else None
            for node in sorted(self._unsent) if data is not None else ():
                self._send(node, data or b"")

    def _fetch(self, node: str) -> bytes | None:
        team = self._team
        try:
            if team is not None:
                data: bytes = team.membership.client_for(node).call(
                    "blob", GetPeerBlob(REGISTRY_BLOB_PREFIX + node), bytes, within_s=_CALL_TIMEOUT_S
                )
                return data
        except ShardNotFoundError:
            return b""
        except (PeerStoreError, OSError) as error:
            log.debug("memory service: cannot read the registry of %s: %s", node, error)
        return None

    def _merge(self, node: str, data: bytes) -> bool:
        if not data:
            return False
        received = _decode_or_empty(data, node)
        with self._changing:
            before = self.registry()
            merged = merge_registries(before, received, now_ns=self._clock_ns())
            if merged == before:
                return False
            self._store.blobs.put(MEMORY_SERVICE_JOB, self._mine, encode_registry(merged))
            return True


def _decode_or_empty(data: bytes, of: str) -> Registry:
    try:
        return decode_registry(data)
    except (msgspec.DecodeError, ValueError) as error:
        log.error("memory service: the data of %s is not a registry: %s", of, error)
        return Registry()


_TICK_S = 0.5
_RETRY_S = 5.0
_GATHER_S = 0.2
"""Seconds to wait for further shards before one common check."""


@dataclass(frozen=True)
class NamespaceSnapshot:
    """Consistent view of all namespaces and shards."""

    view: NamespaceView
    registry: Registry
    unanswered: Mapping[str, str]
    """Nodes that may hold shards but did not respond, with the reason."""

    def complete_steps(self, namespace: str, of: Namespace) -> list[int]:
        return complete_namespace_steps(self.view.of(namespace), of.num_ranks)


class NamespaceInventory(StoreListener):
    """Inventory of the shards of all nodes, and eviction of this node's surplus. Any thread may call it."""

    def __init__(self, store: NodeStore, me: str, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._store = store
        self._me = me
        self.gossip = RegistryGossip(store, me, clock_ns)
        self.team: JobPeers | None = None
        self.evicted_count = 0
        self._wanted = threading.Event()
        self._stop = threading.Event()
        self._evicting = threading.Lock()
        self._incomplete = False
        """Whether a node did not respond to the last snapshot, so more shards may be surplus."""
        self._thread = threading.Thread(target=self._run, name="memory-service-keep", daemon=True)

    def start(self, team: JobPeers | None) -> None:
        """Start the inventory, including other nodes with a team."""
        self.team = team
        if team is not None:
            self.gossip.join(team)
            self.gossip.exchange()
            self._store.subscribe(self)
            self._thread.start()
        self.evict_surplus()

    def close(self) -> None:
        self._stop.set()
        self._wanted.set()
        if self._thread.ident is not None:
            self._thread.join()

    def local_facts(self) -> list[ShardInfo]:
        return self._store.list_shards(MEMORY_SERVICE_JOB)

    def nearest(self, namespace: str, rank: int, step: int) -> NamespaceShard | None:
        """Return this node's shard, or None."""
        view = namespace_view({self._me: self.local_facts()}, self.gossip.registry())
        return view.of(namespace).get(step, {}).get(rank)

    def snapshot(self) -> NamespaceSnapshot:
        """Return the current shards of all nodes. Concurrent calls share one query."""
        held: dict[str, list[ShardInfo]] = {}
        silent: dict[str, str] = {}
        if self.team is not None:
            inventory = self.team.inventory(fresh=True)
            held = {node: list(shards.shards) for node, shards in inventory.nodes.items()}
            silent = {
                node: reason for node, reason in inventory.unreachable.items() if not self.team.membership.is_dead(node)
            }
            verifying = {node for node, shards in inventory.nodes.items() if shards.verifying and node != self._me}
            silent |= dict.fromkeys(verifying, "it still verifies what its last agent left")
            if not self.team.membership.has_quorum:
                silent |= {"": self.team.membership.explain_quorum()}
        held[self._me] = self.local_facts()
        registry = self.gossip.registry()
        return NamespaceSnapshot(namespace_view(held, registry), registry, silent)

    def on_replica_stored(self, record: ShardRecord, holders: tuple[str, ...]) -> None:
        """Schedule an eviction after another node's replica was stored here."""
        if record.key.job == MEMORY_SERVICE_JOB:
            self._wanted.set()

    def shard_changed(self) -> None:
        """Evict surplus shards, or schedule it, after a shard was put or deleted."""
        if self.team is None:
            self.evict_surplus()
        else:
            self._wanted.set()

    def evict_surplus(self) -> int:
        """Delete this node's shards that are no longer retained. Return their number."""
        with self._evicting:
            snapshot = self.snapshot()
            self._incomplete = bool(snapshot.unanswered)
            mine = {fact.key for fact in self.local_facts()}
            surplus = [
                key
                for key in surplus_shards(snapshot.view, snapshot.registry, sure=not snapshot.unanswered)
                if key in mine
            ]
            if not surplus:
                return 0
            count = self._store.versions.delete(MEMORY_SERVICE_JOB, [key.version_id for key in surplus])
            self.evicted_count += count
            for key in surplus:
                log.info("memory service: deleted step %d of rank %d on this node", key.version, key.part)
            return count

    def _run(self) -> None:
        seen, retry_at = self.gossip.registry(), float("inf")
        while not self._stop.is_set():
            wanted = self._wanted.wait(_TICK_S)
            if self._stop.is_set():
                return
            try:
                self.gossip.exchange()
                registry = self.gossip.registry()
                if not (wanted or registry is not seen or time.monotonic() >= retry_at):
                    continue
                self._stop.wait(_GATHER_S)
                self._wanted.clear()
                seen, retry_at = registry, float("inf")
                self.evict_surplus()
            except (PeerStoreError, OSError) as error:
                log.warning("memory service: looking after namespaces failed, and is tried again: %s", error)
                retry_at = time.monotonic() + _RETRY_S
            except Exception:  # the thread must survive any error
                log.exception("memory service: looking after namespaces failed")
                retry_at = time.monotonic() + _RETRY_S
            else:
                if self._incomplete:
                    retry_at = time.monotonic() + _RETRY_S
