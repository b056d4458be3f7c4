"""A shard's bytes for whoever asked: from this node's slot, or from other nodes, a window at a time."""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Generator, Iterator

from peerstore.errors import PeerStoreError, PeerUnreachableError, ShardDamagedError, ShardNotFoundError
from peerstore.peers.board import Wish
from peerstore.peers.pulling import Puller
from peerstore.peers.spans import Target
from peerstore.peers.team import Team
from peerstore.records import ShardRecord
from peerstore.store import NodeStore
from tieredckpt.agent.memory_service.views import Shard

log = logging.getLogger(__name__)

_WINDOW_BYTES = 32 << 20


class Lending:
    """Reads for one node's clients. Any thread may call."""

    def __init__(self, store: NodeStore, me: str) -> None:
        self._store = store
        self._me = me
        self.team: Team | None = None

    @contextlib.contextmanager
    def here(self, shard: Shard) -> Iterator[str]:
        """Where this node's copy lies, compared with its seal, for as long as the block runs.

        Raises ``ShardNotFoundError`` when there is none, ``ShardDamagedError`` when it was not what was sealed: it is
        dropped then, and fetched again by who looks after damaged shards.
        """
        pin = self._store.pin(shard.key)
        try:
            bad = self._store.verify(shard.key)
            if bad:
                raise ShardDamagedError(f"{shard.key}: {len(bad)} of its chunks changed after it was sealed")
            yield pin.path
        finally:
            self._store.unpin(pin.id)

    def elsewhere(self, shard: Shard, start: int, stop: int) -> Generator[memoryview, None, None]:
        """Bytes of a shard from the other nodes that have it, every chunk compared before it is handed on."""
        others = [node for node in shard.nodes if node != self._me]
        if self.team is None or not others:
            raise ShardNotFoundError(f"{shard.key} is not on this node")
        if start >= stop:
            return
        record, nodes = self._described(self.team, shard, others)
        size = min(_WINDOW_BYTES, stop - start)
        with mmap.mmap(-1, size) as window, memoryview(window) as view:
            puller = Puller(self.team.tending.peer)
            at = start
            while at < stop:
                end = min(stop, (at // record.chunk_bytes) * record.chunk_bytes + size)
                with view[: end - at] as piece:
                    pulled = puller.pull([Wish(record, [Target(at, end, piece)], nodes)])
                    if record.key in pulled.failed:
                        raise pulled.failed[record.key]
                    yield piece
                at = end

    def _described(self, team: Team, shard: Shard, nodes: list[str]) -> tuple[ShardRecord, list[str]]:
        said: dict[str, ShardRecord] = {}
        problem: PeerStoreError | OSError | None = None
        for node in nodes:
            try:
                records = team.records(node, shard.key.group)
            except (PeerStoreError, OSError) as error:
                log.warning("memory service: %s did not describe %s: %s", node, shard.key, error)
                problem = error
                continue
            said.update((node, record) for record in records if record.key == shard.key)
        if not said:
            if problem is not None:
                raise PeerUnreachableError(f"who has {shard.key} does not answer: {problem}")
            raise ShardNotFoundError(f"{shard.key} was given up meanwhile")
        record, having = team.agreed(said)
        return record, list(having)
