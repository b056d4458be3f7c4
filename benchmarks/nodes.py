"""Several nodes on one machine, each an agent and a directory, connected over loopback TCP."""

from __future__ import annotations

import contextlib
import os
import shutil
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.parameters import Scene
from benchmarks.sandbox import JOB, end_agent, settings_for
from peerstore.membership.topology import PeerNode, member_list
from peerstore.settings import JobPeersConfig, ReplicationSettings
from tieredckpt.session.session import Session, open_session
from tieredckpt.settings import PeerSettings, Settings

STREAMS = PeerSettings().streams
_SECRET = b"of the benchmarks of one machine"


def name_of(number: int) -> str:
    return f"n{number}"


def node_settings(scene: Scene, number: int, **peer: Any) -> Settings:
    """Return the settings of one node.

    :func:`introduce` names the other nodes, unless ``peer`` sets a discovery.
    """
    name = name_of(number)
    return settings_for(
        scene,
        name,
        agent={"node": name, "peers": "127.0.0.1:0", "labels": f"rack=r{number}", "http": "127.0.0.1:0"},
        memory={"on_busy": "wait"},
        peer={"discovery": "off", **peer},
    )


def open_node(scene: Scene, number: int) -> Session:
    """Open this process's session with a node's agent; start the agent if necessary."""
    return open_session(JOB, node_settings(scene, number))


def address_of(session: Session) -> PeerNode:
    node = session.agent.this_node()
    if node is None:
        raise RuntimeError(f"the agent in {session.settings.agent_directory} does not accept peer connections")
    return node


def introduce(sessions: Sequence[Session], nodes: Sequence[PeerNode], version: int) -> None:
    """Make ``nodes`` the members of the job for the agents of ``sessions``.

    Agents make no replicas: a node reads missing shards from the node that wrote them.
    """
    plan = JobPeersConfig(
        _SECRET, ReplicationSettings(copies=1, streams=STREAMS), member_list=member_list(version, nodes)
    )
    with ThreadPoolExecutor(max(1, len(sessions))) as pool:  # each call waits until its agent sees most nodes
        list(pool.map(lambda session: session.registration.join_peers(plan), sessions))


def start_nodes(scene: Scene, count: int) -> None:
    sessions = [open_node(scene, number) for number in range(count)]
    introduce(sessions, [address_of(session) for session in sessions], 1)


def lose_node(place: Path) -> None:
    """End a node's agent and delete its memory."""
    end_agent(place)
    shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def a_node_each() -> Iterator[None]:
    """Set the launcher's environment variables for one rank per node."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    try:
        yield
    finally:
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)


def metric(place: Path, name: str) -> float:
    """Return a metric of a node's agent, summed over all jobs."""
    address = (place / "http").read_text().strip()
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == f"tieredckpt_{name}")


def tell(value: Any, sender: int) -> Any:
    """Return ``sender``'s value on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=sender)
    return box[0]


def from_all(value: Any) -> list[Any]:
    """Return the values of all ranks, in rank order."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, value)
    return said
