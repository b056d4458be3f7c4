"""Several nodes on this machine: an agent and a directory each, which reach each other over loopback TCP."""

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
    """Those of one node; who the others are is said by :func:`introduce` unless ``peer`` says where to look."""
    name = name_of(number)
    return settings_for(
        scene,
        name,
        agent={"node": name, "peers": "127.0.0.1:0", "labels": f"rack=r{number}", "http": "127.0.0.1:0"},
        memory={"on_busy": "wait"},
        peer={"discovery": "off", **peer},
    )


def open_node(scene: Scene, number: int) -> Session:
    """This process's tie to a node's agent, which is started where there is none."""
    return open_session(JOB, node_settings(scene, number))


def address_of(session: Session) -> PeerNode:
    node = session.agent.this_node()
    if node is None:
        raise RuntimeError(f"the agent in {session.settings.agent_directory} does not listen for others")
    return node


def introduce(sessions: Sequence[Session], nodes: Sequence[PeerNode], version: int) -> None:
    """Tell the agents of ``sessions`` that these nodes have the job. They keep no copies for each other: what a node
    does not have is to be read from where it was written.
    """
    plan = JobPeersConfig(
        _SECRET, ReplicationSettings(copies=1, streams=STREAMS), member_list=member_list(version, nodes)
    )
    with ThreadPoolExecutor(max(1, len(sessions))) as pool:  # each waits until it sees most of the others
        list(pool.map(lambda session: session.registration.join_peers(plan), sessions))


def start_nodes(scene: Scene, count: int) -> None:
    sessions = [open_node(scene, number) for number in range(count)]
    introduce(sessions, [address_of(session) for session in sessions], 1)


def lose_node(place: Path) -> None:
    """Its agent, and everything in its memory."""
    end_agent(place)
    shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def a_node_each() -> Iterator[None]:
    """What a launcher says when every rank is alone on its node."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    try:
        yield
    finally:
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)


def metric(place: Path, name: str) -> float:
    """One of the figures that a node's agent shows, of all jobs together."""
    address = (place / "http").read_text().strip()
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == f"tieredckpt_{name}")


def tell(value: Any, sender: int) -> Any:
    """What ``sender`` says, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=sender)
    return box[0]


def from_all(value: Any) -> list[Any]:
    """What every rank says, in order."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, value)
    return said
