"""For tests of code that uses a store: the real store over anonymous memory, no agent and no files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from peerstore.arena import MemfdArena
from peerstore.settings import StoreSettings
from peerstore.store import NodeStore


@contextlib.contextmanager
def memory_store(budget: str = "256MiB", **settings: object) -> Iterator[NodeStore]:
    """A store of this process's own; everything in it is gone when the block ends."""
    arena = MemfdArena()
    store = NodeStore(arena, StoreSettings(budget=budget, **settings))  # type: ignore[arg-type]
    try:
        yield store
    finally:
        store.close()
        arena.purge()
