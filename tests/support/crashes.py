"""Crash points: a process started with :func:`crash_environ` kills itself at a given point.

``armed/sitecustomize.py`` arms the points when the interpreter starts. A forked start arms its own.
"""

from __future__ import annotations

import os
from pathlib import Path

from peerstore import failpoints

_ARMED = Path(__file__).parent / "armed"
_ROOT = Path(__file__).parents[2]


def crash_environ(points: str) -> dict[str, str]:
    """Return the environment of a process that dies at ``points``.

    With ``seal.asked:3,drain.began`` it dies at its third seal or its first drain.
    """
    if not points:
        return {}
    path = [str(_ARMED), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PEERSTORE_CRASH_AT": points, "PYTHONPATH": os.pathsep.join(path)}


def arm_crash_points() -> None:
    """Arm the crash points named in this process's environment."""
    armed = str(_ARMED) in os.environ.get("PYTHONPATH", "").split(os.pathsep)
    named = os.environ.get("PEERSTORE_CRASH_AT", "") if armed else ""
    pairs = (item.partition(":") for item in named.split(",") if item)
    failpoints.arm_failpoints({point: int(count or 1) for point, _, count in pairs})
