"""Several nodes on one machine, each with an agent and a directory, which tests can kill."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from peerstore.client.agent_launcher import connect_or_launch_agent
from peerstore.errors import AgentUnreachableError
from peerstore.settings import AgentPaths
from peerstore.transport.unix import connect_to_agent
from tests.support import crashes
from tests.support.agents import agent_pid, stop_agent, stop_process
from tests.support.leaks import process_prefix
from tests.support.ranks import RankPool
from tieredckpt.agent.agent_client import NodeAgentClient, agent_command
from tieredckpt.session.session import close_sessions
from tieredckpt.settings import Settings, override_settings, settings_from_mapping

_QUICK = "tests.support.quick_agent"
_ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_S = 200.0


@dataclass
class AgentNode:
    """One node: its agent's directory and settings, and its failure-domain labels."""

    name: str
    directory: Path
    labels: str = ""
    budget: str = "1GiB"
    transport: str = "tcp"
    quick: bool = True
    """Whether its agent uses shorter timeouts, to detect lost nodes sooner than in production."""

    @property
    def environ(self) -> dict[str, str]:
        return {
            "TIEREDCKPT_AGENT_DIRECTORY": str(self.directory),
            "TIEREDCKPT_AGENT_NODE": self.name,
            "TIEREDCKPT_AGENT_LABELS": self.labels,
            "TIEREDCKPT_AGENT_PEERS": "127.0.0.1:0",
            "TIEREDCKPT_AGENT_BUDGET": self.budget,
            "TIEREDCKPT_AGENT_TRANSPORT": self.transport,
        }

    @property
    def settings(self) -> Settings:
        prefix = "TIEREDCKPT_AGENT_"
        agent = {name.removeprefix(prefix).lower(): value for name, value in self.environ.items()}
        return settings_from_mapping({"agent": agent})

    @property
    def pid(self) -> int | None:
        return agent_pid(self.directory)

    def start(self, *, crash_at: str = "") -> None:
        """Start or restart its agent; ``crash_at`` names crash points."""
        module = _QUICK if self.quick else "tieredckpt.agent"
        command = [part if part != "tieredckpt.agent" else module for part in agent_command(self.settings)]
        environ = {**os.environ, "PYTHONPATH": str(_ROOT), **crashes.crash_environ(crash_at)}
        died = (AgentUnreachableError,) if crash_at else ()
        with contextlib.suppress(*died):
            connect_or_launch_agent(AgentPaths(self.directory), command, environ=environ, timeout_s=_PATIENCE_S).close()

    @contextlib.contextmanager
    def agent(self, job: str = "") -> Iterator[NodeAgentClient]:
        """Yield a client of its agent, as a trainer of ``job`` uses it."""
        settings = override_settings(self.settings, agent={"embedded": False})
        with contextlib.closing(NodeAgentClient(settings, job)) as node:
            yield node

    def wait_agent_ended(self) -> None:
        """Wait until its agent is dead and its socket is closed."""
        deadline = time.monotonic() + _PATIENCE_S
        while self.pid is not None or self._answers():
            assert time.monotonic() < deadline, f"the agent of {self.name} lives"
            time.sleep(0.01)

    def _answers(self) -> bool:
        """Return whether its socket is open: the last threads of a killed process may still hold it."""
        try:
            connect_to_agent(AgentPaths(self.directory).socket).close()
        except AgentUnreachableError:
            return False
        return True

    def lose(self) -> None:
        """Lose the machine: kill its agent and delete its memory."""
        stop_agent(self.directory, signal.SIGKILL)
        shutil.rmtree(self.directory, ignore_errors=True)

    def kill_agent(self) -> None:
        """Kill only the agent; its shards stay in memory."""
        stop_agent(self.directory, signal.SIGKILL)
        self.wait_agent_ended()

    def suspend_agent(self) -> None:
        """Suspend the agent: its process lives but does not answer."""
        if self.pid is not None:
            stop_process(self.pid)

    def resume_agent(self) -> None:
        if self.pid is not None:
            os.kill(self.pid, signal.SIGCONT)


@dataclass
class Cluster:
    """A set of nodes and a job whose ranks run on them."""

    ranks: RankPool
    hosts: dict[str, AgentNode] = field(default_factory=dict)
    job: str = field(default_factory=lambda: f"job-{uuid.uuid4().hex[:8]}")

    def add(self, name: str, labels: str = "", *, budget: str = "1GiB", transport: str = "tcp") -> AgentNode:
        directory = Path("/dev/shm") / (process_prefix("tieredckpt") + uuid.uuid4().hex[:8])
        host = self.hosts[name] = AgentNode(name, directory, labels, budget, transport)
        return host

    def __getitem__(self, name: str) -> AgentNode:
        return self.hosts[name]

    def run(
        self, where: Sequence[str], function: Callable[..., Any], *args: Any, environ: dict[str, str] | None = None
    ) -> list[Any]:
        """Run ``function(job, *args)`` on one rank per name: rank i is on node ``where[i]``."""
        places = [self.hosts[name].environ for name in where]
        return self.ranks.run(len(where), _on_node, places, list(where), function, (self.job, *args), environ=environ)

    def close(self) -> None:
        close_sessions()
        for host in self.hosts.values():
            host.resume_agent()
        for host in self.hosts.values():
            stop_agent(host.directory)
            shutil.rmtree(host.directory, ignore_errors=True)


def _on_node(
    places: Sequence[dict[str, str]], where: Sequence[str], function: Callable[..., Any], args: Sequence[Any]
) -> Any:
    import torch.distributed as dist

    rank = dist.get_rank()
    mine = [other for other, name in enumerate(where) if name == where[rank]]
    os.environ.update(places[rank])
    os.environ.update(LOCAL_WORLD_SIZE=str(len(mine)), LOCAL_RANK=str(mine.index(rank)))
    return function(*args)


@contextlib.contextmanager
def make_cluster(ranks: RankPool, *names: str, labels: Callable[[str], str] = lambda _name: "") -> Iterator[Cluster]:
    cluster = Cluster(ranks)
    try:
        for name in names:
            cluster.add(name, labels(name))
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def cluster(ranks: RankPool) -> Iterator[Cluster]:
    """Yield three nodes in three racks."""
    with make_cluster(ranks, "n1", "n2", "n3", labels=lambda name: f"rack=r{name[1:]}") as made:
        yield made


@pytest.fixture
def nodes(ranks: RankPool) -> Iterator[Cluster]:
    """Yield two nodes in two racks."""
    with make_cluster(ranks, "n1", "n2", labels=lambda name: f"rack=r{name[1:]}") as made:
        yield made
