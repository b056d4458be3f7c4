"""Real node agents for tests: each has its own directory, is stopped by pid, and leaves no files."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peerstore.daemon_process import process_start_time
from tests.support.leaks import process_prefix
from tests.support.zygote import has_ended
from tieredckpt.session.session import close_sessions, open_session
from tieredckpt.settings import Settings, load_settings, settings_from_mapping


def agent_pid(directory: Path) -> int | None:
    """Return the pid of the live process that holds the directory's lock."""
    try:
        pid = int((directory / "agent.lock").read_text())
    except (OSError, ValueError):
        return None
    return pid if process_start_time(pid) >= 0 else None


def wait_process_ended(pid: int, timeout_s: float = 200.0) -> None:
    """Wait until the process is gone or a zombie, and its files are closed."""
    assert has_ended(pid, timeout_s), f"process {pid} did not end"


def stop_process(pid: int, timeout_s: float = 200.0) -> None:
    """Send SIGSTOP and wait until all threads are stopped: the signal takes effect later."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + timeout_s
    while {one.read_text().rpartition(")")[2].split()[0] for one in Path(f"/proc/{pid}/task").glob("*/stat")} != {"T"}:
        assert time.monotonic() < deadline, f"process {pid} did not stop"
        time.sleep(0.01)


def stop_agent(directory: Path, number: int = signal.SIGTERM) -> None:
    pid = agent_pid(directory)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        wait_process_ended(pid)


@contextlib.contextmanager
def agent_directory() -> Iterator[Path]:
    directory = Path("/dev/shm") / (process_prefix("tieredckpt") + uuid.uuid4().hex[:8])
    try:
        yield directory
    finally:
        close_sessions()
        stop_agent(directory)
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def agent_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a directory for an embedded agent; child processes find it through the environment."""
    with agent_directory() as directory:
        monkeypatch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(directory))
        monkeypatch.setenv("TIEREDCKPT_AGENT_BUDGET", "2GiB")
        yield directory


def module_agent(*jobs: str) -> Any:
    """Return a fixture that starts one agent per module, with sessions open for ``jobs``."""

    @pytest.fixture(scope="module", autouse=True)
    def node() -> Iterator[Path]:
        with agent_directory() as directory, pytest.MonkeyPatch.context() as patch:
            patch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(directory))
            patch.setenv("TIEREDCKPT_AGENT_BUDGET", "2GiB")
            for job in jobs or ("begun",):
                session = open_session(job, load_settings())
                session.agent.watch_agent()  # as a first save would, until the last test ends
            yield directory

    return node


@pytest.fixture
def agent_settings(agent_dir: Path) -> Settings:
    return settings_from_mapping({"agent": {"directory": str(agent_dir), "budget": "2GiB"}})
