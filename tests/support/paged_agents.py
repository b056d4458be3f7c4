"""A node agent in this process whose messages may be only so large: what a job of many pieces meets, in seconds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from peerstore.arena import TmpfsArena
from peerstore.server import StoreServer, sole_agent
from peerstore.settings import AgentPlace, StoreSettings
from peerstore.store import NodeStore
from tieredckpt.agent.service import NodeService, node_operations
from tieredckpt.errors import TieredCheckpointError


@contextlib.contextmanager
def paged_agent(directory: Path, *, frame_bytes: int, page_bytes: int) -> Iterator[NodeService]:
    place = AgentPlace(directory)
    with sole_agent(place), contextlib.ExitStack() as cleanup:
        store = NodeStore(TmpfsArena(directory), StoreSettings(budget="1GiB"))
        cleanup.callback(store.close)
        service = NodeService(store, page_bytes=page_bytes)
        cleanup.callback(service.close)
        operations = node_operations(service)
        server = StoreServer(
            store, place.socket, more=operations, errors=(TieredCheckpointError,), frame_bytes=frame_bytes
        )
        cleanup.callback(server.close)
        server.start()
        yield service
