"""A node agent inside the test process, for users' tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from peerstore.testing import memory_store
from tieredckpt.agent.agent_service import NodeAgentService
from tieredckpt.session.session import use_agent_factory
from tieredckpt.settings import Settings


class _Shared:
    """The node of the block; sessions come and go without closing it."""

    def __init__(self, node: NodeAgentService) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def close(self) -> None:
        pass


@contextlib.contextmanager
def memory_node(budget: str = "1GiB") -> Iterator[NodeAgentService]:
    """While the block runs, ``TieredWriter``, ``TieredReader`` and ``Checkpointer`` of this process use this node.

    It is the real store and the real drain; only the memory is this process's own and gone when the block ends::

        with memory_node():
            dcp.save(state, storage_writer=TieredWriter("tiered://job", step=1))
    """
    with memory_store(budget) as store, contextlib.closing(NodeAgentService(store)) as node:

        def factory(settings: Settings, job: str) -> Any:
            del settings, job
            return _Shared(node)

        with use_agent_factory(factory):
            yield node
