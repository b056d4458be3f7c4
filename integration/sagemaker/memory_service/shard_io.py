"""Transfer of request bodies into slots, and of shards out of slots of this node or others."""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

from integration.sagemaker.memory_service.namespaces import SNIFFED_BYTES, NamespaceShard, is_dcp_metadata
from integration.sagemaker.memory_service.shard_requests import NAMESPACE_PARTS, RequestRefusedError
from peerstore.errors import (
    ArenaBusyError,
    ArenaFullError,
    PeerStoreError,
    PeerUnreachableError,
    ShardDamagedError,
    ShardNotFoundError,
    ShardUnreadableError,
)
from peerstore.peers.range_reader import RangeReader, ReadRequest, ReadTarget
from peerstore.server.job_peers import JobPeers
from peerstore.shard_records import Lease, ShardKey, ShardRecord
from peerstore.sizes_and_durations import show_size
from peerstore.store.arena import FileMapping, closing_fd, prefault_file
from peerstore.store.node_store import NodeStore

log = logging.getLogger(__name__)

_FIRST_BYTES = 1 << 20
_WAIT_S = 2.0


class IncomingBody(Protocol):
    """Body of a request."""

    size_bytes: int | None
    """None until the whole body has arrived, if its size is not declared."""

    problem: str
    """Error of the body; "" if none was found."""

    @property
    def at_end(self) -> bool: ...

    def fill(self, view: memoryview) -> int:
        """Read as much of the body as fits, and return the bytes read.

        Fewer bytes than fit mean the end of the body, or a problem.
        """


class ShardReceiver:
    """Receiver of shards on one node. Any thread may call it."""

    def __init__(self, store: NodeStore, evict: Callable[[], int]) -> None:
        self._store = store
        self._evict = evict

    @contextlib.contextmanager
    def slot(self, key: ShardKey, body: IncomingBody) -> Iterator[tuple[Lease, int, bool]]:
        """Yield a leased slot with the body, its size, and whether it is a plan.

        The slot is released unless it was sealed.
        """
        lease = self._lease(key, _FIRST_BYTES if body.size_bytes is None else body.size_bytes)
        try:
            if body.size_bytes is None:
                size, head = self._fill_growing(lease, body)
            else:
                size, head = body.size_bytes, self._fill(lease, 0, body.size_bytes, body)
            yield lease, size, is_dcp_metadata(head)
        finally:
            self._store.release(lease.id)  # does nothing after a seal

    def _lease(self, key: ShardKey, size_bytes: int) -> Lease:
        budget = self._store.status().arena.budget_bytes
        if size_bytes > budget:
            raise RequestRefusedError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"A shard of {show_size(size_bytes)} does not fit this node's agent at all: its budget is "
                f"{show_size(budget)} (--budget)",
            )
        with self._translate_full(size_bytes):
            try:
                return self._store.lease(key, size_bytes, NAMESPACE_PARTS)
            except ArenaBusyError:
                self._evict()
                return self._store.lease(key, size_bytes, NAMESPACE_PARTS, wait_s=_WAIT_S)

    def _fill(self, lease: Lease, start: int, stop: int, body: IncomingBody) -> bytes:
        """Write bytes ``start`` to ``stop`` of the slot. Return the first bytes of the slot."""
        with self._translate_full(stop):
            mapped = self._map_slot(lease, stop, start)
        with mapped as mapping, mapping.view as view:
            count = _fill_view(view, start, body)
            head = bytes(view[:SNIFFED_BYTES])
        _raise_problem(body)
        if count != stop - start:
            raise RequestRefusedError(HTTPStatus.BAD_REQUEST, "The body is shorter than its announced length")
        return head

    def _fill_growing(self, lease: Lease, body: IncomingBody) -> tuple[int, bytes]:
        size, head = 0, b""
        while True:
            with self._translate_full(lease.size_bytes):
                mapped = self._map_slot(lease, lease.size_bytes, size)
            with mapped as mapping, mapping.view as view:
                size += _fill_view(view, size, body)
                head = bytes(view[: min(SNIFFED_BYTES, size)])
            _raise_problem(body)
            if body.at_end:
                return size, head
            with self._translate_full(2 * lease.size_bytes):
                lease = self._store.grow(lease.id, 2 * lease.size_bytes, wait_s=_WAIT_S)

    def _map_slot(self, lease: Lease, size_bytes: int, start: int) -> FileMapping:
        with closing_fd(self._store.open_slot(lease.slot)) as fd:
            prefault_file(fd, size_bytes, lambda: False, start=max(start, lease.prefaulted_bytes))
            return FileMapping(fd, size_bytes, writable=True)

    @contextlib.contextmanager
    def _translate_full(self, size_bytes: int) -> Iterator[None]:
        try:
            yield
        except (ArenaFullError, ArenaBusyError) as error:
            arena = self._store.status().arena
            log.warning("memory service: no room for a shard of %d bytes: %s", size_bytes, error)
            raise RequestRefusedError(
                HTTPStatus.INSUFFICIENT_STORAGE,
                f"No room for a shard of {show_size(size_bytes)}: of this node's budget of "
                f"{show_size(arena.budget_bytes)}, {show_size(arena.sealed_bytes)} hold shards that are kept. Raise "
                "--budget, have namespaces keep fewer steps, or delete those that are not needed",
            ) from error


def _fill_view(view: memoryview, start: int, body: IncomingBody) -> int:
    with view[start:] as rest:
        return body.fill(rest)


def _raise_problem(body: IncomingBody) -> None:
    if body.problem:
        raise RequestRefusedError(HTTPStatus.BAD_REQUEST, body.problem)


def seal_shard(store: NodeStore, lease: Lease, size_bytes: int, note: bytes) -> None:
    """Seal the slot, so that its shard counts."""
    try:
        store.seal(lease.id, size_bytes, note)
    except PeerStoreError as error:
        raise RequestRefusedError(HTTPStatus.SERVICE_UNAVAILABLE, f"The shard could not be kept: {error}") from error


_WINDOW_BYTES = 32 << 20
_VERIFIED_CHUNKS = 8


@dataclass(frozen=True)
class FilePiece:
    """Bytes of an open file to send before the next piece is requested."""

    fd: int
    start: int
    stop: int


BodyPiece = FilePiece | memoryview


class _VerifyAhead:
    """Verification of this node's chunks while earlier ones are sent."""

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


class ShardSender:
    """Reader of shards for one node's clients. Any thread may call it."""

    def __init__(self, store: NodeStore, me: str) -> None:
        self._store = store
        self._me = me
        self.team: JobPeers | None = None

    def pieces(self, shard: NamespaceShard, start: int, stop: int) -> Generator[BodyPiece, None, None]:
        """Yield bytes ``[start, stop)`` of a shard in pieces, each verified against the seal.

        If this node's copy turns out damaged, it is dropped, and the rest comes from other nodes.
        """
        at = start
        try:
            for piece in self._local_pieces(shard, start, stop):
                yield piece
                at = piece.stop
            return
        except ShardNotFoundError:  # other nodes have it
            pass
        except ShardDamagedError as error:
            log.error("memory service: %s", error)
        except ShardUnreadableError as error:
            log.warning("memory service: %s", error)
        yield from self._remote_pieces(shard, at, stop)

    def _local_pieces(self, shard: NamespaceShard, start: int, stop: int) -> Iterator[FilePiece]:
        pin = self._store.pin(shard.key)
        try:
            first, last = start // pin.record.chunk_bytes, -(-stop // pin.record.chunk_bytes)
            windows = [(at, min(at + _VERIFIED_CHUNKS, last)) for at in range(first, last, _VERIFIED_CHUNKS)]
            with _VerifyAhead(self._store, shard.key, windows) as verified:
                for chunks in verified:
                    begin, end = (number * pin.record.chunk_bytes for number in chunks)
                    yield FilePiece(pin.fd, max(begin, start), min(end, stop))
        finally:
            pin.close()
            self._store.unpin(pin.id)

    def _remote_pieces(self, shard: NamespaceShard, start: int, stop: int) -> Iterator[memoryview]:
        others = [node for node in shard.nodes if node != self._me]
        if self.team is None or not others:
            raise ShardNotFoundError(f"{shard.key} is not on this node")
        if start >= stop:
            return
        record, nodes = self._fetch_record(self.team, shard, others)
        size = min(_WINDOW_BYTES, stop - start)
        with mmap.mmap(-1, size) as window, memoryview(window) as view:
            puller = RangeReader(self.team.membership.client_for)
            at = start
            while at < stop:
                end = min(stop, (at // record.chunk_bytes) * record.chunk_bytes + size)
                with view[: end - at] as piece:
                    pulled = puller.read([ReadRequest(record, [ReadTarget(at, end, piece)], nodes)])
                    if record.key in pulled.failed:
                        raise pulled.failed[record.key]
                    yield piece
                at = end

    def _fetch_record(self, team: JobPeers, shard: NamespaceShard, nodes: list[str]) -> tuple[ShardRecord, list[str]]:
        records_by_node: dict[str, ShardRecord] = {}
        problem: PeerStoreError | OSError | None = None
        for node in nodes:
            try:
                records = team.fetch_records(node, shard.key.version_id)
            except (PeerStoreError, OSError) as error:
                log.warning("memory service: %s did not describe %s: %s", node, shard.key, error)
                problem = error
                continue
            records_by_node.update((node, record) for record in records if record.key == shard.key)
        if not records_by_node:
            if problem is not None:
                raise PeerUnreachableError(f"no node with {shard.key} answers: {problem}")
            raise ShardNotFoundError(f"{shard.key} was deleted meanwhile")
        record, holders = team.resolve_record(records_by_node)
        return record, list(holders)
