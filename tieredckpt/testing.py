"""Node agent in the test process, for tests of users."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from peerstore.testing import memory_store
from tieredckpt.agent.agent_service import NodeAgentService
from tieredckpt.session.session import use_agent_factory
from tieredckpt.settings import Settings


class _Shared:
    """Node agent that sessions share: ``close`` does nothing."""

    def __init__(self, node: NodeAgentService) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def close(self) -> None:
        pass


@contextlib.contextmanager
def memory_node(budget: str = "1GiB") -> Iterator[NodeAgentService]:
    """Run a node agent in this process while the block runs.

    ``TieredWriter``, ``TieredReader`` and ``Checkpointer`` of this process use it.
    Store and drain are the real ones. The memory belongs to this process and is freed when the block ends::

        with memory_node():
            dcp.save(state, storage_writer=TieredWriter("tiered://job", step=1))
    """
    with memory_store(budget) as store, contextlib.closing(NodeAgentService(store)) as node:

        def factory(settings: Settings, job: str) -> Any:
            del settings, job
            return _Shared(node)

        with use_agent_factory(factory):
            yield node
