"""Processes that are killed at a point of their work: who is started with :func:`crash_environ` arms it in itself.

By :mod:`sitecustomize`, which is in a folder of tests and on nobody else's path; forks arm themselves.
"""

from __future__ import annotations

import os
from pathlib import Path

from peerstore import failpoints

_ARMED = Path(__file__).parent / "armed"
_ROOT = Path(__file__).parents[2]


def crash_environ(points: str) -> dict[str, str]:
    """The environment of a process that is killed there: ``seal.asked:3,drain.began`` is when it seals the third time,
    or drains.
    """
    if not points:
        return {}
    path = [str(_ARMED), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PEERSTORE_CRASH_AT": points, "PYTHONPATH": os.pathsep.join(path)}


def arm_crash_points() -> None:
    """In this process, what its environment says."""
    armed = str(_ARMED) in os.environ.get("PYTHONPATH", "").split(os.pathsep)
    named = os.environ.get("PEERSTORE_CRASH_AT", "") if armed else ""
    pairs = (item.partition(":") for item in named.split(",") if item)
    failpoints.arm_failpoints({point: int(count or 1) for point, _, count in pairs})
