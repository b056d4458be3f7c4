"""The memory service as an agent's plug-in."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from peerstore.settings import StoreSettings
from peerstore.store.arena import MemfdArena
from peerstore.store.node_store import NodeStore
from tieredckpt.agent import __main__ as agent
from tieredckpt.errors import PluginError
from tieredckpt.memory_service_options import MemoryServiceOptions

SERVED = MemoryServiceOptions("127.0.0.1:0", "off")
MODULE = "integration.sagemaker.memory_service.http_frontend"


@pytest.fixture
def store() -> Iterator[NodeStore]:
    with contextlib.closing(NodeStore(MemfdArena(), StoreSettings(budget="64MiB"))) as made:
        yield made


def test_agent_loads_memory_service_by_entry_point(store: NodeStore, tmp_path: Path) -> None:
    with agent._memory_service(store, SERVED, "n1", tmp_path, None) as service:
        assert service is not None
        assert service.status()["address"] == (tmp_path / "memory-service").read_text()


def test_agent_without_memory_service_does_not_import_the_service(store: NodeStore, tmp_path: Path) -> None:
    with agent._memory_service(store, MemoryServiceOptions(), "n1", tmp_path, None) as service:
        assert service is None
    command = f"import sys, tieredckpt.agent.__main__; sys.exit({MODULE!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0


def test_missing_entry_point_names_setting_and_remedy(
    store: NodeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda **_: metadata.EntryPoints())
    with pytest.raises(PluginError, match=r"agent.memory_service is set.*Reinstall tieredckpt"):
        agent._memory_service(store, SERVED, "n1", tmp_path, None)
