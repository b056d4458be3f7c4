"""A node agent on a host of a test's network: see :mod:`tests.support.hosts`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from peerstore.client.store_client import Client
from peerstore.errors import AgentUnreachableError
from peerstore.settings import AgentPaths
from peerstore.transport.unix import connect_to_agent

if TYPE_CHECKING:
    from tests.support.hosts import Host

_ANSWERS_S = 60.0
_ENDS_S = 30.0
_TICK_S = 0.02


class HostAgent:
    """A node agent that runs on a host, as a child of the test."""

    def __init__(self, host: Host, directory: Path, options: Sequence[object]) -> None:
        self.host = host
        self.place = AgentPaths(directory)
        self.log = host.directory.with_suffix(".log")
        """Combined output of all agents started on this host."""
        command = [sys.executable, "-m", "tieredckpt.agent", "--dir", directory]
        command += ["--budget", "1GiB", "--http", f"{host.address}:0", *options]
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
        with self.log.open("ab") as out:
            self.process = host.start(command, stdout=out, stderr=out, env={**os.environ, "PYTHONPATH": path})
        self.pid = self.process.pid

    @property
    def http(self) -> tuple[str, int]:
        """Address of its metrics endpoint."""
        address, _, port = (self.place.directory / "http").read_text().rpartition(":")
        return address, int(port)

    def client(self) -> Client:
        """Return a client of the store over its Unix socket, which every namespace reaches."""
        return Client(lambda: connect_to_agent(self.place.socket), retry_s=0.0)

    def wait_ready(self) -> None:
        for _ in range(int(_ANSWERS_S / _TICK_S)):
            with contextlib.suppress(AgentUnreachableError), contextlib.closing(self.client()):
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_TICK_S)
                break
        raise RuntimeError(f"the agent of {self.host.name} does not answer: {self.log_text()[-2000:]}")

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, which may also be SIGSTOP or SIGCONT."""
        self.process.send_signal(number)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait, and return the exit status, negative for a signal."""
        self.kill(number)
        return self.process.wait(_ENDS_S)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")
