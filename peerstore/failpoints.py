"""Named points at which a test kills this process.

When disabled, a point costs one lookup in an empty dictionary. ``FAILPOINTS`` lists all points, so that a test over all
of them includes new ones.
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
    # a rank of a world that receives the survivors' step
    "live.chosen",
    # the agent that stores shards
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
    # an agent that sends a replica to another node
    "peer.offered",
    "peer.sending",
    # an agent that receives a replica
    "peer.receiving",
    "replica.sealing",
    "replica.sealed",
    "replica.committed",
    # an agent that repairs a damaged shard
    "peer.repairing",
    # an agent that other nodes read from
    "peer.reading",
    # the commit leader
    "peer.replicated",
    # the agent that drains a step
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
    """Kill this process when it reaches one of these points for the n-th time; replaces earlier points."""
    with _lock:
        _left.clear()
        _left.update(points)


def failpoint(point: str) -> None:
    """Kill this process if a test armed this point."""
    if point not in _left:
        return
    with _lock:
        _left[point] -= 1
        if _left[point] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
