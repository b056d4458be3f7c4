"""A body, straight into a slot of the arena: what is too large is refused before there is a slot for it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Protocol

from peerstore.errors import ArenaBusyError, ArenaFullError, PeerStoreError
from peerstore.pages import Mapping, closing, populate_file
from peerstore.records import Lease, ShardKey
from peerstore.store import NodeStore
from peerstore.units import show_size
from tieredckpt.agent.memory_service.answers import RefusedError
from tieredckpt.agent.memory_service.names import PARTS
from tieredckpt.agent.memory_service.views import SNIFFED_BYTES, is_plan

log = logging.getLogger(__name__)

_FIRST_BYTES = 1 << 20
_WAIT_S = 2.0


class Body(Protocol):
    """What a request brings."""

    size_bytes: int | None
    """``None`` when it is not known before it has come."""

    problem: str
    """What is wrong with the body, once that has come to light."""

    @property
    def at_end(self) -> bool: ...

    def fill(self, view: memoryview) -> int:
        """As much of the body as is left and fits; less than fits only at its end, or where there is a problem."""


class Receiving:
    """Takes in shards on one node. Any thread may call."""

    def __init__(self, store: NodeStore, tidy: Callable[[], int]) -> None:
        self._store = store
        self._tidy = tidy

    @contextlib.contextmanager
    def slot(self, key: ShardKey, body: Body) -> Iterator[tuple[Lease, int, bool]]:
        """A leased slot with the body in it, its size, and whether it is a plan; abandoned unless it was sealed."""
        lease = self._lease(key, _FIRST_BYTES if body.size_bytes is None else body.size_bytes)
        try:
            if body.size_bytes is None:
                size, head = self._fill_growing(lease, body)
            else:
                size, head = body.size_bytes, self._fill(lease, 0, body.size_bytes, body)
            yield lease, size, is_plan(head)
        finally:
            self._store.abandon(lease.id)  # of a sealed one there is nothing to give back

    def _lease(self, key: ShardKey, size_bytes: int) -> Lease:
        budget = self._store.status().arena.budget_bytes
        if size_bytes > budget:
            raise RefusedError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"A shard of {show_size(size_bytes)} does not fit this node's agent at all: its budget is "
                f"{show_size(budget)} (--budget)",
            )
        with self._room(size_bytes):
            try:
                return self._store.lease(key, size_bytes, PARTS)
            except ArenaBusyError:
                self._tidy()
                return self._store.lease(key, size_bytes, PARTS, wait_s=_WAIT_S)

    def _fill(self, lease: Lease, start: int, stop: int, body: Body) -> bytes:
        """Bytes ``start`` to ``stop`` of the slot; the first few of them."""
        with self._room(stop):
            mapped = self._mapped(lease, stop, start)
        with mapped as mapping, mapping.view as view:
            count = _filled(view, start, body)
            head = bytes(view[:SNIFFED_BYTES])
        _check(body)
        if count != stop - start:
            raise RefusedError(HTTPStatus.BAD_REQUEST, "The body is shorter than it was said to be")
        return head

    def _fill_growing(self, lease: Lease, body: Body) -> tuple[int, bytes]:
        size, head = 0, b""
        while True:
            with self._room(lease.size_bytes):
                mapped = self._mapped(lease, lease.size_bytes, size)
            with mapped as mapping, mapping.view as view:
                size += _filled(view, size, body)
                head = bytes(view[: min(SNIFFED_BYTES, size)])
            _check(body)
            if body.at_end:
                return size, head
            with self._room(2 * lease.size_bytes):
                lease = self._store.grow(lease.id, 2 * lease.size_bytes, wait_s=_WAIT_S)

    def _mapped(self, lease: Lease, size_bytes: int, start: int) -> Mapping:
        with closing(self._store.open_slot(lease.slot)) as fd:
            populate_file(fd, size_bytes, lambda: False, start=max(start, lease.warm_bytes))
            return Mapping(fd, size_bytes, writable=True)

    @contextlib.contextmanager
    def _room(self, size_bytes: int) -> Iterator[None]:
        try:
            yield
        except (ArenaFullError, ArenaBusyError) as error:
            arena = self._store.status().arena
            log.warning("memory service: no room for a shard of %d bytes: %s", size_bytes, error)
            raise RefusedError(
                HTTPStatus.INSUFFICIENT_STORAGE,
                f"No room for a shard of {show_size(size_bytes)}: of this node's budget of "
                f"{show_size(arena.budget_bytes)}, {show_size(arena.sealed_bytes)} hold shards that are kept. Raise "
                "--budget, have namespaces keep fewer steps, or delete those that are not needed",
            ) from error


def _filled(view: memoryview, start: int, body: Body) -> int:
    with view[start:] as rest:
        return body.fill(rest)


def _check(body: Body) -> None:
    if body.problem:
        raise RefusedError(HTTPStatus.BAD_REQUEST, body.problem)


def sealed(store: NodeStore, lease: Lease, size_bytes: int, note: bytes) -> None:
    """What is in the slot counts from here on."""
    try:
        store.seal(lease.id, size_bytes, note)
    except PeerStoreError as error:
        raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, f"The shard could not be kept: {error}") from error
