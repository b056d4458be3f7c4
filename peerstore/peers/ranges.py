"""Bytes of shards and parities, read from front to back by whoever mixes them, from wherever they are.

Two windows of each source are in memory at a time: the one that is used, and the next one on its way.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

from peerstore.bandwidth import Bandwidth
from peerstore.errors import PeerUnreachableError, ShardDamagedError
from peerstore.peers.board import Wish
from peerstore.peers.pulling import Puller
from peerstore.peers.spans import Target
from peerstore.records import ShardRecord
from peerstore.store import NodeStore

Fetch: TypeAlias = Callable[[int, int], memoryview]
WINDOW_BYTES = 2 << 20


class Ahead:
    """Reads what comes next before it is asked for. Used by one thread."""

    def __init__(self, fetch: Fetch, size_bytes: int, window_bytes: int, pool: ThreadPoolExecutor) -> None:
        self._fetch = fetch
        self._size = size_bytes
        self._window = window_bytes
        self._pool = pool
        self._base = 0
        self._data = memoryview(b"")
        self._next: tuple[int, Future[memoryview]] | None = None

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``[start, stop)``, no more than a window, beginning where a chunk begins."""
        if not (self._base <= start and stop <= self._base + len(self._data)):
            self._move(start)
        return self._data[start - self._base : stop - self._base]

    def _move(self, start: int) -> None:
        coming, self._next = self._next, None
        if coming is not None and coming[0] == start:
            self._data = coming[1].result()
        else:
            self._data = self._fetch(start, min(start + self._window, self._size))
        self._base = start
        after = start + len(self._data)
        if after < self._size:
            future = self._pool.submit(self._fetch, after, min(after + self._window, self._size))
            self._next = after, future


class Ranges:
    """Readers for one piece of work; close them when it is done."""

    def __init__(self, store: NodeStore, puller: Puller, pace: Bandwidth, *, me: str, sources: int) -> None:
        self._store = store
        self._puller = puller
        self._pace = pace
        self._me = me
        self._pool = ThreadPoolExecutor(max(1, sources), thread_name_prefix="peerstore-ahead")
        self._exit = contextlib.ExitStack()
        self.bytes_read = 0

    def reader(self, record: ShardRecord, nodes: Sequence[str], *, stop: int | None = None) -> Fetch:
        """Reads ``record`` up to ``stop``, here if it is here, else from ``nodes``; what comes was compared with it."""
        fetch = self._here(record) if self._me in nodes else self._there(record, nodes)
        window = max(1, WINDOW_BYTES // record.chunk_bytes) * record.chunk_bytes
        return Ahead(fetch, record.size_bytes if stop is None else stop, window, self._pool).read

    def _here(self, record: ShardRecord) -> Fetch:
        fd = self._exit.enter_context(_pinned(self._store, record))

        def fetch(start: int, stop: int) -> memoryview:
            data = memoryview(bytearray(stop - start))
            got = 0
            while got < len(data):
                count = os.preadv(fd, [data[got:]], start + got)
                if not count:
                    raise ShardDamagedError(f"{record.key} ends at byte {start + got} of {record.size_bytes}")
                got += count
            return data

        return fetch

    def _there(self, record: ShardRecord, nodes: Sequence[str]) -> Fetch:
        if not nodes:
            raise PeerUnreachableError(f"no node that is reached holds {record.key}")

        def fetch(start: int, stop: int) -> memoryview:
            data = memoryview(bytearray(stop - start))
            self._pace.take(len(data))
            pulled = self._puller.pull([Wish(record, [Target(start, stop, data)], list(nodes))])
            if record.key in pulled.failed:
                raise pulled.failed[record.key]
            self.bytes_read += len(data)
            return data

        return fetch

    def __enter__(self) -> Ranges:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)  # first: what it reads from is closed next
        self._exit.close()


@contextlib.contextmanager
def _pinned(store: NodeStore, record: ShardRecord) -> Iterator[int]:
    pin = store.pin(record.key)
    try:
        yield pin.fd
    finally:
        pin.close()
        store.unpin(pin.id)
