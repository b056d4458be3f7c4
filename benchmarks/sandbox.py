"""A folder on tmpfs with its own node agent, and cleanup of both."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.parameters import Scene
from peerstore.daemon_process import process_start_time
from tieredckpt.settings import Settings, settings_from_mapping

JOB = "bench"
_END_S = 60.0


@contextlib.contextmanager
def sandbox() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=f"tieredckpt-bench-{os.getpid()}-", dir="/dev/shm"))
    try:
        yield folder
    finally:
        for place in folder.glob("*/agent.lock"):
            end_agent(place.parent)
        shutil.rmtree(folder, ignore_errors=True)


def settings_for(
    scene: Scene,
    place: str = "agent",
    *,
    agent: Mapping[str, Any] | None = None,
    memory: Mapping[str, Any] | None = None,
    peer: Mapping[str, Any] | None = None,
    **durable: Any,
) -> Settings:
    """Return default settings, with the scene's directory, memory budget and copy threads."""
    budget = 4 * scene.size_bytes + (256 << 20)
    return settings_from_mapping(
        {
            "agent": {"directory": str(scene.folder / place), "budget": str(budget), **(agent or {})},
            "memory": {"copy_threads": scene.threads, **(memory or {})},
            "peer": dict(peer or {}),
            "durable": durable,
        }
    )


def agent_pid(place: Path) -> int:
    """Return the process id of this directory's agent, or 0 if it has none."""
    try:
        pid = int((place / "agent.lock").read_text())
    except (OSError, ValueError):
        return 0
    return pid if process_start_time(pid) >= 0 else 0


def end_agent(place: Path) -> None:
    """Stop the directory's agent and wait until its process has ended."""
    pid = agent_pid(place)
    if not pid:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _END_S
    while process_start_time(pid) >= 0:
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
