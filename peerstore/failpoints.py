"""Named points at which a test kills this process. One dictionary lookup when disabled.

Off, a point costs one look at an empty dictionary. ``FAILPOINTS`` lists them all, so that a test that goes through
every point cannot miss a new one.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping

FAILPOINTS = (
    # a trainer that saves
    "stage.leased",
    "stage.half",
    "stage.filled",
    "seal.written",
    "seal.asked",
    # a trainer that loads
    "load.voted",
    "load.half",
    "load.done",
    # a rank of a world that survivors give their step to
    "live.chosen",
    # the agent that keeps shards
    "agent.claimed",
    "agent.metadata",
    "agent.created",
    "agent.leased",
    "agent.grown",
    "agent.hashed",
    "agent.sealing",
    "agent.sealed",
    "agent.deleted",
    "agent.dropped",
    "agent.recovering",
    "agent.recovered",
    # an agent that sends a copy of a shard to another node
    "peer.offered",
    "peer.sending",
    # an agent that takes a copy of another node's shard
    "peer.receiving",
    "replica.sealing",
    "replica.sealed",
    "replica.committed",
    # an agent that fetches a shard again that was damaged here
    "peer.repairing",
    # an agent that other nodes read from
    "peer.reading",
    # the agent that says which version has all its copies
    "peer.replicated",
    # the agent that makes a step durable
    "drain.began",
    "drain.uploaded",
    "drain.indexed",
    "drain.noted",
    "drain.complete",
    "drain.committed",
)

_lock = threading.Lock()
_left: dict[str, int] = {}


def arm_failpoints(points: Mapping[str, int]) -> None:
    """Have this process killed at one of these, and at no other: when it comes there for the so-many-th time."""
    with _lock:
        _left.clear()
        _left.update(points)


def failpoint(point: str) -> None:
    """Die here, if a test said so."""
    if point not in _left:
        return
    with _lock:
        _left[point] -= 1
        if _left[point] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
