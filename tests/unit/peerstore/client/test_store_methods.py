"""The table of the store's operations: the server serves each of them, and no other."""

from __future__ import annotations

import contextlib

from peerstore.client.store_methods import STORE_METHODS
from peerstore.server.store_operations import store_operations
from peerstore.settings import StoreSettings
from peerstore.store.arena import MemfdArena
from peerstore.store.node_store import NodeStore


def test_server_serves_exactly_the_methods_of_the_table():
    arena = MemfdArena()
    with contextlib.closing(NodeStore(arena, StoreSettings(budget="64MiB"))) as store:
        served = store_operations(store)
    arena.purge()
    assert {name: (one.args, one.result) for name, one in served.items()} == {
        method.name: (method.request, method.result) for method in STORE_METHODS
    }
    assert len({method.name for method in STORE_METHODS}) == len(STORE_METHODS)
