"""The table of the agent's operations: the server serves each of them, and no other."""

from __future__ import annotations

import contextlib

from peerstore.settings import StoreSettings
from peerstore.store.arena import MemfdArena
from peerstore.store.node_store import NodeStore
from tieredckpt.agent.agent_methods import AGENT_METHODS
from tieredckpt.agent.agent_operations import agent_operations
from tieredckpt.agent.agent_service import NodeAgentService


def test_server_serves_exactly_the_methods_of_the_table():
    arena = MemfdArena()
    store = NodeStore(arena, StoreSettings(budget="64MiB"))
    with contextlib.closing(store), contextlib.closing(NodeAgentService(store)) as service:
        served = agent_operations(service)
    arena.purge()
    assert {name: (one.args, one.result) for name, one in served.items()} == {
        method.name: (method.request, method.result) for method in AGENT_METHODS
    }
    assert len({method.name for method in AGENT_METHODS}) == len(AGENT_METHODS)
