"""MemoryService: create, put, find, read, remove, latest."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus

from integration.sagemaker.memory_service.namespace_inventory import NamespaceInventory, NamespaceSnapshot
from integration.sagemaker.memory_service.namespaces import (
    Namespace,
    NamespaceShard,
    Registry,
    RemovedShard,
    ShardNote,
    decode_note,
    encode_note,
    namespace_shard_key,
    with_deleted_namespaces,
    with_namespace,
    with_removed_shard,
)
from integration.sagemaker.memory_service.shard_io import (
    BodyPiece,
    IncomingBody,
    ShardReceiver,
    ShardSender,
    seal_shard,
)
from integration.sagemaker.memory_service.shard_requests import RequestRefusedError, no_namespace_error, not_found_error
from peerstore.errors import PeerStoreError, ShardNotFoundError
from peerstore.server.job_peers import JobPeers
from peerstore.store.node_store import NodeStore
from tieredckpt import memory_service_options

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FoundShard:
    """Result of a search for a shard."""

    shard: NamespaceShard
    size_bytes: int
    header: bytes | None


class MemoryService:
    """Namespaces of shards in the memory of all nodes, served by one node. Any thread may call it.

    - After status 200 a shard is sealed on this node; replicas follow in the background, as for other shards.
    - A step is listed if no shard of it is missing on the nodes together
      (:func:`integration.sagemaker.memory_service.namespaces.has_all_ranks`).
    - A missing shard returns 404. An unreachable or unstorable one returns 5xx and a reason, never an empty response.
    """

    def __init__(self, store: NodeStore, me: str, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._store = store
        self._clock_ns = clock_ns
        store.jobs.incarnations.manage(
            memory_service_options.MEMORY_SERVICE_JOB,
            memory_service_options.MEMORY_SERVICE_EPOCH,
            memory_service_options.MEMORY_SERVICE_INCARNATION,
        )
        self.holdings = NamespaceInventory(store, me, clock_ns=clock_ns)
        self._receiver = ShardReceiver(store, self.holdings.evict_surplus)
        self._sender = ShardSender(store, me)
        self._stamp_lock = threading.Lock()
        self._stamp = 0
        self.counted: Counter[str] = Counter()

    def start(self, team: JobPeers | None) -> None:
        """Serve this node's shards, and other nodes' shards with a team."""
        self._sender.team = team
        self.holdings.start(team)

    def close(self) -> None:
        self.holdings.close()

    def namespace(self, name: str) -> Namespace:
        namespace = self.holdings.gossip.registry().get(name)
        if namespace is None:
            raise no_namespace_error(name)
        return namespace

    def create(self, name: str, *, num_ranks: int, steps_retained: int) -> None:
        def create(registry: Registry) -> Registry:
            if registry.get(name) is not None:
                raise RequestRefusedError(HTTPStatus.CONFLICT, f"Namespace '{name}' already exists")
            now_ns = self._clock_ns()
            return with_namespace(registry, name, num_ranks=num_ranks, steps_retained=steps_retained, now_ns=now_ns)

        self.holdings.gossip.change(create)
        log.info("memory service: namespace %s of %d ranks, %d steps kept", name, num_ranks, steps_retained)

    def delete(self, name: str) -> None:
        def delete(registry: Registry) -> Registry:
            if registry.get(name) is None:
                raise no_namespace_error(name)
            return with_deleted_namespaces(registry, name, now_ns=self._clock_ns())

        self.holdings.gossip.change(delete)
        self.holdings.shard_changed()
        log.info("memory service: namespace %s is deleted", name)

    def reset(self) -> None:
        """Delete every namespace."""
        self.holdings.gossip.change(
            lambda known: with_deleted_namespaces(known, *known.live_namespaces, now_ns=self._clock_ns())
        )
        self.holdings.shard_changed()
        log.warning("memory service: every namespace is deleted")

    def put(self, name: str, rank: int, step: int, header: bytes | None, body: IncomingBody) -> None:
        """Store a rank's bytes of a step. They replace earlier ones."""
        namespace = self.namespace(name)
        key = namespace_shard_key(rank, step, self._next_stamp())
        with self._receiver.slot(key, body) as (lease, size, is_plan):
            note = ShardNote(name, namespace.generation, header, is_plan)
            if self.namespace(name).generation != namespace.generation:
                raise no_namespace_error(name)
            seal_shard(self._store, lease, size, encode_note(note))
        self.counted["put_bytes"] += size
        self._delete_older(name, rank, step, key.attempt)
        self.holdings.shard_changed()

    def _delete_older(self, name: str, rank: int, step: int, stamp: int) -> None:
        """Delete this node's earlier shards of the same rank and step immediately."""
        older = [
            fact.key.version_id
            for fact in self.holdings.local_facts()
            if (fact.key.part, fact.key.version) == (rank, step) and fact.key.attempt < stamp
            if _namespace_of(fact.meta) == name
        ]
        if older:
            self._store.versions.delete(memory_service_options.MEMORY_SERVICE_JOB, older)

    def _next_stamp(self) -> int:
        with self._stamp_lock:
            self._stamp = max(self._stamp + 1, self._clock_ns())
            return self._stamp

    def find(self, name: str, rank: int, step: int) -> FoundShard:
        """Return the newest shard of the rank and step, on any node."""
        if self.holdings.gossip.registry().get(name) is None:
            raise not_found_error()
        shard = self._find(name, rank, step)
        return FoundShard(shard, shard.size_bytes, shard.note.header)

    def _find(self, name: str, rank: int, step: int) -> NamespaceShard:
        local = self.holdings.nearest(name, rank, step)
        if local is not None and self.holdings.team is None:
            return local
        snapshot = self.holdings.snapshot()
        shard = snapshot.view.of(name).get(step, {}).get(rank)
        if shard is not None:
            return shard
        self._require_all_answers(snapshot, f"Shard {rank} of step {step}")
        raise not_found_error()

    @contextlib.contextmanager
    def reading(self, found: FoundShard, start: int, stop: int) -> Iterator[Iterator[BodyPiece]]:
        """Yield the pieces of bytes ``start`` to ``stop``.

        Raise :class:`RequestRefusedError` before the block if the first piece is not available.
        """
        with contextlib.closing(self._sender.pieces(found.shard, start, stop)) as pieces:
            try:
                first = next(pieces, None)
            except ShardNotFoundError as error:
                raise not_found_error() from error
            except (PeerStoreError, OSError) as error:
                text = f"The shard is not to be had right now: {error}"
                raise RequestRefusedError(HTTPStatus.SERVICE_UNAVAILABLE, text) from error
            self.counted["get_bytes"] += stop - start
            self.counted["remote_gets"] += isinstance(first, memoryview)
            yield itertools.chain([] if first is None else [first], pieces)

    def remove(self, name: str, rank: int, step: int) -> None:
        found = self.find(name, rank, step)
        note, until = found.shard.note, found.shard.key.attempt
        removed = RemovedShard(name, note.generation, rank, step, until)
        self.holdings.gossip.change(lambda known: with_removed_shard(known, removed, now_ns=self._clock_ns()))
        self._store.versions.delete(memory_service_options.MEMORY_SERVICE_JOB, [found.shard.key.version_id])
        self.holdings.shard_changed()

    def latest(self, name: str, limit: int) -> list[int]:
        """Return the newest complete steps, newest first."""
        namespace = self.holdings.gossip.registry().get(name)
        if namespace is None:
            raise not_found_error()
        snapshot = self.holdings.snapshot()
        if snapshot.unanswered:
            log.warning(
                "memory service: steps of %s are listed without having asked %s", name, _format_unanswered(snapshot)
            )
        return snapshot.complete_steps(name, namespace)[:limit]

    def _require_all_answers(self, snapshot: NamespaceSnapshot, what: str) -> None:
        """Raise :class:`RequestRefusedError` if a node did not respond: the shard may exist there."""
        if snapshot.unanswered:
            raise RequestRefusedError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{what} may be on a node that does not answer: {_format_unanswered(snapshot)}",
            )


def _namespace_of(meta: bytes) -> str:
    note = decode_note(meta)
    return note.namespace if note is not None else ""


def _format_unanswered(snapshot: NamespaceSnapshot) -> str:
    return "; ".join(f"{node}: {why}" if node else why for node, why in sorted(snapshot.unanswered.items()))
