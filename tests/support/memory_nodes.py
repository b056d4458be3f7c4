"""Nodes whose agents serve ``/v1/cp`` and hold copies for each other."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from peerstore.client.agent_launcher import connect_or_launch_agent
from peerstore.client.store_client import Client
from peerstore.settings import AgentPaths
from peerstore.shard_records import ShardInfo
from peerstore.transport.unix import connect_to_agent
from tests.support.agents import stop_agent
from tests.support.leaks import process_prefix
from tests.support.local_nodes import wait_until
from tests.support.ports import free_ports
from tieredckpt.agent.agent_client import agent_command
from tieredckpt.memory_service_options import MEMORY_SERVICE_JOB
from tieredckpt.settings import settings_from_mapping

_ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_S = 200.0


@dataclass
class MemoryNode:
    """One node."""

    name: str
    directory: Path
    agent: dict[str, str]

    def start(self) -> None:
        settings = settings_from_mapping({"agent": {"directory": str(self.directory), "node": self.name, **self.agent}})
        quick = "tests.support.quick_agent"
        command = [quick if word == "tieredckpt.agent" else word for word in agent_command(settings)]
        environ = {**os.environ, "PYTHONPATH": str(_ROOT)}
        place = AgentPaths(self.directory)
        launch = partial(connect_or_launch_agent, place, command, environ=environ, timeout_s=_PATIENCE_S)
        with contextlib.closing(Client(launch)) as client:
            client.list_shards(
                MEMORY_SERVICE_JOB
            )  # an agent just killed may still accept a connection without answering

    @property
    def address(self) -> str:
        wait_until((self.directory / "memory-service").exists, f"{self.name} serves")
        return (self.directory / "memory-service").read_text()

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def shard_infos(self) -> list[ShardInfo]:
        with contextlib.closing(Client(lambda: connect_to_agent(AgentPaths(self.directory).socket))) as client:
            return client.list_shards(MEMORY_SERVICE_JOB)

    def wait_shards(self, count: int) -> None:
        """Wait until it holds ``count`` shards, including copies for other nodes."""
        deadline = time.monotonic() + _PATIENCE_S
        while len(self.shard_infos()) != count:
            assert time.monotonic() < deadline, f"{self.name} holds {self.shard_infos()}"
            time.sleep(0.02)

    def kill_agent(self) -> None:
        """Kill only the agent; the data stays in memory."""
        stop_agent(self.directory, signal.SIGKILL)

    def lose(self) -> None:
        """Lose the machine with its memory."""
        self.kill_agent()
        shutil.rmtree(self.directory)


@contextlib.contextmanager
def memory_nodes(*names: str, **agent: str) -> Iterator[dict[str, MemoryNode]]:
    """Run nodes with started agents; several nodes are configured as peers."""
    base = Path("/dev/shm") / (process_prefix("tieredckpt") + uuid.uuid4().hex[:8])
    base.mkdir(mode=0o700)
    secret = base / "secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_urlsafe(32))
    ports = free_ports(len(names))
    listed = ",".join(f"{name}=127.0.0.1:{port}" for name, port in zip(names, ports, strict=True))
    together = {"memory_service_nodes": f"static:{listed}", "memory_service_secret": f"file:{secret}"}
    nodes = {}
    for name, port in zip(names, ports, strict=True):
        own = {"budget": "256MiB", "peers": f"127.0.0.1:{port}", "memory_service": "127.0.0.1:0"}
        nodes[name] = MemoryNode(name, base / name, own | (together if len(names) > 1 else {}) | agent)
    try:
        for node in nodes.values():
            node.start()
        yield nodes
    finally:
        for node in nodes.values():
            stop_agent(node.directory)
        shutil.rmtree(base, ignore_errors=True)
