"""A shard's bytes for whoever asked: from this node's slot, or from other nodes, a window at a time."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from peerstore.errors import (
    PeerStoreError,
    PeerUnreachableError,
    ShardDamagedError,
    ShardNotFoundError,
    ShardUnreadableError,
)
from peerstore.peers.board import Wish
from peerstore.peers.pulling import Puller
from peerstore.peers.spans import Target
from peerstore.peers.team import Team
from peerstore.records import ShardKey, ShardRecord
from peerstore.store import NodeStore
from tieredckpt.agent.memory_service.views import Shard

log = logging.getLogger(__name__)

_WINDOW_BYTES = 32 << 20
_VERIFIED_CHUNKS = 8


@dataclass(frozen=True)
class FilePiece:
    """Bytes of an open file that can be sent as they are, before the next piece is asked for."""

    fd: int
    start: int
    stop: int


Piece = FilePiece | memoryview


class _Ahead:
    """Chunks of this node's copy, compared while those before them are sent."""

    def __init__(self, store: NodeStore, key: ShardKey, windows: Sequence[tuple[int, int]]) -> None:
        self._store = store
        self._key = key
        self._windows = windows
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="memory-service-verify") if len(windows) > 1 else None

    def __enter__(self) -> Iterator[tuple[int, int]]:
        return self._verified()

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def _verified(self) -> Iterator[tuple[int, int]]:
        if self._pool is None:
            for window in self._windows:
                self._verify(window)
                yield window
            return
        following = self._pool.submit(self._verify, self._windows[0])
        for number, window in enumerate(self._windows):
            following.result()
            if number + 1 < len(self._windows):
                following = self._pool.submit(self._verify, self._windows[number + 1])
            yield window

    def _verify(self, window: tuple[int, int]) -> None:
        bad = self._store.verify(self._key, window)
        if bad:
            raise ShardDamagedError(f"{self._key}: chunk {bad[0]} changed after it was sealed")


class Lending:
    """Reads for one node's clients. Any thread may call."""

    def __init__(self, store: NodeStore, me: str) -> None:
        self._store = store
        self._me = me
        self.team: Team | None = None

    def pieces(self, shard: Shard, start: int, stop: int) -> Generator[Piece, None, None]:
        """Bytes ``[start, stop)`` of a shard, one piece behind the other, each compared with the seal before it is
        handed on. A copy that turns out damaged on the way is dropped, and the rest comes from other nodes.
        """
        at = start
        try:
            for piece in self._here(shard, start, stop):
                yield piece
                at = piece.stop
            return
        except ShardNotFoundError:  # it is on other nodes
            pass
        except ShardDamagedError as error:
            log.error("memory service: %s", error)
        except ShardUnreadableError as error:
            log.warning("memory service: %s", error)
        yield from self._elsewhere(shard, at, stop)

    def _here(self, shard: Shard, start: int, stop: int) -> Iterator[FilePiece]:
        pin = self._store.pin(shard.key)
        try:
            first, last = start // pin.record.chunk_bytes, -(-stop // pin.record.chunk_bytes)
            windows = [(at, min(at + _VERIFIED_CHUNKS, last)) for at in range(first, last, _VERIFIED_CHUNKS)]
            with _Ahead(self._store, shard.key, windows) as verified:
                for chunks in verified:
                    begin, end = (number * pin.record.chunk_bytes for number in chunks)
                    yield FilePiece(pin.fd, max(begin, start), min(end, stop))
        finally:
            pin.close()
            self._store.unpin(pin.id)

    def _elsewhere(self, shard: Shard, start: int, stop: int) -> Iterator[memoryview]:
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
