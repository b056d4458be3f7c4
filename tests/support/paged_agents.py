"""In-process node agent with small frames, to test jobs of many pieces within seconds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from peerstore.server.store_server import StoreServer, hold_agent_lock
from peerstore.settings import AgentPaths, StoreSettings
from peerstore.store.arena import TmpfsArena
from peerstore.store.node_store import NodeStore
from tieredckpt.agent.agent_operations import agent_operations
from tieredckpt.agent.agent_service import NodeAgentService
from tieredckpt.errors import TieredCheckpointError


@contextlib.contextmanager
def paged_agent(directory: Path, *, message_bytes: int, page_bytes: int) -> Iterator[NodeAgentService]:
    place = AgentPaths(directory)
    with hold_agent_lock(place), contextlib.ExitStack() as cleanup:
        store = NodeStore(TmpfsArena(directory), StoreSettings(budget="1GiB"))
        cleanup.callback(store.close)
        service = NodeAgentService(store, page_bytes=page_bytes)
        cleanup.callback(service.close)
        operations = agent_operations(service)
        server = StoreServer(
            store, place.socket, more=operations, errors=(TieredCheckpointError,), max_message_bytes=message_bytes
        )
        cleanup.callback(server.close)
        server.start()
        yield service
