"""Real node agents for tests: a directory of their own, ended by pid, nothing left behind."""

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
    """The process that holds the directory's lock, when it is alive."""
    try:
        pid = int((directory / "agent.lock").read_text())
    except (OSError, ValueError):
        return None
    return pid if process_start_time(pid) >= 0 else None


def wait_process_ended(pid: int, timeout_s: float = 200.0) -> None:
    """Until the process is gone or only waits for init to notice, and has let go of its files."""
    assert has_ended(pid, timeout_s), f"process {pid} did not end"


def stop_process(pid: int, timeout_s: float = 200.0) -> None:
    """SIGSTOP, until none of its threads runs any more: a signal that was sent has not stopped anybody yet."""
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
    """A place for an embedded agent; processes started by the test find it by environment."""
    with agent_directory() as directory:
        monkeypatch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(directory))
        monkeypatch.setenv("TIEREDCKPT_AGENT_BUDGET", "2GiB")
        yield directory


def module_agent(*jobs: str) -> Any:
    """A fixture: one agent for all tests of a module, each of which has a job of its own, started for ``jobs``."""

    @pytest.fixture(scope="module", autouse=True)
    def node() -> Iterator[Path]:
        with agent_directory() as directory, pytest.MonkeyPatch.context() as patch:
            patch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(directory))
            patch.setenv("TIEREDCKPT_AGENT_BUDGET", "2GiB")
            for job in jobs or ("begun",):
                session = open_session(job, load_settings())
                session.agent.watch_agent()  # as the first save of a test would, and until the last one has ended
            yield directory

    return node


@pytest.fixture
def agent_settings(agent_dir: Path) -> Settings:
    return settings_from_mapping({"agent": {"directory": str(agent_dir), "budget": "2GiB"}})
